"""Downloads a model from the HuggingFace hub into its cache: a process of its own.

Only the files that a conversion needs are fetched; a download that broke off goes on where it was.
Prints the folder, or the GGUF file.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from qsf.errors import QsfConversionError, QsfError, QsfIOError
from qsf.file.gguf_parts import part_names
from qsf.find.names import gguf_of
from qsf.find.prepare import elsewhere
from qsf.shell import command

_TEXTS = ("*.json", "*.jinja", "README.md", "LICENSE*")


def main() -> int:
    """Download ``sys.argv[1]``, of the type in ``sys.argv[2]``; exit with 1 if that fails."""
    repo, type_name, *flags = sys.argv[1:]
    try:
        with command.stopped_by_signals():
            path = download(repo, type_name, is_quiet="--quiet" in flags, is_yes="--yes" in flags)
            print(path, flush=True)  # noqa: T201
        code = 0
    except command.StoppedError as stopped:
        command.say_error("qsf", f"{stopped.text}; the same command continues from there")
        code = stopped.exit_code
    except QsfError as error:
        command.say_error("qsf", str(error))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of the download may still wait for the network


def download(repo: str, type_name: str, *, is_quiet: bool, is_yes: bool) -> Path:
    """Return where the model is in the hub's cache, after asking the user.

    Raises:
        QsfIOError: the hub or the network refused.
        QsfConversionError: there is nothing that can be converted.
    """
    if is_quiet:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache  # noqa: F401

    try:
        info = HfApi().model_info(repo, files_metadata=True, timeout=20)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        wanted = wanted_files(repo, sizes, type_name)
        n_bytes = sum(sizes[name] for name in wanted)
        _ask(repo, n_bytes, is_yes=is_yes)
        folder = Path(snapshot_download(repo, revision=info.sha, allow_patterns=sorted(wanted)))
    except QsfError:
        raise
    except Exception as error:
        raise QsfIOError(_reason(repo, error)) from error
    gguf = gguf_of(sorted(wanted), type_name)
    return folder / gguf if gguf is not None else folder


def wanted_files(repo: str, sizes: dict[str, int], type_name: str) -> set[str]:
    """Return the files of a model that a conversion reads."""
    from fnmatch import fnmatch

    names = [name for name in sizes if "/" not in name]
    texts = {name for name in names if any(fnmatch(name, pattern) for pattern in _TEXTS)}
    for pattern in ("*.safetensors", "pytorch_model*.bin"):
        weights = {name for name in names if fnmatch(name, pattern)}
        if weights and "config.json" in names:
            return texts | weights
    gguf = gguf_of(names, type_name)
    if gguf is not None:
        missing = sorted(set(part_names(gguf)) - set(names))
        if missing:
            raise QsfConversionError(f"{repo} has not all parts of {gguf}: {missing[0]} is missing")
        return set(part_names(gguf))
    others = sorted(name for name in names if name.endswith(".gguf"))
    if others:
        raise QsfConversionError(f"{repo} has no {type_name}: there are {', '.join(others[:8])}")
    raise QsfConversionError(
        f"{repo} has no weights that can be converted: neither safetensors with config.json, nor "
        "GGUF"
    )


def _ask(repo: str, n_bytes: int, *, is_yes: bool) -> None:
    size = f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.1f} MB"
    text = f"{repo} is not on this machine. Download {size}"
    if is_yes:
        sys.stderr.write(f"downloading {repo}, {size}\n")
        return
    if not sys.stdin.isatty():
        raise QsfIOError(f"{text} with --yes")
    if not command.read_answer(f"{text}?", default=False):
        raise QsfIOError(f"{repo} was not downloaded")


def _reason(repo: str, error: Any) -> str:
    """Return what went wrong, and what to do."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    status = getattr(getattr(error, "response", None), "status_code", None)
    if "GatedRepoError" in kinds or status == 403:
        return (
            f"{repo} asks for consent: give it on the model's page, then `hf auth login`, and the "
            "same command again"
        )
    if "RepositoryNotFoundError" in kinds or status in (401, 404):
        return f"{repo} is not on the hub (or private: `hf auth login`), nor a file or folder here"
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if status is not None:
        return f"{repo}: the hub answers with status {status}; the same command continues later"
    return (
        f"{repo} could not be downloaded ({type(error).__name__}); the same command continues "
        f"where it stopped. {elsewhere(repo)}"
    )


if __name__ == "__main__":
    main()
