# SPDX-License-Identifier: Apache-2.0
"""The measured processes of qsf.bench: what they evaluate, what they time, what they answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from array import array
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qsf.native import binding
from qsf.native.opening import native_options
from qsf.options import ModelOptions
from qsf_bench.run import launch, tasks, worker_llama, worker_qsf

CHUNK_TOKENS = 4


def tokens_of(n_tokens: int, *, is_even: bool = False) -> list[int]:
    return list(worker_qsf.tokens_of(n_tokens, 100, is_even=is_even))


# ---- what is evaluated ----


@pytest.mark.parametrize("is_even", [False, True])
def test_both_engines_get_the_same_tokens(is_even: bool) -> None:
    for n_tokens, n_vocab in ((0, 10), (1, 1), (128, 512), (512, 32000)):
        ours = worker_qsf.tokens_of(n_tokens, n_vocab, is_even=is_even)
        assert ours == worker_llama.tokens_of(n_tokens, n_vocab, is_even=is_even)
        assert len(ours) == n_tokens
        assert all(token < n_vocab for token in ours)
    assert len(set(worker_qsf.tokens_of(128, 32000, is_even=is_even))) > 100


def test_tokens_are_a_run_of_one_half_or_any_of_the_other() -> None:
    run = tokens_of(40)
    assert [b - a for a, b in pairwise(run)] == [1] * 39 or max(run) == 49
    assert max(run) < 50 <= min(tokens_of(40, is_even=True))


class FakeSession:
    """Holds tokens in chunks, writes down all calls, and has counters that grow with each."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls
        self.n_held = 0
        self.n_calls = 0

    def sync_chunk(self, tokens: array[int]) -> int:
        self.n_calls += 1
        self.n_held = min(len(tokens), self.n_held + CHUNK_TOKENS)
        self.calls.append(("sync", list(tokens), self.n_held))
        return self.n_held

    def step(self, token: int) -> None:
        self.n_calls += 1
        self.n_held += 1
        self.calls.append(("step", token))

    def rewind(self, n_tokens: int) -> None:
        self.n_held = n_tokens
        self.calls.append(("rewind", n_tokens))

    def stats(self) -> Any:
        self.calls.append("stats")
        known: dict[str, Any] = dict.fromkeys(binding.SessionStats.__slots__, 0)
        known |= {"read_ns": 2 * self.n_calls, "checksum_ns": 3 * self.n_calls}
        known |= {"read_bytes": 1000 * self.n_calls}
        known |= {"phase_ns": (4 * self.n_calls, 5 * self.n_calls), "sample_ns": 6 * self.n_calls}
        return SimpleNamespace(**known)

    def close(self) -> None:
        self.calls.append("close")


class FakeModel:
    """Opens, and keeps what it was opened with."""

    def __init__(self, path: str, options: binding.Options, calls: list[Any]) -> None:
        self.calls = calls
        self.options = options
        calls.append(("open", path, options.ctx_tokens))

    def create_session(self) -> FakeSession:
        return FakeSession(self.calls)

    def info(self) -> Any:
        return SimpleNamespace(
            n_vocab=100, n_parameters=7, isa_name="scalar", io_name="direct", io_depth=0,
            plan=binding.MemoryPlan(**dict.fromkeys(binding.MemoryPlan.__slots__, 4)),  # type: ignore[arg-type]
        )  # fmt: skip

    def close(self) -> None:
        self.calls.append("close model")


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> list[FakeModel]:
    """The models that worker_qsf opens, all of them writing down calls in one list."""
    opened: list[FakeModel] = []
    calls: list[Any] = []

    def open_fake(path: str, options: ModelOptions) -> FakeModel:
        opened.append(FakeModel(path, native_options(options), calls))
        return opened[-1]

    def sampler(**how: object) -> Any:
        assert how["temperature"] == 0
        return SimpleNamespace(choose=lambda _session, _recent: calls.append("choose"))

    monkeypatch.setattr(worker_qsf, "open_native", open_fake)
    monkeypatch.setattr(binding, "NativeSampler", sampler)
    monkeypatch.setattr(binding, "phase_names", lambda: ("embed", "mlp"))
    return opened


def qsf_task(*tests: tasks.Test, path: str = "m.qsf", **options: Any) -> tasks.Task:
    return tasks.Task("qsf", path, 2, tests, **options)


