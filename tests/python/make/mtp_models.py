# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with an MTP head, and what it guesses by numpy; drafters of other kinds."""

from __future__ import annotations

import contextlib
import json
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from make import gguf_families, gguf_files, golden_families
from make.golden_families import Case, cases, weights_of, write_checkpoint
from qsf.errors import QsfMemoryError
from qsf.file.layout import FINAL_UNIT, Dtype, TensorType, layer_unit
from qsf.native import binding
from qsf_converter import convert
from qsf_converter.original.layers import Original
from qsf_converter.rounding.plan import Policy, make_plan
from qsf_converter.sources.source import open_source

Array = NDArray[np.float32]
T = TensorType
_QWEN = {
    "eh_proj": "mtp.fc",
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "shared_head.norm": "mtp.norm",
}
FAMILIES = ("qwen3_5", "qwen3_5-nested", "qwen3_5_moe", "qwen3_next", "deepseek_v3", "glm4_moe",
            "glm4_moe_lite")  # fmt: skip


def deep(case: Case, n_layers: int) -> Case:
    """Repeat the layers, so that a pass costs many times as much as a guess."""
    n_before = n_layers_of(case)
    text = case.config.get("text_config", case.config)
    more: dict[str, Any] = {"num_hidden_layers": n_layers, "max_position_embeddings": 512}
    is_mixed = "linear_attention" in (text.get("layer_types") or ())
    like = [i % n_before if is_mixed else min(i, n_before - 1) for i in range(n_layers)]
    for key in ("layer_types", "mlp_layer_types"):
        if text.get(key):
            more[key] = [text[key][i] for i in like]
    shapes = {name: shape for name, shape in case.shapes.items() if ".layers." not in name}
    for i in range(n_layers):
        mark = f".layers.{like[i]}."
        shapes |= {
            name.replace(mark, f".layers.{i}."): shape
            for name, shape in case.shapes.items()
            if mark in name and "visual" not in name
        }
    is_nested = "text_config" in case.config
    config = {**case.config, "text_config": {**text, **more}} if is_nested else {**text, **more}
    return replace(case, config=config, shapes=shapes)


def n_layers_of(case: Case) -> int:
    """The layers of the trunk."""
    config = case.config.get("text_config", case.config)
    return int(config["num_hidden_layers"])


def head_tensors(case: Case) -> dict[str, Array]:
    """The tensors of the head, by the names of layer ``num_hidden_layers``."""
    config = case.config.get("text_config", case.config)
    n_layers, dim = n_layers_of(case), config["hidden_size"]
    types = config.get("layer_types") or ["full_attention"] * n_layers
    like = max(i for i, type_ in enumerate(types) if type_ == "full_attention")
    mark = f"layers.{like}."
    of_layer = {n: shape for n, shape in case.shapes.items() if mark in n and "visual" not in n}
    shapes = {n.rpartition(mark)[2]: shape for n, shape in of_layer.items()}
    ends = dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), (dim,))
    shapes |= {f"{name}.weight": shape for name, shape in ends.items()}
    shapes["eh_proj.weight"] = (dim, 2 * dim)
    at = f"model.layers.{n_layers}."
    return {at + name: weights_of(at + name, shape) for name, shape in shapes.items()}


def write_hf(case: Case, folder: Path, **changed: Array) -> Path:
    """Write the checkpoint with its head, as its makers name the tensors."""
    at = f"model.layers.{n_layers_of(case)}."
    tensors = {**case.tensors(), **head_tensors(case), **changed}
    if not case.config["model_type"].startswith("qwen"):
        return write_checkpoint(folder, case.config, tensors)

    def name_of(name: str) -> str:
        part = name.removeprefix(at)
        own = _QWEN.get(part.removesuffix(".weight"))
        if part == name:
            return name
        return f"mtp.layers.0.{part}" if own is None else f"{own}.weight"

    return write_checkpoint(folder, case.config, {name_of(n): t for n, t in tensors.items()})


def write_sure(folder: Path, tokenizer_from: Path, *, n_layers: int) -> Path:
    """Qwen 3.5 whose next token follows from the last one alone, so that its head guesses right.

    It has the tokenizer of another model. The head reads the token, nothing of the trunk.
    """
    case = deep(cases()["qwen3_5"], n_layers)
    n_before, dim = case.config["vocab_size"], case.config["hidden_size"]
    n_vocab = json.loads((tokenizer_from / "config.json").read_text("utf-8"))["vocab_size"]
    tables = ("model.embed_tokens.weight", "lm_head.weight")
    assert all(case.shapes[name] == (n_before, dim) for name in tables)
    shapes = {**case.shapes, **dict.fromkeys(tables, (n_vocab, dim))}
    case = replace(case, config={**case.config, "vocab_size": n_vocab}, shapes=shapes)
    tensors, at = {**case.tensors(), **head_tensors(case)}, f"model.layers.{n_layers}."
    writes = ("out_proj.weight", "o_proj.weight", "down_proj.weight")
    tensors |= {name: t * np.float32(1e-3) for name, t in tensors.items() if name.endswith(writes)}
    tensors[f"{at}enorm.weight"] = np.zeros(dim, np.float32)  # of 1 + w
    tensors[f"{at}eh_proj.weight"] = np.eye(dim, 2 * dim, dtype=np.float32)
    tensors[f"{at}shared_head.norm.weight"] = tensors["model.norm.weight"]
    write_hf(case, folder, **tensors)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_from / name, folder / name)
    return folder


