"""Answers a question about a text file: the smallest useful program around a model.

Usage: python examples/answer.py MODEL.qsf FILE QUESTION
"""

from __future__ import annotations

import sys
from pathlib import Path

import qsf

_USAGE = "usage: python answer.py MODEL.qsf FILE QUESTION\n"


def main() -> int:
    """Stream the answer to the terminal, then say what it took."""
    if len(sys.argv) != 4:
        sys.stderr.write(_USAGE)
        return 2
    model_path, text_path, question = sys.argv[1:]
    messages = [
        {"role": "system", "content": "Answer from the text, in one or two sentences."},
        {"role": "user", "content": f"{Path(text_path).read_text('utf-8')}\n\n{question}"},
    ]
    try:
        with qsf.Model(model_path, ram_budget="auto") as model:
            for piece in model.chat(messages, max_tokens=80, temperature=0):
                sys.stdout.write(piece)
                sys.stdout.flush()
            stats = model.stats
    except (qsf.QsfError, OSError) as error:
        sys.stderr.write(f"answer: {error}\n")
        return 1
    if stats is not None:
        sys.stderr.write(f"\n{stats.prompt_tokens} tokens read, {stats.step_rate:.1f} tokens/s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
