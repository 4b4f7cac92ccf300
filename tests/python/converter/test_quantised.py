# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are published quantised: the values of the packages that publish them.

tests/golden/quantised.safetensors was made by transformers, compressed-tensors, AutoGPTQ 0.7,
AutoAWQ, bitsandbytes and torchao (make/golden_quantised.py, last in bd61be80). It has CASE/NAME
for each tensor of a checkpoint, CASE/=NAME for the values that the package computes, and in its
metadata CASE with the quantization_config.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from make import golden_families, hf_makers
from make.stored import Reader
from make.tiny_checkpoints import make_llama, raw_safetensors
from oracle import reference
from qsf.errors import QsfArgumentError, QsfConversionError
from qsf.file.layout import Dtype
from qsf_converter import cli, convert
from qsf_converter.sources.checkpoint import Checkpoint, to_float32
from qsf_converter.sources.checkpoint_safetensors import SafetensorsCheckpoint
from qsf_converter.sources.quantised import METHODS, dequantised, method_of
from qsf_converter.sources.source import open_source

GOLDEN = Path(__file__).parents[2] / "golden" / "quantised.safetensors"
W = "m.weight"
Stored = dict[str, tuple[str, tuple[int, ...], bytes]]  # type, shape, bytes


def read_file(path: Path) -> tuple[Stored, dict[str, str]]:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    more = header.pop("__metadata__", {})
    return {
        name: (e["dtype"], tuple(e["shape"]), data[slice(*(end + at for at in e["data_offsets"]))])
        for name, e in header.items()
    }, more


def write_file(folder: Path, stored: Stored, method: dict[str, Any] | None) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(raw_safetensors(stored))
    path = folder / "config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**config, "quantization_config": method}))


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Checkpoint]:
    config = json.loads((folder / "config.json").read_text())
    with SafetensorsCheckpoint(folder) as stored:
        yield dequantised(stored, method_of(config, folder))


def values(checkpoint: Checkpoint, name: str, start: int = 0, stop: int | None = None) -> Any:
    stop = checkpoint.tensors[name].n_rows if stop is None else stop
    rows = checkpoint.read_rows(name, start, stop)
    assert rows.flags.c_contiguous  # as rounding asks
    return to_float32(rows)


GOLDEN_TENSORS, GOLDEN_METHODS = read_file(GOLDEN)
CASES = sorted(GOLDEN_METHODS)


def case_of(name: str) -> tuple[dict[str, Any], Stored, tuple[str, tuple[int, ...], bytes]]:
    own = {
        k.removeprefix(f"{name}/"): v for k, v in GOLDEN_TENSORS.items() if k.startswith(f"{name}/")
    }
    return json.loads(GOLDEN_METHODS[name]), own, own.pop(f"={W}")


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_package_that_made_them(name: str, tmp_path: Path) -> None:
    method, stored, (dtype, shape, data) = case_of(name)
    write_file(tmp_path, stored, method)
    with opened(tmp_path) as checkpoint:
        assert list(checkpoint.tensors) == [W]
        assert checkpoint.tensors[W].shape == shape
        found = values(checkpoint, W)
        if dtype == "BF16":  # theirs are rounded
            raw = found.view(np.uint32)
            raw = (raw + 0x7FFF + (raw >> 16 & 1)) >> 16
            np.testing.assert_array_equal(raw, np.frombuffer(data, "<u2").reshape(shape))
        else:
            expected = np.frombuffer(data, {"F16": "<f2", "F32": "<f4"}[dtype]).reshape(shape)
            np.testing.assert_array_equal(found.astype(expected.dtype), expected)
        for start, stop in ((0, 1), (3, 20), (31, 32), (5, 5)):
            np.testing.assert_array_equal(values(checkpoint, W, start, stop), found[start:stop])


# ---- formats whose packages need a GPU: their arithmetic as it is documented ----
Made = tuple[dict[str, Any], Stored, Any]  # method, tensors, values
RNG = np.random.default_rng(7)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
N, M = 40, 96


def e4m3(byte: Any, bias: int = 7) -> Any:
    """The value of a byte that is not NaN, by the definition of the type."""
    byte = byte.astype(int)
    exponent, fraction = byte >> 3 & 15, (byte & 7) / 8
    value = np.where(
        exponent > 0, 2.0 ** (exponent - bias) * (1 + fraction), 2.0 ** (1 - bias) * fraction
    )
    return np.where(byte > 127, -value, value).astype(np.float32)


