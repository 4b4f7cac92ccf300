# SPDX-License-Identifier: Apache-2.0
"""Blocks that are kept: those of GGUF files and of MXFP4, the same f32 values bit by bit."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qsf
from make import calibrated_models, gguf_families, gguf_files, golden_families, tiny_checkpoints
from make.gguf_files import close
from make.golden_families import Case
from make.gpt_oss import E2M1, N_EXPERTS, Tensors, decoded, dequantised, packed, write
from make.stored import Reader
from oracle import reference
from oracle.kept_tiles import decode_tiles
from qsf.errors import QsfArgumentError, QsfConversionError
from qsf.file.kinds import ExpertScore, ExpertWeights
from qsf.file.layout import Activation, Dtype, Layout, TensorType, dtype_name, tensor_bytes
from qsf_converter import convert
from qsf_converter.calibrate.calibration import Calibration
from qsf_converter.request import Request
from qsf_converter.rounding.key_channels import with_equal_keys
from qsf_converter.rounding.pieces import RoundedUnit, rounded_units
from qsf_converter.rounding.plan import make_plan
from qsf_converter.rounding.tiles import dequantise_tiles, exact_shifts, gguf_tiles, mxfp4_tiles
from qsf_converter.sources.checkpoint import KEPT, MXFP4_BLOCK, to_float32
from qsf_converter.sources.source import open_source

ROWS_AT_ONCE = 4096
# Where the f16 of a block are: its scale, and its min.
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2),
          "Q5_K": (0, 2), "Q6_K": (208,)}  # fmt: skip
# Types of mixtures of llama.cpp, and scales with which their weights are below 0.2.
MIXED = {"IQ4_NL": 1e-3, "Q2_K": 3e-3, "Q3_K": 1e-3, "Q4_K": 1e-4, "Q5_K": 5e-5, "Q6_K": 3e-5,
         "IQ4_XS": 4e-5}  # fmt: skip
WRITABLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # to which the package gguf rounds


def random_rows(
    kind: str, n_rows: int, n_blocks: int, seed: int, scale: float | None = None
) -> np.ndarray:
    """Rows of blocks with any codes and any finite scales and mins, or near ``scale``."""
    rng = np.random.default_rng(seed)
    _, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (n_rows, n_blocks, n_bytes), np.uint8)
    for at in HALVES.get(kind, (0,)):
        values = (rng.standard_normal((n_rows, n_blocks)) * (scale or 1)).astype("<f2")
        if scale is None:
            values[rng.random(values.shape) < 0.1] = rng.choice([0.0, -0.0, 6e-8, 65504])
        blocks[..., at : at + 2] = values[..., None].view(np.uint8)
    return blocks.reshape(n_rows, -1)


@pytest.mark.parametrize("kind", KEPT)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 1 << 32))
def test_tiles_have_the_values_of_the_blocks(
    kind: str, n_rows: int, n_blocks: int, seed: int
) -> None:
    rows = random_rows(kind, n_rows, n_blocks, seed)
    tiles, _ = gguf_tiles(KEPT[kind], rows)
    want = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    assert len(tiles) == tensor_bytes(n_rows, want.shape[1], KEPT[kind], Layout.TILES)
    have = decode_tiles(KEPT[kind], tiles, *want.shape)
    np.testing.assert_array_equal(have.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("kind", KEPT)
@given(st.integers(0, 1 << 32))
def test_shifts_of_rows_are_exact(kind: str, seed: int) -> None:
    rows = random_rows(kind, 8, 2, seed)
    type_ = gguf.GGMLQuantizationType[kind]
    for shifts, sign in zip(exact_shifts(KEPT[kind], rows), (-1, 1), strict=True):
        exponents = tuple(int(sign * min(shift, 12)) for shift in shifts)
        tiles, _ = gguf_tiles(KEPT[kind], rows, exponents)
        want = np.ldexp(gguf.quants.dequantize(rows, type_), np.array(exponents)[:, None])
        have = decode_tiles(KEPT[kind], tiles, *want.shape)
        np.testing.assert_array_equal(have.view(np.uint32), want.view(np.uint32))


def assert_kept(source_path: Path, path: Path) -> set[str]:
    """Each matrix of the file has the f32 values that the package gguf reads in the source.

    Returns the types that the matrices have.
    """
    with open_source(source_path) as source, Reader(path) as reader:
        policy = Request(quant_type="keep").first_policy()
        plan = make_plan(source.family, source.facts, source.checkpoint, policy)
        plan = with_equal_keys(plan, source.checkpoint)  # exact powers of two in Q and K
        kept = [target for target in plan.targets if target.dtype in KEPT.values()]
        for target in kept:
            assert target.rule.target is not None
            unit = next(unit for unit in reader.units if unit.id == target.unit)
            tensor = reader.tensor(unit.idx, target.rule.target)
            assert tensor is not None
            assert tensor.dtype == target.dtype
            data = reader.read_tensor(tensor)
            for start in range(0, target.n_rows, ROWS_AT_ONCE):
                stop = min(start + ROWS_AT_ONCE, target.n_rows)
                rows = source.checkpoint.read_rows(target.source.name, start, stop)
                sizes = [
                    tensor_bytes(n, target.n_cols, tensor.dtype, Layout.TILES)
                    for n in (start, stop)
                    if n
                ]
                part = data[sizes[0] if start else 0 : sizes[-1]]
                have = decode_tiles(tensor.dtype, part, stop - start, target.n_cols)
                want = to_float32(rows)
                if target.exponents:
                    want = np.ldexp(want, np.asarray(target.exponents)[start:stop, None])
                np.testing.assert_array_equal(have.view(np.uint32), want.view(np.uint32))
        return {dtype_name(target.dtype) for target in kept}


@pytest.mark.parametrize("kind", WRITABLE)
def test_a_quantised_file_is_kept_by_default(tmp_path: Path, kind: str) -> None:
    folder = tiny_checkpoints.make_llama(tmp_path / "m", dim=96, head_dim=32, ffn_dim=160)
    path = gguf_files.write(folder, tmp_path / "m.gguf", kind=gguf.GGMLQuantizationType[kind])
    report = convert(path, tmp_path / "m.qsf")
    assert f"kept as they are: {kind.lower()}" in report.notes
    assert not any("rounded again" in line for line in report.warnings)
    assert assert_kept(path, tmp_path / "m.qsf") == {kind.lower()}


def test_mixtures_of_k_quants_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As llama-quantize makes Q2_K, Q3_K_M and IQ4_XS: the values of the file, and its logits."""
    folder = tiny_checkpoints.make_llama(tmp_path / "m", dim=256, head_dim=64, ffn_dim=512)
    kinds, dequantised_rows = cycle(MIXED), list[np.ndarray]()

    def blocks(values: np.ndarray, kind: Any) -> np.ndarray:
        n_cols, _ = gguf.GGML_QUANT_SIZES[kind]
        shape = len(values), values.shape[1] // n_cols
        rows = random_rows(kind.name, *shape, len(dequantised_rows), MIXED[kind.name])
        dequantised_rows.append(gguf.quants.dequantize(rows, kind))
        return rows

    monkeypatch.setattr(gguf_files, "quantised", blocks)
    path, plain = tmp_path / "m.gguf", tmp_path / "plain.gguf"
    gguf_files.write(folder, path, kind=lambda _: gguf.GGMLQuantizationType[next(kinds)])
    report = convert(path, tmp_path / "m.qsf")
    assert not any("rounded" in line for line in report.warnings)
    assert assert_kept(path, tmp_path / "m.qsf") == {kind.lower() for kind in MIXED}
    monkeypatch.setattr(gguf_files, "quantised", lambda *_: dequantised_rows.pop(0))
    gguf_files.write(folder, plain, kind=gguf.GGMLQuantizationType.F32)
    convert(plain, tmp_path / "plain.qsf", quant_type="f32", embed_type="f32")
    tokens = golden_families.tokens_of(50)
    exact: dict[str, Any] = {"exact": True, "kv_type": "f32", "ram_budget": None}
    with (
        qsf.Model(tmp_path / "m.qsf", **exact) as model,
        qsf.Model(tmp_path / "plain.qsf", **exact) as expected,
    ):
        want = expected.logits(tokens)
        assert np.abs(model.logits(tokens) - want).max() < 3e-5 * np.abs(want).max()


