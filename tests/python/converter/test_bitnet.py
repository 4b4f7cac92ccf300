# SPDX-License-Identifier: Apache-2.0
"""BitNet's packed checkpoints: ternary weights come out of a file as they went into it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from make import golden_families, hf_makers, torch_files
from make.stored import Reader
from oracle import reference
from qsf.errors import QsfArgumentError, QsfConversionError
from qsf.file.layout import Dtype
from qsf_converter import convert
from qsf_converter.sources.source import open_source

Array = NDArray[np.float32]
Stored = dict[str, tuple[str, tuple[int, ...], bytes]]

CASES = golden_families.cases()
MULTIPLIED = {"quant_method": "bitnet", "linear_class": "autobitlinear",
              "quantization_mode": "offline", "modules_to_not_convert": None}  # fmt: skip
DIVIDED = {"quant_method": "bitnet"}
NAMES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
"""Tensors of a layer -> their names in checkpoints."""


def pack(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    """-1, 0 and 1 of [rows, cols] as bytes [rows / 4, cols]."""
    quarters = (codes + 1).astype(np.uint8).reshape(4, -1, codes.shape[1])
    return np.asarray(sum(quarters[i] << (2 * i) for i in range(4)), np.uint8)


def is_packed(name: str, shape: tuple[int, ...]) -> bool:
    return "layers." in name and len(shape) == 2


def ternary_of(name: str, shape: tuple[int, ...]) -> NDArray[np.int8]:
    """Random values; the share of zeros, and of nothing but zeros, differs between matrices."""
    rng = np.random.default_rng(len(name) * 1000 + shape[0])
    codes = rng.integers(-1, 2, shape).astype(np.int8)
    codes[rng.random(shape) < (0.98 if "v_proj" in name else 0.2)] = 0
    return codes


def scale_of(name: str) -> Array:
    """A scale that bf16 holds."""
    bits = np.float32(0.03 + 0.001 * len(name)).view(np.uint32) & np.uint32(0xFFFF0000)
    return np.array([bits], np.uint32).view(np.float32)


def packed_tensors(shapes: dict[str, tuple[int, ...]]) -> Stored:
    """The tensors as such checkpoints have them: bytes, bf16 scales, and f16 for the rest."""
    tensors: Stored = {}
    for name, shape in shapes.items():
        if is_packed(name, shape):
            scale = scale_of(name)
            packed = pack(ternary_of(name, shape))
            tensors[name] = ("U8", packed.shape, packed.tobytes())
            tensors[f"{name}_scale"] = ("BF16", (1,), hf_makers.bf16_bytes(scale))
        else:
            values = golden_families.weights_of(name, shape).astype("<f2")
            tensors[name] = ("F16", shape, values.tobytes())
    return tensors


def write_packed(
    folder: Path, how: dict[str, Any], case: str = "bitnet", changes: Stored | None = None
) -> Path:
    folder.mkdir(parents=True)
    config = {**CASES[case].config, "quantization_config": how}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    tensors = {**packed_tensors(dict(CASES[case].shapes)), **(changes or {})}
    hf_makers.write_raw_safetensors(folder / "model.safetensors", tensors)
    return folder


def write_unpacked(folder: Path, how: dict[str, Any], case: str) -> Path:
    """The same weights in f32, without a word of BitNet."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CASES[case].config), "utf-8")
    tensors: Stored = {}
    for name, stored in packed_tensors(dict(CASES[case].shapes)).items():
        if stored[0] == "U8":
            shape = CASES[case].shapes[name]
            scale = factor_of(name, how)
            values = ternary_of(name, shape).astype("<f4") * scale
            tensors[name] = ("F32", shape, values.astype("<f4").tobytes())
        elif not name.endswith("_scale"):
            tensors[name] = stored
    hf_makers.write_raw_safetensors(folder / "model.safetensors", tensors)
    return folder


def factor_of(name: str, how: dict[str, Any]) -> np.float32:
    scale = float(scale_of(name)[0])
    factor: np.float32 = np.float32(1 / scale if how is DIVIDED else scale)
    return factor


