"""What MODEL on a command line means: a .qsf file, something to convert, or a name on the hub."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from qsf.errors import QsfArgumentError, QsfConversionError, QsfIOError, shown
from qsf.file.family import TYPE_NAMES, our_type
from qsf.file.gguf_parts import name_without_part, part_names
from qsf.find import store
from qsf.find.store import likely_name, suggested
from qsf.foreign_json import read_json_file

VECTORS_TYPE = "8bit"  # of models for vectors of texts, which have no answers to judge
_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_URL = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?:models/)?([^/]+/[^/?#]+)")
_MAX_JSON_BYTES = 16 << 20
_MAX_CHARS = 400  # of a name: an address with two names of 96 and what follows
_LFS = b"version https://git-lfs"
_NO_TEXT = re.compile(r".*(?:(?<!LMHead)Model|ForMaskedLM)")  # architectures that write none


@dataclass(frozen=True, slots=True)
class Named:
    """The meaning of a model's name.

    Attributes:
        path: the .qsf file, the folder or the GGUF file; None: to be found on the hub.
        repo: ``org/name`` on the hub; "": it is a file or a folder.
        type_name: the requested type, by our name or llama.cpp's; "": none.
        is_qsf: ``path`` is a .qsf file.
    """

    path: Path | None
    repo: str = ""
    type_name: str = ""
    is_qsf: bool = False

    @property
    def quant_type(self) -> str:
        """The type to convert to, by our name; "": the converter's choice for this model."""
        type_name = self.type_name
        is_file = self.path is not None and self.path.is_file()
        if is_file and self.path is not None and type_name.lower() not in TYPE_NAMES:
            # A type by llama.cpp's name selects a file; it is not converted to another type.
            type_name = "" if type_name.upper() in self.path.name.upper() else type_name
            return our_type(type_name) if type_name else ""
        if type_name:
            return our_type(type_name)
        is_for_vectors = self.path is not None and _is_for_vectors(self.path)
        return VECTORS_TYPE if is_for_vectors else ""


def hub_name(name: str) -> str:
    """Return the one spelling of a model's name: a short name, or ``org/name`` with ``:TYPE``.

    Files here do not matter. Raises QsfArgumentError if it is neither.
    """
    if len(name) > _MAX_CHARS:
        raise QsfArgumentError(f"a model's name has at most {_MAX_CHARS} characters: {shown(name)}")
    url = _URL.match(name)
    name = name if url is None else url[1]
    repo, _, type_name = name.partition(":")
    short = suggested(name)
    if short is not None:
        return short.name
    if _REPO.fullmatch(repo) is None:
        likely = likely_name(name) or "qwen3:4b"
        raise QsfArgumentError(f"{name!r} is no name on the hub: org/name is, or {likely}")
    if not type_name:
        return repo
    is_ours = our_type(type_name) == type_name.lower()
    return f"{repo}:{type_name.lower() if is_ours else type_name.upper()}"


def hub_address(name: str) -> str:
    """Return the address on the hub of a model by its name. Raises as ``hub_name``."""
    name = hub_name(name)
    short = suggested(name)
    return f"https://huggingface.co/{name if short is None else short.gguf}"


def meaning_of(model: str) -> Named:
    """Return the meaning of ``model``. Raises QsfError, with what to do, if it is no model."""
    url = _URL.match(model)
    if url is not None:
        model = url[1]
    elif "://" in model:
        raise QsfArgumentError(
            f"{model} is not on huggingface.co: download it, and name the file or the folder"
        )
    text, type_name = _split_type(model)
    short = None if os.path.lexists(text) else suggested(model) or suggested(text)
    if short is not None:
        type_name = "" if suggested(model) else type_name
        is_kept = any(kept.name == short.repo for kept in store.all_kept())
        is_ours = our_type(type_name) == type_name.lower() if type_name else is_kept
        text = short.repo if is_ours else short.gguf
        type_name = type_name if is_ours else type_name or store.GGUF_TYPE
    elif url is None and os.path.lexists(text):
        return _existing(Path(text), type_name)
    if url is None and short is None and (kept := store.named(text, type_name)):
        return Named(kept[0].path, is_qsf=True)
    folder, _, name = text.partition("/")
    is_file = Path(name).suffix in (".qsf", ".gguf", ".safetensors")
    is_repo = _REPO.fullmatch(text) is not None and not is_file
    if not is_repo or (url is None and Path(folder).is_dir()):
        raise QsfIOError(f"{model}: there is no such file or folder{_neighbours(Path(model))}")
    if type_name:
        our_type(type_name)
    return Named(None, repo=text, type_name=type_name)


def _split_type(model: str) -> tuple[str, str]:
    if os.path.lexists(model):
        return model, ""
    text, colon, type_name = model.rpartition(":")
    return (text, type_name) if colon and "/" not in type_name else (model, "")


def _neighbours(path: Path) -> str:
    from difflib import get_close_matches

    try:
        likely = get_close_matches(path.name, os.listdir(path.parent), 1)  # noqa: PTH208
    except OSError:
        return ""
    if likely:
        return f": did you mean {path.parent / likely[0]}?"
    name = likely_name(str(path))
    return f": did you mean {name}? (qsf list --available has all short names)" if name else ""


