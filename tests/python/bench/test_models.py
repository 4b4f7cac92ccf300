# SPDX-License-Identifier: Apache-2.0
"""The models of qsf.bench: shapes, random files, what is known of them, and their cache."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import gguf
import pytest

from make import bench_baselines, gguf_files
from qsf.errors import (
    QsfArgumentError,
    QsfConversionError,
    QsfFormatError,
    QsfIOError,
)
from qsf_bench.judge.bounds import kv_bytes_per_position
from qsf_bench.models import cache, facts, random_gguf, random_qsf
from qsf_bench.models.facts import baseline_type, check_same_work, read_facts
from qsf_bench.models.random_gguf import (
    BASELINE_TYPES,
    FILE_TYPES,
    gguf_bits_per_weight,
    gguf_bytes,
)
from qsf_bench.models.random_qsf import qsf_bits_per_weight, qsf_bytes
from qsf_bench.models.shapes import SHAPES, Shape, name_of
from qsf_bench.models.shapes import shape_of_file as shape_of
from qsf_converter.rounding.plan import QUANT_TYPES
from qsf_converter.sources.gguf_file import read_head

LLAMA = Shape(2, 256, 512, 4, 2, 320, 64)
GPT2 = Shape(4, 256, 512, 4, 4, 1203, 64, family="gpt2")
ODD = Shape(2, 192, 320, 4, 2, 301, 64, head_dim=32, is_tied=True)  # no whole blocks of 256
GEMMA3 = Shape(
    6, 256, 512, 4, 2, 960, 64, "gemma3_text", head_dim=64, is_tied=True, window_tokens=16
)
FAMILIES = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "odd": ODD,
    "gemma3": GEMMA3,
    "qwen3": dataclasses.replace(LLAMA, family="qwen3"),
    "phi3": dataclasses.replace(LLAMA, family="phi3"),
    "smollm3": dataclasses.replace(LLAMA, family="smollm3", n_layers=4),
    "olmoe": dataclasses.replace(LLAMA, family="olmoe", n_experts=5, n_chosen=2),
    "qwen3_moe": dataclasses.replace(LLAMA, family="qwen3_moe", n_experts=6, n_chosen=3),
}


@pytest.fixture(autouse=True)
def small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_qsf, "POOL_TILES", 64)


def write_qsf(path: Path, shape: Shape, quant_type: str, embed_type: str = "8bit") -> Path:
    random_qsf.write_model(path, shape, QUANT_TYPES[quant_type], QUANT_TYPES[embed_type])
    return path


def write_gguf(path: Path, shape: Shape, mixture: str) -> Path:
    random_gguf.write_model(path, shape, mixture)
    return path


# ---- files of both formats ----


# Each family with one type, and each type with one family.
CASES = [(family, "4bit") for family in FAMILIES]
CASES += [("llama", quant_type) for quant_type in BASELINE_TYPES if quant_type != "4bit"]


@pytest.mark.parametrize(("family", "quant_type"), CASES)
def test_both_files_are_as_predicted_and_the_same_work(
    tmp_path: Path, family: str, quant_type: str
) -> None:
    shape = FAMILIES[family]
    embed_type = cache.embed_type_beside_baseline(shape, quant_type)
    ours = write_qsf(tmp_path / "m.qsf", shape, quant_type, embed_type)
    theirs = write_gguf(tmp_path / "m.gguf", shape, BASELINE_TYPES[quant_type])
    assert shape_of(ours) == shape
    a, b = read_facts(ours), read_facts(theirs)
    assert a.tensor_bytes == qsf_bytes(shape, quant_type, embed_type=embed_type)
    assert b.tensor_bytes == gguf_bytes(shape, BASELINE_TYPES[quant_type])
    assert (a.engine, a.type, b.engine, b.type) == (
        *("qsf", quant_type),
        *("llama.cpp", BASELINE_TYPES[quant_type]),
    )
    assert (a.file_bytes, b.file_bytes) == (ours.stat().st_size, theirs.stat().st_size)
    assert a.n_weights == b.n_weights
    assert (a.token_madds, a.head_madds) == (b.token_madds, b.head_madds)
    assert a.shape_name == b.shape_name
    for name in ("n_layers", "dim", "ffn_dim", "n_heads", "n_kv_heads", "head_dim", "n_vocab"):
        assert getattr(a, name) == getattr(b, name) == getattr(shape, name)
    assert a.max_tokens == b.max_tokens == 64
    assert a.bits_per_weight == qsf_bits_per_weight(shape, quant_type, embed_type=embed_type)
    assert b.bits_per_weight == gguf_bits_per_weight(shape, BASELINE_TYPES[quant_type])
    if family != "odd":  # whose low bits fall back to four there
        check_same_work(a, b)
        check_same_work(b, a)


def test_facts_by_hand(tmp_path: Path) -> None:
    matrices = 2 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 512 * 256)
    table, norms = 320 * 256, 5 * 256
    a = read_facts(write_qsf(tmp_path / "m.qsf", LLAMA, "4bit"))
    b = read_facts(write_gguf(tmp_path / "m.gguf", LLAMA, "Q8_0"))
    assert a.n_weights == b.n_weights == matrices + 2 * table + norms
    assert (a.token_madds, a.head_madds) == (matrices, table)
    # 4bit: 4 bits and two f16 for each 64; 8bit: 8 bits and an f16 for each 64.
    head = table * 33 // 32
    assert a.tensor_bytes == matrices * 9 // 16 + 2 * head + 4 * norms
    assert a.token_bytes == matrices * 9 // 16 + head + 264 + 4 * norms
    assert a.bits_per_weight == pytest.approx(8 * a.tensor_bytes / a.n_weights, rel=1e-12)
    # Q8_0: 8 bits and an f16 for each 32.
    head = table * 34 // 32
    assert b.tensor_bytes == matrices * 34 // 32 + 2 * head + 4 * norms
    assert b.token_bytes == matrices * 34 // 32 + head + 272 + 4 * norms
    assert kv_bytes_per_position(a, "f16", "llama.cpp") == 2 * 2 * 128 * 2
    assert kv_bytes_per_position(a, "4bit", "llama.cpp") == 288


def test_a_token_meets_the_experts_that_are_chosen(tmp_path: Path) -> None:
    shape = FAMILIES["qwen3_moe"]
    matrix = 512 * 256
    attention = (256 + 128 + 128) * 256 + 256 * 256
    for path in (
        write_qsf(tmp_path / "m.qsf", shape, "f16", "f16"),
        write_gguf(tmp_path / "m.gguf", shape, "F16"),
    ):
        facts = read_facts(path)
        assert facts.token_madds == 2 * (attention + 6 * 256 + 3 * 3 * matrix)
        assert facts.tensor_bytes - facts.token_bytes == 2 * (2 * 3 * 3 * matrix + 319 * 256)


@pytest.mark.parametrize(
    ("family", "mixture"),
    [*((family, "Q4_K_M") for family in FAMILIES), *(("odd", mixture) for mixture in FILE_TYPES)],
)
def test_the_gguf_holds_what_its_table_says(tmp_path: Path, family: str, mixture: str) -> None:
    """Read back by our own reader and by the gguf package, whose weights must look like some."""
    path = write_gguf(tmp_path / "m.gguf", FAMILIES[family], mixture)
    with path.open("rb", buffering=0) as file:
        head = read_head(path, file)
    wanted = {t.name: (t.dims, t.type) for t in random_gguf.tensors(FAMILIES[family], mixture)}
    assert {t.name: (t.shape, t.type) for t in head.tensors.values()} == wanted
    assert head.metadata["general.file_type"] == FILE_TYPES[mixture][1]
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith(".bias"):
            assert not values.any()
        elif values.ndim == 1:
            assert (values == 1).all()
        else:
            assert values.std() == pytest.approx(0.02, rel=0.25), tensor.name
            assert abs(values.mean()) < 0.004, tensor.name


# llama.cpp quantises a GGUF: source, destination, mixture.
_QUANTISE = """
import sys, llama_cpp
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{sys.argv[3]}")
llama_cpp.llama_backend_init()
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), params))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        *(Shape(n, 256, 512, 8, 1, 512) for n in (10, 32)),
        Shape(17, 256, 512, 8, 8, 512),
        Shape(80, 256, 512, 8, 2, 512),
        ODD,
        GPT2,
    ],
    ids=name_of,
)
def test_types_are_those_of_the_real_quantiser(tmp_path: Path, shape: Shape) -> None:
    baseline = bench_baselines.baseline_python()
    source = tmp_path / "f16.gguf"
    random_gguf.write_model(source, shape, "F16")
    for mixture in FILE_TYPES:
        if mixture == "F16":
            continue
        out = tmp_path / "m.gguf"
        subprocess.run(
            [baseline, "-c", _QUANTISE, str(source), str(out), mixture],
            check=True,
            capture_output=True,
        )
        with out.open("rb", buffering=0) as file:
            found = {t.name: t.type for t in read_head(out, file).tensors.values()}
        assert found == {t.name: t.type for t in random_gguf.tensors(shape, mixture)}, mixture


