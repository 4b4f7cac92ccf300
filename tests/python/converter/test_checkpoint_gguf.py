# SPDX-License-Identifier: Apache-2.0
"""Reading GGUF files: the model that they were made from comes out again, in parts too."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from make import gguf_files, hf_makers, tiny_checkpoints
from make.gguf_files import Type
from make.refusals import refusals
from make.stored import Reader, write_fresh
from oracle.kept_tiles import decode_tiles
from qsf.errors import QsfArgumentError, QsfConversionError, QsfIOError
from qsf.file.gguf_parts import name_without_part, part_names
from qsf.file.layout import Dtype, TensorType, dtype_name
from qsf.find import store
from qsf.find.download import wanted_files
from qsf.find.names import gguf_of, meaning_of
from qsf_converter import cli, convert
from qsf_converter.sources.checkpoint import KEPT, to_float32
from qsf_converter.sources.checkpoint_gguf import GgufCheckpoint, readable_types
from qsf_converter.sources.gguf_config import llama3_scaling
from qsf_converter.sources.gguf_file import types
from qsf_converter.sources.source import open_source

LLAMA3 = tiny_checkpoints.LLAMA3_SCALING
LINEAR = tiny_checkpoints.LINEAR_SCALING


def read_all(checkpoint: GgufCheckpoint, name: str, step: int = 1 << 30) -> np.ndarray:
    tensor = checkpoint.tensors[name]
    parts = [
        to_float32(checkpoint.read_rows(name, start, min(start + step, tensor.n_rows)))
        for start in range(0, tensor.n_rows, step)
    ]
    return np.concatenate(parts).reshape(tensor.shape)


def assert_same_model(gguf_path: Path, folder: Path, tmp_path: Path) -> None:
    """Header, architecture and all units are those of the directory's own conversion."""
    for source, name in ((gguf_path, "a.qsf"), (folder, "b.qsf")):
        report = convert(source, tmp_path / name, quant_type="f16")
        assert all("tokenizer" in warning for warning in report.warnings)
    with Reader(tmp_path / "a.qsf") as found, Reader(tmp_path / "b.qsf") as expected:
        assert found.header == expected.header
        assert found.arch == expected.arch
        for i in range(len(expected.units)):
            assert found.read_unit(i) == expected.read_unit(i), i
        for tag in set(expected.sections) & {"WPOS"}:
            assert found.read_section(tag) == expected.read_section(tag)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (tiny_checkpoints.make_llama, {"tied_head": True, "n_kv_heads": 1, "head_dim": 10}),
        (tiny_checkpoints.make_llama, {"attention_bias": True, "mlp_bias": True}),
        (tiny_checkpoints.make_llama, {"rope_scaling": LINEAR, "rope_theta": 500.0}),
        (tiny_checkpoints.make_mistral, {}),
        (tiny_checkpoints.make_gpt2, {}),
        (tiny_checkpoints.make_gpt2, {"tied_head": False}),
    ],
)
def test_an_f16_file_is_the_model_it_was_made_from(
    tmp_path: Path, make: Callable[..., Path], options: dict[str, Any]
) -> None:
    folder = make(tmp_path / "m", **options)
    ids = {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1}
    path = gguf_files.write(folder, tmp_path / "m.gguf", changes=ids)
    assert_same_model(path, folder, tmp_path)


