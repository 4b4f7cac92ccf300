# SPDX-License-Identifier: Apache-2.0
"""A run of qsf.bench from request to results, with processes that answer what they are told to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from make.bench_records import request_of
from qsf.errors import QsfArgumentError, QsfFormatError, QsfIOError
from qsf.native import roofline
from qsf.shell.command import StoppedError
from qsf_bench import campaign
from qsf_bench.campaign import Outputs
from qsf_bench.models.facts import read_facts
from qsf_bench.models.random_gguf import write_model as write_gguf
from qsf_bench.models.shapes import shape_of_file
from qsf_bench.run.baseline import Baseline, BaselineMissingError
from qsf_bench.run.launch import Outcome
from qsf_bench.run.memory_group import CapError
from qsf_bench.run.tasks import Answer, Task, TestRun


def answered(task: Task, *, why: str = "", note: str = "") -> Outcome:
    """Return what a process that did all of its task has answered."""
    facts = read_facts(Path(task.path))
    answer = Answer(
        version=f"{task.engine} 1",
        kernels="k",
        kv_type="4bit" if task.engine == "qsf" else "f16",
        n_vocab=facts.n_vocab,
        load_seconds=0.5,
        peak_rss_bytes=1 << 20,
        tests=[TestRun(test.name, test.depth, test.n_tokens, 10**8) for test in task.tests],
    )
    return Outcome(task, answer, why, 2 << 20, None, note)


@dataclass
class Machine:
    """Stands for all that is slow: processes, limits, control groups, the baseline."""

    ran: list[tuple[Task, str, bool]] = field(default_factory=list)  # task, Python, is cold
    said: list[str] = field(default_factory=list)
    baseline: Baseline | BaselineMissingError = field(
        default_factory=lambda: BaselineMissingError("no baseline", "!")
    )
    answer: Callable[[Task], Outcome] = answered

    def run_task(self, task: Task, python: str, *, is_cold: bool) -> Outcome:
        self.ran.append((task, python, is_cold))
        return self.answer(task)

    def find_baseline(self, python: str | None) -> Baseline:
        self.said.append(f"asked {python}")
        if isinstance(self.baseline, BaselineMissingError):
            raise self.baseline
        return self.baseline

    def begin(self, what: str) -> None:
        self.said.append(what)

    def update(self, fraction: float, text: str = "") -> None:
        assert 0 <= fraction <= 1, text

    def say(self, text: str) -> None:
        self.said.append(text)

    def warn(self, text: str) -> None:
        self.said.append(f"warning: {text}")

    def run(self, *models: Path, **options: Any) -> Outputs:
        usual: dict[str, Any] = {"threads": "1", "prompt": "8", "gen": "4", "rounds": 2}
        given = usual | options
        request = request_of(*models, **given)
        return campaign.run(request, self)

    @property
    def files(self) -> list[str]:
        """Names of what was run, in turn."""
        return [Path(task.path).name for task, _, _ in self.ran]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(campaign, "run_task", found.run_task)
    monkeypatch.setattr(campaign, "find_baseline", found.find_baseline)
    monkeypatch.setattr(roofline, "measure_memory", lambda *_: ({"1": 10.0}, {"1": 1000.0}))
    monkeypatch.setattr(roofline, "measure_disk", lambda *_: {"direct x1": 1.0})
    return found


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The limits of the control groups that are made, which cost nothing."""
    made: list[int] = []

    @contextlib.contextmanager
    def group(limit_bytes: int) -> Iterator[None]:
        made.append(limit_bytes)
        yield

    monkeypatch.setattr(campaign, "memory_group", group)
    return made


@pytest.fixture(scope="module")
def baseline_file(tmp_path_factory: pytest.TempPathFactory, tiny_llama_8bit: Path) -> Path:
    """A GGUF file of the bundled model's shape."""
    path = tmp_path_factory.mktemp("baseline") / "baseline.gguf"
    write_gguf(path, shape_of_file(tiny_llama_8bit), "Q8_0", seed=0)
    return path


# ---- what is run ----


