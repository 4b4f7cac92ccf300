"""Chooses the type of each matrix: the requested one, or by a target size and a measurement.

A file of a given size is to lose least: a multiple-choice knapsack. Every matrix takes one of its
types, the costs add up, the bytes stay within a budget; `assign` spends them where a byte saves
most. The bytes of a file are known before it is written, to the byte: `file_bytes`. The measured
importance of each matrix and layer is kept for the report.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from qsf.errors import QsfConversionError
from qsf.file import layout
from qsf.file.layout import (
    DATA_ALIGN,
    HEAD_COLS,
    TENSOR_HEADER_BYTES,
    Dtype,
    Role,
    TensorType,
    padded,
)
from qsf_converter.calibrate.sensitivity import (
    Sensitivity,
    measure,
    measure_layers,
    n_tokens_within,
)
from qsf_converter.calibrate.state import CalibrationState
from qsf_converter.calibrate.texts import CalibrationText
from qsf_converter.original.layers import Original
from qsf_converter.request import AUTO, MIXED, Request
from qsf_converter.rounding.plan import (
    Plan,
    Policy,
    Target,
    common_dtype,
    parse_quant_type,
    table_type,
)
from qsf_converter.rounding.quantisers import ErrorSums, quantise_rows
from qsf_converter.rounding.tiles import tile_bytes
from qsf_converter.sources.checkpoint import Checkpoint
from qsf_converter.sources.families.rules import Place

LAYER_CANDIDATES: Final = (Dtype.Q2_SYM, Dtype.Q2, Dtype.Q3, Dtype.Q4_NL, Dtype.Q4, Dtype.Q8)
EMBEDDING_CANDIDATES: Final = (Dtype.Q3, Dtype.Q4_NL, Dtype.Q4, Dtype.Q8, Dtype.F16)
AUTO_CANDIDATES: Final = (Dtype.Q4_NL, Dtype.Q4_K, Dtype.Q5_0, Dtype.Q5_K, Dtype.Q8)  # of all

# Matrices of a layer that get more bits without a measurement; the others: _MIXED_FALLBACK.
_MIXED: Final[Mapping[int, Dtype]] = {
    TensorType.Q: Dtype.Q2,
    TensorType.K: Dtype.Q2,
    TensorType.V: Dtype.Q2,
    TensorType.ATTN_OUT: Dtype.Q3,
    TensorType.FFN_GATE: Dtype.Q2,
    TensorType.FFN_UP: Dtype.Q2,
    TensorType.FFN_DOWN: Dtype.Q4,
}
_MIXED_EMBEDDING: Final = Dtype.Q4

# Weights of errors by matrix without a measurement: medians that `sensitivity` measured in a small
# LLaMA (bench/LOG-quantisation.md).
_WEIGHTS: Final[Mapping[int, float]] = {
    TensorType.Q: 0.5,
    TensorType.K: 0.6,
    TensorType.V: 1.0,
    TensorType.ATTN_OUT: 0.7,
    TensorType.FFN_GATE: 1.4,
    TensorType.FFN_UP: 1.0,
    TensorType.FFN_DOWN: 1.5,
}
_FIRST_LAYER: Final = 3.0  # relative to the other layers
# Times the number of layers. Of the 0.5B in docs/quality.md 4bit-nl costs KL 0.0014 in its own
# embedding, and 0.0237 in the head; of the 1.5B both cost 1.7 times as much as all of FFN down. The
# tied head of small-llama is worth 8 bits (KL 0.0016; with q5_k, which 5.0 gives it, 0.0028).
_TIED: Final = 8.0
_HEAD: Final = 2.5
_EMBEDDING: Final = 0.15
_FIRST_ROWS: Final = 0.65  # the part of a head's loss that the rows of frequent tokens have

_NEGLIGIBLE: Final = 1e-4  # of a file
_MB: Final = 2**20  # as the commands count


@dataclass(frozen=True, slots=True)
class Assignment:
    """A type for every matrix, by ``Target.name``."""

    dtypes: Mapping[str, Dtype]
    n_bytes: int  # data of all matrices, each padded to 64
    cost: float


# ---- types as a policy ----


def mixed_policy(targets: Sequence[Target]) -> Policy:
    """Return the types of ``mixed`` without a measurement.

    Attention Q, K, V and FFN gate and up 2-bit, attention out 3-bit (few weights, and it writes
    to the residual stream), FFN down 4-bit, embedding and head 4-bit. In mixtures of experts these
    are the types of experts; the parts that all tokens use are much smaller and get 4-bit.
    """
    by_name = {}
    is_mixture = any(target.unit.role == Role.EXPERT for target in targets)
    for target in targets:
        if target.has_choice:
            in_layer = target.is_of_layer
            kind = target.rule.target
            assert kind is not None  # only learned positions have no type
            table_dtype = table_type(target, _MIXED_EMBEDDING)
            dtype = _MIXED.get(kind, Dtype.Q4) if in_layer else table_dtype
            is_for_all = is_mixture and target.unit.role != Role.EXPERT
            by_name[target.name] = Dtype.Q4 if is_for_all else dtype
    return policy_of(targets, by_name)


def policy_of(targets: Sequence[Target], dtypes: Mapping[str, Dtype]) -> Policy:
    """Return the policy that gives every matrix of ``targets`` its type in ``dtypes``.

    ``Policy.layers``, which the header states, is the layers' common type or mixed.
    """
    matrices = [target for target in targets if target.has_choice]
    in_layers = [dtypes[t.name] for t in matrices if t.is_of_layer]
    others = [dtypes[t.name] for t in matrices if not t.is_of_layer]
    return Policy(common_dtype(in_layers), common_dtype(others), dict(dtypes))


def with_policy(plan: Plan, policy: Policy) -> Plan:
    return plan.with_targets(
        lambda target: (
            dataclasses.replace(target, dtype=policy.dtype_of(target.rule, target.name))
            if target.has_choice
            else target
        )
    )


def candidates(
    targets: Iterable[Target],
    layers: Collection[Dtype] = LAYER_CANDIDATES,
    embeddings: Collection[Dtype] = EMBEDDING_CANDIDATES,
) -> dict[str, tuple[Dtype, ...]]:
    return {
        target.name: tuple(
            dtype
            for dtype in (layers if target.is_of_layer else embeddings)
            if target.n_cols % HEAD_COLS.get(dtype, 1) == 0
        )
        for target in targets
        if target.has_choice
    }


def auto_policy(plan: Plan) -> Policy:
    """Return the types of ``auto``: the best guess within the bytes of llama.cpp's Q4_K_M."""
    matrices = [target for target in plan.targets if target.has_unit_type and not target.is_mtp]
    others_bytes = sum(_data_bytes(t, t.dtype) for t in matrices if not t.has_choice)
    budget_bytes = math.floor(sum(q4_k_m_bytes(t, plan) for t in matrices)) - others_bytes
    types = candidates(plan.targets, AUTO_CANDIDATES, AUTO_CANDIDATES)
    for target in matrices:
        # A token does not read the table of its own embeddings: no bytes of it go elsewhere.
        if target.rule.place is Place.EMBEDDING and not plan.facts.arch.tied_head:
            most = q4_k_m_bytes(target, plan)
            fitting = [d for d in types.get(target.name, ()) if _data_bytes(target, d) <= most]
            types |= {target.name: tuple(fitting[-1:])} if fitting else {}
    least_bytes = sum(
        min(_data_bytes(t, d) for d in types[t.name]) for t in matrices if t.has_choice
    )
    costs = guessed_costs(plan, types)
    # Matrices of a few columns are padded to tiles.
    fit = assign(plan.targets, costs, max(budget_bytes, least_bytes))
    return policy_of(plan.targets, fit.dtypes)


