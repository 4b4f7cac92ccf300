# SPDX-License-Identifier: Apache-2.0
"""The budget where it is real: ``qsf-run`` in a memory control group with the budget as its limit.

A process that takes more than it says is killed here, and what it reads counts as well: the model
is larger than the budget.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from make.streamed_models import make_large_llama, write_random_llama, write_random_mixture
from qsf_bench import processes
from qsf_bench.memory_group import CapError, memory_group
from qsf_bench.processes import Ended, run_command
from qsf_converter import convert

pytestmark = pytest.mark.slow

MB = 1 << 20
PROMPT = "Once upon a time there was a little girl"
N_TOKENS = 12

# Prints what the process has had at most, after all that qsf-run did.
RUN = """
import atexit
from qsf.shell.entry import run

def say_peak():
    with open("/proc/self/status") as file:
        print("\\npeak", next(line.split()[1] for line in file if line.startswith("VmHWM")))

atexit.register(say_peak)
run()
"""

Run = Callable[..., Ended]


@pytest.fixture(scope="module", autouse=True)
def _groups_can_be_made() -> None:
    try:
        with memory_group(32 * MB):
            pass
    except CapError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Path:
    """About 130 MB: more than twice of what the smallest budget here is."""
    path = write_random_llama(tmp_path_factory.mktemp("cgroup") / "m.qsf", tiny_llama_dir)
    assert path.stat().st_size > 120 * MB
    return path


def runner(model: Path) -> Run:
    """Run the model with a budget in MB, in a group with that limit or another one."""

    def call(budget_mb: int, *options: str, limit_mb: int = 0) -> Ended:
        command = [sys.executable, "-c", RUN, str(model), "--ram-budget", str(budget_mb)]
        command += ["--prompt", PROMPT, "--temperature", "0", "--max-tokens", str(N_TOKENS)]
        return run_command([*command, *options], limit_mb=limit_mb or budget_mb)

    return call


@pytest.fixture(scope="module")
def run(model: Path) -> Run:
    return runner(model)


def find_least_mb(run: Run) -> int:
    """What the error says to set where a budget is too small, and one more.

    A process takes a megabyte more or less, by how much of its libraries the system holds. In a
    group that is too small for it, it is given less of them, so the group is a larger one.
    """
    done = run(20, limit_mb=200)
    check_refused(done)
    found = re.search(r"set --ram-budget (\d+)", done.errors)
    assert found is not None, done.errors
    return int(found[1]) + 1


@pytest.fixture(scope="module")
def least_mb(run: Run) -> int:
    return find_least_mb(run)


def check_refused(done: Ended) -> None:
    """It said that the model does not fit, and did nothing."""
    assert done.exit_code == 1, done.errors
    assert "the model does not fit in" in done.errors
    assert done.output.startswith("\npeak ")
    assert done.n_oom_kills == 0


def check_inside(done: Ended, budget_mb: int) -> str:
    """It ran to the end below the limit; returns the text."""
    assert done.exit_code == 0, done.errors
    text, _, peak_kb = done.output.rpartition("\npeak ")
    assert f"generated {N_TOKENS} tokens" in done.errors
    assert done.n_oom_kills == 0
    assert 0 < (done.peak_bytes or 0) <= budget_mb * MB
    assert 0 < int(peak_kb) * 1024 <= budget_mb * MB
    return str(text)


def resident_units(done: Ended) -> int:
    """The units of weights in the printed memory map; a map without them has none."""
    found = re.search(r"weights, (\d+) of \d+ units", done.errors)
    return int(found[1]) if found else 0


def test_a_limit_ends_a_process_that_takes_more() -> None:
    """Otherwise the tests below prove nothing."""
    hold = "held = b'x' * (200 << 20); print(len(held))"
    command = [sys.executable, "-c", hold]
    killed = run_command(command, limit_mb=100)
    assert killed.exit_code == -9
    assert killed.n_oom_kills == 1
    assert killed.output == ""
    done = run_command(command, limit_mb=300)
    assert (done.exit_code, done.output.strip()) == (0, str(200 << 20))
    assert (done.peak_bytes or 0) > 200 * MB
    assert not list(Path("/sys/fs/cgroup").glob(f"**/qsf-cap-{os.getpid()}-*"))


@pytest.mark.parametrize("method", ["buffered", "mmap"])
def test_reading_through_the_page_cache_keeps_the_limit(
    model: Path, run: Run, least_mb: int, method: str
) -> None:
    """Also what the kernel reads ahead is charged, and locked until it has come."""
    budget_mb = least_mb + 10
    prompt = ["--prompt", "Once upon a time there was a little girl. " * 20]
    for _ in range(3):
        processes.forget_file(model)
        done = run(budget_mb + 20, "--io", method, *prompt, limit_mb=budget_mb)
        check_inside(done, budget_mb)


def test_a_context_longer_than_memory_keeps_the_limit(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group counts what is written to the file as well, until the disk has it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    asked = ["--prompt", "Once upon a time there was a little girl. " * 80, "--raw"]
    asked += ["--max-seq-len", "1024", "--draft", "off", "--verbose"]
    whole = check_inside(run(300, *asked), 300)
    least = {}
    for policy in ("none", "disk:64"):
        done = run(20, *asked, "--kv-policy", policy, limit_mb=200)
        check_refused(done)
        found = re.search(r"set --ram-budget (\d+)", done.errors)
        assert found is not None
        least[policy] = int(found[1]) + 1
    assert least["disk:64"] < least["none"] - 10
    done = run(least["disk:64"], *asked, "--kv-policy", "disk:64")
    if "lies in memory" in done.errors:
        pytest.skip(done.errors)
    assert check_inside(done, least["disk:64"]) == whole
    assert "MB written to a file" in done.errors


def test_the_text_does_not_depend_on_the_limit(run: Run, least_mb: int) -> None:
    # The KV cache is said, because the least budget of all might leave less for it.
    texts = {}
    for budget_mb in (least_mb, least_mb + 20, least_mb + 60, least_mb + 200):
        done = run(budget_mb, "--kv-type", "4bit", "--verbose")
        texts[resident_units(done)] = check_inside(done, budget_mb)
        assert texts[resident_units(done)].strip()
    assert len(texts) >= 3, "the limits gave the same plan"
    assert min(texts) < 12, "nothing was streamed"
    assert len(set(texts.values())) == 1


def test_experts_larger_than_the_limit(tmp_path: Path, tiny_llama_dir: Path) -> None:
    path = write_random_mixture(tmp_path / "m.qsf", tiny_llama_dir)
    run = runner(path)
    least_mb = find_least_mb(run)
    assert path.stat().st_size > 2 * (least_mb + 40) * MB
    texts = {}
    for budget_mb in (least_mb, least_mb + 15, least_mb + 40):
        done = run(budget_mb, "--kv-type", "4bit", "--verbose")
        text = check_inside(done, budget_mb)
        found = re.search(r"(\d+) of 256 experts", done.errors)
        assert found is not None, done.errors
        texts[int(found[1])] = text
    assert len(texts) == 3, "two limits gave the same plan"
    assert len(set(texts.values())) == 1


# ---- a neighbour takes the memory ----
LIMIT_MB = 420

# Generates the same tokens again and again, and says after each round what is in memory.
RUNNER = """
import json, sys, qsf
with qsf.Model(sys.argv[1], ram_budget="auto", max_seq_len=64) as model:
    while True:
        list(model.generate([1], max_tokens=24, temperature=0, stop=()))
        n_resident = sum(unit.is_resident for unit in model.timeline)
        stats = model.session_stats
        said = (model.stats.token_ids, len(model.timeline) - n_resident, stats.given_back_bytes)
        print(json.dumps([*said, stats.n_taken_again]), flush=True)
