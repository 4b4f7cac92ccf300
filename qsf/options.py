"""Every option of opening a model and of generating text, described once.

A field of ``ModelOptions`` or ``GenerationOptions`` has the type and the default, its ``Option``
the range, the unit, the help and the commands that take it. All commands read these descriptions.
Only small modules are imported here: ``qsf run`` counts its own memory in the budget.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from qsf.errors import QsfArgumentError, shown
from qsf.foreign_json import JsonError, read_json
from qsf.kv import KV_POLICIES, KV_TYPES, parse_kv_policy, parse_kv_type

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from qsf.text.generation import ChosenToken, TokenConstraint


MAX_U32 = 2**32 - 1

IO_METHODS = ("auto", "buffered", "direct", "uring", "mmap")
"""Ways of reading; the index is the number of ``qsf_io_method`` in qsf.h."""


# ---- the values of an option ----


class Kind:
    """The values of an option: ``rule`` describes them, ``parse`` reads one from a command line."""

    rule = "anything"
    metavar: str | None = None
    choices: tuple[str, ...] | None = None

    def is_valid(self, value: Any) -> bool:
        """Return whether ``value`` is a valid argument in Python."""
        return True

    def parse(self, text: str) -> Any:
        """Return the value that ``text`` stands for. Raises ValueError, with what is wrong."""
        raise NotImplementedError


class Whole(Kind):
    """A whole number."""

    metavar = "N"

    def __init__(self, least: int, most: int = MAX_U32) -> None:
        self.least, self.most = least, most
        self.rule = f"a whole number of at least {least}"
        if most < MAX_U32:
            self.rule = f"a whole number from {least} to {most}"

    def is_valid(self, value: Any) -> bool:
        """Return whether the value is in range; True and False are no numbers."""
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return is_whole and self.least <= value <= self.most

    def parse(self, text: str) -> int:
        number = int(text) if re.fullmatch(r"[-+]?[0-9]{1,30}", text) else self.least - 1
        if number < self.least:
            raise ValueError(f"{text!r} is not a whole number of at least {self.least}")
        if number > self.most:
            raise ValueError(f"{text} is too much: at most {self.most}")
        return number


class Length(Whole):
    """A number of tokens, at least 0; -1 on a command line: no limit."""

    def __init__(self) -> None:
        super().__init__(0)

    def parse(self, text: str) -> Any:
        return MAX_U32 if text == "-1" else super().parse(text)


_SIZE_MB = {
    **dict.fromkeys(("", "M", "MB", "MIB"), 1),
    **dict.fromkeys(("G", "GB", "GIB"), 1024),
    **dict.fromkeys(("T", "TB", "TIB"), 1024**2),
}
_MAX_BUDGET_MB = MAX_U32


def megabytes(text: str, others: str = "") -> float:
    """Return the MB of "300", "300MB" or "1.5GB". Raises ValueError, which names ``others`` too."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,17})?) ?([A-Za-z]{0,3})", text)
    factor = None if match is None else _SIZE_MB.get(match[2].upper())
    if match is None or factor is None:
        examples = "MB as a number (300), a size (300MB, 1.5GB)"
        raise ValueError(f"{text!r} is not a size: {examples}{others}")
    return float(match[1]) * factor


class Size(Whole):
    """A whole number of MB of 2^20 bytes; on a command line a size."""

    metavar = "SIZE"

    def parse(self, text: str) -> int:
        return super().parse(str(int(megabytes(text))))


class Budget(Kind):
    """Memory in MB of 2^20 bytes, as a size ("1.5GB"), as a share ("50%"), or "auto"."""

    metavar = "SIZE"
    rule = (
        'a whole number of MB of at least 1, a size such as "300MB" or "1.5GB", a share of the '
        'machine such as "50%", or "auto"'
    )

    def is_valid(self, value: Any) -> bool:
        if isinstance(value, str):
            try:
                return not value[-1:].isdigit() and self.parse(value) is not None
            except ValueError:
                return False
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return is_whole and 1 <= value <= _MAX_BUDGET_MB

    def parse(self, text: str) -> int | str | None:
        """Return MB, "auto" or a share such as "50%"; None for 0, which means no limit."""
        if text == "auto":
            return text
        is_share = text.endswith("%")
        others = ", a share of the machine's memory (50%), 0 for no ceiling, or auto"
        number = megabytes(f"{text[:-1]}MB" if is_share else text, others)
        if is_share:
            if not 1 <= number <= 100:
                raise ValueError(f"{text} is not from 1% to 100%")
            return text
        if number >= _MAX_BUDGET_MB + 1:
            raise ValueError(f"{text} is too much: at most {_MAX_BUDGET_MB} MB")
        if 0 < number < 1:
            raise ValueError(f"{text} is less than 1 MB")
        return int(number) or None


