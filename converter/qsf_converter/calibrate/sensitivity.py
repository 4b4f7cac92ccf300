"""How much each matrix and each layer matters, measured on texts.

A matrix matters as much as the model's predictions change when it alone is rounded: the mean
Kullback-Leibler divergence KL(original || changed) over the tokens of the texts, in nats. The
importance of a layer is the same divergence when the layer is skipped. Both are measured in one
pass over the layers: the original and each change so far have a residual stream of their own, and
all streams go through a layer while its weights are in memory.

Each change is measured alone. `assignment` adds the costs; measurements confirm that the sum
predicts which of two files is better: bench/LOG-quantisation.md.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from qsf.errors import QsfConversionError
from qsf.file import layout
from qsf.file.layout import FINAL_UNIT, OWN_TABLE_UNIT, Dtype, Role, TensorType, UnitId, layer_unit
from qsf_converter.original.layers import Original
from qsf_converter.original.weights import Weights
from qsf_converter.rounding.plan import Target
from qsf_converter.rounding.quantisers import UnrepresentableError, quantise_rows
from qsf_converter.rounding.tiles import TILE_DTYPES, dequantise_tiles
from qsf_converter.sources.checkpoint import Float32Array

# The types that are measured; costs of others are estimated from output errors, see `measure`.
MEASURED: Final = (Dtype.Q2, Dtype.Q3)
DEFAULT_MEMORY_BYTES: Final = 1 << 30  # of all residual streams together
MOST_TOKENS: Final = 2048

_HEAD: Final = "HEAD"

Progress = Callable[[int, int], None]
_Job = tuple[UnitId, str, Dtype]  # the stream of a rounded matrix: its unit, name and type


@dataclass(frozen=True, slots=True)
class LayerImportance:
    """The effect of a layer on the residual stream and on the predictions."""

    layer: int  # the first is 0
    cosine: float  # between its input and output, mean over tokens (ShortGPT, arXiv:2403.03853)
    kl_skipped: float  # nats a token if the layer returns its input


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The result of ``measure``.

    ``kl`` is the cost of rounding one matrix alone in nats a token, by ``Target.name`` and type.
    ``output_error`` is the squared error of the matrix's output relative to the output's energy;
    empty for embedding and head. ``measured`` lists the measured types of a matrix; costs of its
    other types are scaled.
    """

    kl: Mapping[str, Mapping[Dtype, float]]
    output_error: Mapping[str, Mapping[Dtype, float]]
    measured: Mapping[str, tuple[Dtype, ...]]
    layers: tuple[LayerImportance, ...]
    n_tokens: int  # number of compared predictions

    def importance(self, layer: int) -> float:
        """The layer's value in the layer index: ``kl_skipped``, finite and >= 0.

        It is the loss that skipping the layer causes. The cosine, in contrast, is nearly equal for
        most layers and ignores what later layers do with the change.
        """
        return self.layers[layer].kl_skipped if layer < len(self.layers) else 0.0  # the MTP head


def round_matrix(dtype: Dtype, rows: Float32Array) -> Float32Array:
    """Return the values that a file would store for ``rows`` [n_rows, n_cols].

    Raises UnrepresentableError for a value that the type cannot hold.
    """
    return dequantise_tiles(dtype, quantise_rows(dtype, rows), *rows.shape)


def n_tokens_within(
    original: Original,
    candidates: Mapping[str, Collection[Dtype]],
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
) -> int:
    """Return with how many tokens the residual streams together stay below ``memory_bytes``.

    Up to 2048 tokens, which ranks matrices well enough, at least 1. A model of 1.1 G weights (22
    layers, 2048 wide) gets 360 tokens.
    """
    n_streams = len(_jobs(original, candidates)) + original.header.n_layers
    # The 3 are the original's stream, and input and output of the current layer.
    n_tokens = memory_bytes // ((n_streams + 3) * original.width * 4)
    return max(1, min(MOST_TOKENS, n_tokens))


