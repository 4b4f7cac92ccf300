"""A small model whose tokenizer has the marks of thoughts, and whose template begins them."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from make.golden import MODELS
from make.tiny_checkpoints import make_llama
from qsf_converter import convert

N_WORDS = 2048  # of the bundled tokenizer
MARKS = ("<think>", "</think>")
# As templates of DeepSeek R1 and Qwen 3 Thinking: the answer begins with thoughts.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
)


def make_thinker(folder: Path, marks: Sequence[str] = MARKS) -> Path:
    """Return a .qsf file whose tokenizer has the marks, as tokens that are texts too."""
    checkpoint = make_llama(
        folder / "hf", seed=1, n_vocab=N_WORDS + len(marks), max_tokens=256,
        tokenizer_from=MODELS["tiny-llama"],
    )  # fmt: skip
    path = checkpoint / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    plain = {**tokenizer["added_tokens"][0], "special": False}
    tokenizer["added_tokens"] += [
        {**plain, "id": N_WORDS + i, "content": name} for i, name in enumerate(marks)
    ]
    path.write_text(json.dumps(tokenizer), "utf-8")
    path = checkpoint / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**config, "chat_template": TEMPLATE}), "utf-8")
    convert(checkpoint, folder / "m.qsf", quant_type="8bit")
    return folder / "m.qsf"
