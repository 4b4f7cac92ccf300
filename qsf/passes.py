"""Many sessions in one pass over the weights: the records of ``Model.run_pass`` and ``choose``.

A pass reads and unpacks each weight once for all its sessions. With streamed weights many answers
cost little more than one; with resident weights they cost much less than one after the other. The
results are the same bits as for a session alone.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from qsf.errors import QsfArgumentError, QsfError
from qsf.native._qsf import ffi, lib
from qsf.native.binding import NativeSampler, check_status, error_of, record
from qsf.text.arguments import as_tokens

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator, Mapping, Sequence

    from qsf.native.binding import NativeModel
    from qsf.session import Session
    from qsf.text.parts import OpenedModel
    from qsf.text.sampling import SamplingParams


Wants = Literal["none", "last", "all", "ahead"]
WANTS: dict[Wants, int] = {
    "none": lib.QSF_WANTS_NONE,
    "last": lib.QSF_WANTS_LAST,
    "all": lib.QSF_WANTS_ALL,
    "ahead": lib.QSF_WANTS_AHEAD,
}
"""Which tokens of an item get logits: their names in Python."""


@dataclass(slots=True)
class PassItem:
    """What a pass does for one session.

    Attributes:
        session: a Session of the model; each at most once in a pass.
        tokens: the next tokens of the session: a part of a prompt, or the chosen token.
        wants: logits of no token, of the last one (``choose`` takes them), or of all; "ahead": of
            the last one, and the pass may evaluate drafts after it: ``is_ahead``.
        logits: receives those of "all", f32 [n_tokens, n_vocab]: the caller's buffer if it is
            large enough, else a new array of numpy.
        n_hidden: the hidden states before the head of the last so many tokens are added to
            ``hidden``; such an item wants no logits.
        hidden: f64 [dim], any buffer.
        residual: f32 [n_tokens, dim], any buffer: receives the rows after the last layer of a
            stage without a head.
        is_cancelled: set by the pass: ``session.cancel()`` was called meanwhile, and the session
            is unchanged.
    """

    session: Any
    tokens: Sequence[int]
    wants: Wants = "last"
    logits: Any = None
    n_hidden: int = 0
    hidden: Any = None
    residual: Any = None
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True)
class PassReport:
    """Times and counts of a pass.

    Attributes:
        ns: duration of the pass in nanoseconds, without waiting for its turn.
        wait_ns: the part of it spent waiting for streamed weights.
        read_bytes: weights that were read meanwhile, partly ahead for the next pass.
        n_tokens: tokens of all items.
        n_rows: tokens with logits.
        n_drafts: drafts that were evaluated as well.
    """

    ns: int
    wait_ns: int
    read_bytes: int
    n_tokens: int
    n_rows: int
    n_drafts: int


def run_pass(opened: OpenedModel, items: Sequence[PassItem]) -> PassReport:
    """Evaluate all items in one pass, the tokens of each an array; sets ``is_cancelled`` of each.

    Raises:
        QsfError: the pass failed, and no session holds other tokens than before.
    """
    structs = ffi.new("qsf_pass_item[]", len(items))
    keep: list[Any] = []  # owners of the memory that the structs point to
    for struct, item in zip(structs, items, strict=True):
        struct.session = item.session._native._live_handle()
        keep.append(ffi.from_buffer("uint32_t[]", item.tokens))
        struct.tokens = keep[-1]
        struct.n_tokens = len(item.tokens)
        struct.wants = WANTS[item.wants]
        if item.wants == "all":
            keep.append(ffi.from_buffer("float[]", item.logits, require_writable=True))
            struct.logits = keep[-1]
        if item.n_hidden:
            keep.append(ffi.from_buffer("double[]", item.hidden, require_writable=True))
            struct.hidden, struct.n_hidden = keep[-1], item.n_hidden
        if item.residual is not None:
            keep.append(ffi.from_buffer("float[]", item.residual, require_writable=True))
            struct.residual = keep[-1]
    report = ffi.new("qsf_pass_report *")
    status = lib.qsf_model_pass(opened.native._live_handle(), structs, len(items), report)
    check_status(lib.QSF_OK if status == lib.QSF_ERR_CANCELLED else status)  # items say which
    for struct, item in zip(structs, items, strict=True):
        item.is_cancelled = struct.status == lib.QSF_ERR_CANCELLED
    return record(PassReport, report)


class Chosen(NamedTuple):
    """A chosen token.

    Attributes:
        token: its id.
        logprob: its log-probability by the model alone; None if not requested.
        top: (id, log-probability) of the most probable tokens, best first.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Choice:
    """One choice of ``Model.choose``.

    Attributes:
        session: the Session; its logits after the last token are used.
        sampler: its parameters and generator; None: nothing is chosen, ``token`` gets its
            log-probability.
        recent: the tokens that the repetition penalty applies to, usually all so far.
        n_counted: frequency and presence penalty apply to the last so many of these, usually those
            of the answer.
        mask: which tokens are allowed, as bits: bit i % 32 of the 32-bit word i / 32, little end
            first; any object with a buffer. None: all.
        top_logprobs: None: no log-probabilities; 0: only the token's; n: also those of the n most
            probable tokens.
        logits: f32 [n_vocab], used instead of the session's: a row of a pass, any buffer.
        token: see ``sampler``.
    """

    session: Any
    sampler: NativeSampler | None
    recent: array[int]
    n_counted: int = 0
    mask: Any = None
    top_logprobs: int | None = None
    logits: Any = None
    token: int = 0


