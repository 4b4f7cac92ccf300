"""``qsf-run``: generate text from a .qsf file, on the command line.

The generated text goes to standard output, everything else to standard error.

Exit codes: 0, 1 (it could not be done), 2 (wrong options), 130 (Ctrl-C).
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from qsf.errors import QsfArgumentError, QsfError, QsfFormatError, QsfMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from qsf._native import MemoryPlan
    from qsf.model import GenerationStats, Model

_EXIT_FAILED = 1
_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130

_EPILOG = """\
examples:
  qsf-run model.qsf --prompt "Once upon a time"
  qsf-run model.qsf --prompt "Once upon a time" --temperature 0 --max-tokens 50
  qsf-run model.qsf --ram-budget 100 --plan
  qsf-run model.qsf --interactive
  echo "Once upon a time" | qsf-run model.qsf > story.txt
"""


class _UsageError(Exception):
    """The command line is wrong."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _UsageError(message)


@dataclass(frozen=True, slots=True)
class _Request:
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


def _whole(least: int) -> Callable[[str], int]:
    """Return a parser for whole numbers of at least ``least``."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return number

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
    parser.add_argument("model", metavar="MODEL", type=Path, help="a .qsf file")
    _add_prompt_options(parser.add_argument_group("prompt"))
    _add_sampling_options(parser.add_argument_group("choice of tokens"))
    _add_machine_options(parser.add_argument_group("memory and speed"))
    group = parser.add_argument_group("output")
    group.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="say what the file is, what runs, and where the memory goes",
    )
    group.add_argument("-q", "--quiet", action="store_true", help="no statistics at the end")
    group = parser.add_argument_group("not available yet")
    group.add_argument("--quality", metavar="F", help="quality against speed, 0 to 1")
    group.add_argument(
        "--bench", action="store_const", const=True, help="measure the speed and exit"
    )
    group.add_argument("--kv-type", metavar="TYPE", help="precision of the KV cache")
    group.add_argument("--io", metavar="METHOD", help="how weights are read")
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
        type=_whole(0),
        default=256,
        metavar="N",
        help="at most so many tokens (default: 256)",
    )
    group.add_argument(
        "--temperature",
        type=float,
        metavar="F",
        help="0 always takes the most probable token (default: the file's, else 0.7)",
    )
    group.add_argument(
        "--top-p",
        type=float,
        metavar="F",
        help="choose among the tokens that together have this probability; 1: off (default: "
        "the file's, else 0.9)",
    )
    group.add_argument(
        "--top-k",
        type=_whole(0),
        metavar="N",
        help="choose among the N most probable tokens; 0: off (default: the file's, else 40)",
    )
    group.add_argument(
        "--min-p",
        type=float,
        metavar="F",
        help="choose among the tokens at least F times as probable as the first; 0: off "
        "(default: the file's, else 0)",
    )
    group.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="F",
        help="above 1: make tokens less probable that occurred already; 1: off (default: the "
        "file's, else 1)",
    )
    group.add_argument(
        "--seed",
        type=_whole(0),
        metavar="N",
        help="the same seed gives the same text (default: a new one; --verbose says which)",
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="stop before this text; may be given several times",
    )


def _add_machine_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--ram-budget",
        type=_whole(0),
        default=200,
        metavar="MB",
        help="ceiling for the memory of the whole process, in MB of 2^20 bytes; 0: none "
        "(default: 200)",
    )
    group.add_argument(
        "--threads", type=_whole(1), metavar="N", help="(default: one per physical core)"
    )
    group.add_argument(
        "--max-seq-len",
        type=_whole(1),
        metavar="N",
        help="longest sequence in tokens, prompt included (default: the model's, at most 4096)",
    )
    group.add_argument(
        "--exact", action="store_true", help="full-precision arithmetic: slow, for reference"
    )
    group.add_argument(
        "--plan", action="store_true", help="print where the memory would go, and exit"
    )


def _parse(arguments: list[str] | None) -> _Request:
    options = _parser().parse_args(arguments)
    for name in ("quality", "bench", "kv_type", "io"):
        if getattr(options, name) is not None:
            raise _UsageError(f"--{name.replace('_', '-')} is not available yet")
    if options.prompt is not None and options.prompt_file is not None:
        raise _UsageError("--prompt and --prompt-file exclude each other")
    if options.interactive and (options.prompt is not None or options.prompt_file is not None):
        raise _UsageError("--interactive asks for its prompts: leave --prompt out")
    return _Request(
        path=options.model,
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
            "exact": options.exact,
        },
        is_interactive=options.interactive,
        is_plan=options.plan,
        is_verbose=options.verbose,
        is_quiet=options.quiet,
        has_special=not options.no_special,
    )


def main(arguments: list[str] | None = None) -> int:
    """Run ``qsf-run`` and return its exit code."""
    request: _Request | None = None
    try:
        request = _parse(arguments)
        return _run(request)
    except _UsageError as error:
        _say(f"qsf-run: error: {error} (see qsf-run --help)")
        return _EXIT_USAGE
    except QsfFormatError as error:
        path = "" if request is None or str(request.path) in str(error) else f"{request.path}: "
        _say(f"qsf-run: error: {path}{error}")
        return _EXIT_FAILED
    except QsfError as error:
        _say(f"qsf-run: error: {error}")
        return _EXIT_FAILED
    except BrokenPipeError:
        # The reader of our output has had enough. Nothing may be flushed into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        _say(f"qsf-run: error: {error.filename or 'i/o'}: {error.strerror or error}")
        return _EXIT_FAILED
    except KeyboardInterrupt:
        _say("")
        return _EXIT_INTERRUPTED


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _run(request: _Request) -> int:
    # Characters that the terminal's encoding lacks are not worth an error in mid-sentence.
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    if request.is_plan:
        return _print_plan(request)
    prompt = None if request.is_interactive else _prompt(request)
    with _open(request) as model:
        if request.is_verbose:
            _say_facts(model, request)
        if prompt is None:
            return _chat(model, request)
        return _complete(model, request, prompt)


def _open(request: _Request) -> Model:
    from qsf.model import Model

    try:
        return Model(request.path, **request.opening)
    except QsfMemoryError:
        plan = Model.plan(request.path, **request.opening)
        if plan.is_enough:
            raise
        raise QsfMemoryError(_does_not_fit(plan)) from None


def _valid(text: str) -> str:
    """Return text from outside without lone surrogates, which stand for bytes not in UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _prompt(request: _Request) -> str:
    if request.prompt is not None:
        return _valid(request.prompt)
    if request.prompt_file is None and sys.stdin.isatty():
        raise _UsageError("no prompt: give --prompt, --prompt-file or --interactive")
    if request.prompt_file in (None, "-"):
        data = sys.stdin.buffer.read()
    else:
        data = Path(str(request.prompt_file)).read_bytes()
    text = data.decode("utf-8", "replace").removesuffix("\n").removesuffix("\r")
    if not text:
        raise QsfArgumentError("the prompt is empty")
    return text


