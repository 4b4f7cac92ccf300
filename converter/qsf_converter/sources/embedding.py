"""The makers' settings for vectors of texts: pooling, and the end token."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qsf.errors import QsfConversionError
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
    return {"pooling": mode, "end_token": _end_token(tokenizer)}


def of_gguf(fields: Mapping[str, Any], *, has_head: bool) -> dict[str, Any]:
    """Return the settings of a GGUF file, as ``of_folder``."""
    mode = _NUMBERS.get(fields.get(f"{fields.get('general.architecture')}.pooling_type", 0))
    if mode is None and has_head:
        return {}
    words = fields.get("tokenizer.ggml.tokens")
    is_bert = fields.get("tokenizer.ggml.model") == "bert"  # which always has [SEP]
    end = fields.get(f"tokenizer.ggml.{'seperator' if is_bert else 'eos'}_token_id")  # so spelled
    is_added = is_bert or fields.get("tokenizer.ggml.add_eos_token") is True
    is_known = isinstance(words, list) and isinstance(end, int) and 0 <= end < len(words)
    mode = mode or "mean"
    return {"pooling": mode, "end_token": words[end] if is_added and is_known and words else None}


def _end_token(tokenizer: Mapping[str, Any]) -> str | None:
    """Return the token that the post-processor of a tokenizer.json appends to a text."""
    try:
        step = tokenizer["post_processor"]
        steps = step.get("processors", [step])
        for each in steps:
            if each["type"] in ("BertProcessing", "RobertaProcessing"):
                return str(each["sep"][0])
        (template,) = [each["single"] for each in steps if each["type"] == "TemplateProcessing"]
        word = template[-1]["SpecialToken"]["id"]
    except (LookupError, TypeError, ValueError, AttributeError):
        return None  # there is none, or the tokenizer's reader reports the error
    return word if isinstance(word, str) else None
