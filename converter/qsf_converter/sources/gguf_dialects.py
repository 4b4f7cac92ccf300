"""How llama.cpp stores each architecture, as tables: names of metadata and of tensors.

Source: gguf-py/gguf/constants.py, tensor_mapping.py and convert_hf_to_gguf.py of llama.cpp.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from qsf.errors import QsfConversionError, shown

Fields = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Dialect:
    """How llama.cpp stores one architecture.

    ``constants`` are fields of config.json that such a file does not say, ``has`` those that say
    whether there are tensors with such a part in their names. ``has_one_in_norms``: its
    norms are stored as 1 + w, and ``is_ungrouped``: fused tensors hold all of Q, then K, then V.
    ``more`` reads what is said in still other ways. ``yarn`` are fields of that scaling
    of RoPE which such a file does not say; its multiplier may be a tenth of ``mscale_all_dim``,
    which is ``mscale`` too. Files may have each of the last ``n_layouts`` layouts of the family.
    """

    family: str
    tensors: Mapping[str, str]  # HuggingFace's name -> GGUF's name; {layer} is the number
    # Field of config.json -> key of the metadata
    config: Mapping[str, str] = field(default_factory=lambda: RMS_CONFIG)
    optional: Mapping[str, str] = field(default_factory=lambda: OPTIONAL)
    constants: Mapping[str, Any] = field(default_factory=dict)
    has: Mapping[str, str] = field(default_factory=dict)
    # Tensors whose rows are stored in the order of interleaved RoPE -> the field with their heads.
    permuted: Mapping[str, str] = field(default_factory=dict)
    has_one_in_norms: bool = False
    is_ungrouped: bool = False
    more: Callable[[Fields, Shapes, Mapping[str, Any]], Mapping[str, Any]] | None = None
    read_by_more: tuple[str, ...] = ()
    yarn: Mapping[str, Any] = field(default_factory=dict)
    has_tenth_of_mscale: bool = False
    n_layouts: int = 1
    other_families: tuple[str, ...] = ()  # that ``more`` may find it to be

    @property
    def families(self) -> tuple[str, ...]:
        """All families whose GGUF files have this architecture."""
        return self.family, *self.other_families


def layers_of(at: str, names: Mapping[str, str]) -> dict[str, str]:
    """Return the names of a layer's tensors and of their biases."""
    return {
        f"blk.{{layer}}.{here}.{kind}": f"{at}.{{layer}}.{there}.{kind}"
        for here, there in names.items()
        for kind in ("weight", "bias")
    }


def ends_of(embedding: str, norm: str, head: str = "lm_head") -> dict[str, str]:
    """Return the names of embedding, final norm and head."""
    return {
        f"{here}.{kind}": f"{there}.{kind}"
        for here, there in (("token_embd", embedding), ("output_norm", norm), ("output", head))
        for kind in ("weight", "bias")
    }


def own_names(at: str, ends: tuple[str, ...], **layer: str) -> dict[str, str]:
    """Return the names of all tensors where both layers and ends are called otherwise."""
    return {**ends_of(*ends), **layers_of(at, layer)}


def renamed(table: Mapping[str, str], old: str, new: str) -> dict[str, str]:
    """Return a table with another word in HuggingFace's names."""
    return {here: there.replace(old, new) for here, there in table.items()}


QKV = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
}
FFN = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_FUSED_FFN = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
OUT = {"attn_output": "self_attn.o_proj"}
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
SHARED_EXPERTS = {
    f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")
}
EXPERT_COUNTS = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
EXPERT_WIDTH = {"moe_intermediate_size": "expert_feed_forward_length"}
EXPERT_WEIGHTS = {
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
}
EXPERT_GROUPS = {"n_group": "expert_group_count", "topk_group": "expert_group_used_count"}
SELECTION = {"exp_probs_b": "mlp.gate.selection"}
PRE = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
POST = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MTP = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
}
HUNYUAN_QK = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
QK = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_ENDS = ends_of("model.embed_tokens", "model.norm")


def names(*tables: Mapping[str, str]) -> dict[str, str]:
    """Return the names of all tensors of a file with the layer tensors of ``tables``."""
    joined = {here: there for table in (*tables, _MTP) for here, there in table.items()}
    return {**_ENDS, **layers_of("model.layers", joined)}


LLAMA_NAMES = names(PRE, QKV, OUT, FFN)
CONFIG = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
RMS_CONFIG: Mapping[str, str] = {**CONFIG, "rms_norm_eps": "attention.layer_norm_rms_epsilon"}
OPTIONAL: Mapping[str, str] = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
}
WINDOW = {"sliding_window": "attention.sliding_window"}
ATTENTION_BIAS = {"attention_bias": "attn_q.bias"}
BIASES = {**ATTENTION_BIAS, "mlp_bias": "ffn_up.bias"}
# Keys for images: the sections of RoPE, and inputs of deeper layers.
VISION_KEYS = ("rope.dimension_sections", "n_deepstack_layers")
PERMUTED = {
    "self_attn.q_proj": "num_attention_heads",
    "self_attn.k_proj": "num_key_value_heads",
}


