"""The makers' settings for vectors of texts: pooling, and the end token."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qsf.errors import QsfConversionError, shown
from qsf.foreign_json import read_json
from qsf_converter.sources.families.config import MAX_TOKENS
from qsf_converter.sources.metadata import read_json_object
from qsf_converter.text.tables import TOKENIZER_MEMORY_BYTES

# sentence-transformers' names, before release 5 a flag for each, and llama.cpp's numbers.
_NAMES = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_MODES = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
_NUMBERS = {1: "mean", 2: "cls", 3: "last"}
_LEAST_TOKENS = 4  # what a model adds to a pair of texts


def of_folder(model_dir: Path, *, has_head: bool) -> dict[str, Any]:
    """Return the settings of a sentence-transformers folder; {}: it is no such model.

    An encoder (without a head) is one even without settings, for the mean.
    """
    pooling = read_json_object(model_dir / "1_Pooling" / "config.json") or {}
    modes = [mode for name, mode in _NAMES.items() if pooling.get("pooling_mode") == name]
    modes += [mode for name, mode in _MODES.items() if pooling.get(name) is True]
    if pooling and not modes and not has_head:
        raise QsfConversionError("1_Pooling: none of the modes lasttoken, mean_tokens, cls_token")
    if not modes and has_head:
        return {}
    mode = modes[0] if modes else "mean"
    tokenizer = read_json_object(model_dir / "tokenizer.json", TOKENIZER_MEMORY_BYTES) or {}
    return {"pooling": mode, **_special_tokens(tokenizer), **_most_tokens(model_dir)}


def of_gguf(fields: Mapping[str, Any], *, has_head: bool) -> dict[str, Any]:
    mode = _NUMBERS.get(fields.get(f"{fields.get('general.architecture')}.pooling_type", 0))
    if mode is None and has_head:
        return {}
    words = fields.get("tokenizer.ggml.tokens")
    is_bert = fields.get("tokenizer.ggml.model") == "bert"  # which always has [SEP]
    end = fields.get(f"tokenizer.ggml.{'seperator' if is_bert else 'eos'}_token_id")  # so spelled
    is_added = is_bert or fields.get("tokenizer.ggml.add_eos_token") is True
    is_known = isinstance(words, list) and isinstance(end, int) and 0 <= end < len(words)
    word = words[end] if is_added and is_known and words else None
    n_between = 1 if is_bert or fields.get("general.architecture") == "modern-bert" else 2
    return {
        "pooling": mode or "mean",
        "end_token": word,
        "pair_tokens": [] if word is None else [word] * n_between,
    }


def with_settings(chat: bytes, more: Mapping[str, Any]) -> bytes:
    facts = read_json(chat, has_nan=True)
    facts["embedding"] |= more
    return json.dumps(facts, ensure_ascii=False, allow_nan=False).encode()


def _special_tokens(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the post-processor of a tokenizer.json adds behind a text, and between two."""
    try:
        step = tokenizer["post_processor"]
        steps = step.get("processors", [step])
        for each in steps:
            if each["type"] in ("BertProcessing", "RobertaProcessing"):
                word = str(each["sep"][0])
                n = 1 if each["type"] == "BertProcessing" else 2
                return {"end_token": word, "pair_tokens": [word] * n}
        (template,) = [each for each in steps if each["type"] == "TemplateProcessing"]
        word = template["single"][-1]["SpecialToken"]["id"]
        pair = [next(iter(part.items())) for part in template.get("pair") or ()]
        texts = [i for i, (kind, _) in enumerate(pair) if kind == "Sequence"]
        between = [part["id"] for _, part in pair[texts[0] + 1 : texts[-1]]] if texts else []
    except (LookupError, TypeError, ValueError, AttributeError):
        return {"end_token": None}  # there is none, or the tokenizer's reader reports the error
    words = [each for each in between if isinstance(each, str)]
    return {"end_token": word if isinstance(word, str) else None, "pair_tokens": words}


def _most_tokens(model_dir: Path) -> dict[str, Any]:
    for path in sorted(model_dir.glob("sentence_*_config.json")):
        most = (read_json_object(path) or {}).get("max_seq_length")
        if isinstance(most, int) and most >= _LEAST_TOKENS:
            return {"max_tokens": most}
        if most is not None:
            raise QsfConversionError(
                f"{path.name}: max_seq_length = {shown(most)} is not a number of tokens from "
                f"{_LEAST_TOKENS} on"
            )
    most = (read_json_object(model_dir / "tokenizer_config.json") or {}).get("model_max_length")
    if isinstance(most, int | float) and _LEAST_TOKENS <= most <= MAX_TOKENS:
        return {"max_tokens": int(most)}
    return {}
