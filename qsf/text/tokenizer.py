"""Text to token ids and back: the engine's tokenizer, for the vocabulary of a .qsf file."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import TYPE_CHECKING

from qsf.errors import QsfArgumentError
from qsf.native.text import Text

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from qsf.native.text import TextDecoder


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


class Tokenizer:
    """The tokenizer of one model: the section TEXT, which the converter wrote.

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
        self._text = Text(source)
        self._special_ids = frozenset(self._text.special_ids())
        self._prefix = self._text.encode(b"", parse_special=False, add_prefix=True)
        self.bos_id = bos_id

    @property
    def description(self) -> str:
        facts = self._text.facts
        return f"{facts.model} of {facts.n_tokens:,} tokens in the engine"

    @property
    def n_bytes(self) -> int:
        return self._text.facts.n_bytes

    @property
    def special_names(self) -> tuple[str, ...]:
        names = (
            self._text.token_name(token_id).decode("utf-8", "replace")
            for token_id in self._special_ids
        )
        return tuple(sorted((name for name in names if name), key=lambda name: (-len(name), name)))

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    @property
    def n_vocab(self) -> int:
        """The number of tokens, added ones included."""
        return self._text.facts.n_tokens

    def token_id(self, name: str) -> int | None:
        """Return the id of the token called ``name`` in the vocabulary, or None."""
        if self._text.facts.model != "byte-level BPE":
            return self._text.find(name.encode(), is_added=False)
        table = byte_of_char()
        if all(char in table for char in name):
            return self._text.find(bytes(table[char] for char in name), is_added=False)
        return self._text.find(name.encode(), is_added=True)

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
        n_chars = len(text) if max_tokens is None else 8 * max_tokens
        while max_tokens is not None and n_chars < len(text):
            # The cut may change the tokens near it, but never this many.
            n_tokens = len(self._bare_ids(text[:n_chars], parse_special=parse_special))
            if n_tokens > max_tokens + 64:
                whole = n_tokens * len(text) // n_chars
                raise QsfArgumentError(
                    f"the text is too long: it has about {whole} tokens, and the context holds "
                    f"{max_tokens} (max_seq_len={whole} holds more, if model and budget do)",
                    argument="prompt",
                )
            n_chars *= 2
        ids = self._bare_ids(text, parse_special=parse_special)
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

    def _bare_ids(self, text: str, *, parse_special: bool) -> list[int]:
        return self._text.encode(text.encode(), parse_special=parse_special, add_prefix=False)

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """Return the bytes of one token: b"" for a special or unknown token."""
        if skip_special and token_id in self._special_ids:
            return b""
        return self._text.token_bytes(token_id)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of a whole sequence. Bytes that are not UTF-8 become U+FFFD."""
        return self._text.decode(ids, skip_special=skip_special)

    def incremental(
        self, *, at_start: bool = False, skip_special: bool = True
    ) -> IncrementalDecoder:
        """Return a decoder for tokens that arrive one at a time.

        ``at_start``: the first token begins a text, so a SentencePiece vocabulary's leading space
        is dropped; False if the tokens continue a text.
        """
        return IncrementalDecoder(self._text.decoder(at_start=at_start, skip_special=skip_special))


class IncrementalDecoder:
    """Decodes one token after another; never half a character.

    The pieces of ``push`` and the last ``flush`` together are the decoded text. U+FFFD is
    emitted only for bytes of which no continuation could make a character.
    """

    _reasoning = ""  # since the last call

    def __init__(self, decoder: TextDecoder | None) -> None:
        """Made by ``Tokenizer.incremental``; with None for what generates no text."""
        self._native = decoder

    def push(self, token_id: int) -> str:
        """Return the text that is complete with this token: often "", never half a character."""
        return "" if self._native is None else self._native.push(token_id)

    def flush(self) -> str:
        """Return the rest: U+FFFD for an unfinished character, else ""."""
        return "" if self._native is None else self._native.flush()

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


def protect_special(text: str, names: Sequence[str], seam: str) -> str:
    """Return ``text`` with ``seam`` inside every name of a special token.

    If the parts between the seams are encoded one by one, all tokens are ordinary ones.
    """
    text = text.replace(seam, "")
    for name in names:
        if len(name) > 1 and seam not in name:  # a name that contains the seam would multiply seams
            text = text.replace(name, name[0] + seam + name[1:])
    return text
