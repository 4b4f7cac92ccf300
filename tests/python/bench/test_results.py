# SPDX-License-Identifier: Apache-2.0
"""The JSON of qsf.bench: its keys, that it comes back as it was, and what is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from make.bench_records import small_results
from make.examples import examples
from qsf.errors import QsfError, QsfFormatError, QsfIOError
from qsf_bench.judge.results import Results, read, write
from qsf_bench.run.tasks import Cap
from qsf_bench.show.table import as_text, report


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results.json"


def known_of(results: Results) -> dict[str, Any]:
    known: dict[str, Any] = json.loads(json.dumps(results.as_json()))
    return known


def test_what_is_written_is_read(path: Path) -> None:
    results = small_results()
    assert results.rows[0].breakdown is not None
    assert any(row.cap is not None for row in results.rows)
    assert results.failures
    write(results, path, overwrite=False)
    assert read(path) == results
    assert read(path).limits.best_disk_gb_per_s == 2.0


def test_the_keys_that_were_agreed(path: Path) -> None:
    write(small_results(), path, overwrite=False)
    known = json.loads(path.read_text("utf-8"))
    assert known["format"] == 1
    assert known["machine"]["cpu"] == "Processor X"
    assert known["limits"]["memory_gb_per_s"] == {"1": 10.0, "2": 20.0}
    assert known["limits"]["disk_gb_per_s"]["direct x4"] == 2.0
    row = known["rows"][0]
    assert {key: row[key] for key in ("engine", "shape", "type", "bits_per_weight")} == {
        "engine": "qsf",
        "shape": "small",
        "type": "4bit",
        "bits_per_weight": 4.6,
    }
    assert (row["file_bytes"], row["threads"], row["test"], row["depth"]) == (
        *(700_000_000, 2),
        *("pp512", 0),
    )
    assert row["budget_mb"] is None
    assert row["peak_rss_bytes"] == 720 << 20
    assert 0 < row["fraction_of_limit"] < 1
    assert set(row["tok_per_s"]) == {"median", "min", "max", "values"}
    assert {"row", "vs", "median", "min", "max"} <= set(known["ratios"][0])


def set_at(known: Any, place: str, value: object) -> None:
    *way, last = place.split("/")
    for step in way:
        known = known[int(step) if isinstance(known, list) else step]
    known[int(last) if isinstance(known, list) else last] = value


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"format"',
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"format": 1, "machine": ' + b'{"a":' * 100_000,
        b'{"format": ' + b"9" * 10_000 + b"}",
        b" " * ((64 << 20) + 1),
    ],
    ids=lambda content: repr(content[:12]),
)
def test_what_is_no_result_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(QsfFormatError, match=r"is not a result of python -m qsf\.bench"):
        read(path)


@pytest.mark.parametrize("make", [Path, lambda path: path.mkdir() or path])
def test_what_cannot_be_read_is_an_io_error(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    with pytest.raises(QsfIOError, match="absent"):
        read(make(tmp_path / "absent"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


def places(known: Any, way: str = "") -> list[str]:
    """Return the way to every value."""
    found = [way] if way else []
    steps = known.items() if isinstance(known, dict) else []
    for step, inner in enumerate(known) if isinstance(known, list) else steps:
        found += places(inner, f"{way}/{step}" if way else str(step))
    return found


FULL = small_results()
KNOWN = known_of(FULL)
PLACES = [place for place in places(KNOWN) if not place.startswith(("machine/", "settings/"))]


@settings(max_examples=examples(60), deadline=None)
@given(place=st.sampled_from(PLACES), value=JSON)
def test_any_value_anywhere_is_refused_or_can_be_shown(
    tmp_path_factory: pytest.TempPathFactory, place: str, value: object
) -> None:
    known = copy.deepcopy(KNOWN)
    set_at(known, place, value)
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(known))
    try:
        results = read(path)
    except QsfError:
        return
    path.write_text(json.dumps(results.as_json()))
    assert read(path) == results
    assert as_text(report(results))


def test_labels_say_what_a_row_is() -> None:
    row = small_results().rows[0]
    assert row.label == "qsf, 4bit, pp512, 2 threads"
    capped = replace(row, depth=512, threads=1, budget_mb=200, cap=Cap(300, None, 0))
    assert capped.label == "qsf, 4bit, pp512 @ 512, 1 thread, budget 200 MB, cgroup 300 MB"
