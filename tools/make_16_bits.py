"""Makes a 16-bit GGUF file of a quantised one: a source that can be rounded to any type again.

No 16-bit checkpoint of a real model comes with a registry's package, but files in 4 to 8 bits do.
Their weights lie on the steps of their blocks, which another type could meet by chance; so uniform
noise of half a step to either side is added, as large as what rounding took away.

Usage: python tools/make_16_bits.py MODEL.gguf OUT.gguf
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import sys

import numpy as np
from gguf import GGUFReader, GGUFWriter, LlamaFileType, dequantize
from numpy.typing import NDArray

_PLAIN = ("F32", "F16", "BF16")
_STEP_ITEMS = 16  # a divisor of what has one step in every type


def with_noise(values: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.float32]:
    """Add noise of half a step: the least difference between two values of a group."""
    groups = values.reshape(-1, _STEP_ITEMS)
    gaps = np.diff(np.sort(groups, axis=1), axis=1)
    steps = np.where(gaps > 0, gaps, np.inf).min(axis=1, keepdims=True)
    steps[~np.isfinite(steps)] = 0
    noise = rng.uniform(-0.5, 0.5, groups.shape).astype(np.float32)
    return np.asarray((groups + noise * steps).reshape(values.shape), np.float32)


def main() -> None:
    """Write the file."""
    source, out = sys.argv[1:]
    reader, rng = GGUFReader(source), np.random.default_rng(0)
    writer = GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            value = LlamaFileType.MOSTLY_F16 if name == "general.file_type" else field.contents()
            writer.add_key_value(name, value, field.types[0], field.types[-1])
    for tensor in reader.tensors:
        values, kind = tensor.data, tensor.tensor_type
        if kind.name not in _PLAIN:
            values = with_noise(dequantize(values, kind), rng).astype(np.float16)
        writer.add_tensor(tensor.name, values, raw_dtype=kind if kind.name == "BF16" else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
