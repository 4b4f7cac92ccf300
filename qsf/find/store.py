"""Converted models that `qsf run` keeps in the user's cache folder.

A file ``NAME-TYPE-KEY.qsf`` has a small ``.json`` beside it, with the name that the user typed and
a fingerprint of the source. The modification time of the ``.json`` is the time of the last use.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from qsf.errors import QsfIOError
from qsf.file.gguf_parts import part_names
from qsf.file.layout import VERSION
from qsf.file.open_file import PIECES_FOLDER
from qsf.foreign_json import read_json_file
from qsf.system import files


@dataclass(frozen=True, slots=True)
class Suggested:
    """A model that works here. MB are 2^20 bytes, of 4 bits a weight.

    The figures are those of the memory plan for a file of the model's shape, with 20 MB for its
    tokenizer.

    Attributes:
        name: what a user types.
        repo: ``org/name`` on the hub, which asks for no consent.
        licence: its SPDX name, if it has one.
        gguf: the repository with its GGUF file of GGUF_TYPE, about as large as the .qsf file.
        good_for: its use in a few words.
        file_mb: the .qsf file.
        memory_mb: the process with all weights in memory and 4096 tokens of context.
        least_mb: the least budget, with weights read for each token.
    """

    name: str
    repo: str
    licence: str
    gguf: str
    good_for: str
    file_mb: int
    memory_mb: int
    least_mb: int


GGUF_TYPE: Final = "Q4_K_M"
SUGGESTED: Final = (
    Suggested("smollm2:135m", "HuggingFaceTB/SmolLM2-135M-Instruct", "Apache-2.0",
              "unsloth/SmolLM2-135M-Instruct-GGUF",
              "trying QSF out", 85, 210, 71),
    Suggested("smollm2:360m", "HuggingFaceTB/SmolLM2-360M-Instruct", "Apache-2.0",
              "unsloth/SmolLM2-360M-Instruct-GGUF",
              "short answers", 216, 381, 73),
    Suggested("qwen2.5-coder:0.5b", "Qwen/Qwen2.5-Coder-0.5B-Instruct", "Apache-2.0",
              "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
              "code", 326, 448, 72),
    Suggested("qwen3:0.6b", "Qwen/Qwen3-0.6B", "Apache-2.0",
              "unsloth/Qwen3-0.6B-GGUF",
              "chat, thinks", 390, 717, 84),
    Suggested("gemma3:1b", "unsloth/gemma-3-1b-it", "Gemma Terms of Use",
              "unsloth/gemma-3-1b-it-GGUF",
              "chat, many languages", 672, 803, 76),
    Suggested("llama3.2:1b", "unsloth/Llama-3.2-1B-Instruct", "Llama 3.2 Community License",
              "unsloth/Llama-3.2-1B-Instruct-GGUF",
              "chat", 781, 956, 74),
    Suggested("qwen2.5-coder:1.5b", "Qwen/Qwen2.5-Coder-1.5B-Instruct", "Apache-2.0",
              "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
              "code", 933, 1102, 74),
    Suggested("qwen3:1.7b", "Qwen/Qwen3-1.7B", "Apache-2.0",
              "unsloth/Qwen3-1.7B-GGUF",
              "chat, thinks", 1063, 1401, 85),
    Suggested("smollm3:3b", "HuggingFaceTB/SmolLM3-3B", "Apache-2.0",
              "unsloth/SmolLM3-3B-GGUF",
              "chat, thinks", 1768, 2033, 79),
    Suggested("llama3.2:3b", "unsloth/Llama-3.2-3B-Instruct", "Llama 3.2 Community License",
              "unsloth/Llama-3.2-3B-Instruct-GGUF",
              "chat", 1900, 2247, 84),
    Suggested("qwen3:4b", "Qwen/Qwen3-4B", "Apache-2.0",
              "unsloth/Qwen3-4B-GGUF",
              "chat, thinks", 2333, 2752, 89),
    Suggested("qwen2.5-coder:7b", "Qwen/Qwen2.5-Coder-7B-Instruct", "Apache-2.0",
              "Qwen/Qwen2.5-Coder-7B-Instruct-GGUF",
              "code", 4574, 4837, 78),
    Suggested("qwen3:8b", "Qwen/Qwen3-8B", "Apache-2.0",
              "unsloth/Qwen3-8B-GGUF",
              "chat, thinks", 4951, 5382, 89),
)  # fmt: skip
"""By size. Only families that `qsf convert --families` lists."""

_MAX_CHARS = 200


def suggested(name: str) -> Suggested | None:
    """Return the model with that short name, in any case of letters."""
    return next((model for model in SUGGESTED if model.name == name.lower()), None)


def likely_name(name: str) -> str | None:
    """Return a short name like ``name``: the smallest of its family, else a similar spelling."""
    from difflib import get_close_matches

    if len(name) > _MAX_CHARS:  # a search of similar names would take its memory many times
        return None
    names = [model.name for model in SUGGESTED]
    same = [each for each in names if each.split(":")[0] == name.lower().split(":")[0]]
    return next(iter(same or get_close_matches(name.lower(), names, 1)), None)


@dataclass(frozen=True, slots=True)
class Kept:
    path: Path
    name: str  # org/name on the hub, or the path of the source
    quant_type: str
    fingerprint: str  # of the source when it was converted
    n_bytes: int
    used_seconds: float  # since 1970

    @property
    def short_name(self) -> str:
        """The last part of the name, without ``.gguf``; for a suggested model its short name."""
        short = [model.name for model in SUGGESTED if self.name in (model.repo, model.gguf)]
        return short[0] if short else Path(self.name).name.removesuffix(".gguf")

    @property
    def full_name(self) -> str:
        return f"{self.name}:{self.quant_type}"


def store_folder() -> Path:
    return files.user_folder("XDG_CACHE_HOME", "~/.cache") / "models"


def place_of(name: str, quant_type: str) -> Path:
    """Return the path of the model with that name and type, which may not exist."""
    key = hashlib.sha256(f"{name}\0{quant_type}".encode()).hexdigest()[:8]
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(name).name)[:60].strip("-.") or "model"
    return store_folder() / f"{slug}-{quant_type}-{key}.qsf"


def pieces_folder(repo: str, commit: str) -> Path:
    """Return the folder of a model that is converted without a copy of its weights."""
    return store_folder() / "pieces" / repo.replace("/", "--") / commit


def is_of_pieces(source: Path) -> bool:
    return list(source.parents[1:2]) == [store_folder() / "pieces"]


def environment_of(source: Path) -> dict[str, str]:
    """Return what lets the converter follow the pointers of such a folder."""
    return {PIECES_FOLDER: str(source)} if is_of_pieces(source) else {}


# Raised when kept files must be made again: 2 is section TEXT of version 2.
_CONVERSION = 2


def fingerprint_of(source: Path) -> str:
    """Return a text that changes with the source's files and with what conversion makes of them."""
    digest = hashlib.sha256(f"{VERSION}.{_CONVERSION}\n".encode())
    paths = [source.with_name(name) for name in part_names(source.name)]
    if source.is_dir():
        paths = sorted(source.iterdir())
    for path in paths:
        if path.is_file():
            facts = path.stat()
            digest.update(f"{path.name}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


_MAX_NOTE_BYTES = 64 << 10


def read_kept(path: Path) -> Kept | None:
    """Return a converted model's record, or None if it is missing or incomplete."""
    note = path.with_suffix(".json")
    try:
        facts = read_json_file(note, max_bytes=_MAX_NOTE_BYTES)
        used, n_bytes = note.stat().st_mtime, path.stat().st_size
        name, quant_type, fingerprint = (facts[key] for key in ("name", "type", "fingerprint"))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not all(isinstance(text, str) for text in (name, quant_type, fingerprint)):
        return None
    return Kept(path, name, quant_type, fingerprint, n_bytes, used)


def write_note(path: Path, name: str, quant_type: str, fingerprint: str) -> None:
    """Record the source of a converted model in a file beside it."""
    from qsf.shell.output import write_text

    facts = {"name": name, "type": quant_type, "fingerprint": fingerprint}
    write_text(path.with_suffix(".json"), json.dumps(facts) + "\n", overwrite=True)


def mark_used(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.utime(path.with_suffix(".json"))


def all_kept() -> list[Kept]:
    """Return all converted models, the one used last first."""
    try:
        paths = sorted(store_folder().glob("*.qsf"))
    except OSError:
        return []
    kept = [kept for path in paths if (kept := read_kept(path)) is not None]
    return sorted(kept, key=lambda kept: -kept.used_seconds)


def named(short_name: str, quant_type: str = "") -> list[Kept]:
    """Return the converted models of one source by its short name, the one used last first; none if
    several sources have that name.
    """
    same = [kept for kept in all_kept() if kept.short_name == short_name]
    same = same if len({kept.name for kept in same}) == 1 else []
    return [kept for kept in same if quant_type.lower() in ("", kept.quant_type.lower())]


def remove(kept: Kept) -> None:
    """Remove a converted model. Raises QsfIOError."""
    try:
        with locked(kept.path):
            kept.path.unlink(missing_ok=True)
            for suffix in (".json", ".lock"):
                kept.path.with_suffix(suffix).unlink(missing_ok=True)
    except OSError as error:
        raise QsfIOError(f"{kept.path}: {error.strerror}") from error


@contextlib.contextmanager
def locked(path: Path, waiting: str = "") -> Iterator[None]:
    """Let one process at a time make or remove ``path``; prints ``waiting`` before a wait."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = files.open_lock(path.with_suffix(".lock"), 0o666)
    except OSError as error:
        raise QsfIOError(f"{path.parent}: {error.strerror}") from error
    try:
        try:
            files.try_lock(fd)
        except BlockingIOError:
            if waiting:
                os.write(2, f"{waiting}\n".encode())
            files.lock(fd)
        yield
    finally:
        os.close(fd)
