"""Models of the hub that clients of a server ask for: fetched and converted in other processes."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import asyncio
import os
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path
from typing import Any

from qsf.errors import ChildFailedError, QsfArgumentError, QsfIOError
from qsf.find.names import hub_address, hub_name
from qsf.find.prepare import child_command, find_model
from qsf.foreign_json import read_json
from qsf.shell.progress import PROGRESS_LINES

_MAX_LINE_BYTES = 64 << 10
_MAX_MODELS = 200  # of the server: each takes memory
_STATUS = {"B": "pulling", "MB": "converting", "tokens": "measuring"}


class Pulls:
    """One at a time, others wait. In the loop's thread."""

    def __init__(self, paths: dict[str, Path], check: Callable[[str, Path], None]) -> None:
        """Set the models of the server, which ``lines`` adds to if ``check`` raises no QsfError."""
        self._paths, self._check = paths, check
        self._turn = asyncio.Lock()

    async def lines(self, name: str) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the progress in ollama's form until the model is one of the server's.

        Closing the iterator ends the work, which the next call continues. Raises QsfError.
        """
        name, address = hub_name(name), hub_address(name)
        if len(self._paths) >= _MAX_MODELS:
            raise QsfArgumentError(f"the server has {_MAX_MODELS} models, which is its most")
        yield {"status": "pulling manifest"}
        async with self._turn:
            process = await asyncio.create_subprocess_exec(
                *child_command(["pull", address]),
                stdin=DEVNULL,
                stdout=DEVNULL,
                stderr=PIPE,
                env={**os.environ, "PYTHONSAFEPATH": "1", PROGRESS_LINES: "1"},
            )
            text = "it was killed"
            try:
                while data := await process.stderr.readline():  # type: ignore[union-attr]
                    line = data.decode("utf-8", "replace").strip()
                    if line.startswith('{"unit":'):
                        yield _in_ollamas_form(read_json(line, memory_bytes=_MAX_LINE_BYTES), name)
                    else:
                        text = line or text
                is_done = await process.wait() == 0
            finally:
                if process.returncode is None:
                    process.terminate()
                    await process.wait()
            if not is_done:
                raise QsfIOError(text.partition(": error: ")[2] or text)
            loop = asyncio.get_running_loop()
            get_path = partial(find_model, address, is_quiet=True)
            try:
                path = await loop.run_in_executor(None, get_path)
            except ChildFailedError:
                raise QsfIOError(f"{name} was removed while it came: pull it again") from None
            await loop.run_in_executor(None, self._check, name, path)
        self._paths[name] = path


def served_name(name: str) -> str:
    """Return the name of a pulled model in its one spelling; other names unchanged."""
    try:
        return hub_name(name)
    except QsfArgumentError:
        return name


def _in_ollamas_form(facts: dict[str, Any], name: str) -> dict[str, Any]:
    status = f"{_STATUS[facts.pop('unit')]} {name}"
    return {"status": status, "digest": status, **facts}  # clients have a bar for each digest
