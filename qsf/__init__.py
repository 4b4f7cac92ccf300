"""QSF runs language models inside a memory budget.

    import qsf

    with qsf.Model("model.qsf") as model:
        for piece in model.generate("Once upon a time"):
            print(piece, end="", flush=True)

Everything is imported when it is first used, so that ``import qsf`` costs nothing.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

TYPE_CHECKING = False  # typing takes milliseconds: see qsf/shell/entry.py
if TYPE_CHECKING:
    from typing import Any

    from qsf.errors import QsfArgumentError as QsfArgumentError
    from qsf.errors import QsfCancelledError as QsfCancelledError
    from qsf.errors import QsfConversionError as QsfConversionError
    from qsf.errors import QsfError as QsfError
    from qsf.errors import QsfFormatError as QsfFormatError
    from qsf.errors import QsfIOError as QsfIOError
    from qsf.errors import QsfMemoryError as QsfMemoryError
    from qsf.errors import QsfNumericError as QsfNumericError
    from qsf.errors import QsfStateError as QsfStateError
    from qsf.errors import QsfUnsupportedError as QsfUnsupportedError
    from qsf.model import Model as Model
    from qsf.native.binding import MemoryEvent as MemoryEvent
    from qsf.native.binding import MemoryPlan as MemoryPlan
    from qsf.native.binding import ModelInfo as ModelInfo
    from qsf.native.binding import UnitTime as UnitTime
    from qsf.options import GenerationOptions as GenerationOptions
    from qsf.options import ModelOptions as ModelOptions
    from qsf.session import Session as Session
    from qsf.text.chat import ChatTemplate as ChatTemplate
    from qsf.text.generation import ChosenToken as ChosenToken
    from qsf.text.generation import GenerationStats as GenerationStats
    from qsf.text.sampling import SamplingParams as SamplingParams
    from qsf.text.tokenizer import Tokenizer as Tokenizer
    from qsf_converter.convert import convert as convert

    __version__: str

_NAMES_OF = {
    "qsf.errors": (
        "QsfArgumentError",
        "QsfCancelledError",
        "QsfConversionError",
        "QsfError",
        "QsfFormatError",
        "QsfIOError",
        "QsfMemoryError",
        "QsfNumericError",
        "QsfStateError",
        "QsfUnsupportedError",
    ),
    "qsf.model": ("Model",),
    "qsf.native.binding": ("MemoryEvent", "MemoryPlan", "ModelInfo", "UnitTime"),
    "qsf.options": ("GenerationOptions", "ModelOptions"),
    "qsf.session": ("Session",),
    "qsf.text.chat": ("ChatTemplate",),
    "qsf.text.generation": ("ChosenToken", "GenerationStats"),
    "qsf.text.sampling": ("SamplingParams",),
    "qsf.text.tokenizer": ("Tokenizer",),
    "qsf_converter.convert": ("convert",),
}
_HOME = {name: module for module, names in _NAMES_OF.items() for name in names}

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "__version__":
        return import_module("qsf.native.binding").version()
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'qsf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
