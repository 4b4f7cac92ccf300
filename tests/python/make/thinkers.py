"""A small model whose tokenizer has the marks of thoughts, and whose template begins them."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from make.added_tokens import make_with_tokens
from qsf_converter import convert

MARKS = ("<think>", "</think>")
# As templates of DeepSeek R1 and Qwen 3 Thinking: the answer begins with thoughts.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
)


def make_thinker(folder: Path, marks: Sequence[str] = MARKS) -> Path:
    """Return a .qsf file whose tokenizer has the marks, as tokens that are texts too."""
    checkpoint = make_with_tokens(folder, marks, is_special=False, template=TEMPLATE)
    convert(checkpoint, folder / "m.qsf", quant_type="8bit")
    return folder / "m.qsf"
