"""Files of models and of sessions are there whole or not at all, whatever fails or kills."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import tracemalloc
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from make.failing_calls import ERRORS, FailingCalls
from make.qsf_files import tiny_header, write_tiny
from make.stored import Reader
from qsf.errors import QsfIOError
from qsf.file.layout import Arch, Compression
from qsf.file.partial import remove_abandoned
from qsf.file.session_file import BLOCK_BYTES, SessionFile, SessionHead, write_session
from qsf.file.writer import Writer


def head(state_bytes: int) -> SessionHead:
    tokens = array("I", [7] * 9)
    return SessionHead(
        key=b"k" * 32, tokens=tokens, has_logits=False, state_bytes=state_bytes, model="old"
    )


WRITERS: dict[str, Callable[[Path], object]] = {
    "model": lambda path: write_tiny(path, compression=Compression.LZ4, is_dull=True),
    "session": lambda path: write_session(path, head(3 << 20), lambda *_: 0),
}


def put_old(folder: Path) -> Path:
    """Return the path of a file that a failing writer must leave alone."""
    path = folder / "m.qsf"
    path.write_bytes(b"the old file")
    return path


def assert_untouched(path: Path) -> None:
    assert path.read_bytes() == b"the old file"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("model", name) for name in ("pwrite", "fsync", "ftruncate", "pread", "close")),
     *(("session", name) for name in ("pwrite", "fsync", "fchmod", "close"))],
)  # fmt: skip
@pytest.mark.parametrize("error", ERRORS)
def test_every_call_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str, error: BaseException
) -> None:
    """The N-th call fails, for every N until the file is complete."""
    write = WRITERS[kind]
    path = put_old(tmp_path)
    calls = FailingCalls(monkeypatch, name, error)
    numbers = calls.before_the_name(lambda: write(tmp_path / "count.qsf"))
    (tmp_path / "count.qsf").unlink()
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else QsfIOError
    for number in numbers:
        with pytest.raises(expected) as e:
            calls.during(lambda: write(path), fail_at=number)
        if expected is QsfIOError:
            assert str(path) in str(e.value)
            assert "No space left on device after" in str(e.value) or number == 1
        assert_untouched(path)


# Kills itself before the N-th of the calls that change something.
DYING = """
import os, signal, sys
from array import array
from pathlib import Path
from qsf.file.session_file import SessionHead, write_session
n_left = int(sys.argv[2])
def dying(name):
    real = getattr(os, name)
    def call(*args, **more):
        global n_left
        n_left -= 1
        if n_left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **more)
    setattr(os, name, call)
for name in ("open", "pwrite", "fchmod", "fsync", "close", "replace", "rename"):
    dying(name)
head = SessionHead(key=b"k" * 32, tokens=array("I", [7] * 9), has_logits=False,
                   state_bytes=3 << 20, messages=[], model="new")
import zlib
def block(offset, view):
    view[:] = bytes([offset >> 20]) * len(view)
    return zlib.crc32(view)
for _ in range(int(sys.argv[3])):
    write_session(Path(sys.argv[1]), head, block)
"""


def model_of(path: Path) -> str:
    with SessionFile(path) as file:
        file.check_blocks()
        return file.head.model


def test_a_writer_may_be_killed_at_any_call(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    n_killed = 0
    for n in range(100):
        write_session(path, head(0), lambda *_: 0)
        done = subprocess.run([sys.executable, "-c", DYING, str(path), str(n), "1"], check=False)
        is_new = model_of(path) == "new"
        if done.returncode == 0:
            assert is_new
            break
        assert done.returncode == -signal.SIGKILL
        n_killed += 1
    assert n_killed > 8
    write_session(path, head(0), lambda *_: 0)
    assert list(tmp_path.iterdir()) == [path]  # what the dead have left was removed


def test_two_processes_that_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    words = [sys.executable, "-c", DYING, str(path), "100000", "15"]
    writers = [subprocess.Popen(words) for _ in range(2)]
    n_read = 0
    while any(writer.poll() is None for writer in writers):
        n_read += path.exists() and model_of(path) == "new"
    assert [writer.returncode for writer in writers] == [0, 0]
    assert n_read > 0
    assert list(tmp_path.iterdir()) == [path]


def test_a_session_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        write_session(tmp_path / "large", head(40 << 20), lambda *_: 0)
        with SessionFile(tmp_path / "large") as file:
            file.read_blocks(lambda *_: None)
        assert tracemalloc.get_traced_memory()[1] < 3 * BLOCK_BYTES
    finally:
        tracemalloc.stop()


# ---- what lies beside it ----
def test_a_killed_writer_of_the_same_number_is_no_obstacle(tmp_path: Path) -> None:
    stale = tmp_path / f".m.qsf.{os.getpid()}.partial"
    stale.write_bytes(b"x" * 100_000)
    old = os.umask(0o027)
    try:
        write_tiny(tmp_path / "m.qsf")
    finally:
        os.umask(old)
    assert not stale.exists()
    with Reader(tmp_path / "m.qsf") as r:
        r.verify()
    assert (tmp_path / "m.qsf").stat().st_mode & 0o777 == 0o640


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "m.qsf"
    code = (
        "import os, pathlib, signal, sys; from qsf.file.partial import create_partial; "
        "create_partial(pathlib.Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)]) as first:
        os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)  # ended, and nobody knows
        subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert len(list(tmp_path.iterdir())) == 1  # the second has removed what the first left
    kept = [
        tmp_path / name for name in (".m.qsf.1x.partial", ".n.qsf.7.partial", "m.qsf.7.partial")
    ]
    for other in kept:
        other.write_bytes(b"not ours")
    link = tmp_path / ".m.qsf.8.partial"
    link.symlink_to(kept[0])
    writer = Writer(path, tiny_header(), Arch())
    own = tmp_path / f".m.qsf.{os.getpid()}.partial"
    remove_abandoned(path)  # as another process would: ours is locked
    assert sorted(tmp_path.iterdir()) == sorted([*kept, link, own])
    writer.abort()
    assert not own.exists()


def test_a_signal_right_after_the_system_created_the_temporary_leaves_nothing(
    tmp_path: Path,
) -> None:
    code = """
        import os, pathlib, sys
        from qsf.file.partial import create_partial

        def create(*args, system=os.open):
            system(*args)
            raise KeyboardInterrupt

        path = pathlib.Path(sys.argv[1])
        create_partial(path.with_name("other"))[1].rename(path)
        os.open = create
        create_partial(path)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "m.qsf")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.stderr.endswith("\nKeyboardInterrupt\n")
    assert [path.name for path in tmp_path.iterdir()] == ["m.qsf"]


def test_an_impossible_path_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "locked").mkdir(mode=0o500)
    os.mkfifo(tmp_path / "pipe")
    for path, text in [
        (tmp_path, "is a directory"),
        (tmp_path / "none" / "m.qsf", "no folder"),
        (tmp_path / "file" / "m.qsf", "file"),
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path / ("n" * 300), "n"),
        (tmp_path / "a\0b", "null"),
        *([(tmp_path / "locked" / "m.qsf", "Permission denied")] if os.geteuid() else []),
    ]:
        before = sorted(tmp_path.iterdir())
        with pytest.raises(QsfIOError, match=text):
            Writer(path, tiny_header(), Arch())
        assert sorted(tmp_path.iterdir()) == before
