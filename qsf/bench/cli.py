"""``python -m qsf.bench``: how fast QSF is here, beside the machine's limits and llama.cpp.

The report goes to standard output, progress and errors to standard error.

Exit codes: 0 done, 1 failed, 2 wrong options, 3 slower than --compare, 130 interrupted, 143
terminated.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import io as io_streams
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import typer

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
from qsf.errors import QsfArgumentError
from qsf.native import binding
from qsf.options import IO_METHODS
from qsf.shell import command, typer_app
from qsf.shell.output import check_output
from qsf.shell.progress import duration_text
from qsf_converter.rounding.plan import QUANT_TYPES

PROGRAM = "python -m qsf.bench"
EXIT_SLOWER = 3

_REDRAW_S = 0.1


def _words(names: Iterable[str]) -> str:
    """Return names as lines of the help, which are indented by two."""
    lines = textwrap.wrap(", ".join(names), 66, break_on_hyphens=False)
    return "\n  ".join(lines)


# Typer joins the lines of a paragraph; a line with only \b keeps them apart.
_EPILOG = f"""\b
Examples:
  python -m qsf.bench
  python -m qsf.bench model.qsf --threads 2 --depth 0,2048
  python -m qsf.bench --shape llama2-7b --quant 4bit --cgroup 300M
  python -m qsf.bench --quant 4bit --ram-budget none,400,200 --html page.html
  python -m qsf.bench --json new.json --compare old.json
  python -m qsf.bench model.qsf --peer-model model-Q4_K_M.gguf --text test.txt
  python -m qsf.bench model.qsf --peer none --trace trace.json

\b
Shapes: {_words(shapes.SHAPES)}
Types: {_words(QUANT_TYPES)}

Without a MODEL, files of random weights are made and kept in ~/.cache/qsf/bench. python -m
qsf.bench.peer prints the line that installs llama.cpp, built for this processor;
docs/benchmarks.md says what is measured.

\b
Exit codes: 0 done, 1 failed, 2 wrong options, {EXIT_SLOWER} slower than --compare,
  130 interrupted, 143 terminated.
"""

app = typer_app.create_app()


def main() -> NoReturn:
    """Run ``python -m qsf.bench`` on the command line's arguments and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run ``python -m qsf.bench`` and return its exit code."""
    with _hangup_terminates():
        return typer_app.run(app, arguments, program=PROGRAM, when_cut_off="nothing was written")


