"""A server in this process, in a thread of its own, and ways to talk to it."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from qsf import Model
from qsf.cli.serve import make_server, read_constraints
from qsf.cli.serve_options import ServeOptions
from qsf.errors import QsfIOError
from qsf.passes import Chosen
from qsf.serve.scheduling.engine import ModelEngine
from qsf.serve.server import Server


def engine_of(model: Model, n_running: int | None = None) -> ModelEngine:
    more = (model.create_session() for _ in range(1, model.info.plan.max_sessions))
    return ModelEngine(model._opened, [model.session, *more], n_running)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        return error

    @property
    def events(self) -> list[Any]:
        """The events of a stream: JSON, and the text that ends it."""
        found = []
        for block in self.body.decode().split("\n\n"):
            data = "".join(
                line.removeprefix("data: ") for line in block.split("\n") if line[:5] == "data:"
            )
            if data:
                found.append(data if data == "[DONE]" else json.loads(data))
        return found


class Client:
    """Talks to the server at a port."""

    def __init__(self, port: int, server: Server, model: Model) -> None:
        self.port, self.server, self.model = port, server, model
        self.loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        if body is not None:
            named.setdefault("content-type", "application/json")
        try:
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            return Answer(
                answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
            )
        finally:
            connection.close()

    def post(self, path: str, body: object = None, /, **fields: Any) -> Answer:
        return self.ask("POST", path, fields if body is None else body)

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, **headers)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def send(self, data: bytes) -> bytes:
        """Send bytes and return all that comes until the server closes."""
        with self.connect() as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR) if data.endswith(b"\0EOF") else None
            received = b""
            while more := sock.recv(65536):
                received += more
            return received


def after_passes(
    client: Client, monkeypatch: pytest.MonkeyPatch, n_passes: int, act: Callable[[], None]
) -> None:
    """Call ``act`` before each pass of the engine but the next ``n_passes``."""
    engine = client.server.scheduler._engine
    evaluate = engine.evaluate
    n_done = 0

    def evaluate_later(items: Any) -> Any:
        nonlocal n_done
        n_done += 1
        if n_done > n_passes:
            act()
        return evaluate(items)

    monkeypatch.setattr(engine, "evaluate", evaluate_later)


def break_after(client: Client, monkeypatch: pytest.MonkeyPatch, n_passes: int) -> None:
    """Let the engine fail from then on."""

    def fail() -> None:
        raise QsfIOError("cannot read the file: Input/output error")

    after_passes(client, monkeypatch, n_passes, fail)


def scripted(
    client: Client, monkeypatch: pytest.MonkeyPatch, text: str, *, goes_on: bool = False
) -> None:
    """Let the model write ``text``, and end there unless it goes on by itself."""
    tokens = client.model.tokenizer.encode(text, add_prefix=False)
    end = min(client.model.end_ids)
    engine = client.server.scheduler._engine
    choose = engine.choose

    def begun(jobs: Any) -> Any:
        if goes_on and jobs[0][1].n_generated >= len(tokens):
            return choose(jobs)
        return [Chosen([*tokens, end][job.n_generated]) for _, job in jobs]

    monkeypatch.setattr(engine, "choose", begun)


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    ends_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends_at
        time.sleep(0.005)


@contextmanager
def started(words: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Start a command with a pipe for its errors; it does not outlive the block."""
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def serving(
    path: Path,
    model: Model | None = None,
    paths: dict[str, Path] | None = None,
    load: Any = None,
    words: Sequence[str] = (),
    **options: Any,
) -> Iterator[Client]:
    """Serve a model; the options are those of ServeOptions, the other arguments of make_server."""
    asked = ServeOptions(**{"port": 0, "grace": 5.0, **options})
    opened = model or Model(path, ram_budget=None, threads=1, **asked.sessions()[0])
    constraints = read_constraints(path, asked)

    def load_again(*_: object) -> Any:
        return Model(path, ram_budget=None, threads=1, **asked.sessions()[0]), constraints

    load = load or load_again
    server = make_server(
        opened, path, asked, constraints, is_quiet=True, paths=paths, words=words, load=load
    )
    ready = threading.Event()
    box: dict[str, Any] = {}

    async def live() -> None:
        box["loop"] = asyncio.get_running_loop()
        box["stop"] = asyncio.Event()
        box["where"] = await server.start(asked.host, asked.port)
        ready.set()
        await box["stop"].wait()
        await server.stop(asked.grace)

    thread = threading.Thread(target=asyncio.run, args=(live(),))
    thread.start()
    try:
        assert ready.wait(30)
        client = Client(int(box["where"].rpartition(":")[2]), server, opened)
        client.loop = box["loop"]
        yield client
    finally:
        box["loop"].call_soon_threadsafe(box["stop"].set)
        thread.join(30)
        assert not thread.is_alive()
        if model is None:
            opened.close()
