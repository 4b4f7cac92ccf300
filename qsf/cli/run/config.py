"""A user's defaults: ``~/.config/qsf/config.toml``, a line for each option of ``qsf run``."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from qsf.errors import QsfArgumentError, QsfIOError
from qsf.file.foreign_text import text_of
from qsf.options import Flag, GenerationOptions, ModelOptions, Option, Switch, Texts, described
from qsf.system.files import READ_FLAGS

_MAX_BYTES = 64 << 10


def config_path() -> Path:
    """Return the path of the file, which may not exist."""
    folder = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    if not folder.is_absolute():
        folder = Path("~/.config").expanduser()
    return folder / "qsf" / "config.toml"


def read_defaults() -> dict[str, Any]:
    """Return the values of the file by option name; {} without a file.

    Raises:
        QsfArgumentError: an option is unknown or its value is not allowed.
        QsfIOError: the file cannot be read.
    """
    path = config_path()
    try:
        with os.fdopen(os.open(path, READ_FLAGS), "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise QsfIOError(f"{path}: {error.strerror}") from error
    options = {
        option.flag.removeprefix("--"): option
        for kind in (ModelOptions, GenerationOptions)
        for option in described(kind, "run")
    }
    return dict(_value(path, options, name, value) for name, value in _parsed(path, data).items())


def _parsed(path: Path, data: bytes) -> dict[str, Any]:
    if len(data) > _MAX_BYTES:
        raise QsfArgumentError(f"{path}: more than {_MAX_BYTES} bytes are too many for options")
    try:
        # Imported late: only needed if the file exists
        tomllib = importlib.import_module("tomllib")
    except ImportError:
        raise QsfArgumentError(
            f"{path}: reading it takes Python 3.11 or newer: remove it, or use options"
        ) from None
    text = text_of(data, str(path))
    try:
        values: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise QsfArgumentError(f"{path}: {error}") from error
    return values


def _value(path: Path, options: dict[str, Option], name: str, value: Any) -> tuple[str, Any]:
    """Return the option's name in Python and its value as a parsed command line has it."""
    option = options.get(name.replace("_", "-"))
    if option is None:
        from difflib import get_close_matches

        likely = get_close_matches(name, options, 1)
        guess = f": did you mean {likely[0]}?" if likely else f"; there are {', '.join(options)}"
        raise QsfArgumentError(f"{path}: there is no option {name}{guess}")
    kind = option.kind
    try:
        if isinstance(kind, Switch):
            word = ("on" if value else "off") if isinstance(value, bool) else value
            if word not in Switch.choices:
                raise ValueError(f"{value!r} is not one of {', '.join(Switch.choices)}")
            return option.name, word
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            option.check(value)
        elif not isinstance(kind, Flag | Texts):
            return option.name, kind.parse(str(value))
        option.check(value)
    except ValueError as error:  # includes QsfArgumentError
        raise QsfArgumentError(f"{path}: {name}: {error}") from None
    return option.name, [value] if isinstance(kind, Texts) and isinstance(value, str) else value
