# SPDX-License-Identifier: Apache-2.0
"""MXFP4: its table, gpt-oss from checkpoints and GGUF files without loss, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import qsf
from make import calibrated_models, gguf_families, golden_families
from make.gguf_files import close
from make.golden_families import Case
from make.gpt_oss import E2M1, N_EXPERTS, Tensors, decoded, dequantised, packed, write
from oracle import reference
from oracle.kept_tiles import decode_tiles
from qsf.errors import QsfArgumentError, QsfConversionError
from qsf.file.kinds import ExpertScore, ExpertWeights
from qsf.file.layout import Activation, Dtype, TensorType
from qsf.file.reader import Reader
from qsf_converter import convert
from qsf_converter.calibrate.calibration import Calibration
from qsf_converter.rounding.pieces import RoundedUnit, rounded_units
from qsf_converter.rounding.tiles import dequantise_tiles, mxfp4_tiles
from qsf_converter.sources.checkpoint import MXFP4_BLOCK, to_float32


def write_gguf(path: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """As llama.cpp's converter: MXFP4 of its own order of codes, gate and up apart."""
    plain_config, plain = dequantised(config, tensors)
    case = Case("m", plain_config, {}, [], np.zeros(0, np.float32))
    writer = gguf_families.begin(case, path)
    for name, values in gguf_families.converted_tensors(case, plain):
        if "_exps.weight" in name:
            raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType.MXFP4)
            np.testing.assert_array_equal(
                gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.MXFP4), values
            )
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
        else:
            writer.add_tensor(name, values)
    close(writer)
    return path


@pytest.fixture(scope="module")
def gpt_oss() -> tuple[dict[str, Any], Tensors]:
    return packed()


def test_every_byte_and_scale_is_of_the_published_table() -> None:
    raw = np.zeros((255, 16), MXFP4_BLOCK)
    raw["scale"] = np.arange(255)[:, None]
    raw["codes"] = np.arange(256, dtype=np.uint8).reshape(16, 16)
    low, high = np.arange(256) & 15, np.arange(256) >> 4
    codes = np.stack((low, high), axis=-1).reshape(-1)
    with np.errstate(over="ignore"):  # from 2^128 on
        expected = (E2M1[codes] * 2.0 ** (np.arange(255) - 127)[:, None]).astype(np.float32)
    np.testing.assert_array_equal(to_float32(raw), expected)
    tiles = mxfp4_tiles(raw)
    np.testing.assert_array_equal(decode_tiles(Dtype.MXFP4, tiles, 255, 512), expected)
    np.testing.assert_array_equal(dequantise_tiles(Dtype.MXFP4, tiles, 255, 512), expected)


def test_a_tile_worked_out_by_hand() -> None:
    raw = np.zeros((2, 1), MXFP4_BLOCK)
    raw["scale"][:, 0] = 128, 126
    raw["codes"][0, 0, :2] = 0x21, 0xF7  # columns 0 .. 3: 0.5, 1, 6, -6, times 2
    raw["codes"][1, 0, 15] = 0x90  # column 31: -0.5, times 1/2
    tile = bytearray(544)
    tile[0], tile[1] = 128, 126
    tile[32:36] = bytes((1, 2, 7, 15))  # group 0, row 0; the high halves are columns 32 .. 63
    tile[32 + 7 * 64 + 4 + 3] = 9  # group 7, row 1
    assert mxfp4_tiles(raw) == bytes(tile)
    values = dequantise_tiles(Dtype.MXFP4, bytes(tile), 2, 32)
    assert values[0, :4].tolist() == [1, 2, 12, -12]
    assert values[1, 31] == -0.25
    assert np.count_nonzero(values) == 5


