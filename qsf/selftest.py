"""``python -m qsf.selftest``: does QSF compute the same bits here as elsewhere?

Opens a small model that comes with the package, on each instruction set of this machine, by each
way of reading and with three memory budgets, and compares every bit of the logits and the text
with recorded ones. Prints one block of text, which belongs into a bug report. The exit code is 1
if anything differs.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import platform
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

_MODEL = Path(__file__).with_suffix(".qsf")
_PROMPT = "a word and another"
_LOGITS_CRC = 3551613340  # of the prompt's f32 logits [12, 512], on every instruction set
_TEXT = "9��א|b�DDart|가:�dlestart|>art|L9`a "  # the continuation of "a word"
_TRIAL_SECONDS = 120


def _try(budget_mb: int | None, io: str) -> str:
    """Open the model, compute and compare, in a child process whose QSF_ISA is set.

    Returns as words: instruction set, whether logits and text are equal, bytes of the budget, the
    process's peak memory, and the emulator or "-".
    """
    import numpy as np  # imported before the plan, which counts the process's present memory

    import qsf
    from qsf.native.binding import describe_machine
    from qsf.system import process

    if budget_mb == 0:
        # What Python takes grows by pages until the model is open.
        budget_mb = 1 - (-qsf.Model.plan(_MODEL).min_budget_bytes // (1 << 20))
    budget = (budget_mb or 0) << 20
    if 0 < budget < (held := describe_machine().resident_bytes):
        raise qsf.QsfUnsupportedError(
            f"not measured: {held / 1e6:.1f} MB of {budget / 1e6:.1f} MB before the model"
        )
    with qsf.Model(_MODEL, ram_budget=budget_mb, io=io, threads=2) as model:
        logits = np.ascontiguousarray(model.logits(model.tokenize(_PROMPT)))
        text = "".join(model.generate("a word", max_tokens=24, temperature=0))
        has_logits = zlib.crc32(logits.tobytes()) == _LOGITS_CRC
        peak_bytes = describe_machine().peak_bytes
        bits = f"{model.info.isa_name} {has_logits} {text == _TEXT}"
        return f"{bits} {budget} {peak_bytes} {process.emulator_name()}"


def _verdict(isa: str | None, words: str) -> str:
    used_isa, has_logits, has_text, budget_bytes, peak_bytes, emulator = words.split()
    if isa is not None and used_isa != isa:
        return f"FAILED: {used_isa} was used"
    if has_logits != "True":
        return "FAILED: the bits of the logits differ"
    if has_text != "True":
        return "FAILED: the text differs"
    if 0 < int(budget_bytes) < int(peak_bytes):
        taken = f"{int(peak_bytes) / 1e6:.1f} MB taken of {int(budget_bytes) / 1e6:.1f} MB"
        if emulator != "-":
            return f"bits ok; memory not measured: {taken}, of which a part is {emulator}'s own"
        return f"FAILED: {taken}"
    return "ok"


def _judge(isa: str | None, budget_mb: int | None, io: str) -> str:
    """Return the verdict on a trial in a child process."""
    environment = {**os.environ, **({"QSF_ISA": isa} if isa is not None else {})}
    command = [sys.executable, "-m", "qsf.selftest", "--trial", str(budget_mb), io]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, timeout=_TRIAL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"FAILED: no answer after {_TRIAL_SECONDS} s"
    if done.returncode == 0:
        return _verdict(isa, done.stdout.decode())
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    reason = lines[-1] if lines else f"the process ended with {done.returncode}"
    return f"{'refused' if 'QsfUnsupportedError' in reason else 'FAILED'}: {reason}"


def _rows() -> Iterator[tuple[str, str]]:
    import qsf
    from qsf.native import binding, roofline
    from qsf.system import process

    machine = binding.describe_machine()
    libc = " ".join(platform.libc_ver()) or "another C library"
    yield "qsf", f"{qsf.__version__}, Python {platform.python_version()}"
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}, {libc}"
    yield "processor", process.processor_name()
    yield "cores", f"{machine.n_cores}; {machine.isa_name} is used"
    yield (
        "memory",
        f"{machine.memory_bytes / 1e9:.1f} GB, {machine.available_bytes / 1e9:.1f} GB available",
    )
    for isa in machine.isa_available:
        yield f"bits, {isa}", _judge(isa, None, "auto")
    for io in ("buffered", "direct", "uring", "mmap"):
        yield f"reading, {io}", _judge(None, 0, io)
    for name, budget_mb in (("least", 0), ("64 MB", 64), ("none", None)):
        yield f"budget, {name}", _judge(None, budget_mb, "auto")
    rates = roofline.measure_memory([1, machine.n_cores], lambda _: None)
    shown = ", ".join(f"{rate:.1f} with {n} threads" for n, rate in rates.items())
    yield "speed, memory", f"GB/s: {shown}"


def main() -> int:
    """Run all trials, or one trial as a child of this module; return the exit code."""
    if sys.argv[1:2] == ["--trial"]:
        budget, io = sys.argv[2:]
        print(_try(None if budget == "None" else int(budget), io))
        return 0
    if len(sys.argv) > 1:
        print(f"qsf.selftest takes no arguments, but {sys.argv[1]}", file=sys.stderr)
        return 2
    n_failed = 0
    for name, value in _rows():
        print(f"{name + ':':18} {value}", flush=True)
        n_failed += value.startswith("FAILED")
    print(f"{'result:':18} {f'{n_failed} FAILED' if n_failed else 'all passed'}")
    return n_failed != 0


if __name__ == "__main__":
    sys.exit(main())
