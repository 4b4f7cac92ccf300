"""``qsf embed``: a vector for each line of a file.

Vectors go to standard output or a file, one a line as a JSON list, in the order of the texts.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from qsf.errors import QsfArgumentError
from qsf.file.foreign_text import Lines, text_of
from qsf.shell import command, typer_app
from qsf.text.embedding import ALL_POOLINGS

_MAX_LINE_BYTES = 4 << 20
_EPILOG = """Examples:
  qsf embed model.qsf texts.txt > vectors.jsonl
  qsf embed model.qsf texts.txt --dimensions 256 --pooling mean --parallel 8
  echo "A cat" | qsf embed model.qsf -
"""

app = typer_app.create_app()
main = typer_app.runner(app, "qsf embed")


@app.command(epilog=_EPILOG)
def embed_command(
    model: Annotated[str, typer.Argument(help="a model, as for `qsf run`", metavar="MODEL")],
    file: Annotated[
        Path, typer.Argument(help='texts, one a line; "-" is standard input', metavar="FILE")
    ],
    pooling: Annotated[
        str | None,
        typer.Option(
            help="hidden states that a vector is of: that of the last token, the mean, or of an "
            "encoder's first token",
            metavar="|".join(ALL_POOLINGS),
            show_default="as the model was trained",
        ),
    ] = None,
    dimensions: Annotated[
        int | None, typer.Option(help="values of a vector", min=1, show_default="all")
    ] = None,
    parallel: Annotated[int, typer.Option(help="texts in a pass", min=1, max=256)] = 4,
    max_seq_len: Annotated[int | None, typer_app.model_option("max_seq_len")] = None,
    ram_budget: Annotated[Any, typer_app.model_option("ram_budget")] = "auto",
    threads: Annotated[int | None, typer_app.model_option("threads")] = None,
) -> None:
    """Make a vector of length 1 of each line of FILE, to be compared by products."""
    from qsf.find.prepare import find_model
    from qsf.model import Model
    from qsf.native.opening import budget_mb

    path = find_model(model, is_quiet=False)
    options: Any = {"threads": threads, "max_seq_len": max_seq_len, "draft": "off"}
    with (
        command.open_lines(file) as lines,
        Model(path, ram_budget=budget_mb(ram_budget), sessions=parallel, **options) as opened,
    ):
        texts = _texts(lines)
        for vector in opened.embed(texts, pooling=pooling, dimensions=dimensions):
            command.show_lines("[" + ", ".join(f"{value:.9g}" for value in vector) + "]")
        command.say_line(opened.info.plan.text)


def _texts(lines: Lines) -> Iterator[str]:
    number = 0
    while line := lines.readline(_MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > _MAX_LINE_BYTES:
            raise QsfArgumentError(f"line {number} is longer than {_MAX_LINE_BYTES} bytes")
        text = text_of(line, f"line {number}").rstrip("\r\n")
        if not text:
            raise QsfArgumentError(f"line {number} is empty: there is no text")
        yield text
