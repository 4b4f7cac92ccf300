"""``qsf run`` and ``qsf-run``: generate text, or chat, on the command line.

The generated text goes to standard output, everything else to standard error.

Exit codes: 0, 1 (it could not be done), 2 (wrong options), 130 (Ctrl-C), 143 (terminated).
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from qsf.cli.run import report
from qsf.cli.run.answer import Shown, generate, say_lines, show, terminal_guard
from qsf.cli.run.options import Request, parse, read_constraint
from qsf.errors import QsfArgumentError, QsfError
from qsf.file.foreign_text import text_of
from qsf.file.open_file import is_qsf_file
from qsf.options import MAX_U32, call_with
from qsf.shell import command
from qsf.shell.arguments import UsageError, valid_text
from qsf.shell.command import StoppedError
from qsf.system.keys import unseen_keys
from qsf.system.signals import Watcher
from qsf.text.tokenizer import max_text_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from qsf.model import Model

# The default of --max-seq-len is no longer than this (QSF_DEFAULT_CTX_TOKENS).
_DEFAULT_CTX_TOKENS = 16384


def main(arguments: list[str] | None = None) -> int:
    """Run ``qsf-run`` and return its exit code."""
    command.prepare_streams()
    words = sys.argv[1:] if arguments is None else arguments
    request: Request | None = None
    try:
        with command.stopped_by_signals():
            if "--version" in words:
                print(command.version_line("qsf-run"), flush=True)
                return 0
            request = parse(words)
            request = replace(
                request, path=path_of(request.model, is_quiet=request.quiet, is_yes=request.yes)
            )
            return _run(request)
    except StoppedError as stopped:
        if request is not None and not request.quiet:
            command.say_line(f"{command.typed('qsf-run')}: {stopped.text}")
        return stopped.exit_code
    except Exception as error:
        if request is None:  # before the user's defaults are read
            return command.fail("qsf-run", error, usage=QsfError)
        return command.fail("qsf-run", error, request.path)


def path_of(model: str, *, is_quiet: bool, is_yes: bool) -> Path:
    """Return the .qsf file of a model. What finding it by name imports counts in the budget."""
    if is_qsf_file(Path(model)):
        return Path(model)
    from qsf.find.prepare import find_model

    return find_model(model, is_quiet=is_quiet, is_yes=is_yes)


def _run(request: Request) -> int:
    if request.plan:
        return _print_plan(request)
    from qsf.text.parts import require_tokenizer

    require_tokenizer(request.path)
    has_prompt = any((request.prompt is not None, request.prompt_file, request.prompts))
    is_chat = request.interactive or not (
        has_prompt or request.raw or request.json or not sys.stdin.isatty()
    )
    if is_chat and request.form is not None:
        raise UsageError(f"--{request.form[0]} is for --prompt and --prompts, not for a chat")
    prompt = None if is_chat or request.prompts is not None else _prompt(request)
    constraint = read_constraint(request.path, request.form)
    request = replace(request, generation=replace(request.generation, constraint=constraint))
    if request.ray is not None and request.machines is None:
        from qsf.cli.run.many import answer_over_ray

        with command.open_lines(request.prompts) as lines:
            return answer_over_ray(request, lines)
    # --prompts before the model, whose opening takes longer; only once: it may be a pipe
    over = request.staged(
        request.path, request.opening, lambda text: None if request.quiet else say_lines([text])
    )
    with command.open_lines(request.prompts) as lines, over or _open(request) as model:
        if not (request.has_length or request.raw or model.chat_template.is_plain):
            request = replace(request, generation=replace(request.generation, max_tokens=MAX_U32))
        if request.verbose:
            from qsf.text.sampling import sampling_fields

            sampling = model.sampling_params(**sampling_fields(request.generation))
            say_lines(report.facts_lines(model, sampling))
        elif not request.quiet:
            say_lines(report.fewer_skips_lines(model.info.plan))
            say_lines(report.drafter_lines(model.info.plan))
            say_lines(_streaming_lines(model, request))
        _begin_conversation(model, request)
        if request.thinks is not None:
            from qsf.cli.run.conversation import with_thinking

            generation = with_thinking(model, request.generation, is_on=request.thinks)
            request = replace(request, generation=generation)
        if request.prompts is not None:
            from qsf.cli.run.many import answer_many

            code = answer_many(model, request, lines)
        elif prompt is None:
            from qsf.cli.run.chat import Chat

            code = Chat(model, request).run()
        else:
            code = _complete(model, request, prompt)
        if request.verbose:
            say_lines(report.timeline_lines(model))
        return code


def _streaming_lines(model: Model, request: Request) -> list[str]:
    """Return a hint if weights are read for every token although memory is free."""
    plan = model.info.plan
    budget = request.opening.ram_budget
    if plan.streamed_bytes == 0 or budget in ("auto", None) or request.machines is not None:
        return []
    from qsf.native.opening import plan_native

    reserve_bytes = plan.reserve_bytes
    auto = plan_native(request.path, replace(request.opening, ram_budget="auto"), reserve_bytes)
    # The memory that this process takes now is that of the open model too.
    return report.streaming_lines(plan, replace(auto, process_bytes=plan.process_bytes))


def _open(request: Request) -> Model:
    from qsf.model import Model

    progress = command.Progress(f"loading {request.path.name}", is_wanted=not request.quiet)
    echo = ExitStack()

    def leave(number: int) -> None:
        progress.end()
        echo.close()
        command.say_line(f"{command.typed('qsf-run')}: {StoppedError(number).text}")
        command.leave_at_once(number)

    try:
        with echo, Watcher(leave, progress.tick):
            echo.enter_context(unseen_keys())
            model = Model.opened(request.path, request.opening)
    finally:
        progress.end()
    if model.text_vectors.is_encoder:
        raise QsfArgumentError(
            f"{request.path.name} is an encoder: it makes vectors of texts, and no text; "
            f"`qsf embed {request.path} FILE` prints them"
        )
    return model


def _begin_conversation(model: Model, request: Request) -> None:
    """Apply --session and --system to the model's session."""
    if request.system is None and request.session is None:
        return
    if model.chat_template.is_plain:
        name = "--system" if request.session is None else "--session"
        raise QsfArgumentError(f"{name} needs a chat template, and the file has none")
    from qsf.cli.run.conversation import read_conversation, system_lines, with_system

    messages = model.session.messages
    if request.session is not None and request.session.exists():
        reason = read_conversation(request.session, model.session, model.input_bytes)
        if reason and not request.quiet:
            say_lines([f"note: {reason}", "note: so the conversation is evaluated again"])
    system = None if request.system is None else valid_text(request.system, "--system")
    messages[:] = with_system(messages, system)
    if not request.quiet:
        say_lines(system_lines(model))