def test_files_take_turns_in_every_setting(
    machine: Machine, tiny_llama_4bit: Path, tiny_llama_8bit: Path
) -> None:
    found = machine.run(tiny_llama_4bit, tiny_llama_8bit, threads="1,2", baseline="none")
    a, b = tiny_llama_4bit.name, tiny_llama_8bit.name
    assert machine.files == [a, b, a, b] * 2
    assert [task.n_threads for task, _, _ in machine.ran] == [1, 1, 2, 2] * 2
    assert not any(line.startswith("asked") for line in machine.said)
    assert [(row.type, row.threads, row.test) for row in found.results.rows] == [
        (name, n, test) for n in (1, 2) for name in ("4bit", "8bit") for test in ("pp8", "tg4")
    ]
    assert not found.is_incomplete
    assert "measuring, rounds: 2, runs in each: 4" in machine.said


def test_a_file_that_is_the_baseline_of_two_is_run_once(
    machine: Machine, tiny_llama_8bit: Path, baseline_file: Path, tmp_path: Path
) -> None:
    machine.baseline = Baseline("its python", "2")
    other = tmp_path / "other.qsf"
    other.write_bytes(tiny_llama_8bit.read_bytes())
    found = machine.run(
        tiny_llama_8bit, other, baseline_model=[baseline_file, baseline_file], rounds=1
    )
    assert machine.files == [tiny_llama_8bit.name, "baseline.gguf", "other.qsf"]
    assert [python for _, python, _ in machine.ran][1] == "its python"
    # Two files of one type are told apart by their names, the one of another type is not.
    stem = tiny_llama_8bit.stem
    types = list(dict.fromkeys(row.type for row in found.results.rows))
    assert types == [f"8bit {stem}", "Q8_0", "8bit other"]
    rows = found.results.rows
    assert [(rows[r.row].file, rows[r.vs].file) for r in found.results.ratios] == [
        (name, "baseline.gguf") for name in (tiny_llama_8bit.name, "other.qsf") for _ in range(2)
    ]
    assert found.results.machine["baseline"] == "llama.cpp 2"


def test_the_baseline_has_no_part_in_budgets(
    machine: Machine, tiny_llama_8bit: Path, baseline_file: Path
) -> None:
    machine.baseline = Baseline("p", "2")
    options: Any = {
        "baseline_model": [baseline_file],
        "ram_budget": "none,100",
        "rounds": 1,
        "io": "mmap",
    }
    machine.run(tiny_llama_8bit, kv_type="8bit", **options)
    tasks = [task for task, _, _ in machine.ran]
    assert [(task.engine, task.budget_mb) for task in tasks] == [
        ("qsf", None),
        ("llama.cpp", None),
        ("qsf", 100),
    ]
    assert [task.io for task in tasks] == ["mmap", None, "mmap"]
    assert [task.kv_type for task in tasks] == ["8bit"] * 3


def test_a_group_begins_without_anything_cached(
    machine: Machine, groups: list[int], tiny_llama_8bit: Path
) -> None:
    def cold(**options: Any) -> list[bool]:
        machine.ran.clear()
        machine.run(tiny_llama_8bit, baseline="none", rounds=1, **options)
        return [is_cold for _, _, is_cold in machine.ran]

    assert cold() == [False]
    assert cold(ram_budget="1,400") == [True, False]  # the model has 3 MB
    assert cold(cgroup="400M") == [True]
    assert groups[0] == 400 << 20


