"""Adapters of low rank (LoRA, DoRA): a model's matrices become W + s B A before they are rounded.

An adapter is a folder of PEFT, adapter_config.json with adapter_model.safetensors or .bin, or a
GGUF file that llama.cpp makes of one. Each of its tensors must belong to a matrix of the model, and
each field of its configuration that changes what it computes is read. Everything else is refused by
name: without that part the result would be another model than the one that was trained.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from qsf.errors import QsfArgumentError, QsfConversionError, QsfIOError, shown
from qsf.file.layout import Header
from qsf.native.opening import read_adapter
from qsf_converter.sources import metadata
from qsf_converter.sources.architectures import FAMILIES
from qsf_converter.sources.checkpoint import (
    Checkpoint,
    DerivedCheckpoint,
    Matrix,
    SourceTensor,
    to_float32,
)
from qsf_converter.sources.checkpoint_files import FileCheckpoint, Located
from qsf_converter.sources.checkpoint_safetensors import SafetensorsCheckpoint
from qsf_converter.sources.checkpoint_torch import TorchCheckpoint
from qsf_converter.sources.families.family import Facts, Family
from qsf_converter.sources.families.rules import T, TensorRule, Where
from qsf_converter.sources.gguf_config import dialect_of, names_in_gguf
from qsf_converter.sources.gguf_file import GgufHead, read_parts

Float64Array = NDArray[np.float64]

_CONFIG: Final = "adapter_config.json"
_PREFIX: Final = "base_model.model."
_KEY: Final = re.compile(
    r"base_model\.model\.(?P<module>.+)\."
    r"(?P<part>lora_A(?=\.weight$)|lora_B(?=\.weight$)|lora_magnitude_vector)(?:\.weight)?"
)
_READ: Final = frozenset(
    ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern",
     "init_lora_weights")
)  # fmt: skip
# Fields without effect on what a trained adapter computes: the tensors say which layers have one,
# the model's family says which matrices are stored transposed.
_WITHOUT_EFFECT: Final = frozenset(
    ("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
     "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform",
     "lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "revision",
     "runtime_config", "target_modules", "task_type")
)  # fmt: skip
# Ways to begin the training that leave the model's own weights as they are.
_INITS: Final = (True, False, "gaussian", "eva", "orthogonal")
WITH_PEFT: Final = "merge it with PEFT (merge_and_unload, save_pretrained) and convert the result"
_MAX_PATTERNS: Final = 1 << 12
_MAX_PATTERN_CHARS: Final = 500
_MAX_NAME_CHARS: Final = 250
_SLAB_ROWS: Final = 256


@dataclass(frozen=True, slots=True)
class _Change:
    """What an adapter does to a matrix W [out, in]: W + s B A; with a magnitude m [out], each row
    of that gets the length m (DoRA). ``a``, ``b`` and ``magnitude`` are names of tensors.
    """

    a: str
    b: str
    magnitude: str | None
    factor: float


class Adapter:
    """An open adapter: ``name``, ``scale``, ``sha256`` of all that it says; ``changes`` by module,
    or of a GGUF file by the tensor that is changed. ``head`` is that of a GGUF file.

    Raises QsfConversionError for an adapter that cannot be merged.
    """

    def __init__(self, path: Path, scale: float, stored: _Stored) -> None:
        self.path, self.scale, self._stored = path, scale, stored
        self.name = metadata.file_name(path.resolve().name)
        self.head = stored.head if isinstance(stored, _Gguf) else None
        if self.head is None:
            config = metadata.read_json_object(path / _CONFIG) or {}
            _check_config(path, config)
            found, key = _changes(path, config, scale, stored.tensors), config
        else:
            found, key = _changes_of_gguf(path, self.head.metadata, scale, stored.tensors), {}
        self.changes = dict(found)
        for name in stored.tensors:
            if not np.isfinite(self._values(name)).all():
                raise QsfConversionError(f"{path}: {name} holds numbers that are not finite")
        said = json.dumps(key, sort_keys=True) if self.head is None else self.head.metadata_sha256
        self.sha256 = hashlib.sha256(f"{said} {stored.digest()}".encode()).hexdigest()
        self.factors = functools.lru_cache(8)(self._factors)

    @property
    def paths(self) -> tuple[Path, ...]:
        more = (self.path / _CONFIG,) if self.head is None else ()
        return (*self._stored.paths, *more)

    def meta(self) -> dict[str, Any]:
        """Return what META records of it."""
        return {"name": self.name, "sha256": self.sha256, "scale": self.scale}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored.tensors[name].shape

    def _values(self, name: str) -> Float64Array:
        tensor = self._stored.tensors[name]
        return to_float32(self._stored.read_rows(name, 0, tensor.n_rows)).astype(np.float64)

    def _factors(
        self, module: str, n_heads: int
    ) -> tuple[Float64Array, Float64Array, Float64Array | None]:
        """Return s A [r, in], B [out, r] and m [out]; rows of B, those of ``n_heads`` heads, are
        interleaved in the file as those of `GgufCheckpoint`.
        """
        change = self.changes[module]
        m = None if change.magnitude is None else self._values(change.magnitude)[0]
        b = self._values(change.b)
        if n_heads:
            halves = b.reshape(n_heads, -1, 2, b.shape[1]).swapaxes(1, 2)
            b = np.ascontiguousarray(halves).reshape(b.shape)
        return change.factor * self._values(change.a), b, m


@contextlib.contextmanager
def open_adapter(text: str) -> Iterator[Adapter]:
    """Open the adapter that ``text`` names: a PEFT folder or a GGUF file, or that, a colon and a
    scale.

    Raises QsfArgumentError for a scale that is no number, QsfIOError if there is no such path,
    QsfConversionError for an adapter that cannot be merged.
    """
    asked = read_adapter(text)
    if asked.name:
        raise QsfArgumentError(f"--lora {text}: a name is for qsf serve, not for merging")
    scale, path = asked.scale, Path(asked.path)
    if not path.exists():
        raise QsfIOError(f"{path}: no such adapter; --lora takes ADAPTER or ADAPTER:SCALE")
    opener: type[_Stored] = _Gguf
    if path.is_dir():
        if not (path / _CONFIG).exists():
            raise QsfConversionError(f"{path}: no {_CONFIG}; is it a folder that PEFT has saved?")
        opener = _Safetensors if (path / _Safetensors.NAME).exists() else _Torch
    elif path.suffix.lower() != ".gguf":
        raise QsfConversionError(f"{path}: a PEFT folder is expected, or a GGUF file")
    with opener(path) as stored:
        yield Adapter(path, scale, stored)


class _Safetensors(SafetensorsCheckpoint):
    NAME = "adapter_model.safetensors"

    def _open(self, model_dir: Path) -> None:
        self._open_named(model_dir, self.NAME, f"{self.NAME}.index.json")


class _Torch(TorchCheckpoint):
    NAME = "adapter_model.bin"

    def _open(self, model_dir: Path) -> None:
        if not self._open_named(model_dir, self.NAME, f"{self.NAME}.index.json"):
            raise QsfConversionError(f"{model_dir}: neither {_Safetensors.NAME} nor {self.NAME}")


class _Gguf(FileCheckpoint[Located]):
    head: GgufHead

    def _open(self, place: Path) -> None:
        self.head, self._paths = read_parts(place, self._open_raw)
        for name, tensor in self.head.tensors.items():
            source = SourceTensor(name, tensor.shape, tensor.type, tensor.n_bytes)
            file, path = self._files[tensor.part], self._paths[tensor.part]
            self._located[name] = Located(source, file, path, tensor.offset)


_Stored = _Safetensors | _Torch | _Gguf


# ---- PEFT's configuration and names ----


def _check_config(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse what changes the computation and is not read here."""

    def refuse(key: str, advice: str) -> NoReturn:
        value = shown(config.get(key))
        raise QsfConversionError(f"{path}: {key} = {value} is not supported: {advice}")

    if config.get("peft_type") != "LORA":
        refuse("peft_type", "only LORA adapters, with or without DoRA, are merged")
    init = config.get("init_lora_weights", True)
    if not any(init is known or (init == known and isinstance(init, str)) for known in _INITS):
        refuse(
            "init_lora_weights",
            "it may have changed the model's own weights; save the adapter with "
            f"path_initial_model_for_weight_conversion, or {WITH_PEFT}",
        )
    for key in ("use_rslora", "use_dora"):
        if not isinstance(config.get(key, False), bool | None):
            refuse(key, "true or false is expected")
    for key, value in config.items():
        if key not in _READ | _WITHOUT_EFFECT and value and (key, value) != ("bias", "none"):
            refuse(key, WITH_PEFT)


