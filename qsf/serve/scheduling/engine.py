"""``ModelEngine``: the scheduler's engine on the sessions of an open model."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsf.errors import QsfArgumentError, QsfCancelledError, QsfError
from qsf.native import binding as native
from qsf.passes import Choice, Chosen, PassItem, Sampler, choose_items, is_ahead, run_items
from qsf.serve.scheduling.job import Job
from qsf.session import copy_held, load_session, save_session

if TYPE_CHECKING:
    from qsf.session import Session
    from qsf.text.parts import OpenedModel


# Logits of a prompt whose tokens are scored: bytes on top of the plan, and rows of a pass.
_SCORE_BYTES = 2 << 20
_MAX_SCORE_ROWS = 64


class ModelEngine:
    """The sessions of a model, one for each slot.

    Attributes:
        n_running: slots that may have a job at once: the KV pool has room for so many contexts.
        chunk_tokens: most tokens of a pass.
        logits_rows: most tokens with logits in a pass, if several items want some.
        score_rows: most tokens of an item that wants scores.
        n_drafts: drafts in the latest pass, in addition to its items.
    """

    def __init__(
        self, opened: OpenedModel, sessions: Sequence[Session], n_running: int | None = None
    ) -> None:
        """Create sessions of an open model; ``n_running`` of them may have jobs.

        None: as many as the KV pool has contexts.
        """
        info, plan = opened.info, opened.info.plan
        self.n_running = n_running or plan.kv_contexts
        self.ctx_tokens = plan.ctx_tokens
        self.chunk_tokens = plan.chunk_tokens
        self.logits_rows = plan.logits_rows
        self.score_rows = max(1, min(_MAX_SCORE_ROWS, _SCORE_BYTES // (4 * info.n_vocab)))
        self.n_drafts = 0
        self.is_cancelled = False  # a session was cancelled during a pass
        self._rows: memoryview | None = None  # [score_rows, n_vocab] of the last pass
        self._opened = opened
        self.sessions = sessions

    def evaluate(self, items: Sequence[PassItem]) -> list[QsfError | None]:
        """Evaluate all items in one pass; return the error of each, or None.

        Raises QsfError if the pass failed: sessions are then unchanged, or ``n_held`` shows the
        change; QsfMemoryError if the sessions together hold too much.
        """
        for item in items:
            if item.wants == "all":
                item.logits = self._score_rows()
        self.n_drafts = run_items(self._opened, items).n_drafts
        self.is_cancelled = any(item.is_cancelled for item in items)
        return [
            QsfCancelledError("cancelled in a pass") if item.is_cancelled else None
            for item in items
        ]

    def _score_rows(self) -> memoryview:
        if self._rows is None:
            n_values = self.score_rows * self._opened.info.n_vocab
            self._rows = memoryview(bytearray(4 * n_values))
        return self._rows

    def scores(self, slot: int, tokens: Sequence[int], n_top: int) -> list[Chosen]:
        """Return the probability of each of ``tokens``, one for each row of the last pass.

        Raises QsfError.
        """
        assert self._rows is not None
        n_bytes = 4 * self._opened.info.n_vocab
        rows = (self._rows[i * n_bytes : (i + 1) * n_bytes] for i in range(len(tokens)))
        return self._scores(slot, zip(tokens, rows, strict=True), n_top)

    def label_scores(self, slot: int, labels: Sequence[int]) -> list[float]:
        """Return the log-probabilities of ``labels`` after the slot's tokens. Raises QsfError."""
        scores = self._scores(slot, ((label, None) for label in labels), 0)
        return [score.logprob or 0.0 for score in scores]

    def _scores(self, slot: int, pairs: Iterable[tuple[int, Any]], n_top: int) -> list[Chosen]:
        choices = [
            Choice(
                self.sessions[slot], None, array("I"), top_logprobs=n_top, logits=row, token=token
            )
            for token, row in pairs
        ]
        scores = []
        for chosen in choose_items(self._opened, choices):
            if isinstance(chosen, QsfError):
                raise chosen
            scores.append(chosen)
        return scores

    def is_ahead(self, slot: int, token: int) -> bool:
        """Return whether the latest pass also evaluated this token as the slot's next one."""
        return is_ahead(self.sessions[slot], token)

    def choose(self, jobs: Sequence[tuple[int, Job]]) -> list[Chosen | QsfError]:
        """Choose the next token for each of (slot, job)."""
        errors: dict[int, QsfError] = {}
        choices = []
        for slot, job in jobs:
            try:
                choices.append(self._choice(slot, job))
            except QsfError as error:  # from the grammar of its constraint
                errors[slot] = error
        if errors:
            others = iter(self.choose([pair for pair in jobs if pair[0] not in errors]))
            return [errors[slot] if slot in errors else next(others) for slot, _ in jobs]
        return choose_items(self._opened, choices) if choices else []

    def _choice(self, slot: int, job: Job) -> Choice:
        how = job.choosing
        if job.generator is None:
            job.generator = Sampler(
                how.params,
                how.seed,
                frequency_penalty=how.frequency_penalty,
                presence_penalty=how.presence_penalty,
                logit_bias=how.logit_bias,
            )
        return Choice(
            self.sessions[slot],
            job.generator,
            job.tokens,
            n_counted=job.n_generated,
            mask=None if job.constraint is None else job.constraint.mask(),
            top_logprobs=how.n_top if how.has_logprob else None,
        )

    @property
    def is_windowed(self) -> bool:
        """True if what a slot holds can be cut near its end only."""
        return bool(self._opened.info.is_windowed)

    def n_held(self, slot: int) -> int:
        return self.sessions[slot].n_tokens

    def tokens(self, slot: int) -> array[int]:
        return array("I", self.sessions[slot].tokens)

    def count_common(self, slot: int, tokens: array[int]) -> int:
        """Return how many leading tokens the slot holds."""
        return self.sessions[slot].count_common(tokens)

    def n_again(self, slot: int) -> int:
        """Return how many tokens the slot has re-evaluated in total, because recurrent states
        cannot be cut.
        """
        return self.sessions[slot].engine_stats.n_again

    def keep(self, slot: int, n_tokens: int) -> None:
        """Forget all but the first tokens of the slot, or all. Raises QsfError."""
        session = self.sessions[slot]
        try:
            session.rewind(n_tokens)
        except QsfArgumentError:  # a sliding window has moved on: evaluate from the start
            session.rewind(0)

    def set_adapters(self, slot: int, scales: tuple[float, ...] | None) -> None:
        """Set the scales of adapters in a slot, None: the model's; others than its own empty it."""
        self.sessions[slot].set_adapters(
            self._opened.adapter_scales() if scales is None else scales
        )

    def copy(self, slot: int, source: int, n_tokens: int) -> None:
        """Make the slot hold the first tokens that another holds, by sharing its KV memory."""
        copy_held(self.sessions[slot], self.sessions[source], n_tokens)

    def save(self, slot: int, path: Path, owner: str) -> None:
        """Write the state of the slot to a session file. Raises QsfError.

        Streams wait meanwhile, but not for the disk: a file damaged by a power cut is evaluated
        again.
        """
        save_session(self.sessions[slot], path, owner, is_synced=False)

    def load(self, slot: int, path: Path) -> tuple[int, str]:
        """Load a session file into the slot; returns n_tokens and the owner. Raises QsfError."""
        head = load_session(self.sessions[slot], path)
        return len(head.tokens), head.owner

    def state_key(self) -> bytes:
        """Return the key of states: a digest of all that decides their bits."""
        return native.state_key(self._opened.native)

    def state_bytes(self, slot: int) -> int:
        """Return the size of a session file of the slot; 0: the slot is empty."""
        return native.describe_state(self.sessions[slot]._native).n_bytes

    def cancel(self, slot: int) -> None:
        self.sessions[slot].cancel()
