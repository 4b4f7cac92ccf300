"""Sampling parameters, their defaults, stop rules; how many tokens two texts share."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import itertools
from array import array
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsf.errors import QsfArgumentError, QsfFormatError
from qsf.text.arguments import count_common
from qsf.text.sampling import SamplingParams, StopMatcher, end_ids, end_texts, resolve_sampling


def test_what_is_asked_for_beats_the_file_beats_the_defaults() -> None:
    assert resolve_sampling() == SamplingParams(
        temperature=0.7, top_p=0.9, top_k=40, min_p=0.0, repetition_penalty=1.0
    )
    generation = {"temperature": 0.3, "top_k": 7, "min_p": None, "eos_token_id": 1}
    params = resolve_sampling(generation, top_k=3, top_p=None)
    assert params == SamplingParams(temperature=0.3, top_k=3, top_p=0.9)
    generation = {"do_sample": False, "temperature": 0.6}
    assert resolve_sampling(generation).temperature == 0.0
    assert resolve_sampling(generation, temperature=0.5).temperature == 0.5


def test_values_out_of_range_are_refused_by_name() -> None:
    wrong: dict[str, list[Any]] = {
        "temperature": [-0.1, float("nan"), 10**400, "hot"],
        "top_p": [0.0, 1.1],
        "top_k": [-1, 2.5, True, 2**32],
        "min_p": [-0.1, 1.5],
        "repetition_penalty": [0.0, float("inf")],
    }
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(QsfArgumentError, match=name):
                SamplingParams(**{name: value})
    edges = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 1, "repetition_penalty": 1.2}
    params = SamplingParams(**edges)  # type: ignore[arg-type]
    assert {name: getattr(params, name) for name in edges} == edges
    with pytest.raises(QsfArgumentError, match="warmth"):
        resolve_sampling(None, warmth=1.0)


def test_a_bad_value_of_the_file_is_the_files_fault_and_can_be_overridden() -> None:
    with pytest.raises(QsfFormatError, match="generation defaults: top_p"):
        resolve_sampling({"top_p": 7.0})
    assert resolve_sampling({"top_p": 7.0}, top_p=0.5).top_p == 0.5
    with pytest.raises(QsfArgumentError, match="top_p must be") as caught:
        resolve_sampling({"top_p": 0.5}, top_p=7.0)
    assert not isinstance(caught.value, QsfFormatError)


def test_end_ids_are_those_of_the_file_and_of_its_defaults() -> None:
    assert end_ids(None, {}) == set()
    assert end_ids(1, None) == {1}
    assert end_ids(1, {"eos_token_id": 5}) == {1, 5}
    assert end_ids(None, {"eos_token_id": [7, 9]}) == {7, 9}
    for bad in ("</s>", [1, "x"], -1, True, 1.0):
        with pytest.raises(QsfFormatError, match="eos_token_id"):
            end_ids(1, {"eos_token_id": bad})


def test_texts_end_an_answer_as_the_file_says() -> None:
    assert end_texts({}) == end_texts(None) == end_texts({"stop_strings": None}) == ()
    assert end_texts({"stop_strings": "### End"}) == ("### End",)
    assert end_texts({"stop_strings": ["a", "b"]}) == ("a", "b")
    for bad in ([""], 3, {"a": 1}, ["a", 1]):
        with pytest.raises(QsfFormatError, match="stop_strings"):
            end_texts({"stop_strings": bad})


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(piece) for piece in pieces) + matcher.flush()
    return shown, matcher.is_stopped


def test_a_stop_string_is_never_shown_in_part() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("the E") == "the "
    assert matcher.push("N") == ""
    assert not matcher.is_stopped
    assert matcher.push("D of") == ""
    assert matcher.is_stopped
    assert matcher.push("more") == ""
    assert matcher.flush() == ""
    assert run(["END"], ["the E", "N", "ough"]) == ("the ENough", False)
    assert run(["END"], ["the EN"]) == ("the EN", False)
    assert run(["aab"], ["aa", "a", "b"]) == ("a", True)
    ended = StopMatcher(["cat"], ["dog"])
    assert ended.push("a do") + ended.push("g, cat") == "a "
    assert (ended.is_stopped, ended.stopped_by) == (True, None)
    bad: list[list[Any]] = [[""], [3]]
    for stops in bad:
        with pytest.raises(QsfArgumentError, match="stop string"):
            StopMatcher(stops)


@given(
    text=st.text(alphabet="ab", max_size=20),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 20), max_size=8),
)
def test_how_text_is_cut_into_pieces_does_not_matter(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert "".join(pieces) == text
    shown, is_stopped = run(stops, pieces)
    assert (shown, is_stopped) == run(stops, list(text))
    assert is_stopped == any(stop in text for stop in stops)
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)


# ---- token ids ----
TOKENS = st.lists(st.integers(0, 2), max_size=200)


@given(common=TOKENS, a=TOKENS, b=TOKENS)
def test_common_tokens_are_counted(common: list[int], a: list[int], b: list[int]) -> None:
    a, b = common + a, common + b
    equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    assert count_common(array("I", a), array("I", b)) == len(list(equal))
