"""Thoughts, between marks or in channels, are told from the answer."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from make.commands import Run
from make.harmony import (
    ANSWER,
    CALL,
    MARKS,
    N_WORDS,
    TEXT,
    THOUGHTS,
    make_harmony,
    make_thinker,
    said,
)
from make.refusals import table
from make.terminals import OnTerminal
from make.terminals import on_terminal as on_terminal
from qsf import Model, Session
from qsf.errors import QsfArgumentError
from qsf.passes import Chosen
from qsf.text.channels import CALL_BEGIN, CALL_MIDDLE, answer_decoder
from qsf.text.thinking import thinking_args
from qsf.text.tokenizer import Tokenizer
from qsf_converter.text.tables import open_tokenizer

READ = ("prompt", "text", "answer", "thoughts")
THOUGHTS_OF = table("tables")


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
    ("prompt", "text", "answer", "thoughts"), table("tables")["thoughts: channels"]
)
def test_the_label_of_a_channel_is_no_thought(
    gemma: Tokenizer, prompt: str, text: str, answer: str, thoughts: str
) -> None:
    assert read(gemma, text, prompt) == (answer, thoughts)


@pytest.mark.parametrize(
    ("prompt", "text", "answer", "thoughts"), table("tables")["thoughts: marks"]
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
    ("prompt", "text", "answer", "thoughts"), table("tables")["thoughts: ordinary"]
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


# ---- gpt-oss ----
@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = make_harmony(tmp_path_factory.mktemp("harmony"))
    with Model(path, ram_budget=None, threads=1) as opened:
        yield opened


@pytest.mark.parametrize(
    ("text", "shown", "reasoning"), [*table("tables")["channels"], (TEXT, ANSWER, THOUGHTS + "{}")]
)
def test_the_final_channel_is_shown(harmony: Model, text: str, shown: str, reasoning: str) -> None:
    assert read(harmony.tokenizer, text) == (shown, reasoning)


@pytest.mark.parametrize(
    ("text", "shown", "reasoning"),
    [
        (CALL.removesuffix("<|call|>"), '{"city": "Ulm"}', THOUGHTS),
        (" to=functions.weather<|channel|>commentary json<|message|>{}", "{}", ""),
        (
            "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant to=functions.weather"
            "<|channel|>commentary <|constrain|>json<|message|>{}<|end|>"
            "<|start|>assistant<|channel|>analysis<|message|>, well",
            "{}",
            "Hm, well",
        ),
    ],
)
def test_calls_of_known_functions_have_one_form(
    harmony: Model, text: str, shown: str, reasoning: str
) -> None:
    call = CALL_BEGIN + "weather" + CALL_MIDDLE + shown
    assert read(harmony.tokenizer, text, functions=["weather", "now"]) == (call, reasoning)
    unknown, thoughts = read(harmony.tokenizer, text, functions=["now"])
    assert unknown == ""
    assert sorted(thoughts) == sorted(shown + reasoning)


@pytest.mark.parametrize("text", ["to", "to b", "To be", " two", "to=", "x to=functions.weather"])
def test_what_only_looks_like_whom_it_is_for_is_shown(harmony: Model, text: str) -> None:
    assert read(harmony.tokenizer, text, functions=["weather"]) == (text, "")


def test_half_a_character_stays_in_its_channel(harmony: Model) -> None:
    start, face, end = (said(harmony.tokenizer, text) for text in ("<|message|>", "😀", "<|end|>"))
    decoder = answer_decoder(harmony.tokenizer, begins_text=True)
    assert len(face) > 1
    shown = [decoder.push(token) for token in (*start, *face[:-1], *end)]
    assert "".join(shown) == "\N{REPLACEMENT CHARACTER}"


def test_where_there_are_no_channels(harmony: Model, tiny_llama_dir: Path) -> None:
    text = "<|channel|>analysis<|message|>Once"
    assert read(harmony.tokenizer, text, begins_text=False) == ("analysisOnce", "")
    tokenizer = open_tokenizer((tiny_llama_dir / "tokenizer.json").read_bytes(), bos_id=0)
    assert read(tokenizer, "Once upon a time")[0] == tokenizer.decode(
        said(tokenizer, "Once upon a time")
    )


def test_a_chat_keeps_the_answer_alone(harmony: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    assert harmony.end_ids == {1, N_WORDS + 5, N_WORDS + 6}
    script = said(harmony.tokenizer)
    monkeypatch.setattr(Session, "_choose", lambda *_: Chosen(script.pop(0)))
    thoughts: list[str] = []
    pieces = harmony.session.chat("Who are you?", on_reasoning=thoughts.append)
    assert "".join(pieces) == ANSWER
    assert "".join(thoughts) == THOUGHTS + "{}"
    assert [m["content"] for m in harmony.session.messages] == ["Who are you?", ANSWER]
    assert harmony.stats is not None
    assert harmony.stats.stop_reason == "end"
