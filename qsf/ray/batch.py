"""Answers to the prompts of a dataset, on all machines of a Ray cluster: ``qsf.ray.map``."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from qsf.errors import QsfArgumentError, QsfError, QsfFormatError, QsfIOError
from qsf.file.layout import HEADER_BYTES
from qsf.file.open_file import is_qsf_file
from qsf.foreign_json import JsonError, read_json
from qsf.model import Model
from qsf.native.opening import BYTES_PER_MB, budget_mb, read_adapters
from qsf.options import GenerationOptions, ModelOptions, Whole, call_with, check_value
from qsf.ray.cluster import connect, import_ray, live_nodes

# A block that killed its worker so many times is not tried again
_MAX_RETRIES = 3
_DEFAULT_SESSIONS = 4
COLUMNS = ("answer", "reason", "tokens", "prompt_tokens", "generated_tokens", "seed", "error")


def map(
    dataset: Any,
    model: str | os.PathLike[str],
    *,
    workers: int | tuple[int, int] | None = None,
    batch_size: int = 16,
    resources: Mapping[str, float] | None = None,
    **options: Any,
) -> Any:
    """Answer the prompts of a dataset of Ray; return it with a column for each part of an answer.

    A prompt is the column ``prompt``, a text to continue, or ``messages``: a list of mappings with
    role and content, or its JSON text; fields that are null are left out. The new columns are
    ``answer``, ``reason`` (why the text ended), ``tokens`` (ids), ``prompt_tokens`` and
    ``generated_tokens`` (how many), ``seed`` and ``error``: why a row has no answer, else null.
    An answer is that of ``Model.batch`` with the same options, to the bit. If a worker is lost, its
    blocks are answered again.

    Connects to Ray on this machine unless ``ray.init`` or ``qsf.ray.connect`` was called before.

    Args:
        dataset: a ``ray.data.Dataset``.
        model: the file, by a path that all machines have, or a name, of which each machine makes
            a file of its own.
        workers: processes with a model each, or the least and the most; None: as many as there are
            machines.
        batch_size: rows that a worker takes at a time.
        resources: what Ray reserves for each worker, by its names.
        options: of ``ModelOptions`` and ``GenerationOptions``; ``ram_budget`` is for each worker,
            ``sessions`` (prompts in a pass) is 4 if not given.

    Raises:
        QsfArgumentError: an option is out of range, or strangers may enter the cluster.
        QsfUnsupportedError: Ray is missing or too old.
    """
    connect("local")
    opening, generation = _options(options)
    least, most = workers if isinstance(workers, tuple) else (workers, workers)
    least, most = least or len(live_nodes()), most or len(live_nodes())
    check_value("workers", most, Whole(least, 4096))
    check_value("batch_size", batch_size, Whole(1))
    data = import_ray("ray.data")
    headers = headers_of(model, opening)
    with warnings.catch_warnings():  # Ray 2.64 drops max_task_retries, and 2.60 has no other name
        warnings.simplefilter("ignore")
        return dataset.map_batches(
            Answerer,
            fn_constructor_args=(wherever(model), headers, wherever_files(opening), generation),
            batch_format="pyarrow",
            batch_size=batch_size,
            compute=data.ActorPoolStrategy(min_size=least, max_size=most),
            num_cpus=1,
            memory=_memory_bytes(opening),
            resources=dict(resources or {}),
            max_task_retries=_MAX_RETRIES,
        )


def answer_rows(
    rows: list[dict[str, Any]], model: str, opening: ModelOptions, generation: GenerationOptions,
    workers: int | None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield the rows with the columns of their answers, as they are finished.

    Raises QsfError if the batch cannot go on.
    """
    data, exceptions = import_ray("ray.data"), import_ray("ray.exceptions")
    data.DataContext.get_current().enable_progress_bars = False
    n_workers = workers or len(live_nodes())
    # Blocks small enough that all workers have some, and large enough to fill the sessions
    n_rows = max(opening.sessions, min(4 * opening.sessions, len(rows) // (2 * n_workers)))
    given = {f.name: getattr(options, f.name) for options in (opening, generation)
             for f in fields(options)}  # fmt: skip
    dataset = data.from_items(rows, override_num_blocks=-(-len(rows) // n_rows))
    try:
        yield from map(dataset, model, workers=n_workers, batch_size=n_rows, **given).iter_rows()
    except exceptions.RayError as error:
        reason = str(error).strip().splitlines()[-1].removeprefix("qsf.errors.")
        raise QsfError(f"a worker failed: {reason:.500}") from error


def _options(given: dict[str, Any]) -> tuple[ModelOptions, GenerationOptions]:
    given = {"sessions": _DEFAULT_SESSIONS} | given
    names = {f.name for f in fields(ModelOptions)}, {f.name for f in fields(GenerationOptions)}
    for name in given.keys() - names[0] - names[1]:
        raise QsfArgumentError(f"there is no option {name}", argument=name)
    opening, generation = ({k: v for k, v in given.items() if k in n} for n in names)
    return ModelOptions(**opening), GenerationOptions(**generation)


def _memory_bytes(opening: ModelOptions) -> int | None:
    """Return what Ray reserves on the worker's machine; None: nothing, the budget is no number."""
    n_mb = budget_mb(opening.ram_budget)
    return n_mb * BYTES_PER_MB if isinstance(n_mb, int) else None


def wherever(path: str | os.PathLike[str]) -> str:
    """Return the path of a file or folder here from the root, for workers that run elsewhere.

    Symbolic links stay: they may lead elsewhere on another machine.
    """
    return os.path.abspath(path) if Path(path).exists() else os.fspath(path)  # noqa: PTH100


def wherever_files(opening: ModelOptions) -> ModelOptions:
    """Return the options with such paths of adapters and of a draft model."""
    lora = tuple(
        f"{each.name}{'=' if each.name else ''}{wherever(each.path)}:{each.scale!r}"
        for each in read_adapters(opening)
    )
    draft = opening.draft if opening.draft in ("auto", "off") else wherever(opening.draft)
    return replace(opening, lora=lora, draft=draft)


def headers_of(path: str | os.PathLike[str], opening: ModelOptions) -> tuple[bytes, ...]:
    """Return the part with the checksums of all others of a file, then of each of its adapters.

    The first is empty if the file is not here.
    """
    adapters = [each.path for each in read_adapters(opening)]
    found = [] if is_qsf_file(path) else [b""]
    for each in [*([] if found else [path]), *adapters]:
        try:
            with Path(each).open("rb") as file:
                found.append(file.read(HEADER_BYTES))
        except OSError as error:
            raise QsfIOError(f"{each}: {error.strerror}") from error
    return tuple(found)


def check_headers(path: str, opening: ModelOptions, headers: tuple[bytes, ...]) -> None:
    """Raise QsfFormatError unless the files have the headers that ``headers_of`` gave elsewhere."""
    names = (path, *opening.adapters)
    for name, mine, theirs in zip(names, headers_of(path, opening), headers, strict=True):
        if mine and theirs and mine != theirs:
            raise QsfFormatError(
                f"{name} is another file on {socket.gethostname()} than at the start"
            )


class Answerer:
    """A worker: a model in a budget of its own, which answers blocks of prompts."""

    def __init__(
        self,
        name: str,
        headers: tuple[bytes, ...],
        opening: ModelOptions,
        generation: GenerationOptions,
    ) -> None:
        """Open the model.

        Raises QsfFormatError if its files are not those with these headers.
        """
        check_headers(name, opening, headers)
        self._model = call_with(Model.from_pretrained, name, opening)
        self._generation = generation

    def __call__(self, block: Any) -> Any:
        """Return the table ``block`` with the columns of the answers."""
        pyarrow = import_ray("pyarrow")
        found: dict[str, list[Any]] = {name: [None] * len(block) for name in COLUMNS}
        has_messages = "messages" in block.column_names
        if not has_messages and "prompt" not in block.column_names:
            raise QsfArgumentError("the dataset has neither a column prompt nor messages")
        prompts = block.column("messages" if has_messages else "prompt").to_pylist()
        if has_messages:
            prompts = [_messages(value) for value in prompts]
        batch = self._model.start_batch(self._generation)
        for answer in batch.answers(self._model.session, prompts):
            found["answer"][answer.index] = answer.text
            if answer.stats is None:
                found["error"][answer.index] = str(answer.error)
                continue
            found["reason"][answer.index] = answer.stats.stop_reason
            found["tokens"][answer.index] = list(answer.stats.token_ids)
            for name in ("prompt_tokens", "generated_tokens", "seed"):
                found[name][answer.index] = getattr(answer.stats, name)
        text, number = pyarrow.string(), pyarrow.uint64()
        kinds = (text, text, pyarrow.list_(pyarrow.uint32()), number, number, number, text)
        for name, kind in zip(COLUMNS, kinds, strict=True):
            block = block.append_column(name, pyarrow.array(found[name], kind))
        return block


def _messages(value: Any) -> Any:
    """Return the messages of a row; what cannot be messages is left to ``Model.batch``."""
    if isinstance(value, str):
        try:
            return read_json(value, has_surrogates=True)
        except JsonError:
            return []
    return [{k: v for k, v in each.items() if v is not None} for each in value or ()]
