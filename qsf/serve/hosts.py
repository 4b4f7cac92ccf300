"""The models of a server: which are in memory, who uses them, and which one is evicted for another.

docs/decisions/014-models.md has the reasons.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import asyncio
import math
import threading
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsf.errors import QsfMemoryError
from qsf.native.binding import describe_machine
from qsf.serve.http.problems import Problem
from qsf.serve.serving import LATEST

if TYPE_CHECKING:
    from qsf.native.binding import ModelInfo
    from qsf.native.opening import Adapter
    from qsf.serve.scheduling.scheduler import Scheduler
    from qsf.serve.scheduling.slot_files import SlotFiles
    from qsf.serve.serving import Serving


class Host:
    """A model in memory, with the parts that answer its requests."""

    def __init__(
        self,
        serving: Serving,
        scheduler: Scheduler,
        slot_files: SlotFiles | None = None,
        prefix: array[int] | None = None,
    ) -> None:
        self.serving = serving
        self.scheduler = scheduler
        self._slot_files = slot_files
        self._prefix = prefix
        self._thread: threading.Thread | None = None
        self.n_users = 0
        self.used = time.monotonic()
        self.keep_seconds = math.inf  # that it stays in memory unused
        self.leaving: asyncio.Task[None] | None = None  # does that wait

    def start(self, deliver: Callable[[], None]) -> None:
        self.scheduler.prepare(self._prefix)
        self._thread = threading.Thread(
            target=self.scheduler.run, args=(deliver,), name="qsf-engine", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End running jobs, and write the tokens of sequences to files."""
        self.scheduler.close(at_once=True)
        if self._thread is not None:
            self._thread.join()
            if self._slot_files is not None:
                self.scheduler.write_all()
                self._slot_files.close()