"""

# Takes memory step by step and keeps it until its input ends.
HOG = """
import sys, time
taken = []
for _ in range(int(sys.argv[1])):
    taken.append(b"x" * (4 << 20))
    time.sleep(0.1)
print("full", flush=True)
sys.stdin.read()
"""


def test_gives_way_and_comes_back(tmp_path: Path) -> None:
    """About 100 MB of weights in units of 13 MB."""
    sizes = {"n_layers": 8, "dim": 1024, "n_heads": 16, "n_kv_heads": 16, "ffn_dim": 2816}
    path = tmp_path / "m.qsf"
    convert(make_large_llama(tmp_path / "hf", **sizes), path, quant_type="8bit")
    deadline = time.monotonic() + 300
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(memory_group(LIMIT_MB * MB))

        def begin(*words: str) -> subprocess.Popen[str]:
            command = group.enter_and_run([sys.executable, "-c", *words])
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            process = subprocess.Popen(command, text=True, **pipes)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        runner = begin(RUNNER, str(path))

        def next_round() -> Any:
            assert runner.stdout is not None
            assert time.monotonic() < deadline
            line = runner.stdout.readline()
            assert line, f"the runner ended with {runner.wait()}"
            return json.loads(line)

        tokens, *rest = next_round()
        assert all(next_round() == [tokens, 0, 0, 0] for _ in range(20)), "nobody wanted anything"
        assert rest == [0, 0, 0]
        # All that is free and 60 MB more: without giving way, one of the two is killed.
        lines = (group.folder / "memory.stat").read_text().splitlines()
        used = dict(line.split() for line in lines)  # anon: what cannot be dropped as file pages
        n_free = LIMIT_MB * MB - int(used.get("total_rss", used.get("anon", 0)))
        hog = begin(HOG, str((n_free + 60 * MB) // (4 * MB)))
        assert hog.stdout is not None
        while hog.poll() is None and not select.select([hog.stdout], [], [], 0)[0]:
            assert next_round()[0] == tokens
        assert hog.poll() is None, "the neighbour was killed"
        _, n_away, given_back_bytes, _ = next_round()
        assert n_away > 0
        assert given_back_bytes > 60 * MB
        hog.kill()
        while n_away:
            have, n_away, _, n_taken_again = next_round()
            assert have == tokens
        assert n_taken_again > 0
