"""The steps of a tokenizer.json as the engine's numbers.

Steps that the engine lacks are refused by name, so that a file always gives the same tokens as its
original tokenizer. Steps that change single characters, and SentencePiece's, are tables of what
characters become: a key is a text, or the first bytes of characters that all become the same.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import base64
import json
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from qsf_converter.text.characters import listed, named, others
from qsf_converter.text.expressions import (
    Choice,
    ExpressionError,
    Node,
    One,
    Repeat,
    is_empty,
    literal,
    parse,
    replaced,
)

# The first bytes of all characters for private use; some are of no characters, which stay.
_PRIVATE = (
    b"\xee",
    *(bytes([0xEF, byte]) for byte in range(0x80, 0xA4)),
    *(bytes([0xF3, byte]) for byte in range(0xB0, 0xC0)),
    *(bytes([0xF4, byte]) for byte in range(0x80, 0x90)),
)
_LONGEST = 255  # bytes of a text and of what it becomes
_NO_CHARACTERS = ("\U000ffffe", "\U000fffff", "\U0010fffe", "\U0010ffff")


def bert_map(*, is_clean: bool, is_bare: bool, is_lower: bool) -> dict[bytes, str]:
    """Return the table of a BertNormalizer, whose NFD, if it has one, comes before.

    Args:
        is_clean: control characters go, and spaces become the usual one.
        is_bare: combining marks go.
        is_lower: letters become small ones.
    """
    table: dict[bytes, str] = {}
    if is_clean:
        table = dict.fromkeys(_PRIVATE, "")
        table |= {char.encode(): char for char in _NO_CHARACTERS}
    for char in map(chr, (*range(0xD800), *range(0xF900, sys.maxunicode + 1))):
        kind = unicodedata.category(char)
        text = char.lower() if is_lower else char
        if is_bare and kind == "Mn":
            text = ""
        elif is_clean and (kind == "Zs" or char in "\t\n\r\u2028\u2029"):
            text = " "
        elif is_clean and (kind in ("Cc", "Cf") or char == "\ufffd"):
            text = ""
        if text != char and kind != "Co":
            table[char.encode()] = text
    return table


# What Nmt removes, and what it makes spaces.
_NMT_GONE = (*range(1, 9), 0xB, *range(0xE, 0x20), 0x7F, 0x8F, 0x9F)
_NMT_SPACES = (9, 0xA, 0xC, 0xD, 0x1680, *range(0x200B, 0x2010), 0x2028, 0x2029, 0x2581, 0xFEFF,
               0xFFFD)  # fmt: skip


def _char_map(kind: str) -> dict[bytes, str]:
    """Return the table of a normalizer Lowercase, StripAccents or Nmt."""
    if kind == "Nmt":
        points = {**dict.fromkeys(_NMT_GONE, ""), **dict.fromkeys(_NMT_SPACES, " ")}
        return {chr(point).encode(): text for point, text in points.items()}
    chars = map(chr, (*range(0xD800), *range(0xE000, sys.maxunicode + 1)))
    if kind == "Lowercase":
        return {char.encode(): char.lower() for char in chars if char.lower() != char}
    return {char.encode(): "" for char in chars if unicodedata.category(char)[0] == "M"}


def _mapped(table: Mapping[bytes, str], text: str) -> str:
    """Return a text with the longest key at each place replaced."""
    data, at, parts = text.encode(), 0, []
    longest = max(map(len, table), default=0)
    while at < len(data):
        sizes = range(min(longest, len(data) - at), 0, -1)
        size = next((size for size in sizes if data[at : at + size] in table), 0)
        end = at + (size or 1)
        while end < len(data) and data[end] & 0xC0 == 0x80:
            end += 1
        parts.append(table[data[at : at + size]] if size else data[at:end].decode())
        at = end
    return "".join(parts)


def _one_after_another(first: Step, second: Step) -> Step:
    """Return the table of two."""
    if any(len(key.decode("utf-8", "ignore")) > 1 for key in second.table):
        raise refuse("a table of texts behind one of characters")
    both = {key: _mapped(second.table, text) for key, text in first.table.items()}
    return Step(MAP, table={**second.table, **both})


def precompiled_map(charsmap: str) -> dict[bytes, str]:
    """Return the table of SentencePiece's rules, in base64: the bytes of a trie, the trie, texts.

    A unit of the trie (darts-clone) has a label, the distance to its children, and whether one of
    them, of label 0, is a leaf: its value is the place of a text, which a zero byte ends. Raises
    ValueError if it is no trie, or a text is longer than 255 bytes.
    """
    data = base64.b64decode(charsmap)
    n_bytes = int.from_bytes(data[:4], "little")
    units = np.frombuffer(data, "<u4", n_bytes // 4, 4).tolist()
    texts = data[4 + n_bytes :]
    table: dict[bytes, str] = {}
    todo = [(b"", _children(units[0]))]
    for _ in units:  # each has one way to it
        if not todo:
            return table
        key, at = todo.pop()
        if len(key) > _LONGEST:
            break
        for byte in range(256):
            unit = units[at ^ byte] if at ^ byte < len(units) else 0
            if unit & 0x800000FF != byte or (at ^ byte) == 0:
                continue
            if unit >> 8 & 1:
                place = units[(at ^ byte) ^ _children(unit)] & 0x7FFFFFFF
                end = texts.index(b"\0", place, place + _LONGEST + 1)
                table[key + bytes([byte])] = texts[place:end].decode()
            todo.append((key + bytes([byte]), (at ^ byte) ^ _children(unit)))
    raise ValueError("the table of characters is not a trie")


def _children(unit: int) -> int:
    return unit >> 10 << ((unit & 1 << 9) >> 6)


MARK: Final = "\u2581"  # SentencePiece's space

# Kinds of steps: csrc/text/vocabulary.h has the same.
NFC, NFKC, PREPEND, REPLACE, NFD, MAP, NFKD, REPLACE_MATCHES = range(1, 9)
PREFIX_SPACE, MARK_SPACES, MARK_ALL, MARK_FIRST, SPLIT_MARKS, CUT_MARKS = range(16, 22)
EXPRESSION: Final = 22
_FORMS: Final[Mapping[int, Literal["NFC", "NFKC", "NFD", "NFKD"]]] = {
    NFC: "NFC", NFKC: "NFKC", NFD: "NFD", NFKD: "NFKD"
}  # fmt: skip

BEHAVIORS: Final = ("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous")
INVERTED, ON_BYTES, LOOKS_BEHIND = 8, 16, 32  # flags of a step EXPRESSION, beside its behavior

MARKS, BYTE_TOKENS, FIRST_TOKEN = 8, 16, 32  # flags of decoding

# The expression of ByteLevel.
GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_DROPPING_SPACES: Final = ("BertPreTokenizer", "WhitespaceSplit", "Whitespace")
_MOST_STEPS: Final = 12  # of a pre-tokenizer; a file has room for 16 with those of the normaliser

# Characters that BertNormalizer puts spaces around.
_IDEOGRAPHS: Final = (
    (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0x2F800, 0x2FA1F),
)  # fmt: skip


class NotCoveredError(Exception):
    """A step of the tokenizer that the engine lacks."""


class Step(NamedTuple):
    """One step, with up to two strings, what texts become, or a tree whose matches it is about."""

    kind: int
    a: str = ""
    b: str = ""
    table: Mapping[bytes, str] = {}
    tree: Node | None = None
    flags: int = 0


def refuse(feature: str, value: object = None) -> NotCoveredError:
    text = "" if value is None else " " + json.dumps(value, ensure_ascii=False)[:200]
    return NotCoveredError(f"{feature}{text}")


def flatten(part: Mapping[str, Any] | None, name: str) -> Iterable[Mapping[str, Any]]:
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
    steps: list[Step] = []
    parts = list(flatten(normalizer, "normalizer"))
    for part in parts[:-1] if _is_on_bytes(parts) else parts:
        for step in _normalizing(part):
            if step.kind == MAP and steps and steps[-1].kind == MAP:
                steps[-1] = _one_after_another(steps[-1], step)
            else:
                steps.append(step)
    if sum(step.kind == MAP for step in steps) > 1:
        raise refuse("two normalizers with tables of characters")
    return steps


def _is_on_bytes(normalizers: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether normalising ends with ByteLevel, which splitting begins with then."""
    return bool(normalizers) and normalizers[-1].get("type") == "ByteLevel"


