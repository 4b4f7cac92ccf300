"""A table of the types of GGUF files that QSF keeps: bytes and tok/s, beside llama.cpp's.

Usage: python bench/gguf_types.py MODEL.gguf FOLDER N_LAYERS. Makes a file of each type from the
first layers, with the quantiser of llama.cpp (pip install xllamacpp). Ends if one is not exact.
"""
# SPDX-License-Identifier: Apache-2.0

import ctypes
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any

import gguf
import numpy as np
import xllamacpp

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "python"))
from converter.test_gguf_kept import assert_kept

from make.gguf_files import close
from qsf import Model
from qsf_converter import convert
from qsf_converter.sources.checkpoint import KEPT

N_TOKENS, N_ROUNDS = 64, 3
PROMPT = "Once upon a time there was a small village near the sea, where"


def write(source: Path, out: Path, kind: Any, n_layers: int) -> None:
    """Write the model with matrices of one type; a head of its own is the embedding too."""
    quantise = ctypes.CDLL(xllamacpp.xllamacpp.__file__).ggml_quantize_chunk
    quantise.argtypes = [
        ctypes.c_int,
        *2 * [ctypes.c_void_p],
        *3 * [ctypes.c_int64],
        ctypes.c_void_p,
    ]
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, arch)
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            value = n_layers if key == f"{arch}.block_count" else field.contents()
            writer.add_key_value(key, value, field.types[0], field.types[-1])
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    tensors["token_embd.weight"] = tensors.pop("output.weight", tensors["token_embd.weight"])
    for name, tensor in tensors.items():
        if name.startswith("blk.") and int(name.split(".")[1]) >= n_layers:
            continue
        values = np.ascontiguousarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        if values.ndim == 1:
            writer.add_tensor(name, values)
            continue
        shape = gguf.quant_shape_to_byte_shape(values.shape, kind)
        blocks = np.zeros(shape, np.uint8)
        quantise(kind, values.ctypes.data, blocks.ctypes.data, 0, *values.shape, None)
        writer.add_tensor(name, blocks, raw_dtype=kind)
    close(writer)


def rate(path: Path) -> float:
    """Return the tokens a second, after the first, of QSF or llama.cpp with two threads."""
    if path.suffix == ".qsf":
        options: Any = {"ram_budget": "auto", "draft": "off", "threads": 2, "max_seq_len": 512}
        with Model(path, **options) as model:
            list(model.session.generate(PROMPT, max_tokens=N_TOKENS + 1, temperature=0))
            stats = model.session.stats
        assert stats is not None
        assert stats.generated_tokens > N_TOKENS
        return stats.step_rate
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.verbosity = str(path), 512, 1, 0
    params.cpuparams.n_threads = 2
    server = xllamacpp.Server(params)
    asked = {"prompt": PROMPT, "n_predict": N_TOKENS + 1, "temperature": 0, "ignore_eos": True}
    body = json.dumps(asked).encode()
    with urllib.request.urlopen(f"{server.listening_address}/completion", body) as answer:
        return N_TOKENS * 1000 / float(json.load(answer)["timings"]["predicted_ms"])


if len(sys.argv) == 2:
    print(rate(Path(sys.argv[1])), flush=True)
    os._exit(0)  # the server of xllamacpp may hang in its destructor
for kind in KEPT:
    path = Path(sys.argv[2], f"{kind}.gguf")
    out = path.with_suffix(".qsf")
    if not out.exists():
        write(Path(sys.argv[1]), path, gguf.GGMLQuantizationType[kind], int(sys.argv[3]))
        convert(path, out)
        assert assert_kept(path, out) == {kind.lower()}
    models = [sys.executable, __file__, str(out)], [sys.executable, __file__, str(path)]
    rates = [float(subprocess.check_output(m).split()[-1]) for m in N_ROUNDS * models]
    ours, theirs = median(rates[::2]), median(rates[1::2])
    share = 100 * out.stat().st_size / path.stat().st_size
    print(
        f"| {kind} | {share:.1f} % | {ours:.1f} | {theirs:.1f} | {ours / theirs:.2f} |",
        rates,
        flush=True,
    )
