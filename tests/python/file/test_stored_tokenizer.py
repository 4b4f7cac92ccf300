"""The section TOKN: compressed, raw in older files, and broken in every way."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle.file.stored_tokenizer import unpack_tokenizer
from qsf.errors import QsfFormatError
from qsf.file.stored_tokenizer import pack_tokenizer

JSON = b'{"model": {"vocab": {' + b", ".join(b'"t%d": %d' % (i, i) for i in range(2000)) + b"}}}"


def test_it_is_smaller_and_comes_back() -> None:
    section = pack_tokenizer(JSON)
    assert section[:4] == b"LZ4\n"
    assert len(section) < 0.6 * len(JSON)
    assert unpack_tokenizer(section) == JSON


def test_what_does_not_shrink_is_stored_as_it_is() -> None:
    assert pack_tokenizer(b"{}") == b"{}"
    assert unpack_tokenizer(JSON) == JSON  # older files have it raw


@pytest.mark.parametrize("n_bytes", [0, 1, len(JSON) - 1, len(JSON) + 1, 65 << 20, 2**32 - 1])
def test_a_wrong_size_is_refused(n_bytes: int) -> None:
    packed = pack_tokenizer(JSON)[8:]
    with pytest.raises(QsfFormatError, match=r"TOKN announces|LZ4HC block"):
        unpack_tokenizer(b"LZ4\n" + struct.pack("<I", n_bytes) + packed)


@given(st.integers(4, len(pack_tokenizer(JSON)) - 1))
def test_a_cut_section_is_refused(n_bytes: int) -> None:
    with pytest.raises(QsfFormatError):
        unpack_tokenizer(pack_tokenizer(JSON)[:n_bytes])
