"""A checkpoint in full precision as a source of logits, for evaluating files made from it.

The windows go through the model layer by layer, in batches whose activations fit in a given amount
of memory. A layer's weights are read once for each batch, or only once if all weights fit in that
amount too.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from qsf.evaluate.evaluation import Window
from qsf.file.layout import FINAL_UNIT, Dtype, layer_unit
from qsf.foreign_json import read_json
from qsf.text.tokenizer import Tokenizer
from qsf_converter.original.layers import Original
from qsf_converter.rounding.plan import Policy, make_plan
from qsf_converter.sources.checkpoint import Float32Array
from qsf_converter.sources.source import Source, open_source
from qsf_converter.text.tables import open_tokenizer

DEFAULT_MEMORY_BYTES: Final = 256 << 20


class OriginalLogits:
    """An original as ``qsf.evaluate.evaluation.LogitSource``.

    Args:
        original: the model.
        tokenizer: of the checkpoint, or None.
        memory_bytes: for the activations of a batch of windows, at least one window, and as much
            again for kept weights. A layer's weights, as f32, come on top.
    """

    def __init__(
        self,
        original: Original,
        tokenizer: Tokenizer | None,
        *,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
    ) -> None:
        self._original = original
        self._tokenizer = tokenizer
        self._memory_bytes = memory_bytes
        header = original.header
        n_weights = sum(
            target.n_rows * target.n_cols
            for unit in (*map(layer_unit, range(header.n_layers)), FINAL_UNIT)
            for target in original.targets(unit)
        )
        if original.arch.tied_head:
            n_weights += header.n_vocab * header.dim
        has_room = 4 * n_weights <= memory_bytes
        self._weights = functools.lru_cache(None if has_room else 0)(original.weights)
        kept_rows = functools.cache(lambda: list(original.head_rows()))
        self._head_rows = kept_rows if has_room else original.head_rows

    @property
    def n_vocab(self) -> int:
        return self._original.header.n_vocab

    @property
    def max_tokens(self) -> int:
        """The longest window: the model's own context."""
        return self._original.header.max_tokens

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    def logits(
        self, windows: Sequence[Window], max_rows: int, advance: Callable[[float], None]
    ) -> Iterator[Float32Array]:
        start = 0
        while start < len(windows):
            end = self._batch_end(windows, start)
            states = self._states(windows[start:end], advance)
            for window, state in zip(windows[start:end], states, strict=True):
                for first, last in window.blocks(max_rows):
                    yield self._original.logits(state[first:last], self._head_rows())
            start = end

    def _batch_end(self, windows: Sequence[Window], start: int) -> int:
        """Return the end of the batch: windows of equal length, run through the layers together."""
        n_tokens = len(windows[start].tokens)
        window_bytes = 4 * n_tokens * self._original.width
        most = max(1, self._memory_bytes // window_bytes)
        end = start + 1
        while end < len(windows) and end - start < most and len(windows[end].tokens) == n_tokens:
            end += 1
        return end

    def _states(self, windows: Sequence[Window], advance: Callable[[float], None]) -> Float32Array:
        original, n_layers = self._original, self._original.header.n_layers
        tokens = np.stack([window.tokens[:-1] for window in windows])
        x = original.embed(tokens)
        for layer in range(n_layers):
            weights = self._weights(layer_unit(layer))
            # Experts are read once for all windows; other weights are not copied.
            step = len(x) if weights.kind.n_experts else 1
            for i in range(0, len(x), step):
                x[i : i + step] = original.layer(weights, x[i : i + step])
                advance(step * tokens.shape[1] / n_layers)
        return x


@contextlib.contextmanager
def open_original(
    path: Path, *, memory_bytes: int = DEFAULT_MEMORY_BYTES
) -> Iterator[OriginalLogits]:
    """Open a checkpoint as a source of logits; the context manager closes it.

    Raises QsfConversionError when it holds no model that can be converted, QsfIOError when the
    system refuses to read.
    """
    with open_source(path) as source:
        policy = Policy(Dtype.F16, Dtype.F16)  # only names and shapes of the plan are used
        plan = make_plan(source.family, source.facts, source.checkpoint, policy)
        yield OriginalLogits(
            Original(plan, source.checkpoint), _tokenizer_of(source), memory_bytes=memory_bytes
        )


def _tokenizer_of(source: Source) -> Tokenizer | None:
    if source.tokenizer is None:
        return None
    add_bos = read_json(source.chat)["special_tokens"].get("add_bos_token")
    return open_tokenizer(source.tokenizer, bos_id=source.facts.header.bos_id, add_bos=add_bos)