def _complete(model: Model, request: _Request, prompt: str) -> int:
    tokens = model.tokenizer.encode(
        prompt, parse_special=request.has_special, max_tokens=model.info.plan.ctx_tokens
    )
    has_shown = False
    try:
        for piece in _generate(model, request, tokens):
            has_shown = True
            _show(piece)
    except (QsfError, KeyboardInterrupt):
        if has_shown:
            _show("\n")
        raise
    _show("\n")
    stats = model.stats
    if stats is not None and not request.is_quiet:
        if stats.stop_reason == "context":
            _say(_context_is_full(model))
        _say_stats(stats, request)
    return 0


def _generate(
    model: Model, request: _Request, tokens: list[int], *, begins_text: bool = False
) -> Iterator[str]:
    return model.generate(
        tokens,
        max_tokens=request.max_tokens,
        seed=request.seed,
        stop=request.stop,
        begins_text=begins_text,
        **request.sampling,
    )


def _context_is_full(model: Model) -> str:
    n_tokens = model.info.plan.ctx_tokens
    return f"(the context of {n_tokens} tokens is full; --max-seq-len sets its length)"


# ---- chat ----


def _chat(model: Model, request: _Request) -> int:
    template = model.chat_template
    is_terminal = sys.stdin.isatty()
    if template.is_plain:
        _say(
            "This file has no chat template: your lines and the answers are joined as plain "
            "text, which the model continues."
        )
    if is_terminal:
        import readline  # noqa: F401  (input() then edits lines and has a history)

        _say("/reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer.")
    messages: list[dict[str, str]] = []
    while True:
        try:
            line = _read_line(is_terminal)
        except KeyboardInterrupt:
            _say("\n(Ctrl-D or /exit ends)")
            continue
        if line is None or line.strip() == "/exit":
            return 0
        if line.strip() == "/reset":
            messages.clear()
            _say("(the conversation is forgotten)")
        elif line.strip():
            _answer(model, request, messages, line)


def _read_line(is_terminal: bool) -> str | None:
    """Return the next line of the user; None at the end."""
    if is_terminal:
        try:
            return _valid(input("> "))
        except EOFError:
            _say("")
            return None
    line = sys.stdin.buffer.readline()
    return line.decode("utf-8", "replace").rstrip("\r\n") if line else None


