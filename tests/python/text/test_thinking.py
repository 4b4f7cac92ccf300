"""Thoughts between <think> and </think> are told from the answer."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from make.golden import MODELS
from make.served import serving
from make.tiny_checkpoints import make_llama
from qsf import Model
from qsf.text.channels import answer_decoder
from qsf.text.tokenizer import Tokenizer
from qsf_converter import convert

N_WORDS = 2048  # of the bundled tokenizer
MARKS = ("<think>", "</think>")
# As templates of DeepSeek R1 and Qwen 3 Thinking: the answer begins with thoughts.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
)


def make_thinker(folder: Path) -> Path:
    """Return a .qsf file whose tokenizer has the marks, as tokens that are texts too."""
    checkpoint = make_llama(
        folder / "hf", seed=1, n_vocab=N_WORDS + len(MARKS), max_tokens=256,
        tokenizer_from=MODELS["tiny-llama"],
    )  # fmt: skip
    path = checkpoint / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    plain = {**tokenizer["added_tokens"][0], "special": False}
    tokenizer["added_tokens"] += [
        {**plain, "id": N_WORDS + i, "content": name} for i, name in enumerate(MARKS)
    ]
    path.write_text(json.dumps(tokenizer), "utf-8")
    path = checkpoint / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**config, "chat_template": TEMPLATE}), "utf-8")
    convert(checkpoint, folder / "m.qsf", quant_type="8bit")
    return folder / "m.qsf"


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_thinker(tmp_path_factory.mktemp("thinker"))


@pytest.fixture(scope="module")
def tokenizer(thinker: Path) -> Tokenizer:
    with Model(thinker, ram_budget=None, threads=1) as model:
        return model.tokenizer


def read(tokenizer: Tokenizer, text: str, prompt: str = "", **options: Any) -> tuple[str, str]:
    """Return the answer and the thoughts of a text that follows the prompt."""
    tokens = tokenizer.encode(prompt, add_prefix=False)
    decoder = answer_decoder(tokenizer, **{"begins_text": True, "prompt": tokens, **options})
    answer = thoughts = ""
    for token in tokenizer.encode(text, add_prefix=False):
        answer += decoder.push(token)
        thoughts += decoder.take_reasoning()
    answer += decoder.flush()
    return answer, thoughts + decoder.take_reasoning()


@pytest.mark.parametrize(
    ("prompt", "text", "answer", "thoughts"),
    [
        ("", "<think>\nA cat?\n</think>\n\nA dog.", "A dog.", "A cat?\n"),
        ("<think>\n", "A cat?\n</think>\n\nA dog.", "A dog.", "A cat?\n"),
        ("<think>", "Cut in the mid", "", "Cut in the mid"),
        ("<think>\n\n</think>\n\n", "A dog.", "A dog.", ""),
        ("", "A dog.", "A dog.", ""),
        ("", "<think>a</think>b<think>c</think>d", "bd", "ac"),
        ("", "<think></think>\n\n\u00e9", "\u00e9", ""),
    ],
)
def test_thoughts_are_told_from_the_answer(
    tokenizer: Tokenizer, prompt: str, text: str, answer: str, thoughts: str
) -> None:
    assert read(tokenizer, text, prompt) == (answer, thoughts)


def test_a_continuation_is_shown_as_it_is(tokenizer: Tokenizer) -> None:
    text = "<think>A cat?</think>A dog."
    assert read(tokenizer, text, begins_text=False) == (text, "")


@given(parts=st.lists(st.sampled_from([*MARKS, "a", "\n", " b", "\u00fc"]), max_size=12))
def test_nothing_is_lost(tokenizer: Tokenizer, parts: list[str]) -> None:
    answer, thoughts = read(tokenizer, "".join(parts))
    kept = [c for c in "".join(p for p in parts if p not in MARKS) if c != "\n"]
    assert sorted(kept) == sorted((answer + thoughts).replace("\n", ""))


def test_the_server_sends_thoughts_apart(thinker: Path) -> None:
    fields = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "seed": 1}
    with serving(thinker, parallel=1) as client:
        message = client.post("/v1/chat/completions", fields).json["choices"][0]["message"]
        assert message["reasoning_content"]  # the prompt ends with the mark, and it has no end
        assert not message["content"]
        fields["chat_template_kwargs"] = {"enable_thinking": False}
        message = client.post("/v1/chat/completions", fields).json["choices"][0]["message"]
        assert message["content"]
        assert "reasoning_content" not in message
