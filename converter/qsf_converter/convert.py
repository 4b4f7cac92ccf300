"""Turns a HuggingFace model directory, or a GGUF file, into one .qsf file.

Facts (what the checkpoint calls things) are in ``architectures``, which tensor gets which type in
``plan``, floats to tiles in ``quantisers``, and how they get there in ``pieces``. Here it comes
together: what the sources say, what comes out of the pieces in file order, and the report.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qsf.errors import QsfArgumentError, QsfIOError
from qsf.file.layout import OUTLIERS_OF, Dtype, Layout, dtype_name
from qsf.file.outliers import PackedOutliers
from qsf.file.writer import Writer
from qsf.shell.output import check_not_a_source, check_output, check_space
from qsf_converter.calibrate.assignment import common_dtype
from qsf_converter.calibrate.calibration import FEEDBACK, Calibration
from qsf_converter.calibrate.recipe import (
    DEFAULT_CALIBRATION_TOKENS,
    CalibrationText,
    Phase,
    Recipe,
    Wish,
    choose_types,
    read_calibration_text,
    state_key,
    with_tensor_scales,
)
from qsf_converter.calibrate.sensitivity import Sensitivity
from qsf_converter.calibrate.state import CalibrationState, folder_of
from qsf_converter.calibrate.transforms import ROTATED, SCALED
from qsf_converter.original.divergence import Divergence
from qsf_converter.report.record import (
    EXACT,
    ROUNDED,
    Evaluation,
    LayerReport,
    Quality,
    Report,
    TensorReport,
)
from qsf_converter.rounding.compression import AUTO, DEFAULT_COMPRESSION, Chooser, parse_compression
from qsf_converter.rounding.disk import read_bytes_per_s
from qsf_converter.rounding.pieces import Piece, quantised_pieces
from qsf_converter.rounding.plan import (
    DEFAULT_QUANT_TYPE,
    TERNARY_TYPES,
    Plan,
    Policy,
    Target,
    make_plan,
)
from qsf_converter.rounding.quantisers import ErrorSums
from qsf_converter.rounding.side_tables import examine, with_tables
from qsf_converter.sources import metadata
from qsf_converter.sources.architectures import Place
from qsf_converter.sources.checkpoint import Checkpoint
from qsf_converter.sources.source import Source, open_source
from qsf_converter.text.tokenizer import tables_of

# For an upper bound of META's size.
_LONGEST_TYPE = dtype_name(Dtype.TERNARY_DENSE)
_LONGEST_ACTION = f"{ROTATED}, {SCALED}, {FEEDBACK}"
LOSSLESS = "lossless ternary"
_OTHER_META_BYTES = 2048  # compression


def convert(
    model_dir: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    quant_type: str = DEFAULT_QUANT_TYPE,
    embed_type: str | None = None,
    calibration: str | os.PathLike[str] | None = None,
    calibration_tokens: int = DEFAULT_CALIBRATION_TOKENS,
    target_bytes: int | None = None,
    target_bpw: float | None = None,
    ternary_rule: str = "search",
    compress: str = DEFAULT_COMPRESSION,
    disk_bytes_per_s: float | None = None,
    overwrite: bool = False,
    n_threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    phase: Phase | None = None,
) -> Report:
    """Convert the model in ``model_dir`` to the file ``out``; return what was done.

    Args:
        model_dir: a HuggingFace model's folder, or a GGUF file.
        out: the file to write; it appears complete or not at all.
        quant_type: of the matrices of the layers; ``mixed`` chooses for each.
        embed_type: of the embeddings and the head; default 8bit, f16 if ``quant_type`` is, or with
            ``mixed`` chosen.
        calibration: a file of text or JSONL to round by, or ``bundled`` for our own. What is done
            is kept in the folder OUT.calibration until the file is there: the same call goes on
            after an interruption, and makes the same file.
        calibration_tokens: how many of its tokens.
        target_bytes: the most that the file may have; with ``mixed``.
        target_bpw: the same, in bits for each weight.
        ternary_rule: how ternary types round: search finds the best scale of each block; absmean
            is BitNet b1.58's, one scale for each matrix.
        compress: the layers: none, lz4, lz4hc, zstd, or auto, which compresses those that are
            read faster so, on a disk of ``disk_bytes_per_s`` (default: measured where ``out`` is).
        disk_bytes_per_s: see there.
        overwrite: replace ``out``.
        n_threads: that round; default: one per core.
        progress: called with the source bytes done and in all.
        phase: called with the name of what begins before that; returns its progress function.

    Raises QsfConversionError when the model cannot be converted, QsfIOError when the system
    refuses to read or write, QsfArgumentError when ``out`` exists and ``overwrite`` is false or
    for arguments that do not go together, QsfUnsupportedError when the package for the
    compression is not installed.
    """
    started = time.monotonic()
    source_dir, out_path = Path(model_dir), Path(out)
    text_of = None if calibration is None else os.fspath(calibration)
    wish = Wish(
        quant_type, embed_type, text_of, calibration_tokens, target_bytes, target_bpw, ternary_rule
    )
    wish.check()
    parse_compression(compress)
    if disk_bytes_per_s is not None and not (compress == AUTO and 0 < disk_bytes_per_s < math.inf):
        raise QsfArgumentError("the disk's speed is for compression auto, and above zero")
    check_output(out_path, overwrite=overwrite)
    with open_source(source_dir) as source:
        check_not_a_source(out_path, source.files)
        text = read_calibration_text(source, wish)
        plan = make_plan(source.family, source.facts, source.checkpoint, wish.first_policy())
        state = None
        if text is not None:
            state = CalibrationState(folder_of(out_path), state_key(source, wish, text))
        recipe = choose_types(
            plan,
            source.checkpoint,
            wish,
            text,
            _section_bytes(source, plan, wish, text),
            phase or _silent,
            state,
        )
        is_free = target_bytes is None and target_bpw is None and ternary_rule == "search"
        examined = examine(recipe.plan, source.checkpoint, is_free=is_free)
        examined = with_tensor_scales(examined, source.checkpoint, wish)
        recipe = dataclasses.replace(recipe, plan=examined, policy=_settled(recipe, examined))
        chooser = _chooser(compress, disk_bytes_per_s, out_path, source.checkpoint)
        job = _Job(source, wish, recipe, text, state, chooser, out_path, n_threads, progress)
        try:
            quality = job.write(is_packing=compress != DEFAULT_COMPRESSION)
            file_bytes = out_path.stat().st_size
        except QsfIOError:
            raise
        except OSError as error:
            raise QsfIOError(f"{out_path}: {error.strerror or error}") from error
        if state is not None:
            state.remove()
        plan = recipe.plan
        warnings = list(plan.warnings)
        if source.tokenizer is None:
            warnings.append("no tokenizer.json: the file can only be run on token ids")
        _, reason = _text_tables(source)
        if reason is not None:
            warnings.append(
                f"the engine's own tokenizer does not cover this one ({reason}): the file needs the "
                "library tokenizers, which takes up to 120 MB of the memory budget"
            )
    return Report(
        quality=quality,
        warnings=(*warnings, *chooser.warnings),
        n_weights=sum(target.n_rows * target.n_cols for target in plan.targets),
        source_bytes=plan.source_bytes,
        file_bytes=file_bytes,
        elapsed_s=time.monotonic() - started,
        compression=chooser.summary(),
    )


@dataclass(frozen=True, slots=True)
class _Job:
    """One file to be written."""

    source: Source
    wish: Wish
    recipe: Recipe
    text: CalibrationText | None
    state: CalibrationState | None
    chooser: Chooser
    out: Path
    n_threads: int | None
    progress: Callable[[int, int], None] | None

    def write(self, *, is_packing: bool) -> Quality:
        """Write the file; return what META says of it."""
        plan, policy = self.recipe.plan, self.recipe.policy
        # A layer is compressed behind itself.
        needed_bytes = plan.n_bytes + (plan.largest_layer_bytes if is_packing else 0)
        check_space(self.out, _least_bytes(plan) if is_packing else needed_bytes)
        with Writer(
            self.out,
            dataclasses.replace(plan.facts.header, dtype=policy.layers),
            plan.facts.arch,
            needed_bytes=needed_bytes,
            n_threads=self.n_threads,
        ) as writer:
            quality = self._write_weights(writer)
            tables, _ = _text_tables(self.source)
            if tables is not None:
                writer.add_section("TEXT", tables)
            if self.source.tokenizer is not None:
                writer.add_section("TOKN", self.source.tokenizer)
            writer.add_section("CHAT", self.source.chat)
            meta = _meta(self.source, self.wish, self.recipe.policy, quality, self.chooser)
            writer.add_section("META", meta)
        return quality

    def _write_weights(self, writer: Writer) -> Quality:
        plan, checkpoint = self.recipe.plan, self.source.checkpoint
        if self.text is None:
            pieces = quantised_pieces(plan.targets, checkpoint, self.n_threads)
            with contextlib.closing(pieces):
                written = with_tables(plan, pieces)
                tensors = _write_pieces(writer, self.recipe, written, self.chooser, self.progress)
            return Quality(tensors=tuple(tensors))
        report = self.progress or (lambda _done, _total: None)
        calibration = Calibration(
            plan,
            checkpoint,
            self.text.fitted,
            self.text.held_out,
            n_threads=self.n_threads,
            state=self.state,
            progress=lambda n_bytes: report(n_bytes, plan.source_bytes),
        )
        written = with_tables(plan, calibration.pieces())
        tensors = _write_pieces(writer, self.recipe, written, self.chooser, None)
        assert calibration.divergence is not None  # all pieces were written
        return Quality(
            tensors=tuple(tensors),
            layers=_layers(self.recipe.sensitivity),
            evaluation=_evaluation(self.text, calibration.divergence),
            calibration=self.text.facts(),
        )


def _settled(recipe: Recipe, plan: Plan) -> Policy:
    """The policy after outliers may have given some matrices more bits."""
    layers = (t.dtype for t in plan.targets if t.is_matrix and t.rule.place is Place.LAYER)
    return dataclasses.replace(recipe.policy, layers=common_dtype(layers))


def _silent(_name: str) -> Callable[[int, int], None]:
    return lambda _done, _total: None


def _text_tables(source: Source) -> tuple[bytes | None, str | None]:
    """The section TEXT, or why there is none; nothing where there is no tokenizer at all."""
    if source.tokenizer is None:
        return None, None
    special = json.loads(source.chat).get("special_tokens") or {}
    add_bos = special.get("add_bos_token")
    return tables_of(
        source.tokenizer,
        source.facts.header.bos_id,
        add_bos if isinstance(add_bos, bool) else None,
    )


def _section_bytes(
    source: Source, plan: Plan, wish: Wish, text: CalibrationText | None
) -> dict[str, int]:
    """Upper bounds of the sections that do not follow from the plan, in the order of the file."""
    tables, _ = _text_tables(source)
    sizes = {} if tables is None else {"TEXT": len(tables)}
    if source.tokenizer is not None:
        sizes["TOKN"] = len(source.tokenizer)
    longest = -1.2345e-100  # of what five digits print as
    tensors = tuple(
        TensorReport(
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
        for target in plan.targets
    )
    layers = tuple(
        LayerReport(layer, longest, longest, longest) for layer in range(plan.facts.header.n_layers)
    )
    policy = Policy(Dtype.TERNARY_DENSE, Dtype.TERNARY_DENSE)
    quality = Quality(tensors, layers)
    if text is not None:
        numbers = (longest,) * 5
        said = Evaluation(text.judged_by, 1 << 48, 1 << 48, "windows", *numbers)
        quality = Quality(tensors, layers, said, text.facts())
    meta = _meta(source, wish, policy, quality, None)
    return {**sizes, "CHAT": len(source.chat), "META": len(meta) + _OTHER_META_BYTES}


def _meta(
    source: Source, wish: Wish, policy: Policy, quality: Quality, chooser: Chooser | None
) -> bytes:
    return metadata.meta_bytes(
        source.origin,
        architecture=source.family.name,
        weights_sha256="0" * 64 if chooser is None else source.checkpoint.digest(),
        options={
            **wish.options(),
            "quant_type": dtype_name(policy.layers),
            "embed_type": dtype_name(policy.embeddings),
        },
        quality=quality.meta(),
        compression=None if chooser is None else chooser.meta(),
    )


def _layers(sensitivity: Sensitivity | None) -> tuple[LayerReport, ...]:
    if sensitivity is None:
        return ()
    return tuple(
        LayerReport(one.layer, sensitivity.importance(one.layer), one.cosine, one.kl_skipped)
        for one in sensitivity.layers
    )


def _evaluation(text: CalibrationText, divergence: Divergence) -> Evaluation:
    """What the held-out windows say of the rounded weights."""
    original, rounded = divergence.perplexities
    kl = divergence.kl
    return Evaluation(
        text=text.judged_by,
        tokens=divergence.n_tokens,
        ctx_tokens=text.held_out.shape[1],
        protocol="windows",
        perplexity=rounded,
        perplexity_original=original,
        kl_mean=float(kl.mean()),
        kl_p99=float(np.quantile(kl, 0.99)),
        top1_agreement=divergence.top1_agreement,
    )


def _chooser(
    compress: str, disk_bytes_per_s: float | None, out: Path, checkpoint: Checkpoint
) -> Chooser:
    is_given = disk_bytes_per_s is not None
    if compress == AUTO and not is_given:
        disk_bytes_per_s = read_bytes_per_s(out.absolute().parent, checkpoint.paths)
    return Chooser(compress, disk_bytes_per_s, is_given=is_given)


def _least_bytes(plan: Plan) -> int:
    """Return what a compressed file needs at least: how far its layers shrink is not known."""
    layers = sum(target.n_bytes for target in plan.targets if target.rule.place is Place.LAYER)
    return plan.n_bytes - layers + plan.largest_layer_bytes


def _write_pieces(
    writer: Writer,
    recipe: Recipe,
    pieces: Iterable[tuple[Piece, bytes]],
    chooser: Chooser,
    progress: Callable[[int, int], None] | None,
) -> list[TensorReport]:
    """Write all units and the WPOS section from ``pieces``; report every tensor.

    ``pieces`` come in file order; the tensors begin and end with them.
    """
    policy, sensitivity = recipe.policy, recipe.sensitivity
    reports: list[TensorReport] = []
    positions = bytearray()
    errors = ErrorSums()
    unit_idx = -1
    total = recipe.plan.source_bytes
    done = 0
    for piece, data in pieces:
        target = piece.target
        if piece.table is not None:
            _write_table(writer, target, piece.table)
            continue
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
                writer.begin_unit(
                    unit_idx,
                    dtype=_layer_dtype(recipe, unit_idx) if is_layer else policy.embeddings,
                    importance=sensitivity.importance(unit_idx - 1)
                    if is_layer and sensitivity is not None
                    else 1.0,
                )
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
            reports.append(_report(piece, errors))
        done += target.source_bytes * (piece.stop - piece.start) // target.n_rows
        if progress is not None:
            progress(min(done, total), total)
    writer.end_unit()
    if positions:
        writer.add_section("WPOS", bytes(positions), required=True)
    return reports


def _write_table(writer: Writer, target: Target, table: PackedOutliers) -> None:
    """Write the side table of a matrix; the unit is begun, for a norm comes before any matrix."""
    assert target.rule.target is not None  # only learned positions have no type
    kind = OUTLIERS_OF[target.rule.target]
    n_rows, n_cols = target.n_rows, target.n_cols
    writer.begin_tensor(kind, n_rows, n_cols, Dtype.F16, Layout.OUTLIERS, n_entries=table.n_entries)
    writer.write(table.data)
    writer.end_tensor()


def _layer_dtype(recipe: Recipe, unit_idx: int) -> Dtype:
    """What the layer index says of a layer: the type of its matrices, or mixed."""
    return common_dtype(
        target.dtype
        for target in recipe.plan.targets
        if target.unit_idx == unit_idx and target.is_matrix
    )


def _report(piece: Piece, errors: ErrorSums) -> TensorReport:
    target = piece.target
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
        outliers=None if target.outliers is None else target.outliers.near_fraction,
        action=_action(piece, errors),
        output_error=piece.output_error,
    )


def _action(piece: Piece, errors: ErrorSums) -> str:
    """What was done to a tensor, in the words of the report."""
    found = piece.target.outliers
    done = [piece.action or (EXACT if errors.max_error == 0 else ROUNDED)]
    if done == [EXACT] and piece.target.dtype in TERNARY_TYPES:
        done = [LOSSLESS]
    if found is not None and found.action in ("side table", "more bits"):
        done.append(found.action)
    return ", ".join(done)


def _relative_error(errors: ErrorSums) -> float | None:
    """The root of (squared error / squared weights); weights that are all 0 may have none."""
    if errors.squared_error == 0:
        return 0.0
    if errors.source_energy == 0:
        return None
    return math.sqrt(errors.squared_error / errors.source_energy)
