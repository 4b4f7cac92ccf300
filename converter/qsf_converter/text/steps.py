"""The steps of a tokenizer.json as the engine's numbers.

Steps that the engine lacks are refused by name, so that a file always gives the same tokens as its
original tokenizer.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from qsf_converter.text.maps import bert_map, precompiled_map

MARK: Final = "\u2581"  # SentencePiece's space

# Kinds of steps: csrc/text/vocabulary.h has the same.
NFC, NFKC, PREPEND, REPLACE, NFD, MAP = range(1, 7)
PREFIX_SPACE, MARK_SPACES, MARK_ALL, MARK_FIRST, SPLIT_MARKS, CUT_MARKS = range(16, 22)
DIGITS, DIGIT, GPT2, BERT, SPACES = 22, 23, 24, 45, 46

MARKS, BYTE_TOKENS, FIRST_TOKEN = 8, 16, 32  # flags of decoding

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWERS = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_FIRST = r"[^\r\n\p{L}\p{N}]?"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASED = (
    rf"{_FIRST}{_UPPERS}*{_LOWERS}+{{end}}|{_FIRST}{_UPPERS}+{_LOWERS}*{{end}}"
    rf"|{{numbers}}|{_SYMBOLS}[\r\n/]*|{_TAIL}"
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
# What splits a text before BPE in DeepSeek V2, but for numbers, and in its coders.
DEEPSEEK_LLM: Final = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _IDEOGRAPHS,
)
DEEPSEEK_CODER: Final = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, r"\p{N}")

DEEPSEEK_V3: Final = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}",
)
OF_GGUF: Final = (  # where a GGUF file names no rule
    r"[\p{P}\$\+<=>\^~\|]+",
    _GPT2.removesuffix(r"|\s+"),
    r"\p{N}+",
    "[0-9][0-9][0-9]",
)
LLAMA3: Final = rf"{_CONTRACTIONS}|{_FIRST}\p{{L}}+|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n]*|{_TAIL}"
QWEN2: Final = rf"{_CONTRACTIONS}|{_FIRST}\p{{L}}+|\p{{N}}|{_SYMBOLS}[\r\n]*|{_TAIL}"
QWEN35: Final = (
    rf"{_CONTRACTIONS}|{_FIRST}[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}"
)
GPT4O: Final = _CASED.replace("{end}", f"{_CONTRACTIONS}?").replace("{numbers}", r"\p{N}{1,3}")
TEKKEN: Final = _CASED.replace("{end}", "").replace("{numbers}", r"\p{N}")

# Expressions whose matches cover every text without gaps.
_COVERING: Final[Mapping[str, int]] = {
    _GPT2: GPT2, LLAMA3: 25, QWEN2: 26, QWEN35: 27, GPT4O: 28, TEKKEN: 37
}  # fmt: skip
EXPRESSIONS: Final[Mapping[str, int]] = {
    **_COVERING,
    **{expression: 29 + i for i, expression in enumerate(DEEPSEEK_V3)},
    r"\p{N}": 32,
    **dict(zip(OF_GGUF, (35, 34, 36, 33), strict=True)),
    **{expression: 38 + i for i, expression in enumerate(DEEPSEEK_LLM)},
    r"\s?\p{L}+": 43,
    r"\s?\p{P}+": 44,
}


class NotCoveredError(Exception):
    """A step of the tokenizer that the engine lacks."""


class Step(NamedTuple):
    """One step, with up to two strings, or what texts become."""

    kind: int
    a: str = ""
    b: str = ""
    table: Mapping[bytes, str] = {}


def refuse(feature: str, value: object = None) -> NotCoveredError:
    """Return the error that names an unsupported step."""
    text = "" if value is None else " " + json.dumps(value, ensure_ascii=False)[:200]
    return NotCoveredError(f"{feature}{text}")


def flatten(part: Mapping[str, Any] | None, name: str) -> Iterable[Mapping[str, Any]]:
    """Return the parts of nested sequences, in order."""
    if part is None:
        return
    if not isinstance(part, dict):
        raise refuse(f"the {name}", part)
    if part.get("type") != "Sequence":
        yield part
        return
    for inner in part.get("normalizers", part.get("pretokenizers", part.get("decoders"))) or ():
        yield from flatten(inner, name)


def normalizing_steps(normalizer: Mapping[str, Any] | None) -> list[Step]:
    """Return the steps of the normaliser."""
    steps = []
    for part in flatten(normalizer, "normalizer"):
        kind = part.get("type")
        pattern = part.get("pattern") or {}
        if kind in ("NFC", "NFKC"):
            steps.append(Step(NFC if kind == "NFC" else NFKC))
        elif kind == "BertNormalizer" and part.get("handle_chinese_chars"):
            is_lower = bool(part.get("lowercase"))
            accents = part.get("strip_accents")
            is_bare = is_lower if accents is None else bool(accents)
            steps += [Step(NFD)] if is_bare else []
            table = bert_map(
                is_clean=bool(part.get("clean_text")), is_bare=is_bare, is_lower=is_lower
            )
            steps.append(Step(MAP, table=table))
        elif kind == "Precompiled":
            steps.append(Step(MAP, table=precompiled_map(part["precompiled_charsmap"])))
        elif kind == "Prepend" and part["prepend"]:
            steps.append(Step(PREPEND, part["prepend"]))
        elif kind == "Replace" and pattern.get("String"):
            steps.append(Step(REPLACE, pattern["String"], part["content"]))
        else:
            raise refuse("the normalizer", dict(part))
    if sum(step.kind == MAP for step in steps) > 1:
        raise refuse("two normalizers with tables of characters")
    return steps


def normalize(text: str, steps: Iterable[Step]) -> str:
    """Return ``text`` after the steps; for the names of added tokens."""
    for step in steps:
        if step.kind in (NFC, NFKC):
            text = unicodedata.normalize("NFC" if step.kind == NFC else "NFKC", text)
        elif step.kind == PREPEND:
            text = step.a + text if text else text
        elif step.kind == REPLACE:
            text = text.replace(step.a, step.b)
        elif step.kind == NFD:
            text = unicodedata.normalize("NFD", text)
        elif step.kind == MAP:
            text = "".join(step.table.get(char.encode(), char) for char in text)
    return text


@dataclass
class Splitting:
    """How texts are split before the model sees them."""

    steps: list[Step] = field(default_factory=list)
    is_byte_level: bool = False


def splitting_of(pre_tokenizer: Mapping[str, Any] | None, before: list[Step]) -> Splitting:
    """Return the steps of the pre-tokenizer; ``before`` are those of the normaliser."""
    split = Splitting()
    for part in flatten(pre_tokenizer, "pre-tokenizer"):
        if split.is_byte_level:
            raise refuse("a pre-tokenizer behind ByteLevel:", dict(part))
        kind = part.get("type")
        if kind == "ByteLevel":
            split.is_byte_level = True
            split.steps += [Step(PREFIX_SPACE)] if part.get("add_prefix_space", True) else []
            split.steps += [Step(GPT2)] if part.get("use_regex", True) else []
        elif kind == "Split":
            split.steps += _split_steps(part, before)
        elif kind == "Digits":
            split.steps.append(Step(DIGIT if part.get("individual_digits") else DIGITS))
        elif kind == "Metaspace":
            split.steps += _metaspace_steps(part, before)
        elif kind == "BertPreTokenizer":
            split.steps.append(Step(BERT))
        elif kind == "WhitespaceSplit":
            split.steps.append(Step(SPACES))
        else:
            raise refuse("the pre-tokenizer", dict(part))
    n_transforms = sum(PREFIX_SPACE <= step.kind <= MARK_FIRST for step in split.steps)
    if n_transforms > 1:
        raise refuse("a pre-tokenizer that adds spaces twice:", pre_tokenizer)
    return split


def _split_steps(part: Mapping[str, Any], before: list[Step]) -> list[Step]:
    pattern = part.get("pattern") or {}
    behavior, invert = part.get("behavior"), part.get("invert", False)
    expression = pattern.get("Regex")
    if not isinstance(expression, str):
        expression = ""
    if expression in EXPRESSIONS and behavior == "Isolated" and not invert:
        return [Step(EXPRESSIONS[expression])]
    if expression in _COVERING and behavior == "Removed" and invert:
        return [Step(EXPRESSIONS[expression])]
    text = pattern.get("String")
    if text and any(s.kind == REPLACE and s.a == text and text not in s.b for s in before[-1:]):
        return []  # the normaliser leaves nothing to split
    raise refuse("the pre-tokenizer", dict(part))


def _scheme_of(metaspace: Mapping[str, Any]) -> Any:
    usual = "always" if metaspace.get("add_prefix_space", True) else "never"
    return metaspace.get("prepend_scheme", usual)


def _metaspace_steps(part: Mapping[str, Any], before: list[Step]) -> list[Step]:
    if part.get("replacement") != MARK:
        raise refuse("the pre-tokenizer", dict(part))
    scheme = _scheme_of(part)
    kinds = {"always": MARK_ALL, "first": MARK_FIRST, "never": MARK_SPACES}
    if scheme not in kinds or (scheme == "first" and any(s.kind > NFKC for s in before)):
        raise refuse("the pre-tokenizer", dict(part))
    marking = [Step(kinds[scheme])]
    return [*marking, Step(SPLIT_MARKS)] if part.get("split", True) else marking


def decoding_of(decoder: Mapping[str, Any] | None, *, is_byte_level: bool) -> tuple[int, int]:
    """Return the flags of decoding and how many spaces a text loses at its beginning."""
    parts = list(flatten(decoder, "decoder"))
    kinds = [part.get("type") for part in parts]
    if is_byte_level:
        if kinds != ["ByteLevel"]:
            raise refuse("a byte-level vocabulary with the decoder", decoder)
        return 0, 0
    flags = n_leading = 0
    for i, part in enumerate(parts):
        kind = kinds[i]
        if kind == "Replace" and (part["pattern"].get("String"), part["content"]) == (MARK, " "):
            flags |= MARKS
        elif kind == "WordPiece":
            n_leading = 1
        elif kind == "ByteFallback":
            flags |= BYTE_TOKENS
        elif kind == "Metaspace" and len(parts) == 1 and part.get("replacement") == MARK:
            flags |= MARKS | (FIRST_TOKEN if _scheme_of(part) != "never" else 0)
        elif (
            kind == "Strip"
            and part["content"] == " "
            and part["stop"] == 0
            and 0 <= part["start"] <= 16
            and "Fuse" in kinds[:i]
            and i == len(parts) - 1
        ):
            n_leading = part["start"]
        elif kind != "Fuse":
            raise refuse("the decoder", dict(part))
    if not parts:
        raise refuse("a vocabulary without a decoder")
    return flags, n_leading


def prefix_of(
    post_processor: Mapping[str, Any] | None, bos_id: int | None, add_bos: bool | None
) -> list[int]:
    """Return the ids that begin every text, as ``qsf.text.tokenizer.Tokenizer`` does."""
    prefix: list[int] = []
    parts = [post_processor] if post_processor else []
    if post_processor and post_processor.get("type") == "Sequence":
        parts = list(post_processor["processors"])
    for part in parts:
        kind = part.get("type")
        if kind == "TemplateProcessing":
            prefix = [*_template_prefix(part), *prefix]
        elif kind in ("RobertaProcessing", "BertProcessing"):
            prefix = [int(part["cls"][1]), *prefix]
        elif kind != "ByteLevel":
            raise refuse("the post-processor", part)
    has_bos = bos_id is not None and prefix[:1] == [bos_id]
    if add_bos and bos_id is not None and not has_bos:
        return [bos_id, *prefix]
    return prefix[1:] if add_bos is False and has_bos else prefix


def _template_prefix(template: Mapping[str, Any]) -> list[int]:
    ids: list[int] = []
    for item in template["single"]:
        if "Sequence" in item:
            return ids
        ids += template["special_tokens"][item["SpecialToken"]["id"]]["ids"]
    raise refuse("the post-processor", dict(template))
