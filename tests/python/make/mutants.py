"""Files of strangers: any section of a good file changed, all checksums right."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import itertools
import json
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

from make.attacks import entry_at, grow, section_at
from make.qsf_files import repair
from make.stored import unpack_tokenizer
from qsf.file.blocks import pack_tokenizer

_HOSTILE: tuple[Any, ...] = (
    None, True, 0, -1, 2**31, 2**32, 2**64, 10**400, 1e308, float("nan"), float("inf"), "", "x",
    "\0", "\ud800", "a" * 10_000, [], {}, [[]], {"": {}}, [None] * 999, {"type": "Sequence"},
)  # fmt: skip
_DOUBLING = {"type": "Replace", "pattern": {"String": "i"}, "content": "ii"}
_TOKENIZER_PARTS: tuple[tuple[str, Any], ...] = (
    ("normalizer", {"type": "Sequence", "normalizers": [_DOUBLING] * 40}),
    ("normalizer", {"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 9_999}),
    ("normalizer", {"type": "Replace", "pattern": {"String": ""}, "content": "a" * 99_999}),
    ("normalizer", {"type": "Replace", "pattern": {"Regex": "(i*)*$x"}, "content": "b"}),
    ("normalizer", {"type": "Replace", "pattern": {"Regex": "((("}, "content": "b"}),
    ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "/////w=="}),
    ("normalizer", {"prepend": "x" * 99}),
    ("normalizer", {"type": "NFKC"}),
    ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 40}),
    ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(a|a)*b"}, "behavior": "Isolated",
                       "invert": False}),
    ("decoder", {"type": "Sequence", "decoders": [_DOUBLING] * 40}),
    ("decoder", {"type": "Strip", "content": " ", "start": 2**60, "stop": 0}),
    ("decoder", {"type": "Replace", "pattern": {"String": ""}, "content": "aa"}),
    ("padding", {"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_to_multiple_of": None,
                 "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}),
    ("truncation", {"max_length": 0, "stride": 5, "strategy": "LongestFirst", "direction": "Left"}),
    ("post_processor", {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "s", "type_id": 0}}] * 999,
        "pair": [],
        "special_tokens": {"s": {"id": "s", "ids": [0] * 999, "tokens": ["x"] * 999}},
    }),
    ("model", {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "missing"}),
    ("model", {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "missing",
               "continuing_subword_prefix": "#" * 9_999, "max_input_chars_per_word": 2**60}),
    ("model", {"type": "Unigram", "vocab": [["a", float("-1e308")]], "unk_id": 7}),
    ("model", {"type": "BPE", "vocab": {"a": 2**32 - 1}, "merges": []}),
    ("model", {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}),
    ("model", {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [], "dropout": 2.0}),
    ("added_tokens", [{"id": 2**32 - 1, "content": "i", "special": True, "single_word": False,
                       "lstrip": False, "rstrip": False, "normalized": True}]),
)  # fmt: skip
_TEMPLATES = (
    "{{ " + "not " * 18_831 + "1 }}", "{{ " + "1+" * 19_000 + "1 }}",
    "{{ " + "-" * 100_000 + "1 }}",
    "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns | tojson }}",
    '{{ "%500000000d" | format(3) }}',
    '{{ ("a" * 100000) | replace("a", "b" * 100000) }}', "{{ messages | tojson(indent=10**9) }}",
    "{{ messages[0].content * 9999 }}", "{{ raise_exception('no') }}", "{% for",
)  # fmt: skip


def changed_bytes(rng: random.Random, data: bytes) -> bytes:
    """Change a few bytes, or the length."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(min(len(changed), rng.choice([64, 4096, 1 << 30])))
        changed[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
    if rng.random() < 0.2:
        return bytes(changed[: rng.randrange(1, len(changed) + 1)])
    return bytes(changed)


def changed_json(rng: random.Random, data: bytes) -> bytes:
    """Put something hostile in one or two places of a JSON object; or change its bytes."""
    if rng.random() < 0.15:
        return changed_bytes(rng, data)
    if rng.random() < 0.05:
        return b'{"a":' * rng.choice([99, 99_999]) + b"1"
    value = json.loads(data)
    for _ in range(rng.randint(1, 2)):
        place = value
        while True:
            keys = list(place) if isinstance(place, dict) else range(len(place))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(place[key], dict | list) and rng.random() < 0.7:
                place = place[key]
                continue
            place[key] = rng.choice(_HOSTILE)
            break
    return json.dumps(value).encode()


def _chat(rng: random.Random, data: bytes) -> bytes:
    chat = json.loads(data)
    if rng.random() < 0.5:
        chat["chat_template"] = rng.choice([*_TEMPLATES, "{{ messages[0].content }}"])
    generation = chat.setdefault("generation", {})
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "eos_token_id")
    generation[rng.choice((*names, "do_sample"))] = rng.choice(_HOSTILE)
    changed = json.dumps(chat).encode()
    return changed_json(rng, changed) if rng.random() < 0.5 else changed


