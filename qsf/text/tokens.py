"""Tokens as callers meet them: one that was chosen, and which may be chosen."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


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


class TokenConstraint(Protocol):
    """Which tokens of an answer may come next, such as a ``Constraint`` of `constraints.py`."""

    def forced(self) -> int | None:
        """Return the token that must come next; None: there is a choice. Raises QsfError."""

    def mask(self) -> bytes | None:
        """Return which tokens may come next, a bit each; None: all. Raises QsfError."""

    def take(self, token: int) -> bool:
        """Take the token that was chosen; return whether nothing may follow. Raises QsfError."""
