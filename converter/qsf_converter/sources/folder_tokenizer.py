"""Makes tokenizer.json from the other forms in which folders hold a vocabulary.

These are SentencePiece's tokenizer.model, lists of tiktoken (Kimi K2, HunYuan, GLM-4), tekken.json
of Mistral, vocab.json with merges.txt, and BERT's vocab.txt. Each becomes what a GGUF file says of
the same vocabulary, from which `gguf_tokenizer` makes tokenizer.json. Sources: sentencepiece's
sentencepiece_model.proto; transformers' convert_slow_tokenizer.py for merges from ranks, and for
what SentencePiece does before and behind its model.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import base64
import binascii
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from qsf.foreign_json import read_json
from qsf.text.tokenizer import byte_of_char
from qsf_converter.sources.gguf_tokenizer import SPLITS, LeftOutError, json_of
from qsf_converter.sources.metadata import read_bytes, read_json_object
from qsf_converter.text.steps import MARK
from qsf_converter.text.tables import TOKENIZER_MEMORY_BYTES

# tokenizer.ggml. and this key, as a GGUF file would say; but "parts": of tokenizer.json, instead
Said = dict[str, Any]
_CONTROL, _USER_DEFINED = 3, 4
_UNIGRAM, _BPE = 1, 2  # of TrainerSpec.model_type
_MOST_ADDED = 1 << 16
_MOST_BYTES = 512  # of a token that is cut at every place; published ones have 128
# model_type of config.json -> the splitting rule of its list of tiktoken
_RULES: Final = {
    **dict.fromkeys(("kimi_k2", "kimi_k25", "kimi_linear", "deepseek_v3"), "kimi-k2"),
    **dict.fromkeys(("hunyuan", "hunyuan_v1_moe", "hunyuan_v1_dense"), "hunyuan"),
    **dict.fromkeys(("chatglm", "glm", "glm4"), "glm4"),
    **dict.fromkeys(("qwen", "qwen2"), "qwen2"),
    "llama": "llama-bpe",
}
# tokenizer_class -> the splitting rule of its vocab.json
_CLASSES: Final = {
    **dict.fromkeys(("GPT2Tokenizer", "CodeGenTokenizer", "GPTNeoXTokenizer"), "gpt-2"),
    "Qwen2Tokenizer": "qwen2",
}


def tokenizer_of_folder(folder: Path, config: Mapping[str, Any]) -> tuple[bytes | None, str]:
    """Return tokenizer.json and what it is made of, or None and the reason."""
    said = read_json_object(folder / "tokenizer_config.json") or {}
    readers: tuple[tuple[str, Callable[[bytes], Said]], ...] = (
        ("tekken.json", _tekken),
        ("vocab.json", lambda data: _byte_level(data, folder, said)),
        ("tokenizer.model", lambda data: _model_file(data, config, said)),
        *((file.name, lambda data: _ranked(data, config)) for file in _tiktoken_files(folder)),
        ("vocab.txt", lambda data: _word_pieces(data, said)),
    )
    for name, reader in readers:
        data = read_bytes(folder / name)
        if data is None:
            continue
        try:
            found = _with_added(reader(data), said)
            parts = found.pop("parts", {})
            made = json_of({f"tokenizer.ggml.{key}": value for key, value in found.items()})
        except (ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
            return None, f"the tokenizer is left out: {name}: {str(error)[:200]}"
        except LeftOutError as error:
            return None, f"the tokenizer is left out: {name}: {error}"
        made |= {**parts, "model": made["model"] | parts.get("model", {})}
        text = json.dumps(made, ensure_ascii=False).encode("utf-8", "replace")
        return text, f"there is no tokenizer.json: it is made of {name}"
    names = ", ".join(dict.fromkeys(name for name, _ in readers))
    return None, f"there is no tokenizer.json, and none of {names}"


def _tiktoken_files(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.tiktoken"), folder / "tiktoken.model"])


def _with_added(found: Said, said: Mapping[str, Any]) -> Said:
    """Return the vocabulary with the tokens that tokenizer_config.json adds."""
    words, kinds = list(found["tokens"]), list(found["token_type"])
    rows = said.get("added_tokens_decoder") or {}
    most = len(words) + _MOST_ADDED
    for idx, row in sorted((int(idx), row) for idx, row in rows.items()):
        if not 0 <= idx < most:
            raise ValueError(f"the added token {idx} is not near the vocabulary")
        while len(words) <= idx:
            words.append(f"<|unused_{len(words)}|>")
            kinds.append(_USER_DEFINED)
        words[idx], kinds[idx] = row["content"], _CONTROL if row.get("special") else _USER_DEFINED
    more: Said = {"tokens": words, "token_type": np.array(kinds)}
    if "scores" in found:
        scores = [*found["scores"], *[0.0] * (len(words) - len(found["scores"]))]
        more["scores"] = np.array(scores, np.float32)
    name = said.get("bos_token")
    name = name.get("content") if isinstance(name, dict) else name
    if name in words:
        more["bos_token_id"] = words.index(name)
    if isinstance(said.get("add_bos_token"), bool):
        more["add_bos_token"] = said["add_bos_token"]
    return {**found, **more}


# ---- SentencePiece ----


def _model_file(data: bytes, config: Mapping[str, Any], said: Mapping[str, Any]) -> Said:
    first = data.split(b"\n", 1)[0].split()
    if len(first) == 2 and first[1].isdigit():  # GLM-4 names a list of tiktoken so
        return _ranked(data, config)
    words: list[str] = []
    scores: list[float] = []
    kinds: list[int] = []
    trainer, normalizer = {}, {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            words.append(piece.get(1, b"").decode())
            scores.append(struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0)
            kinds.append(piece.get(3, 1))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    kind = trainer.get(3, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE):
        raise ValueError(f"a model of type {kind}, not unigram or BPE")
    return {
        "model": "llama" if kind == _BPE else "t5",
        "tokens": words,
        "scores": scores,
        "token_type": kinds,
        "unknown_token_id": trainer.get(40, 0),
        "bos_token_id": trainer.get(41, 1),
        "parts": _around(normalizer, bool(trainer.get(35, 0)), said.get("legacy") is not False),
    }


def _around(spec: Mapping[int, Any], has_bytes: bool, is_legacy: bool) -> Said:
    """Return what is around the model: spaces at the ends and beside others go, then the marks."""
    has_prefix, drops_spaces = bool(spec.get(3, 1)), bool(spec.get(4, 1))
    charsmap = base64.b64encode(spec.get(2, b"")).decode()
    normalizers: list[Said] = []
    if charsmap:
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if drops_spaces:
        normalizers += [_replace(r"\A +| +\z", ""), _replace(" {2,}", " ")]
    normalizers.append(_replace(" ", MARK, "String"))
    if has_prefix and is_legacy:  # a text that begins with a mark gets another
        normalizers.append(_replace(rf"\A{MARK}", MARK * 2))
    scheme = "always" if is_legacy else "first"
    marks = {"type": "Metaspace", "replacement": MARK, "prepend_scheme": scheme, "split": False}
    decoders: list[Said] = [_replace(MARK, " ", "String")]
    decoders += [{"type": "ByteFallback"}] if has_bytes else []
    decoders.append({"type": "Fuse"})
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": marks if has_prefix else None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"byte_fallback": has_bytes},
    }


def _replace(pattern: str, content: str, kind: str = "Regex") -> Said:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a protobuf message: numbers, and bytes of all other kinds."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            if at >= len(data) or shift > 63:
                raise ValueError("not a model of SentencePiece")
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        key = number()
        if key & 7 == 0:
            yield key >> 3, number()
            continue
        size = {1: 8, 5: 4}.get(key & 7)
        size = number() if key & 7 == 2 else size
        if size is None or at + size > len(data):
            raise ValueError("not a model of SentencePiece")
        yield key >> 3, data[at : at + size]
        at += size


# ---- bytes with ranks, or with merges ----


def _ranked(data: bytes, config: Mapping[str, Any]) -> Said:
    rule = _RULES.get(str(config.get("model_type")))
    if rule is None:
        raise ValueError(f"how {config.get('model_type')!r} splits texts is not known")
    try:
        rows = [line.split() for line in data.splitlines() if line.strip()]
        ranks = {base64.b64decode(word, validate=True): int(rank) for word, rank in rows}
    except binascii.Error as error:
        raise ValueError(f"not a list of tiktoken: {error}") from None
    return _of_ranks(ranks, [], rule)


def _tekken(data: bytes) -> Said:
    said = read_json(data, memory_bytes=TOKENIZER_MEMORY_BYTES)
    n_special = said["config"]["default_num_special_tokens"]
    if not 0 <= n_special <= _MOST_ADDED:
        raise ValueError(f"{n_special} special tokens")
    n_words = said["config"]["default_vocab_size"] - n_special
    ranks = {base64.b64decode(row["token_bytes"]): row["rank"] for row in said["vocab"][:n_words]}
    special = [f"<SPECIAL_{idx}>" for idx in range(n_special)]
    for row in said.get("special_tokens") or ():
        special[row["rank"]] = row["token_str"]
    usual = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")  # of files that do not name them
    special[: len(usual)] = usual if not said.get("special_tokens") else special[: len(usual)]
    return {**_of_ranks(ranks, special, "tekken"), "bos_token_id": special.index("<s>")}


def _of_ranks(ranks: Mapping[bytes, int], special: list[str], rule: str) -> Said:
    """Two tokens merge whenever both together are one; the lower its rank, the earlier."""
    char_of = {byte: char for char, byte in byte_of_char().items()}

    def name(word: bytes) -> str:
        return "".join(char_of[byte] for byte in word)

    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{len(ranks)} tokens, whose ranks are not the numbers below")
    words = sorted(ranks, key=lambda word: ranks[word])
    if max(map(len, words), default=0) > _MOST_BYTES:
        raise ValueError(f"a token of more than {_MOST_BYTES} bytes")
    merges = []
    for word in words:
        halves = [(word[:i], word[i:]) for i in range(1, len(word))]
        pairs = [(a, b) for a, b in halves if a in ranks and b in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [f"{name(a)} {name(b)}" for a, b in pairs]
    kinds = [_CONTROL] * len(special) + [1] * len(words)
    return _merged([*special, *map(name, words)], kinds, merges, rule)


def _merged(words: list[str], kinds: list[int], merges: Iterable[str], rule: str) -> Said:
    return {
        "model": "gpt2",
        "pre": rule,
        "tokens": words,
        "token_type": kinds,
        "merges": list(merges),
    }


def _byte_level(data: bytes, folder: Path, said: Mapping[str, Any]) -> Said:
    kind = str(said.get("tokenizer_class", "")).removesuffix("Fast")
    if kind not in _CLASSES:
        raise ValueError(f"how {kind or 'a tokenizer without a class'} splits texts is not known")
    assert _CLASSES[kind] in SPLITS
    lines = (read_bytes(folder / "merges.txt") or b"").decode().split("\n")
    merges = [line for line in lines if line and not line.startswith("#version")]
    ids = read_json(data, memory_bytes=TOKENIZER_MEMORY_BYTES)
    if sorted(ids.values()) != list(range(len(ids))):
        raise ValueError(f"{len(ids)} words, whose ids are not the numbers below")
    return _merged(sorted(ids, key=lambda word: ids[word]), [1] * len(ids), merges, _CLASSES[kind])


def _word_pieces(data: bytes, said: Mapping[str, Any]) -> Said:
    words = data.decode().rstrip("\n").split("\n")
    if said.get("do_lower_case", True) is not True or "[UNK]" not in words:
        raise ValueError("a vocabulary that is not BERT's uncased one")
    special = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}
    kinds = [_CONTROL if word in special else 1 for word in words]
    names = [
        word if word in special else word[2:] if word.startswith("##") else MARK + word
        for word in words
    ]
    ids = {"unknown_token_id": words.index("[UNK]"), "cls_token_id": words.index("[CLS]")}
    return {"model": "bert", "tokens": names, "token_type": kinds, **ids}
