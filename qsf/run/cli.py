"""``qsf-run``: generate text from a .qsf file, on the command line.

The generated text goes to standard output, everything else to standard error.

Exit codes: 0, 1 (it could not be done), 2 (wrong options), 130 (Ctrl-C), 143 (terminated).
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from qsf.errors import QsfArgumentError, QsfError, QsfFormatError, QsfMemoryError
from qsf.run import report
from qsf.run.options import Request, UsageError, parse, valid_text
from qsf.shell import command
from qsf.shell.command import EXIT_FAILED, EXIT_USAGE, StoppedError
from qsf.text.tokenizer import max_text_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from qsf.model import Model
    from qsf.native.binding import MemoryPlan

# Without --max-seq-len a context has no more tokens (csrc/engine/plan.c).
_DEFAULT_CTX_TOKENS = 4096


def main(arguments: list[str] | None = None) -> int:
    """Run ``qsf-run`` and return its exit code."""
    command.prepare_streams()
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
    except QsfError as error:
        path = request.path if request is not None and isinstance(error, QsfFormatError) else None
        return _fail(command.explain(error, path))


def _fail(text: str, exit_code: int = EXIT_FAILED) -> int:
    command.say_error("qsf-run", text)
    return exit_code


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _run(request: Request) -> int:
    if request.path.is_dir():
        raise QsfError(command.explain_folder(request.path))
    if request.is_plan:
        return _print_plan(request)
    prompt = None if request.is_interactive else _prompt(request)
    with _open(request) as model:
        if request.is_verbose:
            from qsf.text.sampling import asked_sampling

            sampling = model.sampling_params(**asked_sampling(request.generation))
            _say_lines(report.facts_lines(model, sampling))
        elif not request.is_quiet:
            _say_lines(report.fewer_skips_lines(model.info.plan))
        code = _chat(model, request) if prompt is None else _complete(model, request, prompt)
        if request.is_verbose:
            _say_lines(report.timeline_lines(model))
        return code


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
    from qsf.text.parts import require_tokenizer

    require_tokenizer(request.path)
    try:
        return Model(request.path, **request.opening.arguments())
    except QsfMemoryError as error:
        if error.plan is None:
            raise
        raise QsfMemoryError(_does_not_fit(error.plan)) from None


def _prompt(request: Request) -> str:
    if request.prompt is not None:
        return valid_text(request.prompt)
    if request.prompt_file is None and sys.stdin.isatty():
        raise UsageError("no prompt: give --prompt, --prompt-file or --interactive")
    most = max_text_bytes(request.opening.max_seq_len or _DEFAULT_CTX_TOKENS)
    if request.prompt_file in (None, "-"):
        data = command.read_at_most(sys.stdin.buffer, most + 1)
    else:
        with Path(str(request.prompt_file)).open("rb") as file:
            data = command.read_at_most(file, most + 1)
    if len(data) > most:
        raise QsfArgumentError(
            f"the prompt is too long: more than {most} bytes, the most for its context (16 for "
            "each token): --max-seq-len asks for a longer one"
        )
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
        with closing(_generate(model, request, partial(model.generate, tokens))) as pieces:
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
        _say_lines(report.stats_lines(model, stats, is_verbose=request.is_verbose))
    return 0


def _generate(
    model: Model, request: Request, start: Callable[..., Iterator[str]]
) -> Generator[str, None, None]:
    """Yield the pieces of text of ``start(**options)``; a signal stops the engine at once.

    To be closed.
    """
    progress = command.Progress("reading the prompt", is_wanted=not request.is_quiet)

    def show_progress(n_done: int, n_all: int) -> None:
        progress.update(f"reading the prompt: {n_done} of {n_all} tokens")
        if n_done == n_all:
            progress.end()

    options = replace(request.generation, progress=show_progress)
    try:
        with command.Watcher(lambda _: model.cancel(), progress.tick):
            for piece in start(**options.arguments()):
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
    while True:
        try:
            line = _read_line(is_terminal, max_text_bytes(model.info.plan.ctx_tokens))
            asked = "" if line is None else line.strip()
            if line is None or asked == "/exit":
                return 0
            if asked == "/reset":
                model.session.messages.clear()
                _say("(the conversation is forgotten)")
            elif asked == "/help":
                _say(_CHAT_HELP)
            elif re.fullmatch("/[a-z]+", asked):
                _say(f"({asked} is not known. {_CHAT_HELP})")
            elif asked:
                _answer(model, request, line)
        except StoppedError as stopped:
            if stopped.exit_code != command.EXIT_INTERRUPTED:
                raise
            if not is_terminal:
                raise
            _say("\n(Ctrl-D or /exit ends)")


def _read_line(is_terminal: bool, max_bytes: int) -> str | None:
    """Return the next line of the user, "" in place of one that is too long; None at the end.

    Of a pipe never more than ``max_bytes`` are held. A terminal's line is as long as what somebody
    types or pastes there: `readline` knows no limit, so it is left out when it is whole.
    """
    if is_terminal:
        try:
            with command.interruptible_wait():
                line = valid_text(input("> "))
        except EOFError:
            _say("")
            return None
        is_long = len(line.encode()) > max_bytes
    else:
        data = sys.stdin.buffer.readline(max_bytes + 1)
        if not data:
            return None
        is_long = len(data) > max_bytes and not data.endswith(b"\n")
        while is_long and (rest := sys.stdin.buffer.readline(max_bytes)):
            if rest.endswith(b"\n"):
                break
        line = data.decode("utf-8", "replace").rstrip("\r\n")
    if not is_long:
        return line
    _say(f"(the line has more than {max_bytes} bytes, too many for the context: it is left out)")
    return ""


def _answer(model: Model, request: Request, line: str) -> None:
    """Print the answer to ``line``; the model's session keeps the conversation."""
    chat = partial(model.session.chat, line)
    try:
        with closing(_generate(model, request, chat)) as pieces:
            for piece in pieces:
                _show(piece)
    except QsfArgumentError as error:
        is_full = error.argument == "prompt"
        reason = "the context is full: " if is_full else ""  # else too long, or refused
        _say(f"({reason}{command.explain(error)}. /reset forgets the conversation)")
        return
    except StoppedError as stopped:
        _show("\n")
        if stopped.exit_code != command.EXIT_INTERRUPTED:
            raise
        _say("(stopped)")
    else:
        _show("\n")
    n_ctx = model.info.plan.ctx_tokens
    stats = model.stats
    if stats is not None and stats.stop_reason == "context":
        _say(f"(the context of {n_ctx} tokens is full: /reset forgets the conversation)")
    if stats is not None and request.is_verbose:
        _say_lines(report.stats_lines(model, stats, is_verbose=request.is_verbose))


# ---- reports ----


def _say_lines(lines: list[str]) -> None:
    for line in lines:
        _say(line)


def _print_plan(request: Request) -> int:
    from qsf.model import Model

    with command.Watcher(command.leave_at_once):
        plan = Model.plan(request.path, **request.opening.arguments())
    for line in report.plan_lines(plan):
        print(line)
    sys.stdout.flush()
    if plan.is_enough:
        return 0
    return _fail(_does_not_fit(plan))


def _does_not_fit(plan: MemoryPlan) -> str:
    from qsf.native.opening import does_not_fit

    return does_not_fit(plan, is_command=True)


if __name__ == "__main__":
    sys.exit(main())
