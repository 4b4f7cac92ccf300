# SPDX-License-Identifier: Apache-2.0
"""Guesses of the next tokens, also by a draft model, change the time of a text, never a token.

That they change no logit is in test_same_bits.py.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qsf
from make import calibrated_models, golden_families, mtp_models
from make.commands import Run
from make.golden_families import cases
from make.mtp_models import write_pair
from make.served import serving
from make.stored import Reader
from make.streamed_models import least_options, make_streamed_gpt2, write_random_mixture
from make.tiny_checkpoints import make_llama
from oracle.reference import load_qsf
from qsf import Model
from qsf.cli.run import report
from qsf.cli.serve_options import ServeOptions
from qsf.errors import QsfArgumentError, QsfConversionError, QsfFormatError, QsfIOError
from qsf.native import binding
from qsf_converter import convert

PROMPT = "Once upon a time"
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.3, "repetition_penalty": 1.2, "top_k": 0, "top_p": 1.0, "seed": 100},
    *({"temperature": 0.9, "seed": seed} for seed in range(3)),
]


@pytest.fixture(scope="module")
def sibling(converted: Callable[[str, str], Path]) -> Path:
    """The bundled LLaMA model with 2-bit weights: it guesses well, but not always."""
    return converted("tiny-llama", "2bit")


@pytest.fixture(scope="module")
def plain(tiny_llama_8bit: Path) -> Iterator[qsf.Model]:
    with qsf.Model(tiny_llama_8bit, ram_budget=None, draft="off") as opened:
        yield opened


@pytest.fixture(scope="module")
def drafting(tiny_llama_8bit: Path) -> Iterator[qsf.Model]:
    with qsf.Model(tiny_llama_8bit, ram_budget=None, threads=3) as opened:
        yield opened


def answer(model: qsf.Model, prompt: Any, **asked: Any) -> tuple[str, list[int], str]:
    """Return the text, the tokens that are held, and why it ended."""
    model.session.rewind(0)
    text = "".join(model.generate(prompt, **asked))
    assert model.stats is not None
    return text, model.session.tokens, model.stats.stop_reason


@contextmanager
def drafted(text: list[int], seed: int) -> Iterator[None]:
    """Let every step draft what comes in ``text`` next, with mistakes."""
    rng = random.Random(seed)
    step = binding.NativeSession.step

    def guessing(self: binding.NativeSession, token: int) -> None:
        at = self.position() + 1
        drafts = text[at : at + rng.randint(1, 15)]
        if drafts and rng.random() < 0.3:
            drafts[rng.randrange(len(drafts))] = text[0]
        self.draft(array("I", drafts))
        step(self, token)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(binding.NativeSession, "step", guessing)
        yield


# ---- text ----
def test_text_is_the_same(plain: qsf.Model, drafting: qsf.Model) -> None:
    for i, sampling in enumerate(SAMPLINGS):
        asked = {"max_tokens": 60, **sampling}
        want = answer(plain, PROMPT, **asked)
        for _ in range(2):  # what the first one has taught is used by the second
            assert answer(drafting, PROMPT, **asked) == want
        before = drafting.session_stats.n_step_passes
        with drafted(want[1], i):
            assert answer(drafting, PROMPT, **asked) == want
        assert drafting.stats is not None
        n_passes = drafting.session_stats.n_step_passes - before
        assert n_passes < 0.8 * drafting.stats.step_tokens


def test_a_stop_string_inside_accepted_drafts(plain: qsf.Model, drafting: qsf.Model) -> None:
    asked: dict[str, Any] = {"max_tokens": 50, "temperature": 0.9, "seed": 4}
    _, tokens, _ = answer(plain, PROMPT, **asked)
    pieces = list(plain.generate(PROMPT, **asked))
    for n in range(5, len(pieces), 7):
        stop = "".join(pieces[n : n + 2])
        want = answer(plain, PROMPT, stop=stop, **asked)
        with drafted(tokens, n):
            assert answer(drafting, PROMPT, stop=stop, **asked) == want
        more = [*want[1], 5]
        assert list(drafting.generate(more, **asked)) == list(plain.generate(more, **asked))


# ---- room ----
def test_a_plan_without_room_has_no_drafts(tmp_path: Path) -> None:
    path = make_streamed_gpt2(tmp_path)
    asked = binding.Options(budget_bytes=1 << 20, draft_rows=15)
    least = binding.plan_model(path, asked)
    without = binding.plan_model(path, replace(asked, draft_rows=0))
    assert least.engine_bytes == without.engine_bytes  # of the least plan
    assert least.draft_rows == 0
    tight = replace(asked, budget_bytes=least.min_budget_bytes + 4096)
    assert binding.plan_model(path, tight).draft_rows == 0
    roomy = binding.plan_model(path, replace(asked, budget_bytes=0))
    assert roomy.draft_rows == 15
    assert roomy.scratch_bytes > without.scratch_bytes + 16 * 4 * 256


def test_drafts_take_no_room_from_experts(tmp_path: Path, tiny_llama_dir: Path) -> None:
    """What too few slots for drafts leave without them is all of it: it was a few slots."""
    path = write_random_mixture(tmp_path / "m.qsf", tiny_llama_dir, n_real_layers=0)
    options = least_options(path)
    options["ram_budget"] += 60
    n_slots = [
        qsf.Model.plan(path, **options, draft=draft).expert_slots for draft in ("off", "auto")
    ]
    assert n_slots[0] > 30
    assert n_slots[1] > 0.8 * n_slots[0]


# ---- a draft model ----
def test_sessions_have_a_draft_model_each(
    tiny_llama_8bit: Path, plain: qsf.Model, sibling: Path
) -> None:
    one = qsf.Model.plan(tiny_llama_8bit, ram_budget=None, draft=sibling)
    prompts = (PROMPT, "The little dog saw")
    with qsf.Model(tiny_llama_8bit, ram_budget=None, sessions=2, draft=str(sibling)) as drafting:
        assert drafting.info.plan.drafter_state == binding.DRAFTER_HELD
        assert drafting.info.plan.drafter_bytes > one.drafter_bytes
        sessions = (drafting.session, drafting.create_session())
        for sampling in SAMPLINGS:
            asked = {"max_tokens": 40, **sampling}
            wanted = ["".join(plain.generate(prompt, **asked)) for prompt in prompts]
            runs = [s.generate(p, **asked) for s, p in zip(sessions, prompts, strict=True)]
            texts = ["", ""]
            for _ in range(80):
                for i, pieces in enumerate(runs):
                    texts[i] += next(pieces, "")
            assert texts == wanted


def test_a_file_that_is_no_draft_model_is_named(tiny_llama_8bit: Path, tmp_path: Path) -> None:
    (tmp_path / "text.qsf").write_text("no model")
    make_llama(tmp_path / "other", seed=1)
    convert(tmp_path / "other", tmp_path / "other.qsf", quant_type="4bit")
    named = r"the draft model .*{}\.qsf"
    for draft, kind, said in (
        (tmp_path / "missing.qsf", QsfIOError, named.format("missing")),
        (tmp_path / "text.qsf", QsfFormatError, named.format("text")),
        (tmp_path / "other.qsf", QsfArgumentError, named.format("other") + ".*tokenizer"),
        ("", QsfArgumentError, r"draft must be one of auto, off, or a \.qsf file"),
    ):
        with pytest.raises(kind, match=said):
            qsf.Model(tiny_llama_8bit, ram_budget=None, draft=draft)


def test_the_plan_says_what_became_of_it(tiny_llama_8bit: Path, sibling: Path) -> None:
    asked = binding.Options(budget_bytes=1 << 20, draft_rows=15, draft_path=sibling)
    least = binding.plan_model(tiny_llama_8bit, asked).min_budget_bytes
    without = binding.plan_model(tiny_llama_8bit, replace(asked, draft_path=None))
    assert abs(least - without.min_budget_bytes) < 1 << 20  # what the process holds moves a little
    plan = binding.plan_model(tiny_llama_8bit, replace(asked, budget_bytes=least + (1 << 18)))
    assert plan.drafter_state not in (binding.DRAFTER_HELD, binding.DRAFTER_NOT_WORTH)
    assert plan.drafter_bytes == 0 < plan.drafter_wanted_bytes
    assert "no room" in report.drafter_lines(plan)[0]
    held = binding.plan_model(tiny_llama_8bit, replace(asked, budget_bytes=0))
    assert held.drafter_state == binding.DRAFTER_HELD
    assert held.drafter_bytes == held.drafter_wanted_bytes
    assert report.drafter_lines(held) == []
    assert any(line.strip().startswith("draft model ") for line in report.plan_lines(held))
    not_worth = replace(held, drafter_state=binding.DRAFTER_NOT_WORTH, drafter_bytes=0)
    assert "2.25 times as much" in report.drafter_lines(not_worth)[0]


_PEAK = """
import sys, qsf
target, drafter = sys.argv[1:]
asked = {"draft": drafter, "max_seq_len": 256}
plan = qsf.Model.plan(target, ram_budget=None, **asked)
budget = ((plan.process_bytes + plan.reserve_bytes + plan.engine_bytes) >> 20) + 3
with qsf.Model(target, ram_budget=budget, **asked) as model:
    list(model.generate("Once upon a time", max_tokens=100, temperature=0))
    print(model.info.plan.drafter_state, budget)
