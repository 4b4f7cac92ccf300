"""Uses everything of a .qsf file that a command may use."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from qsf.cli.inspect import quality_lines
from qsf.errors import QsfError
from qsf.file.reader import Reader
from qsf.model import Model
from qsf.report.record import read_meta
from qsf.text.parts import read_text_parts
from qsf.text.sampling import end_ids, resolve_sampling


def use_file(path: str | Path, *, has_engine: bool = True) -> None:
    """Open, inspect, verify and run the file. Raises the first QsfError after trying all of it."""
    errors: list[QsfError] = []
    steps = [_read, _inspect, _use_text, *([_run] if has_engine else [])]
    for step in steps:
        try:
            step(Path(path))
        except QsfError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _read(path: Path) -> None:
    with Reader(path) as reader:
        for tag in reader.sections:
            reader.read_section(tag)
        reader.verify()


def _inspect(path: Path) -> None:
    from qsf.cli.inspect import describe, report_lines

    with Reader(path) as reader:
        read_meta(reader)
        describe(reader)
        list(report_lines(reader, with_tensors=True))
        with contextlib.suppress(QsfError):  # most files hold no report
            list(quality_lines(reader))


def _use_text(path: Path) -> None:
    parts = read_text_parts(path)
    with Reader(path) as reader:
        end_ids(reader.header.eos_id, parts.generation)
    resolve_sampling(parts.generation)
    if parts.tokenizer is None:
        return
    messages = [{"role": "user", "content": "Hi, <s> you! 0 \U0001f600"}]
    ids = parts.tokenizer.encode("Hi, <s> you! 0 \U0001f600" * 9, max_tokens=512)
    parts.tokenizer.decode([*ids[:64], 0, 1, 2, 5000])
    if isinstance(parts.template, QsfError):
        raise parts.template
    parts.template.encode(messages, parts.tokenizer, max_tokens=512)


def _run(path: Path) -> None:
    output = io.StringIO()
    with Reader(path) as reader:
        has_text = not reader.sections.keys().isdisjoint(("TEXT", "TOKN"))
    with Model(path, ram_budget=None, threads=1, max_seq_len=16) as model:
        model.logits([1, 2])
        if has_text:
            for piece in model.generate([1, 2], max_tokens=2, seed=1):
                output.write(piece)
