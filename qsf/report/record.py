"""The section META of a file, and the quality report in it: losses of tensors, measurements.

The report is the object "quality" (docs/evaluation.md, "The report in the file"). `Quality.meta`
writes it, `Quality.from_meta` reads it from an untrusted file: it never raises, and returns
neither numbers that are not finite nor absurd counts.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from qsf.foreign_json import JsonError, read_json
from qsf.kv import parse_kv_type

if TYPE_CHECKING:
    from qsf.file.reader import Reader


ROUNDED = "rounded"  # to the nearest that its type can hold
EXACT = "exact"  # stored without any loss

_MAX_TENSORS = 20_000  # of a file; a model of 126 layers with 16 tensors each has 2,000
_MAX_LAYERS = 2_000
_MAX_FACTS = 32
_MAX_TEXT = 200  # characters
_MAX_COUNT = 1 << 48
_MAX_NUMBER = 1e30

_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class TensorReport:
    """The loss of one tensor, [n_rows, n_cols]; None: not measured.

    ``relative_error`` is the root of (squared error / squared weights), ``outliers`` the fraction
    of the weights more than three standard deviations from their mean, ``output_error`` the
    squared error of its outputs on the calibration text, relative to the squared outputs.
    """

    name: str
    source: str
    type: str
    n_rows: int
    n_cols: int
    bits_per_weight: float
    mse: float
    max_error: float
    cosine: float
    relative_error: float | None = None
    outliers: float | None = None
    action: str = ROUNDED
    output_error: float | None = None

    @property
    def n_weights(self) -> int:
        return self.n_rows * self.n_cols

    @property
    def n_bytes(self) -> float:
        return self.bits_per_weight * self.n_weights / 8

    @property
    def error(self) -> float:
        """The relative error; computed from the cosine for files that do not state it."""
        if self.relative_error is not None:
            return self.relative_error
        return math.sqrt(max(0.0, 1.0 - self.cosine * self.cosine))

    @property
    def layer(self) -> int | None:
        """The layer from the tensor's name: 3 for ``3.FFN_DOWN``, None for ``EMBEDDING``."""
        head, dot, _ = self.name.partition(".")
        is_number = dot and head.isascii() and head.isdigit() and len(head) < 9
        return int(head) if is_number else None

    @property
    def kind(self) -> str:
        """The tensor's name within its layer: ``FFN_DOWN``."""
        return self.name if self.layer is None else self.name.partition(".")[2]


@dataclass(frozen=True, slots=True)
class LayerReport:
    """The effect of a layer on the calibration text; None: not measured.

    ``importance`` is that of the file's layer index, ``cosine`` compares the hidden states before
    and after the layer, ``kl_skipped`` the mean KL divergence, in nats, of the model without it.
    """

    layer: int
    importance: float
    cosine: float | None = None
    kl_skipped: float | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The file compared with its original on a text outside of the calibration; KL in nats."""

    text: str
    tokens: int
    ctx_tokens: int
    protocol: str
    perplexity: float
    perplexity_original: float | None = None
    kl_mean: float | None = None
    kl_p99: float | None = None
    top1_agreement: float | None = None

    @property
    def increase(self) -> float | None:
        """Relative increase of the perplexity over the original's: 0.01 is 1 %."""
        if self.perplexity_original is None or self.perplexity_original <= 0:
            return None
        return self.perplexity / self.perplexity_original - 1


@dataclass(frozen=True, slots=True)
class TypeSum:
    """Sums over the tensors of one type; ``cosine`` is the mean weighted by size."""

    type: str
    n_tensors: int
    n_weights: int
    n_bytes: float
    cosine: float

    @property
    def bits_per_weight(self) -> float:
        return self.n_bytes * 8 / self.n_weights


