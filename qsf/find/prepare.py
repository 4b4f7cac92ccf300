"""Finds the .qsf file of a model; downloads and converts the model first if needed."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from qsf.errors import ChildFailedError, QsfIOError
from qsf.find import store
from qsf.find.names import Named, cached_source, meaning_of
from qsf.shell.command import say_line
from qsf.system.keys import unseen_keys


def find_model(
    model: str, *, is_quiet: bool = False, is_yes: bool = False, keeps_copy: bool = True
) -> Path:
    """Return the .qsf file of a model; downloads and converts it if needed.

    Args:
        model: a path or a name, with ``:TYPE`` for another type than the default.
        is_quiet: print no progress.
        is_yes: download without asking.
        keeps_copy: of the original, in the hub's cache, if there is room for it.

    Raises:
        QsfError: there is no such model; the text says what to do.
        ChildFailedError: the download or the conversion failed.
    """
    named = meaning_of(model)
    if named.is_qsf and named.path is not None:
        return named.path
    source = named.path or cached_source(named)
    if source is None:
        kept = _kept_of(named)
        if kept is not None:  # the source is gone, or on another machine
            store.mark_used(kept)
            return kept
        source = _download(named, is_quiet=is_quiet, is_yes=is_yes, keeps_copy=keeps_copy)
    resolved = Named(source, repo=named.repo, type_name=named.type_name)
    name = named.repo or str(source.resolve())
    path = _converted(source, name, resolved.quant_type, is_quiet=is_quiet)
    if store.is_of_pieces(source):
        shutil.rmtree(source, ignore_errors=True)
    return path


def find_source(model: str, *, is_quiet: bool = False, is_yes: bool = False) -> Path:
    """Return the folder or file of the original model; downloads it if needed.

    Raises:
        as ``find_model``.
    """
    named = meaning_of(model)
    source = named.path or cached_source(named)
    return source or _download(named, is_quiet=is_quiet, is_yes=is_yes)


def _kept_of(named: Named) -> Path | None:
    same = [kept for kept in store.all_kept() if kept.name == named.repo]
    if named.type_name:
        same = [kept for kept in same if kept.quant_type == named.quant_type]
    return same[0].path if same else None


def _converted(source: Path, name: str, quant_type: str, *, is_quiet: bool) -> Path:
    out = store.place_of(name, quant_type or ("gguf" if source.is_file() else "default"))
    fingerprint = store.fingerprint_of(source)

    def is_there() -> bool:
        kept = store.read_kept(out)
        return kept is not None and kept.fingerprint == fingerprint

    if not is_there():
        waiting = "" if is_quiet else f"waiting for another process that converts {name}"
        with store.locked(out, waiting):
            if not is_there():
                words = ["--quant-type", quant_type] if quant_type else []
                to = f" to {quant_type}" if quant_type else ""
                if not is_quiet:
                    say_line(f"converting {name}{to}, once: {out}")
                words = ["convert", str(source), str(out), *words, "--force"]
                _run_child([*words, *["--quiet"] * is_quiet])
                store.write_note(out, name, quant_type or _type_of(out), fingerprint)
    store.mark_used(out)
    return out


def _type_of(path: Path) -> str:
    from qsf.file.family import type_of
    from qsf.file.reader import Reader

    with Reader(path) as reader:
        return type_of(reader)


def _download(named: Named, *, is_quiet: bool, is_yes: bool, keeps_copy: bool = True) -> Path:
    repo = named.repo
    words = ["download", repo, named.type_name]
    flags = {"--quiet": is_quiet, "--yes": is_yes, "--no-copy": not keeps_copy}
    answer = _run_child([*words, *(flag for flag, is_given in flags.items() if is_given)])
    path = Path(answer.strip())
    if not path.exists():
        raise QsfIOError(f"{repo}: the download left nothing at {path}")
    return path


def elsewhere(repo: str) -> str:
    """Return what to do without a network."""
    folder = repo.split("/")[-1]
    return (
        f"On a machine with a network `hf download {repo} --local-dir {folder}` gets it: copy "
        f"the folder here, and `qsf run {folder}`"
    )


# ``python -m`` would look for modules in the user's folder first.
_CHILD = "import sys; sys.argv[0] = 'qsf'; sys.path = [p for p in sys.path if p]; "
_PROGRAMS = {
    "pull": "from qsf.shell.entry import start; main = lambda: start('pull')",
    "convert": "from qsf.shell.entry import convert as main; sys.argv[0] = 'qsf convert'",
    "download": "from qsf.find.download import main",
}


def child_command(words: list[str]) -> list[str]:
    """Return the command for one of our programs as a process of its own."""
    program, *arguments = words
    return [sys.executable, "-c", f"{_CHILD}{_PROGRAMS[program]}; main()", *arguments]


def _run_child(words: list[str]) -> str:
    """Run one of our programs to its end and return its output. Raises ChildFailedError."""
    process = subprocess.Popen(
        child_command(words),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONSAFEPATH": "1", **store.environment_of(Path(words[1]))},
    )
    with unseen_keys(), process:  # which waits for its end
        try:
            output = process.communicate()[0]
        except BaseException:
            process.terminate()  # it removes its unfinished files
            raise
    if process.returncode != 0:
        raise ChildFailedError(process.returncode if process.returncode > 0 else 1)
    return output.decode("utf-8", "surrogateescape")
