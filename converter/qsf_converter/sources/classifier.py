"""The head of a cross-encoder, which gives a pair of texts one score.

Its dense layer is a matrix of the file, applied before the pooling as those of `dense.py` are; its
vectors, some thousand numbers, are settings.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Final

from qsf.errors import QsfConversionError, shown
from qsf_converter.sources.checkpoint import Checkpoint, Float32Array, to_float32
from qsf_converter.sources.dense import with_dense
from qsf_converter.sources.families.family import Family

# Names of the dense layer, of what reads its output, and of a norm between them.
_HEADS: Final = (
    ("pooler.dense", "classifier", None),
    ("classifier.dense", "classifier.out_proj", None),
    ("head.dense", "classifier", "head.norm"),
)
_ACTIVATIONS: Final = ("tanh", "gelu")
_POOLINGS: Final = ("cls", "mean")


def is_classifier(family: Family) -> bool:
    return family.name.endswith("ForSequenceClassification")


def with_classifier(
    checkpoint: Checkpoint, family: Family, config: Mapping[str, Any]
) -> tuple[Checkpoint, dict[str, Any]]:
    """Return the checkpoint with the head's dense layer as its own, and the other settings.

    Raises QsfConversionError if the head is not that of a reranker.
    """
    stored = {_bare(name, family): name for name in checkpoint.tensors}

    def read(name: str) -> Float32Array:
        tensor = checkpoint.tensors[stored[name]]
        return to_float32(checkpoint.read_rows(tensor.name, 0, tensor.n_rows))

    heads = (h for h in _HEADS if f"{h[0]}.weight" in stored and f"{h[1]}.weight" in stored)
    dense, out, norm = next(heads, ("", "", None))
    if not dense:
        raise QsfConversionError(
            "its classifier has no dense layer: a GGUF file of a BERT reranker lacks it; convert "
            "the HuggingFace folder"
        )
    weight = read(f"{out}.weight")
    n_labels = 1 if weight.ndim == 1 else len(weight)
    if n_labels != 1:
        raise QsfConversionError(f"its classifier has {n_labels} labels, and a reranker has 1")
    activation = config.get("classifier_activation", "gelu") if norm else "tanh"
    pooling = config.get("classifier_pooling", "cls") if norm else "cls"
    for name, value, allowed in (
        ("classifier_activation", activation, _ACTIVATIONS),
        ("classifier_pooling", pooling, _POOLINGS),
    ):
        if value not in allowed:
            raise QsfConversionError(
                f"config.json: {name} = {shown(value)}, allowed: {', '.join(allowed)}"
            )
    found = {
        key: name
        for key, name in {
            "weight": f"{out}.weight",
            "offset": f"{out}.bias",
            "bias": f"{dense}.bias",
            "norm": f"{norm}.weight",
            "norm_bias": f"{norm}.bias",
        }.items()
        if name in stored
    }
    settings = {key: _packed(read(name)) for key, name in found.items()}
    used = [stored[name] for name in (f"{dense}.weight", *found.values())]
    settings["activation"] = activation
    return with_dense(checkpoint, [read(f"{dense}.weight")], used), {
        "pooling": pooling,
        "classifier": settings,
    }


def _bare(name: str, family: Family) -> str:
    prefix = next((start for start in family.prefixes if name.startswith(start)), "")
    return name.removeprefix(prefix)


def _packed(values: Float32Array) -> str:
    return base64.b64encode(values.reshape(-1).astype("<f4").tobytes()).decode()
