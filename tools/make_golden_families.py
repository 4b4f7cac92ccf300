# SPDX-License-Identifier: Apache-2.0
"""Write tests/golden/families.npz: what transformers computes for a small model of every family.

Run from the project root with the optional extra `golden` installed:

    python tools/make_golden_families.py [part of a case's name]

Each case is a configuration. transformers makes the model and saves it, which says what its
tensors are called on disk; all of them are overwritten (tests/python/make/golden_families.py says
with what), loaded again, and evaluated in f32, eager attention, CPU.
With a part of a name only those cases are made anew; the others are kept.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "python"))

from make import delta_cases, dense_cases, encoder_cases, hybrid_cases, latent_cases  # noqa: E402
from make import golden_families as made  # noqa: E402

BASE: dict[str, Any] = {
    "hidden_size": 72,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 67,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
WIDE = {**BASE, "head_dim": 24}  # heads x head_dim is not the hidden size
SIX = {**BASE, "num_attention_heads": 6}  # heads of 12, where head_dim is no key


def rope(kind: str = "default", theta: float = 5000.0, **more: Any) -> dict[str, Any]:
    """The RoPE parameters of a configuration."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
SHORT, LONG = [1.0 + 0.05 * i for i in range(9)], [1.5 + 0.7 * i for i in range(9)]
S, F = "sliding_attention", "full_attention"


def longrope(original: int) -> dict[str, Any]:
    """The short list holds up to `original` tokens, the long one above."""
    return {
        "max_position_embeddings": 128,
        "original_max_position_embeddings": original,
        **rope(
            "longrope",
            short_factor=SHORT,
            long_factor=LONG,
            partial_rotary_factor=0.75,
            original_max_position_embeddings=original,
        ),
    }


GEMMA = {
    **WIDE,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 20,
    "sliding_window": 7,
    "tie_word_embeddings": True,
}
GEMMA3_LAYERS = [S, S, F, S, S, F]
GEMMA3 = {
    **GEMMA,
    "num_hidden_layers": 6,
    "layer_types": GEMMA3_LAYERS,
    "rope_parameters": {
        F: {"rope_type": "linear", "factor": 8.0, "rope_theta": 20000.0},
        S: {"rope_type": "default", "rope_theta": 500.0},
    },
}
GEMMA4: dict[str, Any] = {
    **{key: value for key, value in GEMMA3.items() if key != "query_pre_attn_scalar"},
    "global_head_dim": 40, "pad_token_id": 2, "num_hidden_layers": 4, "layer_types": [S, F, S, F],
    "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
    "rope_parameters": {
        F: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 20000.0},
        S: {"rope_type": "default", "rope_theta": 500.0},
    },
}  # fmt: skip
GEMMA4_SHARED = {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
GEMMA4_OWN = {**GEMMA4, "num_hidden_layers": 6, "layer_types": GEMMA3_LAYERS,
              "hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 67,
              "num_kv_shared_layers": 3, "use_double_wide_mlp": True}  # fmt: skip
GEMMA4_MOE = {**GEMMA4_SHARED, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2,
              "moe_intermediate_size": 40}  # fmt: skip
PHI = {**BASE, "hidden_size": 80, "hidden_act": "gelu_new", **rope(partial_rotary_factor=0.4)}
NEOX = {**SIX, "hidden_act": "gelu", "num_key_value_heads": None,
        **rope(partial_rotary_factor=0.34)}  # fmt: skip
EYE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
       "num_attention_heads": 2, "patch_size": 4}  # fmt: skip
VISION = {**EYE, "image_size": 8}
GEMMA4_EYE = {**EYE, "head_dim": 8, "num_key_value_heads": 2, "position_embedding_size": 16}
FALCON = {
    **{key: BASE[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size",
                                  "bos_token_id", "eos_token_id")},
    "num_attention_heads": 6, "max_position_embeddings": 64, "ffn_hidden_size": 80,
    "tie_word_embeddings": True,
}  # fmt: skip