def choose(opened: OpenedModel, choices: Sequence[Choice]) -> list[Chosen | QsfError]:
    """Choose a token for each; their sessions are locked.

    Returns:
        For each item the choice, or the error: NaN among its logits, a mask that allows no token.

    Raises:
        QsfArgumentError: an argument is out of range; nothing was chosen.
    """
    structs = ffi.new("qsf_choose_item[]", len(choices))
    keep: list[Any] = []
    for struct, choice in zip(structs, choices, strict=True):
        struct.session = choice.session._native._live_handle()
        # Memory that a struct points to must live until the call has ended and its results are
        # read.
        keep.extend(_fill(struct, choice, opened.native))
        struct.status = 1  # no item has this status after a try
    status = lib.qsf_model_choose(opened.native._live_handle(), structs, len(choices))
    if choices and structs[0].status == 1:
        check_status(status)
    return [_result(*pair) for pair in zip(structs, choices, strict=True)]


def _fill(struct: Any, choice: Choice, model: NativeModel) -> list[Any]:
    """Fill a ``qsf_choose_item``; return the objects that own the memory it points to."""
    keep: list[Any] = []

    def pointer(kind: str, values: Any) -> Any:
        keep.append(ffi.from_buffer(kind, values))
        return keep[-1]

    if choice.logits is not None:
        n_values = memoryview(choice.logits).nbytes // 4
        if n_values != model.n_vocab:
            raise QsfArgumentError(f"logits are {n_values}, but the vocabulary has {model.n_vocab}")
        struct.logits = pointer("float[]", choice.logits)
    struct.recent = pointer("uint32_t[]", choice.recent)
    struct.n_recent = len(choice.recent)
    struct.n_counted = choice.n_counted
    struct.token = choice.token
    if choice.mask is not None:
        n_bytes = (model.n_vocab + 31) // 32 * 4
        struct.mask = ffi.cast("uint32_t *", pointer("char[]", choice.mask))
        if len(keep[-1]) < n_bytes:
            raise QsfArgumentError(
                f"a mask of {len(keep[-1])} bytes is too short: the vocabulary needs {n_bytes}"
            )
    if choice.sampler is not None:
        choice.sampler.fill(struct)
    if choice.top_logprobs is not None:
        struct.n_logprobs = 1 + choice.top_logprobs
        keep.append(ffi.new("uint32_t[]", struct.n_logprobs))
        struct.logprob_tokens = keep[-1]
        keep.append(ffi.new("float[]", struct.n_logprobs))
        struct.logprobs = keep[-1]
    return keep


def _result(struct: Any, choice: Choice) -> Chosen | QsfError:
    if choice.sampler is not None:
        choice.sampler.take_state(struct)
    if struct.status != lib.QSF_OK:
        return error_of(struct.status)
    n = struct.n_logprobs
    if n == 0:
        return Chosen(struct.token)
    pairs = list(zip(struct.logprob_tokens[0:n], struct.logprobs[0:n], strict=True))
    return Chosen(struct.token, pairs[0][1], tuple(pairs[1:]))


