# SPDX-License-Identifier: Apache-2.0
"""The questions of qsf_bench.questions: the wanted answer is right, another one's is not."""

from __future__ import annotations

from qsf_bench.questions import N_OF_KIND, questions


def test_only_the_wanted_answer_is_right() -> None:
    asked = list(questions())
    assert asked == list(questions())
    assert len(asked) == 4 * N_OF_KIND
    for one, other in zip(asked, asked[4:], strict=False):  # of one kind
        assert one.kind == other.kind
        assert one.is_right(one.wanted)
        assert one.is_right(f"```\n{one.wanted}\n```")
        assert one.is_right(other.wanted) == (one.wanted == other.wanted)
        assert not one.is_right("{} or 1000.")