@pytest.mark.parametrize("quant_type", [None, "ternary-dense"])
@pytest.mark.parametrize("how", [MULTIPLIED, DIVIDED], ids=["multiplied", "divided"])
def test_every_weight_is_kept(how: dict[str, Any], quant_type: str | None, tmp_path: Path) -> None:
    out = tmp_path / "m.qsf"
    report = convert(write_packed(tmp_path / "m", how), out, quant_type=quant_type)
    said = [text for text in report.warnings if "weights are ternary" in text]
    assert len(said) == (quant_type is None)
    assert not [text for text in report.warnings if "not used" in text]
    weights = reference.load_qsf(out, 8).weights
    for layer in range(2):
        for ours, theirs in NAMES.items():
            name = f"model.layers.{layer}.{theirs}.weight"
            codes = ternary_of(name, CASES["bitnet"].shapes[name])
            scale = np.float32(np.float16(factor_of(name, how)))
            np.testing.assert_array_equal(weights[f"layer.{layer}.{ours}"], codes * scale)
    with Reader(out) as file:
        assert file.header.dtype == (Dtype.TERNARY_DENSE if quant_type else Dtype.TERNARY)


@pytest.mark.parametrize("quant_type", ["8bit", "f16", "4bit", "ternary"])
@pytest.mark.parametrize("case", ["bitnet", "phi3", "llama-linear"])
def test_the_file_is_that_of_the_unpacked_weights(
    case: str, quant_type: str, tmp_path: Path
) -> None:
    sources = {
        "packed": write_packed(tmp_path / "packed", MULTIPLIED, case),
        "plain": write_unpacked(tmp_path / "plain", MULTIPLIED, case),
    }
    for name, source in sources.items():
        report = convert(source, tmp_path / f"{name}.qsf", quant_type=quant_type)
        assert not [text for text in report.warnings if "ternary" in text]
    with Reader(tmp_path / "packed.qsf") as found, Reader(tmp_path / "plain.qsf") as expected:
        assert found.header == expected.header
        for i in range(len(expected.units)):
            assert found.read_unit(i) == expected.read_unit(i), i


def test_torch_saved_the_same(tmp_path: Path) -> None:
    folder = write_packed(tmp_path / "m", DIVIDED)
    convert(folder, tmp_path / "one.qsf")
    tensors: dict[str, Any] = {}
    for name, (dtype, shape, data) in packed_tensors(dict(CASES["bitnet"].shapes)).items():
        if dtype == "BF16":
            tensors[name] = torch_files.bf16(scale_of(name.removesuffix("_scale")))
        else:
            kind = np.uint8 if dtype == "U8" else np.float16
            tensors[name] = np.frombuffer(data, kind).reshape(shape)
    torch_files.save(folder / "pytorch_model.bin", tensors)
    (folder / "model.safetensors").unlink()
    convert(folder, tmp_path / "two.qsf")
    assert (tmp_path / "one.qsf").read_bytes() == (tmp_path / "two.qsf").read_bytes()


def test_scaled_weights_that_are_not_packed(tmp_path: Path) -> None:
    """Autobitlinear layers hold -1, 0 and 1 in a type of numbers, and the scale beside them."""
    floats: Stored = {}
    for name, shape in CASES["bitnet"].shapes.items():
        if is_packed(name, shape):
            floats[name] = ("F16", shape, ternary_of(name, shape).astype("<f2").tobytes())
    packed = write_packed(tmp_path / "packed", MULTIPLIED)
    plain = write_packed(tmp_path / "plain", MULTIPLIED, changes=floats)
    with open_source(packed) as one, open_source(plain) as two:
        for name, tensor in one.checkpoint.tensors.items():
            assert two.checkpoint.tensors[name].shape == tensor.shape
            rows = [s.checkpoint.read_rows(name, 0, tensor.n_rows) for s in (one, two)]
            np.testing.assert_array_equal(rows[0], rows[1])


def test_any_range_of_rows(tmp_path: Path) -> None:
    folder = write_packed(tmp_path / "m", MULTIPLIED)
    name = "model.layers.1.mlp.up_proj.weight"
    shape = CASES["bitnet"].shapes[name]
    whole = ternary_of(name, shape) * factor_of(name, MULTIPLIED)
    with open_source(folder) as source:
        for start, stop in ((0, 80), (3, 9), (19, 21), (20, 40), (15, 79), (79, 80), (5, 5)):
            rows = source.checkpoint.read_rows(name, start, stop)
            np.testing.assert_array_equal(rows, whole[start:stop])
        for start, stop in ((-1, 2), (70, 81), (9, 8)):
            with pytest.raises(IndexError):
                source.checkpoint.read_rows(name, start, stop)


