"""QSF runs language models inside a memory budget.

    import qsf

    with qsf.Model("model.qsf", ram_budget=200) as model:
        for piece in model.generate("Once upon a time"):
            print(piece, end="", flush=True)

Everything is imported when it is first used, so that ``import qsf`` costs nothing.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qsf.errors import QsfError as QsfError
    from qsf.model import GenerationStats as GenerationStats
    from qsf.model import Model as Model
    from qsf.native.binding import MemoryEvent as MemoryEvent
    from qsf.native.binding import MemoryPlan as MemoryPlan
    from qsf.native.binding import ModelInfo as ModelInfo
    from qsf.native.binding import UnitTime as UnitTime
    from qsf.text.chat import ChatTemplate as ChatTemplate
    from qsf.text.sampling import SamplingParams as SamplingParams
    from qsf.text.tokenizer import Tokenizer as Tokenizer

    __version__: str

_HOME = {
    "ChatTemplate": "qsf.text.chat",
    "GenerationStats": "qsf.model",
    "MemoryEvent": "qsf.native.binding",
    "MemoryPlan": "qsf.native.binding",
    "Model": "qsf.model",
    "ModelInfo": "qsf.native.binding",
    "QsfError": "qsf.errors",
    "SamplingParams": "qsf.text.sampling",
    "Tokenizer": "qsf.text.tokenizer",
    "UnitTime": "qsf.native.binding",
}

__all__ = [
    "ChatTemplate",
    "GenerationStats",
    "MemoryEvent",
    "MemoryPlan",
    "Model",
    "ModelInfo",
    "QsfError",
    "SamplingParams",
    "Tokenizer",
    "UnitTime",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("qsf.native.binding").version()
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'qsf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
