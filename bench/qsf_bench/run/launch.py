"""Starts measured processes, waits for them, and returns their exit and resource use.

Each process has a process group, so that it and its children can be killed; its output goes into
temporary files, of which only the last lines are read. If this process is ended, the measured one
is killed too, and its files and memory group are removed.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from qsf_bench.run.memory_group import memory_group
from qsf_bench.run.tasks import (
    ANSWER_VARIABLE,
    QSF,
    Answer,
    Cap,
    Task,
    WorkerError,
    parse_answer,
)

TIMEOUT_SECONDS = 3600.0

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_LLAMA_WORKER = Path(__file__).with_name("worker_llama.py")
_KEPT_BYTES = 1 << 16  # of a process's output
_SHOWN_LINES = 5
_SHOWN_CHARS = 800


@dataclass(frozen=True, slots=True)
class Ended:
    """The exit and resource use of a process.

    ``max_rss_bytes`` is the kernel's count. It starts with this process's own peak, because a
    child begins as its parent's copy; a smaller peak of the child is unknown: None.
    """

    exit_code: int  # negative: the signal that ended it
    is_late: bool  # killed because its time was over
    max_rss_bytes: int | None
    cap: Cap | None
    output: str  # the last of it
    errors: str  # the last of it


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a task.

    If ``why`` is not empty, the process failed, and ``answer`` has the tests before that, if any.
    """

    task: Task
    answer: Answer | None
    why: str
    peak_rss_bytes: int  # the process alone, by the kernel's count; 0: unknown
    cap: Cap | None
    note: str = ""  # for readers of the figures

    @property
    def has_figures(self) -> bool:
        """True if at least one test was done."""
        return self.answer is not None and bool(self.answer.tests)


# ---- any command ----


def run_command(
    command: Sequence[str],
    *,
    limit_mb: int | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run a command, in a new memory group if there is a limit.

    Raises:
        CapError: the group cannot be made.
        WorkerError: the command cannot be started.
    """
    try:
        import resource
    except ImportError:  # Windows
        raise WorkerError("this system does not say how much memory a process took") from None
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="qsf-bench-"))
        paths = [Path(folder, name) for name in ("output", "errors")]
        output, errors = (stack.enter_context(path.open("wb")) for path in paths)
        group = None
        if limit_mb is not None:
            group = stack.enter_context(memory_group(limit_mb << 20))
            command = group.enter_and_run(list(command))
        own_peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        later = contextlib.ExitStack()
        stack.callback(later.close)
        with _signals_later():
            process = _start(command, output, errors, environment or {})
            stack.callback(_end, process)
            # A second Ctrl-C must not stop the cleanup after the first.
            stack.callback(later.enter_context, _signals_later())
        is_late = _wait(process, timeout_seconds)
        peak_kb = _end(process)
        cap = None
        if group is not None and limit_mb is not None:
            cap = Cap(limit_mb, group.peak_bytes(), group.n_oom_kills())
        return Ended(
            exit_code=process.returncode,
            is_late=is_late,
            max_rss_bytes=peak_kb * 1024 if peak_kb > own_peak_kb else None,
            cap=cap,
            output=_tail(paths[0]),
            errors=_tail(paths[1]),
        )


def _start(
    command: Sequence[str], output: IO[bytes], errors: IO[bytes], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=os.environ | dict(environment),
            start_new_session=True,
        )
    except OSError as error:
        raise WorkerError(f"{command[0]} cannot be started: {error.strerror}") from error


@contextlib.contextmanager
def _signals_later() -> Iterator[None]:
    """Delay the handling of signals to the end: a half-started process would be lost."""
    arrived: list[int] = []
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(handler := signal.getsignal(number)):
                signal.signal(number, lambda number, _frame: arrived.append(number))
                previous[number] = handler
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for arrived_number in arrived:
            signal.raise_signal(arrived_number)


def _wait(process: subprocess.Popen[bytes], timeout_seconds: float) -> bool:
    """Wait for the end of the process; return whether it was killed.

    A thread sleeps until the time limit, because polling would disturb the measurement.
    """
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        _kill(process.pid)

    timer = threading.Timer(timeout_seconds, end)
    timer.daemon = True
    timer.start()
    try:
        # It stays a zombie for now, so its number cannot be reused when the timer kills it.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    finally:
        timer.cancel()
        timer.join()
    return is_late.is_set()


def _end(process: subprocess.Popen[bytes]) -> int:
    """Kill the process and its remaining children; return the kernel's ru_maxrss, once."""
    if process.returncode is not None:
        return 0
    _kill(process.pid)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_maxrss


def _kill(group_id: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group_id, signal.SIGKILL)


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        n_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, n_bytes - _KEPT_BYTES))
        return file.read().decode("utf-8", "replace")


