"""``python -m qsf.bench``: the speed of QSF, compared with the machine's limits and llama.cpp.

The report goes to standard output, progress and errors to standard error.

Exit codes: 0 done, 1 failed, 2 wrong options, 130 interrupted, 143 terminated.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any, NoReturn

from qsf.errors import QsfArgumentError
from qsf.native import binding
from qsf.shell import command, typer_app
from qsf.shell.output import check_output, write_text
from qsf.shell.progress import Steps
from qsf_bench import campaign
from qsf_bench.judge import results
from qsf_bench.options import PROGRAM, Options, parse
from qsf_bench.request import make_request
from qsf_bench.show import table


def main() -> NoReturn:
    """Run ``python -m qsf.bench`` on the command line's arguments and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run ``python -m qsf.bench`` and return its exit code."""

    def app(arguments: list[str], **_: Any) -> int:
        try:
            options = parse(arguments, command.version_line(PROGRAM))
        except SystemExit:  # --help, --version
            return 0
        return bench_command(options)

    return typer_app.run(app, arguments, program=PROGRAM, when_cut_off="nothing was written")


def bench_command(options: Options) -> int:
    """Measure, report, write; returns the exit code. Raises QsfError."""
    request = make_request(options, n_cores=binding.describe_machine().n_cores)
    check_outputs(options)
    steps = Steps(enabled=not options.quiet, program=PROGRAM)
    try:
        outputs = campaign.run(request, steps)
    finally:
        steps.close()
    # The report is shown before files are written, and files are written even if nobody reads it:
    # neither a full disk nor a closed pipe may lose figures that took minutes.
    try:
        print_report(outputs.results)
    except command.StoppedError as stopped:
        stopped.outcome = "the report is cut off"
        raise
    finally:
        written = write_outputs(options, outputs)
    if written and not options.quiet:
        print(f"written: {', '.join(map(str, written))}", file=sys.stderr)
    if outputs.stopped is not None:
        outputs.stopped.outcome = "the report has what was measured until then"
        raise outputs.stopped
    return command.EXIT_FAILED if outputs.is_incomplete else 0


def print_report(measured: results.Results) -> None:
    """Print the tables to standard output."""
    width = shutil.get_terminal_size((120, 24)).columns
    print(table.as_text(table.report(measured), width), end="")
    sys.stdout.flush()


def check_outputs(options: Options) -> None:
    """Refuse an output that would fail after the work, or destroy another file."""
    paths = [path for path in (options.json, options.html) if path is not None]
    if len({path.resolve() for path in paths}) < len(paths):
        raise QsfArgumentError("--json and --html need names of their own")
    taken = {path.resolve() for path in (*options.models, *options.baseline_model)}
    for path in paths:
        if path.resolve() in taken:
            raise QsfArgumentError(f"{path} is read as well: give the output another name")
        check_output(path, overwrite=options.force)


def write_outputs(options: Options, outputs: campaign.Outputs) -> list[Path]:
    """Write the requested files; returns their paths. Raises QsfError."""
    if options.json is not None:
        results.write(outputs.results, options.json, overwrite=options.force)
    if options.html is not None:
        text = table.as_page(table.report(outputs.results))
        write_text(options.html, text, overwrite=options.force)
    return [path for path in (options.json, options.html) if path is not None]
