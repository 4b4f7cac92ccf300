"""A family of models: its names, and how its config.json becomes what each layer computes."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from qsf.errors import QsfConversionError, shown
from qsf.file.kinds import ROPE_NONE, Ffn, LayerKind, QkNorm, RopeSet, pack_tables, plain_kind
from qsf.file.layout import (
    Activation,
    Arch,
    Architecture,
    Dtype,
    Header,
    Norm,
    Positions,
    TensorType,
)
from qsf.foreign_json import read_json
from qsf_converter.sources.checkpoint import Axis, Checkpoint, Matrix
from qsf_converter.sources.families import config as limits
from qsf_converter.sources.families.config import Config
from qsf_converter.sources.families.gguf import Gguf
from qsf_converter.sources.families.positions import Rope, parameters_of, rope_of
from qsf_converter.sources.families.rules import TensorRule, in_file_order

SLIDING, FULL = "sliding_attention", "full_attention"
Factor = float | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """The contents of a configuration: everything but the weights. ``header.dtype`` is provisional.

    ``layer_kinds`` and ``rope_sets`` are empty if header and ``arch`` describe them. ``factors``
    are the factors of rules with ``scale``: of a matrix, or of each row. ``padded`` are the axes of
    tensors that get zeros, by a part of their name.
    """

    header: Header
    arch: Arch
    dims: Mapping[str, int]
    flags: frozenset[str]
    warnings: tuple[str, ...] = ()
    layer_kinds: tuple[LayerKind, ...] = ()
    rope_sets: tuple[RopeSet, ...] = ()
    factors: Mapping[str, Factor] = field(default_factory=dict)
    padded: Mapping[str, Mapping[int, Axis]] = field(default_factory=dict)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        return self.layer_kinds or (plain_kind(self.header, self.arch),) * self.header.n_layers

    @property
    def n_trunk_layers(self) -> int:
        """The layers without the MTP head, which is the last one if there is one."""
        return self.header.n_layers - sum(kind.is_mtp for kind in self.layer_kinds[-1:])

    def tables(self) -> dict[str, bytes]:
        return pack_tables(
            self.header, self.arch, self.layer_kinds, self.rope_sets, QsfConversionError
        )


@dataclass(slots=True)
class Draft:
    """A configuration while it is read; a family's ``adjust`` applies its special cases."""

    config: Config
    header: Header
    arch: Arch
    dims: dict[str, int]
    flags: set[str]
    layers: list[LayerKind]
    layer_types: list[str]
    ropes: dict[str, Rope]  # by type of layers
    warnings: list[str] = field(default_factory=list)
    factors: dict[str, Factor] = field(default_factory=dict)
    padded: dict[str, Mapping[int, Axis]] = field(default_factory=dict)  # see `padded`

    def set_all(self, **changes: Any) -> None:
        self.layers = [dataclasses.replace(layer, **changes) for layer in self.layers]

    def set_type(self, of: str, **changes: Any) -> None:
        self.layers = [
            dataclasses.replace(layer, **changes) if type_ == of else layer
            for layer, type_ in zip(self.layers, self.layer_types, strict=True)
        ]

    def unrotate_full(self) -> None:
        """Let the layers without a window rotate nothing."""
        self.unrotate(i for i, type_ in enumerate(self.layer_types) if type_ == FULL)

    def unrotate(self, layers: Iterable[int]) -> None:
        for i in layers:
            self.layers[i] = dataclasses.replace(self.layers[i], rope_set=ROPE_NONE)


# Tensors for images and sound, which are not converted.
SENSES = ("vision_tower.", "vision_model.", "visual.", "audio_tower.", "multi_modal_projector.",
          "mm_projector.", "embed_vision.", "embed_audio.")  # fmt: skip
TEXT_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "language_model.")


def _count_layers(config: Config) -> int:
    return config.count("num_hidden_layers", limits.MAX_LAYERS)


def no_windows(config: Config, n_layers: int) -> tuple[int, list[str]]:
    """No layer has a window, whatever the value of ``sliding_window``."""
    config.get("sliding_window")
    config.of_layers("layer_types", n_layers, (FULL,))
    return 0, [FULL] * n_layers


def window_of_all(config: Config, n_layers: int) -> tuple[int, list[str]]:
    """A window on every layer, unless the file or ``layer_types`` states none."""
    window_tokens, types = _windows(config, n_layers, [SLIDING] * n_layers)
    if len(set(types)) > 1:
        raise config.error("layer_types", "with different attention is not supported")
    return window_tokens, types