def _llama(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> Mapping[str, Any]:
    if fields.get("expert_count"):
        counts = {name: fields.get(key) for name, key in EXPERT_COUNTS.items()}
        return {"architectures": ["MixtralForCausalLM"], **counts}
    return {"architectures": ["MistralForCausalLM"]} if config.get("sliding_window") else {}


def own_layers(fields: Fields, config: Mapping[str, Any]) -> int:
    """Return the number of layers without those that predict further tokens, which come last.

    Raises QsfConversionError if the metadata's numbers are none or no layer is left.
    """
    n_more, n_all = fields.get("nextn_predict_layers", 0), config["num_hidden_layers"]
    if type(n_more) is not int or type(n_all) is not int or not 0 <= n_more < n_all:
        raise QsfConversionError(
            f"its {shown(n_all)} layers cannot have {shown(n_more)} more in them"
        )
    return n_all - n_more


def layer_types(fields: Fields, config: Mapping[str, Any], period: int) -> dict[str, Any]:
    """The windows: a bool for each layer, or every n-th layer without one (default: ``period``)."""
    if not config.get("sliding_window"):
        return {}
    pattern = fields.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, list):
        kinds = ["sliding_attention" if is_window else "full_attention" for is_window in pattern]
        return {"layer_types": kinds}
    return {"sliding_window_pattern": pattern}


