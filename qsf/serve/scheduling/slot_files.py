"""``--session-dir``: evicted slots go to session files, which later prompts reuse as prefixes.

The name of a file begins with the state key, so that files of another model are never touched. A
file records its owner, so that no client reuses the prompts of another. A file that is damaged is
removed, and its tokens are evaluated again.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import os
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qsf.errors import QsfArgumentError, QsfError, QsfFormatError, QsfIOError, QsfMemoryError
from qsf.file.partial import remove_abandoned
from qsf.file.session_file import SessionFile
from qsf.system import files
from qsf.text.arguments import count_common

if TYPE_CHECKING:
    from qsf.serve.scheduling.engine import ModelEngine
    from qsf.serve.scheduling.job import Slot

# The tokens of all files are kept in memory, 1 MB, and compared with each prompt.
_MOST_TOKENS = 1 << 18
_OFF_SECONDS = 60.0  # writing stops for so long after the disk has refused
_KEPT_SHARE = 0.9  # weight of the older measurements in each update
_SLOPE = 1 / 2048  # assumed slope before measurements: a token at 2048 takes twice as long as at 0
_LEAST_SECONDS = 1e-3  # least time without use in the value
_SUFFIX = ".qsfs"
# Most memory for reading a head: the tokens of the longest context, without a conversation.
_HEAD_BYTES = 4 << 20


@dataclass(slots=True, eq=False)
class Kept:
    """A file and its content; ``used`` is a time of SlotFiles' clock."""

    path: Path
    tokens: array[int]
    salt: str
    n_bytes: int
    used: float


