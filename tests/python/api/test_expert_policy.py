"""The trace that tests/c/check_experts.c replays is what the model of the policy says."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from pathlib import Path

from oracle.expert_policy import Cache, make_trace, replay

ROOT = Path(__file__).resolve().parents[3]


def test_stored_trace_is_the_models() -> None:
    """tools/make_golden_files.py has written what the policy finds."""
    stored = (ROOT / "tests" / "golden" / "expert-trace.txt").read_text(encoding="ascii")
    assert stored == replay()


def test_what_is_used_most_stays() -> None:
    """Below one token's experts least recently used would find nothing; more slots find more."""
    hits = []
    for n_slots in range(15):
        cache = Cache(n_slots)
        hits.append(sum(cache.run_token(token) for token in make_trace()))
    assert hits[0] == 0
    assert hits[2] > sum(map(len, make_trace())) // 5
    assert hits == sorted(hits)
