# SPDX-License-Identifier: Apache-2.0
"""python -m qsf.bench: files that are the same work, turns, the report, and what it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from make.refusals import refusals
from qsf.errors import QsfArgumentError, QsfError
from qsf.native import roofline
from qsf_bench import cli, files, processes, table, tasks
from qsf_bench.models import random_gguf, random_qsf
from qsf_bench.models.random_gguf import BASELINE_TYPES, FILE_TYPES
from qsf_bench.models.shapes import Shape
from qsf_bench.processes import ProcessError, run_command
from qsf_bench.tasks import LLAMA, QSF, Answer, Runs, Task, Test
from qsf_bench.worker_llama import isa_words, tokens_of
from qsf_converter.rounding.plan import QUANT_TYPES

LLAMA_SHAPE = Shape(2, 256, 512, 4, 2, 320, 64)
SMALL = ["--prompt", "8", "--gen", "4", "--threads", "1", "--rounds", "2", "-q"]

# A package of the wheel's name, whose server takes what llama.cpp's takes.
FAKE_WHEEL = """
from types import SimpleNamespace
class CommonParams(SimpleNamespace):
    def __init__(self):
        super().__init__(model=SimpleNamespace(), cpuparams=SimpleNamespace(),
                         cpuparams_batch=SimpleNamespace())
ggml_type = SimpleNamespace(GGML_TYPE_F16=1, GGML_TYPE_Q8_0=8)
def get_system_info(): return "CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 0 | "
class Server:
    def __init__(self, params): self.n_ctx = params.n_ctx
    def handle_completions(self, request):
        n_prompt, n_predicted = len(request["prompt"]), request["n_predict"]
        assert n_prompt + n_predicted <= self.n_ctx
        return {"timings": {"prompt_ms": 1000.0, "predicted_n": n_predicted,
                            "predicted_ms": 500.0 * n_predicted}}
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_qsf, "POOL_TILES", 64)
    rates = {"1": 10.0}
    monkeypatch.setattr(roofline, "measure_memory", lambda _threads, _progress: rates)


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed llama.cpp that answers at once: 2 tokens a second, prompts in a second."""
    folder = tmp_path / "site"
    (folder / "xllamacpp-9.9.dist-info").mkdir(parents=True)
    (folder / "xllamacpp-9.9.dist-info" / "METADATA").write_text("Name: xllamacpp\nVersion: 9.9\n")
    (folder / "xllamacpp.py").write_text(FAKE_WHEEL)
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A .qsf file and a GGUF of the same shape."""
    ours, theirs = tmp_path / "m.qsf", tmp_path / "m.gguf"
    random_qsf.write_model(ours, LLAMA_SHAPE, QUANT_TYPES["4bit"], QUANT_TYPES["8bit"])
    random_gguf.write_model(theirs, LLAMA_SHAPE, "Q4_K_M")
    return ours, theirs


# ---- files ----
def test_facts_by_hand(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    matrices = 2 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 512 * 256)
    table_values, norms = 320 * 256, 5 * 256
    ours = files.read_facts(pair[0])
    assert ours.n_weights == matrices + 2 * table_values + norms
    # 4bit: 4 bits and two f16 for each 64; 8bit: 8 bits and an f16 for each 64.
    head = table_values * 33 // 32
    assert ours.tensor_bytes == matrices * 9 // 16 + 2 * head + 4 * norms
    assert ours.token_bytes == matrices * 9 // 16 + head + 264 + 4 * norms
    random_gguf.write_model(tmp_path / "q8.gguf", LLAMA_SHAPE, "Q8_0")
    theirs = files.read_facts(tmp_path / "q8.gguf")
    assert (theirs.type, theirs.n_weights, theirs.max_tokens) == ("Q8_0", ours.n_weights, 64)
    # Q8_0: 8 bits and an f16 for each 32.
    head = table_values * 34 // 32
    assert theirs.token_bytes == matrices * 34 // 32 + head + 272 + 4 * norms


@pytest.mark.parametrize("mixture", FILE_TYPES)
def test_random_ggufs_are_whole_and_have_a_vocabulary(tmp_path: Path, mixture: str) -> None:
    path = tmp_path / "m.gguf"
    random_gguf.write_model(path, LLAMA_SHAPE, mixture)
    reader = gguf.GGUFReader(path)
    stored = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert stored == {t.name: t.type for t in random_gguf.tensors(LLAMA_SHAPE, mixture)}
    tokens = reader.fields["tokenizer.ggml.tokens"]
    assert len(tokens.data) == LLAMA_SHAPE.n_vocab
    for tensor in reader.tensors:
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if weights.ndim > 1:
            assert 0.01 < weights.std() < 0.04, tensor.name