class Hosts:
    """Models by their names; those in memory are ``loaded``. In the loop's thread."""

    def __init__(
        self,
        paths: Mapping[str, Path],
        first: Host,
        load: Callable[[str, int | None, bool], Host],
        *,
        adapter_folder: Path | None = None,
        wait_seconds: float,
        keep_seconds: float,
        aliases: Mapping[str, str] | None = None,
        takes_any_name: bool = False,
    ) -> None:
        """Set the files of all models, and the one in memory.

        Args:
            paths: the files.
            first: the model in memory.
            load: opens a model inside so many MB (None: no limit), alone or next to others.
                Raises QsfMemoryError if there is no room.
            adapter_folder: where clients may take adapters from; None: nowhere.
            wait_seconds: how long a request may wait for memory that others use.
            keep_seconds: how long a model stays in memory unused, unless its last request says.
            aliases: further names of models, each with the name in ``paths``.
            takes_any_name: an unknown name means the model used last.
        """
        plan = first.serving.model.info.plan
        self.paths = paths
        # Gets a model by its name and adds it to ``paths``; yields lines of progress.
        self.fetch: Callable[[str], AsyncGenerator[dict[str, Any], None]] | None = None
        # The one spelling of a name under which ``fetch`` adds a model.
        self.spelled: Callable[[str], str] = str
        self.adapters = first.serving.model.adapters  # of the only model, else none
        self.adapter_folder = adapter_folder
        # Of requests that choose no adapter; None: as the model is opened.
        self.usual_scales: tuple[float, ...] | None = None
        self.loaded = {first.serving.name: first}
        self.infos: dict[str, ModelInfo] = {first.serving.name: first.serving.model.info}
        self._aliases, self._takes_any_name = aliases or {}, takes_any_name
        self._load, self.wait_seconds, self.keep_seconds = load, wait_seconds, keep_seconds
        self.budget_bytes, self._base_bytes = plan.budget_bytes, plan.process_bytes
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self._deliver: Callable[[], None] = lambda: None

    @property
    def taken_bytes(self) -> int:
        return max(0, describe_machine().resident_bytes - self._base_bytes)

    @property
    def current(self) -> Host:
        """The model in memory that was used last. Raises Problem if there is none."""
        if not self.loaded:
            text = "no model is in memory now: a request to one loads it"
            raise Problem(503, "not_loaded", text, retry_seconds=1)
        return max(self.loaded.values(), key=lambda host: host.used)

    def start(self, deliver: Callable[[], None]) -> None:
        self._deliver = deliver
        self.current.start(deliver)
        self._keep(self.current, self.keep_seconds)

    @asynccontextmanager
    async def using(self, name: str | None, *, is_loading: bool = True) -> AsyncIterator[Host]:
        """Yield a model, which stays in memory until the context ends; None: the one used last.
        Raises Problem for an unknown name, and for one that is not in memory if it may not load it.
        """
        host = await self._get(name, is_loading=is_loading)
        if host.leaving is not None:
            host.leaving.cancel()
        host.n_users += 1
        host.used = time.monotonic()
        try:
            yield host
        finally:
            host.n_users -= 1
            self._freed.set()
            if not host.n_users:
                self._keep(host, host.keep_seconds)

    def _keep(self, host: Host, seconds: float) -> None:
        """Let an unused model leave memory after some time."""
        host.used, host.keep_seconds = time.monotonic(), seconds
        if seconds < math.inf:
            host.leaving = asyncio.get_running_loop().create_task(self._leave(host))

    async def _leave(self, host: Host) -> None:
        await asyncio.sleep(host.keep_seconds)
        async with self._turn:
            if self.loaded.get(host.serving.name) is host:
                await self._let_go(host)

    async def _get(self, name: str | None, *, is_loading: bool) -> Host:
        async with self._turn:  # requests that wait for memory stay first
            name = self._known(name) if name else None
            if name is None:
                name = self.current.serving.name if self.loaded else next(iter(self.paths))
            if not is_loading and name not in self.loaded:
                raise Problem(404, "not_loaded", f"{name} is not in memory", param="model")
            deadline = time.monotonic() + self.wait_seconds
            while name not in self.loaded:
                await self._bring(name, deadline)
            return self.loaded[name]

    async def reopen(self, change: Callable[[tuple[Adapter, ...]], tuple[Adapter, ...]]) -> None:
        """Open the only model with other adapters, after the requests that use it; later ones wait.

        If it cannot be opened with them, it is opened as before. Raises Problem, QsfError.
        """
        name = next(iter(self.paths))
        deadline = time.monotonic() + self.wait_seconds
        async with self._turn:
            change(self.adapters)
            while (host := self.loaded.get(name)) is not None and host.n_users:
                await self._wait("the change of adapters waits for requests that run", deadline)
            before, usual = self.adapters, self.usual_scales
            self.adapters = change(before)
            if usual is not None:
                kept = dict(zip(before, usual, strict=True))
                scales = (kept.get(each, 0.0) for each in self.adapters)
                self.usual_scales = tuple(scales) or None
            try:
                if host is not None:
                    if host.leaving is not None:
                        host.leaving.cancel()
                    await self._let_go(host)
                await self._bring(name, deadline)
            except BaseException as error:
                self.adapters, self.usual_scales = before, usual
                if isinstance(error, Exception):  # else the server ends
                    await self._bring(name, deadline)
                raise
            finally:
                if name in self.loaded:
                    self._keep(self.loaded[name], self.keep_seconds)

    def knows(self, name: str) -> bool:
        names = (each.name for each in self.adapters if each.name)
        return name in self.paths or name in self._aliases or name in names

    def _known(self, name: str) -> str | None:
        """Return the name in ``paths`` for a client's name; None: any model. Raises Problem."""
        bare = name.removesuffix(LATEST)
        for known in (name, bare, self.spelled(bare)):
            if self.knows(known):
                return (
                    known
                    if known in self.paths
                    else self._aliases.get(known, next(iter(self.paths)))
                )
        if self._takes_any_name:
            return None
        here = ", ".join(self.paths) + (" is" if len(self.paths) == 1 else " are")
        text = f"the model {name[:100]!r} is not here: {here} (--any-model lets any name pass)"
        raise Problem(404, "model_not_found", text, param="model")

    async def _bring(self, name: str, deadline: float) -> None:
        """Load a model; evicts an unused one, or waits for one, if memory is short."""
        loop = asyncio.get_running_loop()
        left_bytes = self.budget_bytes - self._promised_bytes()
        budget_mb = max(1, left_bytes >> 20) if self.budget_bytes else None
        try:
            host = await loop.run_in_executor(None, self._load, name, budget_mb, not self.loaded)
        except QsfMemoryError:
            if not self.loaded:
                raise
        else:
            await loop.run_in_executor(None, host.start, self._deliver)
            host.keep_seconds = self.keep_seconds
            self.loaded[name] = host
            self.infos[name] = host.serving.model.info
            return
        idle = [host for host in self.loaded.values() if not host.n_users]
        if idle:
            await self._let_go(min(idle, key=lambda host: host.used))
            return
        await self._wait(f"{name} waits for the memory of models that are used", deadline)

    async def _wait(self, text: str, deadline: float) -> None:
        """Wait until a request has ended. Raises Problem with the text if none does in time."""
        self._freed.clear()
        try:
            await asyncio.wait_for(self._freed.wait(), deadline - time.monotonic())
        except asyncio.TimeoutError:
            raise Problem(503, "queue_timeout", text, retry_seconds=10) from None

    async def _let_go(self, host: Host) -> None:
        loop = asyncio.get_running_loop()
        del self.loaded[host.serving.name]
        await loop.run_in_executor(None, host.stop)
        await loop.run_in_executor(None, host.serving.model.close)

    def _promised_bytes(self) -> int:
        """Return the bytes that loaded models may still allocate: their plans minus their present
        memory.
        """
        plans = [host.serving.model.info.plan for host in self.loaded.values()]
        return max(0, sum(plan.engine_bytes for plan in plans) - self.taken_bytes)