def _normalizing(part: Mapping[str, Any]) -> list[Step]:
    kind = part.get("type")
    if kind in _FORMS.values():
        return [Step(form) for form, name in _FORMS.items() if name == kind]
    if kind == "BertNormalizer":
        is_lower = bool(part.get("lowercase"))
        accents = part.get("strip_accents")
        is_bare = is_lower if accents is None else bool(accents)
        table = bert_map(is_clean=bool(part.get("clean_text")), is_bare=is_bare, is_lower=is_lower)
        return [*([Step(NFD)] if is_bare else []), Step(MAP, table=table)]
    if kind == "Precompiled":
        return [Step(MAP, table=precompiled_map(part["precompiled_charsmap"]))]
    if kind in ("Lowercase", "StripAccents", "Nmt"):
        return [Step(MAP, table=_char_map(kind))]
    if kind == "Prepend":
        return [Step(PREPEND, part["prepend"])] if part["prepend"] else []
    if kind == "Strip":
        ends = ((r"\A\s+", part.get("strip_left")), (r"\s+\z", part.get("strip_right")))
        wanted = [expression for expression, is_wanted in ends if is_wanted]
        return [Step(REPLACE_MATCHES, tree=parse("|".join(wanted)))] if wanted else []
    pattern = part.get("pattern") or {}
    if kind == "Replace" and pattern.get("String"):
        return [Step(REPLACE, pattern["String"], part["content"])]
    if kind == "Replace" and pattern.get("Regex"):
        try:
            tree = parse(pattern["Regex"])
        except ExpressionError as error:
            raise refuse(f"the normalizer's expression: {error}") from error
        if is_empty(tree):
            raise refuse("the normalizer's expression may match nothing:", pattern["Regex"])
        return [Step(REPLACE_MATCHES, b=part["content"], tree=tree)]
    raise refuse("the normalizer", dict(part))


