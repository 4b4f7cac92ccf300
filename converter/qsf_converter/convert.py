"""Turns a HuggingFace model directory, or a GGUF file, into one .qsf file.

A conversion opens the source (`sources`), plans a type for every tensor (`rounding.plan`,
`calibrate.type_choice`), rounds and writes the units, each with its tensors, each with its pieces
(`rounding.pieces`, or `calibrate.calibration` with a text; `writing`).
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from qsf.errors import QsfArgumentError, QsfConversionError, QsfIOError
from qsf.file.blocks import pack_tokenizer
from qsf.file.layout import Dtype, dtype_name
from qsf.file.partial import remove_abandoned
from qsf.file.writer import Writer
from qsf.foreign_json import read_json
from qsf.native.binding import describe_machine
from qsf.report.record import Quality, Report, cost_lines
from qsf.shell.output import check_not_a_source, check_output, check_space
from qsf_converter import meta
from qsf_converter.calibrate.calibration import Calibration
from qsf_converter.calibrate.changes import TAG, Changes, pack
from qsf_converter.calibrate.one_pass import OnePass
from qsf_converter.calibrate.sensitivity import Sensitivity
from qsf_converter.calibrate.state import CalibrationState, folder_of, state_key
from qsf_converter.calibrate.texts import CalibrationText, read_calibration_text
from qsf_converter.calibrate.type_choice import Phase, choose_types
from qsf_converter.costs import Costs, measure_costs
from qsf_converter.meta import UnitWriter
from qsf_converter.request import (
    AUTO,
    DEFAULT_CALIBRATION_TOKENS,
    DEFAULT_TERNARY_RULE,
    Request,
    bytes_of,
)
from qsf_converter.rounding.compression import DEFAULT_COMPRESSION, StoredLayers
from qsf_converter.rounding.key_channels import with_equal_keys
from qsf_converter.rounding.pieces import (
    rounded_units,
    with_exact_types,
    with_outlier_plans,
    with_tensor_scales,
)
from qsf_converter.rounding.plan import (
    ENCODER_QUANT_TYPE,
    KEEP,
    Plan,
    make_plan,
    with_fine_values,
    with_split_head,
)
from qsf_converter.sources.checkpoint import KEPT
from qsf_converter.sources.checkpoint_files import READABLE as PLAIN
from qsf_converter.sources.source import Source, open_source
from qsf_converter.text.tables import tables_of

# Up to this many auto is the default: three minutes of two cores (docs/quality.md).
AUTO_WEIGHTS = 2_000_000_000
# The memory that it needs at most. 1.03 GB were measured with 1.8 billion weights and 2 threads,
# 1.82 GB with layers of 2048 x 8192 and 16.
AUTO_BYTES = 1_000_000_000
AUTO_THREAD_BYTES = 100_000_000  # for each thread

Progress = Callable[[int, int], None]  # called with the source bytes done and all source bytes


def convert(
    model_dir: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    quant_type: str | None = None,
    embed_type: str | None = None,
    calibration: str | os.PathLike[str] | None = None,
    calibration_tokens: int = DEFAULT_CALIBRATION_TOKENS,
    target_size: float | None = None,
    target_bpw: float | None = None,
    ternary_rule: str = DEFAULT_TERNARY_RULE,
    compress: str = DEFAULT_COMPRESSION,
    allow_no_tokenizer: bool = True,
    allow_no_template: bool = False,
    force: bool = False,
    measure: bool = True,
    threads: int | None = None,
    lora: Sequence[str | os.PathLike[str]] = (),
    progress: Progress | None = None,
    phase: Phase | None = None,
) -> Report:
    """Convert a model with the options of ``qsf convert``, under their names.

    ``target_size`` is in MB of 2^20 bytes. Other than the command this converts models without a
    usable tokenizer, unless ``allow_no_tokenizer`` is false. The environment should have
    OPENBLAS_NUM_THREADS=1 before numpy is imported, as that of the command has: more threads of
    numpy's own wait for one another in loops, and the sums depend on their number.
    `Request` explains the options, `convert_as` the other arguments, the result and the errors.
    """
    request = Request(
        quant_type=quant_type,
        embed_type=embed_type,
        calibration=None if calibration is None else os.fspath(calibration),
        calibration_tokens=calibration_tokens,
        target_bytes=bytes_of(target_size),
        target_bpw=target_bpw,
        ternary_rule=ternary_rule,
        compress=compress,
        needs_tokenizer=not allow_no_tokenizer,
        needs_template=not allow_no_template,
        overwrite=force,
        measures_costs=measure,
        n_threads=threads,
        adapters=tuple(os.fspath(each) for each in lora),
    )
    return convert_as(request, model_dir, out, progress=progress, phase=phase)


def convert_as(
    request: Request,
    model_dir: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    phase: Phase | None = None,
) -> Report:
    """Convert the model in ``model_dir`` to the file ``out``; return the report.

    Args:
        request: the options.
        model_dir: a HuggingFace model's folder, or a GGUF file.
        out: the file to write; it appears complete or not at all.
        progress: called with the converted source bytes and all source bytes.
        phase: called with the name of each phase before the conversion itself, such as measuring
            the layers; returns the progress function of that phase.

    Raises QsfConversionError when the model cannot be converted, QsfIOError when the system
    refuses to read or write, QsfArgumentError when ``out`` exists and ``overwrite`` is false or
    for options that exclude each other, QsfUnsupportedError when the package for the
    compression is not installed.
    """
    started = time.monotonic()
    out = Path(out)
    request.check()
    check_output(out, overwrite=request.overwrite)
    remove_abandoned(out)
    with open_source(Path(model_dir), request.adapters) as source:
        check_not_a_source(out, source.files)
        requested_type = request.quant_type
        request, warnings = _with_type(request, source)
        if request.needs_tokenizer:
            source.require_tokenizer()
        if request.needs_template:
            source.require_template()
        conversion = _Conversion.of(source, request, out, phase or _no_phase)
        plan = conversion.plan()
        stored = StoredLayers(request.compress)
        try:
            quality, costs = conversion.write(plan, stored, progress)
            file_bytes = out.stat().st_size
        except QsfIOError:
            raise
        except OSError as error:
            raise QsfIOError(f"{out}: {error.strerror or error}") from error
        if conversion.state is not None:
            conversion.state.remove()
        warnings += plan.warnings
        if source.is_ternary and request.quant_type != requested_type:
            warnings.append(f"its weights are ternary: {request.quant_type}, which keeps them")
        warnings += _rounded_again(plan)
        if source.tokenizer is None:
            warnings.append("without a tokenizer the file can only be run on token ids")
    return Report(
        quality=quality,
        warnings=tuple(warnings),
        n_weights=sum(target.n_rows * target.n_cols for target in plan.targets),
        source_bytes=plan.source_bytes,
        file_bytes=file_bytes,
        elapsed_s=time.monotonic() - started,
        compression=stored.summary(),
        notes=(*_chosen_types(request, plan), *cost_lines(costs), *_types_of_source(source, plan)),
    )


def _with_type(request: Request, source: Source) -> tuple[Request, list[str]]:
    """Return the request with a type that fits the source, unless the user chose one, and warnings.

    Blocks of a GGUF file are kept if possible, and so are ternary weights; else the type has at
    least the source's bits.

    Raises QsfArgumentError for ``keep`` if no block of the source can be kept, and for options that
    would change ternary weights instead of keeping them.
    """
    least, is_free = source.least_type, request.quant_type is None and not request.has_target
    if request.layer_type == KEEP and not source.keeps:
        raise QsfArgumentError(
            f"quant type keep is for GGUF files of {', '.join(KEPT)} and for symmetric int4 and "
            f"int8; {source.path.name} has no such matrix: give a type"
        )
    if source.keeps and (request.layer_type == KEEP or (is_free and request.calibration is None)):
        unkept = request.unkept_type if source.unkept_type is None else source.unkept_type.name
        request = dataclasses.replace(request, quant_type=KEEP, unkept_type=unkept)
    elif is_free and least is not None:
        words = f"converted to {least.name}, as its matrices have {least.bits:.2f} bits a weight"
        return dataclasses.replace(request, quant_type=least.name), [words]
    elif is_free and source.facts.arch.is_encoder:
        request = dataclasses.replace(request, quant_type=ENCODER_QUANT_TYPE)
    elif is_free and source.is_ternary:
        request = dataclasses.replace(request, quant_type=dtype_name(Dtype.TERNARY))
    elif is_free and request.is_plain and _suits_auto(source):
        needed_bytes = AUTO_BYTES + AUTO_THREAD_BYTES * (request.n_threads or os.cpu_count() or 1)
        free_bytes = describe_machine().available_bytes
        if free_bytes < needed_bytes:
            return request, [
                f"converted to {request.layer_type}: auto is nearer the source, and takes up to "
                f"{needed_bytes / 1e6:.0f} MB of memory; {free_bytes / 1e6:.0f} MB are free"
            ]
        request = dataclasses.replace(request, quant_type=AUTO)
    if source.is_ternary:
        request.check_for_ternary_source()
    return request, []


def _suits_auto(source: Source) -> bool:
    """True if ``auto`` can be the default of a source: what it needs is there."""
    facts = source.facts
    n_weights = sum(math.prod(t.shape) for t in source.checkpoint.tensors.values())
    is_computed = not (facts.arch.target_dim or facts.arch.block_layers)
    is_small = n_weights <= AUTO_WEIGHTS and not any(kind.n_experts for kind in facts.kinds)
    # Those of 4 bits have levels that 4bit meets, and the types of auto do not.
    is_fine = not any(t.dtype == "INT4" for t in source.checkpoint.tensors.values())
    if source.tokenizer is None or not (is_computed and is_small and is_fine):
        return False
    try:
        return read_calibration_text(source, Request(quant_type=AUTO)) is not None
    except QsfConversionError:  # its tokenizer and its table of tokens do not fit
        return False


def _chosen_types(request: Request, plan: Plan) -> Iterator[str]:
    """Yield a line of the types that ``auto`` chose, and the shares of the weights."""
    if request.layer_type == AUTO:
        weights: Counter[str] = Counter()
        for target in plan.targets:
            if target.is_matrix:
                weights[dtype_name(target.dtype)] += target.n_rows * target.n_cols
        shares = [f"{name} {n / weights.total():.0%}" for name, n in weights.most_common()]
        yield f"auto, in the bytes of Q4_K_M: {', '.join(shares)} of the weights"


def _types_of_source(source: Source, plan: Plan) -> Iterator[str]:
    """Yield lines of the types that the source's matrices have, and that they keep."""
    if source.origin.stored is not None:
        yield f"its matrices are stored as {source.origin.stored}"
    types = sorted({dtype_name(t.dtype) for t in plan.targets if t.is_kept})
    if types:
        yield f"kept as they are: {', '.join(types)}"


