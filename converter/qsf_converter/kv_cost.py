"""The quality that a KV cache of few bits costs a model, measured during its conversion.

The default type of a file's KV cache follows from that. 4-bit values alone cost small models more
than half a percent (docs/quality.md), so there are two candidates: 8 bits, and f16 if these cost
too much: of perplexity, or of the tokens that greedy decoding would choose.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from qsf.errors import QsfError, QsfFormatError, QsfIOError
from qsf.evaluate.evaluation import Evaluation, evaluate, perplexity_change, working_bytes
from qsf.file.reader import Reader
from qsf.kv import parse_kv_type
from qsf.model import Model
from qsf_converter.calibrate.texts import bundled_text

_REFERENCE: Final = "f16"
_CANDIDATE: Final = "8bit"
_MOST_CHANGE_PERCENT: Final = 0.5  # of perplexity, two standard errors counted in
# Least share of positions at which both caches predict the same token. Of 20 greedy answers of
# 16 tokens,
# SmolLM2-135M (97.1 %) kept 16 with 8 bits, Qwen2.5-Coder-0.5B (98.2 %) keeps 20.
_LEAST_AGREEMENT: Final = 0.975
_CTX_TOKENS: Final = 512
_MOST_TOKENS: Final = 2048
_LEAST_TOKENS: Final = 1024  # of fewer the standard error is too large
# Memory of the whole process: a large model must not need its own size in memory.
_BUDGET_MB: Final = 180
_MARGIN_MB: Final = 32  # above the least that the model can do with, so that fewer layers stream
# About a minute of two cores. By weights, not by the clock: a file must not depend on the machine.
_MOST_WORK: Final = 4e12  # tokens x weights


@dataclass(frozen=True, slots=True)
class KvCost:
    """The increase of perplexity over an f16 cache, for ``tokens`` scored tokens.

    ``type`` is the file's default, ``measured`` the type that was measured. ``agreement`` is the
    share (0 to 1) of positions where both find the same token likeliest.
    """

    type: str
    measured: str
    tokens: int
    change_percent: float
    change_error: float
    agreement: float

    @property
    def bits(self) -> tuple[int, int]:
        """Bits of keys and of values."""
        return parse_kv_type(self.type)

    def meta(self) -> dict[str, Any]:
        """Return what META records."""
        return {**dataclasses.asdict(self), "text": "bundled"}


def measure_kv_cost(
    path: Path, n_weights: int, n_threads: int | None, progress: Callable[[int, int], None]
) -> KvCost | None:
    """Measure the model of a complete file; None if it is too large, or cannot be evaluated.

    Raises:
        QsfIOError, QsfFormatError: the file that was written cannot be read.
    """
    n_tokens = min(_MOST_TOKENS, int(_MOST_WORK / n_weights) // _CTX_TOKENS * _CTX_TOKENS)
    if n_tokens < _LEAST_TOKENS:
        return None

    def evaluate_with(kv_type: str, place: int) -> Evaluation:
        def advance(done: float, total: float) -> None:
            progress(int(place * total + done), int(2 * total))

        with Model(
            path, ram_budget=budget_mb, kv_type=kv_type, threads=n_threads, reserve_mb=reserve_mb
        ) as model:
            ctx_tokens = min(_CTX_TOKENS, model.info.max_tokens)
            return evaluate(
                model, bundled_text(), ctx_tokens=ctx_tokens, max_tokens=n_tokens, progress=advance
            )

    try:
        with Reader(path) as reader:
            n_vocab = reader.header.n_vocab
        reserve_mb = -(-working_bytes(n_vocab, 1, bundled_text(), n_tokens) >> 20)
        least = Model.plan(
            path, ram_budget=1, kv_type=_REFERENCE, reserve_mb=reserve_mb
        ).min_budget_bytes
        budget_mb = max(_BUDGET_MB, (least >> 20) + _MARGIN_MB)
        reference = evaluate_with(_REFERENCE, 0)
        candidate = evaluate_with(_CANDIDATE, 1)
    except (QsfIOError, QsfFormatError):
        raise
    except QsfError:  # a text that its tokenizer cannot encode, a context that is too short
        return None
    change, error = perplexity_change(candidate.token_nll, reference.token_nll)
    agreement = float((candidate.top_tokens == reference.top_tokens).mean())
    is_cheap = change + 2 * error <= _MOST_CHANGE_PERCENT and agreement >= _LEAST_AGREEMENT
    kv_type = _CANDIDATE if is_cheap else _REFERENCE
    return KvCost(kv_type, _CANDIDATE, reference.tokens, change, error, agreement)
