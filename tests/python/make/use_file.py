"""Uses everything of a .qsf file that a command may use, also with a limit of memory."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Iterable
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


# Each line of input is a path; each line of output what became of it. The limit is of private
# memory; what the interpreter and the sample take does not count.
_PROGRAM = """
import json, os, resource, sys
from qsf.errors import QsfError
from make.use_file import use_file
free_bytes = int(sys.argv[1])
use_file(sys.argv[2])
data_bytes = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_DATA, (data_bytes + free_bytes,) * 2)
resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
for line in sys.stdin:
    try:
        use_file(json.loads(line))
        outcome = "fine"
    except QsfError as error:
        outcome = type(error).__name__ + ": " + str(error)
    except BaseException as error:
        outcome = "WRONG " + repr(error)
    print(json.dumps(outcome), flush=True)
"""


def outcomes(sample: Path, paths: Iterable[Path], *, free_mb: int = 256) -> list[str]:
    """Return what becomes of each file in one process that may take ``free_mb`` MB.

    "fine", or the type and text of a QsfError; "WRONG" and what else was raised; "CRASH" and the
    exit code for the file that ends the process, which nothing should. ``sample`` is a good file:
    what using it takes is not counted.
    """
    names = [str(path) for path in paths]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(free_mb << 20), str(sample)],
        input="".join(json.dumps(name) + "\n" for name in names),
        capture_output=True,
        encoding="utf-8",
        cwd=Path(__file__).parents[1],
        check=False,
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    if len(results) < len(names):
        results.append(f"CRASH {done.returncode}: {names[len(results)]}: {done.stderr[-300:]}")
    return results
