"""The converter as a library: the weights in the file are those of the checkpoint."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from make import hf_makers
from make.stored import Reader
from qsf.file.layout import KEPT, Activation, Dtype, Layout, TensorType
from qsf_converter import convert
from qsf_converter import convert as convert_function
from qsf_converter.rounding.plan import QUANT_TYPES
from qsf_converter.rounding.quantisers import quantise_rows
from qsf_converter.rounding.tiles import dequantise_tiles

T = TensorType


def stored(reader: Reader, unit_idx: int, kind: TensorType) -> np.ndarray:
    """A tensor's values; a vector is one-dimensional."""
    tensor = reader.tensor(unit_idx, kind)
    assert tensor is not None, kind
    data = reader.read_tensor(tensor)
    if tensor.layout == Layout.VECTOR:
        return np.frombuffer(data, "<f4")
    return dequantise_tiles(tensor.dtype, data, tensor.n_rows, tensor.n_cols)


def as_f16(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).astype(np.float32)


def llama_expectations(weights: hf_makers.Weights, layer: int) -> dict[TensorType, np.ndarray]:
    names = {
        T.ATTN_NORM: "input_layernorm.weight",
        T.Q: "self_attn.q_proj.weight",
        T.K: "self_attn.k_proj.weight",
        T.V: "self_attn.v_proj.weight",
        T.ATTN_OUT: "self_attn.o_proj.weight",
        T.FFN_NORM: "post_attention_layernorm.weight",
        T.FFN_GATE: "mlp.gate_proj.weight",
        T.FFN_UP: "mlp.up_proj.weight",
        T.FFN_DOWN: "mlp.down_proj.weight",
    }
    return {kind: weights[f"model.layers.{layer}.{name}"] for kind, name in names.items()}


def test_llama_arrives_whole(tmp_path: Path) -> None:
    folder, weights = hf_makers.llama(tmp_path / "m", np.float32)
    report = convert(folder, tmp_path / "out.qsf", quant_type="f16")
    with Reader(tmp_path / "out.qsf") as reader:
        reader.verify()
        h, a = reader.header, reader.arch
        assert (h.n_layers, h.dim, h.n_heads, h.n_kv_heads, h.head_dim) == (2, 72, 4, 2, 10)
        assert (h.n_vocab, h.max_tokens, h.ffn_dim, h.rope_theta) == (50, 64, 80, 5000.0)
        assert (h.bos_id, h.eos_id, h.pad_id) == (1, 2, None)
        assert h.activation == Activation.SILU
        assert a.norm_epsilon == pytest.approx(1e-6)
        assert not a.tied_head
        assert "WPOS" not in reader.sections
        for layer in range(2):
            expected = llama_expectations(weights, layer)
            assert sum(t.unit_idx == layer + 1 for t in reader.tensors) == len(expected)
            for kind, values in expected.items():
                wanted = values if values.ndim == 1 else as_f16(values)
                np.testing.assert_array_equal(stored(reader, layer + 1, kind), wanted)
        for unit_idx, kind, name in (
            (0, T.EMBEDDING, "model.embed_tokens.weight"),
            (3, T.HEAD, "lm_head.weight"),
        ):
            np.testing.assert_array_equal(stored(reader, unit_idx, kind), as_f16(weights[name]))
        np.testing.assert_array_equal(stored(reader, 3, T.FINAL_NORM), weights["model.norm.weight"])
    assert report.n_weights == sum(values.size for values in weights.values())
    assert report.source_bytes == sum(values.nbytes for values in weights.values())
    assert report.file_bytes == (tmp_path / "out.qsf").stat().st_size
    assert report.warnings == ()


