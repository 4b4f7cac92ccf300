"""The state of sessions as bytes, in chunks with checksums: see ``qsf_state.h``."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qsf import errors
from qsf.native._qsf import ffi, lib
from qsf.native.binding import check_status
from qsf.native.records import record

if TYPE_CHECKING:
    from array import array

    from qsf.native.binding import NativeModel, NativeSession


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
