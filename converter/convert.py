"""Turns a HuggingFace model directory into one .qsf file.

Facts (what the checkpoint calls things) are in ``architectures``, mechanism (floats to tiles)
in ``quantisers``; here are the policy (which tensor gets which type) and the loop. The loop handles
pieces of about 32 MB of f32: this thread reads them, a few workers quantise them, this thread
writes them in order. What is under way at one time is bounded, so that memory does not grow
with the checkpoint.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsf.converter import metadata
from qsf.converter.architectures import Facts, Family, Place, TensorRule, family_of, read_facts
from qsf.converter.checkpoint import Checkpoint, RawArray, SourceTensor, to_float32
from qsf.converter.checkpoint_safetensors import SafetensorsCheckpoint
from qsf.converter.compression import AUTO, DEFAULT_COMPRESSION, Chooser, parse_compression
from qsf.converter.disk import read_bytes_per_s
from qsf.converter.output import check_not_a_source, check_output, check_space
from qsf.converter.quantisers import (
    F16_MAX,
    ErrorSums,
    UnrepresentableError,
    quantise_rows,
)
from qsf.converter.tiles import TILE_ROWS, tile_bytes
from qsf.errors import QsfArgumentError, QsfConversionError, QsfIOError
from qsf.format import Dtype, Layout, TensorType, Writer, dtype_name

QUANT_TYPES: Mapping[str, Dtype] = {
    dtype_name(dtype): dtype
    for dtype in (
        Dtype.Q2,
        Dtype.Q2_SYM,
        Dtype.Q3,
        Dtype.Q4,
        Dtype.Q4_SYM,
        Dtype.TERNARY,
        Dtype.TERNARY_DENSE,
        Dtype.Q8,
        Dtype.F16,
    )
}
LATER_QUANT_TYPES = ("mixed",)
DEFAULT_QUANT_TYPE = "4bit"
DEFAULT_EMBED_TYPE = "8bit"

_PIECE_BYTES = 32 << 20  # of f32
_IN_FLIGHT_BYTES = 128 << 20  # of f32; at least one piece
_SLAB_BYTES = 16 << 20  # of source rows, when columns are gathered
_MAX_POSITIONS_BYTES = 256 << 20  # the one tensor that is held whole
_MAX_THREADS = 4


@dataclass(frozen=True, slots=True)
class TensorReport:
    """What became of one tensor."""

    name: str
    source: str
    type: str
    n_rows: int
    n_cols: int
    bits_per_weight: float
    mse: float
    max_error: float
    cosine: float


@dataclass(frozen=True, slots=True)
class Report:
    """What a conversion did."""

    tensors: tuple[TensorReport, ...]
    warnings: tuple[str, ...]
    n_weights: int
    source_bytes: int
    file_bytes: int
    elapsed_s: float
    compression: str | None = None  # one line: what the layers got, if something was asked for

    @property
    def bits_per_weight(self) -> float:
        """Bits of the whole file for each weight."""
        return self.file_bytes * 8 / self.n_weights

    def worst(self, n: int) -> tuple[TensorReport, ...]:
        """The ``n`` quantised matrices that are least like their source."""
        return tuple(sorted(self.tensors, key=lambda tensor: tensor.cosine)[:n])


@dataclass(frozen=True, slots=True)
class Policy:
    """Which type a tensor gets."""

    layers: Dtype
    embeddings: Dtype

    def dtype_of(self, rule: TensorRule, *, is_vector: bool) -> Dtype:
        """Vectors are f32, position rows f16; the head counts as an embedding."""
        if rule.place is Place.POSITIONS:
            return Dtype.F16
        if is_vector:
            return Dtype.F32
        return self.layers if rule.place is Place.LAYER else self.embeddings


@dataclass(frozen=True, slots=True)
class _Target:
    """One tensor of the file: [n_rows, n_cols], made of source rows (or columns) from first_row."""

    rule: TensorRule
    source: SourceTensor
    unit_idx: int
    n_rows: int
    n_cols: int
    first_row: int
    dtype: Dtype
    is_vector: bool

    @property
    def n_bytes(self) -> int:
        if self.rule.place is Place.POSITIONS:
            return self.n_rows * self.n_cols * 2
        if self.is_vector:
            return self.n_cols * 4
        return tile_bytes(self.dtype, self.n_rows, self.n_cols)

    @property
    def source_bytes(self) -> int:
        return self.source.n_bytes // self.rule.n_parts


@dataclass(frozen=True, slots=True)
class _Plan:
    """Everything that was decided before the first weight is read."""

    facts: Facts
    family: Family
    targets: tuple[_Target, ...]
    warnings: tuple[str, ...]

    @property
    def source_bytes(self) -> int:
        return sum(target.source_bytes for target in self.targets)

    @property
    def n_bytes(self) -> int:
        return sum(target.n_bytes for target in self.targets)

    @property
    def largest_layer_bytes(self) -> int:
        layers: dict[int, int] = {}
        for target in self.targets:
            if target.rule.place is Place.LAYER:
                layers[target.unit_idx] = layers.get(target.unit_idx, 0) + target.n_bytes
        return max(layers.values())


@dataclass(slots=True)
class _Piece:
    """Rows [start, stop) of a target."""

    target: _Target
    start: int
    stop: int
    errors: ErrorSums = field(default_factory=ErrorSums)

    @property
    def float_bytes(self) -> int:
        return (self.stop - self.start) * self.target.n_cols * 4


def parse_quant_type(name: str, *, option: str = "quant type") -> Dtype:
    """Return the type called ``name``.

    Raises QsfArgumentError for a type that is planned and for any other name.
    """
    if name in QUANT_TYPES:
        return QUANT_TYPES[name]
    available = f"available: {', '.join(QUANT_TYPES)}"
    if name in LATER_QUANT_TYPES:
        raise QsfArgumentError(f"{option} {name} is not available yet; {available}")
    raise QsfArgumentError(f"{option} {name} is unknown; {available}")


def convert(
    model_dir: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    quant_type: str = DEFAULT_QUANT_TYPE,
    embed_type: str | None = None,
    compress: str = DEFAULT_COMPRESSION,
    disk_bytes_per_s: float | None = None,
    overwrite: bool = False,
    n_threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Convert the model in ``model_dir`` to the file ``out``; return what was done.

    ``quant_type`` is for the matrices of the layers, ``embed_type`` for the embeddings and the
    head (default 8bit, or f16 if ``quant_type`` is). ``compress`` is for the layers: none, lz4,
    lz4hc, zstd, or auto, which compresses those that are read faster so, on a disk of
    ``disk_bytes_per_s`` (default: measured where ``out`` will be). ``progress`` is called with
    the source bytes done and in all. ``out`` appears complete or not at all.

    Raises QsfConversionError when the model cannot be converted, QsfIOError when the system
    refuses to read or write, QsfArgumentError when ``out`` exists and ``overwrite`` is false,
    QsfUnsupportedError when the package for the compression is not installed.
    """
    started = time.monotonic()
    source_dir, out_path = Path(model_dir), Path(out)
    policy = _policy(quant_type, embed_type)
    parse_compression(compress)
    if disk_bytes_per_s is not None and not (compress == AUTO and 0 < disk_bytes_per_s < math.inf):
        raise QsfArgumentError("the disk's speed is for compression auto, and above zero")
    check_output(out_path, overwrite=overwrite)
    config = _read_config(source_dir)
    family = family_of(config)
    ids = metadata.token_ids(metadata.generation_config(source_dir))
    facts = read_facts(family, {**config, **ids, **metadata.token_ids(config)})
    with SafetensorsCheckpoint(source_dir) as checkpoint:
        check_not_a_source(out_path, (*checkpoint.paths, *source_dir.glob("*.json")))
        plan = _plan(family, facts, checkpoint, policy)
        tokenizer = metadata.tokenizer_bytes(source_dir)
        chat = metadata.chat_bytes(source_dir, config)
        warnings = list(plan.warnings)
        if tokenizer is None:
            warnings.append("no tokenizer.json: the file can only be run on token ids")
        # A layer is compressed behind itself.
        is_packing = compress != DEFAULT_COMPRESSION
        needed_bytes = plan.n_bytes + (plan.largest_layer_bytes if is_packing else 0)
        check_space(out_path, _least_bytes(plan) if is_packing else needed_bytes)
        chooser = _chooser(compress, disk_bytes_per_s, out_path, checkpoint)
        header = dataclasses.replace(facts.header, dtype=policy.layers)
        try:
            with Writer(
                out_path,
                header,
                plan.facts.arch,
                needed_bytes=needed_bytes,
                n_threads=n_threads,
            ) as writer:
                pieces = _quantised_pieces(plan, checkpoint, n_threads)
                with contextlib.closing(pieces):
                    reports = _write_pieces(writer, plan, pieces, policy, chooser, progress)
                if tokenizer is not None:
                    writer.add_section("TOKN", tokenizer)
                writer.add_section("CHAT", chat)
                meta = metadata.meta_bytes(
                    source_dir,
                    architecture=family.name,
                    weights_sha256=checkpoint.digest(),
                    options={
                        "quant_type": dtype_name(policy.layers),
                        "embed_type": dtype_name(policy.embeddings),
                    },
                    quality={"tensors": [_rounded(report) for report in reports]},
                    compression=chooser.meta(),
                )
                writer.add_section("META", meta)
            file_bytes = out_path.stat().st_size
        except QsfIOError:
            raise
        except OSError as error:
            raise QsfIOError(f"{out_path}: {error.strerror or error}") from error
    return Report(
        tensors=tuple(reports),
        warnings=(*warnings, *chooser.warnings),
        n_weights=sum(target.n_rows * target.n_cols for target in plan.targets),
        source_bytes=plan.source_bytes,
        file_bytes=file_bytes,
        elapsed_s=time.monotonic() - started,
        compression=chooser.summary(),
    )