with open("/proc/self/status") as file:
    print(next(int(line.split()[1]) for line in file if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_budget_holds_both(tiny_llama_8bit: Path, sibling: Path) -> None:
    words = [sys.executable, "-c", _PEAK, str(tiny_llama_8bit), str(sibling)]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", check=True)
    state, budget_mb, peak_kb = map(int, done.stdout.split())
    assert state == binding.DRAFTER_HELD
    assert peak_kb <= budget_mb * 1024


# ---- the MTP head of a checkpoint guesses what numpy guesses, and never changes a text ----
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


# ---- gemma 4's drafters, which read their model's keys, values and hidden states ----
Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("pair"))


def test_guesses_are_those_of_transformers(pair: Pair) -> None:
    target, drafter = pair
    case = golden_families.drafted()[1]
    assert case.guesses is not None
    n_taken = np.zeros(len(case.guesses), int)
    options = binding.Options(budget_bytes=0, draft_rows=4, draft_path=drafter, exact=True)
    model = binding.NativeModel(target, options)
    assert model.info().plan.drafter_state == binding.DRAFTER_HELD
    session = model.create_session()
    while (n_taken > 1).mean() < 0.5 or n_taken.max() < 4:  # guesses after guesses
        for n, guesses in enumerate(case.guesses):
            session.rewind(0)
            session.sync_chunk(array("I", case.tokens[: n + 1]))
            before = session.stats().n_drafted
            session.step(case.tokens[n + 1])
            after = session.stats().n_drafted
            n_guessed = after[2] - before[2]
            if sum(after) - sum(before) > n_guessed:
                continue  # some are guesses from the text
            for i, token in enumerate(guesses[:n_guessed]):
                assert session.is_ahead(int(token)), (n, i)
                session.step(int(token))
                n_taken[n] = max(n_taken[n], i + 1)
    model.close()


def test_a_drafter_of_ordered_words_guesses_among_all(pair: Pair, tmp_path: Path) -> None:
    case = golden_families.drafted()[1]
    said = {"use_ordered_embeddings": True, "num_centroids": 8, "centroid_intermediate_top_k": 2}
    (name, embedding), *_ = case.tensors().items()
    assert name == "model.embed_tokens.weight"
    beside = {
        "masked_embedding.centroids.weight": embedding[:8],
        "masked_embedding.token_ordering": np.arange(len(embedding), dtype=np.float32),
    }
    config, tensors = {**case.config, **said}, {**case.tensors(), **beside}
    source = golden_families.write_checkpoint(tmp_path / "m", config, tensors)
    convert(source, tmp_path / "m.qsf", quant_type="f16", embed_type="f16")
    with Reader(tmp_path / "m.qsf") as found, Reader(pair[1]) as plain:
        for i in range(len(plain.units)):
            assert found.read_unit(i) == plain.read_unit(i), i


def test_it_is_described(pair: Pair, qsf: Run) -> None:
    shown = qsf("inspect", pair[1]).stdout
    assert "kv_source another model" in shown
    assert "for another model (--draft)" in qsf("show", pair[1]).stdout


def test_the_plan_counts_it(pair: Pair) -> None:
    target, drafter = pair
    with_it = Model.plan(target, ram_budget=None, draft=drafter)
    assert with_it.drafter_bytes == with_it.drafter_wanted_bytes > 200_000
    more = Model.plan(target, ram_budget=None, draft=drafter, sessions=4)
    assert more.drafter_bytes == with_it.drafter_bytes  # it has no keys of its own


def test_keys_in_a_file_are_not_lent(pair: Pair) -> None:
    target, drafter = pair
    options = binding.Options(
        budget_bytes=0, draft_rows=4, draft_path=drafter, kv_resident_tokens=1, chunk_tokens=8,
        kv_folder=target.parent,
    )  # fmt: skip
    plan = binding.plan_model(target, options)
    assert (plan.drafter_state, plan.drafter_bytes) == (binding.DRAFTER_COLD, 0)
    assert "--kv-policy disk" in report.drafter_lines(plan)[0]


def test_it_is_refused_alone_and_for_another_model(pair: Pair, tmp_path: Path) -> None:
    drafter = pair[1]
    with pytest.raises(QsfArgumentError, match=r"drafter\.qsf only guesses.*dimension 72.*--draft"):
        Model(drafter, ram_budget=None)
    with (
        pytest.raises(QsfConversionError, match="a drafter reads another model's keys"),
        calibrated_models.original(drafter.with_suffix("")),
    ):
        pass
    for name, said in (
        ("gemma4-own", r"its layer 1 reads 1 KV heads of 40 dimensions, window 0, and no .*m\.qsf"),
        ("llama-linear", r"its layer 0 reads 2 KV heads of 24 dimensions, window 9, .*m\.qsf"),
        ("phi", r"it guesses for a model of hidden dimension 72, and .*m\.qsf has 80"),
    ):
        source = golden_families.cases()[name].write(tmp_path / name)
        convert(source, tmp_path / "m.qsf", quant_type="f16", force=True)
        with pytest.raises(QsfArgumentError, match=rf"the draft model .*drafter\.qsf: {said}"):
            Model(tmp_path / "m.qsf", ram_budget=None, draft=drafter)


def test_key_channels_stay_as_a_drafter_reads_them(tmp_path: Path) -> None:
    """Those of other models are made equally large."""
    for name, is_kept in (("gemma4-shared", True), ("qwen3", False)):
        case = golden_families.cases()[name]
        tensors = case.tensors()
        keys = next(key for key in tensors if key.endswith("layers.0.self_attn.k_norm.weight"))
        tensors[keys][:] = 1.0
        tensors[keys][[0, 12]] = 64.0  # the two that RoPE rotates together
        golden_families.write_checkpoint(tmp_path / name, case.config, tensors)
        convert(tmp_path / name, tmp_path / "m.qsf", quant_type="8bit", force=True)
        stored = load_qsf(tmp_path / "m.qsf").weights["layer.0.k_norm"]
        assert np.array_equal(stored, tensors[keys]) is is_kept, name
