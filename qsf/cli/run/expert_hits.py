"""How many experts of a token are expected in memory."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from qsf.native.binding import MemoryPlan

# Hits in percent by slots in percent of all experts, from routing traces of Qwen3-30B-A3B replayed
# with the engine's eviction policy.
_TRACED: Final = (
    (0, 0), (1, 14), (2, 22), (4, 32), (6, 41), (8, 48), (10, 54), (15, 67), (20, 77), (30, 87),
    (40, 92), (100, 100),
)  # fmt: skip


def usual_hits(share: float) -> float:
    """Return the expected hit rate if ``share`` of all experts have slots."""
    percent = 100 * share
    for (x, y), (next_x, next_y) in pairwise(_TRACED):
        if percent <= next_x:
            return (y + (next_y - y) * (percent - x) / (next_x - x)) / 100
    return 1.0


def slots_with_twice(plan: MemoryPlan) -> int:
    """Return the number of experts with a slot in twice the memory, after all other units."""
    more_bytes = max(0, max(plan.budget_bytes, plan.taken_bytes) - plan.streamed_bytes)
    return min(plan.n_experts, plan.expert_slots + more_bytes // plan.expert_slot_bytes)


def hit_lines(plan: MemoryPlan) -> list[str]:
    """Return the expected hit rates with these slots and with twice the memory; [] if all fit."""
    if plan.expert_slots >= plan.n_experts:
        return []

    def text(n_slots: int) -> str:
        share = n_slots / plan.n_experts
        return f"{100 * share:.0f} to {100 * usual_hits(share):.0f} %"

    return [
        f"experts of a token that should be in memory: {text(plan.expert_slots)}, with twice the"
        f" memory {text(slots_with_twice(plan))} (all chosen alike; as in traces of trained models)"
    ]