def q4_k_m_bytes(target: Target, plan: Plan) -> float:
    """Return what llama.cpp's Q4_K_M takes for a matrix (llama-quant.cpp of 2026).

    Its blocks have 256 columns; rows of other lengths get Q5_0 and Q8_0 instead.
    """
    n_layers, layer = plan.facts.header.n_layers, target.unit.layer
    eighth = n_layers // 8
    is_outer = layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2
    kind = target.rule.target
    is_head = not target.is_of_layer and (
        plan.facts.arch.tied_head or target.rule.place is not Place.EMBEDDING
    )
    is_fine = is_head or (kind in (TensorType.V, TensorType.FFN_DOWN) and is_outer)
    coarse, fine = (4.5, 6.5625) if target.n_cols % 256 == 0 else (5.5, 8.5)
    return target.n_rows * target.n_cols * (fine if is_fine else coarse) / 8


# ---- sizes ----


def file_bytes(
    plan: Plan,
    section_bytes: Mapping[str, int],
) -> int:
    """Return the size of the file that ``Writer`` makes of a plan, without compression.

    ``section_bytes`` has the sizes of ``TOKN``, ``CHAT``, ``META`` in the order in which they are
    written; those of all others follow from the plan, which has no outlier tables. Upper bounds of
    these sizes give an upper bound of the file.
    """
    at = layout.HEADER_BYTES
    positions_bytes = n_tensors = n_bands = n_units = 0
    templates = set[tuple[tuple[object, ...], ...]]()  # tensors of experts, which are listed once
    for unit in plan.units:
        if unit.place is Place.POSITIONS:
            positions_bytes += unit.n_bytes
            continue
        at = padded(at, layout.UNIT_ALIGN)
        for target in unit.targets:
            at += TENSOR_HEADER_BYTES + padded(target.n_bytes, DATA_ALIGN)
            if target.rule.place is Place.EMBEDDING:
                n_bands = -(-target.n_rows // layout.TILE_ROWS)
        n_units += 1
        is_expert = unit.id.role == Role.EXPERT
        facts = tuple((t.rule.target, t.dtype, t.n_rows, t.n_cols) for t in unit.targets)
        if not is_expert or facts not in templates:
            n_tensors += len(unit.targets)
        if is_expert:
            templates.add(facts)
    sizes = [
        *([positions_bytes] if positions_bytes else []),
        *section_bytes.values(),
        n_units * layout.UNIT_ENTRY.size,
        *map(len, plan.facts.tables().values()),
        n_tensors * layout.TENSOR_ENTRY.size,
        n_bands * 4,
    ]
    for n_bytes in sizes:
        at = padded(at, DATA_ALIGN) + n_bytes
    return padded(at, DATA_ALIGN) + len(sizes) * layout.DIRECTORY_ENTRY.size


def bytes_at(plan: Plan, bits_per_weight: float) -> int:
    """Return the size of a file with the given bits for each weight, all sections included."""
    return math.floor(bits_per_weight * _n_weights(plan) / 8)


def fit_to_size(
    plan: Plan,
    costs: Mapping[str, Mapping[Dtype, float]],
    most_bytes: int,
    section_bytes: Mapping[str, int],
) -> Assignment:
    """Return the cheapest types with which the file has at most ``most_bytes``.

    ``costs`` names every matrix, with the types it may get; ``section_bytes`` is that of
    ``file_bytes``. Raises QsfConversionError with the smallest possible size if that is larger.
    """

    def n_bytes_with(dtypes: Mapping[str, Dtype]) -> int:
        return file_bytes(with_policy(plan, policy_of(plan.targets, dtypes)), section_bytes)

    smallest = smallest_types(plan, costs, most_bytes, section_bytes)
    least_bytes = n_bytes_with(smallest)
    # Padding between units depends on the types of the matrices. So the first try assumes none, and
    # the second subtracts the excess.
    matrix_bytes = sum(_data_bytes(t, smallest[t.name]) for t in plan.targets if t.has_choice)
    budget_bytes = most_bytes - (least_bytes - matrix_bytes) + layout.UNIT_ALIGN * len(plan.units)
    while budget_bytes >= matrix_bytes:
        fit = assign(plan.targets, costs, budget_bytes)
        excess_bytes = n_bytes_with(fit.dtypes) - most_bytes
        if excess_bytes <= 0:
            return fit
        # A full step may skip a better choice, which matters in small files only.
        step_bytes = excess_bytes if excess_bytes < most_bytes * _NEGLIGIBLE else excess_bytes // 4
        budget_bytes = min(budget_bytes, fit.n_bytes) - max(step_bytes, DATA_ALIGN)
    return assign(plan.targets, costs, matrix_bytes)


def smallest_types(
    plan: Plan,
    types: Mapping[str, Collection[Dtype]],
    most_bytes: int,
    section_bytes: Mapping[str, int],
) -> dict[str, Dtype]:
    """Return the smallest type of every matrix, by ``Target.name``.

    The other arguments are those of `fit_to_size`. Raises QsfConversionError with the size if the
    file exceeds ``most_bytes`` even so.
    """
    smallest = {
        target.name: min(types[target.name], key=lambda dtype: _data_bytes(target, dtype))
        for target in plan.targets
        if target.has_choice
    }
    smallest_plan = with_policy(plan, policy_of(plan.targets, smallest))
    least_bytes = file_bytes(smallest_plan, section_bytes)
    if least_bytes > most_bytes:
        others_bytes = sum(section_bytes.values())
        raise QsfConversionError(
            f"a file of {most_bytes / _MB:.2f} MB is too small for this model: the smallest has"
            f" {math.ceil(least_bytes / _MB * 100) / 100:.2f} MB"
            f" ({least_bytes * 8 / _n_weights(plan):.2f} bits a weight, {others_bytes / _MB:.2f} MB"
            " of them tokenizer and metadata); ask for that or more, or convert a smaller model"
        )
    return smallest


def _data_bytes(target: Target, dtype: Dtype) -> int:
    return padded(tile_bytes(dtype, target.n_rows, target.n_cols), DATA_ALIGN)


def _n_weights(plan: Plan) -> int:
    return sum(target.n_rows * target.n_cols for target in plan.targets)


# ---- costs without a measurement ----


def guessed_costs(
    plan: Plan, types: Mapping[str, Collection[Dtype]]
) -> dict[str, dict[Dtype, float]]:
    """Return costs for `fit_to_size` without any measurement, by ``Target.name``.

    The cost is the relative squared error of the type on normally distributed weights, times a
    factor for the kind of matrix. Its size does not matter: rounding a large matrix and a small
    one disturbs the residual stream about as much. Measured costs are much better.
    """
    bell = np.random.default_rng(0).standard_normal((64, 1024)).astype(np.float32)
    losses: dict[Dtype, float] = {}
    for dtype in {dtype for some in types.values() for dtype in some}:
        errors = ErrorSums()
        quantise_rows(dtype, bell, errors)
        losses[dtype] = errors.squared_error / errors.source_energy
    costs = {}
    for target in plan.targets:
        if target.name in types:
            weight = _weight(target, plan)
            costs[target.name] = {dtype: losses[dtype] * weight for dtype in types[target.name]}
    return costs


def _weight(target: Target, plan: Plan) -> float:
    if not target.is_of_layer:
        is_embedding = target.rule.place is Place.EMBEDDING
        table = _TIED if plan.facts.arch.tied_head else _EMBEDDING if is_embedding else _HEAD
        n_rows, n_all = target.n_rows, target.share.n_outputs
        share = _FIRST_ROWS if target.rule.target == TensorType.HEAD else 1.0 - _FIRST_ROWS
        of_head = share if n_rows < n_all else 1.0
        return of_head * table * plan.facts.header.n_layers
    assert target.rule.target is not None  # only learned positions have no type
    by_layer = _FIRST_LAYER if target.unit == layout.layer_unit(0) else 1.0
    return _WEIGHTS.get(target.rule.target, 1.0) * by_layer


# ---- the knapsack ----


@dataclass(slots=True)
class _Item:
    """The options of one matrix, by ascending bytes and descending cost."""

    name: str
    dtypes: list[Dtype]
    n_bytes: NDArray[np.int64]
    costs: NDArray[np.float64]


def assign(
    targets: Iterable[Target], costs: Mapping[str, Mapping[Dtype, float]], budget_bytes: int
) -> Assignment:
    """Return a type for every matrix of ``targets``: little cost within ``budget_bytes`` of data.

    Bytes go where one saves most, for each type of the largest matrix, whose steps may not fit at
    the end. The cost is that of the best choice, or above it by less than one step of another
    matrix; of real models and their targets by at most 0.6 % (bench/LOG-quantisation.md). Of equal
    costs the smaller size wins. Deterministic.

    Raises QsfConversionError when no types fit, or a cost is not finite.
    """
    matrices = [target for target in targets if target.has_choice]
    counts = Counter(target.name for target in matrices)  # experts of a layer get one type
    distinct = {target.name: target for target in matrices}.values()
    items = [_item(target, costs[target.name], counts[target.name]) for target in distinct]
    least_bytes = sum(int(item.n_bytes[0]) for item in items)
    if least_bytes > budget_bytes:
        raise QsfConversionError(
            f"the matrices take at least {least_bytes} bytes, {budget_bytes} are left for them"
        )
    largest = max(range(len(items)), key=lambda i: int(items[i].n_bytes[-1]), default=-1)
    n_tries = len(items[largest].dtypes) if items else 1
    fills = (_fill(items, budget_bytes, largest, k) for k in range(n_tries))
    found = [
        Assignment(
            {item.name: item.dtypes[k] for item, k in zip(items, chosen, strict=True)},
            sum(int(item.n_bytes[k]) for item, k in zip(items, chosen, strict=True)),
            math.fsum(float(item.costs[k]) for item, k in zip(items, chosen, strict=True)),
        )
        for chosen in fills
        if chosen is not None
    ]
    return min(found, key=lambda fit: (fit.cost, fit.n_bytes))


def _item(target: Target, costs: Mapping[Dtype, float], n: int) -> _Item:
    """Return the options of ``n`` matrices like ``target`` that no other one beats in both."""
    if not costs or not all(math.isfinite(cost) for cost in costs.values()):
        raise QsfConversionError(f"{target.name}: costs {dict(costs)}, they must be finite")
    options = sorted((n * _data_bytes(target, dtype), cost, dtype) for dtype, cost in costs.items())
    kept = options[:1]
    for option in options[1:]:
        if option[1] < kept[-1][1]:
            kept.append(option)
    return _Item(
        target.name,
        [dtype for _, _, dtype in kept],
        np.array([n_bytes for n_bytes, _, _ in kept], np.int64),
        np.array([cost for _, cost, _ in kept], np.float64),
    )


def _steps(item: _Item) -> list[tuple[float, int, int]]:
    """The lower convex hull of the options as steps (cost saved per byte, from, to), best first."""
    steps = []
    at, last = 0, len(item.dtypes) - 1
    while at < last:
        gains = (item.costs[at] - item.costs[at + 1 :]) / (
            item.n_bytes[at + 1 :] - item.n_bytes[at]
        )
        to = at + 1 + int(np.argmax(gains))
        steps.append((float(gains.max()), at, to))
        at = to
    return steps


def _fill(items: Sequence[_Item], budget_bytes: int, fixed: int, option: int) -> list[int] | None:
    """Take steps of the hulls, best first, while they fit; item ``fixed`` has the given option."""
    chosen = [option if i == fixed else 0 for i in range(len(items))]
    left = budget_bytes - sum(int(item.n_bytes[k]) for item, k in zip(items, chosen, strict=True))
    if left < 0:
        return None
    steps = [
        (-gain, i, at, to)
        for i, item in enumerate(items)
        for gain, at, to in _steps(item)
        if i != fixed
    ]
    for _, i, at, to in sorted(steps):
        n_bytes = int(items[i].n_bytes[to] - items[i].n_bytes[at])
        if chosen[i] == at and n_bytes <= left:
            chosen[i] = to
            left -= n_bytes
    return chosen


_LAYER_TOKENS: Final = 512  # to measure layers

# Called with the name of a phase that begins; returns the phase's progress function, which is
# called with the steps done and all steps.
Phase = Callable[[str], Callable[[int, int], None]]


def choose_types(
    plan: Plan,
    checkpoint: Checkpoint,
    request: Request,
    text: CalibrationText | None,
    section_bytes: Mapping[str, int],
    phase: Phase,
    state: CalibrationState | None = None,
) -> tuple[Plan, Sensitivity | None]:
    """Return the plan with a type for every matrix, and the measurement or None.

    Without a target size, ``mixed`` aims at the size that the fixed table of types gives; without
    a text it uses that table. Raises QsfConversionError when the target is too small.
    """
    table = mixed_policy(plan.targets)
    if request.layer_type == AUTO:
        return with_policy(plan, auto_policy(plan)), None
    if request.layer_type != MIXED:
        sensitivity = None
        if text is not None:
            sensitivity = _measure_layers(Original(plan, checkpoint), text, phase, state)
        return plan, sensitivity
    if text is None and not request.has_target:
        return with_policy(plan, _with_embed_type(plan, table, request)), None
    types = _candidates(plan, request)
    most_bytes = request.target_bytes
    if request.target_bpw is not None:
        most_bytes = bytes_at(plan, request.target_bpw)
    if most_bytes is None:
        policy = _with_embed_type(plan, table, request)
        most_bytes = file_bytes(with_policy(plan, policy), section_bytes)
    smallest_types(plan, types, most_bytes, section_bytes)  # raises before the long work
    sensitivity = None
    if text is not None:
        sensitivity = _measure(Original(plan, checkpoint), text, types, phase, state)
        costs: Mapping[str, Mapping[Dtype, float]] = sensitivity.kl
    else:
        costs = guessed_costs(plan, types)
    fit = fit_to_size(plan, costs, most_bytes, section_bytes)
    policy = policy_of(plan.targets, fit.dtypes)
    return with_policy(plan, policy), sensitivity


def _candidates(plan: Plan, request: Request) -> dict[str, tuple[Dtype, ...]]:
    """Return the types that each matrix may get; embeddings only the requested one, if any."""
    types = candidates(plan.targets)
    if request.embed_type is not None:
        embed_dtype = parse_quant_type(request.embed_type)
        for target in plan.targets:
            if target.name in types and not target.is_of_layer:
                types[target.name] = (table_type(target, embed_dtype),)
    return types


def _with_embed_type(plan: Plan, policy: Policy, request: Request) -> Policy:
    """Return the policy with the requested type of the embeddings, if there is one."""
    if request.embed_type is None:
        return policy
    embeddings = parse_quant_type(request.embed_type)
    by_name = dict(policy.by_name)
    for target in plan.targets:
        if target.has_choice and not target.is_of_layer:
            by_name[target.name] = table_type(target, embeddings)
    return dataclasses.replace(policy, embeddings=embeddings, by_name=by_name)


def _measure(
    original: Original,
    text: CalibrationText,
    types: Mapping[str, tuple[Dtype, ...]],
    phase: Phase,
    state: CalibrationState | None,
) -> Sensitivity:
    def run() -> Sensitivity:
        progress = phase("measuring how much each tensor matters")
        tokens = text.fitted_samples(n_tokens_within(original, types))
        return measure(original, tokens, types, progress=progress)

    return run() if state is None else state.sensitivity(run)


def _measure_layers(
    original: Original, text: CalibrationText, phase: Phase, state: CalibrationState | None
) -> Sensitivity:
    def run() -> Sensitivity:
        progress = phase("measuring how much each layer matters")
        tokens = text.fitted_samples(_LAYER_TOKENS)
        layers = measure_layers(original, tokens, progress=progress)
        return Sensitivity({}, {}, {}, tuple(layers), tokens.size)

    return run() if state is None else state.sensitivity(run)