def _chooser(
    compress: str, disk_bytes_per_s: float | None, out: Path, checkpoint: Checkpoint
) -> Chooser:
    is_given = disk_bytes_per_s is not None
    if compress == AUTO and not is_given:
        disk_bytes_per_s = read_bytes_per_s(out.absolute().parent, checkpoint.paths)
    return Chooser(compress, disk_bytes_per_s, is_given=is_given)


def _policy(quant_type: str, embed_type: str | None) -> Policy:
    layers = parse_quant_type(quant_type)
    if embed_type is None:
        embed_type = "f16" if layers is Dtype.F16 else DEFAULT_EMBED_TYPE
    return Policy(layers, parse_quant_type(embed_type, option="embed type"))


def _least_bytes(plan: _Plan) -> int:
    """Return what a compressed file needs at least: how far its layers shrink is not known."""
    layers = sum(target.n_bytes for target in plan.targets if target.rule.place is Place.LAYER)
    return plan.n_bytes - layers + plan.largest_layer_bytes


def _read_config(model_dir: Path) -> dict[str, Any]:
    if not model_dir.exists():
        raise QsfIOError(f"{model_dir}: no such directory")
    if not model_dir.is_dir():
        raise QsfConversionError(f"{model_dir}: a model directory is expected, not a file")
    config = metadata.read_json_object(model_dir / "config.json")
    if config is None:
        raise QsfConversionError(f"{model_dir}: no config.json; is it a HuggingFace model?")
    return config


