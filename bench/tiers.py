"""What three rules of eviction cost a server whose conversations do not fit in memory.

A seeded generator makes conversations that come at random, think between their turns and end. For
each rule it counts the seconds of evaluating and of reading what was held before: what is new takes
the same time with all. The rules are the server's retention value (qsf/serve/costs.py), the longest
unused sequence, and chunks of 32 tokens by layer whose cost is weighted by layer and by place in
the conversation. Conversations share nothing here.

Usage: python bench/tiers.py [--memory-mb 60] [--disk-mb 300] [--seed 1]
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field

import numpy as np

from qsf.serve.costs import Costs, value

# The 1.1B shape of docs/benchmarks.md: 22 layers, k8v4
N_LAYERS = 22
TOKEN_BYTES = 8_700
TOKEN_SECONDS = 1.9e-3
POSITION_SECONDS = 0.9e-6  # that a position further on adds to a token
CTX_TOKENS = 2048
CHUNK_TOKENS = 32


@dataclass(frozen=True)
class Turn:
    """A request: the conversation held ``n_before`` tokens, and holds ``n_after`` then."""

    at: float
    conversation: int
    n_before: int
    n_after: int


def make_trace(seed: int, n_conversations: int) -> list[Turn]:
    """Return turns in their order: one conversation in 20 s, 5 turns each, pauses around 45 s."""
    rng = random.Random(seed)
    turns = []
    start = 0.0
    for conversation in range(n_conversations):
        start += rng.expovariate(1 / 20)
        at, n_held = start, 0
        n_tokens = rng.choice((60, 400, 1000))  # with what the system says
        while True:
            n_after = n_held + n_tokens + int(rng.lognormvariate(4.8, 0.6))
            if n_after > CTX_TOKENS:
                break
            turns.append(Turn(at, conversation, n_held, n_after))
            n_held = n_after
            if rng.random() < 0.2:
                break
            at += rng.lognormvariate(3.8, 1.0)
            n_tokens = int(rng.lognormvariate(3.8, 0.8))
    return sorted(turns, key=lambda turn: turn.at)


def known_costs() -> Costs:
    """Return costs that have learned what evaluating takes."""
    costs = Costs()
    for first in (0, 1024):
        seconds = 256 * (TOKEN_SECONDS + POSITION_SECONDS * (first + 128))
        costs.learn_evaluating(first, 256, seconds)
    return costs


@dataclass
class Result:
    """Seconds that having conversations back took."""

    evaluated: float = 0.0
    read: float = 0.0
    n_written: int = 0


@dataclass
class Tier:
    """Conversations by number: how many tokens, and when last used."""

    most_tokens: int
    held: dict[int, tuple[int, float]] = field(default_factory=dict)

    def is_full(self) -> bool:
        """Return whether something must go."""
        return sum(n for n, _ in self.held.values()) > self.most_tokens


def whole(turns: list[Turn], costs: Costs, most: tuple[int, int], *, is_lru: bool) -> Result:
    """Evict whole sequences: by value, or the longest unused."""
    memory, disk = Tier(most[0]), Tier(most[1])
    result = Result()
    for turn in turns:
        key, now = turn.conversation, turn.at
        if key not in memory.held:
            n_read = disk.held.get(key, (0, 0.0))[0]
            result.read += costs.reading(n_read * TOKEN_BYTES)
            result.evaluated += costs.evaluating(n_read, turn.n_before)
        memory.held[key] = turn.n_after, now
        while memory.is_full():

            def worth(other: int, now: float = now, key: int = key) -> float:
                n, used = memory.held[other]
                if other == key:
                    return float("inf")
                if is_lru:
                    return used
                n_passes = 1 if disk.held.get(other, (0, 0))[0] == n else 2
                read = costs.reading(n * TOKEN_BYTES) * n_passes if most[1] else float("inf")
                return value(min(costs.evaluating(0, n), read), n, now - used)

            victim = min(memory.held, key=worth)
            n_tokens, used = memory.held.pop(victim)
            if most[1] and disk.held.get(victim, (0, 0))[0] != n_tokens:
                result.n_written += n_tokens
                disk.held[victim] = n_tokens, used
            while disk.is_full():
                disk.held.pop(
                    min(disk.held, key=lambda k: disk_worth(disk, k, costs, turn, is_lru))
                )
    return result


def disk_worth(disk: Tier, key: int, costs: Costs, turn: Turn, is_lru: bool) -> float:
    """Return what a conversation on the disk is worth at the time of a turn."""
    n, used = disk.held[key]
    if is_lru:
        return used
    return value(costs.evaluating(0, n) - costs.reading(n * TOKEN_BYTES), n, turn.at - used)


def by_layer(turns: list[Turn], costs: Costs, most: tuple[int, int]) -> Result:
    """Evict chunks of a layer: layer weight x position weight x cost / time without use.

    A chunk of which a layer is dropped is evaluated again, since its layers need each other.
    """
    where: dict[int, np.ndarray] = {}  # [chunks, layers]: 0 memory, 1 disk, 2 dropped
    used: dict[int, float] = {}
    lengths: dict[int, int] = {}
    result = Result()
    layer = (N_LAYERS - np.arange(N_LAYERS)) / N_LAYERS

    def values(key: int, now: float) -> np.ndarray:
        chunks = np.arange(len(where[key]))
        base = TOKEN_SECONDS + POSITION_SECONDS * CHUNK_TOKENS * chunks
        weight = (chunks + 1) / len(chunks)
        return np.outer(weight * base, layer) / max(now - used[key], 1e-3)

    def evict(tier: int, keys: list[int], n_most: int, now: float) -> int:
        n_over = sum(int((where[k] == tier).sum()) for k in where) - n_most
        if n_over <= 0:
            return 0
        all_values = [np.where(where[k] == tier, values(k, now), np.inf).ravel() for k in keys]
        order = np.argpartition(np.concatenate(all_values), n_over - 1)[:n_over]
        ends = np.cumsum([len(v) for v in all_values])
        for i in order:
            at = int(np.searchsorted(ends, i, side="right"))
            where[keys[at]].reshape(-1)[i - (ends[at] - len(all_values[at]))] = tier + 1
        return n_over

    entry_tokens = CHUNK_TOKENS / N_LAYERS
    for turn in turns:
        key, now = turn.conversation, turn.at
        if key in where:
            for i, chunk in enumerate(where[key]):
                first, end = i * CHUNK_TOKENS, min((i + 1) * CHUNK_TOKENS, turn.n_before)
                if (chunk == 2).any():
                    result.evaluated += costs.evaluating(first, end)
                else:
                    n = int((chunk == 1).sum())
                    result.read += costs.reading(int(n * entry_tokens * TOKEN_BYTES))
        n_chunks = -(-turn.n_after // CHUNK_TOKENS)
        where[key] = np.zeros((n_chunks, N_LAYERS), np.int8)
        used[key], lengths[key] = now, turn.n_after
        others = [k for k in where if k != key and (where[k] == 0).any()]
        result.n_written += int(evict(0, others, int(most[0] / entry_tokens), now) * entry_tokens)
        on_disk = [k for k in where if (where[k] == 1).any()]
        evict(1, on_disk, int(most[1] / entry_tokens), now)
        for old in [k for k in where if (where[k] == 2).all()]:
            where[old] = np.full((len(where[old]), N_LAYERS), 2, np.int8)
    return result


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory-mb", type=int, default=60)
    parser.add_argument("--disk-mb", type=int, default=300)
    parser.add_argument("--conversations", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    turns = make_trace(options.seed, options.conversations)
    everything = sum(known_costs().evaluating(0, turn.n_before) for turn in turns)
    print(f"{len(turns)} turns; nothing kept: {everything:.0f} s evaluated again\n")
    print("| tiers | rule | s evaluated | s read | s together | MB written |")
    print("|---|---|---|---|---|---|")
    for disk_mb, speed in ((0, 500), (options.disk_mb, 500), (options.disk_mb, 50)):
        costs = known_costs()
        costs.learn_reading(speed * 10**6, 1.0)
        most = options.memory_mb * 10**6 // TOKEN_BYTES, disk_mb * 10**6 // TOKEN_BYTES
        name = f"memory, disk of {speed} MB/s" if disk_mb else "memory only"
        for rule, result in (
            ("value", whole(turns, costs, most, is_lru=False)),
            ("longest unused", whole(turns, costs, most, is_lru=True)),
            ("by layer and place", by_layer(turns, costs, most)),
        ):
            both = result.evaluated + result.read
            written_mb = result.n_written * TOKEN_BYTES / 1e6 if disk_mb else 0.0
            print(
                f"| {name} | {rule} | {result.evaluated:.0f} | {result.read:.1f} | {both:.0f} "
                f"| {written_mb:.0f} |"
            )


if __name__ == "__main__":
    main()
