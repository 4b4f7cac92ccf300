"""Many sessions in one pass over the weights: what ``Model.run_pass`` and ``choose`` take.

A pass reads and unpacks each weight once for all sessions in it, so many answers cost little more
than one where weights are streamed, and much less than one after the other where they are not. What
a session gets has the same bits as if it were alone.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
from array import array
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from qsf.errors import QsfArgumentError
from qsf.native.binding import NativeSampler
from qsf.native.passing import WANTS, NativeChoice, NativeItem, run_pass
from qsf.native.passing import Chosen as Chosen
from qsf.native.passing import PassReport as PassReport
from qsf.native.passing import choose as choose_native
from qsf.text.arguments import as_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from qsf.errors import QsfError
    from qsf.session import Session
    from qsf.text.opened import OpenedModel
    from qsf.text.sampling import SamplingParams


@dataclass(slots=True)
class PassItem:
    """What a pass does for one session.

    Attributes:
        session: of the model; each at most once in a pass.
        tokens: what follows the tokens that the session holds: a piece of a prompt, or the token
            that was chosen.
        wants: logits of no token, of the last one (``choose`` takes them), or of all; "ahead": of
            the last one, and the pass may evaluate guesses of what follows: ``is_ahead``.
        logits: for "all" the pass puts them here, f32 [n_tokens, n_vocab]: into a buffer of the
            caller's that is this large or larger, else into a new array of numpy.
        is_cancelled: set by the pass: ``session.cancel()`` was called meanwhile, and the session
            holds what it held before.
    """

    session: Session
    tokens: Sequence[int]
    wants: Literal["none", "last", "all", "ahead"] = "last"
    logits: Any = None
    is_cancelled: bool = False


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
        """Take the parameters.

        Args:
            params: as ``Model.sampling_params`` returns them.
            seed: 0 to 2**64 - 1; the same seed chooses the same tokens.
            frequency_penalty: taken from a token's logit for each time that it was counted.
            presence_penalty: taken once from a token's logit that was counted.
            logit_bias: what is added to the logits of tokens, by their ids, -1e6 to 1e6.

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


@dataclass(slots=True)
class Choice:
    """One choice of ``Model.choose``.

    Attributes:
        session: whose logits, those of the last token of its latest pass.
        sampler: how; None chooses nothing, for the log-probability of ``token``.
        recent: the tokens that the repetition penalty applies to, usually all so far.
        n_counted: so many of them, the last ones, count for frequency and presence penalty:
            usually those of the answer.
        mask: which tokens are allowed, as bits: bit i % 32 of the 32-bit word i / 32, little end
            first; any object with a buffer. None: all.
        top_logprobs: None: no log-probabilities; 0: that of the token; more: also those of the
            most probable ones.
        logits: f32 [n_vocab], chosen from instead of the session's: a row of a pass, any buffer.
        token: see ``sampler``.
    """

    session: Session
    sampler: NativeSampler | None
    recent: array[int]
    n_counted: int = 0
    mask: Any = None
    top_logprobs: int | None = None
    logits: Any = None
    token: int = 0


def run_items(opened: OpenedModel, items: Sequence[PassItem]) -> PassReport:
    """Evaluate all items together: see ``Model.run_pass``."""
    natives = [_native_item(opened, item) for item in items]
    with _turns([item.session for item in items]):
        report = run_pass(opened.native, natives)
        late = [i for i, item in enumerate(items) if _is_late(natives[i], item.session)]
        if late:  # cancelled after the pass before had ended: not meant
            again = run_pass(opened.native, [natives[i] for i in late])
            report = PassReport(
                report.ns + again.ns,
                report.wait_ns + again.wait_ns,
                report.read_bytes + again.read_bytes,
                report.n_tokens,
                report.n_rows,
                report.n_drafts + again.n_drafts,
            )
        for native, item in zip(natives, items, strict=True):
            item.is_cancelled = native.is_cancelled
    return report


def is_ahead(session: Session, token: int) -> bool:
    """Return whether an "ahead" pass has evaluated this token already, as the session's next.

    A pass of such tokens alone, each of which wants "ahead", evaluates nothing. One that evaluates
    drops the guesses of all sessions, so it comes after those.
    """
    return session._native.is_ahead(token)


def _native_item(opened: OpenedModel, item: PassItem) -> NativeItem:
    tokens = as_tokens(item.tokens)
    if item.wants not in WANTS:
        raise QsfArgumentError(f"wants must be one of {', '.join(WANTS)}, not {item.wants!r}")
    n_values = len(tokens) * opened.info.n_vocab
    if item.wants == "all" and item.logits is None:
        import numpy

        item.logits = numpy.empty((len(tokens), opened.info.n_vocab), dtype=numpy.float32)
    elif item.wants == "all" and memoryview(item.logits).nbytes < 4 * n_values:
        raise QsfArgumentError(
            f"logits has {memoryview(item.logits).nbytes} bytes, and {4 * n_values} are needed"
        )
    logits = item.logits if item.wants == "all" else None
    return NativeItem(item.session._native, tokens, item.wants, logits)


def _is_late(native: NativeItem, session: Session) -> bool:
    return native.is_cancelled and not session.is_pass_cancelled


@contextlib.contextmanager
def _turns(sessions: Sequence[Session]) -> Iterator[None]:
    """Use all these sessions: taken in one order, so that two passes never wait for each other."""
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
    natives = [
        NativeChoice(
            session=choice.session._native,
            sampler=choice.sampler,
            recent=choice.recent,
            n_counted=choice.n_counted,
            mask=choice.mask,
            n_logprobs=0 if choice.top_logprobs is None else 1 + choice.top_logprobs,
            logits=choice.logits,
            token=choice.token,
        )
        for choice in choices
    ]
    with _turns([choice.session for choice in choices]):
        return choose_native(opened.native, natives)
