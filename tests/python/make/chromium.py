"""A headless Chromium, driven by its own protocol over two pipes."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--hide-scrollbars",
)


def find_browser() -> str | None:
    """The path of a Chromium, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a browser of its own."""

    def __init__(self, path: str, folder: Path) -> None:
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()
        # The browser reads commands from 3 and writes answers to 4; 60 and 61 are out of the way.
        script = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        words = [path, *FLAGS, f"--user-data-dir={folder / 'profile'}", "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            ["bash", "-c", script, *words, "about:blank"],
            pass_fds=(to_read, to_write),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._received = b""
        self._n_calls = 0
        self.errors: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def _read(self) -> Any:
        while b"\0" not in self._received:
            more = os.read(self._in, 1 << 16)
            assert more, "the browser has ended"
            self._received += more
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def _call(self, method: str, session: str | None = None, **params: Any) -> Any:
        self._n_calls += 1
        request = {"id": self._n_calls, "method": method, "params": params}
        if session is not None:
            request["sessionId"] = session
        os.write(self._out, json.dumps(request).encode() + b"\0")
        while True:
            message = self._read()
            if message.get("id") == self._n_calls:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, message: Any) -> None:
        """Keep what went wrong inside the page."""
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(message["params"]["exceptionDetails"])[:500])
        if message.get("method") == "Log.entryAdded":
            entry = message["params"]["entry"]
            if entry["level"] == "error":
                self.errors.append(f"{entry['text']} {entry.get('url', '')}")

    def call(self, method: str, **params: Any) -> Any:
        return self._call(method, self._session, **params)

    def show(self, url: str, size: tuple[int, int], scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=size[0],
            height=size[1],
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of a script in the page; promises are waited for."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 60) -> None:
        ends_at = time.monotonic() + seconds
        while not self.run(f"!!({condition})"):
            if time.monotonic() > ends_at:
                shown = self.run("document.body.innerText.slice(0, 1000)")
                raise AssertionError(f"not {condition}: {self.errors}, the page: {shown}")
            time.sleep(0.02)

    def type(self, text: str) -> None:
        """Type into the field that has the focus; a page gives it with its first frame."""
        self.wait_for("document.activeElement !== document.body")
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        code = {"Enter": 13, "Escape": 27, "Tab": 9}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more
            )

    def picture(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])
