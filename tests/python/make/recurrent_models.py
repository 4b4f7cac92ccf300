# SPDX-License-Identifier: Apache-2.0
"""A model with recurrent states for tests of what sessions do."""

from __future__ import annotations

from pathlib import Path

from make.golden_families import cases, weights_of, write_checkpoint
from make.kind_models import VOCAB
from make.mtp_models import head_tensors
from qsf_converter import convert


def write_wide_loop(folder: Path) -> Path:
    """Write a model with looped layers that are larger than the buffers of streaming."""
    golden = cases()["inkling2_loop"]
    wider = {72: 640, 144: 1280}
    tensors = {
        name: weights_of(name, tuple(wider.get(n, n) for n in shape))
        for name, shape in golden.shapes.items()
    }
    source = write_checkpoint(folder / "wide", {**golden.config, "hidden_size": 640}, tensors)
    convert(source, folder / "wide.qsf", quant_type="f16", embed_type="f16")
    return folder / "wide.qsf"


def write_recurrent(folder: Path, *, case: str = "lfm2", quant_type: str = "4bit") -> Path:
    """Write a golden case with a context that holds several snapshots, and VOCAB tokens.

    With an MTP head if the name of the case ends so.
    """
    golden = cases()[case.removesuffix("+mtp")]
    config = {**golden.config, "max_position_embeddings": 512, "vocab_size": VOCAB}
    if "model_max_length" in config:  # the name of Kimi Linear
        config["model_max_length"] = 512
    if "unpadded_vocab_size" in config:
        config["unpadded_vocab_size"] = VOCAB
    if "vocab_size_per_layer_input" in config:
        config["vocab_size_per_layer_input"] = VOCAB
    n_before = golden.config["vocab_size"]
    tensors = {
        name: weights_of(name, tuple(VOCAB if n == n_before else n for n in shape))
        for name, shape in golden.shapes.items()
    }
    if case.endswith("+mtp"):
        tensors |= head_tensors(golden)
    source = write_checkpoint(folder / f"{case}-source", config, tensors)
    path = folder / f"{case}.qsf"
    convert(source, path, quant_type=quant_type)
    return path
