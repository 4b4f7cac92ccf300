"""One request: its jobs, their text so far, and the answer in the form of an API."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from qsf.foreign_json import JsonError
from qsf.passes import Chosen
from qsf.serve.http.problems import Problem
from qsf.serve.scheduling.job import Event, Job
from qsf.serve.tools.call_formats import read_output
from qsf.serve.tools.call_reader import CallPart
from qsf.text.schemas import Check

if TYPE_CHECKING:
    from qsf.serve.api.completion_request import CompletionRequest
    from qsf.serve.http.connection import Exchange
    from qsf.serve.scheduling.scheduler import Scheduler

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
        """The text so far."""
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        """The thoughts so far."""
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
    request: CompletionRequest,
    form: Form,
    make: Callable[[Callable[[int, Event], None]], Sequence[Job]],
    post: Callable[[Call, int, Event], None],
) -> Sequence[Choice]:
    """Submit the jobs of a request and send the answer. Raises Problem before its first byte.

    Args:
        exchange: the request.
        scheduler: runs the jobs.
        request: the checked request.
        form: of the answer.
        make: makes the jobs, given a function that receives their events.
        post: sends an event from the engine's thread to this call.
    """
    call = Call()
    jobs = make(lambda index, event: post(call, index, event))
    choices = [Choice(job) for job in jobs]
    scheduler.submit(jobs)
    if request.is_cut:
        exchange.headers["x-qsf-max-tokens"] = str(request.max_tokens)
    if request.ignored:
        names = ("".join(c if "!" <= c <= "~" else "?" for c in name) for name in request.ignored)
        exchange.headers["x-qsf-ignored"] = ", ".join(names)[:1000].rstrip()
    if request.unenforced:
        exchange.headers[_UNENFORCED] = request.unenforced
    exchange.on_gone = call.mark_gone
    if exchange.is_gone:
        call.mark_gone()
    try:
        if request.is_stream:
            await _stream(exchange, call, request, form, choices)
        else:
            async for item in call.events(len(jobs), 3600.0):
                _take(choices, item)
            if request.unenforced:
                exchange.headers[_UNENFORCED] = await _judged(request, choices)
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
    request: CompletionRequest,
    form: Form,
    choices: Sequence[Choice],
) -> None:
    await exchange.begin_stream(is_lines=request.is_lines)
    try:
        await _send(exchange, form.begin(choices))
        async for item in call.events(len(choices), PING_SECONDS):
            if item is None:
                if request.has_pings:
                    await exchange.send_comment("ping")
                continue
            _take(choices, item)
            index, event = item
            if event.text or event.reasoning or event.tokens or event.calls or event.n_done:
                await _send(exchange, form.more(index, choices[index], event))
            if event.is_last:
                await _send(exchange, form.end(index, choices[index]))
        if request.unenforced:
            await exchange.send_comment(f"{_UNENFORCED}: {await _judged(request, choices)}")
        await _send(exchange, form.finish(choices))
    except Problem as problem:
        await _send(exchange, form.fail(problem))
        raise
    finally:
        exchange.end_stream()


async def _judged(request: CompletionRequest, choices: Sequence[Choice]) -> str:
    """Return the keywords that were not enforced, and whether the answers have their form."""
    schemas = {tool.name: tool.schema for tool in (request.tools.tools if request.tools else ())}
    values: list[tuple[Any, str]] = []
    for choice in choices:
        values += [(schemas[call.name], call.arguments) for call in choice.calls]
        if request.constraint is not None and not choice.calls:
            values.append((request.constraint.schema, choice.text))
    loop = asyncio.get_running_loop()
    fits = [await loop.run_in_executor(None, _fits, *pair) for pair in values]
    word = "no" if False in fits else "unknown" if None in fits or not fits else "yes"
    return f"{request.unenforced}; holds={word}"


def _fits(schema: Any, text: str) -> bool | None:
    try:
        return None if schema is None else Check(schema).fits(read_output(text))
    except JsonError:  # the answer was cut
        return None


async def _send(exchange: Exchange, events: Sequence[Sent]) -> None:
    for name, value in events:
        await exchange.send_event(value, name)
