# SPDX-License-Identifier: Apache-2.0
"""The budget where it is real: ``qsf-run`` in a memory control group with the budget as its limit.

A process that takes more than it says is killed here, and what it reads counts as well: the model
is larger than the budget.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.slow

MB = 1 << 20
PROMPT = "Once upon a time there was a little girl"
N_TOKENS = 12

# Prints what the process has had at most, after all that qsf-run did.
RUN = """
import atexit
from qsf.entry import run

def say_peak():
    with open("/proc/self/status") as file:
        print("\\npeak", next(line.split()[1] for line in file if line.startswith("VmHWM")))

atexit.register(say_peak)
run()
"""

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def bench(project_root: Path) -> Iterator[Callable[[str], ModuleType]]:
    """Import a program of bench/."""
    sys.path.append(str(project_root / "bench"))
    yield importlib.import_module
    sys.path.remove(str(project_root / "bench"))


@pytest.fixture(scope="module")
def memory_group(bench: Callable[[str], ModuleType]) -> ModuleType:
    """The control groups, where this process may make some."""
    module = bench("memory_group")
    try:
        with module.memory_group(32 * MB):
            pass
    except module.CapError as error:
        pytest.skip(str(error))
    return module


@pytest.fixture(scope="module")
def model(
    bench: Callable[[str], ModuleType],
    tmp_path_factory: pytest.TempPathFactory,
    tiny_llama_dir: Path,
) -> Path:
    """About 130 MB: more than twice of what the smallest budget here is."""
    make_model = bench("make_model")
    shape = make_model.Shape(12, 1024, 2816, 16, 16, n_vocab=2048, max_tokens=1024)
    path = tmp_path_factory.mktemp("cgroup") / "m.qsf"
    dtypes = make_model.QUANT_TYPES
    make_model.write_model(
        path, shape, dtypes["8bit"], dtypes["8bit"], tokenizer_from=tiny_llama_dir
    )
    assert path.stat().st_size > 120 * MB
    return path


@pytest.fixture(scope="module")
def run(memory_group: ModuleType, model: Path) -> Run:
    """Run the model with a budget in MB, in a group with that limit or another one."""

    def call(budget_mb: int, *options: str, limit_mb: int = 0) -> Any:
        command = [sys.executable, "-c", RUN, str(model), "--ram-budget", str(budget_mb)]
        command += ["--prompt", PROMPT, "--temperature", "0", "--max-tokens", str(N_TOKENS)]
        return memory_group.run_capped([*command, *options], (limit_mb or budget_mb) * MB)

    return call


@pytest.fixture(scope="module")
def least_mb(run: Run) -> int:
    """What a budget that is too small is told would do, and one more.

    A process takes a megabyte more or less, by how much of its libraries the system holds. In a
    group that is too small for it, it is given less of them, so the group is a larger one.
    """
    done = run(20, limit_mb=200)
    check_refused(done)
    found = re.search(r"--ram-budget (\d+) would do", done.errors)
    assert found is not None, done.errors
    return int(found[1]) + 1


def check_refused(done: Any) -> None:
    """It said that the model does not fit, and did nothing."""
    assert done.exit_code == 1, done.errors
    assert "the model does not fit in" in done.errors
    assert done.output.startswith("\npeak ")
    assert done.group["n_oom_kills"] == 0


def check_inside(done: Any, budget_mb: int) -> str:
    """It ran to the end below the limit; returns the text."""
    assert done.exit_code == 0, done.errors
    text, _, peak_kb = done.output.rpartition("\npeak ")
    assert f"generated {N_TOKENS} tokens" in done.errors
    assert done.group["n_oom_kills"] == 0
    assert 0 < done.group["peak_bytes"] <= budget_mb * MB
    assert 0 < int(peak_kb) * 1024 <= budget_mb * MB
    return str(text)


def resident_units(done: Any) -> int:
    """The units of weights in the printed memory map; a map without them has none."""
    found = re.search(r"weights, (\d+) of \d+ units", done.errors)
    return int(found[1]) if found else 0


def test_a_limit_ends_a_process_that_takes_more(memory_group: ModuleType) -> None:
    """Otherwise the tests below prove nothing."""
    hold = "held = b'x' * (200 << 20); print(len(held))"
    command = [sys.executable, "-c", hold]
    killed = memory_group.run_capped(command, 100 * MB)
    assert killed.exit_code == -9
    assert killed.group["n_oom_kills"] == 1
    assert killed.output == ""
    done = memory_group.run_capped(command, 300 * MB)
    assert (done.exit_code, done.output.strip()) == (0, str(200 << 20))
    assert done.group["peak_bytes"] > 200 * MB
    assert not list(Path("/sys/fs/cgroup").glob(f"**/qsf-cap-{os.getpid()}-*"))


@pytest.mark.parametrize("more_mb", [0, 20])
def test_a_limit_that_is_the_budget_is_kept(run: Run, least_mb: int, more_mb: int) -> None:
    budget_mb = least_mb + more_mb
    assert budget_mb < 100, "the model would not be streamed"
    done = run(budget_mb, "--verbose")
    check_inside(done, budget_mb)
    assert resident_units(done) < 12


def test_the_text_does_not_depend_on_the_limit(run: Run, least_mb: int) -> None:
    # The KV cache is said, because the least budget of all might leave less for it.
    texts = {}
    for budget_mb in (least_mb + 10, least_mb + 60, least_mb + 200):
        done = run(budget_mb, "--kv-type", "4bit", "--verbose")
        texts[resident_units(done)] = check_inside(done, budget_mb)
        assert texts[resident_units(done)].strip()
    assert len(texts) == 3, "two limits gave the same plan"
    assert len(set(texts.values())) == 1


@pytest.mark.parametrize("less_mb", [3, 10])
def test_a_limit_below_what_would_do_is_refused(run: Run, least_mb: int, less_mb: int) -> None:
    done = run(least_mb - less_mb)
    check_refused(done)
    assert "would do" in done.errors


def test_the_bench_measures_what_it_says(
    memory_group: ModuleType, project_root: Path, model: Path, tmp_path: Path
) -> None:
    """bench/under_cap.py as a user types it; what is measured depends on the machine."""
    command = [sys.executable, str(project_root / "bench" / "under_cap.py"), str(model), "--warm"]
    command += ["--limit", "70M", "--tokens", "4", "--rounds", "2", "--read", "16M"]
    command += ["--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "past the page cache" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("| 70M |")
    rounds = json.loads((tmp_path / "out.json").read_text())["rounds"]
    assert len(rounds) == 2
    for known in rounds:
        assert known["qsf"]["facts"]["rate"] > 0
        assert known["qsf"]["facts"]["stats"]["step_tokens"] == 3
        assert 0 < known["qsf"]["facts"]["peak_bytes"] <= 70 * MB
        assert model.stat().st_size / 2 < known["streamed_bytes"] < model.stat().st_size
        assert known["fraction"] * known["disk_limit"] == pytest.approx(
            known["qsf"]["facts"]["rate"]
        )
