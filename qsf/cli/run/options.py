"""The options of ``qsf-run`` and of ``qsf chat``, which is the same with ``--interactive``."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from qsf.cli.run.config import read_defaults
from qsf.cli.run.form import RESERVE_MB
from qsf.options import GenerationOptions, ModelOptions, Whole
from qsf.shell.arguments import (
    Group,
    Parser,
    UsageError,
    model_parser,
    parser_of,
    taken,
    valid_text,
)

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
name of a model there: Qwen/Qwen3-4B. What is no .qsf file is converted once, to 4 bits a weight;
MODEL:8bit asks for another type. `qsf list` shows what was converted.

Defaults of your own: ~/.config/qsf/config.toml, with lines such as ram-budget = "1GB".

exit codes: 0 done, 1 failed, 2 wrong options, 130 interrupted, 143 terminated
"""

# Options that say what answers must look like.
_FORMS = {
    "json-schema": ("FILE", "a JSON schema"),
    "grammar": ("FILE", "a grammar in llama.cpp's notation (GBNF), or Lark"),
    "regex": ("TEXT", "a regular expression"),
}
_PARALLEL = Whole(1, 256)
_DEFAULT_PARALLEL = 4

# What other programs call something that has another name here, or that is not needed.
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


@dataclass(frozen=True, slots=True)
class Request:
    """The command line, parsed.

    ``path`` is the model as it was named until it is found (``qsf.find``), then its .qsf file.
    """

    path: Path
    model: str
    prompt: str | None
    prompt_file: str | None
    prompts: str | None
    form: tuple[str, str] | None  # an option that says what answers must look like, its value
    answers: Path | None
    system: str | None
    history: Path | None
    generation: GenerationOptions
    has_length: bool  # --max-tokens was given, or is among the user's defaults
    opening: ModelOptions
    is_interactive: bool
    is_raw: bool
    is_plan: bool
    is_verbose: bool
    is_quiet: bool
    is_json: bool
    is_stream: bool
    is_yes: bool
    has_special: bool
    thinks: bool | None  # None: as the chat template has it
    hides_thoughts: bool
    is_as_written: bool


# argparse and not typer, as in the tools for which memory does not matter: typer brings
# pydantic, and with it 22 MiB of a budget that counts the whole process (argparse: 2 MiB).
def _parser(*, shows_all: bool = True, is_chat: bool = False) -> Parser:
    if is_chat:
        parser = model_parser(
            "qsf chat",
            "the same as qsf run --interactive",
            "Talk to a model inside a memory budget. /help in the chat shows what can be typed.",
            _CHAT_EPILOG + ("" if shows_all else "\n--help-all shows all options.\n"),
        )
        _add_conversation_options(Group(parser, "conversation", shows_all=shows_all), is_chat=True)
    else:
        parser = model_parser(
            "qsf run",
            "or MODEL PROMPT; the same as qsf-run; qsf chat MODEL chats",
            "Generate text with a model inside a memory budget. On a terminal, without a prompt, "
            "chat with it.",
            _EPILOG + (_MORE_EPILOG if shows_all else "\n--help-all shows all options.\n"),
        )
        _add_prompt_options(Group(parser, "prompt", shows_all=shows_all))
    Group(parser, "choice of tokens", shows_all=shows_all).add_options(GenerationOptions)
    group = Group(parser, "memory and speed", shows_all=shows_all)
    group.add_options(ModelOptions)
    group.add_plan()
    _add_output_options(Group(parser, "output", shows_all=shows_all))
    return parser


def _add_output_options(group: Group) -> None:
    group.add(
        "-v",
        "--verbose",
        action="store_true",
        is_main=True,
        help="say what the file is, what runs, where the memory goes, and at the end where the "
        "time went: reading, waiting for it, computing",
    )
    group.add(
        "--plain",
        action="store_true",
        help="on a terminal, too, print what the model writes: lines are not wrapped at words, "
        "Markdown is not shown by styles",
    )
    group.add("-q", "--quiet", action="store_true", help="no progress, no statistics at the end")
    group.add(
        "--json",
        action="store_true",
        help="print one JSON object: the text, its token ids, why it ended, statistics",
    )
    group.add(
        "--stream",
        action="store_true",
        help="with --json: one object a line for each piece of text, then the whole",
    )
    group.add_asking()
    group.add("-h", "--help", action=_Help, nargs=0, is_main=True, help="show the main options")
    group.add(
        "--help-all", action=_Help, nargs=0, const=True, is_main=True, help="show all options"
    )


def _add_many_options(group: Group) -> None:
    group.add(
        "--prompts",
        metavar="FILE.jsonl",
        help="answer many prompts, several in each pass over the weights: each line is a JSON "
        "text, or an object with prompt or messages, and id if you like; one JSON object a line "
        'is printed for each, as with --json, as soon as it is there. "-" is standard input',
    )
    group.add(
        "--parallel",
        metavar="N",
        type=parser_of(_PARALLEL),
        help="with --prompts or --plan: prompts under way at the same time; the budget holds a KV "
        "cache for each, before weights (default: 4)",
    )
    group.add(
        "--answers",
        metavar="FILE.jsonl",
        help="with --prompts: add the answers to this file; prompts that it answers already are "
        "left out, so that the same command goes on after an interruption",
    )


