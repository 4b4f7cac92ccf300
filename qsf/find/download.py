"""Downloads a model from the HuggingFace hub into its cache: a process of its own.

Only the files that a conversion needs are fetched. Weights come by ranges into the hub's cache: an
interrupted download continues, which the library's own do not, since their names are random.
Prints the folder, or the GGUF file.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from qsf.errors import QsfConversionError, QsfError, QsfIOError
from qsf.file.gguf_parts import part_names
from qsf.file.ranged import RangedFile
from qsf.find.names import cache_folder, gguf_of
from qsf.find.prepare import elsewhere
from qsf.find.store import pieces_folder
from qsf.foreign_json import JsonError, check_json
from qsf.shell import command
from qsf.shell.output import write_text
from qsf.shell.progress import PROGRESS_LINES, ProgressLine
from qsf.system import files
from qsf.system.confine import limit_file_bytes
from qsf.system.signals import STOPPING

# ETAG.incomplete, or ETAG.RANDOM.incomplete of huggingface_hub from 2.0 on
_UNFINISHED = re.compile(r"(.+?)(\.[0-9a-f]{8})?\.incomplete")


class Blobs:
    """The blobs of one model, locked one by one as the library locks them."""

    def __init__(self, repo: str) -> None:
        folder = cache_folder(repo)
        self._folder, self._locks = folder / "blobs", folder.parent / ".locks" / folder.name

    def fetch(self, url: str, n_bytes: int, on_bytes: Callable[[int], object]) -> Path:
        """Download a file of the hub from where an earlier call stopped; return its blob.

        Raises QsfIOError, and the library's errors.
        """
        etag: str | None = import_module("huggingface_hub").get_hf_file_metadata(url).etag
        name = url.rpartition("/")[2]
        if not etag:
            raise QsfIOError(f"{name}: the hub names no etag, by which a file is kept")
        blob = self._folder / etag
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._locked(etag, files.lock):
            if blob.exists():
                on_bytes(n_bytes)
                return blob
            part = blob.with_name(f"{etag}.incomplete")
            with part.open("ab") as file:
                n_done = file.tell() if file.tell() <= n_bytes else 0
                file.truncate(n_done)
                on_bytes(n_done)
                for piece in RangedFile(name, url, n_bytes).pieces(n_done, n_bytes):
                    file.write(piece)
                    on_bytes(len(piece))
            part.replace(blob)
        return blob

    def remove_unfinished(self) -> int:
        """Remove what nobody works on; return the number of bytes."""
        n_bytes = 0
        for path in self._folder.glob("*.incomplete"):
            match = _UNFINISHED.fullmatch(path.name)
            etag = match[1] if match else path.stem
            with contextlib.suppress(OSError), self._locked(etag, files.try_lock):
                size = path.stat().st_size
                path.unlink()  # no other process works on it
                n_bytes += size
        return n_bytes

    @contextlib.contextmanager
    def _locked(self, etag: str, lock: Callable[[int], None]) -> Iterator[None]:
        self._locks.mkdir(parents=True, exist_ok=True)
        fd = files.open_lock(self._locks / f"{etag}.lock", 0o664)
        try:
            lock(fd)
            yield
        finally:
            os.close(fd)


_TEXTS = ("*.json", "*.jinja", "README.md", "LICENSE*")
# How sentence-transformers pools, and its dense layers
_MODULE = re.compile(r"[0-9]_(Pooling|Dense)/(config\.json|model\.safetensors)")
_MAX_FILES = 2000
_MAX_ANSWER_BYTES = 8 << 20  # of an answer that is not a file
_WEIGHTS = (".safetensors", ".bin", ".gguf")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# The library makes file names of these values; ".." in one could name any file.
_HEADERS = {"x-repo-commit": _COMMIT} | dict.fromkeys(
    ("etag", "x-linked-etag"), re.compile(r'(W/)?"?\w[\w.:+=-]{0,127}"?')
)


def main() -> int:
    """Download ``sys.argv[1]``, of the type in ``sys.argv[2]``; exit with 1 if that fails."""
    repo, type_name, *flags = sys.argv[1:]
    for number in STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)
    try:
        path = download(
            repo,
            type_name,
            is_quiet="--quiet" in flags,
            is_yes="--yes" in flags,
            keeps_copy="--no-copy" not in flags,
        )
        print(path, flush=True)  # noqa: T201
        code = 0
    except BrokenPipeError:  # who started it was killed
        os._exit(1)
    except QsfError as error:
        command.say_error("qsf", str(error))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of the download may still wait for the network


def _leave(number: int, _frame: object) -> None:
    """End at once: threads of the library would go on to the end of their files."""
    stopped = command.StoppedError(STOPPING[signal.Signals(number)])
    command.say_error("qsf", f"{stopped.text}; the same command continues from there")
    os._exit(stopped.exit_code)


def download(
    repo: str, type_name: str, *, is_quiet: bool, is_yes: bool, keeps_copy: bool = True
) -> Path:
    """Return the model's place in the hub's cache; asks the user before a download.

    Without a copy, or room for one, it is a folder with pointers to the weights: they are read
    while they are converted.

    Raises:
        QsfIOError: the hub or the network refused.
        QsfConversionError: nothing there can be converted.
    """
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    from huggingface_hub import HfApi, get_session, hf_hub_url, snapshot_download
    from huggingface_hub.constants import ENDPOINT, HF_HUB_CACHE

    get_session().event_hooks = {
        **get_session().event_hooks, "response": [lambda answer: _check_answer(repo, answer)]
    }  # fmt: skip
    # So that the length of an answer is the stated one
    get_session().headers["accept-encoding"] = "identity"
    try:
        info = HfApi().model_info(repo, files_metadata=True, timeout=20)
        if _COMMIT.fullmatch(str(info.sha)) is None:
            raise QsfIOError(f"{repo}: the hub names no commit: {info.sha!r}")
        sizes = {file.rfilename: max(0, file.size or 0) for file in info.siblings or []}
        wanted = wanted_files(repo, sizes, type_name)
        n_bytes = sum(sizes[name] for name in wanted)
        weights = [name for name in sorted(wanted) if re.fullmatch(r"[^/]+\.safetensors", name)]
        is_safe = not ENDPOINT.startswith("http:") or "//127.0.0.1:" in ENDPOINT
        if not weights or not is_safe or (keeps_copy and n_bytes <= _free_bytes(HF_HUB_CACHE)):
            _check_room(repo, n_bytes, HF_HUB_CACHE)
            weights = []
        _ask(repo, n_bytes, is_yes=is_yes)
        if weights:
            folder = pieces_folder(repo, str(info.sha))
            others = sorted(wanted - set(weights))
            snapshot_download(repo, revision=info.sha, allow_patterns=others, local_dir=folder)
            for name in weights:
                url = hf_hub_url(repo, name, revision=info.sha)
                text = json.dumps({"url": url, "size": sizes[name]})
                write_text(folder / name, text, overwrite=True)
            return folder
        limit_file_bytes(max(sizes[name] for name in wanted) + _MAX_ANSWER_BYTES)
        blobs = Blobs(repo)
        large = [name for name in sorted(wanted) if name.endswith(_WEIGHTS) and sizes[name]]
        with _bar_of(sum(map(sizes.__getitem__, large)), is_quiet=is_quiet) as bar:
            urls = [hf_hub_url(repo, name, revision=info.sha) for name in large]
            kept = {
                name: blobs.fetch(url, sizes[name], bar.update)
                for name, url in zip(large, urls, strict=True)
            }
        folder = Path(snapshot_download(repo, revision=info.sha, allow_patterns=sorted(wanted)))
        for name, blob in kept.items():
            if not (folder / name).is_symlink():  # Windows: it is a copy
                blob.unlink(missing_ok=True)
        blobs.remove_unfinished()
    except QsfError:
        raise
    except Exception as error:
        raise QsfIOError(_reason(repo, error)) from error
    gguf = gguf_of(sorted(wanted), type_name)
    return folder / gguf if gguf is not None else folder


def _bar_of(n_bytes: int, *, is_quiet: bool) -> Any:
    """Return a bar of bytes; it prints lines for a program which reads them."""
    base: Any = import_module("tqdm").tqdm
    line = ProgressLine(enabled=bool(os.environ.get(PROGRESS_LINES)), unit="B")

    class Bar(base):  # type: ignore[misc]
        def display(self, *words: object, **more: object) -> None:
            if os.environ.get(PROGRESS_LINES):
                line.update(self.n, n_bytes)
            else:
                super().display(*words, **more)

    is_hidden = is_quiet and not os.environ.get(PROGRESS_LINES)
    return Bar(total=n_bytes, unit="B", unit_scale=True, disable=is_hidden)


def _check_answer(repo: str, answer: Any) -> None:
    """Check an answer of the hub before the library uses it: the answer is untrusted."""
    for name, form in _HEADERS.items() if answer.request.method == "HEAD" else ():
        value = answer.headers.get(name)
        if value is not None and form.fullmatch(value) is None:
            raise QsfIOError(f"{repo}: the hub's answer has a strange {name}: {value!r}")
    is_api = "/api/" in answer.request.url.path
    if is_api and "/api/" not in answer.headers.get("location", "/api/"):
        raise QsfIOError(f"{repo}: the hub sends us elsewhere: {answer.headers['location']!r}")
    if answer.status_code < 300 and not is_api:
        return  # a file is written while it arrives
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise QsfIOError(f"{repo}: the hub's answer is packed, which nobody asked for")
    data = b""
    for piece in answer.stream:
        data += piece
        if len(data) > _MAX_ANSWER_BYTES:
            raise QsfIOError(f"{repo}: the hub's answer has more than {_MAX_ANSWER_BYTES:,} bytes")
    try:
        check_json(data)
    except JsonError as error:
        raise QsfIOError(f"{repo}: the hub's answer: {error}") from None
    answer.stream = import_module(type(answer).__module__).ByteStream(data)


def _free_bytes(cache: str) -> int:
    folder = Path(cache).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(there).free


def _check_room(repo: str, n_bytes: int, cache: str) -> None:
    free_bytes = _free_bytes(cache)
    if n_bytes > free_bytes:
        raise QsfIOError(
            f"{repo} has {n_bytes / 1e9:,.1f} GB, and {cache} has {free_bytes / 1e9:,.1f} GB free"
        )


def wanted_files(repo: str, sizes: dict[str, int], type_name: str) -> set[str]:
    from fnmatch import fnmatch

    names = [name for name in sizes if name.isprintable() and not set("/\\:") & set(name)]
    texts = {name for name in names if any(fnmatch(name, pattern) for pattern in _TEXTS)}
    texts |= {name for name in sizes if _MODULE.fullmatch(name)}
    for pattern in ("*.safetensors", "pytorch_model*.bin"):
        weights = {name for name in names if fnmatch(name, pattern)}
        if weights and "config.json" in names:
            if len(texts | weights) > _MAX_FILES:
                raise QsfConversionError(
                    f"{repo} has {len(texts | weights)} files to convert, allowed: {_MAX_FILES}"
                )
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
    """Return the error's cause, and what to do."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    status = getattr(getattr(error, "response", None), "status_code", None)
    if "GatedRepoError" in kinds or status == 403:
        return (
            f"{repo} asks for consent: give it on the model's page, then `hf auth login`, and the "
            "same command again"
        )
    if "RepositoryNotFoundError" in kinds or status in (401, 404):
        return f"{repo} is not on the hub (or private: `hf auth login`), nor a file or folder here"
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return f"{repo}: a file has more bytes than the hub says"
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
