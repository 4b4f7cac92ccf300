"""One model over several machines: ``qsf.ray.open``. Each stage is an actor of Ray.

The machine of the caller has the last layers, the head, the sessions and the drafts, and asks for
rows; a stage asks the one before it.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from qsf.errors import QsfArgumentError, QsfCancelledError, QsfError, QsfIOError
from qsf.file.reader import Reader
from qsf.model import Model
from qsf.native.binding import RowsWanted, describe_machine, state_key
from qsf.native.opening import BYTES_PER_MB, budget_mb
from qsf.options import ModelOptions, Whole, call_with, check_value
from qsf.ray.batch import check_headers, headers_of, wherever, wherever_files
from qsf.ray.cluster import STAGE_ENVIRONMENT, connect, import_ray, live_nodes
from qsf.stage import Stage

# A stage is started again so often, and a request that it lost sent again
_MAX_RESTARTS = 8
_MAX_RETRIES = 3
_SLICE_SECONDS = 0.1  # in which a cancel is heard
_OPENING_SECONDS = 600
_TIMEOUT_SECONDS = 60.0
_QUIET_SECONDS = 5.0  # without an answer, after which a line says so
_RAY_BYTES = 150 * BYTES_PER_MB  # of a machine, in no budget
_SAME = slice(24, 32)  # of a state's key: the C library's cosines, the version


class Part(NamedTuple):
    """The layers of a machine: from ``first`` to before ``end``."""

    first: int
    end: int
    node_id: str
    address: str

    @property
    def name(self) -> str:
        """The part for people."""
        return f"layers {self.first} to {self.end - 1} on {self.address}"


def open(
    model: str | os.PathLike[str],
    *,
    machines: int,
    address: str = "auto",
    stage_timeout: float = _TIMEOUT_SECONDS,
    **options: Any,
) -> AbstractContextManager[Model]:
    """Open a model whose layers lie on so many machines of a Ray cluster; a context manager.

    Args:
        model: the file, by a path that all machines have.
        machines: how many; this one, with the last layers, included.
        address: of the cluster, as for ``qsf.ray.connect``.
        stage_timeout: seconds after which a stage that gives no rows is an error.
        options: of ``ModelOptions``; ``ram_budget`` is for each machine.

    Raises:
        QsfArgumentError: there are fewer machines, the model cannot be cut, or strangers may enter
            the cluster.
        QsfError: what ``Model(path, ...)`` raises, here or on another machine.
    """
    return open_stages(
        model, ModelOptions(**options), machines, address=address, timeout=stage_timeout
    )


@contextmanager
def open_stages(
    model: str | os.PathLike[str],
    options: ModelOptions,
    machines: int,
    *,
    address: str,
    timeout: float | None = None,
    note: Callable[[str], None] = lambda _text: None,
) -> Iterator[Model]:
    """Do what ``open`` does with options that are checked; ``note`` gets a text for each part."""
    connect(address)
    ray = import_ray()
    parts = place(model, options, machines)
    for part in parts:
        note(part.name)
    options = wherever_files(options)
    strategies = import_ray("ray.util.scheduling_strategies")
    of_stage = ray.remote(num_cpus=0, max_restarts=_MAX_RESTARTS, max_task_retries=_MAX_RETRIES)(
        Host
    )
    actors: list[Any] = []
    rows = None
    try:
        for part in parts[:-1]:
            strategy = strategies.NodeAffinitySchedulingStrategy(part.node_id, soft=True)
            how = replace(options, layers=(part.first, part.end), draft="off")
            actor = of_stage.options(
                scheduling_strategy=strategy, runtime_env={"env_vars": STAGE_ENVIRONMENT}
            ).remote(wherever(model), headers_of(model, how), how, part, rows)
            actors.append(actor)
            rows = Rows(actor, part.name, timeout or _TIMEOUT_SECONDS)
        last = parts[-1]
        how = replace(options, layers=(last.first, last.end))
        if options.draft == "auto" and call_with(Model.plan, model, how).state_bytes:
            how = replace(how, draft="off")  # a stage would evaluate the tokens before them again
        if rows is not None:
            rows.note = note
        how = replace(how, rows=rows)
        with Model.opened(model, how) as opened:
            mine = state_key(opened._opened.native)[_SAME]
            for actor, part in zip(actors, parts, strict=False):
                if wait(actor.key.remote, part.name, _OPENING_SECONDS) != mine:
                    raise QsfArgumentError(
                        f"{part.name}: another version of QSF, or another C library, whose cosines "
                        "differ: the bits would"
                    )
            yield opened
    finally:
        for actor in actors:
            ray.kill(actor)


def plan_stages(
    model: str | os.PathLike[str], options: ModelOptions, machines: int, address: str
) -> tuple[list[str], ModelOptions]:
    """Return the parts for people, and the options of this machine's part."""
    connect(address)
    parts = place(model, options, machines)
    mine = replace(options, layers=(parts[-1].first, parts[-1].end))
    return [part.name for part in parts], mine


