# SPDX-License-Identifier: Apache-2.0
"""How qsf.bench starts processes and takes turns: processes that die, hang and talk nonsense."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from make.bench_records import facts_of
from qsf_bench.run import launch, rounds, tasks
from qsf_bench.run.launch import Outcome
from qsf_bench.run.memory_group import Group
from qsf_bench.run.tasks import Cap

TESTS = (tasks.Test("pp", 8), tasks.Test("tg", 4, depth=8))
ANSWER = tasks.Answer(
    version="x 1",
    kernels="k",
    kv_type="f16",
    n_vocab=10,
    load_seconds=0.5,
    peak_rss_bytes=12345,
    tests=[tasks.TestRun(test.name, test.depth, test.n_tokens, wall_ns=100) for test in TESTS],
)

Script = Callable[..., str]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Write a shell script that stands for a Python; returns its path."""

    def write(text: str, answer: Any = None) -> str:
        path = tmp_path / "python"
        (tmp_path / "given").write_text(answer if isinstance(answer, str) else json.dumps(answer))
        give = f'cp "{tmp_path}/given" "$QSF_BENCH_ANSWER"\n' if answer is not None else ""
        path.write_text(f"#!/bin/sh\n{give}{text}\n")
        path.chmod(0o755)
        return str(path)

    return write


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary files are made; there are none left afterwards."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def task(engine: str = "qsf", **options: Any) -> tasks.Task:
    return tasks.Task(engine, options.pop("path", "m.qsf"), 2, TESTS, **options)


def run(python: str, given: tasks.Task | None = None, **options: Any) -> Outcome:
    return launch.run_task(given or task(), python, **options)


# ---- processes that answer ----


@pytest.mark.parametrize("engine", [tasks.QSF, tasks.LLAMA])
def test_an_answer_is_what_was_asked_for(script: Script, tmp_path: Path, engine: str) -> None:
    python = script(f'printf "%s\\n" "$@" > {tmp_path}/arguments; echo noise', ANSWER.as_json())
    outcome = run(python, task(engine))
    assert (outcome.answer, outcome.why, outcome.cap) == (ANSWER, "", None)
    *words, text = (tmp_path / "arguments").read_text().splitlines()
    assert tasks.parse_task(json.loads(text)) == task(engine)
    if engine == "qsf":
        assert words == ["-m", "qsf_bench.run.worker_qsf"]
    else:
        assert Path(words[0]).name == "worker_llama.py"
        assert Path(words[0]).is_file()


# ---- processes that do not ----


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("kill -KILL $$", "killed by SIGKILL: the system was out of memory, or somebody did it"),
        ("echo why >&2; kill -SEGV $$", "crashed with SIGSEGV: why"),
        ("kill -TERM $$", "ended by SIGTERM"),
        ("kill -40 $$", "crashed with signal 40"),
        ("exit 7", "ended with 7 and gave no answer"),
        ("seq 20 >&2; exit 1", "ended with 1 and gave no answer: 16 / 17 / 18 / 19 / 20"),
    ],
)
def test_the_end_is_said_in_words(script: Script, text: str, wanted: str) -> None:
    outcome = run(script(text))
    assert (outcome.why, outcome.answer) == (wanted, None)


def changed(**values: Any) -> dict[str, Any]:
    return ANSWER.as_json() | values


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ("garbage {", "cannot be read (JSONDecodeError"),
        (b"\xff\xfe".decode("latin1"), "cannot be read"),
        ([1, 2], "cannot be read"),
        ({"version": "x"}, "cannot be read (KeyError"),
        (changed(surplus=1), "cannot be read (TypeError"),
        (changed(tests=[]), "asked for [('pp8', 0), ('tg4', 8)]"),
        (changed(tests=ANSWER.as_json()["tests"][::-1]), "asked for [('pp8', 0), ('tg4', 8)]"),
        (changed(tests=ANSWER.as_json()["tests"] * 2), "asked for [('pp8', 0), ('tg4', 8)]"),
        (
            changed(
                tests=[
                    *ANSWER.as_json()["tests"][:1],
                    {"name": "tg4", "depth": 8, "n_tokens": 4, "wall_ns": 0},
                ]
            ),
            "tg4 took 0 ns",
        ),
        (changed(peak_rss_bytes="much"), "a peak of 'much' bytes"),
    ],
)
def test_an_answer_that_is_none_is_refused(script: Script, answer: Any, wanted: str) -> None:
    outcome = run(script("echo at last >&2", answer))
    assert outcome.answer is None
    assert wanted in outcome.why
    assert outcome.why.endswith(": at last")