def _plan(family: Family, facts: Facts, checkpoint: Checkpoint, policy: Policy) -> _Plan:
    """Match rules with tensors; check every name and shape before any weight is read."""
    by_name: dict[str, SourceTensor] = {}
    for tensor in checkpoint.tensors.values():
        name = tensor.name.removeprefix(family.prefix)
        if name in by_name:
            raise QsfConversionError(f"both {by_name[name].name} and {tensor.name} are there")
        by_name[name] = tensor
    warnings = list(facts.warnings)
    flags = set(facts.flags)
    if not facts.arch.tied_head:
        if "lm_head.weight" in by_name:
            flags.add("separate_head")
        else:
            facts = dataclasses.replace(facts, arch=dataclasses.replace(facts.arch, tied_head=True))
            warnings.append("no lm_head.weight: the embeddings are used as the head")
    used: set[str] = set()
    targets = []
    for unit_idx, layer_idx, rule in _rules_in_order(family, facts.header.n_layers):
        if rule.flag is not None and rule.flag not in flags:
            continue
        name = rule.source.format(layer=layer_idx)
        if name not in by_name:
            raise QsfConversionError(f"the checkpoint has no tensor {family.prefix}{name}")
        used.add(name)
        targets.append(_target(rule, by_name[name], unit_idx, facts.dims, policy))
    warnings += _unused_warnings(family, set(by_name) - used, tied=facts.arch.tied_head)
    return _Plan(facts, family, tuple(targets), tuple(warnings))


def _rules_in_order(family: Family, n_layers: int) -> Iterator[tuple[int, int, TensorRule]]:
    """Yield (unit, layer, rule): positions first, then the units in file order."""
    for place, unit_idx in ((Place.POSITIONS, 0), (Place.EMBEDDING, 0)):
        yield from ((unit_idx, 0, rule) for rule in family.rules if rule.place is place)
    for layer_idx in range(n_layers):
        for rule in family.rules:
            if rule.place is Place.LAYER:
                yield layer_idx + 1, layer_idx, rule
    yield from ((n_layers + 1, 0, rule) for rule in family.rules if rule.place is Place.FINAL)


