"""Options of commands that put the layers of a model on several machines of a Ray cluster."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qsf.options import CheckedOptions, Number, Whole, option_field
from qsf.shell.arguments import Text

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from qsf.model import Model
    from qsf.options import ModelOptions

OF_MACHINES = ("machines",)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinesOptions(CheckedOptions):
    """Which machines. Checked when made. Raises QsfArgumentError, which names the option."""

    ray: str | None = option_field(
        None,
        Text("ADDRESS", may_be_empty=False),
        "a Ray cluster: HOST:PORT of its head, auto for the one that runs here, or local to start "
        "one on this machine; needs qsf[ray] on each (docs/machines.md)",
        commands=OF_MACHINES,
    )
    machines: int | None = option_field(
        None,
        Whole(2, 256),
        "with --ray: put the layers of the model on so many machines, this one included, each in "
        "the budget",
        commands=OF_MACHINES,
    )
    stage_timeout: float | None = option_field(
        None,
        Number(0.1, 86400),
        "with --machines: seconds without an answer of another machine that are an error",
        "60",
        commands=OF_MACHINES,
    )

    def staged(
        self, path: Path, opening: ModelOptions, note: Callable[[str], None]
    ) -> AbstractContextManager[Model] | None:
        """Return the model over the machines; None: it is to be opened here."""
        if self.machines is None or self.ray is None:
            return None
        from qsf.ray.stages import open_stages

        return open_stages(
            path, opening, self.machines, address=self.ray, timeout=self.stage_timeout, note=note
        )

    def planned(self, path: Path, opening: ModelOptions) -> tuple[list[str], ModelOptions]:
        """Return what the plan says of other machines, and the options of this one."""
        if self.machines is None or self.ray is None:
            return [], opening
        from qsf.ray.stages import plan_stages

        return plan_stages(path, opening, self.machines, self.ray)
