"""What the real models are asked, and texts that are hard to split."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

# Full precision (--exact) on f16 weights and llama.cpp answer the same on two small models: where
# the next token is almost a tie, llama.cpp's own rounding would decide.
QUESTIONS = (
    "What is the capital of France? Answer with one word.",
    "What is the capital of Japan? Answer with one word.",
    "What is the capital of Italy? Answer with one word.",
    "Which planet is known as the Red Planet?",
    "What is 2 + 3? Answer with the number only.",
    "What is 7 times 8? Answer with the number only.",
    "How many days are there in a week?",
    "How many hours are there in a day?",
    "What colour is the sky on a clear day?",
    "Who wrote Romeo and Juliet?",
    "Translate the word 'water' to French.",
    "What is the capital of Spain? Answer with one word.",
    "What is the opposite of 'hot'? Answer with one word.",
    "What is the plural of 'mouse'? Answer with one word.",
    "What is 10 - 4? Answer with the number only.",
    "What is the first month of the year?",
    "Write a Python expression that gives the length of the list x.",
    "Which Python keyword defines a function?",
    "Write an SQL query that selects all rows of the table users.",
    "Write a line of C that prints Hello.",
)
TURNS = (
    "My name is Ada and my dog is called Rex. Please remember that.",
    "What is my dog called?",
    "Write one sentence about it.",
)
CODE = "Write a Python function that returns the sum of the squares of a list of numbers."
# llama.cpp leaves out Qwen's normalisation (NFC), and reads "</s>" as a special token where it is
# none: texts with these have other ids there.
TEXTS = (
    *QUESTIONS,
    "",
    " ",
    "Grüße aus Köln, naïve café, \u4f60\u597d\u4e16\u754c, \u043f\u0440\u0438\u0432\u0435\u0442",
    "don't I'LL we've 12345 1,234.50  three   spaces\ttab\r\n\r\nlines\n\n\n end ",
    "\U0001f600\u200d\U0001f469 \u00e9 \ufb01 \u0e01\u0e33 \ud55c\uad6d\uc5b4",
    "def f(x):\n    return {'a': [1, 2]}  # comment\n\n\nclass A(B): pass\n",
    "<|im_start|>user\nhello<|im_end|>\n<s>[INST]",
)
