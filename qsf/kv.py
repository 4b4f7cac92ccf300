"""The KV cache by name: types of its numbers, and policies for texts that outgrow it."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qsf.errors import QsfArgumentError

if TYPE_CHECKING:
    from array import array

_KV_BITS = {"2bit": 2, "4bit": 4, "8bit": 8, "f16": 16, "f32": 32}
KV_TYPES = "f32, f16, 8bit, 4bit, 2bit, or kXvY with X, Y of 16, 8, 4, 2"
KV_POLICIES = "none, disk[:W], recompute[:P] or window:W[:P]"

KV_BLOCK_TOKENS = 32  # of the KV pool; sequences share whole blocks

_WITH_SCALES = {2: 2.5, 4: 4.5, 8: 8.25, 16: 16.0, 32: 32.0}  # bits of a number with its share
_HEAD_VALUES = 64  # heads are padded to a multiple of it
_PINNED_TOKENS = 256
_MOST_TOKENS = 2**31


def parse_kv_type(name: str) -> tuple[int, int]:
    """Return the bits of keys and of values. Raises ValueError for an unknown type."""
    if name in _KV_BITS:
        return _KV_BITS[name], _KV_BITS[name]
    apart = re.fullmatch(r"k(2|4|8|16)v(2|4|8|16)", name)
    if apart is None:
        raise ValueError(f"{name!r} is not a type of KV cache: {KV_TYPES}")
    return int(apart[1]), int(apart[2])


def kv_type_name(key_bits: int, value_bits: int) -> str:
    """Return the name of the type with so many bits for keys and for values."""
    if key_bits != value_bits:
        return f"k{key_bits}v{value_bits}"
    return next(name for name, bits in _KV_BITS.items() if bits == key_bits)


def kv_position_bytes(
    n_layers: int, n_kv_heads: int, head_dim: int, key_bits: int, value_bits: int
) -> float:
    """Return the bytes that the keys and values of one position take in all layers."""
    n_values = -(-head_dim // _HEAD_VALUES) * _HEAD_VALUES
    n_bits = _WITH_SCALES[key_bits] + _WITH_SCALES[value_bits]
    return n_layers * n_kv_heads * n_values * n_bits / 8


@dataclass(frozen=True, slots=True)
class KvPolicy:
    """How a session continues when its context is full: it forgets the middle of the text.

    The first and the newest tokens are then evaluated as a text of their own. With a window,
    layers see only these from the beginning, so the KV cache holds no others.

    Attributes:
        name: the policy as the user wrote it.
        window_tokens: newest tokens that a token sees; 0: all.
        pinned_tokens: first tokens that are never forgotten: system message, attention sinks.
    """

    name: str
    window_tokens: int
    pinned_tokens: int

    def check_context(self, ctx_tokens: int) -> None:
        """Raise QsfArgumentError if a context of so many tokens is too short for the policy."""
        n_kept = self.pinned_tokens + max(self.window_tokens, 1)
        if n_kept >= ctx_tokens:
            kept = f"the first {self.pinned_tokens} tokens"
            if self.window_tokens:
                kept += f" and the newest {self.window_tokens}"
            raise QsfArgumentError(
                f"kv_policy {self.name} keeps {kept}, and the context has only {ctx_tokens}: a "
                f"longer max_seq_len, or smaller numbers ({KV_POLICIES}; P is {_PINNED_TOKENS} "
                "unless given)",
                argument="kv_policy",
            )

    def newest_tokens(self, ctx_tokens: int) -> int:
        """Return how many of the newest tokens stay when the context is full."""
        n_half = (ctx_tokens - self.pinned_tokens) // 2
        return min(self.window_tokens or n_half, n_half)

    def shortened(self, tokens: array[int], ctx_tokens: int) -> array[int]:
        """Return the tokens that stay of a sequence that does not fit in the context."""
        n_newest = self.newest_tokens(ctx_tokens)
        return tokens[: self.pinned_tokens] + tokens[len(tokens) - n_newest :]


def resident_tokens(text: str) -> int | None:
    """Return W of ``disk:W``, the newest tokens kept in memory; 0 for ``disk``; else None.

    Keys and values of the other tokens lie in a file: nothing is forgotten, and the bits are equal.
    """
    match = re.fullmatch(r"disk(?::([0-9]{1,9}))?", text)
    return None if match is None else int(match[1] or 0)


def parse_kv_policy(text: str) -> KvPolicy | None:
    """Return how a named policy forgets; None for "none" and "disk", which forget nothing.

    Raises ValueError if there is no such policy.

    ``window:1024`` and ``recompute`` pin the first 256 tokens, ``window:1024:64`` 64.
    """
    if text == "none" or resident_tokens(text) is not None:
        return None
    match = re.fullmatch(r"(recompute|window:([0-9]{1,10}))(?::([0-9]{1,10}))?", text)
    if match is None:
        raise ValueError(f"{text!r} is not a policy for the KV cache: {KV_POLICIES}")
    window_tokens = int(match[2] or 0)
    pinned_tokens = _PINNED_TOKENS if match[3] is None else int(match[3])
    if match[2] is not None and window_tokens < KV_BLOCK_TOKENS:
        raise ValueError(f"{text!r} is too small: a window has at least {KV_BLOCK_TOKENS}")
    if max(window_tokens, pinned_tokens) > _MOST_TOKENS:
        raise ValueError(f"{text!r} is too much: at most {_MOST_TOKENS} tokens")
    return KvPolicy(text, window_tokens, pinned_tokens)
