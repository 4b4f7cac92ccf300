"""How well a model predicts a text, and how far it is from another: perplexity and KL divergence.

A text is cut into windows. Each token of a window is predicted from those before it, and the
logits are compared with the actual token and with the logits of a reference. Memory holds one
block of rows at a time; sums are float64.

Which tokens are scored is the protocol; only figures of one protocol and context can be compared:

- ``windows``: the text in windows of ctx tokens, side by side; every token but the first of each
  is scored (Frantar et al., GPTQ, 2210.17323; Lin et al., AWQ, 2306.00978).
- ``llama.cpp``: the same windows, the first token of each replaced by BOS where the tokenizer adds
  one; tokens from ctx / 2 + 1 on are scored (llama-perplexity).
- ``sliding``: windows of ctx tokens, each stride tokens after the last; scored are the tokens that
  the window before did not reach (HuggingFace, "Perplexity of fixed-length models").
- ``repeated``: the windows of ``windows``, but the last 64 tokens of each repeat 64 earlier ones
  of the same window: the first 64 in the first window, later ones in the next, at eight depths;
  the last 48 tokens are scored. It measures how well a model recalls what it has read.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from qsf.errors import QsfArgumentError, QsfNumericError
from qsf.model import Model

if TYPE_CHECKING:
    from qsf.kv import KvPolicy
    from qsf.text.tokenizer import Tokenizer


Tokens = NDArray[np.int64]

PROTOCOLS: Final = ("windows", "llama.cpp", "sliding", "repeated")
DEFAULT_PROTOCOL: Final = "windows"

_REPEATED_TOKENS: Final = 64
_CUE_TOKENS: Final = 16  # of the repeated tokens: not scored
_DEPTHS: Final = 8


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that a model reads from position 0; logits row i predicts ``tokens[i + 1]``.

    Scored are the rows from ``first_row`` to the last but one: the last token is only predicted,
    so that no model need evaluate it. ``depth``: with ``repeated``, the position of the passage
    that the end repeats.
    """

    tokens: Tokens
    first_row: int
    depth: int | None = None

    @property
    def n_rows(self) -> int:
        return len(self.tokens) - 1 - self.first_row

    @property
    def scored(self) -> Tokens:
        return self.tokens[self.first_row + 1 :]

    def blocks(self, max_rows: int) -> Iterator[tuple[int, int]]:
        """Yield the scored rows as (first, end), at most ``max_rows`` at once."""
        end = len(self.tokens) - 1
        for first in range(self.first_row, end, max_rows):
            yield first, min(first + max_rows, end)


