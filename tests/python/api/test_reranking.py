# SPDX-License-Identifier: Apache-2.0
"""Cross-encoders: scores of pairs as transformers computes them; of Qwen3-Reranker's kind too."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import qsf
from make import gguf_families, golden_families
from make.encoders import with_tokenizer
from make.gguf_files import add, close
from make.golden_families import DOCUMENTS, QUERY, Case
from make.stored import Reader
from qsf.errors import QsfArgumentError, QsfConversionError
from qsf_converter import convert

CASES = golden_families.rerankers()


def folder_of(case: Case, path: Path, **config: Any) -> Path:
    n_between = 2 if "roberta" in case.config["model_type"] else 1
    return with_tokenizer(replace(case, config={**case.config, **config}).write(path), n_between)


def logits(
    path: Path, query: str = QUERY, documents: Any = DOCUMENTS, **options: Any
) -> list[float]:
    """The logits of the documents in their order."""
    with qsf.Model(path, **{"ram_budget": None, **options}) as model:
        ranked = model.rerank(query, documents)
    assert [d.score for d in ranked] == sorted((d.score for d in ranked), reverse=True)
    scores = {d.index: d.score for d in ranked}
    return [math.log(scores[i] / (1 - scores[i])) for i in range(len(scores))]


@pytest.mark.parametrize("name", CASES)
def test_pairs_have_the_scores_of_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    assert case.scores is not None
    path = tmp_path / "m.qsf"
    convert(folder_of(case, tmp_path / "m"), path, quant_type="f32")
    got = logits(path, exact=True)
    assert np.abs(np.array(got) - case.scores).max() < 1e-5
    assert got == logits(path, exact=True, sessions=3, threads=2)


@pytest.mark.parametrize("name", ["xlm-roberta-pairs", "modernbert-pairs"])
def test_gguf_files_are_the_same_model(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    write_gguf(case, tmp_path / "m.gguf")
    models = {"a": case.write(tmp_path / "a"), "b": tmp_path / "m.gguf"}
    for key, source in models.items():
        convert(source, tmp_path / f"{key}.qsf", allow_no_tokenizer=True)
    with Reader(tmp_path / "a.qsf") as one, Reader(tmp_path / "b.qsf") as other:
        assert [one.read_unit(i) for i in range(len(one.units))] == [
            other.read_unit(i) for i in range(len(other.units))
        ]
        assert one.layer_kinds == other.layer_kinds
        chats = [json.loads(each.read_section("CHAT"))["embedding"] for each in (one, other)]
    assert chats[0]["classifier"] == chats[1]["classifier"]
    assert chats[0]["pooling"] == chats[1]["pooling"] == ("mean" if name[0] == "m" else "cls")


def write_gguf(case: Case, path: Path, *, without: str = "-") -> None:
    """Write a reranker as llama.cpp's converter does."""
    writer = gguf_families.begin(case, path)
    writer.add_pooling_type(gguf.PoolingType.RANK)
    add(writer, "tokenizer.ggml.model", "no_vocab")
    tensors = {
        re.sub(r"^classifier\.(?=weight|bias)", "classifier.out_proj.", name): values
        for name, values in case.tensors().items()
        if without not in name
    }
    bare = {re.sub("^(bert|roberta|model)[.]", "", name): v for name, v in tensors.items()}
    for tensor, values in gguf_families.converted_tensors(case, bare):
        writer.add_tensor(tensor, values)
    close(writer)


def test_what_is_no_reranker_is_refused(tmp_path: Path) -> None:
    case = CASES["bert-pairs"]
    write_gguf(case, tmp_path / "m.gguf")  # which has no pooler
    with pytest.raises(QsfConversionError, match=r"no dense layer.*HuggingFace folder"):
        convert(tmp_path / "m.gguf", tmp_path / "m.qsf", allow_no_tokenizer=True)
    shapes = {**case.shapes, "classifier.weight": (3, 72), "classifier.bias": (3,)}
    replace(case, shapes=shapes).write(tmp_path / "three")
    with pytest.raises(QsfConversionError, match="3 labels, and a reranker has 1"):
        convert(tmp_path / "three", tmp_path / "m.qsf", allow_no_tokenizer=True)
    folder = folder_of(CASES["modernbert-pairs"], tmp_path / "relu", classifier_activation="relu")
    with pytest.raises(QsfConversionError, match="classifier_activation = 'relu', allowed: tanh"):
        convert(folder, tmp_path / "m.qsf")


def test_a_cross_encoder_makes_no_vectors(tmp_path: Path) -> None:
    convert(folder_of(CASES["bert-pairs"], tmp_path / "m"), tmp_path / "m.qsf")
    with qsf.Model(tmp_path / "m.qsf", ram_budget=None) as model:
        with pytest.raises(QsfArgumentError, match=r"cross-encoder.*rerank"):
            list(model.embed(["a"]))
        assert model.rerank("a", []) == []
        # Names of special tokens in a text are ordinary text.
        forged, plain = ("a [SEP] b [SEP] c", "a sep b sep c")
        assert len({d.score for d in model.rerank("a", [forged, plain])}) == 2


def test_long_documents_are_cut_and_long_queries_refused(tmp_path: Path) -> None:
    folder = folder_of(CASES["bert-pairs"], tmp_path / "m")
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 20}')
    convert(folder, tmp_path / "m.qsf")
    with qsf.Model(tmp_path / "m.qsf", ram_budget=None) as model:
        long, short = "a b c d " * 500, " ".join("abcdabcdabcdab")  # 20 tokens with the query
        ranked = model.rerank("x y z", [long, short, short + " c"])
        assert {d.index: d.is_cut for d in ranked} == {0: True, 1: False, 2: True}
        scores = {d.index: d.score for d in ranked}
        assert scores[0] == scores[1] == scores[2]
        with pytest.raises(QsfArgumentError, match=r"query has 17 tokens.* 20,"):
            model.rerank("a " * 17, ["b"])