# Routed layers: experts of a width that is not the dense one's, and layers without experts.
MOE = {**WIDE, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
LOCAL = {**BASE, "num_attention_heads": 6, "intermediate_size": 40, "num_local_experts": 5,
         "num_experts_per_tok": 2}  # fmt: skip
GLM_MOE = {**WIDE, "num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 3,
           "moe_intermediate_size": 40, "n_shared_experts": 1, "first_k_dense_replace": 1,
           **rope(partial_rotary_factor=0.5)}  # fmt: skip
ERNIE = {**SIX, "num_hidden_layers": 4, "moe_num_experts": 6, "moe_k": 3,
         "moe_intermediate_size": 40, "moe_num_shared_experts": 2, "use_bias": False,
         "moe_layer_start_index": 1, "tie_word_embeddings": True}  # fmt: skip

GRANITE = {"embedding_multiplier": 5.5, "residual_multiplier": 0.3, "logits_scaling": 3.0,
           "attention_multiplier": 0.17}  # fmt: skip
VISION_OF_QWEN: dict[str, Any] = {
    "text_config": {**WIDE, **rope(mrope_section=[4, 4, 4], mrope_interleaved=True)},
    "vision_config": {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
                      "out_hidden_size": 72, "patch_size": 4, "spatial_merge_size": 1,
                      "temporal_patch_size": 1, "num_position_embeddings": 16,
                      "deepstack_visual_indexes": [0]},
    "image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62,
    "vision_end_token_id": 63, "tie_word_embeddings": False,
}  # fmt: skip

# fmt: off
# The model types that a case's name does not begin with.
TYPES = {
    "gemma3": "gemma3_text", "gemma3-encoder": "gemma3_text", "gemma4": "gemma4_text",
    "gemma4-shared": "gemma4_text", "gemma4-own": "gemma4_text", "gemma4-moe": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text", "mistral-nested": "mistral3",
}
# A case is a model type, up to the first "-" of its name, and a configuration of it.
OPTIONS: dict[str, dict[str, Any]] = {
    "llama-dynamic": dict(WIDE, **rope("dynamic", factor=3.0)),
    "llama-yarn": dict(WIDE, **rope("yarn", **YARN)),
    "llama-yarn-more": dict(WIDE,
        **rope("yarn", **YARN, beta_fast=20.0, beta_slow=2.0, mscale=0.7, mscale_all_dim=0.9,
               truncate=False)),
    "llama-yarn-factor": dict(WIDE, **rope("yarn", **YARN, attention_factor=0.8)),
    "llama-llama3": dict(WIDE, **rope("llama3", **LLAMA3)),
    "llama-linear": dict(WIDE, **rope("linear", factor=4.0)),
    "llama-proportional": dict(WIDE, **rope("proportional", partial_rotary_factor=0.4, factor=2.0)),
    "qwen2": dict(SIX, tie_word_embeddings=True),
    "qwen2-window": dict(SIX, num_hidden_layers=4, use_sliding_window=True, sliding_window=7,
        max_window_layers=2),
    "qwen3": dict(WIDE, tie_word_embeddings=True),
    "qwen3-bias": dict(WIDE, attention_bias=True, **rope("yarn", **YARN)),
    "phi": PHI,
    "phi3": dict(SIX, original_max_position_embeddings=64),
    "phi3-window": dict(SIX, sliding_window=9, tie_word_embeddings=True,
        original_max_position_embeddings=64),
    "phi3-longrope-short": dict(BASE, num_attention_heads=3, num_key_value_heads=1, **longrope(48)),
    "phi3-longrope-long": dict(BASE, num_attention_heads=3, num_key_value_heads=1, **longrope(32)),
    "smollm3": dict(SIX, num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0],
        tie_word_embeddings=True),
    "granite": dict(SIX, embedding_multiplier=5.5, residual_multiplier=0.3,
        attention_multiplier=0.17, logits_scaling=3.0, tie_word_embeddings=True),
    "granite-bias": dict(SIX, embedding_multiplier=0.7, residual_multiplier=0.22,
        logits_scaling=0.6, attention_multiplier=0.3, attention_bias=True, mlp_bias=False),
    "lfm2": dict(SIX, num_hidden_layers=5, conv_L_cache=3, block_multiple_of=16,
        layer_types=["conv", "conv", F, "conv", F]),
    "lfm2-bias": dict(SIX, num_hidden_layers=4, conv_L_cache=5, conv_bias=True,
        block_auto_adjust_ff_dim=False, tie_word_embeddings=True,
        layer_types=[F, "conv", "conv", "conv"]),
    "lfm2_moe": dict(SIX, num_hidden_layers=4, num_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=40, num_dense_layers=1, routed_scaling_factor=1.5,
        tie_word_embeddings=True, layer_types=["conv", "conv", F, "conv"]),
    "lfm2_moe-plain": dict(SIX, tie_word_embeddings=True, num_hidden_layers=3, num_experts=5,
        num_experts_per_tok=2, moe_intermediate_size=40, num_dense_layers=0, norm_topk_prob=False,
        use_expert_bias=False, conv_bias=True, layer_types=[F, "conv", "conv"]),
    "gemma": dict(WIDE, hidden_activation="gelu_pytorch_tanh", hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True),
    "gemma2": dict(GEMMA, num_hidden_layers=4, attn_logit_softcapping=5.0,
        final_logit_softcapping=60.0),
    "gemma3": GEMMA3,
    "gemma3-nested": {"text_config": GEMMA3,
        "vision_config": {"model_type": "siglip_vision_model", **VISION}, "mm_tokens_per_image": 4,
        "image_token_index": 66, "tie_word_embeddings": True},
    "gemma4": dict(GEMMA4, attention_bias=True, tie_word_embeddings=False),
    "gemma4-shared": GEMMA4_SHARED,
    "gemma4-own": GEMMA4_OWN,
    "gemma4-moe": GEMMA4_MOE,
    "gemma4-nested": {"text_config": GEMMA4_MOE, "vision_config": GEMMA4_EYE, "audio_config": None,
        "image_token_id": 100, "video_token_id": 101, "audio_token_id": 102},
    "gemma4_unified": GEMMA4_SHARED,
    "olmo2": SIX,
    "olmo3": dict(SIX, num_hidden_layers=4, sliding_window=7, layer_types=[S, F, S, F],
        rope_parameters={F: {"rope_type": "yarn", "rope_theta": 5000.0, **YARN},
                         S: {"rope_type": "default", "rope_theta": 5000.0}}),
    "ministral3": dict(WIDE,
        **rope("yarn", **YARN, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
               llama_4_scaling_beta=0.1)),
    "mistral-nested": {"text_config": {"model_type": "mistral", **WIDE, "sliding_window": None},
        "vision_config": {"model_type": "pixtral", **VISION, "head_dim": 8},
        "image_token_index": 66, "tie_word_embeddings": False},
    "exaone4": dict(SIX, num_hidden_layers=4, sliding_window=6, sliding_window_pattern=2,
        layer_types=[S, F, S, F]),
    "exaone4-full": dict(SIX, sliding_window=None, layer_types=[F, F], tie_word_embeddings=True),
    "glm": dict(WIDE, attention_bias=True, **rope(partial_rotary_factor=0.5)),
    "glm4": dict(WIDE, attention_bias=True, **rope(partial_rotary_factor=0.5)),
    "stablelm": dict(SIX, num_key_value_heads=3, **rope(partial_rotary_factor=0.34)),
    "stablelm-parallel": dict(SIX, use_qkv_bias=True, use_parallel_residual=True,
        **rope(partial_rotary_factor=0.34)),
    "stablelm-heads": dict(SIX, num_key_value_heads=3, qk_layernorm=True,
        **rope(partial_rotary_factor=0.34)),
    "starcoder2": dict(SIX, sliding_window=None),
    "starcoder2-window": dict(SIX, sliding_window=7, use_bias=False, tie_word_embeddings=False),
    "gpt_neox": NEOX,
    "gpt_neox-sequential": dict(NEOX, use_parallel_residual=False, attention_bias=False),
    "gptj": {"n_embd": 72, "n_inner": 80, "n_layer": 2, "n_head": 3, "rotary_dim": 8,
        "vocab_size": 67, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 1,
        "tie_word_embeddings": False},
    "falcon": dict(FALCON, multi_query=True, parallel_attn=True, bias=False),
    "falcon-new": dict(FALCON, new_decoder_architecture=True, num_kv_heads=2, parallel_attn=True,
        bias=False),
    "falcon-alibi": dict(FALCON, multi_query=False, parallel_attn=False, bias=True, alibi=True),
    "bloom": {"hidden_size": 72, "n_head": 6, "n_layer": 2, "seq_length": 64, "vocab_size": 67,
        "bos_token_id": 0, "eos_token_id": 1},
    "mpt": {"d_model": 72, "n_heads": 6, "n_layers": 2, "max_seq_len": 64, "vocab_size": 67,
        "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1},
    "bitnet": dict(SIX, hidden_act="relu2", tie_word_embeddings=True),
    "olmoe": dict(LOCAL, num_local_experts=8, num_experts_per_tok=3),
    "olmoe-sum": dict(LOCAL, norm_topk_prob=True, tie_word_embeddings=True),
    "qwen2_moe": dict(MOE, shared_expert_intermediate_size=56),
    "qwen2_moe-sum": dict(MOE, num_experts=5, shared_expert_intermediate_size=40,
        num_hidden_layers=3, mlp_only_layers=[1], norm_topk_prob=True, qkv_bias=False,
        tie_word_embeddings=True),
    "qwen3_moe": dict(MOE, norm_topk_prob=True),
    "qwen3_moe-sparse": dict(MOE, num_hidden_layers=4, decoder_sparse_step=2, num_experts=7,
        num_experts_per_tok=3, norm_topk_prob=False, attention_bias=True),
    "mixtral": LOCAL,
    "mixtral-window": dict(LOCAL, num_experts_per_tok=3, sliding_window=7),
    "granitemoe": dict(LOCAL, embedding_multiplier=5.5, residual_multiplier=0.3, logits_scaling=3.0,
        attention_multiplier=0.17, tie_word_embeddings=True),
    "ernie4_5_moe": ERNIE,
    "ernie4_5_moe-interval": dict(ERNIE, num_hidden_layers=5, moe_layer_start_index=0,
        moe_layer_end_index=3, moe_layer_interval=2, tie_word_embeddings=False),
    "gpt_oss": dict(WIDE, intermediate_size=40, num_local_experts=6, num_experts_per_tok=2,
        sliding_window=7, num_hidden_layers=4,
        **rope("yarn", **YARN, beta_fast=32.0, beta_slow=1.0, truncate=False)),
    "glm4_moe": dict(GLM_MOE, attention_bias=True, routed_scaling_factor=1.5),
    "glm4_moe-groups": dict(GLM_MOE, num_hidden_layers=4, n_group=4, topk_group=2, use_qk_norm=True,
        norm_topk_prob=False, n_shared_experts=2, first_k_dense_replace=2,
        tie_word_embeddings=True),
    "seed_oss-bias": dict(WIDE, attention_bias=False, attention_out_bias=True, mlp_bias=True,
        tie_word_embeddings=True),
    "ernie4_5": WIDE,
    "seed_oss": WIDE,
    "ernie4_5-bias": dict(WIDE, use_bias=True, tie_word_embeddings=True),
    "cwm": dict(WIDE, num_hidden_layers=5, sliding_window=7, **rope("llama3", **LLAMA3)),
    "helium": dict(SIX, head_dim=12),
    "internlm3": dict(WIDE, attention_bias=True, mlp_bias=True),
    "internlm3-plain": dict(WIDE, tie_word_embeddings=True),
    "qwen3_vl": VISION_OF_QWEN,
    "cohere": dict(SIX, logit_scale=0.3, tie_word_embeddings=True),
    "cohere2": dict(WIDE, num_hidden_layers=4, sliding_window=7, logit_scale=0.3,
        tie_word_embeddings=True),
    "nemotron": dict(SIX, head_dim=12, **rope(partial_rotary_factor=0.5)),
    "nemotron-bias": dict(SIX, head_dim=12, attention_bias=True, mlp_bias=True,
        **rope(partial_rotary_factor=0.5)),
    "jais2": WIDE,
    "arcee": WIDE,
    "arcee-bias": dict(WIDE, mlp_bias=True, attention_bias=True),
    "granitemoehybrid": {**SIX, **GRANITE, "layer_types": ["full_attention"] * 2,
        "num_local_experts": 0, "shared_intermediate_size": 96, "position_embedding_type": "rope",
        "tie_word_embeddings": True, "mamba_n_heads": 4, "mamba_d_head": 36},
    "granitemoehybrid-nope": {**SIX, **GRANITE, "layer_types": ["full_attention"] * 2,
        "num_local_experts": 0, "shared_intermediate_size": 96, "mamba_n_heads": 4,
        "mamba_d_head": 36},
    "granitemoeshared": {**LOCAL, **GRANITE, "shared_intermediate_size": 56},
    "hyperclovax": {**WIDE, **GRANITE, "logits_scaling": 0.5},
    "hyperclovax-plain": {**WIDE, **GRANITE, "use_post_norm": False, "tie_word_embeddings": True},
    "vaultgemma": dict(GEMMA, num_hidden_layers=4, attn_logit_softcapping=5.0,
        final_logit_softcapping=60.0),
    "qwen3_vl_moe": dict(VISION_OF_QWEN, text_config={**VISION_OF_QWEN["text_config"], **MOE}),
    "dots1": dict(GLM_MOE, norm_topk_prob=True, routed_scaling_factor=2.0, sliding_window=None,
        **rope()),
    "solar_open": dict(GLM_MOE, first_k_dense_replace=0, n_shared_experts=2,
        routed_scaling_factor=1.5, **rope()),
    "minimax_m2": dict(LOCAL, head_dim=24, num_local_experts=6, **rope(partial_rotary_factor=0.5)),
    "gemma3-encoder": dict(GEMMA3, hidden_size=72, vocab_size=72, use_bidirectional_attention=True),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (TYPES.get(name, name.partition("-")[0]), case) for name, case in OPTIONS.items()},
    **delta_cases.CASES, **encoder_cases.CASES, **hybrid_cases.CASES, **latent_cases.CASES,
    **dense_cases.CASES,
}
# Keys that transformers saves under other names than the published checkpoints have.
PUBLISHED: dict[str, dict[str, Any]] = {
    "internlm3": {"architectures": ["InternLM3ForCausalLM"], "qkv_bias": True, "bias": True,
                  "attention_bias": None, "mlp_bias": None},
    "internlm3-plain": {"architectures": ["InternLM3ForCausalLM"], "qkv_bias": False,
                        "bias": False},
}
# Between the last score that is chosen and the next one, as a part of it where it is below 1.
LEAST_MARGIN = 1e-4
# fmt: on