def _existing(path: Path, type_name: str) -> Named:
    try:
        if path.is_dir():
            return Named(source_folder(path), type_name=type_name)
        if not path.is_file():  # a pipe would wait here for a writer
            return Named(path, is_qsf=True)
        with path.open("rb") as file:
            start = file.read(64)
    except QsfIOError:  # an OSError too
        raise
    except OSError as error:
        raise QsfIOError(f"{path}: {error.strerror}") from error
    if start.startswith(_LFS):
        raise QsfIOError(
            f"{path} is a Git LFS pointer, not the model: `git lfs pull` in its folder gets it"
        )
    if start.startswith(b"GGUF"):
        return Named(_first_part(path), type_name=type_name)
    if not start or path.suffix.lower() == ".gguf":
        what = f"begins with {start[:8]!r}, not with b'GGUF'" if start else "is an empty file"
        raise QsfConversionError(f"{path} {what}: download or copy it again")
    if path.suffix in (".safetensors", ".bin", ".pth", ".pt"):
        raise QsfArgumentError(
            f"{path} is one file of a model: name its folder, {path.absolute().parent}"
        )
    return Named(path, is_qsf=True)


def _first_part(path: Path) -> Path:
    """Return the file if it is whole or the first part. Raises QsfConversionError otherwise."""
    names = part_names(path.name)
    if path.name == names[0]:
        return path
    raise QsfConversionError(
        f"{path} is one of {len(names)} parts: name the first, {path.with_name(names[0])}"
    )


def source_folder(path: Path) -> Path:
    """Return the folder, or the one GGUF file in it, that the converter reads.

    Raises:
        QsfError: the folder has no model, or only parts of one.
    """
    path = snapshot_of(path)
    if (path / "config.json").exists():
        _check_pointers(path)
        return path
    if (path / "adapter_config.json").exists():
        base = _base_model(path / "adapter_config.json")
        raise QsfConversionError(
            f"{path} is an adapter, not a model: merge it into its base model{base} "
            "(peft: merge_and_unload, save_pretrained), and name the folder of the result"
        )
    for suffix in ("gguf", "qsf"):
        names = sorted(file.name for file in path.glob(f"*.{suffix}"))
        if suffix == "gguf" and names and set(names) <= set(part_names(names[0])):
            return _first_part(path / names[0])
        if names:
            raise QsfArgumentError(
                f"{path} is a folder: name one of its files, such as {path / names[0]}"
            )
    raise QsfConversionError(f"{path} is a folder without config.json: there is no model in it")


def _check_pointers(folder: Path) -> None:
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            is_pointer = file.read(len(_LFS)) == _LFS
        if is_pointer:
            raise QsfIOError(
                f"{path} is a Git LFS pointer, not the weights: `git lfs pull` in its folder gets "
                "them"
            )


def _is_for_vectors(folder: Path) -> bool:
    """Return whether a model is for vectors of texts: its makers pool, or it has no head."""
    if (folder / "1_Pooling").is_dir():
        return True
    try:
        facts = read_json_file(folder / "config.json", max_bytes=_MAX_JSON_BYTES)
        return _NO_TEXT.fullmatch(str(facts["architectures"][0])) is not None
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _base_model(path: Path) -> str:
    try:
        name = read_json_file(path, max_bytes=_MAX_JSON_BYTES).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return ""
    return f" {name[:200]}" if isinstance(name, str) and name else ""


# ---- the cache of the hub ----


def hub_cache() -> Path:
    for name, inner in (("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", _HUB)):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser() / inner
    return Path("~/.cache").expanduser() / _HUB


_HUB = "huggingface/hub"


def cache_folder(repo: str) -> Path:
    """Return the folder of ``org/name`` in the hub's cache."""
    return hub_cache() / f"models--{repo.replace('/', '--')}"


def snapshot_of(folder: Path) -> Path:
    """Return the snapshot of a folder of the hub's cache; other folders unchanged."""
    snapshots = folder / "snapshots"
    if not snapshots.is_dir():
        return folder
    try:
        main = snapshots / (folder / "refs" / "main").read_text("ascii").strip()
        if main.is_dir():
            return main
    except (OSError, ValueError):
        pass
    by_age = sorted(snapshots.iterdir(), key=lambda path: path.stat().st_mtime)
    return by_age[-1] if by_age else folder


def cached_source(named: Named) -> Path | None:
    """Return the complete model of that name in the hub's cache: a folder or a GGUF file."""
    folder = cache_folder(named.repo)
    snapshot = snapshot_of(folder)
    if snapshot == folder or not snapshot.is_dir():
        return None
    names = [path.name for path in snapshot.iterdir() if path.exists()]
    gguf = gguf_of(names, named.type_name)
    if gguf is not None and set(part_names(gguf)) <= set(names):
        return snapshot / gguf
    wanted = wanted_weights(snapshot, names)
    is_complete = "config.json" in names and wanted and wanted <= set(names)
    return snapshot if is_complete else None


def wanted_weights(folder: Path, names: list[str]) -> set[str]:
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if index in names:
            try:
                facts = read_json_file(folder / index, max_bytes=_MAX_JSON_BYTES)
                return set(facts["weight_map"].values())
            except (OSError, ValueError, KeyError, AttributeError):
                return set()
    return {name for name in names if name in ("model.safetensors", "pytorch_model.bin")}


def gguf_of(names: list[str], type_name: str) -> str | None:
    """Choose a GGUF file: of the requested type, else of 8 bits; the first part of a split file."""
    files = sorted(name for name in names if name.lower().endswith(".gguf") and "/" not in name)
    files = [name for name in files if name == part_names(name)[0]]
    order = [type_name.upper()] if type_name else ["F16", "BF16", "Q8_0", "Q6_K", "Q4_K_M"]
    for wanted in order:
        for name in files:
            if name_without_part(name).upper().removesuffix(".GGUF").endswith(wanted):
                return name
    return None if type_name or not files else files[0]
