"""What makes vectors and scores of texts: the makers' settings, dense layers, heads of rerankers.

The dense layers that sentence-transformers computes behind the pooling are linear, as the mean is:
their product makes the same vectors when it is applied to the hidden states. The dense layer of a
cross-encoder, which gives a pair of texts one score, is applied so too; the vectors of its head,
some thousand numbers, are settings.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, Final

import numpy as np

from qsf.errors import QsfConversionError, shown
from qsf.foreign_json import read_json
from qsf_converter.sources.checkpoint import (
    Checkpoint,
    DerivedCheckpoint,
    Float32Array,
    Matrix,
    to_float32,
)
from qsf_converter.sources.checkpoint_safetensors import SafetensorsCheckpoint
from qsf_converter.sources.families.config import MAX_TOKENS
from qsf_converter.sources.families.encoders import DENSE
from qsf_converter.sources.families.family import Family
from qsf_converter.sources.metadata import read_json_object
from qsf_converter.text.tables import TOKENIZER_MEMORY_BYTES

_GGUF_NAMES = ("dense_2.weight", "dense_3.weight")
_WEIGHT = "linear.weight"
_IDENTITY = "torch.nn.modules.linear.Identity"


def with_dense(
    stored: Checkpoint, matrices: Sequence[Float32Array], parts: Sequence[str]
) -> Checkpoint:
    """Return the checkpoint with the product of ``matrices`` [out, in], of which the first reads
    the pooled vector, instead of the tensors ``parts``; as it is without any.
    """
    if not matrices:
        return stored
    try:
        product = reduce(lambda done, next_: next_ @ done, (m.astype(float) for m in matrices))
    except ValueError as error:
        raise QsfConversionError(f"its dense layers do not fit together: {error}") from error
    dense = product.astype(np.float32)
    matrix = Matrix(DENSE, dense.shape, "F32", parts, lambda start, stop: dense[start:stop])
    return DerivedCheckpoint(stored, [matrix])


def with_dense_of_folder(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """Return the checkpoint with the dense layers of the folder, 2_Dense and so on, if any."""
    matrices = []
    for path in sorted(folder.glob("[0-9]_Dense")):
        config = read_json_object(path / "config.json") or {}
        activation = config.get("activation_function")
        if activation != _IDENTITY or config.get("bias"):
            raise QsfConversionError(
                f"{path.name}: a dense layer with the activation {shown(activation)} and bias "
                f"{shown(config.get('bias'))} is not supported; allowed: Identity, no bias"
            )
        with SafetensorsCheckpoint(path) as dense:
            names = list(dense.tensors)
            if names != [_WEIGHT]:
                raise QsfConversionError(f"{path.name}: it has {shown(names)}, allowed: {_WEIGHT}")
            matrices.append(to_float32(dense.read_rows(_WEIGHT, 0, dense.tensors[_WEIGHT].n_rows)))
    return with_dense(checkpoint, matrices, ())


def with_dense_of_gguf(checkpoint: Checkpoint) -> Checkpoint:
    names = [name for name in _GGUF_NAMES if name in checkpoint.tensors]
    matrices = [
        to_float32(checkpoint.read_rows(name, 0, checkpoint.tensors[name].n_rows)) for name in names
    ]
    return with_dense(checkpoint, matrices, names)


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


# sentence-transformers' names, before release 5 a flag for each, and llama.cpp's numbers.
_NAMES = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_MODES = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
_NUMBERS = {1: "mean", 2: "cls", 3: "last"}
_LEAST_TOKENS = 4  # what a model adds to a pair of texts


def of_folder(model_dir: Path, *, has_head: bool) -> dict[str, Any]:
    """Return the settings of a sentence-transformers folder; {}: it is no such model.

    An encoder (without a head) is one even without settings, for the mean.
    """
    pooling = read_json_object(model_dir / "1_Pooling" / "config.json") or {}
    modes = [mode for name, mode in _NAMES.items() if pooling.get("pooling_mode") == name]
    modes += [mode for name, mode in _MODES.items() if pooling.get(name) is True]
    if pooling and not modes and not has_head:
        raise QsfConversionError("1_Pooling: none of the modes lasttoken, mean_tokens, cls_token")
    if not modes and has_head:
        return {}
    mode = modes[0] if modes else "mean"
    tokenizer = read_json_object(model_dir / "tokenizer.json", TOKENIZER_MEMORY_BYTES) or {}
    return {"pooling": mode, **_special_tokens(tokenizer), **_most_tokens(model_dir)}


def of_gguf(fields: Mapping[str, Any], *, has_head: bool) -> dict[str, Any]:
    mode = _NUMBERS.get(fields.get(f"{fields.get('general.architecture')}.pooling_type", 0))
    if mode is None and has_head:
        return {}
    words = fields.get("tokenizer.ggml.tokens")
    is_bert = fields.get("tokenizer.ggml.model") == "bert"  # which always has [SEP]
    end = fields.get(f"tokenizer.ggml.{'seperator' if is_bert else 'eos'}_token_id")  # so spelled
    is_added = is_bert or fields.get("tokenizer.ggml.add_eos_token") is True
    is_known = isinstance(words, list) and isinstance(end, int) and 0 <= end < len(words)
    word = words[end] if is_added and is_known and words else None
    n_between = 1 if is_bert or fields.get("general.architecture") == "modern-bert" else 2
    return {
        "pooling": mode or "mean",
        "end_token": word,
        "pair_tokens": [] if word is None else [word] * n_between,
    }


def with_settings(chat: bytes, more: Mapping[str, Any]) -> bytes:
    facts = read_json(chat, has_nan=True)
    facts["embedding"] |= more
    return json.dumps(facts, ensure_ascii=False, allow_nan=False).encode()


def _special_tokens(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the post-processor of a tokenizer.json adds behind a text, and between two."""
    try:
        step = tokenizer["post_processor"]
        steps = step.get("processors", [step])
        for each in steps:
            if each["type"] in ("BertProcessing", "RobertaProcessing"):
                word = str(each["sep"][0])
                n = 1 if each["type"] == "BertProcessing" else 2
                return {"end_token": word, "pair_tokens": [word] * n}
        (template,) = [each for each in steps if each["type"] == "TemplateProcessing"]
        word = template["single"][-1]["SpecialToken"]["id"]
        pair = [next(iter(part.items())) for part in template.get("pair") or ()]
        texts = [i for i, (kind, _) in enumerate(pair) if kind == "Sequence"]
        between = [part["id"] for _, part in pair[texts[0] + 1 : texts[-1]]] if texts else []
    except (LookupError, TypeError, ValueError, AttributeError):
        return {"end_token": None}  # there is none, or the tokenizer's reader reports the error
    words = [each for each in between if isinstance(each, str)]
    return {"end_token": word if isinstance(word, str) else None, "pair_tokens": words}


def _most_tokens(model_dir: Path) -> dict[str, Any]:
    for path in sorted(model_dir.glob("sentence_*_config.json")):
        most = (read_json_object(path) or {}).get("max_seq_length")
        if isinstance(most, int) and most >= _LEAST_TOKENS:
            return {"max_tokens": most}
        if most is not None:
            raise QsfConversionError(
                f"{path.name}: max_seq_length = {shown(most)} is not a number of tokens from "
                f"{_LEAST_TOKENS} on"
            )
    most = (read_json_object(model_dir / "tokenizer_config.json") or {}).get("model_max_length")
    if isinstance(most, int | float) and _LEAST_TOKENS <= most <= MAX_TOKENS:
        return {"max_tokens": int(most)}
    return {}
