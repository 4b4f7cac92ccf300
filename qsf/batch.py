"""Answers to many prompts, several at a time in each pass over the weights: ``Model.batch``.

The scheduler of ``qsf serve`` runs them, in the thread that iterates.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from qsf.errors import (
    QsfArgumentError,
    QsfCancelledError,
    QsfError,
    QsfFormatError,
    QsfIOError,
    QsfMemoryError,
    QsfStateError,
)
from qsf.native.binding import describe_machine
from qsf.options import GenerationOptions, Whole, check_value
from qsf.serve.scheduling.engine import ModelEngine
from qsf.serve.scheduling.job import Choosing, Event, Job, Reading
from qsf.serve.scheduling.metrics import Metrics
from qsf.serve.scheduling.scheduler import Scheduler
from qsf.session import create_session
from qsf.text.arguments import as_tokens
from qsf.text.embedding import TASK, Reranker, unit_vector
from qsf.text.generation import GenerationStats, answer_values, seed_of
from qsf.text.sampling import resolve_sampling, sampling_fields

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable, Iterator, Sequence

    from qsf.session import Session
    from qsf.text.embedding import TextVectors
    from qsf.text.parts import OpenedModel

    Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]

# An error that ends the whole batch, not only one of its answers.
_COMMON_ERRORS = (QsfIOError, QsfFormatError, QsfMemoryError, QsfStateError)


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """The answer to one prompt of a batch.

    Attributes:
        index: which prompt, from 0.
        text: the answer.
        stats: counts and times; the seconds include passes shared with other answers. None after
            an error.
        error: why there is no answer, such as a prompt that is too long or logits that are not
            finite.
    """

    index: int
    text: str = ""
    stats: GenerationStats | None = None
    error: QsfError | None = None
    values: Sequence[float] = ()  # of a prompt for which no text is generated


class Batch:
    """The prompts of one ``Model.batch``, and the sessions that answer them.

    With ``reading`` the prompts are evaluated, and no text is generated.
    """

    def __init__(
        self, opened: OpenedModel, options: GenerationOptions, reading: Reading | None = None
    ) -> None:
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
        self._reading = reading
        self._params = resolve_sampling(opened.generation, **sampling_fields(options))
        self._metrics = Metrics()
        self._ended: list[BatchAnswer] = []

    @property
    def n_passes(self) -> int:
        """Passes over the weights so far."""
        return int(self._metrics.counters["passes_total"])

    def answers(self, session: Session, prompts: Iterable[Prompt]) -> Iterator[BatchAnswer]:
        """Yield answers in the order in which they finish; reads a prompt when a session is free
        for it.

        Uses the model's own session and all free ones until the iteration ends.
        """
        with contextlib.ExitStack() as stack:
            n_open = sum(not each.is_closed for each in self._opened.sessions)
            n_more = self._opened.info.plan.max_sessions - n_open
            more = (stack.enter_context(create_session(self._opened)) for _ in range(n_more))
            yield from self._answers([session, *more], prompts)

    def _answers(
        self, sessions: Sequence[Session], prompts: Iterable[Prompt]
    ) -> Iterator[BatchAnswer]:
        engine = ModelEngine(self._opened, sessions, len(sessions))
        scheduler = Scheduler(
            engine, self._metrics, time.perf_counter, queue_seconds=math.inf, pass_seconds=math.inf
        )
        waiting = enumerate(prompts)
        n_running = 0
        is_over = False
        while True:
            while not is_over and n_running < len(sessions):
                index, prompt = next(waiting, (-1, ""))
                is_over = index < 0
                if not is_over:
                    n_running += self._begin(scheduler, index, prompt, sessions[0])
                    yield from self._take_ended()
            if not n_running:
                return
            scheduler.step()
            if engine.is_cancelled:
                raise QsfCancelledError("the batch was cancelled")
            n_running -= len(self._ended)
            yield from self._take_ended()

    def _take_ended(self) -> list[BatchAnswer]:
        ended, self._ended = self._ended, []
        for answer in ended:
            if isinstance(answer.error, _COMMON_ERRORS):
                raise answer.error
        return ended

    def _begin(self, scheduler: Scheduler, index: int, prompt: Prompt, session: Session) -> bool:
        """Start the answer to a prompt; return False if it cannot start or ended at once."""
        try:
            tokens, options = self._tokens(prompt)
            session.check_tokens(tokens, "prompt")
        except QsfArgumentError as error:
            self._ended.append(BatchAnswer(index, error=error))
            return False
        pieces: list[str] = []

        def sink(job: Job, event: Event) -> None:
            pieces.append(event.text)
            if event.problem is not None:
                error = event.problem.__cause__
                assert isinstance(error, QsfError)
                self._ended.append(BatchAnswer(index, error=error))
            elif event.reason:
                text = "".join(pieces)
                self._ended.append(BatchAnswer(index, text, _stats(job), values=event.values))

        job = Job(
            **answer_values(self._opened, options, tokens, has_text=self._reading is None),
            choosing=Choosing(params=self._params, seed=seed_of(options)),
            sink=sink,
            adapters=session.adapter_scales,
            reading=self._reading,
        )
        if job.max_tokens == 0 and self._reading is None:
            job.reason = "length"
            self._ended.append(BatchAnswer(index, "", _stats(job)))
            return False
        scheduler.submit([job])
        return True

    def _tokens(self, prompt: Prompt) -> tuple[Any, GenerationOptions]:
        """Return the tokens of a prompt, and the options of its answer."""
        opened, options = self._opened, self._options
        ctx_tokens = opened.info.plan.ctx_tokens
        if isinstance(prompt, str):
            return as_tokens(opened.tokenizer.encode(prompt, max_tokens=ctx_tokens)), options
        if not isinstance(prompt, Mapping) and not _are_messages(prompt):
            return as_tokens(prompt, "prompt"), options  # type: ignore[arg-type]
        tokens, options = opened.prompt_of(prompt, options)
        return as_tokens(tokens), options


def reading_of(reranker: Reranker, how: TextVectors, dim: int) -> Reading:
    """Return what a job computes of a pair of texts."""
    if reranker.classifier is None:
        return Reading(labels=reranker.labels)
    return Reading(pooling=how.pooling, dim=dim, is_whole=how.is_encoder)


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document and how well it answers a query.

    Attributes:
        index: which document, from 0.
        score: the probability that it fits, from 0 to 1.
        is_cut: its end was left out, because the pair did not fit in the model's context.
    """

    index: int
    score: float
    is_cut: bool = False


