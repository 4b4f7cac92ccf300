"""Writes units, their tensors and the pieces of these into a file, and reports every tensor."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Callable, Iterable

from qsf.file.layout import OUTLIERS_OF, Compression, Dtype, Layout, Role
from qsf.file.writer import Writer
from qsf.report.record import TensorReport
from qsf_converter.calibrate.sensitivity import Sensitivity
from qsf_converter.meta import WrittenTensor, report_of_experts
from qsf_converter.rounding.compression import StoredLayers
from qsf_converter.rounding.outlier_tables import OutlierTable, with_outlier_tables
from qsf_converter.rounding.pieces import RoundedTensor, RoundedUnit
from qsf_converter.rounding.plan import PlannedUnit
from qsf_converter.rounding.quantisers import ErrorSums
from qsf_converter.sources.families.rules import Place


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
