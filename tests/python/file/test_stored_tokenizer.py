"""The section TOKN: compressed, and raw in older files."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from make.stored import unpack_tokenizer
from qsf.file.blocks import pack_tokenizer

JSON = b'{"model": {"vocab": {' + b", ".join(b'"t%d": %d' % (i, i) for i in range(2000)) + b"}}}"


def test_it_is_smaller_and_comes_back() -> None:
    section = pack_tokenizer(JSON)
    assert section[:4] == b"LZ4\n"
    assert len(section) < 0.6 * len(JSON)
    assert unpack_tokenizer(section) == JSON


def test_what_does_not_shrink_is_stored_as_it_is() -> None:
    assert pack_tokenizer(b"{}") == b"{}"
    assert unpack_tokenizer(JSON) == JSON  # older files have it raw
