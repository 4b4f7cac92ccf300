"""Small models that think: with gpt-oss's channels, and with marks around thoughts."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from make.golden import MODELS
from make.tiny_checkpoints import make_llama
from qsf.text.tokenizer import Tokenizer
from qsf_converter import convert

MARKERS = (
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>",
    "<|call|>",
)  # fmt: skip
# Calls and their results as gpt-oss's template has them.
TEMPLATE = (
    "{% for t in tools or [] %}<|start|>developer<|message|>{{ t.function.name }}<|end|>"
    "{% endfor %}{% for m in messages %}"
    "{% if 'tool_calls' in m %}{% set call = m.tool_calls[0].function %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{% endif %}<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json"
    "<|message|>{{ call.arguments | tojson }}<|call|>"
    "{% elif m.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}"
    "<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "<|start|>assistant"
)
THOUGHTS = "Who asks? A cat."
ANSWER = "I am a dog, and you are not."
TEXT = (
    f"<|channel|>analysis<|message|>{THOUGHTS}<|end|>"
    "<|start|>assistant<|channel|>commentary to=user <|constrain|>json<|message|>{}<|end|>"
    f"<|start|>assistant<|channel|>final<|message|>{ANSWER}<|return|>"
)
CALL = (
    f"<|channel|>analysis<|message|>{THOUGHTS}<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.weather <|constrain|>json<|message|>{"city": "Ulm"}<|call|>'
)


def make_harmony(folder: Path) -> Path:
    """Return a .qsf file. Its end of text is ``<|end|>``, as in GGUF files that know no better."""
    checkpoint = make_with_tokens(folder, MARKERS, is_special=True, template=TEMPLATE)
    ends = {"eos_token_id": [1, N_WORDS + MARKERS.index("<|end|>")]}
    (checkpoint / "generation_config.json").write_text(json.dumps(ends), "utf-8")
    convert(checkpoint, folder / "m.qsf", quant_type="8bit")
    return folder / "m.qsf"


def said(tokenizer: Tokenizer, text: str = TEXT) -> list[int]:
    """Return the tokens of what the model says."""
    return tokenizer.encode(text, add_prefix=False)


MARKS = ("<think>", "</think>")
# As templates of DeepSeek R1 and Qwen 3 Thinking: the answer begins with thoughts.
THINKER_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
)


def make_thinker(folder: Path, marks: Sequence[str] = MARKS) -> Path:
    """Return a .qsf file whose tokenizer has the marks, as tokens that are texts too."""
    checkpoint = make_with_tokens(folder, marks, is_special=False, template=THINKER_TEMPLATE)
    convert(checkpoint, folder / "m.qsf", quant_type="8bit")
    return folder / "m.qsf"


# ---- A small model whose tokenizer has some tokens more than the bundled one ----
N_WORDS = 2048  # of the bundled tokenizer


def make_with_tokens(
    folder: Path,
    words: Sequence[str],
    *,
    is_special: bool,
    max_tokens: int = 256,
    template: str | None = None,
) -> Path:
    """Return a checkpoint in ``folder`` whose last tokens, from N_WORDS on, are ``words``."""
    checkpoint = make_llama(
        folder / "hf", seed=1, n_vocab=N_WORDS + len(words), max_tokens=max_tokens,
        tokenizer_from=MODELS["tiny-llama"],
    )  # fmt: skip
    path = checkpoint / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    plain = {**tokenizer["added_tokens"][0], "special": is_special}
    tokenizer["added_tokens"] += [
        {**plain, "id": N_WORDS + i, "content": word} for i, word in enumerate(words)
    ]
    path.write_text(json.dumps(tokenizer), "utf-8")
    if template is not None:
        path = checkpoint / "tokenizer_config.json"
        config = json.loads(path.read_text("utf-8"))
        path.write_text(json.dumps({**config, "chat_template": template}), "utf-8")
    return checkpoint
