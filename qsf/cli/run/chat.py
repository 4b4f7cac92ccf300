"""A conversation on the terminal, or by lines of a pipe."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import re
import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from qsf.cli.run import report
from qsf.cli.run.answer import Shown, generate, say, say_lines, terminal_guard
from qsf.cli.run.conversation import (
    read_conversation,
    resumed_lines,
    system_lines,
    with_system,
    with_thinking,
    write_conversation,
)
from qsf.cli.run.options import Request
from qsf.errors import QsfArgumentError, QsfError
from qsf.file.family import type_of
from qsf.file.reader import Reader
from qsf.kv import parse_kv_policy
from qsf.options import MAX_U32, GenerationOptions, Option, call_with, described
from qsf.shell import command
from qsf.shell.arguments import valid_text
from qsf.shell.command import StoppedError
from qsf.shell.prose import dim
from qsf.system.files import user_folder
from qsf.system.keys import unseen_keys
from qsf.system.signals import interruptible_wait
from qsf.text.sampling import sampling_fields
from qsf.text.tokenizer import max_text_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from qsf.model import Model


_HELP = """\
/system TEXT     how the model is to answer from now on; without TEXT: as usual
/retry           another answer to the last question; /edit changes that first
/undo            forget the last question and its answer; /reset: all of them
/save FILE       keep the conversation, with what was evaluated; FILE.json: only
                 its messages; /load FILE goes on with one
/set NAME VALUE  an option: temperature 0.2; no VALUE: as it was; alone: all
/think on|off    think before answering, or not; show or hide: its thoughts
/context         how full the context is
/help            this; /exit, /quit or Ctrl-D ends, Ctrl-C stops an answer
\"\"\" begins and ends a message of several lines."""
_ENDS = ("/exit", "/quit", "/bye")
_QUOTES = '"""'
_THINKING = {
    "on": "the model thinks from now on",
    "off": "the model answers at once from now on",
    "show": "thoughts are shown from now on",
    "hide": "thoughts are not shown from now on",
}


def _settings() -> dict[str, Option]:
    return {o.flag.removeprefix("--"): o for o in described(GenerationOptions, "run")}


