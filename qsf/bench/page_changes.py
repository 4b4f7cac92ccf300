"""A comparison in the words of the page."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from qsf.bench import table
from qsf.bench.compare import Comparison
from qsf.bench.page import Change


def changes_of(comparison: Comparison | None) -> tuple[list[Change], list[str]]:
    """Return the changes, without parts of a token that are the same, and what must be known."""
    if comparison is None:
        return [], []
    changes = []
    for change in comparison.changes:
        if not table.is_worth_a_line(change):
            continue
        what, before, now = table.change_words(change)
        words = f"{100 * change.change:+.1f} %"
        if change.corrected != change.change:
            words += f", {100 * change.corrected:+.1f} % without the machine's drift"
        changes.append(
            Change(
                label=f"{change.row}: {what}",
                old=before,
                new=now,
                change=words,
                verdict=table.verdict_text(change),
            )
        )
    notes = table.comparison_notes(comparison)
    if any(change.verdict.endswith("?") for change in changes):
        notes.append("a question mark: beyond its noise, but among so many figures that is chance")
    return changes, notes
