"""Who may ask: keys, hosts, origins, connections; and what the server takes of the memory."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from make.refusals import table
from make.served import Client, serving, started
from qsf.errors import QsfArgumentError, QsfIOError
from qsf.serve.http.gate import is_loopback, read_keys

START = "Once upon a time"


@pytest.fixture(scope="module")
def locked(tiny_llama_4bit: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text("# two keys\nfirst-key\n\nsecond-key\n")
    keys.chmod(0o600)
    with serving(
        tiny_llama_4bit,
        parallel=1,
        api_key_file=str(keys),
        allowed_host="models.example",
        cors_origin="https://app.example",
    ) as found:
        yield found


@pytest.mark.parametrize(("headers", "status"), table("tables")["keys"])
def test_a_key_is_needed(locked: Client, headers: dict[str, str], status: int) -> None:
    for method, path, body in (
        ("GET", "/v1/models", None),
        ("GET", "/metrics", None),
        ("POST", "/v1/completions", {"prompt": START, "max_tokens": 1}),
        ("POST", "/tokenize", {"content": "x"}),
    ):
        answer = locked.ask(method, path, body, **headers)
        assert answer.status == status, (path, answer.body)
        if status == 401:
            assert answer.error["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert b"key" not in answer.body.replace(b"API key", b"").replace(b"_key", b"")


def test_keys_do_not_share_prefixes(locked: Client) -> None:
    """Or the time to the first token would tell what others have asked."""

    def n_cached(key: str, **more: Any) -> int:
        fields = {"prompt": "A long prompt that nobody else asks", "max_tokens": 1, **more}
        answer = locked.ask("POST", "/v1/completions", fields, authorization=f"Bearer {key}")
        n: int = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
        return n

    assert n_cached("first-key") <= 1  # the begin of text, which it has asked for before
    assert n_cached("first-key") > 3
    assert n_cached("second-key") <= 1
    assert n_cached("second-key", cache_salt="a") == 0
    assert n_cached("second-key", cache_salt="a") > 3
    assert n_cached("first-key", cache_salt="a") == 0  # a salt that others use too is no way in


def test_names_of_the_host(locked: Client) -> None:
    allowed = table("tables")["hosts that are asked"]
    others = table("tables")["hosts of others"]
    for host in allowed:  # and health and the page need no key
        assert locked.get("/health", host=host).status == locked.get("/", host=host).status == 200
    for host in (*others, ""):
        answer = locked.get("/health", host=host)
        assert (answer.status, answer.error["code"]) == (403, "forbidden_host")
    for target, status in ((b"localhost", b"200"), (b"example.org", b"403")):
        answer_bytes = locked.send(
            b"GET http://" + target + b"/health HTTP/1.1\r\nhost: localhost\r\n"
            b"connection: close\r\n\r\n"
        )
        assert answer_bytes.startswith(b"HTTP/1.1 " + status)
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost", "/run/socket"):
        assert is_loopback(host)
    for host in ("0.0.0.0", "::", "192.168.1.1", "example.org", ""):
        assert not is_loopback(host)


def test_http_1_0_has_no_host(locked: Client) -> None:
    assert locked.send(b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")
    head = b"GET /health HTTP/1.0\r\nHost: evil.example\r\n\r\n"
    assert locked.send(head).startswith(b"HTTP/1.1 403 ")


def test_origins_of_pages(locked: Client) -> None:
    own = f"http://127.0.0.1:{locked.port}"
    assert locked.get("/health", origin=own).status == 200
    for origin in (
        "https://evil.example",
        "null",
        "http://127.0.0.1:1",
        "https://app.example.evil",
    ):
        answer = locked.get("/health", origin=origin)
        assert (answer.status, answer.error["code"]) == (403, "forbidden_origin")
        assert "access-control-allow-origin" not in answer.headers
    answer = locked.ask("OPTIONS", "/v1/chat/completions", origin="https://app.example")
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert "access-control-allow-credentials" not in answer.headers
    answer = locked.ask("OPTIONS", "/v1/chat/completions", origin="https://evil.example")
    assert answer.status == 403


def test_official_libraries_may_send_their_headers_from_pages(tiny_llama_4bit: Path) -> None:
    wanted = "authorization,x-stainless-os,anthropic-version,OpenAI-Organization,cookie,x-evil"
    with serving(tiny_llama_4bit, parallel=1, cors_origin="*") as client:
        answer = client.ask(
            "OPTIONS",
            "/v1/messages",
            origin="https://any.example",
            access_control_request_headers=wanted,
        )
        assert answer.headers["access-control-allow-origin"] == "https://any.example"
        allowed = answer.headers["access-control-allow-headers"].split(", ")
        assert {"x-stainless-os", "anthropic-version", "openai-organization"} <= set(allowed)
        assert not {"cookie", "x-evil"} & set(allowed)
        fields = {"prompt": START, "max_tokens": 1}
        answer = client.ask("POST", "/v1/completions", fields, origin="https://any.example")
        assert answer.status == 200
        assert "x-qsf-max-tokens" in answer.headers["access-control-expose-headers"]


def test_files_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with pytest.raises(QsfIOError, match="No such file"):
        read_keys(path)
    path.write_text("key\n")
    path.chmod(0o644)
    with pytest.raises(QsfArgumentError, match="mode 0644"):
        read_keys(path)
    path.chmod(0o600)
    assert len(read_keys(path)) == 1
    path.write_text("# nothing\n\n")
    with pytest.raises(QsfArgumentError, match="has 0"):
        read_keys(path)


HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def answer_of(sock: socket.socket, request: bytes) -> bytes:
    """Send a request and return its answer: a head, and a body of one object."""
    sock.sendall(request)
    answer = b""
    while not answer.endswith(b"}") and (more := sock.recv(4096)):
        answer += more
    return answer


def test_connections_have_a_limit(tiny_llama_4bit: Path) -> None:
    with serving(tiny_llama_4bit, parallel=1, connections=3) as client:
        held = [client.connect() for _ in range(3)]
        for sock in held:
            request = HEALTH + HEALTH[:9]  # and the beginning of another
            assert answer_of(sock, request).startswith(b"HTTP/1.1 200")
        assert client.send(HEALTH).startswith(b"HTTP/1.1 503")
        held.pop().close()
        for _ in range(500):
            try:
                if client.get("/health").status == 200:
                    break
            except OSError:
                pass
            time.sleep(0.01)
        else:
            pytest.fail("a connection that has ended still counts")
        for sock in held:
            sock.close()


def test_the_connection_that_is_idle_longest_makes_room(tiny_llama_4bit: Path) -> None:
    with serving(tiny_llama_4bit, parallel=1, connections=3) as client, ExitStack() as stack:
        held = [stack.enter_context(client.connect()) for _ in range(3)]
        for sock in (*held, held[0]):
            assert answer_of(sock, HEALTH).startswith(b"HTTP/1.1 200")
        assert client.get("/health").status == 200
        assert held[1].recv(1) == b""
        for sock in (held[0], held[2]):
            assert answer_of(sock, HEALTH).startswith(b"HTTP/1.1 200")


def test_clients_that_close_after_each_answer_all_get_theirs(tiny_llama_4bit: Path) -> None:
    request = HEALTH.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    with (
        serving(tiny_llama_4bit, parallel=1, connections=64) as client,
        ThreadPoolExecutor(40) as clients,
    ):
        answers = list(clients.map(lambda _: client.send(request)[9:12], range(300)))
    assert answers == [b"200"] * 300


@pytest.mark.skipif(sys.platform != "linux", reason="sets limits of another process")
def test_without_descriptors_connections_wait_and_one_line_says_so(
    tiny_llama_4bit: Path, tmp_path: Path
) -> None:
    import resource

    place = str(tmp_path / "s")
    words = [sys.executable, "-m", "qsf", "serve", str(tiny_llama_4bit), "--host", place, "-q"]
    with started(words) as process, ExitStack() as stack:
        assert process.stderr is not None
        assert process.stderr.readline().endswith(f" at {place}\n")
        assert "in memory" in process.stderr.readline()
        n_open = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
        limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        first, second = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (n_open, limits[1]))
        first.settimeout(30)
        first.connect(place)
        first.sendall(HEALTH)
        line = process.stderr.readline()
        assert "error: Too many open files: new connections wait" in line
        time.sleep(1.5)  # the loop tries again
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)
        assert answer_of(first, b"").startswith(b"HTTP/1.1 200")
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (n_open + 1, limits[1]))
        first.sendall(HEALTH[:9])
        second.connect(place)
        time.sleep(0.5)  # it waits while the server is stopped
        process.send_signal(signal.SIGINT)
        time.sleep(1.2)  # the loop would try again, with a listener that is closed
        assert answer_of(first, HEALTH[9:]).startswith(b"HTTP/1.1 200")
        assert process.wait(60) == 0
        said = process.stderr.read()
        assert said.startswith("qsf serve: interrupted: answers that run may end first\n")
        assert said.endswith("\nqsf serve: stopped\n")


# ---- memory ----
def peak_mb(process_id: int | str) -> float:
    status = Path(f"/proc/{process_id}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_serving_takes_15_mb_more_than_running(tiny_llama_4bit: Path) -> None:
    code = (
        "import sys; from qsf.cli.run import main as cli; cli.main(sys.argv[1:]);"
        "print(open('/proc/self/status').read())"
    )
    words = [sys.executable, "-c", code, str(tiny_llama_4bit), "-p", START, "-n", "50"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    run_mb = int(re.findall(r"VmHWM:\s+(\d+)", done.stdout)[0]) / 1024
    words = [sys.executable, "-m", "qsf", "serve", str(tiny_llama_4bit), "--port", "0"]
    words += ["--constraints", "off"]
    with started(words) as process:
        assert process.stderr is not None
        url = process.stderr.readline().split()[-1]
        threading.Thread(target=process.stderr.read, daemon=True).start()

        def ask(path: str, fields: dict[str, Any]) -> bytes:
            request = urllib.request.Request(
                url + path, json.dumps(fields).encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                return bytes(answer.read())

        fields = {"prompt": START, "max_tokens": 50, "stream": True}
        threads = [
            threading.Thread(target=ask, args=("/v1/completions", fields)) for _ in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert peak_mb(process.pid) - run_mb < 15
        process.terminate()
        assert process.wait(30) == 0
