"""Texts that users give as files: UTF-8, or what Windows programs write."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import codecs

from qsf.errors import QsfArgumentError

_MARKS = {  # the longest first
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def text_of(data: bytes, name: str) -> str:
    """Return the text of a file without its byte order mark, by which UTF-16 is known.

    Raises QsfArgumentError for other encodings: nothing becomes another text silently.
    """
    encoding = next((each for mark, each in _MARKS.items() if data.startswith(mark)), "utf-8")
    try:
        return data.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise QsfArgumentError(
            f"{name} is not {encoding.upper()}: byte 0x{data[error.start]:02x} at position "
            f"{error.start} of {len(data)}: save the text as UTF-8"
        ) from None
