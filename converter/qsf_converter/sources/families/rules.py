"""How tensors of a checkpoint become tensors of a file, as data."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from qsf.file.kinds import Ffn, LayerKind, Mixer
from qsf.file.layout import LAYER_TENSORS, TensorType

T = TensorType

# The matrices of a layer by the input that they share, in the order of the forward pass.
INPUT_GROUPS: Final = (
    (T.Q, T.K, T.V, T.MIX_GATE, T.SSD_GATE, T.SSD_IN),
    (T.ATTN_OUT,),
    (T.SSD_OUT,),
    (T.FFN_GATE, T.FFN_UP),
    (T.FFN_DOWN,),
)


class Place(enum.Enum):
    EMBEDDING = enum.auto()
    LAYER = enum.auto()
    EXPERT = enum.auto()  # the unit of an expert of a layer
    FINAL = enum.auto()
    OWN_TABLE = enum.auto()  # the unit of embeddings that each layer has of its own
    POSITIONS = enum.auto()  # the WPOS section


class Where(enum.Enum):
    """The layers that have a tensor: by their kind."""

    EVERYWHERE = (lambda kind: True,)
    DENSE = (lambda kind: kind.n_experts == 0 and kind.ffn != Ffn.NONE,)
    ROUTED = (lambda kind: kind.n_experts != 0,)
    ATTENTION = (lambda kind: kind.has_attention,)
    SHORT_CONV = (lambda kind: kind.mixer == Mixer.SHORT_CONV,)
    DELTA = (lambda kind: kind.mixer == Mixer.DELTA,)
    SSD = (lambda kind: kind.has_ssd,)
    MIXED = (lambda kind: kind.mixer != Mixer.NONE,)
    FED = (lambda kind: kind.ffn != Ffn.NONE or kind.n_experts != 0,)
    WINDOWED = (lambda kind: kind.window_tokens != 0,)
    UNLIMITED = (lambda kind: _is_unlimited(kind),)
    KEYS = (lambda kind: not kind.kv_source,)  # those with keys and values of their own
    SHARED_KEYS = (lambda kind: kind.kv_source,)  # those that read the keys of another layer
    WINDOWED_KEYS = (lambda kind: kind.window_tokens != 0 and not kind.kv_source,)
    UNLIMITED_KEYS = (lambda kind: _is_unlimited(kind) and not kind.kv_source,)
    MTP = (lambda kind: kind.is_mtp != 0,)  # the MTP head
    LOOPED = (lambda kind: kind.message_rank != 0,)  # those that run several times
    OWN_VALUES = (  # UNLIMITED_KEYS, with values that are not the keys
        lambda kind: _is_unlimited(kind) and not kind.kv_source and not kind.values_are_keys,
    )

    def holds(self, kind: LayerKind) -> bool:
        return bool(self.value[0](kind))


def _is_unlimited(kind: LayerKind) -> bool:
    """Attention without a window."""
    return kind.has_attention and not kind.window_tokens


@dataclass(frozen=True, slots=True)
class TensorRule:
    """How one kind of source tensor becomes one QSF tensor.

    ``source`` is the name without the family's prefix; {layer} in it is the layer's number,
    {before} that of the layer before it, {later} its own where the first layer has no such tensor,
    {last} the last one's; a tensor of a layer without a number belongs to the first one. ``shape``
    names the dimensions of the tensor that is made of it. A matrix is ``transposed`` if the source
    stores [in, out] (GPT-2's Conv1D). A fused source holds ``parts``, named by the dimensions of
    their outputs, one after another along its output axis; ``part`` says which. With ``groups``, a
    dimension too, they take turns: each of so many groups holds its share of every part (Q, K and V
    of one head, then those of the next); ``is_turned`` ones are transposed, each group by itself. A
    source that ``is_stacked`` has the groups along an axis of its own. With {head} in ``source``
    each of the groups is a vector of its own; with {part} q, k and v are sources, one after
    another. ``flag``, if given, is a fact of the configuration without which the tensor does not
    exist. The values are ``add`` plus what is
    stored, times the factor of the configuration that ``scale`` names, or each row times its own;
    of a logarithm (``is_log``) they are e to its power. A matrix that ``is_flat`` becomes a vector,
    one row after the other; one that ``is_repeated`` is a column for all its columns. What is
    ``of_all`` layers is a vector that all have, or a matrix with the outputs of one layer after
    another.
    """

    place: Place
    target: TensorType | None
    source: str
    shape: tuple[str, ...]
    transposed: bool = False
    parts: tuple[str, ...] = ()
    part: int = 0
    groups: str | None = None
    slices: str | None = None
    first_slice: int = 0  # of a layer, or of its first expert
    is_joined: bool = False  # the slices are rows of one matrix, one slice after another
    flag: str | None = None
    where: Where = Where.EVERYWHERE
    add: float = 0.0
    scale: str | None = None
    is_flat: bool = False
    is_repeated: bool = False
    is_log: bool = False
    is_turned: bool = False
    is_stacked: bool = False
    of_all: bool = False

    @property
    def is_of_later(self) -> bool:
        """True if the first layer lacks it."""
        return "{before}" in self.source or "{later}" in self.source

    @property
    def is_vector(self) -> bool:
        return len(self.shape) == 1 or self.is_flat

    def names(self, layer_idx: int, dims: Mapping[str, int], expert: int = 0) -> list[str]:
        """The names of the source tensors: one, or one for each head."""
        if "{part}" in self.source:
            return [self.source.format(layer=layer_idx, part=part) for part in "qkv"]
        n = 1 if "{head}" not in self.source or self.groups is None else dims[self.groups]
        numbers = {"layer": layer_idx, "later": layer_idx, "before": layer_idx - 1}
        numbers["last"] = dims["layers"] - 1
        return [self.source.format(head=i, expert=expert, **numbers) for i in range(n)]

    def source_shape(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        """The shape that each source tensor must have; those of {part} have it together."""
        n_outputs = sum(dims[part] for part in self.parts or self.shape[:1])
        n_outputs //= 1 if self.is_flat else len(self.names(0, dims))
        n_outputs *= dims["layers"] if self.of_all and not self.is_vector else 1
        shape = (n_outputs, *(1 if self.is_repeated else dims[dim] for dim in self.shape[1:]))
        if self.groups is not None and self.is_turned:
            shape = (n_outputs, dims[self.shape[0]] // dims[self.groups])
        if self.groups is not None and self.is_stacked:
            shape = (dims[self.groups], n_outputs // dims[self.groups], *shape[1:])
        shape = shape[::-1] if self.transposed else shape
        if self.is_joined and self.slices is not None:
            return dims[self.slices] * shape[0], *shape[1:]
        return shape if self.slices is None else (dims[self.slices], *shape)


def layer(target: TensorType, source: str, *shape: str, **options: Any) -> TensorRule:
    """A tensor of each layer; ``source`` is its name after the layer's."""
    return TensorRule(Place.LAYER, target, source, shape, **options)


def linear(
    target: TensorType, bias: TensorType | None, source: str, out: str, of: str, **options: Any
) -> tuple[TensorRule, ...]:
    """The rules of a matrix [out, of] and of its bias, which needs the flag ``bias_flag``."""
    bias_flag = options.pop("bias_flag", "")
    matrix = layer(target, f"{source}.weight", out, of, **options)
    if bias is None or bias_flag == "":
        return (matrix,)
    options.pop("transposed", None)
    return layer(bias, f"{source}.bias", out, flag=bias_flag, **options), matrix


def norm(
    target: TensorType,
    source: str,
    dim: str = "hidden",
    bias: TensorType | None = None,
    **more: Any,
) -> tuple[TensorRule, ...]:
    """The rules of a norm and, if ``bias`` is given, of its bias."""
    rules = (layer(target, f"{source}.weight", dim, **more),)
    return rules if bias is None else (*rules, layer(bias, f"{source}.bias", dim, **more))


def ends(
    embedding: str,
    final_norm: str,
    *,
    bias: bool = False,
    head: str = "lm_head",
    head_bias: str | None = None,
    **norm_options: Any,
) -> tuple[TensorRule, ...]:
    rules = [
        TensorRule(Place.EMBEDDING, T.EMBEDDING, f"{embedding}.weight", ("vocab", "hidden")),
        TensorRule(Place.FINAL, T.FINAL_NORM, f"{final_norm}.weight", ("hidden",), **norm_options),
    ]
    if bias:
        rules.append(
            TensorRule(
                Place.FINAL, T.FINAL_NORM_BIAS, f"{final_norm}.bias", ("hidden",), **norm_options
            )
        )
    if head_bias is not None:
        rules.append(
            TensorRule(Place.FINAL, T.HEAD_BIAS, f"{head}.bias", ("vocab",), flag=head_bias)
        )
    head_shape = ("vocab", "hidden")
    rules.append(
        TensorRule(Place.FINAL, T.HEAD, f"{head}.weight", head_shape, flag="separate_head")
    )
    return tuple(rules)


# ---- of the blocks that several families have ----

Rules = tuple[TensorRule, ...]

AT: Final = "layers.{layer}."
ATTN: Final = f"{AT}self_attn."
MLP: Final = f"{AT}mlp."
SPARSE: Final = f"{AT}block_sparse_moe."


def qkv(at: str = ATTN, *, bias: str = "", **options: Any) -> Rules:
    """Q, K and V as separate matrices, with biases if the flag ``bias`` holds."""
    options["bias_flag"] = bias
    return (
        *linear(T.Q, T.Q_BIAS, f"{at}q_proj", "q", "hidden", **options),
        *linear(T.K, T.K_BIAS, f"{at}k_proj", "kv", "hidden", **options),
        *linear(T.V, T.V_BIAS, f"{at}v_proj", "kv", "hidden", **options),
    )


def fused(names: Mapping[Any, Any], source: str, outs: tuple[str, ...], **options: Any) -> Rules:
    """Consecutive parts of one matrix: matrix -> its bias, or None."""
    return tuple(
        rule
        for part, (matrix, bias) in enumerate(names.items())
        for rule in linear(
            matrix, bias, source, outs[part], "hidden", parts=outs, part=part, **options
        )
    )


def out(at: str = ATTN, *, bias: str = "", **options: Any) -> Rules:
    options["bias_flag"] = bias
    return linear(T.ATTN_OUT, T.ATTN_OUT_BIAS, f"{at}o_proj", "hidden", "q", **options)


def attention(at: str = ATTN, **options: Any) -> Rules:
    return (*qkv(at, **options), *out(at, **options))


def gated(at: str = MLP, dim: str = "ffn", *, bias: str = "", **options: Any) -> Rules:
    options["bias_flag"] = bias
    return (
        *linear(T.FFN_GATE, T.FFN_GATE_BIAS, f"{at}gate_proj", dim, "hidden", **options),
        *linear(T.FFN_UP, T.FFN_UP_BIAS, f"{at}up_proj", dim, "hidden", **options),
        *linear(T.FFN_DOWN, T.FFN_DOWN_BIAS, f"{at}down_proj", "hidden", dim, **options),
    )


def gated_fused() -> Rules:
    names = {T.FFN_GATE: None, T.FFN_UP: None}
    return (
        *fused(names, f"{MLP}gate_up_proj", ("ffn", "ffn")),
        *linear(T.FFN_DOWN, None, f"{MLP}down_proj", "hidden", "ffn"),
    )


def pre_norms(**options: Any) -> Rules:
    return (
        *norm(T.ATTN_NORM, f"{AT}input_layernorm", **options),
        *norm(T.FFN_NORM, f"{AT}post_attention_layernorm", **options),
    )


def qk_norms(q: str = "head", k: str = "head", **options: Any) -> Rules:
    return (
        *norm(T.Q_NORM, f"{ATTN}q_norm", q, **options),
        *norm(T.K_NORM, f"{ATTN}k_norm", k, **options),
    )


ENDS = ends("embed_tokens", "norm")
ATTENTION = attention(bias="attention_bias")
LLAMA_RULES = (*pre_norms(), *ATTENTION, *gated(bias="mlp_bias"), *ENDS)


def mtp_rules(add: float = 0.0) -> tuple[TensorRule, ...]:
    """The rules of what the head has beside a layer; ``add``: of the model's norms."""
    norms = {
        T.MTP_TOKEN_NORM: f"{AT}enorm",
        T.MTP_HIDDEN_NORM: f"{AT}hnorm",
        T.MTP_END_NORM: f"{AT}shared_head.norm",
    }
    return (
        layer(T.MTP_TRUNK_NORM, "norm.weight", "hidden", of_all=True, add=add, where=Where.MTP),
        *(
            layer(t, f"{name}.weight", "hidden", add=add, where=Where.MTP)
            for t, name in norms.items()
        ),
        layer(T.MTP_JOIN, f"{AT}eh_proj.weight", "hidden", "joined", where=Where.MTP),
    )


# ---- of experts ----

GATE_AND_UP = ("expert", "expert")


def expert(target: T, source: str, *shape: str, **options: Any) -> TensorRule:
    return TensorRule(Place.EXPERT, target, source, shape, **options)


def _three(gate: str, up: str, down: str, **options: Any) -> Rules:
    return (
        expert(T.FFN_GATE, gate, "expert", "hidden", **options),
        expert(T.FFN_UP, up, "expert", "hidden", **options),
        expert(T.FFN_DOWN, down, "hidden", "expert", **options),
    )


def one_each(
    at: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> Rules:
    """One tensor for each matrix of each expert."""
    at = f"{at}experts.{{expert}}."
    return _three(f"{at}{gate}.weight", f"{at}{up}.weight", f"{at}{down}.weight")


def in_one(gate_up: str, down: str) -> Rules:
    """Gate, then up, of all experts in one tensor; down in another."""
    options: dict[str, Any] = {"slices": "experts", "parts": GATE_AND_UP}
    return (
        expert(T.FFN_GATE, gate_up, "expert", "hidden", part=0, **options),
        expert(T.FFN_UP, gate_up, "expert", "hidden", part=1, **options),
        expert(T.FFN_DOWN, down, "hidden", "expert", slices="experts"),
    )


def of_gguf(at: str = MLP) -> Rules:
    """Each matrix of all experts in one tensor, as in GGUF files."""
    at = f"{at}experts."
    names = (f"{at}{name}.weight" for name in ("gate_proj", "up_proj", "down_proj"))
    return _three(*names, slices="experts")


def plain_experts(at: str) -> tuple[Rules, Rules, Rules]:
    """The layouts of experts without gates: one each, all in one, and GGUF's."""
    at = f"{at}experts."

    def both(middle: str, ending: str, **options: Any) -> Rules:
        return (
            expert(T.FFN_UP, f"{at}{middle}up_proj{ending}", "expert", "hidden", **options),
            expert(T.FFN_DOWN, f"{at}{middle}down_proj{ending}", "hidden", "expert", **options),
        )

    return (
        both("{expert}.", ".weight"),
        both("", "", slices="experts"),
        both("", ".weight", slices="experts"),
    )


def router(name: str) -> TensorRule:
    return layer(T.EXPERT_ROUTER, name, "experts", "hidden", where=Where.ROUTED)


def selection_bias(name: str, **options: Any) -> TensorRule:
    """The bias added to scores for the choice of experts, but not to their weights."""
    return layer(T.SELECTION_BIAS, name, "experts", where=Where.ROUTED, **options)


def _shared_gate(**options: Any) -> TensorRule:
    """The gate of the dense part beside the experts: the sigmoid of a product."""
    name = f"{MLP}shared_expert_gate.weight"
    return layer(T.SHARED_GATE, name, "hidden", where=Where.ROUTED, **options)


LAYOUTS = (
    one_each(MLP),
    in_one(f"{MLP}experts.gate_up_proj", f"{MLP}experts.down_proj"),
    of_gguf(),
)
ROUTER = router(f"{MLP}gate.weight")
DENSE = gated(where=Where.DENSE)
SHARED = gated(f"{MLP}shared_experts.", "shared", where=Where.ROUTED, flag="shared")
SHARED_EXPERT = gated(f"{MLP}shared_expert.", "shared", where=Where.ROUTED)


def with_shared_gate(of_checkpoint: Rules = (), of_gguf: Rules = ()) -> tuple[Rules, ...]:
    """The layouts with the gate of the shared expert (a vector in GGUF files) and more rules."""
    return (
        *((_shared_gate(slices="one"), *of_checkpoint, *rules) for rules in LAYOUTS[:2]),
        (_shared_gate(), *of_gguf, *LAYOUTS[2]),
    )


# docs/format.md, section 4: small vectors come before the matrix that needs them.
_ORDER: Final = (
    T.EMBEDDING, *(row[0] for row in LAYER_TENSORS),
    T.FINAL_QUERY, T.FINAL_NORM, T.FINAL_NORM_BIAS, T.DENSE, T.JOIN, T.HEAD_BIAS, T.HEAD,
    T.OWN_TABLE,
)  # fmt: skip


def in_file_order(rules: tuple[TensorRule, ...]) -> tuple[TensorRule, ...]:
    return tuple(sorted(rules, key=lambda r: -1 if r.target is None else _ORDER.index(r.target)))