def test_blocks_are_kept_only_if_that_was_asked_for(tmp_path: Path) -> None:
    """Not by chance, where the type that matrices are rounded to is the source's."""
    folder = tiny_checkpoints.make_llama(tmp_path / "m", dim=96, head_dim=32, ffn_dim=160)
    path = gguf_files.write(folder, tmp_path / "m.gguf", kind=gguf.GGMLQuantizationType.Q5_0)
    report = convert(path, tmp_path / "m.qsf", quant_type="q5_0", embed_type="q5_0")
    assert not any("kept as they are" in note for note in report.notes)
    assert any("rounded again" in line for line in report.warnings)


def test_a_type_that_is_asked_for_rounds_again_and_says_so(tmp_path: Path) -> None:
    folder = tiny_checkpoints.make_llama(tmp_path / "m", dim=96, head_dim=32, ffn_dim=160)
    path = gguf_files.write(folder, tmp_path / "m.gguf", kind=gguf.GGMLQuantizationType.Q4_1)
    report = convert(path, tmp_path / "m.qsf", quant_type="4bit")
    assert any("--quant-type keep loses nothing" in line for line in report.warnings)
    report = convert(path, tmp_path / "k.qsf", quant_type="keep", embed_type="f16")
    with Reader(tmp_path / "k.qsf") as reader:
        assert {t.dtype for t in reader.unit(0).tensors} == {Dtype.F16}
        assert Dtype.Q4_1 in {t.dtype for t in reader.unit(1).tensors}