# ---- processes that do not end ----


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has just been killed may take a moment."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state == "Z":
            return False
        time.sleep(0.02)
    return True


def test_a_process_that_hangs_is_ended_with_all_it_has_started(
    script: Script, tmp_path: Path
) -> None:
    python = script(f"sleep 1000 & echo $$ $! > {tmp_path}/pids; wait")
    outcome = run(python, timeout_seconds=1.0)
    assert outcome.why == "did not end within 1 s"
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    assert not any(is_alive(pid) for pid in pids)


def test_what_a_process_leaves_behind_is_ended(script: Script, tmp_path: Path) -> None:
    outcome = run(script(f"sleep 1000 & echo $! > {tmp_path}/pid", ANSWER.as_json()))
    assert outcome.why == ""
    assert not is_alive(int((tmp_path / "pid").read_text()))


# ---- groups and caches ----


@pytest.fixture
def group_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the memory group."""
    folder = tmp_path / "group"
    folder.mkdir()
    limits: list[int] = []

    @contextlib.contextmanager
    def fake(limit_bytes: int) -> Iterator[Group]:
        limits.append(limit_bytes)
        yield Group(2, folder)
        assert limits == [300 << 20]

    monkeypatch.setattr(launch, "memory_group", fake)
    return folder


def test_a_process_enters_its_group_before_it_starts(script: Script, group_folder: Path) -> None:
    (group_folder / "memory.peak").write_text("4096\n")
    python = script(f"test $(cat {group_folder}/cgroup.procs) = $$", ANSWER.as_json())
    outcome = run(python, task(cap_mb=300))
    assert (outcome.why, outcome.cap) == ("", Cap(300, 4096, 0))


def test_a_process_that_outgrows_its_group_is_said(script: Script, group_folder: Path) -> None:
    (group_folder / "memory.events").write_text("oom_kill 1\n")
    outcome = run(script("kill -KILL $$"), task(cap_mb=300))
    assert outcome.why == "killed by SIGKILL: out of memory in its group of 300 MB"
    assert outcome.cap == Cap(300, None, 1)


def test_a_cold_task_has_no_caches(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[tuple[Any, ...]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *words: forgotten.append(words[1:]))
    monkeypatch.setattr(os, "sync", lambda: forgotten.append(("sync",)))
    monkeypatch.setattr(launch, "_DROP_CACHES", tmp_path / "drop")
    (tmp_path / "drop").write_text("0")
    model = tmp_path / "m.qsf"
    model.write_bytes(b"weights")
    python = script(f"cp {tmp_path}/drop {tmp_path}/seen", ANSWER.as_json())
    assert run(python, task(path=str(model))).note == ""
    assert ((tmp_path / "seen").read_text(), forgotten) == ("0", [])
    outcome = run(python, task(path=str(model)), is_cold=True)
    assert (outcome.why, outcome.note) == ("", "")
    assert (tmp_path / "seen").read_text() == "3"
    assert forgotten == [(0, 0, os.POSIX_FADV_DONTNEED), ("sync",)]
    monkeypatch.setattr(launch, "_DROP_CACHES", tmp_path / "absent" / "drop")
    assert "only the model was dropped" in run(python, task(path=str(model)), is_cold=True).note
    outcome = run(python, task(path="absent.qsf"), is_cold=True)
    assert outcome.why == "absent.qsf cannot be read: No such file or directory"


# ---- turns ----


@pytest.fixture
def three(tmp_path: Path) -> list[tasks.Task]:
    """Tasks of three files."""
    for name in "abc":
        (tmp_path / name).write_text("")
    return [task(path=str(tmp_path / name)) for name in "abc"]


def outcome_of(given: tasks.Task, why: str = "", *, n_tests: int = 2) -> Outcome:
    answer = replace(ANSWER, tests=ANSWER.tests[:n_tests]) if n_tests else None
    return Outcome(given, answer, why, 5, None)


def name(given: tasks.Task) -> str:
    return Path(given.path).name


def all_of(given: list[tasks.Task]) -> list[rounds.TaskRuns]:
    return [rounds.TaskRuns(one, facts_of()) for one in given]


def test_a_task_that_fails_twice_is_left_out(three: list[tasks.Task]) -> None:
    turns: list[str] = []

    def note(given: tasks.Task) -> Outcome:
        turns.append(name(given))
        return outcome_of(given, "crashed", n_tests=0) if name(given) == "b" else outcome_of(given)

    found = all_of(three)
    rounds.run_rounds(found, 4, note)
    assert "".join(turns) == "abcabcacac"
    assert [len(one.outcomes) for one in found] == [4, 4, 4]
    assert found[1].outcomes == [None] * 4
    assert found[1].failures == {"crashed": 2}