def of(dtype: str, data: Any) -> tuple[str, tuple[int, ...], bytes]:
    return dtype, data.shape, data.tobytes()


def words(codes: Any, bits: int) -> Any:
    """Pack along the last axis, the lowest bits first."""
    shifts = (np.arange(codes.shape[-1]) * bits % 32).astype(np.uint64)
    wide = (codes.astype(np.uint64) << shifts).reshape(*codes.shape[:-1], -1, 32 // bits)
    return wide.sum(-1).astype(np.uint32).view(np.int32)


def nibbles(codes: Any) -> Any:
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def random(high: int, *shape: int) -> Any:
    return RNG.integers(0, high, shape).astype(np.uint8)


def scales(*shape: int) -> Any:
    return (RNG.random(shape) * 0.01 + 0.002).astype(np.float32)


def fp8_ragged() -> Made:  # DeepSeek's kv_a_proj has 4.5 blocks of rows
    codes, scale = random(127, N, M), scales(3, 2)
    method = {"quant_method": "fp8", "weight_block_size": [16, 64]}
    spread = scale.repeat(16, 0)[:N].repeat(64, 1)[:, :M]
    stored = {W: of("F8_E4M3", codes), f"{W}_scale_inv": of("F32", scale)}
    return method, stored, e4m3(codes) * spread


def fp8_mistral() -> Made:  # static activations, one scale, no axes
    codes, scale = random(127, N, M), scales()
    stored = {W: of("F8_E4M3", codes), f"{W}_scale_inv": of("F32", np.asarray(scale)),
              "m.activation_scale": of("F32", np.asarray(scale))}  # fmt: skip
    method = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    return method, stored, e4m3(codes) * scale


def fp8_fnuz() -> Made:  # of AMD's: another bias
    codes, scale = random(127, N, M), scales(N)
    stored = {W: of("F8_E4M3FNUZ", codes), f"{W}_scale": of("F32", scale)}
    return {"quant_method": "fp8"}, stored, e4m3(codes, 8) * scale[:, None]


def fbgemm() -> Made:
    codes, scale = random(127, N, M), scales(N, 1)
    stored = {W: of("F8_E4M3", codes), f"{W}_scale": of("F32", scale),
              "m.input_scale_ub": of("F32", scales(1))}  # fmt: skip
    return {"quant_method": "fbgemm_fp8"}, stored, e4m3(codes) * scale


def mxfp8() -> Made:
    codes, scale = random(127, N, M), random(8, N, M // 32) + 118
    stored = {W: of("F8_E4M3", codes), f"{W}_scale": of("U8", scale.astype(np.uint8))}
    spread = (2.0 ** (scale.astype(int) - 127)).repeat(32, 1).astype(np.float32)
    return {"quant_method": "mxfp8"}, stored, e4m3(codes) * spread


def nvfp4(*, is_ct: bool) -> Made:
    codes, scale, total = random(16, N, M), random(120, N, M // 16), scales(1)
    of_blocks = e4m3(scale) / total if is_ct else e4m3(scale) * total
    method = "compressed-tensors" if is_ct else "modelopt"
    weight, last = (f"{W}_packed", f"{W}_global_scale") if is_ct else (W, f"{W}_scale_2")
    stored = {weight: of("U8", nibbles(codes)), f"{W}_scale": of("F8_E4M3", scale),
              last: of("F32", total), "m.input_scale": of("F32", total)}  # fmt: skip
    return {"quant_method": method}, stored, E2M1[codes] * of_blocks.repeat(16, 1)


def inkling() -> Made:
    codes, scale = random(16, 2, N, M), random(120, 2, N, M // 16)
    largest, below, weight = scales(2), scales(2), "m.w13_weight"
    of_experts = (largest / below)[:, None, None]
    stored = {weight: of("U8", nibbles(codes)), f"{weight}_scale": of("F8_E4M3", scale),
              f"{weight}_amax": of("F32", largest),
              f"{weight}_outer_scale_denominator": of("F32", below)}  # fmt: skip
    return {}, stored, E2M1[codes] * e4m3(scale).repeat(16, -1) * of_experts


def mxfp4() -> Made:
    codes, scale = random(16, N, M), (random(8, N, M // 32) + 118).astype(np.uint8)
    stored = {f"{W}_packed": of("U8", nibbles(codes)), f"{W}_scale": of("U8", scale)}
    spread = (2.0 ** (scale.astype(int) - 127)).repeat(32, 1).astype(np.float32)
    method = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    return method, stored, E2M1[codes] * spread


def kimi() -> Made:  # Kimi K2 Thinking's experts: int4 in groups of 32; here with g_idx too
    codes, scale, groups = random(16, N, M), scales(N, 3), RNG.permutation(M) // 32
    stored = {f"{W}_packed": of("I32", words(codes, 4)), f"{W}_scale": of("F32", scale),
              f"{W}_shape": of("I32", np.array([N, M], np.int32)),
              f"{W}_g_idx": of("I32", groups.astype(np.int32))}  # fmt: skip
    weights = {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group"}
    method = {"quant_method": "compressed-tensors", "format": "pack-quantized",
              "config_groups": {"group_0": {"weights": weights}}}  # fmt: skip
    return method, stored, (codes.astype(np.float32) - 8) * scale[:, groups]


def gptq_v2() -> Made:
    codes, zeros, scale = random(16, N, M), random(16, 3, N), scales(3, N).astype(np.float16)
    stored = {"m.qweight": of("I32", np.ascontiguousarray(words(codes, 4).T)),
              "m.qzeros": of("I32", words(zeros, 4)), "m.scales": of("F16", scale)}  # fmt: skip
    method = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}
    signed = codes - zeros.T.repeat(32, 1).astype(np.float32)
    return method, stored, signed * scale.T.repeat(32, 1)


def awq_gemv() -> Made:  # zeros and scales are padded to whole words
    codes, zeros, scale = random(16, N, M), random(16, N, 8), scales(N, 8).astype(np.float16)
    stored = {"m.qweight": of("I32", words(codes, 4)), "m.qzeros": of("I32", words(zeros, 4)),
              "m.scales": of("F16", scale)}  # fmt: skip
    method = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}
    spread = [part[:, :3].repeat(32, 1).astype(np.float32) for part in (zeros, scale)]
    return method, stored, (codes - spread[0]) * spread[1]


def torchao_int4() -> Made:  # Int4Tensor: signed codes times a scale, plus a zero
    codes, scale, zero = random(16, N, M), scales(3, N), scales(3, N)
    stored = {"m._weight_qdata": of("I8", nibbles(codes).view(np.int8)),
              "m._weight_scale": of("F32", scale),
              "m._weight_zero_point": of("F32", zero)}  # fmt: skip
    signed = codes.astype(np.float32) - np.float32(16) * (codes > 7)
    values = signed * scale.T.repeat(32, 1) + zero.T.repeat(32, 1)
    return {"quant_method": "torchao"}, stored, values.astype(np.float32)


def fused() -> Made:  # experts in one tensor, as Qwen 3 VL MoE's
    codes, scale = random(127, 3, N, M), scales(3, 3, 2)
    stored = {"m.gate_up_proj": of("F8_E4M3", codes), "m.gate_up_proj_scale_inv": of("F32", scale)}
    spread = scale.repeat(16, 1)[:, :N].repeat(64, 2)[:, :, :M]
    method = {"quant_method": "fp8", "weight_block_size": [16, 64]}
    return method, stored, e4m3(codes) * spread


def cast() -> Made:  # FP8 without a word and without scales
    codes = random(127, N, M)
    return {}, {W: of("F8_E4M3", codes)}, e4m3(codes)


FORMULAS: dict[str, Callable[[], Made]] = {
    made.__name__: made
    for made in (fp8_ragged, fp8_mistral, fp8_fnuz, fbgemm, mxfp8, mxfp4, kimi, gptq_v2, awq_gemv,
                 inkling, torchao_int4, fused, cast)
} | {"nvfp4": lambda: nvfp4(is_ct=True), "modelopt": lambda: nvfp4(is_ct=False)}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_values_are_those_of_the_documented_arithmetic(name: str, tmp_path: Path) -> None:
    method, stored, expected = FORMULAS[name]()
    write_file(tmp_path, stored, method or None)
    with opened(tmp_path) as checkpoint:
        (tensor,) = checkpoint.tensors.values()
        assert tensor.shape == expected.shape
        flat = expected.reshape(-1, M)
        np.testing.assert_array_equal(values(checkpoint, tensor.name), flat)
        for start, stop in ((0, 1), (7, 33), (39, len(flat)), (35, 37)):
            np.testing.assert_array_equal(
                values(checkpoint, tensor.name, start, stop), flat[start:stop]
            )


# ---- whole models ----
@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_groups_are_kept_as_blocks(bits: int, tmp_path: Path) -> None:
    sizes = {"dim": 64, "ffn_dim": 96, "n_heads": 4, "n_kv_heads": 2}
    folder = make_llama(tmp_path / "m", head_dim=16, **sizes)
    stored, _ = read_file(folder / "model.safetensors")
    expected = {}
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        shape = stored.pop(name)[1]
        codes = RNG.integers(0, 1 << bits, shape).astype(np.uint8)
        scale = scales(shape[1] // 32, shape[0]).astype(np.float16)
        zeros = np.full((shape[1] // 32, shape[0]), (1 << bits - 1) - 1)
        base = name.removesuffix(".weight")
        stored |= {f"{base}.qweight": of("I32", np.ascontiguousarray(words(codes, bits).T)),
                   f"{base}.qzeros": of("I32", words(zeros, bits)),
                   f"{base}.scales": of("F16", scale)}  # fmt: skip
        spread = scale.T.astype(np.float32).repeat(32, 1)
        expected[name] = (codes.astype(np.float32) - (1 << bits - 1)) * spread
    write_file(folder, stored, {"quant_method": "gptq", "bits": bits, "group_size": 32})
    report = convert(folder, tmp_path / "m.qsf", allow_no_tokenizer=True)
    kind = {4: "q4_0", 8: "q8_0"}[bits]
    assert f"kept as they are: {kind}" in report.notes
    assert f"its matrices are stored as INT{bits} (gptq)" in report.notes
    weights = reference.load_qsf(tmp_path / "m.qsf").weights
    np.testing.assert_array_equal(
        weights["layer.1.ffn_down"], expected["model.layers.1.mlp.down_proj.weight"]
    )


# ---- what is refused ----
@pytest.mark.parametrize("name", ["hqq", "aqlm", "exl2", None, 4])
def test_an_unknown_method_is_refused_by_name(name: Any, tmp_path: Path) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    method = {"quant_method": name, "bits": 4}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    with pytest.raises(QsfConversionError, match=rf"{name}.* is not supported; .*gptq, awq"):
        convert(folder, tmp_path / "m.qsf")


# They may be absent, or are not weights.
OPTIONAL = ("zero_point", "g_idx", "weight_format", "activation_scale", "input_scale", "_ub")


@pytest.mark.parametrize("name", [*CASES, *sorted(FORMULAS.keys() - {"cast"})])
def test_parts_that_are_missing_or_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    method, stored = case_of(name)[:2] if name in CASES else FORMULAS[name]()[:2]
    odd = np.zeros((5, 7), np.float32)
    for part in (part for part in stored if not part.endswith(OPTIONAL)):
        changes: list[Stored] = [{}, {part: ("BOOL", (1,), b"1")}]
        if "scale" in part or part.endswith((".absmax", ".SCB", ".qzeros", ".quant_map")):
            changes.append({part: of("F32", odd)})
        for change in changes:
            others = {key: value for key, value in stored.items() if key != part}
            write_file(tmp_path, {**others, **change}, method)
            with pytest.raises(QsfConversionError):
                read_whole(tmp_path)


def read_whole(folder: Path) -> None:
    with opened(folder) as checkpoint:
        names = checkpoint.tensors.keys() & {W, "m.gate_up_proj"}
        if not names:
            raise QsfConversionError("a family will ask for it")
        values(checkpoint, next(iter(names)))


def test_the_list_of_families_names_the_methods(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--families"]) == 0
    said = capsys.readouterr().out
    assert all(f"quantised by {name}: " in said for name in METHODS)


# ---- BitNet's packed checkpoints ----
Array = NDArray[np.float32]
Packed = dict[str, tuple[str, tuple[int, ...], bytes]]

GOLDEN_CASES = golden_families.cases()
MULTIPLIED = {"quant_method": "bitnet", "linear_class": "autobitlinear",
              "quantization_mode": "offline", "modules_to_not_convert": None}  # fmt: skip
DIVIDED = {"quant_method": "bitnet"}
NAMES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
"""Tensors of a layer -> their names in checkpoints."""


def pack_ternary(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
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


def packed_tensors(shapes: dict[str, tuple[int, ...]]) -> Packed:
    """The tensors as such checkpoints have them: bytes, bf16 scales, and f16 for the rest."""
    tensors: Packed = {}
    for name, shape in shapes.items():
        if is_packed(name, shape):
            scale = scale_of(name)
            packed = pack_ternary(ternary_of(name, shape))
            tensors[name] = ("U8", packed.shape, packed.tobytes())
            tensors[f"{name}_scale"] = ("BF16", (1,), hf_makers.bf16_bytes(scale))
        else:
            values = golden_families.weights_of(name, shape).astype("<f2")
            tensors[name] = ("F16", shape, values.tobytes())
    return tensors


def write_packed(
    folder: Path, how: dict[str, Any], case: str = "bitnet", changes: Packed | None = None
) -> Path:
    folder.mkdir(parents=True)
    config = {**GOLDEN_CASES[case].config, "quantization_config": how}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    tensors = {**packed_tensors(dict(GOLDEN_CASES[case].shapes)), **(changes or {})}
    (folder / "model.safetensors").write_bytes(raw_safetensors(tensors))
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
            codes = ternary_of(name, GOLDEN_CASES["bitnet"].shapes[name])
            scale = np.float32(np.float16(factor_of(name, how)))
            np.testing.assert_array_equal(weights[f"layer.{layer}.{ours}"], codes * scale)
    with Reader(out) as file:
        assert file.header.dtype == (Dtype.TERNARY_DENSE if quant_type else Dtype.TERNARY)


def test_scaled_weights_that_are_not_packed(tmp_path: Path) -> None:
    """Autobitlinear layers hold -1, 0 and 1 in a type of numbers, and the scale beside them."""
    floats: Packed = {}
    for name, shape in GOLDEN_CASES["bitnet"].shapes.items():
        if is_packed(name, shape):
            floats[name] = ("F16", shape, ternary_of(name, shape).astype("<f2").tobytes())
    packed = write_packed(tmp_path / "packed", MULTIPLIED)
    plain = write_packed(tmp_path / "plain", MULTIPLIED, changes=floats)
    with open_source(packed) as one, open_source(plain) as two:
        for name, tensor in one.checkpoint.tensors.items():
            assert two.checkpoint.tensors[name].shape == tensor.shape
            rows = [s.checkpoint.read_rows(name, 0, tensor.n_rows) for s in (one, two)]
            np.testing.assert_array_equal(rows[0], rows[1])
            for start, stop in ((3, 9), (15, 19), (5, 5)) if tensor.n_rows > 1 else ():
                part = one.checkpoint.read_rows(name, start, stop)
                np.testing.assert_array_equal(part, rows[0][start:stop])
        with pytest.raises(IndexError):
            one.checkpoint.read_rows("model.layers.1.mlp.up_proj.weight", 70, 81)


def test_the_example_of_transformers(tmp_path: Path) -> None:
    """The docstring of ``unpack_weights`` has these bytes and what they are."""
    packed = np.array([[0b10100001, 0b00011000], [0b10010000, 0b00001010]], np.uint8)
    values = [[0, -1], [-1, 1], [-1, 1], [-1, 1], [1, 0], [0, -1], [1, -1], [1, -1]]
    more: Packed = {
        "x.weight": ("U8", (2, 2), packed.tobytes()),
        "x.weight_scale": ("F32", (), np.float32(1).tobytes()),
    }
    with open_source(write_packed(tmp_path / "m", DIVIDED, changes=more)) as source:
        assert source.checkpoint.tensors["x.weight"].shape == (8, 2)
        np.testing.assert_array_equal(source.checkpoint.read_rows("x.weight", 0, 8), values)


_Q = "model.layers.0.self_attn.q_proj.weight"
DAMAGED: dict[str, tuple[Packed, str]] = {
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
    case = GOLDEN_CASES["bitnet"]
    config = {**case.config, "quantization_config": {**MULTIPLIED, "quantization_mode": "online"}}
    golden_families.write_checkpoint(tmp_path / "m", config, case.tensors())
    report = convert(tmp_path / "m", tmp_path / "m.qsf")
    assert any("--quant-type ternary --ternary-rule absmean" in text for text in report.warnings)
    with Reader(tmp_path / "m.qsf") as file:
        assert file.header.dtype == Dtype.Q4
