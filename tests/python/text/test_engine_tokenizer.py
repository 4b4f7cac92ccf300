"""The engine's tokenizer: equal to the library's, for every kind that it covers."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import base64
import contextlib
import functools
import json
import random
import re
import resource
import struct
import sys
import unicodedata
import zlib
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from make.mutants import SECTIONS
from make.refusals import refusals
from make.stored import unpack_tokenizer
from make.text_families import MARK, families, qwen2_json, random_text, spm_json
from qsf.errors import QsfArgumentError, QsfFormatError, QsfUnsupportedError
from qsf.text.parts import read_text_parts
from qsf.text.tokenizer import Tokenizer, max_text_bytes, protect_special
from qsf_converter import convert
from qsf_converter.text.steps import precompiled_map
from qsf_converter.text.tables import library_float, open_tokenizer, text_section


@functools.cache
def both(name: str) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    return opened(families(is_small=True)[name])


def opened(data: bytes) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    section, reason = text_section(data, bos_id=None, add_bos=None)
    assert section is not None, reason
    return Tokenizer(section), tokenizers.Tokenizer.from_buffer(data)


def check_equal(name: str, text: str, *, parse_special: bool) -> None:
    ours, library = both(name)
    library.encode_special_tokens = not parse_special
    expected = library.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, add_prefix=False, parse_special=parse_special) == expected
    if "nor\u00e9" in text:  # newer libraries decode it in its normalised form, older ones as it is
        return
    assert ours.decode(expected, skip_special=False) == library.decode(
        expected, skip_special_tokens=False
    )


NAMES = sorted(families(is_small=True))


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_texts_are_those_of_the_library(name: str) -> None:
    rng = random.Random(name)
    for i in range(100):
        check_equal(name, random_text(rng, rng.randrange(1, 16)), parse_special=i % 3 != 0)


@given(name=st.sampled_from(NAMES), ids=st.lists(st.integers(-1, 700), max_size=40))
def test_pieces_join_to_the_whole(name: str, ids: list[int]) -> None:
    """And none ends in the middle of a character."""
    ours, _ = both(name)
    decoder = ours.incremental(at_start=True)
    pieces = [decoder.push(token_id) for token_id in ids]
    assert "".join(pieces) + decoder.flush() == ours.decode(ids)
    raw = b"".join(ours.token_bytes(token_id) for token_id in ids)
    with contextlib.suppress(UnicodeDecodeError):
        assert "\ufffd" in raw.decode() or all("\ufffd" not in piece for piece in pieces)


def real_json(shared_dir: Path, name: str) -> bytes:
    folder = shared_dir / "tokenizers" / name
    return qwen2_json(folder) if name == "qwen2" else (folder / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("name", "n_chars"),
    [
        ("gpt2", 30_000),
        ("llama2", 30_000),
        *(pytest.param(name, None, marks=pytest.mark.slow) for name in ("gpt2", "llama2", "qwen2")),
    ],
)
def test_real_vocabularies_equal_the_library(
    shared_dir: Path, name: str, n_chars: int | None
) -> None:
    ours, library = opened(real_json(shared_dir, name))
    paths = sorted((shared_dir / "text").glob("*.txt"))
    assert paths
    for path in paths:
        text = path.read_text("utf-8")[:n_chars]
        ids = library.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_prefix=False) == ids
        assert ours.decode(ids) == library.decode(ids)


@pytest.mark.parametrize(
    ("name", "vectors"),
    [
        ("gpt2", "gpt-2"),
        ("llama2", "llama-spm"),
        pytest.param("qwen2", "qwen2", marks=pytest.mark.slow),
    ],
)
def test_the_vectors_of_llama_cpp(shared_dir: Path, name: str, vectors: str) -> None:
    ours, _ = opened(real_json(shared_dir, name))
    path = shared_dir / "tokenizers" / "llama.cpp-vectors" / f"ggml-vocab-{vectors}.gguf"
    texts = path.with_suffix(".gguf.inp").read_text("utf-8").split("\n__ggml_vocab_test__\n")
    lines = path.with_suffix(".gguf.out").read_text("utf-8").split("\n")
    assert len(texts) == len(lines) == 47
    for text, line in zip(texts, lines, strict=True):
        ids = [int(word) for word in line.split()]
        assert ours.encode(text, add_prefix=False, parse_special=False) == ids, repr(text)
        assert ours.decode(ids) == text


@pytest.mark.parametrize("name", NAMES)
def test_names_and_special_tokens_are_those_of_the_library(name: str) -> None:
    ours, library = both(name)
    assert ours.n_vocab == library.get_vocab_size()
    added = library.get_added_tokens_decoder().values()
    special = [token.content for token in added if token.special]
    assert ours.special_names == tuple(sorted(special, key=lambda word: (-len(word), word)))
    for word, token_id in list(library.get_vocab().items())[::17]:
        assert ours.token_id(word) == token_id
    assert ours.token_id("no such token") is None


@pytest.mark.parametrize(
    ("bos_id", "add_bos", "prefix"),
    [(1, None, None), (1, True, None), (1, False, []), (None, None, None), (2, True, [2, 1])],
)
def test_the_prefix_is_the_librarys_unless_the_configuration_differs(
    bos_id: int | None, add_bos: bool | None, prefix: list[int] | None
) -> None:
    data = families(is_small=True)["llama2"]
    library = tokenizers.Tokenizer.from_buffer(data)
    expected = library.encode("").ids if prefix is None else prefix
    assert prefix is not None or expected, "the library adds one"
    ours = open_tokenizer(data, bos_id=bos_id, add_bos=add_bos)
    for text in ("", "a word", "<s>a", "<s><s>a"):
        bare = library.encode(text, add_special_tokens=False).ids
        has_prefix = bool(expected) and bare[: len(expected)] == expected
        assert ours.encode(text) == (bare if has_prefix else [*expected, *bare]), text


@pytest.mark.parametrize(("change", "reason"), refusals("engine tokenizers"))
def test_what_is_not_covered_is_named(change: dict[str, Any], reason: str) -> None:
    data = {**json.loads(families(is_small=True)["llama2"]), **change}
    section, text = text_section(json.dumps(data).encode(), bos_id=None, add_bos=None)
    assert section is None
    assert text is not None
    assert reason in text


def test_an_unknown_token_that_never_comes_may_be_missing() -> None:
    data = json.loads(families(is_small=True)["gpt2"])
    data["model"]["unk_token"] = "<none>"
    text = json.dumps(data).encode()
    expected = tokenizers.Tokenizer.from_buffer(text).encode("a caf\u00e9 \u2603").ids
    assert open_tokenizer(text, bos_id=None).encode("a caf\u00e9 \u2603") == expected
    del data["model"]["vocab"]["!"]
    section, reason = text_section(json.dumps(data).encode(), bos_id=None, add_bos=None)
    assert section is None
    assert "unk_token that is not in the vocabulary" in str(reason)


def test_sections_of_other_versions_and_damaged_ones() -> None:
    section, _ = text_section(families(is_small=True)["gpt2"], bos_id=None, add_bos=None)
    assert section is not None
    with pytest.raises(QsfFormatError, match="TEXT"):
        Tokenizer(section[:-8])
    with pytest.raises(QsfUnsupportedError, match="version 3, this build reads versions 1 to 2"):
        Tokenizer(b"\3" + section[1:])
    for name, is_right in (("llama2", True), ("gpt2", False)):
        section, _ = text_section(families(is_small=True)[name], bos_id=None, add_bos=None)
        assert section is not None
        older = b"\1" + section[1:]
        if is_right:
            assert Tokenizer(older).encode("a b") == Tokenizer(section).encode("a b")
        else:
            with pytest.raises(QsfUnsupportedError, match="make the file again with `qsf convert`"):
                Tokenizer(older)
    with pytest.raises(QsfArgumentError, match="character 2"):
        both("gpt2")[0].encode("ab\ud800")


@pytest.mark.parametrize(
    "text", ["-9.876543210987654321", "-0.1", "12345678901234567890123.5", "1e-5"]
)
def test_scores_are_read_as_the_library_reads_them(text: str) -> None:
    vocabulary = [["<unk>", 0], ["a", "SCORE"]]
    model = {"type": "Unigram", "unk_id": 0, "vocab": vocabulary, "byte_fallback": False}
    data = json.dumps({"version": "1.0", "added_tokens": [], "model": model}).replace(
        '"SCORE"', text
    )
    library = json.loads(tokenizers.Tokenizer.from_str(data).to_str())
    assert library_float(text) == library["model"]["vocab"][1][1]


# ---- WordPiece, and SentencePiece's tables of characters ----
OF_BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
STRIPPED = normalizers.BertNormalizer(
    clean_text=False, handle_chinese_chars=False, strip_accents=True, lowercase=False
)
# SentencePiece's compiled form of: U+FF21 -> A, e U+0301 -> U+00E9, U+00AD -> nothing, U+2460 -> 1,
# U+FDFA -> 18 letters, tab -> space.
CHARSMAP = zlib.decompress(
    base64.b85decode(
        "c-ke?1+11;90%ZYuQ(<fj1dY0<WhptB_Yxwp-"
        "4+hDlp2VxxfcpP&!3HKmjRf6i`Veb_MD0BMltr=x%sEc(-"
        "T2|GVGW*}J{xgft<9q!6A<A3{P1$*I{A!?0&VNNZj$J;{?IiD9n(8S}<mA*7S@ysMKlSnz{Bqs&YuvXX"
        "@tc%JNJBL_d7NDQ_JImyk7<azoDAs=}uKz<7H5-"
        "(GT!n{IJicp+ll%xcuDMeYzP>xrrKzUxHBCk`4DpaN#RjEOBYEhFq)TS<PP@j6dNdp@47L9nDCN!oQO="
        "&@MTJjF9X+>Mw(4Ka5;9WY=kuG%RJ-X73_vt}*ddAnJB!=Fy7k%l&hkU@te8i`GLVx-"
        "(kO2&45JMTlu=r1A1j89ggwc#*3@LoZSjO==6By4VCNhP|Ok*lDn9di><V$8To3HqqIm}}&-"
        "!PvAe9IyhvY78!$`Y2dj1_#(Dps<F)vRM}{9Ll04gAO^Hu7`)9I}~T*vb~RvyETb!A^c-"
        "H@o6pBq8jPzmv*7_OhQpILHAGbBLoHAx4zr9OEP>IL#^k;!pnJZ~o;BXSw87{wL4HyVQj6zr4WtCtU~^"
        "xx!_xag`ff=N31)!)@+ymj~SE5f8(Y%U9AR*uFSK*To{SF-g%yA`%;&6x|@k8e%EYHO7(QF@yP|<^"
    )
)

# Of such a character and the marks behind it the library forgets the marks, or joins none.
JOINED = re.compile("([\uff21\u00ad\u2460\ufdfa\t]\\W)|e\u0301[^\\x00-\x7f]")


def is_older(text: str) -> bool:
    """Does the library know all marks? Its table is that of Unicode 8."""
    marks = [char for char in text if unicodedata.category(char) == "Mn"]
    return all(STRIPPED.normalize_str(char) == "" for char in marks)


def wordpiece(**options: Any) -> tokenizers.Tokenizer:
    """Return a small tokenizer as BERT's, trained on texts that are hard to split."""
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(**options)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    rng = random.Random(5)
    texts = [random_text(rng, 30) for _ in range(200)]
    trainer = trainers.WordPieceTrainer(vocab_size=700, special_tokens=OF_BERT, show_progress=False)
    made.train_from_iterator(texts, trainer)
    ids = [(name, made.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    return made


def unigram() -> tokenizers.Tokenizer:
    """Return a small tokenizer as XLM-RoBERTa's."""
    rng = random.Random(6)
    text = "".join(random_text(rng, 30) for _ in range(200)).replace(" ", MARK)
    starts = (rng.randrange(len(text)) for _ in range(900))
    words = {*text, *(text[i : i + rng.randrange(2, 5)] for i in starts)} - {"<s>", "</s>", "<unk>"}
    scored = [(word, -rng.randrange(64, 999) / 64) for word in sorted(words)]
    special = [("<s>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    made = tokenizers.Tokenizer(models.Unigram([*special, *scored], unk_id=2))
    made.normalizer = normalizers.Precompiled(CHARSMAP)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    return made


KINDS = {
    "uncased": lambda: wordpiece(lowercase=True),
    "cased": lambda: wordpiece(lowercase=False, strip_accents=False),
    "accents": lambda: wordpiece(lowercase=True, strip_accents=False),
    "unclean": lambda: wordpiece(lowercase=True, clean_text=False),
    "ideographs": lambda: wordpiece(lowercase=True, handle_chinese_chars=False),
    "unigram": unigram,
}


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_library(kind: str) -> None:
    library = KINDS[kind]()
    ours = open_tokenizer(library.to_str().encode(), bos_id=None)
    rng = random.Random(kind)
    n_tried = 0
    for _ in range(400):
        text = random_text(rng, rng.randrange(1, 25))
        if not is_older(text) or (kind == "unigram" and JOINED.search(text)):
            continue
        n_tried += 1
        want = library.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_prefix=False) == want, text
    assert n_tried > 240
    for text in ("x" * 100, "x" * 101, "", " ", "\u2581a", "a\u2581b"):
        assert (
            ours.encode(text, add_prefix=False)
            == library.encode(text, add_special_tokens=False).ids
        )


@pytest.mark.parametrize("leaf", [0, 1 << 8])
def test_a_table_of_characters_that_is_no_trie_is_refused(leaf: int) -> None:
    """Each unit is a child of all."""
    units = [0, *(byte | byte << 10 | leaf for byte in range(1, 0x100))]
    data = (4 * len(units)).to_bytes(4, "little") + struct.pack("<256I", *units) + b"a\0"
    with pytest.raises(ValueError, match="not a trie"):
        precompiled_map(base64.b64encode(data).decode())


def test_a_text_has_its_first_and_last_token() -> None:
    library = wordpiece(lowercase=True)
    ours = open_tokenizer(library.to_str().encode(), bos_id=None)
    assert [*ours.encode("The cat"), ours.token_id("[SEP]")] == library.encode("The cat").ids
    assert ours.decode(ours.encode("the cat")) == "the cat"


# ---- the tokenizer: encoding rules, and decoding one token at a time ----
SPM_JSON = spm_json(
    ["\u2581", "h", "i", "\u2581h", "\u2581hi", "<", "s", ">"], ["\u2581 h", "\u2581h i"]
)
SPM = open_tokenizer(SPM_JSON, bos_id=1, add_bos=True)


@pytest.fixture(scope="session")
def bundled_json(tiny_llama_dir: Path) -> bytes:
    return (tiny_llama_dir / "tokenizer.json").read_bytes()


@pytest.fixture(scope="session")
def bundled(bundled_json: bytes) -> Tokenizer:
    return open_tokenizer(bundled_json, bos_id=0, add_bos=True)


# ---- encoding ----
def test_bos_is_added_once_whoever_adds_it(bundled_json: bytes, bundled: Tokenizer) -> None:
    for add_bos in (True, None):  # the post-processor of this file adds it, too
        assert (
            open_tokenizer(bundled_json, bos_id=0, add_bos=add_bos).encode("Once")[:2].count(0) == 1
        )
    assert 0 not in open_tokenizer(bundled_json, bos_id=0, add_bos=False).encode("Once")
    assert SPM.encode("hi")[0] == 1
    assert open_tokenizer(SPM_JSON, bos_id=1, add_bos=None).encode("hi")[0] != 1
    assert bundled.encode("<|begin_of_text|>Once") == bundled.encode("Once")
    assert bundled.encode("Once", add_prefix=False) == bundled.encode("Once")[1:]
    assert bundled.encode("") == [0]


def test_special_tokens_are_texts_where_they_are_told(bundled: Tokenizer) -> None:
    text = "a<|end_of_text|>b"
    assert 1 in bundled.encode(text)
    ordinary = bundled.encode(text, parse_special=False)
    assert 1 not in ordinary
    assert bundled.decode(ordinary) == text
    assert 1 in bundled.encode(text)  # the choice does not stick
    names = SPM.special_names
    text = protect_special("</s> hi <s>", names, "\ufdd0")
    assert text.replace("\ufdd0", "") == "</s> hi <s>"
    assert all(name not in text for name in names)
    assert all(
        set(SPM.encode(p, add_prefix=False)).isdisjoint({1, 2}) for p in text.split("\ufdd0")
    )
    ids = bundled.encode("Once")
    assert bundled.decode(ids) == "Once"
    assert bundled.decode(ids, skip_special=False) == "<|begin_of_text|>Once"
    assert bundled.decode([-1, 10**6]) == ""  # ids that do not exist
    seams = ["\ufdd0\ufdd0" + "\ufdd0" * i for i in range(99)]
    assert len(protect_special("<s>" * 9, ["<s>", *seams], "\ufdd0")) == 36


def test_a_text_that_is_too_long_is_refused(bundled: Tokenizer) -> None:
    text = "a red ball " * 1000
    with pytest.raises(
        QsfArgumentError, match=r"too long: it has about [0-9]+ tokens, and the context holds"
    ):
        bundled.encode(text, max_tokens=100)
    n_tokens = len(bundled.encode(text))
    assert len(bundled.encode(text, max_tokens=n_tokens)) == n_tokens
    n_bytes = 20 << 20
    bundled.encode("a" * 99)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(QsfArgumentError, match=f"{n_bytes} bytes, .* 512 tokens has at most 65536"):
        bundled.encode("a" * n_bytes, max_tokens=512)
    scale = 1 if sys.platform == "darwin" else 1024
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) * scale < 2 * n_bytes + (4 << 20), "the text and its bytes, no more"
    assert max_text_bytes(100_000) == 1_600_000


# ---- decoding ----
def test_characters_arrive_whole_and_at_once(bundled: Tokenizer) -> None:
    decoder = bundled.incremental()
    ids = bundled.encode("\U0001f600", add_prefix=False)
    assert len(ids) > 1
    assert [decoder.push(token_id) for token_id in ids] == [""] * (len(ids) - 1) + ["\U0001f600"]
    assert decoder.flush() == ""
    decoder = SPM.incremental()
    assert [decoder.push(3 + byte) for byte in "é".encode()] == ["", "é"]
    assert decoder.push(3 + 0xE2) == ""
    assert decoder.flush() == "\ufffd"
    hi = SPM.token_id("\u2581hi")
    assert hi is not None
    assert SPM.incremental(at_start=False).push(hi) == " hi"
    assert SPM.incremental(at_start=True).push(hi) == "hi"
    assert SPM.decode([hi, hi]) == "hi hi"


# ---- refusals ----
@pytest.mark.parametrize("data", [b"", b"{}", b"not json", b"\xff\xfe"])
def test_what_is_not_a_tokenizer_is_refused(data: bytes) -> None:
    with pytest.raises(QsfUnsupportedError, match="tokenizer"):
        open_tokenizer(data, bos_id=None)


@given(st.integers(0, 2**32))
def test_any_tokenizer_of_a_stranger_encodes_or_is_a_typed_error(
    bundled_json: bytes, seed: int
) -> None:
    data = SECTIONS["TOKN"](random.Random(seed), bundled_json)
    try:
        tokenizer = open_tokenizer(unpack_tokenizer(data), bos_id=0)
        ids = tokenizer.encode("Hi, <s> you\U0001f600 0i", max_tokens=64)
        assert isinstance(tokenizer.decode(ids), str)
    except (QsfFormatError, QsfArgumentError):
        return  # QsfUnsupportedError is one of the first


def test_a_text_needs_no_library(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    path = tmp_path / "m.qsf"
    assert convert(tiny_llama_dir, path).warnings == ()
    parts = read_text_parts(path)
    assert parts.tokenizer is not None
    assert parts.tokenizer.decode(parts.tokenizer.encode("Once upon a time")) == "Once upon a time"
    assert parts.text_bytes == parts.tokenizer.n_bytes
