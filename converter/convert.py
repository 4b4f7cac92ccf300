"""Turns a HuggingFace model directory into one .qsf file.

Facts (what the checkpoint calls things) are in ``architectures``, which tensor gets which type in
``plan``, floats to tiles in ``quantisers``, and how they get there in ``pieces``. Here it comes
together: what the sources say, what comes out of the pieces in file order, and the report.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from qsf.converter import metadata
from qsf.converter.architectures import Place
from qsf.converter.checkpoint import Checkpoint
from qsf.converter.compression import AUTO, DEFAULT_COMPRESSION, Chooser, parse_compression
from qsf.converter.disk import read_bytes_per_s
from qsf.converter.output import check_not_a_source, check_output, check_space
from qsf.converter.pieces import Piece, quantised_pieces
from qsf.converter.plan import (
    DEFAULT_EMBED_TYPE,
    DEFAULT_QUANT_TYPE,
    Plan,
    Policy,
    Target,
    make_plan,
    parse_quant_type,
)
from qsf.converter.quantisers import ErrorSums
from qsf.converter.report import EXACT, ROUNDED, Quality, Report, TensorReport
from qsf.converter.source import open_source
from qsf.errors import QsfArgumentError, QsfIOError
from qsf.format import Dtype, Layout, Writer, dtype_name


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
    with open_source(source_dir) as source:
        check_not_a_source(out_path, source.files)
        checkpoint = source.checkpoint
        plan = make_plan(source.family, source.facts, checkpoint, policy)
        warnings = list(plan.warnings)
        if source.tokenizer is None:
            warnings.append("no tokenizer.json: the file can only be run on token ids")
        # A layer is compressed behind itself.
        is_packing = compress != DEFAULT_COMPRESSION
        needed_bytes = plan.n_bytes + (plan.largest_layer_bytes if is_packing else 0)
        check_space(out_path, _least_bytes(plan) if is_packing else needed_bytes)
        chooser = _chooser(compress, disk_bytes_per_s, out_path, checkpoint)
        header = dataclasses.replace(plan.facts.header, dtype=policy.layers)
        try:
            with Writer(
                out_path,
                header,
                plan.facts.arch,
                needed_bytes=needed_bytes,
                n_threads=n_threads,
            ) as writer:
                pieces = quantised_pieces(plan, checkpoint, n_threads)
                with contextlib.closing(pieces):
                    reports = _write_pieces(writer, plan, pieces, policy, chooser, progress)
                quality = Quality(tensors=tuple(reports))
                if source.tokenizer is not None:
                    writer.add_section("TOKN", source.tokenizer)
                writer.add_section("CHAT", source.chat)
                meta = metadata.meta_bytes(
                    source_dir,
                    architecture=source.family.name,
                    weights_sha256=checkpoint.digest(),
                    options={
                        "quant_type": dtype_name(policy.layers),
                        "embed_type": dtype_name(policy.embeddings),
                    },
                    quality=quality.meta(),
                    compression=chooser.meta(),
                )
                writer.add_section("META", meta)
            file_bytes = out_path.stat().st_size
        except QsfIOError:
            raise
        except OSError as error:
            raise QsfIOError(f"{out_path}: {error.strerror or error}") from error
    return Report(
        quality=quality,
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


def _least_bytes(plan: Plan) -> int:
    """Return what a compressed file needs at least: how far its layers shrink is not known."""
    layers = sum(target.n_bytes for target in plan.targets if target.rule.place is Place.LAYER)
    return plan.n_bytes - layers + plan.largest_layer_bytes


def _write_pieces(
    writer: Writer,
    plan: Plan,
    pieces: Iterable[tuple[Piece, bytes]],
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


def _report(target: Target, errors: ErrorSums) -> TensorReport:
    n_weights = target.n_rows * target.n_cols
    return TensorReport(
        name=target.name,
        source=target.source.name,
        type=dtype_name(target.dtype),
        n_rows=target.n_rows,
        n_cols=target.n_cols,
        bits_per_weight=target.n_bytes * 8 / n_weights,
        mse=errors.mse,
        max_error=errors.max_error,
        cosine=errors.cosine,
        relative_error=_relative_error(errors),
        action=EXACT if errors.max_error == 0 else ROUNDED,
    )


def _relative_error(errors: ErrorSums) -> float | None:
    """The root of (squared error / squared weights); weights that are all 0 may have none."""
    if errors.squared_error == 0:
        return 0.0
    if errors.source_energy == 0:
        return None
    return math.sqrt(errors.squared_error / errors.source_energy)
