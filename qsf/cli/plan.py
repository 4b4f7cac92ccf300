"""``qsf plan``: the possible speed of a model on this machine, by memory budget.

The plans are the engine's own. The limit is the slowest part of a token, at the measured rates of
memory and, for streamed weights, of the disk. Expected is the share of the limit that QSF reached
elsewhere.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qsf.errors import QsfError, one_line
from qsf.file.family import type_of
from qsf.file.reader import Reader
from qsf.file.sizes import ModelSize, size_of
from qsf.foreign_json import read_json
from qsf.kv import kv_position_bytes
from qsf.native.roofline import measure_disk, measure_memory
from qsf.shell import typer_app

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from qsf.file.kinds import LayerKind
    from qsf.file.layout import Header
    from qsf.native.binding import MemoryPlan

_BUDGETS = (("200 MB", 200), ("1 GB", 1024), ("4 GB", 4096), ("auto", "auto"))
_N_TOKENS = 128  # `tok/s` is the speed of generating so many tokens after as many others
_MB = 2**20
_CACHE_BYTES = 64 * _MB
# Shares of the limit that files of 1.1B and 7B reached on the machines of docs/benchmarks.md.
_REACHED = {"memory": 0.85, "disk": 0.8}

app = typer_app.create_app()
main = typer_app.runner(app, "qsf plan")


@app.command()
def plan_command(
    model: Annotated[str, typer.Argument(help="a model, as for `qsf run`", metavar="MODEL")],
    threads: Annotated[
        int | None, typer.Option(help="threads", min=1, max=256, show_default="one per core")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print the table only")] = False,
) -> None:
    """Say how fast a model can be on this machine in 200 MB, 1 GB, 4 GB and with `auto`."""
    from qsf.find.prepare import find_model

    path = find_model(model, is_quiet=quiet)
    with Reader(path) as reader:
        header, size = reader.header, size_of(reader)
        name = f"{path.name}: {size.n_weights / 1e6:,.0f}M weights, {type_of(reader)}"
        visited = [[kind] * reader.arch.visits(i) for i, kind in enumerate(reader.layer_kinds)]
        kinds = [kind for visits in visited for kind in visits]
    requests = [{"ram_budget": budget, "threads": threads} for _, budget in _BUDGETS]
    plans = [
        (name, plan) for (name, _), plan in zip(_BUDGETS, plans_of(model, *requests), strict=True)
    ]
    gb_per_s = _measure(path, plans, is_quiet=quiet)
    for line in table_lines(name, header, kinds, size, gb_per_s, plans):
        print(line)


# Runs in a process that does what `qsf run` does, because a plan counts its own process.
_PLAN = """
import json, sys
from dataclasses import asdict
from qsf.cli.run.main import path_of
from qsf.model import Model
model, *requests = json.loads(sys.argv[1])
path = path_of(model, is_quiet=True, is_yes=False)
print(json.dumps([asdict(Model.plan(path, **options)) for options in requests]))
"""


def plans_of(model: str | Path, *requests: Mapping[str, Any]) -> list[MemoryPlan]:
    """Return the plan of ``qsf run`` for each request: the options of ``Model``."""
    from qsf.native.binding import MemoryPlan

    request = json.dumps([str(model), *requests])
    done = subprocess.run(
        [sys.executable, "-c", _PLAN, request], stdout=subprocess.PIPE, check=False
    )
    if done.returncode != 0:
        raise QsfError(f"{model}: the process that plans ended with {done.returncode}")
    return [MemoryPlan(**facts) for facts in read_json(done.stdout)]


def _measure(
    path: Path, plans: list[tuple[str, MemoryPlan]], *, is_quiet: bool
) -> tuple[float, float]:
    """Return GB/s of memory, and of the disk by the best way; 0: not measured."""

    def say(text: str) -> None:
        if not is_quiet:
            sys.stderr.write(f"measuring: {one_line(text)}\n")

    memory = measure_memory([plans[0][1].n_threads], say)
    is_streamed = any(_read_bytes(plan) for _, plan in plans)
    disk = measure_disk(path, say) if is_streamed else {}
    return max(memory.values(), default=0.0), max(disk.values(), default=0.0)


def _read_bytes(plan: MemoryPlan) -> float:
    """Return the bytes that a token reads from the file, if all experts are chosen alike."""
    if plan.n_experts == 0:
        return float(plan.streamed_bytes)
    missing = 1.0 - plan.expert_slots / plan.n_experts
    return plan.streamed_bytes + plan.expert_token_bytes * missing


def table_lines(
    name: str,
    header: Header,
    kinds: Sequence[LayerKind],
    size: ModelSize,
    gb_per_s: tuple[float, float],
    plans: list[tuple[str, MemoryPlan]],
) -> list[str]:
    """Return the table: a line for each budget, [budget, plan], in their order."""
    lines = [
        f"{name}, {size.file_bytes / _MB:,.0f} MB",
        f"{'--ram-budget':>12} {'taken MB':>10} {'read MB/token':>14} {'tok/s expected':>15} "
        f"{'at most':>8}  limited by",
    ]
    for budget, plan in plans:
        if not plan.is_enough:
            least_mb = -(-plan.min_budget_bytes // _MB)
            lines.append(f"{budget:>12} too small: {least_mb} MB would do")
            continue
        position_bytes = sum(
            kv_position_bytes(1, kind.n_kv_heads, kind.head_dim, plan.kv_k_bits, plan.kv_v_bits)
            for kind in kinds
            if kind.has_attention
        )
        # Once read and once written
        state_bytes = 2 * sum(kind.state_bytes(header.dim) for kind in kinds)
        kv_bytes = position_bytes * (_N_TOKENS + (_N_TOKENS + 1) / 2) + state_bytes
        n_bytes = {"memory": size.token_bytes + kv_bytes, "disk": _read_bytes(plan)}
        rates = dict(zip(n_bytes, gb_per_s, strict=True))
        taken = plan.taken_bytes / _MB
        expected, most, by = ("-", "-", "not measured")
        if all(rates[part] for part in n_bytes if n_bytes[part]):
            seconds = {part: n / rates[part] / 1e9 for part, n in n_bytes.items() if n}
            by = max(seconds, key=seconds.__getitem__)  # the slowest part of a token
            most, expected = _speed(1 / seconds[by]), _speed(_REACHED[by] / seconds[by])
        read_mb = _read_bytes(plan) / _MB
        lines.append(
            f"{budget:>12} {taken:>10,.1f} {read_mb:>14,.1f} {expected:>15} {most:>8}  {by}"
        )
    if size.token_bytes < _CACHE_BYTES:
        lines.append("so small a model fits into the processor's cache, and may be faster")
    return lines


def _speed(tok_per_s: float) -> str:
    return f"{tok_per_s:,.{1 if tok_per_s < 100 else 0}f}"
