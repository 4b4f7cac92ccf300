"""Expressions and settings that split texts: as the library does; the reader of foreign JSON."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import codecs
import functools
import itertools
import json
import os
import random
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, example, given
from hypothesis import strategies as st

from make.refusals import table
from make.text_families import (
    NORMALIZERS,
    OTHERS,
    SETTINGS,
    byte_level,
    families,
    random_text,
    sequence,
    split,
)
from qsf.errors import MAX_LINE, QsfArgumentError, QsfError, QsfFormatError, error_line, shown
from qsf.file.foreign_text import text_of
from qsf.foreign_json import (
    MAX_DEPTH,
    JsonError,
    needed_bytes,
    read_json,
    read_json_at,
    read_json_file,
)
from qsf.text.tokenizer import Tokenizer, byte_of_char
from qsf_converter.sources.gguf_tokenizer import SPLITS
from qsf_converter.text.expressions import ExpressionError, parse
from qsf_converter.text.tables import text_section

TEXTS = (
    "It's 3 o'clock; I'LL pay $1234567.89 + 20% of <that>!  DON'Twe\u017f'\u017f",
    "  two  spaces\n\n\nand lines \t tabs   \r\n\r\n  \n x",
    "caf\u00e9 e\u0301a \u4f60\u597dworld\u3042\u30a2 \ud55c\uad6d\uc5b4 \U0001f600\U0001f44d",
    "x=f(y)^2~|z| 'quoted' \"text\" a-b--c ab1y22z333 \u00b2\u00bd\u0663\u2167 CamelCaseWORDs",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14 \u0928\u092e\u0938\u094d\u0924\u0947 \u2581a \u3000 \u00a0b",
    "<sentinel:12>IMGIMGABCZ,\uff01\u2026\u201ca\u201d \u060c\u0964 /a//\n\n/", " ", "",
)  # fmt: skip


@functools.cache
def _model(*, is_bytes: bool) -> dict[str, Any]:
    """Return a model whose tokens are all pairs of usual characters: wrong pieces give others."""
    chars = list(byte_of_char()) if is_bytes else sorted({*"".join(TEXTS), "\u2581"})
    space, line = ("\u0120", "\u010a") if is_bytes else (" ", "\n")
    usual = [*"aeorst1'.-xA", space, line, "\u2581" if not is_bytes else "\u00c3"]
    words = [*chars, *(a + b for a, b in itertools.product(usual, usual))]
    vocab = {word: idx for idx, word in enumerate(dict.fromkeys([*words, "<unk>"]))}
    return {
        "type": "BPE", "vocab": vocab, "unk_token": None if is_bytes else "<unk>",
        "merges": [[a, b] for a, b in itertools.product(usual, usual)],
    }  # fmt: skip


def tokenizer_json(pre_tokenizer: dict[str, Any]) -> bytes:
    """Return a tokenizer that shows the pieces of a pre-tokenizer."""
    is_bytes = "ByteLevel" in json.dumps(pre_tokenizer)
    decoder = byte_level() if is_bytes else {"type": "Fuse"}
    return json.dumps(
        {
            "version": "1.0", "added_tokens": [], "normalizer": None, "post_processor": None,
            "pre_tokenizer": pre_tokenizer, "decoder": decoder, "model": _model(is_bytes=is_bytes),
        }
    ).encode()  # fmt: skip


def compiled(data: bytes) -> Tokenizer:
    section, reason = text_section(data, bos_id=None, add_bos=None)
    assert section is not None, reason
    return Tokenizer(section)


def check_equal(ours: Tokenizer, library: tokenizers.Tokenizer, text: str) -> None:
    ids = library.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, add_prefix=False) == ids, text


@pytest.mark.parametrize("name", [*SETTINGS, *OTHERS])
def test_published_settings_split_as_the_library_does(name: str) -> None:
    data = tokenizer_json((SETTINGS | OTHERS)[name])
    ours, library = _both(data)
    rng = random.Random(name)
    for text in (*TEXTS, *(random_text(rng, rng.randrange(1, 16)) for _ in range(15))):
        check_equal(ours, library, text)


@pytest.mark.parametrize("kind", ["gpt2", "unigram always"])
@pytest.mark.parametrize("name", NORMALIZERS)
def test_published_normalizers_change_texts_as_the_library_does(name: str, kind: str) -> None:
    data = {**json.loads(families(is_small=True)[kind]), "normalizer": NORMALIZERS[name]}
    ours, library = _both(json.dumps(data).encode())
    rng = random.Random(name)
    for text in (*TEXTS, *(random_text(rng, rng.randrange(1, 16)) for _ in range(15))):
        check_equal(ours, library, text)


def test_what_is_replaced_has_no_flags_of_splitting() -> None:
    data = json.loads(tokenizer_json({"type": "Whitespace"}))
    replace = {"type": "Replace", "pattern": {"Regex": "b+"}, "content": "c"}
    data |= {"normalizer": replace, "pre_tokenizer": None}
    section, _ = text_section(json.dumps(data).encode(), bos_id=None, add_bos=None)
    assert section is not None
    n_entries = int.from_bytes(section[92:96], "little")
    at = len(section) - -(-n_entries * 2 // 8) * 8 - 16  # its row is the only one
    assert section[at] == 0
    for flag in (1, 8, 16):
        bad = section[:at] + bytes([flag]) + section[at + 1 :]
        with pytest.raises(QsfFormatError, match="section TEXT"):
            Tokenizer(bad)


@functools.cache
def _both(data: bytes) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    return compiled(data), tokenizers.Tokenizer.from_buffer(data)


@pytest.mark.parametrize("rule", sorted(set(SPLITS.values())))
def test_rules_of_gguf_split_as_the_library_does(rule: tuple[str, ...]) -> None:
    ours, library = _both(tokenizer_json(sequence(*map(split, rule), byte_level())))
    rng = random.Random(str(rule))
    for text in (*TEXTS, *(random_text(rng, rng.randrange(1, 16)) for _ in range(10))):
        check_equal(ours, library, text)


# ---- random expressions ----
_SETS = (
    r"\p{L}", r"\p{N}", r"\p{Lu}", r"\p{Ll}", r"\p{M}", r"\p{P}", r"\p{S}", r"\p{Han}", r"\s",
    r"\S", r"\d", r"\D", r"\w", r"\W", r"\p{^L}", r"\P{N}", "a", "b", "1", " ", r"\n", r"\r", "'",
    "s",
    ".", r"\.", "[0-9]", "[a-z]", r"\h", r"\p{Hiragana}", r"\u4e00", r"\x{41}", "(?i:s)",
    "(?i:[^a-c])",
)  # fmt: skip
_IN_BRACKETS = (
    r"\p{L}", r"\p{N}", r"\p{Ll}", r"\p{M}", r"\s", r"\r\n", "a-z", "A-Z", "0-9", "/", "'", r"\d",
    r"\P{L}", "a", "b", "[:punct:]", r"\w", "[ab]", "[^a]", r"\-", r"\]", "\u4e00-\u9fa5",
)  # fmt: skip
_COUNTS = (
    "", "", "", "?", "*", "+", "+", "{1,3}", "{2}", "{1,}", "{,2}", "??", "*?", "+?", "{1}",
    "{0,2}?", "{2}?", "{1,2}+",
)  # fmt: skip
_FIRSTS = ("", "", "", "", "^", r"\b", "(?<=a)", r"(?<!\s)", r"\A")
_LASTS = (
    "", "", "", r"(?!\S)", r"(?=\s)", r"(?!\p{L})", "$", r"(?=[ab]|$)", r"\b", r"\B", r"\z",
    r"(?=(?:\d{3})*\b)", "(?!ab)", "(?=a+b)",
)  # fmt: skip

_bracket = st.builds(
    "[{}{}{}]".format,
    st.sampled_from(["", "", "^"]),
    st.lists(st.sampled_from(_IN_BRACKETS), min_size=1, max_size=3).map("".join),
    st.sampled_from(["", "", "", r"&&[^\p{Han}]", r"&&\p{L}", "&&[a-m]"]),
)
_set = st.one_of(st.sampled_from(_SETS), _bracket)
_possessive = st.builds("{}{}".format, _set, st.sampled_from(["?+", "*+", "++"]))
_atom = st.one_of(
    st.builds("{}{}".format, _set, st.sampled_from(_COUNTS)),
    _possessive,
    st.builds("(?>{}{})".format, _set, st.sampled_from(["", "?", "*", "+", "{1,2}"])),
    st.sampled_from(["(?i:'s|'t|'re|'ve)", "(?i:'s|'t|'re|'ve)?", "'(?i:[sdmt]|ll)", "(?i:a|b)+"]),
)


def _joined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    chain = st.builds(
        "{}{}{}".format,
        st.sampled_from(_FIRSTS),
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.sampled_from(_LASTS),
    )
    return st.lists(chain, min_size=1, max_size=3).map("|".join)


_group = st.builds(
    "{}{}){}".format, st.sampled_from(["(?:", "("]), _joined(_atom), st.sampled_from(_COUNTS)
)
_expression = _joined(st.one_of(_atom, _atom, _group))
_text = st.text("aabbsStTrve\u00e9 1123\u0663  \n\r'.,/xAB\u4e2d\u3042\u0301\u017f\u00b2_-Z]")
_BEHAVIORS = ("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous")


@given(
    expression=_expression,
    behavior=st.sampled_from(_BEHAVIORS),
    invert=st.booleans(),
    is_behind=st.booleans(),
    texts=st.lists(_text, min_size=1, max_size=4),
)
def test_any_expression_splits_as_the_library_does(
    expression: str, behavior: str, invert: bool, is_behind: bool, texts: list[str]
) -> None:
    part = {**split(expression), "behavior": behavior, "invert": invert}
    parts = (byte_level(), part) if is_behind else (part, byte_level())
    data = tokenizer_json(sequence(*parts))
    section, reason = text_section(data, bos_id=None, add_bos=None)
    if section is None:  # repetitions of what may be empty, or many look-aheads: by their names
        assert reason is not None
        assert "the pre-tokenizer's expression" in reason
    assume(section is not None)
    ours, library = Tokenizer(section or b""), tokenizers.Tokenizer.from_buffer(data)
    for text in texts:
        check_equal(ours, library, text)


@given(
    expression=_expression,
    content=st.sampled_from(["", "x", " ", "\u00e9\u00e9", "\u2581"]),
    texts=st.lists(_text, min_size=1, max_size=4),
)
def test_any_expression_replaces_as_the_library_does(
    expression: str, content: str, texts: list[str]
) -> None:
    replace = {"type": "Replace", "pattern": {"Regex": expression}, "content": content}
    data = json.dumps({**json.loads(tokenizer_json(byte_level())), "normalizer": replace}).encode()
    section, _ = text_section(data, bos_id=None, add_bos=None)
    assume(section is not None)
    ours, library = Tokenizer(section or b""), tokenizers.Tokenizer.from_buffer(data)
    for text in texts:
        check_equal(ours, library, text)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [*table("tables")["expressions"], ("(" * 60 + "a" + ")" * 60, "more than 50 nested groups")],
)
def test_what_an_expression_may_not_have_is_named(expression: str, reason: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        parse(expression)
    assert reason in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_too_large_expressions_are_refused() -> None:
    for expression, reason in (
        ("(?:[ab]{1,40}c|[ac]{1,40}b|[bc]{1,40}a){1,9}", "states"),
        ("(?:(?:a{40}){40}b){40}", "places"),
        ("(?=ab)a(?=bc)b(?=cd)c(?=de)", "4 look-aheads"),
    ):
        data = tokenizer_json(sequence(split(expression), byte_level()))
        section, said = text_section(data, bos_id=None, add_bos=None)
        assert section is None
        assert said is not None
        assert reason in said


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (r"\s+$", " " * 1_000_000 + "x"),
        (r"(?:ab)*d|a", "ab" * 400_000 + "c"),
        (r"\s*[\r\n]+|\s", "\n" + " " * 500_000),
        ("(?=a[ab]*d)", "ab" * 400_000 + "c"),
    ],
)
def test_long_texts_are_read_once(expression: str, text: str) -> None:
    """With a new search at every place these took hours."""
    ours = compiled(tokenizer_json(sequence(split(expression), byte_level())))
    assert ours.decode(ours.encode(text, add_prefix=False)) == text


# ---- the reader of foreign JSON: what it counts, what it refuses, and that its bound is one ----
MB = 1 << 20
_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXTS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(_TEXTS, inner, max_size=6),
    max_leaves=40,
)
# What takes most memory for its bytes, one of each kind of cost; {} is a number.
DENSE = (
    "{{}}", "[]", "[[]]", "[1]", "[{}]", '{{"":{{}}}}', '{{"k{}":{}}}', '{{"k{}":[{{}}]}}',
    '{{"a":1,"b":2,"c":3,"d":4,"e":5,"f":{}}}', "{}", "{}.5", "-1e-{}", "null", '"{}"', '"é{}"',
    '"€"', '"😀"', '"\\u4e00"', '"a\\n\\n"', '"\\ud83d\\ude00"', "[" * 60 + "]" * 60,
    '{{"":' * 60 + "1" + "}}" * 60,
)  # fmt: skip


def peak_of(text: str) -> int:
    """Return the most memory that parsing takes, and its result."""
    data = text.encode()
    tracemalloc.start()
    value = read_json(data, memory_bytes=1 << 40)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert value is not None
    return peak


@given(_VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_values_are_those_of_the_standard_library(
    value: Any, is_ascii: bool, indent: int | None
) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    assert read_json(text) == read_json(text.encode()) == json.loads(text) == value


@given(st.sampled_from(DENSE), st.integers(300, 12_000))
def test_parsing_never_takes_more_than_what_is_counted(form: str, n: int) -> None:
    text = "[" + ",".join(form.format(i, i) for i in range(n * 10 // len(form) + 1)) + "]"
    assert peak_of(text) <= needed_bytes(text.encode()) + 4096


@given(st.integers(10, 20_000), st.sampled_from(["x{:x}", "€{:x}", "😀{}"]))
def test_tables_of_keys_are_counted_when_they_grow(n: int, form: str) -> None:
    text = "{" + ",".join(f'"{form.format(i)}":{i}' for i in range(n)) + "}"
    assert peak_of(text) <= needed_bytes(text.encode()) + 4096


@given(st.binary(max_size=200) | st.text(st.sampled_from('"\\u{}[]:,dD8cC0aeé😀')).map(str.encode))
def test_any_bytes_are_a_value_or_one_error(data: bytes) -> None:
    try:
        read_json(data)
    except JsonError as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        json.loads(data)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"[" * 65 + b"]" * 65, "nested 65 deep, allowed: up to 64"),
        (b"[" * 1_000_000, "nested 1000000 deep"),
        (b'"\\ud800"', "lone surrogate"),
        (b'"\\uDC00\\ud83d"', "lone surrogate"),
        (b'"\\ud83d\\u0041"', "lone surrogate"),
        (b'{"\\udead": 1}', "lone surrogate"),
        (b"NaN", "NaN is not a number"),
        (b"[-Infinity]", "-Infinity is not a number"),
        (b"1" * 5000, "a whole number of more than 4300 digits"),
        (b"\xff\xfe1\x00", "not JSON"),
        (b"", "not JSON"),
        (b'{"a":1}x', "not JSON"),
    ],
)
def test_what_no_reader_takes_is_refused_with_its_reason(text: bytes, reason: str) -> None:
    with pytest.raises(JsonError, match=reason) as caught:
        read_json(text)
    assert not hasattr(caught.value, "doc")  # the text itself would stay in memory
    assert caught.value.__cause__ is None


def test_brackets_and_escapes_in_texts_are_text() -> None:
    text = json.dumps(["[" * 1000, '"{' * 100, "\\", "\\\\ud800", "😀"])
    assert read_json(text) == json.loads(text)
    assert read_json('"' + "[" * 1000 + '"') == "[" * 1000
    assert read_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert read_json("[Infinity]", has_nan=True) == [float("inf")]
    assert read_json("[NaN, 1.5]", parse_constant=lambda name: name) == ["NaN", 1.5]
    assert read_json('{"a": 1, "a": 2}') == {"a": 2}
    for text in (str(int(1e30)), str(10**4299), str(-(2**63) - 1)):
        assert read_json(text) == read_json(f"\ufeff{text}") == json.loads(text.encode())


def test_memory_is_refused_before_it_is_taken() -> None:
    data = b"[" + b"{}," * (1 << 20) + b"{}]"
    tracemalloc.start()
    with pytest.raises(JsonError, match=r"its 3.00 MB may take 1\d\d.\d MB .* up to 8.0$"):
        read_json(data, memory_bytes=8 * MB)
    assert tracemalloc.get_traced_memory()[1] < 64 << 10
    tracemalloc.stop()


def test_a_file_is_regular_and_not_too_long(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    path.write_text('{"a": [1]}')
    assert read_json_file(path, max_bytes=10) == {"a": [1]}
    with pytest.raises(JsonError, match=r"more than 0\.0 MB"):
        read_json_file(path, max_bytes=9)
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(JsonError, match="not a regular file"):
            read_json_file(other, max_bytes=10)


def test_a_value_inside_a_text_ends_where_it_ends() -> None:
    text = "a: %json " + '{"a": [1]}' + " | [" + "[" * 99 + '"'
    assert read_json_at(text, 9) == ({"a": [1]}, 19)
    with pytest.raises(JsonError, match="not JSON"):
        read_json_at(text, 3)


@given(_VALUES, st.integers(1, 200))
@example({"a\x1f'": None, '"': "\U00018cd6" * 9}, 200)
def test_an_error_shows_at_most_80_characters_of_a_value(value: Any, n: int) -> None:
    for one in (value, [value] * n, {"a": str(value) * n}, "x'\"\n" * n):
        assert len(shown(one)) <= 80
        assert "\n" not in shown(one)
        assert len(str(QsfError(f"not {str(one)!r}"))) <= 90


@pytest.mark.parametrize("n", [0, 999, 1000, 1001, 3999, 4001, 100_000])
def test_an_error_is_a_line_with_its_start_and_its_end(n: int) -> None:
    text = "file: " + "x" * (n - 13) + ": a fault"
    assert error_line(text) == (text if len(text) <= MAX_LINE else error_line(error_line(text)))
    assert len(error_line(text)) <= MAX_LINE
    assert re.fullmatch(r"file: x*( \.\.\. \(cut here\) \.\.\. x*)?: a fault", error_line(text))
    assert len(error_line("'" + "\\'" * n)) <= MAX_LINE  # not the square of n
    for unsafe in ("\x1b[2J" * n, "\u202e\n\r\v\x85" * n):
        assert error_line(unsafe).isprintable()


def test_a_byte_order_mark_is_no_part_of_json_nor_of_a_text() -> None:
    assert read_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
    text = "h\u00f6ren \U0001f600"
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32"):
        assert text_of(text.encode(encoding), "p.txt") == text
    assert text_of(codecs.BOM_UTF16_BE + text.encode("utf-16-be"), "p.txt") == text
    assert text_of(b"", "p.txt") == ""
    for data, said in (
        ("h\u00f6".encode("latin-1"), "p.txt is not UTF-8: byte 0xf6 at position 1 of 2: save"),
        (codecs.BOM_UTF16_LE + b"a", "p.txt is not UTF-16: byte 0x61 at position 2 of 3"),
    ):
        with pytest.raises(QsfArgumentError, match=said):
            text_of(data, "p.txt")