def _rounded_again(plan: Plan) -> list[str]:
    matrices = [t for t in plan.targets if t.is_matrix and t.source.dtype not in PLAIN]
    again = sorted({t.source.dtype for t in matrices if not t.is_kept})
    if not again:
        return []
    best = (
        "--quant-type keep loses nothing"
        if set(again) <= set(KEPT)
        else "f16 and 8bit add the least"
    )
    return [
        f"its matrices are rounded already ({', '.join(again)}), and are rounded again, which "
        f"adds the errors that the report shows; {best}, the original checkpoint is better"
    ]


@dataclass(slots=True)
class _Conversion:
    """One conversion: first `plan`, then `write`."""

    source: Source
    request: Request
    out: Path
    phase: Phase
    text: CalibrationText | None
    state: CalibrationState | None
    sensitivity: Sensitivity | None = None  # what `plan` measured
    changes: Changes = dataclasses.field(default_factory=dict)  # by the calibration

    @classmethod
    def of(cls, source: Source, request: Request, out: Path, phase: Phase) -> _Conversion:
        """Read the calibration text, if there is one, and look for saved layers."""
        text = read_calibration_text(source, request)
        state = None
        if request.calibration is not None and text is not None:
            state = CalibrationState(folder_of(out), state_key(source, request, text))
        return cls(source, request, out, phase, text, state)

    def plan(self) -> Plan:
        """Return the type, scale and outliers of every tensor."""
        source, policy = self.source, self.request.first_policy()
        plan = make_plan(source.family, source.facts, source.checkpoint, policy)
        for step in _STEPS:
            plan = step(plan, self)
        return plan

    @property
    def has_free_types(self) -> bool:
        """True if the types of all matrices are chosen."""
        return self.request.has_chosen_types and self.request.embed_type is None

    def with_types(self, plan: Plan) -> Plan:
        """Return the plan with the types that were chosen; keep what was measured."""
        source, request = self.source, self.request
        tables, _ = _text_tables(source)
        text_bytes = {} if tables is None else {"TEXT": len(tables)}
        section_bytes = {**text_bytes, **meta.section_bytes(source, request, plan, self.text)}
        plan, self.sensitivity = choose_types(
            plan, source.checkpoint, request, self.text, section_bytes, self.phase, self.state
        )
        return plan

    def write(
        self, plan: Plan, stored: StoredLayers, progress: Progress | None
    ) -> tuple[Quality, Costs]:
        """Write the file; return its quality report, and the costs of its arithmetic."""
        source = self.source
        is_packing = self.request.compress != DEFAULT_COMPRESSION
        # A compressed layer is first written after its raw bytes.
        largest_layer_bytes = max(layer.n_bytes for layer in plan.layers)
        needed_bytes = plan.n_bytes + (largest_layer_bytes if is_packing else 0)
        check_space(self.out, _least_bytes(plan) if is_packing else needed_bytes)
        with Writer(
            self.out,
            dataclasses.replace(plan.facts.header, dtype=plan.layer_dtype),
            plan.facts.arch,
            layer_kinds=plan.facts.layer_kinds,
            rope_sets=plan.facts.rope_sets,
            needed_bytes=needed_bytes,
            n_threads=self.request.n_threads,
        ) as writer:
            quality = self._write_units(writer, plan, stored, progress)
            tables, _ = _text_tables(source)
            if tables is not None:
                writer.add_section("TEXT", tables)
            if source.tokenizer is not None:
                writer.add_section("TOKN", pack_tokenizer(source.tokenizer))
            writer.add_section("CHAT", source.chat)
            costs: Costs = {}
            if source.tokenizer is not None and not source.facts.arch.target_dim:
                with ThreadPoolExecutor(1) as beside:
                    synced = beside.submit(writer.sync)
                    costs = measure_costs(
                        writer,
                        sum(t.n_rows * t.n_cols for t in plan.targets),
                        self.request.n_threads,
                        partial(self.phase, "measuring the arithmetic"),
                        is_kept=any(t.is_kept for t in plan.targets),
                        is_wanted=self.request.measures_costs,
                    )
                synced.result()
            if self.changes:
                writer.add_section(TAG, pack(self.changes))
            section = meta.meta_bytes(source, self.request, plan, quality, stored, costs)
            writer.add_section("META", section)
        return quality, costs

    def _write_units(
        self, writer: Writer, plan: Plan, stored: StoredLayers, progress: Progress | None
    ) -> Quality:
        advance = _advance_of(progress, plan.source_bytes)
        checkpoint, n_threads = self.source.checkpoint, self.request.n_threads
        if self.text is None:
            units = rounded_units(plan.units, checkpoint, n_threads)
            with contextlib.closing(units):
                tensors = UnitWriter(writer, stored, self.sensitivity, advance).write(units)
            return Quality(tensors=tensors)
        if self.request.layer_type == AUTO:
            one_pass = OnePass(
                plan, checkpoint, self.text.fitted, n_threads=n_threads, progress=advance
            )
            unit_writer = UnitWriter(writer, stored, self.sensitivity, None)
            return Quality(tensors=unit_writer.write(one_pass.units()))
        calibration = Calibration(
            plan,
            checkpoint,
            self.text.fitted,
            self.text.held_out,
            n_threads=n_threads,
            state=self.state,
            progress=advance,  # also within a layer, which takes minutes
        )
        tensors = UnitWriter(writer, stored, self.sensitivity, None).write(calibration.units())
        assert calibration.divergence is not None  # all tensors were written
        self.changes = calibration.changes
        return Quality(
            tensors=tensors,
            layers=meta.layer_reports(self.sensitivity),
            evaluation=meta.evaluation(self.text, calibration.divergence),
            calibration=self.text.meta(),
        )


