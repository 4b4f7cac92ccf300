"""How a model is to be rounded: by which text, to which types, for which size.

What the user asked for (`Wish`) becomes a plan in which every matrix has its type, and the text
that calibration goes through. What is measured on the way, how much each matrix and layer
matters, is kept: the layer index and the report hold it.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from qsf.errors import QsfArgumentError, QsfConversionError
from qsf.file.layout import Dtype
from qsf_converter.calibrate import assignment
from qsf_converter.calibrate.sensitivity import Sensitivity, choose_effort, measure, measure_layers
from qsf_converter.calibrate.state import CalibrationState
from qsf_converter.calibrate.texts import bundled_text, read_texts, windows
from qsf_converter.original.layers import Original
from qsf_converter.rounding.pieces import pieces_of, read_target
from qsf_converter.rounding.plan import (
    DEFAULT_EMBED_TYPE,
    QUANT_TYPES,
    TERNARY_TYPES,
    Plan,
    Policy,
    parse_quant_type,
)
from qsf_converter.rounding.quantisers import absmean
from qsf_converter.sources.checkpoint import Checkpoint
from qsf_converter.sources.source import Source

MIXED: Final = "mixed"
BUNDLED: Final = "bundled"  # as a calibration text: our own
DEFAULT_CALIBRATION_TOKENS: Final = 65536
TERNARY_RULES: Final = ("search", "absmean")

_WINDOW_TOKENS: Final = 256
_MOST_HELD_OUT: Final = 16  # windows
_LAYER_TOKENS: Final = 2048  # to measure layers by
# Bumped when the same model, text and options would no longer give the same file.
_STATE_VERSION: Final = 1

# Given the name of what begins, returns what is told of its progress: (done, in all).
Phase = Callable[[str], Callable[[int, int], None]]


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user asked for; see ``convert``."""

    quant_type: str
    embed_type: str | None = None
    calibration: str | None = None  # a path, or BUNDLED
    calibration_tokens: int = DEFAULT_CALIBRATION_TOKENS
    target_bytes: int | None = None  # of the file
    target_bpw: float | None = None  # bits of the file for each weight
    ternary_rule: str = "search"  # or absmean

    def check(self) -> None:
        """Raise QsfArgumentError for what does not go together."""
        if self.quant_type != MIXED:
            parse_quant_type(self.quant_type)
            if self.target_bytes is not None or self.target_bpw is not None:
                raise QsfArgumentError(
                    f"a target size chooses the types: quant type mixed, not {self.quant_type}"
                )
        if self.ternary_rule not in TERNARY_RULES:
            raise QsfArgumentError(
                f"ternary rule {self.ternary_rule} is unknown; "
                f"available: {', '.join(TERNARY_RULES)}"
            )
        if self.ternary_rule != "search":
            if QUANT_TYPES.get(self.quant_type) not in TERNARY_TYPES:
                raise QsfArgumentError(
                    f"the ternary rule {self.ternary_rule} is for ternary types, "
                    f"not {self.quant_type}"
                )
            if self.calibration is not None:
                raise QsfArgumentError(
                    f"the ternary rule {self.ternary_rule} leaves nothing to calibrate"
                )
        if self.embed_type is not None:
            parse_quant_type(self.embed_type, option="embed type")
        if self.target_bytes is not None and self.target_bpw is not None:
            raise QsfArgumentError("a target size in MB and one in bits a weight are two targets")
        if self.target_bpw is not None and not 0 < self.target_bpw <= 32:
            raise QsfArgumentError(f"a target of {self.target_bpw:g} bits a weight, not 0 .. 32")
        if self.target_bytes is not None and self.target_bytes <= 0:
            raise QsfArgumentError("the target size is not above zero")
        if self.calibration_tokens < 512:
            raise QsfArgumentError(
                f"{self.calibration_tokens} calibration tokens are too few: at least 512"
            )

    def options(self) -> dict[str, str]:
        """What META says was asked for, beside the types that came of it; no paths."""
        options = {}
        if self.calibration is not None:
            options["calibration_tokens"] = str(self.calibration_tokens)
        if self.target_bytes is not None:
            options["target_bytes"] = str(self.target_bytes)
        if self.target_bpw is not None:
            options["target_bpw"] = f"{self.target_bpw:g}"
        if self.ternary_rule != "search":
            options["ternary_rule"] = self.ternary_rule
        return options

    def first_policy(self) -> Policy:
        """The types before anything is measured."""
        embed_type = self.embed_type
        if self.quant_type == MIXED:
            embeddings = parse_quant_type(embed_type or DEFAULT_EMBED_TYPE, option="embed type")
            return Policy(Dtype.MIXED, embeddings)
        layers = parse_quant_type(self.quant_type)
        if embed_type is None:
            embed_type = "f16" if layers is Dtype.F16 else DEFAULT_EMBED_TYPE
        return Policy(layers, parse_quant_type(embed_type, option="embed type"))


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """Token ids of what is fitted to and of what only judges, [n_windows, n_tokens] each."""

    fitted: NDArray[np.int32]
    held_out: NDArray[np.int32]
    name: str
    sha256: str

    @property
    def judged_by(self) -> str:
        """What the report calls the held-out windows."""
        return f"{self.name}, held out"

    def facts(self) -> dict[str, Any]:
        """What META says of it."""
        return {
            "text": self.name,
            "sha256": self.sha256,
            "windows": len(self.fitted),
            "window_tokens": self.fitted.shape[1],
            "tokens": self.fitted.size,
            "held_out_tokens": self.held_out.size,
        }


