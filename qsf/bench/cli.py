"""``python -m qsf.bench``: how fast QSF is here, beside the machine's limits and llama.cpp.

The report goes to standard output, progress and errors to standard error.

Exit codes: 0 done, 1 failed, 2 wrong options, 3 slower than --compare, 130 interrupted, 143
terminated.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from qsf import _native, command, typer_command
from qsf.bench import campaign, compare, page, page_changes, results, shapes, table, trace
from qsf.bench.request import (
    DEFAULT_ROUNDS,
    DEFAULT_SHAPE,
    DEFAULT_TYPES,
    NO_PEER,
    PEER,
    Request,
    make_request,
)
from qsf.converter.output import check_output
from qsf.converter.plan import QUANT_TYPES
from qsf.errors import QsfArgumentError
from qsf.io_known import METHODS
from qsf.progress import duration_text

PROGRAM = "python -m qsf.bench"
EXIT_SLOWER = 3

_REDRAW_S = 0.1

# Typer joins the lines of a paragraph; a line with only \b keeps them apart.
_EPILOG = f"""\\b
Examples:
  python -m qsf.bench
  python -m qsf.bench model.qsf --threads 2 --depth 0,2048
  python -m qsf.bench --shape llama2-7b --quant 4bit --cgroup 300M
  python -m qsf.bench --quant 4bit --ram-budget none,400,200 --html report.html
  python -m qsf.bench --json new.json --compare old.json
  python -m qsf.bench model.qsf --peer-model model-Q4_K_M.gguf --text test.txt
  python -m qsf.bench model.qsf --peer none --trace trace.json

\\b
Shapes: {", ".join(shapes.SHAPES)}
Types: {", ".join(QUANT_TYPES)}

Without a MODEL, files of random weights are made and kept in ~/.cache/qsf/bench. llama.cpp comes
with pip install 'qsf[bench]'; docs/benchmarks.md says how to build it for this processor, and what
is measured.

\\b
Exit codes: 0 done, 1 failed, 2 wrong options, {EXIT_SLOWER} slower than --compare,
130 interrupted, 143 terminated.
"""

app = typer_command.create_app()


def main() -> NoReturn:
    """Run ``python -m qsf.bench`` on the command line's arguments and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run ``python -m qsf.bench`` and return its exit code."""
    _exit_code[0] = 0
    code = typer_command.run(app, arguments, program=PROGRAM, when_cut_off="nothing was written")
    return code or _exit_code[0]


_exit_code = [0]  # of a run without an error: typer has no way to hand it through


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(command.version_line(PROGRAM))
        raise typer.Exit


