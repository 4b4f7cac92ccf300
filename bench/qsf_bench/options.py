"""The options of ``python -m qsf.bench``, each described once; the parser is made from them.

Single options are checked here; `request` checks combinations.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from qsf.errors import QsfArgumentError
from qsf.options import ModelOptions, Whole, described
from qsf.shell.command import typed
from qsf_bench.models import shapes
from qsf_bench.run.memory_group import parse_limit
from qsf_converter.rounding.plan import QUANT_TYPES

PROGRAM = "python -m qsf.bench"
DEFAULT_SHAPE = "tinyllama-1.1b"
DEFAULT_TYPES = ("4bit", "2bit")
DEFAULT_ROUNDS = 3
DEFAULT_ROUTING = "local"
ROUTINGS = (DEFAULT_ROUTING, "even")

_HELP_COLUMNS = 80

# The options that bench shares with the other commands, with their ranges and help.
MODEL_OPTIONS = {option.name: option for option in described(ModelOptions, "bench")}


def _model_help(name: str) -> str:
    """Return the help of an option that all commands share, as a sentence."""
    text = MODEL_OPTIONS[name].help
    return f"{text[0].upper()}{text[1:]}."


# ---- parsers of values: each returns a value, or raises ValueError or QsfArgumentError ----


def _list_of(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Parse "1,2"; repeated parts count once."""

    def parse_list(text: str) -> tuple[Any, ...]:
        parts = [part.strip() for part in text.split(",")]
        if not all(parts):
            raise ValueError(f"{text!r} is not a list such as 1,2")
        return tuple(dict.fromkeys(map(parse, parts)))

    return parse_list


def _budget(text: str) -> int | None:
    if text == "none":
        return None
    if not re.fullmatch(r"[1-9][0-9]{0,7}", text):
        raise ValueError(f"{text!r} is not a number of MB, or none")
    return int(text)


