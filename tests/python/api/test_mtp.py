# SPDX-License-Identifier: Apache-2.0
"""The MTP head of a checkpoint guesses what numpy guesses, and never changes a text."""

from __future__ import annotations

import json
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qsf
from make import mtp_models
from make.commands import Run
from make.golden_families import cases
from make.served import serving
from make.stored import Reader
from qsf import Model
from qsf.cli.run import report
from qsf.cli.serve_options import ServeOptions
from qsf.native import binding
from qsf_converter import convert

OPEN: dict[str, Any] = {"exact": True, "kv_type": "f32", "ram_budget": None}
N_VOCAB = cases()["qwen3_5"].config["vocab_size"]
N_LAYERS = 24  # a guess costs one layer, a pass all of them


def f16(source: Path, path: Path) -> Path:
    convert(source, path, quant_type="f16", embed_type="f16")
    return path


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mtp")
    case = mtp_models.deep(cases()["qwen3_5"], 2 * N_LAYERS)  # some MB
    return f16(mtp_models.write_hf(case, folder / "m"), folder / "m.qsf")


def take_guesses(session: Any, guesser: mtp_models.Guesser, tokens: list[int]) -> int:
    """Evaluate the last token; check the guesses of the pass, and take them. Returns how many."""
    before = session.stats()
    session.step(tokens[-1])
    after = session.stats()
    n = after.n_drafted[2] - before.n_drafted[2]
    if sum(after.n_drafted) - sum(before.n_drafted) != n:
        return 0  # some are guesses from the text
    for token in guesser.guesses(tokens, n):
        assert session.is_ahead(token)
        session.step(token)
        tokens.append(token)
    assert session.stats().n_step_passes == after.n_step_passes
    return int(n)


@pytest.mark.parametrize("name", ["qwen3_5-nested", "qwen3_5_moe", "deepseek_v3"])
def test_guesses_are_those_of_numpy(name: str, tmp_path: Path) -> None:
    case = mtp_models.deep(cases()[name], N_LAYERS)
    source = mtp_models.write_hf(case, tmp_path / "m")
    guesser = mtp_models.Guesser(source)
    with qsf.Model(f16(source, tmp_path / "m.qsf"), **OPEN, threads=1) as model:
        assert model.info.plan.mtp_state == binding.DRAFTER_HELD
        session, counts = model.session._native, [0]
        rng = np.random.default_rng(1)
        while sum(counts) < 8 or max(counts) < 2:  # a guess after a guess
            tokens = rng.integers(1, 50, 9).tolist()
            session.sync_chunk(array("I", tokens[:-1]))
            for _ in range(3):
                counts.append(take_guesses(session, guesser, tokens))
                tokens += guesser.guesses(tokens, 1)  # so that they turn out to be right
            assert len(counts) < 600, counts


def go_on(session: Any, prompt: list[int], n: int) -> list[int]:
    """Hold the prompt behind the tokens, then n times what is most probable; return all tokens."""
    tokens, logits = array("I", [*session.tokens, *prompt]), np.empty(N_VOCAB, np.float32)
    while session._native.sync_chunk(tokens) < len(tokens):
        pass
    for _ in range(n):
        session._native.read_logits(logits)
        session._native.step(int(np.argmax(logits)))
    return list(session.tokens)


def test_no_text_depends_on_the_head(qwen: Path) -> None:
    """By what becomes of it: held, left out, without room; other settings: test_same_bits.py."""

    def text_of(**options: Any) -> list[int]:
        with qsf.Model(qwen, max_seq_len=160, **{"ram_budget": None, **options}) as model:
            return go_on(model.session, [1, 9, 4, 7], 60)

    def planned(budget_mb: int | None = None) -> Any:
        return qsf.Model.plan(qwen, max_seq_len=160, ram_budget=budget_mb)

    want = text_of(draft="off")
    assert text_of(threads=3) == want
    whole = planned()
    most = (whole.process_bytes + whole.engine_bytes >> 20) + 16
    least = -(-whole.min_budget_bytes >> 20)
    plans = {plan.mtp_state: (mb, plan) for mb in range(least, most) for plan in [planned(mb)]}
    assert sorted(plans) == [binding.DRAFTER_HELD, 2]  # QSF_DRAFTER_NO_ROOM
    for state, (mb, plan) in plans.items():
        assert text_of(ram_budget=mb) == want
        lines = "\n".join(report.plan_lines(plan))
        is_held = state == binding.DRAFTER_HELD
        assert ("drafts also by the file's MTP head" in lines) == is_held
        assert ("without the file's MTP head" in lines) != is_held


def test_left_out_the_head_costs_nothing(qwen: Path, tmp_path: Path) -> None:
    case = mtp_models.deep(cases()["qwen3_5"], 2 * N_LAYERS)
    plain = f16(case.write(tmp_path / "plain"), tmp_path / "plain.qsf")
    off, without = (qsf.Model.plan(p, ram_budget=None, draft="off") for p in (qwen, plain))
    for part in ("weights_bytes", "kv_bytes", "scratch_bytes", "model_bytes", "n_units"):
        assert getattr(off, part) == getattr(without, part), part
    auto = qsf.Model.plan(qwen, ram_budget=None)
    more = auto.min_budget_bytes - auto.process_bytes - off.min_budget_bytes + off.process_bytes
    assert more < 1 << 20
    assert (auto.mtp_state, off.mtp_state) == (binding.DRAFTER_HELD, binding.DRAFTER_NONE)


