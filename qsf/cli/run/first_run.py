"""The question of the first run: may QSF take the memory that is free?"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from qsf.cli.run.config import config_path, remember
from qsf.native.opening import plan_native
from qsf.shell.command import read_answer

if TYPE_CHECKING:
    from qsf.cli.run.options import Request
    from qsf.native.binding import MemoryPlan


def ask_for_memory(request: Request) -> Request:
    """Return the request with the budget that the user chooses, if there is a choice.

    Asks once, and only users at a terminal who never set a budget, if the model does not fit in
    the default budget but in the free memory of the machine or control group. The answer is
    written to the user's defaults; raises QsfError if that fails.
    """
    if not sys.stderr.isatty() or sys.version_info < (
        3,
        11,
    ):  # without tomllib the file could not be read
        return request
    opening = request.opening
    plan = plan_native(request.path, opening)
    if plan.is_enough and not plan.streamed_bytes:
        return request
    free = plan_native(request.path, replace(opening, ram_budget="auto"))
    if not free.is_enough or free.streamed_bytes:
        return request
    sizes = _size(_total(free)), _size(free.budget_bytes)
    is_wanted = read_answer(
        f"In {opening.ram_budget} MB {_cost(plan)}. All of it in memory takes {sizes[0]}; "
        f"{sizes[1]} are free: use what is free from now on?",
        default=True,
    )
    budget = "auto" if is_wanted else opening.ram_budget
    remember("ram-budget", budget)
    sys.stderr.write(f"(kept: ram-budget in {config_path()}; --ram-budget SIZE is for one run)\n")
    return replace(request, opening=replace(opening, ram_budget=budget))


def _cost(plan: MemoryPlan) -> str:
    if not plan.is_enough:
        return "this model does not run"
    return f"{_size(plan.streamed_bytes)} of this model are read again for each token"


def _total(plan: MemoryPlan) -> int:
    return plan.process_bytes + plan.reserve_bytes + plan.engine_bytes


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.0f} MB"