def place(model: str | os.PathLike[str], options: ModelOptions, machines: int) -> list[Part]:
    """Return the parts, whose bytes are as the budgets of their machines; the last is this one's.

    Raises QsfArgumentError if there are too few machines, or the model cannot be cut so often.
    """
    check_value("machines", machines, Whole(2, 256))
    here = import_ray().get_runtime_context().get_node_id()
    nodes = sorted(live_nodes(), key=lambda node: str(node["NodeID"]) == here)
    if len(nodes) < machines:
        raise QsfArgumentError(f"{machines} machines: the Ray cluster has {len(nodes)}")
    rooms = [_room(node, options) for node in nodes]
    others = sorted(range(len(nodes) - 1), key=lambda i: -rooms[i])[: machines - 1]
    chosen = [*others, len(nodes) - 1]
    with Reader(model) as reader:
        n_trunk = len(reader.layers) - reader.layer_kinds[-1].is_mtp
        weights = [unit.raw_bytes for unit in reader.layers[:n_trunk]]
        for layer in range(n_trunk):
            weights[layer] += sum(unit.raw_bytes for unit in reader.experts_of(layer))
        head = (reader.embedding if reader.arch.tied_head else reader.final).raw_bytes
    budgets = [rooms[i] for i in chosen]
    budgets[-1] = max(0, budgets[-1] - head)
    cuts = choose_cuts(weights, budgets, lambda cut: _may_cut(model, options, cut, n_trunk))
    ends = [0, *cuts, n_trunk]
    return [
        Part(*layers, str(nodes[i]["NodeID"]), nodes[i]["NodeManagerAddress"])
        for layers, i in zip(pairwise(ends), chosen, strict=True)
    ]


def choose_cuts(
    weights: Sequence[int], budgets: Sequence[int], may_cut: Callable[[int], bool]
) -> list[int]:
    """Return the first layers of all parts but the first.

    The parts of ``weights``, the bytes of the layers, are as ``budgets``, as near as allowed.
    """
    allowed = [cut for cut in range(1, len(weights)) if may_cut(cut)]
    if len(allowed) < len(budgets) - 1:
        raise QsfArgumentError(
            f"machines: {len(budgets)} are too many: the model can be cut at {len(allowed)} places"
        )
    cuts: list[int] = []
    total, share = sum(budgets) or 1, 0
    for i, budget in enumerate(budgets[:-1]):
        share += budget
        wanted = sum(weights) * share / total
        n_later = len(budgets) - 2 - i  # cuts that must follow
        rest = [cut for cut in allowed if not cuts or cut > cuts[-1]]
        rest = rest[: len(rest) - n_later]
        cuts.append(min(rest, key=lambda cut: abs(sum(weights[:cut]) - wanted)))
    return cuts


def _may_cut(model: Any, options: ModelOptions, cut: int, n_layers: int) -> bool:
    """Return whether no layer from ``cut`` on needs what earlier ones keep."""
    try:
        call_with(Model.plan, model, replace(options, layers=(cut, n_layers)))
    except QsfArgumentError as error:
        if error.argument is not None or "whose keys and values" not in str(error):
            raise
        return False
    return True