def test_a_saved_session_goes_on_with_and_without_the_head(qwen: Path, tmp_path: Path) -> None:
    tokens = [(i * i + 3) % 50 for i in range(100)]
    for before, after, policy in (("auto", "off", "none"), ("off", "auto", "disk")):
        with qsf.Model(qwen, **OPEN, draft=before, kv_policy=policy) as model:
            model.logits(tokens, first_row=99)
            model.session.save(tmp_path / "kept")
            want = go_on(model.session, [1], 40)
        with qsf.Model(qwen, **OPEN, draft=after, kv_policy=policy) as model:
            model.session.load(tmp_path / "kept")
            assert go_on(model.session, [1], 40) == want
            assert model.session_stats.prompt_tokens <= 2


# ---- conversion ----


@pytest.mark.parametrize("name", mtp_models.FAMILIES)
def test_both_sources_give_one_file(name: str, tmp_path: Path) -> None:
    case = cases()[name].text_part()
    sources = {
        "gguf": mtp_models.write_gguf(case, tmp_path / "m.gguf"),
        "hf": mtp_models.write_hf(case, tmp_path / "m"),
    }
    for kind, source in sources.items():
        report = convert(source, tmp_path / f"{kind}.qsf", quant_type="4bit")
        assert not [text for text in report.warnings if "tokenizer" not in text]
    with Reader(tmp_path / "gguf.qsf") as one, Reader(tmp_path / "hf.qsf") as other:
        assert one.layer_kinds[-1] == other.layer_kinds[-1]
        assert [kind.is_mtp for kind in one.layer_kinds].index(True) == len(one.layer_kinds) - 1
        of_head = [
            i for i, unit in enumerate(one.units) if unit.id.layer == len(one.layer_kinds) - 1
        ]
        assert len(of_head) == 1 + one.layer_kinds[-1].n_experts
        for i in of_head:
            assert one.read_unit(i) == other.read_unit(i), i


def test_heads_that_are_not_run_are_left_out(tmp_path: Path) -> None:
    case = cases()["qwen3_5"]
    at = f"model.layers.{mtp_models.n_layers_of(case)}."
    own = {f"{at}embed_tokens.weight": case.tensors()["model.embed_tokens.weight"][::-1].copy()}
    more = {
        f"{at.replace('4', '5')}eh_proj.weight": mtp_models.head_tensors(case)[
            f"{at}eh_proj.weight"
        ]
    }
    for i, changed in enumerate((own, more)):
        source = mtp_models.write_hf(case, tmp_path / f"m{i}", **changed)
        report = convert(source, tmp_path / f"{i}.qsf", quant_type="4bit")
        assert [text for text in report.warnings if "multi-token prediction" in text]
        with Reader(tmp_path / f"{i}.qsf") as reader:
            assert reader.header.n_layers == mtp_models.n_layers_of(case)
    copy = {f"{at}embed_tokens.weight": case.tensors()["model.embed_tokens.weight"]}
    report = convert(mtp_models.write_hf(case, tmp_path / "m", **copy), tmp_path / "m.qsf")
    assert not [text for text in report.warnings if "multi-token prediction" in text]


# ---- commands ----


GREEDY = ("-n", 40, "--temperature", 0)


@pytest.fixture(scope="module")
def sure(tmp_path_factory: pytest.TempPathFactory, tiny_chat_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("sure")
    source = mtp_models.write_sure(folder / "m", tiny_chat_dir, n_layers=2 * N_LAYERS)
    convert(source, folder / "m.qsf")
    return folder / "m.qsf"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, tiny_chat_dir: Path) -> Path:
    """A draft model that guesses as well."""
    folder = tmp_path_factory.mktemp("small")
    convert(mtp_models.write_sure(folder / "m", tiny_chat_dir, n_layers=3), folder / "m.qsf")
    return folder / "m.qsf"


def test_run_says_how_many_guesses_were_right(run: Run, sure: Path, small: Path) -> None:
    def answer(*options: object) -> Any:
        done = run(sure, "-p", "Once upon a time", *GREEDY, "--json", *options)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    off = answer("--draft", "off")
    assert (off["drafted_tokens"], off["accepted_tokens"]) == (0, 0)
    for draft in ("auto", small):
        found = answer("--draft", draft)
        assert (found["text"], found["ids"]) == (off["text"], off["ids"])
        assert 5 <= found["accepted_tokens"] <= found["drafted_tokens"], draft
    assert len(off["ids"]) == 40
    assert len(set(off["ids"])) > 20  # the text itself has little to guess from


def test_a_server_counts_the_guesses_of_two_clients(run: Run, sure: Path) -> None:
    prompts = ["Once upon a time", "The cat saw"]
    wanted = [run(sure, "--raw", "-p", p, *GREEDY, "--draft", "off").stdout for p in prompts]
    options = ServeOptions(parallel=2).sessions()[0]
    with (
        Model(sure, ram_budget=None, **options) as model,
        serving(sure, model, parallel=2) as client,
    ):

        def complete(prompt: str) -> str:
            fields = {"prompt": prompt, "max_tokens": 40, "temperature": 0}
            answer = client.post("/v1/completions", fields)
            return f"{answer.json['choices'][0]['text']}\n"

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(complete, prompts * 3)) == wanted * 3
        lines = client.get("/metrics").body.decode().splitlines()
    (right,) = (line for line in lines if "num_accepted_tokens_total" in line and line[0] != "#")
    assert float(right.split()[-1]) > 0