def test_random_weights_are_made_once(tmp_path: Path) -> None:
    for type_name in ("4bit", "Q4_K_M"):
        path = files.find_or_make("tiny", LLAMA_SHAPE, type_name, tmp_path)
        made_ns = path.stat().st_mtime_ns
        assert files.find_or_make("tiny", LLAMA_SHAPE, type_name, tmp_path) == path
        assert path.stat().st_mtime_ns == made_ns


def test_both_engines_get_the_same_tokens_of_any_vocabulary() -> None:
    for n_vocab in (2, 5, 2048):
        tokens = tokens_of(100, n_vocab)
        assert len(tokens) == 100
        assert max(tokens) <= n_vocab // 2


# ---- the command ----
def run_cli(*words: str | Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = cli.run(list(map(str, words)))
    out, errors = capsys.readouterr()
    return code, out, errors


@pytest.mark.usefixtures("wheel")
def test_two_engines_in_one_table(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, page = tmp_path / "r.json", tmp_path / "r.html"
    words = [*SMALL, "--kv-type", "f16", "--json", str(report), "--html", str(page)]
    code, out, errors = run_cli(pair[0], "--baseline-model", pair[1], *words, capsys=capsys)
    assert (code, errors) == (0, "")
    rows = json.loads(report.read_text())["rows"]
    assert [(row["engine"], row["test"]) for row in rows] == [
        *((QSF, "pp8"), (QSF, "tg4")),
        *((LLAMA, "pp8"), (LLAMA, "tg4")),
    ]
    ours, theirs = rows[1], rows[3]
    assert (theirs["rounds"], rows[2]["rounds"]) == ([2.0, 2.0], [8.0, 8.0])
    assert theirs["version"] == "xllamacpp 9.9, AVX2"
    assert ours["ratio"] == pytest.approx(sum(ours["rounds"]) / 2 / 2.0)
    for text in ("xllamacpp 9.9, AVX2", "Q4_K_M", "x llama.cpp", "10 GB/s with 1"):
        assert text in out
        assert text in page.read_text()
    assert "<script" not in page.read_text()


@pytest.mark.usefixtures("wheel")
def test_a_file_and_the_gguf_it_was_made_of(
    pair: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = tmp_path / "kept.qsf"
    kept.write_bytes(pair[0].read_bytes())
    copies = {str(pair[0]): pair[0], str(pair[1]): kept}
    monkeypatch.setattr(cli, "find_model", lambda name, **_: copies[name])
    words = [*SMALL, "--prompt", "0", "--json", str(tmp_path / "r.json")]
    assert run_cli(*pair, *words, capsys=capsys)[0] == 0
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [(row["file"], row["engine"], row["ratio"] is None) for row in rows] == [
        ("m.qsf", QSF, False),
        ("m.gguf", LLAMA, True),
        ("kept.qsf", QSF, False),
    ]


def test_the_divergence_stands_beside_the_speed(
    tiny_llama_4bit: Path, tiny_llama_8bit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "--prompt", "0", "--no-baseline", "--json", str(tmp_path / "r.json")]
    models = (tiny_llama_4bit, tiny_llama_8bit)
    code, out, _ = run_cli(*models, *words, "--against", tiny_llama_8bit, capsys=capsys)
    assert code == 0
    assert "KL: 512 tokens against" in out
    kls = [row["kl"] for row in json.loads((tmp_path / "r.json").read_text())["rows"]]
    assert kls[0] > kls[1] == 0
    code, _, errors = run_cli(*models, *words, "--against", tiny_llama_4bit, capsys=capsys)
    assert (code, "bits a weight: 8 or 16" in errors) == (2, True)


def test_without_llama_cpp_it_says_how_to_get_it(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "find_baseline", lambda: "")
    code, out, _ = run_cli(pair[0], *SMALL, "--gen", "0", capsys=capsys)
    assert code == 0
    assert "llama.cpp was not measured: `pip install xllamacpp`" in out
    _, out, _ = run_cli(pair[0], *SMALL, "--gen", "0", "--no-baseline", capsys=capsys)
    assert "llama.cpp" not in out


@pytest.mark.parametrize(("words", "text"), refusals("qsf bench"))
def test_what_cannot_be_is_refused(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, errors = run_cli(*words, capsys=capsys)
    assert (code, out) == (2, "")
    assert text in errors


def test_a_context_that_is_too_long_is_refused(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, errors = run_cli(pair[0], *SMALL, "--depth", "60", "--no-baseline", capsys=capsys)
    assert code == 2
    assert "70 tokens, m.qsf was made for 64" in errors


# ---- turns ----
def answers(*speeds: float) -> Callable[[Task], Answer]:
    """Processes that have these speeds; 0: it fails."""
    left = list(speeds)

    def run(_task: Task) -> Answer:
        speed = left.pop(0)
        if not speed:
            raise ProcessError("ended with 1: no")
        return Answer("x", [speed], 1 << 20)

    return run


def test_tasks_take_turns_and_ratios_are_of_one_round(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path]
) -> None:
    runs = [
        Runs(Task(engine, str(path), 1, (Test("tg", 4),)))
        for engine, path in zip((QSF, LLAMA), pair, strict=True)
    ]
    monkeypatch.setattr(tasks, "run_task", answers(10, 5, 0, 1, 30, 10))
    tasks.run_rounds(runs, 3, lambda _fraction, _text: None)
    facts = {str(path): files.read_facts(path) for path in pair}
    rows = table.rows_of(runs, facts, {str(pair[0]): str(pair[1])}, {})
    assert [row.rounds for row in rows] == [[10, 30], [5, 1, 10]]
    assert [row.ratio for row in rows] == [2.5, None]  # of 2 and 3: a round failed
    assert runs[0].failures == ["ended with 1: no"]
    runs[0].answers.append(runs[0].answers[0])  # stopped before llama.cpp's turn
    assert table.rows_of(runs, facts, {str(pair[0]): str(pair[1])}, {})[0].ratio == 2.5


def test_a_task_that_always_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [Runs(Task(QSF, name, 1, (Test("tg", 4),))) for name in ("a", "b")]
    monkeypatch.setattr(tasks, "run_task", answers(0, 1, 0, 1, 1))
    tasks.run_rounds(runs, 3, lambda _fraction, _text: None)
    assert runs[0].is_left_out
    monkeypatch.setattr(tasks, "run_task", answers(0, 0))
    with pytest.raises(QsfError, match=r"nothing could be measured: qsf c, 1 thread: ended with 1"):
        tasks.run_rounds([Runs(Task(QSF, "c", 1, ()))], 2, lambda _fraction, _text: None)


def is_zombie(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].startswith("Z")
    except OSError:
        return True


def test_a_process_leaves_no_children() -> None:
    with pytest.raises(ProcessError, match=r"did not end within 0\.5 s"):
        run_command(["sh", "-c", "sleep 100 & sleep 100"], timeout_seconds=0.5)
    child = run_command(["sh", "-c", "sleep 100 >/dev/null 2>&1 & echo $!"]).output
    deadline = time.monotonic() + 10  # the system takes a moment to end it
    while Path(f"/proc/{child.strip()}").exists() and not is_zombie(child.strip()):
        assert time.monotonic() < deadline
    with pytest.raises(ProcessError, match="cannot be started"):
        run_command(["/no/such/program"])


def test_ctrl_c_keeps_what_was_measured(pair: tuple[Path, Path], tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from qsf.native import roofline\n"
        "roofline.measure_memory = lambda *_: {}\n"
        "from qsf_bench import tasks\n"
        "real, n_done = tasks.run_task, []\n"
        "def run_task(task):\n"
        "    n_done.append(1)\n"
        "    if len(n_done) == 2: os.kill(os.getpid(), signal.SIGINT)\n"
        "    return real(task)\n"
        "tasks.run_task = run_task\n"
        "from qsf.shell.entry import bench\n"
        "bench()\n"
    )
    out = tmp_path / "r.json"
    words = [str(pair[0]), *SMALL, "--no-baseline", "--json", str(out)]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
    assert done.returncode == 128 + signal.SIGINT, done.stderr
    assert "the report has what was measured until then" in done.stderr
    assert [len(row["rounds"]) for row in json.loads(out.read_text())["rows"]] == [1, 1]


def test_instruction_sets_of_llama_cpp() -> None:
    text = "CPU : SSE3 = 1 | AVX = 1 | AVX2 = 1 | AVX512 = 0 | REPACK = 1 | NEON = 1 | "
    assert isa_words(text) == "AVX AVX2 NEON"


def test_types_of_qsf_have_a_counterpart() -> None:
    assert set(BASELINE_TYPES) <= set(QUANT_TYPES)
    assert set(BASELINE_TYPES.values()) <= set(FILE_TYPES)


def test_a_cold_start_needs_a_file_that_can_be_read(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match="cannot be read"):
        processes.forget_file(tmp_path / "none")
    with pytest.raises(QsfArgumentError):
        cli._parser().parse_args(["--threads", "x"])
