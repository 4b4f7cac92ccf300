"""Shared by all commands but ``qsf run``: a typer application whose errors are one line.

``qsf run`` does not use it: typer takes 22 MB, which would count in its budget.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.models import CommandFunctionType

from qsf.errors import QsfArgumentError
from qsf.options import Flag, ModelOptions, described
from qsf.options import megabytes as megabytes
from qsf.shell import command
from qsf.shell.arguments import columns_of_help, plain_parser


class _Help:
    """A command of typer whose help argparse writes, so that it looks as that of ``qsf run``."""

    help: str | None
    epilog: str | None
    get_params: Callable[[Any], list[Any]]

    def get_help(self, ctx: Any) -> str:
        """Return the help of the command, and the names of its subcommands if it has any."""
        params = self.get_params(ctx)
        commands = [
            f"  {name:11} {_first_line(one)}" for name, one in getattr(self, "commands", {}).items()
        ]
        of_usage = [_usage(param) for param in params if isinstance(param, TyperArgument)]
        of_usage += ["COMMAND ..."] * bool(commands)
        paragraphs = inspect.cleandoc(self.help or "").split("\n\n")
        parser = plain_parser(
            ctx.command_path,
            " ".join([f"{ctx.command_path} [OPTIONS]", *of_usage]),
            "\n\n".join(textwrap.fill(text, columns_of_help()) for text in paragraphs),
            "\n".join(["Commands:", *commands]) if commands else self.epilog or "",
        )
        for param in params:
            is_argument = isinstance(param, TyperArgument)
            names = [param.name] if is_argument else sorted(param.opts, key=len)  # -q, --quiet
            values: dict[str, Any] = {"help": _help_of(param).replace("%", "%%")}
            if getattr(param, "is_flag", False):
                values["action"] = "store_true"
            else:
                values["metavar"] = _metavar(param)
            parser.add_argument(*names, **values)
        return parser.format_help().rstrip("\n")


def _first_line(one: Any) -> str:
    return inspect.cleandoc(one.help or "").partition("\n")[0]


def _metavar(param: Any) -> str:
    if param.metavar or isinstance(param, TyperArgument):
        return str(param.metavar or param.name.upper())
    return (
        "N" if isinstance(getattr(param, "min", None), int) else param.name.split("_")[-1].upper()
    )


def _usage(param: Any) -> str:
    name = _metavar(param) + " ..." * (param.nargs == -1)
    return name if param.required else f"[{name}]"


def _help_of(param: Any) -> str:
    """Return the help with what is allowed and the default, as `Option.help_text` has it."""
    if param.name == "help":
        return "show this help"
    low, high = (getattr(param, name, None) for name in ("min", "max"))
    notes = [] if low is None else [f"{low} or more" if high is None else f"{low} to {high}"]
    default = param.show_default if isinstance(param.show_default, str) else param.default
    is_plain = isinstance(param.show_default, str) or isinstance(default, (str, int, float))
    if param.required and not isinstance(param, TyperArgument):
        notes.append("required")
    elif param.show_default and is_plain and default not in (False, ""):
        notes.append(f"default: {default}")
    return f"{param.help} ({'; '.join(notes)})" if notes else str(param.help)


class _Command(_Help, TyperCommand):
    pass


class _Group(_Help, TyperGroup):
    pass


class App(typer.Typer):
    def command(
        self, name: str | None = None, **values: Any
    ) -> Callable[[CommandFunctionType], CommandFunctionType]:
        """Add a command, as `typer.Typer.command`."""
        return super().command(name, cls=_Command, **values)


def create_app() -> App:
    """Return a typer application without its own colours, boxes and tracebacks."""
    return App(
        cls=_Group,
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
    facts: dict[str, Any] = {"help": text}
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

    return typer.Option("--version", help="print the version", callback=show, is_eager=True)


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
