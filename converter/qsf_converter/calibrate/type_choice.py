"""Chooses the type of each matrix: the requested one, or by a target size and a measurement.

The measured importance of each matrix and layer is kept for the layer index and the report.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Final

from qsf.file.layout import Dtype
from qsf_converter.calibrate import assignment
from qsf_converter.calibrate.sensitivity import (
    Sensitivity,
    measure,
    measure_layers,
    n_tokens_within,
)
from qsf_converter.calibrate.state import CalibrationState
from qsf_converter.calibrate.texts import CalibrationText
from qsf_converter.original.layers import Original
from qsf_converter.request import MIXED, Request
from qsf_converter.rounding.plan import Plan, Policy, parse_quant_type, table_type
from qsf_converter.sources.checkpoint import Checkpoint

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
    table = assignment.mixed_policy(plan.targets)
    if request.layer_type != MIXED:
        sensitivity = None
        if text is not None:
            sensitivity = _measure_layers(Original(plan, checkpoint), text, phase, state)
        return plan, sensitivity
    if text is None and not request.has_target:
        return assignment.with_policy(plan, _with_embed_type(plan, table, request)), None
    types = _candidates(plan, request)
    most_bytes = request.target_bytes
    if request.target_bpw is not None:
        most_bytes = assignment.bytes_at(plan, request.target_bpw)
    if most_bytes is None:
        policy = _with_embed_type(plan, table, request)
        most_bytes = assignment.file_bytes(assignment.with_policy(plan, policy), section_bytes)
    assignment.smallest_types(plan, types, most_bytes, section_bytes)  # raises before the long work
    sensitivity = None
    if text is not None:
        sensitivity = _measure(Original(plan, checkpoint), text, types, phase, state)
        costs: Mapping[str, Mapping[Dtype, float]] = sensitivity.kl
    else:
        costs = assignment.guessed_costs(plan, types)
    fit = assignment.fit_to_size(plan, costs, most_bytes, section_bytes)
    policy = assignment.policy_of(plan.targets, fit.dtypes)
    return assignment.with_policy(plan, policy), sensitivity


def _candidates(plan: Plan, request: Request) -> dict[str, tuple[Dtype, ...]]:
    """Return the types that each matrix may get; embeddings only the requested one, if any."""
    types = assignment.candidates(plan.targets)
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
