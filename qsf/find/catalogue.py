"""Short names of popular models: repository, licence, sizes."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Suggested:
    """A model that works here. MB are 2^20 bytes, of 4 bits a weight.

    The figures are those of the memory plan for a file of the model's shape, with 20 MB for its
    tokenizer.

    Attributes:
        name: what a user types.
        repo: ``org/name`` on the hub, which asks for no consent.
        licence: its SPDX name, if it has one.
        good_for: its use in a few words.
        download_mb: the checkpoint, of 16 bits a weight.
        file_mb: the .qsf file.
        memory_mb: the process with all weights in memory and 4096 tokens of context.
        least_mb: the least budget, with weights read for each token.
    """

    name: str
    repo: str
    licence: str
    good_for: str
    download_mb: int
    file_mb: int
    memory_mb: int
    least_mb: int


SUGGESTED: Final = (
    Suggested("smollm2:135m", "HuggingFaceTB/SmolLM2-135M-Instruct", "Apache-2.0",
              "trying QSF out", 257, 85, 210, 71),
    Suggested("smollm2:360m", "HuggingFaceTB/SmolLM2-360M-Instruct", "Apache-2.0",
              "short answers", 690, 216, 381, 73),
    Suggested("qwen2.5-coder:0.5b", "Qwen/Qwen2.5-Coder-0.5B-Instruct", "Apache-2.0",
              "code", 942, 326, 448, 72),
    Suggested("qwen3:0.6b", "Qwen/Qwen3-0.6B", "Apache-2.0",
              "chat, thinks", 1137, 390, 717, 84),
    Suggested("gemma3:1b", "unsloth/gemma-3-1b-it", "Gemma Terms of Use",
              "chat, many languages", 1907, 672, 803, 76),
    Suggested("llama3.2:1b", "unsloth/Llama-3.2-1B-Instruct", "Llama 3.2 Community License",
              "chat", 2357, 781, 956, 74),
    Suggested("qwen2.5-coder:1.5b", "Qwen/Qwen2.5-Coder-1.5B-Instruct", "Apache-2.0",
              "code", 2945, 933, 1102, 74),
    Suggested("qwen3:1.7b", "Qwen/Qwen3-1.7B", "Apache-2.0",
              "chat, thinks", 3281, 1063, 1401, 85),
    Suggested("smollm3:3b", "HuggingFaceTB/SmolLM3-3B", "Apache-2.0",
              "chat, thinks", 5865, 1768, 2033, 79),
    Suggested("llama3.2:3b", "unsloth/Llama-3.2-3B-Instruct", "Llama 3.2 Community License",
              "chat", 6128, 1900, 2247, 84),
    Suggested("qwen3:4b", "Qwen/Qwen3-4B", "Apache-2.0",
              "chat, thinks", 7671, 2333, 2752, 89),
    Suggested("qwen2.5-coder:7b", "Qwen/Qwen2.5-Coder-7B-Instruct", "Apache-2.0",
              "code", 14526, 4574, 4837, 78),
    Suggested("qwen3:8b", "Qwen/Qwen3-8B", "Apache-2.0",
              "chat, thinks", 15623, 4951, 5382, 89),
)  # fmt: skip
"""By size. Only families that `qsf convert --families` lists."""

_MAX_CHARS = 200


def suggested(name: str) -> Suggested | None:
    """Return the model with that short name, in any case of letters."""
    return next((model for model in SUGGESTED if model.name == name.lower()), None)


def likely_name(name: str) -> str | None:
    """Return a short name similar to ``name``: the smallest model of that family, else a similar
    spelling.
    """
    from difflib import get_close_matches

    if len(name) > _MAX_CHARS:  # a search of similar names would take its memory many times
        return None
    names = [model.name for model in SUGGESTED]
    same = [each for each in names if each.split(":")[0] == name.lower().split(":")[0]]
    return next(iter(same or get_close_matches(name.lower(), names, 1)), None)
