# SPDX-License-Identifier: Apache-2.0
"""Writes the golden cases as GGUF files, as llama.cpp's own converter does.

The names of tensors and metadata are those of the package gguf; what is done to the values is
that of convert_hf_to_gguf.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from make.gguf_files import add, close
from make.golden_families import Case, weights_of
from make.refusals import table

Array = NDArray[np.float32]
Keys = gguf.Keys
LATENT = ("deepseek2", "mistral4", "minicpm3")
HYBRIDS = ("granitehybrid", "nemotron_h", "nemotron_h_moe", "falcon-h1", "mamba2")
PERMUTED = (*HYBRIDS[:3], "arcee", "granite", "granitemoe", "mistral3", "smollm3", "llama")
DELTA = ("qwen35", "qwen35moe", "qwen3next")
PLUS_ONE = ("gemma", "gemma2", "gemma3", "gemma-embedding", "nemotron", *DELTA)
ARCHITECTURES: dict[str, str] = table("tables")["gguf architectures"]
"""model_type of a config.json -> architecture of llama.cpp."""
_EXPERT_KEYS: dict[str, str] = table("tables")["gguf keys"]
_GEMMA4_SCALES = {
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
N_LAYERS = ("num_hidden_layers", "n_layers", "n_layer")
N_HEADS = ("num_attention_heads", "n_heads", "n_head")


def write_case(
    case: Case, path: Path, *, is_without_text: bool = False, is_older: bool = False
) -> Path:
    """Write `case`, with f16 matrices and f32 vectors, and return its path.

    is_without_text: say that there is no tokenizer, which llama.cpp wants to be told.
    is_older: keys and values of latents are made by one matrix, and metadata is of their heads.
    """
    writer = begin(case, path, is_older=is_older)
    for name, values in converted_tensors(case, case.tensors(), is_older=is_older):
        writer.add_tensor(name, values)
    _add_rope_factors(writer, case.config)
    if is_without_text:
        add(writer, "tokenizer.ggml.model", "no_vocab")
    close(writer)
    return path


def begin(
    case: Case, path: Path, *, n_ahead: int = 0, is_older: bool = False, also: str = ""
) -> Any:
    """Return a writer of the file that has the metadata of `case`.

    n_ahead: layers behind the last that predict further tokens. also: another name of its
    architecture, which says nothing of the activation.
    """
    config = mamba_general(kimi_general(case.config))
    arch = arch_of(config)
    writer = gguf.GGUFWriter(path, also or arch)
    said = {**_sizes(config), **_more(config, arch)}
    if arch in LATENT:
        said |= _latent_sizes(config, is_older=is_older or arch == "minicpm3")
    if n_ahead:
        said[Keys.LLM.BLOCK_COUNT] += n_ahead
        said[Keys.LLM.NEXTN_PREDICT_LAYERS] = n_ahead
    for key, value in said.items():
        if not (also and key.endswith("hidden_activation")):
            add(writer, key.format(arch=also or arch), value)
    return writer


def converted_tensors(
    case: Case, tensors: dict[str, Array], *, is_older: bool = False
) -> Iterator[tuple[str, Any]]:
    """Yield tensors as the file has them: f16 matrices, f32 vectors and routers."""
    config = case.config
    arch = arch_of(config)
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, _n_layers(config))
    if arch in DELTA:
        tensors = _delta_tensors(config, arch, tensors)
    if arch in (*LATENT[:2], "kimi-linear") and not is_older:
        tensors = _apart(config, tensors)
    if arch in HYBRIDS:
        tensors = mamba_stored(config, arch, tensors)
    # The numbers of xIELU are metadata.
    beside = re.compile(r"pooler\.|\.act_fn\.")
    tensors = {name: values for name, values in tensors.items() if not beside.search(name)}
    joined = tensors if arch in ("gemma4", "mistral4") else joined_experts(tensors)
    for name, stored in joined.items():
        if arch == "kimi-linear":
            name, stored = kimi_stored(name, stored)
        if "roberta" in config["model_type"] and "position_embeddings" in name:
            stored = stored[config["pad_token_id"] + 1 :]
        # The package's table has BitNet's names of before transformers.
        known = name.replace("ffn_sub_norm", "ffn_layernorm")
        known = known.replace("attn_sub_norm", "inner_attn_ln")
        if arch == "bloom":
            known = known.removeprefix("transformer.")
        # As the converter renames them; some are known in another way only.
        known = known.replace("e_score_correction_bias", "e_score_correction.bias")
        known = known.replace(".sinks", ".sinks.weight")
        known = known.replace(".expert_bias", ".expert_bias.bias")
        there = _GEMMA4_SCALES.get(name.split(".", 3)[-1])
        if there is not None:
            there = f"blk.{name.split('.')[2]}.{there}"
        else:
            if arch in ("gemma4", "mistral4") and name.endswith(
                ("_scalar", "gate_up_proj", "experts.down_proj")
            ):
                known += ".weight"
            suffixes = (".weight", ".bias")  # the second name: of Gemma without a head
            there = names.get_name(known, suffixes) or names.get_name(f"model.{known}", suffixes)
        assert there is not None, name
        values = _converted(config, arch, name, stored)
        exact = (
            "ffn_gate_inp.weight",
            ".bias",
            *(f"ssm_conv1d{part}.weight" for part in ("", "_q", "_k", "_v")),
            "ssm_a",
            "ssm_d",
            "_norm.weight",
        )
        if values.size > 1 and not there.endswith(exact[3:]):
            values = values.squeeze()
        is_f32 = values.ndim == 1 or there.endswith(exact)
        yield there, values.astype(np.float32 if is_f32 else np.float16)


def joined_experts(tensors: dict[str, Array]) -> dict[str, Array]:
    """Return the tensors with each matrix of all experts of a layer as one."""
    joined: dict[str, list[Array]] = {}
    for name, values in tensors.items():
        match = re.fullmatch(
            r"(.*\.(?:mlp|mixer|block_sparse_moe|feed_forward)\.experts)\.\d+\.(\w+)\.weight", name
        )
        if match:  # in the order of their numbers
            matrix = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(match[2], match[2])
            at = match[1].replace("block_sparse_moe", "mlp").replace("mixer", "mlp")
            at = at.replace("backbone.", "model.")
            joined.setdefault(f"{at}.{matrix}.weight", []).append(values)
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            at = name.replace("block_sparse_moe.input_linear.weight", "mlp.experts")
            gate, up = np.split(values, 2, axis=1)
            joined |= {f"{at}.gate_proj.weight": list(gate), f"{at}.up_proj.weight": list(up)}
        elif name.endswith("mlp.shared.input_linear.weight"):
            at = name.replace("mlp.shared.input_linear.weight", "mlp")
            gate, up = np.split(values, 2)
            joined |= {f"{at}.gate_proj.weight": [gate], f"{at}.up_proj.weight": [up]}
        elif name.endswith("mlp.shared.output_linear.weight"):
            at = name.replace("mlp.shared.output_linear.weight", "mlp")
            joined[f"{at}.down_proj.weight"] = [values]
        elif name.endswith("shared_mlp.input_linear.weight"):
            at = name.replace("shared_mlp.input_linear.weight", "mlp.shared_experts")
            gate, up = np.split(values, 2)
            joined |= {f"{at}.gate_proj.weight": [gate], f"{at}.up_proj.weight": [up]}
        elif name.endswith("shared_mlp.output_linear.weight"):
            at = name.replace("shared_mlp.output_linear.weight", "mlp.shared_experts")
            joined[f"{at}.down_proj.weight"] = [values]
        elif name.endswith(".experts.gate_up_proj") and f"{name}_bias" not in tensors:
            at = name.removesuffix(".gate_up_proj")
            gate, up = np.split(values, 2, axis=1)
            joined |= {f"{at}.gate_proj.weight": list(gate), f"{at}.up_proj.weight": list(up)}
        elif name.endswith(".experts.down_proj") and f"{name}_bias" not in tensors:
            joined[f"{name}.weight"] = list(values)
        elif match := re.fullmatch(r"(.*\.mlp\.experts)\.gate_up_proj(_bias)?", name):  # gpt-oss
            kind = "bias" if match[2] else "weight"
            rows = values if match[2] else values.swapaxes(1, 2)
            joined[f"{match[1]}.gate_proj.{kind}"] = list(rows[:, 0::2])
            joined[f"{match[1]}.up_proj.{kind}"] = list(rows[:, 1::2])
        elif match := re.fullmatch(r"(.*\.mlp\.experts\.down_proj)(_bias)?", name):
            rows = values if match[2] else values.swapaxes(1, 2)
            joined[f"{match[1]}.{'bias' if match[2] else 'weight'}"] = list(rows)
        elif name.endswith("block_sparse_moe.output_linear.weight"):
            at = name.replace("block_sparse_moe.output_linear.weight", "mlp.experts")
            joined[f"{at}.down_proj.weight"] = list(values)
        else:
            joined[name] = [values]
    return {
        name: np.stack(parts) if ".experts." in name else parts[0] for name, parts in joined.items()
    }


def _converted(config: dict[str, Any], arch: str, name: str, values: Array) -> Array:
    if arch in PLUS_ONE and name.endswith("norm.weight") and "linear_attn" not in name:
        return values + 1
    if arch in PERMUTED:
        if ".q_proj." in name:
            return _interleaved(values, config["num_attention_heads"])
        if ".k_proj." in name:
            return _interleaved(values, config["num_key_value_heads"])
    if "query_key_value" in name:
        n_heads = _first(config, *N_HEADS)
        n_groups = n_heads
        if arch == "falcon":
            if config["new_decoder_architecture"]:
                n_groups = config["num_kv_heads"]
            elif config["multi_query"]:
                n_groups = 1
        n_queries = n_heads // n_groups
        parts = values.reshape(n_groups, n_queries + 2, config["hidden_size"] // n_heads, -1)
        ends = (parts[:, :n_queries], parts[:, n_queries:-1], parts[:, -1:])
        joined = [part.reshape(-1, parts.shape[-1]) for part in ends]
        return np.concatenate(joined).reshape(values.shape)
    return values


def _delta_tensors(
    config: dict[str, Any], arch: str, tensors: dict[str, Array]
) -> dict[str, Array]:
    """Split what key heads share, make -e^A_log, and tile the value heads of Qwen 3.5."""
    n_key, n_value = config["linear_num_key_heads"], config["linear_num_value_heads"]
    keys, value = n_key * config["linear_key_head_dim"], config["linear_value_head_dim"]
    made: dict[str, Array] = {}

    def tiled(values: Array, width: int, first: int = 0) -> Array:
        """Tile rows from ``first`` on, ``width`` for each head."""
        heads = values[first:].reshape(n_key, n_value // n_key, width, *values.shape[1:])
        return np.concatenate([values[:first], heads.swapaxes(0, 1).reshape(values[first:].shape)])

    for name, values in tensors.items():
        part = name.rpartition("linear_attn.")[2].removesuffix(".weight")
        if "linear_attn." not in name:
            made[name] = values
        elif part == "in_proj_qkvz":
            each = value * n_value // n_key
            by_key = values.reshape(n_key, -1, values.shape[1])
            ends = np.cumsum([keys // n_key, keys // n_key, each])
            parts = [rows.reshape(-1, values.shape[1]) for rows in np.split(by_key, ends, axis=1)]
            made[name.replace("qkvz", "qkv")] = np.concatenate(parts[:3])
            made[name.replace("qkvz", "z")] = parts[3]
        else:
            if part == "A_log":
                values = -np.exp(values.astype(np.float64)).astype(np.float32)
            if arch != "qwen3next" and part in ("in_proj_qkv", "conv1d"):
                values = tiled(values, value, 2 * keys)
            elif arch != "qwen3next" and part == "in_proj_z":
                values = tiled(values, value)
            elif arch != "qwen3next" and part == "out_proj":
                values = tiled(np.ascontiguousarray(values.T), value).T
            elif arch != "qwen3next" and part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
                values = tiled(values, 1)
            made[name.replace(".dt_bias", ".dt_proj.bias")] = values
    return made


def _apart(config: dict[str, Any], tensors: dict[str, Array]) -> dict[str, Array]:
    """What makes keys, turned head by head, and values of latents in a tensor each."""
    made: dict[str, Array] = {}
    n_heads, n_keys = config["num_attention_heads"], config["qk_nope_head_dim"]
    for name, values in tensors.items():
        if "kv_b_proj" not in name:
            made[name] = values
            continue
        heads = values.reshape(n_heads, -1, values.shape[1])
        made[name.replace("kv_b", "k_b")] = heads[:, :n_keys].swapaxes(1, 2)
        made[name.replace("kv_b", "v_b")] = heads[:, n_keys:]
    return made


def _latent_sizes(config: dict[str, Any], *, is_older: bool) -> dict[str, Any]:
    n_rope, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    n_keys, n_values = config["qk_nope_head_dim"] + n_rope, config["v_head_dim"]
    said: dict[str, Any] = {
        Keys.Attention.Q_LORA_RANK: config["q_lora_rank"],
        Keys.Attention.KV_LORA_RANK: rank,
        Keys.Rope.DIMENSION_COUNT: n_rope,
        Keys.LLM.NEXTN_PREDICT_LAYERS: None,  # the layers behind the last are not written
    }
    if is_older:
        said |= {Keys.Attention.KEY_LENGTH: n_keys, Keys.Attention.VALUE_LENGTH: n_values}
    else:
        said |= {
            Keys.Attention.HEAD_COUNT_KV: 1,
            Keys.Attention.KEY_LENGTH: rank + n_rope,
            Keys.Attention.VALUE_LENGTH: rank,
            Keys.Attention.KEY_LENGTH_MLA: n_keys,
            Keys.Attention.VALUE_LENGTH_MLA: n_values,
        }
    rope = config["rope_parameters"]
    if "mscale_all_dim" in rope:
        said[Keys.Rope.SCALING_YARN_LOG_MUL] = 0.1 * rope["mscale_all_dim"]
    if config["model_type"] in ("deepseek_v3", "glm4_moe_lite"):
        said[Keys.LLM.EXPERT_GATING_FUNC] = 2
    if config["model_type"] == "glm4_moe_lite":
        n_dense = config["mlp_layer_types"].count("dense")
        said[Keys.LLM.LEADING_DENSE_BLOCK_COUNT] = n_dense
    if config["model_type"] == "youtu":
        said |= {
            Keys.LLM.LEADING_DENSE_BLOCK_COUNT: config["num_hidden_layers"],
            Keys.LLM.EXPERT_FEED_FORWARD_LENGTH: config["intermediate_size"],
            Keys.LLM.EXPERT_SHARED_COUNT: 0,
            Keys.LLM.EXPERT_WEIGHTS_NORM: True,
        }
    return said


def arch_of(config: dict[str, Any]) -> str:
    """Return llama.cpp's name of the architecture."""
    if config.get("use_bidirectional_attention") is True:
        return "gemma-embedding"
    is_mixture = "moe" in config.get("layers_block_type", ())
    return ARCHITECTURES[config["model_type"]] + ("_moe" if is_mixture else "")


