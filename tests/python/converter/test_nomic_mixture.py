# SPDX-License-Identifier: Apache-2.0
"""Nomic Embed 2: transformers has no such mixture, so plain numpy computes what its code does.

Names and settings: config.json of nomic-ai/nomic-embed-text-v2-moe; the layers: its
modeling_hf_nomic_bert.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import erf
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

import qsf
from make.gguf_files import close
from make.golden_families import weights_of, write_checkpoint
from oracle.reference import forward, load_qsf
from qsf_converter import convert

Array = NDArray[Any]
DIM, WIDE, HEADS, N_EXPERTS, N_LAYERS, N_VOCAB = 48, 64, 4, 5, 4, 60
CONFIG = {
    "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "activation_function": "gelu",
    "n_embd": DIM, "n_inner": WIDE, "n_head": HEADS, "n_layer": N_LAYERS, "n_positions": 64,
    "vocab_size": N_VOCAB, "type_vocab_size": 1, "layer_norm_epsilon": 1e-5, "pad_token_id": 1,
    "num_experts": N_EXPERTS, "moe_top_k": 2, "moe_every_n_layers": 2, "moe_impl": "megablocks",
    "moe_normalize_expert_weights": False, "moe_resid_pdrop": 0.0, "num_shared_experts": 0,
    "expert_choice_router": False, "ffn_div": 1, "router_aux_loss_coef": 0.1, "causal": False,
    "qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True, "prenorm": False,
    "rotary_emb_base": 10000, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None, "rotary_scaling_factor": None, "use_rms_norm": False,
    "parallel_block": False, "max_trained_positions": 2048, "pad_vocab_size_multiple": 64,
    "use_flash_attn": True, "scale_attn_weights": True, "use_xentropy": True,
    "dense_seq_output": True, "add_pooling_layer": False, "fused_dropout_add_ln": True,
}  # fmt: skip
TOKENS = [(7 * i + 3) % N_VOCAB for i in range(30)]
_gelu = np.vectorize(lambda x: 0.5 * x * (1 + erf(x / np.sqrt(2))), otypes=[float])


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (N_VOCAB, DIM),
        "embeddings.token_type_embeddings.weight": (1, DIM),
        "emb_ln.weight": (DIM,),
        "emb_ln.bias": (DIM,),
    }
    for i in range(N_LAYERS):
        at = f"encoder.layers.{i}."
        for name, out, of in (("attn.Wqkv", 3 * DIM, DIM), ("attn.out_proj", DIM, DIM)):
            found |= {f"{at}{name}.weight": (out, of), f"{at}{name}.bias": (out,)}
        for name in ("norm1", "norm2"):
            found |= {f"{at}{name}.weight": (DIM,), f"{at}{name}.bias": (DIM,)}
        if i % 2:
            stacked = (N_EXPERTS * WIDE, DIM)
            found |= {f"{at}mlp.experts.mlp.{name}": stacked for name in ("w1", "w2")}
            found |= {f"{at}mlp.router.layer.weight": (N_EXPERTS, DIM)}
            found |= {f"{at}mlp.experts.bias": (DIM,)}
        else:
            for name, out, of in (("fc1", WIDE, DIM), ("fc2", DIM, WIDE)):
                found |= {f"{at}mlp.{name}.weight": (out, of), f"{at}mlp.{name}.bias": (out,)}
    return found


def tensors() -> dict[str, NDArray[np.float32]]:
    return {name: weights_of(name, shape) for name, shape in shapes().items()}


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def hidden_states(w: Mapping[str, Array]) -> Array:
    """The model's own computation, token by token where experts are chosen."""

    def norm(x: Array, name: str) -> Array:
        x = x - x.mean(axis=-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5)
        return np.asarray(x * w[f"{name}.weight"] + w[f"{name}.bias"])

    def linear(x: Array, name: str) -> Array:
        return np.asarray(x @ w[f"{name}.weight"].T + w[f"{name}.bias"])

    def turn(x: Array) -> Array:
        half = DIM // HEADS // 2
        angles = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def experts(x: Array, at: str) -> Array:
        up, down = (w[f"{at}experts.mlp.{n}"].reshape(N_EXPERTS, WIDE, DIM) for n in ("w1", "w2"))
        out = np.zeros_like(x)
        for t, scores in enumerate(softmax(x @ w[f"{at}router.layer.weight"].T)):
            for e in np.argsort(-scores)[:2]:
                out[t] += scores[e] * (_gelu(x[t] @ up[e].T) @ down[e])
        return out + w[f"{at}experts.bias"]

    x = w["embeddings.word_embeddings.weight"][TOKENS]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "emb_ln")
    for i in range(N_LAYERS):
        at = f"encoder.layers.{i}."
        q, k, v = linear(x, f"{at}attn.Wqkv").reshape(len(x), 3, HEADS, -1).swapaxes(0, 1)
        scores = np.einsum("qhd,khd->hqk", turn(q), turn(k)) / np.sqrt(DIM // HEADS)
        mixed = np.einsum("hqk,khd->qhd", softmax(scores), v).reshape(x.shape)
        x = norm(x + linear(mixed, f"{at}attn.out_proj"), f"{at}norm1")
        plain = _gelu(linear(x, f"{at}mlp.fc1")) if i % 2 == 0 else x
        ffn = experts(x, f"{at}mlp.") if i % 2 else linear(plain, f"{at}mlp.fc2")
        x = norm(x + ffn, f"{at}norm2")
    return x


def check(path: Path, w: Mapping[str, Array]) -> None:
    want = hidden_states({name: values.astype(float) for name, values in w.items()})
    got = forward(load_qsf(path), TOKENS).final_norm
    assert np.abs(got - want).max() < 3e-6 * np.abs(want).max()
    with qsf.Model(path, exact=True, ram_budget=None) as model:
        (vector,) = model.embed([TOKENS], pooling="mean")
    mean = want.mean(axis=0)
    assert np.abs(np.array(vector) - mean / np.linalg.norm(mean)).max() < 2e-6


def test_a_mixture_computes_what_its_own_code_does(tmp_path: Path) -> None:
    w = tensors()
    report = convert(
        write_checkpoint(tmp_path / "m", CONFIG, w), tmp_path / "m.qsf", quant_type="f32",
        allow_no_tokenizer=True,
    )  # fmt: skip
    assert not [text for text in report.warnings if "tokenizer" not in text]
    check(tmp_path / "m.qsf", w)


def test_its_gguf_file_lacks_one_bias(tmp_path: Path) -> None:
    w = tensors()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.NOMIC_BERT_MOE, N_LAYERS)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "nomic-bert-moe")
    writer.add_block_count(N_LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(DIM)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_expert_count(N_EXPERTS)
    writer.add_expert_used_count(2)
    writer.add_moe_every_n_layers(2)
    writer.add_causal_attention(False)
    writer.add_tokenizer_model("no_vocab")
    for name, values in w.items():
        if name.endswith("experts.bias"):
            continue
        if "experts.mlp" in name:  # [experts, out, in]
            stacked = values.reshape(N_EXPERTS, WIDE, DIM)
            values = np.ascontiguousarray(stacked if "w1" in name else stacked.swapaxes(1, 2))
        known = name if name.endswith(("weight", "bias")) else f"{name}.weight"
        there = names.get_name(known, (".weight", ".bias"))
        assert there is not None, name
        writer.add_tensor(there, values)
    close(writer)
    report = convert(
        tmp_path / "m.gguf", tmp_path / "m.qsf", quant_type="f32", allow_no_tokenizer=True
    )
    assert not [text for text in report.warnings if "tokenizer" not in text]
    zero = {name: values * 0 for name, values in w.items() if name.endswith("experts.bias")}
    check(tmp_path / "m.qsf", {**w, **zero})