def main(wanted: str = "") -> int:
    """Write the golden file; return the exit code."""
    torch.set_grad_enabled(False)
    transformers.utils.logging.disable_progress_bar()
    arrays, table = _stored()
    for gone in table.keys() - CASES.keys():
        del table[gone]
    arrays = {key: arrays[key] for key in arrays if key.split("/")[0] in table}
    for name, (model_type, options) in CASES.items():
        if wanted in name or name not in table:
            config, shapes, logits, chosen = golden(model_type, options)
            largest = float(np.abs(logits).max())
            table[name] = [config | PUBLISHED.get(name, {}), shapes, largest]
            arrays[name] = made.planes_of(logits, largest)
            arrays |= {f"{name}/{part}": values for part, values in chosen.items()}
            sys.stdout.write(f"{name}: largest logit {largest:.3g}, {len(shapes)} tensors\n")
    libraries = [f"{lib.__name__} {lib.__version__}" for lib in (torch, transformers)]
    np.savez_compressed(
        made.PATH,
        cases=np.frombuffer(json.dumps(table, sort_keys=True).encode(), np.uint8),
        versions=np.array(libraries),
        **arrays,
    )
    sys.stdout.write(f"{made.PATH.name}: {made.PATH.stat().st_size} bytes\n")
    return 0


