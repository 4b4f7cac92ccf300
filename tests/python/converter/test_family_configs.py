# SPDX-License-Identifier: Apache-2.0
"""Configurations of families: spellings, defaults, parts of larger models, refusals by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from make import golden_families
from make.refusals import refusals
from make.stored import Reader
from qsf.errors import QsfConversionError
from qsf_converter import convert
from qsf_converter.sources.architectures import FAMILIES, family_of, read_facts
from qsf_converter.sources.families.family import CLASS_DEFAULTS
from qsf_converter.sources.families.positions import alibi_slopes, mpt_slopes

CASES = golden_families.cases()
Config = dict[str, Any]


def test_every_family_has_its_class_s_defaults() -> None:
    assert json.loads(CLASS_DEFAULTS.read_text("utf-8")).keys() == FAMILIES.keys()


def older(config: Config) -> Config:
    """The configuration as it was spelled before transformers 5."""
    config = copy.deepcopy(config)
    rope = config.pop("rope_parameters", None)
    config["torch_dtype"] = config.pop("dtype")
    windows = None
    if rope and "full_attention" in rope:
        windows, rope = rope["sliding_attention"], rope["full_attention"]
    if rope:
        config["rope_theta"] = rope.pop("rope_theta")
        part = rope.pop("partial_rotary_factor", None)
        if config["model_type"] == "gpt_neox":
            config |= {"rotary_emb_base": config.pop("rope_theta"), "rotary_pct": part}
        elif part is not None:
            config["partial_rotary_factor"] = part
        kind = rope.pop("rope_type")
        if kind != "default":
            config["rope_scaling"] = {"type": kind, **rope}
    if config["model_type"] == "gemma3_text":
        assert windows is not None
        config |= {"rope_local_base_freq": windows["rope_theta"], "sliding_window_pattern": 3}
        del config["layer_types"]
    if config["model_type"].startswith("gemma4"):
        assert windows is not None
        config = {**published(config), "rope_local_base_freq": windows["rope_theta"]}
    if config["model_type"] == "modernbert":
        assert windows is not None
        config["global_rope_theta"] = config.pop("rope_theta")
        config["local_rope_theta"] = windows["rope_theta"]
        if config["layer_types"][0] == "full_attention":
            config["global_attn_every_n_layers"] = 3
            del config["layer_types"]
    if config["model_type"] == "gemma2":
        del config["layer_types"]
    return config


def published(config: Config) -> Config:
    """A configuration of Gemma 4 with the heads of layers without a window as checkpoints say."""
    config = copy.deepcopy(config)
    own = next(iter(config.pop("per_layer_config").values()))
    config["global_head_dim"] = own["head_dim"]
    config["num_global_key_value_heads"] = own.get("num_key_value_heads")
    return config


# They have no older spelling.
_NEW = ("lfm3", "nomic_bert", "embedding_gemma2")


def test_older_spellings_say_the_same() -> None:
    for name, case in CASES.items():
        if "nested" in name or name in _NEW:
            continue
        family, config = family_of(case.config), case.config
        config = {**config, **{key: [0.5] * config["num_hidden_layers"] for key in family.scalars}}
        old = older(config)
        assert "rope_parameters" not in old
        assert read_facts(family, old) == read_facts(family, config), name


def test_configurations_of_published_blooms_say_the_same() -> None:
    config = CASES["bloom"].config
    new = {"hidden_size", "n_head", "slow_but_exact"}
    old = {key: value for key, value in config.items() if key not in new}
    old |= {
        "n_embed": 72, "num_attention_heads": 6, "n_inner": None, "offset_alibi": 100,
        "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "pretraining_tp": 4,
        "masked_softmax_fusion": True, "skip_bias_add": True, "skip_bias_add_qkv": False,
        "unk_token_id": 0,
    }  # fmt: skip
    assert read_facts(family_of(config), old) == read_facts(family_of(config), config)


@pytest.mark.parametrize("name", CASES)
def test_a_key_that_is_left_out_has_a_default_or_is_missed_by_name(name: str) -> None:
    config = CASES[name].config
    family = family_of(config)
    text = config.get("text_config", config)
    sizes = {"hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"}
    needed = {family.renames.get(size, size) for size in sizes - family.defaults.keys()}
    if not {"ffn_multiple", "intermediate_size"} & family.defaults.keys():
        needed.add(family.renames.get("intermediate_size", "intermediate_size"))
    if family.name == "Dots1ForCausalLM":  # its class has no default for these
        needed |= {"n_routed_experts", "num_experts_per_tok"}
    if family.name == "DeepseekV2ForCausalLM":
        needed.add("num_experts_per_tok")
    if text.get("enable_moe_block"):  # nor has that of Gemma 4
        needed |= {"num_experts", "top_k_experts", "moe_intermediate_size"}
    for key in text:
        without = {other: value for other, value in text.items() if other != key}
        changed = {**config, "text_config": without} if text is not config else without
        # Some defaults, of models a thousand times as large, do not fit to this one.
        fault = ""
        try:
            read_facts(family, changed)
        except QsfConversionError as error:
            fault = str(error)
        assert (key in needed) == (f" {key} is missing" in fault), fault


def test_only_the_text_of_a_model_that_sees_is_converted(tmp_path: Path) -> None:
    case = CASES["gemma3-nested"]
    whole = convert(case.write(tmp_path / "whole"), tmp_path / "whole.qsf", quant_type="f16")
    said = [text for text in whole.warnings if "only the text part is converted" in text]
    assert len(said) == 1
    assert "tensors of vision_tower" in said[0]


@pytest.mark.parametrize(("name", "lacks"), refusals("architectures"))
def test_others_are_refused_with_what_they_lack(name: str, lacks: str) -> None:
    with pytest.raises(QsfConversionError, match=f"{name} is not supported: {lacks}") as caught:
        family_of({"architectures": [name]})
    assert "nearest" in str(caught.value)
    assert len(str(caught.value)) < 240


@pytest.mark.parametrize(
    ("name", "architecture", "text_type"),
    [
        ("kimi_k25", "KimiK25ForConditionalGeneration", "kimi_k2"),
        ("exaone4_5", "Exaone4_5_ForConditionalGeneration", "exaone4_5_text"),
        ("qwen2_5_vl", "Qwen2VLForConditionalGeneration", "qwen2_vl_text"),
        ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", None),  # its keys lie outside
    ],
)
def test_a_text_part_may_be_called_as_published(
    name: str, architecture: str, text_type: str | None
) -> None:
    config = CASES[name].config
    text = {**config["text_config"], "model_type": text_type}
    outer = {**config, "architectures": [architecture]}
    published = {**outer, "text_config": text}
    if text_type is None:
        del outer["text_config"]
        published = {**text, **outer, "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}}
    facts = [read_facts(family_of(c), c) for c in (config, published)]
    assert facts[0] == facts[1]


def test_experts_may_be_stored_with_rows_and_columns_exchanged(tmp_path: Path) -> None:
    case = CASES["qwen3_vl_moe"]  # whose published checkpoints have [experts, in, out]
    tensors = {
        name: values.swapaxes(1, 2) if ".experts." in name else values
        for name, values in case.tensors().items()
    }
    golden_families.write_checkpoint(tmp_path / "exchanged", case.config, tensors)
    convert(tmp_path / "exchanged", tmp_path / "exchanged.qsf", quant_type="f16")
    convert(case.write(tmp_path / "usual"), tmp_path / "usual.qsf", quant_type="f16")
    with Reader(tmp_path / "exchanged.qsf") as found, Reader(tmp_path / "usual.qsf") as expected:
        for unit in expected.experts:
            assert found.read_unit(unit.idx) == expected.read_unit(unit.idx), unit.idx


@pytest.mark.parametrize(("name", "changes", "message"), refusals("families"))
def test_what_a_family_does_not_compute_is_refused(
    name: str, changes: Config, message: str
) -> None:
    config = copy.deepcopy(CASES[name].config)
    for key, value in changes.items():
        is_part = isinstance(value, dict) and isinstance(config.get(key), dict)
        config[key] = {**config[key], **value} if is_part else value
    with pytest.raises(QsfConversionError, match=message):
        read_facts(family_of(config), config)


def test_norms_of_heads_must_be_there_and_alike(tmp_path: Path) -> None:
    case = CASES["stablelm-heads"]
    name = "model.layers.1.self_attn.k_layernorm.norms.2.weight"
    for values, message in (
        (None, f"no tensor {name}"),
        (np.ones(13, np.float32), r"norms.2.weight has shape \[13\], config.json asks for \[12\]"),
    ):
        tensors = {key: kept for key, kept in case.tensors().items() if key != name}
        if values is not None:
            tensors[name] = values
        folder = golden_families.write_checkpoint(tmp_path / "m", case.config, tensors)
        with pytest.raises(QsfConversionError, match=message):
            convert(folder, tmp_path / "m.qsf")


@pytest.mark.parametrize(
    "changes",
    [  # num_kv_shared_layers: none without a window is left
        {"per_layer_config": {"1": {"head_dim": 40}}},
        {"per_layer_config": {"1": {"head_dim": 40}, "3": {"head_dim": 48}}},
        {"per_layer_config": {"0": {"head_dim": 40}, "1": {"head_dim": 40}, "3": {"head_dim": 40}}},
        {"per_layer_config": {"1": {"sliding_window": 3}, "3": {"sliding_window": 3}}},
        {"per_layer_config": None, "num_global_key_value_heads": 3},
        {"use_bidirectional_attention": "all"},
        {"hidden_size_per_layer_input": 256},
        {"num_kv_shared_layers": 3},
        {"num_kv_shared_layers": 4},
    ],
)
def test_gemma4_with_other_layers_is_refused(changes: Config) -> None:
    config = {**CASES["gemma4-shared"].config, **changes}
    with pytest.raises(QsfConversionError, match=r"config\.json: "):
        read_facts(family_of(config), config)


def test_the_factor_of_gemma_is_rounded_as_its_checkpoints_are() -> None:
    config = CASES["gemma3"].config
    for dim, factor in ((3072, 55.5), (2560, 50.5), (1152, 34.0), (640, 25.25), (2304, 48.0)):
        said = {**config, "hidden_size": dim, "dtype": "bfloat16"}
        assert read_facts(FAMILIES["Gemma3ForCausalLM"], said).arch.embedding_factor == factor


def test_slopes_of_published_models() -> None:
    assert alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))
    assert alibi_slopes(6) == (2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3)
    assert mpt_slopes(4, 8) == (2**-2, 2**-4, 2**-6, 2**-8)
    assert mpt_slopes(3, 8) == (2**-4, 2**-8, 2**-2)
