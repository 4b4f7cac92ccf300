# SPDX-License-Identifier: Apache-2.0
"""Small models to calibrate, and what the tests of calibration ask of them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from make import tiny_checkpoints
from make.stored import Reader
from oracle import reference
from qsf.file.layout import EMBEDDING_UNIT, FINAL_UNIT, Compression, Dtype, Role, layer_unit
from qsf.file.writer import Writer
from qsf_converter.original.layers import Original
from qsf_converter.rounding.plan import Plan, Policy, make_plan
from qsf_converter.sources.source import Source, open_source

N_VOCAB = 2048  # of the bundled tokenizer
WORDS = ("the", "cat", "saw", "a", "small", "house", "and", "ran", "to", "its", "mother", "soon")


@contextlib.contextmanager
def planned(
    folder: Path, layers: Dtype = Dtype.Q4, embeddings: Dtype = Dtype.Q8
) -> Iterator[tuple[Source, Plan]]:
    """A model with all types chosen."""
    with open_source(folder) as source:
        policy = Policy(layers, embeddings)
        yield source, make_plan(source.family, source.facts, source.checkpoint, policy)


@contextlib.contextmanager
def original(folder: Path) -> Iterator[Original]:
    with planned(folder) as (source, plan):
        yield Original(plan, source.checkpoint)


def small_llama(folder: Path, tokenizer_from: Path, **options: Any) -> Path:
    """Random, with the bundled tokenizer; windows of 64 tokens."""
    sizes = {"dim": 48, "ffn_dim": 72, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8}
    return tiny_checkpoints.make_llama(
        folder,
        tokenizer_from=tokenizer_from,
        **{"n_layers": 3, "n_vocab": N_VOCAB, **sizes, **options},
    )


def small_gpt2(folder: Path, tokenizer_from: Path, **options: Any) -> Path:
    """The same with learned positions, biases, and a head that is the embedding."""
    return tiny_checkpoints.make_gpt2(
        folder,
        tokenizer_from=tokenizer_from,
        **{"n_layers": 2, "dim": 40, "n_heads": 2, "ffn_dim": 70, "n_vocab": N_VOCAB, **options},
    )


def with_outliers(folder: Path) -> Path:
    """The same model with a few weights that are far from all others, in each layer."""
    weights = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(9)
    for name, values in weights.items():
        if name.startswith("model.layers.") and values.ndim == 2:
            flat = values.reshape(-1)
            flat[rng.choice(flat.size, flat.size // 1500 + 1, replace=False)] = 3.5
    save_file(weights, folder / "model.safetensors")
    return folder


def write_text(path: Path, n_words: int = 2000, seed: int = 5) -> Path:
    """A text whose windows differ."""
    rng = np.random.default_rng(seed)
    path.write_text(" ".join(rng.choice(WORDS, n_words)) + "\n", "utf-8")
    return path


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Over the last axis."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    values: NDArray[np.float64] = x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return values


def mean_kl(folder: Path, file: Path, windows: NDArray[np.integer[Any]]) -> float:
    """KL(original || file) in nats over windows, each model computed on its own, in f64."""
    whole, rounded = reference.load_huggingface(folder), reference.load_qsf(file)
    found = []
    for window in windows:
        p, q = (
            log_softmax(reference.forward(model, window).logits[:-1]) for model in (whole, rounded)
        )
        found.append((np.exp(p) * (p - q)).sum(axis=-1))
    return float(np.mean(found))


# ---- rewrites a .qsf file with other importances of layers, or without some of the layers ----


_OPTIONAL = ("META", "TEXT", "TOKN", "CHAT", "WPOS")


def rewrite(
    source: Path,
    out: Path,
    *,
    importances: Sequence[float] | None = None,
    without: Collection[int] = (),
) -> Path:
    """Copy ``source`` to ``out``; ``importances`` [n_layers], layers of ``without`` left out."""
    with Reader(source) as reader:
        n_layers = reader.header.n_layers
        kept = [layer for layer in range(n_layers) if layer not in without]
        header = replace(reader.header, n_layers=len(kept))
        units = [(EMBEDDING_UNIT, reader.embedding)]
        units += [(layer_unit(i), reader.layers[layer]) for i, layer in enumerate(kept)]
        units += [(FINAL_UNIT, reader.final)]
        with Writer(out, header, reader.arch) as writer:
            for new_id, unit in units:
                importance = unit.importance
                if importances is not None and unit.id.role == Role.LAYER:
                    importance = importances[unit.id.layer]
                writer.begin_unit(
                    new_id,
                    dtype=unit.dtype,
                    compression=Compression(unit.compression),
                    importance=importance,
                )
                for tensor in unit.tensors:
                    writer.begin_tensor(
                        tensor.type,
                        tensor.n_rows,
                        tensor.n_cols,
                        tensor.dtype,
                        tensor.layout,
                        tensor.index,
                    )
                    writer.write(reader.read_tensor(tensor))
                    writer.end_tensor()
                writer.end_unit()
            for section in reader.sections.values():
                if section.tag in _OPTIONAL:
                    writer.add_section(section.tag, reader.read_section(section.tag))
    return out