def _room(node: dict[str, Any], options: ModelOptions) -> int:
    """Return the bytes for the model on a machine: the budget, or half of what is free there."""
    n_mb = budget_mb(options.ram_budget)
    if isinstance(n_mb, int):
        return n_mb * BYTES_PER_MB
    strategies = import_ray("ray.util.scheduling_strategies")
    strategy = strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    measured = import_ray().remote(num_cpus=0)(_free_bytes).options(scheduling_strategy=strategy)
    address = node["NodeManagerAddress"]
    return max(0, int(wait(measured.remote, address, _OPENING_SECONDS)) - _RAY_BYTES)


def _free_bytes() -> int:
    return describe_machine().available_bytes // 2


class Host:
    """The actor that has a stage."""

    def __init__(
        self,
        path: str,
        headers: tuple[bytes, ...],
        options: ModelOptions,
        part: Part,
        rows: Rows | None,
    ) -> None:
        check_headers(path, options, headers)
        self._stage = Stage.opened(path, replace(options, rows=rows))

    def rows(self, wanted: list[tuple[int, bytes, int]]) -> bytes:
        """Return the rows of ``Stage.rows``; tokens are as bytes."""
        return bytes(self._stage.rows([RowsWanted.of(*each) for each in wanted]))

    def pid(self) -> int:
        """Return the number of the actor's process."""
        return os.getpid()

    def key(self) -> bytes:
        """Return what must be equal where bits are to be."""
        return state_key(self._stage.model._opened.native)[_SAME]


class Rows:
    """The source of rows of a stage's successor: asks the stage's actor."""

    def __init__(self, actor: Any, name: str, timeout: float) -> None:
        self._actor, self._name, self._timeout = actor, name, timeout
        self.note: Callable[[str], None] | None = None  # a later stage's has none

    def __call__(self, wanted: list[RowsWanted], is_cancelled: Callable[[], bool]) -> Any:
        """Return the rows; see ``wait`` for what it raises."""
        request = [(sequence, tokens.tobytes(), n_new) for sequence, tokens, n_new in wanted]
        return wait(
            lambda: self._actor.rows.remote(request),
            self._name,
            self._timeout,
            is_cancelled,
            self.note,
        )


def wait(
    call: Callable[[], Any],
    name: str,
    timeout: float,
    is_cancelled: Callable[[], bool] | None = None,
    note: Callable[[str], None] | None = None,
) -> Any:
    """Return the result of ``call()``, which is made again while the part's process is not there.

    ``note`` gets a text when there is no answer for some seconds.

    Raises:
        QsfIOError: the part of this name is lost, or silent for ``timeout`` seconds.
        QsfCancelledError: ``is_cancelled()``.
        QsfError: that of the call.
    """
    ray, exceptions = import_ray(), import_ray("ray.exceptions")
    started = time.monotonic()
    ref = call()
    while True:
        if is_cancelled is not None and is_cancelled():
            raise QsfCancelledError(f"cancelled while waiting for {name}")
        quiet_seconds = time.monotonic() - started
        if note is not None and quiet_seconds > _QUIET_SECONDS:
            note(f"{name}: no answer for {_QUIET_SECONDS:g} s; waiting for {timeout:g} s")
            note = None
        if quiet_seconds > timeout:
            raise QsfIOError(f"{name}: no answer for {timeout:g} s (--stage-timeout)")
        if not ray.wait([ref], timeout=_SLICE_SECONDS)[0]:
            continue
        try:
            return ray.get(ref)
        except exceptions.ActorUnavailableError:  # it is being started, perhaps elsewhere
            time.sleep(_SLICE_SECONDS)
            ref = call()
        except exceptions.RayTaskError as error:
            cause = error.cause
            raise (
                cause if isinstance(cause, QsfError) else QsfIOError(f"{name}: {cause}")
            ) from error
        except exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1].removeprefix("qsf.errors.")
            raise QsfIOError(f"{name} is lost: {reason:.400}") from error