def measure(
    original: Original,
    samples: NDArray[np.integer],
    candidates: Mapping[str, Collection[Dtype]],
    *,
    progress: Progress | None = None,
) -> Sensitivity:
    """Measure the cost of rounding each matrix to each of its candidate types.

    A stream goes through all later layers, so time and memory grow with the number of matrices
    and measured types. In a layer only the types of ``MEASURED`` get a stream (all candidates of a
    matrix, if none of them is one); the cost of another type is that of the measured
    type next in size, times the ratio of both types' squared errors in the matrix's output on
    these texts: KL is quadratic in a small change. Embedding and head are few: all their types are
    measured.

    Args:
        original: the model.
        samples: token ids, [n_samples, n_tokens]; independent texts; as many as
            ``n_tokens_within`` says.
        candidates: types by ``Target.name``; matrices that are missing are not measured.
        progress: called with the tokens done and all; a token counts in each stream, once a layer
            and once for its predictions.

    Raises QsfConversionError when a weight cannot be rounded or the model computes no finite
    numbers.
    """
    return _Measurement(original, samples, candidates, progress).run()


def measure_layers(
    original: Original, samples: NDArray[np.integer], *, progress: Progress | None = None
) -> tuple[LayerImportance, ...]:
    """Measure only the importance of layers, with one stream for each layer.

    Arguments and errors are those of ``measure``.
    """
    return measure(original, samples, {}, progress=progress).layers


@dataclass(slots=True)
class _Stream:
    name: str  # of the matrix; of a skipped layer its number
    dtype: Dtype | None  # None: skipped
    x: Float32Array  # [n_samples, n_tokens, width]
    head: Dtype | None = None  # the type that rows of the head are rounded to
    head_rows: range = range(0)  # these rows


