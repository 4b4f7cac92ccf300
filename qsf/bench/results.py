"""The results of a run: rows, ratios, the machine and its limits; and their JSON.

The keys are a contract with whoever reads the files; they are added to, never changed.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from qsf.errors import QsfFormatError, QsfIOError

FORMAT = 1  # of the JSON; files of another are refused


@dataclass(frozen=True, slots=True)
class Spread:
    """A median, and what lies around it. ``values`` are in the order of the rounds."""

    median: float
    min: float
    max: float
    values: list[float] = field(default_factory=list)


def spread_of(values: Sequence[float]) -> Spread:
    """Return the spread of at least one value."""
    return Spread(statistics.median(values), min(values), max(values), list(values))


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where the time of a token went, in milliseconds a token, medians over rounds.

    ``parts`` are one after the other and sum to ``wall_ms`` (within ``PARTS_TOLERANCE``);
    ``beside`` is other threads' work meanwhile.
    """

    wall_ms: float
    parts: dict[str, Spread]
    beside: dict[str, Spread] = field(default_factory=dict)


PARTS_TOLERANCE = 0.03


@dataclass(frozen=True, slots=True)
class Cap:
    """What the kernel counted of a memory control group; the worst of all rounds."""

    limit_mb: int
    peak_bytes: int | None  # of the group, page cache included
    n_oom_kills: int


@dataclass(frozen=True, slots=True)
class Quality:
    """How well a file predicts the text that was given."""

    perplexity: float
    mean_kl: float | None = None  # nats to the original; None: no original was given
    top1: float | None = None  # fraction of tokens where both have the same likeliest next one
    n_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One engine, file and test. tok/s count what the test counts: prompt or generated tokens."""

    engine: str  # "qsf" or "llama.cpp"
    shape: str
    type: str  # such as "4bit" or "Q4_K_M"
    bits_per_weight: float  # all tensors
    file_bytes: int
    threads: int
    test: str  # "pp512", "tg128"
    depth: int
    budget_mb: int | None  # --ram-budget; None: none, or the peer, which has none
    tok_per_s: Spread
    peak_rss_bytes: int  # the most of all rounds, by the kernel's count
    fraction_of_limit: float | None  # median over limit_tok_per_s; None: no limit is known
    limited_by: str = ""  # "memory", "disk", "arithmetic"
    limit_tok_per_s: float | None = None
    bytes_per_token: int | None = None  # that a token (pp: a pass) needs, of weights and KV cache
    gb_per_s: float | None = None  # tok/s * what of them comes from where limited_by says
    read_bytes_per_token: float | None = None  # from the disk, by the kernel's count
    kv_type: str = ""
    io: str = ""
    file: str = ""  # name without folder
    version: str = ""
    kernels: str = ""
    n_weights: int = 0
    cap: Cap | None = None
    breakdown: Breakdown | None = None
    engine_tok_per_s: float | None = None  # by the engine's own count; median
    quality: Quality | None = None
    load_seconds: float | None = None
    madds_per_token: float | None = None  # multiply-adds, of weights and attention

    @property
    def key(self) -> tuple[object, ...]:
        """What makes two rows of two results the same thing."""
        cap_mb = self.cap.limit_mb if self.cap else None
        return (
            *(self.engine, self.shape, self.type, self.threads, self.test, self.depth),
            *(self.budget_mb, cap_mb, self.kv_type),
        )

    @property
    def label(self) -> str:
        """The key in words, without the shape."""
        parts = [self.engine, self.type, self.test]
        if self.depth:
            parts[-1] += f" @ {self.depth}"
        parts.append(f"{self.threads} thread{'' if self.threads == 1 else 's'}")
        if self.budget_mb is not None:
            parts.append(f"budget {self.budget_mb} MB")
        if self.cap is not None:
            parts.append(f"cgroup {self.cap.limit_mb} MB")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Ratio:
    """tok/s of rows[row] in those of rows[vs], round by round."""

    row: int
    vs: int
    median: float
    min: float
    max: float
    values: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Failure:
    """A process that gave no figures."""

    engine: str
    file: str
    what: str  # the test's setting, such as "2 threads, cgroup 300 MB"
    why: str
    n_times: int = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine can do at most, measured before the rows.

    Keys of the first and last are numbers of threads, of the second how the disk was read, such
    as "direct x4" and "buffered x1".
    """

    memory_gb_per_s: dict[str, float] = field(default_factory=dict)
    disk_gb_per_s: dict[str, float] = field(default_factory=dict)
    gmadds_per_s: dict[str, float] = field(default_factory=dict)  # 10^9 8-bit multiply-adds

    @property
    def best_disk_gb_per_s(self) -> float | None:
        """By the best way of reading; None: not measured."""
        return max(self.disk_gb_per_s.values(), default=None)


@dataclass(frozen=True, slots=True)
class Results:
    """All of one run. ``machine``: see `machine.describe`; all of its values are JSON's."""

    machine: dict[str, Any]
    limits: Limits
    rows: list[Row]
    ratios: list[Ratio]
    failures: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what a reader must know, a sentence each
    settings: dict[str, Any] = field(default_factory=dict)  # command line, rounds, ...

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON's types."""
        return {"format": FORMAT} | asdict(self)


def write(results: Results, path: Path, *, overwrite: bool) -> None:
    """Write the JSON, complete or not at all. Raises QsfError."""
    from qsf.converter.output import write_text

    write_text(path, json.dumps(results.as_json(), indent=1) + "\n", overwrite=overwrite)


def read(path: Path) -> Results:
    """Return what `write` wrote. Raises QsfIOError, or QsfFormatError for anything else."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise QsfIOError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise QsfFormatError(f"{path} is not a result of python -m qsf.bench: {error}") from error
    try:
        known = json.loads(text)
        if not isinstance(known, dict) or known.pop("format", None) != FORMAT:
            raise ValueError(f'"format" is not {FORMAT}')
        return _results(known)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise QsfFormatError(f"{path} is not a result of python -m qsf.bench: {error}") from error


def _results(known: dict[str, Any]) -> Results:
    rows = [_row(row) for row in known["rows"]]
    ratios = [_record(Ratio, ratio) for ratio in known["ratios"]]
    for ratio in ratios:
        if not (0 <= ratio.row < len(rows) and 0 <= ratio.vs < len(rows)):
            raise ValueError(f"a ratio of rows {ratio.row} and {ratio.vs}, there are {len(rows)}")
    return Results(
        machine=dict(known["machine"]),
        limits=_record(Limits, known["limits"]),
        rows=rows,
        ratios=ratios,
        failures=[_record(Failure, failure) for failure in known.get("failures", [])],
        notes=[str(note) for note in known.get("notes", [])],
        settings=dict(known.get("settings", {})),
    )


def _record(kind: type[Any], known: dict[str, Any]) -> Any:
    """Return a record of ``kind``; keys of a later version are left out."""
    names = {f.name for f in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in known.items() if name in names})


def _row(known: dict[str, Any]) -> Row:
    parts: dict[str, Any] = {"tok_per_s": _record(Spread, known["tok_per_s"])}
    for name, kind in (("cap", Cap), ("quality", Quality)):
        if known.get(name) is not None:
            parts[name] = _record(kind, known[name])
    if known.get("breakdown") is not None:
        given = known["breakdown"]
        parts["breakdown"] = Breakdown(
            wall_ms=given["wall_ms"],
            parts={name: _record(Spread, s) for name, s in given["parts"].items()},
            beside={name: _record(Spread, s) for name, s in given.get("beside", {}).items()},
        )
    row: Row = _record(Row, known | parts)
    return row
