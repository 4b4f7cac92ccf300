"""How GGUF files hold a family: fields of config.json from their metadata, names of their tensors.

Names of metadata: gguf-py/gguf/constants.py of llama.cpp; of tensors: the package gguf's map.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final

from qsf.errors import QsfConversionError, shown

Fields = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]
More = Callable[[Fields, Shapes, Mapping[str, Any]], Mapping[str, Any]]

# Field of config.json, by its general name -> key of the metadata behind the architecture's name.
KEYS: Final[Mapping[str, str]] = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "logit_scale": "logit_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "kv_lora_rank": "attention.kv_lora_rank",
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_n_groups": "ssm.group_count",
    "mamba_d_state": "ssm.state_size",
    "mamba_d_conv": "ssm.conv_kernel",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_key_head_dim": "ssm.state_size",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
}
_NEEDED: Final = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
                  "max_position_embeddings", "norm_epsilon")  # fmt: skip
_OPTIONAL: Final = ("num_key_value_heads", "head_dim", "rope_theta")
EXPERTS: Final = ("num_experts", "num_experts_per_tok")
EXPERT_WEIGHTS: Final = ("routed_scaling_factor", "norm_topk_prob")
EXPERT_GROUPS: Final = ("n_group", "topk_group")
# Keys for images: the sections of RoPE, and inputs of deeper layers.
VISION_KEYS: Final = ("rope.dimension_sections", "n_deepstack_layers")
# The score of experts, where only a sigmoid (2) is run.
SIGMOID: Final[Mapping[str, tuple[Any, ...]]] = {"expert_gating_func": (2,)}


@dataclass(frozen=True, slots=True)
class Gguf:
    """The files of one of llama.cpp's architectures, ``name``, and of ``also`` others.

    Tensors have the names of the family's rules.

    ``needs`` and ``may`` are the fields that files must and can have beside the usual ones but
    ``without``; ``keys`` are those of fields that `KEYS` lacks. ``constants`` are fields that hold
    if a file does not say them; ``more`` finds others from the metadata, the shapes, and the
    fields so far, with ``others``: the families that it may be. ``ignores`` are keys of metadata
    without effect here, ``neutral`` the only values of others, ``lists`` keys that differ between
    layers. ``is_permuted``: rows of Q and K are in the order of interleaved RoPE,
    ``has_one_in_norms``: norms are stored as 1 + w, ``is_ungrouped``: fused tensors hold all of Q,
    then K, then V. ``yarn`` are fields of that scaling of RoPE; its multiplier may be a tenth of
    ``mscale_all_dim``, which is ``mscale`` too. ``layouts`` are those of the family that files
    have, ``prefix`` the family's, if not its first, ``tensors`` names of those without a rule.
    ``unused_flag`` is that of rules whose tensors a file of this configuration lacks.
    """

    name: str = ""
    _: KW_ONLY
    needs: tuple[str, ...] = ()
    may: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    more: More | None = None
    ignores: tuple[str, ...] = ()
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    lists: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    is_permuted: bool = False
    has_one_in_norms: bool = False
    is_ungrouped: bool = False
    yarn: Mapping[str, Any] = field(default_factory=dict)
    has_tenth_of_mscale: bool = False
    named_as: str = ""  # the architecture whose names of tensors it has, if not its own
    layouts: tuple[int, int | None] = (-1, None)  # first, end
    prefix: str | None = None
    tensors: Mapping[str, str] = field(default_factory=dict)  # GGUF's name -> HuggingFace's
    unused_flag: Callable[[Mapping[str, Any]], str] | None = None
    also: tuple[Gguf, ...] = ()

    def fields(self, *, is_layer_norm: bool) -> dict[str, tuple[str, bool]]:
        """Return the key of each field, and whether a file must have it."""
        epsilon = f"attention.layer_norm_{'' if is_layer_norm else 'rms_'}epsilon"
        keys = {**KEYS, "norm_epsilon": epsilon, **self.keys}
        needed = (*_NEEDED, *self.needs)
        return {
            name: (keys[name], name in needed)
            for name in (*needed, *_OPTIONAL, *self.may)
            if name not in self.without
        }


# ---- what several architectures say in the same way ----


def layer_types(fields: Fields, config: Mapping[str, Any], period: int) -> dict[str, Any]:
    """The windows: a bool for each layer, or every n-th layer without one (default: ``period``)."""
    if not config.get("sliding_window"):
        return {}
    pattern = fields.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, list):
        kinds = ["sliding_attention" if is_window else "full_attention" for is_window in pattern]
        return {"layer_types": kinds}
    return {"sliding_window_pattern": pattern}


def windows(period: int) -> More:
    return lambda fields, _shapes, config: layer_types(fields, config, period)


def whole(name: str, value: Any, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise QsfConversionError(f"its metadata's {name} = {shown(value)} is not a number")
    return value
