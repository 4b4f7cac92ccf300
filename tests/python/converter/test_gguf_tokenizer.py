"""Tokenizers of GGUF files and folders: the ids of the original, or none and a reason."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from make import gguf_files, hf_makers
from make.refusals import refusals, table
from make.stored import Reader, unpack_tokenizer
from make.text_families import MARK, SETTINGS, families
from qsf.text.chat import ChatTemplate
from qsf.text.tokenizer import Tokenizer, byte_of_char
from qsf_converter import convert
from qsf_converter.sources.folder_tokenizer import tokenizer_of_folder
from qsf_converter.sources.gguf_tokenizer import OF_CHARACTERS, SPLITS, chat_of, tokenizer_of
from qsf_converter.text.tables import open_tokenizer

TEXTS = table("tables")["texts"]  # fmt: skip


def as_metadata(said: dict[str, Any]) -> dict[str, Any]:
    """Lists of numbers as the reader of GGUF files gives them."""
    return {
        key: np.array(value) if isinstance(value, list) and not isinstance(value[0], str) else value
        for key, value in said.items()
    }


def rebuilt(said: dict[str, Any]) -> Tokenizer:
    data, reason = tokenizer_of(as_metadata(said))
    assert reason is None
    assert data is not None
    return open_tokenizer(data, bos_id=said.get("tokenizer.ggml.bos_token_id"))


def assert_same(found: Tokenizer, expected: Tokenizer, texts: list[str] = TEXTS) -> None:
    assert found.n_vocab == expected.n_vocab
    assert found.special_names == expected.special_names
    for text in texts:
        for parse_special in (False, True):
            ids = expected.encode(text, parse_special=parse_special)
            assert found.encode(text, parse_special=parse_special) == ids, text
            assert found.decode(ids) == expected.decode(ids)
            assert found.decode(ids, skip_special=False) == expected.decode(ids, skip_special=False)


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gpt2"])
def test_a_byte_level_vocabulary_comes_back(
    tmp_path: Path, model: str, tiny_llama_dir: Path, tiny_gpt2_dir: Path
) -> None:
    """A GGUF file and the folder it was made of convert to equal sections, ids and units."""
    folder = tiny_llama_dir if model == "tiny-llama" else tiny_gpt2_dir
    path = gguf_files.write(
        folder,
        tmp_path / "m.gguf",
        tokenizer=True,
        changes={"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"},
    )
    assert convert(path, tmp_path / "a.qsf", quant_type="8bit").warnings == ()
    convert(folder, tmp_path / "b.qsf", quant_type="8bit")
    with Reader(tmp_path / "a.qsf") as found, Reader(tmp_path / "b.qsf") as expected:
        for i in range(len(expected.units)):
            assert found.read_unit(i) == expected.read_unit(i)
        bos = expected.header.bos_id
        assert found.header == expected.header
        tokenizers = [
            open_tokenizer(unpack_tokenizer(f.read_section("TOKN")), bos_id=bos)
            for f in (found, expected)
        ]
        chats = [json.loads(f.read_section("CHAT")) for f in (found, expected)]
    assert_same(tokenizers[0], tokenizers[1])
    assert chats[0]["special_tokens"] == {
        **chats[1]["special_tokens"],
        "add_bos_token": tokenizers[1].encode("a")[0] == bos,
    }
    ids = {key: chats[1]["generation"][key] for key in ("bos_token_id", "eos_token_id")}
    assert chats[0]["generation"] == ids
    template = ChatTemplate(chats[0]["chat_template"], chats[0]["special_tokens"])
    shown = template.render([{"role": "user", "content": "Hi"}])
    assert shown == chats[1]["special_tokens"]["bos_token"] + "Hi"


@pytest.mark.parametrize("rule", ["gpt-2", "llama-bpe", "qwen2", "default"])
def test_each_splitting_rule_gives_the_ids_of_llama_cpp(
    rule: str, tiny_llama_dir: Path, project_root: Path
) -> None:
    golden = json.loads((project_root / "tests" / "golden" / "gguf_encodings.json").read_text())
    said = gguf_files.with_runs(gguf_files.byte_level_vocabulary(tiny_llama_dir))
    tokenizer = rebuilt({**said, "tokenizer.ggml.pre": rule})
    for text, ids in zip(golden["texts"], golden["ids"][rule], strict=True):
        assert tokenizer.encode(text, add_prefix=False, parse_special=False) == ids, text
        assert tokenizer.decode(ids) == text


def test_words_that_are_not_reached_by_merges(tiny_llama_dir: Path) -> None:
    """LLaMA 3 takes a whole word of its vocabulary, whatever the merges say."""
    said = gguf_files.byte_level_vocabulary(tiny_llama_dir)
    words = [*said["tokenizer.ggml.tokens"][:-1], "zqzqz"]
    for rule, n_tokens in (("llama-bpe", 1), ("llama3", 1), ("gpt-2", 5)):
        changed = {**said, "tokenizer.ggml.tokens": words, "tokenizer.ggml.pre": rule}
        changed["tokenizer.ggml.merges"] = [
            merge
            for merge in said["tokenizer.ggml.merges"]
            if merge.replace(" ", "") != said["tokenizer.ggml.tokens"][-1]
        ]
        assert len(rebuilt(changed).encode("zqzqz", add_prefix=False)) == n_tokens


def test_who_begins_a_text_with_bos(tiny_llama_dir: Path) -> None:
    said = gguf_files.byte_level_vocabulary(tiny_llama_dir)
    del said["tokenizer.ggml.add_bos_token"]
    assert rebuilt({**said, "tokenizer.ggml.pre": "gpt-2"}).encode("a")[0] != 0
    assert rebuilt({**said, "tokenizer.ggml.pre": "llama-bpe"}).encode("a")[0] == 0
    for rule in ("tekken", "pixtral", "lfm2", "chameleon"):
        assert rebuilt({**said, "tokenizer.ggml.pre": rule}).encode("a")[0] == 0
    said["tokenizer.ggml.add_bos_token"] = False
    assert rebuilt({**said, "tokenizer.ggml.pre": "llama-bpe"}).encode("a")[0] != 0


def test_a_missing_rule_is_said(tiny_llama_dir: Path) -> None:
    said = gguf_files.byte_level_vocabulary(tiny_llama_dir)
    del said["tokenizer.ggml.pre"]
    data, note = tokenizer_of(as_metadata(said))
    assert data is not None
    assert note is not None
    assert "tokenizer.ggml.pre is missing" in note
    named, note = tokenizer_of(as_metadata({**said, "tokenizer.ggml.pre": "default"}))
    assert (named, note) == (data, None)


def test_empty_and_double_words_get_names(tiny_llama_dir: Path) -> None:
    """Of equal words the last one is encoded."""
    said = gguf_files.byte_level_vocabulary(tiny_llama_dir)
    words = said["tokenizer.ggml.tokens"]
    kinds = [*said["tokenizer.ggml.token_type"], 5, 5, 1]
    doubles = {**said, "tokenizer.ggml.tokens": [*words, "", "", words[70]]}
    tokenizer = rebuilt({**doubles, "tokenizer.ggml.token_type": kinds})
    n = len(words)
    assert tokenizer.token_id(f"[EMPTY_{n}]") == n
    assert tokenizer.token_id("[DOUBLE_70]") == 70
    assert tokenizer.encode(words[70], add_prefix=False) == [n + 2]


# One rule for each way to split
@pytest.mark.parametrize("rule", sorted({str(how): rule for rule, how in SPLITS.items()}.values()))
def test_every_rule_of_llama_cpp_is_known(rule: str, tiny_llama_dir: Path) -> None:
    said = gguf_files.with_runs(gguf_files.byte_level_vocabulary(tiny_llama_dir))
    tokenizer = rebuilt({**said, "tokenizer.ggml.pre": rule, "tokenizer.ggml.unknown_token_id": 1})
    text = "It's 2024 words,\nand so."
    if rule not in OF_CHARACTERS | {"whitespace"}:
        assert tokenizer.decode(tokenizer.encode(text, add_prefix=False)) == text


def test_tokens_that_a_user_defined(tiny_llama_dir: Path) -> None:
    """They are found in any text, but they are text."""
    said = gguf_files.byte_level_vocabulary(tiny_llama_dir)
    kinds = [*said["tokenizer.ggml.token_type"][:-1], 4]
    words = [*said["tokenizer.ggml.tokens"][:-1], "<tool>"]
    merges = said["tokenizer.ggml.merges"][:500]
    of_words = {"tokens": words, "token_type": kinds, "merges": merges}
    tokenizer = rebuilt({**said, **{f"tokenizer.ggml.{k}": v for k, v in of_words.items()}})
    ids = tokenizer.encode("a<tool>b", add_prefix=False)
    assert ids[1] == len(words) - 1
    assert tokenizer.decode(ids) == "a<tool>b"


SMALL_WORDS = [
    *("<unk>", "<s>", "</s>"), *(f"<0x{i:02X}>" for i in range(256)),
    *("\u2581", "a", "b", "c", "ab", "bc", "abc", "\u2581a", "\u2581ab"),
]  # fmt: skip
SMALL = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": SMALL_WORDS,
    "tokenizer.ggml.scores": [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -5.0, -4.0, -3.0],
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 9,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}  # fmt: skip


def test_sentence_pieces_are_merged_by_score() -> None:
    tokenizer = rebuilt(SMALL)

    def pieces(text: str) -> list[str]:
        return [SMALL_WORDS[idx] for idx in tokenizer.encode(text, add_prefix=False)]

    assert pieces("abc") == ["\u2581a", "bc"]  # bc first, then \u2581a: no ab is left
    assert pieces("ab") == ["\u2581ab"]  # ab, and with it the next
    assert pieces("abab") == ["\u2581ab", "ab"]
    assert pieces("a \u00e9") == ["\u2581a", "\u2581", "<0xC3>", "<0xA9>"]
    assert tokenizer.encode("a") == [1, 266]
    assert tokenizer.decode(tokenizer.encode("a b\u00e9c")) == "a b\u00e9c"
    bare = rebuilt({**SMALL, "tokenizer.ggml.add_space_prefix": False})
    assert bare.encode("ab", add_prefix=False) == [263]
    assert bare.decode([263, 266]) == "ab a"


def test_sentence_pieces_with_merges_are_merged_by_these() -> None:
    said = {
        **SMALL,
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.merges": ["a b", "\u2581 a", "\u2581a b"],
    }
    tokenizer = rebuilt(said)
    assert tokenizer.encode("abc") == [1, 263, 262]  # by scores it were a, bc
    assert tokenizer.encode("b ab\u00e9", add_prefix=False) == [261, 259, 263, 198, 172]
    assert tokenizer.decode(tokenizer.encode("a  b\n\n\u00e9c")) == "a  b\n\n\u00e9c"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        *refusals("gguf-tokenizer"),
        ({"tokenizer.ggml.tokens": [*SMALL_WORDS[:-1], "a" * 10**6]}, "word 267 has 1000000 char"),
        ({"tokenizer.ggml.scores": [float("nan")] * 268}, "values that are no numbers"),
    ],
)  # fmt: skip
def test_what_cannot_be_rebuilt_is_left_out(change: dict[str, Any], reason: str) -> None:
    data, said = tokenizer_of(as_metadata({**SMALL, **change}))
    assert data is None
    assert said is not None
    assert reason in said
    assert len(said.splitlines()) == 1


def test_named_chat_templates() -> None:
    said = {"tokenizer.chat_template": "A", "tokenizer.chat_template.tools": "B"}
    chat = json.loads(chat_of(said, {}))
    assert chat["chat_template"] == "A"
    assert chat["chat_templates"] == {"default": "A", "tools": "B"}


# ---- real vocabularies ----
def test_llama_2_comes_back_from_its_words_and_scores(shared_dir: Path) -> None:
    folder = shared_dir / "tokenizers" / "llama2"
    data = (folder / "tokenizer.json").read_bytes()
    expected = open_tokenizer(data, bos_id=1, add_bos=True)
    said = gguf_files.sentence_piece_vocabulary(folder)
    found = rebuilt(said)
    rebuilt_data, _ = tokenizer_of(as_metadata(said))
    merges = [json.loads(one or b"")["model"]["merges"] for one in (rebuilt_data, data)]
    assert merges[0] == [one.split(" ") for one in merges[1]]
    prose = (shared_dir / "text" / "wikitext2-test.txt").read_text("utf-8")[:20000]
    for text in [*TEXTS, prose]:
        ids = expected.encode(text, parse_special=False)
        assert found.encode(text, parse_special=False) == ids, text
        assert found.decode(ids) == expected.decode(ids)


@pytest.mark.parametrize("rule", ["gpt-2", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_the_vectors_of_llama_cpp(shared_dir: Path, rule: str) -> None:
    folder = shared_dir / "tokenizers"
    name = rule.replace("-", "")
    vocab = json.loads((folder / name / "vocab.json").read_text("utf-8"))
    lines = (folder / name / "merges.txt").read_text("utf-8").split("\n")
    tokenizer = rebuilt(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": rule,
            "tokenizer.ggml.tokens": sorted(vocab, key=lambda word: vocab[word]),
            "tokenizer.ggml.merges": [one for one in lines if one and not one.startswith("#ver")],
        }
    )
    folder = folder / "llama.cpp-vectors"
    inputs = (folder / f"ggml-vocab-{rule}.gguf.inp").read_text("utf-8")
    outputs = (folder / f"ggml-vocab-{rule}.gguf.out").read_text("utf-8")
    n_checked = 0
    texts = inputs.split("\n__ggml_vocab_test__\n")
    for text, line in zip(texts, outputs.split("\n"), strict=False):
        assert tokenizer.encode(text) == [int(word) for word in line.split()], repr(text)
        n_checked += 1
    assert n_checked > 20


# ---- vocabularies in other files than tokenizer.json: the ids are those of one with it ----
WORDS = ("Hello, It's 12345!\n\n  the  end ", "caf\u00e9 x=f(y)\r\n\tz \u4f60", "<|im_end|>a", "")
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
    for text in WORDS:
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
