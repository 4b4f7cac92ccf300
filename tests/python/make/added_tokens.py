"""A small model whose tokenizer has some tokens more than the bundled one."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from make.golden import MODELS
from make.tiny_checkpoints import make_llama

N_WORDS = 2048  # of the bundled tokenizer


def make_with_tokens(
    folder: Path,
    words: Sequence[str],
    *,
    is_special: bool,
    max_tokens: int = 256,
    template: str | None = None,
) -> Path:
    """Return a checkpoint in ``folder`` whose last tokens, from N_WORDS on, are ``words``."""
    checkpoint = make_llama(
        folder / "hf", seed=1, n_vocab=N_WORDS + len(words), max_tokens=max_tokens,
        tokenizer_from=MODELS["tiny-llama"],
    )  # fmt: skip
    path = checkpoint / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    plain = {**tokenizer["added_tokens"][0], "special": is_special}
    tokenizer["added_tokens"] += [
        {**plain, "id": N_WORDS + i, "content": word} for i, word in enumerate(words)
    ]
    path.write_text(json.dumps(tokenizer), "utf-8")
    if template is not None:
        path = checkpoint / "tokenizer_config.json"
        config = json.loads(path.read_text("utf-8"))
        path.write_text(json.dumps({**config, "chat_template": template}), "utf-8")
    return checkpoint