def test_a_prompt_is_warmed_up_with_itself_and_timed_after_its_depth(
    models: list[FakeModel],
) -> None:
    answer = worker_qsf.measure(qsf_task(tasks.Test("pp", 6, depth=3)))
    before, both = tokens_of(3), tokens_of(3) + tokens_of(6)
    evaluated = [("sync", both, 7), ("sync", both, 9)]
    assert models[0].calls == [
        ("open", "m.qsf", 9),
        ("rewind", 0),
        ("sync", before, 3),
        *evaluated,
        ("rewind", 3),
        "stats",
        *evaluated,
        "stats",
    ]
    run = answer.tests[0]
    assert (run.name, run.depth, run.n_tokens, run.n_passes) == ("pp6", 3, 6, 2)


def test_steps_are_given_tokens_and_a_choice_each(models: list[FakeModel]) -> None:
    answer = worker_qsf.measure(qsf_task(tasks.Test("tg", 2, depth=3)))
    steps = [("step", token) for token in tokens_of(2)]
    assert models[0].calls == [
        ("open", "m.qsf", 6),
        ("rewind", 0),
        ("sync", tokens_of(3), 3),
        steps[0],
        "stats",
        *(steps[0], "choose"),
        *(steps[1], "choose"),
        "stats",
    ]
    assert answer.tests[0].n_passes == 2


# ---- what is timed ----


def test_the_engines_counters_of_the_timed_loop_alone_are_answered(
    models: list[FakeModel],
) -> None:
    answer = worker_qsf.measure(qsf_task(tasks.Test("pp", 8, depth=4)))
    assert len(models) == 1
    run = answer.tests[0]
    python_ns = run.parts.pop("python")
    assert run.parts == {"phase_embed": 2 * 4, "phase_mlp": 2 * 5, "sample": 2 * 6}
    assert 0 < python_ns <= run.wall_ns
    assert run.beside == {"read": 2 * 2, "checksum": 2 * 3}
    assert run.read_bytes == 2000
    assert (answer.n_vocab, answer.kernels) == (100, "scalar")
    assert (answer.kv_type, answer.io) == ("4bit", "direct x1")
    assert answer.plan["n_layers"] == 4


# ---- real models ----


def test_a_real_model_is_measured(tiny_llama_4bit: Path, tmp_path: Path) -> None:
    tests = (tasks.Test("pp", 20), tasks.Test("tg", 4), tasks.Test("tg", 3, depth=17))
    out = tmp_path / "answer"
    task = qsf_task(*tests, path=str(tiny_llama_4bit))
    command = [sys.executable, "-m", "qsf_bench.run.worker_qsf", json.dumps(task.as_json())]
    subprocess.run(command, env=os.environ | {tasks.ANSWER_VARIABLE: str(out)}, check=True)
    answer = tasks.parse_answer(json.loads(out.read_text("utf-8")), task)
    assert [(run.name, run.depth) for run in answer.tests] == [("pp20", 0), ("tg4", 0), ("tg3", 17)]
    assert [run.n_passes for run in answer.tests] == [1, 4, 3]
    for run in answer.tests:
        phases_ns = sum(ns for part, ns in run.parts.items() if part.startswith("phase_"))
        assert 0 < phases_ns <= run.wall_ns - run.parts["python"]
    assert answer.version == f"QSF {binding.version()}"
    assert answer.plan["ctx_tokens"] == 21
    assert answer.peak_rss_bytes > 1 << 20
    assert answer.load_seconds > 0
    assert answer.failure == ""


def test_the_measured_process_imports_little() -> None:
    """As test_lean.py asks of qsf-run: its memory is compared with that of others."""
    unwanted = "numpy lz4 typer rich subprocess tempfile logging asyncio concurrent qsf_converter"
    program = (
        "import sys, qsf_bench.run.worker_qsf; "
        "print(*(n for n in sys.argv[1:] if n in sys.modules))"
    )
    command = [sys.executable, "-c", program, *unwanted.split()]
    assert subprocess.check_output(command, text=True).split() == []


# ---- llama.cpp ----


