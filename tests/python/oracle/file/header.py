"""The header, read by Python: the rules of docs/format.md, section 1."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from qsf.errors import QsfFormatError, QsfUnsupportedError
from qsf.file.layout import MODEL, TOKEN_NONE, TOKENS, Architecture, Header, check_header


def parse_model(data: bytes) -> Header:
    """Return the checked header of 128 bytes whose checksums are right.

    Raises:
        QsfFormatError: a field is outside its limits.
        QsfUnsupportedError: an architecture this release does not know.
    """
    f = MODEL.unpack_from(data)[3:]
    ids = [None if i == TOKEN_NONE else i for i in TOKENS.unpack_from(data, 80)]
    if f[0] > max(Architecture):
        raise QsfUnsupportedError(
            f"architecture {f[0]}, this release reads 0 .. {max(Architecture)}"
        )
    header = Header(f[0], f[1], f[2], f[3], f[4] or f[3], *f[5:], *ids)
    check_header(header, QsfFormatError)
    return header
