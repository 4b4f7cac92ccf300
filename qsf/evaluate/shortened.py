"""A model whose context is shorter than the windows that are evaluated, as a source of logits."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from qsf.evaluate.evaluation import Logits, ModelLogits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from qsf.evaluate.windows import Window
    from qsf.kv import KvPolicy
    from qsf.model import Model


class ShortenedLogits(ModelLogits):
    """A .qsf file that continues past its context as ``Session.generate`` does, by a policy."""

    def __init__(self, model: Model, policy: KvPolicy, max_tokens: int) -> None:
        """Use an open model for windows of at most ``max_tokens``. The caller closes it."""
        super().__init__(model)
        self._policy, self._max_tokens = policy, max_tokens

    @property
    def max_tokens(self) -> int:
        return self._max_tokens

    def logits(
        self, windows: Sequence[Window], max_rows: int, advance: Callable[[float], None]
    ) -> Iterator[Logits]:
        for window in windows:
            ids = array("I", window.tokens.tolist())
            held, n_done = array("I"), 0
            for first, end in window.blocks(max_rows):
                parts = []
                while n_done < end:
                    held, rows = self._go_on(held, ids[n_done:end])
                    parts.append(rows[max(first - n_done, 0) :])
                    advance(len(rows))
                    n_done += len(rows)
                yield np.concatenate(parts)

    def _go_on(self, held: array[int], new: array[int]) -> tuple[array[int], Logits]:
        """Evaluate new tokens after ``held``; return the tokens held then, and the logits."""
        n_ctx = self._model.info.plan.ctx_tokens
        n_new = max(1, min(len(new), n_ctx - len(held)))
        held = held + new[:n_new]
        if len(held) > n_ctx:
            held = self._policy.shortened(held, n_ctx)
        return held, self._model.logits(held, first_row=len(held) - n_new)
