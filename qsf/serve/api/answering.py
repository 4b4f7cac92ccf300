"""One request: its jobs, their text so far, and the answer in the form of an API."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from qsf.foreign_json import JsonError
from qsf.passes import Chosen
from qsf.serve.http.problems import Problem
from qsf.serve.scheduling.job import Event, Job
from qsf.serve.tools.call_formats import read_output
from qsf.serve.tools.call_reader import CallPart
from qsf.text.schemas import Check

if TYPE_CHECKING:
    from qsf.serve.api.ask import Ask
    from qsf.serve.http.body import Part
    from qsf.serve.http.connection import Exchange
    from qsf.serve.scheduling.scheduler import Scheduler
    from qsf.serve.serving import Serving

PING_SECONDS = 15.0
_UNENFORCED = "x-qsf-unenforced"

Sent = tuple[str, Any]
"""An event of a stream: its name, mostly "", and what is sent: JSON, or a text as it is."""


@dataclass
class Choice:
    """One choice of an answer, as far as it has arrived."""

    job: Job
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    # Calls of functions; their arguments are complete at the end of the answer
    calls: list[CallPart] = field(default_factory=list)
    arguments: list[list[str]] = field(default_factory=list)  # of each call, in pieces
    tokens: list[Chosen] = field(default_factory=list)
    reason: str = ""
    values: Sequence[float] = ()  # of a job that generates no text

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        return "".join(self.thoughts)


class Form:
    """How an API writes answers; without events, except in overridden methods.

    ``Choice``s are in the order of the jobs.
    """

    name: str  # the id of the answer

    def begin(self, choices: Sequence[Choice]) -> list[Sent]:
        """Return the first events of a stream."""
        return []

    def more(self, index: int, choice: Choice, event: Event) -> list[Sent]:
        """Return the events for more text."""
        return []

    def end(self, index: int, choice: Choice) -> list[Sent]:
        """Return the events for the end of one choice."""
        return []

    def finish(self, choices: Sequence[Choice]) -> list[Sent]:
        """Return the last events of a stream that went well."""
        return []

    def fail(self, problem: Problem) -> list[Sent]:
        """Return the last events of a stream that failed."""
        return []

    def whole(self, choices: Sequence[Choice]) -> object:
        """Return the answer in one piece."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Route:
    """What is done with requests of a method to a path.

    Attributes:
        handler: answers an exchange for a client.
        body: the fields of the body; None: there is none.
        is_open: it needs no key.
    """

    method: str
    path: str
    handler: Callable[[Exchange, str], Any]
    summary: str = ""
    body: type[Part] | None = None
    is_open: bool = False


class Endpoint(NamedTuple):
    """A path of an API: how its requests are read, and how its answers are written.

    Attributes:
        body: the fields of a request.
        read: makes an ``Ask`` of them, or without ``form`` the answer. Raises Problem.
        form: writes the answer.
    """

    path: str
    summary: str
    body: type[Part]
    read: Callable[[Any, Serving], Any]
    form: Callable[[Ask, Serving], Form] | None = None


class Call:
    """The jobs of one request, and their events, which the engine's thread sends to the loop."""

    def __init__(self) -> None:
        self._events: deque[tuple[int, Event]] = deque()
        self._wanted: asyncio.Future[None] | None = None
        self._is_gone = False

    def put(self, index: int, event: Event) -> None:
        """Receive an event of job ``index``; in the loop's thread."""
        self._events.append((index, event))
        self._wake()

    def mark_gone(self) -> None:
        """Record that the client has disconnected."""
        self._is_gone = True
        self._wake()

    def _wake(self) -> None:
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)

    async def events(self, n_jobs: int, seconds: float) -> AsyncIterator[tuple[int, Event] | None]:
        """Yield (index, event) until all jobs have ended; yields None after ``seconds`` without an
        event.

        Ends early if the client disconnects.
        """
        loop = asyncio.get_running_loop()
        n_left = n_jobs
        while n_left and not self._is_gone:
            if not self._events:
                self._wanted = loop.create_future()
                timer = loop.call_later(seconds, self._wake)
                await self._wanted
                timer.cancel()
                if not self._events and not self._is_gone:
                    yield None
                continue
            index, event = self._events.popleft()
            n_left -= event.is_last
            yield index, event


async def answer_call(
    exchange: Exchange,
    scheduler: Scheduler,
    ask: Ask,
    form: Form,
    make: Callable[[Callable[[int, Event], None]], Sequence[Job]],
    post: Callable[[Call, int, Event], None],
) -> Sequence[Choice]:
    """Submit the jobs of a request and send the answer. Raises Problem before its first byte.

    Args:
        exchange: the ask.
        scheduler: runs the jobs.
        ask: the request.
        form: of the answer.
        make: makes the jobs, given a function that receives their events.
        post: sends an event from the engine's thread to this call.
    """
    call = Call()
    jobs = make(lambda index, event: post(call, index, event))
    choices = [Choice(job) for job in jobs]
    scheduler.submit(jobs)
    if ask.is_cut:
        exchange.headers["x-qsf-max-tokens"] = str(ask.max_tokens)
    if ask.ignored:
        names = ("".join(c if "!" <= c <= "~" else "?" for c in name) for name in ask.ignored)
        exchange.headers["x-qsf-ignored"] = ", ".join(names)[:1000].rstrip()
    if ask.unenforced:
        exchange.headers[_UNENFORCED] = ask.unenforced
    exchange.on_gone = call.mark_gone
    if exchange.is_gone:
        call.mark_gone()
    try:
        if ask.is_stream:
            await _stream(exchange, call, ask, form, choices)
        else:
            async for item in call.events(len(jobs), 3600.0):
                _take(choices, item)
            if ask.unenforced:
                exchange.headers[_UNENFORCED] = await _judged(ask, choices)
            if not exchange.is_gone:
                await exchange.send_json(form.whole(choices))
    finally:
        for choice in choices:
            if not choice.reason:
                scheduler.cancel(choice.job)
    return choices


