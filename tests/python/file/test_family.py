"""The family that a file is of, by what its converter wrote, whoever wrote it."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from pathlib import Path

import pytest

from make.qsf_files import tiny_header, write_tiny
from qsf.file.family import family_of, type_of
from qsf.file.layout import Architecture, dtype_name
from qsf.file.reader import Reader


@pytest.mark.parametrize(
    ("meta", "family"),
    [
        (b'{"source": {"name": "m", "architecture": "Qwen2ForCausalLM"}}', "qwen2"),
        (b'{"source": {"name": "m", "architecture": "Gemma3ForConditionalGeneration"}}', "gemma3"),
        (b'{"source": {"name": "m", "architecture": "GPT2LMHeadModel"}}', "gpt2"),
        (b'{"source": {"architecture": "ForCausalLM"}}', "other"),
        (b'{"source": {"architecture": "a\\u001b[2J"}}', "other"),
        (b'{"quality": {}, "source": {"architecture": "Qwen2ForCausalLM"}}', "other"),
        (b"[" * 100_000, "other"),
        (b"", "other"),
    ],
)
def test_the_family_is_the_converters(tmp_path: Path, meta: bytes, family: str) -> None:
    path = tmp_path / "m.qsf"
    header = tiny_header(architecture=Architecture.OTHER)
    write_tiny(path, header=header, sections={"META": meta} if meta else {})
    with Reader(path) as reader:
        assert family_of(reader) == family


@pytest.mark.parametrize(
    ("meta", "name"),
    [
        (b'{"source": {"name": "m", "architecture": "a", "type": "Q4_K_M"}}', "Q4_K_M"),
        (b'{"source": {"name": "\\"type\\": \\"Q8_0\\""}}', ""),
        (b'{"source": {"name": "m"}, "x": {"type": "Q8_0"}}', ""),
        (b"", ""),
    ],
)
def test_the_type_is_a_kept_ggufs(tmp_path: Path, meta: bytes, name: str) -> None:
    path = tmp_path / "m.qsf"
    write_tiny(path, header=tiny_header(), sections={"META": meta} if meta else {})
    with Reader(path) as reader:
        assert type_of(reader) == (name or dtype_name(reader.header.dtype))
