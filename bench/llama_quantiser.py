"""llama.cpp's part of baseline_quality.py: writes a GGUF, quantises it, computes its logits.

Runs in a Python of its own, with
    CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python llama-cpp-python gguf
(or by tools/build_baseline.sh), without QSF and without torch. Every
command prints one line of JSON at the end.

Usage: python bench/llama_quantiser.py version
       python bench/llama_quantiser.py gguf MODEL_DIR OUT.gguf
       python bench/llama_quantiser.py quantise IN.gguf OUT.gguf Q4_K_M [--imatrix SQUARES.npz]
       python bench/llama_quantiser.py logits FILE.gguf TOKENS.npy OUT.npy [--threads 2]
"""

# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import argparse
import ctypes
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# Names of llama.cpp for the matrices of a layer of LlamaForCausalLM.
MATRICES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OTHERS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}

# ---- GGUF ----


def read_safetensors(path: Path) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Yield the tensors of a file of F32, F16 or BF16 numbers, as f32."""
    data = np.memmap(path, np.uint8, "r")
    n_header = int(data[:8].view("<u8")[0])
    header = json.loads(data[8 : 8 + n_header].tobytes())
    header.pop("__metadata__", None)
    for name, facts in header.items():
        begin, end = (8 + n_header + offset for offset in facts["data_offsets"])
        raw = data[begin:end].tobytes()
        if facts["dtype"] == "BF16":  # the upper half of an f32
            values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            dtype = {"F16": "<f2", "F32": "<f4"}[facts["dtype"]]
            values = np.frombuffer(raw, dtype).astype(np.float32)
        yield name, values.reshape(facts["shape"])


def gguf_name(name: str) -> str:
    """Return what llama.cpp calls a tensor of LlamaForCausalLM."""
    if name in OTHERS:
        return OTHERS[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{MATRICES[rest.removesuffix('.weight')]}.weight"


def interleave(rows: npt.NDArray[np.float32], n_heads: int) -> npt.NDArray[np.float32]:
    """Order the rows of Q or K [n_heads * head_dim, dim] as llama.cpp turns them.

    HuggingFace's RoPE turns rows i and i + head_dim / 2 of a head together, llama.cpp's for this
    architecture rows 2 i and 2 i + 1.
    """
    n_rows, n_cols = rows.shape
    halves = rows.reshape(n_heads, 2, n_rows // n_heads // 2, n_cols)
    return np.asarray(halves.swapaxes(1, 2).reshape(n_rows, n_cols))


def write_gguf(model_dir: Path, out: Path) -> dict[str, Any]:
    """Write all weights as F32, so that nothing is rounded before the quantiser sees it."""
    import gguf

    config = json.loads((model_dir / "config.json").read_text("utf-8"))
    if config["model_type"] != "llama" or config.get("rope_scaling"):
        raise SystemExit(f"{model_dir}: only LLaMA models without RoPE scaling are written as GGUF")
    n_heads = config["num_attention_heads"]
    n_kv_heads = config.get("num_key_value_heads", n_heads)
    head_dim = config.get("head_dim") or config["hidden_size"] // n_heads
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_file_type(0)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(n_heads)
    writer.add_head_count_kv(n_kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")  # it is given token ids
    for path in sorted(model_dir.glob("*.safetensors")):
        for name, values in read_safetensors(path):
            if name.endswith("q_proj.weight"):
                values = interleave(values, n_heads)
            elif name.endswith("k_proj.weight"):
                values = interleave(values, n_kv_heads)
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {}


def tensor_facts(path: Path) -> dict[str, Any]:
    """Return weights and bytes of all tensors, and how many weights each type has."""
    import gguf

    tensors = gguf.GGUFReader(path).tensors
    types: Counter[str] = Counter()
    for tensor in tensors:
        types[tensor.tensor_type.name] += int(tensor.n_elements)
    n_bytes = sum(int(tensor.n_bytes) for tensor in tensors)
    return {"n_weights": sum(types.values()), "tensor_bytes": n_bytes, "types": dict(types)}


# ---- llama.cpp ----


def version() -> dict[str, Any]:
    """Return what will quantise and run; an ImportError says what is missing."""
    import gguf
    import llama_cpp

    return {"engine": f"llama-cpp-python {llama_cpp.__version__}", "writer": gguf.__name__}


def quiet_api() -> tuple[Any, list[str]]:
    """Return the library, and the list that its messages are put on."""
    import llama_cpp as api

    lines: list[str] = []

    @api.llama_log_callback  # type: ignore[untyped-decorator]
    def keep(_level: int, text: bytes, _user: object) -> None:
        lines.append(text.decode("utf-8", "replace"))

    api.llama_log_set(keep, None)
    api.keep_log = keep  # as long as the library
    api.llama_backend_init()
    return api, lines


def quantise(source: Path, out: Path, mixture: str, squares: Path | None) -> dict[str, Any]:
    """Let llama.cpp quantise a GGUF of F32; ``squares``: mean squares of inputs by matrix."""
    api, lines = quiet_api()
    params = api.llama_model_quantize_default_params()
    params.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{mixture}")
    kept = []
    if squares is not None:
        entries: list[tuple[bytes | None, Any, int]] = []
        for name, values in np.load(squares).items():
            kept.append(np.ascontiguousarray(values, np.float32))
            pointer = kept[-1].ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            entries.append((name.encode(), pointer, len(values)))
        entries.append((None, None, 0))
        array = (api.llama_model_imatrix_data * len(entries))(*entries)
        params.imatrix = ctypes.cast(array, ctypes.POINTER(api.llama_model_imatrix_data))
    code = api.llama_model_quantize(str(source).encode(), str(out).encode(), params)
    if code:
        raise SystemExit(f"{mixture}: llama.cpp did not quantise ({code})\n" + "".join(lines))
    return {"log": "".join(lines)}


def write_logits(path: Path, tokens_path: Path, out: Path, n_threads: int) -> dict[str, Any]:
    """Write the logits after each token but a window's last: [n_windows * (n - 1), n_vocab].

    The tokens are [n_windows, n]. The KV cache is f16, a window is one batch, and flash
    attention is off: it would round the values of V once more.
    """
    api, lines = quiet_api()
    tokens = np.load(tokens_path)
    n_windows, n_tokens = tokens.shape
    model_params = api.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model = api.llama_model_load_from_file(str(path).encode(), model_params)
    params = api.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = n_tokens
    params.n_threads = params.n_threads_batch = n_threads
    params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = api.llama_init_from_model(model, params) if model else None
    if not context:
        raise SystemExit("".join(lines))
    n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    memory = api.llama_get_memory(context)
    shape = (n_windows, n_tokens - 1, n_vocab)
    found = np.lib.format.open_memmap(out, "w+", np.float32, shape)
    batch = api.llama_batch_init(n_tokens, 0, 1)
    batch.n_tokens = n_tokens
    for i, window in enumerate(tokens):
        for at, token in enumerate(window):
            batch.token[at], batch.pos[at] = int(token), at
            batch.n_seq_id[at], batch.seq_id[at][0], batch.logits[at] = 1, 0, True
        api.llama_memory_clear(memory, True)
        if api.llama_decode(context, batch):
            raise SystemExit(f"{path}: llama_decode failed in window {i}\n" + "".join(lines))
        logits = np.ctypeslib.as_array(api.llama_get_logits(context), (n_tokens, n_vocab))
        found[i] = logits[:-1]
    found.flush()
    return {"engine": f"llama-cpp-python {api.__version__}"} | tensor_facts(path)


def main() -> None:
    """Do what the command line says and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, words in (
        ("version", ()),
        ("gguf", ("source", "out")),
        ("quantise", ("source", "out", "mixture")),
        ("logits", ("source", "tokens", "out")),
    ):
        command = commands.add_parser(name)
        for word in words:
            command.add_argument(word, type=str if word == "mixture" else Path)
        if name == "quantise":
            command.add_argument("--imatrix", type=Path)
        if name == "logits":
            command.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.command == "version":
        facts = version()
    elif args.command == "gguf":
        facts = write_gguf(args.source, args.out)
    elif args.command == "quantise":
        facts = quantise(args.source, args.out, args.mixture, args.imatrix)
    else:
        facts = write_logits(args.source, args.tokens, args.out, args.threads)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
