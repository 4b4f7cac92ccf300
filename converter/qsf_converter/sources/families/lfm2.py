"""LFM2: short convolutions between layers with attention."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from qsf.file.kinds import MAX_TAPS, ROPE_NONE, Mixer, QkNorm
from qsf_converter.sources.families.config import MAX_FFN_DIM, Config
from qsf_converter.sources.families.family import FULL, Draft, Family
from qsf_converter.sources.families.llama import AT, ATTN, DEFAULTS, fused
from qsf_converter.sources.families.rules import T, Where, ends, layer, linear, norm

CONV: Final = "conv"
_AT_CONV = f"{AT}conv."
_ATTENTION: Mapping[str, Any] = {"where": Where.ATTENTION}
_CONVOLUTION: Mapping[str, Any] = {"where": Where.SHORT_CONV, "bias_flag": "conv_bias"}
_PARTS = {T.K: T.K_BIAS, T.Q: T.Q_BIAS, T.V: T.V_BIAS}  # B, C, x
_RULES = (
    *norm(T.ATTN_NORM, f"{AT}operator_norm"),
    *norm(T.FFN_NORM, f"{AT}ffn_norm"),
    *linear(T.Q, None, f"{ATTN}q_proj", "q", "hidden", **_ATTENTION),
    *linear(T.K, None, f"{ATTN}k_proj", "kv", "hidden", **_ATTENTION),
    *linear(T.V, None, f"{ATTN}v_proj", "kv", "hidden", **_ATTENTION),
    *norm(T.Q_NORM, f"{ATTN}q_layernorm", "head", **_ATTENTION),
    *norm(T.K_NORM, f"{ATTN}k_layernorm", "head", **_ATTENTION),
    *linear(T.ATTN_OUT, None, f"{ATTN}out_proj", "hidden", "q", **_ATTENTION),
    *fused(_PARTS, f"{_AT_CONV}in_proj", ("hidden",) * 3, **_CONVOLUTION),
    layer(T.CONV, f"{_AT_CONV}conv.weight", "taps", "hidden", is_flat=True, transposed=True,
          where=Where.SHORT_CONV),
    layer(T.CONV_BIAS, f"{_AT_CONV}conv.bias", "hidden", flag="conv_bias", where=Where.SHORT_CONV),
    *linear(T.ATTN_OUT, T.ATTN_OUT_BIAS, f"{_AT_CONV}out_proj", "hidden", "hidden",
            **_CONVOLUTION),
    *linear(T.FFN_GATE, None, f"{AT}feed_forward.w1", "ffn", "hidden"),
    *linear(T.FFN_UP, None, f"{AT}feed_forward.w3", "ffn", "hidden"),
    *linear(T.FFN_DOWN, None, f"{AT}feed_forward.w2", "hidden", "ffn"),
    *ends("embed_tokens", "embedding_norm"),
)  # fmt: skip


def _layer_types(config: Config, n_layers: int) -> tuple[int, list[str]]:
    """Attention in the layers that are listed, in all where nothing is."""
    types = config.of_layers("layer_types", n_layers, (FULL, CONV))
    listed = config.get("full_attn_idxs")
    if types is not None:
        return 0, types
    if listed is not None and not (
        isinstance(listed, list) and all(isinstance(i, int) and 0 <= i < n_layers for i in listed)
    ):
        raise config.error("full_attn_idxs", "is not a list of layers")
    return 0, [FULL if listed is None or i in listed else CONV for i in range(n_layers)]


def _ffn_dim(config: Config) -> int:
    """The width of the FFN, which the configuration may state before it is adjusted."""
    n = config.count("intermediate_size", MAX_FFN_DIM)
    multiple = config.count("block_multiple_of", MAX_FFN_DIM)
    factor = config.get("block_ffn_dim_multiplier")
    if not config.boolean("block_auto_adjust_ff_dim"):
        return n
    n = int(2 * n / 3)
    if factor is not None:
        n = -(-int(config.positive("block_ffn_dim_multiplier") * n) // multiple) * multiple
    if not 1 <= n <= MAX_FFN_DIM:
        raise config.error("intermediate_size", f"makes an FFN of {n} dimensions")
    return n


def _lfm2(draft: Draft) -> None:
    config, dim = draft.config, draft.header.dim
    for name, value in (("block_dim", dim), ("conv_dim", dim), ("conv_dim_out", dim),
                        ("num_heads", draft.header.n_heads)):  # fmt: skip
        if config.get(name, value) != value:
            raise config.error(name, f"differs from {value}, which is not supported")
    n_taps = config.count("conv_L_cache", MAX_TAPS)
    if n_taps < 2:
        raise config.error("conv_L_cache", f"= {n_taps} is not supported: 2 to {MAX_TAPS} are")
    ffn_dim = _ffn_dim(config)
    draft.header = replace(draft.header, ffn_dim=ffn_dim)
    draft.dims.update(taps=n_taps, ffn=ffn_dim)
    draft.set_all(ffn_dim=ffn_dim)
    draft.layers = [
        replace(kind, mixer=Mixer.SHORT_CONV, n_taps=n_taps, rope_set=ROPE_NONE,
                qk_norm=QkNorm.NONE) if type_ == CONV else kind
        for kind, type_ in zip(draft.layers, draft.layer_types, strict=True)
    ]  # fmt: skip


FAMILIES = (
    Family(
        name="Lfm2ForCausalLM",
        title="LFM2",
        model_type="lfm2",
        rules=_RULES,
        renames={
            "norm_epsilon": "norm_eps",
            "intermediate_size": "block_ff_dim",
            "tie_word_embeddings": "tie_embedding",
        },
        defaults={
            **DEFAULTS,
            "norm_epsilon": 1e-5,
            "rope_theta": 1000000.0,
            "num_key_value_heads": 8,
            "max_position_embeddings": 128000,
            "tie_word_embeddings": True,
            "conv_L_cache": 3,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True,
        },
        flags={"conv_bias": False},
        kind={"qk_norm": QkNorm.PER_HEAD},
        windows=_layer_types,
        adjust=_lfm2,
        neutral={
            "block_use_swiglu": (True,),
            "use_pos_enc": (True,),
            "block_norm_eps": (1e-5,),
            "block_mlp_init_scale": (1.0,),
            "block_out_init_scale": (1.0,),
            "block_use_xavier_init": (True, False),
            "conv_use_xavier_init": (True, False),
        },
    ),
)