def cut_windows(
    tokens: Sequence[int] | Tokens,
    protocol: str,
    ctx_tokens: int,
    *,
    stride_tokens: int | None = None,
    bos_id: int | None = None,
) -> list[Window]:
    """Return the windows of a protocol; see this module.

    ``bos_id`` is what ``llama.cpp`` puts in place of the first token of each window; None: the
    tokenizer adds none. A remainder shorter than a window is scored with ``sliding`` only; but
    with ``windows`` a text shorter than a window is one window.

    Raises:
        QsfArgumentError: the protocol is unknown or cannot have a stride, a number is out of
            range, or the text is too short.
    """
    stride = checked_stride(protocol, ctx_tokens, stride_tokens)
    ids = np.asarray(tokens, np.int64)
    n_tokens = len(ids)
    if n_tokens < 2:
        raise QsfArgumentError(
            f"the text has {n_tokens} token{'' if n_tokens == 1 else 's'}: at least 2 are needed, "
            "one to predict from and one to be predicted"
        )
    if stride is not None:
        return list(_sliding_windows(ids, ctx_tokens, stride))
    starts = range(0, n_tokens - ctx_tokens + 1, ctx_tokens)
    if protocol == "repeated":
        return _repeated_windows(ids, ctx_tokens, starts)
    if protocol == "windows":
        if not starts:
            return [Window(ids, 0)]
        return [Window(ids[start : start + ctx_tokens], 0) for start in starts]
    if not starts:
        raise QsfArgumentError(
            f"the text has {n_tokens} tokens, less than one window of {ctx_tokens}: protocol "
            "llama.cpp needs a shorter context or a longer text"
        )
    windows = [Window(ids[start : start + ctx_tokens].copy(), ctx_tokens // 2) for start in starts]
    if bos_id is not None:
        for window in windows:
            window.tokens[0] = bos_id
    return windows


def _repeated_windows(ids: Tokens, ctx_tokens: int, starts: Sequence[int]) -> list[Window]:
    if not starts:
        raise QsfArgumentError(f"the text has {len(ids)} tokens, less than one of {ctx_tokens}")
    first_row = ctx_tokens - _REPEATED_TOKENS + _CUE_TOKENS - 1
    windows = []
    for i, start in enumerate(starts):
        tokens = ids[start : start + ctx_tokens].copy()
        depth = (ctx_tokens - 2 * _REPEATED_TOKENS) * (i % _DEPTHS) // (_DEPTHS - 1)
        tokens[-_REPEATED_TOKENS:] = tokens[depth : depth + _REPEATED_TOKENS]
        windows.append(Window(tokens, first_row, depth))
    return windows


def _sliding_windows(ids: Tokens, ctx_tokens: int, stride: int) -> Iterator[Window]:
    n_reached = 0
    for start in range(0, len(ids), stride):
        end = min(start + ctx_tokens, len(ids))
        # No token precedes the first token of a window, so it is not predicted.
        first_scored = max(n_reached - start, 1)
        if start + first_scored < end:
            yield Window(ids[start:end], first_scored - 1)
        n_reached = end
        if end == len(ids):
            return


def checked_stride(protocol: str, ctx_tokens: int, stride_tokens: int | None) -> int | None:
    if protocol not in PROTOCOLS:
        raise QsfArgumentError(
            f"there is no protocol {protocol!r}: {', '.join(PROTOCOLS)} are known"
        )
    least = {"llama.cpp": 3, "repeated": 2 * _REPEATED_TOKENS}.get(protocol, 2)
    if ctx_tokens < least:
        raise QsfArgumentError(
            f"the context must be at least {least} tokens with protocol {protocol}, not "
            f"{ctx_tokens}"
        )
    if protocol != "sliding":
        if stride_tokens is not None:
            raise QsfArgumentError(
                f"a stride of {stride_tokens} is for protocol sliding only: {protocol} has windows "
                "side by side"
            )
        return None
    stride = ctx_tokens // 2 if stride_tokens is None else stride_tokens
    if not 1 <= stride <= ctx_tokens:
        raise QsfArgumentError(
            f"the stride must be from 1 to the context's {ctx_tokens} tokens, not {stride}"
        )
    return stride


Logits = NDArray[np.float32]
Floats = NDArray[np.float64]

DEFAULT_CTX_TOKENS: Final = 2048

_BLOCK_BYTES: Final = 128 << 20  # of logits at once
_BLOCK_ROWS: Final = 256  # as many as the engine evaluates at once
_COMPARED_BYTES: Final = 4 << 20  # of float64 at once, so that it stays in the cache
# Memory for each byte of a text: 5.5 to 28 were measured, 56 is an estimate for ids of a byte each.
_ENCODING_BYTES: Final = 24
_IDS_BYTES: Final = 64
_PLACES: Final = 16  # parts of a window with figures of their own
_SPARE_BYTES: Final = 8 << 20  # scores, tokens, windows, libraries loaded late


class LogitSource(Protocol):
    """A model that predicts tokens: a .qsf file, a checkpoint, or an object of the caller."""

    @property
    def n_vocab(self) -> int:
        """Tokens in the vocabulary."""

    @property
    def max_tokens(self) -> int:
        """The longest window that the model accepts, in tokens."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None: the model has none, so only token ids can be evaluated."""

    def logits(
        self, windows: Sequence[Window], max_rows: int, advance: Callable[[float], None]
    ) -> Iterator[Logits]:
        """Yield logits or log-probabilities, [n_rows, n_vocab] of ``Window.blocks(max_rows)``.

        Windows come in order. An array is valid until the next one is requested. ``advance`` gets
        the number of tokens evaluated since its last call: in all, the sum of ``len(tokens) - 1``.
        """


class ModelLogits:
    def __init__(self, model: Model) -> None:
        """Use an open model. The caller closes it."""
        self._model = model

    @property
    def n_vocab(self) -> int:
        return self._model.info.n_vocab

    @property
    def max_tokens(self) -> int:
        """The context that the model was opened with."""
        return self._model.info.plan.ctx_tokens

    @property
    def tokenizer(self) -> Tokenizer | None:
        try:
            return self._model.tokenizer
        except QsfArgumentError:
            return None

    def logits(
        self, windows: Sequence[Window], max_rows: int, advance: Callable[[float], None]
    ) -> Iterator[Logits]:
        """See ``LogitSource``. Every block is written into the same array."""
        n_rows = min(max_rows, max((window.n_rows for window in windows), default=0))
        out = np.empty((n_rows, self.n_vocab), np.float32)
        for window in windows:
            tokens = window.tokens.tolist()
            n_done = 0
            for first, end in window.blocks(max_rows):
                rows = self._model.logits(tokens[:end], first_row=first, out=out)
                advance(end - n_done)
                n_done = end
                yield rows


@dataclass(frozen=True, slots=True)
class Place:
    """What was measured at one place of the windows, compared with a reference.

    Attributes:
        position: the first position of the place, a 16th of a window; with ``repeated`` that of
            the first passage.
        tokens: how many were scored there.
        perplexity: of these tokens.
        against_perplexity: the reference's.
        kl_mean: mean of KL(reference || model) in nats.
    """

    position: int
    tokens: int
    perplexity: float
    against_perplexity: float
    kl_mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The figures of an evaluation. None: not measured, for lack of a reference or tokenizer.

    Attributes:
        protocol: one of ``PROTOCOLS``.
        ctx_tokens: tokens of a window.
        stride_tokens: from one window to the next; with ``sliding`` only.
        windows: how many there were.
        tokens: how many were scored: all means are over these.
        text_tokens: how many the text has, BOS included; with ``max_tokens`` at most that.
        scored_bytes: bytes that the scored tokens stand for.
        perplexity: exp of the mean negative log-likelihood in nats.
        perplexity_error: its standard error, as if the tokens were independent.
        bits_per_byte: bits of information per byte of scored text.
        against_perplexity: the reference's perplexity of the same tokens.
        against_perplexity_error: its standard error.
        perplexity_change_percent: how much larger ours is, in % of the reference's.
        perplexity_change_error: standard error of the change, from paired tokens.
        kl_mean: mean of KL(reference || model) in nats.
        kl_mean_error: its standard error.
        kl_median: median over the scored positions.
        kl_p99: 99th percentile.
        kl_max: maximum.
        top1_agreement: share (0 to 1) of positions at which both have the same most probable token.
        top1_agreement_error: its standard error.
        seconds: total time, the reference included.
        tokens_per_second: tokens that the model evaluated, per second of its own time.
        token_nll: [tokens] negative log-likelihood of each scored token in nats.
        top_tokens: [tokens] the most probable token at each scored position.
        places: the comparison by position, ascending; empty without a reference.
    """

    protocol: str
    ctx_tokens: int
    stride_tokens: int | None
    windows: int
    tokens: int
    text_tokens: int
    scored_bytes: int | None
    perplexity: float
    perplexity_error: float
    bits_per_byte: float | None
    against_perplexity: float | None = None
    against_perplexity_error: float | None = None
    perplexity_change_percent: float | None = None
    perplexity_change_error: float | None = None
    kl_mean: float | None = None
    kl_mean_error: float | None = None
    kl_median: float | None = None
    kl_p99: float | None = None
    kl_max: float | None = None
    top1_agreement: float | None = None
    top1_agreement_error: float | None = None
    seconds: float
    tokens_per_second: float
    token_nll: Floats = field(repr=False, compare=False)
    top_tokens: Tokens = field(repr=False, compare=False)
    places: tuple[Place, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the figures by name; NaN and infinity become None."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
            if name not in ("token_nll", "top_tokens")
        }


def evaluate(
    model: Model | LogitSource,
    text: str | Sequence[int],
    *,
    ctx_tokens: int | None = None,
    protocol: str = DEFAULT_PROTOCOL,
    stride_tokens: int | None = None,
    max_tokens: int | None = None,
    against: Model | LogitSource | None = None,
    progress: Callable[[float, float], None] | None = None,
) -> Evaluation:
    """Measure how well ``model`` predicts a text, and how far it is from ``against``.

    Args:
        model: an open .qsf file, or any source of logits.
        text: the text, which is encoded as the model's tokenizer does it, BOS included where that
            adds one, or its tokens, which are used as they are.
        ctx_tokens: tokens of a window; None: the model's longest, at most 2048.
        protocol: one of ``PROTOCOLS``.
        stride_tokens: for ``sliding``, 1 .. ctx_tokens; None: half of ctx_tokens.
        max_tokens: evaluate only the first so many tokens of the text.
        against: the reference, compared position by position; None: no comparison.
        progress: called with tokens evaluated and to be evaluated, those of ``against`` included.

    Raises:
        QsfArgumentError: an argument is out of range, the text is too short, there is no
            tokenizer, or the two models do not have the same vocabulary.
        QsfNumericError: a logit is NaN or infinite; the text says where.
    """
    started = time.perf_counter()
    source = as_source(model)
    reference = None if against is None else as_source(against)
    if reference is not None and reference.n_vocab != source.n_vocab:
        raise QsfArgumentError(
            f"the vocabularies differ: {source.n_vocab} tokens here, {reference.n_vocab} in what "
            "it is compared with"
        )
    ctx_tokens = _checked_ctx(ctx_tokens, source, reference)
    tokens = _tokens_of(text, source, max_tokens)
    if reference is not None and isinstance(text, str):
        _check_same_tokens(text, tokens, source, reference, max_tokens)
    windows = cut_windows(
        tokens, protocol, ctx_tokens, stride_tokens=stride_tokens, bos_id=_bos_id(source)
    )
    scores = _Scores()
    model_seconds = _score(source, reference, windows, scores, progress)
    return _summary(
        scores,
        windows,
        _scored_bytes(windows, source.tokenizer),
        protocol=protocol,
        ctx_tokens=ctx_tokens,
        stride_tokens=checked_stride(protocol, ctx_tokens, stride_tokens),
        text_tokens=len(tokens),
        seconds=time.perf_counter() - started,
        tokens_per_second=sum(len(w.tokens) - 1 for w in windows) / max(model_seconds, 1e-9),
    )


def as_source(model: Model | LogitSource) -> LogitSource:
    return ModelLogits(model) if isinstance(model, Model) else model


def judged_kv_type(kv_type: str | None, *, is_exact: bool) -> str:
    """Return the type of the KV cache: the given one, or else the most exact.

    The most exact type leaves only errors of the weights. Raises QsfArgumentError if exact
    arithmetic lacks the given type.
    """
    best = "f32" if is_exact else "f16"
    if is_exact and kv_type not in (None, best):
        raise QsfArgumentError(
            f"kv_type {kv_type} cannot be had with exact arithmetic, which keeps f32",
            argument="kv_type",
        )
    return kv_type or best


def default_ctx_tokens(max_tokens: int) -> int:
    return min(max_tokens, DEFAULT_CTX_TOKENS)


# ---- the tokens ----


def _checked_ctx(ctx_tokens: int | None, source: LogitSource, reference: LogitSource | None) -> int:
    limit = source.max_tokens
    if ctx_tokens is None:
        ctx_tokens = default_ctx_tokens(limit)
    elif ctx_tokens > limit:
        raise QsfArgumentError(
            f"a context of {ctx_tokens} tokens is longer than the model's, which is {limit}"
        )
    if reference is not None and ctx_tokens > reference.max_tokens:
        raise QsfArgumentError(
            f"a context of {ctx_tokens} tokens is longer than what it is compared with takes, "
            f"which is {reference.max_tokens}"
        )
    return ctx_tokens


def encode_text(tokenizer: Tokenizer, text: str, max_tokens: int | None) -> list[int]:
    """Return the tokens of a text, at most ``max_tokens`` of them.

    BOS comes first if the tokenizer adds it; names of special tokens are ordinary text.
    Of a long text only the needed part is encoded, because encoding takes memory.
    """
    n_chars = len(text) if max_tokens is None else 8 * max_tokens
    while True:
        ids = tokenizer.encode(text[:n_chars], parse_special=False)
        # A cut inside the text may change the tokens near it, but never this many.
        if n_chars >= len(text) or (max_tokens is not None and len(ids) > max_tokens + 64):
            return ids[:max_tokens]
        n_chars *= 2


def _tokens_of(text: str | Sequence[int], source: LogitSource, max_tokens: int | None) -> Tokens:
    if max_tokens is not None and max_tokens < 2:
        raise QsfArgumentError(f"at least 2 tokens are needed, not {max_tokens}")
    if not isinstance(text, str):
        return _in_vocabulary(np.asarray(text, np.int64)[:max_tokens], source.n_vocab)
    if not text:
        raise QsfArgumentError("the text is empty: there is nothing to predict")
    if source.tokenizer is None:
        raise QsfArgumentError("the model has no tokenizer: give tokens instead of text")
    ids = np.asarray(encode_text(source.tokenizer, text, max_tokens), np.int64)
    return _in_vocabulary(ids, source.n_vocab)


def _in_vocabulary(ids: Tokens, n_vocab: int) -> Tokens:
    wrong = ids[(ids < 0) | (ids >= n_vocab)]
    if len(wrong):
        raise QsfArgumentError(
            f"the token {wrong[0]} is outside the vocabulary, which has {n_vocab}"
        )
    return ids


def _bos_id(source: LogitSource) -> int | None:
    """The token ids that the tokenizer puts before every text."""
    prefix = [] if source.tokenizer is None else source.tokenizer.encode("")
    return prefix[0] if prefix else None


def _check_same_tokens(
    text: str, tokens: Tokens, source: LogitSource, reference: LogitSource, max_tokens: int | None
) -> None:
    ours, theirs = source.tokenizer, reference.tokenizer
    if ours is None or theirs is None:
        return
    others = np.asarray(encode_text(theirs, text, max_tokens), np.int64)
    if len(others) == len(tokens) and (others == tokens).all():
        return
    n_common = min(len(others), len(tokens))
    differ = np.flatnonzero(others[:n_common] != tokens[:n_common])
    at = int(differ[0]) if len(differ) else n_common
    raise QsfArgumentError(
        f"the tokenizers differ ({ours.n_vocab} tokens here, {theirs.n_vocab} in what it is "
        f"compared with): the text has {len(tokens)} tokens here and {len(others)} there, and the "
        f"first that differs is number {at}"
    )


def _scored_bytes(windows: Sequence[Window], tokenizer: Tokenizer | None) -> int | None:
    if tokenizer is None:
        return None
    ids, counts = np.unique(np.concatenate([w.scored for w in windows]), return_counts=True)
    return sum(
        len(tokenizer.token_bytes(int(token_id))) * int(count)
        for token_id, count in zip(ids, counts, strict=True)
    )


# ---- scoring ----


@dataclass(slots=True)
class _Scores:
    """Figures of the scored positions so far: a list of arrays, one for each block of rows."""

    nll: list[Floats] = field(default_factory=list)  # nats
    top: list[Tokens] = field(default_factory=list)
    reference_nll: list[Floats] = field(default_factory=list)
    kl: list[Floats] = field(default_factory=list)
    is_same_top: list[NDArray[np.bool_]] = field(default_factory=list)


def block_rows(n_vocab: int) -> int:
    """Return how many rows of logits are computed at once."""
    return max(1, min(_BLOCK_ROWS, _BLOCK_BYTES // (4 * n_vocab)))


def working_bytes(n_vocab: int, n_sources: int, text: str, max_tokens: int | None) -> int:
    """Return an upper bound of the bytes that ``evaluate`` needs beside the models."""
    # Bytes that encode_text reads: 16 for a token, up to 128 if tokens are few and long.
    n_usual, n_most = (None, None) if max_tokens is None else (16 * max_tokens, 128 * max_tokens)
    ids_bytes = _IDS_BYTES * len(text[:n_usual].encode())
    encoding_bytes = max(ids_bytes, _ENCODING_BYTES * len(text[:n_most].encode()))
    logits_bytes = 4 * n_vocab * block_rows(n_vocab) * n_sources
    compared_bytes = 4 * max(_COMPARED_BYTES, 8 * n_vocab)
    return logits_bytes + compared_bytes + encoding_bytes + _SPARE_BYTES


def _score(
    source: LogitSource,
    reference: LogitSource | None,
    windows: Sequence[Window],
    scores: _Scores,
    progress: Callable[[float, float], None] | None,
) -> float:
    """Fill ``scores``; return the model's own seconds."""
    n_sources = 1 if reference is None else 2
    n_all = n_sources * sum(len(window.tokens) - 1 for window in windows)
    n_done = 0.0

    def advance(n_tokens: float) -> None:
        nonlocal n_done
        n_done += n_tokens
        if progress is not None:
            progress(min(n_done, n_all), n_all)

    max_rows = block_rows(source.n_vocab)
    theirs = None if reference is None else reference.logits(windows, max_rows, advance)
    ours = source.logits(windows, max_rows, advance)
    model_seconds = 0.0
    for window_idx, window in enumerate(windows):
        for first, end in window.blocks(max_rows):
            reference_rows = None if theirs is None else next(theirs)
            started = time.perf_counter()
            rows = next(ours)
            model_seconds += time.perf_counter() - started
            try:
                _score_block(scores, window.tokens[first + 1 : end + 1], rows, reference_rows)
            except QsfNumericError as error:
                raise QsfNumericError(
                    f"{error} in window {window_idx}, positions {first} to {end - 1}"
                ) from None
    return model_seconds


def _score_block(
    scores: _Scores, targets: Tokens, rows: Logits, reference_rows: Logits | None
) -> None:
    """Score rows [n_rows, n_vocab] that predict ``targets`` [n_rows]."""
    n_at_once = max(1, _COMPARED_BYTES // (8 * rows.shape[1]))
    for first in range(0, len(targets), n_at_once):
        part = slice(first, first + n_at_once)
        ours = log_probabilities(rows[part], "the model")
        each = np.arange(len(ours))
        scores.nll.append(-ours[each, targets[part]])
        scores.top.append(rows[part].argmax(axis=1))
        if reference_rows is None:
            continue
        theirs = log_probabilities(reference_rows[part], "what it is compared with")
        scores.reference_nll.append(-theirs[each, targets[part]])
        scores.is_same_top.append(scores.top[-1] == reference_rows[part].argmax(axis=1))
        np.subtract(theirs, ours, out=ours)
        np.exp(theirs, out=theirs)
        # Only rounding errors would be below 0.
        scores.kl.append(np.maximum(np.einsum("rv,rv->r", theirs, ours), 0))


def log_probabilities(rows: Logits, name: str = "the model") -> Floats:
    """Return the log-softmax of logits [n_rows, n_vocab] in float64.

    Raises QsfNumericError with the model's name if a logit is NaN or infinite.
    """
    values = rows.astype(np.float64)
    if not np.isfinite(values).all():
        raise QsfNumericError(f"{name} computes NaN or infinity")
    values -= values.max(axis=1, keepdims=True)
    values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
    return values


# ---- the figures ----


def _mean_error(values: Floats | NDArray[np.bool_]) -> float:
    """Standard error of the mean; 0 for a single value."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


def _exp(nats: float) -> float:
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def _summary(
    scores: _Scores, windows: Sequence[Window], scored_bytes: int | None, **facts: Any
) -> Evaluation:
    """Return the figures of the scores, beside the ``facts`` of how they were measured."""
    nll = np.concatenate(scores.nll)
    perplexity = _exp(float(nll.mean()))
    bits = float(nll.sum()) / math.log(2)
    return Evaluation(
        windows=len(windows),
        tokens=len(nll),
        scored_bytes=scored_bytes,
        perplexity=perplexity,
        perplexity_error=perplexity * _mean_error(nll),
        bits_per_byte=bits / scored_bytes if scored_bytes else None,
        **_comparison(scores, nll),
        **facts,
        token_nll=nll,
        top_tokens=np.concatenate(scores.top),
        places=_places(scores, nll, windows),
    )


def _places(scores: _Scores, nll: Floats, windows: Sequence[Window]) -> tuple[Place, ...]:
    if not scores.kl:
        return ()
    reference_nll, kl = np.concatenate(scores.reference_nll), np.concatenate(scores.kl)
    n_rows = -(-max(len(window.tokens) for window in windows) // _PLACES)
    at = np.concatenate([_positions(window, n_rows) for window in windows])
    return tuple(
        Place(
            position=int(position),
            tokens=int((at == position).sum()),
            perplexity=_exp(float(nll[at == position].mean())),
            against_perplexity=_exp(float(reference_nll[at == position].mean())),
            kl_mean=float(kl[at == position].mean()),
        )
        for position in np.unique(at)
    )


def _positions(window: Window, place_rows: int) -> NDArray[np.int64]:
    """Return the place of each scored row, [n_rows]."""
    if window.depth is not None:
        return np.full(window.n_rows, window.depth)
    rows = np.arange(window.first_row, window.first_row + window.n_rows)
    return rows // place_rows * place_rows


def perplexity_change(nll: Floats, reference_nll: Floats) -> tuple[float, float]:
    """Return by how many % a perplexity is larger than the reference's, and the standard error.

    Both arrays [tokens] are of the same tokens, in nats. The error comes from paired tokens.
    """
    difference = nll - reference_nll
    ratio = _exp(float(difference.mean()))
    return 100 * (ratio - 1), 100 * ratio * _mean_error(difference)


def _comparison(scores: _Scores, nll: Floats) -> dict[str, Any]:
    """Return the fields of an ``Evaluation`` that need a reference."""
    if not scores.kl:
        return {}
    reference_nll, kl = np.concatenate(scores.reference_nll), np.concatenate(scores.kl)
    is_same_top = np.concatenate(scores.is_same_top)
    perplexity = _exp(float(reference_nll.mean()))
    change, change_error = perplexity_change(nll, reference_nll)
    return {
        "against_perplexity": perplexity,
        "against_perplexity_error": perplexity * _mean_error(reference_nll),
        "perplexity_change_percent": change,
        "perplexity_change_error": change_error,
        "kl_mean": float(kl.mean()),
        "kl_mean_error": _mean_error(kl),
        "kl_median": float(np.median(kl)),
        "kl_p99": float(np.quantile(kl, 0.99)),
        "kl_max": float(kl.max()),
        "top1_agreement": float(is_same_top.mean()),
        "top1_agreement_error": _mean_error(is_same_top),
    }


class ShortenedLogits(ModelLogits):
    """A .qsf file that continues past its context as ``Session.generate`` does, by a policy."""

    def __init__(self, model: Model, policy: KvPolicy, max_tokens: int) -> None:
        """Use an open model for windows of at most ``max_tokens``. The caller closes it."""
        super().__init__(model)
        self._policy, self._max_tokens = policy, max_tokens

    @property
    def max_tokens(self) -> int:
        return self._max_tokens

    def logits(
        self, windows: Sequence[Window], max_rows: int, advance: Callable[[float], None]
    ) -> Iterator[Logits]:
        for window in windows:
            ids = array("I", window.tokens.tolist())
            held, n_done = array("I"), 0
            for first, end in window.blocks(max_rows):
                parts = []
                while n_done < end:
                    held, rows = self._go_on(held, ids[n_done:end])
                    parts.append(rows[max(first - n_done, 0) :])
                    advance(len(rows))
                    n_done += len(rows)
                yield np.concatenate(parts)

    def _go_on(self, held: array[int], new: array[int]) -> tuple[array[int], Logits]:
        """Evaluate new tokens after ``held``; return the tokens held then, and the logits."""
        n_ctx = self._model.info.plan.ctx_tokens
        n_new = max(1, min(len(new), n_ctx - len(held)))
        held = held + new[:n_new]
        if len(held) > n_ctx:
            held = self._policy.shortened(held, n_ctx)
        return held, self._model.logits(held, first_row=len(held) - n_new)