class Number(Kind):
    """A finite number from ``least`` (above it with ``is_open``) to ``most``."""

    metavar = "F"

    def __init__(self, least: float, most: float, *, is_open: bool = False) -> None:
        self.least, self.most, self.is_open = least, most, is_open
        words = f"above {least:g} and at most" if is_open else f"from {least:g} to"
        self.rule = f"a number {words} {most:g}"

    def is_valid(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return self.least <= value <= self.most and not (self.is_open and value == self.least)

    def parse(self, text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not self.is_valid(number):
            raise ValueError(f"{text!r} is not {self.rule}")
        return number


class Flag(Kind):
    """True or False; a command's option without a value."""

    rule = "True or False"

    def is_valid(self, value: Any) -> bool:
        return isinstance(value, bool)


class Switch(Flag):
    """None, True or False; "auto", "on" or "off" on a command line."""

    choices = ("auto", "on", "off")

    def parse(self, text: str) -> bool | None:
        return {"auto": None, "on": True, "off": False}[text]


class Choice(Kind):
    """One of several words, or with ``has_files`` the path of a file."""

    def __init__(self, *words: str, has_files: bool = False) -> None:
        self.choices = None if has_files else words
        self.rule = f"one of {', '.join(words)}" + has_files * (
            ", or a .qsf file (`qsf convert FOLDER FILE` makes one)"
        )
        self.metavar = "|".join((*words, "FILE")) if has_files else None

    def is_valid(self, value: Any) -> bool:
        if self.choices is None:
            is_path = isinstance(value, str | os.PathLike) and bool(os.fspath(value))
            return is_path and not Path(value).is_dir()
        return isinstance(value, str) and value in self.choices

    def parse(self, text: str) -> str:
        return text


class Name(Kind):
    """A name that a function understands; it raises ValueError for any other."""

    def __init__(self, parse: Callable[[str], object], metavar: str, rule: str) -> None:
        self._parse, self.metavar, self.rule = parse, metavar, rule

    def is_valid(self, value: Any) -> bool:
        try:
            self._parse(value)
        except (TypeError, ValueError):
            return False
        return True

    def parse(self, text: str) -> str:
        self._parse(text)
        return text


class Texts(Kind):
    """A text, or several, none of them empty; may be repeated on a command line."""

    metavar = "TEXT"
    rule = "a text, or a sequence of texts, that are not empty"

    def is_valid(self, value: Any) -> bool:
        """Return whether the value is such a text or sequence; consumes nothing."""
        if isinstance(value, str):
            return bool(value)
        if not isinstance(value, list | tuple | set | frozenset):
            return False
        return all(isinstance(text, str) and text for text in value)

    def parse(self, text: str) -> str:
        if not text:
            raise ValueError("the text is empty")
        return text


class Files(Texts):
    """Paths of files, with ``NAME=`` before and ``:SCALE`` behind, or not; may be repeated."""

    metavar = "[NAME=]FILE[:SCALE]"
    rule = "a path, or a sequence of paths, with NAME= before and :SCALE behind them or not"

    def is_valid(self, value: Any) -> bool:
        several = value if isinstance(value, list | tuple) else (value,)
        return all(isinstance(path, str | os.PathLike) and os.fspath(path) for path in several)


class Keywords(Kind):
    """Values by name for a chat template; may be repeated on a command line."""

    metavar = "NAME=VALUE"
    rule = (
        "a mapping from names to JSON values, without messages and add_generation_prompt, "
        "which the conversation is"
    )

    def is_valid(self, value: Any) -> bool:
        """Return whether all names are valid in a template, which checks the values itself."""
        return isinstance(value, Mapping) and all(
            isinstance(name, str)
            and name.isidentifier()
            and name not in ("messages", "add_generation_prompt")
            for name in value
        )

    def parse(self, text: str) -> dict[str, Any]:
        """Return the values of ``name=value`` (JSON, or else a text) or of a JSON object."""
        name, equals, value = text.partition("=")
        is_object = text.startswith("{")
        try:
            keywords = read_json(text if is_object else value)
        except JsonError as error:
            if is_object:
                raise ValueError(f"{text!r} is not a JSON object: {error}") from None
            keywords = value
        keywords = keywords if is_object else {name.strip(): keywords}
        if not (equals or is_object) or not self.is_valid(keywords):
            raise ValueError(f"{text!r} is not NAME=VALUE, such as enable_thinking=false")
        return dict(keywords)


class Layers(Kind):
    """The first layer of a stage, and the one after its last."""

    rule = "two whole numbers, the first layer and the one after the last"

    def is_valid(self, value: Any) -> bool:
        """Return whether the value is such a pair."""
        is_pair = isinstance(value, tuple) and len(value) == 2
        return is_pair and all(map(Whole(0).is_valid, value)) and value[0] < value[1]


class Call(Kind):
    """Something that can be called."""

    rule = "a function"

    def is_valid(self, value: Any) -> bool:
        return callable(value)


@dataclass(frozen=True, slots=True)
class Option:
    """The description of an option.

    Attributes:
        name: of the argument in Python; commands write it with dashes.
        kind: its values.
        default: of the argument.
        help: what it does, as the start of a sentence; without the default.
        default_help: the default in words; "": the value itself.
        commands: of the command line which take it, or groups of their help.
        also: other names on command lines: one letter, or a name of other programs.
        is_main: the short help shows it.
    """

    name: str
    default: Any
    kind: Kind
    help: str
    default_help: str = ""
    commands: tuple[str, ...] = ("run",)
    also: tuple[str, ...] = ()
    is_main: bool = False

    @property
    def flag(self) -> str:
        """The option's name on a command line: ``--ram-budget``."""
        return "--" + self.name.replace("_", "-")

    @property
    def default_text(self) -> str:
        """The default in words."""
        if self.default_help or self.default is None:
            return self.default_help
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def help_text(self) -> str:
        """The help with the default."""
        if not self.default_text or isinstance(self.default, bool):
            return self.help
        return f"{self.help} (default: {self.default_text})"

    def check(self, value: Any) -> None:
        """Raise QsfArgumentError unless ``value`` is allowed; None is if it is not a number."""
        if value is None and (self.default is None or self.name == "ram_budget"):
            return
        check_value(self.name, value, self.kind)


def check_value(name: str, value: object, kind: Kind) -> None:
    """Raise QsfArgumentError unless ``value`` is allowed for the argument ``name``."""
    if not kind.is_valid(value):
        raise QsfArgumentError(f"{name} must be {kind.rule}, not {shown(value)}", argument=name)


def option_field(default: Any, *facts: Any, **more: Any) -> Any:
    """Return the field of a ``CheckedOptions``; the arguments are those of ``Option``."""
    option = Option("", default, *facts, **more)
    is_shown = not isinstance(option.kind, Call)  # texts that other processes compare
    return dataclasses.field(default=default, repr=is_shown, metadata={"option": option})


def described(options: type, command: str = "") -> tuple[Option, ...]:
    """Return the options among the fields of ``options``; with a command only those it takes."""
    all_of_them = (
        dataclasses.replace(field.metadata["option"], name=field.name)
        for field in dataclasses.fields(options)
        if field.metadata
    )
    return tuple(o for o in all_of_them if not command or command in o.commands)


class CheckedOptions:
    """Base of dataclasses whose fields are options; values are checked on creation."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for option in described(type(self)):
            option.check(getattr(self, option.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(CheckedOptions):
    """How to open a model. Checked when made. Raises QsfArgumentError, which names the option."""

    ram_budget: int | str | None = option_field(
        "auto",
        Budget(),
        "ceiling for the memory of the whole process, Python and tokenizer included: MB of 2^20 "
        "bytes, or 300MB, 1.5GB, 50% of the machine; auto: what model and context need, at most "
        "half of the free memory, at least 200 MB; 0 (in Python None): no ceiling",
        is_main=True,
    )
    threads: int | None = option_field(
        None, Whole(1, 256), "at most 256", "one per physical core", also=("-t",)
    )
    pin_threads: bool = option_field(
        False, Flag(), "keep each thread that the engine starts on a core of its own (Linux)"
    )
    max_seq_len: int | None = option_field(
        None,
        Whole(1),
        "longest sequence in tokens, prompt included",
        "the model's, at most 16384, less where the budget is small",
        also=("-c", "--ctx-size"),
        is_main=True,
    )
    kv_type: str | None = option_field(
        None,
        Name(parse_kv_type, "TYPE", f"a type of KV cache: {KV_TYPES}"),
        "precision of the KV cache: f16, 8bit, 4bit, 2bit, or keys and values apart, as k8v4",
        "the file's: 8bit, or f16 where its conversion measured that 8 bits cost over 0.5 %",
    )
    kv_policy: str = option_field(
        "none",
        Name(parse_kv_policy, "POLICY", f"a policy for the KV cache: {KV_POLICIES}"),
        "how a text goes on that outgrows its memory: recompute evaluates the beginning and the "
        "newest half again; window:W holds only the W newest tokens; disk holds all, the oldest in "
        "a file in TMPDIR that each pass reads (docs/memory.md)",
    )
    kv_rotation: bool | None = option_field(
        None,
        Switch(),
        "rotate keys and values by a Hadamard matrix, which makes few bits enough",
        "auto: with 8 bits or fewer, in heads of 16 to 256 dimensions",
    )
    io: str | None = option_field(
        None,
        Choice(*IO_METHODS),
        "how weights that do not fit in memory are read: buffered, direct (past the page cache), "
        "uring (io_uring, past it too) or mmap",
        "auto: buffered if the page cache has room for the file, else direct",
    )
    io_depth: int | None = option_field(
        None,
        Whole(1, 32),
        "reads under way at the same time, at most 32",
        "as many as are fastest, to 8",
    )
    quality: float = option_field(
        1.0,
        Number(0, 1),
        "below 1: skip the share 1 - F of the layers, the least important first, but never the "
        "first two or the last two: faster, less memory, worse text (0.8 skips a fifth; the file "
        "must say how important its layers are)",
        "1, all run",
    )
    draft: str | os.PathLike[str] = option_field(  # noqa: RUF009
        "auto",
        Choice("auto", "off", has_files=True),
        "auto: a pass over the weights also evaluates guesses of the next tokens, made from the "
        "text so far and by the file's MTP head, if it has one, where that saves time; the text "
        "is the same with and without. FILE: a "
        "smaller model, a .qsf file with the same tokenizer, guesses too",
    )
    draft_rows: int = option_field(15, Whole(1, 127), "most guesses in a pass")
    lora: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = option_field(  # noqa: RUF009
        (),
        Files(),
        "change the model by an adapter of low rank that `qsf convert --lora ADAPTER --for MODEL` "
        "made for this file, with :0.5 behind it at half its strength; repeatable: all add up, but "
        "those with a NAME, which a request or `session.adapter` chooses",
        "none",
    )
    exact: bool = option_field(False, Flag(), "full-precision arithmetic: slow, for reference")
    sessions: int = option_field(
        1,
        Whole(1, 256),
        "how many sessions may be open at the same time, the model's own included; the budget "
        "holds a KV cache for each",
        commands=(),
    )
    kv_contexts: int | None = option_field(
        None, Whole(1), "full contexts that the KV pool holds", "one for each session", commands=()
    )
    reserve_mb: int = option_field(
        8,
        Whole(8, 1 << 20),
        "MB of the budget that are left to what Python and the program around it allocate",
        commands=(),
    )
    layers: tuple[int, int] | None = option_field(
        None,
        Layers(),
        "only the layers from the first number to before the second: a stage (docs/machines.md)",
        commands=(),
    )
    rows: Callable[..., Any] | None = option_field(  # noqa: RUF009
        None,
        Call(),
        "where a stage gets the rows of the layers before it: such as ``Stage.rows``",
        commands=(),
    )

    @property
    def adapters(self) -> tuple[str, ...]:
        """``lora`` as texts."""
        one = isinstance(self.lora, str | os.PathLike)
        return tuple(map(os.fspath, (self.lora,) if one else self.lora))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions(CheckedOptions):
    """How to continue a prompt. Checked when made. Raises QsfArgumentError, which names the option.

    If one of the five from ``temperature`` on is None, the file's recommendation holds, else
    ``SamplingParams()``.
    """

    max_tokens: int = option_field(
        256,
        Length(),
        "at most so many tokens; -1: until the model ends or the context is full",
        "-1 for answers by a chat template in qsf run and qsf chat, else 256",
        also=("-n", "--n-predict"),
        is_main=True,
    )
    temperature: float | None = option_field(
        None,
        Number(0, 100),
        "0 always takes the most probable token",
        "the file's, else 0.7",
        also=("--temp",),
        is_main=True,
    )
    top_p: float | None = option_field(
        None,
        Number(0, 1, is_open=True),
        "choose among the tokens that together have this probability; 1: off",
        "the file's, else 0.9",
    )
    top_k: int | None = option_field(
        None, Whole(0), "choose among the N most probable tokens; 0: off", "the file's, else 40"
    )
    min_p: float | None = option_field(
        None,
        Number(0, 1),
        "choose among the tokens at least F times as probable as the first; 0: off",
        "the file's, else 0",
    )
    repetition_penalty: float | None = option_field(
        None,
        Number(0.01, 100),
        "above 1: make tokens less probable that occurred already; 1: off",
        "the file's, else 1",
        also=("--repeat-penalty",),
    )
    seed: int | None = option_field(
        None,
        Whole(0, 2**64 - 1),
        "the same seed gives the same text",
        "a new one; the statistics have it",
    )
    stop: str | Sequence[str] = option_field(
        (), Texts(), "stop before this text; repeatable", "none"
    )
    template_args: Mapping[str, Any] | None = option_field(
        None,
        Keywords(),
        "what the chat template is told beside the messages, such as enable_thinking=false, or "
        "tools; a JSON object gives several",
        "nothing",
        also=("--template-arg", "--chat-template-kwargs"),
    )
    constraint: Callable[[], TokenConstraint] | None = option_field(  # noqa: RUF009
        None,
        Call(),
        "called for each answer, returns what says which tokens may come next",
        commands=(),
    )
    begins_text: bool = option_field(
        False,
        Flag(),
        "the output is a text of its own (an answer), not the rest of the prompt's, so a "
        "SentencePiece vocabulary's leading space is dropped",
        commands=(),
    )
    progress: Callable[[int, int], None] | None = option_field(  # noqa: RUF009
        None,
        Call(),
        "called while a long prompt is read, with how many of its tokens are done and how many "
        "there are; it may use the model",
        commands=(),
    )
    on_token: Callable[[ChosenToken], None] | None = option_field(  # noqa: RUF009
        None,
        Call(),
        "called with each token that is chosen, one that ends the text included, and its "
        "log-probability; it may use the model",
        commands=(),
    )
    on_reasoning: Callable[[str], None] | None = option_field(  # noqa: RUF009
        None,
        Call(),
        "called with pieces of the model's thoughts (between <think> and </think>, or in other "
        "channels of gpt-oss than the final one), which are not part of the answer; it may use the "
        "model",
        commands=(),
    )
    top_logprobs: int = option_field(
        0,
        Whole(0, 100),
        "how many of the most probable tokens on_token is told beside the chosen one",
        commands=(),
    )


_P = ParamSpec("_P")
_Self = TypeVar("_Self")
_First = TypeVar("_First")
_Options = TypeVar("_Options")
_Result = TypeVar("_Result")


def taking(
    options: Callable[_P, _Options],
) -> Callable[
    [Callable[[_Self, _First, _Options], _Result]],
    Callable[Concatenate[_Self, _First, _P], _Result],
]:
    """Make a method ``(self, first, options)`` callable as ``(self, first, name=value, ...)``.

    Type checkers, editors and ``help()`` show the options as arguments.
    """

    def decorate(
        method: Callable[[_Self, _First, _Options], _Result],
    ) -> Callable[Concatenate[_Self, _First, _P], _Result]:
        own = list(inspect.signature(method).parameters.values())[:2]
        first_name = own[1].name

        @functools.wraps(method)
        def call(self: _Self, *args: Any, **arguments: Any) -> _Result:
            if not args and first_name in arguments:
                args = (arguments.pop(first_name),)
            if len(args) != 1:
                raise TypeError(
                    f"{method.__qualname__}() takes {first_name}, and options by name; "
                    f"{len(args)} arguments without a name were given"
                )
            return method(self, args[0], options(**arguments))  # type: ignore[call-arg]

        signature = inspect.Signature([*own, *inspect.signature(options).parameters.values()])
        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__doc__ = _with_options(method.__doc__ or "", options)
        return call  # type: ignore[return-value]

    return decorate


def call_with(
    method: Callable[Concatenate[_First, ...], _Result], first: _First, options: object
) -> _Result:
    """Call a bound method of `taking` with options that are already checked."""
    bound: Any = method
    result: _Result = bound.__func__.__wrapped__(bound.__self__, first, options)
    return result


def _with_options(text: str, options: Any) -> str:
    """Return a docstring with the options in place of ``{options}``."""
    lines = [f"{o.name}: {o.help_text}." for o in described(options)]
    return text.replace("{options}", "\n            ".join(lines))
