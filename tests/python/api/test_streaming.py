"""Faults and signals while weights are streamed: typed errors, no hang, no wrong token.

The model is larger than the least budget, so nearly all of it is read for every token. Every
child has a timeout: a hang is a failure. No test depends on how fast the disk is: a child is
stopped while its file is changed.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qsf
from make.commands import COMMAND, Start
from make.recurrent_models import write_wide_loop
from make.streamed_models import (
    IO_METHODS,
    least_options,
    make_streamed_llama,
    require_method,
    why_not,
)
from qsf.file.reader import Reader
from qsf.file.sizes import size_of

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")

HANG_SECONDS = 60
N_TOKENS = 48
OPTIONS = ["--kv-type", "8bit", "--max-seq-len", "512", "-p", "Once upon a time", "--seed", "7"]
OPTIONS += ["--temperature", "1", "-n", str(N_TOKENS)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_streamed_llama(tmp_path_factory.mktemp("streaming"))


@pytest.fixture
def copy(model_path: Path, tmp_path: Path) -> Path:
    """A copy that the test may damage."""
    return Path(shutil.copy(model_path, tmp_path / "copy.qsf"))


@pytest.fixture(scope="module")
def right_text(model_path: Path) -> str:
    """What the options give with all weights in memory."""
    how: dict[str, Any] = {"ram_budget": None, "kv_type": "8bit", "max_seq_len": 512}
    with qsf.Model(model_path, **how) as model:
        return "".join(
            model.generate("Once upon a time", seed=7, temperature=1, max_tokens=N_TOKENS)
        )


@pytest.fixture(scope="module")
def least_mb(model_path: Path) -> int:
    """MB in which ``qsf-run`` streams, with room in the ring for reads to overlap."""
    words = [*COMMAND, str(model_path), *OPTIONS, "--plan", "--ram-budget", "1"]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", check=False)
    (least_mb,) = re.findall(r"--ram-budget (\d+)", done.stderr)
    return int(least_mb) + 5


class Child:
    """``qsf-run`` that is generating, from weights of which most are streamed."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self.process, self.shown = process, b""
        watchdog = threading.Timer(HANG_SECONDS, process.kill)
        watchdog.start()
        while len(self.shown) < 20 and (more := process.stdout.read(20 - len(self.shown))):
            self.shown += more
        watchdog.cancel()
        assert len(self.shown) == 20, self.end()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Keep it from going on meanwhile; it is in the midst of its text."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            assert self.process.poll() is None
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def end(self) -> tuple[int, str, str]:
        """Return code, text and what was said; raises where it hangs."""
        shown, said = self.process.communicate(timeout=HANG_SECONDS)
        text = (self.shown + shown).decode("utf-8", "replace").removesuffix("\n")
        assert b"Traceback" not in said
        return self.process.returncode, text, said.decode("utf-8", "replace")


@pytest.fixture
def stream(start: Start, least_mb: int) -> Callable[[Path, str], Child]:
    def call(path: Path, method: str) -> Child:
        require_method(path, method)
        budget = ("--ram-budget", least_mb, "--verbose")
        return Child(start(path, *OPTIONS, "--io", method, *budget))

    return call


def test_a_signal_ends_it(model_path: Path, stream: Callable[[Path, str], Child]) -> None:
    child = stream(model_path, "uring")
    child.process.send_signal(signal.SIGTERM)
    code, _, said = child.end()
    assert code == 143
    assert "error" not in said


# ---- the file changes under way ----
@pytest.mark.parametrize(("method", "keep"), [("direct", 0), ("mmap", 15_000_000), ("uring", None)])
def test_a_file_that_is_truncated_or_overwritten_is_an_error(
    copy: Path, stream: Callable[[Path, str], Child], right_text: str, method: str, keep: int | None
) -> None:
    child = stream(copy, method)
    with child.stopped():
        if keep is None:
            with copy.open("r+b") as file:
                file.seek(2 << 20)  # behind the embedding, whose bands have checksums of their own
                file.write(os.urandom(4096) * (40 << 8))
        else:
            os.truncate(copy, keep)
    code, text, said = child.end()
    assert code == 1, said
    # Layers that were verified before the change may be used; the changed bytes never are.
    assert right_text.startswith(text)
    words = ("checksum",) if keep is None else ("truncated", "ends", "checksum")
    last_line = said.splitlines()[-1]
    assert last_line.startswith("qsf-run: error: "), said
    assert any(word in last_line for word in words), said


def test_a_file_that_is_replaced_is_read_on(
    copy: Path, stream: Callable[[Path, str], Child], right_text: str
) -> None:
    other = copy.with_name("other.qsf")
    other.write_bytes(os.urandom(1 << 20))
    child = stream(copy, "buffered")
    with child.stopped():
        other.replace(copy)
    code, text, said = child.end()
    assert (code, text) == (0, right_text)
    (line,) = (line for line in said.splitlines() if line.startswith("  weights, "))
    n_resident, n_units = (int(word) for word in line.split()[1:4:2])
    assert n_resident <= n_units // 2
    for part in ("time: reading", "waiting for it", "computing", "checksums", " streamed "):
        assert part in said, said