@pytest.mark.parametrize("shape", [(1, 1), (15, 2), (17, 3), (40, 5)])
def test_blocks_come_back_from_tiles(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(shape)
    raw = np.zeros(shape, MXFP4_BLOCK)
    raw["scale"] = rng.integers(0, 255, shape)
    raw["codes"] = rng.integers(0, 256, (*shape, 16))
    n_rows, n_cols = shape[0], 32 * shape[1]
    tiles = mxfp4_tiles(raw)
    np.testing.assert_array_equal(decode_tiles(Dtype.MXFP4, tiles, n_rows, n_cols), to_float32(raw))


def test_a_checkpoint_keeps_every_weight(
    gpt_oss: tuple[dict[str, Any], Tensors], tmp_path: Path
) -> None:
    config, tensors = gpt_oss
    path = tmp_path / "m.qsf"
    report = convert(write(tmp_path / "m", config, tensors), path)
    assert "kept as they are: mxfp4" in report.notes
    found = {t.name: t for t in report.quality.tensors}["1.EXPERTS.FFN_UP"]
    assert (found.type, found.action, found.max_error, found.cosine) == ("mxfp4", "exact", 0, 1)
    with Reader(path) as reader:
        kind = reader.layer_kinds[0]
        assert kind.activation == Activation.SILU_CLAMPED
        assert (kind.expert_score, kind.expert_weights) == (
            ExpertScore.LOGIT, ExpertWeights.SOFTMAX
        )  # fmt: skip
        assert [kind.window_tokens for kind in reader.layer_kinds] == [7, 0, 7, 0]
        assert {unit.dtype for unit in reader.experts} == {Dtype.MXFP4}
    model = reference.load_qsf(path)
    for layer in range(4):
        at = f"model.layers.{layer}.mlp.experts."
        both, down = (decoded(tensors, at + name) for name in ("gate_up_proj", "down_proj"))
        biases = tensors[f"{at}gate_up_proj_bias"]
        for expert in range(N_EXPERTS):
            own = f"layer.{layer}.expert.{expert}."
            for name, values in (
                ("ffn_gate", both[expert, 0::2]),
                ("ffn_up", both[expert, 1::2]),
                ("ffn_down", down[expert]),
                ("ffn_gate_bias", biases[expert, 0::2]),
                ("ffn_up_bias", biases[expert, 1::2]),
            ):
                np.testing.assert_array_equal(model.weights[own + name], values)


def test_a_gguf_file_gives_the_same_units(
    gpt_oss: tuple[dict[str, Any], Tensors], tmp_path: Path
) -> None:
    config, tensors = gpt_oss
    a, b = tmp_path / "a.qsf", tmp_path / "b.qsf"
    convert(write(tmp_path / "m", config, tensors), a, quant_type="8bit")
    report = convert(write_gguf(tmp_path / "m.gguf", config, tensors), b, quant_type="8bit")
    assert not [text for text in report.warnings if "rounded" in text or "not used" in text]
    ours, theirs = reference.load_qsf(a), reference.load_qsf(b)
    assert ours.weights.keys() == theirs.weights.keys()
    for name, values in ours.weights.items():
        np.testing.assert_array_equal(theirs.weights[name], values, name)
    with Reader(a) as one, Reader(b) as other:
        assert (one.header, one.layer_kinds) == (other.header, other.layer_kinds)
        assert one.rope_sets == other.rope_sets


def test_engine_reference_and_dequantised_weights_agree(
    gpt_oss: tuple[dict[str, Any], Tensors], tmp_path: Path
) -> None:
    config, tensors = gpt_oss
    native, plain = tmp_path / "native.qsf", tmp_path / "plain.qsf"
    f16: dict[str, Any] = {"quant_type": "f16", "embed_type": "f16"}
    convert(write(tmp_path / "m", config, tensors), native, **f16)
    convert(write(tmp_path / "p", *dequantised(config, tensors)), plain, **f16)
    tokens = golden_families.tokens_of(67)
    expected = reference.forward(reference.load_qsf(plain, 40), tokens).logits
    options: dict[str, Any] = {"kv_type": "f32", "max_seq_len": 40, "ram_budget": None}
    with qsf.Model(native, exact=True, **options) as model:
        assert np.abs(model.logits(tokens) - expected).max() < 3e-5 * np.abs(expected).max()


def test_fewer_bits_are_given_only_where_they_are_asked_for(
    gpt_oss: tuple[dict[str, Any], Tensors], tmp_path: Path
) -> None:
    folder = write(tmp_path / "m", *gpt_oss)
    for quant_type, expected in (("2bit", Dtype.Q2), ("8bit", Dtype.MXFP4), ("mixed", Dtype.MXFP4)):
        path = tmp_path / f"{quant_type}.qsf"
        convert(folder, path, quant_type=quant_type)
        with Reader(path) as reader:
            assert {unit.dtype for unit in reader.experts} == {expected}
            router = reader.tensor(1, TensorType.EXPERT_ROUTER)
            assert router is not None
            assert router.dtype == Dtype.F16


def test_calibration_keeps_the_experts(
    gpt_oss: tuple[dict[str, Any], Tensors], tmp_path: Path
) -> None:
    folder = write(tmp_path / "m", *gpt_oss)
    with calibrated_models.planned(folder, Dtype.Q4, Dtype.Q8) as (source, plan):
        tokens = np.random.default_rng(3).integers(0, 67, (4, 24))
        calibration = Calibration(plan, source.checkpoint, tokens[:3], tokens[3:])
        calibrated = [tiles_of(unit) for unit in calibration.units()]
        plain = [tiles_of(unit) for unit in rounded_units(plan.units, source.checkpoint, 1)]
    assert calibration.divergence is not None
    assert len(calibrated) == len(plain) == 2 + 4 * (1 + N_EXPERTS)
    for kept, unrounded in zip(calibrated, plain, strict=True):
        experts = {name: data for name, data in unrounded.items() if "EXPERTS" in name}
        assert kept.items() >= experts.items()


def tiles_of(unit: RoundedUnit) -> dict[str, bytes]:
    """The bytes of a unit's tensors by name."""
    return {t.target.name: b"".join(p.data for p in t.pieces) for t in unit.tensors}


def test_nothing_is_rounded_to_mxfp4(
    gpt_oss: tuple[dict[str, Any], Tensors], tmp_path: Path
) -> None:
    with pytest.raises(QsfArgumentError, match="mxfp4 is unknown"):
        convert(write(tmp_path / "m", *gpt_oss), tmp_path / "m.qsf", quant_type="mxfp4")


NAME = "model.layers.1.mlp.experts.down_proj"


def without_scales(tensors: Tensors) -> None:
    del tensors[f"{NAME}_scales"]


def without_codes(tensors: Tensors) -> None:
    del tensors[f"{NAME}_blocks"]


def of_other_blocks(tensors: Tensors) -> None:
    blocks = tensors[f"{NAME}_blocks"]
    tensors[f"{NAME}_blocks"] = blocks.reshape(*blocks.shape[:2], -1, 8)


def with_other_scales(tensors: Tensors) -> None:
    tensors[f"{NAME}_scales"] = tensors[f"{NAME}_scales"][:, :-1]


def with_a_scale_of_nan(tensors: Tensors) -> None:
    tensors[f"{NAME}_scales"][2, 3, 1] = 255


def with_a_scale_that_overflows(tensors: Tensors) -> None:
    tensors[f"{NAME}_scales"][2, 3, 1] = 254
    tensors[f"{NAME}_blocks"][2, 3, 1] = 0x74  # 2, 6


def with_more_experts(tensors: Tensors) -> None:
    for kind in ("blocks", "scales"):
        tensors[f"{NAME}_{kind}"] = np.concatenate([tensors[f"{NAME}_{kind}"]] * 2)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (without_scales, "_blocks has no scales"),
        (without_codes, "_scales: bytes without codes"),
        (of_other_blocks, "no blocks of MXFP4, which are 16 bytes"),
        (with_other_scales, "no blocks of MXFP4, which are 16 bytes"),
        (with_a_scale_of_nan, r"_blocks at \[2, 3, 32\]: the value is nan"),
        (with_a_scale_that_overflows, r"_blocks at \[2, 3, 32\]: the value is inf"),
        (with_more_experts, r"shape \[12, 96, 64\], config.json asks for \[6, 96, 64\]"),
    ],
)
def test_damage_is_named(
    damage: Any, problem: str, gpt_oss: tuple[dict[str, Any], Tensors], tmp_path: Path
) -> None:
    config, tensors = gpt_oss
    tensors = {name: values.copy() for name, values in tensors.items()}
    damage(tensors)
    with pytest.raises(QsfConversionError, match=problem):
        convert(write(tmp_path / "m", config, tensors), tmp_path / "m.qsf")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"swiglu_limit": 6.0}, "swiglu_limit = 6.0 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act is not supported; supported: silu"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok = 7, there are 6 experts"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ],
)
def test_configurations_that_compute_something_else_are_refused(
    change: dict[str, Any],
    problem: str,
    gpt_oss: tuple[dict[str, Any], Tensors],
    tmp_path: Path,
) -> None:
    config, tensors = gpt_oss
    with pytest.raises(QsfConversionError, match=problem):
        convert(write(tmp_path / "m", {**config, **change}, tensors), tmp_path / "m.qsf")
