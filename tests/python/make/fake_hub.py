"""A HuggingFace hub on the loopback, with one model: names, files, broken connections."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "some-org/tiny-model"


class FakeHub:
    """Serves the files of a folder.

    Attributes:
        fetched: [file, first byte] of every download.
        ranges: [file, first byte, end] of those that ask for a part.
        break_after: how many bytes of a file are sent before the connection ends; None: all.
        facts: other values in what it says of the model.
        headers: other headers of files.
        n_extra_bytes: sent behind each file.
        pause_seconds: between the eighths of a file.
        n_bytes_sent: of weights.
    """

    def __init__(self, folder: Path) -> None:
        paths = [path for path in folder.rglob("*") if path.is_file()]
        self.files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        self.fetched: list[tuple[str, int]] = []
        self.ranges: list[tuple[str, int, int]] = []
        self.break_after: int | None = None
        self.facts: dict[str, Any] = {}
        self.headers: dict[str, str] = {}
        self.n_extra_bytes = 0
        self.pause_seconds = 0.0
        self.n_bytes_sent = 0
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None: ...

            def do_HEAD(self) -> None:
                hub.answer(self, has_body=False)

            def do_GET(self) -> None:
                hub.answer(self, has_body=True)

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None: ...  # a client that has gone is none of ours

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, handler: BaseHTTPRequestHandler, *, has_body: bool) -> None:
        path = handler.path.split("?")[0]
        if path.startswith(f"/api/models/{REPO}/tree/"):
            self._send_json(handler, [self._entry(name, "path") for name in self.files])
        elif path == f"/api/models/{REPO}" or path.startswith(f"/api/models/{REPO}/revision/"):
            siblings = [self._entry(name, "rfilename") for name in self.files]
            facts = {"id": REPO, "sha": COMMIT, "siblings": siblings, **self.facts}
            self._send_json(handler, facts)
        elif path.startswith(f"/{REPO}/resolve/") and path.split("/", 5)[-1] in self.files:
            self._send_file(handler, path.split("/", 5)[-1], has_body=has_body)
        else:
            body = b"not found"
            handler.send_response(404)
            handler.send_header("X-Error-Code", "RepoNotFound")
            handler.send_header("Content-Length", str(len(body)))
            handler.end_headers()
            if has_body:
                handler.wfile.write(body)

    def _entry(self, name: str, key: str) -> dict[str, Any]:
        data = self.files[name]
        oid = hashlib.sha1(data, usedforsecurity=False).hexdigest()
        return {"type": "file", key: name, "size": len(data), "oid": oid}

    def _send_json(self, handler: BaseHTTPRequestHandler, value: Any) -> None:
        body = json.dumps(value).encode()
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def _send_file(self, handler: BaseHTTPRequestHandler, name: str, *, has_body: bool) -> None:
        data = self.files[name]
        wanted = handler.headers.get("Range", "")
        start, _, last = wanted.removeprefix("bytes=").partition("-")
        first, end = int(start or 0), int(last or len(data) - 1) + 1
        self.ranges.append((name, first, end)) if last and has_body else None
        handler.send_response(206 if wanted else 200)
        headers = {
            "ETag": f'"{self._entry(name, "path")["oid"]}"', "X-Repo-Commit": COMMIT,
            "Content-Length": str(end - first + self.n_extra_bytes), **self.headers,
        }  # fmt: skip
        for header in {"Accept-Ranges": "bytes", **headers}.items():
            handler.send_header(*header)
        if wanted:
            handler.send_header("Content-Range", f"bytes {first}-{end - 1}/{len(data)}")
        handler.end_headers()
        if not has_body:
            return
        self.fetched.append((name, first))
        sent = end
        if self.break_after is not None and name.endswith(".safetensors"):
            sent = min(end, first + self.break_after)
        step = max(1, (sent - first) // 8) if self.pause_seconds else sent - first
        with contextlib.suppress(OSError):
            for at in range(first, sent, max(1, step)):
                piece = data[at : min(sent, at + step)]
                handler.wfile.write(piece)
                self.n_bytes_sent += len(piece) if name.endswith(".safetensors") else 0
                time.sleep(self.pause_seconds)
            handler.wfile.write(bytes(self.n_extra_bytes))
        if sent < end:
            handler.close_connection = True


@pytest.fixture
def hub(tmp_path: Path, tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with the bundled model, and empty caches."""
    server = FakeHub(tiny_llama_dir)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield server
    server.close()
