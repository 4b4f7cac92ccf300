"""The binding to the C engine: status to exception, struct to record, handle to object.

No policy.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

from qsf import errors
from qsf.native._facts import ModelFields, OptionFields, PlanFields, StatsFields
from qsf.native._qsf import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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


# Of this thread: the error of a source of rows, which ended the pass that asked it
_of_source = threading.local()


def check_status(status: int) -> None:
    """Raise the exception that belongs to ``status``, a ``qsf_status``, unless it is ``QSF_OK``."""
    cause = _of_source.__dict__.pop("error", None)
    if status != lib.QSF_OK:
        is_of_pass = status == lib.QSF_ERR_IO and not isinstance(cause, errors.QsfCancelledError)
        if cause is not None and is_of_pass:
            raise cause
        raise error_of(status)


# ---- records of structs ----

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
    "tuple[float, ...]": lambda floats: tuple(floats.values[0 : floats.n]) if floats.n else (),
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
DRAFTER_COLD: int = lib.QSF_DRAFTER_COLD
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


# ---- the machine ----


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
            if name == "adapters" and value:
                paths += [ffi.new("char[]", path_bytes(path)) for path, _ in value]
                rows = list(zip(paths[-len(value) :], [scale for _, scale in value], strict=True))
                given = ffi.new("qsf_adapter_choice[]", rows)
                paths.append(given)
                out.n_adapters = len(value)
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
        if self.is_elsewhere:
            return
        if getattr(_of_source, "is_asked", False):  # the engine's locks are held below this call
            threading.Thread(target=self._close, args=(handle,)).start()
        else:
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


class RowsWanted(NamedTuple):
    """Rows that a stage needs of the layers before it.

    Attributes:
        sequence: a number that stands for a session.
        tokens: all tokens of the sequence.
        n_new: rows are wanted of so many last ones.
    """

    sequence: int
    tokens: array[int]
    n_new: int

    @classmethod
    def of(cls, sequence: int, tokens: bytes, n_new: int) -> RowsWanted:
        """Return a request whose tokens came as bytes, 32 bits each."""
        return cls(sequence, array("I", tokens), n_new)


class RowsSource(Protocol):
    """Where a stage that is not the first gets its rows."""

    def __call__(self, wanted: list[RowsWanted], is_cancelled: Callable[[], bool]) -> Any:
        """Return f32 [sum of n_new, dim], any buffer.

        A source that waits should ask ``is_cancelled`` often, and raise QsfCancelledError then.
        """


def _rows_wanted(struct: Any) -> RowsWanted:
    tokens = array("I", bytes(ffi.buffer(struct.held, 4 * struct.n_held)))
    tokens.frombytes(bytes(ffi.buffer(struct.tokens, 4 * struct.n_tokens)))
    return RowsWanted(int(ffi.cast("uintptr_t", struct.session)), tokens, struct.n_tokens)


def _keep_error(_kind: Any, error: BaseException, _traceback: Any) -> None:
    _of_source.error = error


class NativeModel(_Handle):
    """Owns one ``qsf_model``."""

    def __init__(self, path: str | os.PathLike[str], options: Options) -> None:
        """Open the file at ``path``; raises ``QsfError``."""
        out = ffi.new("qsf_model **")
        check_status(lib.qsf_model_open(path_bytes(path), options.as_struct(), out))
        super().__init__(out[0], lib.qsf_model_close, "model", "the model")
        facts = self.info()
        self.n_vocab, self._dim = facts.n_vocab, facts.dim

    def set_source(self, rows: RowsSource) -> None:
        """Take the rows before the first layer from ``rows``.

        What it raises, the call that evaluates raises; sessions keep what they held.
        """

        @ffi.callback("qsf_rows_source", onerror=_keep_error, error=1)  # type: ignore[untyped-decorator]
        def source(_arg: Any, structs: Any, n: int, out: Any, stride: int) -> int:
            wanted = [_rows_wanted(struct) for struct in structs[0:n]]
            sessions = [struct.session for struct in structs[0:n]]
            is_asked = getattr(_of_source, "is_asked", False)  # by a stage before this one, too
            _of_source.is_asked = True
            try:
                data = memoryview(
                    rows(wanted, lambda: all(map(lib.qsf_session_is_cancelled, sessions)))
                )
            finally:
                _of_source.is_asked = is_asked
            n_rows = sum(each.n_new for each in wanted)
            n_bytes = 4 * self._dim
            if data.nbytes != n_rows * n_bytes:
                raise errors.QsfStateError(
                    f"the layers before gave {data.nbytes} bytes, not {n_rows} rows of {n_bytes}"
                )
            data = data.cast("B")
            to = ffi.buffer(out, 4 * stride * n_rows)
            for i in range(n_rows):
                to[4 * stride * i : 4 * stride * i + n_bytes] = data[
                    n_bytes * i : n_bytes * (i + 1)
                ]
            return 0

        self._source = source  # the engine does not keep it alive
        check_status(lib.qsf_model_set_source(self._live_handle(), source, ffi.NULL))

    def info(self) -> ModelInfo:
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

    def set_adapters(self, scales: Sequence[float]) -> None:
        """Set the scales of the model's adapters; if they change, the session holds no tokens."""
        given = ffi.new("float[]", list(scales))
        check_status(lib.qsf_session_set_adapters(self._live_handle(), given, len(given)))

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
        out = ffi.new("qsf_stats *")
        lib.qsf_session_stats(self._live_handle(), out)
        return record(SessionStats, out)


