"""Folders of encoders with a tokenizer."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from pathlib import Path
from string import ascii_lowercase

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors


def with_tokenizer(folder: Path, n_between: int = 1) -> Path:
    """Write BERT's tokenizer with words of single letters; ``n_between`` ends of a text are
    between two.
    """
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *ascii_lowercase, *(f"##{letter}" for letter in ascii_lowercase)]
    ids = {word: i for i, word in enumerate(words)}
    made = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", f"[CLS] $A {'[SEP] ' * n_between}$B:1 [SEP]:1", special_tokens=ends
    )
    made.add_special_tokens(special)
    made.save(str(folder / "tokenizer.json"))
    return folder
