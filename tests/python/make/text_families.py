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

from qsf_converter.sources.gguf_tokenizer import SPLITS

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
SPECIAL = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<unk>",
    "[X]",
    " lead",
    "word",
    "nor\u00e9",
    "\n\n",
    "<0x41>",
)
_PIECES = (
    *SPECIAL,
    "<|im_",
    "start|>",
    "</",
    "<s",
    "s>",
    "'s",
    "'LL",
    "  ",
    "1234",
    "\r\n",
    "the ",
)


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


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# As the tokenizer.json of these families have them.
EXPRESSIONS = {
    "llama3": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}",
    "qwen2": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}",
    "qwen35": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}",
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    rf"{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+"
    rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}",
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}",
}
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}",
)
_LLAMA_CPP = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    "[0-9][0-9][0-9]",
)


def _split(expression: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": expression},
        "behavior": "Isolated",
        "invert": False,
    }


def _byte_level(*, add_prefix_space: bool = False, use_regex: bool = False) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


def added_tokens() -> list[dict[str, Any]]:
    """Return added tokens with every flag."""
    flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
    plain: dict[str, Any] = dict.fromkeys(flags, False)
    rows = {
        "<|im_start|>": {"special": True},
        "<|im_start|>x": {"special": True},
        "[X]": {"special": True, "rstrip": True},
        " lead": {"lstrip": True},
        "word": {"single_word": True},
        "nor\u00e9": {"normalized": True, "lstrip": True, "rstrip": True},
        "\n\n": {},
        "\n\n\n": {},
    }
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


def _made(kind: str, *, is_small: bool, added: bool = True, **parts: Any) -> bytes:
    data = json.loads(_trained(kind, is_small=is_small))
    data["model"].update(parts.pop("model", {}))
    if kind == "chars":  # real vocabularies have no merges with the unknown token
        merges = data["model"]["merges"]
        data["model"]["merges"] = [merge for merge in merges if "<unk>" not in merge]
    rows = [] if kind == "bytes" else [row for row in data["added_tokens"] if row["id"] < 3]
    ids = data["model"]["vocab"]
    known = set(ids) if isinstance(ids, dict) else {name for name, _ in ids}
    if added:
        rows += [
            {**row, "id": len(known) + i}
            for i, row in enumerate(row for row in added_tokens() if row["content"] not in known)
        ]
    data.update(added_tokens=rows, **parts)
    return json.dumps(data).encode()


_NFC = {"type": "NFC"}
_BYTE_DECODER = _byte_level(add_prefix_space=True, use_regex=True)
_TO_MARK = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
_LLAMA2 = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": MARK}, _TO_MARK]}
_FALLBACK = (
    {"type": "Replace", "pattern": {"String": MARK}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
)
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _decoders(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "decoders": list(parts)}


def _metaspace(scheme: str, *, split: bool) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": MARK, "prepend_scheme": scheme, "split": split}


def _template(bos: str, idx: int) -> dict[str, Any]:
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, sequence],
        "pair": [sequence, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [idx], "tokens": [bos]}},
    }


