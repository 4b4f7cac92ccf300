"""Writes units into a file, and records the conversion in META: tensors, options, the source.

META is JSON for people: where the weights came from, what made the file and how well the stored
weights match the source. It contains no time and no path, so that the same input gives the same
file.

The types for a target size depend on the size of META, which is not known before rounding:
`section_bytes` gives an upper bound.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata as package_metadata
from typing import Any, Final

import numpy as np

from qsf.file.blocks import pack_tokenizer
from qsf.file.layout import (
    OUTLIERS_OF,
    Compression,
    Dtype,
    Layout,
    Role,
    TensorType,
    dtype_name,
)
from qsf.file.writer import Writer
from qsf.report.record import EXACT, ROUNDED, Evaluation, LayerReport, Quality, TensorReport
from qsf_converter.calibrate.calibration import FEEDBACK
from qsf_converter.calibrate.changes import TAG, most_bytes
from qsf_converter.calibrate.sensitivity import Divergence, Sensitivity
from qsf_converter.calibrate.texts import CalibrationText
from qsf_converter.calibrate.transforms import ROTATED, SCALED
from qsf_converter.costs import Costs
from qsf_converter.request import AUTO, Request
from qsf_converter.rounding.compression import StoredLayers
from qsf_converter.rounding.outliers import TABLE_ACTION
from qsf_converter.rounding.pieces import (
    OutlierTable,
    RoundedTensor,
    RoundedUnit,
    with_outlier_tables,
)
from qsf_converter.rounding.plan import KEEP, QUANT_TYPES, Plan, PlannedUnit, Target
from qsf_converter.rounding.quantisers import ErrorSums
from qsf_converter.sources.families.rules import Place
from qsf_converter.sources.source import Source

LOSSLESS: Final = "lossless ternary"
KEY_EXPONENTS: Final = "key_exponents"  # of META: what `key_channels` did to rows of K and Q
_PROTOCOL: Final = "windows"  # META's name of samples without overlap

# The longest values that META can have, for an upper bound of its size.
_LONGEST_TYPE: Final = max(QUANT_TYPES, key=len)
_LONGEST_ACTION: Final = f"{ROTATED}, {SCALED}, {FEEDBACK}"
_LONGEST_NUMBER: Final = -1.2345e-100  # the longest number with five digits
_LARGEST_COUNT: Final = 1 << 48
_COMPRESSION_BYTES: Final = 2048  # for the costs of its arithmetic


def meta_bytes(
    source: Source,
    request: Request,
    plan: Plan,
    quality: Quality,
    stored: StoredLayers,
    costs: Costs,
) -> bytes:
    types = (plan.layer_dtype, plan.embedding_dtype)
    compression = stored.meta()
    more = {} if compression is None else {"compression": compression}
    # The digest is of the tensors as they were read: no second read, the same for any sharding.
    digest = source.checkpoint.digest()
    return _packed(source, request, types, quality, digest, plan, {**more, **costs})


def _packed(
    source: Source,
    request: Request,
    types: tuple[Dtype, Dtype],
    quality: Quality,
    digest: str,
    plan: Plan,
    more: Mapping[str, Any],
) -> bytes:
    exponents = {  # of layers where they are not 0; those of Q follow from them
        str(t.unit.layer): list(t.exponents)
        for t in plan.targets
        if t.rule.target == TensorType.K and any(t.exponents)
    }
    origin = source.origin
    kinds = {KEEP: origin.type_name, AUTO: AUTO}  # by the name that users know
    type_name = kinds.get(request.layer_type)
    layers, embeddings = map(dtype_name, types)
    options = {**request.meta_options(), "quant_type": layers, "embed_type": embeddings}
    meta = {
        "source": {
            "name": origin.name,
            "architecture": source.family.name,
            **({"type": type_name} if type_name else {}),
            "config_sha256": origin.config_sha256,
            "weights_sha256": digest,
            **({} if origin.stored is None else {"stored": origin.stored}),
        },
        "converter": {"name": "qsf-convert", "version": _version(), "options": options},
        "quality": quality.meta(),
        "licence": origin.licence,
        KEY_EXPONENTS: exponents,
        **({"adapters": [a.meta() for a in source.adapters]} if source.adapters else {}),
        **more,
    }
    return json.dumps(meta, ensure_ascii=False).encode()


def _version() -> str:
    try:
        return package_metadata.version("qsf")
    except package_metadata.PackageNotFoundError:
        return "unknown"


def section_bytes(
    source: Source, request: Request, plan: Plan, text: CalibrationText | None
) -> dict[str, int]:
    """Return upper bounds of the sections that do not follow from the plan, in file order."""
    longest = _LONGEST_NUMBER
    targets = {target.name: target for target in plan.targets}  # experts of a layer count once
    tensors = tuple(map(_longest_report, targets.values()))
    layers = tuple(
        LayerReport(layer, longest, longest, longest) for layer in range(plan.facts.header.n_layers)
    )
    quality = Quality(tensors, layers)
    sizes = {} if source.tokenizer is None else {"TOKN": len(pack_tokenizer(source.tokenizer))}
    if text is not None:
        numbers = (longest,) * 5
        counts = (_LARGEST_COUNT, _LARGEST_COUNT)
        evaluation = Evaluation(text.evaluation_name, *counts, _PROTOCOL, *numbers)
        quality = Quality(tensors, layers, evaluation, text.meta())
        sizes[TAG] = most_bytes(
            {
                (t.unit.layer, t.rule.target): t.n_cols
                for t in plan.targets
                if t.is_matrix and t.unit.role == Role.LAYER and t.rule.target is not None
            }
        )
    types = (QUANT_TYPES[_LONGEST_TYPE],) * 2
    meta = _packed(source, request, types, quality, "0" * 64, plan, {})
    return {**sizes, "CHAT": len(source.chat), "META": len(meta) + _COMPRESSION_BYTES}


def _longest_report(target: Target) -> TensorReport:
    longest = _LONGEST_NUMBER
    return TensorReport(
        name=target.name,
        source=target.source.name,
        type=_LONGEST_TYPE,
        n_rows=target.n_rows,
        n_cols=target.n_cols,
        bits_per_weight=12.345,
        mse=longest,
        max_error=longest,
        cosine=longest,
        relative_error=longest,
        outliers=longest,
        action=_LONGEST_ACTION,
        output_error=longest,
    )


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    target: Target
    errors: ErrorSums
    action: str | None
    output_error: float | None

    def report(self) -> TensorReport:
        target, errors = self.target, self.errors
        return TensorReport(
            name=target.name,
            source=target.source.name,
            type=dtype_name(target.dtype),
            n_rows=target.n_rows,
            n_cols=target.n_cols,
            bits_per_weight=target.n_bytes * 8 / (target.n_rows * target.n_cols),
            mse=errors.mse,
            max_error=errors.max_error,
            cosine=errors.cosine,
            relative_error=_relative_error(errors),
            outliers=None if target.outliers is None else target.outliers.near_fraction,
            action=_action(target, errors, self.action),
            output_error=self.output_error,
        )


def report_of_experts(experts: Sequence[WrittenTensor]) -> TensorReport:
    errors = ErrorSums()
    for written in experts:
        errors.add(written.errors)
    fed = [written.output_error for written in experts if written.action == FEEDBACK]
    output_error = None
    if fed:
        output_error = sum(error for error in fed if error is not None) / len(fed)
    action = FEEDBACK if fed else None
    if 0 < len(fed) < len(experts):
        action = f"{FEEDBACK}, {len(experts) - len(fed)} of {len(experts)} {ROUNDED}"
    joined = WrittenTensor(experts[0].target, errors, action, output_error).report()
    return dataclasses.replace(joined, n_rows=joined.n_rows * len(experts))


def _action(target: Target, errors: ErrorSums, action: str | None) -> str:
    action = action or (EXACT if errors.max_error == 0 else ROUNDED)
    if action == EXACT and target.is_ternary:
        action = LOSSLESS
    if target.outliers is not None and target.outliers.action in (TABLE_ACTION, "more bits"):
        return f"{action}, {target.outliers.action}"
    return action


def _relative_error(errors: ErrorSums) -> float | None:
    """The root of (squared error / squared weights); 0 if all weights are 0."""
    if errors.squared_error == 0:
        return 0.0
    if errors.source_energy == 0:
        return None
    return math.sqrt(errors.squared_error / errors.source_energy)


def layer_reports(sensitivity: Sensitivity | None) -> tuple[LayerReport, ...]:
    if sensitivity is None:
        return ()
    return tuple(
        LayerReport(
            layer.layer, sensitivity.importance(layer.layer), layer.cosine, layer.kl_skipped
        )
        for layer in sensitivity.layers
    )


def evaluation(text: CalibrationText, divergence: Divergence) -> Evaluation:
    original, rounded = divergence.perplexities
    kl = divergence.kl
    return Evaluation(
        text=text.evaluation_name,
        tokens=divergence.n_tokens,
        ctx_tokens=text.held_out.shape[1],
        protocol=_PROTOCOL,
        perplexity=rounded,
        perplexity_original=original,
        kl_mean=float(kl.mean()),
        kl_p99=float(np.quantile(kl, 0.99)),
        top1_agreement=divergence.top1_agreement,
    )


class UnitWriter:
    """Writes the units of a model in file order.

    Args:
        writer: of the file.
        stored: records how each layer is stored, and has their compression.
        sensitivity: gives the importance of each layer; None: all are equally important.
        progress: called with the source bytes of each piece that is written.
    """

    def __init__(
        self,
        writer: Writer,
        stored: StoredLayers,
        sensitivity: Sensitivity | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._writer = writer
        self._stored = stored
        self._sensitivity = sensitivity
        self._progress = progress or (lambda _n_bytes: None)
        self._positions = bytearray()

    def write(self, units: Iterable[RoundedUnit]) -> tuple[TensorReport, ...]:
        reports: list[TensorReport] = []
        experts: dict[str, list[WrittenTensor]] = {}  # by name; experts of a layer share one
        for unit in units:
            if unit.unit.place is Place.POSITIONS:
                written_here = [self._write_pieces(t, self._positions.extend) for t in unit.tensors]
                reports += [written.report() for written in written_here]
                continue
            self._begin(unit.unit, unit.importance)
            for tensor in with_outlier_tables(unit):
                if isinstance(tensor, OutlierTable):
                    self._write_table(tensor)
                    continue
                written = self._write_tensor(tensor)
                if unit.unit.id.role != Role.EXPERT:
                    reports.append(written.report())
                else:
                    experts.setdefault(tensor.target.name, []).append(written)
            self._end(unit.unit)
        reports += map(report_of_experts, experts.values())
        if self._positions:
            self._writer.add_section("WPOS", bytes(self._positions), required=True)
        return tuple(reports)

    def _begin(self, unit: PlannedUnit, importance: float) -> None:
        if unit.id.role == Role.LAYER and self._sensitivity is not None:
            importance = self._sensitivity.importance(unit.id.layer)
        is_layer = unit.place is Place.LAYER
        compression = self._stored.compression if is_layer else Compression.NONE
        self._writer.begin_unit(
            unit.id, dtype=unit.dtype, importance=importance, compression=compression
        )

    def _end(self, unit: PlannedUnit) -> None:
        stored = self._writer.end_unit()
        if unit.place is Place.LAYER:
            self._stored.note(stored)

    def _write_tensor(self, tensor: RoundedTensor) -> WrittenTensor:
        target = tensor.target
        assert target.rule.target is not None  # only learned positions have no type
        layout = Layout.VECTOR if target.is_vector else Layout.TILES
        self._writer.begin_tensor(
            target.rule.target, target.n_rows, target.n_cols, target.dtype, layout
        )
        written = self._write_pieces(tensor, self._writer.write)
        self._writer.end_tensor()
        return written

    def _write_pieces(
        self, tensor: RoundedTensor, write: Callable[[bytes], object]
    ) -> WrittenTensor:
        target = tensor.target
        errors = ErrorSums()
        output_error = None
        for rounded in tensor.pieces:
            write(rounded.data)
            errors.add(rounded.errors)
            output_error = rounded.output_error
            self._progress(target.source_bytes * rounded.piece.n_rows // target.n_rows)
        return WrittenTensor(target, errors, tensor.action, output_error)

    def _write_table(self, table: OutlierTable) -> None:
        matrix, packed = table.matrix, table.packed
        assert matrix.rule.target is not None  # a matrix
        self._writer.begin_tensor(
            OUTLIERS_OF[matrix.rule.target],
            matrix.n_rows,
            matrix.n_cols,
            Dtype.F16,
            Layout.OUTLIERS,
            n_entries=packed.n_entries,
        )
        self._writer.write(packed.data)
        self._writer.end_tensor()