def _one_of(names: Collection[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"{text} is unknown; available: {', '.join(names)}")
        return text

    return parse


def _shape(text: str) -> str:
    return shapes.name_of(shapes.find_shape(text))


_TOKENS = _list_of(Whole(0, 1 << 20).parse)

# ---- the options ----


def _option(
    metavar: str,
    text: str,
    parse: Callable[[str], Any] = str,
    *,
    shown: str = "",
    default: Any = None,
    flags: tuple[str, ...] = (),
) -> Any:
    """Describe an option; ``shown`` is the default in words if it is not a plain value."""
    words = f"{text} [default: {shown}]" if shown else text
    metadata = {"metavar": metavar, "help": words, "flags": flags, "parse": parse}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The values of the command line, each checked alone. MB are 2^20 bytes."""

    models: tuple[Path, ...] = ()
    shape: tuple[str, ...] | None = _option(
        "NAME,...",
        "Shapes of random weights: see below.",
        _list_of(_shape),
        shown=DEFAULT_SHAPE,
    )
    quant: tuple[str, ...] | None = _option(
        "TYPE,...",
        "Types of random weights: see below.",
        _list_of(_one_of(QUANT_TYPES)),
        shown=",".join(DEFAULT_TYPES),
    )
    threads: tuple[int, ...] | None = _option(
        "N,...",
        "Numbers of threads.",
        _list_of(Whole(1, 256).parse),
        shown="1 and all cores, in a cgroup all cores",
    )
    prompt: tuple[int, ...] | None = _option(
        "N,...",
        "Lengths of prompts in tokens; 0: none.",
        _TOKENS,
        shown="512, in a cgroup 32",
    )
    gen: tuple[int, ...] | None = _option(
        "N,...",
        "Numbers of tokens to generate; 0: none.",
        _TOKENS,
        shown="128, in a cgroup 16",
    )
    depth: tuple[int, ...] = _option(
        "N,...", "Tokens in the context before each test.", _TOKENS, shown="0", default=(0,)
    )
    routing: tuple[str, ...] = _option(
        "local,even",
        "How random mixtures choose experts: as much alike from token to token as a trained one "
        "does, or evenly, the worst case.",
        _list_of(_one_of(ROUTINGS)),
        shown=DEFAULT_ROUTING,
        default=(DEFAULT_ROUTING,),
    )
    ram_budget: tuple[int | None, ...] | None = _option(
        "MB|none,...",
        "Memory budgets of QSF. llama.cpp has no budget: it runs only beside none, or in a cgroup.",
        _list_of(_budget),
        shown="none, in a cgroup its limit",
    )
    cgroup: tuple[int, ...] | None = _option(
        "300M,...",
        "Run everything in memory control groups of these limits. Linux, as root or in a "
        "delegated group.",
        _list_of(lambda text: parse_limit(text) >> 20),
    )
    rounds: int = _option(
        "N",
        "Rounds; each runs everything once.",
        Whole(1, 100).parse,
        shown=str(DEFAULT_ROUNDS),
        default=DEFAULT_ROUNDS,
    )
    baseline: tuple[str, ...] = _option(
        "llama.cpp|none",
        "What to measure beside QSF: llama-cpp-python, or nothing.",
        shown="llama.cpp where it is installed",
        default=(),
    )
    baseline_python: Path | None = _option(
        "PYTHON", "The Python that has llama-cpp-python.", Path, shown="the one that runs this"
    )
    baseline_model: tuple[Path, ...] = _option(
        "MODEL.gguf",
        "The .gguf file to measure beside a MODEL; once for each MODEL, in their order.",
        Path,
        shown="random weights of its shape",
        default=(),
    )
    kv_type: str | None = _option(
        "TYPE",
        f"For both sides: {_model_help('kv_type')}",
        MODEL_OPTIONS["kv_type"].kind.parse,
        shown="QSF the file's, else 8bit; llama.cpp f16",
    )
    io: str | None = _option(
        "HOW", _model_help("io"), _one_of(MODEL_OPTIONS["io"].kind.choices or ()), shown="auto"
    )
    json: Path | None = _option("FILE", "Write the results as JSON.", Path)
    html: Path | None = _option("FILE", "Write the report as one web page.", Path)
    cache: Path | None = _option(
        "FOLDER", "Folder for random weights.", Path, shown="~/.cache/qsf/bench"
    )
    force: bool = _option("", "Replace output files.", default=False)
    quiet: bool = _option("", "No progress on standard error.", default=False, flags=("-q",))


def parse(arguments: list[str], version: str) -> Options:
    """Return the command line's options; ``--help`` and ``--version`` print and end the program.

    Raises QsfArgumentError for an unknown option or a value of the wrong form.
    """
    values = vars(_parser(version).parse_args(arguments))
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return Options(**(values | lists))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise QsfArgumentError(f"{message.removeprefix('argument ')} (see {typed(PROGRAM)} --help)")


def _parser(version: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [OPTIONS] [MODEL.qsf]...",
        description="Measure how fast models run here, beside the machine's limits and llama.cpp.",
        epilog=_EPILOG,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=26, width=_HELP_COLUMNS
        ),
        allow_abbrev=False,
    )
    parser.add_argument(
        "models", nargs="*", type=Path, metavar="MODEL.qsf",
        help="Files to measure. [default: random weights]",
    )  # fmt: skip
    for option in fields(Options)[1:]:
        about = option.metadata
        flags = (*about["flags"], "--" + option.name.replace("_", "-"))
        keys: dict[str, Any] = {"dest": option.name, "help": about["help"]}
        if option.default is False:
            keys["action"] = "store_true"
        else:
            keys |= {"metavar": about["metavar"], "type": _value_of(about["parse"])}
            keys |= {"action": "append"} if option.default == () else {"default": option.default}
        parser.add_argument(*flags, **keys)
    parser.add_argument("--version", action="version", version=version)
    parser.set_defaults(baseline=[], baseline_model=[])
    return parser


def _value_of(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return ``parse`` with errors that argparse shows."""

    def value(text: str) -> Any:
        try:
            return parse(text)
        except (ValueError, QsfArgumentError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return value


def _lines(names: Iterable[str]) -> str:
    return textwrap.fill(", ".join(names), _HELP_COLUMNS - 10, break_on_hyphens=False).replace(
        "\n", "\n  "
    )


_EPILOG = f"""\
Examples:
  python -m qsf.bench
  python -m qsf.bench model.qsf --threads 2 --depth 0,2048
  python -m qsf.bench --shape llama2-7b --quant 4bit --cgroup 300M
  python -m qsf.bench --quant 4bit --ram-budget none,400,200 --html page.html
  python -m qsf.bench model.qsf --baseline-model model-Q4_K_M.gguf

Shapes: {_lines(shapes.SHAPES)}
Types: {_lines(QUANT_TYPES)}

Without a MODEL, files of random weights are made and kept in the cache folder.
`make baseline` builds llama.cpp for this processor; docs/benchmarks.md says
what is measured.

Exit codes: 0 done, 1 failed, 2 wrong options, 130 interrupted, 143 terminated."""
