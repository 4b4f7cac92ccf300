"""The rules of ARCH, KIND and ROPE in Python: docs/format.md, sections 6 to 8."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from qsf.errors import QsfError
from qsf.file.kinds import F32, F32_ARRAY, U32, LayerKind, RopeSet, Value
from qsf.file.layout import *


@dataclass(frozen=True, slots=True)
class Key:
    """A key that this release knows."""

    number: int
    name: str  # of the field
    type: int  # U32, F32 or F32_ARRAY
    least: int = 0  # of a u32; an f32 is above 0, the values of an array are 0 or more
    most: int = 0xFFFFFFFF


def check_value(section: str, key: Key, value: Value, error: type[QsfError]) -> None:
    if isinstance(value, tuple):
        for i, v in enumerate(value):
            if not 0.0 <= v <= F32_MAX:
                raise error(f"{section}: {key.name}[{i}] is {v:g}, allowed: finite, 0 or more")
    elif key.type == F32:
        if not 0.0 < value <= F32_MAX:
            raise error(f"{section}: {key.name} is {value:g}, allowed: finite, above 0")
    elif not key.least <= value <= key.most:
        raise error(f"{section}: {key.name} is {value}, allowed: {key.least} .. {key.most}")


def kind_keys(header: Header) -> tuple[Key, ...]:
    n_kv_heads = header.n_kv_heads or header.n_heads
    return (
        Key(1, "mixer", U32, most=max(Mixer)),
        Key(16, "is_parallel", U32, most=1),
        Key(17, "is_mtp", U32, most=1),
        Key(18, "is_post_norm", U32, most=1),
        Key(32, "n_heads", U32, least=1, most=header.n_heads),
        Key(33, "n_kv_heads", U32, least=1, most=n_kv_heads),
        Key(34, "head_dim", U32, least=1, most=header.head_dim),
        Key(36, "window_tokens", U32),
        Key(37, "rope_set", U32, most=ROPE_NONE),
        Key(38, "score_scale", F32),
        Key(39, "score_cap", F32),
        Key(40, "temperature_beta", F32),
        Key(41, "temperature_step", U32, least=1),
        Key(43, "alibi_slopes", F32_ARRAY),
        Key(44, "latent_rank", U32, least=1, most=header.head_dim),
        Key(45, "nope_dim", U32, least=1, most=MAX_HEAD_DIM),
        Key(46, "latent_value_dim", U32, least=1, most=MAX_HEAD_DIM),
        Key(47, "query_rank", U32, least=1, most=MAX_DIM),
        Key(48, "qk_norm", U32, most=max(QkNorm)),
        Key(49, "kv_source", U32, most=header.n_layers - 1),
        Key(50, "has_late_qk_norm", U32, most=1),
        Key(51, "qkv_limit", F32),
        Key(52, "latent_norm_dim", U32, least=1, most=header.head_dim),
        Key(56, "output_gate", U32, most=2),
        Key(57, "value_norm", U32, most=1),
        Key(59, "values_are_keys", U32, most=1),
        Key(64, "ffn", U32, most=max(Ffn)),
        Key(65, "ffn_dim", U32, least=1, most=header.ffn_dim),
        Key(66, "activation", U32, most=max(Activation)),
        Key(67, "xielu_square", F32),
        Key(68, "xielu_exp", F32),
        Key(69, "xielu_line", F32),
        Key(80, "n_experts", U32, least=1, most=MAX_LAYER_EXPERTS),
        Key(81, "n_chosen", U32, least=1, most=MAX_CHOSEN),
        Key(82, "expert_dim", U32, least=1, most=header.ffn_dim),
        Key(83, "expert_score", U32, most=max(ExpertScore)),
        Key(84, "expert_weights", U32, most=max(ExpertWeights)),
        Key(85, "weights_epsilon", F32),
        Key(86, "weights_factor", F32),
        Key(87, "n_groups", U32, least=1, most=MAX_LAYER_EXPERTS),
        Key(88, "n_groups_kept", U32, least=1, most=MAX_LAYER_EXPERTS),
        Key(89, "group_score", U32, most=max(GroupScore)),
        Key(91, "expert_ffn", U32, least=Ffn.PLAIN, most=Ffn.GATED),
        Key(112, "n_key_heads", U32, least=1, most=MAX_HEADS),
        Key(113, "n_value_heads", U32, least=1, most=MAX_HEADS),
        Key(114, "key_dim", U32, least=1, most=MAX_STATE_DIM),
        Key(115, "value_dim", U32, least=1, most=MAX_STATE_DIM),
        Key(116, "n_taps", U32, least=2, most=MAX_TAPS),
        Key(117, "gate_rank", U32, least=1, most=MAX_DIM),
        Key(118, "has_channel_decays", U32, most=1),
        Key(119, "beta_factor", F32),
        Key(120, "decay_limit", F32),
        Key(123, "has_sigmoid_gate", U32, most=1),
        Key(125, "value_epsilon", F32),
        Key(126, "has_tiled_heads", U32, most=1),
        Key(128, "residual_factor", F32),
    )


def rotary_dims_of(header: Header, arch: Arch, sets: Sequence[RopeSet]) -> dict[int, int]:
    if sets:
        return {s.number: 2 * len(s.frequencies) for s in sets}
    if header.positions != Positions.ROPE:
        return {}
    return {0: header.head_dim if arch.rope_dims is None else arch.rope_dims}


_ATTENTION_FIELDS: Final = (
    "score_scale", "score_cap", "temperature_beta", "alibi_slopes", "qk_norm", "kv_source",
    "output_gate", "value_norm", "values_are_keys", "latent_rank", "qkv_limit",
)  # fmt: skip
_HEAD_FIELDS: Final = ("n_key_heads", "n_value_heads", "key_dim", "value_dim")  # keys 112 .. 115
_DELTA_FIELDS: Final = (  # keys 117 .. 126
    "gate_rank", "has_channel_decays", "has_sigmoid_gate", "beta_factor", "value_epsilon",
    "has_tiled_heads", "decay_limit",
)  # fmt: skip


def _check_mixer(name: str, k: LayerKind, header: Header, error: type[QsfError]) -> None:
    """Raise ``error`` unless a kind has the fields of its mixer, and no others."""
    heads = (header.n_heads, header.n_kv_heads or header.n_heads, header.head_dim, 0, ROPE_NONE)
    is_plain = heads == (k.n_heads, k.n_kv_heads, k.head_dim, k.window_tokens, k.rope_set) and all(
        getattr(k, f) == LayerKind.__dataclass_fields__[f].default for f in _ATTENTION_FIELDS
    )
    if not k.has_attention and not is_plain:
        raise error(
            f"{name}: mixer {int(k.mixer)} (key 1) with attention's keys 32 .. 59, allowed:"
            " a window (36) of 0, RoPE set (37) 255"
        )
    if (k.mixer in (Mixer.ATTENTION, Mixer.NONE)) != (k.n_taps == 0):
        raise error(
            f"{name}: mixer {int(k.mixer)} (key 1) has {k.n_taps} taps (key 116), allowed:"
            f" 2 .. {MAX_TAPS} for a convolution (1 .. 4), else none"
        )
    _check_latent(name, k, error)
    if k.has_ssd and k.kv_source:
        raise error(f"{name}: SSD (key 1) with another layer's keys (key 49)")
    if k.mixer == Mixer.NONE and (k.is_parallel or (k.ffn == Ffn.NONE and not k.n_experts)):
        what = "with a parallel FFN (key 16)" if k.is_parallel else "without an FFN"
        raise error(f"{name}: mixer 5 (key 1), which is none, {what}, allowed: an FFN or experts")
    _check_state(name, k, error)


def _check_latent(name: str, k: LayerKind, error: type[QsfError]) -> None:
    """Raise ``error`` for wrong fields of latent attention, which other attention does not have."""
    if not k.latent_rank:
        if k.nope_dim or k.latent_value_dim or k.query_rank or k.latent_norm_dim:
            raise error(f"{name}: keys 45 .. 47, 52 without a latent (key 44)")
        return
    others = (k.qk_norm, k.output_gate == 1, k.value_norm, k.values_are_keys, k.qkv_limit)
    if (
        k.latent_rank % LATENT_STEP
        or k.latent_rank >= k.head_dim
        or not k.nope_dim
        or not k.latent_value_dim
        or k.latent_value_dim % LATENT_VALUE_STEP
        or k.n_kv_heads != 1
        or k.latent_norm_dim > k.latent_rank
        or any(others)
    ):
        raise error(
            f"{name}: a latent of {k.latent_rank} in keys of {k.head_dim}, queries of"
            f" {k.nope_dim}, values of {k.latent_value_dim}, {k.n_kv_heads} KV heads, allowed: a"
            f" multiple of {LATENT_STEP} below the keys, 1 or more, a multiple of"
            f" {LATENT_VALUE_STEP}, 1, without keys 48 .. 59 but a gate of heads (56), and a norm"
            " (52) of at most all"
        )


def _check_state(name: str, k: LayerKind, error: type[QsfError]) -> None:
    """Raise ``error`` for wrong fields of states by heads, which other mixers do not have."""
    has_heads = k.mixer == Mixer.DELTA or k.has_ssd
    for key, field in enumerate(_HEAD_FIELDS, 112):
        if has_heads != (getattr(k, field) != 0):
            raise error(
                f"{name}: mixer {int(k.mixer)} (key 1) with a key {key} of {getattr(k, field)},"
                " allowed: 1 or more for the delta rule (2) and SSD (3, 4), else none"
            )
    if k.mixer != Mixer.DELTA and any(
        getattr(k, f) != LayerKind.__dataclass_fields__[f].default for f in _DELTA_FIELDS
    ):
        raise error(f"{name}: mixer {int(k.mixer)} (key 1) with keys 117 .. 126")
    if not has_heads:
        return
    n_rows = k.channels(0)
    if k.n_value_heads % k.n_key_heads != 0 or n_rows > MAX_MIXED_ROWS:
        raise error(
            f"{name}: {k.n_value_heads} value heads, {k.n_key_heads} key heads, {n_rows} rows of"
            f" q, k and v, allowed: a multiple of the key heads, at most {MAX_MIXED_ROWS} rows"
        )


def check_kind(
    name: str,
    kind: LayerKind,
    header: Header,
    rotary_dims: dict[int, int],
    error: type[QsfError],
) -> None:
    """Raise ``error`` for fields of a kind that contradict each other."""
    _check_mixer(name, kind, header, error)
    if kind.n_heads % kind.n_kv_heads != 0:
        raise error(f"{name}: {kind.n_kv_heads} KV heads do not divide {kind.n_heads} heads")
    if kind.rope_set != ROPE_NONE:
        dims = rotary_dims.get(kind.rope_set)
        if dims is None:
            raise error(f"{name}: there is no RoPE set {kind.rope_set}")
        if dims > kind.head_dim - kind.latent_rank:
            raise error(
                f"{name}: RoPE set {kind.rope_set} rotates {dims} dimensions, the heads have"
                f" {kind.head_dim - kind.latent_rank}"
            )
    if kind.is_post_norm and kind.is_parallel:
        raise error(f"{name}: post-norm (key 18) with a parallel FFN (key 16)")
    if (kind.temperature_beta == 0.0) != (kind.temperature_step == 0):
        raise error(f"{name}: a query temperature has both a beta and a step")
    _check_values(name, kind, error)
    if kind.values_are_keys and kind.qk_norm == QkNorm.WHOLE_WIDTH:
        raise error(f"{name}: values that are keys (key 59), whose heads have one norm (key 48)")
    if kind.kv_source and (
        kind.value_norm
        or kind.values_are_keys
        or kind.latent_rank
        or kind.qk_norm == QkNorm.WHOLE_WIDTH
    ):
        raise error(
            f"{name}: keys and values of another layer (key 49) with a latent or norms of its own"
            " (keys 44, 48, 57, 59), allowed: of queries, per head"
        )
    if kind.alibi_slopes and len(kind.alibi_slopes) != kind.n_heads:
        raise error(f"{name}: {len(kind.alibi_slopes)} slopes for {kind.n_heads} heads")
    _check_experts(name, kind, error)


def check_sources(layers: Sequence[LayerKind], error: type[QsfError]) -> None:
    """Raise ``error`` unless layers read keys and values of earlier ones with the same heads.

    Only the last layer may be an MTP head.
    """

    def heads(kind: LayerKind) -> tuple[object, ...]:
        heads = kind.n_kv_heads, kind.head_dim, kind.window_tokens
        return (kind.has_attention, kind.latent_rank, *heads)

    for i, kind in enumerate(layers):
        source = kind.kv_source - 1
        is_alone = i == 0 or i + 1 != len(layers) or kind.kv_source
        if kind.is_mtp and (is_alone or kind.mixer != Mixer.ATTENTION):
            raise error(
                f"KIND: layer {i} of {len(layers)} is an MTP head (key 17), allowed: the last of 2"
                " or more, with attention to keys of its own"
            )
        if kind.kv_source and (
            source >= i or layers[source].kv_source or heads(layers[source]) != heads(kind)
        ):
            raise error(
                f"KIND: layer {i} reads keys and values of layer {source}, allowed: an earlier"
                " layer with keys of its own, as many KV heads, the same head dimension and window"
            )


def _check_values(name: str, k: LayerKind, error: type[QsfError]) -> None:
    """Raise ``error`` for norms and limits of Q and K, or an activation, that are not complete."""
    is_by_head = k.qk_norm in (QkNorm.PER_HEAD, QkNorm.OWN_WEIGHTS)
    if k.has_late_qk_norm and (not is_by_head or k.temperature_step):
        raise error(
            f"{name}: a late norm of Q and K (key 50), allowed: by heads (key 48 of 1 or 3) without"
            " a query temperature (40, 41)"
        )
    if k.qkv_limit and k.qk_norm == QkNorm.WHOLE_WIDTH:
        raise error(f"{name}: a limit of Q, K and V (key 51), whose heads have one norm (key 48)")
    is_xielu = k.activation == Activation.XIELU
    if any((n != 0) != is_xielu for n in (k.xielu_square, k.xielu_exp, k.xielu_line)):
        raise error(
            f"{name}: activation {int(k.activation)} (key 66), allowed: 6 with all of keys 67"
            " .. 69, others with none"
        )


_EXPERT_FIELDS: Final = (
    "n_chosen", "expert_dim", "expert_score", "expert_weights", "weights_epsilon",
    "weights_factor", "n_groups", "n_groups_kept", "group_score", "expert_ffn",
)  # fmt: skip


def _check_experts(name: str, k: LayerKind, error: type[QsfError]) -> None:
    """Raise ``error`` for wrong fields of the routed part, or for any without experts."""
    if k.n_experts == 0:
        if any(getattr(k, f) != LayerKind.__dataclass_fields__[f].default for f in _EXPERT_FIELDS):
            raise error(f"{name}: keys 81 .. 91 without experts (key 80)")
        return
    if k.n_chosen == 0 or k.expert_dim == 0:
        raise error(
            f"{name}: experts (key 80) without those chosen (81) or their FFN dimension (82)"
        )
    least = 2 if k.group_score == GroupScore.TWO_LARGEST else 1
    if (
        k.n_experts % k.n_groups != 0
        or k.n_groups_kept > k.n_groups
        or k.n_experts // k.n_groups < least
    ):
        raise error(
            f"{name}: {k.n_experts} experts in {k.n_groups} groups, {k.n_groups_kept} kept,"
            f" allowed: groups of the same size, {least} or more"
        )
    n_left = k.n_experts // k.n_groups * k.n_groups_kept
    if k.n_chosen > n_left:
        raise error(f"{name}: {k.n_chosen} experts are chosen of {n_left}, allowed: at most all")
    if k.expert_weights == ExpertWeights.BY_SUM and k.expert_score == ExpertScore.LOGIT:
        raise error(f"{name}: logits (key 83) divided by their sum (key 84)")


ARCH_RULES: Final = (
    Key(1, "norm_epsilon", F32),
    Key(2, "rope_scaling", U32, most=max(RopeScaling)),
    Key(3, "rope_factor", F32),
    Key(4, "rope_low_freq_factor", F32),
    Key(5, "rope_high_freq_factor", F32),
    Key(6, "rope_original_tokens", U32, least=1),
    Key(7, "rope_dims", U32, most=4096),
    Key(8, "rope_interleaved", U32, most=1),
    Key(9, "tied_head", U32, most=1),
    Key(10, "window_tokens", U32),
    Key(11, "embedding_factor", F32),
    Key(12, "logit_cap", F32),
    Key(13, "own_width", U32, most=MAX_OWN_WIDTH),
    Key(14, "is_encoder", U32, most=1),
    Key(0x8010, "kv_key_bits", U32, least=2, most=32),
    Key(0x8011, "kv_value_bits", U32, least=2, most=32),
    Key(0x8012, "act_bits", U32, least=8, most=16),
)


def check_arch(values: dict[str, Any], header: Header, error: type[QsfError]) -> None:
    for name in ("kv_key_bits", "kv_value_bits"):
        bits = values.get(name, 2)
        if bits & (bits - 1):
            raise error(f"ARCH: {name} is {bits}, allowed: 2, 4, 8, 16, 32")
    if (bits := values.get("act_bits", 8)) not in (8, 16):
        raise error(f"ARCH: act_bits is {bits}, allowed: 8, 16")
    dims = values.get("rope_dims")
    if dims is not None and (dims % 2 != 0 or dims > header.head_dim):
        raise error(
            f"ARCH: rope_dims is {dims}, allowed: even and at most the head dimension of"
            f" {header.head_dim}"
        )
    low = values.get("rope_low_freq_factor", DEFAULT_ARCH.rope_low_freq_factor)
    high = values.get("rope_high_freq_factor", DEFAULT_ARCH.rope_high_freq_factor)
    if not high > low:
        raise error(f"ARCH: rope_high_freq_factor is {high:g}, allowed: above the low one, {low:g}")


def check_set(name: str, s: RopeSet, last: RopeSet | None, error: type[QsfError]) -> None:
    """Raise ``error`` for a RoPE set that breaks a rule or may not follow the set ``last``."""
    first_number = 0 if last is None else last.number + 1
    is_next = last is not None and s.number == last.number
    if not is_next and s.number != first_number:
        raise error(f"{name} has number {s.number}, allowed: ascending from 0 without gaps")
    if not is_next and s.least_context != 0:
        raise error(f"{name} is the first of its number from context {s.least_context}, allowed: 0")
    if last is not None and is_next and s.least_context <= last.least_context:
        raise error(f"{name}: context {s.least_context} after {last.least_context}")
    if (
        last is not None
        and is_next
        and (s.is_interleaved != last.is_interleaved or len(s.frequencies) != len(last.frequencies))
    ):
        raise error(f"{name} has other pairs than the one before it, of the same number")
    if not 1 <= len(s.frequencies) <= MAX_ROPE_PAIRS:
        raise error(f"{name} has {len(s.frequencies)} pairs, allowed: 1 .. {MAX_ROPE_PAIRS}")
    if not 0.0 < to_f32(s.factor) <= F32_MAX:
        raise error(f"{name}: factor is {s.factor:g}, allowed: finite, above 0")
    for frequency in s.frequencies:
        if not 0.0 <= frequency <= F32_MAX or not math.isfinite(frequency):
            raise error(f"{name}: a frequency is {frequency:g}, allowed: finite, 0 or more")
