"""How published tokenizers split texts: the pre_tokenizer of their tokenizer.json, by model.

Written by us; only these settings, no words. Which model has which rule is what llama.cpp's
convert_hf_to_gguf_update.py says (https://github.com/ggml-org/llama.cpp), the expressions are those
that its src/llama-vocab.cpp quotes; CLIP, T5, Llama 2 and the like are as transformers'
convert_slow_tokenizer.py makes them (https://github.com/huggingface/transformers).
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import Any

Settings = dict[str, Any]

_C = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_T = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = rf"{_C}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_T}"
_QWEN2 = _CL100K.replace("{1,3}", "")
_U, _L = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(end: str, numbers: str, lines: str = r"[\r\n/]*") -> str:
    first = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{first}{_U}*{_L}+{end}|{first}{_U}+{_L}*{end}|{numbers}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+{lines}|{_T}"
    )


_O200K = _cased(f"{_C}?", r"\p{N}{1,3}")
_KIMI = r"[\p{Han}]+|" + _cased(f"{_C}?", r"\p{N}{1,3}", r"[\r\n]*").replace(
    r"\p{M}]", r"\p{M}&&[^\p{Han}]]"
)
_CODE = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_T}"
)


def split(expression: str, behavior: str = "Isolated", *, invert: bool = False) -> Settings:
    """Return a pre-tokenizer Split."""
    pattern = {"Regex": expression}
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}


def text_split(text: str, behavior: str, *, invert: bool = False) -> Settings:
    """Return a pre-tokenizer Split by a text."""
    return {**split("", behavior, invert=invert), "pattern": {"String": text}}


def byte_level(*, space: bool = False, regex: bool = False) -> Settings:
    """Return a pre-tokenizer ByteLevel."""
    return {
        "type": "ByteLevel", "add_prefix_space": space, "trim_offsets": True, "use_regex": regex
    }  # fmt: skip


def sequence(*parts: Settings) -> Settings:
    """Return a Sequence."""
    return {"type": "Sequence", "pretokenizers": list(parts)}


def digits(*, single: bool) -> Settings:
    """Return a pre-tokenizer Digits."""
    return {"type": "Digits", "individual_digits": single}


def metaspace(scheme: str, *, is_split: bool = True) -> Settings:
    """Return a pre-tokenizer Metaspace."""
    return {
        "type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": is_split
    }  # fmt: skip


def bytes_of(*expressions: str) -> Settings:
    """Return expressions one after another, then ByteLevel without its own."""
    return sequence(*map(split, expressions), byte_level())


_BYTE = byte_level(regex=True)
_WORDS = {"type": "Whitespace"}
_SPACES = {"type": "WhitespaceSplit"}
_BERT = {"type": "BertPreTokenizer"}
_ASIAN = "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uac00-\ud7af]+"

SETTINGS: dict[str, Settings] = {
    # ByteLevel alone, or after digits
    **dict.fromkeys(
        ["openai-community/gpt2", "microsoft/phi-2", "mosaicml/mpt-7b", "allenai/OLMo-1.7-7B-hf",
        "core42/jais-13b", "jinaai/jina-reranker-v1-tiny-en", "jinaai/jina-embeddings-v2-base-es",
        "jinaai/jina-embeddings-v2-base-de", "jinaai/jina-embeddings-v2-base-code",
        "sentence-transformers/stsb-roberta-base", "ai-sage/GigaChat-20B-A3B-instruct",
        "trillionlabs/Trillion-7B-preview", "skt/A.X-4.0", "LGAI-EXAONE/EXAONE-4.0-32B",
        "JetBrains/Mellum-4b-base", "answerdotai/ModernBERT-base",
        "ibm-granite/granite-docling-258M", "evilfreelancer/ruGPT3XL"], _BYTE
    ),
    "roberta with a space": byte_level(space=True, regex=True),
    **dict.fromkeys(
        ["bigcode/starcoder2-3b", "smallcloudai/Refact-1_6-base",
        "CohereForAI/c4ai-command-r-v01", "HuggingFaceTB/SmolLM-135M", "WisdomShell/CodeShell-7B",
        "LGAI-EXAONE/EXAONE-3.0-7.8B-Instruct", "sapienzanlp/Minerva-7B-base-v1.0",
        "JetBrains/Mellum2-12B-A2.5B-Base"],
        sequence(digits(single=True), _BYTE),
    ),
    # as cl100k
    **dict.fromkeys(
        ["meta-llama/Meta-Llama-3-8B", "tiiuae/Falcon3-7B-Base", "tiiuae/Falcon-H1-0.5B-Base",
        "mistral-community/pixtral-12b", "K-intelligence/Midm-2.0-Base-Instruct",
        "LiquidAI/LFM2.5-350M", "jinaai/jina-embeddings-v5-text-nano", "databricks/dbrx-base",
        "abacusai/Smaug-Llama-3-70B-Instruct", "THUDM/glm-4-9b-chat", "THUDM/glm-4-9b-hf",
        "zai-org/GLM-4.5-Air", "zai-org/GLM-4.7-Flash"], bytes_of(_CL100K)
    ),
    **dict.fromkeys(
        ["Qwen/Qwen1.5-7B", "Qwen/Qwen3-Embedding-0.6B",
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "KORMo-Team/KORMo-tokenizer",
        "codefuse-ai/F2LLM-v2-4B", "Infinigence/Megrez-3B-Instruct",
        "stabilityai/stablelm-2-zephyr-1_6b", "tencent/Hunyuan-A13B-Instruct",
        "upstage/Solar-Open-100B", "alvarobartt/grok-2-tokenizer"], bytes_of(_QWEN2)
    ),
    "Qwen/Qwen3.5-9B-Instruct": bytes_of(
        rf"{_C}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_T}"
    ),
    "ByteDance-Seed/Seed-Coder-8B-Base": bytes_of(
        rf"{_C}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_T}"
    ),
    **dict.fromkeys(
        ["inclusionAI/Ling-lite", "inclusionAI/Ling-mini-base-2.0"],
        bytes_of(
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
            r"|\s*[\r\n]|\s+(?!\S)|\s+"
        ),
    ),
    "the same, Removed": sequence(
        split(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+", "Removed", invert=True
        ),
        byte_level(),
    ),
    "openai/tiktoken cl100k_base": bytes_of(
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
    ),
    "inceptionai/Jais-2-8B-Chat": bytes_of(
        _CL100K.removesuffix(r"|\s+(?!\S)|\s+")
        + "".join(rf"|\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))
        + r"|\s{1,2}(?!\S)|\s{1}"
    ),
    "LGAI-EXAONE/K-EXAONE-236B-A23B": bytes_of(
        rf"{_C}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    ),
    "openbmb/MiniCPM5-1B": bytes_of(r"\p{N}{1,3}", _CL100K.replace("{1,3}", "+")),
    "poolside/Laguna-XS.2": bytes_of(r"[^\n]+|[\n]+", _QWEN2),
    # as o200k
    **dict.fromkeys(
        ["Xenova/gpt-4o", "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        "kakaocorp/kanana-2-30b-a3b-instruct-2601", "lewtun/talkie-1930-13b-it-hf",
        "MiniMaxAI/MiniMax-M2"],
        bytes_of(_O200K),
    ),
    **dict.fromkeys(
        ["mistralai/Mistral-Nemo-Base-2407"],
        bytes_of(_cased("", r"\p{N}")),
    ),
    "CohereLabs/tiny-aya-base": bytes_of(r"\d{1,3}(?=(?:\d{3})*\b)", _O200K),
    "moonshotai/Kimi-K2-Base": bytes_of(_KIMI),
    "tencent/Youtu-LLM-2B": bytes_of(
        "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c"
        "\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        _cased(f"{_C}?", r"\p{N}"),
    ),
    # DeepSeek's
    **dict.fromkeys(
        ["deepseek-ai/DeepSeek-V3", "jdopensource/JoyAI-LLM-Flash", "tencent/Hunyuan-4B-Instruct",
        "tencent/Hy4-preview"],
        bytes_of(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _CODE),
    ),
    "deepseek-ai/deepseek-coder-6.7b-base": sequence(
        split(r"[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"),
        split("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"), digits(single=True), byte_level(),
    ),
    "deepseek-ai/deepseek-llm-7b-base": sequence(
        split(r"[\r\n]"), split("\\s?[A-Za-z\u00b5\u00c0-\u00d6\u0370-\u0373\u0400-\u0481]+"),
        split("\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"), split(r"\s+$"),
        split("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"), digits(single=True), byte_level(),
    ),
    "arcee-ai/Trinity-Tokenizer": bytes_of(r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _ASIAN, _CODE),
    "UW/OLMo2-8B-SuperBPE-t180k": bytes_of(r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    # of their own
    "tiiuae/falcon-7b": sequence(
        {"type": "Punctuation", "behavior": "Contiguous"}, _BYTE, digits(single=False),
        split("[0-9][0-9][0-9]"),
    ),
    **dict.fromkeys(
        ("bigscience/bloom", "LumiOpen/Poro-34B-chat", "TurkuNLP/gpt3-finnish-small"),
        bytes_of(" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"),
    ),
    "LumiOpen/Viking-7B": sequence(
        split(" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"), digits(single=True),
        byte_level(),
    ),
    "facebook/chameleon-7b": sequence(
        split(r"<sentinel:[0-9]+>"), split(r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z"),
        split(r"([\t\n]|    |  )"), digits(single=True),
        {"type": "Punctuation", "behavior": "Isolated"}, _BYTE,
    ),
    "google/gemma-3-1b-it": sequence(text_split(" ", "MergedWithPrevious"), byte_level()),
    "spaces, then bytes": sequence(_SPACES, byte_level()),
    # not on bytes
    "google-bert/bert-base-uncased": _BERT,
    "BAAI/bge-small-en-v1.5": _BERT,
    "jinaai/jina-embeddings-v2-base-zh": _WORDS,
    "FacebookAI/xlm-roberta-base": sequence(_SPACES, metaspace("always")),
    "google-t5/t5-small": metaspace("always"),
    "meta-llama/Llama-2-7b-hf": metaspace("first", is_split=False),
    "mistralai/Mistral-7B-v0.3": metaspace("first", is_split=False),
    "01-ai/Yi-6B": metaspace("never"),
    "openai/clip-vit-base-patch32": sequence(
        split(
            r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]"
            r"|[^\s\p{L}\p{N}]+", "Removed", invert=True
        ),
        byte_level(),
    ),
}  # fmt: skip
Normalizers = dict[str, Settings | None]


def _normalizers(*parts: Settings) -> Settings:
    return {"type": "Sequence", "normalizers": list(parts)}


def _replace(pattern: str, content: str, kind: str = "Regex") -> Settings:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def _plain(kind: str, **more: Any) -> Settings:
    return {"type": kind, **more}


_RIGHT = _plain("Strip", strip_left=False, strip_right=True)
# The normalizer of tokenizer.json, by model or by who makes it (convert_slow_tokenizer.py).
NORMALIZERS: Normalizers = {
    "BAAI/bge-m3, of SentencePiece since transformers 4.30": _normalizers(
        _plain("Nmt"), _plain("NFKC"), _RIGHT, _replace(" {2,}", "\u2581")
    ),
    "FacebookAI/xlm-roberta-base, trained by the library": _normalizers(
        _plain("Nmt"), _plain("NFKC"), _replace(" {2,}", " ")
    ),
    "albert/albert-base-v2": _normalizers(
        _replace("``", '"', "String"), _replace("''", '"', "String"), _plain("NFKD"),
        _plain("StripAccents"), _plain("Lowercase"), _replace(" {2,}", " "),
    ),
    "openai/clip-vit-base-patch32": _normalizers(
        _plain("NFC"), _replace(r"\s+", " "), _plain("Lowercase")
    ),
    "deepseek-ai/DeepSeek-V3": _normalizers(),
    "Qwen/Qwen3-8B": _plain("NFC"),
    "as google-bert's, in parts": _normalizers(
        _plain("NFD"), _plain("Lowercase"), _plain("StripAccents")
    ),
    "line ends of one kind": _replace(r"\r\n?", "\n"),
    "stripped": _plain("Strip", strip_left=True, strip_right=True),
    "capitals apart": _replace(r"(?<=a)[A-Z]+(?!\S)", "#"),
}  # fmt: skip
# Settings that no model above has, of the library's other pre-tokenizers.
OTHERS: dict[str, Settings] = {
    "delimiter": sequence({"type": "CharDelimiterSplit", "delimiter": "-"}, byte_level()),
    "length": sequence({"type": "FixedLength", "length": 3}, byte_level()),
    "text": sequence(text_split("ab", "MergedWithNext", invert=True), byte_level()),
    "words": sequence(_WORDS, byte_level(space=True)),
    **{
        f"punctuation {behavior}": sequence(
            {"type": "Punctuation", "behavior": behavior}, byte_level(space=True, regex=True)
        )
        for behavior in (
            "Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"
        )
    },
    "behind bytes": sequence(_BYTE, digits(single=False), split(r"\p{L}+|.", "MergedWithNext")),
}  # fmt: skip
