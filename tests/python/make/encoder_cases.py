# SPDX-License-Identifier: Apache-2.0
"""Configurations of encoders and cross-encoders, for `tools/make_golden_families.py`."""

from __future__ import annotations

from typing import Any

S, F = "sliding_attention", "full_attention"
# fmt: off
# The hidden states are kept instead of logits, so the vocabulary has their size.
ENCODER: dict[str, Any] = {
    "hidden_size": 72, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 6, "vocab_size": 72, "max_position_embeddings": 64,
}
MODERN: dict[str, Any] = {
    **ENCODER, "local_attention": 9, "global_attn_every_n_layers": 3, "pad_token_id": 4,
    "bos_token_id": 0, "eos_token_id": 1, "cls_token_id": 0, "sep_token_id": 1,
    "rope_parameters": {F: {"rope_type": "default", "rope_theta": 5000.0},
                        S: {"rope_type": "default", "rope_theta": 500.0}},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {**ENCODER, "type_vocab_size": 2}),
    "xlm-roberta": ("xlm-roberta", {**ENCODER, "max_position_embeddings": 70, "pad_token_id": 4,
                                    "type_vocab_size": 1}),
    "roberta": ("roberta", {**ENCODER, "max_position_embeddings": 70, "pad_token_id": 4}),
    "nomic_bert": ("nomic_bert", {**ENCODER, "hidden_act": "silu", "head_dim": 12}),
    "modernbert": ("modernbert", {**MODERN, "num_hidden_layers": 4}),
    "modernbert-bias": (
        "modernbert",
        {**MODERN, "num_hidden_layers": 3, "norm_bias": True, "attention_bias": True,
         "mlp_bias": True, "hidden_activation": "silu", "layer_types": [S, F, S]},
    ),
    "bert-pairs": ("bert", {**ENCODER, "type_vocab_size": 2, "num_labels": 1}),
    "xlm-roberta-pairs": (
        "xlm-roberta", {**ENCODER, "max_position_embeddings": 70, "pad_token_id": 4,
                        "type_vocab_size": 1, "num_labels": 1}),
    "modernbert-pairs": ("modernbert", {**MODERN, "classifier_pooling": "mean", "num_labels": 1}),
    "modernbert-pairs-cls": (
        "modernbert", {**MODERN, "classifier_bias": True, "norm_bias": True, "num_labels": 1}),
}
# fmt: on
