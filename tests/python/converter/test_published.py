"""Published files of every family: each row of tests/data/families.json converts as it stands.

A row has what such files say beyond sizes: config.json with its quantization_config, how
tokenizer.json splits and normalises, tokenizer.ggml.pre, the texts around turns, the features of
its template ("": there is none) and where it is to be had, the type of the numbers where the
configuration does not say it, model_max_length. What transformers renders of each feature is in
tests/data/template_features.json.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import copy
import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import tokenizers

from make import gguf_files, golden_families, tiny_checkpoints
from make.refusals import refusals, table
from make.stored import Reader
from make.text_families import SETTINGS, families
from qsf.errors import QsfConversionError
from qsf.file.layout import TensorType
from qsf.text.chat import ChatTemplate
from qsf.text.parts import read_text_parts
from qsf.text.render import one_process
from qsf_converter import convert
from qsf_converter.rounding.tiles import dequantise_tiles
from qsf_converter.sources import quantised
from qsf_converter.sources.architectures import FAMILIES, family_of, read_facts
from qsf_converter.sources.checkpoint_gguf import readable_types
from qsf_converter.sources.families.family import CLASS_DEFAULTS
from qsf_converter.sources.families.positions import alibi_slopes, mpt_slopes
from qsf_converter.sources.gguf_config import FILE_TYPES

Row = dict[str, Any]
ROWS: dict[str, Row] = table("families")
FEATURES = table("template_features")
# The GGUF files that https://huggingface.co/mradermacher and /bartowski make of nearly every family
# (granite-3.0-1b-a400m-instruct-i1-GGUF, ibm-granite_granite-3.2-8b-instruct-GGUF); gpt-oss: MXFP4.
FILES = (
    "IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ2_M IQ3_XXS IQ3_XS IQ3_S IQ3_M IQ4_XS IQ4_NL Q2_K Q2_K_S"
    " Q3_K_S Q3_K_M Q3_K_L Q4_0 Q4_1 Q4_K_S Q4_K_M Q5_0 Q5_1 Q5_K_S Q5_K_M Q6_K Q8_0 F16 BF16 F32"
    " MXFP4 TQ1_0 TQ2_0"
)
# All of them are converted by `make check-slow`.
CONVERTED = [
    pytest.param(name, marks=[] if i % 12 == 0 else pytest.mark.slow) for i, name in enumerate(ROWS)
]
DOWN = "model.layers.0.mlp.down_proj.weight"
TEXTS = (
    "Hello, It's 12345 o'clock!\n\n  the  end ", "\u4f60\u597d caf\u00e9s x=f(y)\r\n\tz CamelCASE",
    "<|im_start|>user\n<|im_end|>", "   ", "",
)  # fmt: skip


def test_every_family_has_a_row() -> None:
    assert {family_of(row["config"]).name for row in ROWS.values()} == FAMILIES.keys()
    for row in ROWS.values():
        assert all(row[key].startswith("https://") for key in row if key.endswith("from"))
        assert not ("turn" in row and row.get("template") == "")


def test_every_published_kind_of_gguf_file_is_read() -> None:
    assert {*FILES.split()} == {*FILE_TYPES.values()}
    tensors = {re.sub(r"(K)_[SML]$|(IQ[23])_(?:M|XS)$", r"\1\2", name) for name in FILES.split()}
    read = readable_types()
    assert not [name for name in tensors if not any(kind.startswith(name) for kind in read)]


def test_its_template_is_rendered_as_transformers_renders_it() -> None:
    chat = FEATURES["chat"]
    with one_process():
        for features in {row["template"] for row in ROWS.values() if row.get("template")}:
            sources, texts = zip(*(FEATURES["features"][f] for f in features.split()), strict=True)
            template = ChatTemplate("".join(sources))
            assert template.render(chat["messages"], tools=chat["tools"]) == "".join(texts)


def facts_of(config: Row) -> Any:
    family = family_of(config)
    scalars = {key: [0.5] * config["num_hidden_layers"] for key in family.scalars}
    return read_facts(family, {**quantised.without_method(config), **scalars})


@pytest.mark.parametrize("name", ROWS)
def test_its_configuration_is_read(name: str, tmp_path: Path) -> None:
    config = ROWS[name]["config"]
    text = config.get("text_config", config)
    facts = facts_of(config)
    sizes = {text[key] for key in ("hidden_size", "n_embd", "d_model", "n_embed") if key in text}
    assert sizes == {facts.header.dim}
    method = quantised.method_of(config, tmp_path)
    assert (method is None) is ("quantization_config" not in config)


def test_keys_of_no_class_are_passed_over_only_where_the_class_is_known() -> None:
    config = ROWS["LlamaForCausalLM/SmolLM2"]["config"]
    assert "is_llama_config: transformers passes over" in facts_of(config).warnings[0]
    for changes in (
        {"transformers_version": "5.25.0"},
        {"transformers_version": None},
        {"clip_qkv": 8.0},
    ):
        with pytest.raises(QsfConversionError, match=r"= (True|8\.0) is not supported"):
            facts_of({**config, **changes})


def test_keys_of_published_files_that_change_nothing() -> None:
    deepseek, phi, nemotron = (
        ROWS[f"{name}ForCausalLM"]["config"] for name in ("DeepseekV3", "Phi", "NemotronH")
    )
    facts_of({**deepseek, "num_beam_groups": 1, "transformers_version": None})  # Kimi K2.5
    assert facts_of({**phi, "rotary_dim": 32}).arch.rope_dims == 32  # Phi-1
    for limits in ([0.0, 1e308], [0.0, math.inf], [0.0, {"__float__": "Infinity"}], None):
        facts_of({**nemotron, "time_step_limit": limits})  # Nemotron 3 Ultra
    with pytest.raises(QsfConversionError, match="rotary_dim = 16 is not supported"):
        facts_of({**phi, "rotary_dim": 16})
    for wrong in ([0.0, 1.0], [0.1, math.inf], 5.0, [0.0]):
        with pytest.raises(QsfConversionError, match="time_step_limit"):
            facts_of({**nemotron, "time_step_limit": wrong})


def test_files_of_ling_have_the_keys_of_their_own_code() -> None:
    saved = golden_families.cases()["bailing_hybrid"].config
    names = {
        "model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group", "num_experts_per_token": "num_experts_per_tok",
    }  # fmt: skip
    of_transformers = ("layer_types", "linear_head_dim", "linear_num_heads")
    published = {names.get(k, k): v for k, v in saved.items() if k not in of_transformers}
    published |= {"architectures": ["BailingMoeV3ForCausalLM"], "transformers_version": "4.57.1"}
    assert facts_of(published) == facts_of(saved)
    for name, value in (("expert_swiglu_limit_list", [7.0]), ("value_norm", True)):
        with pytest.raises(QsfConversionError, match=name):
            facts_of({**published, name: value})


def test_a_key_of_older_files_counts() -> None:
    config = ROWS["MiniMaxM2ForCausalLM"]["config"]
    assert facts_of(config).arch.rope_dims == config["rotary_dim"] == 64
    config = ROWS["Gemma4ForConditionalGeneration"]["config"]
    assert "05" in config["text_config"]["per_layer_config"]  # transformers pads numbers of layers
    assert [kind.head_dim for kind in facts_of(config).layer_kinds[4:6]] == [256, 512]


def storage_of(row: Row) -> Any:
    """The type of the numbers in the published safetensors files, as safetensors names it."""
    config = row["config"]
    of_text = config.get("text_config", {})
    said = (of.get(key) for of in (config, of_text) for key in ("dtype", "torch_dtype"))
    name = row.get("stored") or next(filter(None, said))
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[name]


def marks_of(row: Row) -> list[str]:
    return re.findall(r"<[^<>\s]+>|\[[^\[\]\s]+\]", "".join(row.get("turn", ())))


def tokenizer_of(row: Row) -> Row:
    """Return tokenizer.json with the row's settings and a small vocabulary."""
    settings = SETTINGS[row["split"]] if row["split"] else None
    is_bytes = "ByteLevel" in json.dumps(settings)
    kind = "gpt2" if is_bytes else "unigram always" if settings else "llama2"
    data: Row = json.loads(families(is_small=True)[kind])
    if settings:
        data |= {"pre_tokenizer": settings, "normalizer": row.get("normalizer")}
    data["post_processor"] = None
    first = len(data["model"]["vocab"])
    data["added_tokens"] = [token for token in data["added_tokens"] if token["id"] < first]
    known = {token["content"] for token in data["added_tokens"]}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    new = [mark for mark in dict.fromkeys(["<end>", *marks_of(row)]) if mark not in known]
    held = dict(data["model"]["vocab"])  # which may have a mark as a word
    behind = [mark for mark in new if mark not in held]
    held |= {mark: first + i for i, mark in enumerate(behind)}
    data["added_tokens"] += [
        {"id": held[mark], "content": mark, "special": True, **flags} for mark in new
    ]
    return data


