"""``Model``: a .qsf file opened inside a memory budget, and the text it generates."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import os
import threading
import time
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from qsf.errors import QsfArgumentError, QsfCancelledError, QsfFormatError
from qsf.native import binding
from qsf.native.opening import io_origin, open_native, options_of, with_known_io, with_reserve
from qsf.text.parts import read_text_parts
from qsf.text.sampling import SamplingParams, StopMatcher, end_ids, resolve_sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Self

    from qsf.text.chat import ChatTemplate
    from qsf.text.tokenizer import Tokenizer

DEFAULT_RAM_BUDGET_MB = 200
DEFAULT_MAX_TOKENS = 256

_MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """What one generation took.

    Attributes:
        prompt_tokens: length of the prompt.
        evaluated_tokens: those of them that the session did not hold already.
        prompt_seconds: time to evaluate them.
        generated_tokens: tokens chosen, an end token included.
        step_tokens: tokens evaluated one at a time, of the generated ones all but the last.
        step_seconds: time to evaluate and choose them.
        first_token_seconds: from the start to the first token; 0 without one.
        stop_reason: "end" (the model ended the text), "stop" (a stop string), "length"
            (``max_tokens``), "context" (the context is full), "cancelled", or "abandoned"
            (the caller stopped iterating, or an error was raised).
        seed: what makes the same text again.
        peak_bytes: the most memory that the process has had so far.
    """

    prompt_tokens: int
    evaluated_tokens: int
    prompt_seconds: float
    generated_tokens: int
    step_tokens: int
    step_seconds: float
    first_token_seconds: float
    stop_reason: str
    seed: int
    peak_bytes: int

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens evaluated per second."""
        return self.evaluated_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def step_rate(self) -> float:
        """Generated tokens per second, after the first."""
        return self.step_tokens / self.step_seconds if self.step_seconds else 0.0


def _as_tokens(ids: Sequence[int]) -> array[int]:
    if isinstance(ids, bytes | bytearray):
        raise QsfArgumentError("tokens must be a sequence of token ids, not bytes: decode them")
    try:
        return array("I", ids)
    except (TypeError, OverflowError, ValueError) as error:
        raise QsfArgumentError(f"tokens must be a sequence of token ids: {error}") from error