@app.command(name=PROGRAM, epilog=_EPILOG)
def bench_command(
    models: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Files to measure.", show_default="random weights", metavar="[MODEL.qsf]..."
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Shape of random weights, or several: see below.", show_default=DEFAULT_SHAPE
        ),
    ] = None,
    quant: Annotated[
        str | None,
        typer.Option(help="Their types: see below.", show_default=",".join(DEFAULT_TYPES)),
    ] = None,
    threads: Annotated[
        str | None,
        typer.Option(
            help="Numbers of threads.", show_default="1 and all cores, in a cgroup all cores"
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="Prompts of so many tokens; 0: none.", show_default="512, in a cgroup 32"
        ),
    ] = None,
    gen: Annotated[
        str | None,
        typer.Option(
            help="So many tokens one at a time; 0: none.", show_default="128, in a cgroup 16"
        ),
    ] = None,
    depth: Annotated[
        str, typer.Option(help="Each test after so many tokens that are there already.")
    ] = "0",
    ram_budget: Annotated[
        str | None,
        typer.Option(
            help="Budgets of QSF in MB, or none. llama.cpp has no such thing and runs only "
            "beside none, or in a cgroup.",
            show_default="none, in a cgroup its limit",
        ),
    ] = None,
    cgroup: Annotated[
        str | None,
        typer.Option(
            help="Run everything in memory control groups of these limits, as 300M,1G. Linux, as "
            "root or in a delegated group.",
            show_default=False,
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option(help="How often everything is measured, in turns.", min=1, max=100)
    ] = DEFAULT_ROUNDS,
    peer: Annotated[
        str | None,
        typer.Option(help=f"{PEER}, or {NO_PEER}.", show_default=f"{PEER} where it is installed"),
    ] = None,
    peer_python: Annotated[
        Path | None,
        typer.Option(
            help="The Python that has llama-cpp-python.", show_default="the one that runs this"
        ),
    ] = None,
    peer_model: Annotated[
        list[Path] | None,
        typer.Option(
            help="A .gguf file to put beside a MODEL; once for each, in their order.",
            show_default="random weights of its shape",
        ),
    ] = None,
    kv_type: Annotated[
        str | None,
        typer.Option(
            help="Precision of both KV caches: f16, 8bit, 4bit; see qsf-run.",
            show_default="QSF 4bit, llama.cpp f16, their defaults",
        ),
    ] = None,
    io: Annotated[
        str | None,
        typer.Option(
            help=f"How QSF reads streamed weights: {', '.join(METHODS)}.",
            show_default="auto",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Measure how well the files predict this text.", show_default=False),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            help="With --text: KL divergence to this original, a HuggingFace folder or .qsf file.",
            show_default=False,
        ),
    ] = None,
    json_out: Annotated[
        Path | None,
        typer.Option("--json", help="Write the results as JSON.", show_default=False),
    ] = None,
    html_out: Annotated[
        Path | None,
        typer.Option("--html", help="Write the report as one web page.", show_default=False),
    ] = None,
    trace_out: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            help="Write what QSF did in a few tokens as Chrome trace events.",
            show_default=False,
        ),
    ] = None,
    compare_to: Annotated[
        Path | None,
        typer.Option(
            "--compare",
            help="JSON of an earlier run: say what is slower or faster by more than noise.",
            metavar="OLD.json",
            show_default=False,
        ),
    ] = None,
    warm: Annotated[
        bool, typer.Option("--warm", help="Leave files in the page cache before streamed runs.")
    ] = False,
    cache: Annotated[
        Path | None,
        typer.Option(help="Folder for random weights.", show_default="~/.cache/qsf/bench"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace output files.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress on standard error.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Measure how fast models run here, against the machine's limits and llama.cpp."""
    request = make_request(
        models or [],
        n_cores=_native.describe_machine().n_cores,
        shape=shape,
        quant=quant,
        threads=threads,
        prompt=prompt,
        gen=gen,
        depth=depth,
        ram_budget=ram_budget,
        cgroup=cgroup,
        rounds=rounds,
        peer=peer,
        peer_python=peer_python,
        peer_models=peer_model or [],
        kv_type=kv_type,
        io=io,
        cache=cache,
        is_warm=warm,
        text=text,
        against=against,
    )
    outputs = _checked_outputs([json_out, html_out, trace_out], compare_to, overwrite=force)
    old = results.read(compare_to) if compare_to is not None else None
    found = _measure(request, wants_trace=trace_out is not None, is_quiet=quiet)
    comparison = compare.compare(old, found.results) if old is not None else None
    # What took minutes is shown before anything is written: a full disk must not lose it.
    _print_report(found.results, comparison)
    if json_out is not None:
        results.write(found.results, json_out, overwrite=force)
    if html_out is not None:
        changes, notes = page_changes.changes_of(comparison)
        page.write_page(
            found.results, html_out, overwrite=force, changes=changes, change_notes=notes
        )
    if trace_out is not None and found.trace is not None:
        _write_trace(found.trace, trace_out, overwrite=force)
    written = [path for path in outputs if path != trace_out or found.trace is not None]
    if written and not quiet:
        print(f"written: {', '.join(map(str, written))}", file=sys.stderr)
    if found.stopped is not None:
        found.stopped.outcome = "the report has what was measured until then"
        raise found.stopped
    if found.is_incomplete:
        _exit_code[0] = command.EXIT_FAILED
    elif comparison is not None and comparison.is_regression:
        _exit_code[0] = EXIT_SLOWER


def _print_report(found: results.Results, comparison: compare.Comparison | None) -> None:
    width = shutil.get_terminal_size((120, 24)).columns
    print(table.as_text(table.report(found), width), end="")
    if comparison is not None:
        print("\n" + table.as_text(table.comparison_report(comparison), width), end="")
    sys.stdout.flush()


def _write_trace(found: campaign.Trace, out: Path, *, overwrite: bool) -> None:
    trace.write_trace(
        out,
        found.rows,
        found.kinds,
        n_layers=found.n_layers,
        name=found.name,
        overwrite=overwrite,
    )


def _checked_outputs(
    paths: Sequence[Path | None], compare_to: Path | None, *, overwrite: bool
) -> list[Path]:
    """Refuse before the work what would fail, or destroy something, after it."""
    outputs = [path for path in paths if path is not None]
    if len({path.absolute() for path in outputs}) < len(outputs):
        raise QsfArgumentError("--json, --html and --trace need names of their own")
    if compare_to is not None and compare_to.absolute() in {path.absolute() for path in outputs}:
        raise QsfArgumentError(f"--compare {compare_to} would be replaced by the new results")
    for path in outputs:
        check_output(path, overwrite=overwrite)
    return outputs


def _measure(request: Request, *, wants_trace: bool, is_quiet: bool) -> campaign.Found:
    watcher = _Lines(enabled=not is_quiet)
    try:
        return campaign.run(request, watcher, wants_trace=wants_trace)
    finally:
        watcher.close()


class _Lines(campaign.Watcher):
    """Shows what is being done: a line that changes on a terminal, else one for each thing."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._is_terminal = sys.stderr.isatty()
        self._began = self._drawn = 0.0
        self._what = ""
        self._shown_tenths = 0
        self._is_open = False

    def begin(self, what: str) -> None:
        self._wipe()
        self._what, self._began, self._shown_tenths = what, time.monotonic(), 0
        if self._enabled and not self._is_terminal:
            print(what, file=sys.stderr, flush=True)
        self.update(0.0)

    def update(self, fraction: float, text: str = "") -> None:
        if not self._enabled:
            return
        now = time.monotonic()
        left = ""
        if fraction > 0 and now - self._began > 1:
            left = f", {duration_text((now - self._began) * (1 - fraction) / fraction)} left"
        line = f"{fraction:4.0%}{left}{'  ' + text if text else ''}"
        if self._is_terminal:
            if now - self._drawn >= _REDRAW_S or fraction in (0.0, 1.0):
                width = shutil.get_terminal_size().columns - 1
                sys.stderr.write(f"\r{f'{self._what} {line}'[:width]}\x1b[K")
                sys.stderr.flush()
                self._drawn, self._is_open = now, True
        elif int(fraction * 10) > self._shown_tenths:
            self._shown_tenths = int(fraction * 10)
            print(f"  {line.strip()}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        self._wipe()
        if self._enabled:
            print(text, file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        self._wipe()
        print(f"{PROGRAM}: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave a clean line; nothing is shown after it."""
        self._wipe()
        self._enabled = False

    def _wipe(self) -> None:
        if self._is_open:
            self._is_open = False
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
