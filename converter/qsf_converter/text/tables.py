"""The section TEXT from the bytes of a tokenizer.json: docs/format.md, section 9."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import codecs
import functools
import itertools
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from qsf.errors import QsfUnsupportedError
from qsf.foreign_json import read_json
from qsf.text.tokenizer import Tokenizer, byte_of_char
from qsf_converter.text.characters import EDGE
from qsf_converter.text.expressions import ExpressionError, classes_of, compile_tree, sets_of
from qsf_converter.text.steps import (
    CUT_MARKS,
    LOOKS_BEHIND,
    MAP,
    MARK,
    NotCoveredError,
    Step,
    decoding_of,
    normalize,
    normalizing_steps,
    prefix_of,
    refuse,
    splitting_of,
)

# Most memory of a parsed tokenizer.json: one of 262,000 tokens and 580,000 merges takes 400 MB.
TOKENIZER_MEMORY_BYTES: Final = 768 << 20

_VERSION: Final = 2
_NONE: Final = 0xFFFFFFFF
_HEADER_BYTES: Final = 128
_BPE_BYTES, _BPE_CHARS, _UNIGRAM, _WORDPIECE = 0, 1, 2, 3
_IGNORE_MERGES, _FUSE_UNK, _BYTE_FALLBACK = 1, 2, 4
_PRESENT, _SPECIAL = 1, 2
_LSTRIP, _RSTRIP, _SINGLE_WORD, _NORMALIZED, _IS_SPECIAL = 1, 2, 4, 8, 16
_MAX_PROBES: Final = 255
_MAX_STRING_BYTES: Final = 512
_MAX_IDS: Final = 1 << 24
_CLASS_BLOCK: Final = 128  # characters of a block of the table of classes
_MAX_FILL: Final = 0.6  # share of a table's slots: more make searches long, fewer take memory
_UNK_PENALTY: Final = 10.0  # below the worst score, as in SentencePiece

U32 = NDArray[np.uint32]


def text_section(
    tokenizer_json: bytes, *, bos_id: int | None, add_bos: bool | None
) -> tuple[bytes | None, str | None]:
    """Return the section, or None and the reason why the engine cannot use the tokenizer.

    Args:
        tokenizer_json: the bytes of a ``tokenizer.json``.
        bos_id: the token that begins a text, if the model has one.
        add_bos: whether it is added; None: as the tokenizer does.
    """
    try:
        return _compile(
            read_json(
                tokenizer_json, memory_bytes=TOKENIZER_MEMORY_BYTES, parse_float=library_float
            ),
            bos_id,
            add_bos,
        ), None
    except NotCoveredError as error:
        return None, str(error)
    except (ArithmeticError, ValueError, LookupError, TypeError, AttributeError) as error:
        return None, f"a tokenizer.json of an unknown form ({error!r})"


def library_float(text: str) -> float:
    """Return the number that the `tokenizers` library reads, up to an ulp from the nearest one.

    It reads the digits as an integer of 64 bits, as far as they fit, and then divides by a power
    of ten. Scores of two segmentations may differ by less than that error.
    """
    mantissa, _, exponent_text = text.lower().partition("e")
    whole, _, decimals = mantissa.lstrip("+-").partition(".")
    exponent = int(exponent_text or 0)
    significand = 0
    for i, digit in enumerate(whole + decimals):
        if significand * 10 + int(digit) >= 1 << 64:
            exponent += max(0, len(whole) - i)
            break
        significand = significand * 10 + int(digit)
        exponent -= i >= len(whole)
    value = float(significand)
    while exponent < -308 and value:
        value, exponent = value / 1e308, exponent + 308
    power = float(f"1e{min(abs(exponent), 308)}")
    value = value * power if exponent >= 0 else value / power
    return -value if mantissa.startswith("-") else value


@dataclass
class _Vocabulary:
    """The model part of tokenizer.json, before the tables are made."""

    model: int
    flags: int
    ids: dict[str, int]
    unk_id: int
    merges: U32  # [n, 3]: left, right, result, by rank
    scores: list[float]


def _compile(data: Mapping[str, Any], bos_id: int | None, add_bos: bool | None) -> bytes:
    normalizing = normalizing_steps(data.get("normalizer"))
    splitting = splitting_of(data.get("pre_tokenizer"), data.get("normalizer"))
    words = _vocabulary_of(data["model"], is_byte_level=splitting.is_byte_level)
    decoding, n_leading = decoding_of(data.get("decoder"), is_byte_level=splitting.is_byte_level)
    added = _added_tokens(data.get("added_tokens") or [], words.ids)
    steps = [*normalizing, *splitting.steps, *_cut_steps(words, splitting.steps)]
    prefix = prefix_of(data.get("post_processor"), bos_id, add_bos)

    n_names, kinds, texts, keys = _texts_of(words, added)
    n_ids = len(texts)

    pool = _Pool()
    added_rows, n_raw = _added_rows(added, normalizing, pool)
    step_rows = [(s.kind, *pool.place(s.a), *pool.place(s.b)) for s in steps]
    slots, probes = _slots_of(_hash_texts(list(keys)), np.array(list(keys.values()), np.uint32))
    ranks = np.arange(len(words.merges), dtype=np.uint32)
    merge_slots, merge_probes = _slots_of(_hash_pairs(words.merges), ranks)
    offsets = np.concatenate([[0], np.cumsum([len(text) for text in texts])])
    nodes = _tree(keys) if words.model == _UNIGRAM else np.zeros((0, 3), np.uint32)
    mapped = {
        key: pool.place(text)[0] << 8 | len(text.encode())
        for step in steps
        if step.kind == MAP
        for key, text in step.table.items()
    }
    map_nodes = _tree(mapped) if mapped else np.zeros((0, 3), np.uint32)
    class_tables, n_classes = _split_tables(steps)
    unk_score = min(words.scores) - _UNK_PENALTY if words.scores else 0.0
    units = [keys.get(bytes([byte]), _NONE) for byte in range(256)]
    tokens_of_bytes = [words.ids.get(f"<0x{byte:02X}>", _NONE) for byte in range(256)]
    arrays: list[NDArray[Any]] = [
        offsets.astype("<u4"),
        kinds,
        np.frombuffer(b"".join(texts), np.uint8),
        slots,
        np.array(units, "<u4"),
        np.array(tokens_of_bytes, "<u4"),
        words.merges,
        merge_slots,
        np.array(added_rows, "<u4"),
        np.array(prefix, "<u4"),
        np.array(step_rows, "<u4"),
        np.frombuffer(bytes(pool.data), np.uint8),
        np.array([*words.scores, *[0.0] * (n_ids - len(words.scores))], "<f8")
        if words.model == _UNIGRAM
        else np.zeros(0),
        nodes,
        map_nodes,
        *class_tables,
    ]
    header = struct.pack(
        "<18Id4I",
        *(_VERSION, words.model, words.flags | decoding, n_leading, n_ids, n_names),
        *(words.unk_id, int(offsets[-1]), len(slots), len(words.merges), len(merge_slots)),
        *(len(added_rows), n_raw, len(prefix), len(step_rows), len(pool.data), len(nodes)),
        *(max(probes, merge_probes), unk_score, len(map_nodes)),
        *(n_classes, len(class_tables[1]), len(class_tables[4])),
    )
    return header.ljust(_HEADER_BYTES, b"\0") + b"".join(map(_padded, arrays))


def _split_tables(steps: Sequence[Step]) -> tuple[list[NDArray[Any]], int]:
    splits = [(step.tree, step.flags) for step in steps if step.tree is not None]
    if not splits:
        empty = np.zeros(0, np.uint8)
        return [empty, empty, empty, empty, empty], 0
    try:
        classes = classes_of(chars for tree, _ in splits for chars in sets_of(tree))
        automata = [(compile_tree(tree, classes), flags) for tree, flags in splits]
    except ExpressionError as error:
        raise refuse(f"the pre-tokenizer's expressions: {error}") from error
    blocks: dict[bytes, int] = {}
    index = [
        blocks.setdefault(block.tobytes(), len(blocks))
        for block in classes[:EDGE].reshape(-1, _CLASS_BLOCK)
    ]
    of_bytes = np.zeros(256, np.uint8)
    for char, byte in byte_of_char().items():
        of_bytes[byte] = classes[ord(char)]
    rows = [
        (
            flags | (LOOKS_BEHIND if a.looks_behind else 0),
            len(a.forward),
            len(a.backward),
            a.n_aheads,
        )
        for a, flags in automata
    ]
    entries = [table.reshape(-1) for a, _ in automata for table in (a.forward, a.backward)]
    tables: list[NDArray[Any]] = [
        np.array(index, "<u2"),
        np.frombuffer(b"".join(blocks), np.uint8).reshape(-1, _CLASS_BLOCK),
        of_bytes,
        np.array(rows, "<u4"),
        np.concatenate(entries).astype("<u2"),
    ]
    return tables, int(classes[EDGE]) + 1


def _texts_of(
    words: _Vocabulary, added: Sequence[Mapping[str, Any]]
) -> tuple[int, NDArray[np.uint8], list[bytes], dict[bytes, int]]:
    names: dict[int, str] = {idx: name for name, idx in words.ids.items()}
    names.update({token["id"]: token["content"] for token in added})
    n_ids = max(names, default=-1) + 1
    if n_ids > _MAX_IDS:
        raise refuse(f"{n_ids} ids")
    special = {token["id"] for token in added if token["special"]}
    kinds = np.zeros(n_ids, np.uint8)
    kinds[list(names)] = _PRESENT
    kinds[list(special)] |= _SPECIAL
    texts = [b""] * n_ids
    keys: dict[bytes, int] = {}
    byte_of = (
        {ord(char): byte for char, byte in byte_of_char().items()}
        if words.model == _BPE_BYTES
        else None
    )
    for idx, name in names.items():
        mapped = None if byte_of is None else _as_bytes(name, byte_of)
        texts[idx] = name.encode() if mapped is None else mapped
        if name in words.ids and (byte_of is None or mapped is not None):
            keys[texts[idx]] = idx
    return len(names), kinds, texts, keys


def _as_bytes(name: str, byte_of: dict[int, int]) -> bytes | None:
    try:
        return codecs.charmap_encode(name, "strict", byte_of)[0]
    except UnicodeEncodeError:
        return None


# ---- the model ----


def _vocabulary_of(model: Mapping[str, Any], *, is_byte_level: bool) -> _Vocabulary:
    kind = model.get("type", "BPE" if "merges" in model else None)
    if kind == "BPE":
        return _bpe(model, is_byte_level=is_byte_level)
    if kind == "Unigram" and not is_byte_level:
        return _unigram(model)
    if kind == "WordPiece":
        return _wordpiece(model)
    raise refuse(f"a model of type {kind}" + (" on bytes" if is_byte_level else ""))


def _bpe(model: Mapping[str, Any], *, is_byte_level: bool) -> _Vocabulary:
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise refuse(f"{name} of the BPE model:", model[name])
    ids = _checked_ids(model["vocab"])
    has_bytes = is_byte_level and ids.keys() >= byte_of_char().keys()
    if is_byte_level and model.get("byte_fallback") and not has_bytes:
        raise refuse("byte_fallback in a byte-level BPE model that lacks bytes")
    unk = model.get("unk_token")
    if unk not in ids and has_bytes:
        unk = None  # it never comes
    if unk is not None and unk not in ids:
        raise refuse("an unk_token that is not in the vocabulary:", unk)
    merges = model["merges"]
    rows: list[int] = []
    try:
        for merge in merges:
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            rows += (ids[left], ids[right], ids[left + right])
    except (KeyError, TypeError, ValueError):
        raise refuse(
            "a merge of words that are not in the vocabulary:", merges[len(rows) // 3]
        ) from None
    ranked = np.array(rows, "<u4").reshape(-1, 3)
    if unk is not None and (with_unk := (ranked[:, :2] == ids[unk]).any(axis=1)).any():
        raise refuse("a merge with the unknown token:", merges[int(with_unk.argmax())])
    pairs = ranked[:, 0].astype(np.uint64) << np.uint64(32) | ranked[:, 1]
    # Of a pair that is there twice the last one counts.
    last = len(pairs) - 1 - np.unique(pairs[::-1], return_index=True)[1]
    flags = (
        (_IGNORE_MERGES if model.get("ignore_merges") else 0)
        | (_FUSE_UNK if model.get("fuse_unk") else 0)
        | (_BYTE_FALLBACK if model.get("byte_fallback") and not is_byte_level else 0)
    )
    return _Vocabulary(
        model=_BPE_BYTES if is_byte_level else _BPE_CHARS,
        flags=flags,
        ids=ids,
        unk_id=_NONE if unk is None else ids[unk],
        merges=ranked[np.sort(last)],
        scores=[],
    )


def _unigram(model: Mapping[str, Any]) -> _Vocabulary:
    ids = _checked_ids({name: idx for idx, (name, _) in enumerate(model["vocab"])})
    scores = [float(score) for _, score in model["vocab"]]
    unk_id = model.get("unk_id")
    if len(ids) != len(scores) or "" in ids or not all(map(math.isfinite, scores)):
        raise refuse("a unigram vocabulary with words that are empty, twice, or without a score")
    if unk_id is None or not 0 <= unk_id < len(scores):
        raise refuse("a unigram vocabulary without an unknown token")
    flags = _FUSE_UNK | (_BYTE_FALLBACK if model.get("byte_fallback") else 0)
    return _Vocabulary(_UNIGRAM, flags, ids, unk_id, np.zeros((0, 3), np.uint32), scores)


def _wordpiece(model: Mapping[str, Any]) -> _Vocabulary:
    rules = (model.get("continuing_subword_prefix"), model.get("max_input_chars_per_word", 100))
    if rules != ("##", 100):
        raise refuse("a WordPiece model with other words:", rules)
    ids = _checked_ids(model["vocab"])
    unk_id = ids.get(model["unk_token"], _NONE)
    return _Vocabulary(_WORDPIECE, 0, ids, unk_id, np.zeros((0, 3), np.uint32), [])


def _checked_ids(vocabulary: Mapping[str, int]) -> dict[str, int]:
    ids = {str(name): int(idx) for name, idx in vocabulary.items()}
    if not ids or len(set(ids.values())) != len(ids):
        raise refuse("a vocabulary that is empty or gives an id twice")
    if min(ids.values()) < 0 or max(ids.values()) >= _MAX_IDS:
        raise refuse(f"ids from {min(ids.values())} to {max(ids.values())}")
    return ids


def _cut_steps(words: _Vocabulary, splitting: Sequence[Step]) -> list[Step]:
    """Characters before which a long text may be cut without another result, which saves memory.

    A merge makes a word of the vocabulary. So if no such word has a certain character before a
    mark, no merge crosses the place between the two.
    """
    if words.model != _BPE_CHARS or words.flags & _IGNORE_MERGES or MARK not in words.ids:
        return []
    names = {idx: name for name, idx in words.ids.items()}
    before = set()
    for idx in set(words.merges[:, 2].tolist()):
        name = names[idx]
        before |= {a for a, b in itertools.pairwise(name) if b == MARK and a != MARK}
    listed = "".join(sorted(before))
    return [Step(CUT_MARKS, listed)] if len(listed.encode()) <= _MAX_STRING_BYTES else []


# ---- added tokens ----


def _added_tokens(
    rows: Iterable[Mapping[str, Any]], ids: Mapping[str, int]
) -> list[dict[str, Any]]:
    added: list[dict[str, Any]] = []
    added_ids: dict[str, int] = {}
    for row in rows:
        content = row["content"]
        if not content:
            continue
        if content in added_ids or len(content.encode()) > _MAX_STRING_BYTES:
            raise refuse("an added token that occurs twice or is too long:", content)
        given = ids.get(content)
        if given is None:
            given = max(len(ids), max(added_ids.values(), default=-1) + 1)
        if given != row["id"]:
            raise refuse(f"the added token {content!r} with id {row['id']} instead of {given}")
        added_ids[content] = given
        added.append({**row, "id": given, "special": bool(row.get("special"))})
    if len({token["id"] for token in added}) != len(added):
        raise refuse("two added tokens of one id")
    return added


def _added_rows(
    added: Iterable[Mapping[str, Any]], normalizing: Sequence[Step], pool: _Pool
) -> tuple[list[tuple[int, ...]], int]:
    groups: tuple[dict[bytes, tuple[int, int]], ...] = ({}, {})
    for token in added:
        is_normalized = bool(token.get("normalized", not token["special"]))
        content = normalize(token["content"], normalizing) if is_normalized else token["content"]
        flags = (
            (_LSTRIP if token.get("lstrip") else 0)
            | (_RSTRIP if token.get("rstrip") else 0)
            | (_SINGLE_WORD if token.get("single_word") else 0)
            | (_NORMALIZED if is_normalized else 0)
            | (_IS_SPECIAL if token["special"] else 0)
        )
        group = groups[is_normalized]
        if not content or content.encode() in group:
            raise refuse(
                "an added token that is empty or another one when it is normalised:",
                token["content"],
            )
        group[content.encode()] = (token["id"], flags)
    rows: list[tuple[int, ...]] = [
        (*group[content], *pool.place(content)) for group in groups for content in sorted(group)
    ]
    return rows, len(groups[0])


class _Pool:
    def __init__(self) -> None:
        self.data = bytearray()

    def place(self, text: str | bytes) -> tuple[int, int]:
        data = text.encode() if isinstance(text, str) else text
        if len(data) > _MAX_STRING_BYTES:
            raise refuse(f"a string of {len(data)} bytes")
        offset = self.data.find(data)
        if offset < 0:
            offset = len(self.data)
            self.data += data
        return offset, len(data)


# ---- tables ----


def _hash_texts(texts: Sequence[bytes]) -> U32:
    lengths = np.array([len(text) for text in texts], np.int64)
    begins = np.concatenate([[0], np.cumsum(lengths)])[:-1]
    data = np.frombuffer(b"".join(texts), np.uint8).astype(np.uint32)
    hashes = np.full(len(texts), 0x811C9DC5, np.uint32)
    by_length = np.argsort(-lengths, kind="stable")
    sorted_lengths = -lengths[by_length]
    for k in range(int(lengths.max(initial=0))):
        longer = by_length[: np.searchsorted(sorted_lengths, -k, side="left")]
        hashes[longer] = (hashes[longer] ^ data[begins[longer] + k]) * np.uint32(0x01000193)
    folded: U32 = hashes ^ hashes >> np.uint32(15)
    return folded


def _hash_pairs(merges: U32) -> U32:
    left, right = merges[:, 0], merges[:, 1]
    hashes = left * np.uint32(0x9E3779B1) ^ right * np.uint32(0x85EBCA77)
    hashes = (hashes ^ hashes >> np.uint32(15)) * np.uint32(0x2C1B3C6D)
    folded: U32 = hashes ^ hashes >> np.uint32(13)
    return folded


def _slots_of(hashes: U32, values: U32) -> tuple[U32, int]:
    """Return an open-addressing table of the values, and the longest probe."""
    n_slots = 1
    while n_slots * _MAX_FILL < len(hashes):
        n_slots *= 2
    while True:
        slots = np.full(n_slots, _NONE, np.uint32)
        rest, at, n_probes = np.arange(len(hashes)), hashes & np.uint32(n_slots - 1), 0
        while len(rest) and n_probes < _MAX_PROBES:
            n_probes += 1
            is_first = np.zeros(len(rest), bool)  # of those that want a slot
            is_first[np.unique(at, return_index=True)[1]] = True
            takes = is_first & (slots[at] == _NONE)
            slots[at[takes]] = values[rest[takes]]
            rest, at = rest[~takes], at[~takes] + np.uint32(1) & np.uint32(n_slots - 1)
        if not len(rest):
            return slots, max(1, n_probes)
        n_slots *= 2


def _tree(keys: Mapping[bytes, int]) -> U32:
    """Return a tree of the texts, breadth first; a node is: first child, children and byte, id."""
    texts = sorted(keys)
    rows: list[list[int]] = [[0, 0, _NONE]]
    todo = [(0, 0, len(texts), 0)]  # node, range of texts, bytes in common
    for node, low, high, depth in todo:
        if len(texts[low]) == depth:
            rows[node][2] = keys[texts[low]]
            low += 1
        rows[node][0] = len(rows)
        n_children = 0
        while low < high:
            byte, end = texts[low][depth], low + 1
            while end < high and texts[end][depth] == byte:
                end += 1
            todo.append((len(rows), low, end, depth + 1))
            rows.append([0, byte, _NONE])
            n_children += 1
            low = end
        rows[node][1] |= n_children << 8
        rows[node][0] *= n_children != 0
    return np.array(rows, "<u4")


def _padded(array: NDArray[Any]) -> bytes:
    data = array.tobytes()
    return data + bytes(-len(data) % 8)


@functools.lru_cache(maxsize=2)
def tables_of(
    tokenizer_json: bytes, bos_id: int | None, add_bos: bool | None
) -> tuple[bytes | None, str | None]:
    return text_section(tokenizer_json, bos_id=bos_id, add_bos=add_bos)


def open_tokenizer(
    tokenizer_json: bytes, *, bos_id: int | None, add_bos: bool | None = None
) -> Tokenizer:
    """Return the engine's tokenizer.

    Raises:
        QsfUnsupportedError: the bytes are no tokenizer, or its kind is not supported.
    """
    section, reason = tables_of(tokenizer_json, bos_id, add_bos)
    if section is None:
        raise QsfUnsupportedError(f"the engine does not have this kind of tokenizer: {reason}")
    return Tokenizer(section, bos_id=bos_id)
