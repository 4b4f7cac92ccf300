"""Many sessions in one pass over the weights: the records of ``Model.run_pass`` and ``choose``.

A pass reads and unpacks each weight once for all its sessions. With streamed weights many answers
cost little more than one; with resident weights they cost much less than one after the other. The
results are the same bits as for a session alone.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import TYPE_CHECKING

from qsf.errors import QsfArgumentError
from qsf.native.binding import NativeSampler
from qsf.native.passing import WANTS, choose, run_pass
from qsf.native.passing import Choice as Choice
from qsf.native.passing import Chosen as Chosen
from qsf.native.passing import PassItem as PassItem
from qsf.native.passing import PassReport as PassReport
from qsf.native.passing import Wants as Wants
from qsf.text.arguments import as_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from qsf.errors import QsfError
    from qsf.session import Session
    from qsf.text.parts import OpenedModel
    from qsf.text.sampling import SamplingParams


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
        report = _run_pass(opened, items)
        late = [i for i in items if i.is_cancelled and not i.session.is_pass_cancelled]
        if late:  # a cancel after the previous pass had ended was not for this one
            again = _run_pass(opened, late)
            report = PassReport(
                report.ns + again.ns,
                report.wait_ns + again.wait_ns,
                report.read_bytes + again.read_bytes,
                report.n_tokens,
                report.n_rows,
                report.n_drafts + again.n_drafts,
            )
    return report


def is_ahead(session: Session, token: int) -> bool:
    """Return whether an "ahead" pass has already evaluated this token as the session's next one.

    A pass with only such "ahead" items evaluates nothing. A pass that evaluates discards the drafts
    of all sessions, so it must come later.
    """
    return session._native.is_ahead(token)


def _run_pass(opened: OpenedModel, items: Sequence[PassItem]) -> PassReport:
    return run_pass(opened.native, [item.session._native for item in items], items)


def _check_item(opened: OpenedModel, item: PassItem) -> None:
    item.tokens = as_tokens(item.tokens)
    if item.wants not in WANTS:
        raise QsfArgumentError(f"wants must be one of {', '.join(WANTS)}, not {item.wants!r}")
    if item.n_hidden and memoryview(item.hidden).nbytes != 8 * opened.info.dim:
        raise QsfArgumentError(f"hidden must have {opened.info.dim} values of 8 bytes each")
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
        sessions = [choice.session._native for choice in choices]
        return choose(opened.native, sessions, choices)