def _prompt(request: Request) -> str:
    if request.prompt is not None:
        return valid_text(request.prompt, "the prompt")
    if request.prompt_file is None and sys.stdin.isatty():
        raise UsageError("no prompt: give --prompt, --prompt-file or --interactive")
    most = max_text_bytes(request.opening.max_seq_len or _DEFAULT_CTX_TOKENS)
    with command.open_input(request.prompt_file) as file:
        data = command.read_at_most(file, most + 1)
    if len(data) > most:
        raise QsfArgumentError(
            f"the prompt is too long: more than {most} bytes, the most for its context (16 for "
            "each token): --max-seq-len asks for a longer one"
        )
    name = "standard input" if request.prompt_file in (None, "-") else str(request.prompt_file)
    text = text_of(data, name).removesuffix("\n").removesuffix("\r")
    if not text:
        raise QsfArgumentError(
            "the prompt is empty: give --prompt TEXT, --prompt-file FILE or text on standard input"
        )
    return text


def _start_of(model: Model, request: Request, prompt: str) -> Callable[..., Iterator[str]]:
    """Return a generator function of options: answers by the template, or continuations."""
    if not request.raw and not model.chat_template.is_plain:
        return partial(call_with, model.session.chat, prompt)
    tokens = model.tokenizer.encode(
        prompt, parse_special=not request.no_special, max_tokens=model.info.plan.ctx_tokens
    )
    return partial(call_with, model.generate, tokens)


def echo_of(prompt: str) -> str:
    """Return what a terminal shows of a prompt that is continued: nothing that steers it."""
    return "".join(c for c in prompt if c.isprintable() or c in "\n\t")


def _complete(model: Model, request: Request, prompt: str) -> int:
    start = _start_of(model, request, prompt)
    texts: list[str] = []
    guard = terminal_guard(is_wanted=not (request.json or request.no_loop_guard))
    is_continuation = request.raw or model.chat_template.is_plain
    shown = Shown(
        is_as_written=request.plain or request.raw or request.form is not None,
        has_markdown=not is_continuation,
    )
    try:
        pieces = generate(
            model, request.generation, start,
            is_quiet=request.quiet, hides_thoughts=request.hide_thinking,
            guard=guard,
        )  # fmt: skip
        with unseen_keys(), closing(pieces):
            for piece in pieces:
                if is_continuation and not texts and not request.json and sys.stdout.isatty():
                    shown.push(echo_of(prompt))
                texts.append(piece)
                if not request.json:
                    shown.push(piece)
                elif request.stream:
                    show(report.json_line({"piece": piece}))
    except (QsfError, StoppedError):
        if texts and not request.json:
            shown.end()
            if model.stats is not None and not request.quiet:
                say_lines(report.stats_lines(model, model.stats, is_verbose=False))
        raise
    if request.session is not None:
        from qsf.cli.run.conversation import write_conversation

        write_conversation(request.session, model.session)
    stats = model.stats
    if stats is None:
        return 0
    if request.json:
        record = report.answer_record(model, stats, "".join(texts))
        show(report.json_line(record | report.draft_record(model.session_stats)))
        return 0
    shown.end()
    if guard is not None and guard.found:
        say_lines([guard.found])
    if not request.quiet:
        say_lines(report.ending_lines(model, stats))
        say_lines(report.stats_lines(model, stats, is_verbose=request.verbose))
    return 0


# ---- the plan ----


def _print_plan(request: Request) -> int:
    from qsf.model import Model

    with Watcher(command.leave_at_once):
        # The constraint's memory counts as "process before opening"
        read_constraint(request.path, request.form)
        parts, opening = request.planned(request.path, request.opening)
        plan = call_with(Model.plan, request.path, opening)
    print(
        *parts,
        *report.plan_lines(plan),
        *_cost_lines(request),
        sep="\n",
        flush=True,
    )
    if plan.is_enough:
        return 0
    from qsf.native.opening import does_not_fit

    command.say_error("qsf-run", does_not_fit(plan, is_command=True))
    return command.EXIT_FAILED


def _cost_lines(request: Request) -> list[str]:
    """Return the file's default arithmetic; leaves out the KV cache if the user chose one."""
    from qsf.file.reader import Reader
    from qsf.report.record import cost_lines, read_meta

    with Reader(request.path) as reader:
        return cost_lines(read_meta(reader), with_kv_cache=request.opening.kv_type is None)


if __name__ == "__main__":
    sys.exit(main())