def test_gpt2_arrives_split_and_transposed(tmp_path: Path) -> None:
    folder, weights = hf_makers.gpt2(tmp_path / "m")
    convert(folder, tmp_path / "out.qsf", quant_type="f16")
    with Reader(tmp_path / "out.qsf") as reader:
        assert reader.header.ffn_dim == 4 * 48
        assert reader.arch.tied_head
        assert reader.tensor(3, T.HEAD) is None
        wpos = np.frombuffer(reader.read_section("WPOS"), "<f2").reshape(24, 48)
        np.testing.assert_array_equal(wpos, weights["transformer.wpe.weight"])
        for layer in range(2):
            h = f"transformer.h.{layer}."
            fused, bias = weights[f"{h}attn.c_attn.weight"], weights[f"{h}attn.c_attn.bias"]
            expected = {
                T.Q: fused[:, :48].T,
                T.K: fused[:, 48:96].T,
                T.V: fused[:, 96:].T,
                T.Q_BIAS: bias[:48],
                T.K_BIAS: bias[48:96],
                T.V_BIAS: bias[96:],
                T.ATTN_OUT: weights[f"{h}attn.c_proj.weight"].T,
                T.ATTN_OUT_BIAS: weights[f"{h}attn.c_proj.bias"],
                T.FFN_UP: weights[f"{h}mlp.c_fc.weight"].T,
                T.FFN_UP_BIAS: weights[f"{h}mlp.c_fc.bias"],
                T.FFN_DOWN: weights[f"{h}mlp.c_proj.weight"].T,
                T.FFN_DOWN_BIAS: weights[f"{h}mlp.c_proj.bias"],
                T.ATTN_NORM: weights[f"{h}ln_1.weight"],
                T.ATTN_NORM_BIAS: weights[f"{h}ln_1.bias"],
                T.FFN_NORM: weights[f"{h}ln_2.weight"],
                T.FFN_NORM_BIAS: weights[f"{h}ln_2.bias"],
            }
            assert sum(t.unit_idx == layer + 1 for t in reader.tensors) == len(expected)
            for kind, values in expected.items():
                np.testing.assert_array_equal(
                    stored(reader, layer + 1, kind), values.astype(np.float32), err_msg=kind.name
                )
        np.testing.assert_array_equal(
            stored(reader, 3, T.FINAL_NORM_BIAS), weights["transformer.ln_f.bias"]
        )


@pytest.mark.parametrize(
    ("quant", "embed", "dtype", "embed_dtype"),
    [
        ("2bit", None, Dtype.Q2, Dtype.Q8),
        ("2bit-sym", None, Dtype.Q2_SYM, Dtype.Q8),
        ("3bit", None, Dtype.Q3, Dtype.Q8),
        ("4bit", None, Dtype.Q4, Dtype.Q8),
        ("4bit-sym", None, Dtype.Q4_SYM, Dtype.Q8),
        ("4bit-nl", None, Dtype.Q4_NL, Dtype.Q8),
        ("ternary", None, Dtype.TERNARY, Dtype.Q8),
        ("ternary-dense", None, Dtype.TERNARY_DENSE, Dtype.Q8),
        ("8bit", None, Dtype.Q8, Dtype.Q8),
        ("f16", None, Dtype.F16, Dtype.F16),
        ("4bit", "4bit", Dtype.Q4, Dtype.Q4),
        ("2bit", "3bit", Dtype.Q2, Dtype.Q3),
        ("4bit", "f16", Dtype.Q4, Dtype.F16),
    ],
)
def test_types_follow_the_options(
    tmp_path: Path, quant: str, embed: str | None, dtype: Dtype, embed_dtype: Dtype
) -> None:
    folder, weights = hf_makers.llama(tmp_path / "m")
    report = convert(folder, tmp_path / "out.qsf", quant_type=quant, embed_type=embed)
    with Reader(tmp_path / "out.qsf") as reader:
        assert reader.header.dtype == dtype
        for tensor in reader.tensors:
            if tensor.layout == Layout.VECTOR:
                assert tensor.dtype == Dtype.F32
            else:
                in_layer = tensor.unit_idx in (1, 2)
                assert tensor.dtype == (dtype if in_layer else embed_dtype)
        q = weights["model.layers.1.self_attn.q_proj.weight"].astype(np.float32)
        stored_q = reader.tensor(2, T.Q)
        assert stored_q is not None
        assert reader.read_tensor(stored_q) == quantise_rows(dtype, q)
        meta = json.loads(reader.read_section("META"))
    assert meta["converter"]["options"]["quant_type"] == quant
    assert len(meta["quality"]["tensors"]) == len(report.tensors) == 21
    by_name = {tensor.name: tensor for tensor in report.tensors}
    again = dequantise_tiles(dtype, quantise_rows(dtype, q), *q.shape)
    assert by_name["1.Q"].type == quant
    assert by_name["1.Q"].mse == pytest.approx(float(np.mean((q - again) ** 2)), rel=1e-3)
    assert report.worst(1)[0].cosine == min(tensor.cosine for tensor in report.tensors)


