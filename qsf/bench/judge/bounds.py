"""The limit of a test on this machine: by memory, by the disk or by arithmetic."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qsf.bench.judge.results import Limits
from qsf.bench.models.facts import FileFacts
from qsf.bench.run.tasks import QSF, Task, Test
from qsf.kv import parse_kv_type

# Bits of a value with its share of scales and minimums.
_LLAMA_KV_BITS = {"f16": 16.0, "8bit": 8.5, "4bit": 4.5}
_QSF_KV_BITS = {2: 2.5, 4: 4.5, 8: 8.25, 16: 16.0, 32: 32.0}
_QSF_KV_BLOCK = 64  # a head takes a whole number of these


@dataclass(frozen=True, slots=True)
class Bound:
    """The most that a test can reach. ``binding_bytes`` of a token come from the slowest part."""

    limited_by: str  # "memory", "disk", "arithmetic"
    tok_per_s: float
    binding_bytes: float | None


def kv_bytes_per_position(facts: FileFacts, kv_type: str, engine: str) -> float | None:
    """Return bytes of keys and values of one position in all layers; None: not a known type."""
    if engine == QSF:
        try:
            key_bits, value_bits = parse_kv_type(kv_type)
        except ValueError:
            return None
        bits = _QSF_KV_BITS[key_bits] + _QSF_KV_BITS[value_bits]
        n_values = -(-facts.head_dim // _QSF_KV_BLOCK) * _QSF_KV_BLOCK
    else:
        if kv_type not in _LLAMA_KV_BITS:
            return None
        bits, n_values = 2 * _LLAMA_KV_BITS[kv_type], facts.head_dim
    return facts.n_layers * facts.n_kv_heads * n_values * bits / 8


def mean_positions(test: Test) -> float:
    """Return the mean number of positions that a token of the test attends to, with its own."""
    return test.depth + (test.n_tokens + 1) / 2


def streamed_bytes_at_best(task: Task, facts: FileFacts, plan: Mapping[str, object]) -> float:
    """Return bytes of weights that cannot stay in memory from one pass to the next.

    QSF's plan has the number. Of another engine only the group's limit is known: at best all of
    it holds weights.
    """
    if task.engine == QSF:
        n_bytes = plan.get("streamed_bytes", 0)
        return float(n_bytes) if isinstance(n_bytes, int | float) else 0.0
    if task.cap_mb is None:
        return 0.0
    return float(max(0, facts.token_bytes - (task.cap_mb << 20)))


def bound_of(
    test: Test,
    facts: FileFacts,
    limits: Limits,
    *,
    threads: int,
    kv_token_bytes: float | None,
    streamed_bytes: float,
    first_bytes: float = 0.0,
    n_passes: int = 1,
) -> Bound | None:
    """Return the limit of a test: the slowest of its needs, each at the machine's best rate.

    Args:
        test: the test.
        facts: the bytes and multiply-adds of a token.
        limits: of the machine.
        threads: number of threads, which selects the limits.
        kv_token_bytes: of the KV cache that a token reads; ignored for a prompt.
        streamed_bytes: of weights that a pass reads from the disk.
        first_bytes: of a token, which memory gives before it is known what is to be read.
        n_passes: of a prompt over the weights, one for each chunk.

    Returns:
        None if a limit that matters was not measured: generation needs that of memory, a prompt
        that of arithmetic, both that of the disk if weights are streamed.
    """
    memory = limits.memory_gb_per_s.get(str(threads))
    disk = limits.best_disk_gb_per_s
    gmadds = limits.gmadds_per_s.get(str(threads))
    n_passes = max(1, n_passes) if test.kind == "pp" else test.n_tokens
    per_token = n_passes / test.n_tokens
    seconds: dict[str, tuple[float, float | None]] = {}  # a token, and bytes of it
    if streamed_bytes > 0:
        if not disk:
            return None
        n_bytes = streamed_bytes * per_token
        before = first_bytes / memory if memory and test.kind == "tg" else 0.0
        seconds["disk"] = ((n_bytes / disk + before) / 1e9, n_bytes)
    if test.kind == "pp":
        if not gmadds:
            return None
        # Of the head only the last token's logits are wanted. What attention multiplies is left
        # out: the limit is that of the weights.
        n_madds = facts.token_madds + facts.head_madds / test.n_tokens
        seconds["arithmetic"] = (n_madds / gmadds / 1e9, None)
        if memory:
            n_bytes = facts.token_bytes * per_token
            seconds["memory"] = (n_bytes / memory / 1e9, n_bytes)
    else:
        if not memory or kv_token_bytes is None:
            return None
        n_bytes = facts.token_bytes + kv_token_bytes
        seconds["memory"] = (n_bytes / memory / 1e9, n_bytes)
    by, (token_seconds, binding_bytes) = max(seconds.items(), key=lambda need: need[1][0])
    return Bound(by, 1 / token_seconds, binding_bytes) if token_seconds > 0 else None
