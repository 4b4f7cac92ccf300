"""The ASGI application: what `qsf serve` answers, brought by another server."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

import qsf.asgi
from make.served import Client
from qsf.errors import QsfArgumentError, QsfError
from qsf.serve.http.exchange import to_json
from qsf.text import render

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}


def app(model: Path, *words: str) -> qsf.asgi.Application:
    return qsf.asgi.app(str(model), "--ram-budget", "0", "-t", "1", "-q", *words)


def within(made: qsf.asgi.Application, use: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    """Use the application as its own server would, without a lifespan."""

    async def live() -> None:
        transport = httpx.ASGITransport(made)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            try:
                await use(client)
            finally:
                await made.stop()

    asyncio.run(live())


# Method, path, what httpx sends: answered as `qsf serve` does
REQUESTS: list[tuple[str, str, dict[str, Any]]] = [
    ("GET", "/health", {}),
    ("HEAD", "/health", {}),
    ("GET", "//v1/health/", {}),
    ("GET", "/nowhere", {}),
    ("GET", COMPLETIONS, {}),
    ("POST", COMPLETIONS, {"content": b"{", "headers": {"content-type": "application/json"}}),
    ("POST", COMPLETIONS, {"json": {"prompt": 3}}),
    ("POST", COMPLETIONS, {"content": b"a", "headers": {"content-type": "text/plain"}}),
    ("POST", "/tokenize", {"json": {"content": "word " * 9000}}),
    ("POST", "/tokenize", {"json": {"content": "word " * 300_000}}),
    ("POST", "/v1/messages", {"json": {"messages": []}}),
    ("GET", "/health", {"headers": {"host": "elsewhere.org"}}),
    ("GET", "/health", {"headers": {"origin": "http://elsewhere.org"}}),
]


def test_requests_are_answered_as_by_qsf_serve(client: Client, tiny_llama_8bit: Path) -> None:
    async def use(other: httpx.AsyncClient) -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{client.port}") as own:
            for method, path, more in REQUESTS:
                here, there = (
                    await other.request(method, path, **more),
                    own.request(method, path, **more),
                )
                assert (here.status_code, here.content) == (there.status_code, there.content), path
                kinds = [answer.headers["content-type"] for answer in (here, there)]
                assert kinds[0] == kinds[1]

    within(app(tiny_llama_8bit), use)


def test_keys_and_streams(tiny_llama_8bit: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)

    async def use(client: httpx.AsyncClient) -> None:
        assert (await client.get("/v1/models")).status_code == 401
        client.headers["authorization"] = "Bearer secret"
        assert (await client.get("/v1/models")).status_code == 200
        body = {"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0}
        whole = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]["text"]
        streamed = (await client.post(COMPLETIONS, json={**body, "stream": True})).text
        assert streamed.endswith("data: [DONE]\n\n")
        assert len(whole) > 5

    within(app(tiny_llama_8bit, "--api-key-file", str(keys)), use)


def test_a_client_that_leaves_ends_its_answer(tiny_llama_8bit: Path) -> None:
    async def live() -> None:
        made = app(tiny_llama_8bit)
        server = await made.start()
        sent: list[Any] = []
        messages = [{"type": "http.request", "body": to_json(LONG)}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            while len(sent) < 3:
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        fields = [(b"content-type", b"application/json"), (b"content-length", b"1")]
        scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": fields}
        await made(scope, receive, send)
        while server.scheduler.running:
            await asyncio.sleep(0.001)
        assert len(sent) < 200
        await made.stop()

    asyncio.run(live())


async def answer_of(
    made: qsf.asgi.Application, *parts: bytes, seconds: float = 0.0, **more: Any
) -> Any:
    """The status and the body, for a body that comes in parts."""
    waiting, sent = list(parts), list[Any]()

    async def receive() -> Any:
        await asyncio.sleep(seconds)
        part = waiting.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(waiting)}

    async def send(message: Any) -> None:
        sent.append(message)

    fields = [(b"content-type", b"application/json"), (b"transfer-encoding", b"chunked")]
    scope = {"type": "http", "method": "POST", "path": "/tokenize", "headers": fields, **more}
    await made(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


def test_bodies_have_a_time_and_addresses_need_keys(tiny_llama_8bit: Path) -> None:
    async def live() -> None:
        made, parts = app(tiny_llama_8bit), (b'{"content":', b'"a"', b"}")
        assert (await answer_of(made, *parts))[0] == 200
        made._limits = replace(made._limits, body=0.2)
        assert (await answer_of(made, *parts, seconds=0.1))[0] == 408
        status, body = await answer_of(made, *parts, server=("10.0.0.1", 80))
        assert status == 403
        assert b"--api-key-file" in body
        await made.stop()

    asyncio.run(live())


def test_a_start_that_fails_or_is_cancelled_leaves_nothing(
    tiny_llama_8bit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def live() -> None:
        before = render._kept.n_users
        lacking = app(Path("absent.qsf"))
        for _ in range(2):
            with pytest.raises(QsfError, match="there is no such file"):
                await lacking.start()
        made = app(tiny_llama_8bit)
        n_opened = [0]
        real = made._open

        def open_slowly() -> Any:
            n_opened[0] += 1
            time.sleep(0.2)
            return real()

        monkeypatch.setattr(made, "_open", open_slowly)
        first = asyncio.create_task(made.start())
        await asyncio.sleep(0.05)
        first.cancel()
        assert await made.start() is await made.start()
        assert n_opened == [1]
        await made.stop()
        assert render._kept.n_users == before

    asyncio.run(live())


def test_what_is_of_the_listener_is_refused(tiny_llama_8bit: Path) -> None:
    for words in (["--port", "9000"], ["--host=0.0.0.0"], ["--plan"]):
        with pytest.raises(QsfArgumentError, match="here another server listens"):
            app(tiny_llama_8bit, *words)
    with pytest.raises(QsfArgumentError, match="--no-such"):
        app(tiny_llama_8bit, "--no-such")


@contextmanager
def uvicorn_with(made: Any) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(made, port=0, log_level="critical", ws="none"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        thread.join(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)


def test_uvicorn_carries_it(tiny_llama_8bit: Path) -> None:
    made = app(tiny_llama_8bit)
    with uvicorn_with(made) as where:
        answer = httpx.post(f"{where}{COMPLETIONS}", json={"prompt": "Once", "max_tokens": 3})
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert made._server is not None
    assert made._server is None, "closed with its server"
