# SPDX-License-Identifier: Apache-2.0
"""Quality of files in qsf.bench: our measure for both engines, and the process of llama.cpp."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from make import bench_baselines, gguf_files
from qsf.bench.judge.quality import BaselineLogits, measure
from qsf.bench.judge.results import Quality
from qsf.bench.models import random_gguf
from qsf.bench.models.random_qsf import QUANT_TYPES, write_model
from qsf.bench.models.shapes import Shape
from qsf.errors import QsfArgumentError, QsfError, QsfFormatError, QsfIOError, QsfUnsupportedError
from qsf.evaluate.evaluation import evaluate
from qsf.evaluate.windows import Window
from qsf.model import Model

TEXT = (
    "Once upon a time there was a little girl who lived near the sea. She liked to walk along "
    "the water and look for shells. One day she found a big blue stone, and it was warm. "
) * 3
NO_BASELINE = "/nowhere/python"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, "utf-8")
    return path


def ignore(_n_tokens: float) -> None:
    pass


# ---- the process, with a stand-in for llama.cpp ----


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return bench_baselines.stand_in_for_llama(tmp_path, monkeypatch)


def baseline(path: str, python: str, ctx_tokens: int = 700) -> BaselineLogits:
    return BaselineLogits(Path(path), python, ctx_tokens=ctx_tokens, n_threads=1)


def windows_of(*lengths: tuple[int, int]) -> list[Window]:
    random = np.random.default_rng(0)
    return [Window(random.integers(0, 9, n).astype(np.int64), first) for n, first in lengths]


@pytest.mark.parametrize("max_rows", [1000, 256, 100, 7])
def test_rows_are_those_that_were_asked_for(stand_in: str, max_rows: int) -> None:
    """Windows longer than a batch, scored from the first row, from the middle, from the last."""
    windows = windows_of((600, 0), (601, 300), (5, 3), (300, 257))
    advanced: list[float] = []
    with baseline("m.gguf", stand_in) as source:
        assert (source.n_vocab, source.max_tokens, source.tokenizer) == (11, 700, None)
        rows = [block.copy() for block in source.logits(windows, max_rows, advanced.append)]
    found = np.concatenate(rows)
    token = np.concatenate([w.tokens[w.first_row : -1] for w in windows])
    at = np.concatenate([np.arange(w.first_row, len(w.tokens) - 1) for w in windows])
    assert (found[:, 0] == token).all()
    assert (found[:, 1] == at).all()
    assert not found[:, 3:].any()
    # A batch ends at the end of a block or after 256 tokens, never behind what is asked for.
    assert (found[:, 2] > at).all()
    assert (found[:, 2] <= at + 256).all()
    assert sum(advanced) == sum(len(w.tokens) - 1 for w in windows)
    assert len(rows) == sum(len(list(w.blocks(max_rows))) for w in windows)


def test_a_file_that_does_not_open(stand_in: str) -> None:
    with pytest.raises(QsfFormatError, match=r"llama\.cpp: broken\.gguf cannot be opened: bad mag"):
        baseline("broken.gguf", stand_in).__enter__()


@pytest.mark.parametrize(
    ("token", "how", "line"),
    [
        (10, "ended with exit code 9", "out of luck"),
        (9, "ended with exit code 1", "failed with -3"),
    ],
)
def test_a_death_at_work(stand_in: str, token: int, how: str, line: str) -> None:
    window = Window(np.array([1, 2, token, 3]), 0)
    with baseline("m.gguf", stand_in) as source, pytest.raises(QsfError, match=how) as caught:
        list(source.logits([window], 2, ignore))
    assert "m.gguf: the process of llama.cpp" in str(caught.value)
    assert line in str(caught.value)
    with pytest.raises(QsfArgumentError, match="is not running"):
        list(source.logits([window], 2, ignore))


def script(folder: Path, text: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n", "utf-8")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ("for i in 1 2 3 4 5 6 7 8 9; do echo line $i >&2; done; exit 3", QsfError,
         r"ended with exit code 3: line 5 / .* / line 9$"),
        ("kill -9 $$", QsfError, "was killed by signal 9 and wrote nothing$"),
        ("echo nonsense", QsfError, "ended with exit code 0 and wrote nothing$"),
        ("echo nonsense; cat >&2; echo end >&2", QsfError, r"exit code 0: end$"),
        ("""echo '{"missing": "No module named x"}'""", QsfUnsupportedError,
         r"no llama-cpp-python that works \(No module named x\): `make baseline`"),
    ],
)  # fmt: skip
def test_a_death_at_the_start(
    tmp_path: Path, body: str, kind: type[QsfError], message: str
) -> None:
    with pytest.raises(kind, match=f"(?s){message}") as caught:
        baseline("m.gguf", script(tmp_path, body)).__enter__()
    assert type(caught.value) is kind


def test_no_interpreter() -> None:
    with pytest.raises(QsfIOError, match="/nowhere/python cannot be run: No such file"):
        baseline("m.gguf", NO_BASELINE).__enter__()


def test_an_interpreter_without_llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = bench_baselines.stand_in_for_llama(tmp_path, monkeypatch)
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('no such luck')")
    with pytest.raises(QsfUnsupportedError, match=r"works \(no such luck\)"):
        baseline("m.gguf", python).__enter__()


def test_leaving_ends_the_process(tmp_path: Path) -> None:
    python = script(tmp_path, """echo '{"n_vocab": 5}'; exec sleep 1000""")
    with baseline("m.gguf", python) as source:
        process = source._running()
        assert process.poll() is None
    assert process.poll() is not None


# ---- measuring ----


def test_files_are_measured_as_evaluate_does(
    text: Path, tiny_llama_f16: Path, tiny_llama_4bit: Path, tiny_llama_dir: Path
) -> None:
    told: list[tuple[str, float, float]] = []
    found = measure(
        [tiny_llama_4bit, tiny_llama_f16],
        text,
        against=tiny_llama_dir,
        llama_python=NO_BASELINE,
        n_threads=1,
        ctx_tokens=64,
        progress=lambda *numbers: told.append(numbers),
    )
    assert list(found) == [tiny_llama_4bit, tiny_llama_f16]
    from qsf_converter.original.logits import open_original

    for path, quality_found in found.items():
        with (
            Model(path, ram_budget=None, kv_type="f16", max_seq_len=64) as model,
            open_original(tiny_llama_dir) as original,
        ):
            wanted = evaluate(model, TEXT, ctx_tokens=64, against=original)
        assert quality_found.perplexity == wanted.perplexity
        assert quality_found.mean_kl == wanted.kl_mean
        assert quality_found.top1 == wanted.top1_agreement
        assert quality_found.n_tokens == wanted.tokens
    rounded, whole = (one.mean_kl for one in found.values())
    assert whole is not None
    assert rounded is not None
    assert whole < 1e-5 < rounded
    assert {name for name, _, _ in told} == {path.name for path in found}
    assert told[-1][1] == told[-1][2]


def test_without_a_reference_there_is_no_kl(text: Path, tiny_llama_4bit: Path) -> None:
    def ask(text_tokens: int | None) -> Quality:
        found = measure(
            [tiny_llama_4bit],
            text,
            against=None,
            llama_python=NO_BASELINE,
            n_threads=1,
            text_tokens=text_tokens,
        )
        return found[tiny_llama_4bit]

    part = ask(50)
    assert (part.mean_kl, part.top1, part.n_tokens) == (None, None, 49)
    assert ask(None).n_tokens > 49
    assert measure([], text, against=None, llama_python=NO_BASELINE, n_threads=1) == {}


def test_against_another_file(text: Path, tiny_llama_f16: Path, tiny_llama_4bit: Path) -> None:
    found = measure(
        [tiny_llama_f16, tiny_llama_4bit],
        text,
        against=tiny_llama_f16,
        llama_python=NO_BASELINE,
        n_threads=1,
    )
    assert (found[tiny_llama_f16].mean_kl, found[tiny_llama_f16].top1) == (0, 1)
    assert (found[tiny_llama_4bit].mean_kl or 0) > 1e-3


def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, text: Path, tiny_llama_4bit: Path, tiny_gpt2_8bit: Path
) -> None:
    def ask(*files: Path, against: Path | None = None, ctx_tokens: int | None = None) -> None:
        measure(
            files,
            text,
            against=against,
            llama_python=NO_BASELINE,
            n_threads=1,
            ctx_tokens=ctx_tokens,
        )

    random = tmp_path / "random.qsf"
    write_model(random, Shape(1, 64, 64, 2, 2, 300, 64), QUANT_TYPES["8bit"], QUANT_TYPES["8bit"])
    with pytest.raises(QsfArgumentError, match=r"4bit\.qsf has 2048 tokens, random\.qsf 300"):
        ask(tiny_llama_4bit, random)
    with pytest.raises(QsfArgumentError, match=r"4bit\.qsf has 2048 tokens, random\.qsf 300"):
        ask(tiny_llama_4bit, against=random)
    with pytest.raises(QsfArgumentError, match=r"none of random\.qsf has a tokenizer"):
        ask(random)
    with pytest.raises(QsfArgumentError, match="samples of 513 tokens are longer than 512"):
        ask(tiny_llama_4bit, ctx_tokens=513)
    with pytest.raises(QsfIOError, match="nothing: no such file"):
        ask(tiny_llama_4bit, against=tmp_path / "nothing")
    other = tmp_path / "other.qsf"
    write_model(
        other,
        Shape(1, 64, 64, 2, 2, 2048, 64),
        QUANT_TYPES["8bit"],
        QUANT_TYPES["8bit"],
        tokenizer_from=lower_case_tokenizer(tmp_path),
    )
    with pytest.raises(QsfArgumentError, match=r"tokenizers differ: .* by other\.qsf's"):
        ask(tiny_llama_4bit, other)
    text.write_bytes(b"\xff")
    with pytest.raises(QsfArgumentError, match=r"text\.txt is not UTF-8"):
        ask(tiny_llama_4bit)
    text.write_bytes(b"")
    with pytest.raises(QsfArgumentError, match=r"text\.txt is empty"):
        ask(tiny_llama_4bit)
    text.unlink()
    with pytest.raises(QsfIOError, match=r"text\.txt: No such file"):
        ask(tiny_llama_4bit)


def lower_case_tokenizer(folder: Path) -> Path:
    """A tokenizer of the same size that gives other tokens."""
    source = Path(__file__).resolve().parents[3] / "examples" / "tiny-llama" / "tokenizer.json"
    parsed = json.loads(source.read_text("utf-8"))
    parsed["normalizer"] = {"type": "Lowercase"}
    (folder / "lower").mkdir()
    (folder / "lower" / "tokenizer.json").write_text(json.dumps(parsed), "utf-8")
    return folder / "lower"


# ---- with llama.cpp ----


def test_llama_and_qsf_agree_on_what_is_not_quantised(
    tmp_path: Path,
    text: Path,
    project_root: Path,
    tiny_llama_dir: Path,
    tiny_llama_f16: Path,
) -> None:
    python = bench_baselines.baseline_python()
    whole = tmp_path / "F32.gguf"
    converter = str(project_root / "bench" / "llama_quantiser.py")
    command = [python, converter, "gguf", str(tiny_llama_dir), str(whole)]
    subprocess.run(command, check=True, capture_output=True)
    found = measure(
        [tiny_llama_f16, whole],
        text,
        against=tiny_llama_dir,
        llama_python=python,
        n_threads=1,
        ctx_tokens=100,
    )
    ours, theirs = found.values()
    assert ours.n_tokens == theirs.n_tokens > 50
    assert theirs.perplexity == pytest.approx(ours.perplexity, rel=1e-3)
    assert theirs.mean_kl is not None
    assert theirs.mean_kl < 1e-5


@pytest.mark.slow
def test_llama_and_qsf_agree_on_gpt2(tmp_path: Path, text: Path, tiny_gpt2_dir: Path) -> None:
    from qsf_converter.convert import convert

    theirs = gguf_files.write(tiny_gpt2_dir, tmp_path / "F16.gguf", tokenizer=True)
    ours = tmp_path / "f16.qsf"
    convert(tiny_gpt2_dir, ours, quant_type="f16")
    found = measure(
        [ours, theirs],
        text,
        against=tiny_gpt2_dir,
        llama_python=bench_baselines.baseline_python(),
        n_threads=1,
    )
    assert found[theirs].perplexity == pytest.approx(found[ours].perplexity, rel=1e-3)
    assert (found[theirs].mean_kl or 1) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("mixture", random_gguf.FILE_TYPES)
@pytest.mark.parametrize(
    "shape",
    [
        Shape(2, 256, 512, 4, 2, 320, 64),
        Shape(2, 256, 512, 4, 4, 301, 64, family="gpt2"),
        Shape(2, 192, 320, 4, 2, 301, 64, head_dim=32, is_tied=True),
    ],
    ids=["llama", "gpt2", "odd"],
)
def test_llama_runs_the_random_files(tmp_path: Path, shape: Shape, mixture: str) -> None:
    path = tmp_path / "m.gguf"
    random_gguf.write_model(path, shape, mixture)
    window = Window(np.arange(1, 40), 0)
    source = BaselineLogits(path, bench_baselines.baseline_python(), ctx_tokens=64, n_threads=1)
    with source:
        assert source.n_vocab == shape.n_vocab
        logits = np.concatenate([rows.copy() for rows in source.logits([window], 16, ignore)])
    assert logits.shape == (38, shape.n_vocab)
    assert np.isfinite(logits).all()
    assert 0.01 < logits.std() < 10
