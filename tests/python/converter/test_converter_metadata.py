"""The converter as a library: what the file says of the model beside its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from make import hf_makers
from make.stored import unpack_tokenizer
from make.tiny_checkpoints import LLAMA3_SCALING
from qsf import Model
from qsf.file.layout import Activation
from qsf.file.reader import Reader
from qsf_converter import convert


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


def test_named_chat_templates(tmp_path: Path) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m")
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    convert(folder, tmp_path / "out.qsf")
    with Reader(tmp_path / "out.qsf") as reader:
        chat = json.loads(reader.read_section("CHAT"))
    assert chat["chat_template"] == "d"
    assert chat["chat_templates"] == {"tool_use": "t", "default": "d"}


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