@pytest.mark.parametrize(
    ("name", "mixture", "published_gb"),
    [
        *(("llama2-7b", *one) for one in (("Q4_0", 3.83), ("Q3_K_M", 3.30), ("Q8_0", 7.16))),
        *(("llama2-7b", "Q4_K_M", 4.08), ("llama2-13b", "Q4_K_M", 7.87)),
        *(("mistral-7b", "Q4_K_M", 4.37), ("tinyllama-1.1b", "Q4_K_M", 0.669)),
        *(("llama2-70b", *one) for one in (("Q4_0", 38.87), ("Q3_K_M", 33.19), ("Q4_K_M", 41.42))),
    ],
)
def test_sizes_are_those_of_published_files(name: str, mixture: str, published_gb: float) -> None:
    """They hold a tokenizer too, at most 2 MB, and are given with three digits."""
    assert gguf_bytes(SHAPES[name], mixture) / 1e9 == pytest.approx(published_gb, rel=3e-3)


def test_facts_of_no_model_are_refused(tmp_path: Path, tiny_llama_dir: Path) -> None:
    with pytest.raises(QsfIOError, match=r"none\.qsf: No such file"):
        read_facts(tmp_path / "none.qsf")
    text = tmp_path / "text"
    text.write_text("no model")
    with pytest.raises(QsfFormatError, match="not a QSF file"):
        read_facts(text)
    path = gguf_files.write(
        tiny_llama_dir, tmp_path / "m.gguf", changes={"llama.block_count": None}
    )
    with pytest.raises(QsfFormatError, match=r"llama\.block_count is missing"):
        read_facts(path)
    path = gguf_files.write(
        tiny_llama_dir, tmp_path / "m.gguf", changes={"llama.feed_forward_length": [512] * 5 + [7]}
    )
    with pytest.raises(QsfFormatError, match=r"feed_forward_length is \[512.*expected one number"):
        read_facts(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(QsfFormatError, match="truncated") as caught:
        read_facts(path)
    assert not isinstance(caught.value, QsfConversionError)


# ---- the same work ----

N_WEIGHTS = 1_344_768


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"n_layers": 3}, "layers: 2 and 3"),
        ({"dim": 257}, "hidden dimension: 256 and 257"),
        ({"n_heads": 8}, "heads: 4 and 8"),
        ({"n_kv_heads": 4}, "KV heads: 2 and 4"),
        ({"head_dim": 32}, "head dimension: 64 and 32"),
        ({"ffn_dim": 513}, "FFN dimension: 512 and 513"),
        ({"n_vocab": 319}, "vocabulary: 320 and 319"),
        ({"n_weights": 1_360_000}, f"weights: {N_WEIGHTS:,} and 1,360,000"),
        ({"tensor_bytes": 6.3 * N_WEIGHTS / 8}, "bits per weight 26 % apart, allowed: 25"),
    ],
)
def test_other_work_is_refused(tmp_path: Path, changed: dict[str, Any], text: str) -> None:
    facts = read_facts(write_qsf(tmp_path / "m.qsf", LLAMA, "4bit"))
    facts = dataclasses.replace(facts, tensor_bytes=5 * N_WEIGHTS // 8)
    other = dataclasses.replace(facts, path=Path("o.gguf"), **changed)
    with pytest.raises(QsfArgumentError) as caught:
        check_same_work(facts, other)
    assert text in str(caught.value)
    size = f"{facts.file_bytes / 1e6:.1f} MB"
    assert f"m.qsf (qsf 4bit, 5.00 bits per weight, {size})" in str(caught.value)
    assert f"{other.bits_per_weight:.2f} bits per weight" in str(caught.value)


# Of the others the head is so much that its type decides how many bits a weight takes.
def test_layers_that_read_the_keys_of_others_have_none() -> None:
    """As llama.cpp has Gemma 4 E2B: what makes own embeddings is one matrix of all layers."""
    shape = SHAPES["gemma4-e2b"]
    found = {t.name: t.dims for t in random_gguf.tensors(shape, "Q4_K_M")}
    assert found["per_layer_token_embd.weight"] == (262144, 35 * 256)
    assert found["per_layer_model_proj.weight"] == (35 * 256, 1536)
    assert [f"blk.{i}.attn_k.weight" in found for i in (14, 15)] == [True, False]
    assert [found[f"blk.{i}.ffn_up.weight"] for i in (14, 15)] == [(6144, 1536), (12288, 1536)]
    assert [found[f"blk.{i}.attn_q.weight"] for i in (3, 4)] == [(2048, 1536), (4096, 1536)]


MOSTLY_LAYERS = [name for name, shape in SHAPES.items() if shape.n_vocab < 60000]


@pytest.mark.parametrize("quant_type", BASELINE_TYPES)
@pytest.mark.parametrize("name", MOSTLY_LAYERS)
def test_what_is_made_for_the_baseline_passes_for_the_same_work(name: str, quant_type: str) -> None:
    """By the sizes, without making 70 B weights; and it is the type of the table but for one."""
    shape = SHAPES[name]
    embed_type = cache.embed_type_beside_baseline(shape, quant_type)
    bits = qsf_bits_per_weight(shape, quant_type, embed_type=embed_type)
    mixture = baseline_type(quant_type, shape, bits)
    baseline_bits = gguf_bits_per_weight(shape, mixture)
    assert max(bits, baseline_bits) / min(bits, baseline_bits) <= 1 + facts.MOST_BITS_APART
    is_far = (name, quant_type) == ("llama2-70b", "2bit-sym")  # 2.3 bits; Q2_K has 2.95
    assert mixture == ("TQ2_0" if is_far else BASELINE_TYPES[quant_type])
    if name == "llama2-7b":
        assert embed_type == ("f16" if quant_type == "f16" else "8bit")


def test_a_mixed_file_gets_the_nearest_type() -> None:
    shape = SHAPES["llama2-7b"]
    assert baseline_type("mixed", shape, 4.4) == "Q4_0"
    assert baseline_type("mixed", shape, 3.3) == "Q2_K"
    assert baseline_type("4bit", shape, 4.6) == "Q4_K_M"
    assert baseline_type("4bit", shape, 8.0) == "Q8_0"  # as with f16 tables on a small model