def normalize(text: str, steps: Iterable[Step]) -> str:
    for step in steps:
        if step.kind in _FORMS:
            text = unicodedata.normalize(_FORMS[step.kind], text)
        elif step.kind == PREPEND:
            text = step.a + text if text else text
        elif step.kind == REPLACE:
            text = text.replace(step.a, step.b)
        elif step.tree is not None:
            text = replaced(step.tree, step.b, text)
        else:
            text = _mapped(step.table, text)
    return text


@dataclass
class Splitting:
    steps: list[Step] = field(default_factory=list)
    is_byte_level: bool = False


def splitting_of(
    pre_tokenizer: Mapping[str, Any] | None, normalizer: Mapping[str, Any] | None
) -> Splitting:
    """Return the steps of the pre-tokenizer, and what of the normaliser is done by splitting."""
    before = list(flatten(normalizer, "normalizer"))
    split = Splitting(is_byte_level=_is_on_bytes(before))
    if any(part.get("handle_chinese_chars", True) for part in before if _is_bert(part)):
        split.steps.append(_expression(One(listed(_IDEOGRAPHS))))
        parts = list(flatten(pre_tokenizer, "pre-tokenizer"))
        if not parts or parts[0].get("type") not in _DROPPING_SPACES:
            raise refuse("BertNormalizer in front of the pre-tokenizer", pre_tokenizer)
    for part in flatten(pre_tokenizer, "pre-tokenizer"):
        kind = part.get("type")
        if kind in ("ByteLevel", "Metaspace") and split.is_byte_level:
            raise refuse("a pre-tokenizer behind ByteLevel:", dict(part))
        if kind == "ByteLevel":
            split.steps += [Step(PREFIX_SPACE)] if part.get("add_prefix_space", True) else []
            split.steps += [_expression(parse(GPT2))] if part.get("use_regex", True) else []
            split.is_byte_level = True
        elif kind == "Metaspace":
            split.steps += _metaspace_steps(part, before)
        else:
            flags = ON_BYTES if split.is_byte_level else 0
            try:
                steps = _expression_steps(part)
            except ExpressionError as error:
                raise refuse(f"the pre-tokenizer's expression: {error}") from error
            split.steps += [step._replace(flags=step.flags | flags) for step in steps]
    n_transforms = sum(PREFIX_SPACE <= step.kind <= MARK_FIRST for step in split.steps)
    if n_transforms > 1:
        raise refuse("a pre-tokenizer that adds spaces twice:", pre_tokenizer)
    if len(split.steps) > _MOST_STEPS:
        raise refuse(f"a pre-tokenizer of {len(split.steps)} steps instead of {_MOST_STEPS}")
    return split