def test_source_types_give_the_same_file(tmp_path: Path) -> None:
    """Values that f32, f16 and bf16 hold alike: the file does not depend on the type."""
    shapes = hf_makers.llama_shapes(hf_makers.LLAMA_CONFIG)
    rng = np.random.default_rng(5)
    values = {name: rng.integers(-9, 9, shape).astype(np.float32) for name, shape in shapes.items()}
    files = {}
    for dtype in ("F32", "F16", "BF16"):
        folder = hf_makers.write_model(tmp_path / dtype, hf_makers.LLAMA_CONFIG, None)
        encode: dict[str, Callable[[np.ndarray], bytes]] = {
            "F32": lambda v: v.tobytes(),
            "F16": lambda v: v.astype("<f2").tobytes(),
            "BF16": hf_makers.bf16_bytes,
        }
        hf_makers.write_raw_safetensors(
            folder / "model.safetensors",
            {name: (dtype, v.shape, encode[dtype](v)) for name, v in values.items()},
        )
        convert(folder, tmp_path / f"{dtype}.qsf")
        with Reader(tmp_path / f"{dtype}.qsf") as reader:
            files[dtype] = [reader.read_unit(i) for i in range(4)]
    assert files["F32"] == files["F16"] == files["BF16"]


def test_sharded_is_single_and_threads_do_not_matter(tmp_path: Path) -> None:
    folder, weights = hf_makers.gpt2(tmp_path / "a" / "m")
    sharded = hf_makers.write_model(tmp_path / "b" / "m", hf_makers.GPT2_CONFIG, None)
    hf_makers.write_shards(sharded, weights, 3)
    convert(folder, tmp_path / "one.qsf", threads=1)
    convert(sharded, tmp_path / "many.qsf", threads=3)
    assert (tmp_path / "one.qsf").read_bytes() == (tmp_path / "many.qsf").read_bytes()