def _number(path: Path, key: str, value: Any, *, is_rank: bool) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -3e38 < value < 3e38 or (is_rank and (value < 1 or value % 1)):
        wanted = "a rank" if is_rank else "a number"
        raise QsfConversionError(f"{path}: {key} = {shown(value)} is not {wanted}")
    return float(value)


def _by_module(
    path: Path, config: Mapping[str, Any], key: str, pattern_key: str
) -> Callable[[str], float]:
    """Return a function that gives the number of a module: PEFT's default, or that of the first
    pattern that matches the end of its name.
    """
    is_rank = key == "r"
    usual = _number(path, key, config.get(key, 8), is_rank=is_rank)
    said = config.get(pattern_key) or {}
    if not isinstance(said, dict) or len(said) > _MAX_PATTERNS:
        raise QsfConversionError(f"{path}: {pattern_key} is not an object of a few patterns")
    numbers = [(_pattern(path, pattern_key, text),
                _number(path, pattern_key, value, is_rank=is_rank))
               for text, value in said.items()]  # fmt: skip

    def of(module: str) -> float:
        return next((n for pattern, n in numbers if pattern.match(module)), usual)

    return of


def _pattern(path: Path, key: str, text: str) -> re.Pattern[str]:
    """Return PEFT's expression for a pattern; refuse those that might be matched for years."""
    bare = re.sub(r"\\.|\(\?:", "", text)
    is_nested = re.search(r"\)[*+{]", bare) is not None
    if is_nested or len(text) > _MAX_PATTERN_CHARS or len(re.findall("[*+?{]", bare)) > 2:
        raise QsfConversionError(f"{path}: {key}: {shown(text)} is too complex: {WITH_PEFT}")
    try:
        return re.compile(rf"(.*\.)?({text})$")
    except (re.error, OverflowError, RecursionError) as error:
        raise QsfConversionError(f"{path}: {key}: {shown(text)}: {error}") from error