def _n_layers(config: dict[str, Any]) -> int:
    blocks = config.get("layers_block_type")
    return len(blocks) if blocks else _first(config, *N_LAYERS)


def _interleaved(values: Array, n_heads: int) -> Array:
    halves = values.reshape(n_heads, 2, values.shape[0] // n_heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _first(config: dict[str, Any], *names: str) -> Any:
    return next(config[name] for name in names if config.get(name))


def _sizes(config: dict[str, Any]) -> dict[str, Any]:
    dim = config.get("hidden_size") or config["d_model"]
    n_heads = _first(config, *N_HEADS)
    head_dim = config.get("head_dim") or dim // n_heads
    said: dict[str, Any] = {
        Keys.LLM.BLOCK_COUNT: _n_layers(config),
        Keys.LLM.CONTEXT_LENGTH: _first(
            config, "max_position_embeddings", "max_seq_len", "seq_length"
        ),
        Keys.LLM.EMBEDDING_LENGTH: dim,
        Keys.LLM.FEED_FORWARD_LENGTH: config.get("intermediate_size")
        or config.get("ffn_hidden_size")
        or 4 * dim,
        Keys.Attention.HEAD_COUNT: n_heads,
        Keys.LLM.VOCAB_SIZE: config["vocab_size"],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }
    if config.get("pad_token_id") is not None:
        said["tokenizer.ggml.padding_token_id"] = config["pad_token_id"]
    if config.get("num_key_value_heads"):
        said[Keys.Attention.HEAD_COUNT_KV] = config["num_key_value_heads"]
    if "head_dim" in config:
        said |= {Keys.Attention.KEY_LENGTH: head_dim, Keys.Attention.VALUE_LENGTH: head_dim}
    is_mixture = config["model_type"] != "nemotron_h" or "moe" in config["layers_block_type"]
    for name, key in _EXPERT_KEYS.items() if is_mixture else ():
        if config.get(name) is not None:
            said[key] = config[name]
    if "routed_scaling_factor" in config and is_mixture:
        said[Keys.LLM.EXPERT_WEIGHTS_NORM] = config["norm_topk_prob"]
    if config["model_type"] == "gpt_oss":
        said[Keys.LLM.EXPERT_FEED_FORWARD_LENGTH] = config["intermediate_size"]
    if config["model_type"] == "glm4_moe":
        said[Keys.LLM.BLOCK_COUNT] += config["num_nextn_predict_layers"]
        said[Keys.LLM.EXPERT_GATING_FUNC] = 2
    if "rms_norm_eps" in config:
        said[Keys.Attention.LAYERNORM_RMS_EPS] = config["rms_norm_eps"]
    for name in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"):
        if name in config and config["model_type"][:4] != "lfm2":
            said[Keys.Attention.LAYERNORM_EPS] = config[name]
    return {**said, **_rope(config, head_dim)}


def _rope(config: dict[str, Any], head_dim: int) -> dict[str, Any]:
    said: dict[str, Any] = {}
    rope = config.get("rope_parameters")
    if rope is None:
        return said
    if "full_attention" in rope:
        if config["model_type"].startswith(("gemma", "modernbert")):
            said[Keys.Rope.FREQ_BASE_SWA] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    part = rope.get("partial_rotary_factor", 1.0)
    said |= {
        Keys.Rope.FREQ_BASE: rope["rope_theta"],
        Keys.Rope.DIMENSION_COUNT: int(head_dim * part),
    }
    kind = rope["rope_type"]
    original = rope.get("original_max_position_embeddings")
    if kind in ("linear", "yarn"):
        said |= {Keys.Rope.SCALING_TYPE: kind, Keys.Rope.SCALING_FACTOR: rope["factor"]}
    if kind in ("yarn", "longrope"):
        said[Keys.Rope.SCALING_ORIG_CTX_LEN] = original
    if kind == "longrope":
        ratio = config["max_position_embeddings"] / original
        said[Keys.Rope.SCALING_ATTN_FACTOR] = math.sqrt(1 + math.log(ratio) / math.log(original))
    if kind == "yarn":
        for key, name in (
            (Keys.Rope.SCALING_YARN_BETA_FAST, "beta_fast"),
            (Keys.Rope.SCALING_YARN_BETA_SLOW, "beta_slow"),
            (Keys.Attention.TEMPERATURE_SCALE, "llama_4_scaling_beta"),
        ):
            if name in rope:
                said[key] = rope[name]
        if "mscale_all_dim" in rope:
            said[Keys.Rope.SCALING_YARN_LOG_MUL] = rope["mscale_all_dim"]
    return said


def _more(config: dict[str, Any], arch: str) -> dict[str, Any]:
    is_encoder = arch in ("bert", "nomic-bert", "modern-bert", "gemma-embedding")
    said: dict[str, Any] = {Keys.Attention.CAUSAL: False} if is_encoder else {}
    if "roberta" in config["model_type"]:
        said[Keys.LLM.CONTEXT_LENGTH] = (
            config["max_position_embeddings"] - config["pad_token_id"] - 1
        )
    for name, key in (
        ("embedding_multiplier", Keys.LLM.EMBEDDING_SCALE),
        ("residual_multiplier", Keys.LLM.RESIDUAL_SCALE),
        ("attention_multiplier", Keys.Attention.SCALE),
        ("logits_scaling", Keys.LLM.LOGIT_SCALE),
        ("logit_scale", Keys.LLM.LOGIT_SCALE),
        ("attn_logit_softcapping", Keys.LLM.ATTN_LOGIT_SOFTCAPPING),
        ("final_logit_softcapping", Keys.LLM.FINAL_LOGIT_SOFTCAPPING),
    ):
        if config.get(name) is not None and arch != "falcon-h1":
            said[key] = config[name]
    if config.get("sliding_window") is not None and arch not in ("qwen2", "qwen2moe"):
        said[Keys.Attention.SLIDING_WINDOW] = config["sliding_window"]
        if "layer_types" in config and arch != "gpt-oss":  # llama.cpp knows that they alternate
            windows = [kind == "sliding_attention" for kind in config["layer_types"]]
            said[Keys.Attention.SLIDING_WINDOW_PATTERN] = windows
    if arch == "bitnet":
        said["{arch}.hidden_activation"] = config["hidden_act"]
    if arch == "modern-bert":
        said[Keys.Attention.SLIDING_WINDOW] = config["local_attention"]
        said["{arch}.hidden_activation"] = config["hidden_activation"]
        windows = [kind == "sliding_attention" for kind in config["layer_types"]]
        is_usual = not windows[0]
        said[Keys.Attention.SLIDING_WINDOW_PATTERN] = 3 if is_usual else windows
    if arch in ("lfm2", "lfm2moe"):
        is_attention = [kind == "full_attention" for kind in config["layer_types"]]
        of_layers = [config["num_key_value_heads"] * is_one for is_one in is_attention]
        said[Keys.Attention.HEAD_COUNT_KV] = of_layers
        said[Keys.Attention.LAYERNORM_RMS_EPS] = config["norm_eps"]
        said[Keys.ShortConv.L_CACHE] = config["conv_L_cache"]
        said["{arch}.expert_gating_func"] = 2 if arch == "lfm2moe" else None
        said[Keys.LLM.LEADING_DENSE_BLOCK_COUNT] = config.get("num_dense_layers")
        if config.get("block_auto_adjust_ff_dim"):  # the width as it is used
            multiple = config["block_multiple_of"]
            n = int(2 * config["intermediate_size"] / 3)
            said[Keys.LLM.FEED_FORWARD_LENGTH] = -(-n // multiple) * multiple
    if arch == "gemma4":
        full = next(iter(config["per_layer_config"].values()))
        width, n_own = full["head_dim"], full.get("num_key_value_heads")
        said |= {
            Keys.Attention.KEY_LENGTH: width,
            Keys.Attention.VALUE_LENGTH: width,
            Keys.Attention.KEY_LENGTH_SWA: config["head_dim"],
            Keys.Attention.VALUE_LENGTH_SWA: config["head_dim"],
            Keys.Rope.DIMENSION_COUNT: width,
            Keys.Rope.DIMENSION_COUNT_SWA: config["head_dim"],
            Keys.Attention.SHARED_KV_LAYERS: config["num_kv_shared_layers"],
            Keys.LLM.EMBD_LENGTH_PER_LAYER_INP: config["hidden_size_per_layer_input"],
        }
        if config["use_double_wide_mlp"]:
            n_shared, ffn_dim = config["num_kv_shared_layers"], config["intermediate_size"]
            n_before = config["num_hidden_layers"] - n_shared
            ffn_dims = [ffn_dim] * n_before + [2 * ffn_dim] * n_shared
            said[Keys.LLM.FEED_FORWARD_LENGTH] = ffn_dims
        if n_own is not None:
            said[Keys.Attention.HEAD_COUNT_KV] = [
                config["num_key_value_heads"] if is_windowed else n_own for is_windowed in windows
            ]
    if arch in DELTA:
        n_value = config["linear_num_value_heads"]
        said |= {
            Keys.SSM.CONV_KERNEL: config["linear_conv_kernel_dim"],
            Keys.SSM.STATE_SIZE: config["linear_key_head_dim"],
            Keys.SSM.GROUP_COUNT: config["linear_num_key_heads"],
            Keys.SSM.TIME_STEP_RANK: n_value,
            Keys.SSM.INNER_SIZE: n_value * config["linear_value_head_dim"],
        }
    if arch in HYBRIDS:
        said |= mamba_said(config, arch)
    if arch == "kimi-linear":
        said |= kimi_said(config)
    if arch == "gptneox":
        said[Keys.LLM.USE_PARALLEL_RESIDUAL] = config["use_parallel_residual"]
    if arch == "falcon":
        n_shared = config["num_kv_heads"] if config["new_decoder_architecture"] else 1
        said |= {Keys.Attention.HEAD_COUNT_KV: n_shared, Keys.LLM.TENSOR_DATA_LAYOUT: "jploski"}
    if arch == "mpt":
        bias = config["attn_config"]["alibi_bias_max"]
        said[Keys.Attention.MAX_ALIBI_BIAS] = float(bias)
        said[Keys.Attention.CLAMP_KQV] = config["attn_config"]["clip_qkv"]
    if arch == "apertus":
        for name in ("alpha_p", "alpha_n", "beta", "eps"):
            names = (f"model.layers.{i}.mlp.act_fn.{name}" for i in range(_n_layers(config)))
            said[f"{{arch}}.xielu.{name}"] = [
                float(weights_of(at, (() if name in ("beta", "eps") else (1,))).ravel()[0])
                for at in names
            ]
    if arch == "hunyuan-moe":
        said |= {
            Keys.LLM.EXPERT_USED_COUNT: config["moe_topk"],
            Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH: config["intermediate_size"],
        }
    if config.get("rope_parameters", {}).get("alpha"):
        dim = config["head_dim"]
        stretched = config["rope_parameters"]["alpha"] ** (dim / (dim - 2))
        said[Keys.Rope.FREQ_BASE] = config["rope_parameters"]["rope_theta"] * stretched
    return said


def _add_rope_factors(writer: Any, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    if config["model_type"].startswith("gemma4"):
        width = next(iter(config["per_layer_config"].values()))["head_dim"]
        n_turned = int(width * rope["full_attention"]["partial_rotary_factor"] / 2)
        factors = np.full(width // 2, 1e30, np.float32)
        factors[:n_turned] = 1
        writer.add_tensor("rope_freqs.weight", factors)
    if rope.get("rope_type") == "longrope":
        for name in ("long", "short"):
            values = np.array(rope[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", values)


# ---- what llama.cpp's converter does to Kimi Linear ----
def kimi_general(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with usual names of Kimi Linear's keys."""
    if config["model_type"] != "kimi_linear":
        return config
    names = {"max_position_embeddings": "model_max_length", "norm_topk_prob": "moe_renormalize",
             "num_experts_per_tok": "num_experts_per_token", "n_group": "num_expert_group",
             "n_shared_experts": "num_shared_experts"}  # fmt: skip
    n_dense = config["mlp_layer_types"].count("dense")
    here = {name: config[key] for name, key in names.items()}
    return {**config, **here, "first_k_dense_replace": n_dense}


def kimi_stored(name: str, values: Array) -> tuple[str, Array]:
    """-e^A_log, and convolutions with four axes."""
    if name.endswith("A_log"):
        return name, -np.exp(values.astype(np.float64)).astype(np.float32)
    if "_conv1d." in name:
        return name, values.reshape(1, len(values), 1, -1)
    return name.replace(".dt_bias", ".dt_proj.bias"), values


def kimi_said(config: dict[str, Any]) -> dict[str, Any]:
    """What the metadata says beside what all families say."""
    n_rope, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    return {
        Keys.Attention.HEAD_COUNT_KV: [int(t[0] == "f") for t in config["layer_types"]],
        Keys.SSM.CONV_KERNEL: config["linear_conv_kernel_dim"],
        Keys.KDA.HEAD_DIM: config["linear_head_dim"],
        Keys.Attention.Q_LORA_RANK: config["q_lora_rank"],
        Keys.Attention.KV_LORA_RANK: rank,
        Keys.Rope.DIMENSION_COUNT: n_rope,
        Keys.Attention.KEY_LENGTH: rank + n_rope,
        Keys.Attention.VALUE_LENGTH: None,
        Keys.Attention.KEY_LENGTH_MLA: config["qk_nope_head_dim"] + n_rope,
        Keys.Attention.VALUE_LENGTH_MLA: config["v_head_dim"],
        Keys.LLM.EXPERT_GATING_FUNC: 2,
    }


# ---- what llama.cpp's converter makes of models with layers of Mamba-2 ----
def mamba_general(config: dict[str, Any]) -> dict[str, Any]:
    """Give a model without attention what others state."""
    if config["model_type"] != "mamba2":
        return config
    more = {"num_attention_heads": 1, "intermediate_size": 1, "max_position_embeddings": 1 << 20}
    left_out = ("head_dim", "layer_norm_epsilon")
    kept = {name: value for name, value in config.items() if name not in left_out}
    return {**kept, **more, "rms_norm_eps": config["layer_norm_epsilon"]}


def mamba_stored(config: dict[str, Any], arch: str, tensors: dict[str, Array]) -> dict[str, Array]:
    """Make -e^A_log, matrices of vectors, and fold Falcon's factors into its matrices."""
    n_groups = config.get("mamba_n_groups") or config["n_groups"]
    has_experts = arch == "nemotron_h_moe" or config.get("num_local_experts")
    factors: dict[str, Any] = {}
    if arch == "falcon-h1":
        inner = config["mamba_d_ssm"]
        n_keys = n_groups * config["mamba_d_state"]
        of_parts = np.array(config["ssm_multipliers"]) * config["ssm_in_multiplier"]
        n_of_parts = (inner, inner, n_keys, n_keys, config["mamba_n_heads"])
        attention = config["attention_in_multiplier"]
        factors = {
            "mamba.in_proj": np.repeat(of_parts, n_of_parts)[:, None],
            "mamba.out_proj": config["ssm_out_multiplier"],
            "q_proj": attention,
            "k_proj": attention * config["key_multiplier"],
            "v_proj": attention,
            "o_proj": config["attention_out_multiplier"],
            "gate_proj": config["mlp_multipliers"][0],
            "down_proj": config["mlp_multipliers"][1],
            "embed_tokens": config["embedding_multiplier"],
            "lm_head": config["lm_head_multiplier"],
        }
    made: dict[str, Array] = {}
    for name, values in tensors.items():
        if name.endswith(("A_log", ".D")):
            values = values[:, None]
        if name.endswith("A_log"):
            values = -np.exp(values.astype(np.float64)).astype(np.float32)
        elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            values = values.reshape(n_groups, -1)
        for part, factor in factors.items():
            if name.endswith(f"{part}.weight"):
                values = (values * factor).astype(np.float32)
        if "shared_mlp" in name and not has_experts:  # one FFN
            name = name.replace("shared_mlp", "mlp.shared")
        made[name.replace(".dt_bias", ".dt_proj.bias")] = values
    return made


def mamba_said(config: dict[str, Any], arch: str) -> dict[str, Any]:
    types = config.get("layers_block_type") or config.get("layer_types") or ()
    attention = config.get("attn_layer_indices", ())  # of Bamba, which has RoPE
    if attention:
        layers = range(config["num_hidden_layers"])
        types = [("mamba", "full_attention")[i in attention] for i in layers]
    n_heads = _first(config, "mamba_n_heads", "mamba_num_heads", "num_heads")
    inner = _first(config, "mamba_d_ssm") if arch == "falcon-h1" else 2 * config["hidden_size"]
    if "mamba_head_dim" in config:
        inner = n_heads * config["mamba_head_dim"]
    told: dict[str, Any] = {
        Keys.SSM.CONV_KERNEL: _first(config, "mamba_d_conv", "conv_kernel"),
        Keys.SSM.STATE_SIZE: _first(config, "mamba_d_state", "ssm_state_size", "state_size"),
        Keys.SSM.GROUP_COUNT: _first(config, "mamba_n_groups", "n_groups"),
        Keys.SSM.TIME_STEP_RANK: n_heads,
        Keys.SSM.INNER_SIZE: inner,
    }
    if arch == "mamba2":  # the converter states none
        told |= {Keys.Attention.HEAD_COUNT: 0, Keys.LLM.FEED_FORWARD_LENGTH: 0}
    if types:
        of_layers = [config["num_key_value_heads"] * (t == "full_attention") for t in types]
        is_turned = bool(attention) or config.get("position_embedding_type") == "rope"
        told |= {Keys.Attention.HEAD_COUNT_KV: of_layers, Keys.Rope.SCALING_FINETUNED: is_turned}
    if "layers_block_type" in config:
        of = config["moe_intermediate_size" if arch == "nemotron_h_moe" else "intermediate_size"]
        told[Keys.LLM.FEED_FORWARD_LENGTH] = [of * (t in ("mlp", "moe")) for t in types]
        told[Keys.Attention.LAYERNORM_RMS_EPS] = config["layer_norm_epsilon"]
    return told