def test_limits_are_the_better_of_before_and_after(
    machine: Machine, tiny_llama_8bit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = iter([({"1": 10.0}, {"1": 500.0}), ({"1": 8.0}, {"1": 700.0})])
    monkeypatch.setattr(roofline, "measure_memory", lambda *_: next(memory))
    disk = iter([{"direct x1": 1.0}, {"direct x1": 0.5, "buffered x1": 3.0}])
    monkeypatch.setattr(roofline, "measure_disk", lambda *_: next(disk))
    found = machine.run(tiny_llama_8bit, baseline="none").results.limits
    assert found.memory_gb_per_s == {"1": 10.0}
    assert found.gmadds_per_s == {"1": 700.0}
    assert found.disk_gb_per_s == {"direct x1": 1.0, "buffered x1": 3.0}


# ---- what is refused, and when ----


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"shape": "tiny", "depth": "0,2045"},
            "pp8 after 2045 needs a context of 2053 tokens, tiny was",
        ),
        ({"shape": "tiny,nothing"}, "'nothing' is unknown; known: tiny, gpt2"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(
    machine: Machine, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(QsfArgumentError, match=said):
        machine.run(cache=tmp_path / "cache", **options)
    assert not (tmp_path / "cache").exists()
    assert machine.said == []


def test_files_of_the_wrong_kind_are_refused(
    machine: Machine,
    tiny_llama_8bit: Path,
    tiny_llama_dir: Path,
    baseline_file: Path,
    tmp_path: Path,
) -> None:
    cut = tmp_path / "cut.qsf"
    cut.write_bytes(tiny_llama_8bit.read_bytes()[:5000])
    model = tiny_llama_8bit
    wrong: list[tuple[list[Path], dict[str, Any], type[Exception], str]] = [
        ([baseline_file], {}, QsfArgumentError, "is a GGUF file, not a .qsf file: convert it with"),
        ([tiny_llama_dir], {}, QsfArgumentError, "is a HuggingFace model: convert it: "),
        ([cut], {}, QsfFormatError, "has 5000 bytes, but its header"),
        ([tmp_path / "absent.qsf"], {}, QsfIOError, "No such file"),
        ([model], {"baseline_model": [model]}, QsfArgumentError, "files are called"),
        ([model], {"baseline_model": [cut]}, QsfFormatError, "has 5000 bytes"),
        ([model], {"depth": "5000"}, QsfArgumentError, "was made for"),
    ]
    for models, options, kind, said in wrong:
        with pytest.raises(kind, match=said):
            machine.run(*models, **options)
    other = tmp_path / "b.qsf"
    other.write_bytes(model.read_bytes())
    with pytest.raises(QsfArgumentError, match=r"b\.qsf is a \.qsf file, not a GGUF file"):
        machine.run(model, baseline_model=[other])
    assert machine.said == []


def test_a_group_that_cannot_be_had_is_said_before_the_work(
    machine: Machine, tiny_llama_8bit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def refused(_limit_bytes: int) -> Iterator[None]:
        raise CapError("run this as root")
        yield

    monkeypatch.setattr(campaign, "memory_group", refused)
    with pytest.raises(CapError, match="run this as root"):
        machine.run(tiny_llama_8bit, cgroup="300M")
    assert machine.said == []


# ---- what is missing ----


@pytest.mark.parametrize("how", ["baseline", "baseline_python", "baseline_model"])
def test_a_baseline_that_was_asked_for_is_missed(
    machine: Machine, tiny_llama_8bit: Path, baseline_file: Path, how: str
) -> None:
    asked: Any = {
        "baseline": "llama.cpp",
        "baseline_python": Path("x"),
        "baseline_model": [baseline_file],
    }[how]
    found = machine.run(tiny_llama_8bit, **{how: asked})
    assert found.is_incomplete
    (failure,) = found.results.failures
    assert (failure.engine, failure.why) == ("llama.cpp", "no baseline")
    assert "warning: llama.cpp, all of it: no baseline!" in machine.said
    assert len(found.results.rows) == 2


# ---- interruptions ----


def stop_at(machine: Machine, number: int) -> None:
    """Let a signal arrive in that run, counted from 0."""

    def answer(task: Task) -> Outcome:
        if len(machine.ran) > number:
            raise StoppedError(2)
        return answered(task, note=f"note {len(machine.ran)}")

    machine.answer = answer


def test_an_interruption_keeps_what_was_measured(machine: Machine, tiny_llama_8bit: Path) -> None:
    stop_at(machine, 2)
    found = machine.run(tiny_llama_8bit, baseline="none", rounds=5)
    assert isinstance(found.stopped, StoppedError)
    assert [len(row.tok_per_s.values) for row in found.results.rows] == [2, 2]
    assert found.results.notes[0] == "interrupted before all rounds were done"
    assert {"note 1", "note 2"} <= set(found.results.notes)
    assert len(machine.ran) == 3