def _target(
    rule: TensorRule,
    source: SourceTensor,
    unit_idx: int,
    dims: Mapping[str, int],
    policy: Policy,
) -> _Target:
    expected = tuple(dims[dim] for dim in rule.shape)
    if source.shape != expected:
        raise QsfConversionError(
            f"tensor {source.name} has shape {list(source.shape)}, "
            f"config.json asks for {list(expected)}"
        )
    is_vector = len(expected) == 1
    n_outputs = expected[1] if rule.transposed else expected[0]
    part_rows = n_outputs // rule.n_parts
    n_inputs = 0 if is_vector else expected[0] if rule.transposed else expected[1]
    if rule.place is Place.POSITIONS and part_rows * n_inputs * 2 > _MAX_POSITIONS_BYTES:
        raise QsfConversionError(
            f"tensor {source.name}: {part_rows} x {n_inputs} positions are too many to convert"
        )
    return _Target(
        rule=rule,
        source=source,
        unit_idx=unit_idx,
        n_rows=1 if is_vector else part_rows,
        n_cols=part_rows if is_vector else n_inputs,
        first_row=rule.part * part_rows,
        dtype=policy.dtype_of(rule, is_vector=is_vector),
        is_vector=is_vector,
    )


def _unused_warnings(family: Family, unused: set[str], *, tied: bool) -> list[str]:
    """Name the tensors that nothing needs, apart from those known to hold no weights."""
    unknown = sorted(
        name
        for name in unused
        if not name.endswith(family.ignored_suffixes) and not (tied and name == "lm_head.weight")
    )
    if not unknown:
        return []
    more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
    return [f"{len(unknown)} tensors are not used: {', '.join(unknown[:8])}{more}"]


def _write_pieces(
    writer: Writer,
    plan: _Plan,
    pieces: Iterable[tuple[_Piece, bytes]],
    policy: Policy,
    chooser: Chooser,
    progress: Callable[[int, int], None] | None,
) -> list[TensorReport]:
    """Write all units and the WPOS section from ``pieces``; report every tensor.

    ``pieces`` come in file order; the tensors begin and end with them.
    """
    reports: list[TensorReport] = []
    positions = bytearray()
    errors = ErrorSums()
    unit_idx = -1
    total = plan.source_bytes
    done = 0
    for piece, data in pieces:
        target = piece.target
        in_unit = target.rule.place is not Place.POSITIONS
        if piece.start == 0:
            errors = ErrorSums()
            if in_unit and target.unit_idx != unit_idx:
                if unit_idx > 0:
                    compression = chooser.for_layer(writer.sample)
                    chooser.note(writer.end_unit(compression=compression))
                elif unit_idx == 0:
                    writer.end_unit()
                unit_idx = target.unit_idx
                is_layer = target.rule.place is Place.LAYER
                writer.begin_unit(unit_idx, dtype=policy.layers if is_layer else policy.embeddings)
            if in_unit and target.rule.target is not None:
                writer.begin_tensor(
                    target.rule.target,
                    target.n_rows,
                    target.n_cols,
                    target.dtype,
                    Layout.VECTOR if target.is_vector else Layout.TILES,
                )
        if in_unit:
            writer.write(data)
        else:
            positions += data
        errors.add(piece.errors)
        if piece.stop == target.n_rows:
            if in_unit:
                writer.end_tensor()
            reports.append(_report(target, errors))
        done += target.source_bytes * (piece.stop - piece.start) // target.n_rows
        if progress is not None:
            progress(min(done, total), total)
    writer.end_unit()
    if positions:
        writer.add_section("WPOS", bytes(positions), required=True)
    return reports


def _quantised_pieces(
    plan: _Plan, checkpoint: Checkpoint, n_threads: int | None
) -> Generator[tuple[_Piece, bytes], None, None]:
    """Yield all pieces in file order with their bytes, a bounded number of them under way."""
    n_workers = n_threads or min(_MAX_THREADS, os.cpu_count() or 1)
    under_way: deque[tuple[_Piece, Future[bytes]]] = deque()
    in_flight_bytes = 0
    pool = ThreadPoolExecutor(n_workers, thread_name_prefix="quantise")
    try:
        for piece in _pieces(plan):
            while under_way and (
                len(under_way) > n_workers or in_flight_bytes + piece.float_bytes > _IN_FLIGHT_BYTES
            ):
                oldest, future = under_way.popleft()
                yield oldest, future.result()
                in_flight_bytes -= oldest.float_bytes
                del future
            in_flight_bytes += piece.float_bytes
            under_way.append((piece, pool.submit(_quantise, piece, _read(piece, checkpoint))))
        while under_way:
            oldest, future = under_way.popleft()
            yield oldest, future.result()
            del future
    finally:
        pool.shutdown(cancel_futures=True)


