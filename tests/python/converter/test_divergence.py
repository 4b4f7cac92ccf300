# SPDX-License-Identifier: Apache-2.0
"""KL, perplexity and agreement from parts of the vocabulary, against whole rows of logits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from make.calibrated_models import log_softmax
from qsf_converter.original.divergence import Divergence

N_VOCAB = 61
LOGITS: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "normal": lambda x: x,
    "ascending": lambda x: np.asarray(np.sort(x, axis=-1)),
    "descending": lambda x: np.asarray(-np.sort(-x, axis=-1)),
    "large": lambda x: x * 1e4,
    "large, all negative": lambda x: x * 10 - 1e4,
    "small": lambda x: x * 1e-3,
}


def in_parts(
    tokens: NDArray[np.integer], p: NDArray[np.float32], q: NDArray[np.float32], step: int
) -> Divergence:
    found = Divergence(tokens)
    for start in range(0, p.shape[-1], step):
        for sample in range(len(tokens)):
            part = slice(start, start + step)
            found.add(sample, start, p[sample][:, part], q[sample][:, part])
    return found


def made(kind: str) -> tuple[NDArray[np.integer], NDArray[np.float32], NDArray[np.float32]]:
    rng = np.random.default_rng(2)
    p = LOGITS[kind](rng.standard_normal((3, 9, N_VOCAB)) * 3).astype(np.float32)
    noise = rng.standard_normal(p.shape) * (1e-3 if kind == "small" else 0.7)
    return rng.integers(0, N_VOCAB, (3, 9)), p, (p + noise).astype(np.float32)


@pytest.mark.parametrize("kind", list(LOGITS))
@pytest.mark.parametrize("step", [N_VOCAB, 31, 7, 1])
def test_parts_of_the_vocabulary_give_what_the_whole_gives(kind: str, step: int) -> None:
    tokens, p, q = made(kind)
    found = in_parts(tokens, p, q, step)
    log_p, log_q = log_softmax(p[:, :-1]), log_softmax(q[:, :-1])
    kl = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    # Logits of 1e4 are 1e-3 apart as f32; the sums are f64.
    tolerance = 1e-9 if np.abs(p).max() < 1e3 else 2e-3
    np.testing.assert_allclose(found.kl, kl, rtol=1e-5, atol=tolerance)
    assert found.kl.shape == (3, 8)
    assert found.n_tokens == 24
    expected = []
    for values in (log_p, log_q):
        chosen = np.take_along_axis(values, tokens[:, 1:, None], axis=-1)
        expected.append(-chosen.mean())
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(found.perplexities, np.exp(expected), rtol=1e-6)
    same = p[:, :-1].argmax(axis=-1) == q[:, :-1].argmax(axis=-1)
    assert found.top1_agreement == same.mean()


@pytest.mark.parametrize("step", [N_VOCAB, 10])
def test_equal_models_do_not_diverge(step: int) -> None:
    tokens, p, _ = made("normal")
    found = in_parts(tokens, p, p.copy(), step)
    np.testing.assert_allclose(found.kl, 0, atol=1e-15)
    assert found.top1_agreement == 1
    assert found.perplexities[0] == found.perplexities[1]


def test_the_first_token_is_not_predicted_and_the_last_predicts_nothing() -> None:
    tokens, p, q = made("normal")
    before = in_parts(tokens, p, q, 20)
    p[:, -1], q[:, -1] = 1e3, -1e3
    tokens = tokens.copy()
    tokens[:, 0] = 0
    after = in_parts(tokens, p, q, 20)
    np.testing.assert_array_equal(before.kl, after.kl)
    assert before.perplexities == after.perplexities


def test_the_first_of_equal_logits_is_the_likeliest() -> None:
    tokens = np.zeros((1, 2), np.int32)
    p, q = np.zeros((1, 2, 6), np.float32), np.zeros((1, 2, 6), np.float32)
    p[0, 0, [1, 4]] = 1
    q[0, 0, 1] = 1
    assert all(in_parts(tokens, p, q, step).top1_agreement == 1 for step in (1, 2, 3, 6))
    q[0, 0, [1, 4]] = 0, 1
    assert all(in_parts(tokens, p, q, step).top1_agreement == 0 for step in (1, 2, 3, 6))
