"""Renders a chat template in a process of its own, under limits of the system.

An untrusted template may nest until the stack is full, multiply strings or never end.
The process has no more than ``_FREE_BYTES``, 8 bytes for each byte of the request and 160 for each
of the template on top of what its interpreter and Jinja2 take; the reserve of the memory plan
covers them (``ChatTemplate.render_bytes``).
The process renders one template and ends before the engine computes, or, in ``one_process``, stays
and has the limits in a fork for each template.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import marshal
import os
import sys
import threading
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsf.errors import QsfArgumentError, QsfError, QsfFormatError, QsfMemoryError
from qsf.system import process as processes

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator, Mapping

_FREE_BYTES = 4 << 20
_FREE_PER_BYTE = 8
_STACK_BYTES = 1 << 20
_CPU_SECONDS = 10
_LIBRARIES = ("jinja2", "markupsafe")


class TemplateFailedError(QsfArgumentError):
    """The template fails with these messages, which it does not refuse."""


def render(source: str, values: Mapping[str, Any], *, max_bytes: int, compiler_bytes: int) -> str:
    """Return the text that the template ``source`` makes of ``values``.

    Args:
        source: Jinja, as chat templates use it.
        values: JSON values by name.
        max_bytes: longest text, in UTF-8.
        compiler_bytes: what compiling the template takes.

    Raises:
        QsfArgumentError: the template refuses the values, or the text would be too long.
        TemplateFailedError: the template fails with these values.
        QsfFormatError: the template is broken, or exceeds its limit of memory or time.
        QsfMemoryError, QsfError: the process could not be started.
    """
    values_bytes = marshal.dumps((source, dict(values)))
    limits = {
        "free_bytes": _FREE_BYTES + _FREE_PER_BYTE * len(values_bytes) + compiler_bytes,
        "n_seconds": _CPU_SECONDS,
        "stack_bytes": _STACK_BYTES,
        "max_bytes": max_bytes,
    }
    returncode, answer = _ask_child(marshal.dumps(limits) + values_bytes)
    if answer[:1] != b"!":
        raise QsfError(
            f"the process that renders chat templates does not start: {sys.executable} ends with "
            f"exit code {returncode}"
        )
    kind, text = answer[1:2], answer[2:].decode("utf-8", "replace")
    if kind == b"T":
        return text
    if kind == b"R":
        raise QsfArgumentError(f"the chat template refuses the messages: {text}")
    if kind == b"F":
        raise TemplateFailedError(f"the chat template fails with these messages: {text}")
    if kind == b"L":
        raise QsfArgumentError(
            f"the chat template makes a prompt of {text} bytes of the messages, and {max_bytes} is "
            "the limit",
            argument="prompt",
        )
    if processes.how_ended(returncode) == processes.KILLED:
        raise QsfMemoryError("the system ended the process that renders the chat template")
    reason = text if kind == b"E" else _reason_of_crash(returncode, is_full=kind == b"M")
    raise QsfFormatError(f"the file's chat template cannot be rendered: {reason}")


class _Child:
    """A process that renders, started and talked to in threads of their own.

    Python's signal handlers run in the main thread between any two instructions and may raise
    there, even between the start of a process and storing it. They cannot interrupt these threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_over = threading.Event()
        self._answer: tuple[int, bytes] | OSError = (0, b"")
        self._is_stopped = False

    @property
    def has_ended(self) -> bool:
        """True after ``stop``, and if the system ended the process."""
        return self._is_stopped or (self._process is not None and self._process.poll() is not None)

    def ask(self, command: list[str], request: bytes) -> tuple[int, bytes]:
        """Return the exit code, or minus the number of a signal, and the answer.

        Raises QsfMemoryError. After an exception, or an answer without a text, it is stopped.
        """
        self._is_over.clear()
        is_answered = False
        try:
            threading.Thread(target=self._talk, args=(command, request), name="qsf-render").start()
            self._is_over.wait()
            is_answered = not isinstance(self._answer, OSError) and len(self._answer[1]) > 1
        except RuntimeError as error:  # no more threads
            self._is_over.set()
            raise QsfMemoryError(f"the chat template cannot be rendered: {error}") from error
        finally:
            if not is_answered:
                self.stop()
        if isinstance(self._answer, OSError):
            raise QsfMemoryError(
                f"the process that renders chat templates cannot be started: {self._answer}"
            ) from self._answer
        return self._answer

    def _talk(self, command: list[str], request: bytes) -> None:
        try:
            with self._lock:
                if self._is_stopped:
                    return
                is_new = self._process is None
                # The terminal's Ctrl-C goes to us alone, and we end the process.
                process = self._process = self._process or processes.start_apart(command)
            self._answer = _exchange(process, request, is_new=is_new)
        except OSError as error:
            self._answer = error
        finally:
            self._is_over.set()

    def stop(self) -> None:
        """End the process; prevents a start that has not happened yet."""
        with self._lock:
            self._is_stopped = True
        if self._process is not None:
            processes.end_apart(self._process)
            self._is_over.wait()