def _is_bert(normalizer: Mapping[str, Any]) -> bool:
    return normalizer.get("type") == "BertNormalizer"


def _expression(tree: Node, behavior: str = "Isolated", *, is_inverted: bool = False) -> Step:
    flags = BEHAVIORS.index(behavior) | (INVERTED if is_inverted else 0)
    return Step(EXPRESSION, tree=tree, flags=flags)


def _expression_steps(part: Mapping[str, Any]) -> list[Step]:
    """Return the steps of a pre-tokenizer that only splits."""
    kind = part.get("type")
    if kind == "Split":
        pattern, behavior = part.get("pattern") or {}, part.get("behavior")
        expression, text = pattern.get("Regex"), pattern.get("String")
        if behavior not in BEHAVIORS or not (isinstance(expression, str) or text):
            raise refuse("the pre-tokenizer", dict(part))
        tree = parse(expression) if isinstance(expression, str) else literal(str(text))
        return [_expression(tree, behavior, is_inverted=bool(part.get("invert")))]
    if kind == "Digits":
        behavior = "Isolated" if part.get("individual_digits") else "Contiguous"
        return [_expression(One(named("rust_numeric")), behavior)]
    if kind == "Punctuation" and part.get("behavior", "Isolated") in BEHAVIORS:
        return [_expression(One(named("rust_punctuation")), part.get("behavior", "Isolated"))]
    if kind == "WhitespaceSplit":
        return [_expression(One(named("space")), "Removed")]
    if kind == "BertPreTokenizer":
        return [
            _expression(One(named("space")), "Removed"),
            _expression(One(named("rust_punctuation"))),
        ]
    if kind == "Whitespace":
        word, space = named("rust_word"), named("space")
        runs = (Repeat(One(word), 1, None), Repeat(One(others(word | space)), 1, None))
        return [_expression(Choice(runs), "Removed", is_inverted=True)]
    if kind == "CharDelimiterSplit" and part.get("delimiter"):
        return [_expression(literal(part["delimiter"]), "Removed")]
    if kind == "FixedLength" and part.get("length", 5) > 0:
        return [_expression(Repeat(One(named("any")), 1, int(part.get("length", 5))))]
    raise refuse("the pre-tokenizer", dict(part))


def _scheme_of(metaspace: Mapping[str, Any]) -> Any:
    usual = "always" if metaspace.get("add_prefix_space", True) else "never"
    return metaspace.get("prepend_scheme", usual)


def _metaspace_steps(part: Mapping[str, Any], before: list[Mapping[str, Any]]) -> list[Step]:
    if part.get("replacement") != MARK:
        raise refuse("the pre-tokenizer", dict(part))
    scheme = _scheme_of(part)
    kinds = {"always": MARK_ALL, "first": MARK_FIRST, "never": MARK_SPACES}
    if scheme not in kinds or (scheme == "first" and not all(map(_keeps_beginning, before))):
        raise refuse("the pre-tokenizer", dict(part))
    marking = [Step(kinds[scheme])]
    return [*marking, Step(SPLIT_MARKS)] if part.get("split", True) else marking


def _keeps_beginning(normalizer: Mapping[str, Any]) -> bool:
    """Return whether a text begins where it began: behind a removed character comes no mark."""
    pattern = normalizer.get("pattern") or {}
    is_of_one = len(pattern.get("String", "")) == 1 and bool(normalizer["content"])
    return normalizer.get("type") in (*_FORMS.values(), "Lowercase") or is_of_one


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
        elif kind == "Metaspace" and "Fuse" not in kinds[:i] and part.get("replacement") == MARK:
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
