"""Measure what README.md's table shows and print its rows.

Each run is a process of its own, seen from outside: peak memory is what the kernel reports for it.
The 1.1B model has random weights of TinyLlama's shape, made here; nothing is downloaded. Its
weights are in the page cache when streamed runs begin, so those rows say what the engine costs,
not the disk.

Usage: .venv/bin/python bench/readme_table.py [--runs 3] [--folder build/bench]
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
PROMPT = "Once upon a time there was a little girl who lived near the sea. " * 12


@dataclass(frozen=True, slots=True)
class Case:
    """One row: a file, how it is run, and what to call it."""

    label: str
    path: Path
    budget_mb: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Run:
    """What one process reported of itself, and the kernel of it."""

    prompt_rate: float
    step_rate: float
    peak_bytes: int


def convert(source: Path, out: Path, quant_type: str) -> None:
    """Convert unless the file is there already."""
    if out.exists():
        return
    command = [str(BIN / "qsf-convert"), str(source), str(out), "--quant-type", quant_type]
    subprocess.run([*command, "--quiet"], check=True)


def prepare(folder: Path) -> list[Case]:
    """Make the files and list the rows."""
    folder.mkdir(parents=True, exist_ok=True)
    cases = []
    tiny = ROOT / "examples" / "tiny-llama"
    for quant_type in ("4bit", "8bit", "f16"):
        path = folder / f"tiny-llama-{quant_type}.qsf"
        convert(tiny, path, quant_type)
        cases.append(Case(f"tiny-llama 2.8M, {quant_type}", path, 200, 256))
    large = folder / "1.1b"
    if not (large / "model.safetensors.index.json").exists():
        script = str(ROOT / "bench" / "make_checkpoint.py")
        command = [sys.executable, script, str(large), "--shape", "1.1b"]
        subprocess.run([*command, "--tokenizer-from", str(tiny)], check=True)
    path = folder / "1.1b-4bit.qsf"
    convert(large, path, "4bit")
    for budget_mb in (800, 400, 200, 120):
        cases.append(Case("1.1B shape, 4bit", path, budget_mb, 32))
    return cases


def run(case: Case) -> Run:
    """Run one process to its end."""
    command = [str(BIN / "qsf-run"), str(case.path), "--prompt", PROMPT, "--temperature", "0"]
    command += ["--max-tokens", str(case.max_tokens), "--ram-budget", str(case.budget_mb)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    report = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    rates = re.search(r"prompt .*? ([\d.]+) tok/s \| generated .*? ([\d.]+) tok/s", report)
    if status != 0 or rates is None:
        raise SystemExit(f"{' '.join(command[:2])} failed:\n{report}")
    return Run(float(rates[1]), float(rates[2]), usage.ru_maxrss * 1024)


def spread(runs: list[Run], value: Callable[[Run], float]) -> str:
    """Median, with least and most behind it."""
    values = sorted(value(r) for r in runs)
    digits = 0 if values[0] >= 100 else 1
    middle = f"{statistics.median(values):,.{digits}f}"
    return f"{middle} ({values[0]:,.{digits}f}-{values[-1]:,.{digits}f})"


def cpu_name() -> str:
    """Return the processor's name as Linux tells it."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return found[1] if found else platform.processor()


def main() -> None:
    """Measure every case and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")
    args = parser.parse_args()
    cases = prepare(args.folder)
    print(f"{cpu_name()}, {os.cpu_count()} cores, median (least-most) of {args.runs} runs\n")
    print("| model | file | `--ram-budget` | peak memory | prompt tok/s | generated tok/s |")
    print("|---|---|---|---|---|---|")
    for case in cases:
        run(case)  # warm-up
        runs = [run(case) for _ in range(args.runs)]
        file_mb = case.path.stat().st_size / 2**20
        peak_mb = max(r.peak_bytes for r in runs) / 2**20
        prompt = spread(runs, lambda r: r.prompt_rate)
        step = spread(runs, lambda r: r.step_rate)
        print(
            f"| {case.label} | {file_mb:,.1f} MB | {case.budget_mb} MB | {peak_mb:.0f} MB "
            f"| {prompt} | {step} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
