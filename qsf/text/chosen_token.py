"""A token that was chosen, and how probable the alternatives were."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChosenToken:
    """One token that was chosen, as ``on_token`` gets it.

    Log-probabilities are natural logarithms, by the model alone: before penalty, temperature and
    limits of sampling.

    Attributes:
        id: of the token.
        logprob: its log-probability.
        top: (id, log-probability) of the ``top_logprobs`` most probable tokens, best first.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