class SlotFiles:
    """The session folder of one server, locked while the process lives."""

    def __init__(
        self,
        folder: Path,
        engine: ModelEngine,
        limit_bytes: int,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make the folder if it is missing, and read the heads of this model's files.

        Raises QsfArgumentError if another server uses it, QsfIOError.
        """
        self.costs = Costs()
        self.all: list[Kept] = []
        self.n_failures = 0
        self.write_seconds = self.read_seconds = 0.0
        self._folder, self._engine, self._limit_bytes = folder, engine, limit_bytes
        self._say, self._clock = say, clock
        self._off_until = float("-inf")
        self._n_written = 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = files.open_lock(folder / "lock", 0o600)
        except OSError as error:
            raise QsfIOError(f"--session-dir {folder}: {error.strerror}") from error
        try:
            files.try_lock(self._lock)
        except BlockingIOError as error:
            self.close()
            raise QsfArgumentError(
                f"--session-dir {folder} is in use by another server: name another folder"
            ) from error
        except OSError:  # no locks on this file system
            pass
        self._key = engine.state_key()
        self._prefix = f"{self._key.hex()[:16]}-"
        try:
            self._scan()
        except OSError as error:
            self.close()
            raise QsfIOError(f"--session-dir {folder}: {error.strerror}") from error

    def close(self) -> None:
        os.close(self._lock)

    @property
    def n_bytes(self) -> int:
        return sum(kept.n_bytes for kept in self.all)

    @property
    def n_tokens(self) -> int:
        return sum(len(kept.tokens) for kept in self.all)

    def _scan(self) -> None:
        for partial in list(self._folder.glob(f".{self._prefix}*.partial")):
            remove_abandoned(self._folder / (partial.name[1:].partition(_SUFFIX)[0] + _SUFFIX))
        for path in sorted(self._folder.glob(f"{self._prefix}*{_SUFFIX}")):
            number = path.name[len(self._prefix) : -len(_SUFFIX)]
            self._n_written = max(self._n_written, int(number) if number.isdecimal() else 0)
            try:
                with SessionFile(path, memory_bytes=_HEAD_BYTES) as file:
                    head, info = file.head, path.stat()
            except QsfError as error:
                self._say(f"not taken: {error}")
                if isinstance(error, QsfFormatError):
                    path.unlink(missing_ok=True)
                continue
            if head.key == self._key:
                used = self._clock() - max(time.time() - info.st_mtime, 0.0)
                self.all.append(Kept(path, head.tokens, head.owner, info.st_size, used))
        self._make_room(0, 0, ())

    def measure(self, slot: Slot) -> None:
        """Write and read the slot's session file to learn the speed of reading."""
        if self.save(slot):
            kept, _ = self.find(self._engine.tokens(slot.index), slot.salt, slot.n_held)
            if kept is not None and len(kept.tokens) == slot.n_held and self.load(kept, slot):
                self._remove(kept)

    def find(self, tokens: array[int], salt: str, n_most: int) -> tuple[Kept | None, int]:
        """Return the file that shares the longest prefix of at most ``n_most`` tokens, and its
        length.
        """
        best: Kept | None = None
        n_best = 0
        for kept in self.all:
            if kept.salt == salt:
                n_tokens = min(count_common(kept.tokens, tokens), n_most)
                if n_tokens > n_best:
                    best, n_best = kept, n_tokens
        return best, n_best

    def load(self, kept: Kept, slot: Slot) -> bool:
        started = time.perf_counter()
        slot.n_held = 0
        try:
            slot.n_held, slot.salt = self._engine.load(slot.index, kept.path)
        except QsfMemoryError:
            raise
        except QsfError as error:
            self._fail(f"not taken: {error}")
            self._remove(kept)
            return False
        seconds = time.perf_counter() - started
        self.costs.learn_reading(kept.n_bytes, seconds)
        self.read_seconds += seconds
        kept.used = self._clock()
        with contextlib.suppress(OSError):
            os.utime(kept.path)
        return True

    def save(self, slot: Slot) -> bool:
        tokens = self._engine.tokens(slot.index)
        kept, n_tokens = self.find(tokens, slot.salt, len(tokens))
        if kept is not None and n_tokens == len(tokens):
            kept.used = max(kept.used, slot.used)
            return True
        n_bytes = self._engine.state_bytes(slot.index) + 8 * len(tokens) + 8192
        is_off = self._clock() < self._off_until
        if n_bytes > self._limit_bytes or len(tokens) > _MOST_TOKENS or is_off:
            return False
        replaced = [
            kept
            for kept in self.all
            if kept.salt == slot.salt and kept.tokens == tokens[: len(kept.tokens)]
        ]
        self._make_room(n_bytes, len(tokens), replaced)
        self._n_written += 1
        path = self._folder / f"{self._prefix}{self._n_written}{_SUFFIX}"
        started = time.perf_counter()
        try:
            self._engine.save(slot.index, path, slot.salt)
            n_bytes = path.stat().st_size
        except (QsfError, OSError) as error:
            self._off_until = self._clock() + _OFF_SECONDS
            self._fail(f"not kept: {error}")
            return False
        self.write_seconds += time.perf_counter() - started
        self.all.append(Kept(path, tokens, slot.salt, n_bytes, slot.used))
        for kept in replaced:
            self._remove(kept)
        return True

    def _make_room(self, n_bytes: int, n_tokens: int, replaced: Sequence[Kept]) -> None:
        """Remove the files of least value until ``n_bytes`` fit; ``replaced`` is removed anyway."""
        now = self._clock()

        def worth(kept: Kept) -> float:
            gained = self.costs.evaluating(0, len(kept.tokens)) - self.costs.reading(kept.n_bytes)
            return value(max(gained, 0.0), len(kept.tokens), now - kept.used)

        rest = [kept for kept in self.all if kept not in replaced]
        rest.sort(key=lambda kept: (worth(kept), kept.used))
        n_bytes += sum(kept.n_bytes for kept in rest)
        n_tokens += sum(len(kept.tokens) for kept in rest)
        for kept in rest:
            if n_bytes <= self._limit_bytes and n_tokens <= _MOST_TOKENS:
                return
            n_bytes -= kept.n_bytes
            n_tokens -= len(kept.tokens)
            self._remove(kept)

    def _remove(self, kept: Kept) -> None:
        self.all.remove(kept)
        with contextlib.suppress(OSError):
            kept.path.unlink(missing_ok=True)

    def _fail(self, text: str) -> None:
        self.n_failures += 1
        self._say(text)


class Costs:
    """Durations in seconds, learned from passes and files.

    Evaluating a token at position p takes c0 + c1 * p seconds: attention reads all earlier
    positions.
    """

    def __init__(self) -> None:
        self._c0, self._c1 = 1e-3, 1e-3 * _SLOPE
        # Sums of a*a, a*b, b*b, a*s, b*s over passes with s = c0 * a + c1 * b
        self._sums = [0.0] * 5
        self._read_sums = [0.0, 0.0]  # sums of bytes and seconds

    def learn_evaluating(self, first: int, n_tokens: int, seconds: float) -> None:
        """Record the duration of a prompt pass that starts at position ``first``."""
        a, b = float(n_tokens), n_tokens * (first + n_tokens / 2)
        new = (a * a, a * b, b * b, a * seconds, b * seconds)
        self._sums = [_KEPT_SHARE * s + x for s, x in zip(self._sums, new, strict=True)]
        aa, ab, bb, at, bt = self._sums
        determinant = aa * bb - ab * ab
        if determinant > 1e-3 * aa * bb:
            c0 = (at * bb - bt * ab) / determinant
            c1 = (aa * bt - ab * at) / determinant
            if c0 > 0 and c1 >= 0:
                self._c0, self._c1 = c0, c1
                return
        self._c0 = max(at, 0.0) / (aa + _SLOPE * ab)
        self._c1 = self._c0 * _SLOPE

    def learn_reading(self, n_bytes: int, seconds: float) -> None:
        sums = zip(self._read_sums, (n_bytes, seconds), strict=True)
        self._read_sums = [_KEPT_SHARE * s + x for s, x in sums]

    def evaluating(self, first: int, end: int) -> float:
        """Return the seconds for the tokens from position ``first`` up to ``end``."""
        return self._c0 * (end - first) + self._c1 * (end * end - first * first) / 2

    def reading(self, n_bytes: int) -> float:
        """Return the seconds for reading a file; before the first one, at 500 MB/s."""
        read_bytes, seconds = self._read_sums
        return n_bytes * (seconds / read_bytes if read_bytes else 2e-9)


def value(cost_seconds: float, n_tokens: int, inactive_seconds: float) -> float:
    """Return the retention value of a sequence: its restoring cost divided by the time without use.

    The value is per token that eviction frees, or one long sequence would outweigh many short ones.
    """
    return cost_seconds / max(n_tokens, 1) / max(inactive_seconds, _LEAST_SECONDS)