def llama3_factors(theta: float, head_dim: int, scaling: dict[str, Any]) -> np.ndarray:
    """The divisors of the angles as llama.cpp's converter computes them."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    factors = []
    for i in range(0, head_dim, 2):
        length = 2 * math.pi * theta ** (i / head_dim)
        if length < original / high:
            factors.append(1.0)
        elif length > original / low:
            factors.append(scaling["factor"])
        else:
            smooth = (original / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)


def test_the_scaling_of_llama_3_comes_from_its_factors(tmp_path: Path) -> None:
    folder = tiny_checkpoints.make_llama(tmp_path / "m", rope_scaling=LLAMA3)
    factors = llama3_factors(10000.0, 24, LLAMA3)
    ids = {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1}
    path = gguf_files.write(
        folder, tmp_path / "m.gguf", changes=ids, tensors={"rope_freqs.weight": factors}
    )
    assert_same_model(path, folder, tmp_path)


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (4.0, 16384)])
def test_the_scalings_of_published_models(factor: float, original: int) -> None:
    said = {**LLAMA3, "factor": factor, "original_max_position_embeddings": original}
    factors = llama3_factors(500000.0, 128, said)
    assert llama3_scaling(factors, 500000.0, 128) == said
    factors[20] *= 1.01
    with pytest.raises(QsfConversionError, match="not those of LLaMA 3"):
        llama3_scaling(factors, 500000.0, 128)
    for wrong in (0.0, -1.0, np.nan, np.inf):
        factors[20] = wrong
        with pytest.raises(QsfConversionError, match="not positive numbers"):
            llama3_scaling(factors, 500000.0, 128)
    assert llama3_scaling(np.ones(64), 500000.0, 128) is None
    with pytest.raises(QsfConversionError, match="64 RoPE factors do not fit to heads of 64"):
        llama3_scaling(np.ones(64), 500000.0, 64)


def test_any_range_of_rows_is_put_in_order(tmp_path: Path) -> None:
    """Ranges that cut heads; and the digest is that of the same numbers read otherwise."""
    folder, weights = hf_makers.llama(tmp_path / "m")
    path = gguf_files.write(folder, tmp_path / "m.gguf")
    name = "model.layers.1.self_attn.q_proj.weight"
    digests = set()
    for step in (1, 3, 7, 10, 23, 40):
        with GgufCheckpoint(path) as checkpoint:
            np.testing.assert_array_equal(read_all(checkpoint, name, step), weights[name])
            digests.add(checkpoint.digest())
    assert len(digests) == 1
    with GgufCheckpoint(path) as checkpoint:
        rows = checkpoint.read_rows(name, 13, 29)
        assert rows.dtype == np.float16
        np.testing.assert_array_equal(rows, weights[name][13:29])
        assert checkpoint.read_rows(name, 5, 5).shape == (0, 72)


PLAIN = ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")
NOT_IN_THE_PACKAGE = ("Q8_1", "Q8_K")
OURS = ("Q1_0", "I2_S")  # of which the package has no values
SUPPORTED = [
    name
    for name, _, _ in types().values()
    if name not in (*PLAIN[:2], *PLAIN[3:], *NOT_IN_THE_PACKAGE, *OURS)
]


def test_the_types_that_are_read_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--families"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == f"Weights in GGUF, read: {', '.join(readable_types())}"
    assert said[-2] == f"Weights in GGUF, kept: {', '.join((*KEPT, 'MXFP4'))}"
    assert {*readable_types()} == {*SUPPORTED, *PLAIN[:3], *OURS}


def random_blocks(kind: Any, n_rows: int, n_cols: int) -> np.ndarray:
    """Bytes of a type of which no scale is infinite or NaN: no byte has its upper bits set."""
    n_items, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(kind)
    return rng.integers(0, 0x78, (n_rows, n_cols // n_items * n_bytes), dtype=np.uint8)


@pytest.mark.parametrize("kind_name", SUPPORTED)
def test_each_type_gives_the_numbers_of_the_package(tmp_path: Path, kind_name: str) -> None:
    if kind_name not in Type.__members__:
        pytest.skip(f"the installed gguf does not know {kind_name}")
    kind = Type[kind_name]
    dim, n_heads, n_kv_heads = 256, 4, 2
    blocks = {"attn_q": random_blocks(kind, dim, dim), "attn_v": random_blocks(kind, dim // 2, dim)}
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    config = {
        **hf_makers.LLAMA_CONFIG,
        "hidden_size": dim,
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads,
        "head_dim": dim // n_heads,
    }
    for key, value in gguf_files._llama(config).items():
        gguf_files.add(writer, f"llama.{key}", value)
    for name, data in blocks.items():
        writer.add_tensor(f"blk.0.{name}.weight", data, raw_dtype=kind)
    gguf_files.close(writer)
    whole = {name: gguf.quants.dequantize(data, kind) for name, data in blocks.items()}
    with GgufCheckpoint(tmp_path / "m.gguf") as checkpoint:
        for short, step in (("q", 50), ("v", 128)):
            name = f"model.layers.0.self_attn.{short}_proj.weight"
            assert checkpoint.tensors[name].dtype == kind_name
            found = read_all(checkpoint, name, step)
            if short == "q":
                found = gguf_files.interleave(found, n_heads)
            np.testing.assert_array_equal(found, whole[f"attn_{short}"])


@pytest.mark.parametrize(
    ("kind", "quant_type", "bits"),
    [
        (Type.Q8_0, "q8_0", ""),
        (Type.Q4_1, "q4_1", ""),
        (Type.Q4_0, "q4_0", ""),
        (Type.TQ2_0, "ternary", "2.06"),
        (Type.Q1_0, "ternary", "1.12"),
        (Type.F16, "4bit", ""),
    ],
)
def test_the_default_type_is_not_below_the_files_own(
    tmp_path: Path, kind: Any, quant_type: str, bits: str
) -> None:
    sizes = {"dim": 256, "head_dim": 32, "n_heads": 8, "n_kv_heads": 8, "ffn_dim": 256}
    folder = tiny_checkpoints.make_llama(tmp_path / "m", n_layers=1, **sizes)
    path = gguf_files.write(folder, tmp_path / "m.gguf", kind=kind)
    report = convert(path, tmp_path / "m.qsf")
    with Reader(tmp_path / "m.qsf") as reader:
        assert dtype_name(reader.header.dtype) == quant_type
    warning = f"converted to {quant_type}, as its matrices have {bits} bits a weight"
    assert (warning in report.warnings) == bool(bits)
    report = convert(path, tmp_path / "m.qsf", quant_type="3bit", force=True)
    assert not any("converted to" in warning for warning in report.warnings)


def test_blocks_of_signs_keep_their_values(tmp_path: Path) -> None:
    sizes = {"dim": 256, "head_dim": 32, "n_heads": 8, "n_kv_heads": 8, "ffn_dim": 384}
    folder = tiny_checkpoints.make_llama(tmp_path / "m", n_layers=1, **sizes)
    path = gguf_files.write(folder, tmp_path / "m.gguf", kind=Type.Q1_0)
    name = "model.layers.0.mlp.down_proj.weight"
    weights = load_file(folder / "model.safetensors")[name].reshape(-1, 128)
    scales = np.abs(weights).mean(axis=1, keepdims=True).astype(np.float16)
    want = np.where(weights >= 0, scales, -scales).astype(np.float32).reshape(256, 384)
    with GgufCheckpoint(path) as checkpoint:
        np.testing.assert_array_equal(read_all(checkpoint, name, 100), want)
    convert(path, tmp_path / "m.qsf")
    with Reader(tmp_path / "m.qsf") as reader:
        tensor = reader.tensor(1, TensorType.FFN_DOWN)
        assert tensor is not None
        assert tensor.dtype == Dtype.TERNARY
        data = reader.read_tensor(tensor)
        np.testing.assert_array_equal(decode_tiles(tensor.dtype, data, 256, 384), want)


def test_what_the_file_says_of_itself(tmp_path: Path) -> None:
    folder = tiny_checkpoints.make_llama(tmp_path / "m")
    changes = {
        "general.name": "Some model",
        "general.license": "apache-2.0",
        "llama.vision": 3,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 5,
    }
    path = gguf_files.write(folder, tmp_path / "m.gguf", changes=changes)
    report = convert(path, tmp_path / "m.qsf")
    assert "llama.vision of the metadata is not understood and left out" in report.warnings
    assert "the tokenizer is left out: the file has no vocabulary" in report.warnings
    with Reader(tmp_path / "m.qsf") as reader:
        meta = json.loads(reader.read_section("META"))
        chat = json.loads(reader.read_section("CHAT"))
    assert meta["source"]["name"] == "Some model"
    assert meta["source"]["architecture"] == "LlamaForCausalLM"
    assert len(meta["source"]["config_sha256"]) == 64
    assert meta["licence"] == "apache-2.0"
    assert chat["generation"] == {"bos_token_id": 0, "eos_token_id": [1, 5]}
    other = gguf_files.write(folder, tmp_path / "x.gguf", changes={"general.name": ""})
    with open_source(path) as one, open_source(other) as two:
        assert two.origin.name == "x"
        assert one.origin.config_sha256 != two.origin.config_sha256
        assert one.files == (path,)


@pytest.mark.parametrize(("changes", "message"), refusals("gguf"))
def test_models_that_cannot_be_represented(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = tiny_checkpoints.make_llama(tmp_path / "m")
    path = gguf_files.write(folder, tmp_path / "m.gguf", changes=changes)
    with pytest.raises(QsfConversionError, match=message):
        convert(path, tmp_path / "out.qsf")
    assert not (tmp_path / "out.qsf").exists()


def test_other_architectures_and_types_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma3n")
    gguf_files.close(writer)
    with pytest.raises(
        QsfConversionError,
        match=r"'gemma3n' of a GGUF file is not supported: embeddings of .* Gemma 3; `qsf",
    ):
        GgufCheckpoint(tmp_path / "m.gguf")
    folder = tiny_checkpoints.make_llama(tmp_path / "m")
    tensors = {"model.norm.weight": np.zeros(80, np.float32)}
    path = gguf_files.write(folder, tmp_path / "two.gguf", tensors=tensors)
    with pytest.raises(QsfConversionError, match=r"two of its tensors are model.norm.weight"):
        GgufCheckpoint(path)


def test_a_quantised_bias_is_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoints.make_llama(
        tmp_path / "m", attention_bias=True, n_heads=1, head_dim=64
    )
    path = gguf_files.write(folder, tmp_path / "m.gguf")
    content = bytearray(path.read_bytes())
    at = content.index(b"blk.0.attn_q.bias") + len(b"blk.0.attn_q.bias") + 4 + 8
    assert content[at - 8 : at + 4] == struct.pack("<QI", 64, 0)
    struct.pack_into("<I", content, at, 8)
    path.write_bytes(content)
    with pytest.raises(QsfConversionError, match=r"blk.0.attn_q.bias, a bias, is Q8_0"):
        GgufCheckpoint(path)


@pytest.mark.parametrize("number", [9, 15, 24, 28])
def test_types_that_cannot_be_dequantised_are_refused_by_name(tmp_path: Path, number: int) -> None:
    name, n_items, n_bytes = types()[number]
    folder = tiny_checkpoints.make_llama(tmp_path / "m", dim=256, head_dim=32)
    path = gguf_files.write(folder, tmp_path / "m.gguf")
    content = bytearray(path.read_bytes())
    at = content.index(b"blk.0.attn_v.weight") + len(b"blk.0.attn_v.weight") + 4 + 16
    assert content[at : at + 4] == struct.pack("<I", 1)
    # As many bytes of another type, without overlapping the next tensor: fewer columns.
    struct.pack_into("<QQI", content, at - 16, n_items, 1, number)
    path.write_bytes(content)
    with GgufCheckpoint(path) as checkpoint:
        tensor = checkpoint.tensors["model.layers.0.self_attn.v_proj.weight"]
        assert (tensor.dtype, tensor.n_bytes) == (name, n_bytes)
        with pytest.raises(QsfConversionError, match=f"stored as {name}, which the installed"):
            checkpoint.read_rows(tensor.name, 0, 1)


# ---- damaged and hostile files ----
def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def head(
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_tensors: int = 0,
    n_keys: int = 0,
    content: bytes = b"",
) -> bytes:
    return magic + struct.pack("<IQQ", version, n_tensors, n_keys) + content


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def entry(
    name: bytes = b"x",
    dims: tuple[int, ...] = (32, 2),
    kind: int = 0,
    offset: int = 0,
    n_dims: int | None = None,
) -> bytes:
    n_dims = len(dims) if n_dims is None else n_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", n_dims, *dims, kind, offset)


HUGE = 1 << 62
MANY_TEXTS = struct.pack("<IQ", 8, (1 << 20) + 1) + bytes(8 << 20) + text(b"")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a GGUF file: it is an empty file"),
        (b"ggml" + bytes(40), "not a GGUF file"),
        (b"GGU", "not a GGUF file"),
        (b"GGUF\3", "truncated: the version"),
        (head(version=1), "GGUF version 1 is not supported"),
        (head(version=3 << 24), "big-endian is not supported"),
        (head(version=9), "GGUF version 9"),
        (head(n_keys=HUGE), f"{HUGE} keys do not fit"),
        (head(n_tensors=HUGE), f"{HUGE} tensors do not fit"),
        (head(n_tensors=200_000, content=bytes(7_000_000)), "200000 tensors are too many"),
        (head(n_keys=65_537, content=bytes(900_000)), "65537 keys are too many, allowed: up to 65"),
        (head(n_keys=1, content=key(b"a", 9, MANY_TEXTS)), "1048577 texts in 'a' are too many"),
        (head(n_keys=1, content=struct.pack("<Q", HUGE) + bytes(20)), "a key of"),
        (head(n_keys=1, content=struct.pack("<Q", 999) + bytes(20)), "truncated: a key"),
        (head(n_keys=1, content=key(b"a", 8, struct.pack("<Q", HUGE))), "value of 'a' of"),
        (head(n_keys=1, content=key(b"a", 8, struct.pack("<Q", 999))), "truncated"),
        (head(n_keys=1, content=key(b"a", 13, bytes(8))), "type 13, which is unknown"),
        (head(n_keys=1, content=key(b"a", 9, struct.pack("<IQ", 0, HUGE))), "numbers in 'a' do no"),
        (head(n_keys=1, content=key(b"a", 9, struct.pack("<IQ", 8, HUGE))), "texts in 'a' do not"),
        (head(n_keys=1, content=key(b"a", 9, struct.pack("<IQ", 9, 1) + bytes(12))), "type 9, whi"),
        (head(n_keys=2, content=key(b"a", 7, b"\1") * 2), "do not fit|occurs twice"),
        (head(n_keys=2, content=key(b"a", 10, bytes(8)) * 2), "'a' occurs twice"),
        (head(n_keys=1, content=key(b"general.alignment", 4, bytes(4))), "not a power of two"),
        (head(n_keys=1, content=key(b"general.alignment", 8, text(b"x"))), "not a power of two"),
        (head(n_tensors=1, content=entry(n_dims=9)), "has 9 dimensions"),
        (head(n_tensors=1, content=entry(n_dims=0)), "has 0 dimensions"),
        (head(n_tensors=1, content=entry(kind=99)), "type 99, which is unknown; supported: F32"),
        (head(n_tensors=1, content=entry(dims=(33, 2), kind=8)), "no whole blocks of Q8_0"),
        (head(n_tensors=1, content=entry(dims=(HUGE, HUGE))), "truncated: tensor 'x' ends at"),
        (head(n_tensors=1, content=entry(offset=HUGE)), "truncated: tensor 'x' ends at"),
        (head(n_tensors=1, content=entry(offset=7) + bytes(999)), "no multiple of 32"),
        (head(n_tensors=2, content=entry() * 2 + bytes(999)), "overlaps|twice"),
        (head(n_tensors=2, content=entry() + entry(b"y") + bytes(999)), "overlaps"),
        (head(n_tensors=2, content=entry() + entry(offset=256) + bytes(999)), "occurs twice"),
        (head(n_tensors=1, content=entry() + bytes(64)), "truncated: tensor 'x' ends at 256 of"),
        (head(n_tensors=1, content=entry() + bytes(999)), "architecture None of a GGUF file"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(QsfConversionError, match=message) as caught:
        GgufCheckpoint(path)
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value).splitlines()) == 1


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoints.make_llama(tmp_path / "m", n_layers=1)
    path = gguf_files.write(folder, tmp_path / "m.gguf")
    content = path.read_bytes()
    n_head_bytes = content.index(b"output_norm.weight")
    for n in [*range(0, n_head_bytes, 7), *range(n_head_bytes, len(content) - 4, 9973)]:
        write_fresh(path, content[:n])
        with pytest.raises(QsfConversionError):
            GgufCheckpoint(path)


def test_flipped_bytes_never_raise_anything_else(tmp_path: Path) -> None:
    folder = tiny_checkpoints.make_llama(tmp_path / "m", n_layers=1)
    changes = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "ab"]}
    changes |= {"tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.pre": "gpt-2"}
    path = gguf_files.write(folder, tmp_path / "m.gguf", changes=changes)
    content = path.read_bytes()
    rng = np.random.default_rng(1)
    n_refused = 0
    for at in rng.integers(4, 2600, 250).tolist():
        write_fresh(path, content[:at] + rng.bytes(1) + content[at + 1 :])
        try:
            with open_source(path):
                pass
        except QsfConversionError:
            n_refused += 1
    assert n_refused > 50


def test_a_file_that_shrinks_and_one_that_is_none(tmp_path: Path) -> None:
    folder = tiny_checkpoints.make_llama(tmp_path / "m")
    path = gguf_files.write(folder, tmp_path / "m.gguf")
    with GgufCheckpoint(path) as checkpoint:
        with path.open("r+b") as file:
            file.truncate(9000)
        with pytest.raises(QsfIOError, match=r"bytes early in tensor model.embed_tokens.weight"):
            checkpoint.read_rows("model.embed_tokens.weight", 0, 101)
    with pytest.raises(QsfIOError, match=r"gone\.gguf"):
        GgufCheckpoint(tmp_path / "gone.gguf")


# ---- files in parts ----
@pytest.fixture
def first(tmp_path: Path) -> Path:
    """The first of four parts; ``whole.gguf`` beside them is the same model."""
    folder = tiny_checkpoints.make_llama(tmp_path / "hf")
    gguf_files.write(folder, tmp_path / "whole.gguf")
    return gguf_files.write(folder, tmp_path / "m.gguf", n_in_part=6)


def test_the_parts_are_the_file(first: Path, tmp_path: Path) -> None:
    assert first.name == "m-00001-of-00004.gguf"
    for source in (first, tmp_path / "whole.gguf"):
        convert(source, tmp_path / f"{source.stem}.qsf")
    parts, whole = (tmp_path / f"{name}.qsf" for name in ("m-00001-of-00004", "whole"))
    with Reader(parts) as found, Reader(whole) as expected:
        assert found.header == expected.header
        for i in range(len(expected.units)):
            assert found.read_unit(i) == expected.read_unit(i)


def test_no_part_is_written_over(first: Path) -> None:
    last = first.with_name("m-00004-of-00004.gguf")
    before = last.read_bytes()
    with pytest.raises(QsfArgumentError, match="is a file of the model itself"):
        convert(first, last, force=True)
    assert last.read_bytes() == before


def test_a_part_that_is_missing_is_named(first: Path) -> None:
    first.with_name("m-00003-of-00004.gguf").unlink()
    with pytest.raises(QsfConversionError, match=r"m-00003-of-00004.gguf is missing.*part 3 of"):
        convert(first, first.with_name("out.qsf"))


def test_parts_that_do_not_belong_together(first: Path, tmp_path: Path) -> None:
    second, third = (first.with_name(f"m-0000{i}-of-00004.gguf") for i in (2, 3))
    out = tmp_path / "out.qsf"
    with pytest.raises(QsfConversionError, match=r"one of 4 parts: name the first, .*m-00001-of"):
        convert(second, out)
    shutil.copy(first, tmp_path / "renamed.gguf")
    with pytest.raises(QsfConversionError, match="part of the name"):
        convert(tmp_path / "renamed.gguf", out)
    shutil.copy(third, second)
    with pytest.raises(QsfConversionError, match=r"00002-of-00004.gguf: .* not part 2 of 4"):
        convert(first, out)
    data = third.read_bytes()
    at = data.index(b"split.no") + len("split.no") + 4
    second.write_bytes(data[:at] + b"\x01" + data[at + 1 :])
    with pytest.raises(QsfConversionError, match="is in an earlier part too"):
        convert(first, out)
    assert not out.exists()


def test_names_of_parts(first: Path, tmp_path: Path) -> None:
    assert part_names("m.gguf") == ("m.gguf",)
    assert part_names("m-00001-of-00000.gguf") == ("m-00001-of-00000.gguf",)
    assert part_names("m-00002-of-00002.gguf")[0] == "m-00001-of-00002.gguf"
    assert name_without_part("m-Q8_0-00001-of-00002.gguf") == "m-Q8_0.gguf"
    hub = ["m-Q4_0-00001-of-00002.gguf", "m-Q4_0-00002-of-00002.gguf", "m-Q8_0.gguf"]
    assert gguf_of(hub, "q4_0") == hub[0]
    assert wanted_files("org/m", dict.fromkeys(hub, 1), "Q4_0") == set(hub[:2])
    with pytest.raises(QsfConversionError, match=r"00002-of-00002\.gguf is missing"):
        wanted_files("org/m", dict.fromkeys(hub[:1], 1), "Q4_0")
    assert meaning_of(str(first)).path == first
    alone = tmp_path / "alone"
    alone.mkdir()
    for path in tmp_path.glob("m-*.gguf"):
        shutil.copy(path, alone)
    assert meaning_of(str(alone)).path == alone / first.name
    before = store.fingerprint_of(alone / first.name)
    (alone / "m-00003-of-00004.gguf").write_bytes(b"")
    assert store.fingerprint_of(alone / first.name) != before
