"""The binding to the C engine: status to exception, handle to object. No policy.

Its records of plans and measurements are in ``records.py``, but belong to this module's names.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from qsf import errors
from qsf.native._facts import ModelFields, OptionFields
from qsf.native._qsf import ffi, lib
from qsf.native.records import MemoryEvent as MemoryEvent
from qsf.native.records import MemoryPlan as MemoryPlan
from qsf.native.records import SessionStats as SessionStats
from qsf.native.records import UnitTime as UnitTime
from qsf.native.records import memory_plan, record, text_of, unit_time
from qsf.native.records import phase_names as phase_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import numpy.typing as npt

_ERROR_OF_STATUS: dict[int, type[errors.QsfError]] = {
    lib.QSF_ERR_ARG: errors.QsfArgumentError,
    lib.QSF_ERR_NOMEM: errors.QsfMemoryError,
    lib.QSF_ERR_IO: errors.QsfIOError,
    lib.QSF_ERR_FORMAT: errors.QsfFormatError,
    lib.QSF_ERR_DAMAGED: errors.QsfFormatError,
    lib.QSF_ERR_UNSUPPORTED: errors.QsfUnsupportedError,
    lib.QSF_ERR_CANCELLED: errors.QsfCancelledError,
    lib.QSF_ERR_NUMERIC: errors.QsfNumericError,
}


BUDGET_AUTO: int = lib.QSF_BUDGET_AUTO
"""As ``budget_bytes``: at most half of the free memory."""

_MAX_EVENTS = 64  # more than the engine keeps


def error_of(status: int) -> errors.QsfError:
    """Return the exception for this ``qsf_status`` with this thread's latest error text."""
    detail = ffi.string(lib.qsf_error_detail()).decode("utf-8", "replace")
    kind = _ERROR_OF_STATUS.get(status, errors.QsfError)
    return kind(detail, is_damage=True) if status == lib.QSF_ERR_DAMAGED else kind(detail)


def check_status(status: int) -> None:
    """Raise the exception that belongs to ``status``, a ``qsf_status``, unless it is ``QSF_OK``."""
    if status != lib.QSF_OK:
        raise error_of(status)


def version() -> str:
    return text_of(lib.qsf_version())


@dataclass(frozen=True, slots=True)
class Machine:
    """What the engine would run with here; fields as ``qsf_machine`` in qsf.h."""

    isa_name: str
    isa_available: tuple[str, ...]
    n_cores: int
    memory_bytes: int
    available_bytes: int
    resident_bytes: int
    peak_bytes: int


def describe_machine() -> Machine:
    """Return the machine's facts; the two last fields describe this process at the moment."""
    out = ffi.new("qsf_machine *")
    check_status(lib.qsf_machine_describe(out))
    return record(Machine, out, isa_available=tuple(text_of(out.isa_available).split()))


def measure_roofline(n_threads: int, n_bytes: int, n_ms: int) -> float:
    """Return the GB/s that ``n_threads`` read from memory together, measured in about ``n_ms``.

    Reads from ``n_bytes`` of memory: 64 MiB at least, better several times the last cache.

    Raises:
        QsfArgumentError: a number is out of bounds.
        QsfMemoryError: the system lacks the memory.
    """
    out = ffi.new("double *")
    try:
        status = lib.qsf_machine_roofline(n_threads, n_bytes, n_ms, out)
    except (OverflowError, TypeError) as error:
        raise errors.QsfArgumentError(f"{n_threads}, {n_bytes}, {n_ms}: {error}") from error
    check_status(status)
    return float(out[0]) / 1e9


class Options(OptionFields):
    """How to open a model: fields as ``qsf_options`` in qsf.h. None: the engine's default."""

    __slots__ = ()

    def as_struct(self) -> Any:
        """Return a new ``qsf_options *``.

        Raises:
            QsfArgumentError: a number does not fit its field.
        """
        out = ffi.new("qsf_options *")
        lib.qsf_options_default(out)
        paths = _PATHS[out] = []
        for name in OptionFields.__slots__:
            given = value = getattr(self, name)
            if isinstance(value, str | os.PathLike):
                paths.append(ffi.new("char[]", path_bytes(value)))
                given = paths[-1]
            try:
                if value is not None:
                    setattr(out, name, given)
            except (OverflowError, TypeError) as error:
                raise errors.QsfArgumentError(f"{name} cannot be {value!r}") from error
        return out


# Memory that structs of options point to
_PATHS: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()


def plan_model(path: str | os.PathLike[str], options: Options) -> MemoryPlan:
    """Return the memory plan of opening, even if it exceeds the budget."""
    out = ffi.new("qsf_plan *")
    status = lib.qsf_model_plan(path_bytes(path), options.as_struct(), out)
    if status == lib.QSF_ERR_NOMEM and out.min_budget_bytes:
        return memory_plan(out, is_enough=False)
    check_status(status)
    return memory_plan(out, is_enough=True)