def _changes(
    path: Path, config: Mapping[str, Any], scale: float, tensors: Mapping[str, SourceTensor]
) -> Iterator[tuple[str, _Change]]:
    """Yield each module with its change; refuse tensors of other kinds, and incomplete ones."""
    parts: dict[str, dict[str, str]] = {}
    has_magnitude = bool(config.get("use_dora"))
    for name in tensors:
        match = _KEY.fullmatch(name) if len(name) <= _MAX_NAME_CHARS else None
        if match is None or (match["part"] == "lora_magnitude_vector" and not has_magnitude):
            raise QsfConversionError(
                f"{path}: tensor {shown(name)} is none of a LoRA on a matrix: {WITH_PEFT}"
            )
        parts.setdefault(match["module"], {})[match["part"]] = name
    if not parts:
        raise QsfConversionError(f"{path}: the adapter holds no tensors")
    rank_of = _by_module(path, config, "r", "rank_pattern")
    alpha_of = _by_module(path, config, "lora_alpha", "alpha_pattern")
    for module, own in parts.items():
        for part in ("lora_A", "lora_B", *(["lora_magnitude_vector"] if has_magnitude else [])):
            if part not in own:
                raise QsfConversionError(f"{path}: {shown(module)} has no {part}: copy it again")
        rank, shape = rank_of(module), tensors[own["lora_A"]].shape
        if shape[:1] != (rank,):
            raise QsfConversionError(
                f"{path}: {own['lora_A']} has shape {list(shape)}, and its rank is {rank:g} by "
                f"{_CONFIG}"
            )
        divisor = math.sqrt(rank) if config.get("use_rslora") else rank
        factor = scale * alpha_of(module) / divisor
        yield (
            module,
            _Change(own["lora_A"], own["lora_B"], own.get("lora_magnitude_vector"), factor),
        )


# ---- GGUF files ----


def _changes_of_gguf(
    path: Path, fields: Mapping[str, Any], scale: float, tensors: Mapping[str, SourceTensor]
) -> Iterator[tuple[str, _Change]]:
    """Yield each changed tensor with its change, as llama.cpp reads them."""
    wanted = {"general.type": "adapter", "adapter.type": "lora"}
    known = {**wanted, "adapter.lora.task_name": None, "adapter.lora.alpha": None}
    for key in (*wanted, *(key for key in fields if key.startswith("adapter."))):
        value = fields.get(key)
        if key not in known or value != wanted.get(key, value):
            raise QsfConversionError(
                f"{path}: {key} = {shown(value)} is not supported: {WITH_PEFT}"
            )
    alpha = _number(path, "adapter.lora.alpha", fields.get("adapter.lora.alpha", 0), is_rank=False)
    names = {name.removesuffix(".lora_a").removesuffix(".lora_b") for name in tensors}
    wanted_names = {f"{name}.lora_{part}" for name in names for part in "ab"}
    for name in sorted(wanted_names ^ tensors.keys()):
        raise QsfConversionError(f"{path}: tensor {shown(name)} is missing, or none of a LoRA")
    for name in names:
        rank = tensors[f"{name}.lora_a"].shape[0]
        if not rank:
            raise QsfConversionError(f"{path}: {shown(name)} has rank 0")
        factor = scale * alpha / rank if alpha else scale
        yield name, _Change(f"{name}.lora_a", f"{name}.lora_b", None, factor)