class FakeLlama(SimpleNamespace):
    """As much of llama_cpp's low-level API as there is need of, which writes down calls."""

    llama_token = __import__("ctypes").c_int32
    __version__ = "9.8"
    LLAMA_LOAD_MODE_MMAP = "mmap"
    LLAMA_FLASH_ATTN_TYPE_AUTO, LLAMA_FLASH_ATTN_TYPE_ENABLED = -1, 1
    GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 = 1, 8, 2

    def __init__(self, *, has_modes: bool = True) -> None:
        modes: dict[str, Any] = {"load_mode": None} if has_modes else {"use_mmap": False}
        self.model_params = SimpleNamespace(n_gpu_layers=99, use_extra_bufts=True, **modes)
        self.flash = {"flash_attn_type": None} if has_modes else {"flash_attn": None}
        self.contexts: list[SimpleNamespace] = []
        self.calls: list[Any] = []
        self.log: Any = None

    def llama_log_callback(self, function: Any) -> Any:
        return function

    def llama_log_set(self, function: Any, _user: object) -> None:
        self.log = function

    def llama_backend_init(self) -> None:
        pass

    def llama_model_default_params(self) -> Any:
        return self.model_params

    def llama_model_load_from_file(self, path: bytes, _params: object) -> str:
        if not path.endswith(b".gguf"):
            self.log(2, b"not a GGUF\n", None)
            return ""
        self.log(1, b"load_tensors:   CPU_Mapped model buffer size =    12.50 MiB\n", None)
        return "model"

    def llama_model_get_vocab(self, _model: str) -> str:
        return "vocab"

    def llama_vocab_n_tokens(self, _vocab: str) -> int:
        return 100

    def llama_sampler_init_greedy(self) -> str:
        return "greedy"

    def llama_sampler_sample(self, sampler: str, _context: object, row: int) -> int:
        self.calls.append((sampler, row))
        return 0

    def llama_context_default_params(self) -> Any:
        return SimpleNamespace(**self.flash)

    def llama_init_from_model(self, _model: str, params: SimpleNamespace) -> Any:
        self.contexts.append(params)
        return params

    def llama_free(self, _context: object) -> None:
        self.calls.append("free")

    def llama_batch_get_one(self, ids: Any, n_tokens: int) -> list[int]:
        assert len(ids) == n_tokens
        return list(ids)

    def llama_decode(self, _context: object, batch: list[int]) -> int:
        self.calls.append(batch)
        return 1 if batch[:1] == [-1] else 0

    def llama_synchronize(self, _context: object) -> None:
        self.calls.append("wait")

    def llama_get_memory(self, _context: object) -> str:
        return "memory"

    def llama_memory_seq_rm(self, _memory: str, sequence: int, first: int, last: int) -> bool:
        self.calls.append((sequence, first, last))
        return True


def ask_llama(
    api: FakeLlama, patch: pytest.MonkeyPatch, *tests: tasks.Test, **options: Any
) -> tasks.Answer:
    patch.setitem(sys.modules, "llama_cpp", api)
    path = options.pop("path", "m.gguf")
    task = tasks.Task("llama.cpp", path, 3, tests, **options)
    return tasks.parse_answer(worker_llama.measure(task.as_json()), task)


def test_llama_does_what_qsf_does(monkeypatch: pytest.MonkeyPatch) -> None:
    api = FakeLlama()
    tests = (tasks.Test("pp", 2500, depth=3), tasks.Test("tg", 2, depth=1))
    answer = ask_llama(api, monkeypatch, *tests)
    prompt, steps = tokens_of(2500), tokens_of(2)
    evaluated = [prompt[:2048], prompt[2048:], "wait"]
    timed_steps = [[steps[0]], ("greedy", -1), [steps[1]], ("greedy", -1)]
    assert api.calls == [
        *(tokens_of(3), "wait"),
        *evaluated,
        (0, 3, -1),
        *evaluated,
        "free",
        *(tokens_of(1), "wait"),
        *(steps[:1], "wait"),
        *timed_steps,
    ]
    assert [run.n_passes for run in answer.tests] == [5, 2]  # of 512 tokens at most
    assert [run.n_tokens for run in answer.tests] == [2500, 2]
    assert all(run.wall_ns > 0 for run in answer.tests)
    assert (answer.version, answer.kernels) == ("llama.cpp 9.8", "CPU_Mapped:12.50")
    assert (answer.n_vocab, answer.kv_type) == (100, "f16")
    assert answer.peak_rss_bytes > 1 << 20
    api.calls.clear()
    ask_llama(api, monkeypatch, tasks.Test("pp", 4), is_slow=True)
    assert api.calls == ["wait", tokens_of(4)[:1], "wait", (0, 0, -1), tokens_of(4), "wait"]


def test_the_baseline_finds_no_modules_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run by its path, Python would look into qsf/bench for `trace`, `results` or `tasks`."""
    (tmp_path / "llama_cpp.py").write_text("import tasks\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    task = tasks.Task("llama.cpp", str(tmp_path), 1, (tasks.Test("tg", 1),))
    outcome = launch.run_task(task, sys.executable)
    assert "No module named 'tasks'" in outcome.why
