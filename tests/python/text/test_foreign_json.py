"""The reader of foreign JSON: what it counts, what it refuses, and that its bound is one."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import codecs
import json
import os
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qsf.errors import MAX_LINE, QsfArgumentError, QsfError, error_line, shown
from qsf.file.foreign_text import text_of
from qsf.foreign_json import (
    MAX_DEPTH,
    JsonError,
    needed_bytes,
    read_json,
    read_json_at,
    read_json_file,
)

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