@functools.cache
def families(*, is_small: bool = False) -> dict[str, bytes]:
    """Return the tokenizer.json of each family; small ones have few merges."""
    make = functools.partial(_made, is_small=is_small)
    made: dict[str, bytes] = {
        "gpt2": make("bytes", pre_tokenizer=_byte_level(use_regex=True)),
        "gpt2 with a space": make(
            "bytes", pre_tokenizer=_byte_level(add_prefix_space=True, use_regex=True)
        ),
        "smollm": make(
            "bytes",
            pre_tokenizer=_sequence(
                {"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)
            ),
        ),
        "digits": make(
            "bytes",
            pre_tokenizer=_sequence({"type": "Digits", "individual_digits": False}, _byte_level()),
        ),
        "deepseek": make("bytes", pre_tokenizer=_sequence(*map(_split, _DEEPSEEK), _byte_level())),
        "deepseek-v2": make(
            "bytes",
            pre_tokenizer=_sequence(
                *map(_split, SPLITS["deepseek-llm"][:-1]),
                {"type": "Digits", "individual_digits": True},
                _byte_level(),
            ),
        ),
        "deepseek-coder": make(
            "bytes", pre_tokenizer=_sequence(*map(_split, SPLITS["deepseek-coder"]), _byte_level())
        ),
        "llama.cpp": make(
            "bytes", pre_tokenizer=_sequence(*map(_split, _LLAMA_CPP), _byte_level())
        ),
        "one number": make(
            "bytes", pre_tokenizer=_sequence(_split(r"\p{N}"), _byte_level(use_regex=True))
        ),
        "nfkc": make(
            "bytes", normalizer={"type": "NFKC"}, pre_tokenizer=_byte_level(use_regex=True)
        ),
        "removed": make(
            "bytes",
            pre_tokenizer=_sequence(
                {**_split(EXPRESSIONS["llama3"]), "behavior": "Removed", "invert": True},
                _byte_level(),
            ),
        ),
    }
    for name, expression in EXPRESSIONS.items():
        made[name] = make(
            "bytes",
            normalizer=_NFC if name.startswith("qwen") else None,
            pre_tokenizer=_sequence(_split(expression), _byte_level()),
            post_processor=_template("<s>", 0),
            model={"ignore_merges": name in ("llama3", "o200k")},
        )
    fallback = {"byte_fallback": True}
    made["llama2"] = make(
        "chars", normalizer=_LLAMA2, pre_tokenizer=None, model=fallback,
        post_processor=_template("<s>", 1), decoder=_decoders(*_FALLBACK, _STRIP),
    )  # fmt: skip
    made["gemma"] = make(
        "chars", normalizer=_TO_MARK, model=fallback, decoder=_decoders(*_FALLBACK),
        pre_tokenizer={
            "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
            "invert": False,
        },
    )  # fmt: skip
    made["mistral"] = make(
        "chars", pre_tokenizer=_metaspace("first", split=False), model=fallback,
        decoder=_decoders(*_FALLBACK, _STRIP),
    )  # fmt: skip
    for scheme in ("always", "first", "never"):
        made[f"metaspace {scheme}"] = make(
            "chars", pre_tokenizer=_metaspace(scheme, split=True), model={"fuse_unk": False},
            decoder=_metaspace(scheme, split=True),
        )  # fmt: skip
        made[f"unigram {scheme}"] = make(
            "unigram", pre_tokenizer=_metaspace(scheme, split=scheme != "never"),
            model={"byte_fallback": scheme == "first"},
            normalizer={"type": "NFKC"} if scheme == "never" else None,
            decoder=_metaspace(scheme, split=True),
            added=scheme != "first",
        )  # fmt: skip
    return made


def spm_json(pieces: Sequence[str], merges: Sequence[str]) -> bytes:
    """Return a tokenizer such as LLaMA 2's: three special tokens, all bytes, these pieces."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    plain = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    rows = [{"id": i, "content": names[i], "special": True, **plain} for i in range(3)]
    model = {
        "type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True,
        "vocab": {name: i for i, name in enumerate(names)}, "merges": list(merges),
    }  # fmt: skip
    data = {
        "version": "1.0", "added_tokens": rows, "normalizer": _LLAMA2, "pre_tokenizer": None,
        "post_processor": None, "decoder": _decoders(*_FALLBACK, _STRIP), "model": model,
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
        "normalizer": _NFC,
        "pre_tokenizer": _sequence(_split(EXPRESSIONS["qwen2"]), _byte_level()),
        "decoder": _BYTE_DECODER,
        "model": {
            "type": "BPE",
            "vocab": json.loads((folder / "vocab.json").read_text("utf-8")),
            "merges": [line for line in lines if line and not line.startswith("#version")],
        },
    }
    return json.dumps(data).encode()
