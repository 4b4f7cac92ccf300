"""Saved sessions: how ``Session.save``, ``load`` and ``fork`` move the engine's state.

A file is written and read block by block, so it may be larger than the memory budget.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from qsf.errors import QsfArgumentError, QsfError, QsfMemoryError
from qsf.file.session_file import SessionFile, SessionHead, write_session
from qsf.kv import kv_type_name
from qsf.native import binding as native
from qsf.text.arguments import as_messages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from qsf.native.binding import NativeSession
    from qsf.text.parts import OpenedModel


class Session(Protocol):
    """The members of `qsf.session.Session` that this module uses."""

    messages: list[dict[str, Any]]
    _opened: OpenedModel
    _native: NativeSession

    def _turn(self) -> contextlib.AbstractContextManager[object]:
        """Lock the session for one use."""


def save_session(
    session: Session, path: str | os.PathLike[str], owner: str = "", *, is_synced: bool = True
) -> None:
    """Write the state of the session: see ``Session.save``, and ``write_session``."""
    opened = session._opened
    with session._turn():
        state = native.describe_state(session._native)
        if state.n_tokens < session._native.position() and _catch_up(session):
            state = native.describe_state(session._native)
        head = SessionHead(
            key=native.state_key(opened.native),
            tokens=session._native.tokens()[: state.n_tokens],
            has_logits=state.has_logits,
            state_bytes=state.n_bytes,
            messages=session.messages,
            model=opened.name,
            kv_type=kv_type(opened),
            owner=owner,
        )
        write_session(
            Path(path),
            head,
            lambda offset, block: native.read_state(session._native, offset, block),
            is_synced=is_synced,
        )


def _catch_up(session: Session) -> bool:
    """Evaluate what recurrent states lack after a rewind; False: a sliding window has moved on."""
    tokens = session._native.tokens()
    try:
        session._native.rewind(len(tokens))
    except QsfArgumentError:
        return False
    while session._native.sync_chunk(tokens) < len(tokens):
        pass
    return True


def load_session(session: Session, path: str | os.PathLike[str]) -> SessionHead:
    """Restore the session from a file: see ``Session.load``."""
    opened = session._opened
    with SessionFile(path, memory_bytes=opened.input_bytes) as file:
        head = file.head
        messages = as_messages(head.messages)
        _check_goes_on(opened, file)
        state = native.State(len(head.tokens), head.has_logits, head.state_bytes)

        def take(offset: int, block: memoryview, crc32: int) -> None:
            native.write_state(session._native, state, offset, block, crc32)

        with session._turn():
            session._native.rewind(0)
            try:
                file.read_blocks(take)
            except QsfMemoryError:  # the KV pool is full: nothing is wrong with the file
                raise
            except QsfError as error:
                raise error.located(path) if error.path is None else error from None
            if state.n_bytes:
                native.adopt_state(session._native, head.tokens)
    session.messages[:] = messages
    return head


def _check_goes_on(opened: OpenedModel, file: SessionFile) -> None:
    head, ctx_tokens = file.head, opened.info.plan.ctx_tokens
    if head.key != native.state_key(opened.native):
        raise QsfArgumentError(
            f"{file.path}: what it holds was computed by {head.model} with a KV cache of "
            f"{head.kv_type}, and this is {opened.name} with {kv_type(opened)}: it goes on with "
            "the same file, KV type, quality, exactness and release only",
            argument="path",
        )
    if len(head.tokens) > ctx_tokens:
        raise QsfArgumentError(
            f"{file.path}: it holds {len(head.tokens)} tokens, but the context holds {ctx_tokens}: "
            f"open the model with max_seq_len={len(head.tokens)} or more",
            argument="path",
        )


def kv_type(opened: OpenedModel) -> str:
    """Return the types of keys and values, such as k8v4."""
    plan = opened.info.plan
    return kv_type_name(plan.kv_k_bits, plan.kv_v_bits)


def copy_held(to: Session, source: Session, n_tokens: int | None = None) -> None:
    """Make session ``to`` hold the first tokens, or all, of another session by sharing blocks.

    Raises:
        QsfArgumentError: the other session holds fewer tokens, or a sliding window has dropped
            positions that the next token would see; ``to`` is unchanged.
    """
    with _both_turns(to, source):
        n_copied = source._native.position() if n_tokens is None else n_tokens
        native.copy_tokens(to._native, source._native, n_copied)


@contextlib.contextmanager
def _both_turns(a: Session, b: Session) -> Iterator[None]:
    """Lock two sessions, always in the same order, so that two threads never deadlock."""
    first, second = sorted((a, b), key=id)
    with first._turn(), second._turn():
        yield
