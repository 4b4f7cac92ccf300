"""``Session``: one sequence of tokens with its KV cache, and the text that continues it."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import os
import threading
import time
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from qsf.closable import Closing
from qsf.errors import (
    QsfArgumentError,
    QsfCancelledError,
    QsfError,
    QsfFormatError,
    QsfMemoryError,
    QsfStateError,
)
from qsf.file.session_file import SessionFile, SessionHead, write_session
from qsf.kv import kv_type_name
from qsf.native import binding
from qsf.options import GenerationOptions, Whole, check_value, taking
from qsf.passes import Choice, Chosen, choose
from qsf.text.arguments import as_messages, as_tokens, check_rows
from qsf.text.generation import ChosenToken, Generation
from qsf.text.parts import OpenedModel

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

    from qsf.text.generation import GenerationStats


# What cancels an answer, and its pieces
_Run: TypeAlias = "tuple[Callable[[], None], Iterator[str]]"
_ANSWER_TOKENS = 256  # that a context which holds a prompt should have for its answer


class Uncopyable:
    """Refuses ``copy.copy``, ``copy.deepcopy`` and pickle: engine memory cannot be copied so."""

    __slots__ = ()

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        """Raise QsfStateError."""
        raise QsfStateError(
            f"a {type(self).__name__} can be neither copied nor pickled: open the file again, or "
            "use Session.fork()"
        )


class Talking:
    """What sessions and models share: texts that continue a prompt, and answers to messages.

    A model does it in its own session.
    """

    __slots__ = ()

    @taking(GenerationOptions)
    def chat(
        self, messages: str | Mapping[str, Any] | Sequence[Mapping[str, Any]], options: Any
    ) -> Iterator[str]:
        """Answer messages; iterate for the pieces of text.

        To a session the messages are new ones: the file's chat template makes the prompt from
        ``self.messages`` and them. When the iteration ends, even early, ``self.messages`` contains
        them and the answer. An error before the first piece leaves the conversation as it was.

        To a model they are the whole conversation. It remembers only the KV cache: a call with the
        same messages and more evaluates only the new ones.

        Args:
            messages: what the user says, or one or more mappings with ``role`` ("system", "user",
                "assistant" or what the template knows) and ``content``, a text or a list of parts
                with text.
            {options}

        Raises:
            QsfArgumentError: as ``generate``, or the template refuses the messages.
            QsfFormatError: the template is broken.
        """
        return self._chat(messages, options)[1]

    @taking(GenerationOptions)
    def achat(
        self, messages: str | Mapping[str, Any] | Sequence[Mapping[str, Any]], options: Any
    ) -> AsyncIterator[str]:
        """Answer like ``chat``, for ``async for``: see ``agenerate``.

        Args:
            messages: as ``chat`` takes them.
            {options}
        """
        return _threaded(*self._chat(messages, options))

    @taking(GenerationOptions)
    def generate(self, prompt: str | Sequence[int], options: Any) -> Iterator[str]:
        """Continue ``prompt``; iterate for the pieces of text.

        Pieces are whole characters. Work is done while iterating; ``stats`` is there when
        the iteration has ended. The arguments are checked at once.

        Args:
            prompt: text, or token ids, which are used as they are: the whole sequence; tokens that
                the session holds are not evaluated again.
            {options}

        Raises:
            QsfArgumentError: an argument is out of range, or the prompt is longer than the
                context; ``argument`` is its name.
        """
        return self._generate(prompt, options)[1]

    @taking(GenerationOptions)
    def agenerate(self, prompt: str | Sequence[int], options: Any) -> AsyncIterator[str]:
        """Continue like ``generate``, for ``async for``.

        The engine computes in a thread of the event loop's pool, while other tasks run. A task
        that is cancelled ends its own generation within one layer's time, and no other's.

        Args:
            prompt: as ``generate`` takes it.
            {options}
        """
        return _threaded(*self._generate(prompt, options))

    def _chat(self, messages: Any, options: GenerationOptions) -> _Run:
        raise NotImplementedError

    def _generate(self, prompt: str | Sequence[int], options: GenerationOptions) -> _Run:
        raise NotImplementedError


def create_session(opened: OpenedModel) -> Session:
    """Return a new session. Raises QsfMemoryError if the plan has no room for it."""
    try:
        with opened.turn():
            session = Session(opened, opened.native.create_session())
            opened.sessions.add(session)
    except QsfMemoryError as error:
        n_most = opened.info.plan.max_sessions
        raise QsfMemoryError(
            f"the model was opened with sessions={n_most}, and {len(opened.sessions)} are open "
            f"(one is the model's own): close one, or open the model with sessions={n_most + 1}",
            argument="sessions",
        ) from error
    return session


class Session(Closing, Uncopyable, Talking):
    """One sequence of tokens and its KV cache, of an open model.

    ``Model.create_session()`` makes one; ``model.session`` is the model's own, which
    ``model.generate`` and ``model.logits`` use. The model is opened with ``sessions=N`` to have N,
    each with a KV cache inside the one budget.

    Each call passes the whole sequence: the session keeps the tokens that it already holds and
    evaluates the rest. So a conversation costs only its new tokens, and a retry nothing.

    Threads: sessions of a model may be used from several threads, and take turns by chunks of the
    prompt and by tokens. Calls of several threads on *one* session also take turns, with the same
    results as one after the other; if they name different sequences each evaluates its own again.
    ``cancel`` may be called from anywhere at any time.

    Life: a session is closed by ``close()``, by leaving its ``with`` block, by ``Model.close()``,
    or when nobody refers to it. Afterwards, and in a process made by ``os.fork()``, every method
    but ``close()`` raises QsfStateError.

    Attributes:
        messages: the conversation of ``chat``, mappings with role and content; may be changed
            between two calls. ``messages.clear()`` begins a new one.

    Example::

        with qsf.Model("model.qsf", sessions=2) as model, model.create_session() as session:
            for piece in session.chat("Who are you?"):
                print(piece, end="", flush=True)
    """

    def __init__(self, opened: OpenedModel, native: binding.NativeSession) -> None:
        """Made by ``Model.create_session``."""
        self.messages: list[dict[str, Any]] = []
        self._opened = opened
        self._native = native
        self._lock = threading.RLock()  # the engine's session is used by one thread at a time
        self._cancel_lock = threading.RLock()  # cancel() may run beside close()
        self._running: list[Generation] = []
        self.is_pass_cancelled: bool | None = None  # None: no pass is evaluating the session
        self._stats: GenerationStats | None = None
        self.adapter_scales = opened.adapter_scales()

    def close(self) -> None:
        """Free the KV cache. Waits for a running call of another thread; may be repeated."""
        if self._native.owner.is_elsewhere:
            self._native.close()
            return
        with self._turn(), self._cancel_lock:
            self._native.close()

    @property
    def is_closed(self) -> bool:
        """True if the session or its model was closed."""
        return self._native.is_closed

    def __repr__(self) -> str:
        """Describe the session, without waiting for a running call."""
        state = ", closed" if self._native.is_closed else ""
        n_ctx = self._opened.info.plan.ctx_tokens
        return f"<qsf.Session: context {n_ctx} tokens, {len(self.messages)} messages{state}>"

    # ---- the tokens it holds ----

    @property
    def tokens(self) -> list[int]:
        """The tokens that the session has evaluated and holds."""
        with self._turn():
            return self._native.tokens().tolist()

    @property
    def n_tokens(self) -> int:
        """The number of tokens that the session holds."""
        with self._turn():
            return self._native.position()

    def count_common(self, tokens: array[int]) -> int:
        """Return how many leading tokens the session holds."""
        with self._turn():
            return self._native.count_common(tokens)

    def rewind(self, n_tokens: int) -> None:
        """Forget all but the first ``n_tokens`` of ``tokens``; costs nothing.

        Raises:
            QsfArgumentError: the session holds fewer tokens, or a sliding window has dropped
                positions that the next token would see; prompts that begin with these tokens still
                work, and evaluate them again.
        """
        check_value("n_tokens", n_tokens, Whole(0))
        with self._turn():
            n_held = self._native.position()
            if n_tokens > n_held:
                raise QsfArgumentError(
                    f"n_tokens is {n_tokens}, but only {n_held} are held", argument="n_tokens"
                )
            self._native.rewind(n_tokens)

    @property
    def adapter(self) -> str | None:
        """The name of the adapter that changes the session; None: only those without a name do.

        Adapters get their names when the model is opened: ``lora="poet=poet.qsf"``. To set another
        one empties the session, and the next call evaluates its tokens again. Raises
        QsfArgumentError for a name that no adapter has.
        """
        for each in self._opened.adapters:
            if each.name and self._opened.adapter_scales(each.name) == self.adapter_scales:
                return each.name
        return None

    @adapter.setter
    def adapter(self, name: str | None) -> None:
        self.set_adapters(self._opened.adapter_scales(name))

    def set_adapters(self, scales: Sequence[float]) -> None:
        """Set the scale of each adapter; 0: it does not change the session.

        Other scales empty the session. Raises QsfArgumentError for other than as many finite
        numbers.
        """
        with self._turn():
            self._use(scales)

    def _use(self, scales: Sequence[float]) -> None:
        try:
            numbers = tuple(map(float, scales))
        except (OverflowError, TypeError, ValueError):
            raise QsfArgumentError("scales of adapters are numbers", argument="scales") from None
        self._native.set_adapters(numbers)
        self.adapter_scales = numbers

    def fork(self) -> Session:
        """Return a new session that holds the same tokens and messages and continues on its own.

        Both share the KV cache of their common tokens, so nothing is evaluated again.

        Raises:
            QsfMemoryError: as many sessions are open as the model was opened for.
        """
        copy = create_session(self._opened)
        copy.messages = [dict(message) for message in self.messages]
        try:
            copy_held(copy, self)
        except BaseException:
            copy.close()
            raise
        return copy

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the session to a file: its messages, tokens and KV cache (docs/sessions.md).

        The file is written atomically and replaces one of that name; only its owner may read it.
        Raises QsfIOError if the system refuses; an older file is then unchanged.
        """
        save_session(self, path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load a file of ``save``: its messages, tokens and KV cache.

        The session continues with the same bits as the saved one, and evaluates nothing again.

        Raises:
            QsfFormatError: the file is damaged or no session file. The session may hold no tokens
                then; its messages are unchanged.
            QsfArgumentError: another model, KV type or release has computed it, or the context is
                too small; the session is unchanged.
        """
        load_session(self, path)

    @property
    def stats(self) -> GenerationStats | None:
        """Statistics of the last finished ``generate`` or ``chat``."""
        return self._stats

    @property
    def engine_stats(self) -> binding.SessionStats:
        """The engine's counts for this session; the record describes the units."""
        with self._turn():
            return self._native.stats()

    def logits(
        self,
        tokens: Sequence[int],
        *,
        first_row: int = 0,
        out: npt.NDArray[np.float32] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return the logits after each token from ``first_row`` on, [n_rows, n_vocab].

        Tokens before ``first_row`` need no product with the head, and nothing at all if the last
        call ended with them, so a long text can be evaluated block by block::

            for start in range(0, len(tokens), 256):
                rows = model.logits(tokens[: start + 256], first_row=start)

        Needs numpy, which takes about 16 MiB, and the array: neither is in the budget.

        Args:
            tokens: the token ids, from position 0.
            first_row: logits after ``tokens[first_row]`` are the first row.
            out: C-contiguous f32 [at least n_rows, n_vocab], filled and returned; None: a new one.

        Raises:
            QsfArgumentError: no tokens, too many, one outside the vocabulary, no such row, or
                ``out`` has another form.
        """
        import numpy

        ids = as_tokens(tokens)
        if not ids:
            raise QsfArgumentError("tokens must have at least one token", argument="tokens")
        self.check_tokens(ids, "tokens")
        check_value("first_row", first_row, Whole(0))
        n_rows, n_vocab = len(ids) - first_row, self._opened.info.n_vocab
        if n_rows < 1:
            raise QsfArgumentError(
                f"first_row is {first_row}, but there are {len(ids)} tokens", argument="first_row"
            )
        if out is None:
            out = numpy.empty((n_rows, n_vocab), dtype=numpy.float32)
        else:
            check_rows(out, n_rows, n_vocab)
        out = out[:n_rows]
        n_done = 0
        with self._turn():
            while n_done < len(ids):
                # A late cancel() was for a ``generate`` that had just ended.
                with contextlib.suppress(QsfCancelledError):
                    n_done = self._native.score_chunk(ids, out, n_done, first_row)
        return out

    def cancel(self) -> None:
        """End running ``generate``, ``chat`` and passes, from any thread, within a layer's time."""
        self._native.owner.check()
        with self._cancel_lock:
            self._cancel(self._running)
            if self.is_pass_cancelled is False:
                self.is_pass_cancelled = True
                self._native.cancel()

    def _cancel(self, chosen: Iterable[Generation]) -> None:
        with self._cancel_lock:
            runs = [run for run in chosen if run in self._running]
            for run in runs:
                run.is_cancelled = True
            if runs and not self._native.is_closed:
                self._native.cancel()  # a run that the cancel was not for continues

    # ---- text ----

    def _chat(self, messages: Any, options: GenerationOptions) -> _Run:
        messages = [*self.messages, *as_messages(messages)]
        cancel, pieces = self._generate(*self._opened.prompt_of(messages, options))
        return cancel, self._answer(messages, pieces)

    def _answer(self, messages: list[dict[str, Any]], pieces: Iterator[str]) -> Iterator[str]:
        answer: list[str] = []
        is_kept = True
        try:
            for piece in pieces:
                answer.append(piece)
                yield piece
        except QsfError:
            is_kept = bool(answer)
            raise
        finally:
            pieces.close()  # type: ignore[attr-defined]  # now, and not when it is collected
            if is_kept:
                reply = {"role": "assistant", "content": "".join(answer)}
                self.messages[:] = [*messages, reply]

    def _generate(self, prompt: str | Sequence[int], options: GenerationOptions) -> _Run:
        self._native.owner.check()
        if options.template_args:
            raise QsfArgumentError(
                "template_args are for the chat template: a text that is continued has none",
                argument="template_args",
            )
        opened = self._opened
        if isinstance(prompt, str):
            prompt = opened.tokenizer.encode(prompt, max_tokens=opened.info.plan.ctx_tokens)
        tokens = as_tokens(prompt, "prompt")
        self.check_tokens(tokens, "prompt")
        run = Generation(opened, options, tokens)
        return lambda: self._cancel((run,)), self._pieces(run)

    def check_tokens(self, tokens: array[int], name: str) -> None:
        """Raise QsfArgumentError for no tokens, more than the context holds, or invalid ids."""
        if not tokens:
            raise QsfArgumentError(
                f"the {name} is empty: there is no token to begin with", argument=name
            )
        info = self._opened.info
        ctx_tokens = info.plan.ctx_tokens
        if len(tokens) > ctx_tokens:
            enough = min(len(tokens) + _ANSWER_TOKENS, info.max_tokens)
            why = (
                f"max_seq_len={enough} holds more, if the budget does"
                if len(tokens) <= info.max_tokens
                else f"the model was made for at most {info.max_tokens}"
            )
            raise QsfArgumentError(
                f"the {name} has {len(tokens)} tokens, but the context holds {ctx_tokens} ({why})"
                if name == "prompt"
                else f"{name} are {len(tokens)}, but the context holds {ctx_tokens} ({why})",
                argument=name,
            )
        if tokens and max(tokens) >= info.n_vocab:
            raise QsfArgumentError(
                f"{name} must be token ids below {info.n_vocab}, not {max(tokens)}: outside the "
                "vocabulary",
                argument=name,
            )

    # ---- turns ----

    def _turn(self) -> contextlib.AbstractContextManager[object]:
        """Use the engine's session: exclusively, and in its own process only.

        The returned object is entered and left in C: an exception raised by a signal handler comes
        before or after, so the lock is always released.
        """
        self._native.owner.check()  # first: a lock that was held during a fork is never released
        if self._lock._is_owned():  # type: ignore[attr-defined]  # as threading.Condition does
            raise QsfStateError(
                "the session is in the middle of a call of this thread: a signal handler or "
                "finaliser cannot use it (cancel() it can)"
            )
        return self._lock

    # ---- one generation ----

    def _pieces(self, run: Generation) -> Iterator[str]:
        self._running.append(run)
        try:
            text = run.take_forced()
            while True:
                reasoning = run.decoder.take_reasoning()
                if reasoning and run.options.on_reasoning is not None:
                    run.options.on_reasoning(reasoning)
                if text:
                    yield text
                if run.reason:
                    return
                text = self._next_text(run)
        finally:
            self._running.remove(run)
            self._stats = run.stats()

    def _next_text(self, run: Generation) -> str:
        """Choose the next token, and append forced ones; return the text that can be shown."""
        if run.max_tokens == 0:
            return run.end("length")
        try:
            token = self._next_token(run)
        except QsfCancelledError:
            return run.end("cancelled")
        return run.take(token) + run.take_forced()

    def _evaluate_prompt(self, run: Generation) -> None:
        n_before = self._native.stats().prompt_tokens
        self._hold(run)
        run.n_evaluated = min(self._native.stats().prompt_tokens - n_before, run.n_prompt)
        run.prompt_seconds = time.perf_counter() - run.start_seconds

    def _hold(self, run: Generation) -> None:
        """Make the session hold the run's tokens."""
        n_done = 0
        while n_done < len(run.tokens):
            try:
                n_done = self._native.sync_chunk(run.tokens)
            except QsfCancelledError:
                if run.is_cancelled:
                    raise
                # The cancel was for a run that had just ended; the engine keeps it for the next
                # call. A callback that uses the session makes it drop this prompt. The prompt is
                # evaluated again up to the same token without a call, so that each call means at
                # least one more chunk.
            if run.options.progress is not None and run.n_reported < n_done and not run.n_chosen:
                run.n_reported = n_done
                self._lock.release()
                try:
                    run.options.progress(min(n_done, run.n_prompt), run.n_prompt)
                finally:
                    self._lock.acquire()
                if run.is_cancelled:
                    raise QsfCancelledError("cancelled between two chunks")
                n_common = self._native.count_common(run.tokens[:n_done])
                # The callback may have changed the logits
                n_done = min(n_common, len(run.tokens) - 1)

    def _step(self, run: Generation) -> bool:
        """Evaluate the last of the run's tokens; return False unless all earlier ones were held."""
        n_others = len(run.tokens) - 1
        if not self._native.count_common(run.tokens) == self._native.position() == n_others:
            return False  # another call has used the session in between
        try:
            self._native.step(run.tokens[-1])
        except QsfCancelledError:
            if run.is_cancelled:
                raise
            return False  # as above
        return True

    def _next_token(self, run: Generation) -> int:
        """Evaluate the newest tokens, then choose the next one."""
        started = time.perf_counter()
        with self._turn():
            if run.is_cancelled:
                raise QsfCancelledError("cancelled between two tokens")
            if not run.n_chosen:
                run.start_seconds = started
                self._evaluate_prompt(run)
            else:
                run.shorten()
                if not self._step(run):
                    self._hold(run)
            chosen = self._choose(run)
        now = time.perf_counter()
        run.n_chosen += 1
        if run.n_chosen == 1:
            run.first_token_seconds = now - run.start_seconds
        else:
            run.step_seconds += now - started
        if run.options.on_token is not None:
            run.options.on_token(ChosenToken(chosen.token, chosen.logprob or 0.0, chosen.top))
        return chosen.token

    def _choose(self, run: Generation) -> Chosen:
        n_top = None
        if run.options.on_token is not None:
            n_top = min(run.options.top_logprobs, self._opened.info.n_vocab)
        mask = None if run.constraint is None else run.constraint.mask()
        choice = Choice(self, run.sampler, run.tokens, mask=mask, top_logprobs=n_top)
        (chosen,) = choose(self._opened, [choice])
        if isinstance(chosen, QsfError):
            raise chosen
        return chosen


async def _threaded(cancel: Callable[[], None], pieces: Iterator[str]) -> AsyncIterator[str]:
    """Yield ``pieces``, a generator of texts that are never None.

    If the task is cancelled or the iteration is closed, ``cancel`` is called to end the current
    piece; its thread is awaited, then the generator is closed.
    """
    import asyncio  # 4 MB that few users need

    step: asyncio.Future[str | None] | None = None
    try:
        while True:
            step = asyncio.ensure_future(asyncio.to_thread(next, pieces, None))
            piece = await asyncio.shield(step)
            if piece is None:
                return
            yield piece
    finally:
        while step is not None and not step.done():
            cancel()
            with contextlib.suppress(asyncio.CancelledError):  # one is already on its way
                await asyncio.wait([step])
        if step is not None and not step.cancelled():
            step.exception()  # the error was raised above, or nobody waits for it any more
        pieces.close()  # type: ignore[attr-defined]


# ---- saved sessions: block by block, so a file may be larger than the memory budget ----


def save_session(
    session: Session, path: str | os.PathLike[str], owner: str = "", *, is_synced: bool = True
) -> None:
    """Write the state of the session: see ``Session.save``, and ``write_session``."""
    opened = session._opened
    with session._turn():
        state = binding.describe_state(session._native)
        if state.n_tokens < session._native.position() and _catch_up(session):
            state = binding.describe_state(session._native)
        head = SessionHead(
            key=binding.state_key(opened.native),
            tokens=session._native.tokens()[: state.n_tokens],
            has_logits=state.has_logits,
            state_bytes=state.n_bytes,
            messages=session.messages,
            model=opened.name,
            kv_type=kv_type(opened),
            owner=owner,
            adapters=()
            if session.adapter_scales == opened.adapter_scales()
            else session.adapter_scales,
        )
        write_session(
            Path(path),
            head,
            lambda offset, block: binding.read_state(session._native, offset, block),
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
        state = binding.State(len(head.tokens), head.has_logits, head.state_bytes)

        def take(offset: int, block: memoryview, crc32: int) -> None:
            binding.write_state(session._native, state, offset, block, crc32)

        with session._turn():
            before = session.adapter_scales
            session._native.rewind(0)
            try:
                session._use(head.adapters or opened.adapter_scales())
                file.read_blocks(take)
                if state.n_bytes:
                    binding.adopt_state(session._native, head.tokens)
            except QsfError as error:
                session._use(before)
                if error.path is None and not isinstance(error, QsfMemoryError):
                    error = error.located(path)  # else the KV pool is full
                raise error from None
    session.messages[:] = messages
    return head


def _check_goes_on(opened: OpenedModel, file: SessionFile) -> None:
    head, ctx_tokens = file.head, opened.info.plan.ctx_tokens
    if head.key != binding.state_key(opened.native):
        raise QsfArgumentError(
            f"{file.path}: what it holds was computed by {head.model} with a KV cache of "
            f"{head.kv_type}, and this is {opened.name} with {kv_type(opened)}: it goes on with "
            "the same file, KV type, quality, exactness and release only",
            argument="path",
        )
    if len(head.adapters) not in (0, len(opened.adapters)):
        n_here = len(opened.adapters)
        raise QsfFormatError(f"{file.path}: its note has {len(head.adapters)} scales of {n_here}")
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
        binding.copy_tokens(to._native, source._native, n_copied)
        to.adapter_scales = source.adapter_scales


@contextlib.contextmanager
def _both_turns(a: Session, b: Session) -> Iterator[None]:
    """Lock two sessions, always in the same order, so that two threads never deadlock."""
    first, second = sorted((a, b), key=id)
    with first._turn(), second._turn():
        yield
