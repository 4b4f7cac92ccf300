"""Text to token ids and back: the engine's tokenizer, for the vocabulary of a .qsf file."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qsf.errors import QsfArgumentError
from qsf.native._qsf import ffi, lib
from qsf.native.binding import check_status, record

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_uninitialised = ffi.new_allocator(should_clear_after_alloc=False)


def byte_of_char() -> dict[str, int]:
    """Return the byte for each character of a byte-level vocabulary.

    Printable Latin-1 characters represent themselves; the characters from U+0100 on represent the
    other bytes, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


def max_text_bytes(max_tokens: int) -> int:
    """Return how many bytes of UTF-8 a text for a context of ``max_tokens`` may have.

    Real texts have 3 to 8 bytes a token.
    """
    return max(64 << 10, 16 * max_tokens)


@dataclass(frozen=True, slots=True)
class _Facts:
    """What a vocabulary is; fields as ``qsf_text_facts`` in qsf.h."""

    model: str
    n_tokens: int
    n_ids: int
    n_bytes: int
    room_bytes: int


class Tokenizer:
    """The tokenizer of one model: the section TEXT, which the converter wrote. For all threads.

    Args:
        source: the path of a .qsf file, or the bytes of the section.
        bos_id: the token that begins a text, if the model has one.

    Raises:
        QsfUnsupportedError: the file has no such section, or one of a newer version.
        QsfFormatError: the section breaks a rule of docs/format.md.

    Example::

        tokenizer = Tokenizer("model.qsf")
        assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"
    """

    def __init__(
        self, source: str | os.PathLike[str] | bytes, *, bos_id: int | None = None
    ) -> None:
        out = ffi.new("qsf_text **")
        if isinstance(source, bytes):
            check_status(lib.qsf_text_create(ffi.from_buffer(source), len(source), out))
        else:
            check_status(lib.qsf_text_open(os.fsencode(source), out))
        self._handle: Any = ffi.gc(out[0], lib.qsf_text_close)
        facts = ffi.new("qsf_text_facts *")
        lib.qsf_text_info(self._handle, facts)
        self._facts = record(_Facts, facts)
        ids = ffi.new("uint32_t[]", lib.qsf_text_special(self._handle, ffi.NULL, 0) + 1)
        n_ids = lib.qsf_text_special(self._handle, ids, len(ids))
        self._special_ids = frozenset(ids[0:n_ids])
        self._prefix = self._ids(b"", lib.QSF_TOKENIZE_PREFIX)
        self.bos_id = bos_id

    @property
    def description(self) -> str:
        return f"{self._facts.model} of {self._facts.n_tokens:,} tokens in the engine"

    @property
    def n_bytes(self) -> int:
        return self._facts.n_bytes

    @property
    def special_names(self) -> tuple[str, ...]:
        names = (
            self._bytes_of(lib.qsf_token_name, token_id).decode("utf-8", "replace")
            for token_id in self._special_ids
        )
        return tuple(sorted((name for name in names if name), key=lambda name: (-len(name), name)))

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    @property
    def n_vocab(self) -> int:
        """The number of tokens, added ones included."""
        return self._facts.n_tokens

    def token_id(self, name: str) -> int | None:
        """Return the id of the token called ``name`` in the vocabulary, or None."""
        if self._facts.model != "byte-level BPE":
            return self._find(name.encode(), is_added=False)
        table = byte_of_char()
        if all(char in table for char in name):
            return self._find(bytes(table[char] for char in name), is_added=False)
        return self._find(name.encode(), is_added=True)

    def _find(self, name: bytes, *, is_added: bool) -> int | None:
        """Return the token with this name; if two share it, ``is_added`` selects one."""
        token_id = lib.qsf_token_find(self._handle, ffi.from_buffer(name), len(name), is_added)
        return None if token_id == lib.QSF_TOKEN_NONE else int(token_id)

    def encode(
        self,
        text: str,
        *,
        add_prefix: bool = True,
        parse_special: bool = True,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Return the token ids of ``text``, without an end token.

        Args:
            text: what to encode.
            add_prefix: prepend the tokens that begin a text (BOS), unless the text already begins
                with them.
            parse_special: the name of a special token, such as ``</s>``, becomes that token.
                False: it is ordinary text; for text of unknown origin.
            max_tokens: refuse a text of clearly more tokens, judged by its beginning. None: no
                limit; memory is then taken outside of the RAM budget: at most 64 MiB and some 40
                bytes for each token.

        Raises:
            QsfArgumentError: the text has lone surrogates, which are not Unicode, or is too long.
        """
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise QsfArgumentError(
                f"the text is not valid Unicode: character {error.start} is {text[error.start]!r}"
            ) from error
        if max_tokens is not None and len(data) > max_text_bytes(max_tokens):
            raise QsfArgumentError(
                f"the text is too long: {len(data)} bytes, and a context of {max_tokens} tokens "
                f"has at most {max_text_bytes(max_tokens)}",
                argument="prompt",
            )
        flags = lib.QSF_TOKENIZE_SPECIAL if parse_special else 0
        n_chars = len(text) if max_tokens is None else 8 * max_tokens
        while max_tokens is not None and n_chars < len(text):
            # The cut may change the tokens near it, but never this many.
            n_tokens = len(self._ids(text[:n_chars].encode(), flags))
            if n_tokens > max_tokens + 64:
                whole = n_tokens * len(text) // n_chars
                raise QsfArgumentError(
                    f"the text is too long: it has about {whole} tokens, and the context holds "
                    f"{max_tokens} (max_seq_len={whole} holds more, if model and budget do)",
                    argument="prompt",
                )
            n_chars *= 2
        ids = self._ids(data, flags)
        if not add_prefix or (self._prefix and ids[: len(self._prefix)] == self._prefix):
            return ids
        return [*self._prefix, *ids]

    def encode_beginning(self, text: str, most: int, **options: bool) -> list[int]:
        """Return the tokens of a text, as ``encode``; of one that is too long at least the first
        ``most`` ones.
        """
        try:
            return self.encode(text, max_tokens=4 * most, **options)
        except QsfArgumentError as error:
            if error.argument != "prompt":
                raise
        return self.encode_beginning(text[: len(text) // 2], most, **options)

    def _ids(self, data: bytes, flags: int) -> list[int]:
        """Return the ids of UTF-8, as ``qsf_tokenize``; other threads run meanwhile."""
        count = ffi.new("size_t *")
        n_room = len(data) // 2 + 64
        while True:
            ids = _uninitialised("uint32_t[]", n_room)
            text = ffi.from_buffer(data)
            check_status(lib.qsf_tokenize(self._handle, text, len(data), flags, ids, n_room, count))
            if count[0] <= n_room:
                return list(ffi.unpack(ids, count[0])) if count[0] else []
            n_room = count[0]

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """Return the bytes of one token: b"" for a special or unknown token."""
        if skip_special and token_id in self._special_ids:
            return b""
        return self._bytes_of(lib.qsf_token_text, token_id)

    def _bytes_of(self, function: Any, token_id: int) -> bytes:
        """Return the bytes of a token, b"" if it does not exist."""
        if not 0 <= token_id < self._facts.n_ids:
            return b""
        out = ffi.new("char[]", self._facts.room_bytes)
        n_bytes = function(self._handle, token_id, out, self._facts.room_bytes)
        return bytes(ffi.buffer(out, n_bytes))

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of a whole sequence. Bytes that are not UTF-8 become U+FFFD."""
        valid_ids = array("I", (token_id for token_id in ids if 0 <= token_id < self._facts.n_ids))
        flags = lib.QSF_DETOKENIZE_START | (0 if skip_special else lib.QSF_DETOKENIZE_SPECIAL)
        count = ffi.new("size_t *")
        n_room = 16 * len(valid_ids) + 64
        while True:  # other threads run meanwhile
            out = _uninitialised("char[]", n_room)
            pointer = ffi.from_buffer("uint32_t[]", valid_ids)
            n_ids = len(valid_ids)
            check_status(
                lib.qsf_detokenize(self._handle, pointer, n_ids, flags, out, n_room, count)
            )
            if count[0] <= n_room:
                return str(ffi.buffer(out, count[0]), "utf-8")
            n_room = count[0]

    def incremental(
        self, *, at_start: bool = False, skip_special: bool = True
    ) -> IncrementalDecoder:
        """Return a decoder for tokens that arrive one at a time.

        ``at_start``: the first token begins a text, so a SentencePiece vocabulary's leading space
        is dropped; False if the tokens continue a text.
        """
        flags = (lib.QSF_DETOKENIZE_START if at_start else 0) | (
            0 if skip_special else lib.QSF_DETOKENIZE_SPECIAL
        )
        return _TextDecoder(self._handle, self._facts, flags)


class IncrementalDecoder:
    """Decodes one token after another; never half a character.

    The pieces of ``push`` and the last ``flush`` together are the decoded text. U+FFFD is
    emitted only for bytes of which no continuation could make a character. This one is for what
    generates no text; ``Tokenizer.incremental`` makes others.
    """

    _reasoning = ""  # since the last call

    def push(self, token_id: int) -> str:
        """Return the text that is complete with this token: often "", never half a character."""
        return ""

    def flush(self) -> str:
        """Return the rest: U+FFFD for an unfinished character, else ""."""
        return ""

    def take_reasoning(self) -> str:
        """Return the reasoning since the last call, which is not part of the answer."""
        text, self._reasoning = self._reasoning, ""
        return text

    @property
    def is_thinking(self) -> bool:
        """True if the next text is, as far as known, not part of the answer."""
        return False

    def end_of_thoughts(self) -> list[int]:
        """Return the tokens that end the thoughts, while it ``is_thinking``."""
        return []


class _TextDecoder(IncrementalDecoder):
    """A ``qsf_text_decoder``; for one thread at a time."""

    def __init__(self, text: Any, facts: _Facts, flags: int) -> None:
        self._text, self._n_ids = text, facts.n_ids
        self._n_room = max(3, facts.room_bytes)
        self._out = ffi.new("char[]", self._n_room)
        self._count = ffi.new("size_t *")
        self._state = ffi.new("qsf_text_decoder *")
        lib.qsf_decoder_init(text, flags, self._state)

    def push(self, token_id: int) -> str:
        if not 0 <= token_id < self._n_ids:
            return ""
        check_status(
            lib.qsf_decoder_push(
                self._text, self._state, token_id, self._out, self._n_room, self._count
            )
        )
        return bytes(ffi.buffer(self._out, self._count[0])).decode()

    def flush(self) -> str:
        n_bytes = lib.qsf_decoder_flush(self._state, self._out)
        return bytes(ffi.buffer(self._out, n_bytes)).decode()


def protect_special(text: str, names: Sequence[str], seam: str) -> str:
    """Return ``text`` with ``seam`` inside every name of a special token.

    If the parts between the seams are encoded one by one, all tokens are ordinary ones.
    """
    text = text.replace(seam, "")
    for name in names:
        if len(name) > 1 and seam not in name:  # a name that contains the seam would multiply seams
            text = text.replace(name, name[0] + seam + name[1:])
    return text
