"""The binding to the C engine's vocabularies: texts to ids and back. No policy."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from qsf.native._qsf import ffi, lib
from qsf.native.binding import check_status, record


@dataclass(frozen=True, slots=True)
class TextFacts:
    """What a vocabulary is; fields as ``qsf_text_facts`` in qsf.h."""

    model: str
    n_tokens: int
    n_ids: int
    n_bytes: int
    room_bytes: int


class Text:
    """A ``qsf_text``. Any number of threads may use it at the same time."""

    def __init__(self, source: str | os.PathLike[str] | bytes) -> None:
        """Open the vocabulary of the file at ``source``, or that of a section's bytes.

        Raises:
            QsfUnsupportedError: the file has no vocabulary, or one of a newer version.
            QsfFormatError: it breaks a rule of docs/format.md.
        """
        out = ffi.new("qsf_text **")
        if isinstance(source, bytes):
            check_status(lib.qsf_text_create(ffi.from_buffer(source), len(source), out))
        else:
            check_status(lib.qsf_text_open(os.fsencode(source), out))
        self._handle = ffi.gc(out[0], lib.qsf_text_close)
        facts = ffi.new("qsf_text_facts *")
        lib.qsf_text_info(self._handle, facts)
        self.facts = record(TextFacts, facts)

    def encode(self, text: bytes, *, parse_special: bool, add_prefix: bool) -> list[int]:
        """Return the ids of UTF-8, as ``qsf_tokenize``; other threads run meanwhile."""
        flags = (lib.QSF_TOKENIZE_SPECIAL if parse_special else 0) | (
            lib.QSF_TOKENIZE_PREFIX if add_prefix else 0
        )
        count = ffi.new("size_t *")
        n_room = len(text) // 2 + 64
        while True:
            ids = _uninitialised("uint32_t[]", n_room)
            status = lib.qsf_tokenize(
                self._handle, ffi.from_buffer(text), len(text), flags, ids, n_room, count
            )
            check_status(status)
            if count[0] <= n_room:
                return list(ffi.unpack(ids, count[0])) if count[0] else []
            n_room = count[0]

    def decode(self, ids: Iterable[int], *, skip_special: bool) -> str:
        """Return the text of all ids, as ``qsf_detokenize``; other threads run meanwhile."""
        valid_ids = array("I", (token_id for token_id in ids if 0 <= token_id < self.facts.n_ids))
        flags = lib.QSF_DETOKENIZE_START | (0 if skip_special else lib.QSF_DETOKENIZE_SPECIAL)
        count = ffi.new("size_t *")
        n_room = 16 * len(valid_ids) + 64
        while True:
            out = _uninitialised("char[]", n_room)
            pointer = ffi.from_buffer("uint32_t[]", valid_ids)
            status = lib.qsf_detokenize(
                self._handle, pointer, len(valid_ids), flags, out, n_room, count
            )
            check_status(status)
            if count[0] <= n_room:
                return str(ffi.buffer(out, count[0]), "utf-8")
            n_room = count[0]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text; b"" if it does not exist."""
        return self._bytes_of(lib.qsf_token_text, token_id)

    def token_name(self, token_id: int) -> bytes:
        """Return a token's name in the vocabulary; b"" if it does not exist."""
        return self._bytes_of(lib.qsf_token_name, token_id)

    def _bytes_of(self, function: object, token_id: int) -> bytes:
        if not 0 <= token_id < self.facts.n_ids:
            return b""
        out = ffi.new("char[]", self.facts.room_bytes)
        n_bytes = function(self._handle, token_id, out, self.facts.room_bytes)  # type: ignore[operator]
        return bytes(ffi.buffer(out, n_bytes))

    def find(self, name: bytes, *, is_added: bool) -> int | None:
        """Return the token with this name; if two share it, ``is_added`` selects one."""
        token_id = lib.qsf_token_find(self._handle, ffi.from_buffer(name), len(name), is_added)
        return None if token_id == lib.QSF_TOKEN_NONE else int(token_id)

    def special_ids(self) -> list[int]:
        n_ids = lib.qsf_text_special(self._handle, ffi.NULL, 0)
        ids = ffi.new("uint32_t[]", n_ids + 1)
        lib.qsf_text_special(self._handle, ids, n_ids)
        return list(ffi.unpack(ids, n_ids)) if n_ids else []

    def decoder(self, *, at_start: bool, skip_special: bool) -> TextDecoder:
        """Return a decoder for tokens that arrive one at a time."""
        return TextDecoder(self, at_start=at_start, skip_special=skip_special)


class TextDecoder:
    """A ``qsf_text_decoder``; for one thread at a time."""

    def __init__(self, text: Text, *, at_start: bool, skip_special: bool) -> None:
        """Made by ``Text.decoder``."""
        flags = (lib.QSF_DETOKENIZE_START if at_start else 0) | (
            0 if skip_special else lib.QSF_DETOKENIZE_SPECIAL
        )
        self._text = text
        self._n_room = max(3, text.facts.room_bytes)
        self._out = ffi.new("char[]", self._n_room)
        self._count = ffi.new("size_t *")
        self._state = ffi.new("qsf_text_decoder *")
        lib.qsf_decoder_init(text._handle, flags, self._state)

    def push(self, token_id: int) -> str:
        if not 0 <= token_id < self._text.facts.n_ids:
            return ""
        handle = self._text._handle
        status = lib.qsf_decoder_push(
            handle, self._state, token_id, self._out, self._n_room, self._count
        )
        check_status(status)
        return bytes(ffi.buffer(self._out, self._count[0])).decode()

    def flush(self) -> str:
        """Return the rest: U+FFFD for an unfinished character, else ""."""
        n_bytes = lib.qsf_decoder_flush(self._state, self._out)
        return bytes(ffi.buffer(self._out, n_bytes)).decode()


_uninitialised = ffi.new_allocator(should_clear_after_alloc=False)