@dataclass(slots=True)
class _Measurement:
    """One pass over the layers: the streams, and the measurements so far."""

    original: Original
    samples: NDArray[np.integer]
    candidates: Mapping[str, Collection[Dtype]]
    progress: Progress | None
    streams: list[_Stream] = field(default_factory=list)
    errors: dict[str, dict[Dtype, float]] = field(default_factory=dict)
    cosines: list[float] = field(default_factory=list)
    jobs: list[_Job] = field(default_factory=list)
    n_done: int = 0
    n_all: int = 0

    def run(self) -> Sensitivity:
        """Run all streams through all layers, then compare their predictions."""
        original = self.original
        self.jobs = _jobs(original, self.candidates)
        self._count()
        x = original.embed(self.samples)
        self._start_embeddings(x)
        for layer in range(original.header.n_layers):
            x = self._pass_layer(layer, x)
        self._start_heads(x)
        with np.errstate(all="ignore"):  # the result is checked
            divergences = self._divergences(x)
        if not np.isfinite(divergences).all():
            raise QsfConversionError("the model computes NaN or infinity on the calibration texts")
        return self._result([max(0.0, float(value)) for value in divergences])

    def _count(self) -> None:
        """Count the passes: those of the original, and of each stream from where it starts."""
        n_layers = self.original.header.n_layers
        # The original, and skipped layers
        self.n_all = n_layers + n_layers * (n_layers - 1) // 2 + n_layers
        for unit, _, _ in self.jobs:
            n_before = {Role.EMBEDDING: 0, Role.FINAL: n_layers}.get(unit.role, unit.layer)
            self.n_all += 1 + n_layers - n_before

    def _advance(self) -> None:
        self.n_done += 1
        if self.progress is not None:
            self.progress(self.n_done * self.samples.size, self.n_all * self.samples.size)

    def _start_embeddings(self, x: Float32Array) -> None:
        for unit, name, dtype in self.jobs:
            if unit.role not in (Role.EMBEDDING, Role.OWN_TABLE):
                continue
            changed = x.copy()
            if unit.role == Role.OWN_TABLE:
                self.original.round_own(changed, partial(self._round, name, dtype))
                self.streams.append(_Stream(name, dtype, changed))
                continue
            factor = np.float32(self.original.arch.embedding_factor)
            for start, rows in self.original.embedding_rows():
                here = (self.samples >= start) & (self.samples < start + len(rows))
                ids, places = np.unique(self.samples[here] - start, return_inverse=True)
                if len(ids):
                    used = rows[ids]
                    lost = self._round(name, dtype, used) - used
                    self.original.parts(changed)[0][here] += (lost * factor)[places]
            self.original.keep_embedded(changed)
            head = dtype if self.original.arch.tied_head else None
            rows_of_head = range(self.original.header.n_vocab)
            self.streams.append(_Stream(name, dtype, changed, head, rows_of_head))

    def _pass_layer(self, layer: int, x: Float32Array) -> Float32Array:
        """Run all streams through a layer, add those of its changes, return the original's."""
        original = self.original
        weights = original.weights(layer_unit(layer))
        inputs: dict[TensorType, list[Float32Array]] = {}

        def observe(kinds: tuple[TensorType, ...], values: Float32Array) -> None:
            for kind in kinds:
                inputs.setdefault(kind, []).append(values)

        out = original.layer(weights, x, observe)
        self._advance()
        self.cosines.append(_mean_cosine(original.parts(x)[0], original.parts(out)[0]))
        self._pass_streams(weights)
        for target in original.targets(layer_unit(layer)):
            if target.name in self.candidates:
                self._start_matrix(target, weights, x, inputs)
        for target in original.targets(layer_unit(layer).of_expert(0)):
            if target.name in self.candidates:
                self._start_experts(target, weights, x)
        self.streams.append(_Stream(str(layer), None, x))
        return out

    def _pass_streams(self, weights: Weights) -> None:
        """Run the streams through a layer; each expert is read once, for all streams."""
        if weights.kind.n_experts and self.streams:
            joined = np.concatenate([stream.x for stream in self.streams])
            passed = np.split(self.original.layer(weights, joined), len(self.streams))
            for stream, x in zip(self.streams, passed, strict=True):
                stream.x = x
                self._advance()
            return
        for stream in self.streams:
            stream.x = self.original.layer(weights, stream.x)
            self._advance()

    def _start_experts(self, first: Target, weights: Weights, x: Float32Array) -> None:
        """Measure a matrix of all experts, rounded together, as `_start_matrix` does for one
        matrix.

        The output errors are those of the weights, without the inputs of each expert.
        """
        kind, read = first.rule.target, weights.expert
        assert kind is not None
        assert read is not None
        types = _types(self.candidates[first.name])
        lost = dict.fromkeys(types, 0.0)
        energy = 0.0
        for number in range(weights.kind.n_experts):
            exact = read(number)[kind]
            energy += _energy(exact)
            for dtype in types:
                lost[dtype] += _energy(self._round(first.name, dtype, exact) - exact)
        for dtype in _measured_types(types):

            def rounded(number: int, dtype: Dtype = dtype) -> Weights:
                own = read(number)
                return own.changed({kind: self._round(first.name, dtype, own[kind])})

            changed = self.original.layer(weights.changed(expert=rounded), x)
            self.streams.append(_Stream(first.name, dtype, changed))
            self._advance()
        self.errors[first.name] = {t: lost[t] / energy if energy else 0.0 for t in types}

    def _start_matrix(
        self,
        target: Target,
        weights: Weights,
        x: Float32Array,
        inputs: Mapping[TensorType, list[Float32Array]],
    ) -> None:
        """Measure the output errors of a matrix's types, and start the streams of some."""
        kind = target.rule.target
        assert kind is not None  # learned positions are in no layer
        exact = weights[kind]
        types = _types(self.candidates[target.name])
        energy = sum(_energy(values @ exact.T) for values in inputs[kind])
        by_type: dict[Dtype, float] = {}
        for dtype in types:
            rounded = self._round(target.name, dtype, exact)
            lost = sum(_energy(values @ (rounded - exact).T) for values in inputs[kind])
            by_type[dtype] = lost / energy if energy else 0.0
            if dtype in _measured_types(types):
                changed = self.original.layer(weights.changed({kind: rounded}), x)
                self.streams.append(_Stream(target.name, dtype, changed))
                self._advance()
        self.errors[target.name] = by_type

    def _start_heads(self, x: Float32Array) -> None:
        for unit, name, dtype in self.jobs:
            if unit.role == Role.FINAL:
                (share,) = (t.share for t in self.original.targets(unit) if t.name == name)
                part = range(share.first, share.first + share.n)
                self.streams.append(_Stream(name, dtype, x, dtype, part))

    def _round(self, name: str, dtype: Dtype, rows: Float32Array) -> Float32Array:
        try:
            return round_matrix(dtype, rows)
        except UnrepresentableError as error:
            raise QsfConversionError(
                f"tensor {name} as {layout.dtype_name(dtype)}: {error.reason}"
            ) from error

    # ---- the predictions ----

    def _divergences(self, x: Float32Array) -> NDArray[np.float64]:
        """Return the mean KL of every stream. The head is read twice, a range of rows at a time.

        With z the logits of the original and y those of a stream, the KL is E_p[z - y] - log sum
        exp z + log sum exp y, p being the softmax of z; the sums go over the ranges.
        """
        original = self.original
        weights = original.vectors(FINAL_UNIT)
        base = original.final_norm(weights, x)
        for stream in self.streams:
            stream.x = original.final_norm(weights, stream.x)
        log_sum = _LogSum(base.shape[:2])
        for start, rows in original.head_rows():
            for i in range(len(base)):
                log_sum.add(i, original.finish_logits(weights, base[i] @ rows.T, start))
        log_sums = [_LogSum(base.shape[:2]) for _ in self.streams]
        gaps = np.zeros((len(self.streams), *base.shape[:2]))
        for start, rows in original.head_rows():
            types = [stream.head if start in stream.head_rows else None for stream in self.streams]
            heads = {
                dtype: rows if dtype is None else self._round(_HEAD, dtype, rows)
                for dtype in dict.fromkeys(types)
            }
            for i in range(len(base)):
                z = original.finish_logits(weights, base[i] @ rows.T, start)
                p = np.exp(z - log_sum.value(i)[:, None].astype(np.float32))
                for k, stream in enumerate(self.streams):
                    products = stream.x[i] @ heads[types[k]].T
                    y = original.finish_logits(weights, products, start)
                    log_sums[k].add(i, y)
                    gaps[k, i] += np.einsum("tv,tv->t", p, z - y, dtype=np.float64)
        for _ in self.streams:
            self._advance()
        total = log_sum.all()
        return np.array(
            [np.mean(gaps[k] - total + log_sums[k].all()) for k in range(len(self.streams))]
        )

    def _result(self, divergences: Sequence[float]) -> Sensitivity:
        kl: dict[str, dict[Dtype, float]] = {}
        skipped: dict[int, float] = {}
        for stream, value in zip(self.streams, divergences, strict=True):
            if stream.dtype is None:
                skipped[int(stream.name)] = value
            else:
                kl.setdefault(stream.name, {})[stream.dtype] = value
        measured = {name: tuple(by_type) for name, by_type in kl.items()}
        for name, errors in self.errors.items():
            kl[name] = _scaled(kl[name], errors)
        return Sensitivity(
            kl=kl,
            output_error=self.errors,
            measured=measured,
            layers=tuple(
                LayerImportance(layer, cosine, skipped[layer])
                for layer, cosine in enumerate(self.cosines)
            ),
            n_tokens=self.samples.size,
        )


