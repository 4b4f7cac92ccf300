"""The file of a saved session: messages, tokens and the KV cache (docs/sessions.md).

Pure Python; the content of the state is known to the engine alone.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
import stat
import struct
import sys
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from qsf.closable import Closing
from qsf.errors import QsfArgumentError, QsfError, QsfFormatError, QsfIOError, QsfUnsupportedError
from qsf.file.open_file import begins_with
from qsf.file.output import Output
from qsf.foreign_json import MEMORY_BYTES, JsonError, read_json
from qsf.system import files

MAGIC: Final = b"QSFS"
VERSION: Final = 1
BLOCK_BYTES: Final = 1 << 20
MAX_NOTE_BYTES: Final = 4 << 20
MAX_TOKENS: Final = 1 << 20
MAX_STATE_BYTES: Final = 1 << 42
_ALIGN: Final = 4096
_HEADER: Final = struct.Struct("<4sIIIIIQII8x32sQ36xI")
_NOTE_NAMES: Final = {"messages", "model", "kv_type", "owner"}
_MOST_F32: Final = 3.4028234663852886e38
_LATER_NAMES: Final = {"adapters"}  # only in the note of a session that has it


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionHead:
    """All of a session file but the state.

    Attributes:
        key: digest of all that decides the bits of the state.
        tokens: the tokens of the state.
        has_logits: the state has logits after the last of them.
        state_bytes: size of the state; 0: neither state nor tokens.
        messages: the conversation, mappings with role and content.
        model: the model's name, for people.
        kv_type: type of keys and values, for people.
        owner: the client of a server that may use it.
        adapters: the scales of the model's adapters, if they are not those that it was opened with.
    """

    key: bytes
    tokens: array[int]
    has_logits: bool
    state_bytes: int
    messages: Sequence[dict[str, Any]] = ()
    model: str = ""
    kv_type: str = ""
    owner: str = field(default="", repr=False)
    adapters: Sequence[float] = ()

    def note(self) -> bytes:
        """Return the head as JSON. Raises QsfArgumentError for messages that JSON lacks."""
        try:
            note = {name: getattr(self, name) for name in sorted(_NOTE_NAMES)}
            note["messages"] = list(self.messages)
            if self.adapters:
                note["adapters"] = list(self.adapters)
            data = json.dumps(note, ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise QsfArgumentError(f"messages cannot be kept: {error}") from error
        if len(self.tokens) > MAX_TOKENS:
            raise QsfArgumentError(
                f"the session has {len(self.tokens)} tokens; at most {MAX_TOKENS} can be kept"
            )
        if len(data) > MAX_NOTE_BYTES:
            raise QsfArgumentError(
                f"the messages have {len(data) / 1e6:.1f} MB; a session is kept with at most "
                f"{MAX_NOTE_BYTES / 1e6:.1f}"
            )
        return data


def is_session_file(path: str | os.PathLike[str]) -> bool:
    return begins_with(path, MAGIC)


def _words(numbers: array[int]) -> bytes:
    if sys.byteorder == "big":
        numbers = array("I", numbers)
        numbers.byteswap()
    return numbers.tobytes()


def _numbers(data: bytes) -> array[int]:
    numbers = array("I")
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _state_offset(n_note: int, n_tokens: int, n_blocks: int) -> int:
    end = _HEADER.size + n_note + 4 * (n_tokens + n_blocks)
    return -(-end // _ALIGN) * _ALIGN


# ---- writing ----


class _SessionOutput(Output):
    """Writes a session file: first the blocks, then the head, at last the rename."""

    def write(
        self, head: SessionHead, read_block: Callable[[int, memoryview], int], *, is_synced: bool
    ) -> None:
        self._is_synced = is_synced
        note, tokens = head.note(), _words(head.tokens)
        n_blocks = -(-head.state_bytes // BLOCK_BYTES)
        at = _state_offset(len(note), len(head.tokens), n_blocks)
        self._create()
        is_named = False
        try:
            with self._system_calls():
                files.make_private(self._fd)
            checksums = array("I")
            buffer = memoryview(bytearray(min(BLOCK_BYTES, head.state_bytes)))
            for offset in range(0, head.state_bytes, BLOCK_BYTES):
                block = buffer[: min(BLOCK_BYTES, head.state_bytes - offset)]
                checksums.append(read_block(offset, block))
                self._put_at(at + offset, block)
            rest = note + tokens + _words(checksums)
            self._put_at(_HEADER.size, rest.ljust(at - _HEADER.size, b"\0"))
            self._put_at(0, _pack_header(head, len(note), rest, at + head.state_bytes))
            self._take_name()
            is_named = True
        finally:
            self.abort()
            if not is_named:
                self._unlink()


def _pack_header(head: SessionHead, n_note: int, rest: bytes, file_bytes: int) -> bytes:
    data = _HEADER.pack(
        MAGIC,
        VERSION,
        _HEADER.size,
        len(head.tokens),
        int(head.has_logits),
        n_note,
        head.state_bytes,
        BLOCK_BYTES,
        zlib.crc32(rest),
        head.key,
        file_bytes,
        0,
    )
    return data[:-4] + struct.pack("<I", zlib.crc32(data[:-4]))


def write_session(
    path: Path,
    head: SessionHead,
    read_block: Callable[[int, memoryview], int],
    *,
    is_synced: bool = True,
) -> None:
    """Write a session file atomically; replaces a file of that name.

    Args:
        path: the file.
        head: its head.
        read_block: fills a buffer with the state from an offset on; returns its CRC32.
        is_synced: wait for the disk. Else a power cut may leave a damaged file; its checksums show
            that.

    Raises:
        QsfIOError: the system refuses; an older file is unchanged.
    """
    _SessionOutput(path, None, head.state_bytes).write(head, read_block, is_synced=is_synced)


# ---- reading ----


class SessionFile(Closing):
    """An open session file; everything but the state has been checked.

    Attributes:
        path: the file.
        file_bytes: its size.
        head: the head of the file.
    """

    head: SessionHead

    def __init__(self, path: str | os.PathLike[str], *, memory_bytes: int = MEMORY_BYTES) -> None:
        """Open and check the file; parsing its head may take ``memory_bytes``.

        Raises:
            QsfIOError: the system refused to open or to read it.
            QsfFormatError: it is damaged or of another kind.
            QsfUnsupportedError: it needs another release.
        """
        self._memory_bytes = memory_bytes
        self.path = Path(path)
        self._fd = -1
        try:
            self._fd = os.open(self.path, files.READ_FLAGS)
            info = os.fstat(self._fd)
            if not stat.S_ISREG(info.st_mode):
                raise QsfIOError(f"{self.path}: not a regular file")
            self.file_bytes = info.st_size
            self._check()
        except BaseException as error:
            self.close()
            if isinstance(error, QsfFormatError):
                raise error.located(self.path) from error
            if isinstance(error, (OSError, ValueError)) and not isinstance(error, QsfError):
                # ValueError: a path with a zero byte.
                raise QsfIOError(f"{self.path}: {getattr(error, 'strerror', error)}") from error
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read_blocks(self, take: Callable[[int, memoryview, int], None]) -> None:
        """Call ``take(offset, block, crc32)`` for each block of the state, in order."""
        buffer = memoryview(bytearray(min(BLOCK_BYTES, self.head.state_bytes)))
        for i, crc32 in enumerate(self._checksums):
            offset = i * BLOCK_BYTES
            block = buffer[: min(BLOCK_BYTES, self.head.state_bytes - offset)]
            self._fill(self._at + offset, block)
            take(offset, block, crc32)

    def check_blocks(self) -> None:
        """Read all of the state. Raises QsfFormatError if a block is damaged."""

        def check(offset: int, block: memoryview, crc32: int) -> None:
            if zlib.crc32(block) != crc32:
                raise _damage(f"the block at {offset} of the state").located(self.path)

        self.read_blocks(check)

    def _fill(self, at: int, view: memoryview) -> None:
        try:
            while view:
                n = files.read_into(self._fd, view, at)
                if n == 0:
                    raise QsfFormatError("the file ends early", is_damage=True).located(self.path)
                view, at = view[n:], at + n
        except OSError as error:
            raise QsfIOError(f"{self.path}: {error.strerror}") from error

    def _read_at(self, at: int, n_bytes: int) -> bytes:
        data = bytearray(n_bytes)
        self._fill(at, memoryview(data))
        return bytes(data)

    def _check(self) -> None:
        if self.file_bytes < _HEADER.size:
            raise QsfFormatError(
                f"not a session file: {self.file_bytes} bytes, its header has {_HEADER.size}"
            )
        data = self._read_at(0, _HEADER.size)
        magic, version, n_header, n_tokens, has_logits, n_note, *rest = _HEADER.unpack(data)
        state_bytes, block_bytes, rest_crc32, key, file_bytes, crc32 = rest
        if magic != MAGIC:
            raise QsfFormatError(f"not a session file: it begins with {magic.hex(' ')}")
        if zlib.crc32(data[:-4]) != crc32:
            raise _damage("the header")
        if version != VERSION:
            raise QsfUnsupportedError(
                f"{self.path}: session file version {version}, this release reads {VERSION}"
            )
        for name, value, most in (
            ("size of the header", abs(n_header - _HEADER.size), 0),
            ("number of tokens", n_tokens, MAX_TOKENS),
            ("flag of logits", has_logits, min(n_tokens, 1)),
            ("size of the note", n_note, MAX_NOTE_BYTES),
            ("size of the state", state_bytes, MAX_STATE_BYTES if n_tokens else 0),
            ("size of blocks", abs(block_bytes - BLOCK_BYTES), 0),
            ("reserved field", any(data[40:48] + data[88:124]), 0),
        ):
            if value > most:
                raise QsfFormatError(f"header: the {name} is not allowed")
        n_blocks = -(-state_bytes // BLOCK_BYTES)
        self._at = _state_offset(n_note, n_tokens, n_blocks)
        if self.file_bytes != file_bytes or file_bytes != self._at + state_bytes:
            raise QsfFormatError(
                f"the file has {self.file_bytes} bytes, but its header makes it"
                f" {self._at + state_bytes}: truncated or extended",
                is_damage=True,
            )
        self._read_rest(key, n_note, n_tokens, n_blocks, rest_crc32)
        self.head = SessionHead(
            key=key,
            tokens=self._tokens,
            has_logits=bool(has_logits),
            state_bytes=state_bytes,
            **self._note,
        )

    def _read_rest(self, key: bytes, n_note: int, n_tokens: int, n_blocks: int, crc32: int) -> None:
        sizes = n_note, 4 * n_tokens, 4 * n_blocks
        needed_bytes = 2 * sum(sizes)  # as bytes of the file, and as numbers
        if needed_bytes > self._memory_bytes:
            raise QsfFormatError(
                f"its messages, tokens and checksums may take {needed_bytes / 2**20:.1f} MB of "
                f"memory, allowed: up to {self._memory_bytes / 2**20:.1f}"
            )
        pieces = []
        at = _HEADER.size
        sum_of_pieces = 0
        for n_bytes in sizes:
            pieces.append(self._read_at(at, n_bytes))
            sum_of_pieces = zlib.crc32(pieces[-1], sum_of_pieces)
            at += n_bytes
        if sum_of_pieces != crc32 or any(self._read_at(at, self._at - at)):
            raise _damage("what comes before the state")
        note, tokens, checksums = pieces
        self._note = _parse_note(note, self._memory_bytes - needed_bytes)
        self._tokens = _numbers(tokens)
        self._checksums = _numbers(checksums)


def _damage(part: str) -> QsfFormatError:
    return QsfFormatError(f"{part} is damaged: its checksum is wrong", is_damage=True)


def _parse_note(data: bytes, memory_bytes: int) -> dict[str, Any]:
    try:
        note = read_json(data, memory_bytes=memory_bytes)
    except JsonError as error:
        raise QsfFormatError(f"the note cannot be read: {error}") from error
    if not isinstance(note, dict) or set(note) - _LATER_NAMES != _NOTE_NAMES:
        raise QsfFormatError(f"the note must have {', '.join(sorted(_NOTE_NAMES))}")
    for name in _NOTE_NAMES - {"messages"}:
        if not isinstance(note[name], str):
            raise QsfFormatError(f"the note: {name} must be a text")
    messages = note["messages"]
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
        for message in messages
    ):
        raise QsfFormatError("the note: messages must be a list of objects with role and content")
    scales = note.get("adapters", [])
    if not isinstance(scales, list) or not all(
        type(scale) in (int, float) and abs(scale) <= _MOST_F32 for scale in scales
    ):
        raise QsfFormatError("the note: adapters must be a list of numbers that an f32 holds")
    return note
