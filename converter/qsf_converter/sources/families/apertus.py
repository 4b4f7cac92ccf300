"""Apertus: a plain FFN with xIELU, whose numbers are tensors of each layer."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from dataclasses import replace

from qsf.errors import shown
from qsf.file.kinds import Ffn, QkNorm
from qsf.file.layout import Activation
from qsf_converter.sources.families.family import Draft, Family, usual
from qsf_converter.sources.families.gguf import Gguf
from qsf_converter.sources.families.llama import (
    AT,
    ATTENTION,
    DEFAULTS,
    ENDS,
    LLAMA3_OF_CWM,
    MLP,
    qk_norms,
)
from qsf_converter.sources.families.rules import T, linear, norm


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _apertus(draft: Draft) -> None:
    """The numbers of xIELU are stored as what softplus makes them of."""
    config, n_layers = draft.config, draft.header.n_layers
    if config.get("hidden_act") != "xielu":
        raise config.error("hidden_act", f"= {shown(config['hidden_act'])} is not xielu")
    numbers: list[list[float]] = []
    for name in _XIELU:
        values = config.get(f"xielu_{name}")
        if (
            not isinstance(values, list)
            or len(values) != n_layers
            or not all(isinstance(n, (int, float)) and abs(n) < 1e6 for n in values)
        ):
            raise config.error(
                f"xielu_{name}", f"= {shown(values)} is not a number of each of {n_layers} layers"
            )
        numbers.append(values)
    square, exp, line = numbers
    draft.layers = [
        replace(
            kind,
            activation=Activation.XIELU,
            xielu_square=_softplus(square[i]),
            xielu_exp=line[i] + _softplus(exp[i]),
            xielu_line=line[i],
        )
        for i, kind in enumerate(draft.layers)
    ]


_XIELU = ("alpha_p", "alpha_n", "beta")

_KEYS = {f"xielu_{name}": f"xielu.{name}" for name in _XIELU}


FAMILIES = (
    Family(
        name="ApertusForCausalLM",
        title="Apertus (8B, 70B)",
        model_type="apertus",
        gguf={
            "apertus": Gguf(
                may=tuple(_KEYS), keys=_KEYS, lists=tuple(_KEYS.values()), reads=("xielu.eps",)
            )
        },
        ffn=Ffn.PLAIN,
        activation=Activation.SILU,  # KIND has xIELU
        rules=(
            *norm(T.ATTN_NORM, f"{AT}attention_layernorm"),
            *norm(T.FFN_NORM, f"{AT}feedforward_layernorm"),
            *ATTENTION,
            *qk_norms(),
            *linear(T.FFN_UP, None, f"{MLP}up_proj", "ffn", "hidden"),
            *linear(T.FFN_DOWN, None, f"{MLP}down_proj", "hidden", "ffn"),
            *ENDS,
        ),
        ignored_suffixes=(
            "rotary_emb.inv_freq",
            *(f"act_fn.{name}" for name in _XIELU),
            "act_fn.eps",
        ),
        scalars={f"xielu_{name}": f"{MLP}act_fn.{name}" for name in _XIELU},
        defaults=usual(
            DEFAULTS,
            context=65536,
            epsilon=1e-5,
            hidden_act="xielu",
            rope_parameters={**LLAMA3_OF_CWM, "rope_theta": 12000000.0, "factor": 8.0},
        ),
        flags={"attention_bias": False},
        kind={"qk_norm": QkNorm.PER_HEAD},
        neutral={"qk_norm": (True,), "post_norm": (None, False), "mlp_bias": (None, False)},
        adjust=_apertus,
    ),
)
