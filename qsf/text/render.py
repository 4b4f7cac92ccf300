"""Renders a chat template in a process of its own, under limits of the system.

An untrusted template may nest until the stack is full, multiply strings or never end.
The process has no more than ``_FREE_BYTES`` and 8 bytes for each byte of the request on top of what
its interpreter takes; the reserve of the memory plan covers both (``qsf.text.chat.RENDER_BYTES``).
The process renders one template and ends before the engine computes.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import marshal
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsf.errors import QsfArgumentError, QsfError, QsfFormatError, QsfMemoryError
from qsf.system import children

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping

_FREE_BYTES = 4 << 20
_FREE_PER_BYTE = 8
_STACK_BYTES = 1 << 20
_CPU_SECONDS = 10
_MAX_STEPS = 20_000_000  # enough for any real conversation


def render(source: str, values: Mapping[str, Any], *, max_bytes: int) -> str:
    """Return the text that the template ``source`` makes of ``values``.

    Args:
        source: Jinja, as chat templates use it.
        values: JSON values by name.
        max_bytes: longest text, in UTF-8.

    Raises:
        QsfArgumentError: the template refuses the values, or the text would be too long.
        QsfFormatError: the template is broken, or exceeds its limit of memory or time.
        QsfMemoryError, QsfError: the process could not be started.
    """
    values_bytes = marshal.dumps((source, dict(values)))
    limits = {
        "fuel": _MAX_STEPS,
        "free_bytes": _FREE_BYTES + _FREE_PER_BYTE * len(values_bytes),
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
    if kind == b"L":
        raise QsfArgumentError(
            f"the chat template makes a prompt of {text} bytes of the messages, and {max_bytes} is "
            "the limit",
            argument="prompt",
        )
    if children.how_ended(returncode) == children.KILLED:
        raise QsfMemoryError("the system ended the process that renders the chat template")
    reason = text if kind == b"E" else _reason_of_crash(returncode, is_full=kind == b"M")
    raise QsfFormatError(f"the file's chat template cannot be rendered: {reason}")


class _Child:
    """One process, started and awaited in a thread of its own.

    Python's signal handlers run in the main thread between any two instructions and may raise
    there, even between the start of a process and storing it. They cannot interrupt this thread.
    """

    def __init__(self, command: list[str], request: bytes) -> None:
        self._command = command
        self._request = request
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False
        self.is_over = threading.Event()
        self.answer = b""
        self.returncode = 0
        self.error: OSError | None = None

    def run(self) -> None:
        """Start the process, send the request and read to the end."""
        try:
            with self._lock:
                if self._is_stopped:
                    return
                # The terminal's Ctrl-C goes to us alone, and we end the process.
                self._process = children.start_apart(self._command)
            with self._process:
                self.answer = self._process.communicate(self._request)[0]
            self.returncode = self._process.returncode
        except OSError as error:
            self.error = error
        finally:
            self.is_over.set()

    def stop(self) -> None:
        """Kill the process and wait for its end; prevents a start that has not happened yet."""
        with self._lock:
            self._is_stopped = True
        if self._process is not None:
            self._process.kill()
            self.is_over.wait()


def _ask_child(request: bytes) -> tuple[int, bytes]:
    """Return the exit code, or minus the number of a signal, and the output of the process."""
    library = find_spec("minijinja")
    if library is None or library.origin is None:
        raise QsfError("chat templates need the package minijinja: pip install minijinja")
    if not sys.executable or getattr(sys, "frozen", False):
        raise QsfError(
            "chat templates are rendered by a second Python process, and this program does not say "
            "where its Python is (sys.executable)"
        )
    program = Path(__file__).with_name("render_child.py")
    folder = Path(library.origin).parents[1]
    # -I and -S: it imports only the standard library and two folders, and runs no site hooks.
    folders = [str(Path(children.__file__).parent), str(folder)]
    child = _Child([sys.executable, "-I", "-S", "-B", str(program), *folders], request)
    try:
        threading.Thread(target=child.run, name="qsf-render").start()
        child.is_over.wait()
    except RuntimeError as error:  # no more threads
        raise QsfMemoryError(f"the chat template cannot be rendered: {error}") from error
    finally:
        child.stop()
    if child.error is not None:
        raise QsfMemoryError(
            f"the process that renders chat templates cannot be started: {child.error}"
        ) from child.error
    return child.returncode, child.answer


def _reason_of_crash(returncode: int, *, is_full: bool) -> str:
    end = children.FULL if is_full else children.how_ended(returncode)
    if end == children.FULL:
        return "it takes more memory than a template may"
    if end == children.NESTED:
        return f"it is nested too deeply: its stack takes more than {_STACK_BYTES >> 20} MB"
    if end == children.SLOW:
        return f"it takes more than {_CPU_SECONDS} seconds of processor time"
    return f"it ends the process that renders it ({returncode})"
