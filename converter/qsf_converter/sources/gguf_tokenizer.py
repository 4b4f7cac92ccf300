"""Makes tokenizer.json and the section CHAT from the vocabulary of a GGUF file.

Four kinds are rebuilt: BPE, mostly on bytes (model "gpt2" in GGUF: words, merges and the name of a
splitting rule), SentencePiece's BPE (model "llama": words with scores, of which the merges follow;
"gemma4": with merges), its unigram model ("t5") and WordPiece ("bert", of which llama.cpp knows the
uncased form). Other kinds are left out with a warning.

Sources: src/llama-vocab.cpp of llama.cpp for names of rules and defaults (where that file says from
which expression of a published tokenizer.json its own is made, the published one stands here);
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
from qsf_converter.text.steps import GPT2, MARK
from qsf_converter.text.tables import open_tokenizer

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"\s+(?!\S)|\s+"
_TAIL = rf"\s*[\r\n]+|{_END}"
_FIRST = r"[^\r\n\p{L}\p{N}]?"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+"
_UPPERS = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWERS = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _words(letters: str = r"\p{L}+", numbers: str = r"\p{N}", *, tail: str = _TAIL) -> str:
    """Return an expression as that of cl100k: contractions, words, numbers, symbols, spaces."""
    return f"{_CONTRACTIONS}|{_FIRST}{letters}|{numbers}|{_SYMBOLS}[\\r\\n]*|{tail}"


def _cased(end: str, numbers: str = r"\p{N}{1,3}") -> str:
    """Return an expression as that of o200k, where a word ends before a capital letter."""
    return (
        rf"{_FIRST}[{_UPPERS}]*[{_LOWERS}]+{end}|{_FIRST}[{_UPPERS}]+[{_LOWERS}]*{end}|{numbers}"
        rf"|{_SYMBOLS}[\r\n/]*|{_TAIL}"
    )


# Letters that have cases, as the tokenizer of DeepSeek V2 lists them.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-"
    "\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-"
    "\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-"
    "\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc"
    "\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-"
    "\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-"
    "\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-"
    "\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-"
    "\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-"
    "\U000118df\U0001e900-\U0001e943"
)
_IDEOGRAPHS = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASIAN = (  # of Trinity
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e00-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    "\u1100-\u11ff]+"
)
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c"
    "\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
_CODE_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
_SENTENCES = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_BAILING = (
    rf"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*"
    rf"|\s*[\r\n]|{_END}"
)
_NO_HAN = r"&&[^\p{Han}]]"
_KIMI = _cased(f"{_CONTRACTIONS}?").replace("M}]", "M}" + _NO_HAN).replace(r"\r\n/", r"\r\n")
_JAIS2 = "|".join(
    rf"\s{{{n}}}(?!\S)" for n in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")
)
_JAIS2 += r"|\s{1}"

_NUMBER = r"\p{N}"
# The expressions, one after another, and the names of rules that are these.
_RULES: Final[Mapping[tuple[str, ...], str]] = {
    (GPT2,): "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert"
    " jina-v1-en jina-v2-code roberta-bpe exaone4 mpt olmo jais trillion granite-docling",
    (_NUMBER, GPT2): "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    (_words(numbers=r"\p{N}{1,3}"),): "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0"
    " lfm2 jina-v5-nano dbrx smaug-bpe glm4 glm5 chatglm-bpe",
    (_words(),): "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
    (_words(r"[\p{L}\p{M}]+").replace(r"^\s\p{L}\p{N}", r"^\s\p{L}\p{M}\p{N}"),): "qwen35",
    (_cased(f"{_CONTRACTIONS}?"),): "gpt-4o llama4 kanana2 talkie minimax-m2"
    " granite-embed-multi-97m",
    (r"\d{1,3}(?=(?:\d{3})*\b)", _cased(f"{_CONTRACTIONS}?")): "tiny_aya cohere2moe",
    (_cased("", _NUMBER),): "tekken",
    (_YOUTU, _cased(f"{_CONTRACTIONS}?", _NUMBER)): "youtu",
    (rf"\p{{Han}}+|{_KIMI}",): "kimi-k2",
    (r"\p{N}{1,3}", _CJK, rf"{_CODE_WORDS}[\r\n]*|{_TAIL}"): "deepseek-v3 hunyuan-dense hy_v4"
    " joyai-llm",
    (r"\p{N}{1,3}", _CJK, rf"{_CODE_WORDS}|[\r\n]|{_END}", _NUMBER): "spark2_5",
    (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _ASIAN, rf"{_CODE_WORDS}[\r\n]*|{_TAIL}"): "afmoe",
    (
        r"[\r\n]",
        rf"\s?[{_CASED_LETTERS}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _IDEOGRAPHS,
        r"\p{N}+",
    ): "deepseek-llm",
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, _NUMBER): "deepseek-coder",
    (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"): "falcon",
    (_SENTENCES,): "bloom poro-chat gpt3-finnish",
    (_SENTENCES, _NUMBER): "viking",
    (_BAILING,): "bailingmoe bailingmoe2 llada-moe",
    (_words().replace(r"}]+[\r\n]*", r"}\r\n]+"),): "seed-coder",
    (_words().removeprefix(f"{_CONTRACTIONS}|"),): "ufakzeka",
    (r"[^\n]+|[\n]+", _words()): "laguna",
    (
        rf"{_CONTRACTIONS}|{_FIRST}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        rf"|{_SYMBOLS}[\r\n/]?|\s*[\r\n]|{_END}",
    ): "exaone-moe",
    (_words(r"(?:\p{L}|\p{M}|\u200C|\u200D)+", r"\p{N}{1,3}"),): "k2-horizon",
    (_words(numbers=r"\p{N}{1,3}", tail=rf"\s*[\r\n]+|{_JAIS2}"),): "jais-2",
    (r"\p{N}{1,3}", _words(numbers=r"\p{N}+")): "minicpm5",
    (r"\p{N}+", r"(?=(\d{3})+(?!\d))"): "superbpe",
    (
        "<sentinel:[0-9]+>",
        "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        r"([\t\n]|    |  )",
        _NUMBER,
        r"[\p{P}!-/:-@\[-`{-~]",
        GPT2,
    ): "chameleon",
    (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"): "default",
    # Vocabularies of characters, not of bytes.
    (r"[^\n]+|[\n]+",): "gemma4 granite-embed-multi-311m sarvam-moe mmbert",
    (r"\S+",): "whitespace",
}  # fmt: skip
SPLITS: Final = {name: rule for rule, names in _RULES.items() for name in names.split()}

OF_CHARACTERS: Final = frozenset(("gemma4", "granite-embed-multi-311m", "sarvam-moe", "mmbert"))
_LIKE_LLAMA_3 = "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
# Rules whose texts begin with the token that begins a text, if the file says nothing of it.
ADD_BOS: Final = frozenset(f"{_LIKE_LLAMA_3} tekken chameleon gemma4".split())
# Rules whose pieces become a token if there is one, whatever the merges say.
IGNORE_MERGES: Final = frozenset(
    f"{_LIKE_LLAMA_3} minicpm5 youtu glm4 glm5 tekken granite-embed-multi-97m gpt-4o llama4"
    " kanana2 talkie".split()
)
# Rules of tokenizers that normalise texts.
NFC: Final = frozenset(["qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "qwen35"])


Metadata = Mapping[str, Any]

_MAX_WORD_CHARS = 256  # merges are searched at every position within a word
_WITH_RULE: Final = ("gpt2", "whitespace")  # values of tokenizer.ggml.model: BPE with a rule
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # of tokenizer.ggml.token_type; 1 is normal

_NO_RULE: Final = (
    "the file does not say how texts are split into words (tokenizer.ggml.pre is missing): the rule"
    " `default` of llama.cpp is assumed, which most models were not trained with; answers may be"
    " worse, use a newer GGUF file of the model"
)


class LeftOutError(Exception):
    """Raised if no tokenizer can be made; the text is the reason."""


def tokenizer_of(metadata: Metadata) -> tuple[bytes | None, str | None]:
    """Return tokenizer.json, or None; and what is to be said of it, or the reason."""
    try:
        data = json.dumps(json_of(metadata), ensure_ascii=False).encode("utf-8", "replace")
        # As the source will open it, so that a vocabulary is compiled once.
        bos_id = metadata.get("tokenizer.ggml.bos_token_id")
        add_bos = metadata.get("tokenizer.ggml.add_bos_token")
        open_tokenizer(
            data,
            bos_id=bos_id if isinstance(bos_id, int) else None,
            add_bos=add_bos if isinstance(add_bos, bool) else None,
        )
    except LeftOutError as error:
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


def json_of(metadata: Metadata) -> dict[str, Any]:
    """Return tokenizer.json; raises LeftOutError."""
    model = metadata.get("tokenizer.ggml.model")
    words = metadata.get("tokenizer.ggml.tokens")
    if model is None or not isinstance(words, list) or not words:
        raise LeftOutError("the file has no vocabulary")
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
        raise LeftOutError(f"tokenizer.ggml.model {str(model)[:40]!r} is not supported")
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
        raise LeftOutError("words of its vocabulary have the names of empty or double ones")
    return names


def _with_rule(
    metadata: Metadata, ids: Mapping[str, int], words: list[str], kinds: list[float]
) -> dict[str, Any]:
    """Return BPE: the file holds the merges and the name of the splitting rule."""
    rule = str(metadata.get("tokenizer.ggml.pre", "default"))
    if rule not in SPLITS:
        raise LeftOutError(
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
        raise LeftOutError("the file has no merges")
    pairs = [merge.split(" ") for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise LeftOutError("one of its merges is not of two words")
    return pairs


def _sentence_piece(
    metadata: Metadata, ids: Mapping[str, int], words: list[str], kinds: list[float]
) -> dict[str, Any]:
    """Return SentencePiece's BPE: two pieces merge if they make a word, the best score first."""
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if not isinstance(unknown, int) or not 0 <= unknown < len(words):
        raise LeftOutError(
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
        raise LeftOutError("tokenizer.ggml.precompiled_charsmap is no list of bytes")
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
        raise LeftOutError(f"the unknown token {str(unknown)[:40]} is not in the vocabulary")
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
            raise LeftOutError(f"word {idx} has {len(word)} characters")
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
        raise LeftOutError(f"tokenizer.ggml.{name} has no number for each of {n_words} words")
    numbers: list[float] = values.tolist()
    if not all(map(math.isfinite, numbers)):
        raise LeftOutError(f"tokenizer.ggml.{name} has values that are no numbers")
    return numbers