def window_when_switched(config: Config, n_layers: int) -> tuple[int, list[str]]:
    """Qwen: a window on the layers from ``max_window_layers`` on, if ``use_sliding_window``."""
    first = config.get("max_window_layers")
    if not config.boolean("use_sliding_window"):
        return no_windows(config, n_layers)
    if isinstance(first, bool) or not isinstance(first, int):
        raise config.error("max_window_layers", f"= {shown(first)} is not a number of layers")
    return _windows(config, n_layers, [SLIDING if i >= first else FULL for i in range(n_layers)])


def window_but_every(config: Config, n_layers: int) -> tuple[int, list[str]]:
    """A window on all layers but every n-th, by ``sliding_window_pattern``.

    The pattern is n, or the types of a period by their first letters (LLLG: the last one is
    global).
    """
    pattern = config.get("sliding_window_pattern")
    if config.get("sliding_window") is None:
        pattern = 1
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        usual = [FULL if pattern[i % len(pattern)] == "G" else SLIDING for i in range(n_layers)]
    else:
        n = 1 if pattern == 1 else config.count("sliding_window_pattern", limits.MAX_LAYERS)
        usual = [SLIDING if (i + 1) % n else FULL for i in range(n_layers)]
    return _windows(config, n_layers, usual)


def window_but_first_of_four(config: Config, n_layers: int) -> tuple[int, list[str]]:
    """CWM, Granite: every fourth layer, beginning with the first, has no window."""
    return _windows(config, n_layers, [SLIDING if i % 4 else FULL for i in range(n_layers)])


def _windows(config: Config, n_layers: int, usual: list[str]) -> tuple[int, list[str]]:
    types = config.of_layers("layer_types", n_layers, (SLIDING, FULL))
    if config.get("sliding_window") is None:
        return 0, [FULL] * n_layers
    return config.tokens("sliding_window"), usual if types is None else types


RENAMES: Mapping[str, str] = {"norm_epsilon": "rms_norm_eps"}
BIASES = {"attention_bias": False, "mlp_bias": False}

# By family: what its class takes for keys that a file leaves out (tools/make_class_defaults.py).
CLASS_DEFAULTS: Final = Path(__file__).with_name("class_defaults.json")


@functools.cache
def _class_defaults() -> Mapping[str, Mapping[str, Any]]:
    rows: dict[str, dict[str, Any]] = read_json(CLASS_DEFAULTS.read_bytes())
    return rows


