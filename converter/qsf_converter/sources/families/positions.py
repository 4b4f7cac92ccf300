"""Frequencies of RoPE and slopes of ALiBi as numbers, computed as transformers computes them.

Sets that header and ARCH can express (one set, plain, linear or llama3) stay there; all others go
to the section ROPE. Source: modeling_rope_utils.py of transformers.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from qsf.errors import QsfConversionError, shown
from qsf.file.kinds import RopeSet
from qsf.file.layout import RopeScaling
from qsf_converter.sources.families.config import MAX_TOKENS, Config

_ORIGINAL: Final = "original_max_position_embeddings"
KINDS: Final = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


@dataclass(frozen=True, slots=True)
class Rope:
    """One way to rotate.

    ``arch`` are the fields of ``Arch`` that describe it, None if only ``sets`` can. ``sets`` have
    the number 0. ``temperature`` is the beta and the step of a query temperature.
    """

    theta: float
    arch: dict[str, Any] | None
    sets: tuple[RopeSet, ...]
    temperature: tuple[float, int] | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    """The inputs of the frequencies that are not keys of the scaling."""

    scaling: Config
    theta: float
    n_dims: int  # rotated dimensions
    head_dim: int
    max_tokens: int
    plain: NDArray[np.float64] = field(init=False)  # [n_dims / 2]

    def __post_init__(self) -> None:
        exponents = np.arange(0, self.n_dims, 2) / self.n_dims
        object.__setattr__(self, "plain", self.theta**-exponents)

    @property
    def original_tokens(self) -> int:
        return self.scaling.count(_ORIGINAL, MAX_TOKENS, self.max_tokens)


NO_ROPE = Config({"rope_theta": 10000.0})  # of layers that rotate nothing: no number is used


def parameters_of(
    config: Config,
    layer_type: str,
    *,
    theta: str = "rope_theta",
    defaults: Mapping[str, Any] | None = None,
) -> Config:
    """Return the RoPE parameters of a type of layers, from either spelling, as one object.

    transformers 5 has one object ``rope_parameters``, possibly one per type of layers; older
    versions have ``rope_theta``, ``rope_scaling`` and ``partial_rotary_factor``. ``theta`` is the
    key outside of the object that is used if the object has no theta; ``defaults`` hold values
    that both lack.
    """
    old, modern = config.get("rope_scaling"), None
    if config.has("rope_parameters") or not old:
        modern = config.get("rope_parameters")  # of the class's defaults too
    name, scaling = ("rope_parameters", modern) if modern else ("rope_scaling", old or {})
    if not isinstance(scaling, dict):
        raise config.error(name, "is not an object")
    if any(isinstance(value, dict) for value in scaling.values()):
        scaling = scaling.get(layer_type)
        if not isinstance(scaling, dict):
            raise config.error(f"{name}.{layer_type}", "is missing, or is not an object")
    stated: dict[str, Any] = {}
    if config.get(theta) is not None:
        stated["rope_theta"] = config.positive(theta)
    if config.get("partial_rotary_factor") is not None:
        stated["partial_rotary_factor"] = config.positive("partial_rotary_factor")
    stated |= {key: value for key, value in scaling.items() if value is not None}
    # Phi-3 states the original length outside, and that value wins.
    if config.get(_ORIGINAL) is not None:
        stated[_ORIGINAL] = config.count(_ORIGINAL, MAX_TOKENS)
    return Config(stated, defaults=defaults, where=f"{name}.")


def rope_of(
    scaling: Config, head_dim: int, max_tokens: int, *, is_interleaved: bool, may_be_partial: bool
) -> Rope:
    """Return the frequencies for ``scaling``.

    Raises QsfConversionError for an unsupported kind or value.
    """
    theta = scaling.positive("rope_theta", 10000.0)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    kind = {"su": "longrope", "mrope": "default"}.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in KINDS:
        raise QsfConversionError(
            f"config.json: RoPE scaling {shown(kind)} is not supported; "
            f"supported: {', '.join(KINDS)}"
        )
    n_dims = _rotated(scaling, head_dim, kind == "proportional")
    if n_dims != head_dim and not may_be_partial:
        raise scaling.error("partial_rotary_factor", "is not supported for this architecture")
    place = _Place(scaling, theta, n_dims, head_dim, max_tokens)
    arch, variants = _SCALINGS[kind](place)
    if arch is not None:
        if n_dims != head_dim:
            arch["rope_dims"] = n_dims
        if is_interleaved:
            arch["rope_interleaved"] = True
    sets = tuple(
        RopeSet(
            number=0,
            frequencies=tuple(float(f) for f in frequencies.astype(np.float32)),
            is_interleaved=is_interleaved,
            least_context=least,
            factor=float(np.float32(factor)),
        )
        for least, frequencies, factor in variants
    )
    temperature = None
    if scaling.get("llama_4_scaling_beta"):
        temperature = (scaling.positive("llama_4_scaling_beta"), place.original_tokens)
    return Rope(theta, arch, sets, temperature)


def _rotated(scaling: Config, head_dim: int, is_proportional: bool) -> int:
    """How many dimensions of a head are rotated."""
    part = scaling.positive("partial_rotary_factor", 1.0)
    n_dims = head_dim if is_proportional else int(head_dim * part)
    if "rotary_dims" in scaling:  # the form of GPT-J and of GGUF files
        n_dims = scaling.count("rotary_dims", head_dim)
    if head_dim % 2 or n_dims > head_dim or n_dims < 2 or n_dims % 2:
        raise QsfConversionError(
            f"config.json: RoPE needs an even head_dim, and an even part of it, not {n_dims} of "
            f"{head_dim} (partial_rotary_factor {part:g})"
        )
    return n_dims


# (least context, frequencies [pairs], factor of cos and sin) of each set
_Found = list[tuple[int, NDArray[np.float64], float]]


def _default(place: _Place) -> tuple[dict[str, Any] | None, _Found]:
    # Dynamic scaling changes nothing up to the model's own context, which is a file's longest.
    return {}, [(0, place.plain, 1.0)]


def _linear(place: _Place) -> tuple[dict[str, Any] | None, _Found]:
    factor = place.scaling.positive("factor")
    arch = {"rope_scaling": RopeScaling.LINEAR, "rope_factor": factor}
    return arch, [(0, place.plain / factor, 1.0)]


def _llama3(place: _Place) -> tuple[dict[str, Any] | None, _Found]:
    scaling = place.scaling
    factor = scaling.positive("factor")
    low, high = scaling.positive("low_freq_factor"), scaling.positive("high_freq_factor")
    if high <= low:
        raise scaling.error(
            "high_freq_factor", f"= {high:g} is not above low_freq_factor = {low:g}"
        )
    original = place.scaling.count(_ORIGINAL, MAX_TOKENS)
    turns = original * place.plain / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    arch = {
        "rope_scaling": RopeScaling.LLAMA3,
        "rope_factor": factor,
        "rope_low_freq_factor": low,
        "rope_high_freq_factor": high,
        "rope_original_tokens": original,
    }
    return arch, [(0, place.plain * (kept + (1 - kept) / factor), 1.0)]


def _proportional(place: _Place) -> tuple[dict[str, Any] | None, _Found]:
    part = place.scaling.positive("partial_rotary_factor", 1.0)
    factor = place.scaling.positive("factor", 1.0)
    n_rotated = int(part * place.head_dim // 2)
    frequencies = np.zeros(place.head_dim // 2)
    exponents = np.arange(0, 2 * n_rotated, 2) / place.head_dim
    frequencies[:n_rotated] = place.theta**-exponents / factor
    return None, [(0, frequencies, 1.0)]


def _yarn(place: _Place) -> tuple[dict[str, Any] | None, _Found]:
    scaling, original = place.scaling, place.original_tokens
    ratio = place.max_tokens / original if scaling.has(_ORIGINAL) else None
    factor = scaling.positive("factor", ratio)

    def pair_that_turns(times: float) -> float:
        wave = math.log(original / (times * 2 * math.pi))
        return place.n_dims * wave / (2 * math.log(place.theta))

    low = pair_that_turns(scaling.positive("beta_fast", 32.0))
    high = pair_that_turns(scaling.positive("beta_slow", 1.0))
    if scaling.boolean("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, place.n_dims - 1)
    span = high - low if high != low else 0.001
    stretched = np.clip((np.arange(place.n_dims // 2) - low) / span, 0, 1)
    frequencies = place.plain * (1 - stretched) + place.plain / factor * stretched
    return None, [(0, frequencies, _yarn_factor(scaling, factor))]


def _yarn_factor(scaling: Config, factor: float) -> float:
    def of(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return scaling.positive("attention_factor")
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return of(scaling.positive("mscale")) / of(scaling.positive("mscale_all_dim"))
    return of(1.0)


def _longrope(place: _Place) -> tuple[dict[str, Any] | None, _Found]:
    scaling, original, n_pairs = place.scaling, place.original_tokens, place.n_dims // 2
    short, long = (
        np.array(scaling.numbers(name, n_pairs)) for name in ("short_factor", "long_factor")
    )
    ratio = scaling.positive("factor", place.max_tokens / original)
    if scaling.get("attention_factor") is not None:
        factor = scaling.positive("attention_factor")
    else:
        factor = 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original))
    variants: _Found = [(0, place.plain / short, factor)]
    if original < place.max_tokens:
        variants.append((original + 1, place.plain / long, factor))
    return None, variants


_SCALINGS: Final = {
    "default": _default,
    "dynamic": _default,
    "linear": _linear,
    "llama3": _llama3,
    "proportional": _proportional,
    "yarn": _yarn,
    "longrope": _longrope,
}


def alibi_slopes(n_heads: int) -> tuple[float, ...]:
    """Return the slopes of the heads of Falcon and BLOOM."""
    power = 1 << (n_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4 * (2 * i + 1) / power) for i in range(n_heads - power)]
    return tuple(slopes)


def mpt_slopes(n_heads: int, most: float) -> tuple[float, ...]:
    """Return the slopes of the heads of MPT; that of the last head is 2 ** -``most``."""
    power = 1 << (n_heads - 1).bit_length()
    slopes = [2.0 ** -((i + 1) * most / power) for i in range(power)]
    if power != n_heads:
        slopes = slopes[1::2] + slopes[::2]
    return tuple(slopes[:n_heads])