@dataclass(frozen=True, slots=True)
class Quality:
    """The quality report: how well a file matches its original.

    ``calibration`` holds texts and numbers: text, sha256, tokens, samples and so on.
    ``n_unreadable`` counts malformed entries of a file's report.
    """

    tensors: tuple[TensorReport, ...]
    layers: tuple[LayerReport, ...] = ()
    evaluation: Evaluation | None = None
    calibration: Mapping[str, Any] | None = None
    n_unreadable: int = 0

    def meta(self) -> dict[str, Any]:
        """Return the object for META; last digits, which differ by machine, are rounded away."""
        meta: dict[str, Any] = {"tensors": [_rounded(dataclasses.asdict(t)) for t in self.tensors]}
        if self.layers:
            meta["layers"] = [_rounded(dataclasses.asdict(layer)) for layer in self.layers]
        if self.evaluation is not None:
            meta["evaluation"] = _rounded(dataclasses.asdict(self.evaluation))
        if self.calibration is not None:
            meta["calibration"] = _rounded(self.calibration)
        return meta

    @classmethod
    def from_meta(cls, meta: object) -> Quality | None:
        """Return the report in ``meta``, or None."""
        if not isinstance(meta, dict):
            return None
        tensors, n_bad_tensors = _read_list(TensorReport, meta.get("tensors"), _MAX_TENSORS)
        layers, n_bad_layers = _read_list(LayerReport, meta.get("layers"), _MAX_LAYERS)
        if not tensors:
            return None
        n_unreadable = n_bad_tensors + n_bad_layers
        evaluation = None
        if meta.get("evaluation") is not None:
            evaluation = _read(Evaluation, meta["evaluation"])
            n_unreadable += evaluation is None
        facts = meta.get("calibration")
        return cls(
            tensors=tuple(tensors),
            layers=tuple(layers),
            evaluation=evaluation,
            calibration=_read_facts(facts) if isinstance(facts, dict) else None,
            n_unreadable=n_unreadable,
        )

    @property
    def n_weights(self) -> int:
        return sum(tensor.n_weights for tensor in self.tensors)

    def worst(self, n: int) -> tuple[TensorReport, ...]:
        return tuple(sorted(self.tensors, key=lambda tensor: tensor.cosine)[:n])

    def least_important(self, n: int) -> tuple[LayerReport, ...]:
        return tuple(sorted(self.layers, key=lambda layer: layer.importance)[:n])

    def actions(self) -> tuple[tuple[str, int], ...]:
        """The treatments and how many tensors got each, most frequent first."""
        counts = Counter(tensor.action for tensor in self.tensors)
        return tuple(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    def by_type(self) -> tuple[TypeSum, ...]:
        groups: dict[str, list[TensorReport]] = {}
        for tensor in self.tensors:
            groups.setdefault(tensor.type, []).append(tensor)
        sums = [
            TypeSum(
                type=name,
                n_tensors=len(group),
                n_weights=(n_weights := sum(t.n_weights for t in group)),
                n_bytes=math.fsum(t.n_bytes for t in group),
                cosine=math.fsum(t.cosine * (t.n_weights / n_weights) for t in group),
            )
            for name, group in groups.items()
        ]
        return tuple(sorted(sums, key=lambda entry: (-entry.n_bytes, entry.type)))


@dataclass(frozen=True, slots=True)
class Report:
    """Counts of a conversion."""

    quality: Quality
    warnings: tuple[str, ...]
    n_weights: int
    source_bytes: int
    file_bytes: int
    elapsed_s: float
    compression: str | None = None  # one line: the compression of the layers, if it was requested
    notes: tuple[str, ...] = ()  # lines: unchanged parts; measured defaults of arithmetic

    @property
    def tensors(self) -> tuple[TensorReport, ...]:
        return self.quality.tensors

    @property
    def bits_per_weight(self) -> float:
        """Bits of the whole file for each weight."""
        return self.file_bytes * 8 / self.n_weights

    def worst(self, n: int) -> tuple[TensorReport, ...]:
        return self.quality.worst(n)


# ---- META: numbers in ----


def _rounded(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Rounded to five digits, so that machines agree; NaN and infinity become null."""
    return {name: _round(value) for name, value in fields.items()}


def _round(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None


# ---- META: numbers out of a file, which may hold anything ----


# Least and most of a number that a file may state; of other numbers, 0 .. _MAX_NUMBER.
_RANGES: Mapping[str, tuple[float, float]] = {
    "n_rows": (1, _MAX_COUNT),
    "n_cols": (1, _MAX_COUNT),
    "bits_per_weight": (0.01, 1024),
    "cosine": (-1, 1),
    "outliers": (0, 1),
    "importance": (-_MAX_NUMBER, _MAX_NUMBER),
    "kl_skipped": (-_MAX_NUMBER, _MAX_NUMBER),
    "kl_mean": (-1, _MAX_NUMBER),
    "kl_p99": (-1, _MAX_NUMBER),
    "top1_agreement": (0, 1),
}
_MAY_LACK = {"source": "", "text": "", "protocol": ""}  # of older files


def _read(kind: type[_Record], entry: object) -> _Record | None:
    """Return a record of the values of a JSON object, or None if one of them is malformed."""
    if not isinstance(entry, dict):
        return None
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cast("type[Any]", kind)):
        value: Any = entry.get(field.name)
        if value is None and field.default is not dataclasses.MISSING:
            continue
        value = _MAY_LACK.get(field.name) if value is None else value
        if field.type == "str":
            if not isinstance(value, str):
                return None
            values[field.name] = value[:_MAX_TEXT]
            continue
        is_count = field.type == "int"
        least, most = _RANGES.get(field.name, (0, _MAX_COUNT if is_count else _MAX_NUMBER))
        # True is an int; the comparison is false for NaN
        if type(value) not in ((int,) if is_count else (int, float)) or not least <= value <= most:
            return None
        values[field.name] = value if is_count else float(value)
    return kind(**values)


def _read_list(kind: type[_Record], entries: object, most: int) -> tuple[list[_Record], int]:
    if entries is None:
        return [], 0
    if not isinstance(entries, list):
        return [], 1
    records = [_read(kind, entry) for entry in entries[:most]]
    done = [record for record in records if record is not None]
    return done, len(entries) - len(done)


def _read_facts(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the texts and numbers of a calibration, shortened."""
    facts: dict[str, Any] = {}
    for name, value in list(entry.items())[:_MAX_FACTS]:
        if isinstance(value, str):
            facts[name[:_MAX_TEXT]] = value[:_MAX_TEXT]
        elif type(value) in (int, float) and abs(value) <= _MAX_NUMBER:
            facts[name[:_MAX_TEXT]] = value
    return facts


def read_meta(reader: Reader) -> dict[str, Any] | None:
    """Return the META object, or None if it is absent or malformed.

    NaN and infinity become None.
    """
    if "META" not in reader.sections:
        return None
    try:
        meta = read_json(
            reader.read_section("META"), parse_constant=lambda _: None, parse_float=_finite
        )
    except JsonError:
        return None
    return meta if isinstance(meta, dict) else None


_ACT_BITS: Final = (8, 16)


def cost_lines(meta: Mapping[str, Any] | None, *, with_kv_cache: bool = True) -> list[str]:
    """Return lines about the file's default arithmetic and its measured cost.

    Omits values that were not measured or are malformed.
    """
    lines = [
        _line_of(meta, "activations", "activations of {bits:d} bits: {measured:d} bits change")
    ]
    if with_kv_cache:
        lines.append(_line_of(meta, "kv_cache", "KV cache {type}: {measured} changes"))
    return [line for line in lines if line is not None]


def _line_of(meta: Mapping[str, Any] | None, name: str, begin: str) -> str | None:
    record: Any = (meta or {}).get(name)
    try:
        if name == "kv_cache":
            for kv_type in (record["type"], record["measured"]):
                parse_kv_type(kv_type)
        elif not {record["bits"], record["measured"]}.issubset(_ACT_BITS):
            return None
        return (
            f"{begin.format(**record)} perplexity by "
            f"{record['change_percent']:+.2f} % +- {record['change_error']:.2f} and the likeliest "
            f"token at {100 * (1 - record['agreement']):.1f} % of positions"
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _finite(digits: str) -> float | None:
    value = float(digits)
    return value if math.isfinite(value) else None