def path_bytes(path: str | os.PathLike[str]) -> bytes:
    """Return a path as bytes for the engine. Raises QsfArgumentError for one with a zero byte."""
    raw = os.fsencode(path)
    if b"\0" in raw:
        raise errors.QsfArgumentError(f"a path cannot contain a zero byte: {path!r}")
    return raw


@dataclass(frozen=True, slots=True)
class ModelInfo(ModelFields):
    """What a model is and how it was opened; fields as ``qsf_model_facts`` in qsf.h."""

    plan: MemoryPlan


class _Owner:
    """Closes a handle, only in the process that opened it.

    A process made by ``os.fork()`` has the engine's memory but none of its threads: a call that
    waits for a thread, closing included, would never return.

    The handle refers to its owner, so the owner lives longer, in whatever order the collector
    works.
    """

    def __init__(self, close: Any, kind: str) -> None:
        self._close = close
        self._kind = kind
        self._pid = os.getpid()

    @property
    def is_elsewhere(self) -> bool:
        """The handle belongs to another process."""
        return self._pid != os.getpid()

    def check(self) -> None:
        """Raise QsfStateError in another process."""
        if self.is_elsewhere:
            raise errors.QsfStateError(
                f"the {self._kind} was opened in process {self._pid}, and this is process "
                f"{os.getpid()}, made from it by fork: open the file after the fork"
            )

    def __call__(self, handle: Any) -> None:
        if not self.is_elsewhere:
            self._close(handle)


class _Handle:
    """What owns a handle of the engine, until ``close()`` or until it is collected."""

    def __init__(self, handle: Any, close: Any, kind: str, closed: str) -> None:
        self.owner = _Owner(close, kind)
        self._handle: Any = ffi.gc(handle, self.owner)
        self._closed = closed

    def close(self) -> None:
        """Let go of it; the memory of a model is freed with its last session."""
        handle, self._handle = self._handle, None
        if handle is not None:
            ffi.release(handle)

    @property
    def is_closed(self) -> bool:
        return self._handle is None

    def _live_handle(self) -> Any:
        self.owner.check()
        if self._handle is None:
            raise errors.QsfStateError(f"{self._closed} is closed")
        return self._handle


class NativeModel(_Handle):
    """Owns one ``qsf_model``."""

    def __init__(self, path: str | os.PathLike[str], options: Options) -> None:
        """Open the file at ``path``; raises ``QsfError``."""
        out = ffi.new("qsf_model **")
        check_status(lib.qsf_model_open(path_bytes(path), options.as_struct(), out))
        super().__init__(out[0], lib.qsf_model_close, "model", "the model")
        self.n_vocab = self.info().n_vocab

    def info(self) -> ModelInfo:
        """Return the facts about the model and the plan it was opened with."""
        out = ffi.new("qsf_model_facts *")
        lib.qsf_model_info(self._live_handle(), out)
        return record(ModelInfo, out, plan=memory_plan(out.plan, is_enough=True))

    def section(self, tag: str) -> bytes | None:
        n_bytes = lib.qsf_model_section_bytes(self._live_handle(), tag.encode())
        if n_bytes == 0:
            return None
        out = bytearray(n_bytes)
        check_status(
            lib.qsf_model_section(self._live_handle(), tag.encode(), ffi.from_buffer(out), n_bytes)
        )
        return bytes(out)

    def timeline(self) -> list[UnitTime]:
        """Return times and bytes read of each unit since the model was opened."""
        n_units = lib.qsf_model_timeline(self._live_handle(), ffi.new("qsf_unit_time *"), 0)
        out = ffi.new("qsf_unit_time[]", n_units)
        lib.qsf_model_timeline(self._live_handle(), out, n_units)
        return [unit_time(time) for time in out]

    def memory_events(self) -> list[MemoryEvent]:
        """Return the latest events of memory given back or taken again, oldest first."""
        out = ffi.new("qsf_memory_event[]", _MAX_EVENTS)
        n_events = lib.qsf_model_memory_events(self._live_handle(), out, _MAX_EVENTS)
        return [record(MemoryEvent, event) for event in out[0:n_events]]

    def create_session(self) -> NativeSession:
        out = ffi.new("qsf_session **")
        check_status(lib.qsf_session_create(self._live_handle(), out))
        return NativeSession(out[0])