def _stored() -> tuple[dict[str, Any], dict[str, Any]]:
    if not made.PATH.exists():
        return {}, {}
    with np.load(made.PATH) as stored:
        table = json.loads(bytes(stored["cases"]))
        keys = set(stored.files) - {"cases", "versions"}
        return {name: stored[name] for name in keys}, table


def golden(
    model_type: str, options: dict[str, Any]
) -> tuple[
    dict[str, Any],
    dict[str, tuple[int, ...]],
    np.ndarray[Any, Any],
    dict[str, np.ndarray[Any, Any]],
]:
    """Return config.json, the shapes of the tensors on disk, and what is computed of the text.

    That are the logits and, of a mixture, the ``experts`` [routed layers, tokens, chosen] in
    ascending order and their ``weights``.
    """
    config = transformers.AutoConfig.for_model(model_type, **options)
    loader: Any = transformers.AutoModelForCausalLM
    is_encoder = model_type in made.ENCODERS or "use_bidirectional_attention" in options
    if is_encoder:
        loader = transformers.AutoModel
    if "num_labels" in options:
        loader = transformers.AutoModelForSequenceClassification
    if "text_config" in options:
        loader = transformers.AutoModelForImageTextToText
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        loader.from_config(config).save_pretrained(folder)
        saved = json.loads((folder / "config.json").read_text("utf-8"))
        shapes = delta_cases.published(saved, _shapes(folder / "model.safetensors"))
        case = made.Case("", saved, shapes, [], np.empty(0, np.float32))
        case.write(folder)
        model, report = loader.from_pretrained(
            folder,
            dtype=torch.float32,
            # Its eager attention adds the slopes twice, in the mask and to the scores.
            attn_implementation="sdpa" if options.get("alibi") else "eager",
            output_loading_info=True,
        )
        faults = {kind: values for kind, values in report.items() if values}
        if faults:
            raise ValueError(f"{model_type}: {faults}")
        model.eval()
        n_vocab = options.get("text_config", options)["vocab_size"]
        tokens = made.tokens_of(n_vocab)
        if "num_labels" in options:
            return saved, shapes, *_of_pairs(model, tokens)
        with _Chosen(model) as chosen:
            out = model(torch.tensor([tokens]))
            logits = (out.last_hidden_state if is_encoder else out.logits)[0].double().numpy()
    return saved, shapes, logits, chosen.arrays()


