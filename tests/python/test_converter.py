"""The converter as a library: what is in the file, and what it refuses to make a file of."""

from __future__ import annotations

import errno
import importlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_makers
import numpy as np
import pytest
from safetensors.numpy import save_file

from qsf.converter import convert
from qsf.converter import convert as convert_function
from qsf.converter.tiles import dequantise_tiles, quantise_rows
from qsf.errors import QsfArgumentError, QsfConversionError, QsfError, QsfIOError
from qsf.format import Activation, Dtype, Layout, Reader, TensorType

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
    assert report.warnings == ("no tokenizer.json: the file can only be run on token ids",)


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
        ("4bit", None, Dtype.Q4, Dtype.Q8),
        ("8bit", None, Dtype.Q8, Dtype.Q8),
        ("f16", None, Dtype.F16, Dtype.F16),
        ("4bit", "4bit", Dtype.Q4, Dtype.Q4),
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
    convert(folder, tmp_path / "one.qsf", n_threads=1)
    convert(sharded, tmp_path / "many.qsf", n_threads=3)
    assert (tmp_path / "one.qsf").read_bytes() == (tmp_path / "many.qsf").read_bytes()


def test_pieces_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row ranges, gathered columns and a small memory bound give the same bytes."""
    module = importlib.import_module("qsf.converter.convert")
    for make in (hf_makers.llama, hf_makers.gpt2):
        folder, _ = make(tmp_path / make.__name__)
        convert(folder, tmp_path / "whole.qsf", overwrite=True)
        with monkeypatch.context() as patch:
            patch.setattr(module, "_PIECE_BYTES", 1)
            patch.setattr(module, "_SLAB_BYTES", 500)
            patch.setattr(module, "_IN_FLIGHT_BYTES", 1)
            convert(folder, tmp_path / "pieces.qsf", overwrite=True)
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
    save_file({**weights, "lm_head.weight": np.ones((50, 72))}, folder / "model.safetensors")
    assert not any("lm_head" in text for text in convert(folder, tmp_path / "b.qsf").warnings)
    folder, weights = hf_makers.llama(tmp_path / "absent")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors")
    assert any("lm_head" in text for text in convert(folder, tmp_path / "c.qsf").warnings)
    for name in "abc":
        with Reader(tmp_path / f"{name}.qsf") as reader:
            assert reader.arch.tied_head
            assert reader.tensor(3, T.HEAD) is None


def test_gpt2_with_its_own_head(tmp_path: Path) -> None:
    folder, weights = hf_makers.gpt2(tmp_path / "m", tie_word_embeddings=False)
    head = np.arange(40 * 48, dtype=np.float16).reshape(40, 48) / 100
    save_file({**weights, "lm_head.weight": head}, folder / "model.safetensors")
    convert(folder, tmp_path / "out.qsf", embed_type="f16")
    with Reader(tmp_path / "out.qsf") as reader:
        assert not reader.arch.tied_head
        np.testing.assert_array_equal(stored(reader, 3, T.HEAD), head)


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 7.0}}, (7.0, 0, 1.0)),
        ({"rope_scaling": None}, (5000.0, 0, 1.0)),
        ({"rope_scaling": {"rope_type": "default"}}, (5000.0, 0, 1.0)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, (5000.0, 1, 2.0)),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 9}}, (9, 1, 2.5)),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, (5000.0, 2, 8.0)),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}, (5e5, 2, 8.0)),
    ],
)
def test_rope_in_both_spellings(
    tmp_path: Path, changes: dict[str, Any], expected: tuple[float, int, float]
) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m", **changes)
    convert(folder, tmp_path / "out.qsf")
    with Reader(tmp_path / "out.qsf") as reader:
        a = reader.arch
        assert (reader.header.rope_theta, a.rope_scaling, a.rope_factor) == expected
        if a.rope_scaling == 2:
            assert (a.rope_low_freq_factor, a.rope_high_freq_factor) == (1.0, 4.0)
            assert a.rope_original_tokens == 32


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"sliding_window": None}, 0),
        ({"sliding_window": 16}, 16),
        ({"sliding_window": 16, "layer_types": ["full_attention"] * 2}, 0),
        ({}, 4096),
    ],
)
def test_mistral_window(tmp_path: Path, changes: dict[str, Any], window: int) -> None:
    mistral: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    folder, _ = hf_makers.llama(tmp_path / "m", **mistral, **changes)
    convert(folder, tmp_path / "out.qsf")
    with Reader(tmp_path / "out.qsf") as reader:
        assert reader.header.architecture == 2
        assert reader.arch.window_tokens == window


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("gelu_new", Activation.GELU_TANH),
        ("gelu_pytorch_tanh", Activation.GELU_TANH),
        ("gelu", Activation.GELU_ERF),
        ("relu", Activation.RELU),
        ("silu", Activation.SILU),
    ],
)
def test_activations(tmp_path: Path, name: str, activation: Activation) -> None:
    folder, _ = hf_makers.gpt2(tmp_path / "m", activation_function=name)
    convert(folder, tmp_path / "out.qsf")
    with Reader(tmp_path / "out.qsf") as reader:
        assert reader.header.activation == activation


def test_the_file_brings_tokenizer_and_chat(tmp_path: Path) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m")
    tokenizer = b'{"model": {"vocab": {}}, "odd":   "spacing \xc3\xa9"}\n'
    generation = {"eos_token_id": [2, 3], "temperature": 0.6}
    (folder / "tokenizer.json").write_bytes(tokenizer)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    special = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**special, "chat_template": "{{ é }}"}), encoding="utf-8"
    )
    (folder / "special_tokens_map.json").write_text(json.dumps({"unk_token": "<unk>"}))
    (folder / "README.md").write_text("---\ntags: [x]\nlicense: mit\n---\nlicense: no\n")
    report = convert(folder, tmp_path / "out.qsf")
    assert report.warnings == ()

    def chat() -> dict[str, Any]:
        with Reader(tmp_path / "out.qsf") as reader:
            assert reader.read_section("TOKN") == tokenizer
            content: dict[str, Any] = json.loads(reader.read_section("CHAT"))
            return content

    assert chat() == {
        "chat_template": "{{ é }}",
        "special_tokens": {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "add_bos_token": True,
        },
        "generation": {"bos_token_id": 1, **generation},
    }
    with Reader(tmp_path / "out.qsf") as reader:
        meta = json.loads(reader.read_section("META"))
    assert meta["licence"] == "mit"
    assert meta["source"]["name"] == "m"
    assert len(meta["source"]["weights_sha256"]) == 64

    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    convert(folder, tmp_path / "out.qsf", overwrite=True)
    assert chat()["chat_template"] == "from json"
    (folder / "chat_template.jinja").write_text("from jinja")
    convert(folder, tmp_path / "out.qsf", overwrite=True)
    assert chat()["chat_template"] == "from jinja"


def test_token_ids_complete_each_other(tmp_path: Path) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m", bos_token_id=None)
    ids = {"bos_token_id": 7, "eos_token_id": None, "pad_token_id": 9}
    (folder / "generation_config.json").write_text(json.dumps(ids))
    convert(folder, tmp_path / "out.qsf")
    with Reader(tmp_path / "out.qsf") as reader:
        h = reader.header
        assert (h.bos_id, h.eos_id, h.pad_id) == (7, 2, 9)
        generation = json.loads(reader.read_section("CHAT"))["generation"]
    assert generation == {"bos_token_id": 7, "eos_token_id": [2, 3], "pad_token_id": 9}


def test_named_chat_templates(tmp_path: Path) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m")
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    convert(folder, tmp_path / "out.qsf")
    with Reader(tmp_path / "out.qsf") as reader:
        chat = json.loads(reader.read_section("CHAT"))
    assert chat["chat_template"] == "d"
    assert chat["chat_templates"] == {"tool_use": "t", "default": "d"}


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    folder, _ = hf_makers.gpt2(tmp_path / "m")
    calls: list[tuple[int, int]] = []
    report = convert(
        folder, tmp_path / "out.qsf", progress=lambda done, total: calls.append((done, total))
    )
    assert calls == sorted(calls)
    assert calls[-1] == (report.source_bytes, report.source_bytes)


def test_warnings_name_what_is_not_used(tmp_path: Path) -> None:
    folder, weights = hf_makers.llama(tmp_path / "m")
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(5, np.float32),
        "model.layers.0.self_attn.q_proj.bias": np.ones(40, np.float32),
    }
    save_file({**weights, **extra}, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    assert convert(folder, tmp_path / "out.qsf").warnings == (
        "1 tensors are not used: layers.0.self_attn.q_proj.bias",
    )


def test_ids_outside_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m", pad_token_id=-1, bos_token_id=50)
    report = convert(folder, tmp_path / "out.qsf")
    assert sum("outside the vocabulary" in text for text in report.warnings) == 2
    with Reader(tmp_path / "out.qsf") as reader:
        assert (reader.header.bos_id, reader.header.pad_id) == (None, None)


# ---- what is refused ----


def refuse(folder: Path, message: str, error: type[QsfError] = QsfConversionError) -> None:
    """Converting raises, says why, and leaves nothing beside the model."""
    out = folder.parent / "out.qsf"
    before = sorted(folder.parent.iterdir())
    with pytest.raises(error, match=message):
        convert(folder, out)
    assert sorted(folder.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "FalconForCausalLM is not supported.*Llama"),
        ({"architectures": None, "model_type": "falcon"}, "names no architecture.*falcon"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "not a positive number"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1}}}, "differs between layers"),
        ({"rope_scaling": "linear"}, "not an object"),
        (
            {"rope_scaling": {**LLAMA3, "rope_type": "llama3", "high_freq_factor": 1}},
            "is not above low_freq_factor",
        ),
        ({"hidden_act": "gelu_10"}, "hidden_act = 'gelu_10' is not supported; supported: gelu_new"),
        ({"quantization_config": {"bits": 4}}, "quantization_config .* unquantised checkpoint"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"mlp_bias": True}, "no tensor model.layers.0.mlp.gate_proj.bias"),
        ({"num_key_value_heads": 3}, "cannot share 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0 is not within"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers = '2'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"head_dim": 9}, "even head_dim"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "not true or false"),
        ({"vocab_size": 51}, r"embed_tokens.weight has shape \[50, 72\].*\[51, 72\]"),
        ({"num_hidden_layers": 3}, r"no tensor model.layers.2.input_layernorm.weight"),
    ],
)
def test_configurations_that_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m")
    config = {**hf_makers.LLAMA_CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    refuse(folder, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"scale_attn_weights": False}, "scale_attn_weights"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"activation_function": "tanh"}, "activation_function"),
        ({"n_head": 5}, "not a multiple"),
    ],
)
def test_gpt2_configurations_that_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder, _ = hf_makers.gpt2(tmp_path / "m", **changes)
    refuse(folder, message)


def test_mistral_with_mixed_attention_is_refused(tmp_path: Path) -> None:
    folder, _ = hf_makers.llama(
        tmp_path / "m",
        architectures=["MistralForCausalLM"],
        layer_types=["full_attention", "sliding_attention"],
    )
    refuse(folder, "layer_types")


@pytest.mark.parametrize("content", ["", "{", "[]", "nul", "[" * 100000])
def test_a_config_that_is_not_json(tmp_path: Path, content: str) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m")
    (folder / "config.json").write_text(content)
    refuse(folder, r"config\.json: ")


def test_missing_directories(tmp_path: Path) -> None:
    refuse(tmp_path / "gone", "no such directory", QsfIOError)
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", "no config.json")


@pytest.mark.parametrize("value", [np.nan, np.inf, 7e4])
@pytest.mark.parametrize(
    ("name", "position"),
    [
        ("transformer.h.1.attn.c_attn.weight", (47, 100)),
        ("transformer.h.0.mlp.c_proj.weight", (191, 3)),
        ("transformer.h.0.attn.c_attn.bias", (77,)),
        ("transformer.wte.weight", (39, 47)),
        ("transformer.wpe.weight", (20, 1)),
    ],
)
def test_bad_values_are_named(
    tmp_path: Path, name: str, position: tuple[int, ...], value: float
) -> None:
    folder, weights = hf_makers.gpt2(tmp_path / "m", np.float32)
    weights[name][position] = value
    save_file(weights, folder / "model.safetensors")
    fits = value == 7e4 and (name.endswith("bias") or "wte" in name)  # f32; 8-bit: up to 8e6
    # 4 bits: 7e4 / 15 is a good scale, but a block from -7e4 has no f16 for its min.
    if value == 7e4 and "h." in name and name.endswith("weight"):
        weights[name][position] = -value
        save_file(weights, folder / "model.safetensors")
    if fits:
        convert(folder, tmp_path / "out.qsf")
    else:
        where = ", ".join(map(str, position))
        refuse(folder, rf"tensor {name} at \[{where}\]: ".replace(".", r"\."))


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    folder, weights = hf_makers.llama(tmp_path / "m")
    name = "model.layers.0.self_attn.k_proj.weight"
    weights[name] = np.zeros((20, 72), np.int8)
    save_file(weights, folder / "model.safetensors")
    refuse(folder, f"{name} is stored as I8")


def test_two_names_for_one_tensor(tmp_path: Path) -> None:
    folder, weights = hf_makers.llama(tmp_path / "m")
    save_file({**weights, "norm.weight": np.ones(72)}, folder / "model.safetensors")
    refuse(folder, "both .*norm.weight")


def test_options_that_are_refused(tmp_path: Path) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m")
    for name in ("2bit", "3bit", "ternary", "mixed"):
        with pytest.raises(QsfConversionError, match=f"{name} is not available yet.*4bit, 8bit"):
            convert(folder, tmp_path / "out.qsf", quant_type=name)
    with pytest.raises(QsfArgumentError, match="embed type q5 is unknown"):
        convert(folder, tmp_path / "out.qsf", embed_type="q5")


def test_existing_files_are_kept_unless_told(tmp_path: Path) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m")
    out = tmp_path / "out.model"
    out.write_text("precious")
    with pytest.raises(QsfArgumentError, match="exists"):
        convert(folder, out)
    assert out.read_text() == "precious"
    (folder / "config.json").rename(folder / "config.txt")
    with pytest.raises(QsfConversionError):
        convert(folder, out, overwrite=True)
    assert out.read_text() == "precious"
    (folder / "config.txt").rename(folder / "config.json")
    convert(folder, out, overwrite=True)
    with Reader(out) as reader:
        reader.verify()
    for name in ("model.safetensors", "config.json"):
        with pytest.raises(QsfArgumentError, match="of the model itself"):
            convert(folder, folder / name, overwrite=True)


def test_bad_outputs(tmp_path: Path) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m")
    with pytest.raises(QsfIOError, match="is a directory"):
        convert(folder, tmp_path)
    with pytest.raises(QsfIOError, match="no such directory"):
        convert(folder, tmp_path / "gone" / "out.qsf")


def test_too_little_space_is_seen_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    folder, _ = hf_makers.llama(tmp_path / "m")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    refuse(folder, "only 0 MB are free", QsfIOError)


def test_a_full_disk_at_any_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = hf_makers.gpt2(tmp_path / "m")
    real, n_writes, fail_at = os.pwrite, 0, -1

    def pwrite(fd: int, data: Any, off: int) -> int:
        nonlocal n_writes
        n_writes += 1
        if n_writes == fail_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, off)

    monkeypatch.setattr(os, "pwrite", pwrite)
    convert(folder, tmp_path / "whole.qsf")
    assert n_writes > 20
    for number in range(1, n_writes + 1, 4):
        n_writes, fail_at = 0, number
        refuse(folder, "No space left on device", QsfIOError)


def test_an_interrupt_anywhere_leaves_nothing(tmp_path: Path) -> None:
    folder, _ = hf_makers.gpt2(tmp_path / "m")
    n_calls = 0

    def count(done: int, total: int) -> None:
        nonlocal n_calls
        n_calls += 1

    convert(folder, tmp_path / "whole.qsf", progress=count)
    before = sorted(tmp_path.iterdir())
    for stop_at in range(1, n_calls + 1, 5):
        seen = 0

        def interrupt(done: int, total: int, stop_at: int = stop_at) -> None:
            nonlocal seen
            seen += 1
            if seen == stop_at:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            convert(folder, tmp_path / "out.qsf", progress=interrupt)
        assert sorted(tmp_path.iterdir()) == before
    assert not [t for t in threading.enumerate() if t.name.startswith("quantise")]


@pytest.mark.skipif(os.name != "posix", reason="needs hard links")
def test_output_that_is_the_weights_under_another_name(tmp_path: Path) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m")
    (tmp_path / "link").hardlink_to(folder / "model.safetensors")
    with pytest.raises(QsfArgumentError, match="of the model itself"):
        convert(folder, tmp_path / "link", overwrite=True)


def test_public_names() -> None:
    import qsf.converter

    assert qsf.converter.__all__ == ["Report", "convert"]
    assert qsf.converter.convert is convert_function
