"""Reads config.json: every value is checked when it is read, and unread keys are reported."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from qsf.errors import QsfConversionError, shown
from qsf.file.layout import Activation

MAX_LAYERS: Final = 4096
MAX_DIM: Final = 1 << 20
MAX_HEADS: Final = 4096
MAX_HEAD_DIM: Final = 4096
MAX_VOCAB: Final = 1 << 24
MAX_TOKENS: Final = 1 << 24
MAX_FFN_DIM: Final = 1 << 22

ACTIVATIONS: Final = {
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu": Activation.GELU_ERF,
    "relu": Activation.RELU,
    "relu2": Activation.RELU_SQUARED,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "swiglu": Activation.SILU,
}


class Config(Mapping[str, Any]):
    """A config.json, with general names for keys that a family names differently.

    It records which keys were read. Every reading method raises QsfConversionError for a missing or
    invalid value.

    Args:
        values: the keys and values of the file.
        renames: general name -> the family's.
        defaults: of the family's class, by general names, for keys that a file leaves out.
        where: name of the object in errors.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        renames: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
        where: str = "",
    ) -> None:
        self._values = values
        self._renames = renames or {}
        self._defaults = defaults or {}
        self._where = where
        self._read: set[str] = set()  # names that were requested

    def __getitem__(self, name: str) -> Any:
        """The value of a key: under the family's name, else the general one, else the default."""
        keys = (self._renames.get(name, name), name)
        self._read.update(keys)
        key = next((key for key in keys if key in self._values), None)
        return self._defaults[name] if key is None else self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def unread(self) -> Iterator[tuple[str, Any]]:
        """Yield the keys of the file that no method has read, with their values."""
        yield from ((key, value) for key, value in self._values.items() if key not in self._read)

    def has(self, name: str) -> bool:
        return any(key in self._values for key in (self._renames.get(name, name), name))

    def error(self, name: str, problem: str) -> QsfConversionError:
        key = self._renames.get(name, name)
        return QsfConversionError(f"config.json: {self._where}{key} {problem}")

    def count(self, name: str, most: int, default: int | None = None, *, least: int = 1) -> int:
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise self.error(name, "is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(name, f"= {shown(value)} is not within {least}..{most}")
        return value

    def tokens(self, name: str) -> int:
        """A number of tokens; files say 10**9 or 10**30 for one without a bound."""
        return min(self.count(name, 10**40), MAX_TOKENS)

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            problem = "is missing" if value is None else f"= {shown(value)} is not a number"
            raise self.error(name, problem)
        if not math.isfinite(value) or value <= 0:
            raise self.error(name, f"= {shown(value)} is not a positive number")
        return float(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        value = False if value is None else value  # so transformers takes null
        if not isinstance(value, bool):
            raise self.error(name, f"= {shown(value)} is not true or false")
        return value

    def numbers(self, name: str, n: int) -> list[float]:
        value = self.get(name)
        if not isinstance(value, list) or len(value) != n:
            raise self.error(name, f"= {shown(value)} is not a list of {n} numbers")
        return [Config({name: item}, where=self._where).positive(name) for item in value]

    def activation(self, name: str) -> Activation:
        value = self.get(name)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            supported = ", ".join(ACTIVATIONS)
            raise self.error(name, f"= {shown(value)} is not supported; supported: {supported}")
        return ACTIVATIONS[value]

    def of_layers(self, name: str, n_layers: int, allowed: tuple[Any, ...]) -> list[Any] | None:
        """A value for each layer, one of ``allowed``; None if the file states none.

        A list may be longer: layers after the last one predict further tokens in training.
        """
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < n_layers:
            raise self.error(name, f"= {shown(value)} is not a list for {n_layers} layers")
        for item in value[:n_layers]:
            if item not in allowed:
                raise self.error(
                    name, f"has {shown(item)}, supported: {', '.join(map(str, allowed))}"
                )
        return value[:n_layers]

    def token_id(self, name: str, n_vocab: int, warnings: list[str]) -> int | None:
        value = self.get(name)
        if isinstance(value, list):
            value = value[0] if value else None
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"= {shown(value)} is not a token id")
        if not 0 <= value < n_vocab:
            warnings.append(
                f"{name} {value} is outside the vocabulary of {n_vocab} and is left out"
            )
            return None
        return value
