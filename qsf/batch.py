"""Answers to many prompts, several at a time in each pass over the weights: ``Model.batch``."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from qsf.errors import QsfArgumentError, QsfCancelledError, QsfError
from qsf.kept import copy_held
from qsf.kv import KV_BLOCK_TOKENS
from qsf.passes import Choice, PassItem, choose_items, is_ahead, run_items
from qsf.session import create_session
from qsf.text.arguments import as_messages, as_tokens, count_common
from qsf.text.channels import answer_decoder
from qsf.text.generation import Generation, GenerationStats
from qsf.text.sampling import StopMatcher, asked_sampling, resolve_sampling

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable, Iterator, Sequence

    from qsf.options import GenerationOptions
    from qsf.session import Session
    from qsf.text.constraints import Constraint
    from qsf.text.opened import OpenedModel

    Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """The answer to one prompt of a batch.

    Attributes:
        index: which prompt, from 0.
        text: the answer.
        stats: what it took; seconds are those in which it was in passes with others. None where
            there is an error.
        error: why there is no answer: the prompt is too long, the logits are not finite.
    """

    index: int
    text: str = ""
    stats: GenerationStats | None = None
    error: QsfError | None = None


class _Slot:
    """A session, and the answer that it is at."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.index = -1
        self.run: Generation | None = None
        self.pieces: list[str] = []
        self.matcher = StopMatcher(())
        self.decoder: Any = None
        self.n_held = 0
        self.constraint: Constraint | None = None
        # Who evaluates the first tokens of this prompt, its prompt's index, and how many tokens
        self.leader: tuple[_Slot, int, int] | None = None

    def begin(
        self, index: int, run: Generation, decoder: Any, constraint: Constraint | None
    ) -> None:
        """Begin an answer; what the session holds of its prompt is kept."""
        stop = run.options.stop
        self.index, self.run, self.pieces, self.decoder = index, run, [], decoder
        self.constraint = None if constraint is None else constraint.copy()
        self.matcher = StopMatcher([stop] if isinstance(stop, str) else stop)
        run.start_seconds = time.perf_counter()

    def share(self, others: Sequence[_Slot]) -> None:
        """Keep what the session holds of its prompt, or take it from a slot that holds more.

        Where another slot is about to hold more, wait for it.
        """
        run = _run(self)
        n_common = self.n_common(run.tokens)
        source = max(others, key=lambda slot: slot.n_common(run.tokens))
        n_shared = source.n_common(run.tokens)
        try:
            if n_shared > n_common:
                copy_held(self.session, source.session, n_shared)
            else:
                self.session.rewind(n_common)
        except QsfArgumentError:  # a window of attention has gone on: from the start
            self.session.rewind(0)
        self.n_held = self.session.n_tokens
        run.n_evaluated = len(run.tokens) - self.n_held
        self.leader = None
        n_best = self.n_held + KV_BLOCK_TOKENS - 1  # fewer are evaluated rather than waited for
        for other in others:
            if other.run is None or other.index >= self.index:
                continue
            n_tokens = count_common(other.run.tokens, run.tokens[:-1])
            if n_tokens > max(n_best, other.n_held):
                self.leader, n_best = (other, other.index, n_tokens), n_tokens

    def is_waiting(self) -> bool:
        """Return whether another slot is still evaluating the beginning of the prompt."""
        if self.leader is None:
            return False
        slot, index, n_tokens = self.leader
        return slot.index == index and slot.run is not None and slot.n_held < n_tokens

    def n_common(self, tokens: array[int]) -> int:
        """Return how many leading tokens the session holds, but never all: logits are needed."""
        return self.session.count_common(tokens[:-1])