Windows = Callable[[Config, int], tuple[int, list[str]]]
"""Reads the window in tokens, and the type of each layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture of transformers, by its name in ``config.json``.

    Biases of attention and MLP and the norms of queries and keys follow from the rules.
    ``renames`` and ``defaults`` are those of ``Config``; ``defaults`` are the class's, but for what
    is said here. The names in ``flags`` are facts for the rules: a name that is a key of
    config.json is read from there, and True if the file does not state it; all others always hold.
    ``kind`` are fields of ``LayerKind`` of all layers. ``layouts`` are ways in which checkpoints
    store the other tensors, such as experts: separately or in one tensor; most GGUF files use the
    last. ``nested`` are classes for more than text whose text part has this family: the keys lie
    under ``text_config``, and the tensors whose names begin with one of ``left_out`` are not
    converted. ``scalars`` are tensors of one number in each layer, which become lists of the
    configuration. ``gguf`` is its form in GGUF files.
    """

    name: str
    title: str  # the models' name for people
    model_type: str = ""  # the name in snake case, if not stated
    rules: tuple[TensorRule, ...]
    layouts: tuple[tuple[TensorRule, ...], ...] = ()
    # A name may have this prefix or not; usually model., with ``nested`` TEXT_PREFIXES.
    prefixes: tuple[str, ...] = ()
    ignored_suffixes: tuple[str, ...] = ("rotary_emb.inv_freq",)
    nested: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()  # with ``nested`` usually SENSES
    architecture: Architecture = Architecture.OTHER
    norm: Norm = Norm.RMS
    ffn: Ffn | None = None  # as the rules
    activation: Activation | None = None  # of the header; None: hidden_act
    scalars: Mapping[str, str] = field(default_factory=dict)  # key of the config -> tensors of it
    positions: Positions = Positions.ROPE
    is_interleaved: bool = False
    renames: Mapping[str, str] = field(default_factory=lambda: RENAMES)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, bool] = field(default_factory=dict)
    facts: frozenset[str] = frozenset()  # flags that always hold
    kind: Mapping[str, Any] = field(default_factory=dict)
    count_layers: Callable[[Config], int] = _count_layers
    windows: Windows = no_windows
    rope_parameters: Callable[[Config, str], Config] = parameters_of
    has_partial_rope: bool = False
    adjust: Callable[[Draft], None] | None = None
    # Makes tensors that the rules name of others, which may have their names.
    derive: Callable[[Checkpoint, Facts], Iterable[Matrix]] | None = None
    gguf: Gguf | None = None
    ignored_keys: str = ""  # an expression for those without effect, whatever they say
    # Field -> the value, or values, that change nothing in the engine's computation; others are
    # refused, unless they are false or empty.
    neutral: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Put the rules into the order of the file; state what follows from names and rules."""
        every = (*self.rules, *(rule for rules in self.layouts for rule in rules))
        biases = {rule.flag for rule in every} & {"attention_bias", "mlp_bias"}
        norms = {rule.shape for rule in every if rule.target == TensorType.Q_NORM and not rule.flag}
        targets = {rule.target for rule in every}
        is_plain = TensorType.FFN_UP in targets and TensorType.FFN_GATE not in targets
        flags: dict[Any, bool] = dict.fromkeys(biases, False)
        kind: dict[str, Any] = {"qk_norm": QkNorm.PER_HEAD} if ("head",) in norms else {}
        kind |= {"qk_norm": QkNorm.WHOLE_WIDTH} if ("q",) in norms else {}
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", self.name.partition("For")[0])
        for field_, value in (
            ("rules", in_file_order(self.rules)),
            ("layouts", tuple(in_file_order(rules) for rules in self.layouts)),
            ("model_type", self.model_type or name.lower()),
            ("flags", flags | dict(self.flags)),
            ("facts", self.facts | ({rule.flag for rule in every} & {"always"})),
            ("ffn", self.ffn or (Ffn.PLAIN if is_plain else Ffn.GATED)),
            ("kind", kind | dict(self.kind)),
            ("defaults", {**_class_defaults().get(self.name, {}), **self.defaults}),
            ("prefixes", self.prefixes or (TEXT_PREFIXES if self.nested else ("model.",))),
            ("left_out", self.left_out or (SENSES if self.nested else ())),
        ):
            object.__setattr__(self, field_, value)

    @property
    def forms(self) -> tuple[Gguf, ...]:
        """The architectures of llama.cpp that have this family."""
        return () if self.gguf is None else (self.gguf, *self.gguf.also)

    @property
    def has_head(self) -> bool:
        return any(rule.target == TensorType.HEAD for rule in self.rules)

    def config_of(self, values: Mapping[str, Any]) -> Config:
        text = values.get("text_config")
        if (values.get("architectures") or [None])[0] in self.nested and isinstance(text, dict):
            outer = {key: values[key] for key in _OUTER_KEYS if key in values}
            values = {**text, **outer}
        return Config(values, self.renames, self.defaults)


# Keys outside of text_config that override those inside of it.
_OUTER_KEYS = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "dtype",
               "torch_dtype", "quantization_config", "backbone_hidden_size",
               "use_ordered_embeddings", "num_centroids",
               "centroid_intermediate_top_k")  # fmt: skip


def read_family(family: Family, config: Config) -> Facts:
    """Return the contents of ``config``; raises QsfConversionError if the engine lacks some."""
    warnings: list[str] = []
    header = _header(family, config, warnings)
    window_tokens, layer_types = family.windows(config, header.n_layers)
    arch = Arch(
        norm_epsilon=config.positive("norm_epsilon"),
        tied_head=config.boolean("tie_word_embeddings"),
        window_tokens=window_tokens if SLIDING in layer_types else 0,
    )
    plain = dataclasses.replace(
        plain_kind(header, arch), ffn=family.ffn or Ffn.GATED, **family.kind
    )
    layers = [
        dataclasses.replace(plain, window_tokens=window_tokens if type_ == SLIDING else 0)
        for type_ in layer_types
    ]
    draft = Draft(
        config=config,
        header=header,
        arch=arch,
        dims=_dims(header),
        flags={name for name, usual in family.flags.items() if config.boolean(name, usual)}
        | family.facts,
        layers=layers,
        layer_types=layer_types,
        ropes=_ropes(family, config, header, layer_types),
        warnings=warnings,
    )
    if family.adjust is not None:
        family.adjust(draft)
    return _facts_of(draft)


def _header(family: Family, config: Config, warnings: list[str]) -> Header:
    dim, n_heads, n_kv_heads, head_dim = _head_dims(config)
    n_vocab = config.count("vocab_size", limits.MAX_VOCAB)
    multiple = config.get("ffn_multiple")
    ffn_dim = config.count("intermediate_size", limits.MAX_FFN_DIM, multiple and multiple * dim)
    is_rope = family.positions == Positions.ROPE
    ids = {
        name: config.token_id(f"{name}_token_id", n_vocab, warnings)
        for name in ("bos", "eos", "pad")
    }
    return Header(
        architecture=family.architecture,
        n_layers=family.count_layers(config),
        dim=dim,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        n_vocab=n_vocab,
        max_tokens=config.tokens("max_position_embeddings"),
        ffn_dim=ffn_dim,
        head_dim=head_dim,
        dtype=Dtype.F16,
        activation=config.activation("hidden_act")
        if family.activation is None
        else family.activation,
        norm=family.norm,
        positions=family.positions,
        rope_theta=10000.0 if is_rope else 0.0,  # until RoPE is read
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        pad_id=ids["pad"],
    )


def _head_dims(config: Config) -> tuple[int, int, int, int]:
    dim = config.count("hidden_size", limits.MAX_DIM)
    n_heads = config.count("num_attention_heads", limits.MAX_HEADS)
    n_kv_heads = config.count("num_key_value_heads", n_heads, n_heads)
    if n_heads % n_kv_heads:
        raise QsfConversionError(
            f"config.json: {n_heads} attention heads cannot share {n_kv_heads} key-value heads"
        )
    if config.get("head_dim") is None and dim % n_heads:
        raise config.error("hidden_size", f"{dim} is not a multiple of {n_heads} attention heads")
    head_dim = config.count("head_dim", limits.MAX_HEAD_DIM, max(1, dim // n_heads))
    if head_dim > limits.MAX_HEAD_DIM:
        raise QsfConversionError(f"config.json: heads of {head_dim} are too wide")
    return dim, n_heads, n_kv_heads, head_dim


def _dims(header: Header) -> dict[str, int]:
    n_kv_heads = header.n_kv_heads or header.n_heads
    return {
        "hidden": header.dim,
        "q": header.n_heads * header.head_dim,
        "kv": n_kv_heads * header.head_dim,
        "head": header.head_dim,
        "heads": header.n_heads,
        "kv heads": n_kv_heads,
        "ffn": header.ffn_dim,
        "vocab": header.n_vocab,
        "positions": header.max_tokens,
        "layers": header.n_layers,
    }


def _ropes(
    family: Family, config: Config, header: Header, layer_types: list[str]
) -> dict[str, Rope]:
    if family.positions != Positions.ROPE:
        return {}
    return {
        type_: rope_of(
            family.rope_parameters(config, type_),
            header.head_dim,
            header.max_tokens,
            is_interleaved=family.is_interleaved,
            may_be_partial=family.has_partial_rope,
        )
        for type_ in dict.fromkeys(layer_types)
    }


def _facts_of(draft: Draft) -> Facts:
    """Number the RoPE sets, and move to header and ARCH what these can express."""
    header, arch, layers = draft.header, draft.arch, draft.layers
    sets: tuple[RopeSet, ...] = ()
    distinct = list(dict.fromkeys(_key(rope) for rope in draft.ropes.values()))
    if distinct:
        first = next(iter(draft.ropes.values()))
        header = dataclasses.replace(header, rope_theta=first.theta)
        if len(distinct) == 1 and first.arch is not None:
            arch = dataclasses.replace(arch, **first.arch)
        else:
            sets = tuple(
                slot
                for number, (_, own) in enumerate(distinct)
                for slot in (dataclasses.replace(s, number=number) for s in own)
            )
        layers = [
            layer
            if layer.rope_set == ROPE_NONE
            else _with_rope(layer, draft.ropes[type_], distinct)
            for layer, type_ in zip(layers, draft.layer_types, strict=True)
        ]
    return Facts(
        header=header,
        arch=arch,
        dims=draft.dims,
        flags=frozenset(draft.flags),
        warnings=tuple(draft.warnings),
        layer_kinds=tuple(layers),
        rope_sets=sets,
        factors=draft.factors,
        padded=draft.padded,
    )


_RopeKey = tuple[float, tuple[RopeSet, ...]]


def _key(rope: Rope) -> _RopeKey:
    """The fields that identify a RoPE set; the query temperature is stored with the layers."""
    return rope.theta, rope.sets


def _with_rope(layer: LayerKind, rope: Rope, distinct: list[_RopeKey]) -> LayerKind:
    beta, step = rope.temperature or (0.0, 0)
    return dataclasses.replace(
        layer, rope_set=distinct.index(_key(rope)), temperature_beta=beta, temperature_step=step
    )