class Chat:
    """One conversation: reads what the user types until the end, and answers."""

    def __init__(self, model: Model, request: Request) -> None:
        self._model = model
        self._request = request
        self._options = request.generation
        self._messages = model.session.messages
        self._max_bytes = max_text_bytes(model.info.plan.ctx_tokens)
        self._hides_thoughts = request.hide_thinking
        self._is_terminal = sys.stdin.isatty()
        self._typed = ""  # a command that ended an edit
        self._commands: dict[str, Callable[[str], object]] = {
            "/system": self._set_system,
            "/retry": self._retry,
            "/edit": self._edit,
            "/undo": self._undo,
            "/reset": self._reset,
            "/save": self._save,
            "/load": self._load,
            "/set": self._set,
            "/think": self._think,
            "/context": self._say_context,
            "/help": lambda _: say(_HELP),
        }

    def run(self) -> int:
        if self._model.chat_template.is_plain:
            say(
                "This file has no chat template: your lines and the answers are joined as plain "
                "text, which the model continues."
            )
        if self._is_terminal and not self._request.quiet:
            name = Path(self._request.model).name.removesuffix(".qsf").removesuffix(".gguf")
            with Reader(self._request.path) as reader:
                say_lines(report.greeting_lines(self._model, name, type_of(reader)))
            if self._request.session is not None:
                say_lines(resumed_lines(self._model, self._request.session))
        with line_editing(self._completed) if self._is_terminal else contextlib.nullcontext():
            while self._turn():
                pass
        return 0

    def _turn(self) -> bool:
        """Read and answer one message; return False at the end of the conversation."""
        try:
            line, self._typed = self._typed or self._read_message(), ""
            typed = "" if line is None else line.strip()
            if line is None or typed in _ENDS:
                return False
            name, _, rest = typed.partition(" ")
            if re.fullmatch("/[a-z]+", name) and "\n" not in typed:
                self._obey(name, rest.strip())
            elif typed:
                self._answer(line, self._options)
        except StoppedError as stopped:
            if stopped.exit_code != command.EXIT_INTERRUPTED or not self._is_terminal:
                raise
            say("\n(Ctrl-D or /exit ends)")
        return True

    def _completed(self, before: str, word: str) -> list[str]:
        """Return the completions of ``word``, which follows ``before`` on the line."""
        name = before.strip()
        if not before:
            names = [*self._commands, "/exit"] if word.startswith("/") else []
        elif name in ("/save", "/load"):
            return file_names(word)
        else:
            names = {"/set": list(_settings()), "/think": list(_THINKING)}.get(name, [])
        return [f"{each} " for each in names if each.startswith(word)]

    # ---- reading ----

    def _read_message(self) -> str | None:
        """Return the user's message; a message between triple quotes may have several lines."""
        line = self._read_line("> ")
        if line is None or not line.lstrip().startswith(_QUOTES):
            return line
        text = line.lstrip().removeprefix(_QUOTES)
        while not text.rstrip().endswith(_QUOTES):
            more = self._read_line(". ")
            if more is None:
                return text
            if len(text) + len(more) > self._max_bytes:
                return self._check_length("", is_long=True)
            text += f"\n{more}"
        return text.rstrip().removesuffix(_QUOTES).strip("\n")

    def _read_line(self, prompt: str, given: str = "") -> str | None:
        """Return the user's next line, "" in place of a line that is too long, None at the end.

        Memory holds no more of a pipe's line than the context can take. A terminal's line is read
        whole before its length is checked. On a terminal ``given`` is the line's initial text,
        which the user can edit.
        """
        if self._is_terminal:
            try:
                with prefilled(given), interruptible_wait():
                    line = valid_text(input(prompt), "the line")
            except EOFError:
                say("")
                return None
            except QsfArgumentError as error:
                return self._refuse_line(str(error))
            return self._check_length(line, is_long=len(line.encode()) > self._max_bytes)
        data = sys.stdin.buffer.readline(self._max_bytes + 1)
        if not data:
            return None
        is_long = len(data) > self._max_bytes and not data.endswith(b"\n")
        while is_long and (rest := sys.stdin.buffer.readline(self._max_bytes)):
            if rest.endswith(b"\n"):
                break
        try:
            line = data.decode("utf-8", "replace" if is_long else "strict").rstrip("\r\n")
        except UnicodeDecodeError:
            return self._refuse_line("the line is not UTF-8")
        return self._check_length(line, is_long=is_long)

    def _check_length(self, line: str, *, is_long: bool) -> str:
        text = f"more than {self._max_bytes} bytes are too many for the context"
        return self._refuse_line(text) if is_long else line

    def _refuse_line(self, reason: str) -> str:
        say(f"({reason}: left out)")
        return ""

    # ---- answering ----

    def _answer(self, line: str, options: GenerationOptions) -> None:
        """Print the answer to ``line``; a full context forgets its oldest turns first."""
        before = list(self._messages)
        n_forgotten = 0
        while True:
            try:
                self._say_answer(line, options)
                break
            except QsfArgumentError as error:
                if error.argument == "prompt" and (n_turns := self._forget_oldest()):
                    n_forgotten += n_turns
                    continue
                self._messages[:] = before
                say(f"({command.explain(error)})")
                return
        if n_forgotten:
            turns = "turn is" if n_forgotten == 1 else f"{n_forgotten} turns are"
            say(f"(the context was full: the oldest {turns} forgotten; /save keeps what is left)")
        if self._request.session is not None:
            write_conversation(self._request.session, self._model.session)

    def _forget_oldest(self) -> int:
        """Forget the oldest question with its answer, or half of the conversation under a KV
        policy.

        Prints how many were forgotten. The rest is evaluated again, so half saves later
        evaluations.
        """
        starts = [i for i, message in enumerate(self._messages) if message["role"] == "user"]
        has_policy = parse_kv_policy(self._model.info.plan.kv_policy) is not None
        n_turns = (len(starts) + 1) // 2 if has_policy else min(1, len(starts))
        if n_turns:
            end = starts[n_turns] if n_turns < len(starts) else len(self._messages)
            del self._messages[starts[0] : end]
        return n_turns

    def _say_answer(self, line: str, options: GenerationOptions) -> None:
        chat = partial(call_with, self._model.session.chat, line)
        is_plain = self._model.chat_template.is_plain
        shown = Shown(is_as_written=self._request.plain, has_markdown=not is_plain)
        guard = terminal_guard(is_wanted=not self._request.no_loop_guard)
        try:
            pieces = generate(
                self._model, options, chat,
                is_quiet=self._request.quiet, hides_thoughts=self._hides_thoughts,
                guard=guard,
            )  # fmt: skip
            with unseen_keys(), closing(pieces):
                for piece in pieces:
                    shown.push(piece)
        except StoppedError as stopped:
            shown.end()
            if stopped.exit_code != command.EXIT_INTERRUPTED:
                raise
            say("(stopped)")
        else:
            shown.end()
        if guard is not None and guard.found:
            say(guard.found)
        stats = self._model.stats
        if stats is None:
            return
        if stats.stop_reason == "length":
            say(f"(cut after {stats.generated_tokens} tokens: /set max-tokens -1 lets it end)")
        if stats.stop_reason == "context":
            say("(cut: the context is full; the next message forgets the oldest turns)")
        if self._request.verbose:
            say_lines(report.stats_lines(self._model, stats, is_verbose=True))
        elif self._is_terminal and not self._request.quiet:
            say(dim(report.speed_line(stats)))

    # ---- commands ----

    def _obey(self, name: str, rest: str) -> None:
        obey = self._commands.get(name)
        if obey is None:
            say(f"({name} is not known; there are {', '.join(self._commands)} and /exit)")
            return
        try:
            obey(rest)
        except QsfError as error:
            say(f"({command.explain(error)})")

    def _set_system(self, text: str) -> None:
        if self._model.chat_template.is_plain:
            say("(the file has no chat template, so there is no place for it)")
            return
        self._messages[:] = with_system(self._messages, text)
        say_lines(system_lines(self._model))
        say("(the model is told so from now on)" if text else "(the model is told nothing)")

    def _reset(self, _: str) -> None:
        self._messages[:] = [m for m in self._messages if m["role"] == "system"]
        say("(the conversation is forgotten)")

    def _take_last(self) -> str | None:
        at = self._last_question()
        if at is None:
            return None
        content = self._messages[at]["content"]
        del self._messages[at:]
        return content if isinstance(content, str) else ""

    def _last_question(self) -> int | None:
        for at in range(len(self._messages) - 1, -1, -1):
            if self._messages[at]["role"] == "user":
                return at
        say("(there is no question yet)")
        return None

    def _undo(self, _: str) -> None:
        if self._take_last() is not None:
            say("(the last question and its answer are forgotten)")

    def _retry(self, _: str) -> None:
        question = self._take_last()
        if question is not None:
            self._answer(question, replace(self._options, seed=None))

    def _edit(self, _: str) -> None:
        if not self._is_terminal:
            raise QsfArgumentError("/edit needs a terminal: /undo, and ask again")
        at = self._last_question()
        if at is None:
            return
        content = self._messages[at]["content"]
        if not isinstance(content, str):
            raise QsfArgumentError("the last question is a list of parts: /undo, and ask again")
        say("(an empty line or Ctrl-C leaves it as it was)")
        question = self._read_line("> ", content)
        if question is not None and question.split(" ")[0] in {*self._commands, *_ENDS}:
            self._typed = question
            return
        if question is None or not question.strip():
            say("(nothing has changed)")
            return
        del self._messages[at:]
        self._answer(question, self._options)

    def _save(self, name: str) -> None:
        if not name:
            raise QsfArgumentError("/save FILE: the file is missing")
        write_conversation(Path(name).expanduser(), self._model.session)
        say(f"({len(self._messages)} messages are in {name})")

    def _load(self, name: str) -> None:
        if not name:
            raise QsfArgumentError("/load FILE: the file is missing")
        path = Path(name).expanduser()
        reason = read_conversation(path, self._model.session, self._model.input_bytes)
        if reason:
            say(f"({reason}: the conversation is evaluated again)")
        say_lines(resumed_lines(self._model, path, is_held=not reason))

    def _think(self, how: str) -> None:
        if how not in _THINKING:
            raise QsfArgumentError(f"/think takes one of {', '.join(_THINKING)}")
        if how in ("show", "hide"):
            self._hides_thoughts = how == "hide"
        else:
            self._options = with_thinking(self._model, self._options, is_on=how == "on")
        say(f"({_THINKING[how]})")

    def _set(self, rest: str) -> None:
        options = _settings()
        name, _, text = rest.partition(" ")
        if not name:
            used = self._model.sampling_params(**sampling_fields(self._options))
            for shown, each in options.items():
                value = getattr(used, each.name, getattr(self._options, each.name))
                text = f"{value:g}" if isinstance(value, float) else str(value)
                text = each.default_text or "none" if value in (None, ()) else text
                say(f"{shown:20} {'-1 (until the model ends)' if value == MAX_U32 else text}")
            return
        option = options.get(name.removeprefix("--").replace("_", "-"))
        if option is None:
            raise QsfArgumentError(f"there is no option {name}: {', '.join(options)}")
        try:
            value = option.kind.parse(text.strip()) if text.strip() else option.default
        except ValueError as error:
            raise QsfArgumentError(f"{name}: {error}") from None
        self._options = replace(self._options, **{option.name: value})

    def _say_context(self, _: str) -> None:
        n_held = self._model.session.n_tokens
        n_all = self._model.info.plan.ctx_tokens
        say(f"({n_held} of {n_all} tokens, {100 * n_held / n_all:.0f} %, in "
            f"{len(self._messages)} messages)")  # fmt: skip


