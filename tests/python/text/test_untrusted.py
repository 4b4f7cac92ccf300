"""Tokenizers of strangers: bounded work, typed errors."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
import random
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from make.examples import examples
from make.mutants import SECTIONS
from qsf.errors import QsfArgumentError, QsfFormatError, QsfUnsupportedError
from qsf.file.stored_tokenizer import unpack_tokenizer
from qsf.text.tokenizer import Tokenizer, max_text_bytes, protect_special
from qsf.text.untrusted import check_tokenizer, library_errors

N_EXAMPLES = int(os.environ.get("QSF_FUZZ_EXAMPLES", examples(150)))  # `make fuzz` asks for more


@pytest.fixture(scope="module")
def bundled(tiny_llama_dir: Path) -> bytes:
    return (tiny_llama_dir / "tokenizer.json").read_bytes()


def changed(data: bytes, **parts: Any) -> bytes:
    return json.dumps({**json.loads(data), **parts}).encode()


def replace_with(text: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": text}, "content": new}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


@pytest.mark.parametrize(
    "normalizer",
    [
        sequence(*[replace_with("a", "aa")] * 40),
        replace_with("a", "b" * 300),
        replace_with("", "b"),
        {"type": "Replace", "pattern": {"Regex": ""}, "content": "b" * 300},
        {"type": "Prepend", "prepend": "b" * 300},
        sequence(
            sequence(*[replace_with("a", "aa")] * 5), sequence(*[replace_with("a", "aa")] * 5)
        ),
        {"prepend": "b"},
        {"type": "NoSuchThing"},
        {"type": "Precompiled", "precompiled_charsmap": "/////w=="},  # announces 4 GB
    ],
)
def test_what_multiplies_text_is_refused(bundled: bytes, normalizer: dict[str, Any]) -> None:
    """Before the library loads it: added tokens are normalised while it does."""
    if normalizer == replace_with("", "b"):
        assert check_tokenizer(changed(bundled, normalizer=normalizer)) == 2
        return
    with pytest.raises(QsfFormatError, match=r"times longer|not a known one|table"):
        Tokenizer(changed(bundled, normalizer=normalizer))


def test_pre_tokenizers_and_decoders_that_multiply_are_refused(bundled: bytes) -> None:
    steps = {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 9}
    with pytest.raises(QsfUnsupportedError, match="512 times longer"):
        Tokenizer(changed(bundled, pre_tokenizer=steps))
    steps = {"type": "Sequence", "decoders": [replace_with("a", "aa")] * 40}
    with pytest.raises(QsfUnsupportedError, match="times longer"):
        Tokenizer(changed(bundled, decoder=steps))


def test_growth_within_the_limit_is_refused_when_a_text_meets_it(bundled: bytes) -> None:
    tokenizer = Tokenizer(changed(bundled, normalizer=replace_with("Q", "q" * 100)))
    assert tokenizer.encode("Hello" * 1000)
    with pytest.raises(QsfFormatError, match=r"makes more than .* bytes of the text's first"):
        tokenizer.encode("Q" * 1000)


def test_too_many_tokens_in_front_are_refused(bundled: bytes) -> None:
    processor = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "s", "type_id": 0}}] * 9,
        "pair": [],
        "special_tokens": {"s": {"id": "s", "ids": [0] * 9, "tokens": ["x"] * 9}},
    }
    with pytest.raises(QsfUnsupportedError, match="adds 81 tokens"):
        Tokenizer(changed(bundled, post_processor=processor))


def test_an_unknown_token_that_is_missing_is_an_error_of_the_file(bundled: bytes) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "missing"}
    tokenizer = Tokenizer(changed(bundled, model=model, added_tokens=[], post_processor=None))
    with pytest.raises(QsfFormatError, match="cannot encode this text"):
        tokenizer.encode("Hello")


def test_a_panic_is_a_typed_error_and_an_interrupt_is_none() -> None:
    panic = type("PanicException", (BaseException,), {})
    with pytest.raises(QsfFormatError, match="cannot encode: boom"), library_errors("encode"):
        raise panic("boom")
    with pytest.raises(KeyboardInterrupt), library_errors("encode"):
        raise KeyboardInterrupt


def test_a_regular_expression_past_its_limit_is_a_typed_error(bundled: bytes) -> None:
    splitter = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated",
                "invert": False}  # fmt: skip
    tokenizer = Tokenizer(changed(bundled, pre_tokenizer=splitter))
    with pytest.raises(QsfFormatError, match="cannot encode this text"):
        tokenizer.encode("x" * 60)


def test_a_token_of_a_page_is_refused(bundled: bytes) -> None:
    parts = json.loads(bundled)
    parts["model"]["vocab"]["a" * 5000] = len(parts["model"]["vocab"])
    tokenizer = Tokenizer(json.dumps(parts).encode())
    token_id = tokenizer.token_id("a" * 5000)
    assert token_id is not None
    with pytest.raises(QsfFormatError, match="has 5000 bytes, and 4096 is the limit"):
        tokenizer.token_bytes(token_id)


@pytest.mark.parametrize("n_bytes", [1 << 20, 50 << 20])
def test_a_long_text_is_refused_before_it_is_encoded(bundled: bytes, n_bytes: int) -> None:
    tokenizer = Tokenizer(bundled)
    tokenizer.encode("a" * 99)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(QsfArgumentError, match=f"{n_bytes} bytes, .* 512 tokens has at most 65536"):
        tokenizer.encode("a" * n_bytes, max_tokens=512)
    scale = 1 if sys.platform == "darwin" else 1024
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) * scale < 2 * n_bytes + (4 << 20), "the text and its bytes, no more"
    assert max_text_bytes(100_000) == 1_600_000


def test_a_special_token_with_a_seam_multiplies_nothing() -> None:
    names = ["\ufdd0\ufdd0" + "\ufdd0" * i for i in range(99)]
    assert len(protect_special("<s>" * 9, ["<s>", *names], "\ufdd0")) == 36


# ---- reading the parts ----


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{", b'{"a"', b'{"a":}', b'{"a":1', b'{"a":1,}', b'{"a":"', b'{"a":[', b'{"a":{]',
     b'{"a":1,"\\u0061":2}', b'{"' + b"a" * 99 + b'":1}',
     b'{"a":' + b"[" * 9999 + b"]" * 9999 + b"}"],
)  # fmt: skip
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(QsfFormatError, match="cannot be read"):
        check_tokenizer(data)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=examples(200))
@given(_VALUES, st.sampled_from([None, 1, "\t"]), st.booleans(), st.permutations(range(3)))
def test_the_normalizer_is_found_wherever_it_stands(
    vocabulary: Any, indent: Any, is_ascii: bool, order: list[int]
) -> None:
    """After and before any other JSON; the one inside of another part does not count."""
    fakes = {"normalizer": {"type": "NFD"}, "x": vocabulary, '"normalizer': "\\"}
    parts = [("model", fakes), ("normalizer", {"type": "NFKC"}), ("added_tokens", [vocabulary])]
    text = json.dumps(dict(parts[i] for i in order), indent=indent, ensure_ascii=is_ascii)
    assert check_tokenizer(text.encode("utf-8", "replace")) == 11


@settings(deadline=None, max_examples=N_EXAMPLES)
@given(st.integers(0, 2**32))
def test_any_tokenizer_encodes_or_is_a_typed_error(bundled: bytes, seed: int) -> None:
    data = SECTIONS["TOKN"](random.Random(seed), bundled)
    try:
        tokenizer = Tokenizer(unpack_tokenizer(data), bos_id=0)
        ids = tokenizer.encode("Hi, <s> you\U0001f600 0i", max_tokens=64)
        assert isinstance(tokenizer.decode(ids), str)
    except (QsfFormatError, QsfArgumentError):
        return  # typed, as it should be
