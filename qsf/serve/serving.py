"""The model and the options that all requests of a server share."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qsf.model import Model
    from qsf.text.constraints import Constraints


LATEST = ":latest"  # appended to names by ollama's clients


@dataclass(frozen=True, slots=True)
class Serving:
    """The model, and the options of the server that hold for every request."""

    model: Model
    name: str
    fingerprint: str
    most_choices: int
    constraints: Constraints | str = ""  # a text: the reason why there are none
    max_seconds: float | None = None
    is_strict: bool = False

    @property
    def ctx_tokens(self) -> int:
        """The most tokens of a sequence, prompt and answer together."""
        return self.model.info.plan.ctx_tokens