def test_pieces_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row ranges, gathered columns and a small memory bound give the same bytes."""
    module = importlib.import_module("qsf_converter.rounding.pieces")
    for make in (hf_makers.llama, hf_makers.gpt2):
        folder, _ = make(tmp_path / make.__name__)
        convert(folder, tmp_path / "whole.qsf", force=True)
        with monkeypatch.context() as patch:
            patch.setattr(module, "_PIECE_BYTES", 1)
            patch.setattr(module, "_SLAB_BYTES", 500)
            patch.setattr(module, "_IN_FLIGHT_BYTES", 1)
            convert(folder, tmp_path / "pieces.qsf", force=True)
        with Reader(tmp_path / "whole.qsf") as a, Reader(tmp_path / "pieces.qsf") as b:
            assert [a.read_unit(i) for i in range(4)] == [b.read_unit(i) for i in range(4)]
            assert a.sections.keys() == b.sections.keys()
            metas = [json.loads(reader.read_section("META")) for reader in (a, b)]
            assert metas[0]["source"] == metas[1]["source"]


@pytest.mark.parametrize("make", [hf_makers.llama, hf_makers.gpt2])
def test_names_without_prefix(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    folder, weights = make(tmp_path / "a" / "m")
    convert(folder, tmp_path / "with.qsf")
    bare = {
        name.removeprefix("model.").removeprefix("transformer."): values
        for name, values in weights.items()
    }
    config = json.loads((folder / "config.json").read_text())
    other = hf_makers.write_model(tmp_path / "b" / "m", config, bare)
    convert(other, tmp_path / "without.qsf")
    with Reader(tmp_path / "with.qsf") as a, Reader(tmp_path / "without.qsf") as b:
        assert [a.read_unit(i) for i in range(4)] == [b.read_unit(i) for i in range(4)]


def test_biases(tmp_path: Path) -> None:
    folder, weights = hf_makers.llama(tmp_path / "m", attention_bias=True, mlp_bias=True)
    convert(folder, tmp_path / "out.qsf")
    names = {
        T.Q_BIAS: "self_attn.q",
        T.K_BIAS: "self_attn.k",
        T.V_BIAS: "self_attn.v",
        T.ATTN_OUT_BIAS: "self_attn.o",
        T.FFN_GATE_BIAS: "mlp.gate",
        T.FFN_UP_BIAS: "mlp.up",
        T.FFN_DOWN_BIAS: "mlp.down",
    }
    with Reader(tmp_path / "out.qsf") as reader:
        for kind, name in names.items():
            expected = weights[f"model.layers.1.{name}_proj.bias"]
            np.testing.assert_array_equal(stored(reader, 2, kind), expected)


def test_tied_heads(tmp_path: Path) -> None:
    folder, weights = hf_makers.llama(tmp_path / "tied", tie_word_embeddings=True)
    assert not any("lm_head" in text for text in convert(folder, tmp_path / "a.qsf").warnings)
    head = weights["model.embed_tokens.weight"]
    save_file({**weights, "lm_head.weight": head}, folder / "model.safetensors")
    assert not any("lm_head" in text for text in convert(folder, tmp_path / "b.qsf").warnings)
    save_file({**weights, "lm_head.weight": head + 1}, folder / "model.safetensors")
    said = convert(folder, tmp_path / "d.qsf").warnings  # as transformers 5 loads it
    assert any("lm_head.weight is not the embeddings, although" in text for text in said)
    with Reader(tmp_path / "d.qsf") as reader:
        assert not reader.arch.tied_head
    folder, weights = hf_makers.llama(tmp_path / "absent")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors")
    assert any("lm_head" in text for text in convert(folder, tmp_path / "c.qsf").warnings)
    for name in "abc":
        with Reader(tmp_path / f"{name}.qsf") as reader:
            assert reader.arch.tied_head
            assert reader.tensor(3, T.HEAD) is None


@pytest.mark.parametrize("row", [None, 0, 49])
def test_a_head_that_repeats_the_embeddings_is_stored_once(tmp_path: Path, row: int | None) -> None:
    folder, weights = hf_makers.llama(tmp_path / "m")
    head = weights["model.embed_tokens.weight"].copy()
    if row is not None:
        head[row, -1] += 1
    save_file({**weights, "lm_head.weight": head}, folder / "model.safetensors")
    report = convert(folder, tmp_path / "out.qsf", embed_type="f16")
    assert any("stored once" in line for line in report.warnings) is (row is None)
    with Reader(tmp_path / "out.qsf") as reader:
        assert bool(reader.arch.tied_head) is (row is None)
        assert (reader.tensor(3, T.HEAD) is None) is (row is None)


def test_gpt2_with_its_own_head(tmp_path: Path) -> None:
    folder, weights = hf_makers.gpt2(tmp_path / "m", tie_word_embeddings=False)
    head = np.arange(40 * 48, dtype=np.float16).reshape(40, 48) / 100
    save_file({**weights, "lm_head.weight": head}, folder / "model.safetensors")
    convert(folder, tmp_path / "out.qsf", embed_type="f16")
    with Reader(tmp_path / "out.qsf") as reader:
        assert not reader.arch.tied_head
        np.testing.assert_array_equal(stored(reader, 3, T.HEAD), head)


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    folder, _ = hf_makers.gpt2(tmp_path / "m")
    calls: list[tuple[int, int]] = []
    report = convert(
        folder, tmp_path / "out.qsf", progress=lambda done, total: calls.append((done, total))
    )
    assert calls == sorted(calls)
    assert calls[-1] == (report.source_bytes, report.source_bytes)


def test_every_type_that_is_rounded_to_can_be_asked_for() -> None:
    assert set(QUANT_TYPES.values()) == set(Dtype) - {*KEPT, Dtype.MIXED}


def test_public_names() -> None:
    import qsf_converter

    assert qsf_converter.__all__ == ["Report", "Request", "convert", "convert_as"]
    assert qsf_converter.convert is convert_function
