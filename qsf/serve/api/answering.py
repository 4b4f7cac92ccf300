"""One request: its jobs, their text so far, and the ``Encoder`` that an API answers with."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from qsf.foreign_json import JsonError
from qsf.passes import Chosen
from qsf.serve.http.exchange import to_json
from qsf.serve.http.problems import Problem
from qsf.serve.scheduling.job import Event, Job
from qsf.serve.tools.call_formats import read_output
from qsf.serve.tools.call_reader import CallPart
from qsf.text.schemas import Check

if TYPE_CHECKING:
    from qsf.serve.api.ask import Ask
    from qsf.serve.http.body import Part
    from qsf.serve.http.exchange import Exchange
    from qsf.serve.scheduling.scheduler import Scheduler
    from qsf.serve.serving import Serving

PING_SECONDS = 15.0
_UNENFORCED = "x-qsf-unenforced"

Sent = tuple[str, Any]
"""An event of a stream: its name, mostly "", and what is sent: JSON, or a text as it is."""
BEGUN, DONE = Event(), Event()
"""The first and the last event of each answer, around those of its jobs."""


@dataclass
class Choice:
    """One choice of an answer, as far as it has arrived."""

    index: int
    job: Job
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    # Calls of functions; their arguments are complete at the end of the answer
    calls: list[CallPart] = field(default_factory=list)
    arguments: list[list[str]] = field(default_factory=list)  # of each call, in pieces
    tokens: list[Chosen] = field(default_factory=list)
    reason: str = ""
    values: Sequence[float] = ()  # of a job that generates no text
    is_echoed: bool = False  # its prompt was sent with log-probabilities

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        return "".join(self.thoughts)

    def take(self, event: Event) -> None:
        self.texts.append(event.text)
        self.thoughts.append(event.reasoning)
        for part in event.calls:
            if part.name:
                self.calls.append(replace(part))
                self.arguments.append([])
            self.arguments[part.index].append(part.arguments)
        if event.is_last:
            for call, pieces in zip(self.calls, self.arguments, strict=True):
                call.arguments = "".join(pieces)
        self.tokens += event.tokens
        self.reason = "error" if event.problem is not None else event.reason
        self.values = event.values


class Encoder:
    """Encodes the events of an answer in the form of an API: a stream, or one piece at the end.

    APIs override what they send: nothing is sent for the other events.
    """

    prefix = ""  # of the answer's name
    kind = "text/event-stream"

    def __init__(self, ask: Ask, serving: Serving) -> None:
        self.ask, self.serving = ask, serving
        self.name = f"{self.prefix}{os.urandom(12).hex()}"  # the id of the answer
        self.choices: list[Choice] = []  # in the order of the jobs

    def encode(self, event: Event, index: int = 0) -> bytes:
        """Return what is sent for an event of choice ``index``, for ``BEGUN``, or for ``DONE``.

        An answer in one piece is sent for ``DONE``.
        """
        choice = None if event is BEGUN or event is DONE else self.choices[index]
        if choice is not None:
            choice.take(event)
        if not self.ask.is_stream:
            return to_json(self.whole()) if event is DONE else b""
        sent: list[Sent] = []
        if choice is None:
            sent += self.begin() if event is BEGUN else self.finish()
        elif event.problem is not None:
            sent += self.fail(event.problem)
        else:
            sent += self.more(choice, event) if event.has_more else ()
            sent += self.end(choice) if event.is_last else ()
        return b"".join(self.framed(value, name) for name, value in sent)

    @classmethod
    def framed(cls, value: Any, name: str = "") -> bytes:
        """Return a server-sent event, or a line of JSON."""
        data = value.encode() if isinstance(value, str) else to_json(value)
        if cls.kind != "text/event-stream":
            return data + b"\n"
        return (f"event: {name}\ndata: " if name else "data: ").encode() + data + b"\n\n"

    @classmethod
    def comment(cls, text: str) -> bytes:
        """Return what readers of the stream ignore."""
        return f": {text}\n\n".encode() if cls.kind == "text/event-stream" else b""

    def begin(self) -> Iterable[Sent]:
        return ()

    def more(self, choice: Choice, event: Event) -> Iterable[Sent]:
        return ()

    def end(self, choice: Choice) -> Iterable[Sent]:
        return ()

    def finish(self) -> Iterable[Sent]:
        """Return the events after the last ones of all choices."""
        return ()

    def fail(self, problem: Problem) -> Iterable[Sent]:
        return [("", problem.body())]

    def whole(self) -> object:
        """Return the answer in one piece."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Route:
    """A path of the server, and what is done with requests to it.

    Attributes:
        body: the fields of the body; None: there is none.
        decode: makes an ``Ask`` of the fields, or without ``encoder`` the answer. Raises Problem.
        encoder: writes the answer.
        handler: answers an exchange for a client, where there is no ``decode``.
        is_open: it needs no key.
    """

    path: str
    summary: str = ""
    body: type[Part] | None = None
    decode: Callable[[Any, Serving], Any] | None = None
    encoder: type[Encoder] | None = None
    method: str = "POST"
    handler: Callable[[Exchange, str], Any] | None = None
    is_open: bool = False


