"""The tokenizer: encoding rules, and decoding one token at a time."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import random
import resource
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from make.mutants import SECTIONS
from make.stored import unpack_tokenizer
from make.text_families import spm_json
from qsf.errors import QsfArgumentError, QsfFormatError, QsfUnsupportedError
from qsf.text.parts import read_text_parts
from qsf.text.tokenizer import Tokenizer, max_text_bytes, protect_special
from qsf_converter import convert
from qsf_converter.text.tables import open_tokenizer

SPM_JSON = spm_json(
    ["\u2581", "h", "i", "\u2581h", "\u2581hi", "<", "s", ">"], ["\u2581 h", "\u2581h i"]
)
SPM = open_tokenizer(SPM_JSON, bos_id=1, add_bos=True)


@pytest.fixture(scope="session")
def bundled_json(tiny_llama_dir: Path) -> bytes:
    return (tiny_llama_dir / "tokenizer.json").read_bytes()


@pytest.fixture(scope="session")
def bundled(bundled_json: bytes) -> Tokenizer:
    return open_tokenizer(bundled_json, bos_id=0, add_bos=True)


# ---- encoding ----


def test_bos_is_added_once_whoever_adds_it(bundled_json: bytes, bundled: Tokenizer) -> None:
    for add_bos in (True, None):  # the post-processor of this file adds it, too
        assert (
            open_tokenizer(bundled_json, bos_id=0, add_bos=add_bos).encode("Once")[:2].count(0) == 1
        )
    assert 0 not in open_tokenizer(bundled_json, bos_id=0, add_bos=False).encode("Once")
    assert SPM.encode("hi")[0] == 1
    assert open_tokenizer(SPM_JSON, bos_id=1, add_bos=None).encode("hi")[0] != 1
    assert bundled.encode("<|begin_of_text|>Once") == bundled.encode("Once")
    assert bundled.encode("Once", add_prefix=False) == bundled.encode("Once")[1:]
    assert bundled.encode("") == [0]


def test_special_tokens_are_texts_where_they_are_told(bundled: Tokenizer) -> None:
    text = "a<|end_of_text|>b"
    assert 1 in bundled.encode(text)
    ordinary = bundled.encode(text, parse_special=False)
    assert 1 not in ordinary
    assert bundled.decode(ordinary) == text
    assert 1 in bundled.encode(text)  # the choice does not stick
    names = SPM.special_names
    text = protect_special("</s> hi <s>", names, "\ufdd0")
    assert text.replace("\ufdd0", "") == "</s> hi <s>"
    assert all(name not in text for name in names)
    assert all(
        set(SPM.encode(p, add_prefix=False)).isdisjoint({1, 2}) for p in text.split("\ufdd0")
    )
    ids = bundled.encode("Once")
    assert bundled.decode(ids) == "Once"
    assert bundled.decode(ids, skip_special=False) == "<|begin_of_text|>Once"
    assert bundled.decode([-1, 10**6]) == ""  # ids that do not exist
    seams = ["\ufdd0\ufdd0" + "\ufdd0" * i for i in range(99)]
    assert len(protect_special("<s>" * 9, ["<s>", *seams], "\ufdd0")) == 36


def test_a_text_that_is_too_long_is_refused(bundled: Tokenizer) -> None:
    text = "a red ball " * 1000
    with pytest.raises(
        QsfArgumentError, match=r"too long: it has about [0-9]+ tokens, and the context holds"
    ):
        bundled.encode(text, max_tokens=100)
    n_tokens = len(bundled.encode(text))
    assert len(bundled.encode(text, max_tokens=n_tokens)) == n_tokens
    n_bytes = 20 << 20
    bundled.encode("a" * 99)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(QsfArgumentError, match=f"{n_bytes} bytes, .* 512 tokens has at most 65536"):
        bundled.encode("a" * n_bytes, max_tokens=512)
    scale = 1 if sys.platform == "darwin" else 1024
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) * scale < 2 * n_bytes + (4 << 20), "the text and its bytes, no more"
    assert max_text_bytes(100_000) == 1_600_000


# ---- decoding ----


def test_characters_arrive_whole_and_at_once(bundled: Tokenizer) -> None:
    decoder = bundled.incremental()
    ids = bundled.encode("\U0001f600", add_prefix=False)
    assert len(ids) > 1
    assert [decoder.push(token_id) for token_id in ids] == [""] * (len(ids) - 1) + ["\U0001f600"]
    assert decoder.flush() == ""
    decoder = SPM.incremental()
    assert [decoder.push(3 + byte) for byte in "é".encode()] == ["", "é"]
    assert decoder.push(3 + 0xE2) == ""
    assert decoder.flush() == "\ufffd"
    hi = SPM.token_id("\u2581hi")
    assert hi is not None
    assert SPM.incremental(at_start=False).push(hi) == " hi"
    assert SPM.incremental(at_start=True).push(hi) == "hi"
    assert SPM.decode([hi, hi]) == "hi hi"


# ---- refusals ----


@pytest.mark.parametrize("data", [b"", b"{}", b"not json", b"\xff\xfe"])
def test_what_is_not_a_tokenizer_is_refused(data: bytes) -> None:
    with pytest.raises(QsfUnsupportedError, match="tokenizer"):
        open_tokenizer(data, bos_id=None)


@given(st.integers(0, 2**32))
def test_any_tokenizer_of_a_stranger_encodes_or_is_a_typed_error(
    bundled_json: bytes, seed: int
) -> None:
    data = SECTIONS["TOKN"](random.Random(seed), bundled_json)
    try:
        tokenizer = open_tokenizer(unpack_tokenizer(data), bos_id=0)
        ids = tokenizer.encode("Hi, <s> you\U0001f600 0i", max_tokens=64)
        assert isinstance(tokenizer.decode(ids), str)
    except (QsfFormatError, QsfArgumentError):
        return  # QsfUnsupportedError is one of the first


def test_a_text_needs_no_library(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    path = tmp_path / "m.qsf"
    assert convert(tiny_llama_dir, path).warnings == ()
    parts = read_text_parts(path)
    assert parts.tokenizer is not None
    assert parts.tokenizer.decode(parts.tokenizer.encode("Once upon a time")) == "Once upon a time"
    assert parts.text_bytes == parts.tokenizer.n_bytes
