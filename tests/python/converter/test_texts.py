"""Texts are read as files say, and cut into samples that hold what they should."""

# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from qsf.errors import QsfConversionError, QsfIOError
from qsf_converter.calibrate import texts
from qsf_converter.calibrate.texts import bundled_text, cut_samples, read_texts

BOS, EOS = 0, 1


@pytest.fixture(scope="module")
def tokenizer_json(tiny_llama_dir: Path) -> bytes:
    return (tiny_llama_dir / "tokenizer.json").read_bytes()


def ids_of(tokenizer_json: bytes, text: str) -> list[int]:
    library = tokenizers.Tokenizer.from_buffer(tokenizer_json)
    library.encode_special_tokens = True
    return list(library.encode(text, add_special_tokens=False).ids)


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# ---- files ----


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "One.\n\n\nTwo.\n", ["One.\n\n\nTwo.\n"]),
        ("a.txt", b"\xef\xbb\xbfmark", ["mark"]),
        ("a", "One\n<|endoftext|>\nTwo <|endoftext|>\r\n<|endoftext|>\r\n  \n", ["One\n",
            "Two <|endoftext|>\r\n"]),
        ("a.jsonl", '"x"\n\n{"text": "y", "prompt": "no"}\r\n{"content": "z"}', ["x", "y", "z"]),
        ("a.jsonl", '{"text": null, "prompt": "p"}\n{"text": " "}\n"\u2028"\n"a\u2028b"\n',
            ["p", "a\u2028b"]),
        ("a.JSON", '["x", {"text": "y"}]', ["x", "y"]),
    ],
)  # fmt: skip
def test_files(tmp_path: Path, name: str, content: str | bytes, expected: list[str]) -> None:
    assert read_texts(written(tmp_path, name, content)) == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", "no text in its 0 bytes"),
        ("a.txt", " \n\t\n", "no text in its 4 bytes"),
        ("a.json", "", "no text in its 0 bytes"),
        ("a.jsonl", "\n\n", "no text in its 2 bytes"),
        ("a.txt", b"ok\nno \xff\n", "line 2 is not UTF-8 (byte 0xff at offset 6)"),
        ("a.jsonl", '"x"\n\n{"text": }\n', "line 3: not JSON"),
        ("a.jsonl", "[" * 100_000, "line 1: nested 100000 deep"),
        ("a.jsonl", '"x"\n7\n', "line 2: a string or an object is expected, not int"),
        ("a.jsonl", '{"text": 7, "b": 1}\n', 'line 1: no string called "text", "content" or '
            '"prompt"; its keys are "text", "b"'),
        ("a.json", '["x", {}]', "value 2: no string"),
        ("a.json", '{"text": "x"}', "a JSON array of texts is expected, not dict"),
    ],
)  # fmt: skip
def test_refused_files(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    path = written(tmp_path, name, content)
    with pytest.raises(QsfConversionError) as caught:
        read_texts(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_the_system_refuses(tmp_path: Path) -> None:
    with pytest.raises(QsfIOError, match="no such file"):
        read_texts(tmp_path / "absent.txt")
    with pytest.raises(QsfIOError):
        read_texts(tmp_path)


# ---- samples ----


def test_samples_hold_the_texts_in_order(tokenizer_json: bytes) -> None:
    both = ["A cat sat on a mat, and it was happy. " * 30, "Dogs <|end_of_text|> bark. " * 30]
    expected = [*ids_of(tokenizer_json, both[0]), EOS, *ids_of(tokenizer_json, both[1])]
    found = cut_samples(tokenizer_json, both, n_tokens=65, max_samples=1000, bos_id=BOS, eos_id=EOS)
    assert found.dtype == np.int32
    assert found.shape == (len(expected) // 64, 65)
    assert (found[:, 0] == BOS).all()
    assert found[:, 1:].ravel().tolist() == expected[: found[:, 1:].size]
    assert expected.count(EOS) == 1  # what only reads like the token is text


def test_samples_of_a_model_without_bos_and_eos(tokenizer_json: bytes) -> None:
    both = ["A cat sat on a mat. " * 20, "Dogs bark. " * 20]
    expected = ids_of(tokenizer_json, both[0]) + ids_of(tokenizer_json, both[1])
    found = cut_samples(tokenizer_json, both, n_tokens=64, max_samples=1000)
    assert found.ravel().tolist() == expected[: len(expected) // 64 * 64]


def test_samples_are_spread_evenly(tokenizer_json: bytes) -> None:
    text = " ".join(str(i) for i in range(3000))
    every = cut_samples(tokenizer_json, [text], n_tokens=64, max_samples=10_000, bos_id=BOS)
    some = cut_samples(tokenizer_json, [text], n_tokens=64, max_samples=7, bos_id=BOS)
    at = [i * len(every) // 7 for i in range(7)]
    assert len(every) > 70
    assert (some == every[at]).all()
    again = cut_samples(tokenizer_json, [text], n_tokens=64, max_samples=7, bos_id=BOS)
    assert (some == again).all()


def test_a_short_text_makes_one_shorter_sample(tokenizer_json: bytes) -> None:
    text = "A cat sat on a mat, and it was happy. " * 6
    ids = ids_of(tokenizer_json, text)
    assert 64 <= len(ids) < 200
    found = cut_samples(tokenizer_json, [text], n_tokens=512, max_samples=8, bos_id=BOS)
    assert found.tolist() == [[BOS, *ids]]


def test_too_little_text(tokenizer_json: bytes) -> None:
    ids = ids_of(tokenizer_json, "A cat sat.")
    message = f"the text has {len(ids)} tokens; at least 63 are needed, and 4088 for 8 samples of"
    with pytest.raises(QsfConversionError, match=message):
        cut_samples(tokenizer_json, ["A cat sat."], n_tokens=512, max_samples=8, bos_id=BOS)
    with pytest.raises(QsfConversionError, match="the text has 0 tokens"):
        cut_samples(tokenizer_json, [], n_tokens=512, max_samples=8)
    with pytest.raises(QsfConversionError, match="hold no text"):
        cut_samples(tokenizer_json, ["a"], n_tokens=1, max_samples=8, bos_id=BOS)
    assert cut_samples(tokenizer_json, ["A cat sat."], n_tokens=3, max_samples=1).shape == (1, 3)


def test_texts_that_are_not_unicode(tokenizer_json: bytes) -> None:
    with pytest.raises(QsfConversionError, match="text 2 is not valid Unicode"):
        cut_samples(tokenizer_json, ["fine", "\ud800"], n_tokens=8, max_samples=1)


def test_long_texts_are_encoded_in_pieces_without_loss(
    tokenizer_json: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f"Line {i} of a long text.\n" for i in range(400)) + "word " * 400 + "x" * 900
    whole = cut_samples(tokenizer_json, [text], n_tokens=64, max_samples=10_000)
    monkeypatch.setattr(texts, "_PIECE_CHARS", 500)
    pieces = list(texts._pieces(text))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 500
    assert len(pieces) > 20
    cut = cut_samples(tokenizer_json, [text.rstrip("x")], n_tokens=64, max_samples=10_000)
    assert (cut == whole[: len(cut)]).all()  # no piece ends within a token


def test_of_far_too_much_text_a_part_is_taken_everywhere(
    tokenizer_json: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "_PIECE_CHARS", 50)
    many = [f"<{i:05}> " * (i % 17) for i in range(4000)]
    taken = texts._spread(many, 0)
    chars = "".join(piece for text in taken for piece in text)
    assert 0.9 * 64 * 50 < len(chars) <= 64 * 50
    numbers = [int(word.strip("<>")) for word in chars.split() if len(word) == 7]
    assert max(np.diff([0, *numbers, 4000])) < 300
    assert numbers == sorted(numbers)


# ---- the bundled text ----


def test_bundled_text(tokenizer_json: bytes) -> None:
    text = bundled_text()
    assert 120_000 <= len(text.encode()) <= 200_000
    assert "\r" not in text
    assert "\ufffd" not in text
    assert "Gutenberg" not in text
    found = cut_samples(tokenizer_json, [text], n_tokens=256, max_samples=128, bos_id=BOS)
    assert found.shape == (128, 256)


def test_every_part_of_the_bundled_text_has_a_source(project_root: Path) -> None:
    sources = (
        project_root / "converter/qsf_converter/calibrate/CALIBRATION_TEXT_SOURCES.md"
    ).read_text("utf-8")
    assert json.dumps(len(bundled_text().encode())) in sources.replace(",", "")
