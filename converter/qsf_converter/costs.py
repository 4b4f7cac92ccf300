"""Measures the cost of cheap arithmetic during a conversion, and chooses the file's defaults.

The KV cache gets 8 bits, or f16 if these cost too much. 4-bit values alone cost small models more
than half a percent (docs/quality.md). Activations get 8 bits; a model with weights of a GGUF file
gets 16 if 8 cost too much. Weights that this converter rounds lose more than 8-bit activations do.

Cheap arithmetic adds noise to the logits. A few tokens tell its size, since each has as many
logits as the vocabulary, so the measurement stops as soon as the verdict is clear.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from qsf.errors import QsfError, QsfFormatError, QsfIOError
from qsf.evaluate.evaluation import encode_text, log_probabilities
from qsf.file.reader import Reader
from qsf.file.writer import Writer
from qsf.kv import parse_kv_type
from qsf.model import Model
from qsf_converter.calibrate.texts import bundled_text

_KV_TYPES: Final = ("8bit", "f16")  # the measured option, and the reference
_ACT_BITS: Final = (8, 16)
_MOST_CHANGE_PERCENT: Final = 0.5  # change of perplexity, plus two standard errors
# Least share of positions at which both predict the same token. Of 20 greedy answers of 16 tokens,
# SmolLM2-135M kept 16 with a KV cache of 8 bits (97.1 %) and with activations of 8 bits (97.3 %),
# Qwen2.5-Coder-0.5B keeps 20 (98.2 %, 98.9 %).
_LEAST_KV_AGREEMENT: Final = 0.975
_LEAST_ACT_AGREEMENT: Final = 0.98
# Share of positions at which noise of size 1 changes the likeliest token: 0.25 to 0.32 in models of
# 0.1B to 0.5B, for noise of 0.03 to 0.1 (bench/LOG-quantisation.md).
_FLIPS_OF_NOISE: Final = 0.28
# Tokens of each sample. All but the first are for verdicts that the samples before leave open.
_SAMPLES: Final = (32, 48, 80, 80)
# Not scored: the first tokens of a text have activations of other sizes, and each text has one.
_N_FIRST: Final = 16
_CLEAR_ERRORS: Final = 3  # standard errors between a clear noise and its limit
# Memory of the whole process: measuring a large model must not need the model's size.
_BUDGET_MB: Final = 180
_MARGIN_MB: Final = 32  # above the least memory of the model, so that fewer layers are streamed
# The limit counts weights, not time: a file must not depend on the machine.
_MOST_WORK: Final = 4e12  # tokens x weights

Costs = dict[str, dict[str, Any]]  # the records of META, by name


@dataclass(frozen=True, slots=True)
class Noise:
    """The difference of two models' logits at each scored position.

    ``sizes`` are root mean squares over the vocabulary; ``lost`` is the Kullback-Leibler
    divergence in nats, the expected change of the log-likelihood.
    """

    sizes: NDArray[np.float64]
    lost: NDArray[np.float64]

    @classmethod
    def between(cls, rows: NDArray[np.float32], reference: NDArray[np.float32]) -> Noise:
        """Compare logits [n_tokens, n_vocab], a row at a time to save memory."""
        sizes, lost = [], []
        for ours, theirs in zip(rows, reference, strict=True):
            ours_log, theirs_log = (log_probabilities(row[None])[0] for row in (ours, theirs))
            change = theirs_log - ours_log
            sizes.append(float(change.std()))
            lost.append(max(0.0, float(np.exp(theirs_log) @ change)))
        return cls(np.array(sizes), np.array(lost))

    def without(self, other: Noise) -> Noise:
        """Return the rest if this is the sum of ``other`` and of independent noise."""
        squares = np.square(self.sizes) - np.square(other.sizes)
        return Noise(np.sqrt(np.maximum(squares, 0)), np.maximum(self.lost - other.lost, 0))

    def with_more(self, other: Noise) -> Noise:
        return Noise(
            np.concatenate((self.sizes, other.sizes)), np.concatenate((self.lost, other.lost))
        )

    @property
    def agreement(self) -> float:
        return 1 - min(1.0, _FLIPS_OF_NOISE * float(self.sizes.mean()))

    @property
    def change_percent(self) -> tuple[float, float]:
        """The estimated change of perplexity, and its standard error."""
        return 100 * float(self.lost.mean()), 100 * _error_of(self.lost)

    def is_cheap(self, least_agreement: float) -> bool:
        """Return whether the noise is within both limits."""
        change, error = self.change_percent
        return change + 2 * error <= _MOST_CHANGE_PERCENT and self.agreement >= least_agreement

    def is_clear(self, least_agreement: float) -> bool:
        """Return whether more tokens would hardly change the verdict."""
        change, error = self.change_percent
        distance = abs(self.agreement - least_agreement)
        return (
            distance > _CLEAR_ERRORS * _FLIPS_OF_NOISE * _error_of(self.sizes)
            and abs(_MOST_CHANGE_PERCENT - change) > _CLEAR_ERRORS * error
        )

    def meta(self, name: str, options: tuple[str | int, str | int], least: float) -> dict[str, Any]:
        """Return the record for META; ``options`` are the measured one and the reference."""
        # Logarithms of C libraries differ in the last bits; files do not.
        change, error = (round(value, 6) for value in self.change_percent)
        return {
            name: options[0] if self.is_cheap(least) else options[1],
            "measured": options[0],
            "tokens": len(self.sizes),
            "change_percent": change,
            "change_error": error,
            "agreement": round(self.agreement, 6),
            "text": "bundled",
        }


def _error_of(values: NDArray[np.float64]) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values)))


def n_measured_tokens(n_weights: int) -> int:
    """Return the most tokens to measure a model with; 0: the model is too large."""
    n_tokens = int(min(sum(_SAMPLES), _MOST_WORK / n_weights))
    return n_tokens if n_tokens >= _SAMPLES[0] else 0


def measure_costs(
    writer: Writer,
    n_weights: int,
    n_threads: int | None,
    begin: Callable[[], Callable[[int, int], None]],
    *,
    is_kept: bool,
    is_wanted: bool,
) -> Costs:
    """Measure the model of a complete file, and write its defaults into ``ARCH``.

    Args:
        writer: of a file that lacks META only.
        n_weights: weights that a token uses.
        n_threads: of the evaluation; None: one per core.
        begin: called before anything is measured; returns the progress function, which is called
            with the tokens done and all tokens of the samples so far.
        is_kept: the weights are those of a GGUF file.
        is_wanted: if not, the file gets f16 and, if ``is_kept``, 16 bits.

    Returns: the records of META, by name; none if the model is too large, or cannot be evaluated.

    Raises:
        QsfIOError, QsfFormatError: the file that was written cannot be read.
    """
    writer.change_arch(act_bits=_ACT_BITS[is_kept])
    if not is_wanted:
        writer.change_arch(kv_key_bits=16, kv_value_bits=16)
        return {}
    most_tokens = n_measured_tokens(n_weights)
    if not most_tokens:
        return {}
    try:
        kv, acts = _Trial(writer, is_kept, most_tokens, n_threads, begin()).run()
    except (QsfIOError, QsfFormatError):
        raise
    except QsfError:  # the tokenizer cannot encode the text, or the context is too short
        return {}
    records: Costs = {}
    if acts is not None:
        records["activations"] = acts.meta("bits", _ACT_BITS, _LEAST_ACT_AGREEMENT)
        writer.change_arch(act_bits=records["activations"]["bits"])
    if kv is not None:
        records["kv_cache"] = kv.meta("type", _KV_TYPES, _LEAST_KV_AGREEMENT)
        key_bits, value_bits = parse_kv_type(records["kv_cache"]["type"])
        writer.change_arch(kv_key_bits=key_bits, kv_value_bits=value_bits)
    return records


@dataclass(slots=True)
class _Trial:
    writer: Writer
    is_kept: bool
    most_tokens: int
    n_threads: int | None
    progress: Callable[[int, int], None]
    n_done: int = 0
    n_planned: int = 0

    def run(self) -> tuple[Noise | None, Noise | None]:
        """Return the noise of the KV cache and of activations; None: not measured.

        Both are measured together first: if their sum is cheap, so is each.
        """
        kv: Noise | None = None
        acts: Noise | None = None
        at = 0
        for n_tokens in _SAMPLES:
            if at + n_tokens > self.most_tokens:
                break
            self.n_planned += 2 * n_tokens
            reference = self._logits(at, n_tokens, _KV_TYPES[1])
            both = Noise.between(self._cheap(at, n_tokens), reference)
            rest = both
            if self.is_kept and not both.is_cheap(_LEAST_ACT_AGREEMENT):
                self.n_planned += n_tokens
                both = Noise.between(self._logits(at, n_tokens, _KV_TYPES[0]), reference)
                rest = rest.without(both)
            kv = both if kv is None else kv.with_more(both)
            if self.is_kept:
                acts = rest if acts is None else acts.with_more(rest)
            at += n_tokens
            if kv.is_clear(_LEAST_KV_AGREEMENT) and (
                acts is None or acts.is_clear(_LEAST_ACT_AGREEMENT)
            ):
                break
        return kv, acts

    def _cheap(self, start: int, n_tokens: int) -> NDArray[np.float32]:
        if self.is_kept:
            self.writer.change_arch(act_bits=_ACT_BITS[0])
        try:
            return self._logits(start, n_tokens, _KV_TYPES[0])
        finally:
            if self.is_kept:
                self.writer.change_arch(act_bits=_ACT_BITS[1])

    def _logits(self, start: int, n_tokens: int, kv_type: str) -> NDArray[np.float32]:
        with self.writer.completed() as path:
            with Reader(path) as reader:
                n_vocab = reader.header.n_vocab
            reserve_mb = 16 + -(-3 * 4 * n_tokens * n_vocab >> 20)
            options: dict[str, Any] = {
                "kv_type": kv_type, "draft": "off",
                "max_seq_len": n_tokens, "reserve_mb": reserve_mb,
            }  # fmt: skip
            least = Model.plan(path, ram_budget=1, **options).min_budget_bytes
            budget_mb = max(_BUDGET_MB, (least >> 20) + _MARGIN_MB)
            with Model(path, ram_budget=budget_mb, threads=self.n_threads, **options) as model:
                ids = encode_text(model.tokenizer, bundled_text(), start + n_tokens)
                rows = np.array(model.logits(ids[start:], first_row=_N_FIRST))
        self.n_done += n_tokens
        self.progress(self.n_done, max(self.n_done, self.n_planned))
        return rows