class Divergence:
    """Compares the predictions of two models, from logits of one part of the vocabulary at a time.

    KL(p || q) needs the sum of exp(logit) of both models and the sum of p * (difference of the
    logits). All three are accumulated over the parts, relative to the largest logit so far, so
    memory never holds a whole row of logits.
    """

    def __init__(self, tokens: NDArray[np.integer]) -> None:
        self._next = tokens[:, 1:]
        shape = self._next.shape
        self._largest = np.full((2, *shape), -np.inf)
        self._sums = np.zeros((2, *shape))  # of exp(logit - largest)
        self._product = np.zeros(shape)  # of exp(original - its largest) * (original - changed)
        self._chosen = np.zeros((2, *shape))  # logits of the actual token
        self._likeliest = np.zeros((2, *shape), np.int64)

    def add(self, sample: int, start: int, original: Float32Array, changed: Float32Array) -> None:
        wanted = self._next[sample]
        at = np.flatnonzero((wanted >= start) & (wanted < start + original.shape[1]))
        models: tuple[NDArray[np.floating], ...] = (original[:-1].astype(np.float64), changed[:-1])
        for i, logits in enumerate(models):
            best = logits.argmax(axis=1)
            largest = logits[np.arange(len(logits)), best]
            before = self._largest[i, sample]
            self._likeliest[i, sample][largest > before] = start + best[largest > before]
            now = np.maximum(before, largest)
            shrink = np.exp(before - now)
            grown = np.exp(logits - now[:, None])
            self._sums[i, sample] = self._sums[i, sample] * shrink + grown.sum(axis=1)
            self._largest[i, sample] = now
            self._chosen[i, sample][at] = logits[at, wanted[at] - start]
            if i == 0:
                gained = (grown * (original[:-1] - changed[:-1])).sum(axis=1)
                self._product[sample] = self._product[sample] * shrink + gained

    @property
    def n_tokens(self) -> int:
        return self._next.size

    @property
    def kl(self) -> NDArray[np.float64]:
        """KL(original || changed) in nats, [n_samples, n_tokens - 1]."""
        log_sums = np.log(self._sums) + self._largest
        kl: NDArray[np.float64] = self._product / self._sums[0] - log_sums[0] + log_sums[1]
        return kl

    @property
    def perplexities(self) -> tuple[float, float]:
        losses = np.log(self._sums) + self._largest - self._chosen
        original, changed = np.exp(losses.mean(axis=(1, 2)))
        return float(original), float(changed)

    @property
    def top1_agreement(self) -> float:
        return float((self._likeliest[0] == self._likeliest[1]).mean())


