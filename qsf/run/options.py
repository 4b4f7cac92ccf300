"""The options of ``qsf-run``."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from qsf.options import (
    Flag,
    GenerationOptions,
    Kind,
    ModelOptions,
    Option,
    Switch,
    Texts,
    described,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_Options = TypeVar("_Options", ModelOptions, GenerationOptions)

_EPILOG = """\
examples:
  qsf-run model.qsf --prompt "Once upon a time"
  qsf-run model.qsf --prompt "Once upon a time" --temperature 0 --max-tokens 50
  qsf-run model.qsf --ram-budget 100 --plan
  qsf-run model.qsf --interactive
  qsf-run model.qsf --prompt "Once upon a time" --kv-type k8v4
  qsf-run model.qsf --prompt "Once upon a time" --io direct --io-depth 4 --verbose
  echo "Once upon a time" | qsf-run model.qsf > story.txt

exit codes: 0 done, 1 failed, 2 wrong options, 130 interrupted, 143 terminated
"""


class UsageError(Exception):
    """The command line is wrong."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            message = f"there is no {unknown.split()[0]}{self._suggestion(unknown.split()[0])}"
            if not unknown.startswith("-"):
                message = f"one MODEL is enough: what is {unknown!r}? Texts with spaces need quotes"
        raise UsageError(message.removeprefix("argument "))

    def _suggestion(self, word: str) -> str:
        from difflib import get_close_matches

        known = re.findall(r"(?<![\w-])--[a-z][a-z-]*", self.format_help())
        word = word.split("=")[0]
        longer = [name for name in known if len(word) > 3 and name.startswith(word)]
        likely = longer or get_close_matches(word, known, 1)
        return f": did you mean {likely[0]}?" if likely else ""


@dataclass(frozen=True, slots=True)
class Request:
    """The command line, parsed."""

    path: Path
    prompt: str | None
    prompt_file: str | None
    generation: GenerationOptions
    opening: ModelOptions
    is_interactive: bool
    is_plan: bool
    is_verbose: bool
    is_quiet: bool
    has_special: bool


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    """Add an option of qsf/options.py."""
    names = [option.flag] if not option.short else [f"-{option.short}", option.flag]
    kind = option.kind
    if isinstance(kind, Flag) and kind.choices is None:
        group.add_argument(*names, action="store_true", help=option.help_text)
        return
    values: dict[str, Any] = {
        "help": option.help_text,
        "default": option.default,
        "dest": option.name,
    }
    if kind.choices is not None:
        group.add_argument(*names, choices=kind.choices, **values)
    elif isinstance(kind, Texts):
        values |= {"action": "append", "default": []}
        group.add_argument(*names, type=_parser_of(kind), metavar=kind.metavar, **values)
    else:
        group.add_argument(*names, type=_parser_of(kind), metavar=kind.metavar, **values)


def _parser_of(kind: Kind) -> Callable[[str], Any]:
    """Return ``kind.parse`` with its error as argparse shows it."""

    def parse(text: str) -> Any:
        try:
            value = kind.parse(text)
            return valid_text(value) if isinstance(kind, Texts) else value
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


# argparse and not typer, as in the tools for which memory does not matter: typer brings
# pydantic, and with it 22 MiB of a budget that counts the whole process (argparse: 2 MiB).
def _parser() -> _Parser:
    parser = _Parser(
        prog="qsf-run",
        usage="qsf-run [options] MODEL",
        description="Generate text with a model inside a memory budget.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="a .qsf file")
    _add_prompt_options(parser.add_argument_group("prompt"))
    group = parser.add_argument_group("choice of tokens")
    for option in described(GenerationOptions, "run"):
        _add(group, option)
    group = parser.add_argument_group("memory and speed")
    for option in described(ModelOptions, "run"):
        _add(group, option)
    group.add_argument(
        "--plan", action="store_true", help="print where the memory would go, and exit"
    )
    group = parser.add_argument_group("output")
    group.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="say what the file is, what runs, where the memory goes, and at the end where the "
        "time went: reading, waiting for it, computing",
    )
    group.add_argument(
        "-q", "--quiet", action="store_true", help="no progress, no statistics at the end"
    )
    group.add_argument("--version", action="store_true", help="print the version and exit")
    return parser


def _add_prompt_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("-p", "--prompt", metavar="TEXT", help="text to continue")
    group.add_argument(
        "--prompt-file",
        metavar="FILE",
        help='read the prompt from a file; "-" is standard input, which is also read when it '
        "is not a terminal and there is no other prompt. One line end at its end is not part "
        "of the prompt",
    )
    group.add_argument(
        "-i",
        "--interactive",
        action="store_true",
        help="chat, with the file's chat template: /reset forgets the conversation, /exit or "
        "Ctrl-D ends, Ctrl-C stops an answer",
    )
    group.add_argument(
        "--no-special",
        action="store_true",
        help="take text in the prompt that reads like a special token as ordinary text",
    )


def parse(arguments: list[str]) -> Request:
    """Return the command line, parsed. Raises UsageError with what is wrong."""
    options = _parser().parse_args(arguments)
    if not options.model:
        raise UsageError("the name of MODEL is empty")
    if options.prompt is not None and options.prompt_file is not None:
        raise UsageError("--prompt and --prompt-file exclude each other")
    if options.interactive and (options.prompt is not None or options.prompt_file is not None):
        raise UsageError("--interactive asks for its prompts: leave --prompt out")
    return Request(
        path=Path(options.model),
        prompt=options.prompt,
        prompt_file=options.prompt_file,
        generation=_taken(GenerationOptions, options),
        opening=_taken(ModelOptions, options),
        is_interactive=options.interactive,
        is_plan=options.plan,
        is_verbose=options.verbose,
        is_quiet=options.quiet,
        has_special=not options.no_special,
    )


def _taken(kind: type[_Options], given: argparse.Namespace) -> _Options:
    """Return the options of ``kind`` as they were given. Raises UsageError."""
    values = {option.name: getattr(given, option.name) for option in described(kind, "run")}
    for option in described(kind, "run"):
        if isinstance(option.kind, Switch):
            values[option.name] = option.kind.parse(values[option.name] or "auto")
    return kind(**values)


def valid_text(text: str) -> str:
    """Return text from outside without lone surrogates, which stand for bytes not in UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
