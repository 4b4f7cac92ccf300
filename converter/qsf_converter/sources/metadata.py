"""The sections TOKN and CHAT, which make a .qsf file enough on its own, and the source's origin.

TOKN is ``tokenizer.json``. CHAT is JSON with the chat template, the special tokens and
``generation_config.json``.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qsf.errors import QsfConversionError, QsfIOError
from qsf.foreign_json import MEMORY_BYTES, JsonError, read_json
from qsf.system.files import READ_FLAGS
from qsf_converter.text.tables import TOKENIZER_MEMORY_BYTES

_LFS = b"version https://git-lfs"
_MAX_JSON_BYTES = 64 << 20  # limit of the section TOKN
# Most memory of a parsed list of tensors: enough for 100,000, far more than known shards have.
INDEX_MEMORY_BYTES = 256 << 20
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_LICENCE_NAMES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "COPYING")


@dataclass(frozen=True, slots=True)
class Origin:
    name: str
    config_sha256: str  # of config.json, or of the metadata of a GGUF file
    licence: str | None
    stored: str | None = None  # how a quantised checkpoint stores its matrices
    type_name: str = ""  # of the weights, by llama.cpp's name; "": none, or not kept


def origin_of(model_dir: Path) -> Origin:
    config = read_bytes(model_dir / "config.json") or b""
    return Origin(
        name=file_name(model_dir.resolve().name),
        config_sha256=hashlib.sha256(config).hexdigest(),
        licence=_licence(model_dir),
    )


def file_name(name: str) -> str:
    return os.fsencode(name).decode("utf-8", "replace")


def open_regular(path: Path) -> io.FileIO:
    """Open a file to read it.

    Raises OSError, QsfConversionError for a pipe, a device, and what Git leaves of a large file.
    """
    file = io.FileIO(path, "rb", opener=lambda name, _: os.open(name, READ_FLAGS))
    fault = "" if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else "not a regular file"
    if not fault and file.read(len(_LFS)) == _LFS:
        fault = "only a pointer of Git LFS is here: `git lfs pull` in its folder gets the file"
    if fault:
        file.close()
        raise QsfConversionError(f"{path}: {fault}")
    file.seek(0)
    return file


def read_bytes(path: Path) -> bytes | None:
    """Return a file's bytes, or None when there is no such file.

    Raises QsfConversionError for a pipe, a device or more than 64 MB, QsfIOError when the system
    refuses to read.
    """
    try:
        with io.BufferedReader(open_regular(path)) as file:
            n_bytes = os.fstat(file.fileno()).st_size
            if n_bytes > _MAX_JSON_BYTES:
                raise QsfConversionError(
                    f"{path}: {n_bytes >> 20} MB, allowed: up to {_MAX_JSON_BYTES >> 20}"
                )
            return file.read(_MAX_JSON_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise QsfIOError(f"{path}: {error.strerror}") from error


def read_json_object(path: Path, memory_bytes: int = MEMORY_BYTES) -> dict[str, Any] | None:
    """Return a JSON object, or None when there is no such file.

    Raises QsfConversionError when the file is not a JSON object or takes more than
    ``memory_bytes``, QsfIOError when the system
    refuses to read it.
    """
    data = read_bytes(path)
    if data is None:
        return None
    try:
        parsed = read_json(data, memory_bytes=memory_bytes, has_nan=True, parse_int=_whole_number)
    except JsonError as error:
        raise QsfConversionError(f"{path}: {error}") from error
    if not isinstance(parsed, dict):
        raise QsfConversionError(f"{path}: a JSON object is expected, not {type(parsed).__name__}")
    return parsed


def _whole_number(digits: str) -> int | float:
    """Return the number; beyond f64, which every use of it overflows, that of f64: infinity."""
    return int(digits) if len(digits) <= sys.float_info.max_10_exp else float(digits)


def tokenizer_bytes(model_dir: Path) -> bytes | None:
    path = model_dir / "tokenizer.json"
    if read_json_object(path, TOKENIZER_MEMORY_BYTES) is None:
        return None
    return read_bytes(path)


def generation_config(model_dir: Path) -> dict[str, Any]:
    parsed = read_json_object(model_dir / "generation_config.json") or {}
    return {name: value for name, value in parsed.items() if value is not None}


def token_ids(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: config[name] for name in TOKEN_IDS if config.get(name) is not None}


def chat_bytes(model_dir: Path, config: Mapping[str, Any], generation: Mapping[str, Any]) -> bytes:
    """Return the CHAT section: ``chat_template``, ``special_tokens``, ``generation``.

    ``chat_template`` is null when the model has none. When it has several, named ones, it is
    the one called ``default``, and ``chat_templates`` holds them all. ``generation`` is that of
    the file; missing token ids come from ``config``.
    """
    tokenizer = read_json_object(model_dir / "tokenizer_config.json") or {}
    chat: dict[str, Any] = _chat_templates(model_dir, tokenizer)
    chat["special_tokens"] = _special_tokens(model_dir, tokenizer)
    chat["generation"] = {**token_ids(config), **generation}
    return json.dumps(chat, ensure_ascii=False).encode()


def _chat_templates(model_dir: Path, tokenizer: dict[str, Any]) -> dict[str, Any]:
    files = {file.stem: file for file in model_dir.glob("additional_chat_templates/*.jinja")}
    files["default"] = model_dir / "chat_template.jinja"
    named = {name: text for name in sorted(files) if (text := _text_of(files[name])) is not None}
    if named:
        return {"chat_template": named.get("default"), "chat_templates": named}
    separate = read_json_object(model_dir / "chat_template.json") or {}
    template = separate.get("chat_template", tokenizer.get("chat_template"))
    if isinstance(template, list):
        named = {
            entry["name"]: entry["template"]
            for entry in template
            if isinstance(entry, dict)
            and isinstance(entry.get("name"), str)
            and isinstance(entry.get("template"), str)
        }
        if named:
            return {"chat_template": named.get("default"), "chat_templates": named}
    return {"chat_template": template}


def _text_of(path: Path) -> str | None:
    try:
        data = read_bytes(path)
        return None if data is None else data.decode()
    except UnicodeDecodeError as error:
        raise QsfConversionError(f"{path}: not UTF-8: {error}") from error


def _special_tokens(model_dir: Path, tokenizer: dict[str, Any]) -> dict[str, Any]:
    fallback = read_json_object(model_dir / "special_tokens_map.json") or {}
    tokens: dict[str, Any] = {}
    for name in _SPECIAL_TOKENS:
        token = tokenizer.get(name) or fallback.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            tokens[name] = token
    for name in ("add_bos_token", "add_eos_token"):
        if isinstance(tokenizer.get(name), bool):
            tokens[name] = tokenizer[name]
    return tokens


def _licence(model_dir: Path) -> str | None:
    card = (read_bytes(model_dir / "README.md") or b"").decode("utf-8", "replace").splitlines()
    if card and card[0].strip() == "---":
        for line in card[1:]:
            if line.strip() == "---":
                break
            key, _, value = line.partition(":")
            if key == "license" and value.strip():
                return value.strip().strip("\"'")
    for name in _LICENCE_NAMES:
        text = (read_bytes(model_dir / name) or b"").decode("utf-8", "replace")
        for line in text.splitlines():
            if line.strip():
                return line.strip()[:200]
    return None
