"""Text to token ids and back, for the tokenizer that a .qsf file carries.

Encoding is done by the ``tokenizers`` library. Decoding is done here, token by token as
bytes, because text is streamed: a character may be spread over several tokens, and the
library can only decode a finished list.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import codecs
import json
import re
import threading
from typing import TYPE_CHECKING, Any

from qsf.errors import QsfArgumentError, QsfFormatError, QsfUnsupportedError
from qsf.foreign_json import read_json
from qsf.text.untrusted import check_tokenizer, library_errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MAX_TOKEN_BYTES = 4096  # known ones have up to a few hundred
_USUAL_GROWTH = 12  # of a normaliser: a space in front, and three bytes for each
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_of_char() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 characters stand for themselves, the other bytes, in order, for the
    characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


def max_text_bytes(max_tokens: int) -> int:
    """Return how long a text for a context of ``max_tokens`` may be, in UTF-8.

    Real texts have 3 to 8 bytes a token. Encoding takes up to 190 bytes for each byte of text, 128
    where there are 8 and more bytes a token: the reserve of the memory plan is for this.
    """
    return max(64 << 10, 16 * max_tokens)


class _PieceRules:
    """How one token's name becomes bytes, read from the decoder part of tokenizer.json."""

    def __init__(self, decoder: dict[str, Any]) -> None:
        self.byte_of_char: dict[str, int] | None = None
        self.has_byte_tokens = False
        self.replacements: list[tuple[str, str]] = []
        self.n_leading_spaces = 0  # how many a text loses at its start
        self._add(decoder)

    def _add(self, step: dict[str, Any]) -> None:
        kind = step.get("type")
        if kind == "Sequence":
            for part in step["decoders"]:
                self._add(part)
        elif kind == "ByteLevel":
            self.byte_of_char = byte_of_char()
        elif kind == "ByteFallback":
            self.has_byte_tokens = True
        elif kind == "Replace" and "String" in step["pattern"]:
            self.replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace":
            self.replacements.append((step["replacement"], " "))
            self.n_leading_spaces += int(step.get("prepend_scheme", "always") != "never")
        elif kind == "Strip" and step["content"] == " " and step["stop"] == 0:
            self.n_leading_spaces += step["start"]
        elif kind != "Fuse":
            raise QsfUnsupportedError(
                f"the tokenizer decodes with {json.dumps(step)}, which is not supported "
                "(byte-level BPE and SentencePiece vocabularies are)"
            )

    def bytes_of(self, name: str) -> bytes:
        """Return the bytes of the token called ``name`` in the vocabulary."""
        if self.byte_of_char is not None:
            table = self.byte_of_char
            if all(char in table for char in name):
                return bytes(table[char] for char in name)
            return name.encode()
        if self.has_byte_tokens:
            match = _BYTE_TOKEN.fullmatch(name)
            if match is not None:
                return bytes([int(match[1], 16)])
        for old, new in self.replacements:
            name = name.replace(old, new)
        return name.encode()


def _library() -> Any:
    """Return the class that encodes. Raises QsfUnsupportedError if it is not installed."""
    try:
        from tokenizers import Tokenizer as Backend
    except ImportError as error:
        raise QsfUnsupportedError(
            "this tokenizer is of a kind that the engine does not have, so it needs the Python "
            "package tokenizers: pip install 'qsf[tokenizers]'"
        ) from error
    return Backend


