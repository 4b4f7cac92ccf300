"""``qsf list``, ``rm``, ``pull`` and ``show``: models that are converted and kept, by name."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qsf.errors import QsfArgumentError, QsfError, one_line
from qsf.find.download import Blobs
from qsf.find.store import (
    GGUF_TYPE,
    SUGGESTED,
    Kept,
    all_kept,
    named,
    remove,
    store_folder,
    suggested,
)
from qsf.shell import command, typer_app

if TYPE_CHECKING:
    from qsf.file.reader import Reader

_MB = 2**20
_LEAST_TOKENS_PER_S = 8  # of a model that is proposed
_TRIAL = (128 << 20, 60)  # of the memory's speed: bytes, ms
_LEAST_FREE_MB = 1024  # for the trial; what fits half of less is fast enough anywhere

list_app, remove_app, pull_app, show_app = (typer_app.create_app() for _ in range(4))
list_main = typer_app.runner(list_app, "qsf list")
remove_main = typer_app.runner(remove_app, "qsf rm")
pull_main = typer_app.runner(pull_app, "qsf pull")
show_main = typer_app.runner(show_app, "qsf show")


@show_app.command()
def show_model(
    model: Annotated[
        str, typer.Argument(help="a .qsf file, or a name as `qsf list` has it", metavar="MODEL")
    ],
    is_verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="show sections, layers and sizes, too")
    ] = False,
    is_json: Annotated[bool, typer.Option("--json", help="print JSON for programs")] = False,
) -> None:
    """Show what a model is: its type, size, context, licence and defaults.

    `qsf inspect` lists the tensors of a file, checks every byte, and has the quality report.
    """
    from qsf.cli import inspect
    from qsf.file.reader import Reader

    with Reader(kept_file(model)) as reader:
        if is_json:
            command.show_json(inspect.describe(reader))
        elif is_verbose:
            command.show_lines("\n".join(inspect.report_lines(reader, with_tensors=False)))
        else:
            command.show_lines("\n".join(_summary(reader)))


def _summary(reader: Reader) -> list[str]:
    from qsf.file.family import family_of, type_of
    from qsf.file.sizes import size_of
    from qsf.report.record import read_meta
    from qsf.text.chat import ChatTemplate
    from qsf.text.parts import read_text_parts
    from qsf.text.sampling import resolve_sampling

    meta = read_meta(reader) or {}
    source = meta.get("source")
    parts = read_text_parts(reader.path)
    sampling = resolve_sampling(parts.generation)
    n_weights = size_of(reader).n_weights
    has_template = isinstance(parts.template, ChatTemplate) and not parts.template.is_plain
    rows = {
        "name": source.get("name") if isinstance(source, dict) else None,
        "adapters": _adapters(meta),
        "file": reader.path,
        "size": f"{reader.file_bytes / _MB:,.1f} MB, {n_weights / 1e6:,.0f} million weights",
        "type": type_of(reader),
        "family": family_of(reader),
        "context": f"up to {reader.header.max_tokens:,} tokens",
        "licence": meta.get("licence"),
        "answers": "by its chat template" if has_template else "none: it continues texts",
        "sampling": f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}, top-k "
        f"{sampling.top_k}, min-p {sampling.min_p:g}, repetition penalty "
        f"{sampling.repetition_penalty:g}",
    }
    if reader.arch.is_encoder:
        rows |= {"answers": "none: it makes vectors of texts", "sampling": None}
    if reader.arch.target_dim:
        rows |= {"answers": "none: it guesses for another model (--draft)", "sampling": None}
    return [f"{name:9} {str(value)[:200]}" for name, value in rows.items() if value]


def _adapters(meta: dict[str, Any]) -> str:
    """Return the adapters that a conversion merged, from META, which is untrusted."""
    listed = meta.get("adapters")
    named = [a for a in listed if isinstance(a, dict)] if isinstance(listed, list) else []
    return ", ".join(f"{str(a.get('name'))[:40]} x {str(a.get('scale'))[:10]}" for a in named)


def kept_file(model: str) -> Path:
    """Return the .qsf file of a model that is converted already. Raises QsfError for none."""
    from qsf.find.names import meaning_of

    named = meaning_of(model)
    if named.is_qsf and named.path is not None:
        return named.path
    name = named.repo or str(Path(str(named.path)).resolve())
    kept = next((kept for kept in all_kept() if kept.name == name), None)
    if kept is None:
        raise QsfArgumentError(f"{model} is not converted yet: {command.runnable()} pull {model}")
    return kept.path


@pull_app.command()
def pull_model(
    model: Annotated[
        str,
        typer.Argument(
            help="a short name (`qsf list --available`), org/name on the hub, a HuggingFace folder "
            "or a GGUF file; with :TYPE another type than qsf convert's",
            metavar="MODEL",
        ),
    ],
    is_quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print no progress")] = False,
    has_no_copy: Annotated[
        bool,
        typer.Option(
            "--no-copy",
            help="convert while it comes, and keep no copy of the original. That is done too where "
            "the disk has no room for one",
        ),
    ] = False,
) -> int:
    """Download a model and convert it, so that `qsf run` and `qsf chat` begin at once.

    An interrupted download continues; `qsf rm MODEL` removes what came of it.
    """
    from qsf.find.prepare import find_model

    path = find_model(model, is_quiet=is_quiet, is_yes=True, keeps_copy=not has_no_copy)
    if not is_quiet:
        size = path.stat().st_size / _MB
        command.show_lines(f"{model} is ready, {size:,.1f} MB: {command.runnable()} chat {model}")
    return 0


@list_app.command()
def list_models(
    is_json: Annotated[bool, typer.Option("--json", help="print one JSON list")] = False,
    is_available: Annotated[
        bool, typer.Option("--available", help="list models to begin with, by their short names")
    ] = False,
) -> None:
    """List the models that `qsf run` and `qsf chat` have converted, the one used last first."""
    if is_available:
        _list_available(is_json=is_json)
        return
    models = all_kept()
    if is_json:
        command.show_json([_facts(kept) for kept in models])
        return
    if not models:
        command.show_lines(
            f"no models yet in {store_folder()}: qsf list --available names some to begin with"
        )
        return
    names = [kept.short_name if named(kept.short_name) else kept.name for kept in models]
    width = max(map(len, names))
    rows = [(name, kept, _facts(kept)) for name, kept in zip(names, models, strict=True)]
    family_width = max(6, *(len(facts["family"]) for _, _, facts in rows))
    command.show_lines(
        f"{'model':<{width}}  {'type':<9} {'family':<{family_width}} {'MB':>9}  last used"
    )
    for name, kept, facts in rows:
        command.show_lines(
            one_line(name).ljust(width)
            + f"  {kept.quant_type:<9} {facts['family']:<{family_width}}"
            f" {kept.n_bytes / _MB:>9,.1f}  {_ago(kept.used_seconds)}"
        )
    total = sum(kept.n_bytes for kept in models) / _MB
    command.show_lines(f"{total:,.1f} MB in {store_folder()}")


def _list_available(*, is_json: bool) -> None:
    from qsf.native.binding import describe_machine, measure_roofline

    machine = describe_machine()
    free_mb = min(machine.memory_bytes, machine.available_bytes) // _MB
    if is_json:
        command.show_json([asdict(model) for model in SUGGESTED])
        return
    # Half of the free memory leaves room for longer contexts and for other programs. A token reads
    # all of the file.
    most_mb = float(free_mb)
    if free_mb >= _LEAST_FREE_MB:
        rate = measure_roofline(os.cpu_count() or 1, *_TRIAL) * 1e9
        most_mb = rate / _LEAST_TOKENS_PER_S / _MB
    start = [m.name for m in SUGGESTED if m.memory_mb <= free_mb // 2 and m.file_mb <= most_mb]
    start = start[-3:] or [SUGGESTED[0].name]
    command.show_lines(f"{free_mb:,} MB of memory are free: start with {', '.join(start)}")
    command.show_lines(
        f"{'name':<19}{'download':>11}{'in memory':>11}{'at least':>10}  {'licence':<28} good for"
    )
    for model in SUGGESTED:
        command.show_lines(
            f"{model.name:<19}{model.file_mb:>8,} MB"
            f"{model.memory_mb:>8,} MB{model.least_mb:>7,} MB  {model.licence:<28} {model.good_for}"
        )
    command.show_lines(
        f"GGUF files of {GGUF_TYPE}, 4096 tokens; NAME:8bit converts the original. With less "
        "memory than a whole\nmodel takes, weights are read again for each token. "
        f"{command.runnable()} chat {start[-1]}"
    )


def _facts(kept: Kept) -> dict[str, Any]:
    return {
        "name": kept.name,
        "type": kept.quant_type,
        "family": _family(kept),
        "bytes": kept.n_bytes,
        "last_used": int(kept.used_seconds),
        "path": str(kept.path),
    }


def _family(kept: Kept) -> str:
    from qsf.file.family import family_of
    from qsf.file.reader import Reader

    try:
        with Reader(kept.path) as reader:
            return family_of(reader)
    except QsfError:
        return "damaged"


def _ago(seconds: float) -> str:
    n_seconds = max(0.0, time.time() - seconds)
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        n = int(n_seconds // length)
        if n:
            return f"{n} {unit}{'' if n == 1 else 's'} ago"
    return "just now"


@remove_app.command()
def remove_models(
    names: Annotated[
        list[str],
        typer.Argument(help="names as `qsf list` has them, also with :TYPE", metavar="MODEL"),
    ],
) -> None:
    """Remove converted models, and what an interrupted download left.

    Their sources stay: `qsf run` converts them again.
    """
    models = all_kept()
    chosen: list[Kept] = []
    for name in names:
        short = suggested(name)
        path, colon, quant_type = name.partition(":")
        names_here = {name, f"{Path(path).resolve()}{colon}{quant_type}"}
        of_short = {short.repo, short.gguf} if short is not None else set()
        names_here |= of_short
        same = [k for k in models if names_here & {k.name, k.full_name, k.path.name, str(k.path)}]
        same = same or named(path, quant_type)
        repos = {k.name for k in same} | (of_short or {path})
        n_bytes = sum(Blobs(repo).remove_unfinished() for repo in repos)
        if n_bytes:
            command.show_lines(f"removed {n_bytes / _MB:,.1f} MB of a download that never ended")
        elif not same:
            raise QsfArgumentError(f"there is no converted model {name}: `qsf list` has the names")
        chosen += [kept for kept in same if kept not in chosen]
    for kept in chosen:
        remove(kept)
        command.show_lines(f"removed {kept.full_name}, {kept.n_bytes / _MB:,.1f} MB")
