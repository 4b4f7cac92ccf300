"""The splitting rules that GGUF files name in tokenizer.ggml.pre.

Source: src/llama-vocab.cpp of llama.cpp (names, defaults). Where that file says from which
expression of a published tokenizer.json its own is made, the published one stands here.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from qsf_converter.text.steps import GPT2

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

OF_CHARACTERS: Final = frozenset(["gemma4", "granite-embed-multi-311m", "sarvam-moe", "mmbert"])
LIKE_LLAMA_3: Final = frozenset(
    [
        "llama3",
        "llama-v3",
        "llama-bpe",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "midm-2.0",
        "lfm2",
        "jina-v5-nano",
    ]
)
# Rules whose texts begin with the token that begins a text, if the file says nothing of it.
ADD_BOS: Final = LIKE_LLAMA_3 | {"tekken", "chameleon", "gemma4"}
# Rules whose pieces become a token if there is one, whatever the merges say.
IGNORE_MERGES: Final = LIKE_LLAMA_3 | frozenset(
    [
        "minicpm5",
        "youtu",
        "glm4",
        "glm5",
        "tekken",
        "granite-embed-multi-97m",
        "gpt-4o",
        "llama4",
        "kanana2",
        "talkie",
    ]
)
# Rules of tokenizers that normalise texts.
NFC: Final = frozenset(["qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "qwen35"])