class Call:
    """The jobs of one request, and their events, which the engine's thread sends to the loop."""

    def __init__(self) -> None:
        self._events: deque[tuple[Job, Event]] = deque()
        self._wanted: asyncio.Future[None] | None = None
        self._is_gone = False

    def put(self, job: Job, event: Event) -> None:
        """Receive an event of a job; in the loop's thread."""
        self._events.append((job, event))
        self._wake()

    def mark_gone(self) -> None:
        """Record that the client has disconnected."""
        self._is_gone = True
        self._wake()

    def _wake(self) -> None:
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)

    async def events(self, n_jobs: int) -> AsyncIterator[tuple[Job, Event] | None]:
        """Yield events until all jobs have ended; yields None after ``PING_SECONDS`` without any.

        Ends early if the client disconnects.
        """
        loop = asyncio.get_running_loop()
        n_left = n_jobs
        while n_left and not self._is_gone:
            if not self._events:
                self._wanted = loop.create_future()
                timer = loop.call_later(PING_SECONDS, self._wake)
                await self._wanted
                timer.cancel()
                if not self._events and not self._is_gone:
                    yield None
                continue
            job, event = self._events.popleft()
            n_left -= event.is_last
            yield job, event


async def answer_call(
    exchange: Exchange, scheduler: Scheduler, call: Call, jobs: Sequence[Job], encoder: Encoder
) -> None:
    """Submit the jobs of a request and send the answer. Raises Problem before its first byte."""
    ask = encoder.ask
    encoder.choices = [Choice(index, job) for index, job in enumerate(jobs)]
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
            exchange.begin(encoder.kind)
            await exchange.write(encoder.encode(BEGUN))
        async for item in call.events(len(jobs)):
            if item is not None:
                job, event = item
                await exchange.write(encoder.encode(event, job.index))
                if event.problem is not None:
                    raise event.problem
            elif ask.is_stream and ask.has_pings:
                await exchange.write(encoder.comment("ping"))
        verdict = await _judged(encoder) if ask.unenforced else ""
        if ask.is_stream:
            said = encoder.comment(f"{_UNENFORCED}: {verdict}") if verdict else b""
            await exchange.write(said + encoder.encode(DONE))
        elif not exchange.is_gone:
            exchange.headers |= {_UNENFORCED: verdict} if verdict else {}
            await exchange.send(encoder.encode(DONE))
    finally:
        if ask.is_stream:
            exchange.end()
        for choice in encoder.choices:
            if not choice.reason:
                scheduler.cancel(choice.job)


async def _judged(encoder: Encoder) -> str:
    """Return the keywords that were not enforced, and whether the answers have their form."""
    ask = encoder.ask
    schemas = {tool.name: tool.schema for tool in (ask.tools.tools if ask.tools else ())}
    values: list[tuple[Any, str]] = []
    for choice in encoder.choices:
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


def usage(choices: Sequence[Choice], n: int = 1) -> dict[str, Any]:
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
    n_new, n_steps = job.n_prompt - job.n_cached, max(job.n_generated - 1, 0)
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