_MAX_HISTORY = 1000


@contextlib.contextmanager
def line_editing(complete: Callable[[str, str], Sequence[str]]) -> Iterator[None]:
    """Let input() edit lines, join pasted lines into one message, and keep a history over runs.

    ``complete(before, word)`` returns completions of ``word``, which follows ``before`` on the
    line.
    """
    try:
        import readline
    except ImportError:  # Windows, whose console edits lines itself
        yield
        return
    matches: list[str] = []

    def completer(word: str, state: int) -> str | None:
        if state == 0:
            matches[:] = complete(readline.get_line_buffer()[: readline.get_begidx()], word)
        return matches[state] if state < len(matches) else None

    with contextlib.suppress(Exception):  # libedit lacks the setting
        readline.parse_and_bind("set enable-bracketed-paste on")
    is_libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
    readline.set_completer_delims(" ")
    readline.set_completer(completer)
    path = user_folder("XDG_STATE_HOME", "~/.local/state") / "history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(_MAX_HISTORY)
    try:
        yield
    finally:
        readline.set_completer(None)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600)
            readline.write_history_file(path)


@contextlib.contextmanager
def prefilled(text: str) -> Iterator[None]:
    """Start the next input() with ``text``, which the user can edit."""
    try:
        import readline
    except ImportError:
        text = ""
    if not text:
        yield
        return
    readline.set_startup_hook(lambda: readline.insert_text(text))
    try:
        yield
    finally:
        readline.set_startup_hook(None)


def file_names(word: str) -> list[str]:
    folder, _, start = word.rpartition("/")
    try:
        inside = sorted(Path(f"{folder}/" if "/" in word else ".").expanduser().iterdir())
    except (OSError, RuntimeError):
        return []
    head = word[: len(word) - len(start)]
    return [
        f"{head}{path.name}{'/' if path.is_dir() else ''}"
        for path in inside
        if path.name.startswith(start) and (start or not path.name.startswith("."))
    ]
