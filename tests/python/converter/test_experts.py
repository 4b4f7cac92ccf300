# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: layouts of checkpoints, routing, routers, memory, refusals."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from math import erf
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

import qsf
from make import golden_families, kind_models, tiny_checkpoints
from make.gguf_files import close
from make.golden_families import Case, weights_of, write_checkpoint
from make.refusals import refusals
from make.stored import Reader
from oracle.reference import forward, load_qsf
from qsf.errors import QsfConversionError
from qsf.file.kinds import ExpertScore, ExpertWeights
from qsf.file.layout import Dtype, TensorType
from qsf_converter import convert
from qsf_converter.original.weights import Choice, route
from qsf_converter.sources.architectures import family_of, read_facts

# Kimi Linear's are stored apart in every form.
CASES = {
    name: case
    for name, case in golden_families.cases().items()
    if case.experts is not None and not name.startswith("kimi")
}
Tensors = dict[str, NDArray[np.float32]]


def fused(tensors: Tensors) -> Tensors:
    """The tensors as transformers 5 holds them: gate and up of all experts in one, down another."""
    out: Tensors = {}
    experts: dict[tuple[str, str], Tensors] = {}
    for name, values in tensors.items():
        name = name.replace("mlp.moe_statics", "mlp.gate.moe_statics")
        match = re.fullmatch(r"(.*)\.(mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight", name)
        if match:
            experts.setdefault((match[1], match[3]), {})[match[4]] = values
        elif re.search(r"block_sparse_moe\.(gate\.|e_score)", name):
            out[name.replace("block_sparse_moe", "mlp")] = values
        elif "block_sparse_moe" in name:  # Granite has them in one, under other names
            for ours, theirs in (
                ("input_linear.weight", "experts.gate_up_proj"),
                ("output_linear.weight", "experts.down_proj"),
                ("router.layer", "router"),
            ):
                name = name.replace(ours, theirs)
            out[name] = values
        else:
            out[name] = values
    for layer in dict.fromkeys(layer for layer, _ in experts):
        own = [one for (at, _), one in experts.items() if at == layer]
        parts = [[one.get(a, one.get(b)) for one in own] for a, b in _NAMES]
        gate, up, down = (np.stack([w for w in part if w is not None]) for part in parts)
        out[f"{layer}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        out[f"{layer}.mlp.experts.down_proj"] = down
    return out


_NAMES = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))


def same_files(a: Path, b: Path) -> bool:
    """Equal but for META, which has the digest of the tensors as they are stored."""
    with Reader(a) as one, Reader(b) as other:
        units = range(len(one.units))
        return (
            one.header == other.header
            and one.layer_kinds == other.layer_kinds
            and one.tensors == other.tensors
            and all(one.read_unit(i) == other.read_unit(i) for i in units)
        )