def _add_prompt_options(group: Group) -> None:
    group.add("-m", "--model", dest="named_model", metavar="MODEL", help="the same as MODEL")
    group.add(
        "-p",
        "--prompt",
        metavar="TEXT",
        is_main=True,
        help="what to answer, by the file's chat template; without one, or with --raw, text to "
        "continue",
    )
    group.add(
        "-f",
        "--prompt-file",
        metavar="FILE",
        is_main=True,
        help='read the prompt from a file; "-" is standard input, which is also read when it '
        "is not a terminal and there is no other prompt. One line end at its end is not part "
        "of the prompt",
    )
    group.add(
        "-i",
        "--interactive",
        action="store_true",
        is_main=True,
        help="chat, as on a terminal without a prompt: /help there shows what can be typed",
    )
    _add_many_options(group)
    for name, (metavar, language) in _FORMS.items():
        text = f"answers follow {language} (needs the Python package llguidance)"
        group.add(f"--{name}", metavar=metavar, help=text)
    _add_conversation_options(group, is_chat=False)
    group.add(
        "--raw", action="store_true", is_main=True, help="continue the prompt: no chat template"
    )
    group.add(
        "--no-special",
        action="store_true",
        help="take text in the prompt that reads like a special token as ordinary text, as "
        "is always done where a chat template makes the prompt",
    )


def _add_conversation_options(group: Group, *, is_chat: bool) -> None:
    group.add("--system", metavar="TEXT", is_main=True, help="how the model is to answer")
    group.add(
        "--session",
        "--history",
        dest="history",
        metavar="FILE",
        is_main=is_chat,
        help="a conversation that is continued, and written back with the answer: with its KV "
        "cache, so that nothing is evaluated again, or if it is called FILE.json as a JSON list of "
        "messages with role and content; it need not exist",
    )
    for flag, thinks, text in (
        ("--think", True, "let the model think before it answers"),
        ("--no-think", False, "let the model answer without thinking"),
    ):
        help_text = f"{text}, where its chat template has a switch for it"
        group.add(flag, dest="thinks", action="store_const", const=thinks, help=help_text)
    group.add("--hide-thinking", action="store_true", help="show only that the model thinks")


def parse(arguments: list[str]) -> Request:
    """Return the command line, parsed, with the user's defaults.

    Raises UsageError with what is wrong, QsfArgumentError where the user's defaults are.
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
    usual_length = parser.get_default("max_tokens")
    parser.set_defaults(**{"max_tokens": None} | read_defaults())
    options, rest = parser.parse_known_args(arguments)
    if len(rest) == 1 and not rest[0].startswith("-") and options.prompt is None:
        options.prompt, rest = rest[0], []
    if rest:
        rest.sort(key=lambda word: not word.startswith("-"))
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    _check(options)
    has_length = options.max_tokens is not None
    if not has_length:
        options.max_tokens = usual_length
    model = options.model or options.named_model
    form = next(iter(_forms(options)), None)
    opening = replace(taken(ModelOptions, options), sessions=_sessions(options))
    if form is not None:
        opening = replace(opening, reserve_mb=RESERVE_MB)
    return Request(
        path=Path(model),
        model=model,
        prompt=options.prompt,
        prompt_file=options.prompt_file,
        prompts=options.prompts,
        form=form,
        answers=None if options.answers is None else Path(options.answers),
        system=None if options.system is None else valid_text(options.system),
        history=None if options.history is None else Path(options.history),
        generation=taken(GenerationOptions, options),
        has_length=has_length,
        opening=opening,
        is_interactive=options.interactive,
        is_raw=options.raw,
        is_plan=options.plan,
        is_verbose=options.verbose,
        is_quiet=options.quiet or options.json,
        is_json=options.json,
        is_stream=options.stream,
        is_yes=options.yes,
        has_special=not options.no_special,
        thinks=options.thinks,
        hides_thoughts=options.hide_thinking,
        is_as_written=options.plain,
    )


def _forms(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the options that say what answers must look like, with their values."""
    forms = [(name, getattr(options, name.replace("-", "_"))) for name in _FORMS]
    return [(name, value) for name, value in forms if value is not None]


def _sessions(options: argparse.Namespace) -> int:
    """Return how many prompts are under way at the same time."""
    if options.parallel is not None:
        return int(options.parallel)
    return 1 if options.prompts is None else _DEFAULT_PARALLEL


def _flag(name: str) -> str:
    return "--session" if name == "history" else f"--{name.replace('_', '-')}"


def _check_many(options: argparse.Namespace) -> None:
    """Raise UsageError for what does not go with --prompts, or only with it."""
    if options.parallel is not None and options.prompts is None and not options.plan:
        raise UsageError("--parallel is for --prompts and --plan")
    if options.answers is not None and options.prompts is None:
        raise UsageError("--answers is for --prompts")
    if options.prompts is None:
        return
    for name in (
        "prompt",
        "prompt_file",
        "interactive",
        "system",
        "history",
        "stream",
        "no_special",
    ):
        if getattr(options, name):
            raise UsageError(f"--prompts has them all: leave {_flag(name)} out")


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
    if options.stream and not options.json:
        raise UsageError("--stream is for --json: text is streamed anyway")
    for name in ("interactive", "system", "history", "template_args"):
        if options.raw and getattr(options, name):
            raise UsageError(f"--raw has no turns: leave {_flag(name)} out")
    if options.json and (options.interactive or options.plan):
        raise UsageError("--json is for one answer, not for --interactive or --plan")