def test_there_must_be_something_to_keep(tmp_path: Path) -> None:
    folder = tiny_checkpoints.make_llama(tmp_path / "m")
    with pytest.raises(QsfArgumentError, match="keep is for GGUF files of Q4_0"):
        convert(folder, tmp_path / "m.qsf", quant_type="keep")
    with pytest.raises(QsfArgumentError, match="keep rounds nothing"):
        convert(folder, tmp_path / "m.qsf", quant_type="keep", calibration="bundled")


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoints.make_llama(tmp_path / "m", dim=96, head_dim=32, ffn_dim=160)
    path = gguf_files.write(folder, tmp_path / "m.gguf", kind=gguf.GGMLQuantizationType.Q8_0)
    with open_source(path) as source:
        located = source.checkpoint._located["model.embed_tokens.weight"]  # type: ignore[attr-defined]
        at = located.file_off + 2 * located.tensor.row_bytes
    data = bytearray(path.read_bytes())
    data[at : at + 2] = np.array([np.inf], "<f2").tobytes()
    path.write_bytes(data)
    with pytest.raises(
        QsfConversionError, match=r"embed_tokens\.weight: a scale of row 2 is infinite"
    ):
        convert(path, tmp_path / "m.qsf")


# ---- MXFP4: its table, gpt-oss from checkpoints and GGUF files, what is refused ----
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
    """Their weights, dequantised and in the engine, give the same logits."""
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
    f16: dict[str, Any] = {"quant_type": "f16", "embed_type": "f16", "force": True}
    convert(tmp_path / "m", a, **f16)
    convert(write(tmp_path / "p", *dequantised(config, tensors)), b, **f16)
    tokens = golden_families.tokens_of(67)
    expected = reference.forward(reference.load_qsf(b, 40), tokens).logits
    with qsf.Model(a, exact=True, kv_type="f32", max_seq_len=40, ram_budget=None) as model:
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


NAME = "model.layers.1.mlp.experts.down_proj"


def test_damage_is_named(gpt_oss: tuple[dict[str, Any], Tensors], tmp_path: Path) -> None:
    config, tensors = gpt_oss
    blocks, scales = tensors[f"{NAME}_blocks"], tensors[f"{NAME}_scales"]
    nan, huge, sixes = scales.copy(), scales.copy(), blocks.copy()
    nan[2, 3, 1], huge[2, 3, 1], sixes[2, 3, 1] = 255, 254, 0x74  # 2, 6
    narrow = blocks.reshape(*blocks.shape[:2], -1, 8)
    for of_codes, of_scales, problem in (
        (blocks, None, "_blocks has no scales"),
        (None, scales, "_scales: bytes without codes"),
        (narrow, scales, "no blocks of MXFP4, which are 16 bytes"),
        (blocks, scales[:, :-1], "no blocks of MXFP4, which are 16 bytes"),
        (blocks, nan, r"_blocks at \[2, 3, 32\]: the value is nan"),
        (sixes, huge, r"_blocks at \[2, 3, 32\]: the value is inf"),
        (
            np.concatenate([blocks] * 2), np.concatenate([scales] * 2),
            r"shape \[12, 96, 64\], config.json asks for \[6, 96, 64\]",
        ),
    ):  # fmt: skip
        damaged = {**tensors, f"{NAME}_blocks": of_codes, f"{NAME}_scales": of_scales}
        kept = {name: values for name, values in damaged.items() if values is not None}
        with pytest.raises(QsfConversionError, match=problem):
            convert(write(tmp_path / "m", config, kept), tmp_path / "m.qsf")


# A configuration that computes something else
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"swiglu_limit": 6.0}, "swiglu_limit = 6.0 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act is not supported; supported: silu"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok = 7, there are 6 experts"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ],
)
def test_configurations_that_are_refused(
    change: dict[str, Any], problem: str, gpt_oss: tuple[dict[str, Any], Tensors], tmp_path: Path
) -> None:
    config, tensors = gpt_oss
    with pytest.raises(QsfConversionError, match=problem):
        convert(write(tmp_path / "m", {**config, **change}, tensors), tmp_path / "m.qsf")
