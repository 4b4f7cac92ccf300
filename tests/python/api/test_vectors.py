# SPDX-License-Identifier: Apache-2.0
"""Vectors of texts, of decoders and of encoders: equal whatever runs beside them."""

from __future__ import annotations

import json
import math
import re
import shutil
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import qsf
from make import gguf_families, golden_families
from make.gguf_files import add, close
from make.golden import ROOT
from make.golden_families import DOCUMENTS, QUERY, Case, with_tokenizer
from make.stored import Reader
from make.tiny_checkpoints import safetensors_bytes
from oracle.reference import forward, hidden_states, load_qsf
from qsf.errors import QsfArgumentError, QsfConversionError, QsfFormatError
from qsf.passes import PassItem
from qsf_converter import convert
from qsf_converter.sources.embedding import of_folder

N_POSITIONS = 310
TEXTS = [[(7 * i + n) % 72 for i in range(n)] for n in (1, 3, 300, 256, 257, N_POSITIONS)]
# Two have windows, one of them heads of two widths.
FAMILIES = ("nomic_bert", "gemma3-encoder", "embedding_gemma2")


def make(folder: Path, name: str = "nomic_bert", **config: Any) -> Path:
    """Write a checkpoint for long texts and return its folder."""
    case = golden_families.cases()[name]
    more = {"max_position_embeddings": N_POSITIONS, **config}
    return with_tokenizer(replace(case, config={**case.config, **more}).write(folder))


def vectors(path: Path, texts: Any = TEXTS, **options: Any) -> list[array[float]]:
    pooling = options.pop("pooling", "mean")
    with qsf.Model(path, **{"ram_budget": None, **options}) as model:
        return list(model.embed(texts, pooling=pooling))


