"""Makes tokenizer.json and the section CHAT from the vocabulary of a GGUF file.

Four kinds are rebuilt: BPE, mostly on bytes (model "gpt2" in GGUF: words, merges and the name of a
splitting rule, of which gguf_splits.py knows all), SentencePiece's BPE (model "llama": words with
scores, of which the merges follow; "gemma4": with merges), its unigram model ("t5") and WordPiece
("bert", of which llama.cpp knows the uncased form). Other kinds are left out with a warning.

Sources: src/llama-vocab.cpp of llama.cpp for defaults;
convert_slow_tokenizer.py of transformers for merges from scores.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from qsf.errors import QsfError
from qsf_converter.sources.gguf_splits import ADD_BOS, IGNORE_MERGES, NFC, OF_CHARACTERS, SPLITS
from qsf_converter.text.steps import MARK
from qsf_converter.text.tables import open_tokenizer

Metadata = Mapping[str, Any]

_MAX_WORD_CHARS = 256  # merges are searched at every position within a word
_WITH_RULE: Final = ("gpt2", "whitespace")  # values of tokenizer.ggml.model: BPE with a rule
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # of tokenizer.ggml.token_type; 1 is normal

_NO_RULE: Final = (
    "the file does not say how texts are split into words (tokenizer.ggml.pre is missing): the rule"
    " `default` of llama.cpp is assumed, which most models were not trained with; answers may be"
    " worse, use a newer GGUF file of the model"
)


class _LeftOutError(Exception):
    """Raised if no tokenizer can be made; the text is the reason."""


def tokenizer_of(metadata: Metadata) -> tuple[bytes | None, str | None]:
    """Return tokenizer.json, or None; and what is to be said of it, or the reason."""
    try:
        data = json.dumps(_tokenizer(metadata), ensure_ascii=False).encode("utf-8", "replace")
        # As the source will open it, so that a vocabulary is compiled once.
        bos_id = metadata.get("tokenizer.ggml.bos_token_id")
        add_bos = metadata.get("tokenizer.ggml.add_bos_token")
        open_tokenizer(
            data,
            bos_id=bos_id if isinstance(bos_id, int) else None,
            add_bos=add_bos if isinstance(add_bos, bool) else None,
        )
    except _LeftOutError as error:
        return None, f"the tokenizer is left out: {error}"
    except QsfError as error:
        return None, f"the tokenizer is left out: {str(error)[:300]}"
    is_split = metadata["tokenizer.ggml.model"] in _WITH_RULE
    return data, None if "tokenizer.ggml.pre" in metadata or not is_split else _NO_RULE


def chat_of(metadata: Metadata, token_ids: Mapping[str, Any]) -> bytes:
    """Return the CHAT section: template, special tokens, token ids; see ``metadata.chat_bytes``."""
    template = metadata.get("tokenizer.chat_template")
    chat: dict[str, Any] = {"chat_template": template if isinstance(template, str) else None}
    prefix = "tokenizer.chat_template."
    named = {
        key.removeprefix(prefix): value
        for key, value in metadata.items()
        if key.startswith(prefix) and isinstance(value, str)
    }
    if named:
        if chat["chat_template"] is not None:
            named.setdefault("default", chat["chat_template"])
        chat["chat_template"] = named.get("default")
        chat["chat_templates"] = named
    words = metadata.get("tokenizer.ggml.tokens")
    tokens: dict[str, Any] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        idx = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(words, list) and isinstance(idx, int) and 0 <= idx < len(words):
            tokens[f"{name}_token"] = words[idx]
    for name in ("add_bos_token", "add_eos_token"):
        value = metadata.get(f"tokenizer.ggml.{name}")
        if isinstance(value, bool):
            tokens[name] = value
    chat["special_tokens"] = tokens
    chat["generation"] = dict(token_ids)
    return json.dumps(chat, ensure_ascii=False).encode("utf-8", "replace")


def _tokenizer(metadata: Metadata) -> dict[str, Any]:
    model = metadata.get("tokenizer.ggml.model")
    words = metadata.get("tokenizer.ggml.tokens")
    if model is None or not isinstance(words, list) or not words:
        raise _LeftOutError("the file has no vocabulary")
    words = _distinct(words)
    ids = {word: idx for idx, word in enumerate(words)}
    kinds = _numbers(metadata, "token_type", len(words), default=1)
    if model in _WITH_RULE:
        parts = _with_rule(metadata, ids, words, kinds)
    elif model in ("llama", "gemma4"):
        parts = _sentence_piece(metadata, ids, words, kinds)
    elif model == "t5":
        parts = _unigram(metadata, words)
    elif model == "bert":
        parts = _wordpiece(metadata, words, kinds)
    else:
        raise _LeftOutError(f"tokenizer.ggml.model {str(model)[:40]!r} is not supported")
    return {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding")),
        "added_tokens": [
            _added(idx, words[idx], kinds[idx] != _USER_DEFINED)
            for idx in range(len(words))
            if kinds[idx] in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ],
        **parts,
        "post_processor": _prefix(metadata, words, model),
    }


def _added(idx: int, word: str, is_special: bool) -> dict[str, Any]:
    return {
        "id": idx,
        "content": word,
        **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        "special": is_special,
    }


def _distinct(words: list[str]) -> list[str]:
    """Return the words with names for empty ones, as llama.cpp names them, and for older doubles.

    Of equal words llama.cpp encodes texts with the last one.
    """
    last = {word: idx for idx, word in enumerate(words)}
    names = [
        f"[EMPTY_{idx}]" if not word else word if last[word] == idx else f"[DOUBLE_{idx}]"
        for idx, word in enumerate(words)
    ]
    if len(set(names)) != len(names):
        raise _LeftOutError("words of its vocabulary have the names of empty or double ones")
    return names


def _with_rule(
    metadata: Metadata, ids: Mapping[str, int], words: list[str], kinds: list[float]
) -> dict[str, Any]:
    """Return BPE: the file holds the merges and the name of the splitting rule."""
    rule = str(metadata.get("tokenizer.ggml.pre", "default"))
    if rule not in SPLITS:
        raise _LeftOutError(
            f"tokenizer.ggml.pre {rule[:40]!r} is none of the {len(SPLITS)} rules"
            " that llama.cpp knows"
        )
    if rule in OF_CHARACTERS:
        parts = _sentence_piece(metadata, ids, words, kinds)
        marks = {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "always"}
        return {**parts, "pre_tokenizer": marks} if rule == "mmbert" else parts
    pairs = _pairs(metadata)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    byte_level |= {"use_regex": False}
    splits = [
        {"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated", "invert": False}
        for one in SPLITS[rule]
    ]
    if rule == "whitespace":
        return {
            "normalizer": None,
            "pre_tokenizer": splits[0],
            "decoder": {"type": "Fuse"},
            "model": _bpe(ids, pairs),
        }
    return {
        "normalizer": {"type": "NFC"} if rule in NFC else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "decoder": {**byte_level, "add_prefix_space": True, "use_regex": True},
        "model": _bpe(ids, pairs, ignore_merges=rule in IGNORE_MERGES),
    }


def _bpe(ids: Mapping[str, int], pairs: list[list[str]], **more: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix")),
        "end_of_word_suffix": None,
        **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
        "vocab": dict(ids),
        "merges": pairs,
        **more,
    }


def _pairs(metadata: Metadata) -> list[list[str]]:
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise _LeftOutError("the file has no merges")
    pairs = [merge.split(" ") for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise _LeftOutError("one of its merges is not of two words")
    return pairs


def _sentence_piece(
    metadata: Metadata, ids: Mapping[str, int], words: list[str], kinds: list[float]
) -> dict[str, Any]:
    """Return SentencePiece's BPE: two pieces merge if they make a word, the best score first."""
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if not isinstance(unknown, int) or not 0 <= unknown < len(words):
        raise _LeftOutError(
            f"tokenizer.ggml.unknown_token_id {str(unknown)[:40]} is not in the vocabulary"
        )
    is_scored = metadata["tokenizer.ggml.model"] == "llama"
    pairs = _scored(metadata, ids, words, kinds) if is_scored else _pairs(metadata)
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True) is not False
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
    prepend = [{"type": "Prepend", "prepend": MARK}] if has_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": MARK}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": _bpe(ids, pairs, unk_token=words[unknown], fuse_unk=True, byte_fallback=True),
    }


