# SPDX-License-Identifier: Apache-2.0
"""Calibration of the bundled mixture of experts, its types, its report, and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from make import calibrated_models
from make.tiny_checkpoints import safetensors_bytes
from qsf.file.layout import Dtype, TensorType
from qsf.file.reader import Reader
from qsf.report.record import Report
from qsf_converter import convert
from qsf_converter.calibrate import compensation, type_choice
from qsf_converter.rounding.plan import Policy, make_plan

T = TensorType
BUNDLED = "bundled"
N_TOKENS = 4096


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory, tiny_moe_dir: Path) -> Report:
    path = tmp_path_factory.mktemp("calibrated") / "2bit.qsf"
    return convert(
        tiny_moe_dir, path, quant_type="2bit", calibration=BUNDLED, calibration_tokens=N_TOKENS
    )


@pytest.mark.slow
def test_experts_get_feedback_on_the_tokens_that_they_meet(
    calibrated: Report, tiny_moe_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {report.name: report for report in calibrated.quality.tensors}
    of_experts = kinds["2.EXPERTS.FFN_DOWN"]
    assert (of_experts.n_rows, of_experts.n_cols) == (8 * 192, 160)
    assert of_experts.action == "feedback"
    assert of_experts.output_error is not None
    assert kinds["2.EXPERT_ROUTER"].type == "f16"
    # The same where no expert meets enough tokens: plain rounding, which is worse.
    monkeypatch.setattr(compensation, "LEAST_TOKENS", 1 << 30)
    plain = convert(
        tiny_moe_dir,
        tmp_path / "plain.qsf",
        quant_type="2bit",
        calibration=BUNDLED,
        calibration_tokens=N_TOKENS,
    )
    actions = {report.name: report.action for report in plain.quality.tensors}
    assert actions["2.EXPERTS.FFN_DOWN"] == "rounded"
    assert actions["2.Q"] == kinds["2.Q"].action
    kl = [report.quality.evaluation for report in (calibrated, plain)]
    assert kl[0] is not None
    assert kl[1] is not None
    assert kl[0].kl_mean is not None
    assert kl[1].kl_mean is not None
    assert kl[0].kl_mean < 0.9 * kl[1].kl_mean


def test_the_report_counts_experts_that_few_tokens_met(
    tiny_moe_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.qsf"
    monkeypatch.setattr(compensation, "LEAST_TOKENS", 900)
    report = convert(
        tiny_moe_dir, path, quant_type="4bit", calibration=BUNDLED, calibration_tokens=N_TOKENS
    )
    n_fitted = int((report.quality.calibration or {})["tokens"])
    for layer in range(4):
        with Reader(path) as reader:
            shares = [unit.importance for unit in reader.experts_of(layer)]
        assert sum(shares) == pytest.approx(2, abs=1e-5)
        n_plain = sum(round(share * n_fitted) < 900 for share in shares)
        found = [t for t in report.quality.tensors if t.name == f"{layer}.EXPERTS.FFN_UP"]
        wanted = {0: "feedback", 8: "rounded"}.get(n_plain, f"feedback, {n_plain} of 8 rounded")
        assert found[0].action == wanted


def test_mixed_gives_experts_fewer_bits_than_what_all_tokens_read(
    tiny_moe_dir: Path, tmp_path: Path
) -> None:
    report = convert(tiny_moe_dir, tmp_path / "model.qsf", quant_type="mixed")
    types = {tensor.name: tensor.type for tensor in report.quality.tensors}
    assert types["1.Q"] == types["1.ATTN_OUT"] == "4bit"
    assert types["1.EXPERTS.FFN_GATE"] == types["1.EXPERTS.FFN_UP"] == "2bit"
    assert types["1.EXPERT_ROUTER"] == "f16"


def test_a_target_size_is_kept_and_used(tiny_moe_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.qsf"
    for n_bytes in (1_900_000, 2_600_000):
        convert(tiny_moe_dir, path, target_size=n_bytes / 2**20)
        assert 0.97 * n_bytes < path.stat().st_size <= n_bytes
        with Reader(path) as reader:
            for layer in range(4):
                dtypes = {tuple(t.dtype for t in e.tensors) for e in reader.experts_of(layer)}
                assert len(dtypes) == 1  # experts of a layer share their types
        path.unlink()


def test_the_size_of_a_mixture_is_known_to_the_byte(tiny_moe_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.qsf"
    convert(tiny_moe_dir, path, quant_type="3bit")
    with calibrated_models.planned(tiny_moe_dir, Dtype.Q3) as (source, _), Reader(path) as reader:
        policy = Policy(Dtype.Q3, Dtype.Q8)
        plan = make_plan(source.family, source.facts, source.checkpoint, policy)
        others = ("TEXT", "TOKN", "CHAT", "META")
        sizes = {tag: reader.sections[tag].n_bytes for tag in others}
        assert type_choice.file_bytes(plan, sizes) == path.stat().st_size


def test_a_tensor_of_all_experts_never_lies_in_memory(tmp_path: Path) -> None:
    n_experts, width, dim = 8, 1024, 2048  # gate and up: 67 MB as f16, 134 MB as f32
    layer = "model.layers.0."
    rng = np.random.default_rng(0)

    def some(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return np.resize((rng.standard_normal(65521) * 0.02).astype(np.float32), shape)

    tensors = {
        "model.embed_tokens.weight": some(256, dim),
        "model.norm.weight": some(dim),
        **{f"{layer}{n}.weight": some(dim) for n in _NORMS},
        **{f"{layer}self_attn.{n}_norm.weight": some(64) for n in "qk"},
        **{f"{layer}self_attn.{n}_proj.weight": some(128, dim) for n in "qkv"},
        f"{layer}self_attn.o_proj.weight": some(dim, 128),
        f"{layer}mlp.gate.weight": some(n_experts, dim),
        f"{layer}mlp.experts.gate_up_proj": some(n_experts, 2 * width, dim),
        f"{layer}mlp.experts.down_proj": some(n_experts, dim, width),
    }
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(tensors, "fp16"))
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": dim, "intermediate_size": width, "moe_intermediate_size": width,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64,
        "vocab_size": 256, "max_position_embeddings": 64, "tie_word_embeddings": True,
        "num_experts": n_experts, "num_experts_per_tok": 2, "norm_topk_prob": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    measured = subprocess.run(
        [sys.executable, "-c", _CONVERT, tmp_path], capture_output=True, text=True, check=True
    )
    assert int(measured.stdout) < 130 << 20  # 80 MB on two cores


_NORMS = ("input_layernorm", "post_attention_layernorm")
_CONVERT = """
import sys
from pathlib import Path
from qsf_converter import convert
folder = Path(sys.argv[1])
convert(folder, folder / "model.qsf", quant_type="2bit-sym")
status = open("/proc/self/status").read()
print(int(status.split("VmHWM:")[1].split()[0]) * 1024)
"""
