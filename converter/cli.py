"""``qsf-convert``: a HuggingFace model directory becomes one .qsf file.

Exit codes: 0 done, 1 the model cannot be converted or the system refused, 2 wrong usage,
130 interrupted, 143 terminated. Every error is one line on stderr.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from qsf import command, typer_command
from qsf.converter.compression import AUTO, COMPRESSIONS, DEFAULT_COMPRESSION
from qsf.converter.convert import convert
from qsf.converter.output import check_output
from qsf.converter.plan import DEFAULT_QUANT_TYPE, QUANT_TYPES
from qsf.converter.report import Report
from qsf.converter.report_html import write_page
from qsf.converter.report_text import summary_lines
from qsf.errors import QsfArgumentError

PROGRAM = "qsf-convert"

_MB = 2**20  # as qsf-run and system monitors count
_BAR_WIDTH = 24
_REDRAW_S = 0.1

# Typer joins the lines of a paragraph; a line with only \b keeps them apart.
_EPILOG = """\b
Examples:
  qsf-convert examples/tiny-llama tiny.qsf
  qsf-convert examples/tiny-llama tiny.qsf --quant-type 8bit --force
  qsf-convert examples/tiny-llama tiny.qsf --quant-type 2bit --embed-type 4bit
  qsf-convert examples/tiny-llama tiny.qsf --compress auto --disk-speed 200
  qsf-convert examples/tiny-llama tiny.qsf --report tiny.html

\b
Bits a weight: 8bit 8.25, 4bit 4.5, 4bit-sym 4.25, 3bit 3.5, 2bit 2.5,
2bit-sym 2.25, ternary 2.25, ternary-dense 1.875. The ternary types are for
models trained so. Other models lose much below 4 bits.

\b
Exit codes: 0 done, 1 failed, 2 wrong options, 130 interrupted, 143 terminated.
"""

app = typer_command.create_app()


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(command.version_line(PROGRAM))
        raise typer.Exit


class ProgressLine:
    """Shows how far a conversion is: a bar on a terminal, else a line at every 10 %."""

    def __init__(self, *, enabled: bool) -> None:
        """Start the clock; show nothing at all unless ``enabled``."""
        self._enabled = enabled
        self._is_terminal = sys.stderr.isatty()
        self._started = time.monotonic()
        self._drawn = 0.0
        self._shown_tenths = 0
        self._is_open = False

    def update(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` source bytes are converted."""
        if not self._enabled:
            return
        now = time.monotonic()
        elapsed_s = max(now - self._started, 1e-3)
        fraction = done / total if total else 1.0
        left_s = elapsed_s * (1 - fraction) / fraction if fraction else 0.0
        numbers = (
            f"{fraction:4.0%}  {done / _MB:.0f} of {total / _MB:.0f} MB, "
            f"{done / elapsed_s / _MB:.0f} MB/s, {_duration(left_s)} left"
        )
        if self._is_terminal:
            if now - self._drawn >= _REDRAW_S or done == total:
                bar = "#" * int(fraction * _BAR_WIDTH)
                print(f"\r[{bar:<{_BAR_WIDTH}}] {numbers}\x1b[K", end="", file=sys.stderr)
                sys.stderr.flush()
                self._drawn = now
                self._is_open = True
        elif int(fraction * 10) > self._shown_tenths:
            self._shown_tenths = int(fraction * 10)
            print(numbers.strip(), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the terminal's cursor at the start of a fresh line."""
        if self._is_open:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._is_open = False


@app.command(name=PROGRAM, epilog=_EPILOG)
def convert_command(
    model_dir: Annotated[
        Path,
        typer.Argument(help="Directory with config.json and safetensors weights.", metavar="MODEL"),
    ],
    out: Annotated[Path, typer.Argument(help="File to write.", metavar="OUT")],
    quant_type: Annotated[
        str,
        typer.Option(help=f"Type of the layers' matrices: {', '.join(QUANT_TYPES)}."),
    ] = DEFAULT_QUANT_TYPE,
    embed_type: Annotated[
        str | None,
        typer.Option(
            help="Type of the embeddings and the output head: one of the same.",
            show_default="8bit, or f16 with --quant-type f16",
        ),
    ] = None,
    compress: Annotated[
        str,
        typer.Option(
            help=f"Compression of the layers: {', '.join(COMPRESSIONS)}; auto compresses those "
            "that the disk and the processor deliver at least 3 % faster so."
        ),
    ] = DEFAULT_COMPRESSION,
    disk_speed: Annotated[
        float | None,
        typer.Option(
            help="For --compress auto: MB/s of the disk that the model will be read from.",
            min=0.001,
            show_default="measured on OUT's disk",
        ),
    ] = None,
    report_out: Annotated[
        Path | None,
        typer.Option(
            "--report", help="Write the quality report as a web page too.", metavar="FILE.html"
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace OUT, and the report, if they exist.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option(help="Threads that quantise.", min=1, show_default="one per core")
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")
    ] = False,
    calibration: Annotated[
        Path | None, typer.Option(help="Calibration text (not available yet).")
    ] = None,
    target_size: Annotated[
        str | None, typer.Option(help="Size of OUT in MB (not available yet).")
    ] = None,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Convert a HuggingFace model to one .qsf file that holds all that is needed to run it."""
    if disk_speed is not None and compress != AUTO:
        raise QsfArgumentError("--disk-speed is only for --compress auto")
    later = {
        "--calibration": calibration,
        "--target-size": target_size,
    }
    for option, value in later.items():
        if value is not None:
            raise QsfArgumentError(f"{option} is not available yet")
    if report_out is not None:
        _check_report(report_out, out, model_dir, is_forced=force)
    line = ProgressLine(enabled=not quiet)
    try:
        report = convert(
            model_dir,
            out,
            quant_type=quant_type,
            embed_type=embed_type,
            compress=compress,
            disk_bytes_per_s=None if disk_speed is None else disk_speed * 1e6,
            overwrite=force,
            n_threads=threads,
            progress=line.update,
        )
    finally:
        line.close()
    for warning in report.warnings:
        print(f"{PROGRAM}: warning: {warning}", file=sys.stderr)
    if report_out is not None:
        write_page(out, report_out, overwrite=force)
    if not quiet:
        _print_summary(report, out, report_out)


def _check_report(report_out: Path, out: Path, model_dir: Path, *, is_forced: bool) -> None:
    """Refuse before the long work what would fail, or destroy something, after it."""
    check_output(report_out, overwrite=is_forced)
    if report_out.resolve() == out.resolve():
        raise QsfArgumentError(f"the report and the model are the same file: {out}")
    if report_out.exists() and report_out.resolve().parent == model_dir.resolve():
        raise QsfArgumentError(f"{report_out} is a file of the model itself")


def main() -> NoReturn:
    """Run ``qsf-convert`` on the command line's arguments and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run ``qsf-convert`` and return its exit code."""
    return typer_command.run(app, arguments, program=PROGRAM, when_cut_off="nothing was written")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _peak_bytes() -> int | None:
    """Peak resident memory of this process, where the system tells."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.split("VmHWM:", 1)[1].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return None


def _print_summary(report: Report, out: Path, report_out: Path | None) -> None:
    peak_bytes = _peak_bytes()
    memory = "" if peak_bytes is None else f", peak memory {peak_bytes / _MB:.0f} MB"
    for line in summary_lines(report, str(out)):
        print(line)
    if report_out is not None:
        print(f"report: {report_out}")
    print(f"done in {_duration(report.elapsed_s)}{memory}")


if __name__ == "__main__":
    main()
