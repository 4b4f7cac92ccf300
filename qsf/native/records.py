"""Records of the C engine's plans and measurements, made from its structs. No policy."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar

from qsf.native._facts import PlanFields, StatsFields
from qsf.native._qsf import ffi, lib

_Record = TypeVar("_Record")


def text_of(chars: Any) -> str:
    return str(ffi.string(chars).decode())


def optional_id(token: int) -> int | None:
    """Return a token's id, or None if the engine has none."""
    return None if token == lib.QSF_TOKEN_NONE else token


_READERS: dict[str, Callable[[Any], Any]] = {
    "bool": bool,
    "str": text_of,
    "int | None": optional_id,
    "tuple[int, ...]": tuple,
}


def record(kind: type[_Record], struct: Any, **more: Any) -> _Record:
    """Return a struct as a dataclass; ``more`` are fields with values of their own.

    A field that the struct lacks gets the record's default.
    """
    made: Any = kind
    annotations: dict[str, Any] = {field.name: field.type for field in fields(made)}
    for name in annotations.keys() - more.keys():
        if hasattr(struct, name):
            value = getattr(struct, name)
            reader = _READERS.get(annotations[name])
            more[name] = value if reader is None else reader(value)
    return kind(**more)


def phase_names() -> tuple[str, ...]:
    """Return the short names of the computing thread's phases, in the order of ``phase_ns``.

    "embedding", "norm", "qkv", "attention", "attn_out", "gate_up", "down", "head", "wait",
    "decompress", "other": see ``qsf_phase`` in qsf.h.
    """
    return tuple(text_of(lib.qsf_phase_name(i)) for i in range(lib.QSF_N_PHASES))


@dataclass(frozen=True, slots=True)
class UnitTime:
    """One unit's share of all passes since the model was opened.

    Reading runs ahead of computing, so the times of neighbours overlap.

    Attributes:
        name: "embedding", "layer 0" and so on, "final".
        is_resident: it is in memory now, which changes under memory pressure.
        is_skipped: ``quality`` skips this layer; all else is 0.
        n_passes: how often it was used.
        read_bytes: bytes read from the file in these passes.
        read_ns: from the start of its first read to the end of its last, in nanoseconds.
        wait_ns: nanoseconds for which computing waited for it.
        compute_ns: the remaining nanoseconds between its begin and its end.
    """

    name: str
    is_resident: bool
    is_skipped: bool
    n_passes: int
    read_bytes: int
    read_ns: int
    wait_ns: int
    compute_ns: int


_UNIT_NAMES: Final = ("embedding", "layer {}", "final")  # by role


def unit_time(struct: Any) -> UnitTime:
    return record(UnitTime, struct, name=_UNIT_NAMES[struct.role].format(struct.layer))


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """Memory that was released under pressure, or taken again.

    Attributes:
        seconds: since the model was opened.
        bytes: how much.
        available_bytes: the system's free memory before.
        is_given_back: True: released; False: taken again.
        n_units_resident: units in memory afterwards.
    """

    seconds: int
    bytes: int
    available_bytes: int
    is_given_back: bool
    n_units_resident: int


DRAFTER_NONE: int = lib.QSF_DRAFTER_NONE
DRAFTER_HELD: int = lib.QSF_DRAFTER_HELD
DRAFTER_NOT_WORTH: int = lib.QSF_DRAFTER_NOT_WORTH
"""Values of ``MemoryPlan.drafter_state``: ``qsf_drafter_state`` in qsf.h."""


class MemoryPlan(PlanFields):
    """Where the memory goes; fields as ``qsf_plan`` in qsf.h.

    ``is_enough`` is False if the budget or the free memory is too small; ``min_budget_bytes``
    would be enough. ``skipped_layers`` ascend. ``text_bytes`` is the part of ``process_bytes``
    that the tokenizer has taken, and ``kv_policy`` the option; the engine does not know them.
    """

    __slots__ = ()

    @property
    def taken_bytes(self) -> int:
        """The most memory of the whole process with this plan."""
        return self.process_bytes + self.reserve_bytes + self.engine_bytes

    @property
    def allowed_bytes(self) -> int:
        """The budget, or less if the machine has less; 0: unknown."""
        return self.ceiling_bytes or self.budget_bytes

    @property
    def memory_text(self) -> str:
        """What is taken beside what is allowed: "in memory 624 MB of at most 8.0 GB"."""
        allowed = f" of at most {size_text(self.allowed_bytes)}" if self.allowed_bytes else ""
        return f"in memory {size_text(self.taken_bytes)}{allowed}"

    @property
    def text(self) -> str:
        """The line of every command: memory, context, and what is read for each token."""
        streamed = self.streamed_bytes
        read = f", {size_text(streamed)} read from the file for each token" if streamed else ""
        return f"{self.memory_text}, context {self.ctx_tokens}{read}"


def size_text(n_bytes: int) -> str:
    """Return a size in MB or GB of 2^20 and 2^30 bytes, rounded up."""
    if n_bytes > 1000 << 20:
        return f"{-(-10 * n_bytes // 2**30) / 10:.1f} GB"
    return f"{-(-n_bytes // 2**20)} MB"


def memory_plan(struct: Any, *, is_enough: bool) -> MemoryPlan:
    words = struct.skipped_layers
    skipped = tuple(i for i in range(struct.n_layers) if words[i // 64] >> (i % 64) & 1)
    return record(MemoryPlan, struct, skipped_layers=skipped, is_enough=is_enough)


GUESSERS = ("the text", "what followed before", "the draft model or the MTP head", "the caller")
"""Who guesses tokens, as ``QSF_N_GUESSERS`` in qsf_stats.h counts them."""


class SessionStats(StatsFields):
    """What a session has done; fields as ``qsf_stats`` in qsf.h.

    Names tell the units: ``_ns`` are nanoseconds, ``_bytes`` bytes, ``_tokens`` tokens, ``n_``
    counts. ``read_ns`` is time in which at least one read was under way, ``wait_ns`` time in which
    computing waited for one; checksums and decompression are sums over threads. ``phase_ns`` has
    one number for each of ``phase_names()``; their sum is that of ``prompt_ns`` and ``step_ns``.
    ``n_drafted`` and ``n_accepted`` have one for each of ``GUESSERS``.
    """

    __slots__ = ()
