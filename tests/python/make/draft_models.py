"""How a model with room for guesses of the next tokens is opened so that it streams."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from qsf.errors import QsfMemoryError
from qsf.native import binding


def open_streamed(
    path: Path, draft_rows: int, *, least_chunk_tokens: int = 1, **options: Any
) -> binding.NativeModel:
    """Open in the least memory that has room for the drafts, and for chunks of so many tokens."""
    asked: dict[str, Any] = {"draft_rows": draft_rows, **options}
    for more_bytes in range(1 << 18, 1 << 24, 1 << 18):
        # What the process holds, and so the least budget, may grow meanwhile.
        least = binding.plan_model(path, binding.Options(budget_bytes=1 << 20, **asked))
        budget_bytes = least.min_budget_bytes + more_bytes
        with contextlib.suppress(QsfMemoryError):
            model = binding.NativeModel(path, binding.Options(budget_bytes=budget_bytes, **asked))
            plan = model.info().plan
            has_room = plan.draft_rows == draft_rows and plan.chunk_tokens >= least_chunk_tokens
            if has_room and plan.streamed_bytes:
                return model
            model.close()
    raise AssertionError("no budget streams layers and has room for drafts")
