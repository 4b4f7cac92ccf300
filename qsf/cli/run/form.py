"""``qsf run --json-schema``, ``--grammar``, ``--regex``: answers that have a form."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsf.errors import QsfArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from qsf.model import Model
    from qsf.options import GenerationOptions
    from qsf.text.constraints import Constraint

# Of the budget, for the grammar and what follows it.
RESERVE_MB = 8
_MAX_BYTES = 64 << 10


def read_constraint(path: Path, form: tuple[str, str] | None) -> Constraint | None:
    """Return the form of answers of the model at ``path``; None: any.

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
        try:
            value = data.decode()
        except UnicodeDecodeError as error:
            raise QsfArgumentError(f"{value} is not UTF-8: {error}") from None
    kind = "json" if option == "json-schema" else option
    return Constraints(path).make(kind, value, f"--{option}")


def answer_in_form(
    model: Model, options: GenerationOptions, constraint: Constraint, prompt: str | Sequence[int]
) -> Iterator[str]:
    """Yield the pieces of an answer: to the user of a conversation, or what continues token ids."""
    batch = model.start_batch(replace(options, progress=None), constraint)
    if not isinstance(prompt, str):
        yield from batch.pieces(model.session, prompt)
        return
    turns: list[dict[str, Any]] = [*model.session.messages, {"role": "user", "content": prompt}]
    pieces = []
    for piece in batch.pieces(model.session, turns):
        pieces.append(piece)
        yield piece
    model.session.messages[:] = [*turns, {"role": "assistant", "content": "".join(pieces)}]
