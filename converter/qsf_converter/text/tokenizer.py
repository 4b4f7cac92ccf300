"""The tokenizer of a source, as its file will have it."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import functools

from qsf.text.engine_tokenizer import EngineTokenizer
from qsf.text.tokenizer import Tokenizer
from qsf.text.untrusted import check_tokenizer
from qsf_converter.text.tables import text_section


@functools.lru_cache(maxsize=2)
def tables_of(
    tokenizer_json: bytes, bos_id: int | None, add_bos: bool | None
) -> tuple[bytes | None, str | None]:
    """Return the section TEXT, or None and why there is none; see ``text_section``."""
    return text_section(tokenizer_json, bos_id=bos_id, add_bos=add_bos)


def open_tokenizer(
    tokenizer_json: bytes, *, bos_id: int | None, add_bos: bool | None = None
) -> Tokenizer:
    """Return the engine's tokenizer, or the library's where the engine does not have its kind.

    Raises:
        QsfFormatError: the bytes are not a tokenizer.
        QsfUnsupportedError: they are, but neither of the two can decode it.
    """
    check_tokenizer(tokenizer_json)  # its limits, before anything of it becomes Python objects
    section, _ = tables_of(tokenizer_json, bos_id, add_bos)
    if section is not None:
        return EngineTokenizer(section, bos_id=bos_id)
    return Tokenizer(tokenizer_json, bos_id=bos_id, add_bos=add_bos)
