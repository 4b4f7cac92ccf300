"""``ModelEngine``: the scheduler's engine on the sessions of an open model."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from qsf.errors import QsfArgumentError, QsfError
from qsf.native.binding import NativeSampler, NativeSession
from qsf.serve.job import Chosen, Job

if TYPE_CHECKING:
    from qsf.model import Model
    from qsf.serve.scheduler import PassItem


class ModelEngine:
    """The sessions of a model, one for each slot."""

    def __init__(self, model: Model) -> None:
        """Take all sessions that the model was opened for."""
        plan = model.info.plan
        self.n_slots = plan.max_sessions
        self.ctx_tokens = plan.ctx_tokens
        self.chunk_tokens = plan.chunk_tokens
        # The sessions themselves must live: closing the model closes those that it knows of.
        self._owners = [model.session]
        self._owners += [model.create_session() for _ in range(1, self.n_slots)]
        self._sessions: list[NativeSession] = [session._native for session in self._owners]
        self._tokens = [array("I") for _ in self._sessions]

    def evaluate(self, items: Sequence[PassItem]) -> list[QsfError | None]:
        """Evaluate all items; return what went wrong with each."""
        return [self._evaluate(item) for item in items]

    def _evaluate(self, item: PassItem) -> QsfError | None:
        session, held = self._sessions[item.slot], self._tokens[item.slot]
        n_before = len(held)
        held.extend(item.tokens)
        try:
            while session.sync_chunk(held) < len(held):
                pass
        except QsfError as error:
            del held[session.position() :]
            del held[n_before:]
            return error
        return None

    def choose(self, jobs: Sequence[tuple[int, Job]]) -> list[Chosen | QsfError]:
        """Choose the next token for each of (slot, job)."""
        return [self._choose(self._sessions[slot], job) for slot, job in jobs]

    def _choose(self, session: NativeSession, job: Job) -> Chosen | QsfError:
        how = job.choosing
        if job.generator is None:
            params = how.params
            job.generator = NativeSampler(
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=params.top_k,
                min_p=params.min_p,
                repetition_penalty=params.repetition_penalty,
                seed=how.seed,
            )
        try:
            token = job.generator.choose(session, job.tokens)
            if not how.has_logprob:
                return Chosen(token)
            (_, logprob), *top = session.logprobs(token, how.n_top)
            return Chosen(token, logprob, tuple(top))
        except QsfError as error:
            return error

    def n_held(self, slot: int) -> int:
        """Return how many tokens the slot holds."""
        return len(self._tokens[slot])

    def keep(self, slot: int, n_tokens: int) -> int:
        """Forget all but the first tokens of the slot; return how many it holds then."""
        held = self._tokens[slot]
        try:
            self._sessions[slot].rewind(min(n_tokens, len(held)))
        except QsfArgumentError:  # a window of attention has gone on: from the start
            self._sessions[slot].rewind(0)
            n_tokens = 0
        del held[n_tokens:]
        return len(held)

    def cancel(self, slot: int) -> None:
        """End what is evaluated for the slot; from any thread."""
        self._sessions[slot].cancel()