def unit(vector: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(vector / np.linalg.norm(vector))


# ---- decoders ----
def test_a_decoder_without_a_head_makes_vectors(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """As e5-mistral and others are published: MistralModel, tensors without `model.`, untied."""
    folder = shutil.copytree(tiny_llama_dir, tmp_path / "base")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config |= {"architectures": ["LlamaModel"], "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    stored = load_file(folder / "model.safetensors")
    tensors = {name.removeprefix("model."): values for name, values in stored.items()}
    save_file(tensors, folder / "model.safetensors")
    report = convert(folder, tmp_path / "base.qsf", quant_type="f16")
    assert any("LlamaModel has no head" in line for line in report.warnings)
    convert(tiny_llama_dir, tmp_path / "whole.qsf", quant_type="f16")
    assert vectors(tmp_path / "base.qsf") == vectors(tmp_path / "whole.qsf")


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_those_of_sentence_transformers(tiny_llama_f16: Path, pooling: str) -> None:
    golden = json.loads((ROOT / "tests" / "golden" / "vectors.json").read_text("utf-8"))
    with qsf.Model(tiny_llama_f16, exact=True, ram_budget=None) as model:
        (got,) = model.embed([golden["tokens"]], pooling=pooling)
        (cut,) = model.embed([golden["tokens"]], pooling=pooling, dimensions=8)
    assert np.abs(np.array(got[:24]) - golden[pooling]).max() < 1e-5
    assert abs(np.linalg.norm(got) - 1) < 1e-6
    assert np.abs(np.array(cut) - unit(np.array(got[:8]))).max() < 1e-6


def test_what_cannot_be_is_refused(tiny_llama_8bit: Path) -> None:
    with qsf.Model(tiny_llama_8bit, ram_budget=None, threads=1) as model:
        room = array("d", bytes(8 * model.info.dim))
        for item, match in (
            (PassItem(model.session, [1], "none", n_hidden=2, hidden=room), "2 hidden .* 1 tokens"),
            (PassItem(model.session, [1], "last", n_hidden=1, hidden=room), "logits too"),
            (PassItem(model.session, [1], "none", n_hidden=1, hidden=room[1:]), "8 bytes each"),
        ):
            with pytest.raises(QsfArgumentError, match=match):
                model.run_pass([item])
        assert not any(room)
        for options, match in (
            ({"pooling": "max"}, "pooling must be last or mean"),
            ({"dimensions": 0}, "dimensions"),
            ({"dimensions": model.info.dim + 1}, "dimensions"),
        ):
            with pytest.raises(QsfArgumentError, match=match):
                list(model.embed(["a"], **options))
        with pytest.raises(QsfArgumentError, match="empty"):
            list(model.embed(["a", []]))


@pytest.fixture(scope="module")
def embedder(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as sentence-transformers writes it, whose tokenizer ends texts with a token."""
    folder = tmp_path_factory.mktemp("embedder") / "hf"
    shutil.copytree(tiny_llama_dir, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    end = tokenizer["added_tokens"][1]
    text, special = {"Sequence": {"id": "A", "type_id": 0}}, end["content"]
    last = {"SpecialToken": {"id": special, "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing", "single": [text, last], "pair": [text, last],
        "special_tokens": {special: {"id": special, "ids": [end["id"]], "tokens": [special]}},
    }  # fmt: skip
    path.write_text(json.dumps(tokenizer), "utf-8")
    (folder / "1_Pooling").mkdir()
    mode = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(mode), "utf-8")
    convert(folder, folder.parent / "m.qsf", quant_type="f16")
    return folder


def test_the_conventions_of_the_makers_are_kept(embedder: Path) -> None:
    path = embedder.parent / "m.qsf"
    with qsf.Model(path, ram_budget=None, exact=True) as model:
        (end_id,) = model.text_vectors.end_ids
        assert model.text_vectors.pooling == "last"
        tokens = [*model.tokenizer.encode("Once upon a time"), end_id]
        assert list(model.embed(["Once upon a time"])) == list(
            model.embed([tokens], pooling="last")
        )


# ---- encoders ----
@pytest.mark.parametrize("name", FAMILIES)
def test_long_texts_are_those_of_the_reference(name: str, tmp_path: Path) -> None:
    """Keys of several spans on both sides of a token; windows across their edges."""
    convert(make(tmp_path / "m", name), tmp_path / "m.qsf", quant_type="f32")
    model, texts = load_qsf(tmp_path / "m.qsf"), TEXTS[1:3]
    states = [hidden_states(model, text) for text in texts]
    for pooling in ("mean", "cls"):
        got = vectors(tmp_path / "m.qsf", texts, exact=True, pooling=pooling)
        for rows, vector in zip(states, got, strict=True):
            want = unit(rows[0] if pooling == "cls" else rows.mean(axis=0))
            assert np.abs(np.array(vector) - want).max() < 5e-6


def test_a_context_is_as_long_as_fits(tmp_path: Path) -> None:
    path = tmp_path / "m.qsf"
    convert(make(tmp_path / "m", max_position_embeddings=8192), path)
    whole = vectors(path, TEXTS[:4])
    least = -(-qsf.Model.plan(path, ram_budget=1, max_seq_len=300).min_budget_bytes // 2**20)
    with qsf.Model(path, ram_budget=least + 4) as model:
        assert list(model.embed(TEXTS[:4])) == whole
        n_fitting = model.info.plan.ctx_tokens
        assert 256 <= n_fitting == model.info.plan.chunk_tokens < 8192
        (longest,) = model.embed([[5] * n_fitting])
        assert abs(np.linalg.norm(longest) - 1) < 1e-6
        with pytest.raises(QsfArgumentError, match=f"{n_fitting + 1}.*{n_fitting}"):
            list(model.embed([[5] * (n_fitting + 1)]))
    with pytest.raises(qsf.QsfMemoryError):
        qsf.Model(path, ram_budget=least + 4, max_seq_len=8192)


def test_what_an_encoder_cannot_do_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.qsf"
    convert(make(tmp_path / "m"), path)
    with qsf.Model(path, ram_budget=None, sessions=2) as model:
        assert model.text_vectors.pooling == "mean"
        for call in (
            lambda: model.logits([1, 2]),
            lambda: list(model.generate([1, 2])),
            lambda: model.run_pass([PassItem(model.session, [1], "last")]),
        ):
            with pytest.raises(QsfArgumentError, match=r"is an encoder.*vectors of whole texts"):
                call()
        room = array("d", bytes(8 * model.info.dim))
        part = PassItem(model.session, [1, 2], "none", n_hidden=1, hidden=room)
        model.run_pass([part])
        with pytest.raises(QsfArgumentError, match="whole texts"):
            model.run_pass([part])  # tokens behind others
        with pytest.raises(QsfArgumentError, match="mean or cls"):
            list(model.embed([[1]], pooling="last"))
    with pytest.raises(QsfArgumentError, match="before a token"):
        qsf.Model(path, ram_budget=None, kv_policy="window:64")
    with pytest.raises(QsfConversionError, match="predicts no tokens"):
        convert(tmp_path / "m", tmp_path / "c.qsf", calibration="bundled", force=True)


def dense_folder(folder: Path, activation: str = "Identity") -> Path:
    """EmbeddingGemma's form: mean pooling, then two dense layers."""
    make(folder, "gemma3-encoder")
    rng = np.random.default_rng(3)
    for i, shape in ((2, (100, 72)), (3, (72, 100))):
        (folder / f"{i}_Dense").mkdir()
        weights = {"linear.weight": rng.standard_normal(shape).astype(np.float32)}
        (folder / f"{i}_Dense" / "model.safetensors").write_bytes(
            safetensors_bytes(weights, "fp32")
        )
        name = f"torch.nn.modules.linear.{activation}"
        config = {"bias": False, "activation_function": name}
        (folder / f"{i}_Dense" / "config.json").write_text(json.dumps(config))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    return folder


def test_dense_layers_are_computed_behind_the_pooling(tmp_path: Path) -> None:
    folder = dense_folder(tmp_path / "m")
    convert(folder, tmp_path / "m.qsf", quant_type="f32")
    rng = np.random.default_rng(3)
    first, second = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((100, 72), (72, 100))
    )
    model = load_qsf(tmp_path / "m.qsf")
    texts = TEXTS[:2]
    for text, got in zip(texts, vectors(tmp_path / "m.qsf", texts, exact=True), strict=True):
        states = forward(model, text).final_norm
        want = unit(second @ (first @ states.mean(axis=0)))
        assert np.abs(np.array(got) - want).max() < 2e-6
    with pytest.raises(QsfConversionError, match=r"Tanh.*allowed: Identity"):
        convert(dense_folder(tmp_path / "t", "Tanh"), tmp_path / "t.qsf")
    weights = {name: np.zeros((72, 72), np.float32) for name in ("linear.weight", "other")}
    (folder / "2_Dense" / "model.safetensors").write_bytes(safetensors_bytes(weights, "fp32"))
    with pytest.raises(QsfConversionError, match=r"2_Dense: it has .*other.*allowed: linear"):
        convert(folder, tmp_path / "u.qsf")


def test_the_makers_pooling_and_the_usual_type(tmp_path: Path) -> None:
    folder = make(tmp_path / "m")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    convert(folder, tmp_path / "m.qsf")
    with qsf.Model(tmp_path / "m.qsf", ram_budget=None) as model:
        assert (model.text_vectors.pooling, model.info.quant_type) == ("cls", "8bit")
        ids = [2, 5, 4 + 27, 3]
        assert list(model.embed(["Aa"])) == list(model.embed([ids], pooling="cls"))
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')  # release 5
    assert of_folder(folder, has_head=False)["pooling"] == "cls"
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(QsfConversionError, match="none of the modes"):
        convert(folder, tmp_path / "n.qsf")


def test_texts_are_cut_where_the_makers_cut_them(tmp_path: Path) -> None:
    """As sentence-transformers does: the tokens around a text stay."""
    folder = make(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 9}')
    settings = folder / "sentence_bert_config.json"
    for text, most in (('{"max_seq_length": 6}', 6), ('{"max_seq_length": null}', 9), ("{}", 9)):
        settings.write_text(text)
        convert(folder, tmp_path / "m.qsf", force=True)
        letters = "a b c d e f g h i j k l"
        ids = [2, *range(5, 5 + most - 2), 3]
        with qsf.Model(tmp_path / "m.qsf", ram_budget=None) as model:
            assert model.text_vectors.max_tokens == most
            with pytest.warns(UserWarning, match="longer than") as warned:
                short, cut, very = model.embed(["a", letters, letters * 2000])
            assert [str(each.message).split(" tokens")[0] for each in warned] == [
                f"text {i} is longer than the {most}" for i in (1, 2)
            ]
            assert list(model.embed([ids])) == [cut] == [very]
            assert list(model.embed([ids + ids])) != [cut]  # token ids are used as they are
            assert list(model.embed([letters[: 2 * (most - 2)]])) == [cut] != [short]
    settings.write_text('{"max_seq_length": "many"}')
    with pytest.raises(QsfConversionError, match=r"max_seq_length = 'many' is not a number"):
        convert(folder, tmp_path / "m.qsf", force=True)


def test_ids_need_no_tokenizer(tmp_path: Path) -> None:
    case = golden_families.cases()["nomic_bert"]
    convert(case.write(tmp_path / "m"), tmp_path / "m.qsf", allow_no_tokenizer=True)
    with qsf.Model(tmp_path / "m.qsf", ram_budget=None) as model:
        (vector,) = model.embed([[1, 2, 3]])
        assert len(vector) == 72
        with pytest.raises(QsfArgumentError, match=r"no tokenizer: logits.*embed.*token ids"):
            list(model.embed(["a"]))
        with pytest.raises(QsfArgumentError, match="no tokenizer"):
            model.rerank("a", ["b"])


# ---- cross-encoders, and rerankers of Qwen3's kind ----
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
        classifier = model.text_vectors.classifier
        assert classifier is not None
        with pytest.raises(QsfFormatError, match="72 numbers, and the dense matrix makes 3"):
            classifier.logit([0.5] * 3)
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
