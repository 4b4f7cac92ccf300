"""``qsf-run``: generate text from a .qsf file, on the command line.

The generated text goes to standard output, everything else to standard error.

Exit codes: 0, 1 (it could not be done), 2 (wrong options), 130 (Ctrl-C), 143 (terminated).
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from qsf import command
from qsf.command import EXIT_FAILED, EXIT_USAGE, StoppedError
from qsf.errors import QsfArgumentError, QsfError, QsfFormatError, QsfMemoryError
from qsf.kv_type import kv_type_name
from qsf.run_options import Request, UsageError, parse, valid_text

if TYPE_CHECKING:
    from collections.abc import Generator

    from qsf._native import MemoryPlan
    from qsf.model import GenerationStats, Model

# What the library calls by the names of its arguments, people here know as options.
_ARGUMENT_NAMES = re.compile(
    r"\b(ram_budget|threads|max_seq_len|max_tokens|temperature|top_p|top_k|min_p"
    r"|repetition_penalty|seed)(?= (?:must be|sets|cannot))"
)


def main(arguments: list[str] | None = None) -> int:
    """Run ``qsf-run`` and return its exit code."""
    command.open_missing_streams()
    try:
        with command.stopped_by_signals():
            return _main(sys.argv[1:] if arguments is None else arguments)
    except StoppedError as stopped:
        return stopped.exit_code
    except BrokenPipeError:
        # The reader of our output has had enough. Nothing may be flushed into it at exit.
        command.drop_output()
        return 0
    except OSError as error:
        command.drop_output()
        return _fail(command.explain_system(error))


def _main(arguments: list[str]) -> int:
    request: Request | None = None
    try:
        if "--version" in arguments:
            print(command.version_line("qsf-run"), flush=True)
            return 0
        request = parse(arguments)
        return _run(request)
    except UsageError as error:
        return _fail(f"{error} (see qsf-run --help)", EXIT_USAGE)
    except QsfFormatError as error:
        path = "" if request is None or str(request.path) in str(error) else f"{request.path}: "
        return _fail(path + command.explain_format(error))
    except QsfError as error:
        return _fail(_ARGUMENT_NAMES.sub(lambda name: _option(name[1]), str(error)))


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _fail(text: str, exit_code: int = EXIT_FAILED) -> int:
    command.say_error("qsf-run", text)
    return exit_code


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _run(request: Request) -> int:
    # Characters that the terminal's encoding lacks are not worth an error in mid-sentence.
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    if request.path.is_dir():
        raise QsfError(command.explain_folder(request.path))
    if request.is_plan:
        return _print_plan(request)
    prompt = None if request.is_interactive else _prompt(request)
    with _open(request) as model:
        if request.is_verbose:
            _say_facts(model, request)
        if request.opening["kv_type"] is None and not request.is_quiet:
            _warn_of_few_bits(model.info.plan)
        if prompt is None:
            return _chat(model, request)
        return _complete(model, request, prompt)


def _open(request: Request) -> Model:
    progress = command.Progress(f"loading {request.path.name}", is_wanted=not request.is_quiet)

    def leave(number: int) -> None:
        progress.end()
        command.leave_at_once(number)

    try:
        with command.Watcher(leave, progress.tick):
            return _open_in_budget(request)
    finally:
        progress.end()


def _open_in_budget(request: Request) -> Model:
    from qsf.model import Model

    try:
        return Model(request.path, **request.opening)
    except QsfMemoryError:
        plan = Model.plan(request.path, **request.opening)
        if plan.is_enough:
            raise
        raise QsfMemoryError(_does_not_fit(plan)) from None


def _prompt(request: Request) -> str:
    if request.prompt is not None:
        return valid_text(request.prompt)
    if request.prompt_file is None and sys.stdin.isatty():
        raise UsageError("no prompt: give --prompt, --prompt-file or --interactive")
    if request.prompt_file in (None, "-"):
        data = sys.stdin.buffer.read()
    else:
        data = Path(str(request.prompt_file)).read_bytes()
    text = data.decode("utf-8", "replace").removesuffix("\n").removesuffix("\r")
    if not text:
        raise QsfArgumentError(
            "the prompt is empty: give --prompt TEXT, --prompt-file FILE or text on standard input"
        )
    return text


def _complete(model: Model, request: Request, prompt: str) -> int:
    tokens = model.tokenizer.encode(
        prompt, parse_special=request.has_special, max_tokens=model.info.plan.ctx_tokens
    )
    has_shown = False
    try:
        with closing(_generate(model, request, tokens)) as pieces:
            for piece in pieces:
                has_shown = True
                _show(piece)
    except (QsfError, StoppedError):
        if has_shown:
            _show("\n")
        raise
    _show("\n")
    stats = model.stats
    if stats is not None and not request.is_quiet:
        if stats.stop_reason == "context":
            _say(_context_is_full(model))
        _say_stats(model, stats, request)
    return 0


def _generate(
    model: Model, request: Request, tokens: list[int], *, begins_text: bool = False
) -> Generator[str, None, None]:
    """Yield the pieces of text; a signal stops the engine at once. To be closed."""
    progress = command.Progress(
        f"reading the prompt: {len(tokens)} tokens", is_wanted=not request.is_quiet
    )

    def show_progress(n_done: int, n_all: int) -> None:
        progress.update(f"reading the prompt: {n_done} of {n_all} tokens")
        if n_done == n_all:
            progress.end()

    pieces = model.generate(
        tokens,
        max_tokens=request.max_tokens,
        seed=request.seed,
        stop=request.stop,
        begins_text=begins_text,
        progress=show_progress,
        **request.sampling,
    )
    try:
        with command.Watcher(lambda _: model.cancel(), progress.tick):
            for piece in pieces:
                progress.end()
                yield piece
    finally:
        progress.end()


def _context_is_full(model: Model) -> str:
    n_tokens = model.info.plan.ctx_tokens
    if n_tokens < model.info.max_tokens:
        return (
            f"(the context of {n_tokens} tokens is full; --max-seq-len asks for a longer one, "
            "which a larger --ram-budget may take)"
        )
    return f"(the context of {n_tokens} tokens is full; the model was made for no more)"


# ---- chat ----


_CHAT_HELP = (
    "/reset forgets the conversation, /exit or Ctrl-D ends, /help shows this, Ctrl-C stops an "
    "answer"
)


def _chat(model: Model, request: Request) -> int:
    template = model.chat_template
    is_terminal = sys.stdin.isatty()
    if template.is_plain:
        _say(
            "This file has no chat template: your lines and the answers are joined as plain "
            "text, which the model continues."
        )
    if is_terminal:
        import readline  # noqa: F401  (input() then edits lines and has a history)

        _say(_CHAT_HELP)
    messages: list[dict[str, str]] = []
    while True:
        try:
            line = _read_line(is_terminal)
            asked = "" if line is None else line.strip()
            if line is None or asked == "/exit":
                return 0
            if asked == "/reset":
                messages.clear()
                _say("(the conversation is forgotten)")
            elif asked == "/help":
                _say(_CHAT_HELP)
            elif re.fullmatch("/[a-z]+", asked):
                _say(f"({asked} is not known. {_CHAT_HELP})")
            elif asked:
                _answer(model, request, messages, line)
        except StoppedError as stopped:
            if stopped.exit_code != command.EXIT_INTERRUPTED:
                raise
            if not is_terminal:
                raise
            _say("\n(Ctrl-D or /exit ends)")


def _read_line(is_terminal: bool) -> str | None:
    """Return the next line of the user; None at the end."""
    if is_terminal:
        try:
            with command.interruptible_wait():
                line = input("> ")
            return valid_text(line)
        except EOFError:
            _say("")
            return None
    data = sys.stdin.buffer.readline()
    return data.decode("utf-8", "replace").rstrip("\r\n") if data else None


def _answer(model: Model, request: Request, messages: list[dict[str, str]], line: str) -> None:
    """Print the answer to ``line`` and add both to ``messages``."""
    asked = [*messages, {"role": "user", "content": line}]
    tokens = model.chat_tokens(asked)
    n_ctx = model.info.plan.ctx_tokens
    if len(tokens) >= n_ctx:
        _say(
            f"(the context is full: the conversation has {len(tokens)} tokens with this line, "
            f"of {n_ctx}. /reset forgets it)"
        )
        return
    said: list[str] = []
    is_own_text = not model.chat_template.is_plain
    try:
        with closing(_generate(model, request, tokens, begins_text=is_own_text)) as pieces:
            for piece in pieces:
                said.append(piece)
                _show(piece)
    except StoppedError as stopped:
        _show("\n")
        if stopped.exit_code != command.EXIT_INTERRUPTED:
            raise
        _say("(stopped)")
    else:
        _show("\n")
    messages[:] = [*asked, {"role": "assistant", "content": "".join(said)}]
    stats = model.stats
    if stats is not None and stats.stop_reason == "context":
        _say(f"(the context of {n_ctx} tokens is full: /reset forgets the conversation)")
    if stats is not None and request.is_verbose:
        _say_stats(model, stats, request)


# ---- reports ----


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.1f}"


def _counted(n_tokens: int, rate: float) -> str:
    speed = f", {rate:.1f} tok/s" if rate else ""
    return f"{n_tokens} token{'' if n_tokens == 1 else 's'}{speed}"


def _say_stats(model: Model, stats: GenerationStats, request: Request) -> None:
    parts = [f"prompt {_counted(stats.prompt_tokens, stats.prompt_rate)}"]
    if stats.evaluated_tokens < stats.prompt_tokens:
        parts[0] += f" ({stats.prompt_tokens - stats.evaluated_tokens} known from before)"
    parts.append(f"generated {_counted(stats.generated_tokens, stats.step_rate)}")
    if stats.generated_tokens:
        parts.append(f"first token {stats.first_token_seconds:.3f} s")
    parts.append(f"peak RSS {_mb(stats.peak_bytes)} MB")
    _say(" | ".join(parts))
    if request.is_verbose:
        _say(f"stopped by {stats.stop_reason}, seed {stats.seed}")
        done = model.session_stats
        _say(
            f"since opening: {done.n_loops} loops, {done.n_parallel_regions} shared between "
            f"threads, {done.parallel_ns / 1e9:.3f} s in those"
        )


def _say_facts(model: Model, request: Request) -> None:
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
        ("KV cache", _kv_text(info.plan) + (", rotated" if info.plan.kv_is_rotated else "")),
        ("i/o", info.io_name),
        ("sampling", f"temperature {params.temperature:g}, top-p {params.top_p:g}, "
                     f"top-k {params.top_k}, min-p {params.min_p:g}, repetition penalty "
                     f"{params.repetition_penalty:g}"),
    )  # fmt: skip
    for name, text in rows:
        _say(f"{name:9} {text}")
    for line in _plan_lines(info.plan):
        _say(line)


def _kv_text(plan: MemoryPlan) -> str:
    return kv_type_name(plan.kv_k_bits, plan.kv_v_bits)


def _warn_of_few_bits(plan: MemoryPlan) -> None:
    """The planner took 2 bits to stay in the budget, and the text will be the worse for it."""
    if plan.kv_k_bits == 2 or plan.kv_v_bits == 2:
        _say(
            f"the budget of {_mb(plan.budget_bytes)} MB leaves 2 bits for the KV cache, which "
            "costs quality: a larger --ram-budget, or --kv-type 4bit to be sure of more"
        )


def _plan_lines(plan: MemoryPlan) -> list[str]:
    """Return the memory map as a table."""
    rows = [
        ("process before opening", plan.process_bytes),
        ("reserved for Python", plan.reserve_bytes),
        (f"weights, {plan.n_units_resident} of {plan.n_units} units", plan.weights_bytes),
        ("window for streamed weights", plan.window_bytes),
        ("embedding rows", plan.embedding_bytes),
        (f"KV cache, {plan.ctx_tokens} tokens, {_kv_text(plan)}", plan.kv_bytes),
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


def _print_plan(request: Request) -> int:
    from qsf.model import Model

    with command.Watcher(command.leave_at_once):
        plan = Model.plan(request.path, **request.opening)
    for line in _plan_lines(plan):
        print(line)
    sys.stdout.flush()
    if plan.is_enough:
        return 0
    return _fail(_does_not_fit(plan))


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