# ---- tasks ----


def forget_file(path: str | os.PathLike[str]) -> None:
    """Let the system drop the file's pages from its cache. Raises WorkerError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)  # unwritten pages cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    except OSError as error:
        raise WorkerError(f"{path} cannot be read: {error.strerror}") from error


def drop_caches(path: str) -> str:
    """Drop the page cache: of the file, and of all other files if permitted.

    Returns why that is not permitted, or "". Raises WorkerError: the file cannot be read.
    """
    forget_file(path)
    try:
        if os.access(_DROP_CACHES, os.W_OK):
            os.sync()
        _DROP_CACHES.write_text("3")
    except OSError as error:
        return f"{_DROP_CACHES}: {error.strerror}"
    return ""


def run_task(
    task: Task,
    python: str,
    *,
    is_cold: bool = False,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Outcome:
    """Run one task.

    Args:
        task: what to run.
        python: the interpreter of the worker.
        is_cold: drop the file from the page cache first. Needed in a memory group smaller than the
            file: the group is not charged for pages that others have read.
        timeout_seconds: limit after which the process is killed.

    Raises:
        CapError: the task's memory group cannot be made.
    """
    answer = None
    with tempfile.TemporaryDirectory(prefix="qsf-bench-") as folder:
        answer_path = Path(folder, "answer.json")
        command = [python, *worker_of(task), json.dumps(task.as_json())]
        try:
            refused = drop_caches(task.path) if is_cold else ""
            ended = run_command(
                command,
                limit_mb=task.cap_mb,
                timeout_seconds=timeout_seconds,
                environment={ANSWER_VARIABLE: str(answer_path)},
            )
        except WorkerError as error:
            return Outcome(task, None, str(error), 0, None)
        late = f"did not end within {timeout_seconds:g} s"
        why = late if ended.is_late else signal_text(ended)
        try:
            answer = read_answer(answer_path, task, ended)
        except WorkerError as error:
            why = why or str(error)
    if answer is not None:
        why = why or answer.failure
    if ended.exit_code and not why:
        after = " after it had answered" if answer else ""
        why = f"ended with {ended.exit_code}{after}{last_lines(ended.errors)}"
    peak_bytes = ended.max_rss_bytes or (answer.peak_rss_bytes if answer else 0)
    note = f"only the model was dropped from the caches before a run ({refused})" if refused else ""
    return Outcome(task, answer, why, peak_bytes, ended.cap, note)


def worker_of(task: Task) -> list[str]:
    """Return the arguments of a Python that make it the task's worker."""
    return ["-m", "qsf_bench.run.worker_qsf"] if task.engine == QSF else [str(_LLAMA_WORKER)]


def read_answer(path: Path, task: Task, ended: Ended) -> Answer:
    """Return the process's answer. Raises WorkerError, with its last lines."""
    end = last_lines(ended.errors)
    try:
        answer = parse_answer(json.loads(path.read_bytes()), task)
    except OSError:
        raise WorkerError(f"ended with {ended.exit_code} and gave no answer{end}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise WorkerError(f"gave an answer that cannot be read ({cause}){end}") from error
    return answer


def last_lines(text: str) -> str:
    """Return the last lines of a process's output, as the end of a sentence."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return ": " + " / ".join(lines[-_SHOWN_LINES:])[-_SHOWN_CHARS:] if lines else ""


def signal_text(ended: Ended) -> str:
    """Return in words which signal ended a process; "" if none did."""
    if ended.exit_code >= 0:
        return ""
    try:
        name = signal.Signals(-ended.exit_code).name
    except ValueError:
        name = f"signal {-ended.exit_code}"
    if name == "SIGKILL":
        if ended.cap is not None and ended.cap.n_oom_kills:
            return f"killed by {name}: out of memory in its group of {ended.cap.limit_mb} MB"
        return f"killed by {name}: the system was out of memory, or somebody did it"
    if name in ("SIGTERM", "SIGINT", "SIGHUP"):
        return f"ended by {name}"
    end = last_lines(ended.errors)
    if name == "SIGILL":
        end = ": an instruction that this processor lacks: built for another processor?" + end
    return f"crashed with {name}{end}"
