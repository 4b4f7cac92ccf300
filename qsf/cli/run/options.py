"""The options of ``qsf run`` and of ``qsf chat``, which is the same with ``--interactive``.

The user's defaults are in ``~/.config/qsf/config.toml``, a line for each option of ``qsf run``.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import argparse
import importlib
import os
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from qsf.cli.machines import MachinesOptions
from qsf.cli.run.answer import say
from qsf.errors import QsfArgumentError, QsfIOError
from qsf.file.foreign_text import text_of
from qsf.native.opening import read_adapters
from qsf.options import (
    Flag,
    GenerationOptions,
    Kind,
    ModelOptions,
    Option,
    Switch,
    Texts,
    Whole,
    described,
    option_field,
)
from qsf.shell.arguments import FilePath, Group, Parser, Text, UsageError, model_parser, taken
from qsf.system.files import READ_FLAGS, user_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from qsf.text.constraints import Constraint


# Bytes of the budget for the grammar and its matcher.
RESERVE_MB = 8
_MAX_BYTES = 64 << 10


def read_constraint(path: Path, form: tuple[str, str] | None) -> Callable[[], Constraint] | None:
    """Return a maker of the constraint for answers of the model at ``path``; None: no constraint.

    ``form`` is an option and its value, such as ("regex", "[a-z]+").

    It takes some megabytes for the vocabulary, so it comes before the model is opened.
    """
    if form is None:
        return None
    from qsf.text.constraints import Constraints

    option, value = form
    if option != "regex":
        with Path(value).open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise QsfArgumentError(f"{value} is larger than {_MAX_BYTES} bytes")
        value = text_of(data, value)
    kind = "json" if option == "json-schema" else option
    constraint = Constraints(path).make(kind, value, f"--{option}")
    if constraint.unenforced:
        names = ", ".join(sorted(constraint.unenforced))
        say(f"warning: --{option}: {names} cannot be enforced: check the answer")
    return constraint.copy


_EPILOG = """\
examples:
  qsf run model.qsf "Who are you?"
  qsf run model.qsf --prompt "Once upon a time" --raw --temperature 0 --max-tokens 50
  qsf chat model.qsf --ram-budget 400MB
  echo "Once upon a time" | qsf run model.qsf > story.txt
"""
_CHAT_EPILOG = """\
examples:
  qsf chat model.qsf
  qsf chat Qwen/Qwen3-4B --ram-budget 1GB
  qsf chat model.qsf --session talk.qsfs       (goes on with it tomorrow)
  qsf chat model.qsf --system "Answer in one sentence."
"""
_MORE_EPILOG = """\
  qsf run model.qsf --ram-budget 100 --plan
  qsf run model.qsf --prompt "Once upon a time" --kv-type k8v4
  qsf run model.qsf --prompt "Once upon a time" --io direct --io-depth 4 --verbose
  qsf run model.qsf --prompt "Who are you?" --session talk.qsfs
  qsf run model.qsf --prompt "Once upon a time" --json
  qsf run model.qsf --prompts asked.jsonl --parallel 8 > answers.jsonl

MODEL is a .qsf file, a HuggingFace folder, a GGUF file, a folder of the HuggingFace cache, or the
name of a model there: Qwen/Qwen3-4B. What is no .qsf file is converted once, as by qsf convert;
MODEL:8bit asks for another type. `qsf list` shows what was converted.

Defaults of your own: ~/.config/qsf/config.toml, with lines such as ram-budget = "1GB".

exit codes: 0 done, 1 failed, 2 wrong options, 130 interrupted, 143 terminated
"""

# Options that constrain the form of answers.
_FORMS = ("json_schema", "grammar", "regex")
_DEFAULT_PARALLEL = 4

# Options of other programs that have another name here, or that are not needed.
_HABITS = {
    "--ctx": "--max-seq-len",
    "--num-ctx": "--max-seq-len",
    "--num-predict": "--max-tokens",
    "-sys": "--system",
    "--system-prompt": "--system",
    "--file": "--prompt-file",
    "-cnv": "--interactive",
    "--conversation": "--interactive",
    "-no-cnv": "--raw",
    "-ctk": "--kv-type",
    "--cache-type-k": "--kv-type",
    "--cache-type-v": "--kv-type",
    "--memory": "--ram-budget",
    "--reverse-prompt": "--stop",
    "-s": "--seed",
    "-ngl": "",
    "--n-gpu-layers": "",
    "--gpu-layers": "",
    "--mlock": "--ram-budget",
    "--no-mmap": "--io",
}


class _Help(argparse.Action):
    """Prints the short help, or with ``const`` all of it, and exits."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> NoReturn:
        _parser(shows_all=bool(self.const), is_chat=namespace.interactive).print_help()
        sys.exit(0)