class Tokenizer:
    """The tokenizer of one model, by the library ``tokenizers`` (the extra of that name).

    Args:
        tokenizer_json: the bytes of a ``tokenizer.json``.
        bos_id: the token that begins a text, if the model has one.
        add_bos: whether ``encode`` puts it there; None: as tokenizer.json says.

    Raises:
        QsfFormatError: the bytes are not a tokenizer.
        QsfUnsupportedError: they are, but of a kind that cannot be decoded here, or the library is
            not installed.

    Example::

        tokenizer = Tokenizer(Path("tokenizer.json").read_bytes(), bos_id=1)
        assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"
    """

    def __init__(
        self, tokenizer_json: bytes, *, bos_id: int | None = None, add_bos: bool | None = None
    ) -> None:
        """Load the tokenizer; see the class."""
        self._growth = check_tokenizer(tokenizer_json)
        library = _library()
        with library_errors("be read"):
            backend = library.from_buffer(tokenizer_json)
            backend.no_padding()
            backend.no_truncation()
        decoder = backend.decoder
        if decoder is None:
            raise QsfUnsupportedError("the tokenizer says nothing about how to decode")
        self._rules = _PieceRules(read_json(decoder.__getstate__()))
        self._backend = backend
        self._lock = threading.Lock()
        self._special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self._prefix = self._find_prefix(bos_id, add_bos)
        self.bos_id = bos_id

    def _find_prefix(self, bos_id: int | None, add_bos: bool | None) -> list[int]:
        """Return the ids that begin every encoded text."""
        with library_errors("encode"):
            bare = list(self._backend.encode("a", add_special_tokens=False).ids)
            full = list(self._backend.encode("a", add_special_tokens=True).ids)
        n_prefix = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
        prefix = full[:n_prefix]
        has_bos = bos_id is not None and prefix[:1] == [bos_id]
        if add_bos and bos_id is not None and not has_bos:
            return [bos_id, *prefix]
        if add_bos is False and has_bos:
            return prefix[1:]
        return prefix

    @property
    def description(self) -> str:
        """What it is, for people."""
        return f"{self.n_vocab:,} tokens in the library tokenizers"

    @property
    def n_bytes(self) -> int | None:
        """How much memory its tables take; None: only the library knows."""
        return None

    @property
    def special_names(self) -> tuple[str, ...]:
        """The texts of the special tokens, longest first."""
        names = (self._backend.id_to_token(token_id) for token_id in self._special_ids)
        return tuple(sorted((name for name in names if name), key=lambda name: (-len(name), name)))

    @property
    def special_ids(self) -> frozenset[int]:
        """The special tokens."""
        return self._special_ids

    @property
    def n_vocab(self) -> int:
        """How many tokens there are, added ones included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def token_id(self, name: str) -> int | None:
        """Return the id of the token called ``name`` in the vocabulary, if there is one."""
        token_id = self._backend.token_to_id(name)
        return None if token_id is None else int(token_id)

    def encode(
        self,
        text: str,
        *,
        add_prefix: bool = True,
        parse_special: bool = True,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Return the token ids of ``text``, ready to be continued (no end token).

        Args:
            text: what to encode.
            add_prefix: begin with the tokens that begin a text (BOS), unless the text itself
                begins with them.
            parse_special: text that reads like a special token, such as ``</s>``, becomes
                that token. With False it is ordinary text: for text of unknown origin.
            max_tokens: refuse a text of clearly more tokens, which its beginning shows. None:
                any text that the caller has memory for, outside of the RAM budget: the library
                takes up to 190 bytes for each of the text's, the engine at most 64 MiB and some
                40 for each token.

        Raises:
            QsfArgumentError: the text has lone surrogates, so it is not Unicode, or is too
                long.
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
        n_chars = len(text) if max_tokens is None else 8 * max_tokens
        while max_tokens is not None and n_chars < len(text):
            # The cut may change the tokens beside it, but never so many.
            n_tokens = len(self._bare_ids(text[:n_chars], parse_special=parse_special))
            if n_tokens > max_tokens + 64:
                raise QsfArgumentError(
                    f"the text is too long: the first {n_chars} of its {len(text)} characters "
                    f"have {n_tokens} tokens already, and {max_tokens} is the limit",
                    argument="prompt",
                )
            n_chars *= 2
        ids = self._bare_ids(text, parse_special=parse_special)
        if not add_prefix or (self._prefix and ids[: len(self._prefix)] == self._prefix):
            return ids
        return [*self._prefix, *ids]

    def _bare_ids(self, text: str, *, parse_special: bool) -> list[int]:
        with self._lock, library_errors("encode this text"):
            if self._growth > _USUAL_GROWTH:
                self._check_growth(text)
            self._backend.encode_special_tokens = not parse_special
            # Without offsets it takes a third less, and it lets other threads run meanwhile.
            return list(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def _check_growth(self, text: str) -> None:
        """Is the text, when normalised, of a usual length? Pieces are small enough to find out."""
        most = 4096 + _USUAL_GROWTH * len(text.encode())
        n_bytes = 0
        normalizer = self._backend.normalizer
        for at in range(0, len(text), 64):
            n_bytes += len(normalizer.normalize_str(text[at : at + 64]).encode())
            if n_bytes > most:
                raise QsfFormatError(
                    f"the tokenizer makes more than {most} bytes of the text's first {at + 64} "
                    "characters"
                )

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """Return the bytes of one token: b"" for a special or an unknown one."""
        if skip_special and token_id in self._special_ids:
            return b""
        name = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if name is None:
            return b""
        data = self._rules.bytes_of(name)
        if len(data) > _MAX_TOKEN_BYTES:
            raise QsfFormatError(
                f"token {token_id} has {len(data)} bytes, and {_MAX_TOKEN_BYTES} is the limit"
            )
        return data

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of a whole sequence. Bytes that are not UTF-8 become U+FFFD."""
        decoder = self.incremental(at_start=True, skip_special=skip_special)
        return "".join([*(decoder.push(token_id) for token_id in ids), decoder.flush()])

    def incremental(
        self, *, at_start: bool = False, skip_special: bool = True
    ) -> IncrementalDecoder:
        """Return a decoder for tokens that arrive one at a time.

        ``at_start``: the first token begins a text, so that a SentencePiece vocabulary's
        leading space is dropped; False where the tokens continue one.
        """
        n_leading_spaces = self._rules.n_leading_spaces if at_start else 0
        return IncrementalDecoder(self, n_leading_spaces, skip_special=skip_special)


class IncrementalDecoder:
    """Decodes one token after another; never half a character.

    The pieces of ``push`` and the last ``flush`` together are the decoded text. U+FFFD is
    emitted only for bytes of which no continuation could make a character.
    """

    def __init__(self, tokenizer: Tokenizer, n_leading_spaces: int, *, skip_special: bool) -> None:
        """Made by ``Tokenizer.incremental``."""
        self._tokenizer = tokenizer
        self._n_leading_spaces = n_leading_spaces
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Return the text that is complete with this token: often "", never half a character."""
        data = self._tokenizer.token_bytes(token_id, skip_special=self._skip_special)
        return self._without_leading_spaces(self._utf8.decode(data))

    def flush(self) -> str:
        """Return what is left: U+FFFD for an unfinished character, else ""."""
        return self._without_leading_spaces(self._utf8.decode(b"", final=True))

    def take_reasoning(self) -> str:
        """Return what was said since the last call that is not part of the answer."""
        return ""

    def _without_leading_spaces(self, text: str) -> str:
        while text and self._n_leading_spaces:
            if text[0] != " ":
                self._n_leading_spaces = 0
                break
            text = text[1:]
            self._n_leading_spaces -= 1
        return text


def protect_special(text: str, names: Sequence[str], seam: str) -> str:
    """Return ``text`` with ``seam`` inside every name of a special token.

    Encoding what lies between the seams piece by piece then gives ordinary tokens.
    """
    text = text.replace(seam, "")
    for name in names:
        if len(name) > 1 and seam not in name:  # a name with a seam would multiply seams
            text = text.replace(name, name[0] + seam + name[1:])
    return text
