# SPDX-License-Identifier: Apache-2.0
"""Converts models to files that say 16-bit activations, whatever 8 bits cost them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qsf.file.writer import Writer
from qsf_converter import convert


def convert_fine(source: Path, out: Path, **options: Any) -> Path:
    """Convert with the options of `convert`; the converter measures this only for GGUF's types."""
    finish = Writer.finish

    def finish_fine(writer: Writer) -> None:
        writer.change_arch(act_bits=16)
        finish(writer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Writer, "finish", finish_fine)
        convert(source, out, **options)
    return out
