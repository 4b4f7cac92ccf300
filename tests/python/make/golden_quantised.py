# SPDX-License-Identifier: Apache-2.0
"""Write tests/golden/quantised.safetensors: quantised matrices, and their values.

The packages that publish each format make both: transformers (fp8), compressed-tensors, AutoGPTQ
0.7, AutoAWQ, bitsandbytes and torchao, on a CPU. The file has CASE/NAME for each tensor of a
checkpoint and CASE/=NAME for the values that the package computes; its metadata has CASE and the
quantization_config.

Usage, in an environment with these packages: python tests/python/make/golden_quantised.py
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import torch
from awq.modules.linear.gemm import WQLinear_GEMM
from awq.utils.packing_utils import dequantize_gemm
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

OUT = Path(__file__).resolve().parents[2] / "golden" / "quantised.safetensors"
N_ROWS, N_COLS = 32, 64
W = "m.weight"
Case = tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor]


def weights(n_rows: int = N_ROWS, n_cols: int = N_COLS) -> torch.Tensor:
    """Return random weights."""
    return torch.randn(n_rows, n_cols) * 0.05


def fp8(dtype: torch.dtype, rows: int, cols: int, scale_type: torch.dtype) -> Case:
    """FP8 with scales of blocks."""
    values = weights()
    blocks = values.reshape(N_ROWS // rows, rows, N_COLS // cols, cols)
    scale = (blocks.abs().amax((1, 3)) / torch.finfo(dtype).max).to(scale_type)
    codes = (blocks / scale.float()[:, None, :, None]).reshape(N_ROWS, N_COLS).to(dtype)
    found = Fp8Dequantize(None)._dequantize_one(codes, scale)
    config = {"quant_method": "fp8", "weight_block_size": [rows, cols]}
    return config, {W: codes, f"{W}_scale_inv": scale}, found


def packed(form: str, **args: Any) -> Case:
    """A format of compressed-tensors, as its compressor stores it."""
    own = QuantizationArgs(**args)
    values = weights()
    size = own.group_size or N_COLS
    parts = values.reshape(N_ROWS, -1, size)
    low, high = parts.amin(-1), parts.amax(-1)
    scale, zero = calculate_qparams(low, high, own)
    state = {"weight": values, "weight_scale": scale.bfloat16()}
    if not own.symmetric:
        state["weight_zero_point"] = zero
    scheme = QuantizationScheme(targets=["Linear"], weights=own, format=form)
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress({k: v.clone() for k, v in state.items()}, scheme)
    stored = {k: v for k, v in stored.items() if v is not None}
    back = compressor.decompress({k: v.clone() for k, v in stored.items()}, scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"weights": json.loads(own.model_dump_json())}},
    }
    return config, {f"m.{k}": v for k, v in stored.items()}, back


@functools.cache
def auto_gptq_linear() -> Any:
    """Return AutoGPTQ's layer; its package as a whole needs an older transformers."""
    found = importlib.util.find_spec("auto_gptq")
    assert found is not None
    for name in ("auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear"):
        module = types.ModuleType(name)
        tail = name.split(".")[1:]
        module.__path__ = [str(Path(*found.submodule_search_locations or [], *tail))]
        sys.modules[name] = module
    return importlib.import_module("auto_gptq.nn_modules.qlinear.qlinear_cuda").QuantLinear