# ---- any memory, any way of reading ----
def test_budgets_and_ways_of_reading(model_path: Path) -> None:
    """From almost nothing in memory to everything: rings of all sizes, units in any mixture."""
    tokens, counts = list(range(60)), set()
    with qsf.Model(model_path, ram_budget=None, kv_type="8bit", max_seq_len=128) as model:
        resident = model.logits(tokens)
    least = least_options(model_path)
    for i, more_mb in enumerate((0, 1, 2, 5, 13, 34, 55)):
        options = {**least, "ram_budget": least["ram_budget"] + more_mb, "threads": 1 + i % 2}
        if i < len(IO_METHODS) and why_not(model_path, IO_METHODS[i]) is None:
            options |= {"io": IO_METHODS[i], "io_depth": 1 + i}
        with qsf.Model(model_path, **options) as model:
            counts.add(model.info.plan.n_units_resident)
            for _ in range(2):
                assert np.array_equal(resident[:1], model.logits(tokens[:1]))
                assert np.array_equal(resident, model.logits(tokens))
    assert min(counts) < model.info.plan.n_units == max(counts)


# ---- what is counted ----
def test_looped_layers_are_read_at_each_visit(tmp_path: Path) -> None:
    path, n_tokens = write_wide_loop(tmp_path), 8
    with Reader(path) as reader:
        stored = {unit.id.name: unit.stored_bytes for unit in reader.units}
        visits = [reader.arch.visits(i) for i in range(reader.header.n_layers)]
        used = size_of(reader).token_bytes
    assert visits == [1, 1, 3, 3, 1, 1]
    of_layers = sum(n * stored[f"layer {i}"] for i, n in enumerate(visits))
    assert (
        of_layers < used < of_layers + stored["final unit"] + 10 * 2 * stored["layer 2, expert 0"]
    )
    logits = []
    options = least_options(path, draft="off", max_seq_len=40)
    for budget in (None, options["ram_budget"]):
        with qsf.Model(path, **{**options, "ram_budget": budget}) as model:
            logits.append(model.logits(list(range(n_tokens))))
            units, plan = model.timeline, model.info.plan
    assert np.array_equal(logits[0], logits[1])
    n_chunks = -(-n_tokens // plan.chunk_tokens)
    streamed = {
        unit.name: n * stored[unit.name]
        for unit, n in zip(units[1:-1], visits, strict=True)
        if not unit.is_resident
    }
    of_final = 0 if units[-1].is_resident else stored["final unit"]
    assert "layer 2" in streamed
    assert plan.streamed_bytes == sum(streamed.values()) + of_final
    for unit in units[1:-1]:
        assert unit.read_bytes == n_chunks * streamed.get(unit.name, 0)
    assert plan.experts_a_token == sum(visits) * 2


def test_the_timeline_adds_up(model_path: Path) -> None:
    with Reader(model_path) as reader:
        stored_bytes = [unit.stored_bytes for unit in reader.units]
    with qsf.Model(model_path, **least_options(model_path, draft="off")) as model:
        list(model.generate([3, 1, 4, 1, 5, 9, 2, 6], max_tokens=9, temperature=0))
        stats, units, plan = model.session_stats, model.timeline, model.info.plan
    assert [u.name for u in units] == ["embedding", *(f"layer {i}" for i in range(6)), "final"]
    assert (stats.prompt_tokens, stats.step_tokens) == (8, 8)
    n_chunks = -(-8 // plan.chunk_tokens)
    streamed = [
        (unit, n_bytes)
        for unit, n_bytes in zip(units, stored_bytes, strict=True)
        if not unit.is_resident and unit.name != "embedding"  # of which only rows are read
    ]
    assert {unit.n_passes for unit, _ in streamed if unit.name != "final"} == {8 + n_chunks}
    for unit, n_bytes in streamed:
        assert unit.read_bytes == unit.n_passes * n_bytes > 0, unit
        assert min(unit.read_ns, unit.compute_ns) > 0
    for unit in units:
        assert not unit.is_resident or (unit.read_bytes, unit.read_ns, unit.wait_ns) == (0, 0, 0)
    assert sum(not unit.is_resident for unit in units) == plan.n_units - plan.n_units_resident
    assert plan.streamed_bytes == sum(n_bytes for _, n_bytes in streamed)
    # Times are parts of others: a sum that is larger has counted something twice.
    total_ns = stats.prompt_ns + stats.step_ns
    assert 0 < sum(unit.wait_ns + unit.compute_ns for unit in units) <= total_ns
    assert sum(unit.wait_ns for unit in units) <= stats.wait_ns <= total_ns
    # Reading ahead began when the model was opened.
    assert stats.read_bytes >= sum(unit.read_bytes for unit in units) > 0
    assert min(stats.read_ns, stats.checksum_ns) > 0
    assert stats.decompress_ns == 0
