"""Thoughts between <think> and </think> are told from the answer."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from make.commands import Run
from make.harmony import MARKS, make_thinker
from make.terminals import OnTerminal
from make.terminals import on_terminal as on_terminal
from qsf import Model
from qsf.errors import QsfArgumentError
from qsf.text.channels import answer_decoder
from qsf.text.thinking import thinking_args
from qsf.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_thinker(tmp_path_factory.mktemp("thinker"))


@pytest.fixture(scope="module")
def tokenizer(thinker: Path) -> Tokenizer:
    with Model(thinker, ram_budget=None, threads=1) as model:
        return model.tokenizer


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = make_thinker(tmp_path_factory.mktemp("gemma"), ("<|channel>", "<channel|>"))
    with Model(path, ram_budget=None, threads=1) as model:
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
        ("", "<|channel>thought\nA cat?\n<channel|>A dog.", "A dog.", "A cat?\n"),
        ("<|channel>thought\n<channel|>", "A dog.", "A dog.", ""),
        ("", "<|channel>thought\n<channel|>A dog.", "A dog.", ""),
        (
            "",
            "<|channel>thoughts are\nfree<channel|>\n\nthought\nb",
            "thought\nb",
            "thoughts are\nfree",
        ),
        ("", "<|channel>thou<channel|>b", "b", ""),
        ("<|channel>thought\n", "the cat<channel|>b", "b", "the cat"),
        ("", "A dog.", "A dog.", ""),
    ],
)
def test_the_label_of_a_channel_is_no_thought(
    gemma: Tokenizer, prompt: str, text: str, answer: str, thoughts: str
) -> None:
    assert read(gemma, text, prompt) == (answer, thoughts)


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


@pytest.fixture(scope="module")
def plain(tiny_chat_8bit: Path) -> Tokenizer:
    """Return a tokenizer without the marks, which are then written as ordinary text."""
    with Model(tiny_chat_8bit, ram_budget=None, threads=1) as model:
        return model.tokenizer


@pytest.mark.parametrize(
    ("prompt", "text", "answer", "thoughts"),
    [
        ("", "<think>\nA cat?\n</think>\n\nA dog.", "A dog.", "A cat?\n"),
        ("<think>\n", "A cat?\n</think>\n\nA dog.", "A dog.", "A cat?\n"),
        ("", "[THINK]a < b[/THINK]c < d", "c < d", "a < b"),
        ("", "Here is my thought process: a. Here is my response: b", " b", " a. "),
        ("", "Write <think>x</think>.", "Write <think>x</think>.", ""),
        ("", "<thin", "<thin", ""),
        ("", "<think>a</thi", "", "a</thi"),
        ("", "", "", ""),
    ],
)
def test_marks_that_are_ordinary_text_count_where_an_answer_begins(
    plain: Tokenizer, prompt: str, text: str, answer: str, thoughts: str
) -> None:
    assert read(plain, text, prompt) == (answer, thoughts)


@pytest.mark.parametrize(
    ("template", "args"),
    [
        ("{% if enable_thinking is defined and enable_thinking is false %}", "enable_thinking"),
        ("{%- if not thinking is defined %}{% set thinking = false %}{% endif %}", "thinking"),
        ("{%- if thinking %}You think.{% endif %}", "thinking"),
    ],
)
def test_the_switch_of_a_template(template: str, args: str) -> None:
    assert thinking_args(template, is_on=True) == {args: True}
    assert thinking_args(template, is_on=False) == {args: False}


def test_a_template_without_switch_is_refused_or_thinks_anyway(
    run: Run, tiny_chat_8bit: Path
) -> None:
    for template in (
        "{{ '<think>' }}",
        "{% if message.thinking %}<|channel|>{{ reasoning_effort }}",
    ):
        assert thinking_args(template, is_on=True) == {}
        with pytest.raises(QsfArgumentError, match="the model always thinks"):
            thinking_args(template, is_on=False)
    for is_on in (True, False):
        with pytest.raises(QsfArgumentError, match="knows no thinking"):
            thinking_args("{{ messages }} thinking about it", is_on=is_on)
    done = run(tiny_chat_8bit, "-p", "Hi", "--no-think")
    assert done.returncode == 1
    assert "the model's chat template knows no thinking: leave it out" in done.stderr


def test_a_continuation_is_shown_as_it_is(tokenizer: Tokenizer) -> None:
    text = "<think>A cat?</think>A dog."
    assert read(tokenizer, text, begins_text=False) == (text, "")


@given(parts=st.lists(st.sampled_from([*MARKS, "a", "\n", " b", "\u00fc"]), max_size=12))
def test_nothing_is_lost(tokenizer: Tokenizer, parts: list[str]) -> None:
    answer, thoughts = read(tokenizer, "".join(parts))
    kept = [c for c in "".join(p for p in parts if p not in MARKS) if c != "\n"]
    assert sorted(kept) == sorted((answer + thoughts).replace("\n", ""))


def test_a_chat_shows_hides_and_switches_thoughts(
    thinker: Path, on_terminal: OnTerminal, run: Run
) -> None:
    options = ("-n", 6, "--seed", 1)
    xterm = {"TERM": "xterm"}
    chat = on_terminal("chat", thinker, *options, environment=xterm)
    chat.ask("Hi\n", "6 tokens, ")
    assert "\x1b[2m" in chat.text.split("Hi", 1)[1]
    chat.ask("/think hide\n", "(thoughts are not shown from now on)")
    chat.ask("Hi\n", "(thought for ")
    chat.ask("/think off\n", "(the model answers at once from now on)")
    chat.read_until("> ")
    before = len(chat.text)
    chat.type("Hi\n")
    chat.read_until("6 tokens, ")
    assert "(thought for" not in chat.text[before:]
    chat.ask("/think\n", "(/think takes one of on, off, show, hide)")
    chat.ask("\x04", "\n")
    assert chat.wait() == 0
    assert run(thinker, "-p", "Hi", *options).stdout.strip() == ""
    assert run(thinker, "-p", "Hi", "--no-think", *options).stdout.strip() != ""
    thinking = run(thinker, "-p", "Hi", "--think", *options)
    assert (thinking.returncode, thinking.stdout.strip()) == (0, "")