def _answer(model: Model, request: _Request, messages: list[dict[str, str]], line: str) -> None:
    """Print the answer to ``line`` and add both to ``messages``."""
    asked = [*messages, {"role": "user", "content": line}]
    tokens = model.chat_tokens(asked)
    n_ctx = model.info.plan.ctx_tokens
    if len(tokens) >= n_ctx:
        _say(
            f"(the context is full: the conversation has {len(tokens)} tokens with this line, "
            f"of {n_ctx}. /reset forgets it; --max-seq-len sets the length)"
        )
        return
    pieces: list[str] = []
    is_own_text = not model.chat_template.is_plain
    try:
        for piece in _generate(model, request, tokens, begins_text=is_own_text):
            _show(piece)
            pieces.append(piece)
    except KeyboardInterrupt:
        _show("\n")
        _say("(stopped)")
    else:
        _show("\n")
    messages[:] = [*asked, {"role": "assistant", "content": "".join(pieces)}]
    stats = model.stats
    if stats is not None and stats.stop_reason == "context":
        _say(f"(the context of {n_ctx} tokens is full: /reset forgets the conversation)")
    if stats is not None and request.is_verbose:
        _say_stats(stats, request)


# ---- reports ----


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.1f}"


def _say_stats(stats: GenerationStats, request: _Request) -> None:
    _say(
        f"prompt {stats.evaluated_tokens} tokens, {stats.prompt_rate:.1f} tok/s | "
        f"generated {stats.generated_tokens} tokens, {stats.step_rate:.1f} tok/s | "
        f"first token {stats.first_token_seconds:.3f} s | "
        f"peak RSS {_mb(stats.peak_bytes)} MB"
    )
    if request.is_verbose:
        _say(f"stopped by {stats.stop_reason}, seed {stats.seed}")


def _say_facts(model: Model, request: _Request) -> None:
    from qsf import _native

    info = model.info
    machine = _native.describe_machine()
    params = model.sampling_params(**request.sampling)
    rows = (
        ("model", f"{info.architecture}, {info.n_parameters:,} parameters, {info.quant_type}, "
                  f"file {_mb(info.file_bytes)} MB"),
        ("shape", f"{info.n_layers} layers of {info.dim}, FFN {info.ffn_dim}, {info.n_heads} heads "
                  f"and {info.n_kv_heads} KV heads of {info.head_dim}"),
        ("tokens", f"{info.n_vocab:,} in the vocabulary, context {info.plan.ctx_tokens} of "
                   f"{info.max_tokens}, prompt in chunks of {info.plan.chunk_tokens}"),
        ("kernels", f"{info.isa_name} (here: {' '.join(machine.isa_available)}), "
                    f"{info.plan.n_threads} threads"),
        ("i/o", info.io_name),
        ("sampling", f"temperature {params.temperature:g}, top-p {params.top_p:g}, "
                     f"top-k {params.top_k}, min-p {params.min_p:g}, repetition penalty "
                     f"{params.repetition_penalty:g}"),
    )  # fmt: skip
    for name, text in rows:
        _say(f"{name:9} {text}")
    for line in _plan_lines(info.plan):
        _say(line)


def _plan_lines(plan: MemoryPlan) -> list[str]:
    """Return the memory map as a table."""
    rows = [
        ("process before opening", plan.process_bytes),
        ("reserved for Python", plan.reserve_bytes),
        (f"weights, {plan.n_units_resident} of {plan.n_units} units", plan.weights_bytes),
        ("window for streamed weights", plan.window_bytes),
        ("embedding rows", plan.embedding_bytes),
        (f"KV cache, {plan.ctx_tokens} tokens", plan.kv_bytes),
        (f"activations, chunks of {plan.chunk_tokens}", plan.scratch_bytes),
        ("tables", plan.tables_bytes),
        (f"stacks, {plan.n_threads} threads", plan.stacks_bytes),
    ]
    total = plan.process_bytes + plan.reserve_bytes + plan.engine_bytes
    lines = ["memory, MB of 2^20 bytes"]
    lines += [f"  {name:32}{_mb(n_bytes):>12}" for name, n_bytes in rows if n_bytes]
    lines.append(f"  {'total':32}{_mb(total):>12}")
    budget = _mb(plan.budget_bytes) if plan.budget_bytes else "none"
    lines.append(f"  {'budget':32}{budget:>12}")
    return lines


def _print_plan(request: _Request) -> int:
    from qsf.model import Model

    plan = Model.plan(request.path, **request.opening)
    for line in _plan_lines(plan):
        print(line)
    sys.stdout.flush()
    if plan.is_enough:
        return 0
    _say(f"qsf-run: error: {_does_not_fit(plan)}")
    return _EXIT_FAILED


def _does_not_fit(plan: MemoryPlan) -> str:
    """Return how much is needed and which option would make it fit."""
    needed = -(-plan.min_budget_bytes // 2**20)
    shorter = ", or --max-seq-len with a shorter context" if plan.kv_bytes >= 2**20 else ""
    return (
        f"the model does not fit in {_mb(plan.budget_bytes)} MB, of which Python and the "
        f"tokenizer take {_mb(plan.process_bytes + plan.reserve_bytes)}: "
        f"--ram-budget {needed} would do{shorter}"
    )


if __name__ == "__main__":
    sys.exit(main())
