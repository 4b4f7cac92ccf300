"""What the real models are asked, and texts that are hard to split."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from make.refusals import table

# Full precision (--exact) on f16 weights and llama.cpp answer the same on two small models: where
# the next token is almost a tie, llama.cpp's own rounding would decide.
QUESTIONS = table("tables")["questions"]
TURNS = (
    "My name is Ada and my dog is called Rex. Please remember that.",
    "What is my dog called?",
    "Write one sentence about it.",
)
CODE = "Write a Python function that returns the sum of the squares of a list of numbers."
# llama.cpp leaves out Qwen's normalisation (NFC), and reads "</s>" as a special token where it is
# none: texts with these have other ids there.
TEXTS = (*table("tables")["real texts"], *QUESTIONS)
