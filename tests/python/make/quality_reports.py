"""Quality reports as a calibrated conversion writes them, from a seed."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
import random

from qsf.report.record import Evaluation, LayerReport, Quality, TensorReport

# Kind, rows and columns in units of 256.
_MATRICES = (
    ("Q", 4, 4), ("K", 1, 4), ("V", 1, 4), ("ATTN_OUT", 4, 4), ("FFN_GATE", 11, 4),
    ("FFN_UP", 11, 4), ("FFN_DOWN", 4, 11),
)  # fmt: skip
_BITS = {"2bit": 2.5, "3bit": 3.5, "4bit": 4.5, "8bit": 8.25, "f32": 32.0}
_ERRORS = {"2bit": 0.33, "3bit": 0.17, "4bit": 0.082, "8bit": 0.0065, "f32": 0.0}
_ACTIONS = ("rounded", "feedback", "scaled+feedback", "rotated+feedback", "outlier table")


def tensor(
    name: str, dtype: str, n_rows: int, n_cols: int, rng: random.Random, action: str = "rounded"
) -> TensorReport:
    """A tensor of a type with about the error that is usual for it."""
    error = _ERRORS[dtype] * rng.uniform(0.7, 1.4)
    return TensorReport(
        name=name,
        source=f"model.{name.lower()}.weight",
        type=dtype,
        n_rows=n_rows,
        n_cols=n_cols,
        bits_per_weight=_BITS[dtype],
        mse=error * error * 4e-4,
        max_error=error * 0.2,
        cosine=math.sqrt(max(0.0, 1 - error * error)),
        relative_error=error,
        outliers=rng.uniform(0, 0.004),
        action="exact" if error == 0 else action,
        output_error=error * error * rng.uniform(0.2, 0.9) if n_rows > 1 else None,
    )


def full_quality(n_layers: int = 12, seed: int = 1) -> Quality:
    """A report with all that a calibrated mixed conversion measures."""
    rng = random.Random(seed)
    tensors = [tensor("EMBEDDING", "4bit", 32000, 1024, rng)]
    for layer in range(n_layers):
        is_edge = layer in (0, n_layers - 1)
        tensors.append(tensor(f"{layer}.ATTN_NORM", "f32", 1, 1024, rng))
        for kind, n_rows, n_cols in _MATRICES:
            types = ("4bit", "8bit") if is_edge or kind == "V" else ("2bit", "3bit", "3bit", "4bit")
            dtype, action = rng.choice(types), rng.choice(_ACTIONS)
            name = f"{layer}.{kind}"
            tensors.append(tensor(name, dtype, n_rows * 256, n_cols * 256, rng, action))
        tensors.append(tensor(f"{layer}.FFN_NORM", "f32", 1, 1024, rng))
    tensors += [tensor("FINAL_NORM", "f32", 1, 1024, rng), tensor("HEAD", "8bit", 32000, 1024, rng)]
    layers = []
    for layer in range(n_layers):
        edge = min(layer, n_layers - 1 - layer)
        kl = rng.uniform(0.02, 0.09) + 2.4 * math.exp(-1.6 * edge)
        layers.append(LayerReport(layer, kl, 1 - 0.4 * kl / (1 + kl), kl))
    return Quality(
        tensors=tuple(tensors),
        layers=tuple(layers),
        evaluation=Evaluation(
            text="tinystories-dev.txt",
            tokens=131072,
            ctx_tokens=512,
            protocol="strided",
            perplexity=7.8312,
            perplexity_original=7.6541,
            kl_mean=0.02134,
            kl_p99=0.2711,
            top1_agreement=0.9284,
        ),
        calibration={
            "text": "tinystories-train.txt", "sha256": "9f" * 32, "tokens": 65536, "windows": 128,
            "damping": 0.01,
        },
    )  # fmt: skip
