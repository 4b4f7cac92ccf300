"""Checkpoints that are published quantised, as ``quantization_config`` of config.json says.

One module for each way to store; all of them give `Matrix`, and families see their values under
the names of unquantised matrices.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from qsf.errors import QsfConversionError, shown
from qsf_converter.sources.checkpoint import Checkpoint, DerivedCheckpoint, Matrix
from qsf_converter.sources.families.config import Config
from qsf_converter.sources.metadata import read_json_object
from qsf_converter.sources.quantised import packed, scaled
from qsf_converter.sources.quantised.matrix import FP8, OF_ACTIVATIONS, Stored

_Matrices = Callable[[Stored, Config], Iterator[Matrix]]

# quant_method -> what is read of it, for people, and its reader.
METHODS: Final[Mapping[str, tuple[str, _Matrices]]] = {
    "fp8": ("scales of blocks, rows or matrices, such as DeepSeek's", scaled.matrices),
    "fbgemm_fp8": ("FP8 with scales of rows", scaled.matrices),
    "mxfp8": ("FP8 in blocks of 32", scaled.matrices),
    "mxfp4": ("kept", scaled.mxfp4_matrices),
    "compressed-tensors": ("FP8, int8, packed int4 and int8, NVFP4, MXFP4", scaled.matrices),
    "modelopt": ("FP8, NVFP4", scaled.matrices),
    "gptq": ("2, 3, 4 and 8 bits, versions 1 and 2, desc_act", packed.gptq_matrices),
    "awq": ("4 bits, gemm and gemv", packed.awq_matrices),
    "bitsandbytes": ("NF4, FP4, nested too, int8", packed.bitsandbytes_matrices),
    "bitnet": ("ternary weights, kept", packed.bitnet_matrices),
    "torchao": ("int4, int8 and float8 in safetensors", scaled.torchao_matrices),
}
_KEYS: Final = ("quantization_config", "compression_config")
# Of older repositories.
_FILES: Final = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}


@dataclass(frozen=True, slots=True)
class Method:
    name: str
    own: Config

    @property
    def is_bitnet(self) -> bool:
        return self.name == "bitnet"

    @property
    def is_ternary(self) -> bool:
        """True if the layers' matrices are stored as ternary weights."""
        return self.is_bitnet and packed.is_ternary(self.own)


def method_of(config: Mapping[str, Any], folder: Path) -> Method | None:
    """Return the method that config.json states, or a file beside it; None: there is none.

    Raises QsfConversionError for one that is not read.
    """
    text = config.get("text_config")
    places = (config, text if isinstance(text, dict) else {})
    stated = next((place[key] for key in _KEYS for place in places if place.get(key)), None)
    for file, method in _FILES.items():
        if stated is None and (found := read_json_object(folder / file)) is not None:
            stated = {"quant_method": method, **found}
    if stated is None:
        return None
    if not isinstance(stated, dict):
        raise QsfConversionError(
            f"config.json: quantization_config = {shown(stated)} is not an object"
        )
    name = _name_of(stated)
    if name not in METHODS:
        raise QsfConversionError(
            f"config.json: quantization_config.quant_method = {shown(name)} is not supported; "
            f"supported: {', '.join(METHODS)}; convert the original, unquantised checkpoint"
        )
    return Method(name, Config(stated, where="quantization_config."))


def without_method(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if key not in _KEYS}
    if isinstance(kept.get("text_config"), dict):
        kept["text_config"] = without_method(kept["text_config"])
    return kept


def _name_of(stated: Mapping[str, Any]) -> Any:
    name = stated.get("quant_method")
    if name is None and (stated.get("load_in_4bit") or stated.get("load_in_8bit")):
        return "bitsandbytes"
    if name is None and stated.get("config_groups"):
        return "compressed-tensors"
    if name == "auto-round":  # in the form of another
        packing = str(stated.get("packing_format")).lower()
        return next((other for other in ("gptq", "awq") if packing.endswith(other)), name)
    return name


def storage_of(checkpoint: Checkpoint, method: Method | None) -> str | None:
    if method is not None and method.is_bitnet:
        return None
    types = {matrix.type for matrix in getattr(checkpoint, "matrices", {}).values()}
    where = "" if method is None else f" ({method.name})"
    return f"{', '.join(sorted(types))}{where}" if types else None


def dequantised(stored: Checkpoint, method: Method | None) -> Checkpoint:
    """Return the checkpoint with the values of its quantised matrices.

    Raises QsfConversionError for parts that are missing or do not fit.
    """
    if method is None:
        if not any(tensor.dtype in FP8 for tensor in stored.tensors.values()):
            return stored
        method = Method("fp8", Config({}))
    matrices = METHODS[method.name][1](Stored(stored), method.own)
    return DerivedCheckpoint(stored, matrices, OF_ACTIVATIONS.search)
