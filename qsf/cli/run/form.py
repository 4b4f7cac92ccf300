"""``qsf run --json-schema``, ``--grammar``, ``--regex``: constraints on the form of an answer."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qsf.cli.run.answer import say
from qsf.errors import QsfArgumentError
from qsf.file.foreign_text import text_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from qsf.text.constraints import Constraint

# Bytes of the budget for the grammar and its matcher.
RESERVE_MB = 8
_MAX_BYTES = 64 << 10


def read_constraint(path: Path, form: tuple[str, str] | None) -> Callable[[], Constraint] | None:
    """Return a maker of the constraint for answers of the model at ``path``; None: no constraint.

    ``form`` is an option and its value, such as ("regex", "[a-z]+").

    It takes some megabytes for the vocabulary, so it comes before the model is opened.
    """
    if form is None:
        return None
    from qsf.text.constraints import Constraints

    option, value = form
    if option != "regex":
        with Path(value).open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise QsfArgumentError(f"{value} is larger than {_MAX_BYTES} bytes")
        value = text_of(data, value)
    kind = "json" if option == "json-schema" else option
    constraint = Constraints(path).make(kind, value, f"--{option}")
    if constraint.unenforced:
        names = ", ".join(sorted(constraint.unenforced))
        say(f"warning: --{option}: {names} cannot be enforced: check the answer")
    return constraint.copy
