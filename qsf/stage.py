"""``Stage``: some layers of a model, whose rows other layers of it go on with."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from qsf.errors import QsfArgumentError, QsfCancelledError
from qsf.model import Model
from qsf.native.binding import RowsWanted
from qsf.options import ModelOptions, call_with, taking
from qsf.passes import PassItem

if TYPE_CHECKING:
    import os
    from array import array

    from qsf.session import Session


class Stage:
    """Layers of a model that others follow; ``Model(path, layers=..., rows=stage.rows)`` has these.

    A request names all tokens of its sequence, and the stage evaluates those that it lacks. So a
    stage that is opened anew gives the same rows, bit for bit, as the one that was lost.

    Threads: one call at a time.
    """

    @taking(ModelOptions)
    def __init__(self, path: str | os.PathLike[str], options: Any) -> None:
        """Open the layers.

        ``sessions`` should be those of the model that follows: with fewer, sequences take each
        other's place and are evaluated again. ``draft`` has no effect.

        Args:
            path: the file.
            {options}

        Raises:
            QsfError: what ``Model(path, ...)`` raises.
        """
        self.model = Model.opened(path, options)
        self._free = [self.model.session]
        self._free += [self.model.create_session() for _ in range(1, options.sessions)]
        self._of: dict[int, Session] = {}  # by sequence, the least recently used first

    @classmethod
    def opened(cls, path: str | os.PathLike[str], options: ModelOptions) -> Stage:
        """Open the layers with options that are already checked."""
        stage = cls.__new__(cls)
        call_with(stage.__init__, path, options)  # type: ignore[misc]
        return stage

    def close(self) -> None:
        """Free the memory."""
        self.model.close()

    def rows(
        self, wanted: Sequence[RowsWanted], is_cancelled: Callable[[], bool] = lambda: False
    ) -> bytearray:
        """Return f32 [sum of n_new, dim], the rows after the stage's last layer.

        Raises:
            QsfArgumentError: a request has more new tokens than tokens, or does not fit.
            QsfCancelledError: ``is_cancelled()``, which is asked between chunks.
            QsfError: what ``Model.run_pass`` raises; a repeated call is right.
        """
        row_bytes = 4 * self.model.info.dim
        out = bytearray(row_bytes * sum(each.n_new for each in wanted))
        rest, items = memoryview(out), []
        for sequence, tokens, n_new in wanted:
            if not 0 < n_new <= len(tokens):
                raise QsfArgumentError(f"{n_new} new tokens of {len(tokens)}")
            session = self._session(sequence, {each.sequence for each in wanted})
            lacking = len(tokens) - n_new
            held = self._hold(session, tokens[:lacking])
            self._evaluate(session, tokens[held:lacking], None, is_cancelled)
            items.append(PassItem(session, tokens[lacking:], "none"))
            items[-1].residual, rest = rest[: row_bytes * n_new], rest[row_bytes * n_new :]
        if sum(len(item.tokens) for item in items) <= self.model.info.plan.chunk_tokens:
            self.model.run_pass(items)
        else:
            for item in items:
                self._evaluate(item.session, item.tokens, item.residual, is_cancelled)
        return out

    def _session(self, sequence: int, busy: set[int]) -> Session:
        """Return the session of a sequence, which may take the place of one that is not busy."""
        session = self._of.pop(sequence, None)
        if session is None and not self._free:
            oldest = next((name for name in self._of if name not in busy), None)
            if oldest is None:
                raise QsfArgumentError(f"more than {len(self._of)} sequences (sessions) in a pass")
            self._free.append(self._of.pop(oldest))
        self._of[sequence] = session or self._free.pop()
        return self._of[sequence]

    @staticmethod
    def _hold(session: Session, tokens: array[int]) -> int:
        """Bring the session to a beginning of ``tokens``; return how many it then holds."""
        held = session.count_common(tokens)
        if session.n_tokens > held:
            try:
                session.rewind(held)
            except QsfArgumentError:  # the window has moved on
                session.rewind(0)
        return session.n_tokens

    def _evaluate(
        self, session: Session, tokens: Any, residual: Any, is_cancelled: Callable[[], bool]
    ) -> None:
        chunk, row_bytes = self.model.info.plan.chunk_tokens, 4 * self.model.info.dim
        for at in range(0, len(tokens), chunk):
            if is_cancelled():
                raise QsfCancelledError("cancelled between two chunks")
            part = tokens[at : at + chunk]
            item = PassItem(session, part, "none")
            if residual is not None:
                item.residual = residual[row_bytes * at : row_bytes * (at + len(part))]
            self.model.run_pass([item])
