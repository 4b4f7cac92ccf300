"""Measure what the type of the KV cache costs: perplexity of a text beside that with f16.

The text is cut into windows of at most 512 tokens (fewer if the model was made for fewer), and
each is read from its beginning; perplexity is over all tokens but the first of each window.

Usage: python bench/kv_perplexity.py MODEL.qsf TEXT [--windows 60] [--kv-types f16 8bit k8v4 4bit]
"""

# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import qsf

WINDOW_TOKENS = 512


def perplexity(model: qsf.Model, windows: Sequence[list[int]]) -> float:
    """Return e to the mean negative logarithm of the probability of the next token."""
    total = 0.0
    n_tokens = 0
    for tokens in windows:
        logits = model.logits(tokens).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        log_sums = np.log(np.exp(logits).sum(axis=1))
        at_next = logits[np.arange(len(tokens) - 1), tokens[1:]]
        total += float((log_sums[:-1] - at_next).sum())
        n_tokens += len(tokens) - 1
    return math.exp(total / n_tokens)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", metavar="MODEL.qsf")
    parser.add_argument("text", type=Path)
    parser.add_argument("--windows", type=int, default=60)
    parser.add_argument("--kv-types", nargs="+", default=["f16", "8bit", "k8v4", "4bit"])
    args = parser.parse_args()
    text = args.text.read_text(encoding="utf-8")[: args.windows * WINDOW_TOKENS * 8]
    base = None
    print("| KV cache | rotated | perplexity | beside the first |")
    print("|---|---|---|---|")
    for kv_type in args.kv_types:
        with qsf.Model(args.model, ram_budget=None, kv_type=kv_type) as model:
            size = min(WINDOW_TOKENS, model.info.max_tokens)
            tokens = model.tokenize(text)[: args.windows * size]
            windows = [tokens[i : i + size] for i in range(0, len(tokens), size)]
            found = perplexity(model, [w for w in windows if len(w) > 1])
            is_rotated = model.info.plan.kv_is_rotated
        base = base or found
        percent = (found / base - 1) * 100
        rotated = "yes" if is_rotated else "no"
        print(f"| {kv_type} | {rotated} | {found:.4f} | {percent:+.3f} % |", flush=True)


if __name__ == "__main__":
    main()
