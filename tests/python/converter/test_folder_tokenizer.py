"""Vocabularies in other files than tokenizer.json: the ids are those of one with it."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from make import hf_makers
from make.text_families import MARK, SETTINGS, families
from qsf.text.tokenizer import byte_of_char
from qsf_converter import convert
from qsf_converter.sources.folder_tokenizer import tokenizer_of_folder
from qsf_converter.text.tables import open_tokenizer

TEXTS = ("Hello, It's 12345!\n\n  the  end ", "caf\u00e9 x=f(y)\r\n\tz \u4f60", "<|im_end|>a", "")
LONG_TOKEN = json.dumps(
    {
        "config": {"default_num_special_tokens": 8, "default_vocab_size": 9},
        "vocab": [{"rank": 0, "token_bytes": "YWFh" * 200}],
    }
).encode()
ADDED = {"special": True, "content": "<|im_end|>"}


def field(number: int, value: Any) -> bytes:
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    if isinstance(value, int):
        return _number(number << 3) + _number(value)
    data = value.encode() if isinstance(value, str) else value
    return _number(number << 3 | 2) + _number(len(data)) + data


def _number(value: int) -> bytes:
    return bytes([value & 127 | 128]) + _number(value >> 7) if value > 127 else bytes([value])


def sentence_piece(data: dict[str, Any], kind: int) -> bytes:
    """Return tokenizer.model; of BPE with scores that put the merges into their order."""
    vocab = data["model"]["vocab"]
    names = [name for name, _ in vocab] if kind == 1 else sorted(vocab, key=lambda n: vocab[n])
    scores = [score for _, score in vocab] if kind == 1 else [-float(i) for i in range(len(names))]
    kinds = [
        2 if name == "<unk>" else 3 if name in ("<s>", "</s>") else 6 if name[:3] == "<0x" else 1
        for name in names
    ]
    pieces = (
        field(1, field(1, name) + field(2, float(score)) + field(3, of))
        for name, score, of in zip(names, scores, kinds, strict=True)
    )
    trainer = field(3, kind) + field(35, 1) + field(40, 0) + field(41, 1)
    return b"".join(pieces) + field(2, trainer) + field(3, field(1, "identity") + field(3, 1))


def made(folder: Path, files: dict[str, bytes], model_type: str = "llama", said: Any = None) -> Any:
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (folder / "tokenizer_config.json").write_text(json.dumps(said or {}), "utf-8")
    found, reason = tokenizer_of_folder(folder, {"model_type": model_type})
    assert found is not None, reason
    assert "it is made of" in reason
    return open_tokenizer(found, bos_id=None)


def check(ours: Any, library: tokenizers.Tokenizer) -> None:
    for text in TEXTS:
        ids = library.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_prefix=False) == ids, text


def bare(kind: str, **changes: Any) -> dict[str, Any]:
    """Return a tokenizer.json whose only added token beside the vocabulary is <|im_end|>."""
    data: dict[str, Any] = json.loads(families(is_small=True)[kind])
    n_words = len(data["model"]["vocab"])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    kept = [token for token in data["added_tokens"] if token["id"] < 3 and kind != "gpt2"]
    added = [*kept, {"id": n_words, **flags, **ADDED}]
    return {**data, "added_tokens": added, "post_processor": None, **changes}


def ranks_of(data: dict[str, Any]) -> list[bytes]:
    """Return a vocabulary of bytes by rank, without tokens that no two others make."""
    of = byte_of_char()
    vocab = data["model"]["vocab"]
    return [bytes(of[c] for c in n) for n in sorted(vocab, key=lambda n: vocab[n]) if n[0] != "<"]


def test_vocab_and_merges(tmp_path: Path) -> None:
    for kind, split in (
        ("GPT2Tokenizer", "openai-community/gpt2"),
        ("Qwen2TokenizerFast", "Qwen/Qwen1.5-7B"),
    ):
        data = bare("gpt2", pre_tokenizer=SETTINGS[split])
        n_words = len(data["model"]["vocab"])
        merges = "\n".join(
            m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]
        )
        files = {
            "vocab.json": json.dumps(data["model"]["vocab"]).encode(),
            "merges.txt": f"#version: 0.2\n{merges}\n".encode(),
        }
        said = {"tokenizer_class": kind, "added_tokens_decoder": {str(n_words): ADDED}}
        ours = made(tmp_path, files, said=said)
        check(ours, tokenizers.Tokenizer.from_str(json.dumps(data)))


def test_tiktoken_and_tekken(tmp_path: Path) -> None:
    data = bare("gpt2")
    words = ranks_of(data)
    char_of = {byte: char for char, byte in byte_of_char().items()}
    names = ["".join(char_of[byte] for byte in word) for word in words]
    merges = [
        (name[:i], name[i:]) for name in names for i in range(1, len(name))
        if {name[:i], name[i:]} <= set(names)
    ]  # fmt: skip
    model = {**data["model"], "vocab": {n: i for i, n in enumerate(names)}, "merges": merges}
    token = {**data["added_tokens"][0], "id": len(names)}
    for file, model_type, split in (
        ("tiktoken.model", "kimi_k2", "moonshotai/Kimi-K2-Base"),
        ("tokenizer.model", "chatglm", "THUDM/glm-4-9b-chat"),
        ("hy.tiktoken", "hunyuan_v1_moe", "tencent/Hunyuan-A13B-Instruct"),
    ):
        folder = tmp_path / model_type
        folder.mkdir()
        lines = [b"%s %d" % (base64.b64encode(word), i) for i, word in enumerate(words)]
        said = {"added_tokens_decoder": {str(len(words)): ADDED}}
        ours = made(folder, {file: b"\n".join(lines)}, model_type, said=said)
        expected = {**data, "model": model, "added_tokens": [token]}
        expected["pre_tokenizer"] = SETTINGS[split]
        check(ours, tokenizers.Tokenizer.from_str(json.dumps(expected)))
    special = ["<unk>", "<s>", "</s>", "<|im_end|>"]
    tekken = {
        "config": {"default_num_special_tokens": 4, "default_vocab_size": len(words) + 4},
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(word).decode()}
            for i, word in enumerate(words)
        ],
        "special_tokens": [{"rank": i, "token_str": name} for i, name in enumerate(special)],
    }
    folder = tmp_path / "tekken"
    folder.mkdir()
    ours = made(folder, {"tekken.json": json.dumps(tekken).encode()}, "mistral")
    shifted = {name: i + 4 for i, name in enumerate(names)}
    vocab = {**{name: i for i, name in enumerate(special)}, **shifted}
    added = [{**token, "id": i, "content": name} for i, name in enumerate(special)]
    expected = {**data, "model": {**model, "vocab": vocab}, "added_tokens": added}
    expected["pre_tokenizer"] = SETTINGS["mistralai/Mistral-Nemo-Base-2407"]
    check(ours, tokenizers.Tokenizer.from_str(json.dumps(expected)))


@pytest.mark.parametrize("kind", ["unigram always", "llama2"])
def test_sentence_piece_of_both_kinds(tmp_path: Path, kind: str) -> None:
    """The parts are those that transformers 5.24 makes of the same file."""
    data = bare(kind)
    said = {"added_tokens_decoder": {str(len(data["model"]["vocab"])): ADDED}}
    model = sentence_piece(data, 1 if kind == "unigram always" else 2)
    if kind == "llama2":
        ids = data["model"]["vocab"]
        halves = ((n[:i], n[i:]) for n in ids if n[0] != "<" for i in range(1, len(n)))
        pairs = [(a, b) for a, b in halves if a in ids and b in ids]
        pairs.sort(key=lambda pair: (ids[pair[0] + pair[1]], ids[pair[0]], ids[pair[1]]))
        data["model"]["merges"] = pairs
    replaced = [(r"\A +| +\z", ""), (" {2,}", " "), (" ", MARK), (rf"\A{MARK}", MARK * 2)]
    data["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Replace", "pattern": {"Regex": a}, "content": b} for a, b in replaced
        ],
    }
    data["pre_tokenizer"] = {
        "type": "Metaspace", "replacement": MARK, "prepend_scheme": "always", "split": False
    }  # fmt: skip
    data["model"]["byte_fallback"] = True
    ours = made(tmp_path, {"tokenizer.model": model}, said=said)
    check(ours, tokenizers.Tokenizer.from_str(json.dumps(data)))


def test_word_pieces(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "end", "##s", "caf", "##e", ",", "x"]
    ours = made(tmp_path, {"vocab.txt": "\n".join(words).encode()}, "bert")
    assert ours.encode("The ends, caf\u00e9 q", add_prefix=False) == [4, 5, 6, 9, 7, 8, 1]


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("tokenizer.model", b"\xff" * 40, "not a model of SentencePiece"),
        ("tokenizer.model", field(1, field(1, "a")) + field(2, field(3, 3)), "type 3"),
        ("tiktoken.model", b"YQ== 0\n", "'gpt2' splits texts is not known"),
        ("qwen.tiktoken", b"YQ== 0\nYQ== 1\n", "'gpt2' splits"),
        ("tekken.json", b"{}", "tekken.json"),
        ("tekken.json", LONG_TOKEN, "a token of more than 512 bytes"),
        ("tekken.json", LONG_TOKEN.replace(b": 8,", b": 80000000000,"), "80000000000 special"),
        ("vocab.json", b"{}", "without a class"),
        ("vocab.txt", b"a\nb\n", "BERT's uncased"),
    ],
)
def test_what_cannot_be_made_is_said(tmp_path: Path, name: str, data: bytes, reason: str) -> None:
    folder, _ = hf_makers.gpt2(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    (folder / name).write_bytes(data)
    report = convert(folder, tmp_path / "m.qsf")
    assert any(reason in line and "left out" in line for line in report.warnings), report.warnings
