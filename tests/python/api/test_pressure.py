# SPDX-License-Identifier: Apache-2.0
"""A neighbour in the same control group takes the memory: the engine gives way and comes back."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from make.streamed_models import make_large_llama
from qsf_converter import convert

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's"),
]

MIB = 1 << 20
LIMIT_BYTES = 420 * MIB
WATCHDOG_SECONDS = 300

# Generates the same tokens again and again, and says after each round what is in memory.
RUNNER = """
import json, sys
from qsf.native._qsf import ffi, lib

def check(status):
    assert status == 0, ffi.string(lib.qsf_error_detail())

options = ffi.new("qsf_options *")
model, session = ffi.new("qsf_model **"), ffi.new("qsf_session **")
lib.qsf_options_default(options)
options.ctx_tokens = 64
check(lib.qsf_model_open(sys.argv[1].encode(), options, model))
check(lib.qsf_session_create(model[0], session))
facts, stats = ffi.new("qsf_model_facts *"), ffi.new("qsf_stats *")
lib.qsf_model_info(model[0], facts)
logits = ffi.new("float[]", facts.n_vocab)
events = ffi.new("qsf_memory_event[]", 16)
while True:
    check(lib.qsf_session_rewind(session[0], 0))
    tokens = [1]
    for _ in range(24):
        check(lib.qsf_session_step(session[0], tokens[-1]))
        check(lib.qsf_session_logits(session[0], logits, facts.n_vocab))
        tokens.append(max(range(facts.n_vocab), key=logits.__getitem__))
    lib.qsf_session_stats(session[0], stats)
    lib.qsf_model_info(model[0], facts)
    n_events = lib.qsf_model_memory_events(model[0], events, 16)
    print(json.dumps({
        "tokens": tokens, "n_resident": facts.plan.n_units_resident, "n_units": facts.plan.n_units,
        "given_back_bytes": stats.given_back_bytes, "taken_again_bytes": stats.taken_again_bytes,
        "n_given_back": stats.n_given_back, "n_taken_again": stats.n_taken_again,
        "events": [[events[i].seconds, events[i].bytes, events[i].available_bytes,
                    events[i].is_given_back, events[i].n_units_resident] for i in range(n_events)],
    }), flush=True)
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


class Group:
    """A memory control group of version 1 or 2 with a limit."""

    def __init__(self, limit_bytes: int) -> None:
        v1 = Path("/sys/fs/cgroup/memory")
        self.is_v1 = (v1 / "memory.limit_in_bytes").exists()
        self.path = (v1 if self.is_v1 else Path("/sys/fs/cgroup")) / f"qsf-test-{os.getpid()}"
        limit_name = "memory.limit_in_bytes" if self.is_v1 else "memory.max"
        try:
            self.path.mkdir()
        except OSError as error:
            pytest.skip(f"no control group can be made here: {error}")
        try:
            (self.path / limit_name).write_text(str(limit_bytes))
        except OSError as error:
            self.path.rmdir()
            pytest.skip(f"no memory limit can be set here: {error}")

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a process that is in the group from its first instruction."""
        script = 'echo $$ > "$0" && exec "$@"'
        return subprocess.Popen(
            ["sh", "-c", script, str(self.path / "cgroup.procs"), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def used_bytes(self) -> int:
        """Return the bytes that cannot be dropped as file pages can."""
        key = "total_rss " if self.is_v1 else "anon "
        lines = (self.path / "memory.stat").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key))

    def remove(self) -> None:
        """Remove the group, whose last processes may still be on their way out."""
        for _ in range(100):
            with contextlib.suppress(OSError):
                self.path.rmdir()
                return
            time.sleep(0.1)


@pytest.fixture
def group() -> Iterator[Group]:
    """A group, removed at the end."""
    made = Group(LIMIT_BYTES)
    yield made
    made.remove()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 100 MB of weights in units of 13 MB."""
    folder = tmp_path_factory.mktemp("pressure")
    checkpoint = make_large_llama(
        folder / "hf", n_layers=8, dim=1024, n_heads=16, n_kv_heads=16, ffn_dim=2816
    )
    convert(checkpoint, folder / "m.qsf", quant_type="8bit")
    return folder / "m.qsf"


def next_round(runner: subprocess.Popen[str]) -> dict[str, Any]:
    """Return what the runner says next; it must be alive."""
    assert runner.stdout is not None
    line = runner.stdout.readline()
    assert line, f"the runner ended with {runner.wait()}"
    said: dict[str, Any] = json.loads(line)
    return said


def is_filling(hog: subprocess.Popen[str]) -> bool:
    """Has the hog not said yet that it has all it wanted?"""
    assert hog.stdout is not None
    return not select.select([hog.stdout], [], [], 0)[0]


@contextlib.contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Kill the process at the end."""
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_gives_way_and_comes_back(model_path: Path, group: Group) -> None:
    deadline = time.monotonic() + WATCHDOG_SECONDS
    with ended(group.start(sys.executable, "-c", RUNNER, str(model_path))) as runner:
        first = next_round(runner)
        assert first["n_resident"] == first["n_units"]
        for _ in range(20):
            assert next_round(runner)["given_back_bytes"] == 0, "nobody wanted anything"

        # All that is free and 60 MiB more: without giving way, one of the two is killed.
        n_steps = (LIMIT_BYTES - group.used_bytes() + 60 * MIB) // (4 * MIB)
        with ended(group.start(sys.executable, "-c", HOG, str(n_steps))) as hog:
            while hog.poll() is None and is_filling(hog):
                assert time.monotonic() < deadline
                said = next_round(runner)
                assert said["tokens"] == first["tokens"]
            assert hog.poll() is None, "the neighbour was killed"
            said = next_round(runner)
            assert said["given_back_bytes"] > 60 * MIB
            assert said["n_resident"] < said["n_units"]

        while said["n_resident"] < said["n_units"]:
            assert time.monotonic() < deadline
            said = next_round(runner)
            assert said["tokens"] == first["tokens"]
        assert said["n_taken_again"] > 0
        print(said["events"])