def template_of(row: Row) -> str:
    if "turn" not in row:
        return ""
    user, behind_user, answer, behind = map(json.dumps, row["turn"])
    return (
        "{% for m in messages %}{% if m.role == 'user' %}"
        f"{{{{ {user} + m.content + {behind_user} }}}}{{% else %}}"
        f"{{{{ {answer} + m.content + {behind} }}}}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {answer} }}}}{{% endif %}}"
    )


@functools.cache
def written(folder: Path, name: str, storage: Any = "fp16") -> tuple[Path, Row]:
    """Write a checkpoint with the row's tokenizer; its eos_token is not the end of a turn."""
    row = ROWS[name]
    data = tokenizer_of(row)
    ids = {token["content"]: token["id"] for token in data["added_tokens"]}
    n_vocab = 1 + max(ids.values())
    sizes = {"dim": 32, "ffn_dim": 32, "n_layers": 1, "n_heads": 2, "head_dim": 16}
    tiny_checkpoints.make_llama(folder, n_vocab=n_vocab, storage=storage, **sizes)
    said = {"model_max_length": row.get("model_max_length"), "eos_token": "<end>"}
    said |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    said |= {"chat_template": template_of(row)} if "turn" in row else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(said), "utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(data), "utf-8")
    ends = {"bos_token_id": 0, "eos_token_id": ids["<end>"]}
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **ends}), "utf-8")
    (folder / "generation_config.json").write_text(json.dumps(ends), "utf-8")
    return folder, data


