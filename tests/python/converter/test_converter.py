# SPDX-License-Identifier: Apache-2.0
"""The converter as a library: the weights in the file are those of the checkpoint, what the file
says beside them, and what is refused."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from make import hf_makers, tiny_checkpoints
from make.refusals import refusals
from make.stored import Reader, unpack_tokenizer
from make.tiny_checkpoints import LLAMA3_SCALING, raw_safetensors
from oracle.kept_tiles import decode_tiles
from qsf import Model
from qsf.errors import QsfArgumentError, QsfConversionError, QsfError, QsfIOError
from qsf.evaluate.evaluation import evaluate
from qsf.file.layout import FINAL_UNIT, KEPT, Activation, Dtype, Layout, TensorType
from qsf_converter import convert
from qsf_converter.calibrate import one_pass
from qsf_converter.calibrate.type_choice import auto_policy, q4_k_m_bytes, with_policy
from qsf_converter.original.layers import Original
from qsf_converter.request import Request
from qsf_converter.rounding.plan import QUANT_TYPES, Policy, make_plan
from qsf_converter.rounding.quantisers import quantise_rows
from qsf_converter.rounding.tiles import dequantise_tiles
from qsf_converter.sources.architectures import family_of, read_facts
from qsf_converter.sources.families.family import Facts
from qsf_converter.sources.source import open_source

T = TensorType


@pytest.mark.parametrize(
    ("quant", "embed", "dtype", "embed_dtype"),
    [
        *((name, None, dtype, Dtype.Q8) for name, dtype in QUANT_TYPES.items() if name[0] != "f"),
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
    assert report.n_weights == sum(values.size for values in weights.values())
    assert report.source_bytes == sum(values.nbytes for values in weights.values())
    assert report.file_bytes == (tmp_path / "out.qsf").stat().st_size
    with Reader(tmp_path / "out.qsf") as reader:
        reader.verify()
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
        encoded = {name: (dtype, v.shape, encode[dtype](v)) for name, v in values.items()}
        (folder / "model.safetensors").write_bytes(raw_safetensors(encoded))
        convert(folder, tmp_path / f"{dtype}.qsf")
        with Reader(tmp_path / f"{dtype}.qsf") as reader:
            files[dtype] = [reader.read_unit(i) for i in range(4)]
    assert files["F32"] == files["F16"] == files["BF16"]


def test_sharded_is_single_and_threads_do_not_matter(tmp_path: Path) -> None:
    """Nor does the prefix of names."""
    folder, weights = hf_makers.gpt2(tmp_path / "a" / "m")
    sharded, bare = (
        hf_makers.write_model(tmp_path / name / "m", hf_makers.GPT2_CONFIG, None) for name in "bc"
    )
    hf_makers.write_shards(sharded, weights, 3)
    without = {name.removeprefix("transformer."): values for name, values in weights.items()}
    save_file(without, bare / "model.safetensors")
    calls: list[tuple[int, int]] = []
    report = convert(
        folder, tmp_path / "one.qsf", threads=1, progress=lambda *done: calls.append(done)
    )
    assert calls == sorted(calls)
    assert calls[-1] == (report.source_bytes, report.source_bytes)
    convert(sharded, tmp_path / "many.qsf", threads=3)
    assert (tmp_path / "one.qsf").read_bytes() == (tmp_path / "many.qsf").read_bytes()
    convert(bare, tmp_path / "bare.qsf")
    with Reader(tmp_path / "one.qsf") as a, Reader(tmp_path / "bare.qsf") as b:
        assert [a.read_unit(i) for i in range(4)] == [b.read_unit(i) for i in range(4)]


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


def test_every_type_that_is_rounded_to_can_be_asked_for() -> None:
    assert set(QUANT_TYPES.values()) == set(Dtype) - {*KEPT, Dtype.MIXED} | {Dtype.Q5_0}


# ---- what is refused ----
def refuse(folder: Path, message: str, error: type[QsfError] = QsfConversionError) -> None:
    """Converting raises, says why, and leaves nothing beside the model."""
    out = folder.parent / "out.qsf"
    before = sorted(folder.parent.iterdir())
    with pytest.raises(error, match=message):
        convert(folder, out)
    assert sorted(folder.parent.iterdir()) == before


@pytest.mark.parametrize(("changes", "message"), refusals("llama"))
def test_configurations_that_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m")
    config = {**hf_makers.LLAMA_CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    refuse(folder, message)


# Of GPT-2
@pytest.mark.parametrize(("changes", "message"), refusals("gpt2"))
def test_gpt2_configurations_that_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder, _ = hf_makers.gpt2(tmp_path / "m", **changes)
    refuse(folder, message)


def test_a_config_that_is_not_json(tmp_path: Path) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m")
    for content in ("", "{", "[]", "nul", "[" * 100000):
        (folder / "config.json").write_text(content)
        refuse(folder, r"config\.json: ")


@pytest.mark.parametrize("value", [np.nan, 7e4])
@pytest.mark.parametrize(
    ("name", "position"),
    [
        ("transformer.h.1.attn.c_attn.weight", (47, 100)),
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


def test_integer_weights_and_two_names_for_one_tensor(tmp_path: Path) -> None:
    folder, weights = hf_makers.llama(tmp_path / "m")
    name = "model.layers.0.self_attn.k_proj.weight"
    weights[name] = np.zeros((20, 72), np.int8)
    save_file(weights, folder / "model.safetensors")
    refuse(folder, f"{name} is stored as I8")
    save_file({**weights, "norm.weight": np.ones(72)}, folder / "model.safetensors")
    refuse(folder, "has norm.weight and model.norm.weight")


def test_existing_files_are_kept_unless_told(tmp_path: Path) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m")
    out = tmp_path / "out.model"
    out.write_text("precious")
    with pytest.raises(QsfArgumentError, match="exists"):
        convert(folder, out)
    assert out.read_text() == "precious"
    (folder / "config.json").rename(folder / "config.txt")
    with pytest.raises(QsfConversionError):
        convert(folder, out, force=True)
    assert out.read_text() == "precious"
    (folder / "config.txt").rename(folder / "config.json")
    convert(folder, out, force=True)
    with Reader(out) as reader:
        reader.verify()
    (tmp_path / "link").hardlink_to(folder / "model.safetensors")
    for path in (folder / "model.safetensors", folder / "config.json", tmp_path / "link"):
        with pytest.raises(QsfArgumentError, match="of the model itself"):
            convert(folder, path, force=True)


def test_a_link_to_nothing_is_kept_unless_told(tmp_path: Path) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m")
    out = tmp_path / "out.qsf"
    out.symlink_to("nothing.qsf")
    with pytest.raises(QsfArgumentError, match="exists; --force replaces it"):
        convert(folder, out)
    assert out.readlink() == Path("nothing.qsf")
    convert(folder, out, force=True)
    with Reader(out) as reader:
        reader.verify()
    assert not out.is_symlink()
    assert not (tmp_path / "nothing.qsf").exists()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("config.json", "pipe"), ("config.json", "device"), ("config.json", "large"),
     ("tokenizer.json", "pipe"), ("tokenizer.json", "large"), ("generation_config.json", "device"),
     ("tokenizer_config.json", "pipe"), ("tokenizer_config.json", "large"),
     ("model.safetensors.index.json", "large"), ("model.safetensors.index.json", "pipe"),
     ("model.safetensors", "device"), ("pytorch_model.bin", "pipe"), ("m.gguf", "pipe"),
     ("m.gguf", "device")],
)  # fmt: skip
def test_files_that_never_end_are_refused(tmp_path: Path, name: str, kind: str) -> None:
    """Nothing waits for a writer, and nothing is read to its end."""
    folder, _ = hf_makers.llama(tmp_path / "m")
    if name in ("model.safetensors.index.json", "pytorch_model.bin", "m.gguf"):
        (folder / "model.safetensors").unlink()
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(65 << 30)
    said = "66560 MB, allowed: up to 64" if kind == "large" else "not a regular file"
    refuse(path if name == "m.gguf" else folder, said)


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


# ---- what the file says beside the weights ----
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 7.0}}, (7.0, 0, 1.0)),
        ({"rope_scaling": None}, (5000.0, 0, 1.0)),
        ({"rope_scaling": {"rope_type": "default"}}, (5000.0, 0, 1.0)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, (5000.0, 1, 2.0)),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 9}}, (9, 1, 2.5)),
        ({"rope_scaling": LLAMA3_SCALING}, (5000.0, 2, 8.0)),
        ({"rope_parameters": {**LLAMA3_SCALING, "rope_theta": 5e5}}, (5e5, 2, 8.0)),
    ],
)
def test_rope_in_both_spellings(
    changes: dict[str, Any], expected: tuple[float, int, float]
) -> None:
    facts = facts_of({**hf_makers.LLAMA_CONFIG, **changes})
    a = facts.arch
    assert (facts.header.rope_theta, a.rope_scaling, a.rope_factor) == expected
    if a.rope_scaling == 2:
        of_llama = (a.rope_low_freq_factor, a.rope_high_freq_factor, a.rope_original_tokens)
        assert of_llama == (1.0, 4.0, 32)


def facts_of(config: dict[str, Any]) -> Facts:
    return read_facts(family_of(config), config)


def test_windows_of_mistral_and_names_of_activations() -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    for changes, window in (
        ({"sliding_window": None}, 0),
        ({"sliding_window": 16}, 16),
        ({"sliding_window": 16, "layer_types": ["full_attention"] * 2}, 0),
        ({}, 4096),
    ):
        facts = facts_of({**hf_makers.LLAMA_CONFIG, **mistral, **changes})
        assert (facts.header.architecture, facts.arch.window_tokens) == (2, window)
    for name, activation in (
        ("gelu_new", Activation.GELU_TANH),
        ("gelu_pytorch_tanh", Activation.GELU_TANH),
        ("gelu", Activation.GELU_ERF),
        ("relu", Activation.RELU),
        ("silu", Activation.SILU),
    ):
        facts = facts_of({**hf_makers.GPT2_CONFIG, "activation_function": name})
        assert facts.header.activation == activation


def test_the_file_brings_tokenizer_and_chat(tmp_path: Path) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m")
    tokenizer = hf_makers.tokenizer_json().replace(b", ", b",   ") + b"\n"
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
    assert [w for w in report.warnings if "own tokenizer" not in w] == []  # it is none

    def chat() -> dict[str, Any]:
        with Reader(tmp_path / "out.qsf") as reader:
            assert unpack_tokenizer(reader.read_section("TOKN")) == tokenizer
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
    convert(folder, tmp_path / "out.qsf", force=True)
    assert chat()["chat_template"] == "from json"
    (folder / "chat_template.jinja").write_text("from jinja")
    convert(folder, tmp_path / "out.qsf", force=True)
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


def test_chat_templates_in_files_of_their_own(tmp_path: Path) -> None:
    """As transformers writes them: they are preferred, and their line ends stay."""
    folder, _ = hf_makers.llama(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "other"}))
    (folder / "chat_template.jinja").write_bytes(b"{{ 'd' }}\r\n")
    convert(folder, tmp_path / "out.qsf")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("t")
    convert(folder, tmp_path / "more.qsf")
    for name, named in (("out", {}), ("more", {"tool_use": "t"})):
        with Reader(tmp_path / f"{name}.qsf") as reader:
            chat = json.loads(reader.read_section("CHAT"))
        assert chat["chat_template"] == "{{ 'd' }}\r\n"
        assert chat["chat_templates"] == {"default": "{{ 'd' }}\r\n", **named}
    with Model(tmp_path / "more.qsf", ram_budget=None) as model:
        user = [{"role": "user", "content": "x"}]
        assert model.chat_template.render(user) == "d"
        assert model.chat_template.render(user, tools=[]) == "t"


def test_warnings_name_what_is_not_used(tmp_path: Path) -> None:
    folder, weights = hf_makers.llama(tmp_path / "m")
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(5, np.float32),
        "model.layers.0.self_attn.q_proj.bias": np.ones(40, np.float32),
    }
    save_file({**weights, **extra}, folder / "model.safetensors")
    warnings = convert(folder, tmp_path / "out.qsf").warnings
    assert tuple(w for w in warnings if "own tokenizer" not in w) == (
        "1 tensors are not used: layers.0.self_attn.q_proj.bias",
    )


def test_ids_outside_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m", pad_token_id=-1, bos_token_id=50)
    report = convert(folder, tmp_path / "out.qsf")
    assert sum("outside the vocabulary" in text for text in report.warnings) == 2
    with Reader(tmp_path / "out.qsf") as reader:
        assert (reader.header.bos_id, reader.header.pad_id) == (None, None)


# ---- `--quant-type auto`: types within the bytes of Q4_K_M, and error feedback after one pass ----
TEXT = "Once upon a time there was a little bear who lived near the big river. " * 12


def test_half_of_what_4bit_loses(
    tmp_path: Path, converted: Callable[[str, str], Path], tiny_llama_dir: Path
) -> None:
    for n_threads in (1, 2):
        convert(tiny_llama_dir, tmp_path / f"{n_threads}.qsf", quant_type="auto", threads=n_threads)
    assert (tmp_path / "1.qsf").read_bytes() == (tmp_path / "2.qsf").read_bytes()
    found = []
    for path in (tmp_path / "1.qsf", converted("tiny-llama", "4bit")):
        with Model(path) as model, Model(converted("tiny-llama", "f16")) as against:
            found.append(evaluate(model, TEXT, against=against).kl_mean)
    auto, plain = found
    assert auto is not None
    assert plain is not None
    assert auto < 0.4 * plain


@pytest.mark.parametrize("is_tied", [True, False])
def test_bytes_are_those_of_q4_k_m(tmp_path: Path, is_tied: bool) -> None:
    """Of 8 layers llama.cpp gives V and down of 0, 3, 6 and 7 more bits, and the head; those of an
    embedding that is not the head are not read with a token.
    """
    sizes = {"dim": 256, "ffn_dim": 512, "n_heads": 4, "n_kv_heads": 4, "head_dim": 64}
    folder = tiny_checkpoints.make_llama(
        tmp_path / "m", n_layers=8, n_vocab=512, tied_head=is_tied, **sizes
    )
    with open_source(folder) as source:
        policy = Request(quant_type="auto").first_policy()
        plan = make_plan(source.family, source.facts, source.checkpoint, policy)
        matrices = [target for target in plan.targets if target.is_matrix]
        attention, feed = 256 * 256, 256 * 512
        fine_bits = 512 * 256 + 4 * (attention + feed)
        all_weights = (1 if is_tied else 2) * 512 * 256 + 8 * (4 * attention + 3 * feed)
        theirs = fine_bits * 6.5625 / 8 + (all_weights - fine_bits) * 4.5 / 8
        assert sum(q4_k_m_bytes(target, plan) for target in matrices) == theirs
        chosen = with_policy(plan, auto_policy(plan))
        ours = sum(target.n_bytes for target in chosen.targets if target.is_matrix)
        assert 0.97 * theirs < ours <= theirs
        dtypes = {target.name: target.dtype for target in chosen.targets if target.is_matrix}
        assert set(dtypes.values()) == {Dtype.Q4_K, Dtype.Q5_K, Dtype.Q8}
        if not is_tied:
            assert dtypes["EMBEDDING"] == Dtype.Q4_K  # as theirs


@pytest.mark.parametrize("dtype", [Dtype.Q4_NL, Dtype.Q4_K, Dtype.Q5_0, Dtype.Q5_K])
def test_wide_inputs_are_rounded_in_parts(monkeypatch: pytest.MonkeyPatch, dtype: Dtype) -> None:
    """Inputs that move together: what a column loses, its neighbours make up for."""
    rng = np.random.default_rng(3)
    common = rng.standard_normal((2048, 4))
    x = common @ rng.standard_normal((4, 768)) + 0.1 * rng.standard_normal((2048, 768))
    weights = rng.standard_normal((40, 768)).astype(np.float32)
    errors = {}
    for part_cols in (256, 4096):
        monkeypatch.setattr(one_pass, "_PART_COLS", part_cols)
        inputs = one_pass._Input(x.astype(np.float32))
        for part in inputs.parts:
            inputs.factorise(part)
        assert [part.cols.stop for part in inputs.parts][-1] == 768
        tiles, sums = inputs.round(dtype, weights, n_threads=2)
        stored = decode_tiles(dtype, tiles, *weights.shape)
        np.testing.assert_allclose(sums.squared_error, np.square(stored - weights).sum(), 1e-4)
        errors[len(inputs.parts)] = np.square((stored - weights) @ x.T).sum()
    plain = np.empty_like(weights)
    quantise_rows(dtype, weights, stored=plain)
    lost = np.square((plain - weights) @ x.T).sum()
    assert errors[1] < errors[3] < 0.7 * lost


def test_what_columns_make_up_for_may_exceed_the_range_of_the_rows() -> None:
    """Inputs that follow larger ones take up errors that are 40 times their weights."""
    rng = np.random.default_rng(4)
    large = rng.standard_normal((2048, 256))
    small = 0.6 * large + 0.01 * rng.standard_normal((2048, 256))
    x = np.concatenate([large, small], axis=1).astype(np.float32)
    weights = rng.standard_normal((80, 512)).astype(np.float32)
    weights[:, 256:] *= 0.001
    errors = {}
    for dtype in (Dtype.Q5_0, Dtype.Q5_K):
        inputs = one_pass._Input(x)
        inputs.factorise(inputs.parts[0])
        tiles, sums = inputs.round(dtype, weights, n_threads=1)
        assert sums.n_values == weights.size
        stored = decode_tiles(dtype, tiles, *weights.shape)
        errors[dtype] = np.square((stored - weights) @ x.T).sum()
    assert errors[Dtype.Q5_K] < errors[Dtype.Q5_0]


def test_a_tied_head_of_few_bits_is_rounded_as_the_head(tiny_llama_dir: Path) -> None:
    tokens = np.random.default_rng(5).integers(2048, size=(12, 100))
    with open_source(tiny_llama_dir) as source:
        plan = make_plan(source.family, source.facts, source.checkpoint, Policy(Dtype.Q4, Dtype.Q4))
        one = one_pass.OnePass(plan, source.checkpoint, tokens)
        unit = next(iter(one.units()))
        (tensor,) = unit.tensors
        tiles = b"".join(piece.data for piece in tensor.pieces)
        original = Original(plan, source.checkpoint)
        ((_, weights),) = original.embedding_rows()
        x = original.embed(tokens[1::2])  # nothing is fitted to these
        for layer in plan.layers:
            x = original.layer(original.weights(layer.id), x)
        y = original.final_norm(original.vectors(FINAL_UNIT), x).reshape(-1, 192)
    plain = np.empty_like(weights)
    quantise_rows(Dtype.Q4, weights, stored=plain)
    stored = decode_tiles(Dtype.Q4, tiles, *weights.shape)
    losses = [np.square((rounded - weights) @ y.T).sum() for rounded in (stored, plain)]
    assert losses[0] < 0.8 * losses[1]
    assert tensor.action == "feedback"


def test_it_is_the_default_where_it_was_measured(
    tmp_path: Path, tiny_llama_dir: Path, auto_weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of large models, of those without a tokenizer, nor with a request of its own."""
    bare = tiny_checkpoints.make_llama(tmp_path / "bare")
    small, large = auto_weights, 1_000_000
    cases: tuple[tuple[int, Path, dict[str, Any], str], ...] = (
        (small, tiny_llama_dir, {}, "auto"),
        (large, tiny_llama_dir, {}, "4bit"),
        (small, bare, {}, "4bit"),
        (small, tiny_llama_dir, {"quant_type": "4bit"}, "4bit"),
        (small, tiny_llama_dir, {"embed_type": "4bit"}, "4bit"),
    )
    for limit, folder, options, expected in cases:
        monkeypatch.setattr(sys.modules["qsf_converter.convert"], "AUTO_WEIGHTS", limit)
        report = convert(folder, tmp_path / "m.qsf", force=True, **options)
        is_auto = any(note.startswith("auto, ") for note in report.notes)
        assert is_auto == (expected == "auto"), (limit, folder, options)
    monkeypatch.setattr(sys.modules["qsf_converter.convert"], "AUTO_WEIGHTS", small)
    monkeypatch.setattr(sys.modules["qsf_converter.convert"], "AUTO_BYTES", 1 << 60)
    report = convert(tiny_llama_dir, tmp_path / "m.qsf", force=True)
    assert any("MB are free" in warning for warning in report.warnings)
    assert not any(note.startswith("auto, ") for note in report.notes)


def test_what_auto_cannot_do_is_said(tmp_path: Path, tiny_llama_dir: Path) -> None:
    for options in ({"calibration": "bundled"}, {"embed_type": "8bit"}, {"target_size": 2}):
        with pytest.raises(QsfArgumentError, match="auto"):
            convert(tiny_llama_dir, tmp_path / "m.qsf", quant_type="auto", **options)
    bare = tiny_checkpoints.make_llama(tmp_path / "bare")
    with pytest.raises(QsfConversionError, match="tokenizer"):
        convert(bare, tmp_path / "m.qsf", quant_type="auto")
