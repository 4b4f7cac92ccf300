"""Random load with faults: every request ends once, and nothing is left over."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from make.served import Client, serving, wait_for
from qsf.errors import QsfIOError

START = "Once upon a time"
N_REQUESTS = 400


def request(rng: random.Random) -> bytes:
    fields: dict[str, Any] = {
        "prompt": START * rng.randint(1, 12),
        "max_tokens": rng.randint(1, 60),
        "stream": rng.random() < 0.7,
        "seed": rng.randrange(9),
        "n": rng.choice([1, 1, 1, 2]),
        "stop": rng.choice([[], ["the"]]),
    }
    if rng.random() < 0.1:
        fields["temperature"] = -1
    data = json.dumps(fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def visit(client: Client, seed: int) -> str:
    """Send one request, perhaps not to its end, and read the answer, perhaps not to its end."""
    rng = random.Random(seed)
    data = request(rng)
    kind = rng.choice(["whole", "whole", "whole", "half", "leave", "reset"])
    with client.connect() as sock:
        if kind == "half":
            sock.sendall(data[: rng.randrange(len(data))])
            return kind
        sock.sendall(data)
        received = b""
        n_wanted = 1 << 30 if kind == "whole" else rng.randrange(2000)
        while len(received) < n_wanted and (more := sock.recv(65536)):
            received += more
        if kind == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        if kind == "whole":
            head, _, body = received.partition(b"\r\n\r\n")
            status = int(head.split()[1])
            assert status in (200, 400, 429, 500), received
            if b"event-stream" in head:
                assert (b"[DONE]" in body) != (b'"error"' in body)
                assert body.endswith(b"0\r\n\r\n")
        return kind


def n_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def load(client: Client, first: int) -> None:
    with ThreadPoolExecutor(12) as pool:
        kinds = list(pool.map(lambda i: visit(client, first + i), range(N_REQUESTS)))
    assert set(kinds) == {"whole", "half", "leave", "reset"}
    scheduler = client.server.scheduler
    wait_for(lambda: not scheduler.running and not scheduler.n_waiting)
    wait_for(lambda: not client.server._connections)
    # asyncio closes the socket of a connection after it was told to be lost, in the same turn
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), client.loop).result()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="reads /proc")
def test_random_load_with_faults(tiny_llama_4bit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tiny_llama_4bit, parallel=4, queue=6) as client:
        scheduler = client.server.scheduler
        submitted: list[Any] = []
        lock = threading.Lock()
        submit = scheduler.submit

        def count(jobs: Any) -> None:
            submit(jobs)
            with lock:
                submitted.extend(jobs)

        engine, rng = scheduler._engine, random.Random(5)
        evaluate = engine.evaluate

        def fail(items: Any) -> Any:
            if rng.random() < 0.15:  # a pass is tried twice
                raise QsfIOError("Input/output error")
            return evaluate(items)

        monkeypatch.setattr(scheduler, "submit", count)
        load(client, 0)
        n_before = n_files()
        monkeypatch.setattr(engine, "evaluate", fail)
        load(client, 100_000)
        assert n_files() <= n_before  # a leak is more
        assert {job.state.value for job in submitted} == {"ended"}
        ends = client.server._metrics.ends
        assert sum(ends.values()) == len(submitted)
        assert {"length", "stop", "cancelled", "engine_error"} <= set(ends)
        monkeypatch.undo()
        whole = client.post("/v1/completions", prompt=START, max_tokens=5, seed=1).json
        again = client.post("/v1/completions", prompt=START, max_tokens=5, seed=1).json
        assert whole["choices"] == again["choices"]
