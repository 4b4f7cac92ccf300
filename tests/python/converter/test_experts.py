# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: layouts of checkpoints, routing, routers, memory, refusals."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from make import golden_families, kind_models, tiny_checkpoints
from make.golden_families import Case
from make.stored import Reader
from qsf.errors import QsfConversionError
from qsf.file.kinds import ExpertScore, ExpertWeights, Ffn, GroupScore
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


@pytest.mark.parametrize("name", CASES)
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


def test_a_selection_bias_chooses_and_does_not_weigh() -> None:
    how: dict[str, Any] = {"expert_score": ExpertScore.SIGMOID, "weights_factor": 2.0}
    choice = chosen([0.0] * 3, [0.0, 0.1, 0.2], n_chosen=1, **how)
    assert (int(choice.experts[0, 0]), float(choice.weights[0, 0])) == (2, 1.0)


def test_only_the_best_groups_are_chosen_from() -> None:
    scores = [9.0, 0.0, 5.0, 5.5, 4.0, 4.0]
    groups: dict[str, Any] = {"n_chosen": 2, "n_groups": 3, "n_groups_kept": 1}
    assert sorted(chosen(scores, **groups).experts[0]) == [0, 1]
    of_two = chosen(scores, **groups, group_score=GroupScore.TWO_LARGEST)
    assert sorted(of_two.experts[0]) == [2, 3]


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


def changed(case: Case, tmp_path: Path, **changes: Any) -> Path:
    return dataclasses.replace(case, config={**case.config, **changes}).write(tmp_path / "m")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported"),
        ("olmoe", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9, there are 8 experts"),
        ("olmoe", {"num_experts": 7}, r"gate.weight has shape \[8, 72\]"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers = 3 is not a list"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}, "no layer has experts"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias = True is not supported"),
        ("ernie4_5_moe", {"moe_layer_start_index": 9}, "no layer has experts"),
        ("glm4_moe", {"first_k_dense_replace": 3}, "no layer has experts"),
        ("glm4_moe-groups", {"n_group": 3}, "8 experts in 3 groups"),
        ("glm4_moe", {"topk_group": 2}, "topk_group = 2 is not within 1..1"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = changed(CASES[name], tmp_path, **changes)
    with pytest.raises(QsfConversionError, match=message):
        convert(folder, tmp_path / "model.qsf")


# What configurations of published models say beside sizes, and how they route.
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen3-Coder-30B-A3B": (
        {
            "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False,
            "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
            "intermediate_size": 5472, "max_position_embeddings": 262144, "max_window_layers": 28,
            "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
            "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
            "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False,
            "qkv_bias": False, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1e7,
            "router_aux_loss_coef": 0.0, "shared_expert_intermediate_size": 0,
            "sliding_window": None, "tie_word_embeddings": False, "use_qk_norm": True,
            "use_sliding_window": False, "vocab_size": 151936,
        },
        {"n_experts": 128, "n_chosen": 8, "expert_dim": 768, "ffn": Ffn.NONE,
         "expert_weights": ExpertWeights.BY_SUM},
    ),
    "ERNIE-4.5-21B-A3B": (
        {
            "architectures": ["Ernie4_5_MoeForCausalLM"], "hidden_act": "silu",
            "hidden_size": 2560, "intermediate_size": 12288, "max_position_embeddings": 131072,
            "num_attention_heads": 20, "num_key_value_heads": 4, "num_hidden_layers": 28,
            "rms_norm_eps": 1e-5, "vocab_size": 103424, "rope_theta": 500000, "use_rmsnorm": True,
            "tie_word_embeddings": True, "use_bias": False, "moe_num_experts": 64,
            "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_intermediate_size": 1536,
            "moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_k": 6, "moe_layer_interval": 1,
            "moe_use_aux_free": True,
        },
        {"n_experts": 64, "n_chosen": 6, "expert_dim": 1536, "ffn_dim": 3072,
         "expert_score": ExpertScore.SOFTMAX},
    ),
    "Qwen3-Next-80B-A3B": (
        {
            "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False,
            "decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 256,
            "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5120,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "linear_value_head_dim": 128,
            "max_position_embeddings": 262144, "mlp_only_layers": [], "moe_intermediate_size": 512,
            "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512,
            "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
            "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "rope_scaling": None,
            "rope_theta": 10000000, "shared_expert_intermediate_size": 512,
            "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
        },
        {"n_experts": 512, "n_chosen": 10, "expert_dim": 512, "ffn_dim": 512,
         "expert_weights": ExpertWeights.BY_SUM, "n_value_heads": 0, "output_gate": 1},
    ),
    "GLM-4.5-Air": (
        {
            "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 4096, "partial_rotary_factor": 0.5,
            "intermediate_size": 10944, "max_position_embeddings": 131072,
            "moe_intermediate_size": 1408, "norm_topk_prob": True, "num_attention_heads": 96,
            "n_group": 1, "topk_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
            "routed_scaling_factor": 1.0, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
            "num_hidden_layers": 46, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "rope_scaling": None, "rope_theta": 1000000, "num_nextn_predict_layers": 1,
            "tie_word_embeddings": False, "use_qk_norm": False, "vocab_size": 151552,
        },
        {"n_experts": 128, "n_chosen": 8, "expert_dim": 1408, "ffn_dim": 1408,
         "expert_score": ExpertScore.SIGMOID},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_configurations_of_published_models_are_read(name: str) -> None:
    config, wanted = PUBLISHED[name]
    facts = read_facts(family_of(config), config)
    last = facts.layer_kinds[-1]
    assert {key: getattr(last, key) for key in wanted} == wanted
    assert facts.header.ffn_dim == max(kind.ffn_dim for kind in facts.layer_kinds)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    tensors = CASES["olmoe"].tensors()
    del tensors["model.layers.1.mlp.experts.6.up_proj.weight"]
    golden_families.write_checkpoint(tmp_path / "m", CASES["olmoe"].config, tensors)
    with pytest.raises(
        QsfConversionError, match=r"no tensor model\.layers\.1\.mlp\.experts\.6\.up"
    ):
        convert(tmp_path / "m", tmp_path / "model.qsf")


def test_a_value_that_is_no_number_is_found_in_its_expert(tmp_path: Path) -> None:
    tensors = fused(CASES["olmoe"].tensors())
    tensors["model.layers.0.mlp.experts.gate_up_proj"][5, 43, 7] = np.nan
    golden_families.write_checkpoint(tmp_path / "m", CASES["olmoe"].config, tensors)
    with pytest.raises(QsfConversionError, match=r"gate_up_proj at \[5, 43, 7\]"):
        convert(tmp_path / "m", tmp_path / "model.qsf")