# ---- the merged checkpoint ----


def merged(
    stored: Checkpoint, adapters: Sequence[Adapter], family: Family, facts: Facts
) -> DerivedCheckpoint:
    """Return the checkpoint with the matrices that the adapters change in f32.

    Raises QsfConversionError for a matrix that the model lacks, or that has another shape.
    """
    changed: dict[str, list[_Part]] = {}
    shapes = {name: tensor.shape for name, tensor in stored.tensors.items()}
    for adapter in adapters:
        names = Names(adapter, shapes, family, facts.header, tied_head=facts.arch.tied_head)
        for placed in names.placed():
            factors = functools.partial(adapter.factors, placed.module, placed.n_heads)
            merge = _Part(factors, names.is_transposed(placed.name))
            changed.setdefault(placed.name, []).append(merge)
    return DerivedCheckpoint(
        stored,
        [
            Matrix(
                name,
                stored.tensors[name].shape,
                "F32",
                [name],
                _Merged(stored, name, parts).rows,
            )
            for name, parts in changed.items()
        ],
    )


class Placed(NamedTuple):
    """A matrix that an adapter changes: the checkpoint's name of it; B has rows of ``n_heads``
    heads that are interleaved, 0: none.
    """

    module: str
    name: str
    n_heads: int


class Names:
    """Finds the matrices of a model, by name and shape, by the names that an adapter has for
    them.
    """

    def __init__(
        self,
        adapter: Adapter,
        shapes: Mapping[str, tuple[int, ...]],
        family: Family,
        header: Header,
        *,
        tied_head: bool,
    ) -> None:
        self._adapter, self._shapes = adapter, shapes
        self._prefixes = sorted({*family.prefixes, "model."}, key=len, reverse=True)
        self._names = {self.bare(name): name for name in shapes}
        original = FAMILIES[family.name]
        self._file, in_gguf, heads = None, family, {}
        if adapter.head is not None:
            fields = adapter.head.metadata
            try:
                self._file = names_in_gguf(fields, family.name)
            except QsfConversionError as error:
                raise QsfConversionError(f"{adapter.path}: {error}") from error
            in_gguf = self._file.family
            if dialect_of(fields)[1].is_permuted:
                n_kv_heads = header.n_kv_heads or header.n_heads
                heads = {".q_proj.": header.n_heads, ".k_proj.": n_kv_heads}
        self._heads: Mapping[str, int] = heads
        self._transposed = _patterns(family, lambda rule: rule.transposed)
        refused = _patterns(original, lambda rule: rule.target in (T.EMBEDDING, T.OWN_TABLE))
        if tied_head:
            refused += _patterns(original, lambda rule: rule.target == T.HEAD)
        self._refused = {"the embedding, or a head that is the embedding": refused}
        if self._file is not None:
            what = "a matrix that its family stores transposed (GPT-2)"
            self._refused[what] = _patterns(original, lambda rule: rule.transposed)
        if (self._file is None) != (family is original):
            what = "a matrix whose rows GGUF files may hold in another order than the original"
            self._refused[what] = _reordered(original, in_gguf)

    def placed(self) -> Iterator[Placed]:
        """Yield the matrices that the adapter changes; refuse those that it does not fit."""
        adapter = self._adapter
        for module, change in adapter.changes.items():
            name, (n_out, n_in) = self._matrix(module)
            rank = adapter.shape(change.a)[0]
            wanted: dict[str, tuple[int, ...]] = {change.a: (rank, n_in), change.b: (n_out, rank)}
            wanted |= {} if change.magnitude is None else {change.magnitude: (n_out,)}
            for part, shape in wanted.items():
                if adapter.shape(part) != shape:
                    raise QsfConversionError(
                        f"{adapter.path}: {part} has shape {list(adapter.shape(part))}, for "
                        f"{name} [{n_out}, {n_in}] it must be {list(shape)}: is it an adapter of "
                        "another model?"
                    )
            yield Placed(module, name, self._n_heads(name))

    def bare(self, name: str) -> str:
        """Return a name without the family's prefix."""
        prefix = next((start for start in self._prefixes if name.startswith(start)), "")
        return name.removeprefix(prefix)

    def _matrix(self, module: str) -> tuple[str, tuple[int, ...]]:
        """Return the name of a module's matrix, and its shape as [out, in]."""
        wanted = f"{module}.weight" if self._file is None else self._file.name_there(module)
        bare = self.bare(wanted)
        for what, patterns in self._refused.items():
            if any(pattern.fullmatch(bare) for pattern in patterns):
                raise QsfConversionError(
                    f"{self._adapter.path}: it changes {shown(module)}, {what}, which is not "
                    f"supported: {WITH_PEFT}"
                )
        name = wanted if wanted in self._shapes else self._names.get(bare)
        shape = () if name is None else self._shapes[name]
        if name is None or len(shape) != 2:
            raise QsfConversionError(
                f"{self._adapter.path}: it changes {shown(module)}, and the model "
                f"{'has no such tensor' if name is None else 'stores that as no matrix'}: is it an "
                f"adapter of another model? If not, {WITH_PEFT}"
            )
        return name, shape[::-1] if self.is_transposed(name) else shape

    def is_transposed(self, name: str) -> bool:
        """Return whether a matrix is stored as [in, out] (GPT-2's Conv1D)."""
        return any(pattern.fullmatch(self.bare(name)) for pattern in self._transposed)

    def _n_heads(self, name: str) -> int:
        """Return how many heads of interleaved rows the adapter's B has; 0: none."""
        return next((n for part, n in self._heads.items() if part in name), 0)