class Model:
    """One .qsf file, opened.

    Args:
        path: the file.
        ram_budget: ceiling in MB (of 2^20 bytes, as system monitors count) for the whole
            process, Python and tokenizer included; "auto": what the machine or its control
            group has to give now; None: no ceiling. What Python allocates for its caller counts
            too, up to 8 MB; arrays from ``logits`` come on top.
        threads: None: one per physical core.
        pin_threads: each thread that the engine starts stays on a core of its own (Linux); the
            calling thread, which works too, is left as it is.
        max_seq_len: the longest sequence, in tokens, prompt included; None: what the model
            was made for, at most 4096.
        exact: f32 activations and plain kernels: slow, for reference.
        kv_type: precision of the KV cache: "f16", "8bit", "4bit", "2bit", or keys and values
            apart, as "k8v4"; None: 4 bits, 2 where memory is too short for that.
        kv_rotation: turn keys and values by a Hadamard matrix, which is good for few bits;
            None: with 4 bits or fewer where the heads allow it.
        io: how weights that are not in memory are read: "buffered", "direct" (past the page
            cache), "uring" or "mmap"; None or "auto": what suits the file and the memory, else
            what a short probe finds fastest, which is remembered in the user's cache folder.
        io_depth: reads under way at the same time, 1 to 32; None: chosen with the method.
        quality: 0 to 1. Below 1, the share ``1 - quality`` of the layers is skipped, the least
            important first, never the first two or the last two: faster, less memory, worse
            text. Needs a file that says how important its layers are.

    Raises:
        QsfMemoryError: the budget, or what the machine has to give, is too small; the text
            says what would do.
        QsfUnsupportedError: ``io`` cannot be had here, or the file needs another release.
        QsfFormatError: the file is damaged or is no .qsf file.
        QsfIOError: it cannot be read.
        QsfArgumentError: an argument is out of range, or ``quality`` is below 1 and the file
            has no layer importance or no more than four layers.

    A model holds one sequence of tokens. A call that begins with the tokens that are held
    evaluates only the rest, so that a conversation costs what is new in it. Calls from
    several threads take turns.

    Example::

        with Model("model.qsf") as model:
            for piece in model.generate("Once upon a time", max_tokens=50):
                print(piece, end="", flush=True)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        ram_budget: int | Literal["auto"] | None = DEFAULT_RAM_BUDGET_MB,
        threads: int | None = None,
        max_seq_len: int | None = None,
        pin_threads: bool = False,
        exact: bool = False,
        kv_type: str | None = None,
        kv_rotation: bool | None = None,
        io: str | None = None,
        io_depth: int | None = None,
        quality: float = 1.0,
    ) -> None:
        """Open the file; see the class."""
        options = options_of(
            ram_budget,
            threads,
            max_seq_len,
            is_pinned=pin_threads,
            is_exact=exact,
            kv_type=kv_type,
            kv_rotation=kv_rotation,
            io=io,
            io_depth=io_depth,
            quality=quality,
        )
        parts = read_text_parts(path)
        self._tokenizer = parts.tokenizer
        self._template = parts.template
        self._generation = parts.generation
        options = with_known_io(path, with_reserve(options, parts.reserve_bytes))
        self._native = open_native(path, options)
        self._info = self._native.info()
        self._io_origin = io_origin(options, self._info)
        self._session = self._native.create_session()
        self._end_ids = end_ids(self._info.eos_id, self._generation)
        self._lock = threading.Lock()  # the session is used by one thread at a time
        self._holder: object = None  # whose tokens the session holds
        self._cancel_lock = threading.RLock()  # cancel() may meet close()
        self._running: list[_Run] = []
        self._stats: GenerationStats | None = None

    @staticmethod
    def plan(
        path: str | os.PathLike[str],
        *,
        ram_budget: int | Literal["auto"] | None = DEFAULT_RAM_BUDGET_MB,
        threads: int | None = None,
        max_seq_len: int | None = None,
        pin_threads: bool = False,
        exact: bool = False,
        kv_type: str | None = None,
        kv_rotation: bool | None = None,
        io: str | None = None,
        io_depth: int | None = None,
        quality: float = 1.0,
    ) -> binding.MemoryPlan:
        """Return where the memory of ``Model(path, ...)`` would go, without opening it.

        Where the budget, or the machine, is too small, ``is_enough`` is False and
        ``min_budget_bytes`` says what would do.
        """
        options = options_of(
            ram_budget,
            threads,
            max_seq_len,
            is_pinned=pin_threads,
            is_exact=exact,
            kv_type=kv_type,
            kv_rotation=kv_rotation,
            io=io,
            io_depth=io_depth,
            quality=quality,
        )
        parts = read_text_parts(path)
        options = with_known_io(path, with_reserve(options, parts.reserve_bytes))
        plan = binding.plan_model(path, options)
        del parts  # counted by the plan as part of the process, so it lives until here
        return plan

    def close(self) -> None:
        """Free the memory. Waits for a running call of another thread."""
        with self._lock, self._cancel_lock:
            self._session.close()
            self._native.close()

    def __enter__(self) -> Self:
        """Return the model itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the model."""
        self.close()

    @property
    def info(self) -> binding.ModelInfo:
        """What the model is and how it was opened, memory plan included."""
        return self._info

    @property
    def skipped_layers(self) -> tuple[int, ...]:
        """The layers that are not run, by the ``quality`` asked for, ascending; the first is 0."""
        return self._info.plan.skipped_layers

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the file.

        Raises:
            QsfArgumentError: the file has none, so there is no text, only ``logits``.
        """
        if self._tokenizer is None:
            raise QsfArgumentError("the file has no tokenizer: logits() can be used, on token ids")
        return self._tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        """The chat template; ``is_plain`` where the file has none.

        Raises:
            QsfFormatError: it is no text; all else works. Using it tells whether it is broken.
        """
        if isinstance(self._template, QsfFormatError):
            raise self._template
        return self._template

    @property
    def generation_defaults(self) -> SamplingParams:
        """How tokens are chosen unless ``generate`` is told otherwise."""
        return resolve_sampling(self._generation)

    def sampling_params(self, **asked: float | None) -> SamplingParams:
        """Return how ``generate`` would choose tokens with these options; None: not given."""
        return resolve_sampling(self._generation, **asked)

    @property
    def stats(self) -> GenerationStats | None:
        """What the last finished ``generate`` took."""
        return self._stats

    @property
    def session_stats(self) -> binding.SessionStats:
        """What the engine has counted since the model was opened; units in its description."""
        with self._lock:
            return self._session.stats()

    @property
    def timeline(self) -> list[binding.UnitTime]:
        """What each unit (embedding, layers, final) has taken since the model was opened.

        Bytes read from the file and nanoseconds of reading, of waiting for it and of computing,
        over all passes. ``session_stats`` has the sums.
        """
        with self._lock:
            return self._native.timeline()

    @property
    def memory_events(self) -> list[binding.MemoryEvent]:
        """When memory was given back because the system ran short, and taken again: the latest."""
        with self._lock:
            return self._native.memory_events()

    @property
    def io_origin(self) -> str:
        """Where the way of reading (``info.io_name``) comes from, such as "found by a probe"."""
        return self._io_origin

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a prompt, begun with BOS where the model wants it."""
        return self.tokenizer.encode(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``; special tokens have none."""
        return self.tokenizer.decode(ids)

    def chat_tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the prompt for the answer to ``messages``: mappings with role and content."""
        n_ctx = self._info.plan.ctx_tokens
        return self.chat_template.encode(messages, self.tokenizer, max_tokens=n_ctx)

    def logits(
        self,
        tokens: Sequence[int],
        *,
        first_row: int = 0,
        out: npt.NDArray[np.float32] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return the logits after each token from ``first_row`` on, [n_rows, n_vocab].

        Tokens before ``first_row`` cost no head, and nothing at all where the last call ended
        with them, so that a long text can be asked for block by block::

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

        ids = _as_tokens(tokens)
        if not ids:
            raise QsfArgumentError("logits need at least one token")
        n_rows, n_vocab = len(ids) - first_row, self._info.n_vocab
        if not 0 <= first_row < len(ids):
            raise QsfArgumentError(f"first_row is {first_row}, but there are {len(ids)} tokens")
        if out is None:
            out = numpy.empty((n_rows, n_vocab), dtype=numpy.float32)
        elif out.dtype != numpy.float32 or not out.flags.c_contiguous:
            raise QsfArgumentError("out must be a C-contiguous array of float32")
        elif out.ndim != 2 or len(out) < n_rows or out.shape[1] != n_vocab:
            raise QsfArgumentError(
                f"out has the shape {list(out.shape)}: at least {n_rows} rows of {n_vocab} are "
                "needed"
            )
        out = out[:n_rows]
        n_done = 0
        with self._lock:
            self._holder = None
            while n_done < len(ids):
                # A late cancel() was meant for a ``generate`` that had just ended.
                with contextlib.suppress(QsfCancelledError):
                    n_done = self._session.score_chunk(ids, out, n_done, first_row)
        return out

    def cancel(self) -> None:
        """End the running ``generate``, from any thread; it stops within one layer's time."""
        with self._cancel_lock:
            runs = tuple(self._running)
            for run in runs:
                run.is_cancelled = True
            if runs and not self._session.is_closed:
                self._session.cancel()

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        begins_text: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[str]:
        """Continue ``prompt``; iterate for the pieces of text.

        Pieces are whole characters. Work is done while iterating; ``stats`` is there when
        the iteration has ended. The arguments are checked at once.

        Args:
            prompt: text, or token ids, which are used as they are.
            max_tokens: at most so many tokens.
            temperature: as the next four see ``SamplingParams``; None: what the file
                recommends, else the defaults there.
            top_p: see there.
            top_k: see there.
            min_p: see there.
            repetition_penalty: see there.
            seed: 0 .. 2^64 - 1; the same seed gives the same text. None: a new one.
            stop: a text, or several, at which to stop; it is not part of the output.
            begins_text: the output is a text of its own (an answer), not the rest of the
                prompt's, so a SentencePiece vocabulary's leading space is dropped.
            progress: called while a long prompt is read, with how many of its tokens are
                done and how many there are.

        Raises:
            QsfArgumentError: an argument is out of range, or the prompt is longer than the
                context.
        """
        params = resolve_sampling(
            self._generation,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
        )
        if not isinstance(max_tokens, int) or max_tokens < 0:
            raise QsfArgumentError(f"max_tokens must be at least 0, not {max_tokens!r}")
        if seed is None:
            seed = int.from_bytes(os.urandom(4), "little")
        if not isinstance(seed, int) or not 0 <= seed <= _MAX_SEED:
            raise QsfArgumentError(f"seed must be between 0 and 2^64 - 1, not {seed!r}")
        ctx_tokens = self._info.plan.ctx_tokens
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt, max_tokens=ctx_tokens)
        tokens = _as_tokens(prompt)
        if not tokens:
            raise QsfArgumentError("the prompt is empty: there is no token to begin with")
        if len(tokens) > ctx_tokens:
            why = (
                "max_seq_len asks for more, which a larger budget may take"
                if ctx_tokens < self._info.max_tokens
                else "the model was made for no more"
            )
            raise QsfArgumentError(
                f"the prompt has {len(tokens)} tokens, but the context holds {ctx_tokens} ({why})"
            )
        matcher = StopMatcher([stop] if isinstance(stop, str) else stop)
        decoder = self.tokenizer.incremental(at_start=begins_text)
        run = _Run(tokens, max_tokens, params, seed, progress)
        return self._pieces(run, matcher, decoder.push, decoder.flush)

    def _pieces(self, run: _Run, matcher: StopMatcher, push: Any, flush: Any) -> Iterator[str]:
        self._running.append(run)
        try:
            for token in self._tokens(run):
                piece = matcher.push(push(token))
                if piece:
                    yield piece
                if matcher.is_stopped:
                    run.stop_reason = "stop"
                    return
            rest = matcher.push(flush()) + matcher.flush()
            if rest:
                yield rest
        finally:
            self._running.remove(run)
            self._stats = run.stats()

    def _tokens(self, run: _Run) -> Iterator[int]:
        """Yield chosen tokens, without the one that ends the text."""
        try:
            self._evaluate_prompt(run)
            while run.n_generated < run.max_tokens:
                token = self._next_token(run)
                if token is None:
                    return
                yield token
            run.stop_reason = "length"
        except QsfCancelledError:
            run.stop_reason = "cancelled"

    def _evaluate_prompt(self, run: _Run) -> None:
        run.start_seconds = time.perf_counter()
        with self._lock:
            n_before = self._session.stats().prompt_tokens
            self._hold(run)
            run.n_evaluated = self._session.stats().prompt_tokens - n_before
        run.prompt_seconds = time.perf_counter() - run.start_seconds

    def _hold(self, run: _Run) -> None:
        """Make the session hold the run's tokens."""
        self._holder = None
        n_done = 0
        while n_done < len(run.tokens):
            try:
                n_done = self._session.sync_chunk(run.tokens)
            except QsfCancelledError:
                if run.is_cancelled:
                    raise
                # It was meant for a run that had just ended: the engine remembers it.
            if run.progress is not None and run.n_generated == 0:
                run.progress(n_done, run.n_prompt)
        self._holder = run

    def _step(self, run: _Run) -> None:
        """Evaluate the last of the run's tokens, where the session holds all others."""
        self._holder = None
        try:
            self._session.step(run.tokens[-1])
        except QsfCancelledError:
            if run.is_cancelled:
                raise
            return  # as above; _hold does it
        self._holder = run

    def _next_token(self, run: _Run) -> int | None:
        """Evaluate the token chosen last, choose the next; None: the text has ended."""
        started = time.perf_counter()
        with self._lock:
            if run.is_cancelled:
                raise QsfCancelledError("cancelled between two tokens")
            if run.is_behind:
                if len(run.tokens) > self._info.plan.ctx_tokens:
                    run.stop_reason = "context"
                    return None
                if self._holder is run:
                    self._step(run)
                run.is_behind = False
                run.n_steps += 1
            if self._holder is not run:  # another call has used the session in between
                self._hold(run)
            token = run.sampler.choose(self._session, run.tokens)
        now = time.perf_counter()
        run.n_generated += 1
        if run.n_generated == 1:
            run.first_token_seconds = now - run.start_seconds
        else:
            run.step_seconds += now - started
        if token in self._end_ids:
            run.stop_reason = "end"
            return None
        run.tokens.append(token)
        run.is_behind = True
        return token