def _gemma(period: int, largest: int) -> Callable[..., dict[str, Any]]:
    """llama.cpp knows the scale of each generation's largest model, recognised by its layers."""

    def more(fields: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
        is_largest = config["num_hidden_layers"] == largest
        width = config["hidden_size"] // config["num_attention_heads"]
        return {
            **layer_types(fields, config, period),
            "query_pre_attn_scalar": width if is_largest else config["head_dim"],
        }

    return more


def _olmo(fields: Fields, _shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    if not config.get("sliding_window"):
        return {}
    return {"architectures": ["Olmo3ForCausalLM"], **layer_types(fields, config, 4)}


def _exaone4(fields: Fields, _shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_window": config.get("sliding_window"), **layer_types(fields, config, 4)}


def lfm2(_fields: Fields, _shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without KV heads are short convolutions; the stated FFN width is already adjusted."""
    of_layers = config.get("num_key_value_heads")
    if not isinstance(of_layers, list):
        of_layers = [of_layers] * config["num_hidden_layers"]
    return {
        "num_key_value_heads": max(of_layers, default=0),
        "layer_types": ["full_attention" if n else "conv" for n in of_layers],
        "block_auto_adjust_ff_dim": False,
    }


LLAMA = Dialect(
    family="LlamaForCausalLM",
    optional={**OPTIONAL, **WINDOW},
    tensors={**LLAMA_NAMES, **layers_of("model.layers", EXPERTS)},
    permuted=PERMUTED,
    has=BIASES,
    more=_llama,
    read_by_more=("expert_count",),
    other_families=("MistralForCausalLM", "MixtralForCausalLM"),
)
_ALONE = replace(LLAMA, more=None, other_families=())  # its tensors, for other families
_QWEN2 = replace(
    _ALONE,
    family="Qwen2ForCausalLM",
    optional=OPTIONAL,
    constants={"use_sliding_window": False},
    permuted={},
    has={},
)
_GEMMA_FIELDS: Mapping[str, Any] = {
    # Published checkpoints are bf16, in which the factor of the embedding is rounded.
    "hidden_activation": "gelu_pytorch_tanh",
    "dtype": "bfloat16",
}
_GEMMA2 = Dialect(
    family="Gemma2ForCausalLM",
    optional={
        **OPTIONAL,
        **WINDOW,
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    constants=_GEMMA_FIELDS,
    tensors=names(
        {**POST, "attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"},
        QKV, OUT, FFN,
    ),
    has_one_in_norms=True,
    has=ATTENTION_BIAS,
    more=_gemma(2, 46),
)  # fmt: skip
_GLM4 = Dialect(
    family="Glm4ForCausalLM",
    tensors=names(
        {**PRE, "post_attention_norm": "post_self_attn_layernorm",
         "post_ffw_norm": "post_mlp_layernorm"},
        QKV, OUT, _FUSED_FFN,
    ),
    has=ATTENTION_BIAS,
)  # fmt: skip
DIALECTS: Final[Mapping[str, Dialect]] = {
    "llama": LLAMA,
    "mistral3": replace(_ALONE, family="Ministral3ForCausalLM", optional=OPTIONAL),
    "qwen2": _QWEN2,
    "hunyuan-dense": replace(
        _QWEN2,
        family="HunYuanDenseV1ForCausalLM",
        constants={},
        tensors=names(PRE, QKV, HUNYUAN_QK, OUT, FFN),
        has=ATTENTION_BIAS,
    ),
    "apertus": replace(
        _QWEN2,
        family="ApertusForCausalLM",
        constants={"hidden_act": "xielu"},
        optional={
            **OPTIONAL,
            **{f"xielu_{name}": f"xielu.{name}" for name in ("alpha_p", "alpha_n", "beta")},
        },
        tensors=names(
            {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
            *(QKV, QK, OUT, FFN),
        ),
        has=ATTENTION_BIAS,
        read_by_more=("xielu.eps",),
    ),
    "qwen2vl": replace(_QWEN2, family="Qwen2_5_VLTextForCausalLM", read_by_more=VISION_KEYS),
    "qwen3": replace(
        _QWEN2,
        family="Qwen3ForCausalLM",
        tensors=names(PRE, QKV, QK, OUT, FFN),
        has=ATTENTION_BIAS,
    ),
    "qwen3vl": replace(
        _QWEN2,
        family="Qwen3VLTextForCausalLM",
        constants={},
        tensors=names(PRE, QKV, QK, OUT, FFN),
        has=ATTENTION_BIAS,
        read_by_more=VISION_KEYS,
    ),
    "seed_oss": replace(
        _QWEN2,
        family="SeedOssForCausalLM",
        constants={},
        tensors=names({**PRE, "post_attention_norm": PRE["ffn_norm"]}, QKV, OUT, FFN),
        has={**BIASES, "attention_out_bias": "attn_output.bias"},
    ),
    "ernie4_5": replace(
        _QWEN2,
        family="Ernie4_5ForCausalLM",
        constants={},
        has={"use_bias": "attn_q.bias"},
    ),
    "arcee": replace(
        _ALONE,
        family="ArceeForCausalLM",
        optional=OPTIONAL,
        constants={"hidden_act": "relu2"},
        read_by_more=(),
    ),
    "phi3": replace(
        _ALONE,
        family="Phi3ForCausalLM",
        tensors=names(PRE, {"attn_qkv": "self_attn.qkv_proj"}, OUT, _FUSED_FFN),
        permuted={},
    ),
    "smollm3": replace(
        _ALONE,
        family="SmolLM3ForCausalLM",
        optional=OPTIONAL,
        # llama.cpp skips RoPE in every fourth layer of this architecture.
        constants={"no_rope_layer_interval": 4},
    ),
    "granite": replace(
        _ALONE,
        family="GraniteForCausalLM",
        optional={
            **OPTIONAL,
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "attention_multiplier": "attention.scale",
            "logits_scaling": "logit_scale",
        },
    ),
    "lfm2": Dialect(
        family="Lfm2ForCausalLM",
        config={
            **CONFIG,
            "norm_eps": "attention.layer_norm_rms_epsilon",
            "conv_L_cache": "shortconv.l_cache",
        },
        tensors={
            **names(
                {"attn_norm": "operator_norm", "ffn_norm": "ffn_norm"},
                QKV,
                {"attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"},
                {"attn_output": "self_attn.out_proj"},
                {"ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3"},
                {"ffn_down": "feed_forward.w2"},
                {f"shortconv.{part}": f"conv.{part}" for part in ("in_proj", "conv", "out_proj")},
            ),
            "token_embd_norm.weight": "model.embedding_norm.weight",  # this is the final norm
        },
        has={"conv_bias": "shortconv.in_proj.bias"},
        more=lfm2,
    ),
    "gemma": Dialect(
        family="GemmaForCausalLM",
        constants={"hidden_act": "gelu_pytorch_tanh", "dtype": "bfloat16"},
        tensors=LLAMA_NAMES,
        has_one_in_norms=True,
        has=ATTENTION_BIAS,
    ),
    "gemma2": _GEMMA2,
    "gemma3": replace(
        _GEMMA2,
        family="Gemma3ForCausalLM",
        optional={**_GEMMA2.optional, "rope_local_base_freq": "rope.freq_base_swa"},
        tensors={**_GEMMA2.tensors, **layers_of("model.layers", QK)},
        more=_gemma(6, 62),
    ),
    "olmo2": replace(
        LLAMA,
        other_families=("Olmo3ForCausalLM",),
        family="Olmo2ForCausalLM",
        tensors=names(POST, QKV, QK, OUT, FFN),
        permuted={},
        more=_olmo,
    ),
    "exaone4": replace(
        _ALONE,
        family="Exaone4ForCausalLM",
        tensors=names(POST, QKV, QK, OUT, FFN),
        permuted={},
        more=_exaone4,
    ),
    "chatglm": replace(_GLM4, family="GlmForCausalLM", tensors=names(PRE, QKV, OUT, _FUSED_FFN)),
    "glm4": _GLM4,
    "bitnet": replace(
        _ALONE,
        family="BitNetForCausalLM",
        optional=OPTIONAL,
        constants={"hidden_act": "relu2"},
        tensors=names(
            PRE,
            QKV,
            OUT,
            FFN,
            {"attn_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm"},
        ),
        permuted={},
    ),
}
