"""The bytes that a test reads: keys and values from memory, weights from the disk."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping

from qsf.kv import kv_position_bytes, parse_kv_type
from qsf_bench.models.facts import FileFacts
from qsf_bench.run.tasks import QSF, Task, Test

# Bits of a value with its share of scales and minimums.
_LLAMA_KV_BITS = {"f16": 16.0, "8bit": 8.5, "4bit": 4.5}


def kv_bytes_per_position(facts: FileFacts, kv_type: str, engine: str) -> float | None:
    """Return bytes of keys and values of one position in all layers; None: unknown type."""
    if engine == QSF:
        try:
            bits = parse_kv_type(kv_type)
        except ValueError:
            return None
        return kv_position_bytes(facts.n_layers, facts.n_kv_heads, facts.head_dim, *bits)
    if kv_type not in _LLAMA_KV_BITS:
        return None
    return facts.n_layers * facts.n_kv_heads * facts.head_dim * 2 * _LLAMA_KV_BITS[kv_type] / 8


def mean_positions(test: Test) -> float:
    """Return the mean number of positions that a token of the test attends to, its own included."""
    return test.depth + (test.n_tokens + 1) / 2


def streamed_bytes_at_best(task: Task, facts: FileFacts, plan: Mapping[str, object]) -> float:
    """Return bytes of weights that cannot stay in memory between passes.

    QSF's plan has the number. For other engines only the group's limit is known: at best all of it
    holds weights.
    """
    if task.engine == QSF:
        n_bytes = plan.get("streamed_bytes", 0)
        return float(n_bytes) if isinstance(n_bytes, int | float) else 0.0
    if task.cap_mb is None:
        return 0.0
    return float(max(0, facts.token_bytes - (task.cap_mb << 20)))