class _Run:
    """The state of one ``generate``."""

    def __init__(
        self,
        tokens: array[int],
        max_tokens: int,
        params: SamplingParams,
        seed: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.tokens = tokens
        self.n_prompt = len(tokens)
        self.max_tokens = max_tokens
        self.seed = seed
        self.progress = progress
        self.is_cancelled = False
        self.sampler = binding.NativeSampler(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            seed=seed,
        )
        self.is_behind = False  # the last of tokens is not evaluated yet
        self.stop_reason = "abandoned"
        self.n_evaluated = 0
        self.n_generated = 0
        self.n_steps = 0
        self.start_seconds = 0.0
        self.prompt_seconds = 0.0
        self.step_seconds = 0.0
        self.first_token_seconds = 0.0

    def stats(self) -> GenerationStats:
        """Return what has happened so far."""
        return GenerationStats(
            prompt_tokens=self.n_prompt,
            evaluated_tokens=self.n_evaluated,
            prompt_seconds=self.prompt_seconds,
            generated_tokens=self.n_generated,
            step_tokens=self.n_steps,
            step_seconds=self.step_seconds,
            first_token_seconds=self.first_token_seconds,
            stop_reason=self.stop_reason,
            seed=self.seed,
            peak_bytes=binding.describe_machine().peak_bytes,
        )
