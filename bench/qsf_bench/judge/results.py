"""The results of a run: rows, ratios, the machine and its limits; and their JSON.

The keys are a contract with readers of the files: keys are added, never changed.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import types
import typing
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from qsf.errors import QsfFormatError, QsfIOError
from qsf.native.roofline import Limits
from qsf_bench.run.tasks import Cap, setting_words

FORMAT = 1  # version of the JSON; files of other versions are refused
_MOST_BYTES = 64 << 20  # largest file that is read; a result has some ten thousand bytes


@dataclass(frozen=True, slots=True)
class Spread:
    """A median, with the least and the largest value. ``values`` are in the order of the rounds."""

    median: float
    min: float
    max: float
    values: list[float] = field(default_factory=list)


def spread_of(values: Sequence[float]) -> Spread:
    """Return the spread of at least one value."""
    return Spread(statistics.median(values), min(values), max(values), list(values))


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The time of a token by phase: milliseconds, medians over rounds.

    ``parts`` do not overlap and sum to ``wall_ms``, within 3 % or a note says so; ``beside`` is
    the work of other threads at the same time.
    """

    wall_ms: float
    parts: dict[str, Spread]
    beside: dict[str, Spread] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Row:
    """One engine, file and test. tok/s counts the test's tokens: those of the prompt, or generated
    ones.
    """

    engine: str  # "qsf", "llama.cpp" or the name of a llama-bench
    shape: str
    type: str  # such as "4bit" or "Q4_K_M"
    bits_per_weight: float  # all tensors
    file_bytes: int
    threads: int
    test: str  # "pp512", "tg128"
    depth: int
    budget_mb: int | None  # --ram-budget; None: none, or a baseline, which has no budget
    tok_per_s: Spread
    peak_rss_bytes: int  # the most of all rounds, by the kernel's count
    fraction_of_limit: float | None  # median over limit_tok_per_s; None: no limit is known
    limited_by: str = ""  # "memory", "disk", "arithmetic"
    limit_tok_per_s: float | None = None
    bytes_per_token: int | None = (
        None  # bytes that a token (pp: a pass) needs of weights and KV cache
    )
    gb_per_s: float | None = None  # tok/s times the bytes from the limiting source
    read_bytes_per_token: float | None = None  # from the disk, by the kernel's count
    expert_hits: float | None = None  # share of the chosen experts that were in memory
    kv_type: str = ""
    io: str = ""
    file: str = ""  # name without folder
    version: str = ""
    kernels: str = ""
    n_weights: int = 0
    cap: Cap | None = None
    breakdown: Breakdown | None = None
    load_seconds: float | None = None

    @property
    def label(self) -> str:
        """Engine, type, test and setting in words, without the shape."""
        test = f"{self.test} @ {self.depth}" if self.depth else self.test
        cap_mb = self.cap.limit_mb if self.cap else None
        setting = setting_words(self.threads, self.budget_mb, cap_mb)
        return f"{self.engine}, {self.type}, {test}, {setting}"

    @property
    def above_limit(self) -> str:
        """A sentence if the row is faster than its limit, so it has no share of it; else ""."""
        if self.fraction_of_limit is None or self.fraction_of_limit <= 1:
            return ""
        return _ABOVE_LIMIT.get(self.limited_by, "the machine became faster").format(
            mb=self.file_bytes / 2**20
        )

    @property
    def share_of_limit(self) -> str:
        """The share of the limit, at most 100 %, or a word such as "cached"; "": unknown."""
        if self.fraction_of_limit is None:
            return ""
        if self.above_limit:
            return "faster" if self.limited_by == "arithmetic" else "cached"
        return f"{100 * self.fraction_of_limit:.0f} %"


_ABOVE_LIMIT = {
    "disk": "faster than the disk as it was measured: the page cache holds streamed weights",
    "memory": "faster than memory as it was measured: of a file of {mb:,.0f} MB the processor's "
    "caches hold much, and memory is no limit",
    "arithmetic": "the processor is faster than when its limit was measured",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio(Spread):
    """The ratio of tok/s of rows[row] to rows[vs], round by round."""

    row: int
    vs: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A process without figures."""

    engine: str
    file: str
    what: str  # the test's setting, such as "2 threads, cgroup 300 MB"
    why: str
    n_times: int = 1


@dataclass(frozen=True, slots=True)
class Results:
    """The results of one run. ``machine``: see `machine.describe`; its values are JSON's."""

    machine: dict[str, Any]
    limits: Limits
    rows: list[Row]
    ratios: list[Ratio]
    failures: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # notes for readers, a sentence each
    settings: dict[str, Any] = field(default_factory=dict)  # command line, rounds, ...

    def as_json(self) -> dict[str, Any]:
        """Return the results as JSON's types."""
        return {"format": FORMAT} | asdict(self)


def write(results: Results, path: Path, *, overwrite: bool) -> None:
    """Write the JSON atomically. Raises QsfError."""
    from qsf.shell.output import write_text

    write_text(path, json.dumps(results.as_json(), indent=1) + "\n", overwrite=overwrite)


def read(path: Path) -> Results:
    """Return the results that `write` wrote. Raises QsfIOError, QsfFormatError."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise QsfIOError(f"{path}: {error.strerror}") from error
    try:
        if len(raw) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES:,} bytes")
        record = json.loads(raw.decode("utf-8"))
        if not isinstance(record, dict) or record.pop("format", None) != FORMAT:
            raise ValueError(f'"format" is not {FORMAT}')
        return _results(record)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise QsfFormatError(f"{path} is not a result of python -m qsf.bench: {error}") from error


def _results(record: dict[str, Any]) -> Results:
    results: Results = _record(Results, record)
    n_rows = len(results.rows)
    for ratio in results.ratios:
        if not (0 <= ratio.row < n_rows and 0 <= ratio.vs < n_rows):
            raise ValueError(f"a ratio of rows {ratio.row} and {ratio.vs}, there are {n_rows}")
    return results


_HINTS = {
    kind: typing.get_type_hints(kind)
    for kind in (Spread, Breakdown, Cap, Row, Ratio, Failure, Limits, Results)
}


def _record(kind: type[Any], record: dict[str, Any]) -> Any:
    """Return a record of ``kind``; keys of other versions are left out."""
    hints = _HINTS[kind]
    values = {name: _value(hints[name], record[name], name) for name in hints if name in record}
    return kind(**values)  # a TypeError names the missing fields


def _value(hint: Any, value: Any, name: str) -> Any:
    """Return a JSON value as the type of a record's field. Raises ValueError, TypeError."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:  # always of something and None
        return None if value is None else _value(arguments[0], value, name)
    if hint is Any:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    wanted = dict if dataclasses.is_dataclass(hint) else origin or hint
    is_number = not isinstance(value, float) or math.isfinite(value)
    if not isinstance(value, wanted) or isinstance(value, bool) or not is_number:
        raise ValueError(f"{name} is {str(value)[:40]!r}, expected {wanted.__name__}")
    if dataclasses.is_dataclass(hint):
        return _record(typing.cast("type[Any]", hint), value)
    if origin is list:
        return [_value(arguments[0], item, name) for item in value]
    if origin is dict:
        return {key: _value(arguments[1], item, key) for key, item in value.items()}
    return value