# ---- the state of sessions as bytes, in chunks with checksums: see qsf_state.h ----


@dataclass(frozen=True, slots=True)
class State:
    """The state of a session; fields as ``qsf_state``."""

    n_tokens: int
    has_logits: bool
    n_bytes: int


def state_key(model: NativeModel) -> bytes:
    key = ffi.new("unsigned char[]", lib.QSF_STATE_KEY_BYTES)
    check_status(lib.qsf_model_state_key(model._live_handle(), key))
    return bytes(key)


def describe_state(session: NativeSession) -> State:
    """Return the description of the session's state; empty if the session cannot be continued."""
    out = ffi.new("qsf_state *")
    check_status(lib.qsf_session_describe_state(session._live_handle(), out))
    return record(State, out)


def read_state(session: NativeSession, offset: int, into: memoryview) -> int:
    """Fill ``into`` with the state from ``offset`` on; return the checksum."""
    crc32 = ffi.new("uint32_t *")
    data = ffi.from_buffer(into, require_writable=True)
    check_status(lib.qsf_session_read_state(session._live_handle(), offset, data, len(data), crc32))
    return int(crc32[0])


def write_state(
    session: NativeSession, state: State, offset: int, data: memoryview, crc32: int
) -> None:
    """Restore one chunk of a saved state, which replaces the state of the session.

    Raises:
        QsfFormatError: checksum mismatch; the session is then empty.
        QsfArgumentError: the state belongs to another model or a longer context.
    """
    struct = _struct(state)
    raw = ffi.from_buffer(data)
    check_status(
        lib.qsf_session_write_state(session._live_handle(), struct, offset, raw, len(raw), crc32)
    )


def adopt_state(session: NativeSession, tokens: array[int]) -> None:
    """Make the session hold the tokens of the state that was restored."""
    ids = ffi.from_buffer("uint32_t[]", tokens)
    check_status(lib.qsf_session_adopt_state(session._live_handle(), ids))


def copy_tokens(to: NativeSession, source: NativeSession, n_tokens: int) -> None:
    """Make ``to`` hold the first ``n_tokens`` of ``source`` by sharing its KV blocks."""
    check_status(lib.qsf_session_copy(to._live_handle(), source._live_handle(), n_tokens))


def _struct(state: State) -> Any:
    struct = ffi.new("qsf_state *")
    try:
        struct.n_tokens = state.n_tokens
        struct.has_logits = int(state.has_logits)
        struct.n_bytes = state.n_bytes
    except OverflowError as error:
        raise errors.QsfArgumentError(f"a state cannot be {state}") from error
    return struct


# ---- choosing tokens ----


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