def gptq(bits: int, *, sym: bool, shuffled: bool) -> Case:
    """AutoGPTQ: random codes and zeros."""
    group = 32
    layer = torch.nn.Linear(N_COLS, N_ROWS, bias=False)
    g_idx = (torch.randperm(N_COLS) if shuffled else torch.arange(N_COLS)) // group
    top = 2**bits - 1
    zeros = torch.full((N_ROWS, N_COLS // group), (top + 1) // 2)
    if not sym:
        zeros = torch.randint(1, top, zeros.shape)
    scales = torch.rand(zeros.shape).half() * 0.01 + 0.001
    codes = torch.randint(0, top + 1, (N_ROWS, N_COLS))
    layer.weight.data = ((codes - zeros[:, g_idx]) * scales.float()[:, g_idx]).float()
    stored = auto_gptq_linear()(bits, group, N_COLS, N_ROWS, bias=False)
    stored.pack(layer, scales.float(), zeros.float(), g_idx.int())
    found = torch.stack([stored(row[None].float())[0] for row in torch.eye(N_COLS)]).T
    names = ("qweight", "qzeros", "scales", "g_idx")
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": shuffled}
    return config, {f"m.{name}": getattr(stored, name) for name in names}, found.half()


def awq() -> Case:
    """AutoAWQ, version gemm."""
    group = 32
    layer = torch.nn.Linear(N_COLS, N_ROWS, bias=False)
    zeros = torch.randint(0, 16, (N_COLS // group, N_ROWS))
    scales = torch.rand(zeros.shape).half() * 0.01 + 0.001
    codes = torch.randint(0, 16, (N_ROWS, N_COLS))
    index = torch.arange(N_COLS) // group
    layer.weight.data = ((codes - zeros.T[:, index]) * scales.T.float()[:, index]).half()
    stored = WQLinear_GEMM.from_linear(layer, 4, group, scales=scales, zeros=zeros)
    found = dequantize_gemm(stored.qweight, stored.qzeros, stored.scales, 4, group).T
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    return config, {f"m.{n}": getattr(stored, n) for n in ("qweight", "qzeros", "scales")}, found


def four_bits(kind: str, *, nested: bool) -> Case:
    """NF4 or FP4."""
    values = weights(64, 260 if nested else 6).half()  # nested: more than 256 blocks
    codes, state = bnb.quantize_4bit(
        values, blocksize=64, quant_type=kind, compress_statistics=nested
    )
    stored = {f"{W}.{k}": v for k, v in state.as_dict(packed=True).items()}
    return (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {W: codes, **stored},
        (bnb.dequantize_4bit(codes, state)),
    )


def eight_bits() -> Case:
    """LLM.int8()."""
    codes, scales, _ = bnb.int8_vectorwise_quant(weights().half())
    stored = {W: codes, "m.SCB": scales, f"{W}_format": torch.tensor(0, dtype=torch.uint8)}
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return config, stored, bnb.int8_vectorwise_dequant(codes, scales)


def torchao(kind: str) -> Case:
    """A tensor of torchao as its safetensors form."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        quantize_,
    )

    layer = torch.nn.Sequential(torch.nn.Linear(N_COLS, N_ROWS, bias=False).bfloat16())
    config = {
        "int8": Int8WeightOnlyConfig(version=2),
        "float8": Float8WeightOnlyConfig(),
        "intx": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
    }[kind]
    quantize_(layer, config)
    stored, _ = flatten_tensor_state_dict({W: layer[0].weight.data})
    return {"quant_method": "torchao"}, stored, layer[0].weight.dequantize()


CASES: dict[str, Callable[[], Case]] = {
    "fp8-blocks": lambda: fp8(torch.float8_e4m3fn, 16, 32, torch.float32),
    "fp8-bf16": lambda: fp8(torch.float8_e4m3fn, 16, 32, torch.bfloat16),
    "fp8-e5m2": lambda: fp8(torch.float8_e5m2, 1, N_COLS, torch.float32),
    "fp8-tensor": lambda: fp8(torch.float8_e4m3fn, N_ROWS, N_COLS, torch.float32),
    "ct-float": lambda: packed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "ct-naive": lambda: packed("naive-quantized", num_bits=8, type="float", strategy="tensor"),
    "ct-int8": lambda: packed("int-quantized", num_bits=8, strategy="channel"),
    "ct-int8-zero": lambda: packed(
        "int-quantized", num_bits=8, strategy="channel", symmetric=False
    ),
    "ct-int4": lambda: packed("pack-quantized", num_bits=4, strategy="group", group_size=32),
    "ct-int4-channel": lambda: packed("pack-quantized", num_bits=4, strategy="channel"),
    "ct-int4-zero": lambda: packed(
        "pack-quantized", num_bits=4, strategy="group", group_size=16, symmetric=False
    ),
    "ct-int8-packed": lambda: packed("pack-quantized", num_bits=8, strategy="group", group_size=32),
    "gptq-2": lambda: gptq(2, sym=True, shuffled=False),
    "gptq-3-zero": lambda: gptq(3, sym=False, shuffled=False),
    "gptq-4": lambda: gptq(4, sym=True, shuffled=False),
    "gptq-4-zero-order": lambda: gptq(4, sym=False, shuffled=True),
    "gptq-8-order": lambda: gptq(8, sym=True, shuffled=True),
    "awq": awq,
    "nf4": lambda: four_bits("nf4", nested=False),
    "nf4-nested": lambda: four_bits("nf4", nested=True),
    "fp4": lambda: four_bits("fp4", nested=False),
    "bnb-int8": eight_bits,
    "torchao-int8": lambda: torchao("int8"),
    "torchao-float8": lambda: torchao("float8"),
    "torchao-intx": lambda: torchao("intx"),
}


def main() -> None:
    """Write the file."""
    tensors: dict[str, torch.Tensor] = {}
    configs: dict[str, str] = {}
    for seed, (name, make) in enumerate(CASES.items()):
        torch.manual_seed(seed)
        config, stored, values = make()
        configs[name] = json.dumps(config)
        tensors[f"{name}/={W}"] = values.contiguous()
        tensors |= {f"{name}/{part}": tensor.contiguous() for part, tensor in stored.items()}
    save_file(tensors, OUT, metadata=configs)
    print(OUT, OUT.stat().st_size)


if __name__ == "__main__":
    main()
