"""gpt-oss's channels: the final one is the answer, the others are reasoning."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from make.added_tokens import N_WORDS
from make.harmony import ANSWER, CALL, TEXT, THOUGHTS, make_harmony, said
from qsf import Model, Session
from qsf.passes import Chosen
from qsf.text.channels import CALL_BEGIN, CALL_MIDDLE, answer_decoder
from qsf.text.tokenizer import Tokenizer
from qsf_converter.text.tables import open_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = make_harmony(tmp_path_factory.mktemp("harmony"))
    with Model(path, ram_budget=None, threads=1) as opened:
        yield opened


def read(
    tokenizer: Tokenizer, text: str, *, begins_text: bool = True, functions: Sequence[str] = ()
) -> tuple[str, str]:
    """Return what is shown of a text, and what is reasoning."""
    decoder = answer_decoder(tokenizer, begins_text=begins_text, functions=functions)
    shown = reasoning = ""
    for token in said(tokenizer, text):
        shown += decoder.push(token)
        reasoning += decoder.take_reasoning()
    shown += decoder.flush()
    return shown, reasoning + decoder.take_reasoning()


@pytest.mark.parametrize(
    ("text", "shown", "reasoning"),
    [
        (TEXT, ANSWER, THOUGHTS + "{}"),
        ("No channels at all.", "No channels at all.", ""),
        ("<|message|>None here.<|return|>", "None here.", ""),
        ("<|channel|>analysis<|message|>Cut in the mid", "", "Cut in the mid"),
        ("<|channel|>finally<|message|>Nearly.", "", "Nearly."),
        ("<|channel|>final", "", ""),
        ("<|channel|>final <|constrain|>json<|message|>[1]<|return|>", "[1]", ""),
        ("<|channel|>analysis<|message|>é<|end|>x<|start|>y<|channel|>final<|message|>ü", "ü", "é"),
    ],
)
def test_the_final_channel_is_shown(model: Model, text: str, shown: str, reasoning: str) -> None:
    assert read(model.tokenizer, text) == (shown, reasoning)


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
    model: Model, text: str, shown: str, reasoning: str
) -> None:
    call = CALL_BEGIN + "weather" + CALL_MIDDLE + shown
    assert read(model.tokenizer, text, functions=["weather", "now"]) == (call, reasoning)
    unknown, thoughts = read(model.tokenizer, text, functions=["now"])
    assert unknown == ""
    assert sorted(thoughts) == sorted(shown + reasoning)


@pytest.mark.parametrize("text", ["to", "to b", "To be", " two", "to=", "x to=functions.weather"])
def test_what_only_looks_like_whom_it_is_for_is_shown(model: Model, text: str) -> None:
    assert read(model.tokenizer, text, functions=["weather"]) == (text, "")


def test_half_a_character_stays_in_its_channel(model: Model) -> None:
    start, face, end = (said(model.tokenizer, text) for text in ("<|message|>", "😀", "<|end|>"))
    decoder = answer_decoder(model.tokenizer, begins_text=True)
    assert len(face) > 1
    shown = [decoder.push(token) for token in (*start, *face[:-1], *end)]
    assert "".join(shown) == "\N{REPLACEMENT CHARACTER}"


def test_where_there_are_no_channels(model: Model, tiny_llama_dir: Path) -> None:
    text = "<|channel|>analysis<|message|>Once"
    assert read(model.tokenizer, text, begins_text=False) == ("analysisOnce", "")
    tokenizer = open_tokenizer((tiny_llama_dir / "tokenizer.json").read_bytes(), bos_id=0)
    assert read(tokenizer, "Once upon a time")[0] == tokenizer.decode(
        said(tokenizer, "Once upon a time")
    )


def test_a_chat_keeps_the_answer_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model.end_ids == {1, N_WORDS + 5, N_WORDS + 6}
    script = said(model.tokenizer)
    monkeypatch.setattr(Session, "_choose", lambda *_: Chosen(script.pop(0)))
    thoughts: list[str] = []
    pieces = model.session.chat("Who are you?", on_reasoning=thoughts.append)
    assert "".join(pieces) == ANSWER
    assert "".join(thoughts) == THOUGHTS + "{}"
    assert [m["content"] for m in model.session.messages] == ["Who are you?", ANSWER]
    assert model.stats is not None
    assert model.stats.stop_reason == "end"
