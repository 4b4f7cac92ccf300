"""The server: endpoints, access rules, and the threads that answer."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from qsf.errors import QsfError
from qsf.native.binding import version
from qsf.serve.api import (
    adapters,
    anthropic,
    llama_server,
    ollama,
    openai,
    responses,
    text_api,
    vectors,
)
from qsf.serve.api.answering import Call, Choice, Encoder, Route, answer_call
from qsf.serve.api.ask import Ask, make_jobs
from qsf.serve.hosts import Host, Hosts
from qsf.serve.http.body import Part, read_body, read_name, read_part
from qsf.serve.http.connection import Connection, Limits
from qsf.serve.http.exchange import Exchange, Head, to_json
from qsf.serve.http.gate import Gate, page_headers, read_page
from qsf.serve.http.problems import Problem, invalid, problem_of
from qsf.serve.scheduling.job import Event, Job
from qsf.serve.scheduling.metrics import Metrics
from qsf.serve.scheduling.scheduler import Scheduler
from qsf.serve.serving import LATEST, Serving
from qsf.shell import command

_KINDS = ("application/json", "", "application/x-www-form-urlencoded")  # what `curl -d` says
# Memory for each byte of a body: text with characters outside the basic plane takes 8. One body is
# parsed at a time.
_MODELS = "/v1/models/"
_ONE_MODEL = "/v1/models/{model}"
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_BODY_MEMORY = 8
_BACKLOG = 128


class Server:
    """Answers HTTP requests with models; ``start`` and ``stop`` belong to the loop's thread."""

    def __init__(
        self,
        hosts: Hosts,
        metrics: Metrics,
        gate: Gate,
        limits: Limits,
        log: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.hosts = hosts
        self._body_memory = _BODY_MEMORY * limits.max_body_bytes
        self.large_bodies = asyncio.Semaphore(limits.large_bodies)
        self._metrics = metrics
        self._gate = gate
        self._limits = limits
        self._log = log
        self._created = int(time.time())
        self._listener: asyncio.Server | None = None
        self._connections: set[Connection] = set()
        self._outbox: list[tuple[Call, Job, Event]] = []
        self._outbox_lock = threading.Lock()
        # One thread for templates, tokens and JSON: the reserve of the memory plan covers one.
        self._texts = ThreadPoolExecutor(1, "qsf-text")
        self._is_stopping = False
        self._silent_until = 0.0
        self._page = read_page()
        self.routes = {(route.method, route.path): route for route in self._table()}

    @property
    def serving(self) -> Serving:
        return self.hosts.current.serving

    @property
    def scheduler(self) -> Scheduler:
        return self.hosts.current.scheduler

    def _table(self) -> Iterator[Route]:
        def page(path: str, summary: str, handler: Any, **more: Any) -> Route:
            return Route(path, summary, method="GET", handler=handler, **more)

        def get(path: str, summary: str, make: Callable[[], object], **more: Any) -> Route:
            async def answer(exchange: Exchange, _owner: str) -> None:
                await exchange.send(to_json(make()))

            return page(path, summary, answer, **more)

        def of_model(path: str, what: str, make: Callable[[Serving, Scheduler], object]) -> Route:
            return get(path, what, lambda: make(self.serving, self.scheduler))

        yield page("/", "a page to chat with", self._answer_page, is_open=True)
        yield get("/openapi.json", "this description", self._describe, is_open=True)
        for path in ("/health", "/v1/health"):
            yield get(path, "whether it answers", lambda: {"status": "ok"}, is_open=True)
        yield get("/v1/models", "the models", self._models)
        yield page(_ONE_MODEL, "a model", self._answer_model)
        yield of_model("/props", "defaults and the plan of memory", text_api.props)
        yield get("/lora-adapters", "the adapters", partial(adapters.listed, self.hosts))
        for path, summary, body, change in (
            ("/lora-adapters", "scales of requests without their own", adapters.Scales,
             adapters.set_scales),
            ("/v1/load_lora_adapter", "add an adapter", adapters.Load, adapters.load),
            ("/v1/unload_lora_adapter", "remove an adapter", adapters.Unload, adapters.unload),
        ):  # fmt: skip
            handler = partial(self._change_adapters, body, change)
            yield Route(path, summary, body, handler=handler)
        yield of_model("/slots", "what each sequence does", text_api.slots)
        yield of_model("/tokenizer_info", "texts of special tokens", text_api.tokenizer_info)
        yield page("/metrics", "counters for Prometheus", self._answer_metrics)
        yield get("/api/tags", "the models", partial(ollama.tags, self.hosts, self._created))
        yield get("/api/ps", "the models in memory", partial(ollama.running, self.hosts))
        yield get("/api/version", "the version", lambda: {"version": version()})
        yield Route("/api/pull", "that a model is here", ollama.Pull, handler=self._pull)
        for api in (openai, responses, anthropic, vectors, llama_server, ollama, text_api):
            yield from api.ROUTES

    def _models(self) -> dict[str, Any]:
        return {"object": "list", "data": self._model_entries()}

    def _model_entries(self) -> list[dict[str, Any]]:
        """Return the models, and the adapters with names."""
        entries = []
        names = [each.name for each in self.hosts.adapters if each.name]
        for name in self.hosts.paths:
            entry = text_api.model_entry(self.hosts, name, self._created)
            entries += [entry, *({**entry, "id": each, "parent": name} for each in names)]
        return entries

    async def _answer_model(self, exchange: Exchange, _owner: str) -> None:
        name = exchange.head.path.removeprefix(_MODELS)
        entry = next((each for each in self._model_entries() if each["id"] == name), None)
        if entry is None:
            raise Problem(404, "not_found", f"there is no model {name[:100]!r}")
        await exchange.send(to_json(entry))

    # ---- life ----

    def begin(self) -> None:
        """Answer the requests that others bring in this loop."""
        self._loop = asyncio.get_running_loop()
        self.hosts.start(self._deliver)

    async def start(self, host: str, port: int) -> str:
        """Listen; return the address. ``host`` may be the path of a Unix socket."""
        self.begin()
        loop = self._loop
        loop.set_exception_handler(self._report)
        is_path = host.startswith("/")
        # The backlog of asyncio is also how often it tries to accept at a time: without descriptors
        # each failure would add a try, and all of them fail again a second later.
        if is_path:
            listener = await loop.create_unix_server(self._connect, host, backlog=1)
        else:
            listener = await loop.create_server(self._connect, host, port, backlog=1)
        self._listener = listener
        for sock in listener.sockets:
            with sock.dup() as same:
                same.listen(_BACKLOG)
        number = listener.sockets[0].getsockname()[1]
        return host if is_path else f"http://{f'[{host}]' if ':' in host else host}:{number}"

    async def stop(self, grace_seconds: float) -> None:
        """Accept no more requests; running ones may continue for ``grace_seconds``."""
        self._is_stopping = True
        if self._listener is not None:
            self._listener.close()
        for host in self.hosts.loaded.values():
            host.scheduler.close()
        ends_at = self._loop.time() + grace_seconds
        for connection in tuple(self._connections):
            connection.close_when_done()
        while self._connections and self._loop.time() < ends_at:
            await asyncio.sleep(0.05)
        while self.hosts.loaded:
            await self._loop.run_in_executor(None, self.hosts.loaded.popitem()[1].stop)
        await asyncio.sleep(0.05)  # the last events reach their clients
        for connection in tuple(self._connections):
            connection.abort()
        self._texts.shutdown(wait=False, cancel_futures=True)

    def _report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Print an error of the loop: in one line a minute that no connection can be accepted.

        The loop tries again a second later, perhaps with a listener that is closed by then.
        """
        error = context.get("exception")
        if self._is_stopping and isinstance(error, ValueError):
            return
        if not isinstance(error, OSError) or error.errno not in _NO_ROOM:
            loop.default_exception_handler(context)
        elif loop.time() >= self._silent_until:
            self._silent_until = loop.time() + 60
            reason = os.strerror(error.errno)
            command.say_error("qsf-serve", f"{reason}: new connections wait (see ulimit -n)")

    def _connect(self) -> asyncio.Protocol:
        return Connection(self, self._limits, self._connections.discard, self._welcome)

    def _welcome(self, connection: Connection) -> bool:
        """Add a connection, and return whether it may ask; closes an idle one if necessary."""
        self._connections.add(connection)
        most = self._limits.max_connections
        if len(self._connections) > 2 * most:
            connection.abort()
            return False
        counted = [other for other in self._connections if other.is_counted]
        is_near = connection.peer in ("", "127.0.0.1", "::1")  # a proxy may run there
        near = [other for other in counted if other.peer == connection.peer]
        if not is_near and len(near) >= self._limits.max_of_address:
            counted, most = near, self._limits.max_of_address
        if not self._is_stopping and len(counted) >= most:
            spare = [other for other in counted if other.is_spare]
            if spare:
                longest = min(spare, key=lambda other: other.idle_since)
                longest.close_when_done()
                counted.remove(longest)
        return not self._is_stopping and len(counted) < most

    # ---- from the engine's thread to the loop ----

    def _deliver(self) -> None:
        """Send the events of a pass to the event loop, in one message."""
        if self._outbox:
            try:
                self._loop.call_soon_threadsafe(self._dispatch)
            except RuntimeError:  # the loop has ended
                self._outbox.clear()

    def _dispatch(self) -> None:
        with self._outbox_lock:
            outbox, self._outbox = self._outbox, []
        for call, job, event in outbox:
            call.put(job, event)

    # ---- requests ----

    def extra_headers(self, head: Head | None) -> dict[str, str]:
        every = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
        return every if head is None else {**every, **self._gate.cors_headers(head)}

    def explain(self, problem: Problem, head: Head | None) -> object:
        """Return the body of an error: in Anthropic's form for its paths, else in OpenAI's."""
        if head is not None and head.path.startswith("/v1/messages"):
            return anthropic.problem_body(problem)
        if head is not None and head.path.startswith("/api/"):
            return ollama.problem_body(problem)
        return problem.body()

    def check(self, head: Head) -> tuple[Route, str]:
        self._gate.check_page(head)
        if head.method == "OPTIONS":
            return Route(head.path, handler=self._answer_options), ""
        path = _ONE_MODEL if head.path.startswith(_MODELS) else head.path
        route = self.routes.get(("GET" if head.method == "HEAD" else head.method, path))
        if route is None:
            others = [method for method, other in self.routes if other == path]
            if not others:
                raise Problem(404, "not_found", f"there is nothing at {head.path[:100]!r}")
            text = f"{head.path} takes {' and '.join(others)}"
            allow = ", ".join([*others, *(["HEAD"] if "GET" in others else []), "OPTIONS"])
            raise Problem(405, "method_not_allowed", text, allow=allow)
        owner = "" if route.is_open else self._gate.owner_of(head)
        kind = head.get("content-type").split(";")[0].strip().lower()
        if route.body is not None and kind not in _KINDS:
            text = f"the body must be application/json, not {kind[:50]!r}"
            raise Problem(415, "not_json", text)
        if (coding := head.get("content-encoding").lower()) not in ("", "identity"):
            raise Problem(415, "not_plain", f"the body must not be compressed: {coding[:50]!r}")
        has_body = (
            head.get("content-length") not in ("", "0") or "transfer-encoding" in head.headers
        )
        if route.body is None and has_body:
            raise Problem(400, "bad_request", f"{head.method} {head.path} has no body")
        return route, owner

    async def answer(self, endpoint: tuple[Route, str], exchange: Exchange) -> None:
        """Answer a request. Raises Problem, which becomes the answer unless one has begun."""
        route, owner = endpoint
        started = time.monotonic()
        note = ""
        try:
            if route.handler is not None:
                await route.handler(exchange, owner)
            elif route.encoder is not None:
                note = await self._complete(route, route.encoder, exchange, owner)
            else:
                await self._answer_text(route, exchange)
        except Problem as problem:
            self._metrics.count_rejection(problem.code)
            note = problem.code
            exchange.status = exchange.status or problem.status
            raise
        except QsfError as error:
            self._metrics.count_rejection("engine_error")
            note = "engine_error"
            raise problem_of(error) from error
        finally:
            if self._log is not None:
                head = exchange.head
                is_named = head.get("x-request-id") == head.request_id  # by the client
                self._log(
                    {
                        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
                        "key": owner[:8],
                        "request_id": head.request_id,
                        "client_id": head.request_id if is_named else "",
                        "method": head.method,
                        "path": head.path,
                        "status": exchange.status,
                        "seconds": round(time.monotonic() - started, 3),
                        "note": f"{note}{' gone' if exchange.is_gone else ''}".strip(),
                    }
                )

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        return await self._loop.run_in_executor(self._texts, call)

    @asynccontextmanager
    async def _using(self, exchange: Exchange) -> AsyncIterator[tuple[Host, str | None]]:
        """Give the model that a request names, loaded if need be, and the adapter's name, if it is
        that of one.

        The values of its body are made later: the memory plan has room for those of one body, and
        a request may wait long for its model.
        """
        name, is_leaving = await self._in_thread(
            lambda: read_name(exchange.body, self._body_memory)
        )
        async with self.hosts.using(name, is_loading=not is_leaving) as host:
            names = [each.name for each in host.serving.model.adapters if each.name]
            adapter = (name or "").removesuffix(LATEST)
            yield host, adapter if adapter in names else None

    def _decode(self, route: Route, exchange: Exchange, serving: Serving) -> tuple[Any, list[str]]:
        """Return what a request asks for, and the names of its fields that nobody knows."""
        assert route.body is not None
        assert route.decode is not None
        fields, ignored = read_part(route.body, read_body(exchange.body, self._body_memory))
        if ignored and route.encoder is not None and serving.is_strict:
            text = f"{ignored[0]} is not known here, and the server is strict"
            raise invalid(ignored[0], text, "unsupported_parameter")
        return route.decode(fields, serving), ignored

    async def _complete(
        self, route: Route, make_encoder: type[Encoder], exchange: Exchange, owner: str
    ) -> str:
        async with self._using(exchange) as (host, adapter):
            serving = host.serving
            decode = partial(self._decode, route, exchange, serving)
            ask: Ask
            ask, ask.ignored = await self._in_thread(decode)
            exchange.drop_body()
            usual = serving.model.adapter_scales()
            if ask.adapters is None and adapter is not None:
                ask.adapters = serving.model.adapter_scales(adapter)
            elif ask.adapters is None:
                ask.adapters = self.hosts.usual_scales
            ask.adapters = None if ask.adapters == usual else ask.adapters
            kept = ask.keep_seconds
            host.keep_seconds = self.hosts.keep_seconds if kept is None else kept
            encoder = make_encoder(ask, replace(serving, name=adapter or serving.name))
            call = Call()

            def post(job: Job, event: Event) -> None:
                with self._outbox_lock:
                    self._outbox.append((call, job, event))

            most = _max_seconds(serving, ask, exchange)
            jobs = make_jobs(ask, serving, post, owner=owner, name=encoder.name, max_seconds=most)
            await answer_call(exchange, host.scheduler, call, jobs, encoder)
        return _note(encoder.choices)

    async def _answer_text(self, route: Route, exchange: Exchange) -> None:
        async with self._using(exchange) as (host, _):

            def answer() -> bytes:
                return to_json(self._decode(route, exchange, host.serving)[0])

            body = await self._in_thread(answer)
        await exchange.send(body)

    async def _change_adapters(
        self, body: type[Part], change: Any, exchange: Exchange, _owner: str
    ) -> None:
        data = exchange.body
        if body is adapters.Scales and data.lstrip()[:1] == b"[":  # as llama-server takes it
            data = b'{"lora":' + data + b"}"
        fields, _ = await self._in_thread(
            lambda: read_part(body, read_body(data, self._body_memory))
        )
        exchange.drop_body()
        answer = await change(self.hosts, fields)
        if isinstance(answer, str):
            await exchange.send(answer.encode(), "text/plain")
        else:
            await exchange.send(to_json(answer))

    async def _pull(self, exchange: Exchange, _owner: str) -> None:
        fields, _ = await self._in_thread(
            lambda: read_part(ollama.Pull, read_body(exchange.body, self._body_memory))
        )
        exchange.drop_body()
        name, is_stream = fields.model or fields.name or "", fields.stream is not False
        work = asyncio.ensure_future(self._send_lines(exchange, name, is_stream=is_stream))
        exchange.on_gone = work.cancel
        try:
            await work
        except asyncio.CancelledError:
            if not exchange.is_gone:
                raise

    async def _send_lines(self, exchange: Exchange, name: str, *, is_stream: bool) -> None:
        line: dict[str, Any] = {}
        try:
            async with aclosing(ollama.pull(self.hosts, name)) as lines:
                async for line in lines:
                    if is_stream and not exchange.status:
                        exchange.begin(ollama.LINES)
                    if is_stream:
                        await exchange.write(to_json(line) + b"\n")
        except QsfError as error:
            if not exchange.status:
                raise
            await exchange.write(to_json(ollama.problem_body(problem_of(error))) + b"\n")
        if is_stream:
            exchange.end()
        else:
            await exchange.send(to_json(line))

    async def _answer_page(self, exchange: Exchange, _owner: str) -> None:
        kind, headers = "text/html; charset=utf-8", page_headers(self._page)
        await exchange.send(self._page, kind, headers=headers)

    async def _answer_metrics(self, exchange: Exchange, _owner: str) -> None:
        body = self._metrics.text(self._gauges() if self.hosts.loaded else {}).encode()
        await exchange.send(body, "text/plain; version=0.0.4; charset=utf-8")

    def _gauges(self) -> dict[str, float]:
        scheduler = self.scheduler
        return {
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": scheduler.n_waiting,
            "kv_cache_usage_perc": _share_used(scheduler, self.serving.ctx_tokens),
            "budget_bytes": self.serving.model.info.plan.budget_bytes,
            **scheduler.gauges(),
        }

    async def _answer_options(self, exchange: Exchange, _owner: str) -> None:
        await exchange.send(b"", "text/plain")

    def _describe(self) -> dict[str, Any]:
        from qsf.serve.api.openapi import describe  # rarely needed

        return describe(self.routes.values(), version(), self.hosts.paths)


def _share_used(scheduler: Scheduler, ctx_tokens: int) -> float:
    used = sum(slot.n_held for slot in scheduler.slots if slot.job is not None)
    return used / (ctx_tokens * scheduler.n_running_most)


def _max_seconds(serving: Serving, ask: Ask, exchange: Exchange) -> float | None:
    """Return the time limit, shortened by the client's x-stainless-read-timeout."""
    most = serving.max_seconds
    timeout = exchange.head.get("x-stainless-read-timeout")
    if not ask.is_stream and timeout.isdigit() and int(timeout) > 0:
        return min(most or int(timeout), int(timeout))
    return most


def _note(choices: Sequence[Choice]) -> str:
    """Return counts for the log, without any text."""
    if not choices:
        return "no prompt"
    job = choices[0].job
    n_answer = sum(choice.job.n_generated for choice in choices)
    again = f" again {job.n_again}" if job.n_again else ""
    return (
        f"prompt {job.n_prompt} cached {job.n_cached}{again} answer {n_answer} "
        f"{choices[0].reason or 'unfinished'}"
    )


def log_json(record: dict[str, Any]) -> None:
    line = json.dumps({name: value for name, value in record.items() if value})
    command.say_line(line, is_wrapped=False)


def log_line(record: dict[str, Any]) -> None:
    """Print a line of the log for people: keys and ids only where clients have them."""
    words = [record["time"].partition("T")[2]]
    words += [
        f"{name} {record[of]}" for name, of in (("key", "key"), ("id", "client_id")) if record[of]
    ]
    words += [f"{record[name]}" for name in ("method", "path", "status")]
    text = f"{' '.join(words)} {record['seconds']:.3f} s {record['note']}".rstrip()
    command.say_line(json.dumps(text)[1:-1])
