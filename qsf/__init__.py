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
    from qsf._native import MemoryEvent as MemoryEvent
    from qsf._native import MemoryPlan as MemoryPlan
    from qsf._native import ModelInfo as ModelInfo
    from qsf._native import UnitTime as UnitTime
    from qsf.chat import ChatTemplate as ChatTemplate
    from qsf.errors import QsfError as QsfError
    from qsf.model import GenerationStats as GenerationStats
    from qsf.model import Model as Model
    from qsf.sampling import SamplingParams as SamplingParams
    from qsf.tokenizer import Tokenizer as Tokenizer

    __version__: str

_HOME = {
    "ChatTemplate": "qsf.chat",
    "GenerationStats": "qsf.model",
    "MemoryEvent": "qsf._native",
    "MemoryPlan": "qsf._native",
    "Model": "qsf.model",
    "ModelInfo": "qsf._native",
    "QsfError": "qsf.errors",
    "SamplingParams": "qsf.sampling",
    "Tokenizer": "qsf.tokenizer",
    "UnitTime": "qsf._native",
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
        return import_module("qsf._native").version()
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'qsf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
