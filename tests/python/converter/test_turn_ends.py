"""The tokens that end a turn, whatever the metadata names."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qsf.text.tokenizer import Tokenizer, byte_of_char
from qsf_converter.sources.usable import with_turn_ends
from qsf_converter.text.tables import open_tokenizer

# Abridged templates with the features of published ones.
PUBLISHED = Path(__file__).parents[2] / "data" / "templates"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_with(*special: str, plain: tuple[str, ...] = ()) -> Tokenizer:
    """Make a tokenizer of bytes; the special tokens have the ids from 256 on, then plain ones."""
    added = [
        {"id": 256 + i, "content": text, "special": text in special, "single_word": False,
         "lstrip": False, "rstrip": False, "normalized": False}
        for i, text in enumerate((*special, *plain))
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    data = {
        "version": "1.0", "added_tokens": added, "normalizer": None, "post_processor": None,
        "pre_tokenizer": {**byte_level, "use_regex": True}, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": byte_of_char(), "merges": []},
    }  # fmt: skip
    return open_tokenizer(json.dumps(data).encode(), bos_id=None)


def ends_of(template: str | None, tokenizer: Tokenizer, eos: Any = None, **tokens: str) -> Any:
    generation = {} if eos is None else {"eos_token_id": eos}
    chat = {"chat_template": template, "special_tokens": tokens, "generation": generation}
    ends = with_turn_ends(chat, tokenizer)["generation"].get("eos_token_id")
    if not isinstance(ends, list):
        return ends
    return [tokenizer.token_bytes(end, skip_special=False).decode() for end in ends]


def test_the_template_says_what_the_metadata_leaves_out() -> None:
    tokenizer = tokenizer_with("<|base_end|>", "<|im_start|>", "<|im_end|>")
    assert ends_of(CHATML, tokenizer, 256) == ["<|base_end|>", "<|im_end|>"]
    assert ends_of(CHATML, tokenizer) == ["<|im_end|>"]
    assert ends_of(CHATML, tokenizer, 258) == 258, "nothing is added"
    assert ends_of(None, tokenizer, 256) == 256, "without a template there are no turns"


def loop(body: str) -> str:
    return f"{{% for m in messages %}}{body}{{% endfor %}}"


# The template (else the published one of that name), the special tokens, and which end a turn
CASES = {
    "any text": (loop("[{{ m.role }}]{{ m.content }}<eot>\n"), "<eot> <x>", "<eot>"),
    "between turns": (loop("{{ m.content }}{{ ' <x> ' if not loop.last }}"), "<x>", "<x>"),
    "the next turn": (loop("<|{{ m.role }}|>\n{{ m.content }}"), "<|user|> <|assistant|>", "<|user|>"),
    "a text in between": (loop("{{ m.content }}{{ '\\nUser: <x>' if not loop.last }}"), "<x>", ""),
    "in words": (loop("{{ m.content }}<c>message<s><e>\n"), "<c> <s> <e>", "<e>"),
    "a mark that is no token": (loop("{{ m.content }}<y>\n"), "<x>", ""),
    "an answer is refused": ("{{ raise_exception('no') }}", "<x>", ""),
    "known marks": (CHATML, "<|im_end|> <|endoftext|> <|eom_id|> <|call|>", "<|im_end|> <|eom_id|> <|endoftext|>"),
    # A mark of the answer's own comes first
    "command-r": ("", "<|END_RESPONSE|> <|END_OF_TURN_TOKEN|> <|USER_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    # An end of the whole instead of the next turn
    "phi-3": ("", "<|end|> <|user|> </s>", "</s> <|end|>"),
    "llama-2": ("", "<s> </s>", "</s>"),
    "gemma": ("", "<start_of_turn> <end_of_turn>", "<end_of_turn>"),
    # <|end|> is between thoughts and the answer
    "gpt-oss": ("", "<|end|> <|return|> <|call|> <|start|>", "<|return|>"),
    "qwen3": ("", "<|im_end|> <|im_start|> </think> </tool_call>", "<|im_end|>"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_ends_of_templates(name: str) -> None:
    template, special, ends = CASES[name]
    template = template or (PUBLISHED / f"{name}.jinja").read_text("utf-8")
    tokens = {"eos_token": "</s>"} if "</s>" in special else {}
    found = ends_of(template, tokenizer_with(*special.split()), **tokens)
    assert found == (ends.split() or None)


def test_a_mark_of_the_template_need_not_be_special() -> None:
    """Many fine-tunes add their marks as ordinary tokens."""
    tokenizer = tokenizer_with(plain=("<|im_start|>", "<|im_end|>", "<|endoftext|>"))
    assert ends_of(CHATML, tokenizer) == ["<|im_end|>"]


def test_the_tokenizers_own_end_is_one() -> None:
    assert ends_of("{{ messages[0].content }}", tokenizer_with("<e>"), eos_token="<e>") == ["<e>"]
