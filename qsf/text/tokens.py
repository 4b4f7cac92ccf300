"""Tokens in the public interface: a chosen token, and constraints on the next."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ChosenToken:
    """One chosen token, for ``on_token``.

    Log-probabilities are natural logarithms of the model's own distribution, before penalties,
    temperature and limits of sampling.

    Attributes:
        id: of the token.
        logprob: its log-probability.
        top: (id, log-probability) of the ``top_logprobs`` most probable tokens, best first.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class TokenConstraint(Protocol):
    """A constraint on the next token of an answer, such as ``Constraint`` of `constraints.py`."""

    def forced(self) -> int | None:
        """Return the forced token; None: there is a choice. Raises QsfError."""

    def mask(self) -> bytes | None:
        """Return the mask of allowed tokens, a bit each; None: all. Raises QsfError."""

    def take(self, token: int) -> bool:
        """Record the chosen token; return True at the end of the form. Raises QsfError."""