def _take(choices: Sequence[Choice], item: tuple[int, Event] | None) -> None:
    """Add an event to its choice. Raises the Problem in an event that reports one."""
    if item is None:
        return
    index, event = item
    if event.problem is not None:
        choices[index].reason = "error"
        raise event.problem
    choice = choices[index]
    if event.text:
        choice.texts.append(event.text)
    if event.reasoning:
        choice.thoughts.append(event.reasoning)
    for part in event.calls:
        if part.name:
            choice.calls.append(replace(part))
            choice.arguments.append([])
        choice.arguments[part.index].append(part.arguments)
    if event.is_last:
        for call, pieces in zip(choice.calls, choice.arguments, strict=True):
            call.arguments = "".join(pieces)
    choice.tokens += event.tokens
    choice.reason = event.reason
    choice.values = event.values


async def _stream(
    exchange: Exchange,
    call: Call,
    ask: Ask,
    form: Form,
    choices: Sequence[Choice],
) -> None:
    await exchange.begin_stream(is_lines=ask.is_lines)
    try:
        await _send(exchange, form.begin(choices))
        async for item in call.events(len(choices), PING_SECONDS):
            if item is None:
                if ask.has_pings:
                    await exchange.send_comment("ping")
                continue
            _take(choices, item)
            index, event = item
            if event.text or event.reasoning or event.tokens or event.calls or event.n_done:
                await _send(exchange, form.more(index, choices[index], event))
            if event.is_last:
                await _send(exchange, form.end(index, choices[index]))
        if ask.unenforced:
            await exchange.send_comment(f"{_UNENFORCED}: {await _judged(ask, choices)}")
        await _send(exchange, form.finish(choices))
    except Problem as problem:
        await _send(exchange, form.fail(problem))
        raise
    finally:
        exchange.end_stream()


async def _judged(ask: Ask, choices: Sequence[Choice]) -> str:
    """Return the keywords that were not enforced, and whether the answers have their form."""
    schemas = {tool.name: tool.schema for tool in (ask.tools.tools if ask.tools else ())}
    values: list[tuple[Any, str]] = []
    for choice in choices:
        values += [(schemas[call.name], call.arguments) for call in choice.calls]
        if ask.constraint is not None and not choice.calls:
            values.append((ask.constraint.schema, choice.text))
    loop = asyncio.get_running_loop()
    fits = [await loop.run_in_executor(None, _fits, *pair) for pair in values]
    word = "no" if False in fits else "unknown" if None in fits or not fits else "yes"
    return f"{ask.unenforced}; holds={word}"


def _fits(schema: Any, text: str) -> bool | None:
    try:
        return None if schema is None else Check(schema).fits(read_output(text))
    except JsonError:  # the answer was cut
        return None


async def _send(exchange: Exchange, events: Sequence[Sent]) -> None:
    for name, value in events:
        await exchange.send_event(value, name)


def usage(choices: Sequence[Choice], n: int) -> dict[str, Any]:
    """Return the numbers of tokens; a prompt counts once for its ``n`` choices."""
    firsts = [choice.job for choice in choices[::n]]
    n_prompt = sum(job.n_prompt for job in firsts)
    n_answer = sum(choice.job.n_generated for choice in choices)
    n_thought = sum(choice.job.n_thought for choice in choices)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_answer,
        "total_tokens": n_prompt + n_answer,
        "prompt_tokens_details": {"cached_tokens": sum(job.n_cached for job in firsts)},
        "completion_tokens_details": {"reasoning_tokens": n_thought},
    }


def timings(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the times of the first choice, with llama-server's names, and its seed."""
    job = choices[0].job
    n_new = job.n_prompt - job.n_cached
    n_steps = max(job.n_generated - 1, 0)
    prompt_ms = 1e3 * max(job.first - job.admitted, 0.0)
    answer_ms = 1e3 * max(job.last - job.first, 0.0)
    return {
        "cache_n": job.n_cached,
        "prompt_n": n_new,
        "prompt_ms": round(prompt_ms, 3),
        "prompt_per_second": round(1e3 * n_new / prompt_ms, 3) if prompt_ms else 0.0,
        "predicted_n": job.n_generated,
        "forced_n": job.n_forced,
        "predicted_ms": round(answer_ms, 3),
        "predicted_per_second": round(1e3 * n_steps / answer_ms, 3) if answer_ms else 0.0,
        "queue_ms": round(1e3 * max(job.admitted - job.arrived, 0.0), 3),
        "seed": job.choosing.seed,
    }
