"""What the commands share: exit codes, signals, errors as one line.

Only small modules are imported here: the imports of ``qsf-run`` count in its budget.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from qsf.errors import (
    ChildFailedError,
    QsfError,
    QsfFormatError,
    QsfMemoryError,
    clean,
    error_line,
    one_line,
)
from qsf.file.foreign_text import Lines
from qsf.system.files import wait_writable
from qsf.system.signals import STOPPING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO

    from typing_extensions import Buffer

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT

_PATIENCE_SECONDS = 2.0


class StoppedError(BaseException):
    """A signal that asks the program to end.

    Not an Exception, so that ``except Exception`` does not catch it.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.text = "interrupted" if number == signal.SIGINT else "terminated"
        self.exit_code = 128 + number
        self.outcome = ""  # replaces the default outcome text of the command


def _raise_stopped(number: int, _frame: object) -> None:
    raise StoppedError(STOPPING[signal.Signals(number)])


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP raise StoppedError, unless our parent ignores them."""
    previous = {}
    if threading.current_thread() is threading.main_thread():
        previous = {
            number: signal.signal(number, _raise_stopped)
            for number in STOPPING
            if signal.getsignal(number) is not signal.SIG_IGN
        }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def leave_at_once(number: int) -> None:
    """End the process now, from any thread; for moments with nothing to clean up."""
    os._exit(128 + number)


class Progress:
    """One line on the terminal about work that takes longer than two seconds.

    Shows nothing if standard error is not a terminal.
    """

    def __init__(self, text: str, *, is_wanted: bool) -> None:
        self._text = text
        self._is_over = not is_wanted or sys.stderr is None or not sys.stderr.isatty()
        self._is_shown = False
        self._started = time.monotonic()
        self._lock = threading.Lock()

    def update(self, text: str) -> None:
        self._text = text

    def tick(self) -> None:
        """Show the line if two seconds are over; from any thread."""
        with self._lock:
            seconds = time.monotonic() - self._started
            if not self._is_over and seconds >= _PATIENCE_SECONDS:
                self._is_shown = True
                sys.stderr.write(f"\r{self._text} ({seconds:.0f} s)\x1b[K")
                sys.stderr.flush()

    def end(self) -> None:
        with self._lock:
            self._is_over = True
            if self._is_shown:
                self._is_shown = False
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()


def json_text(value: object, indent: int | None = None) -> str:
    """Return JSON with unescaped letters, and escapes for characters that control a terminal.

    Raises ValueError for NaN and infinity, which JSON lacks.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def show_lines(text: str) -> None:
    """Print lines on standard output, without characters that control a terminal."""
    sys.stdout.write("".join(f"{clean(line)}\n" for line in text.split("\n")))


def show_json(value: object) -> None:
    sys.stdout.write(f"{json_text(value, 2)}\n")


def typed(program: str) -> str:
    """Return the name with which the user started ``program``: ``qsf run`` or ``qsf-run``."""
    return sys.argv[0] if sys.argv[0].startswith("qsf ") else program  # see entry.front


def runnable() -> str:
    """Return the command for ``qsf`` in the user's shell: its name, or its path if not in PATH."""
    import shlex
    import shutil

    here = Path(sys.executable).with_name("qsf")
    on_path = shutil.which("qsf")
    if not here.exists() or (on_path is not None and here.samefile(on_path)):
        return "qsf"
    inside = here.is_relative_to(Path.cwd())
    return shlex.quote(str(here.relative_to(Path.cwd()) if inside else here))


def say_error(program: str, text: str) -> None:
    """Print an error as the commands do: one line on standard error."""
    say_line(f"{typed(program)}: error: {error_line(text)}")


def say_line(line: str, *, is_wrapped: bool = True) -> None:
    """Print a line on standard error; ignores a terminal that is gone."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{wrapped(line) if is_wrapped else line}\n")
        sys.stderr.flush()


def wrapped(text: str) -> str:
    """Break lines between words where the terminal of standard error would break within them."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):  # no terminal
        return text
    if columns == 0 or all(len(line) <= columns for line in text.split("\n")):
        return text
    import textwrap

    fit = textwrap.TextWrapper(columns, break_long_words=False, break_on_hyphens=False)
    return "\n".join(fit.fill(line) if len(line) > columns else line for line in text.split("\n"))


def read_answer(question: str, *, default: bool) -> bool:
    """Ask on the terminal; return whether the answer is yes, or ``default`` for an empty answer."""
    sys.stderr.write(f"{question} [{'Y/n' if default else 'y/N'}] ")
    sys.stderr.flush()
    answer = sys.stdin.readline().strip().lower()
    return answer in ("y", "yes") if answer else default


