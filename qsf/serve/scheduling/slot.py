"""A sequence of the server's engine, and its job."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import dataclass

from qsf.serve.scheduling.job import Job, State


@dataclass(slots=True, eq=False)
class Slot:
    """A sequence in the engine: of a job, or kept after one.

    Attributes:
        n_held: number of tokens in the engine's session.
        leader: a slot that evaluates the first tokens of this slot's job, with its job and their
            number; until then this job waits. None: no such slot.
        is_pinned: holds the shared prefix, and never anything else.
    """

    index: int
    job: Job | None = None
    n_held: int = 0
    salt: str = ""
    used: float = 0.0
    leader: tuple[Slot, Job, int] | None = None
    is_pinned: bool = False

    def is_waiting(self) -> bool:
        """Return whether another slot is still evaluating the first tokens of this slot's job."""
        if self.leader is None:
            return False
        slot, job, n_tokens = self.leader
        return slot.job is job and job.state is State.PROMPT and slot.n_held < n_tokens