def _pieces(plan: _Plan) -> Iterator[_Piece]:
    for target in plan.targets:
        band_bytes = TILE_ROWS * target.n_cols * 4
        step = max(1, _PIECE_BYTES // band_bytes) * TILE_ROWS
        for start in range(0, target.n_rows, step):
            yield _Piece(target, start, min(start + step, target.n_rows))


def _read(piece: _Piece, checkpoint: Checkpoint) -> RawArray:
    """Read a piece as it is stored: [n_rows, n_cols], or [n_cols, n_rows] of a transposed one."""
    target = piece.target
    source = target.source
    if target.is_vector:
        stop = target.first_row + target.n_cols
        return checkpoint.read_rows(source.name, 0, 1)[:, target.first_row : stop]
    first, last = target.first_row + piece.start, target.first_row + piece.stop
    if not target.rule.transposed:
        return checkpoint.read_rows(source.name, first, last)
    slab_rows = max(1, _SLAB_BYTES // source.row_bytes)
    columns: NDArray[np.generic] | None = None
    for start in range(0, source.n_rows, slab_rows):
        stop = min(start + slab_rows, source.n_rows)
        slab = checkpoint.read_rows(source.name, start, stop)
        if columns is None:
            columns = np.empty((source.n_rows, last - first), slab.dtype)
        columns[start:stop] = slab[:, first:last]
    assert columns is not None  # a matrix has at least one row
    return columns


def _quantise(piece: _Piece, raw: RawArray) -> bytes:
    """Turn what ``_read`` returned into the bytes of the file; runs on a worker."""
    target = piece.target
    try:
        if target.rule.transposed:
            raw = np.ascontiguousarray(raw.T)
        rows = to_float32(raw)
        del raw
        if target.rule.place is Place.POSITIONS:
            return _plain_rows(rows, np.dtype("<f2"), F16_MAX, piece.errors)
        if target.is_vector:
            return _plain_rows(rows, np.dtype("<f4"), np.inf, piece.errors)
        return quantise_rows(target.dtype, rows, piece.errors)
    except UnrepresentableError as error:
        raise QsfConversionError(
            f"tensor {target.source.name} at {_source_position(piece, error)}: {error.reason}"
        ) from error


def _plain_rows(
    rows: NDArray[np.float32], dtype: np.dtype[Any], limit: float, errors: ErrorSums
) -> bytes:
    """Rows one after another, without tiles."""
    with np.errstate(over="ignore"):
        stored = rows.astype(dtype)
    bad = np.argwhere(~np.isfinite(stored))
    if len(bad):
        row, col = (int(idx) for idx in bad[0])
        raise UnrepresentableError(row, col, float(rows[row, col]), limit)
    errors.observe(rows, stored.astype(np.float32))
    return stored.tobytes()


def _source_position(piece: _Piece, error: UnrepresentableError) -> list[int]:
    """Where the value is in the source tensor."""
    target = piece.target
    if target.is_vector:
        return [target.first_row + error.col]
    position = [target.first_row + piece.start + error.row, error.col]
    return position[::-1] if target.rule.transposed else position


def _report(target: _Target, errors: ErrorSums) -> TensorReport:
    n_weights = target.n_rows * target.n_cols
    kind = "WPOS" if target.rule.target is None else TensorType(target.rule.target).name
    is_layer = target.rule.place is Place.LAYER
    return TensorReport(
        name=f"{target.unit_idx - 1}.{kind}" if is_layer else kind,
        source=target.source.name,
        type=dtype_name(target.dtype),
        n_rows=target.n_rows,
        n_cols=target.n_cols,
        bits_per_weight=target.n_bytes * 8 / n_weights,
        mse=errors.mse,
        max_error=errors.max_error,
        cosine=errors.cosine,
    )


def _rounded(report: TensorReport) -> dict[str, Any]:
    """A report for META; rounded, because the last digits depend on the machine."""
    fields = dataclasses.asdict(report)
    return {
        name: float(f"{value:.5g}") if isinstance(value, float) else value
        for name, value in fields.items()
    }