def _unigram(metadata: Metadata, words: list[str]) -> dict[str, Any]:
    """Return SentencePiece's unigram model: the tokens with the largest sum of scores."""
    scores = _numbers(metadata, "scores", len(words))
    charsmap = np.asarray(metadata.get("tokenizer.ggml.precompiled_charsmap", ()))
    if charsmap.size and (charsmap.ndim != 1 or charsmap.dtype.kind not in "iu"):
        raise _LeftOutError("tokenizer.ggml.precompiled_charsmap is no list of bytes")
    data = charsmap.astype(np.uint8).tobytes()
    normalizer = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}
    metaspace = {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "always"}
    return {
        "normalizer": normalizer if data else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "WhitespaceSplit"}, {**metaspace, "split": True}],
        },
        "decoder": metaspace,
        "model": {
            "type": "Unigram",
            "unk_id": metadata.get("tokenizer.ggml.unknown_token_id", 2),
            "vocab": [[word, score] for word, score in zip(words, scores, strict=True)],
            "byte_fallback": False,
        },
    }


def _wordpiece(metadata: Metadata, words: list[str], kinds: list[float]) -> dict[str, Any]:
    """Return WordPiece: in GGUF a word begins with a mark, in tokenizer.json others with ##."""
    vocab = {
        word if kinds[i] in (_UNKNOWN, _CONTROL) else _piece(word): i
        for i, word in enumerate(words)
    }
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 100)
    if not isinstance(unknown, int) or not 0 <= unknown < len(words):
        raise _LeftOutError(f"the unknown token {str(unknown)[:40]} is not in the vocabulary")
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": words[unknown],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocab,
        },
    }