def write_gguf(case: Case, path: Path) -> Path:
    """Write the file as llama.cpp converts it: the head is the last block."""
    n_layers = n_layers_of(case)
    head = head_tensors(case)
    at, add = f"model.layers.{n_layers}.", 1.0 if "qwen" in case.config["model_type"] else 0.0
    ends = {
        f"{at}{part}.weight": f"blk.{n_layers}.nextn.{part.replace('.', '_')}.weight"
        for part in ("eh_proj", "enorm", "hnorm", "shared_head.norm")
    }
    more: dict[str, Any] = {"num_hidden_layers": n_layers + 1}
    if "layer_types" in case.config:
        more["layer_types"] = [*case.config["layer_types"], "full_attention"]
    longer = replace(case, config={**case.config, **more})
    is_counted = case.config["model_type"] == "glm4_moe"  # in its metadata, as llama.cpp does it
    writer = gguf_families.begin(case, path, n_ahead=0 if is_counted else 1)
    layers = {**case.tensors(), **{n: t for n, t in head.items() if n not in ends}}
    for name, values in gguf_families.converted_tensors(longer, layers):
        writer.add_tensor(name, values)
    for name, there in ends.items():
        is_norm = head[name].ndim == 1
        values = head[name] + add if is_norm else head[name].astype(np.float16)
        writer.add_tensor(there, values)
    gguf_files.close(writer)
    return path


class Guesser:
    """The trunk and the head of a checkpoint in numpy."""

    def __init__(self, folder: Path) -> None:
        """Plan the checkpoint as f16."""
        self._stack = ExitStack()
        source = self._stack.enter_context(open_source(folder))
        f16 = Policy(Dtype.F16, Dtype.F16)
        plan = make_plan(source.family, source.facts, source.checkpoint, f16)
        self._original = Original(plan, source.checkpoint)
        self._n_layers = self._original.header.n_layers
        self._eps = np.float32(self._original.arch.norm_epsilon)

    def _norm(self, x: Array, weight: Array) -> Array:
        size = np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + self._eps)
        return np.asarray(x / size * weight, np.float32)

    def hidden(self, tokens: list[int]) -> Array:
        """The final hidden states of the trunk."""
        x = self._original.embed(np.array([tokens]))
        for i in range(self._n_layers):
            x = self._original.layer(self._original.weights(layer_unit(i)), x)
        return np.asarray(self._original.final_norm(self._original.vectors(FINAL_UNIT), x)[0])

    def guesses(self, tokens: list[int], n: int) -> list[int]:
        """What the head guesses after the tokens, the last of which is not evaluated yet."""
        w = self._original.weights(layer_unit(self._n_layers))
        hidden, behind = list(self.hidden(tokens[:-1])), list(tokens)
        out = []
        for _ in range(n):
            e = self._original.embed(np.array([behind[1:]]))[0]
            joined = (self._norm(e, w[T.MTP_TOKEN_NORM]),
                      self._norm(np.array(hidden), w[T.MTP_HIDDEN_NORM]))  # fmt: skip
            x = np.concatenate(joined, axis=-1) @ w[T.MTP_JOIN].T
            x = self._original.layer(w, np.asarray(x[None], np.float32))[0]
            hidden.append(self._norm(x[-1], w[T.MTP_END_NORM]))
            logits = np.concatenate(
                [hidden[-1] @ rows.T for _, rows in self._original.head_rows()], axis=-1
            )
            out.append(int(np.argmax(logits)))
            behind.append(out[-1])
        return out


# ---- A model and its drafter, which reads the model's keys, values and hidden states ----
MAX_TOKENS = 512


def write_pair(folder: Path, name: str = "target") -> tuple[Path, Path]:
    """Write both, with the weights of the golden cases; guesses for the model pay."""
    for file, case in zip((name, "drafter"), golden_families.drafted(), strict=True):
        text = case.config.get("text_config", {})
        more = {"text_config": {**text, "max_position_embeddings": MAX_TOKENS}} if text else {}
        case = replace(case, config={**case.config, "max_position_embeddings": MAX_TOKENS, **more})
        source = case.write(folder / file)
        convert(source, folder / f"{file}.qsf", quant_type="f16", embed_type="f16", force=True)
    return folder / f"{name}.qsf", folder / "drafter.qsf"


# ---- how a model with room for guesses of the next tokens is opened so that it streams ----
def open_streamed(
    path: Path, draft_rows: int, *, least_chunk_tokens: int = 1, **options: Any
) -> binding.NativeModel:
    """Open in the least memory that has room for the drafts, and for chunks of so many tokens."""
    asked: dict[str, Any] = {"draft_rows": draft_rows, **options}
    for more_bytes in range(1 << 18, 1 << 24, 1 << 18):
        # What the process holds, and so the least budget, may grow meanwhile.
        least = binding.plan_model(path, binding.Options(budget_bytes=1 << 20, **asked))
        budget_bytes = least.min_budget_bytes + more_bytes
        with contextlib.suppress(QsfMemoryError):
            model = binding.NativeModel(path, binding.Options(budget_bytes=budget_bytes, **asked))
            plan = model.info().plan
            has_room = plan.draft_rows == draft_rows and plan.chunk_tokens >= least_chunk_tokens
            if has_room and plan.streamed_bytes:
                return model
            model.close()
    raise AssertionError("no budget streams layers and has room for drafts")
