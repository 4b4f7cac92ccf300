# SPDX-License-Identifier: Apache-2.0
"""WordPiece, and SentencePiece's tables of characters: the ids are those of the library."""

from __future__ import annotations

import base64
import random
import re
import struct
import unicodedata
import zlib
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from make.text_families import MARK, random_text
from qsf_converter.text.steps import precompiled_map
from qsf_converter.text.tables import open_tokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
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
    trainer = trainers.WordPieceTrainer(vocab_size=700, special_tokens=SPECIAL, show_progress=False)
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
