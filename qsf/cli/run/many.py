"""``qsf run --prompts FILE``: answers to many prompts, resumable after an interruption."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import hashlib
import operator
import time
from array import array
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from qsf.cli.run import report
from qsf.cli.run.answer import say, show
from qsf.errors import QsfArgumentError, QsfError, shown
from qsf.file.foreign_text import Lines
from qsf.foreign_json import JsonError, read_json
from qsf.native.binding import describe_machine
from qsf.options import MAX_U32
from qsf.shell import command
from qsf.system.signals import Watcher

if TYPE_CHECKING:
    from qsf.cli.run.options import Request
    from qsf.model import Model


# Of the memory that lines may take if no model is open here: half of a plan's least reserve
_INPUT_BYTES = 64 << 20


def answer_many(model: Model, request: Request, file: Lines) -> int:
    """Answer every line of --prompts; the exit code is 1 if a line failed."""
    is_raw = request.raw or model.chat_template.is_plain
    lines = _Lines(request, file, model.input_bytes, is_raw=is_raw)
    batch = model.start_batch(request.generation)

    def records() -> Generator[dict[str, Any], None, None]:
        with (
            closing(lines.prompts()) as prompts,
            closing(batch.answers(model.session, prompts)) as answers,  # type: ignore[type-var]
        ):
            for answer in answers:
                stats = answer.stats
                found = {} if stats is None else report.answer_record(model, stats, answer.text)
                yield lines.record(answer.index, answer.error, found)

    def cost() -> str:
        each = f"{lines.n_tokens / max(1, batch.n_passes):.2f} tokens a pass"
        peak = f"peak RSS {describe_machine().peak_bytes / 2**20:.1f} MB"
        return f"{each} | {peak} | {model.info.plan.text}"

    return _answer(request, lines, records(), model.cancel, cost)


def answer_over_ray(request: Request, file: Lines) -> int:
    """Answer every line of --prompts on the machines of --ray; exit codes as `answer_many`."""
    from qsf.ray.batch import answer_rows
    from qsf.ray.cluster import connect
    from qsf.text.parts import read_text_parts
    from qsf.text.thinking import thinking_args

    assert request.ray is not None
    template = read_text_parts(request.path).template
    if isinstance(template, QsfError):
        raise template
    is_raw = request.raw or template.is_plain
    generation = request.generation
    if not (request.has_length or is_raw):
        generation = replace(generation, max_tokens=MAX_U32)
    if request.thinks is not None:
        args = thinking_args(template.source, is_on=request.thinks)
        args = {**(generation.template_args or {}), **args}
        generation = replace(generation, template_args=args)
    lines = _Lines(replace(request, generation=generation), file, _INPUT_BYTES, is_raw=is_raw)
    connect(request.ray)

    def records() -> Generator[dict[str, Any], None, None]:
        rows = [
            {"row": row, "messages": command.json_text(prompt)}
            for row, prompt in enumerate(lines.prompts())
        ]
        workers = request.workers
        for row in (
            answer_rows(rows, request.model, request.opening, generation, workers) if rows else ()
        ):
            error = None if row["error"] is None else QsfError(row["error"])
            found = {
                "text": row["answer"],
                "ids": row["tokens"],
                "stop_reason": row["reason"],
                "seed": row["seed"],
                "prompt_tokens": row["prompt_tokens"],
                "generated_tokens": row["generated_tokens"],
            }
            yield lines.record(row["row"], error, {} if error else found)

    return _answer(request, lines, records(), lambda: None, lambda: f"over Ray at {request.ray}")


def _answer(
    request: Request,
    lines: _Lines,
    records: Generator[dict[str, Any], None, None],
    cancel: Callable[[], None],
    cost: Callable[[], str],
) -> int:
    """Write the records of all answers as they come; ``cost()`` ends the line about them."""
    n_failed = n_answers = 0
    started = time.perf_counter()
    with ExitStack() as stack:
        out = None
        if request.answers is not None:
            lines.done = read_done(request.answers, lines.memory_bytes)
            out = stack.enter_context(request.answers.open("a", encoding="utf-8"))
            n_done = sum(digest != 0 for digest in lines.done)
            if n_done and not request.quiet:
                say(f"{n_done} prompts are answered in {request.answers} already")
        progress = command.Progress("answering", is_wanted=not request.quiet)
        stack.callback(progress.end)
        stack.enter_context(Watcher(lambda _: cancel(), progress.tick))
        stack.enter_context(closing(records))
        for n_answers, record in enumerate(records, 1):
            n_failed += _write(record, out)
            progress.update(f"answered {n_answers} prompts")
    index = next((index for index, digest in enumerate(lines.done) if digest), None)
    if index is not None:
        raise QsfArgumentError(
            f"{request.answers} has an answer to line {index + 1}, which {request.prompts} lacks"
        )
    if not request.quiet:
        rate = lines.n_tokens / (time.perf_counter() - started)
        text = f"answered {n_answers} prompts, {lines.n_tokens} tokens, {rate:.1f} tok/s"
        say(f"{text}, {cost()}")
    if n_failed:
        command.say_error("qsf-run", f'{n_failed} prompts have no answer: see their "error"')
    return 1 if n_failed else 0


def _write(record: dict[str, Any], out: IO[str] | None) -> bool:
    line = report.json_line(record)
    if out is None:
        show(line)
    else:
        out.write(line)
        out.flush()
    return "error" in record


def read_done(path: Path, memory_bytes: int) -> array[int]:
    """Return the digests of the answered lines, by their index; 0 for other lines.

    An incomplete last line is removed from the file. No line may take more
    than ``memory_bytes``, nor all digests more than half of that.

    Raises:
        QsfArgumentError: the file is not an output of --prompts, or has an index beyond that limit.
    """
    done = array("Q")
    if not path.exists():
        return done
    if not path.is_file():
        raise QsfArgumentError(
            f"--answers {path} is not a regular file, which it goes on with; without --answers "
            "the answers go to standard output"
        )
    most_lines = memory_bytes // 2 // done.itemsize
    n_whole = 0
    with path.open("rb+") as file:
        lines = iter(lambda: file.readline(memory_bytes), b"")
        for line_no, line in enumerate(lines, 1):
            if len(line) < memory_bytes and not line.endswith(b"\n"):
                file.truncate(n_whole)
                break
            n_whole += len(line)
            try:
                record = read_json(line, memory_bytes=memory_bytes)
                index, digest = operator.index(record["index"]), array("Q", [int(record["of"], 16)])
                if index < 0:
                    raise ValueError(index)
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                raise QsfArgumentError(
                    f"{path}, line {line_no}: no answer of qsf run --prompts; --answers goes on "
                    "with a file of its own, or begins one"
                ) from error
            if index >= most_lines:
                raise QsfArgumentError(
                    f"{path}, line {line_no}, answers a line beyond {most_lines}, for which the "
                    "memory budget has no room: raise --ram-budget, or split the prompts"
                )
            if index >= len(done):
                done.frombytes(bytes(done.itemsize * (index + 1 - len(done))))
            done[index] = digest[0]
    return done


class _Lines:
    """The lines of --prompts, and the prompts that are being answered."""

    def __init__(self, request: Request, file: Lines, memory_bytes: int, *, is_raw: bool) -> None:
        self.done = array("Q")  # see `read_done`; becomes 0 once --prompts has the line
        self._path = request.prompts
        self._file = file
        # Text and parsed line take up to three times as much
        self._most_line_bytes = memory_bytes // 4
        self._is_raw = is_raw
        self.memory_bytes = memory_bytes
        self._options = repr(request.generation).encode()
        self._n_taken = 0
        self.n_tokens = 0  # of the answers so far
        self._running: dict[int, tuple[int, str, Any, QsfError | None]] = {}

    def prompts(self) -> Generator[Any, None, None]:
        for index, line in enumerate(self._lines()):
            if not line.strip():
                continue
            digest = hashlib.blake2b(line.strip() + self._options, digest_size=8).hexdigest()
            if index < len(self.done) and self.done[index]:
                self._check_same(index, digest)
                self.done[index] = 0
                continue
            name, prompt, error = self._parse(line)
            self._running[self._n_taken] = (index, digest, name, error)
            self._n_taken += 1
            yield prompt

    def _lines(self) -> Generator[bytes, None, None]:
        """Yield the lines; of a line that is too long only its beginning."""
        most = self._most_line_bytes + 1
        while line := self._file.readline(most):
            rest = line
            while len(rest) >= most and not rest.endswith(b"\n"):
                rest = self._file.readline(most)
            yield line

    def _check_same(self, index: int, digest: str) -> None:
        if self.done[index] != int(digest, 16):
            raise QsfArgumentError(
                f"line {index + 1} of {self._path}, or an option, is not what --answers has the "
                "answer to: give a new file"
            )

    def _parse(self, line: bytes) -> tuple[Any, Any, QsfError | None]:
        """Return a line's id, its prompt or None, and what is wrong with it."""
        try:
            if len(line) > self._most_line_bytes:
                raise JsonError(f"more than {self._most_line_bytes / 2**20:.1f} MB")
            room = self.memory_bytes - len(line)
            record = read_json(line, memory_bytes=room, has_surrogates=True)
        except JsonError as error:
            return None, [], QsfArgumentError(f"the line cannot be read: {error}")
        name = record.get("id") if isinstance(record, dict) else None
        try:
            command.json_text(name)
        except ValueError as error:  # Python reads 1e999 as infinity
            return None, [], QsfArgumentError(f"id cannot be given back: {error}")
        try:
            return name, self._prompt_of(record), None
        except QsfArgumentError as error:
            return name, [], error

    def _prompt_of(self, record: Any) -> Any:
        """Return the prompt as ``Model.batch`` takes it. Raises QsfArgumentError."""
        if isinstance(record, str):
            record = {"prompt": record}
        if not isinstance(record, dict) or len({"prompt", "messages"} & set(record)) != 1:
            raise QsfArgumentError(
                'the line must be a text, or an object with "prompt" or with "messages"'
            )
        for name in record:
            if name not in ("id", "prompt", "messages"):
                raise QsfArgumentError(
                    f"the line has {shown(name)}; id, prompt and messages are known"
                )
        if "prompt" in record:
            if not isinstance(record["prompt"], str):
                raise QsfArgumentError("prompt must be a text")
            prompt = record["prompt"]
            return prompt if self._is_raw else [{"role": "user", "content": prompt}]
        if self._is_raw:
            raise QsfArgumentError(
                "messages need a chat template: the file has none, or --raw leaves it out"
            )
        if not isinstance(record["messages"], list):
            raise QsfArgumentError("messages must be a list")
        return record["messages"]

    def record(self, row: int, error: QsfError | None, found: dict[str, Any]) -> dict[str, Any]:
        """Return what is written about a prompt, the ``row``-th taken: ``found`` or an error."""
        index, digest, name, wrong = self._running.pop(row)
        start = {"index": index, "of": digest} | ({} if name is None else {"id": name})
        error = wrong or error
        if error is not None or not found:
            return {**start, "error": str(error)}
        self.n_tokens += found["generated_tokens"]
        return {**start, **found}
