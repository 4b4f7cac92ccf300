"""The options of ``qsf-run``."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from qsf.native.io_known import MAX_DEPTH, METHODS
from qsf.native.kv_type import parse_kv_type

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_THREADS = 256
_MAX_U32 = 2**32 - 1
_MAX_SEED = 2**64 - 1
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

        known = [name for action in self._actions for name in action.option_strings]
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
    sampling: dict[str, Any]
    max_tokens: int
    seed: int | None
    stop: list[str]
    opening: dict[str, Any]
    is_interactive: bool
    is_plan: bool
    is_verbose: bool
    is_quiet: bool
    has_special: bool


def _whole(least: int, most: int, unit: str = "") -> Callable[[str], int]:
    """Return a parser for whole numbers from ``least`` to ``most``."""

    def parse(text: str) -> int:
        number = int(text) if re.fullmatch(r"[-+]?[0-9]{1,30}", text) else least - 1
        if number < least:
            rule = f"a whole number of at least {least}"
            raise argparse.ArgumentTypeError(f"{text!r} is not {rule}{unit and ', in ' + unit}")
        if number > most:
            raise argparse.ArgumentTypeError(f"{text} is too much: at most {most}")
        return number

    return parse


def _fraction(least: float, most: float, *, is_open: bool = False) -> Callable[[str], float]:
    """Return a parser for numbers from ``least``, with ``is_open`` above it, to ``most``."""
    rule = f"above {least:g} and at most" if is_open else f"from {least:g} to"

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = float("nan")
        if not least <= number <= most or (is_open and number == least):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {rule} {most:g}")
        return number

    return parse


def _budget(text: str) -> int | str:
    return text if text == "auto" else _whole(0, _MAX_U32, "MB, or auto")(text)


def _kv_type(text: str) -> str:
    try:
        parse_kv_type(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _stop(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the text is empty")
    return valid_text(text)


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
    _add_sampling_options(parser.add_argument_group("choice of tokens"))
    _add_machine_options(parser.add_argument_group("memory and speed"))
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


def _add_sampling_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-n",
        "--max-tokens",
        type=_whole(0, _MAX_U32),
        default=256,
        metavar="N",
        help="at most so many tokens (default: 256)",
    )
    group.add_argument(
        "--temperature",
        type=_fraction(0, 100),
        metavar="F",
        help="0 always takes the most probable token (default: the file's, else 0.7)",
    )
    group.add_argument(
        "--top-p",
        type=_fraction(0, 1, is_open=True),
        metavar="F",
        help="choose among the tokens that together have this probability; 1: off (default: "
        "the file's, else 0.9)",
    )
    group.add_argument(
        "--top-k",
        type=_whole(0, _MAX_U32),
        metavar="N",
        help="choose among the N most probable tokens; 0: off (default: the file's, else 40)",
    )
    group.add_argument(
        "--min-p",
        type=_fraction(0, 1),
        metavar="F",
        help="choose among the tokens at least F times as probable as the first; 0: off "
        "(default: the file's, else 0)",
    )
    group.add_argument(
        "--repetition-penalty",
        type=_fraction(0.01, 100),
        metavar="F",
        help="above 1: make tokens less probable that occurred already; 1: off (default: the "
        "file's, else 1)",
    )
    group.add_argument(
        "--seed",
        type=_whole(0, _MAX_SEED),
        metavar="N",
        help="the same seed gives the same text (default: a new one; --verbose says which)",
    )
    group.add_argument(
        "--stop",
        type=_stop,
        action="append",
        default=[],
        metavar="TEXT",
        help="stop before this text; may be given several times",
    )


def _add_machine_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--ram-budget",
        type=_budget,
        default=200,
        metavar="MB",
        help="ceiling for the memory of the whole process, in MB of 2^20 bytes; auto: what the "
        "machine, or its control group, has to give; 0: none (default: 200)",
    )
    group.add_argument(
        "--threads",
        type=_whole(1, _MAX_THREADS),
        metavar="N",
        help=f"at most {_MAX_THREADS} (default: one per physical core)",
    )
    group.add_argument(
        "--pin-threads",
        action="store_true",
        help="keep each thread that the engine starts on a core of its own",
    )
    group.add_argument(
        "--max-seq-len",
        type=_whole(1, _MAX_U32),
        metavar="N",
        help="longest sequence in tokens, prompt included (default: the model's, at most 4096, "
        "less where the budget is small)",
    )
    group.add_argument(
        "--kv-type",
        type=_kv_type,
        metavar="TYPE",
        help="precision of the KV cache: f16, 8bit, 4bit, 2bit, or keys and values apart, as "
        "k8v4 (default: 4bit; 2bit where the budget is too small for that)",
    )
    group.add_argument(
        "--kv-rotation",
        choices=("auto", "on", "off"),
        default="auto",
        help="turn keys and values by a Hadamard matrix, which makes few bits enough (default: "
        "auto: with 4 bits or fewer, where the size of the heads is a power of two)",
    )
    group.add_argument(
        "--io",
        choices=tuple(METHODS),
        default="auto",
        help="how weights that do not fit in memory are read: buffered, direct (past the page "
        "cache), uring (io_uring, past it too) or mmap (default: auto: what suits the memory, "
        "else what a short probe of the disk finds fastest, once in 30 days)",
    )
    group.add_argument(
        "--io-depth",
        type=_whole(1, MAX_DEPTH),
        metavar="N",
        help=f"reads under way at the same time, at most {MAX_DEPTH} (default: chosen with the "
        "method)",
    )
    group.add_argument(
        "--quality",
        type=_fraction(0, 1),
        default=1.0,
        metavar="F",
        help="below 1: skip the share 1 - F of the layers, the least important first, but never "
        "the first two or the last two: faster, less memory, worse text (0.8 skips a fifth; the "
        "file must say how important its layers are; default: 1, all run)",
    )
    group.add_argument(
        "--exact", action="store_true", help="full-precision arithmetic: slow, for reference"
    )
    group.add_argument(
        "--plan", action="store_true", help="print where the memory would go, and exit"
    )


def parse(arguments: list[str]) -> Request:
    """Return the command line, parsed. Raises UsageError with what is wrong."""
    parser = _parser()
    options = parser.parse_args(arguments)
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
        sampling={
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": options.top_k,
            "min_p": options.min_p,
            "repetition_penalty": options.repetition_penalty,
        },
        max_tokens=options.max_tokens,
        seed=options.seed,
        stop=options.stop,
        opening={
            "ram_budget": options.ram_budget or None,
            "threads": options.threads,
            "max_seq_len": options.max_seq_len,
            "pin_threads": options.pin_threads,
            "exact": options.exact,
            "kv_type": options.kv_type,
            "kv_rotation": {"auto": None, "on": True, "off": False}[options.kv_rotation],
            "io": None if options.io == "auto" else options.io,
            "io_depth": options.io_depth,
            "quality": options.quality,
        },
        is_interactive=options.interactive,
        is_plan=options.plan,
        is_verbose=options.verbose,
        is_quiet=options.quiet,
        has_special=not options.no_special,
    )


def valid_text(text: str) -> str:
    """Return text from outside without lone surrogates, which stand for bytes not in UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