def check_file(path: Path, data: Row, row: Row) -> None:
    library = tokenizers.Tokenizer.from_str(json.dumps(data))
    tokenizer = read_text_parts(path).tokenizer
    assert tokenizer is not None
    for text in TEXTS:
        ids = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_prefix=False) == ids, text
    end = marks_of({"turn": row["turn"][3:]}) if "turn" in row else []
    with Reader(path) as reader:
        chat = json.loads(reader.read_section("CHAT"))
    if end:
        assert library.token_to_id(end[0]) in chat["generation"]["eos_token_id"]


@pytest.mark.parametrize("name", CONVERTED)
def test_a_folder_of_its_form_converts(name: str, tmp_path: Path) -> None:
    storage = storage_of(ROWS[name])
    folder, data = written(tmp_path / "m", name, storage)
    report = convert(folder, tmp_path / "m.qsf", quant_type="f32", embed_type="f32")
    assert not [line for line in report.warnings if "left out" in line]
    check_file(tmp_path / "m.qsf", data, ROWS[name])
    content = (folder / "model.safetensors").read_bytes()
    stored = dict(safetensors.deserialize(content))[DOWN]  # type: ignore[no-untyped-call]
    assert stored["dtype"] == {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}[storage]
    values = np.frombuffer(
        stored["data"], {"BF16": "<u2", "F16": "<f2"}.get(stored["dtype"], "<f4")
    )
    if stored["dtype"] == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    with Reader(tmp_path / "m.qsf") as reader:
        tensor = reader.tensor(1, TensorType.FFN_DOWN)
        assert tensor is not None
        found = dequantise_tiles(tensor.dtype, reader.read_tensor(tensor), 32, 32)
    np.testing.assert_array_equal(found.ravel(), values.astype(np.float32))


@pytest.mark.parametrize("name", CONVERTED)
def test_a_gguf_file_of_its_form_converts(name: str, tmp_path: Path) -> None:
    folder, data = written(tmp_path / "m", name)
    row = ROWS[name]
    template = {"tokenizer.chat_template": template_of(row)} if "turn" in row else {}
    for i, pre in enumerate(row["pre"] if row["split"] else ()):
        said = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False, **template}
        path = gguf_files.write(folder, tmp_path / f"{i}.gguf", tokenizer=True, changes=said)
        report = convert(path, tmp_path / f"{i}.qsf", quant_type="8bit")
        assert not [line for line in report.warnings if "left out" in line]
        check_file(tmp_path / f"{i}.qsf", data, row)


# ---- configurations: spellings, defaults, parts of larger models, refusals by name ----
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