def fail(
    program: str, error: Exception, read: Path | None = None, usage: type[QsfError] | tuple[()] = ()
) -> int:
    """Print what has ended a program, unless that is done, and return its exit code.

    ``read`` is the file of a wrong format; errors of the kind ``usage`` mean wrong options.
    """
    if isinstance(error, ChildFailedError):
        return error.exit_code
    if isinstance(error, OSError) and not isinstance(error, QsfError):
        drop_output()
        if isinstance(error, BrokenPipeError):
            return 0  # the reader of our output has closed it; flushing at exit would fail
        say_error(program, f"{error.filename or 'output'}: {error.strerror or error}")
        return EXIT_FAILED
    explain_usage: Any = getattr(error, "format_message", None)
    if callable(explain_usage):
        text = re.sub(r"^Missing argument '(\S+)'\.$", r"\1 is missing", explain_usage())
        epilog = getattr(getattr(getattr(error, "ctx", None), "command", None), "epilog", None)
        example = re.search(r"^  (qsf .+)", epilog or "", re.MULTILINE)
        if example is not None and text.endswith(" is missing"):
            text += f", as in: {example[1]}"
        say_error(program, f"{text} (see {typed(program)} --help)")
        return EXIT_USAGE
    if isinstance(error, QsfError):
        say_error(program, explain(error, read if isinstance(error, QsfFormatError) else None))
        return EXIT_USAGE if isinstance(error, usage) else EXIT_FAILED
    is_full = isinstance(error, MemoryError)
    what = f"internal error, please report it: {type(error).__name__}: {error}"
    say_error(program, "out of memory" if is_full else what)
    return EXIT_FAILED


def explain(error: QsfError, path: Path | None = None) -> str:
    """Return the error's text for a command: with its options, and what to do.

    The text names ``path``, the file that was read.
    """
    text = str(error)
    if isinstance(error, QsfMemoryError) and error.plan is not None:
        from qsf.native.opening import does_not_fit

        text = does_not_fit(error.plan, is_command=True)
    name = error.argument
    if name is not None and name in _option_names():
        flag = "--" + name.replace("_", "-")
        if text.startswith(f"{name}="):  # the option has a value here: the file itself is fine
            return f"{flag} {text.removeprefix(f'{name}=')}"
        if text.startswith(name):
            text = flag + text.removeprefix(name)
    text = re.sub(r"\bmax_seq_len=(\d)", r"--max-seq-len \1", text)
    if path is not None and one_line(str(path)) not in text:
        text = f"{path}: {text}"
    if error.is_damage:
        text += ". The file is damaged: copy it again, or convert the model again"
    return text


def _option_names() -> set[str]:
    from qsf.options import GenerationOptions, ModelOptions, described

    kinds = (ModelOptions, GenerationOptions)
    return {option.name for kind in kinds for option in described(kind) if option.commands}


def explain_folder(path: Path) -> str:
    if (path / "config.json").exists():
        return f"{path} is a HuggingFace model: convert it: {runnable()} convert {path} model.qsf"
    return f"{path} is a folder, not a .qsf file"


class _WholeOutput(io.FileIO):
    """A descriptor whose ``write`` writes all bytes, or raises OSError.

    The system may accept only a part: if the pipe does not block, or if a signal arrives while the
    reader is slow. Python's text streams lose the rest if PYTHONUNBUFFERED is set.
    """

    def write(self, data: Buffer, /) -> int:
        left = memoryview(data).cast("B")
        n_bytes = len(left)
        while left:
            n_written = super().write(left)
            if n_written is None:  # the stream does not block, and is full
                wait_writable(self.fileno())
            else:
                left = left[n_written:]
        return n_bytes


_ENCODING = "utf-8" if sys.platform == "win32" else None  # None: as the user's locale has it


def _whole(stream: TextIO) -> TextIO:
    """Return a standard stream that never loses bytes silently and can write every character."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream  # a stream that somebody replaced
    stream.reconfigure(encoding=_ENCODING, errors="replace")
    if not isinstance(getattr(stream.buffer, "raw", stream.buffer), io.FileIO):
        return stream  # the console of Windows, which takes characters
    if stream not in (sys.__stdout__, sys.__stderr__) or isinstance(stream.buffer, _WholeOutput):
        return stream
    stream.flush()
    return io.TextIOWrapper(
        _WholeOutput(stream.fileno(), "w", closefd=False),
        encoding=stream.encoding,
        errors="replace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def prepare_streams() -> None:
    """Open standard streams that our parent closed, and make their writes complete or fail."""
    nowhere = Path(os.devnull)
    if sys.stdin is None:
        sys.stdin = nowhere.open(encoding="utf-8")
    if sys.stdout is None:
        sys.stdout = nowhere.open("w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = nowhere.open("w", encoding="utf-8")
    sys.stdout, sys.stderr = _whole(sys.stdout), _whole(sys.stderr)


def open_input(name: str | Path | None) -> contextlib.AbstractContextManager[IO[bytes]]:
    """Open a file for reading; None and "-" are standard input."""
    is_stdin = name is None or str(name) == "-"
    return contextlib.nullcontext(sys.stdin.buffer) if is_stdin else Path(str(name)).open("rb")


@contextlib.contextmanager
def open_lines(name: str | Path | None) -> Iterator[Lines]:
    """Open a file for reading its lines, as ``open_input`` does."""
    with open_input(name) as file:
        lines = Lines(file)  # here, so that it is not collected before the file is closed
        yield lines


def read_at_most(file: IO[bytes], n_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < n_bytes and (piece := file.read(min(n_bytes - len(data), 1 << 16))):
        data += piece
    return bytes(data)


def drop_output() -> None:
    """Discard the buffered output: nobody reads standard output any more."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def version_line(program: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"{typed(program)} {version('qsf')}"
    except PackageNotFoundError:
        return f"{typed(program)} (not installed)"