def _piece(word: str) -> str:
    return word[1:] if word.startswith(MARK) else f"##{word}"


def _scored(
    metadata: Metadata, ids: Mapping[str, int], words: list[str], kinds: list[float]
) -> list[list[str]]:
    """Return the merges implied by the scores of words."""
    scores = _numbers(metadata, "scores", len(words))
    merges: list[tuple[float, int, int]] = []
    for idx, word in enumerate(words):
        if kinds[idx] in (_UNKNOWN, _CONTROL, _BYTE):
            continue
        if len(word) > _MAX_WORD_CHARS:
            raise _LeftOutError(f"word {idx} has {len(word)} characters")
        for at in range(1, len(word)):
            left, right = ids.get(word[:at]), ids.get(word[at:])
            if left is not None and right is not None:
                merges.append((-scores[idx], left, right))
    # If two merges make the same word, the first in the vocabulary wins, as in transformers.
    merges.sort()
    return [[words[left], words[right]] for _, left, right in merges]


def _prefix(metadata: Metadata, words: list[str], model: str) -> dict[str, Any] | None:
    """Return the rule that puts BOS before a text, or None; with llama.cpp's defaults."""
    is_usual = model not in _WITH_RULE or metadata.get("tokenizer.ggml.pre") in ADD_BOS
    is_wanted = metadata.get("tokenizer.ggml.add_bos_token", is_usual)
    bos = metadata.get("tokenizer.ggml.bos_token_id", 1 if model == "llama" else None)
    if model == "bert":  # always, and under this name in older files
        is_wanted, bos = True, metadata.get("tokenizer.ggml.cls_token_id", bos)
    if is_wanted is not True or not isinstance(bos, int) or not 0 <= bos < len(words):
        return None
    word = words[bos]
    first = {"SpecialToken": {"id": word, "type_id": 0}}
    text = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    return {
        "type": "TemplateProcessing",
        "single": [first, text[0]],
        "pair": [first, *text],
        "special_tokens": {word: {"id": word, "ids": [bos], "tokens": [word]}},
    }


def _numbers(
    metadata: Metadata, name: str, n_words: int, default: int | None = None
) -> list[float]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if values is None and default is not None:
        return [default] * n_words
    if not isinstance(values, np.ndarray) or len(values) != n_words:
        raise _LeftOutError(f"tokenizer.ggml.{name} has no number for each of {n_words} words")
    numbers: list[float] = values.tolist()
    if not all(map(math.isfinite, numbers)):
        raise _LeftOutError(f"tokenizer.ggml.{name} has values that are no numbers")
    return numbers
