"""Texts that users give as files: UTF-8, or what Windows programs write."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import codecs
import io
from typing import IO

from qsf.errors import QsfArgumentError

_MARKS = {  # the longest first
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def _encoding_of(data: bytes) -> str:
    return next((each for mark, each in _MARKS.items() if data.startswith(mark)), "utf-8")


class Lines:
    """The lines of a file in UTF-8, whatever its byte order mark says that they are stored in."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._encoding = ""  # not looked at yet: who writes a pipe may wait for something first
        self._text: io.TextIOWrapper | None = None  # unless it is UTF-8

    def readline(self, most: int) -> bytes:
        """Return the next line, or its first ``most`` characters; b"" at the end.

        Raises QsfArgumentError for bytes that are not of the encoding.
        """
        if not self._encoding:
            first = self._file.peek(4) if isinstance(self._file, io.BufferedReader) else b""
            self._encoding = _encoding_of(first)
            if self._encoding != "utf-8":
                self._text = io.TextIOWrapper(self._file, self._encoding, newline="\n")
        if self._text is None:
            return self._file.readline(most)
        try:
            return self._text.readline(most).encode()
        except UnicodeDecodeError as error:
            text = f"a line is not {self._encoding.upper()}: save the text as UTF-8"
            raise QsfArgumentError(text) from error


def text_of(data: bytes, name: str) -> str:
    """Return the text of a file without its byte order mark, by which UTF-16 is known.

    Raises QsfArgumentError for other encodings: nothing becomes another text silently.
    """
    encoding = _encoding_of(data)
    try:
        return data.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise QsfArgumentError(
            f"{name} is not {encoding.upper()}: byte 0x{data[error.start]:02x} at position "
            f"{error.start} of {len(data)}: save the text as UTF-8"
        ) from None