class _LogSum:
    """Accumulates log sum exp over ranges of logits, for [n_samples, n_tokens]."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._most = np.full(shape, -np.inf)
        self._sum = np.zeros(shape)

    def add(self, sample: int, logits: Float32Array) -> None:
        before = self._most[sample]
        most = np.maximum(before, logits.max(axis=1))
        shifted = np.exp(logits - most[:, None].astype(np.float32))
        with np.errstate(invalid="ignore"):
            kept = np.where(self._sum[sample] > 0, np.exp(before - most), 0.0)
        self._sum[sample] = self._sum[sample] * kept + shifted.sum(axis=1, dtype=np.float64)
        self._most[sample] = most

    def value(self, sample: int) -> NDArray[np.float64]:
        return np.asarray(self._most[sample] + np.log(self._sum[sample]))

    def all(self) -> NDArray[np.float64]:
        return np.asarray(self._most + np.log(self._sum))


def _matrices(original: Original) -> list[Target]:
    """All matrices; the first expert of a layer represents all its experts."""
    targets: list[Target] = []
    for unit in [OWN_TABLE_UNIT, *layout.pass_units(original.header.n_layers)]:
        targets += original.targets(unit)
        if unit.role == Role.LAYER:
            targets += original.targets(unit.of_expert(0))
    return [target for target in targets if target.has_choice]


def _jobs(original: Original, candidates: Mapping[str, Collection[Dtype]]) -> list[_Job]:
    jobs = []
    for target in _matrices(original):
        types = _types(candidates.get(target.name, ()))
        if target.is_of_layer:
            types = _measured_types(types)
        jobs += [(target.unit, target.name, dtype) for dtype in types]
    return jobs


def _types(types: Collection[Dtype]) -> tuple[Dtype, ...]:
    """Each type once, the smallest first."""
    return tuple(sorted(set(types), key=_tile_bytes))


def _tile_bytes(dtype: Dtype) -> int:
    return TILE_DTYPES[dtype].itemsize


def _measured_types(types: tuple[Dtype, ...]) -> tuple[Dtype, ...]:
    return tuple(dtype for dtype in types if dtype in MEASURED) or types


def _scaled(measured: Mapping[Dtype, float], errors: Mapping[Dtype, float]) -> dict[Dtype, float]:
    """The costs of all types: measured, or scaled from the measured type next in size."""
    costs = {}
    for dtype in errors:
        nearest = min(measured, key=lambda m: abs(_tile_bytes(m) - _tile_bytes(dtype)))
        if dtype in measured:
            costs[dtype] = measured[dtype]
        elif errors[nearest] > 0:
            costs[dtype] = measured[nearest] * errors[dtype] / errors[nearest]
        else:  # a matrix of zeros: nothing was lost
            costs[dtype] = 0.0
    return costs


def _energy(values: Float32Array) -> float:
    return float(np.sum(values * values, dtype=np.float64))


def _mean_cosine(x: Float32Array, y: Float32Array) -> float:
    """Mean over tokens; of [n_samples, n_tokens, dim]."""
    products = np.einsum("wtd,wtd->wt", x, y, dtype=np.float64)
    norms = np.sqrt(np.sum(x * x, axis=-1, dtype=np.float64))
    norms *= np.sqrt(np.sum(y * y, axis=-1, dtype=np.float64))
    return float(np.mean(products / np.where(norms == 0, 1.0, norms)))