def read_calibration_text(source: Source, wish: Wish) -> CalibrationText | None:
    """Return the windows to calibrate with, or None when none was asked for.

    Every so many-th window is held out. Raises QsfConversionError when the model has no tokenizer
    or the text is too short.
    """
    if wish.calibration is None:
        return None
    if source.tokenizer is None:
        raise QsfConversionError("calibration needs the model's tokenizer.json, and there is none")
    is_bundled = wish.calibration == BUNDLED
    texts = [bundled_text()] if is_bundled else read_texts(Path(wish.calibration))
    header = source.facts.header
    n_tokens = min(_WINDOW_TOKENS, header.max_tokens)
    n_fitted = max(1, wish.calibration_tokens // n_tokens)
    n_held_out = max(1, min(_MOST_HELD_OUT, n_fitted // 8))
    tokens = windows(
        source.tokenizer,
        texts,
        n_tokens=n_tokens,
        max_windows=n_fitted + n_held_out,
        bos_id=header.bos_id,
        eos_id=header.eos_id,
    )
    if len(tokens) < 2:
        raise QsfConversionError(
            f"{wish.calibration}: {tokens.size} tokens are too few to calibrate with: at least"
            f" two windows of {n_tokens} are needed"
        )
    if int(tokens.max()) >= header.n_vocab:
        raise QsfConversionError(
            f"the tokenizer has token {int(tokens.max())}, the model {header.n_vocab} tokens"
        )
    n_held_out = max(1, min(n_held_out, len(tokens) // 4))
    step = len(tokens) // n_held_out
    is_held_out = np.zeros(len(tokens), bool)
    is_held_out[step - 1 :: step][:n_held_out] = True
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    name = BUNDLED if is_bundled else Path(wish.calibration).name
    return CalibrationText(tokens[~is_held_out], tokens[is_held_out], name, digest)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A plan with all types, and what was measured to get there."""

    plan: Plan
    policy: Policy
    sensitivity: Sensitivity | None = None


def with_tensor_scales(plan: Plan, checkpoint: Checkpoint, wish: Wish) -> Plan:
    """Return the plan with the scale that rule absmean (BitNet b1.58) gives each ternary matrix.

    Reads these matrices once.
    """
    if wish.ternary_rule != "absmean":
        return plan
    targets = []
    for target in plan.targets:
        if target.is_matrix and target.dtype in TERNARY_TYPES:
            parts = (read_target(target, checkpoint, piece) for piece in pieces_of([target]))
            target = dataclasses.replace(target, tensor_scale=absmean(parts))
        targets.append(target)
    return dataclasses.replace(plan, targets=tuple(targets))


def choose_types(
    plan: Plan,
    checkpoint: Checkpoint,
    wish: Wish,
    text: CalibrationText | None,
    section_bytes: Mapping[str, int],
    phase: Phase,
    state: CalibrationState | None = None,
) -> Recipe:
    """Give every matrix its type.

    Without a target, ``mixed`` is as large as the plan's table of types makes it; without a text,
    and without a target, it is that table. Raises QsfConversionError when the target is too small.
    """
    is_mixed = wish.quant_type == MIXED
    has_target = wish.target_bytes is not None or wish.target_bpw is not None
    table = assignment.mixed_policy(plan.targets)
    if is_mixed and text is None and not has_target:
        policy = _with_embed_type(plan, table, wish)
        return Recipe(assignment.with_policy(plan, policy), policy)
    if not is_mixed:
        sensitivity = None
        if text is not None:
            sensitivity = _measured_layers(Original(plan, checkpoint), text, phase, state)
        return Recipe(plan, wish.first_policy(), sensitivity)
    types = assignment.candidates(plan.targets)
    if wish.embed_type is not None:
        only = parse_quant_type(wish.embed_type)
        layers = {t.name for t in plan.targets if t.unit_idx in range(1, _final_unit(plan))}
        types = {name: some if name in layers else (only,) for name, some in types.items()}
    most_bytes = wish.target_bytes
    if wish.target_bpw is not None:
        most_bytes = assignment.bytes_at(plan, wish.target_bpw)
    if most_bytes is None:
        policy = _with_embed_type(plan, table, wish)
        most_bytes = assignment.file_bytes(assignment.with_policy(plan, policy), section_bytes)
    assignment.smallest_types(plan, types, most_bytes, section_bytes)  # refuses before the work
    sensitivity = None
    if text is not None:
        sensitivity = _measured(Original(plan, checkpoint), text, types, phase, state)
        costs: Mapping[str, Mapping[Dtype, float]] = sensitivity.kl
    else:
        costs = assignment.guessed_costs(plan, types)
    fit = assignment.fit_to_size(plan, costs, most_bytes, section_bytes)
    policy = assignment.policy_of(plan.targets, fit.dtypes)
    return Recipe(assignment.with_policy(plan, policy), policy, sensitivity)


def _final_unit(plan: Plan) -> int:
    return plan.facts.header.n_layers + 1


def _with_embed_type(plan: Plan, policy: Policy, wish: Wish) -> Policy:
    """The policy with the embeddings that were asked for, if any were."""
    if wish.embed_type is None:
        return policy
    embeddings = parse_quant_type(wish.embed_type)
    by_name = dict(policy.by_name)
    for target in plan.targets:
        if target.is_matrix and target.unit_idx in (0, _final_unit(plan)):
            by_name[target.name] = embeddings
    return dataclasses.replace(policy, embeddings=embeddings, by_name=by_name)


def _some_windows(text: CalibrationText, n_tokens: int) -> NDArray[np.int32]:
    """Windows of about ``n_tokens`` in all, spread over the text."""
    length = min(text.fitted.shape[1], n_tokens)
    n = max(1, min(len(text.fitted), n_tokens // length))
    return text.fitted[:: len(text.fitted) // n][:n, :length]


def _measured(
    original: Original,
    text: CalibrationText,
    types: Mapping[str, tuple[Dtype, ...]],
    phase: Phase,
    state: CalibrationState | None,
) -> Sensitivity:
    def run() -> Sensitivity:
        effort = choose_effort(original, types)
        progress = phase("measuring how much each tensor matters")
        tokens = _some_windows(text, effort.n_tokens)
        return measure(original, tokens, types, measured=effort.measured, progress=progress)

    return run() if state is None else state.sensitivity(run)


def _measured_layers(
    original: Original, text: CalibrationText, phase: Phase, state: CalibrationState | None
) -> Sensitivity:
    def run() -> Sensitivity:
        progress = phase("measuring how much each layer matters")
        tokens = _some_windows(text, _LAYER_TOKENS)
        layers = measure_layers(original, tokens, progress=progress)
        return Sensitivity({}, {}, {}, tuple(layers), tokens.size)

    return run() if state is None else state.sensitivity(run)


def state_key(source: Source, wish: Wish, text: CalibrationText) -> str:
    """Say what a calibration is of: with the same key it makes the same file."""
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in source.files]
    facts = {
        "version": _STATE_VERSION,
        "files": sorted(files),
        "tensors": [[t.name, t.shape, t.dtype] for t in source.checkpoint.tensors.values()],
        "wish": dataclasses.asdict(wish),
        "fitted": hashlib.sha256(text.fitted.tobytes()).hexdigest(),
        "held_out": hashlib.sha256(text.held_out.tobytes()).hexdigest(),
    }
    return json.dumps(facts)
