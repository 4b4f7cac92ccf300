# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are published quantised: the values of the packages that publish them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from make import hf_makers
from make.golden_families import cases, weights_of
from make.tiny_checkpoints import make_llama, safetensors_bytes
from oracle import reference
from qsf.errors import QsfConversionError
from qsf.file.reader import Reader
from qsf.report.record import read_meta
from qsf_converter import cli, convert
from qsf_converter.sources.checkpoint import Checkpoint, to_float32
from qsf_converter.sources.checkpoint_safetensors import SafetensorsCheckpoint
from qsf_converter.sources.quantised import METHODS, dequantised, method_of

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
    header, body = {}, b""
    for name, (dtype, shape, data) in stored.items():
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        body += data
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
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
    return to_float32(checkpoint.read_rows(name, start, stop))


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
    return (
        method,
        {W: of("F8_E4M3", codes), f"{W}_scale_inv": of("F32", scale)},
        e4m3(codes) * spread,
    )


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
    return (
        method,
        stored,
        (codes - zeros.T.repeat(32, 1).astype(np.float32)) * scale.T.repeat(32, 1),
    )


def awq_gemv() -> Made:  # zeros and scales are padded to whole words
    codes, zeros, scale = random(16, N, M), random(16, N, 8), scales(N, 8).astype(np.float16)
    stored = {"m.qweight": of("I32", words(codes, 4)), "m.qzeros": of("I32", words(zeros, 4)),
              "m.scales": of("F16", scale)}  # fmt: skip
    method = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}
    spread = [part[:, :3].repeat(32, 1).astype(np.float32) for part in (zeros, scale)]
    return method, stored, (codes - spread[0]) * spread[1]


def torchao_int4() -> Made:  # Int4Tensor: signed codes times a scale, plus a zero
    codes, scale, zero = random(16, N, M), scales(3, N), scales(3, N)
    stored = {
        "m._weight_qdata": of("I8", nibbles(codes).view(np.int8)),
        "m._weight_scale": of("F32", scale),
        "m._weight_zero_point": of("F32", zero),
    }
    signed = codes.astype(np.float32) - np.float32(16) * (codes > 7)
    return (
        {"quant_method": "torchao"},
        stored,
        (signed * scale.T.repeat(32, 1) + zero.T.repeat(32, 1)).astype(np.float32),
    )


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
                 torchao_int4, fused, cast)
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


def quantised_proj(name: str, shape: tuple[int, ...]) -> tuple[Stored, Any]:
    """int4 in groups of 24 of one matrix, as Kimi K2 Thinking's."""
    base = name.removesuffix(".weight")
    codes = RNG.integers(0, 16, shape).astype(np.uint8)
    scale = (scales(shape[0], shape[1] // 8) * 5).astype(np.float16)
    stored = {f"{base}.weight_packed": of("I32", words(codes, 4)),
              f"{base}.weight_scale": of("F16", scale),
              f"{base}.weight_shape": of("I32", np.array(shape, np.int32))}  # fmt: skip
    return stored, (codes.astype(np.float32) - 8) * scale.repeat(8, 1).astype(np.float32)


def test_a_mixture_converts_as_its_dequantised_checkpoint(tmp_path: Path) -> None:
    case = cases()["qwen3_moe"]
    plain = {name: weights_of(name, shape) for name, shape in case.shapes.items()}
    stored: Stored = {}
    n_quantised = 0
    for name, weight in plain.items():
        if name.endswith("_proj.weight") and weight.shape[1] % 8 == 0:
            own, plain[name] = quantised_proj(name, weight.shape)
            stored |= own
            n_quantised += 1
        else:
            stored[name] = of("F32", weight)
    assert n_quantised > 10
    for folder in ("q", "p"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(case.config))
    weights = {"num_bits": 4, "group_size": 8, "strategy": "group"}
    groups = {"group_0": {"weights": weights}}
    method = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}
    write_file(tmp_path / "q", stored, method)
    (tmp_path / "p" / "model.safetensors").write_bytes(safetensors_bytes(plain, "fp32"))
    options: dict[str, Any] = {"quant_type": "f32", "embed_type": "f32"}
    report = convert(tmp_path / "q", tmp_path / "q.qsf", **options)
    convert(tmp_path / "p", tmp_path / "p.qsf", **options)
    ours, theirs = (reference.load_qsf(tmp_path / f"{one}.qsf").weights for one in "qp")
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        np.testing.assert_array_equal(ours[name], weight, name)
    assert "its matrices are stored as INT4 (compressed-tensors)" in report.notes
    with Reader(tmp_path / "q.qsf") as reader:
        meta = read_meta(reader)
        assert meta is not None
        assert meta["source"]["stored"] == "INT4 (compressed-tensors)"


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