def _stored_tokenizer(rng: random.Random, data: bytes) -> bytes:
    """As the file has it: compressed or not, and sometimes of a broken form."""
    if rng.random() < 0.2:
        return changed_bytes(rng, data)
    changed = _tokenizer(rng, unpack_tokenizer(data))
    return pack_tokenizer(changed) if rng.random() < 0.5 else changed


def _tokenizer(rng: random.Random, data: bytes) -> bytes:
    if rng.random() < 0.3:
        return changed_json(rng, data)
    tokenizer = json.loads(data)
    for name, part in rng.sample(_TOKENIZER_PARTS, rng.randint(1, 2)):
        tokenizer[name] = part
    return json.dumps(tokenizer).encode()


# How a stranger changes each section. tools/lint_c.py compares the tags with docs/format.md and
# with the reader: a section without a case here fails the lint.
SECTIONS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "UNIT": changed_bytes,
    "ARCH": changed_bytes,
    "KIND": changed_bytes,
    "ROPE": changed_bytes,
    "TENS": changed_bytes,
    "EBND": changed_bytes,
    "WPOS": changed_bytes,
    "META": changed_json,
    "TEXT": changed_bytes,
    "TOKN": _stored_tokenizer,
    "CHAT": _chat,
}


def section_of(data: bytes | bytearray, tag: str) -> bytes:
    """Return the bytes of a section."""
    entry = entry_at(data, tag.encode())
    n_bytes = struct.unpack_from("<Q", data, entry + 16)[0]
    start = section_at(data, tag.encode())
    return bytes(data[start : start + n_bytes])


def mutant(data: bytes, tag: str, seed: int) -> bytes:
    """Return the file with one section changed, and sometimes the header or the directory too."""
    rng = random.Random(f"{tag} {seed}")
    changed = bytearray(data)
    old = section_of(data, tag)
    new = SECTIONS[tag](rng, old)
    if len(new) == len(old):
        start = section_at(data, tag.encode())
        changed[start : start + len(new)] = new
    else:
        grow(changed, tag.encode(), new)
    if tag == "TOKN":  # read only if the engine has no tables of its own
        entry = entry_at(changed, b"TEXT")
        changed[entry : entry + 4] = b"text"
    if rng.random() < 0.1:
        at = rng.choice([*range(12, 92), *range(-320, 0)])
        changed[at] = rng.randrange(256)
    return repair(changed)


def session_mutant(data: bytes, seed: int) -> bytes:
    """Change a session file: its header, note, tokens, checksums or state; all checksums right."""
    rng = random.Random(f"session {seed}")
    n_tokens, _, n_note, state_bytes = struct.unpack_from("<IIIQ", data, 12)
    ends = [128, 128 + n_note, 128 + n_note + 4 * n_tokens, len(data) - state_bytes, len(data)]
    head, note, tokens, table, state = (data[a:b] for a, b in itertools.pairwise([0, *ends]))
    kind = rng.choice(["head", "note", "tokens", "state", "bytes"])
    if kind == "bytes":
        return changed_bytes(rng, data)  # and checksums as they were
    if kind == "note":
        note = changed_json(rng, note)
    elif kind == "tokens":
        at = 4 * rng.randrange(n_tokens)
        tokens = tokens[:at] + rng.choice([b"\0" * 4, b"\xff" * 4, b"\1\2\0\0"]) + tokens[at + 4 :]
    elif kind == "state":
        changed = bytearray(state)
        for _ in range(rng.randint(1, 40)):
            at = rng.randrange(len(changed))
            n = min(rng.randint(1, 64), len(changed) - at)
            changed[at : at + n] = rng.choice([rng.randbytes(n), b"\0" * n, b"\xff" * n])
        state = bytes(changed)
    return _repaired_session(rng, kind == "head", head, note, tokens, state, table)


def _repaired_session(rng: random.Random, is_hostile: bool, head: bytes, *parts: bytes) -> bytes:
    note, tokens, state, _ = parts
    sums = [zlib.crc32(state[at : at + (1 << 20)]) for at in range(0, len(state), 1 << 20)]
    rest = note + tokens + struct.pack(f"<{len(sums)}I", *sums)
    header = bytearray(head)
    n_before = -(-(128 + len(rest)) // 4096) * 4096
    struct.pack_into("<I", header, 20, len(note))
    struct.pack_into("<I", header, 36, zlib.crc32(rest))
    struct.pack_into("<Q", header, 80, n_before + len(state))
    if is_hostile:
        for _ in range(rng.randint(1, 3)):
            at = rng.choice([4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 48, 80, 84, 100])
            value = rng.choice([0, 1, 2, 127, 2**20, 2**31, 2**32 - 1, rng.randrange(2**32)])
            struct.pack_into("<I", header, at, value)
    struct.pack_into("<I", header, 124, zlib.crc32(bytes(header[:124])))
    return bytes(header) + rest.ljust(n_before - 128, b"\0") + state
