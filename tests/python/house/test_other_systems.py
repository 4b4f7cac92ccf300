"""The package without the modules and names that Windows lacks: `qsf.system` has another way."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from qsf.system import confine, process

ROOT = Path(__file__).resolve().parents[3]
# Python as Windows has it, as far as Linux can show it: what is missing there is removed.
WINDOWS = """
import os, signal, sys, mmap, select, subprocess, asyncio, threading, types, socket, errno, ctypes
import _signal, _socket
pair = _socket.socketpair
socket.socketpair = lambda: pair()
for name in ("fcntl", "resource", "termios", "readline", "pwd", "grp"):
    sys.modules[name] = None
for module, names in (
    (os, "O_CLOEXEC O_NONBLOCK O_NOFOLLOW O_DIRECTORY O_DIRECT pread preadv pwrite fchmod "
         "posix_fadvise kill fork geteuid getuid sysconf statvfs"),
    (signal, "SIGHUP SIGKILL SIGBUS SIGURG SIGXCPU pthread_kill pthread_sigmask"),
    (_signal, "SIGHUP pthread_sigmask"), (_socket, "socketpair"), (mmap, "MAP_PRIVATE"),
):
    for name in names.split():
        delattr(module, name)
signal.SIGBREAK = signal.SIGTTIN
_held = set()
class Kernel32:
    def LockFileEx(self, handle, *_):
        key = os.fstat(handle.value).st_ino
        return key not in _held and not _held.add(key)
ctypes.WinDLL = lambda *_, **__: Kernel32()
ctypes.get_last_error = lambda: 33
sys.modules["msvcrt"] = types.SimpleNamespace(get_osfhandle=lambda fd: fd)
"""


def on_windows(script: str, *arguments: str | Path) -> str:
    program = WINDOWS + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_of_the_packages_can_be_imported() -> None:
    printed = on_windows("""
        import importlib, pkgutil
        import qsf, qsf_bench, qsf_converter
        names = [m.name for p in (qsf, qsf_bench, qsf_converter) for m in pkgutil.walk_packages(
                 p.__path__, p.__name__ + ".") if not m.name.endswith(("build_ffi", "libqsf"))
                 and not m.name.endswith(("__main__", "render_child", "qsf.bench"))]
        for name in names:
            importlib.import_module(name)
        print(len(names))
    """)
    assert int(printed) > 200


def test_files_are_read_written_locked_and_removed(tmp_path: Path) -> None:
    printed = on_windows(
        """
        from pathlib import Path
        from qsf.system import files
        path = Path(sys.argv[1])
        fd = files.create_new(path)
        assert files.write_at(fd, memoryview(b"abcdef"), 2) == 6
        assert files.read_at(fd, 3, 4) == b"cde"
        buffer = memoryview(bytearray(16))
        assert files.read_into(fd, buffer, 1) == 7 and bytes(buffer[:7]) == b"\\0abcdef"
        files.make_private(fd)
        files.forget_cached(fd)
        files.sync_folder(path.parent)
        os.lseek(fd, 5, os.SEEK_SET)
        files.lock(fd)
        assert os.lseek(fd, 0, os.SEEK_CUR) == 5
        other = files.open_no_link(path)
        try:
            files.try_lock(other)
        except BlockingIOError as error:
            print("held", error.errno == errno.EACCES)
        link = path.with_name("link")
        link.symlink_to(path)
        try:
            files.open_no_link(link)
        except OSError as error:
            print("link", error.errno == errno.ELOOP)
        files.unlink_locked(fd, path)
        print("there", path.exists(), os.read(fd, 1))
        os.close(fd)
        with files.new_memory(4096) as block:
            print(len(block))
        """,
        tmp_path / "file",
    )
    assert printed.splitlines() == ["held True", "link True", "there False b''", "4096"]


def test_a_signal_reaches_the_watcher_during_a_long_call_and_a_server() -> None:
    printed = on_windows("""
        import ctypes
        from qsf.system.signals import HANGUP, STOPPING, Watcher, handle_stopping
        from qsf.system.signals import interruptible_wait
        signal.signal(signal.SIGINT, lambda *_: print("back", flush=True))
        with Watcher(lambda number: print("watched", number, flush=True)):
            threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
            ctypes.PyDLL(None)  # loads it before the sleep
            ctypes.CDLL(None).usleep(800_000)
        with interruptible_wait():
            print(HANGUP == signal.SIGBREAK, len(STOPPING))
        class Loop(asyncio.SelectorEventLoop):
            def add_signal_handler(self, *_):
                raise NotImplementedError
        async def wait():
            stopped = asyncio.Event()
            handle_stopping(asyncio.get_running_loop(), lambda n: (print(n), stopped.set()))
            asyncio.get_running_loop().call_later(0.1, signal.raise_signal, signal.SIGTERM)
            await stopped.wait()
        Loop().run_until_complete(wait())
    """)
    assert printed.splitlines() == [f"watched {2}", "back", "True 3", "15"]


def test_text_is_generated_and_a_chat_needs_no_readline(tmp_path: Path) -> None:
    printed = on_windows("""
        from qsf.cli.run.chat import line_editing, prefilled
        from qsf.system.keys import unseen_keys
        with line_editing(lambda *_: []), prefilled("a"), unseen_keys():
            pass
        from qsf.cli.run import main
        sys.exit(main.main(["qsf/selftest.qsf", "--prompt", "a word", "-n", "24"]))
    """)
    assert len(printed) > 8


def test_ends_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {-9: process.KILLED, -11: process.NESTED, -15: "", -37: ""}  # 37: one without a name
    assert {code: process.how_ended(code) for code in ends} == ends
    monkeypatch.setattr("sys.platform", "win32")
    ends = {0xC0000409: "memory", 0xC00000FD: "stack", 1816: "time", 1: "", 0: ""}
    assert {code: process.how_ended(code) for code in ends} == ends


def test_the_limits_of_a_job_are_where_windows_reads_them() -> None:
    limits = confine.job_limits(5 << 20, 10)
    assert len(limits) == 144  # of 64-bit Windows
    assert int.from_bytes(limits[:8], "little") == 100_000_000  # steps of 100 ns
    assert int.from_bytes(limits[16:20], "little") == 0x102
    assert int.from_bytes(limits[112:120], "little") == 5 << 20