def _of_pairs(
    model: Any, tokens: list[int]
) -> tuple[np.ndarray[Any, Any], dict[str, np.ndarray[Any, Any]]]:
    """Return the hidden states of the text, and the logits of pairs."""
    has_types = getattr(model.config, "type_vocab_size", 1) > 1
    scores = []
    for pair in made.pairs_of(2 if "roberta" in model.config.model_type else 1):
        types = [int(3 in pair[:i]) for i in range(len(pair))]
        more = {"token_type_ids": torch.tensor([types])} if has_types else {}
        scores.append(model(torch.tensor([pair]), **more).logits[0, 0].item())
    hidden = model.base_model(torch.tensor([tokens])).last_hidden_state[0]
    return hidden.double().numpy(), {"scores": np.array(scores, np.float32)}


class _Chosen:
    """Notes what the experts of every layer are given, and how near the choices were."""

    def __init__(self, model: Any) -> None:
        self._layers: list[tuple[Any, Any]] = []
        self._margin = float("inf")
        self._topk = torch.topk, torch.Tensor.topk
        for name, module in model.named_modules():
            if name.endswith(".experts"):
                module.register_forward_pre_hook(self._note, with_kwargs=True)

    def __enter__(self) -> _Chosen:
        """Look at every torch.topk; those within groups are no choices, but no nearer either."""

        def topk(values: Any, k: int, *args: Any, **options: Any) -> Any:
            if k < values.shape[-1]:
                best = self._topk[0](values, k + 1, dim=-1)[0]
                last, next_ = best[..., -2], best[..., -1]
                gaps = (last - next_) / last.abs().clamp(max=1.0)
                self._margin = min(self._margin, float(gaps.min()))
            return self._topk[0](values, k, *args, **options)

        torch.topk = torch.Tensor.topk = topk
        return self

    def __exit__(self, *_error: object) -> None:
        torch.topk, torch.Tensor.topk = self._topk
        if self._margin < LEAST_MARGIN:
            raise ValueError(f"a choice of experts is as near as {self._margin:.2g}")

    def _note(self, _module: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        experts, weights = [*args, *options.values()][1:3]
        order = experts.argsort(dim=1)
        self._layers.append((experts.gather(1, order), weights.gather(1, order)))

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        if not self._layers:
            return {}
        experts, weights = (torch.stack(of).numpy() for of in zip(*self._layers, strict=True))
        return {"experts": experts.astype(np.uint8), "weights": weights.astype(np.float32)}


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