# The decisions on all tensors, in this order. They end before the first tensor is rounded.
_STEPS: Final[tuple[Callable[[Plan, _Conversion], Plan], ...]] = (
    lambda plan, c: with_exact_types(plan, c.source.checkpoint),
    lambda plan, c: with_equal_keys(plan, c.source.checkpoint),
    lambda plan, c: with_split_head(plan, has_free_type=c.has_free_types),
    lambda plan, _: with_fine_values(plan),
    lambda plan, c: c.with_types(plan),
    lambda plan, c: with_outlier_plans(
        plan, c.source.checkpoint, may_add_bytes=c.request.may_add_bytes
    ),
    lambda plan, c: with_tensor_scales(plan, c.source.checkpoint, c.request.ternary_rule),
)


def _advance_of(progress: Progress | None, total: int) -> Callable[[int], None]:
    """Return a function that adds source bytes and reports them, never more than ``total``."""
    done = 0

    def advance(n_bytes: int) -> None:
        nonlocal done
        done = min(done + n_bytes, total)
        if progress is not None:
            progress(done, total)

    advance(0)  # the time begins to count
    return advance


def _no_phase(_name: str) -> Progress:
    return lambda _done, _total: None


def _text_tables(source: Source) -> tuple[bytes | None, str | None]:
    """The section TEXT, or the reason why it is missing; empty without tokenizer."""
    if source.tokenizer is None:
        return None, None
    special = read_json(source.chat).get("special_tokens") or {}
    add_bos = special.get("add_bos_token")
    return tables_of(
        source.tokenizer, source.facts.header.bos_id, add_bos if isinstance(add_bos, bool) else None
    )


def _least_bytes(plan: Plan) -> int:
    """Return a lower bound of a file's size: its compression is not known yet."""
    sizes = [layer.n_bytes for layer in plan.layers]
    return plan.n_bytes - sum(sizes) + max(sizes)
