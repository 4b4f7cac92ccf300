"""Inkling 2: attention with learned biases of distance, between convolutions, in residual blocks.

Of Inkling 2 Mini (the loop) some layers run several times. Checkpoints have vectors of all layers
together, taps and distances in ascending order, and vocabularies with rows that no token has; what
is made of them here has the form of docs/format.md.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from qsf.errors import QsfConversionError, shown
from qsf.file import kinds
from qsf.file.kinds import ROPE_NONE, ExpertScore, ExpertWeights, Mixer
from qsf.file.layout import MAX_PASSES, Activation, Positions
from qsf_converter.sources.checkpoint import Checkpoint, Matrix, RawArray, to_float32
from qsf_converter.sources.families import config as limits
from qsf_converter.sources.families import rules as r
from qsf_converter.sources.families.config import Config
from qsf_converter.sources.families.experts import route
from qsf_converter.sources.families.family import (
    FULL,
    SLIDING,
    Draft,
    Facts,
    Family,
)
from qsf_converter.sources.families.rules import AT, MLP, Place, T, TensorRule, Where

_ATTN: Final = f"{AT}attn."
_PREFIX: Final = "model.llm."
_QUERIES: Final = ("middle_cycle_cross_pass_queries", "middle_cycle_cross_pass_kv_queries")
_GATES: Final = {
    "attn": (T.Q_GATE_DOWN, T.Q_FORGET, T.Q_GAIN),
    "k": (T.K_GATE_DOWN, T.K_FORGET, T.K_GAIN),
    "v": (T.V_GATE_DOWN, T.V_FORGET, T.V_GAIN),
    "mlp": (T.FFN_GATE_DOWN, T.FFN_FORGET, T.FFN_GAIN),
}


def _conv(target: T, name: str, dim: str, **options: Any) -> TensorRule:
    return r.layer(target, f"{name}.weight", "taps", dim, is_flat=True, transposed=True, **options)


def _attention(of: str, where: Where) -> r.Rules:
    """The tensors whose sizes differ between layers with a window (``of`` is "window ") and without
    one.
    """

    def rule(target: T, name: str, *shape: str, **options: Any) -> TensorRule:
        return r.layer(target, f"{_ATTN}{name}", *shape, where=where, **options)

    heads, q, kv = f"{of}heads", f"{of}q", f"{of}kv"
    return (
        rule(T.Q_SCALE, "q_l2_clip.scale", heads, f"{of}head", is_flat=True),
        rule(T.RELATIVE_SCALE, "rel_l2_clip.scale", heads, "relative", is_flat=True),
        rule(T.PROFILES, "rel_logits_proj.proj", "relative", f"{of}extent", is_flat=True),
        rule(T.Q, "wq_du.weight", q, "hidden"),
        rule(T.K, "wk_dv.weight", kv, "hidden"),
        rule(T.V, "wv_dv.weight", kv, "hidden"),
        rule(T.MIX_GATE, "gate_attn.weight", q, "hidden"),
        rule(T.RELATIVE, "wr_du.weight", f"{of}relatives", "hidden"),
        rule(T.TOKEN_SINKS, "attn_sink_proj.weight", heads, "hidden"),
        rule(T.ATTN_OUT, "wo_ud.weight", "hidden", q),
    )


_OF_WINDOWS: Final = (
    *_attention("window ", Where.WINDOWED),
    r.layer(T.BLOCK_QUERIES, "attn_res.attn_queries.{before}", "hidden", where=Where.WINDOWED),
    *r.norm(T.ATTN_NORM, f"{AT}attn_norm", where=Where.WINDOWED),
    _conv(T.K_CONV, f"{_ATTN}k_sconv", "window kv", where=Where.WINDOWED),
    _conv(T.V_CONV, f"{_ATTN}v_sconv", "window kv", where=Where.WINDOWED),
)
_OF_OTHERS: Final = (
    *_attention("", Where.UNLIMITED),
    r.layer(T.BLOCK_QUERIES, "attn_res.attn_queries.{before}", "inputs", "hidden", is_flat=True,
            where=Where.UNLIMITED),
    *r.norm(T.ATTN_NORM, f"{AT}q_input_norm", where=Where.UNLIMITED),
    *r.norm(T.K_INPUT_NORM, f"{AT}k_input_norm", where=Where.UNLIMITED),
    *r.norm(T.V_INPUT_NORM, f"{AT}v_input_norm", where=Where.UNLIMITED),
    *(r.layer(conv, f"{_ATTN}{part}_sconv.static_w", "taps", "kv", is_flat=True,
              where=Where.UNLIMITED) for part, conv in (("k", T.K_CONV), ("v", T.V_CONV))),
    *(r.layer(taps, f"{_ATTN}{part}_sconv.weight_proj", "taps of heads", "hidden",
              where=Where.UNLIMITED) for part, taps in (("k", T.K_TAPS), ("v", T.V_TAPS))),
)  # fmt: skip
_OF_LOOPS: Final = (
    r.layer(T.MESSAGE_QUERIES, f"{AT}message_queries", "messages", "hidden", is_flat=True,
            where=Where.LOOPED),
    *(
        r.layer(target, f"{AT}controllers.{part}.{name}_weight", *shape, where=Where.LOOPED)
        for part, targets in _GATES.items()
        for target, (name, *shape) in zip(
            targets,
            (("down", "message rank", "joined"), ("forget", "hidden", "message rank"),
             ("gain", "hidden", "message rank")),
            strict=True,
        )
    ),
)  # fmt: skip
_EXPERTS: Final[dict[str, Any]] = {
    "slices": "experts", "parts": r.GATE_AND_UP, "groups": "expert",
}  # fmt: skip
_RULES: Final = (
    r.layer(T.INPUT_NORM, "embed_norm.weight", "hidden"),
    *_OF_WINDOWS,
    *_OF_OTHERS,
    _conv(T.MIX_CONV, f"{AT}attn_sconv", "hidden"),
    r.layer(T.FFN_QUERY, "attn_res.mlp_queries.{layer}", "hidden"),
    *r.norm(T.FFN_NORM, f"{AT}mlp_norm"),
    r.router(f"{MLP}gate.weight"),
    r.selection_bias(f"{MLP}gate.bias"),
    r.expert(T.FFN_GATE, f"{MLP}experts.w13_weight", "expert", "hidden", part=0, **_EXPERTS),
    r.expert(T.FFN_UP, f"{MLP}experts.w13_weight", "expert", "hidden", part=1, **_EXPERTS),
    r.expert(T.FFN_DOWN, f"{MLP}experts.w2_weight", "hidden", "expert", slices="experts"),
    _conv(T.FFN_CONV, f"{AT}mlp_sconv", "hidden"),
    TensorRule(Place.FINAL, T.FINAL_QUERY, "attn_res.output_query", ("hidden",)),
    *r.ends("embed", "norm", head="unembed"),
)


def _windows(config: Config, n_layers: int) -> tuple[int, list[str]]:
    usual_types = ["hybrid" if (i + 1) % 6 == 0 else "hybrid_sliding" for i in range(n_layers)]
    types = config.of_layers("layer_types", n_layers, ("hybrid", "hybrid_sliding")) or usual_types
    window = config.count("sliding_window", limits.MAX_TOKENS)
    return window, [FULL if type_ == "hybrid" else SLIDING for type_ in types]


def _adjust(draft: Draft) -> None:
    config, header = draft.config, draft.header
    n_taps = config.count("conv_kernel_size", kinds.MAX_TAPS, least=2)
    d_rel = config.count("d_rel", limits.MAX_HEAD_DIM)
    block_layers = config.count("n_layers_per_attn_res_block", limits.MAX_LAYERS)
    sizes = {
        FULL: (header.n_heads, header.n_kv_heads, header.head_dim,
               config.count("rel_extent", limits.MAX_TOKENS)),
        SLIDING: (config.count("swa_num_attention_heads", limits.MAX_HEADS),
                  config.count("swa_num_key_value_heads", limits.MAX_HEADS),
                  config.count("swa_head_dim", limits.MAX_HEAD_DIM),
                  config.count("sliding_window", limits.MAX_TOKENS)),
    }  # fmt: skip
    used = [sizes[type_] for type_ in sizes if type_ in draft.layer_types]
    most = [max(of) for of in zip(*used, strict=True)]
    draft.header = replace(
        header, n_heads=most[0], n_kv_heads=most[1], head_dim=most[2], activation=Activation.SILU
    )
    draft.arch = replace(
        draft.arch, block_layers=block_layers, logit_cap=config.positive("final_logit_softcapping")
    )
    draft.set_all(
        mixer=Mixer.RELATIVE,
        n_taps=n_taps,
        rope_set=ROPE_NONE,
        relative_dim=d_rel,
        length_limit=config.positive("qk_l2_clip_threshold"),
        relative_limit=config.positive("rel_l2_clip_threshold"),
        output_gate=1,
        value_norm=1,
        activation=Activation.SILU_CAPPED,
        gate_cap=config.positive("mlp_gate_softcap"),
        up_cap=config.positive("mlp_up_softcap"),
    )
    for type_, of, more in (
        (FULL, "", {"has_own_inputs": 1,
                    "temperature_beta": config.positive("log_scaling_alpha"),
                    "temperature_step": config.count("log_scaling_n_floor", limits.MAX_TOKENS)}),
        (SLIDING, "window ", {}),
    ):  # fmt: skip
        heads, kv_heads, head, extent = sizes[type_]
        draft.set_type(type_, n_heads=heads, n_kv_heads=kv_heads, head_dim=head,
                       relative_extent=extent, **more)  # fmt: skip
        own = {"heads": heads, "head": head, "q": heads * head, "kv": kv_heads * head,
               "extent": extent, "relatives": heads * d_rel}  # fmt: skip
        draft.dims |= {f"{of}{name}": size for name, size in own.items()}
    draft.dims |= {
        "taps": n_taps, "taps of heads": sizes[FULL][1] * n_taps, "relative": d_rel, "inputs": 3,
        "messages": 4, "joined": 2 * header.dim, "expert": draft.dims["ffn"],
    }  # fmt: skip
    route(
        draft,
        range(header.n_layers),
        expert_score=ExpertScore.SIGMOID,
        expert_weights=ExpertWeights.BY_SUM,
        weights_epsilon=1e-20,
        weights_factor=config.positive("route_scale"),
    )


def _loop(draft: Draft) -> None:
    _adjust(draft)
    config, n_layers = draft.config, draft.header.n_layers
    stated = config.get("loop_config") or {}
    if not isinstance(stated, dict):
        raise config.error("loop_config", f"= {shown(stated)} is not an object")
    own = Config(
        {
            "loop_layer_index_start": stated.get("core_start", config["loop_layer_index_start"]),
            "loop_layer_index_end": stated.get("core_end", config["loop_layer_index_end"]),
            "loop_num_passes": stated.get("num_passes", config["loop_num_passes"]),
            "loop_gate_rank": stated.get("gate_rank", config["loop_gate_rank"]),
        }
    )
    begin = own.count("loop_layer_index_start", n_layers)
    end = own.count("loop_layer_index_end", n_layers)
    rank = own.count("loop_gate_rank", limits.MAX_DIM)
    n_passes = own.count("loop_num_passes", MAX_PASSES, least=2)
    draft.arch = replace(draft.arch, loop_begin=begin, loop_end=end, loop_passes=n_passes)
    draft.dims["message rank"] = rank
    for i in range(begin, end):
        draft.layers[i] = replace(draft.layers[i], message_rank=rank)


def _derived(stored: Checkpoint, facts: Facts) -> Iterator[Matrix]:
    """Yield the tensors that a file has in another form."""

    def made(
        name: str, shape: tuple[int, ...], parts: list[str], change: Callable[..., RawArray]
    ) -> Matrix:
        def read(start: int, stop: int) -> RawArray:
            values = (
                to_float32(stored.read_rows(part, 0, stored.tensors[part].n_rows)) for part in parts
            )
            return np.ascontiguousarray(change(*values))[start:stop]

        return Matrix(name, shape, "F32", parts, read)

    n_vocab = facts.header.n_vocab
    for tensor in stored.tensors.values():
        name, shape = tensor.name, tensor.shape
        if name in (f"{_PREFIX}embed.weight", f"{_PREFIX}unembed.weight"):
            if len(shape) == 2 and shape[0] > n_vocab:
                rows = partial(stored.read_rows, name)
                yield Matrix(name, (n_vocab, shape[1]), tensor.dtype, [name], rows)
        elif name.endswith("_sconv.static_w"):
            yield made(name, shape, [name], lambda taps: taps[::-1])
        elif name.endswith(".rel_logits_proj.proj"):
            yield made(name, shape, [name], lambda profiles: profiles[:, ::-1])
    queries = [f"{_PREFIX}{name}" for name in _QUERIES]
    begin, end = facts.arch.loop_begin, facts.arch.loop_end
    if not end:
        return
    wanted = (2 * (end - begin), facts.header.dim)
    for name in queries:
        if name not in stored.tensors or stored.tensors[name].shape != wanted:
            raise QsfConversionError(f"the checkpoint has no tensor {name} of shape {[*wanted]}")
    for i in range(end - begin):
        of_layer = slice(2 * i, 2 * i + 2)
        yield made(
            f"{_PREFIX}layers.{begin + i}.message_queries",
            (4, facts.header.dim),
            queries,
            # of queries and FFN, then of keys and values
            lambda q, kv, at=of_layer: np.concatenate([q[at][:1], kv[at], q[at][1:]]),
        )


_COMMON: Final[dict[str, Any]] = {
    "prefixes": (_PREFIX,),
    "positions": Positions.ALIBI,
    "windows": _windows,
    "derive": _derived,
    "renames": {
        "norm_epsilon": "rms_norm_eps",
        "num_experts": "n_routed_experts",
        "intermediate_size": "moe_intermediate_size",
        "sliding_window": "sliding_window_size",
        "vocab_size": "unpadded_vocab_size",
    },
    "neutral": {"scoring_func": "sigmoid", "number_of_conv_states": 4},
    "ignored_keys": "vocab_size|pad_token_id",
}

_TOKENS: Final = {"vocab_size": 200058, "eos_token_id": 200006}
FAMILIES = (
    Family(
        name="Inkling2LoopForCausalLM",
        title="Inkling 2 Mini (26B-A3B), text",
        model_type="inkling2_loop_text",
        nested=("Inkling2LoopForConditionalGeneration",),
        rules=(*_RULES, *_OF_LOOPS),
        defaults={
            **_TOKENS,
            "num_attention_heads": 24,
            "hidden_size": 2304,
            "num_hidden_layers": 24,
            "intermediate_size": 1152,
        },
        adjust=_loop,
        **_COMMON,
    ),
    Family(
        name="Inkling2ForCausalLM",
        title="Inkling 2 (Small), text",
        model_type="inkling2_text",
        nested=("Inkling2ForConditionalGeneration",),
        rules=_RULES,
        defaults={
            **_TOKENS,
            "num_attention_heads": 48,
            "hidden_size": 4608,
            "num_hidden_layers": 48,
            "intermediate_size": 2304,
        },
        adjust=_adjust,
        **_COMMON,
    ),
)
