"""The architectures that can be converted, and the facts of a config.json.

`sources/families` has their tables. A field that requires a computation that the engine lacks, or
that no table knows, is refused before any weight is read.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Final

from qsf.errors import QsfConversionError, shown
from qsf_converter.sources.families import (
    delta,
    encoders,
    experts,
    gemma,
    gpt,
    hybrids,
    inkling,
    latent,
    llama,
)
from qsf_converter.sources.families.config import Config
from qsf_converter.sources.families.family import Facts, Family, read_family

FAMILIES: Final[Mapping[str, Family]] = {
    family.name: family
    for module in (llama, gemma, gpt, experts, latent, delta, hybrids, inkling, encoders)
    for family in module.FAMILIES
}
_NESTED: Final = {name: family for family in FAMILIES.values() for name in family.nested}
# Published files have MPTForCausalLM and LLaMAForCausalLM, too; Ling 3's the name of its own code.
_ANY_CASE: Final = {
    **{name.lower(): name for name in (*FAMILIES, *_NESTED)},
    "bailingmoev3forcausallm": "BailingHybridForCausalLM",
}

# A part of an architecture's name -> the computation that the engine lacks, and a related
# architecture that runs.
_MISSING: Final = (
    (r"Inkling", "convolutions around dense layers, shared experts weighed with the others",
     "Inkling 2"),
    (r"Qwen4Exp", "hyper-connections, attention to chosen blocks, rows for n-grams",
     "Qwen 3.5, 3.6 MoE"),
    (r"Bailing.*Linear|BailingMoeV2_5|Glm5", "a gated delta rule of another form", "Kimi Linear"),
    (r"Mamba|Jamba|FalconH1|NemotronH|Bamba|Zamba|Hybrid", "layers with recurrent states",
     "Granite 4 H"),
    (r"Rwkv|RecurrentGemma|xLSTM", "recurrent layers", "Qwen 3"),
    (r"DeepseekV(32|4)|GlmMoeDsa", "attention with an indexer", "DeepSeek V3"),
    (r"Moe|MoE|Dbrx|Llama4|Jetmoe|Arctic", "a mixture of experts of another form", "Qwen 3 MoE"),
    (r"Gemma3n", "embeddings of each layer and several residual streams", "Gemma 3"),
    (r"T5|Bart|Whisper|Marian|Pegasus", "an encoder with a decoder", "Qwen 3"),
    (r"Bert|Roberta|Electra|Deberta", "an encoder of another form", "BERT"),
    (r"VL|Vision|Llava|Idefics|Omni|Audio|ForConditionalGeneration", "more than text",
     "Qwen 3 VL, whose text part runs"),
)  # fmt: skip
# Another model_type of a text part -> that of its family.
_OTHER_TYPES: Final[Mapping[Any, str]] = {
    "kimi_k2": "deepseek_v3",
    "exaone4_5_text": "exaone4",
    "qwen2_vl_text": "qwen2_5_vl_text",
}
_LIST: Final = "`qsf convert --families` lists what is"


def family_of(config: Mapping[str, Any]) -> Family:
    names = config.get("architectures")
    if names and not (isinstance(names, list) and isinstance(names[0], str)):
        raise QsfConversionError(
            f"config.json: architectures = {shown(names)} is not a list of names"
        )
    if names:
        name = _ANY_CASE.get(names[0].lower(), names[0])
        if name in FAMILIES:
            return FAMILIES[name]
        if name in _NESTED:
            return _of_text(_NESTED[name], config)
        whole = with_head(name)
        if whole is not None:
            return FAMILIES[whole]
        raise QsfConversionError(
            f"architecture {name[:60]} is not supported{what_it_lacks(name)}; {_LIST}"
        )
    for family in FAMILIES.values():
        if family.model_type == config.get("model_type"):
            return family
    raise QsfConversionError(
        f"config.json names no architecture (model_type {shown(config.get('model_type'))}); {_LIST}"
    )


def with_head(name: str) -> str | None:
    """Return the architecture that is this one with a head: models for vectors are published
    as MistralModel or Qwen2Model.
    """
    return _ANY_CASE.get(f"{name.removesuffix('Model')}ForCausalLM".lower())


def what_it_lacks(name: str, flags: int = 0) -> str:
    """Return what the engine lacks for that architecture, and a related one; "" if unknown."""
    for part, feature, nearest in _MISSING:
        if re.search(part, name, flags):
            return f": {feature}; the nearest family that runs is {nearest}"
    return ""


def _of_text(usual: Family, config: Mapping[str, Any]) -> Family:
    """The family of the text part, which may be one of several that the class can contain."""
    text = config.get("text_config", {})  # older files have its keys outside
    if not isinstance(text, dict):
        raise QsfConversionError(f"config.json: text_config = {shown(text)} is not an object")
    name = config["architectures"][0]
    type_ = text.get("model_type", usual.model_type)
    for family in FAMILIES.values():
        if family.model_type == _OTHER_TYPES.get(type_, type_):
            if name in family.nested:
                return family
            break
    raise QsfConversionError(
        f"config.json: text_config.model_type = {shown(text.get('model_type'))} "
        f"is not supported within {name}"
    )


def read_facts(family: Family, values: Mapping[str, Any]) -> Facts:
    """Return the contents of a config.json; raises QsfConversionError if the engine lacks some."""
    name = (values.get("architectures") or [family.name])[0]
    is_headless = name not in FAMILIES and with_head(name) is not None
    if is_headless:
        values = {**values, "tie_word_embeddings": True}
    config = family.config_of(values)
    facts = read_family(family, config)
    if is_headless:
        text = f"{name} has no head: it makes vectors of texts; its embeddings write any text"
        facts = dataclasses.replace(facts, warnings=(*facts.warnings, text))
    version = str(values.get("transformers_version") or "")
    is_known = _version_of(version) <= _CLASSES_OF
    # Files of Phi-1 have both this and the factor that it follows from.
    neutral = {"rotary_dim": facts.arch.rope_dims or facts.header.head_dim, **family.neutral}
    passed_over = _check_unread(family, config, neutral, is_known=is_known)
    if passed_over:
        said = (
            f"config.json: {', '.join(passed_over)}: transformers passes over keys that"
            f" {family.name} does not have, and so does this conversion",
        )
        facts = dataclasses.replace(facts, warnings=(*facts.warnings, *said))
    if "KIND" not in facts.tables():  # which checks the header, too
        facts = dataclasses.replace(facts, layer_kinds=())  # header and ARCH describe all layers
    return facts


# The tables read all keys that classes of this version have, but for these.
_CLASSES_OF: Final = (5, 24)
_OF_CLASSES: Final = frozenset(
    ("is_encoder_decoder", "add_cross_attention", "clip_qkv", "qk_layernorm", "moe_latent_size",
     "sliding_window", "rotary_dim", "tie_embedding", "mamba_n_groups", "mamba_d_conv",
     "mamba_expand", "quantization", "quantization_config",
     # false, or refused
     "add_classification_head", "apply_residual_connection_post_layernorm", "attention_bias",
     "attn_layer_indices", "group_limited_greedy", "mamba_proj_bias", "mlp_bias",
     "moe_normalize_expert_weights", "norm_topk_prob", "post_norm", "projectors_bias",
     "scale_attn_by_inverse_layer_idx", "use_bias", "use_bidirectional_attention", "use_cla",
     "use_mrope", "use_qk_norm", "use_sliding_window")
)  # fmt: skip
_NOT_IN_TRANSFORMERS: Final = ("InternLM3ForCausalLM",)


def _version_of(text: str) -> tuple[int, ...]:
    found = re.match(r"(\d{1,4})\.(\d{1,4})", text)
    return tuple(map(int, found.groups())) if found else (_CLASSES_OF[0] + 1,)


def _check_unread(
    family: Family, config: Config, neutral: Mapping[str, Any], *, is_known: bool
) -> list[str]:
    """Refuse keys that no table reads, unless they are empty or change no logits.

    Returns those that transformers passes over, of a file that a known version has written.
    """
    neutral = {**_NEUTRAL_VALUES, **neutral}
    strict = {*neutral, *_OF_CLASSES}
    passed_over = []
    for name, value in config.unread():
        if re.fullmatch(family.ignored_keys, name):
            continue
        allowed = neutral.get(name, ())
        allowed = allowed if isinstance(allowed, (tuple, range)) else (allowed,)
        if value is None or value in allowed:
            continue
        if name not in neutral and (not value or _HARMLESS.fullmatch(name)):
            continue
        if name in strict or not is_known or family.name in _NOT_IN_TRANSFORMERS:
            raise config.error(name, f"= {shown(value)} is not supported for {family.name}")
        passed_over.append(name)
    return passed_over


# Values of keys of some families that change nothing; other values are refused.
_NEUTRAL_VALUES: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("logit_scale", "logits_scaling", "embedding_multiplier"), 1.0),
    **dict.fromkeys(("residual_multiplier", "partial_rotary_factor"), 1.0),
    **dict.fromkeys(("num_local_experts", "num_experts"), (0, 1)),
}
# Keys for training, tools, generation or other tasks.
_HARMLESS: Final = re.compile(
    r"_.*|architectures|model_type|(torch_)?dtype|transformers(_|\.).*|auto_map|use_cache"
    r"|.*drop(out)?(_p|_prob|_rate)?|(.*_)?initializer_.*|.*_init(_.*)?|init_.*|.*label.*"
    r"|problem_type|pretraining_tp|gradient_checkpointing.*|use_flash_attn.*|attn_implementation|flash_.*"
    r"|tokenizer_class|task_specific_params|summary_.*|finetuning_task|prefix|unsloth_.*|n_ctx"
    r"|(bos|eos|pad|sep|unk|decoder_start|image|mask|cls)_token_(id|index)|.*_token_ids?|name"
    r"|(do_sample|temperature|top_[kp]|max_length|min_length|repetition_penalty|num_beams"
    r"|num_return_sequences|length_penalty|no_repeat_ngram_size|early_stopping|typical_p"
    r"|num_beam_groups|diversity_penalty|encoder_no_repeat_ngram_size|exponential_decay_.*|min_p"
    r"|(begin_)?suppress_tokens|max_new_tokens)"
    r"|output_.*|return_.*|torchscript|use_bfloat16|chunk_size_feed_forward|cross_attention.*"
    r"|is_decoder|pruned_heads|tf_legacy_loss|tie_encoder_decoder|bad_words_ids|add_bos_token"
    r"|add_eos_token|rope_theta|rotary|ep_size|router_.*|cache_implementation|license|version"
    r"|use_mtp|mtp_.*|num_mtp_.*|num_nextn_predict_layers|seq_aux|moe_(drop_tokens|random_routing_dropped_token)"
    r"|.*_use_xavier_init|attention_softmax_in_fp32|bias_dropout_fusion|masked_softmax_fusion"
    r"|skip_bias_add(_qkv)?|slow_but_exact"
    r"|sentence_transformers|sbert_.*|fused_.*|.*fused|attention_implementation|mm_.*|vision_.*|unk_token|model_max_length"
)
