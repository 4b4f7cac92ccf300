"""A source's tokenizer in the form of its file."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import functools

from qsf.errors import QsfUnsupportedError
from qsf.text.tokenizer import Tokenizer
from qsf_converter.text.tables import text_section


@functools.lru_cache(maxsize=2)
def tables_of(
    tokenizer_json: bytes, bos_id: int | None, add_bos: bool | None
) -> tuple[bytes | None, str | None]:
    return text_section(tokenizer_json, bos_id=bos_id, add_bos=add_bos)


def open_tokenizer(
    tokenizer_json: bytes, *, bos_id: int | None, add_bos: bool | None = None
) -> Tokenizer:
    """Return the engine's tokenizer.

    Raises:
        QsfUnsupportedError: the bytes are no tokenizer, or its kind is not supported.
    """
    section, reason = tables_of(tokenizer_json, bos_id, add_bos)
    if section is None:
        raise QsfUnsupportedError(f"the engine does not have this kind of tokenizer: {reason}")
    return Tokenizer(section, bos_id=bos_id)