def _exchange(
    process: subprocess.Popen[bytes], request: bytes, *, is_new: bool
) -> tuple[int, bytes]:
    """Send the request; return the exit code and the answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    if is_new and process.stdout.read(1) != b"+":
        return process.wait(), b""
    try:
        process.stdin.write(marshal.dumps(request))
        process.stdin.flush()
        code, answer = marshal.load(process.stdout)
    except (EOFError, BrokenPipeError):
        return process.wait(), b"!"
    return code, answer


class _Kept:
    """The process of the renderings inside ``one_process``."""

    def __init__(self) -> None:
        self.n_users = 0
        self.turn = threading.Lock()  # held while it renders
        self.child = _Child()


_kept = _Kept()


@contextmanager
def one_process() -> Iterator[None]:
    """Render all templates inside with one process, which forks for each. Its libraries then take
    8 MB until the end, and a rendering a fifth of the time.

    Where the system cannot fork, this does nothing.
    """
    _kept.n_users += hasattr(os, "fork")
    try:
        yield
    finally:
        _kept.n_users -= hasattr(os, "fork")
        if not _kept.n_users:
            with _kept.turn:
                _kept.child.stop()


def _ask_child(request: bytes) -> tuple[int, bytes]:
    """Return the exit code, or minus the number of a signal, and the output of the process."""
    if not _kept.n_users:
        child = _Child()
        try:
            return child.ask(_command("once"), request)
        finally:
            child.stop()
    with _kept.turn:
        if _kept.child.has_ended:
            _kept.child.stop()
            _kept.child = _Child()
        return _kept.child.ask(_command("stay"), request)


def _command(mode: str) -> list[str]:
    origins = [library and library.origin for library in map(find_spec, _LIBRARIES)]
    if None in origins:
        raise QsfError("chat templates need the package Jinja2: pip install jinja2")
    if not sys.executable or getattr(sys, "frozen", False):
        raise QsfError(
            "chat templates are rendered by a second Python process, and this program does not say "
            "where its Python is (sys.executable)"
        )
    program = Path(__file__).with_name("render_child.py")
    # -I and -S: it imports only the standard library and these folders, and runs no site hooks.
    folders = [str(Path(processes.__file__).parent)]
    folders += dict.fromkeys(str(Path(origin).parents[1]) for origin in origins if origin)
    return [sys.executable, "-I", "-S", "-B", str(program), mode, *folders]


def _reason_of_crash(returncode: int, *, is_full: bool) -> str:
    end = processes.FULL if is_full else processes.how_ended(returncode)
    if end == processes.FULL:
        return "it takes more memory than a template may"
    if end == processes.NESTED:
        return f"it is nested too deeply: its stack takes more than {_STACK_BYTES >> 20} MB"
    if end == processes.SLOW:
        return f"it takes more than {_CPU_SECONDS} seconds of processor time"
    return f"it ends the process that renders it ({returncode})"