# One of each layout of experts apart
@pytest.mark.parametrize(
    "name",
    ["olmoe", "qwen2_moe", "mixtral", "ernie4_5_moe", "glm4_moe", "minimax_m2", "deepseek_v3",
     "lfm2_moe", "hunyuan_v1_moe"],
)  # fmt: skip
def test_experts_in_one_tensor_give_the_same_file(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    joined = fused(case.tensors())
    if joined.keys() == case.shapes.keys():
        pytest.skip("its checkpoints have them in one tensor")
    one, other = tmp_path / "one.qsf", tmp_path / "other.qsf"
    convert(case.write(tmp_path / "m"), one)
    report = convert(
        golden_families.write_checkpoint(tmp_path / "fused", case.config, joined), other
    )
    assert not [text for text in report.warnings if "not used" in text]
    assert same_files(one, other)


def chosen(scores: list[float], bias: list[float] | None = None, **kind: Any) -> Choice:
    """What one token chooses whose router says the scores."""
    w = {TensorType.EXPERT_ROUTER: np.eye(len(scores), dtype=np.float32)}
    if bias is not None:
        w[TensorType.SELECTION_BIAS] = np.array(bias, np.float32)
    of = kind_models.kind(n_experts=len(scores), **{"expert_score": ExpertScore.LOGIT, **kind})
    return route(of, w, np.array([scores], np.float32))


def test_of_equal_scores_the_lower_number_is_chosen() -> None:
    for scores, experts in (([1.0, 3.0, 3.0, 3.0], [1, 2]), ([2.0] * 4, [0, 1])):
        choice = chosen(scores, n_chosen=2, expert_weights=ExpertWeights.SOFTMAX)
        assert choice.experts.tolist() == [experts]
        assert choice.weights.tolist() == [[0.5, 0.5]]


def router_dtype(case: Case, scale: float, tmp_path: Path) -> Dtype:
    tensors = case.tensors()
    for name, values in tensors.items():
        if name.endswith("mlp.gate.weight"):
            tensors[name] = values * np.float32(scale)
    folder = golden_families.write_checkpoint(tmp_path / "m", case.config, tensors)
    path = tmp_path / "model.qsf"
    convert(folder, path, quant_type="2bit", force=True)
    with Reader(path) as reader:
        router = reader.tensor(1, TensorType.EXPERT_ROUTER)
        assert router is not None
        return Dtype(router.dtype)


def test_routers_are_stored_exactly_whatever_the_type_of_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["olmoe"]
    assert router_dtype(case, 1.0, tmp_path) == Dtype.F16
    monkeypatch.setattr(
        golden_families,
        "safetensors_bytes",
        lambda tensors, _kind: tiny_checkpoints.safetensors_bytes(tensors, "fp32"),
    )
    assert router_dtype(case, 1.0, tmp_path) == Dtype.F16
    assert router_dtype(case, 1.001, tmp_path) == Dtype.F32  # f16 does not hold these


@pytest.mark.parametrize(("name", "changes", "message"), refusals("experts"))
def test_what_cannot_be_computed_is_refused_by_name(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    case = CASES[name]
    folder = dataclasses.replace(case, config={**case.config, **changes}).write(tmp_path / "m")
    with pytest.raises(QsfConversionError, match=message):
        convert(folder, tmp_path / "model.qsf")


def test_configurations_of_published_models_are_read(project_root: Path) -> None:
    """What they say beside sizes, and how the last layer routes."""
    published = json.loads((project_root / "tests/data/published_mixtures.json").read_text())
    for name, said in published.items():
        facts = read_facts(family_of(said["config"]), said["config"])
        last, wanted = facts.layer_kinds[-1], said["last_layer"]
        assert {key: getattr(last, key) for key in wanted} == wanted, name
        assert facts.header.ffn_dim == max(kind.ffn_dim for kind in facts.layer_kinds)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    apart = CASES["olmoe"].tensors()
    together = fused(apart)
    del apart["model.layers.1.mlp.experts.6.up_proj.weight"]
    together["model.layers.0.mlp.experts.gate_up_proj"][5, 43, 7] = np.nan
    for tensors, message in (
        (apart, r"no tensor model\.layers\.1\.mlp\.experts\.6\.up"),
        (together, r"gate_up_proj at \[5, 43, 7\]"),  # a value that is no number
    ):
        folder = golden_families.write_checkpoint(tmp_path / "m", CASES["olmoe"].config, tensors)
        with pytest.raises(QsfConversionError, match=message):
            convert(folder, tmp_path / "model.qsf")


# ---- Nomic Embed 2, which transformers lacks: plain numpy computes what its own code does ----
Array = NDArray[Any]
DIM, WIDE, HEADS, N_EXPERTS, N_LAYERS, N_VOCAB = 48, 64, 4, 5, 4, 60
NOMIC = {
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
        write_checkpoint(tmp_path / "m", NOMIC, w), tmp_path / "m.qsf", quant_type="f32",
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
