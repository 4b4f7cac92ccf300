"""``qsf-run``: generate text from a .qsf file, on the command line.

The generated text goes to standard output, everything else to standard error.

Exit codes: 0, 1 (it could not be done), 2 (wrong options), 130 (Ctrl-C).
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from qsf.errors import QsfArgumentError, QsfError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from qsf._native import MemoryPlan
    from qsf.model import GenerationStats, Model

_EXIT_FAILED = 1
_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130

_EPILOG = """\b
Examples:
  qsf-run model.qsf --prompt "Once upon a time"
  qsf-run model.qsf --prompt "Once upon a time" --temperature 0 --max-tokens 50
  qsf-run model.qsf --ram-budget 100 --plan
  qsf-run model.qsf --interactive
  echo "Once upon a time" | qsf-run model.qsf > story.txt
"""

# What typer raises for a wrong command line, whichever click it is built on.
_WrongUsageError: type[Exception] = typer.BadParameter.__bases__[0]

_app = typer.Typer(
    add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)


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


def _later(what: str) -> str:
    return f"{what} (not available yet)."


@_app.command(epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
def _parse(
    path: Annotated[Path, typer.Argument(metavar="MODEL", help="A .qsf file.", show_default=False)],
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="Text to continue.")
    ] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help='Read the prompt from a file; "-" is standard input, which is also read when '
            "it is not a terminal and there is no other prompt. One line end at its end is "
            "not part of the prompt.",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", min=0, metavar="N", help="At most so many tokens.")
    ] = 256,
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="F",
            help="0 always takes the most probable token. [default: the file's, else 0.7]",
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="F",
            help="Choose among the tokens that together have this probability; 1: off. "
            "[default: the file's, else 0.9]",
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Choose among the N most probable tokens; 0: off. "
            "[default: the file's, else 40]",
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            metavar="F",
            help="Choose among the tokens at least F times as probable as the first; 0: off. "
            "[default: the file's, else 0]",
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            metavar="F",
            help="Above 1: make tokens that occurred less probable; 1: off. "
            "[default: the file's, else 1]",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="The same seed gives the same text. [default: a new one, see --verbose]",
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Stop before this text. May be given several times."),
    ] = None,
    ram_budget: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="MB",
            help="Ceiling for the memory of the whole process, in MB of 2^20 bytes; 0: none.",
        ),
    ] = 200,
    threads: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="[default: one per physical core]"),
    ] = None,
    max_seq_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Longest sequence in tokens, prompt included. "
            "[default: the model's, at most 4096]",
        ),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Full-precision arithmetic: slow, for reference.")
    ] = False,
    interactive: Annotated[
        bool,
        typer.Option(
            "--interactive",
            "-i",
            help="Chat, with the file's chat template. /reset forgets the conversation, /exit "
            "or Ctrl-D ends, Ctrl-C stops an answer.",
        ),
    ] = False,
    no_special: Annotated[
        bool,
        typer.Option(
            "--no-special",
            help="Take text in the prompt that reads like a special token as ordinary text.",
        ),
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print where the memory would go, and exit.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Say what the file is, what runs, and where memory goes."),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No statistics at the end.")
    ] = False,
    quality: Annotated[
        str | None, typer.Option(metavar="F", help=_later("Quality against speed, 0 to 1"))
    ] = None,
    bench: Annotated[bool, typer.Option("--bench", help=_later("Measure speed and exit"))] = False,
    kv_type: Annotated[
        str | None, typer.Option(metavar="TYPE", help=_later("Precision of the KV cache"))
    ] = None,
    io: Annotated[
        str | None, typer.Option(metavar="METHOD", help=_later("How weights are read"))
    ] = None,
) -> _Request:
    """Generate text with a model inside a memory budget."""
    for name, value in (
        ("--quality", quality),
        ("--bench", bench or None),
        ("--kv-type", kv_type),
        ("--io", io),
    ):
        if value is not None:
            raise typer.BadParameter(f"{name} is not available yet")
    if prompt is not None and prompt_file is not None:
        raise typer.BadParameter("--prompt and --prompt-file exclude each other")
    if interactive and (prompt is not None or prompt_file is not None):
        raise typer.BadParameter("--interactive asks for its prompts: leave --prompt out")
    return _Request(
        path=path,
        prompt=prompt,
        prompt_file=prompt_file,
        sampling={
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
        },
        max_tokens=max_tokens,
        seed=seed,
        stop=stop or [],
        opening={
            "ram_budget": ram_budget or None,
            "threads": threads,
            "max_seq_len": max_seq_len,
            "exact": exact,
        },
        is_interactive=interactive,
        is_plan=plan,
        is_verbose=verbose,
        is_quiet=quiet,
        has_special=not no_special,
    )


def main(arguments: list[str] | None = None) -> int:
    """Run ``qsf-run`` and return its exit code."""
    try:
        request = _app(args=arguments, prog_name="qsf-run", standalone_mode=False)
        if not isinstance(request, _Request):  # --help
            return int(request or 0)
        return _run(request)
    except _WrongUsageError as error:
        _say(f"qsf-run: error: {_one_line(error)} (see qsf-run --help)")
        return _EXIT_USAGE
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
    except (KeyboardInterrupt, typer.Abort):
        _say("")
        return _EXIT_INTERRUPTED


def _one_line(error: Exception) -> str:
    format_message: Callable[[], str] = getattr(error, "format_message", error.__str__)
    text = " ".join(format_message().split()).removeprefix("Invalid value: ")
    return text[:1].lower() + text[1:].rstrip(".")


def _say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


def _show(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _fail_usage(text: str) -> NoReturn:
    raise typer.BadParameter(text)


def _run(request: _Request) -> int:
    # Characters that the terminal's encoding lacks are not worth an error in mid-sentence.
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    if request.is_plan:
        return _print_plan(request)
    prompt = None if request.is_interactive else _prompt(request)
    from qsf.model import Model

    with Model(request.path, **request.opening) as model:
        if request.is_verbose:
            _say_facts(model)
        if prompt is None:
            return _chat(model, request)
        return _complete(model, request, prompt)


def _prompt(request: _Request) -> str:
    if request.prompt is not None:
        # The shell passes bytes; what is not UTF-8 in them arrives as lone surrogates.
        return os.fsencode(request.prompt).decode("utf-8", "replace")
    if request.prompt_file is None and sys.stdin.isatty():
        _fail_usage("no prompt: give --prompt, --prompt-file or --interactive")
    if request.prompt_file in (None, "-"):
        data = sys.stdin.buffer.read()
    else:
        data = Path(str(request.prompt_file)).read_bytes()
    text = data.decode("utf-8", "replace").removesuffix("\n").removesuffix("\r")
    if not text:
        raise QsfArgumentError("the prompt is empty")
    return text


def _complete(model: Model, request: _Request, prompt: str) -> int:
    tokens = model.tokenizer.encode(prompt, parse_special=request.has_special)
    try:
        for piece in _generate(model, request, tokens):
            _show(piece)
    finally:
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
            return os.fsencode(input("> ")).decode("utf-8", "replace")
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


def _say_facts(model: Model) -> None:
    from qsf import _native

    info = model.info
    machine = _native.describe_machine()
    params = model.generation_defaults
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
                     f"{params.repetition_penalty:g}, unless options say otherwise"),
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
    from qsf.model import BYTES_PER_MB, Model

    plan = Model.plan(request.path, **request.opening)
    for line in _plan_lines(plan):
        print(line)
    sys.stdout.flush()
    if plan.is_enough:
        return 0
    needed = -(-plan.min_budget_bytes // BYTES_PER_MB)
    _say(
        f"qsf-run: error: the model does not fit in {request.opening['ram_budget']} MB; "
        f"--ram-budget {needed} would do"
    )
    return _EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