def _patterns(family: Family, is_wanted: Callable[[TensorRule], object]) -> list[re.Pattern[str]]:
    """Return expressions for the names of the tensors that some rules of the family read."""
    rules = (*family.rules, *(rule for layout in family.layouts for rule in layout))
    return [name_pattern(rule.source) for rule in rules if is_wanted(rule)]


def _reordered(original: Family, in_gguf: Family) -> list[re.Pattern[str]]:
    """Return the names of matrices whose outputs a GGUF file may have in another order, which the
    checkpoint does not restore: fused ones, and value heads of recurrent layers.
    """
    if in_gguf.derive or _patterns(original, lambda rule: rule.where in (Where.DELTA, Where.SSD)):
        return [re.compile(".*")]
    groups = {rule.groups for rule in in_gguf.rules}
    return _patterns(original, lambda rule: rule.groups not in groups)


def name_pattern(source: str) -> re.Pattern[str]:
    """Return an expression for the names that a rule's source stands for."""
    return re.compile(re.sub(r"\\{\w+\\}", r"\\w+", re.escape(source)))


class _Part(NamedTuple):
    factors: Callable[[], tuple[Float64Array, Float64Array, Float64Array | None]]
    is_transposed: bool


class _Merged:
    """Rows of a matrix with its changes, in f64 until the end, so that ranges change no bit."""

    def __init__(
        self,
        stored: Checkpoint,
        name: str,
        parts: Sequence[_Part],
    ) -> None:
        self._stored, self._name, self._parts = stored, name, parts
        self._is_transposed = parts[0].is_transposed
        self._lengths: dict[int, Float64Array] = {}  # of the outputs of a transposed matrix

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        own = self._own(start, stop)
        total = own.copy()
        for i, part in enumerate(self._parts):
            magnitude = part.factors()[2]
            change = self._change(i, start, stop)
            if magnitude is not None:  # as PEFT adds up several: each by itself changes W
                factor = magnitude / self._output_lengths(i)
                changed = own + change
                factor = factor if self._is_transposed else factor[start:stop, None]
                change = changed * factor - own
            total += change
        with np.errstate(over="ignore"):
            rows: NDArray[np.float32] = total.astype(np.float32)
        return rows  # what is not finite is refused with its name

    def _own(self, start: int, stop: int) -> Float64Array:
        return to_float32(self._stored.read_rows(self._name, start, stop)).astype(np.float64)

    def _change(self, i: int, start: int, stop: int) -> Float64Array:
        a, b, _ = self._parts[i].factors()
        return (b @ a[:, start:stop]).T if self._is_transposed else b[start:stop] @ a

    def _output_lengths(self, i: int) -> Float64Array:
        """Return the length of the weights of each output of W + s B A."""
        if i not in self._lengths:
            squares: list[Float64Array] = []
            n_rows = self._stored.tensors[self._name].n_rows
            for start in range(0, n_rows, _SLAB_ROWS):
                stop = min(start + _SLAB_ROWS, n_rows)
                values = self._own(start, stop) + self._change(i, start, stop)
                squares.append((values**2).sum(axis=0 if self._is_transposed else 1))
            self._lengths[i] = np.sqrt(
                np.sum(squares, axis=0) if self._is_transposed else np.concatenate(squares)
            )
        return self._lengths[i]
