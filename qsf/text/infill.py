"""Text between a prefix and a suffix (fill in the middle), for models with the special tokens for
it.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import TYPE_CHECKING

from qsf.errors import QsfArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qsf.text.tokenizer import Tokenizer

# Tokens before prefix, suffix and middle. The first row whose tokens all exist is used.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen-Coder, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder, StableCode
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # Code Llama
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)  # DeepSeek-Coder
_REPO, _FILE = ("<|repo_name|>", "<reponame>"), ("<|file_sep|>", "<file_sep>")
# Further tokens with which models end a middle.
_ENDS = (*_REPO, *_FILE, "<|fim_pad|>", "<fim_pad>", "<|endoftext|>", "<EOT>", "\u2581<EOT>")


def infill_marks(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens before prefix, suffix and middle; []: the model has none."""
    for names in _MARKS:
        ids = [tokenizer.token_id(name) for name in names]
        if None not in ids:
            return [token for token in ids if token is not None]
    return []


def infill_end_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that end a middle, in addition to those that end a text."""
    ids = (tokenizer.token_id(name) for name in _ENDS)
    return frozenset(token for token in ids if token is not None)


def infill_tokens(
    tokenizer: Tokenizer,
    prefix: str,
    suffix: str,
    files: Sequence[tuple[str, str]] = (),
    max_tokens: int | None = None,
) -> list[int]:
    """Return the prompt of the text between a prefix and a suffix.

    Names of special tokens in the texts are ordinary text.

    Args:
        tokenizer: of the model.
        prefix, suffix: the texts before and after the middle.
        files: (name, text) of other files, for models trained with them.
        max_tokens: see ``Tokenizer.encode``.

    Raises:
        QsfArgumentError: the model has no such tokens, or a text is too long.
    """
    marks = infill_marks(tokenizer)
    if not marks:
        raise QsfArgumentError(
            "this model's tokenizer has no tokens for a text between two others (fill in the "
            "middle): take a code model such as Qwen2.5-Coder"
        )

    def text(part: str) -> list[int]:
        return tokenizer.encode(part, add_prefix=False, parse_special=False, max_tokens=max_tokens)

    tokens = [] if tokenizer.bos_id is None else tokenizer.encode("")
    repo, separator = (
        next((token for token in map(tokenizer.token_id, names) if token is not None), None)
        for names in (_REPO, _FILE)
    )
    if files and separator is not None:
        tokens += [] if repo is None else [repo, *text("project\n")]
        for name, content in files:
            tokens += [separator, *text(f"{name}\n{content}\n")]
        tokens += [separator, *text("file\n")]
    return [*tokens, marks[0], *text(prefix), marks[1], *text(suffix), marks[2]]
