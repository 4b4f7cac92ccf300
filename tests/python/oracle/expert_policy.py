"""Which experts stay in memory, in a few lines: what csrc/stream/ must do with the same uses."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

DECAY: Final = 0.97
N_TRANSIT: Final = 3
REPEATED: Final = 0.4  # of a token's experts, by the next one

# Of tests/golden/tiny-experts-4bit.qsf, with which tests/c/check_experts.c replays the trace.
LAYER_EXPERTS: Final = (6, 8)
N_CHOSEN: Final = (2, 3)
N_TOKENS: Final = 200
SLOTS: Final = (0, 1, 2, 4, 5, 7, 10, 13)


class Cache:
    """Slots for experts of layers that run one after the other."""

    def __init__(self, n_slots: int) -> None:
        self._ends = [sum(LAYER_EXPERTS[: i + 1]) for i in range(len(LAYER_EXPERTS))]
        self._n_slots = n_slots
        self._counts = [0.0] * self._ends[-1]
        self._slots: set[int] = set()

    def run_token(self, chosen: Sequence[int]) -> int:
        """Use the experts of a token, numbered over all layers; return how many were there."""
        self._counts = [DECAY * count for count in self._counts]
        begins = [0, *self._ends]
        return sum(
            self._run_layer(end, [expert for expert in chosen if begin <= expert < end])
            for begin, end in zip(begins, self._ends, strict=False)
        )

    def _run_layer(self, end: int, wanted: Sequence[int]) -> int:
        for expert in wanted:
            self._counts[expert] += 1
        hits = [expert for expert in wanted if expert in self._slots]
        in_use, transit = set(hits), set[int]()
        unused = list(wanted)  # not released, in the order in which they are
        for expert in wanted:
            if expert in hits:
                continue
            while not self._place(expert, end, in_use):
                if len(transit) < N_TRANSIT:
                    transit.add(expert)
                    break
                released = unused.pop(0)
                in_use.discard(released)
                transit.discard(released)
        return len(hits)

    def _place(self, expert: int, end: int, in_use: set[int]) -> bool:
        """Keep the expert if there is a free slot, or one whose expert counts less."""
        if len(self._slots) == self._n_slots:
            others = self._slots - in_use

            def worth(other: int) -> tuple[float, int]:
                return self._counts[other], -((other - end) % len(self._counts))

            victim = min(others, key=worth, default=None)
            if victim is None or self._counts[expert] <= self._counts[victim]:
                return False
            self._slots.remove(victim)
        self._slots.add(expert)
        in_use.add(expert)
        return True


def make_trace() -> list[list[int]]:
    """Return the experts of each token: some are those of the last one, low numbers come often."""
    rng = random.Random(3)
    trace: list[list[int]] = []
    for _ in range(N_TOKENS):
        token: list[int] = []
        first = 0
        for n_experts, n in zip(LAYER_EXPERTS, N_CHOSEN, strict=True):
            layer = range(first, first + n_experts)
            before = trace[-1] if trace else []
            chosen = {expert for expert in before if expert in layer and rng.random() < REPEATED}
            while len(chosen) < n:
                chosen.add(first + int(n_experts * rng.random() ** 2))
            token += sorted(chosen)
            first += n_experts
        trace.append(token)
    return trace


def replay() -> str:
    """Return tests/golden/expert-trace.txt: a token's experts, then its hits for each of SLOTS."""
    caches = [Cache(n_slots) for n_slots in SLOTS]
    rows = [[*token, *(cache.run_token(token) for cache in caches)] for token in make_trace()]
    return "".join(" ".join(map(str, row)) + "\n" for row in rows)
