"""The tokenizer that the engine has: no library, a few megabytes, no lock of Python's."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import TYPE_CHECKING

from qsf.native.text import Text
from qsf.text.tokenizer import IncrementalDecoder, Tokenizer, byte_of_char

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from qsf.native.text import TextDecoder


class EngineTokenizer(Tokenizer):
    """The tokenizer in the section TEXT, which the converter wrote.

    Args:
        source: the path of a .qsf file, or the bytes of the section.
        bos_id: the token that begins a text, if the model has one.

    Raises:
        QsfUnsupportedError: the file has no such section, or one of a newer version.
        QsfFormatError: the section breaks a rule of docs/format.md.
    """

    def __init__(
        self, source: str | os.PathLike[str] | bytes, *, bos_id: int | None = None
    ) -> None:
        """Open the vocabulary; see the class."""
        self._text = Text(source)
        self._special_ids = frozenset(self._text.special_ids())
        self._prefix = self._text.encode(b"", parse_special=False, add_prefix=True)
        self.bos_id = bos_id

    @property
    def description(self) -> str:
        """What it is, for people."""
        facts = self._text.facts
        return f"{facts.model} of {facts.n_tokens:,} tokens in the engine"

    @property
    def n_bytes(self) -> int:
        """How much memory its tables take."""
        return self._text.facts.n_bytes

    @property
    def special_names(self) -> tuple[str, ...]:
        """The texts of the special tokens, longest first."""
        names = (
            self._text.token_name(token_id).decode("utf-8", "replace")
            for token_id in self._special_ids
        )
        return tuple(sorted((name for name in names if name), key=lambda name: (-len(name), name)))

    @property
    def n_vocab(self) -> int:
        """How many tokens there are, added ones included."""
        return self._text.facts.n_tokens

    def token_id(self, name: str) -> int | None:
        """Return the id of the token called ``name`` in the vocabulary, if there is one."""
        if self._text.facts.model != "byte-level BPE":
            return self._text.find(name.encode(), is_added=False)
        table = byte_of_char()
        if all(char in table for char in name):
            return self._text.find(bytes(table[char] for char in name), is_added=False)
        return self._text.find(name.encode(), is_added=True)

    def _bare_ids(self, text: str, *, parse_special: bool) -> list[int]:
        return self._text.encode(text.encode(), parse_special=parse_special, add_prefix=False)

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """Return the bytes of one token: b"" for a special or an unknown one."""
        if skip_special and token_id in self._special_ids:
            return b""
        return self._text.token_bytes(token_id)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of a whole sequence. Bytes that are not UTF-8 become U+FFFD."""
        return self._text.decode(ids, skip_special=skip_special)

    def incremental(
        self, *, at_start: bool = False, skip_special: bool = True
    ) -> IncrementalDecoder:
        """Return a decoder for tokens that arrive one at a time; see ``Tokenizer``."""
        return _EngineDecoder(self._text.decoder(at_start=at_start, skip_special=skip_special))


class _EngineDecoder(IncrementalDecoder):
    """Decodes one token after another, in the engine."""

    def __init__(self, decoder: TextDecoder) -> None:
        self._decoder = decoder

    def push(self, token_id: int) -> str:
        """Return the text that is complete with this token: often "", never half a character."""
        return self._decoder.push(token_id)

    def flush(self) -> str:
        """Return what is left: U+FFFD for an unfinished character, else ""."""
        return self._decoder.flush()
