"""How near the engine's logits must be to the reference's."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import qsf
from oracle.reference import forward, load_qsf


def tokens_for(n_vocab: int, n_tokens: int = 48) -> list[int]:
    return [int(token) for token in np.random.default_rng(5).integers(0, n_vocab, n_tokens)]


def assert_near(got: NDArray[np.float32], want: NDArray[Any]) -> None:
    """Equal up to the order of f32 sums.

    Each logit passes through a few thousand roundings; the terms of its sums are no larger than
    the largest logit, so 1e-4 of that is generous to rounding and far below any real difference.
    """
    scale = float(np.abs(want).max())
    assert np.abs(got - want).max() <= 1e-4 * scale


def count_near(path: Path, quant_type: str, n_pairs: int) -> int:
    """Of so many pairs of tokens, those whose logits are nearly the reference's by default.

    All must be within twice what rounding the activations does.
    """
    reference = load_qsf(path)
    n_near = 0
    pairs = np.array(tokens_for(101, 2 * n_pairs)).reshape(n_pairs, 2).tolist()
    with qsf.Model(path, ram_budget=None, kv_type="f16") as model:
        for tokens in pairs:
            got = model.logits(tokens)
            want = forward(reference, tokens, activations="integer", kv="f16").logits
            rounding = np.abs(want - forward(reference, tokens).logits).max()
            error = np.abs(got - want).max()
            assert error <= 2 * rounding
            n_near += int(error <= (0.3 if quant_type == "8bit" else 0.01) * rounding)
    return n_near
