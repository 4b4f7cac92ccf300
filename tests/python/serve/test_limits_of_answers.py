# SPDX-License-Identifier: Apache-2.0
"""How long answers may be, and among how many tokens they choose, where clients ask for more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from make.served import Client, serving

START = "Once upon a time"


@pytest.fixture(scope="module")
def plain(tiny_llama_8bit: Path) -> Iterator[Client]:
    with serving(tiny_llama_8bit, parallel=1) as client:
        yield client


def test_more_tokens_than_the_context_has_are_cut_and_said(
    plain: Client, tiny_llama_8bit: Path
) -> None:
    fields = {"prompt": list(range(500)), "ignore_eos": True}
    for most, n_tokens in ((5000, 12), (-1, 12), (12, 12), (3, 3)):
        answer = plain.post("/v1/completions", {**fields, "max_tokens": most})
        assert answer.json["usage"]["completion_tokens"] == n_tokens
        assert answer.json["choices"][0]["finish_reason"] == "length"
        assert answer.headers.get("x-qsf-max-tokens") == ("12" if most == 5000 else None)
    with serving(tiny_llama_8bit, parallel=1, strict=True) as strict:
        answer = strict.post("/v1/completions", {**fields, "max_tokens": 13})
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert (
            "500 tokens and max_tokens is 13, but the context holds 512"
            in (answer.error["message"])
        )


def test_a_top_k_of_minus_one_is_off(plain: Client) -> None:
    texts = {
        plain.post(
            "/v1/completions", prompt=START, max_tokens=20, seed=3, temperature=2.0, top_k=top_k
        ).json["choices"][0]["text"]
        for top_k in (-1, 0)
    }
    assert len(texts) == 1
