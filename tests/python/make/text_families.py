"""Small tokenizers of every kind that the engine encodes with, and texts that are hard to split.

The vocabularies are trained on such texts without splitting them, so that merges reach across
every place where a splitting rule might cut: a wrong cut then gives other tokens.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from make.refusals import table

Settings = dict[str, Any]
MARK = "\u2581"

_ALPHABETS = (
    "abcdefghij ABCDE",
    "'s't're've'm'll'd'S'RE'LL \u017f'\u017f",
    "0123456789\u0660\u00b2\u2167\u09ea",
    " \t\n\r\r\n\u00a0\u3000\u2028\u0085\v\f\u200b",
    ".,!?;:-_/\\()[]{}<>|`~@#$%^&*+=\"'",
    "\u00e9\u00df\u0130\u01c5\u02b0\u05d0\u0639\u0e01\u0905\u4e2d\u6587\u3042\u30a2\uac00\ud55c",
    "e\u0301\u0300\u0345\u0327\u1100\u1161\u11a8\u09c7\u09be\u0f71\u0f72\u1d15e\u2126\ufb01\ufdfa",
    "\U0001f600\u200d\U0001f469\ufe0f\U0001f1e9\U0001f1ea\U00020000\U0010ffff\ud7ff\ue000\ufffd\ufffe",
    f"{MARK} {MARK}a",
    "\x00\x01\x1f\x7f\u0080\u00ad\ufeff",
)
_PIECES = (
    "<s>", "</s>", "<|im_start|>", "<unk>", "[X]", " lead", "word", "nor\u00e9", "\n\n", "<0x41>",
    "<|im_", "start|>", "</", "<s", "s>", "'s", "'LL", "  ", "1234", "\r\n", "the ",
)  # fmt: skip


def random_text(rng: random.Random, n_parts: int) -> str:
    """Return characters and pieces of all kinds, next to each other or in runs."""
    parts = []
    for _ in range(n_parts):
        draw = rng.random()
        if draw < 0.15:
            parts.append(rng.choice(_PIECES))
        elif draw < 0.2:
            c = rng.randrange(0x110000)
            parts.append("?" if 0xD800 <= c <= 0xDFFF else chr(c))
        elif draw < 0.25:
            parts.append(rng.choice(rng.choice(_ALPHABETS)) * rng.randrange(1, 12))
        else:
            parts.append("".join(rng.choices(rng.choice(_ALPHABETS), k=rng.randrange(1, 5))))
    return "".join(parts)


# tests/data/tokenizers.json: how the tokenizers of `families` differ, and what published ones set.
#
# - settings: the pre_tokenizer of tokenizer.json, by models that share it. Only settings, no words:
#   which model has which rule is what llama.cpp's convert_hf_to_gguf_update.py says, expressions
#   are those of its src/llama-vocab.cpp (https://github.com/ggml-org/llama.cpp); CLIP, T5, Llama 2
#   and the like are as transformers' convert_slow_tokenizer.py makes them.
# - normalizers: those of tokenizer.json, by model or by who makes it.
# - others: settings of the library's other pre-tokenizers, which no published model has.
_DATA = table("tokenizers")
SETTINGS: dict[str, Settings] = {name: row for names, row in _DATA["settings"] for name in names}
NORMALIZERS: dict[str, Settings] = _DATA["normalizers"]
OTHERS: dict[str, Settings] = _DATA["others"]


def split(expression: str) -> Settings:
    """Return a pre-tokenizer Split."""
    pattern = {"Regex": expression}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def byte_level() -> Settings:
    """Return a pre-tokenizer ByteLevel that does not split."""
    flags = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "ByteLevel", **flags}


def sequence(*parts: Settings) -> Settings:
    """Return a pre-tokenizer Sequence."""
    return {"type": "Sequence", "pretokenizers": list(parts)}


def added_tokens() -> list[dict[str, Any]]:
    """Return added tokens with every flag."""
    flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
    plain: dict[str, Any] = dict.fromkeys(flags, False)
    rows = table("tables")["added words"]
    return [{"content": content, **plain, **row} for content, row in rows.items()]


@functools.cache
def _trained(kind: str, *, is_small: bool) -> str:
    """Return the JSON of a tokenizer trained on random texts that are not split."""
    rng = random.Random(14)
    texts = [random_text(rng, 12) for _ in range(200 if is_small else 6000)]
    if kind == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=320 if is_small else 3000,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<s>"],
        )
    elif kind == "chars":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(
            vocab_size=440 if is_small else 2500,
            show_progress=False,
            limit_alphabet=120,
            special_tokens=names,
        )
    else:
        # Few characters, and no names of special tokens, which would be words twice.
        texts = ["".join(c for c in text if c < "\u0300" and c != "<") for text in texts]
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.UnigramTrainer(
            vocab_size=640 if is_small else 1200,
            show_progress=False,
            special_tokens=names,
            unk_token="<unk>",
        )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str())


def _made(
    vocabulary: str, *, is_small: bool, added: bool = True, model: Settings, **parts: Any
) -> bytes:
    data = json.loads(_trained(vocabulary, is_small=is_small))
    data["model"].update(model)
    if vocabulary == "chars":  # real vocabularies have no merges with the unknown token
        merges = data["model"]["merges"]
        data["model"]["merges"] = [merge for merge in merges if "<unk>" not in merge]
    rows = [] if vocabulary == "bytes" else [row for row in data["added_tokens"] if row["id"] < 3]
    ids = data["model"]["vocab"]
    known = set(ids) if isinstance(ids, dict) else {name for name, _ in ids}
    if added:
        rows += [
            {**row, "id": len(known) + i}
            for i, row in enumerate(row for row in added_tokens() if row["content"] not in known)
        ]
    data.update(added_tokens=rows, **parts)
    return json.dumps(data).encode()


@functools.cache
def families(*, is_small: bool = False) -> dict[str, bytes]:
    """Return the tokenizer.json of each family; small ones have few merges."""
    rows = _DATA["families"]
    return {name: _made(is_small=is_small, **{"model": {}, **rows[name]}) for name in rows}


def spm_json(pieces: Sequence[str], merges: Sequence[str]) -> bytes:
    """Return a tokenizer such as LLaMA 2's: three special tokens, all bytes, these pieces."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    plain = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    rows = [{"id": i, "content": names[i], "special": True, **plain} for i in range(3)]
    model = {
        "type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True,
        "vocab": {name: i for i, name in enumerate(names)}, "merges": list(merges),
    }  # fmt: skip
    llama2 = _DATA["families"]["llama2"]
    data = {
        "version": "1.0", "added_tokens": rows, "normalizer": llama2["normalizer"],
        "pre_tokenizer": None, "post_processor": None, "decoder": llama2["decoder"], "model": model,
    }  # fmt: skip
    return json.dumps(data, ensure_ascii=False).encode()


def qwen2_json(folder: Path) -> bytes:
    """Return the tokenizer.json of Qwen 2, whose parts are in `folder`."""
    lines = (folder / "merges.txt").read_text("utf-8").split("\n")
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    data = {
        "version": "1.0",
        "added_tokens": [
            {"id": int(idx), **row} for idx, row in config["added_tokens_decoder"].items()
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": SETTINGS["Qwen/Qwen1.5-7B"],
        "decoder": {**byte_level(), "add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": json.loads((folder / "vocab.json").read_text("utf-8")),
            "merges": [line for line in lines if line and not line.startswith("#version")],
        },
    }
    return json.dumps(data).encode()