class Batch:
    """The prompts of one ``Model.batch``, and the sessions that answer them."""

    def __init__(
        self,
        opened: OpenedModel,
        options: GenerationOptions,
        constraint: Constraint | None = None,
    ) -> None:
        """Take the options, and the form that all answers must have."""
        if options.progress is not None or options.on_token is not None:
            name = "progress" if options.progress is not None else "on_token"
            raise QsfArgumentError(f"{name} is for one prompt: a batch has none", argument=name)
        if opened.info.plan.kv_policy.startswith("recompute"):
            raise QsfArgumentError(
                "kv_policy recompute is for generate and chat, not for a batch: window:W is",
                argument="kv_policy",
            )
        self._opened = opened
        self._options = options
        self._params = resolve_sampling(opened.generation, **asked_sampling(options))
        self._slots: list[_Slot] = []
        self._constraint = constraint
        self.n_passes = 0

    def pieces(self, session: Session, prompt: Prompt) -> Iterator[str]:
        """Yield the text of one answer as it is made; ``session.stats`` has what it took.

        Raises QsfError.
        """
        slot = _Slot(session)
        self._slots = [slot]
        error = self._begin(0, prompt)
        while error is None and slot.run is not None:
            n_before = len(slot.pieces)
            for _, error in self._pass([slot]):
                session._stats = self._finish(slot, error).stats
            yield "".join(slot.pieces[n_before:])
        if error is not None:
            raise error

    def answers(self, session: Session, prompts: Iterable[Prompt]) -> Iterator[BatchAnswer]:
        """Yield answers as they are finished; prompts are taken when there is room for them.

        Uses the session, and all others that the model has room for, until the iteration ends.
        """
        with contextlib.ExitStack() as stack:
            self._slots = [_Slot(session)]
            n_open = sum(not each.is_closed for each in self._opened.sessions)
            for _ in range(n_open, self._opened.info.plan.max_sessions):
                more = stack.enter_context(create_session(self._opened))
                self._slots.append(_Slot(more))
            yield from self._answers(prompts)

    def _answers(self, prompts: Iterable[Prompt]) -> Iterator[BatchAnswer]:
        waiting = iter(enumerate(prompts))
        is_over = False
        while True:
            while not is_over and any(slot.run is None for slot in self._slots):
                index, prompt = next(waiting, (-1, ""))
                is_over = index < 0
                error = None if is_over else self._begin(index, prompt)
                if error is not None:
                    yield BatchAnswer(index, error=error)
            active = [slot for slot in self._slots if slot.run is not None]
            if not active:
                return
            for slot, error in self._pass(active):
                yield self._finish(slot, error)

    def _begin(self, index: int, prompt: Prompt) -> QsfError | None:
        """Give a prompt to the free session that holds most of it; return what is wrong with it."""
        try:
            run, begins_text = self._generation(prompt)
        except QsfArgumentError as error:
            return error
        free = [slot for slot in self._slots if slot.run is None]
        slot = max(free, key=lambda slot: slot.n_common(run.tokens))
        decoder = answer_decoder(self._opened.tokenizer, begins_text=begins_text, prompt=run.tokens)
        slot.begin(index, run, decoder, self._constraint)
        slot.share(self._slots)
        return None

    def _generation(self, prompt: Prompt) -> tuple[Generation, bool]:
        """Return the state of a new answer, and whether its text begins one."""
        opened, options = self._opened, self._options
        ctx_tokens = opened.info.plan.ctx_tokens
        begins_text = options.begins_text
        if isinstance(prompt, str):
            tokens = as_tokens(opened.tokenizer.encode(prompt, max_tokens=ctx_tokens))
        elif isinstance(prompt, Mapping) or _are_messages(prompt):
            template = opened.template
            messages = as_messages(prompt)
            tokens = as_tokens(
                template.encode(
                    messages,
                    opened.tokenizer,
                    template_args=options.template_args,
                    max_tokens=ctx_tokens,
                )
            )
            begins_text = begins_text or not template.is_plain
        else:
            tokens = as_tokens(prompt, "prompt")  # type: ignore[arg-type]
        self._slots[0].session.check_tokens(tokens, "prompt")
        seed = options.seed
        if seed is None:
            seed = int.from_bytes(os.urandom(4), "little")
        return Generation(tokens, replace(options, template_args=None), self._params, seed), (
            begins_text
        )

    def _pass(self, active: list[_Slot]) -> list[tuple[_Slot, QsfError | None]]:
        """Evaluate what is missing, choose; return the answers that are finished, or cannot be."""
        taken = self._take(active)
        items = [item for _, item in taken]
        run_items(self._opened, items)
        if any(item.is_cancelled for item in items):
            raise QsfCancelledError("the batch was cancelled")
        for slot, item in taken:
            slot.n_held += len(item.tokens)
            self._slots.remove(slot)  # where not all have room in a pass they take turns
            self._slots.append(slot)
        ready = [slot for slot, _ in taken if slot.n_held == len(_run(slot).tokens)]
        ended = [(slot, None) for slot in ready if not self._wants_more(slot)]
        choosing = [slot for slot in ready if self._wants_more(slot)]
        results: list[tuple[_Slot, QsfError | None]] = [*ended]
        choices = []
        for slot in tuple(choosing):
            try:
                mask = None if slot.constraint is None else slot.constraint.mask()
            except QsfError as error:
                choosing.remove(slot)
                results.append((slot, error))
                continue
            run = _run(slot)
            choices.append(Choice(slot.session, run.sampler, run.tokens, mask=mask))
        for slot, chosen in zip(choosing, choose_items(self._opened, choices), strict=True):
            if isinstance(chosen, QsfError):
                results.append((slot, chosen))
            elif self._take_token(slot, chosen.token) or self._take_forced(slot):
                results.append((slot, None))
        return results

    def _take_forced(self, slot: _Slot) -> bool:
        """Add what must come next, for one pass; return whether that ends the answer."""
        while slot.constraint is not None and (token := slot.constraint.forced()) is not None:
            if self._take_token(slot, token):
                return True
        return False

    def _take(self, active: list[_Slot]) -> list[tuple[_Slot, PassItem]]:
        """Return the next pass: what is evaluated already, or what goes on and then prompts."""
        going = [(slot, _run(slot)) for slot in active if _run(slot).n_generated > 0]
        nexts = [(slot, run.tokens[slot.n_held : slot.n_held + 1]) for slot, run in going]
        ahead = [
            (slot, PassItem(slot.session, token, "ahead"))
            for slot, token in nexts
            if is_ahead(slot.session, token[0])
        ]
        if ahead:
            return ahead
        self.n_passes += 1
        left = self._opened.info.plan.chunk_tokens
        taken = []
        for slot in active:
            if slot.leader is not None and not slot.is_waiting():
                slot.share(self._slots)
        active = [slot for slot in active if slot.leader is None]
        for slot in sorted(active, key=lambda slot: len(_run(slot).tokens) - slot.n_held > 1):
            missing = _run(slot).tokens[slot.n_held :]
            tokens = missing[:left]
            is_last = len(tokens) == len(missing)
            if tokens:
                item = PassItem(slot.session, tokens, "ahead" if is_last else "none")
                taken.append((slot, item))
            left -= len(tokens)
        return taken

    def _wants_more(self, slot: _Slot) -> bool:
        run = _run(slot)
        if run.n_generated >= run.options.max_tokens:
            run.stop_reason = "length"
            return False
        return True

    def _take_token(self, slot: _Slot, token: int) -> bool:
        """Add a chosen token to the answer; return whether that ends it."""
        run = _run(slot)
        now = time.perf_counter()
        run.n_generated += 1
        if run.n_generated == 1:
            run.first_token_seconds = run.prompt_seconds = now - run.start_seconds
        else:
            run.n_steps += 1
            run.step_seconds = now - run.start_seconds - run.first_token_seconds
        if token in self._opened.end_ids:
            run.stop_reason = "end"
            return True
        run.append(token)
        slot.pieces.append(slot.matcher.push(slot.decoder.push(token)))
        if slot.matcher.is_stopped:
            run.stop_reason = "stop"
        elif slot.constraint is not None and slot.constraint.take(token):
            run.stop_reason = "end"
        elif run.n_generated >= run.options.max_tokens:
            run.stop_reason = "length"
        elif len(run.tokens) > self._opened.info.plan.ctx_tokens:
            run.stop_reason = "context"
        else:
            return False
        return True

    def _finish(self, slot: _Slot, error: QsfError | None) -> BatchAnswer:
        run, slot.run = _run(slot), None
        if error is not None:
            return BatchAnswer(slot.index, error=error)
        if run.stop_reason != "stop":
            slot.pieces.append(slot.matcher.push(slot.decoder.flush()) + slot.matcher.flush())
        return BatchAnswer(slot.index, "".join(slot.pieces), run.stats())


def _are_messages(prompt: object) -> bool:
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _run(slot: _Slot) -> Generation:
    assert slot.run is not None
    return slot.run
