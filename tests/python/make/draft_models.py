"""Models for guesses of the next tokens, and how one is opened so that it streams."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from make.recurrent_models import write_recurrent
from make.streamed_models import make_streamed_gpt2
from make.tiny_checkpoints import make_llama, make_mistral
from qsf.errors import QsfMemoryError
from qsf.native import binding
from qsf_converter import convert


def make_draft_models(folder: Path) -> dict[str, Path]:
    """Write LLaMA, Mistral with a window and a GPT-2 that can be streamed; experts are stored."""
    for name, make in (("llama", make_llama), ("mistral", make_mistral)):
        make(folder / name, seed=3)
        convert(folder / name, folder / f"{name}.qsf", quant_type="4bit")
    return {
        "llama": folder / "llama.qsf",
        "mistral": folder / "mistral.qsf",
        "streamed": make_streamed_gpt2(folder),
        "recurrent": write_recurrent(folder),
        "delta": write_recurrent(folder, case="qwen3_5-three"),
        "kda": write_recurrent(folder, case="kimi_linear"),
        "ssd": write_recurrent(folder, case="granitemoehybrid-moe"),
        "experts": Path(__file__).parents[2] / "golden" / "tiny-experts-4bit.qsf",
    }


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
