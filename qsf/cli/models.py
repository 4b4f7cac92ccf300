"""``qsf list`` and ``qsf rm``: the models that ``run`` and ``chat`` have converted."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from qsf.errors import QsfArgumentError, QsfError
from qsf.find.store import Kept, all_kept, remove, store_folder
from qsf.shell import command, typer_app

_MB = 2**20

list_app = typer_app.create_app()
remove_app = typer_app.create_app()


def main() -> int:
    """Run ``qsf list`` and return its exit code."""
    return typer_app.run(list_app, sys.argv[1:], program="qsf list")


def remove_main() -> int:
    """Run ``qsf rm`` and return its exit code."""
    return typer_app.run(remove_app, sys.argv[1:], program="qsf rm")


@list_app.command()
def list_models(
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """List the models that `qsf run` and `qsf chat` have converted, the one used last first."""
    models = all_kept()
    if is_json:
        command.show_json([_facts(kept) for kept in models])
        return
    if not models:
        command.show_lines(
            f"no models yet in {store_folder()}: qsf run FOLDER, or qsf run org/name"
        )
        return
    width = max(len(kept.name) for kept in models)
    rows = [(kept, _facts(kept)) for kept in models]
    family_width = max(6, *(len(facts["family"]) for _, facts in rows))
    command.show_lines(
        f"{'model':<{width}}  {'type':<9} {'family':<{family_width}} {'MB':>9}  last used"
    )
    for kept, facts in rows:
        command.show_lines(
            command.one_line(kept.name).ljust(width)
            + f"  {kept.quant_type:<9} {facts['family']:<{family_width}}"
            f" {kept.n_bytes / _MB:>9,.1f}  {_ago(kept.used_seconds)}"
        )
    total = sum(kept.n_bytes for kept in models) / _MB
    command.show_lines(f"{total:,.1f} MB in {store_folder()}")


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
        list[str], typer.Argument(help="Names as `qsf list` has them, also with :TYPE.")
    ],
) -> None:
    """Remove converted models. Their sources stay: `qsf run` converts them again."""
    models = all_kept()
    chosen: list[Kept] = []
    for name in names:
        path, colon, quant_type = name.partition(":")
        names_here = {name, f"{Path(path).resolve()}{colon}{quant_type}"}
        same = [k for k in models if names_here & {k.name, k.full_name, k.path.name, str(k.path)}]
        if not same:
            raise QsfArgumentError(f"there is no converted model {name}: `qsf list` has the names")
        chosen += [kept for kept in same if kept not in chosen]
    for kept in chosen:
        remove(kept)
        command.show_lines(f"removed {kept.full_name}, {kept.n_bytes / _MB:,.1f} MB")