def rerank(
    opened: OpenedModel,
    session: Session,
    query: str,
    documents: Iterable[str],
    instruction: str | None,
) -> list[RankedDocument]:
    """Return the documents, best first: see ``Model.rerank``."""
    how, ctx_tokens = opened.vectors, opened.info.plan.ctx_tokens
    reranker = how.reranker(opened.tokenizer)
    most = min(ctx_tokens, how.max_tokens or ctx_tokens)
    encode = partial(
        opened.tokenizer.encode_beginning, most=most, add_prefix=False, parse_special=False
    )
    cuts: list[bool] = []

    def prompts() -> Iterator[list[int]]:
        for text in documents:
            tokens, is_cut = reranker.prompt(query, text, instruction or TASK, encode, most)
            cuts.append(is_cut)
            yield tokens

    batch = Batch(opened, GenerationOptions(), reading_of(reranker, how, opened.info.vector_dim))
    ranked = []
    for answer in batch.answers(session, prompts()):
        if answer.error is not None:
            raise answer.error
        score = reranker.score(answer.values)
        ranked.append(RankedDocument(answer.index, score, cuts[answer.index]))
    return sorted(ranked, key=lambda document: (-document.score, document.index))


def embed(
    opened: OpenedModel,
    session: Session,
    texts: Iterable[str | Sequence[int]],
    pooling: str | None,
    dimensions: int | None,
) -> Iterator[array[float]]:
    """Yield a vector for each text: see ``Model.embed``."""
    how, dim = opened.vectors, opened.info.vector_dim
    how.check_vectors()
    pooling = how.pooling if pooling is None else pooling
    if pooling not in how.poolings:
        raise QsfArgumentError(
            f"pooling must be {' or '.join(how.poolings)}, not {pooling!r}", argument="pooling"
        )
    if dimensions is not None:
        check_value("dimensions", dimensions, Whole(1, dim))
    prompts = (
        _tokens_of(opened, index, text) if isinstance(text, str) else text
        for index, text in enumerate(texts)
    )
    batch = Batch(
        opened, GenerationOptions(), Reading(pooling=pooling, dim=dim, is_whole=how.is_encoder)
    )
    waiting: dict[int, BatchAnswer] = {}  # finished before an answer with a smaller index
    n_told = 0
    for answer in batch.answers(session, prompts):
        waiting[answer.index] = answer
        while (first := waiting.pop(n_told, None)) is not None:
            if first.error is not None:
                raise first.error
            n_told += 1
            yield unit_vector(first.values, dimensions or 0)


def _tokens_of(opened: OpenedModel, index: int, text: str) -> list[int]:
    """Return the tokens of a text to be embedded; warns about one that is cut."""
    how, tokenizer = opened.vectors, opened.tokenizer
    ctx_tokens = opened.info.plan.ctx_tokens
    if how.max_tokens:
        tokens, is_cut = how.complete(tokenizer.encode_beginning(text, ctx_tokens))
    else:
        tokens, is_cut = how.complete(tokenizer.encode(text, max_tokens=ctx_tokens))
    if is_cut:
        warnings.warn(
            f"text {index} is longer than the {how.max_tokens} tokens that the model was made "
            "for: its end is cut",
            stacklevel=2,
        )
    return tokens


def _are_messages(prompt: object) -> bool:
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _stats(job: Job) -> GenerationStats:
    prompt_seconds = max(job.first - job.admitted, 0.0)
    return GenerationStats(
        prompt_tokens=job.n_prompt,
        evaluated_tokens=job.n_prompt - job.n_cached if job.first else 0,
        prompt_seconds=prompt_seconds,
        generated_tokens=job.n_generated,
        step_tokens=max(job.n_generated - 1, 0),
        step_seconds=job.last - job.first,
        first_token_seconds=prompt_seconds,
        stop_reason=job.reason,
        seed=job.choosing.seed,
        peak_bytes=describe_machine().peak_bytes,
        token_ids=tuple(job.tokens[job.n_prompt :]),
    )