@contextlib.contextmanager
def _hangup_terminates() -> Iterator[None]:
    """Let the end of the terminal be as SIGTERM: what is measured has a session of its own."""
    hangup = getattr(signal, "SIGHUP", None)  # not on every system
    is_main = threading.current_thread() is threading.main_thread()
    if hangup is None or not is_main or signal.getsignal(hangup) is signal.SIG_IGN:  # as nohup does
        yield
        return
    previous = signal.signal(hangup, lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(hangup, previous)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(command.version_line(PROGRAM))
        raise typer.Exit


@app.command(name=PROGRAM, epilog=_EPILOG)
def bench_command(
    models: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Files to measure.", show_default="random weights", metavar="MODEL.qsf"
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Shapes of random weights: see below.",
            show_default=DEFAULT_SHAPE,
            metavar="NAME,...",
        ),
    ] = None,
    quant: Annotated[
        str | None,
        typer.Option(
            help="Their types: see below.",
            show_default=",".join(DEFAULT_TYPES),
            metavar="TYPE,...",
        ),
    ] = None,
    threads: Annotated[
        str | None,
        typer.Option(
            help="Numbers of threads.",
            show_default="1 and all cores, in a cgroup all cores",
            metavar="N,...",
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="Prompts of so many tokens; 0: none.",
            show_default="512, in a cgroup 32",
            metavar="N,...",
        ),
    ] = None,
    gen: Annotated[
        str | None,
        typer.Option(
            help="So many tokens one at a time; 0: none.",
            show_default="128, in a cgroup 16",
            metavar="N,...",
        ),
    ] = None,
    depth: Annotated[
        str,
        typer.Option(
            help="Each test after so many tokens that are there already.", metavar="N,..."
        ),
    ] = "0",
    ram_budget: Annotated[
        str | None,
        typer.Option(
            help="Budgets of QSF in MB, or none. llama.cpp has no such thing and runs only "
            "beside none, or in a cgroup.",
            show_default="none, in a cgroup its limit",
            metavar="MB|none,...",
        ),
    ] = None,
    cgroup: Annotated[
        str | None,
        typer.Option(
            help="Run everything in memory control groups of these limits, as 300M,1G. Linux, as "
            "root or in a delegated group.",
            show_default=False,
            metavar="300M,...",
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option(help="How often everything is measured, in turns.", min=1, max=100)
    ] = DEFAULT_ROUNDS,
    peer: Annotated[
        str | None,
        typer.Option(
            help="What to put beside QSF.",
            show_default=f"{PEER} where it is installed",
            metavar=f"{PEER}|{NO_PEER}",
        ),
    ] = None,
    peer_python: Annotated[
        Path | None,
        typer.Option(
            help="The Python that has llama-cpp-python.",
            show_default="the one that runs this",
            metavar="PYTHON",
        ),
    ] = None,
    peer_model: Annotated[
        list[Path] | None,
        typer.Option(
            help="A .gguf file to put beside a MODEL; once for each, in their order.",
            show_default="random weights of its shape",
            metavar="MODEL.gguf",
        ),
    ] = None,
    kv_type: Annotated[
        str | None,
        typer.Option(
            help="Precision of both KV caches: f16, 8bit, 4bit; see qsf-run.",
            show_default="QSF 4bit, llama.cpp f16, their defaults",
            metavar="TYPE",
        ),
    ] = None,
    io: Annotated[
        str | None,
        typer.Option(
            help=f"How QSF reads streamed weights: {', '.join(IO_METHODS)}.",
            show_default="auto",
            metavar="HOW",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help="Measure how well the files predict this text too.",
            show_default=False,
            metavar="FILE",
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            help="With --text: KL divergence to this original, a HuggingFace folder or .qsf file.",
            show_default=False,
            metavar="MODEL",
        ),
    ] = None,
    json_out: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Write the results as JSON.", show_default=False, metavar="FILE"
        ),
    ] = None,
    html_out: Annotated[
        Path | None,
        typer.Option(
            "--html", help="Write the report as one web page.", show_default=False, metavar="FILE"
        ),
    ] = None,
    trace_out: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            help="Write what QSF did in a few tokens as Chrome trace events.",
            show_default=False,
            metavar="FILE",
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
        bool,
        typer.Option(
            "--warm", help="Leave files in the page cache before runs that stream or in a cgroup."
        ),
    ] = False,
    cache: Annotated[
        Path | None,
        typer.Option(
            help="Folder for random weights.", show_default="~/.cache/qsf/bench", metavar="FOLDER"
        ),
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
) -> int:
    """Measure how fast models run here, against the machine's limits and llama.cpp."""
    request = make_request(
        models or [],
        n_cores=binding.describe_machine().n_cores,
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
    out = _Outputs(json_out, html_out, trace_out, is_forced=force)
    out.check(request, compare_to)
    old = results.read(compare_to) if compare_to is not None else None
    found = _measure(request, wants_trace=trace_out is not None, is_quiet=quiet)
    comparison = compare.compare(old, found.results) if old is not None else None
    # What took minutes is shown before anything is written, and written although nobody reads it:
    # neither a full disk nor a pipe that is closed may lose it.
    try:
        _print_report(found.results, comparison)
    except command.StoppedError as stopped:
        stopped.outcome = "the report is cut off"
        raise
    finally:
        written = out.write(found, comparison)
    if written and not quiet:
        print(f"written: {', '.join(map(str, written))}", file=sys.stderr)
    if found.stopped is not None:
        found.stopped.outcome = "the report has what was measured until then"
        raise found.stopped
    if comparison is not None and not comparison.changes:
        command.say_error(PROGRAM, f"no figure of {compare_to} was measured now: none is compared")
        return command.EXIT_FAILED
    if found.is_incomplete:
        return command.EXIT_FAILED
    return EXIT_SLOWER if comparison is not None and comparison.is_regression else 0


def _print_report(found: results.Results, comparison: compare.Comparison | None) -> None:
    width = shutil.get_terminal_size((120, 24)).columns
    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks our lines shows others
        if isinstance(stream, io_streams.TextIOWrapper):
            stream.reconfigure(errors="replace")
    print(table.as_text(table.report(found), width), end="")
    if comparison is not None:
        print("\n" + table.as_text(table.comparison_report(comparison), width), end="")
    sys.stdout.flush()


@dataclass(frozen=True, slots=True)
class _Outputs:
    """The files that are asked for."""

    json: Path | None
    html: Path | None
    trace: Path | None
    is_forced: bool

    def check(self, request: Request, compare_to: Path | None) -> None:
        """Refuse before the work what would fail, or destroy something, after it."""
        paths = [path for path in (self.json, self.html, self.trace) if path is not None]
        if len({path.resolve() for path in paths}) < len(paths):
            raise QsfArgumentError("--json, --html and --trace need names of their own")
        sources = [compare_to, request.text, *request.models, *request.peer_models]
        taken = {path.resolve() for path in sources if path is not None}
        for path in paths:
            if path.resolve() in taken:
                raise QsfArgumentError(f"{path} is read as well: give the output another name")
            check_output(path, overwrite=self.is_forced)

    def write(self, found: campaign.Found, comparison: compare.Comparison | None) -> list[Path]:
        """Write what there is; returns what was written. Raises QsfError."""
        if self.json is not None:
            results.write(found.results, self.json, overwrite=self.is_forced)
        if self.html is not None:
            changes, notes = page_changes.changes_of(comparison)
            page.write_page(
                found.results,
                self.html,
                overwrite=self.is_forced,
                changes=changes,
                change_notes=notes,
            )
        traced = found.trace
        if self.trace is not None and traced is not None:
            trace.write_trace(
                self.trace,
                traced.rows,
                traced.kinds,
                n_layers=traced.n_layers,
                name=traced.name,
                overwrite=self.is_forced,
            )
        written = [self.json, self.html, self.trace if traced is not None else None]
        return [path for path in written if path is not None]


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
        print(f"{PROGRAM}: {command.one_line(text)}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave a clean line; nothing is shown after it."""
        self._wipe()
        self._enabled = False

    def _wipe(self) -> None:
        if self._is_open:
            self._is_open = False
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
