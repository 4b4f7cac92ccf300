"""Files of strangers: any section of a good file changed, all checksums right."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

from make.attacks import entry_at, grow, section_at
from make.qsf_files import repair
from qsf.file.stored_tokenizer import pack_tokenizer, unpack_tokenizer

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


def _bytes(rng: random.Random, data: bytes) -> bytes:
    """Change a few bytes, or the length."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(min(len(changed), rng.choice([64, 4096, 1 << 30])))
        changed[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
    if rng.random() < 0.2:
        return bytes(changed[: rng.randrange(1, len(changed) + 1)])
    return bytes(changed)


def _json(rng: random.Random, data: bytes) -> bytes:
    """Put something hostile in one or two places of a JSON object; or change its bytes."""
    if rng.random() < 0.15:
        return _bytes(rng, data)
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
    names = [
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "eos_token_id",
        "do_sample",
    ]
    generation[rng.choice(names)] = rng.choice(_HOSTILE)
    return (
        _json(rng, json.dumps(chat).encode()) if rng.random() < 0.5 else json.dumps(chat).encode()
    )


def _stored_tokenizer(rng: random.Random, data: bytes) -> bytes:
    """As the file has it: compressed or not, and sometimes of a broken form."""
    if rng.random() < 0.2:
        return _bytes(rng, data)
    changed = _tokenizer(rng, unpack_tokenizer(data))
    return pack_tokenizer(changed) if rng.random() < 0.5 else changed


def _tokenizer(rng: random.Random, data: bytes) -> bytes:
    if rng.random() < 0.3:
        return _json(rng, data)
    tokenizer = json.loads(data)
    for name, part in rng.sample(_TOKENIZER_PARTS, rng.randint(1, 2)):
        tokenizer[name] = part
    return json.dumps(tokenizer).encode()


# How a stranger changes each section. tools/lint_c.py compares the tags with docs/format.md and
# with the readers in C and Python: a section without a case here fails the lint.
SECTIONS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "LAYR": _bytes,
    "EMBD": _bytes,
    "FINL": _bytes,
    "ARCH": _bytes,
    "KIND": _bytes,
    "ROPE": _bytes,
    "EXPT": _bytes,
    "TENS": _bytes,
    "EBND": _bytes,
    "WPOS": _bytes,
    "META": _json,
    "TEXT": _bytes,
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