def test_the_example_of_transformers(tmp_path: Path) -> None:
    """The docstring of ``unpack_weights`` has these bytes and what they are."""
    packed = np.array([[0b10100001, 0b00011000], [0b10010000, 0b00001010]], np.uint8)
    values = [[0, -1], [-1, 1], [-1, 1], [-1, 1], [1, 0], [0, -1], [1, -1], [1, -1]]
    more: Stored = {
        "x.weight": ("U8", (2, 2), packed.tobytes()),
        "x.weight_scale": ("F32", (), np.float32(1).tobytes()),
    }
    with open_source(write_packed(tmp_path / "m", DIVIDED, changes=more)) as source:
        assert source.checkpoint.tensors["x.weight"].shape == (8, 2)
        np.testing.assert_array_equal(source.checkpoint.read_rows("x.weight", 0, 8), values)


_Q = "model.layers.0.self_attn.q_proj.weight"
DAMAGED: dict[str, tuple[Stored, str]] = {
    "a code that is none": (
        {_Q: ("U8", (18, 72), bytes(18 * 72 - 1) + b"\xc0")},
        "q_proj.weight: 3 is not the code",
    ),
    "another shape": (
        {_Q: ("U8", (72, 72), bytes(72 * 72))},
        r"has shape \[288, 72\], config.json asks for \[72, 72\]",
    ),
    "no scale": ({"model.x.weight": ("U8", (1, 4), bytes(4))}, "bytes of shape .* weight_scale"),
    "a packed vector": (
        {"x.weight": ("U8", (4,), bytes(4)), "x.weight_scale": ("F16", (1,), b"\x00\x3c")},
        r"bytes of shape \[4\]",
    ),
    "two scales": ({f"{_Q}_scale": ("F16", (2,), bytes(4))}, "which is not one scale"),
    "a scale in bytes": ({f"{_Q}_scale": ("U8", (1,), b"\x01")}, "which is not one scale"),
    "a scale of nought": ({f"{_Q}_scale": ("F16", (1,), bytes(2))}, "= 0 is not a positive"),
    "a scale that is none": (
        {f"{_Q}_scale": ("F16", (1,), b"\x00\x7e")},
        "= nan is not a positive number",
    ),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_tensors_are_refused(what: str, tmp_path: Path) -> None:
    changes, message = DAMAGED[what]
    folder = write_packed(tmp_path / "m", MULTIPLIED, changes=changes)
    with pytest.raises(QsfConversionError, match=message):
        convert(folder, tmp_path / "m.qsf")
    assert not (tmp_path / "m.qsf").exists()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({**DIVIDED, "use_rms_norm": True}, "quantization_config.use_rms_norm = True is not"),
        ({**DIVIDED, "linear_class": ["x"]}, r"quantization_config.linear_class = \['x'\] is not"),
        ({**DIVIDED, "quantization_mode": 1}, "quantization_config.quantization_mode = 1 is not"),
        ({"quant_method": "hqq"}, "convert the original, unquantised checkpoint"),
    ],
)
def test_other_ways_to_compute_are_refused(
    how: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(QsfConversionError, match=message):
        convert(write_packed(tmp_path / "m", how), tmp_path / "m.qsf")


def test_what_would_change_the_weights_is_refused(tmp_path: Path) -> None:
    folder, out = write_packed(tmp_path / "m", MULTIPLIED), tmp_path / "m.qsf"
    with pytest.raises(QsfArgumentError, match="absmean would change their scales"):
        convert(folder, out, quant_type="ternary", ternary_rule="absmean")
    for quant_type in (None, "ternary-dense"):
        with pytest.raises(QsfArgumentError, match="leaves nothing to calibrate"):
            convert(folder, out, quant_type=quant_type, calibration="bundled")


def test_master_weights_come_with_a_word_on_their_rounding(tmp_path: Path) -> None:
    case = CASES["bitnet"]
    config = {**case.config, "quantization_config": {**MULTIPLIED, "quantization_mode": "online"}}
    golden_families.write_checkpoint(tmp_path / "m", config, case.tensors())
    report = convert(tmp_path / "m", tmp_path / "m.qsf")
    assert any("--quant-type ternary --ternary-rule absmean" in text for text in report.warnings)
    with Reader(tmp_path / "m.qsf") as file:
        assert file.header.dtype == Dtype.Q4