def _flag(help: str, *groups: str, **more: Any) -> Any:
    return option_field(False, Flag(), help, commands=groups, **more)


def _given(kind: Kind, help: str, *groups: str, default_help: str = "", **more: Any) -> Any:
    return option_field(None, kind, help, default_help, commands=groups, **more)


def _form(kind: Kind, language: str) -> Any:
    return _given(kind, f"answers follow {language} (needs the Python package llguidance)", "run")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(MachinesOptions):
    """Actions of `qsf run` and `qsf chat`; ``commands`` are the groups of help that list them."""

    prompt: str | None = _given(
        Text("TEXT"),
        "what to answer, by the file's chat template; without one, or with --raw, text to continue",
        "run",
        also=("-p",),
        is_main=True,
    )
    prompt_file: str | None = _given(
        Text("FILE"),
        'read the prompt from a file; "-" is standard input, which is also read when it is not a '
        "terminal and there is no other prompt. One line end at its end is not part of the prompt",
        "run",
        also=("-f",),
        is_main=True,
    )
    interactive: bool = _flag(
        "chat, as on a terminal without a prompt: /help there shows what can be typed",
        "run",
        also=("-i",),
        is_main=True,
    )
    prompts: str | None = _given(
        Text("FILE.jsonl"),
        "answer many prompts, several in each pass over the weights: each line is a JSON text, or "
        "an object with prompt or messages, and id if you like; one JSON object a line is printed "
        'for each, as with --json, as soon as it is there. "-" is standard input',
        "run",
    )
    parallel: int | None = _given(
        Whole(1, 256),
        "with --prompts or --plan: prompts under way at the same time; the budget holds a KV cache "
        "for each, before weights",
        "run",
        default_help=str(_DEFAULT_PARALLEL),
    )
    answers: Path | None = _given(  # noqa: RUF009
        FilePath("FILE.jsonl"),
        "with --prompts: add the answers to this file; prompts that it answers already are left "
        "out, so that the same command goes on after an interruption",
        "run",
    )
    workers: int | None = _given(
        Whole(1, 4096),
        "with --prompts and --ray: models that answer at the same time, each in a budget of its "
        "own",
        "run",
        default_help="one for each machine",
    )
    json_schema: str | None = _form(Text("FILE"), "a JSON schema")
    grammar: str | None = _form(Text("FILE"), "a grammar in llama.cpp's notation (GBNF), or Lark")
    regex: str | None = _form(Text("TEXT"), "a regular expression")
    system: str | None = _given(
        Text("TEXT"), "how the model is to answer", "run", "chat", is_main=True
    )
    session: Path | None = _given(  # noqa: RUF009
        FilePath("FILE"),
        "a conversation that is continued, and written back with the answer: with its KV cache, so "
        "that nothing is evaluated again, or if it is called FILE.json as a JSON list of messages "
        "with role and content; it need not exist",
        "run",
        "chat",
        also=("--history",),
    )
    think: bool = _flag(
        "let the model think before it answers, where its chat template has a switch for it",
        "run",
        "chat",
    )
    no_think: bool = _flag(
        "let the model answer without thinking, where its chat template has a switch for it",
        "run",
        "chat",
    )
    hide_thinking: bool = _flag("show only that the model thinks", "run", "chat")
    no_loop_guard: bool = _flag(
        "do not end an answer that repeats one text 8 times and for 200 tokens, as is done on a "
        "terminal",
        "run",
        "chat",
    )
    raw: bool = _flag("continue the prompt: no chat template", "run", is_main=True)
    no_special: bool = _flag(
        "take text in the prompt that reads like a special token as ordinary text, as is always "
        "done where a chat template makes the prompt",
        "run",
    )
    verbose: bool = _flag(
        "say what the file is, what runs, where the memory goes, and at the end where the time "
        "went: reading, waiting for it, computing",
        "output",
        also=("-v",),
        is_main=True,
    )
    plain: bool = _flag(
        "on a terminal, too, print what the model writes: lines are not wrapped at words, Markdown "
        "is not shown by styles",
        "output",
    )
    quiet: bool = _flag("no progress, no statistics at the end", "output", also=("-q",))
    json: bool = _flag(
        "print one JSON object: the text, its token ids, why it ended, statistics", "output"
    )
    stream: bool = _flag(
        "with --json: one object a line for each piece of text, then the whole", "output"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(RunOptions):
    """The command line, parsed.

    ``path`` is the model's name as typed, and after ``qsf.find`` its .qsf file.
    """

    path: Path
    model: str
    generation: GenerationOptions
    has_length: bool  # --max-tokens was given, or is in the user's defaults
    opening: ModelOptions
    plan: bool
    yes: bool

    @property
    def form(self) -> tuple[str, str] | None:
        """The option that constrains the form of answers, with its value."""
        return next(iter(_forms(self)), None)

    @property
    def thinks(self) -> bool | None:
        """Whether the model is to think; None: the default of its chat template."""
        return self.think if self.think or self.no_think else None


# argparse instead of typer: typer imports pydantic, 22 MiB of a budget that counts the whole
# process (argparse: 2 MiB).
def _parser(*, shows_all: bool = True, is_chat: bool = False) -> Parser:
    if is_chat:
        parser = model_parser(
            "qsf chat",
            "the same as qsf run --interactive",
            "Talk to a model inside a memory budget. /help in the chat shows what can be typed.",
            _CHAT_EPILOG + ("" if shows_all else "\n--help-all shows all options.\n"),
        )
        group = Group(parser, "conversation", shows_all=shows_all)
        group.add_options(RunOptions, "chat", main=("session",))
    else:
        parser = model_parser(
            "qsf run",
            "or MODEL PROMPT; qsf chat MODEL chats",
            "Generate text with a model inside a memory budget. On a terminal, without a prompt, "
            "chat with it.",
            _EPILOG + (_MORE_EPILOG if shows_all else "\n--help-all shows all options.\n"),
        )
        group = Group(parser, "prompt", shows_all=shows_all)
        group.add("-m", "--model", dest="named_model", metavar="MODEL", help="the same as MODEL")
        group.add_options(RunOptions)
    Group(parser, "several machines", shows_all=shows_all).add_options(MachinesOptions, "machines")
    Group(parser, "choice of tokens", shows_all=shows_all).add_options(GenerationOptions)
    group = Group(parser, "memory and speed", shows_all=shows_all)
    group.add_options(ModelOptions)
    group.add_plan()
    group = Group(parser, "output", shows_all=shows_all)
    group.add_options(RunOptions, "output")
    group.add_asking()
    group.add("-h", "--help", action=_Help, nargs=0, is_main=True, help="show the main options")
    group.add(
        "--help-all", action=_Help, nargs=0, const=True, is_main=True, help="show all options"
    )
    return parser


def parse(arguments: list[str]) -> Request:
    """Return the command line, parsed, with the user's defaults.

    Raises UsageError for a wrong command line, QsfArgumentError for wrong defaults of the user.
    """
    for word in arguments:
        name = word.split("=")[0]
        if name in _HABITS:
            other = _HABITS[name]
            raise UsageError(
                f"there is no {name}: {other} is its name here"
                if other
                else f"there is no {name}: QSF computes on the processor, in the memory of "
                "--ram-budget"
            )
    parser = _parser()
    usual = {name: parser.get_default(name) for name in ("max_tokens", "ram_budget")}
    parser.set_defaults(**dict.fromkeys(usual, ...) | read_defaults())
    options, rest = parser.parse_known_args(arguments)
    if len(rest) == 1 and not rest[0].startswith("-") and options.prompt is None:
        options.prompt, rest = rest[0], []
    if rest:
        rest.sort(key=lambda word: not word.startswith("-"))
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    _check(options)
    is_given = {name: getattr(options, name) is not ... for name in usual}
    for name, value in usual.items():
        if not is_given[name]:
            setattr(options, name, value)
    options.quiet |= options.json
    model = options.model or options.named_model
    opening = replace(taken(ModelOptions, options), sessions=_sessions(options))
    if any(each.name for each in read_adapters(opening)):
        raise UsageError("--lora NAME=FILE is for qsf serve and its requests: leave NAME= out")
    if _forms(options):
        opening = replace(opening, reserve_mb=RESERVE_MB)
    given = taken(RunOptions, options, "")
    return Request(
        **{field.name: getattr(given, field.name) for field in fields(RunOptions)},
        path=Path(model),
        model=model,
        generation=taken(GenerationOptions, options),
        has_length=is_given["max_tokens"],
        opening=opening,
        plan=options.plan,
        yes=options.yes,
    )


def _forms(options: Any) -> list[tuple[str, str]]:
    forms = [(name.replace("_", "-"), getattr(options, name)) for name in _FORMS]
    return [(name, value) for name, value in forms if value is not None]


def _sessions(options: argparse.Namespace) -> int:
    """Return how many prompts are answered at the same time."""
    if options.parallel is not None:
        return int(options.parallel)
    return 1 if options.prompts is None else _DEFAULT_PARALLEL


def _check_many(options: argparse.Namespace) -> None:
    """Raise UsageError for options that exclude --prompts or need it."""
    if options.parallel is not None and options.prompts is None and not options.plan:
        raise UsageError("--parallel is for --prompts and --plan")
    if options.answers is not None and options.prompts is None:
        raise UsageError("--answers is for --prompts")
    if options.stage_timeout is not None and options.machines is None:
        raise UsageError("--stage-timeout is for --machines")
    if options.machines is not None and options.ray is None:
        raise UsageError("--machines needs --ray, which says where they are")
    if options.ray is not None and options.prompts is None and options.machines is None:
        raise UsageError("--ray is for --prompts or --machines")
    has_workers = options.ray is not None and options.machines is None
    if options.workers is not None and not has_workers:
        raise UsageError("--workers is for --prompts and --ray, without --machines")
    if has_workers and (forms := _forms(options)):
        raise UsageError(f"--{forms[0][0]} is for one machine: leave --ray out")
    if options.prompts is None:
        return
    for name in (
        "prompt",
        "prompt_file",
        "interactive",
        "system",
        "session",
        "stream",
        "no_special",
    ):
        if getattr(options, name):
            raise UsageError(f"--prompts has them all: leave --{name.replace('_', '-')} out")


def _check(options: argparse.Namespace) -> None:
    """Raise UsageError for options that are missing or exclude each other."""
    if options.model is None and options.named_model is None:
        raise UsageError("MODEL is missing: a .qsf file, a HuggingFace folder, a GGUF file")
    if not (options.model or options.named_model):
        raise UsageError("the name of MODEL is empty")
    if options.model is not None and options.named_model is not None:
        raise UsageError(f"one MODEL is enough: {options.model!r} or {options.named_model!r}")
    if options.prompt is not None and options.prompt_file is not None:
        raise UsageError("--prompt and --prompt-file exclude each other")
    if options.interactive and (options.prompt is not None or options.prompt_file is not None):
        raise UsageError("--interactive asks for its prompts: leave --prompt out")
    _check_many(options)
    if len(forms := _forms(options)) > 1:
        raise UsageError(f"--{forms[0][0]} and --{forms[1][0]} exclude each other")
    if options.think and options.no_think:
        raise UsageError("--think and --no-think exclude each other")
    if options.stream and not options.json:
        raise UsageError("--stream is for --json: text is streamed anyway")
    for name in ("interactive", "system", "session", "template_args"):
        if options.raw and getattr(options, name):
            raise UsageError(f"--raw has no turns: leave --{name.replace('_', '-')} out")
    if options.json and (options.interactive or options.plan):
        raise UsageError("--json is for one answer, not for --interactive or --plan")


_MAX_BYTES = 64 << 10


def config_path() -> Path:
    """Return the path of the file, which may not exist."""
    return user_folder("XDG_CONFIG_HOME", "~/.config") / "config.toml"


def read_defaults() -> dict[str, Any]:
    """Return the values of the file by option name; {} without a file.

    Raises:
        QsfArgumentError: an option is unknown or its value is not allowed.
        QsfIOError: the file cannot be read.
    """
    path = config_path()
    try:
        with os.fdopen(os.open(path, READ_FLAGS), "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise QsfIOError(f"{path}: {error.strerror}") from error
    options = {
        option.flag.removeprefix("--"): option
        for kind in (ModelOptions, GenerationOptions)
        for option in described(kind, "run")
    }
    return dict(_value(path, options, name, value) for name, value in _parsed(path, data).items())


def _parsed(path: Path, data: bytes) -> dict[str, Any]:
    if len(data) > _MAX_BYTES:
        raise QsfArgumentError(f"{path}: more than {_MAX_BYTES} bytes are too many for options")
    try:
        # Imported late: only needed if the file exists
        tomllib = importlib.import_module("tomllib")
    except ImportError:
        raise QsfArgumentError(
            f"{path}: reading it takes Python 3.11 or newer: remove it, or use options"
        ) from None
    text = text_of(data, str(path))
    try:
        values: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise QsfArgumentError(f"{path}: {error}") from error
    return values


def _value(path: Path, options: dict[str, Option], name: str, value: Any) -> tuple[str, Any]:
    """Return the option's name in Python and its value as a parsed command line has it."""
    option = options.get(name.replace("_", "-"))
    if option is None:
        from difflib import get_close_matches

        likely = get_close_matches(name, options, 1)
        guess = f": did you mean {likely[0]}?" if likely else f"; there are {', '.join(options)}"
        raise QsfArgumentError(f"{path}: there is no option {name}{guess}")
    kind = option.kind
    try:
        if isinstance(kind, Switch):
            word = ("on" if value else "off") if isinstance(value, bool) else value
            if word not in Switch.choices:
                raise ValueError(f"{value!r} is not one of {', '.join(Switch.choices)}")
            return option.name, word
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            option.check(value)
        elif not isinstance(kind, Flag | Texts):
            return option.name, kind.parse(str(value))
        option.check(value)
    except ValueError as error:  # includes QsfArgumentError
        raise QsfArgumentError(f"{path}: {name}: {error}") from None
    return option.name, [value] if isinstance(kind, Texts) and isinstance(value, str) else value