class Sampler(NativeSampler):
    """How the tokens of one answer are chosen, and the state of its random generator."""

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        *,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
    ) -> None:
        """Set the parameters.

        Args:
            params: as ``Model.sampling_params`` returns them.
            seed: 0 to 2**64 - 1; the same seed chooses the same tokens.
            frequency_penalty: subtracted from a token's logit once for each occurrence among the
                counted tokens.
            presence_penalty: subtracted once if the token occurs among them.
            logit_bias: added to the logits of tokens, by their ids, -1e6 to 1e6.

        Raises:
            QsfArgumentError: a value is no number, or no token id.
        """
        try:
            super().__init__(
                **asdict(params),
                seed=seed,
                frequency_penalty=frequency_penalty,
                presence_penalty=presence_penalty,
                logit_bias=logit_bias,
            )
        except (TypeError, OverflowError) as error:
            raise QsfArgumentError(f"a sampler cannot have these values: {error}") from error


def run_items(opened: OpenedModel, items: Sequence[PassItem]) -> PassReport:
    """Evaluate all items together: see ``Model.run_pass``."""
    for item in items:
        _check_item(opened, item)
    with _turns([item.session for item in items]):
        report = run_pass(opened, items)
        late = [i for i in items if i.is_cancelled and not i.session.is_pass_cancelled]
        if late:  # a cancel after the previous pass had ended was not for this one
            again = run_pass(opened, late)
            sums = ("ns", "wait_ns", "read_bytes", "n_drafts")
            more = {name: getattr(report, name) + getattr(again, name) for name in sums}
            report = replace(report, **more)
    return report


def is_ahead(session: Session, token: int) -> bool:
    """Return whether an "ahead" pass has already evaluated this token as the session's next one.

    A pass with only such "ahead" items evaluates nothing. A pass that evaluates discards the drafts
    of all sessions, so it must come later.
    """
    return session._native.is_ahead(token)


def _check_item(opened: OpenedModel, item: PassItem) -> None:
    item.tokens = as_tokens(item.tokens)
    if item.wants not in WANTS:
        raise QsfArgumentError(f"wants must be one of {', '.join(WANTS)}, not {item.wants!r}")
    dim = opened.info.vector_dim
    if item.n_hidden and memoryview(item.hidden).nbytes != 8 * dim:
        raise QsfArgumentError(f"hidden must have {dim} values of 8 bytes each")
    n_bytes = 4 * opened.info.dim * len(item.tokens)
    if item.residual is not None and memoryview(item.residual).nbytes != n_bytes:
        raise QsfArgumentError(f"residual must have {n_bytes} bytes, {opened.info.dim} f32 a token")
    n_values = len(item.tokens) * opened.info.n_vocab
    if item.wants == "all" and item.logits is None:
        import numpy

        item.logits = numpy.empty((len(item.tokens), opened.info.n_vocab), dtype=numpy.float32)
    elif item.wants == "all" and memoryview(item.logits).nbytes < 4 * n_values:
        raise QsfArgumentError(
            f"logits has {memoryview(item.logits).nbytes} bytes, and {4 * n_values} are needed"
        )


@contextlib.contextmanager
def _turns(sessions: Sequence[Session]) -> Iterator[None]:
    """Lock all these sessions, always in the same order, so that two passes never deadlock."""
    with contextlib.ExitStack() as stack:
        for session in sorted(set(sessions), key=id):
            stack.enter_context(session._turn())
            stack.enter_context(_cancellable(session))
        yield


@contextlib.contextmanager
def _cancellable(session: Session) -> Iterator[None]:
    with session._cancel_lock:
        session.is_pass_cancelled = False
    try:
        yield
    finally:
        with session._cancel_lock:
            session.is_pass_cancelled = None


def choose_items(opened: OpenedModel, choices: Sequence[Choice]) -> list[Chosen | QsfError]:
    """Choose a token for each: see ``Model.choose``."""
    with _turns([choice.session for choice in choices]):
        return choose(opened, choices)
