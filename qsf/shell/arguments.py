"""Command lines made from the descriptions of options, for `qsf run` and `qsf serve`."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from qsf.errors import QsfArgumentError
from qsf.options import Flag, Keywords, Kind, Option, Switch, Texts, described

_Options = TypeVar("_Options")


class UsageError(Exception):
    def format_message(self) -> str:
        return str(self)


class Text(Kind):
    """A text from a command line, unchanged."""

    def __init__(self, metavar: str, *, may_be_empty: bool = True) -> None:
        self.metavar, self._may_be_empty = metavar, may_be_empty
        self.rule = "a text" if may_be_empty else "a text that is not empty"

    def is_valid(self, value: Any) -> bool:
        return isinstance(value, str) and (self._may_be_empty or bool(value))

    def parse(self, text: str) -> Any:
        if not self.is_valid(text):
            raise ValueError(f"must be {self.rule}")
        return text


class FilePath(Text):
    def is_valid(self, value: Any) -> bool:
        return isinstance(value, Path)

    def parse(self, text: str) -> Path:
        return Path(text)


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError, with a suggestion for a misspelled option."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self._positionals.title, self._optionals.title = "Arguments", "Options"
        self.flags: list[str] = []

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            message = f"there is no {unknown.split()[0]}{self._suggestion(unknown.split()[0])}"
            if not unknown.startswith("-"):
                message = f"one MODEL is enough: what is {unknown!r}? Texts with spaces need quotes"
        raise UsageError(re.sub(r"^argument (?:-\w+/)?([\w-]+):", r"\1:", message))

    def print_help(self, file: Any = None) -> None:
        """Print the help. Raises OSError, which argparse ignores, if it cannot be written."""
        stream = file or sys.stdout
        stream.write(self.format_help())
        stream.flush()

    def format_help(self) -> str:
        """Return the help, as all commands begin it."""
        return super().format_help().replace("usage: ", "Usage: ", 1)

    def _suggestion(self, word: str) -> str:
        from difflib import get_close_matches

        word = word.split("=")[0]
        longer = [name for name in self.flags if len(word) > 3 and name.startswith(word)]
        flags = {name.removeprefix("--"): name for name in self.flags}  # dashes are alike in all
        close = get_close_matches(word.lstrip("-"), flags, 1, _LEAST_ALIKE)
        likely = longer or [flags[name] for name in close]
        return f": did you mean {likely[0]}?" if likely else ""


_LEAST_ALIKE = 0.7  # a wrong hint is worse than none


def columns_of_help() -> int:
    """Return the width that argparse gives to a help."""
    return shutil.get_terminal_size().columns - 2


def plain_parser(prog: str, usage: str, description: str, epilog: str) -> Parser:
    """Return a parser without arguments, whose texts stay as they are in its help."""
    return Parser(
        prog=prog,
        usage=usage,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )


def model_parser(
    prog: str, model_help: str, description: str, epilog: str, *, takes_several: bool = False
) -> Parser:
    """Return a parser of a command with options and MODEL; ``model_help`` says its other names."""
    usage = f"{prog} [OPTIONS] MODEL{' ...' * takes_several}     ({model_help})"
    parser = plain_parser(prog, usage, description, epilog)
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="*" if takes_several else "?",
        help="a .qsf file, a HuggingFace folder, a GGUF file, or a name: qwen3:4b, org/name",
    )
    return parser


class _Merge(argparse.Action):
    """Merges the value of a repeated option into its earlier values."""

    def __call__(self, _parser: Any, options: Any, given: Any, _flag: Any = None) -> None:
        setattr(options, self.dest, {**(getattr(options, self.dest) or {}), **given})


class Group:
    """A group of options in the help; the short help leaves out those that are not main."""

    def __init__(self, parser: Parser, title: str, *, shows_all: bool) -> None:
        """Add the group to the parser; ``shows_all``: the whole help, not the short one."""
        self._parser = parser
        self._group = parser.add_argument_group(title.capitalize())
        self._shows_all = shows_all

    def add(self, *names: str, help: str, is_main: bool = False, **values: Any) -> None:
        shown = help.replace("%", "%%") if is_main or self._shows_all else argparse.SUPPRESS
        self._parser.flags += [name for name in names if name.startswith("--")]
        action = self._group.add_argument(*names, help=shown, **values)
        # Names of other programs are taken, and not listed.
        longer = [name for name in names if name.startswith("--")]
        action.option_strings = [name for name in names if name not in longer[1:]]

    def add_options(
        self, options: type, command: str = "run", *, main: Collection[str] = ()
    ) -> None:
        """Add the options among the fields of ``options`` that ``command`` takes.

        The short help shows those named in ``main`` too.
        """
        for option in described(options, command):
            self._add_option(option, is_main=option.is_main or option.name in main)

    def add_plan(self) -> None:
        """Add the options that end without opening a model."""
        self.add("--plan", action="store_true", help="print where the memory would go, and exit")

    def add_asking(self) -> None:
        """Add the options for finding a model, and the version."""
        self.add("-y", "--yes", action="store_true", help="download a model without asking")
        self.add("--version", action="store_true", help="print the version and exit")

    def _add_option(self, option: Option, *, is_main: bool) -> None:
        short = [name for name in option.also if not name.startswith("--")]
        names = [*short, option.flag, *(name for name in option.also if name not in short)]
        kind = option.kind
        values: dict[str, Any] = {"help": option.help_text, "is_main": is_main}
        if isinstance(kind, Flag) and kind.choices is None:
            self.add(*names, action="store_true", **values)
            return
        values |= {"default": option.default, "dest": option.name}
        if kind.choices is not None:
            self.add(*names, choices=kind.choices, **values)
            return
        if isinstance(kind, Texts):
            values |= {"action": "append", "default": None}
        elif isinstance(kind, Keywords):
            values["action"] = _Merge
        self.add(*names, type=parser_of(kind), metavar=kind.metavar, **values)


def parser_of(kind: Kind) -> Callable[[str], Any]:
    """Return ``kind.parse`` with its error as argparse shows it."""

    def parse(text: str) -> Any:
        try:
            value = kind.parse(text)
            return valid_text(value, "the text") if isinstance(kind, Texts) else value
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def taken(kind: type[_Options], given: argparse.Namespace, command: str = "run") -> _Options:
    """Return the options of ``kind`` from the command line. Raises QsfArgumentError."""
    options = described(kind, command)
    values = {option.name: getattr(given, option.name) for option in options}
    for option in options:
        if isinstance(option.kind, Switch):
            values[option.name] = option.kind.parse(values[option.name] or "auto")
        elif isinstance(option.kind, Texts):
            values[option.name] = values[option.name] or ()
    return kind(**values)


def valid_text(text: str, name: str) -> str:
    """Return text from outside. Raises QsfArgumentError for bytes that are not UTF-8."""
    try:
        return text.encode("utf-8", "surrogateescape").decode()
    except ValueError:
        raise QsfArgumentError(f"{name} is not UTF-8") from None
