"""Shared by all commands but ``qsf-run``: a typer application whose errors are one line.

``qsf-run`` does not use it: typer takes 22 MB, which would count in its budget.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import typer

from qsf.errors import QsfArgumentError
from qsf.options import Flag, ModelOptions, described
from qsf.options import megabytes as megabytes
from qsf.shell import command


def create_app() -> typer.Typer:
    """Return a typer application without its own colours, boxes and tracebacks."""
    return typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def runner(app: Callable[..., object], program: str) -> Callable[..., int]:
    """Return ``run`` for an application, whose default arguments are the command line's."""

    def run_app(arguments: list[str] | None = None) -> int:
        return run(app, sys.argv[1:] if arguments is None else arguments, program=program)

    return run_app


def parser_of(parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Return ``parse`` with its error as typer shows it."""

    def parse_value(value: Any) -> Any:
        try:
            return parse(str(value))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parse_value


def model_option(name: str, *, help: str = "", default_help: str = "") -> Any:
    """Return the option ``name`` of ``qsf.ModelOptions`` for typer, with other help if given."""
    option = next(o for o in described(ModelOptions) if o.name == name)
    text = help or option.help
    facts: dict[str, Any] = {"help": f"{text[:1].upper()}{text[1:]}."}
    if not isinstance(option.kind, Flag):
        facts |= {"parser": parser_of(option.kind.parse), "metavar": option.kind.metavar}
        facts |= {"show_default": default_help or option.default_help or True}
    return typer.Option(option.flag, **facts)


def version_option(program: str) -> Any:
    """Return ``--version`` for typer, which prints the version of ``program`` and exits."""

    def show(is_wanted: bool) -> None:
        if is_wanted:
            typer.echo(command.version_line(program))
            raise typer.Exit

    return typer.Option("--version", help="Print the version.", callback=show, is_eager=True)


def run(
    app: Callable[..., object], arguments: list[str], *, program: str, when_cut_off: str = ""
) -> int:
    """Run an application of typer, or a similar function, and return its exit code.

    The code is 0, or the number that the command returns.

    ``when_cut_off`` is printed after "interrupted", such as the state of the output; None prints
    nothing. An outcome in the exception replaces it.
    """
    command.prepare_streams()
    try:
        with command.stopped_by_signals():
            code: object = app(arguments, standalone_mode=False, prog_name=command.typed(program))
            sys.stdout.flush()
    except command.StoppedError as stopped:
        outcome = stopped.outcome or when_cut_off
        if outcome:
            command.say_error(program, f"{stopped.text}; {outcome}")
        return stopped.exit_code
    except SystemExit:  # of typer, if the reader of our output has closed it
        command.drop_output()
        return 0
    except Exception as error:
        return command.fail(program, error, usage=QsfArgumentError)
    return code if isinstance(code, int) else 0