class NativeSession(_Handle):
    """Owns one ``qsf_session``. Tokens are arrays of unsigned ints, so that nothing is copied."""

    def __init__(self, handle: Any) -> None:
        """Take ownership of ``handle``, a ``qsf_session *``."""
        super().__init__(handle, lib.qsf_session_destroy, "session", "the session or the model")

    def sync_chunk(self, tokens: array[int]) -> int:
        """Evaluate at most one chunk towards holding ``tokens``; return how many are done."""
        n_done = ffi.new("size_t *")
        check_status(
            lib.qsf_session_sync(self._live_handle(), _tokens(tokens), len(tokens), n_done)
        )
        return int(n_done[0])

    def score_chunk(
        self, tokens: array[int], logits: npt.NDArray[np.float32], n_done: int, first_row: int = 0
    ) -> int:
        """Fill rows of ``logits`` [n_tokens - first_row, n_vocab]; return the new ``n_done``.

        Row i is for token ``first_row + i``; the rows of tokens before ``n_done`` are already
        filled.
        """
        done = ffi.new("size_t *", n_done)
        floats = ffi.from_buffer("float[]", logits, require_writable=True)
        check_status(
            lib.qsf_session_score(
                self._live_handle(),
                _tokens(tokens),
                len(tokens),
                first_row,
                floats,
                len(floats),
                done,
            )
        )
        return int(done[0])

    def step(self, token: int) -> None:
        """Evaluate one token after those the session holds."""
        check_status(lib.qsf_session_step(self._live_handle(), token))

    def is_ahead(self, token: int) -> bool:
        """Return whether a pass has evaluated this token already, as the next one."""
        return bool(lib.qsf_session_is_ahead(self._live_handle(), token))

    def draft(self, tokens: array[int]) -> None:
        """Replace the engine's drafts in the next pass of a step by these."""
        check_status(lib.qsf_session_draft(self._live_handle(), _tokens(tokens), len(tokens)))

    def position(self) -> int:
        return int(lib.qsf_session_position(self._live_handle()))

    def tokens(self) -> array[int]:
        out = array("I", bytes(4 * self.position()))
        lib.qsf_session_tokens(self._live_handle(), _tokens(out), len(out))
        return out

    def count_common(self, tokens: array[int]) -> int:
        n_common = lib.qsf_session_common(self._live_handle(), _tokens(tokens), len(tokens))
        return int(n_common)

    def rewind(self, n_tokens: int) -> None:
        check_status(lib.qsf_session_rewind(self._live_handle(), n_tokens))

    def cancel(self) -> None:
        """Stop the running call, or else the next one; from any thread."""
        lib.qsf_session_cancel(self._live_handle())

    def read_logits(self, out: npt.NDArray[np.float32]) -> None:
        """Copy the logits [n_vocab] after the last token."""
        floats = ffi.from_buffer("float[]", out, require_writable=True)
        check_status(lib.qsf_session_logits(self._live_handle(), floats, len(floats)))

    def logprobs(self, token: int, n_top: int) -> list[tuple[int, float]]:
        """Return (id, log-probability) of ``token``, then of the ``n_top`` most probable ones."""
        n_tokens = n_top + 1
        ids, logprobs = ffi.new("uint32_t[]", n_tokens), ffi.new("float[]", n_tokens)
        ids[0] = token
        check_status(lib.qsf_session_logprobs(self._live_handle(), ids, logprobs, n_tokens))
        return list(zip(ids, logprobs, strict=True))

    def stats(self) -> SessionStats:
        """Return the session's counts and times so far."""
        out = ffi.new("qsf_stats *")
        lib.qsf_session_stats(self._live_handle(), out)
        return record(SessionStats, out)


class NativeSampler:
    """Chooses tokens: parameters and the state of one random generator."""

    def __init__(
        self, *, seed: int, logit_bias: Mapping[int, float] | None = None, **how: float
    ) -> None:
        """Set the fields of ``qsf_sampling`` in ``how``; ``logit_bias`` is by token id."""
        self._how = ffi.new("qsf_sampling *")
        lib.qsf_sampling_default(self._how)
        for name, value in how.items():
            setattr(self._how, name, value)
        self._n_biased = len(logit_bias or ())
        self._biased = ffi.new("uint32_t[]", list(logit_bias or ()))
        self._biases = ffi.new("float[]", list((logit_bias or {}).values()))
        self._random_state = ffi.new("uint64_t *", seed)
        self._token = ffi.new("uint32_t *")

    def choose(self, session: NativeSession, recent: array[int]) -> int:
        """Return the next token; penalties apply to ``recent``, and biases not at all."""
        arguments = (self._how, _tokens(recent), len(recent), self._random_state, self._token)
        check_status(lib.qsf_session_sample(session._live_handle(), *arguments))
        return int(self._token[0])

    def fill(self, item: Any) -> None:
        """Fill the sampler's fields of a ``qsf_choose_item``."""
        item.how, item.random_state = self._how, self._random_state[0]
        item.biased, item.biases, item.n_biased = self._biased, self._biases, self._n_biased

    def take_state(self, item: Any) -> None:
        """Continue with the random generator's state after the choice of ``item``."""
        self._random_state[0] = item.random_state


def _tokens(tokens: array[int]) -> Any:
    return ffi.from_buffer("uint32_t[]", tokens)
