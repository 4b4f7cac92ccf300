"""``Model``: a .qsf file opened inside a memory budget."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsf.closable import Closing
from qsf.errors import ChildFailedError, QsfArgumentError, QsfConversionError
from qsf.native.opening import (
    Adapter,
    io_origin,
    open_native,
    plan_native,
    read_adapters,
    with_policy,
)
from qsf.options import GenerationOptions, ModelOptions, call_with, taking
from qsf.passes import choose_items, run_items
from qsf.session import Session, Talking, Uncopyable, _Run, create_session
from qsf.text.arguments import as_messages, as_tokens
from qsf.text.channels import ends_with_channels
from qsf.text.parts import OpenedModel, read_text_parts
from qsf.text.sampling import end_ids, end_texts, resolve_sampling

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Self

    from qsf.batch import Batch, BatchAnswer, RankedDocument
    from qsf.errors import QsfError
    from qsf.native import binding
    from qsf.passes import Choice, Chosen, PassItem, PassReport
    from qsf.text.chat import ChatTemplate
    from qsf.text.embedding import TextVectors
    from qsf.text.generation import GenerationStats
    from qsf.text.sampling import SamplingParams
    from qsf.text.tokenizer import Tokenizer


class Model(Closing, Uncopyable, Talking):
    """One .qsf file, opened: the weights, the tokenizer and the chat template.

    The model has a session of its own, ``session``, which ``generate`` and ``logits`` use: a call
    whose tokens begin with those held evaluates only the rest. ``sessions=N`` opens the model for
    N sessions in the one budget; see ``Session``.

    The arguments are the fields of ``ModelOptions``; ``help(qsf.Model.__init__)`` describes each.

    Threads: a model may be used from several threads. Its sessions take turns.

    Life: closed by ``close()``, by leaving its ``with`` block, or when nobody refers to it or to
    one of its sessions. ``close`` closes all sessions; afterwards, and in a process made by
    ``os.fork()``, methods that need the engine raise QsfStateError: open the file after the fork.

    Example::

        with Model("model.qsf") as model:
            for piece in model.generate("Once upon a time", max_tokens=50):
                print(piece, end="", flush=True)
    """

    @taking(ModelOptions)
    def __init__(self, path: str | os.PathLike[str], options: Any) -> None:
        """Open the file.

        The budget includes up to ``reserve_mb`` for Python's own objects; arrays from ``logits``
        come on top.

        Args:
            path: the file.
            {options}

        Raises:
            QsfMemoryError: the budget or the free memory is too small; the text says what to set,
                and ``plan`` lists the parts.
            QsfUnsupportedError: ``io`` cannot be had here, or the file needs another release.
            QsfFormatError: the file is damaged or is no .qsf file.
            QsfIOError: it cannot be read.
            QsfArgumentError: an argument is out of range, or ``quality`` is below 1 and the file
                has no layer importance or no more than four layers; ``argument`` is its name.
        """
        self._path = checked_path(path)
        parts = read_text_parts(path)
        native = open_native(path, options, parts.reserve_bytes)
        info = native.info()
        memory = with_policy(info.plan, options)
        memory = replace(memory, text_bytes=parts.text_bytes)
        info = replace(info, plan=memory, architecture=parts.family)
        self._io_origin = io_origin(options)
        self._opened = OpenedModel(
            native=native,
            info=info,
            tokenizer_or_none=parts.tokenizer,
            template_or_error=parts.template,
            generation=parts.generation,
            end_ids=ends_with_channels(end_ids(info.eos_id, parts.generation), parts.tokenizer),
            vectors=parts.vectors,
            name=Path(os.fsdecode(self._path)).name,
            adapters=read_adapters(options),
        )
        self._session = create_session(self._opened)

    @classmethod
    @taking(ModelOptions)
    def from_pretrained(cls, name: str | os.PathLike[str], options: Any) -> Self:
        """Open a model by the name that ``qsf run`` takes; downloads and converts it if needed.

        Converted files are kept; `qsf list` shows them. Downloads and conversions run in processes
        of their own, whose memory is not in the budget; their messages go to stderr.

        Args:
            name: a .qsf file, a folder with a HuggingFace model, a GGUF file, or ``org/name`` on
                the hub, which is downloaded unless it is in the hub's cache; with ``:TYPE`` after
                it for another type than the default.
            {options}

        Raises:
            QsfConversionError: the download or the conversion failed; stderr has the reason.
            QsfError: there is no such model, or what ``Model(path, ...)`` raises.
        """
        from qsf.find.prepare import find_model  # never needed for a path

        try:
            path = find_model(os.fspath(checked_path(name)), is_quiet=True, is_yes=True)
        except ChildFailedError as error:
            raise QsfConversionError(
                f"{os.fspath(name)}: no .qsf file could be made of it; stderr has the reason"
            ) from error
        return cls.opened(path, options)

    @classmethod
    def opened(cls, path: str | os.PathLike[str], options: ModelOptions) -> Self:
        """Open the file with options that are already checked; raises what ``Model(...)`` does."""
        model = cls.__new__(cls)
        call_with(model.__init__, path, options)  # type: ignore[misc]
        return model

    @classmethod
    @taking(ModelOptions)
    def plan(cls, path: str | os.PathLike[str], options: Any) -> binding.MemoryPlan:
        """Return the memory plan of ``Model(path, ...)`` without opening it.

        If the budget or the machine is too small, ``is_enough`` is False and ``min_budget_bytes``
        is the least that is enough. The arguments are those of ``Model``.
        """
        path = checked_path(path)
        parts = read_text_parts(path)
        plan = plan_native(path, options, parts.reserve_bytes)
        # The plan counts these in process_bytes, so they stay alive until here.
        return replace(plan, text_bytes=parts.text_bytes)

    @property
    def input_bytes(self) -> int:
        """Most memory that reading untrusted JSON may take: half of the plan's reserve."""
        return self._opened.input_bytes

    @property
    def session(self) -> Session:
        """The model's own session, which ``generate`` and ``logits`` use."""
        return self._session

    def create_session(self) -> Session:
        """Return a new session with its own tokens and KV cache.

        Raises:
            QsfMemoryError: as many sessions are open as the model was opened for (``sessions``),
                its own included.
        """
        return create_session(self._opened)

    def close(self) -> None:
        """Close all sessions and free the memory. Waits for running calls of other threads."""
        self._opened.close()

    def __repr__(self) -> str:
        """Describe the model; works after close."""
        info, state = self.info, ", closed" if self._opened.native.is_closed else ""
        return (
            f"<qsf.Model {os.fspath(self._path)!r}: {info.architecture}, {info.quant_type}, "
            f"{info.n_parameters / 1e6:,.1f}M weights, {info.plan.ctx_tokens} tokens of context"
            f"{state}>"
        )

    @property
    def info(self) -> binding.ModelInfo:
        """What the model is and how it was opened, memory plan included."""
        return self._opened.info

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The adapters of ``lora``: each with its ``path``, ``scale`` and ``name``."""
        return self._opened.adapters

    def adapter_scales(self, name: str | None = None) -> tuple[float, ...]:
        """Return the scales of the adapters without a name, and of that with ``name``; others 0.

        Raises QsfArgumentError for a name that no adapter has.
        """
        return self._opened.adapter_scales(name)

    @property
    def skipped_layers(self) -> tuple[int, ...]:
        """The layers that ``quality`` skips, ascending; the first is 0."""
        return self.info.plan.skipped_layers

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the file.

        Raises:
            QsfArgumentError: the file has none, so there is no text, only ``logits``.
        """
        return self._opened.tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        """The chat template; ``is_plain`` if the file has none.

        Raises:
            QsfFormatError: it is no text; all else works. Other errors of a template appear when
                it is used.
        """
        return self._opened.template

    @property
    def generation_defaults(self) -> SamplingParams:
        """How tokens are chosen if ``generate`` gets no such options."""
        return resolve_sampling(self._opened.generation)

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end a text."""
        return self._opened.end_ids

    @property
    def end_texts(self) -> tuple[str, ...]:
        """The texts that end one, where no token does."""
        return end_texts(self._opened.generation)

    @property
    def text_vectors(self) -> TextVectors:
        """How the model's makers compute vectors of texts."""
        return self._opened.vectors

    def embed(
        self,
        texts: Iterable[str | Sequence[int]],
        *,
        pooling: str | None = None,
        dimensions: int | None = None,
    ) -> Iterator[array[float]]:
        """Yield a vector of length 1 for each text, in their order: f32 in an array.

        As many texts as the model has sessions (``sessions=N``) share a pass.

        Args:
            texts: texts, to which the model's end token is added, or token ids, which are used as
                they are.
            pooling: "last" or "mean" of the hidden states, of encoders "mean" or "cls", the first
                one; None: the makers' choice.
            dimensions: return only so many first values; None: all.

        Raises:
            QsfArgumentError: an argument is out of range, a text is empty or longer than the
                context.
        """
        from qsf.batch import embed  # few need it

        return embed(self._opened, self._session, texts, pooling, dimensions)

    def rerank(
        self, query: str, documents: Iterable[str], *, instruction: str | None = None
    ) -> list[RankedDocument]:
        """Return the documents by how well they answer ``query``, best first.

        For cross-encoders, and for models that answer "yes" and "no" as Qwen3-Reranker does. The
        end of a document that does not fit in the context is left out (``is_cut``).

        Args:
            query: what is looked for.
            documents: texts; as many as the model has sessions share a pass.
            instruction: the task, for models that read one; None: web search.

        Raises:
            QsfArgumentError: the model is of another kind, or the query does not fit.
        """
        from qsf.batch import rerank  # few need it

        return rerank(self._opened, self._session, query, documents, instruction)

    def sampling_params(self, **params: float | None) -> SamplingParams:
        """Return the sampling parameters of ``generate`` with these options; None: not given."""
        return resolve_sampling(self._opened.generation, **params)

    @property
    def stats(self) -> GenerationStats | None:
        """Statistics of the last finished ``generate`` of the model's own session."""
        return self._session.stats

    @property
    def session_stats(self) -> binding.SessionStats:
        """The engine's counts for the model's own session."""
        return self._session.engine_stats

    @property
    def timeline(self) -> list[binding.UnitTime]:
        """Times and bytes of each unit (embedding, layers, final) since the model was opened.

        Bytes read from the file and nanoseconds of reading, of waiting for it and of computing,
        over all passes. ``session_stats`` has the sums.
        """
        with self._opened.turn():
            return self._opened.native.timeline()

    @property
    def memory_events(self) -> list[binding.MemoryEvent]:
        """The latest events of memory released under pressure or taken again."""
        with self._opened.turn():
            return self._opened.native.memory_events()

    @property
    def io_origin(self) -> str:
        """How ``info.io_name`` was chosen, "chosen" or "as asked"."""
        return self._io_origin

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text, with BOS first if the model uses it.

        The text may be longer than the context: ``tokenizer.encode`` says how much memory it takes.
        """
        if not isinstance(text, str):
            raise QsfArgumentError(
                f"text must be a text, not {type(text).__name__}", argument="text"
            )
        return self.tokenizer.encode(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``; special and unknown tokens give no text."""
        return self.tokenizer.decode(as_tokens(ids, "ids"))

    def chat_tokens(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        template_args: Mapping[str, Any] | None = None,
        tools: Sequence[Any] | None = None,
    ) -> list[int]:
        """Return the prompt for the answer to ``messages``: mappings with role and content.

        ``template_args`` and ``tools`` are those of ``ChatTemplate.render``.
        """
        return self.chat_template.encode(
            as_messages(messages),
            self.tokenizer,
            tools=tools,
            template_args=template_args,
            max_tokens=self.info.plan.ctx_tokens,
        )

    def logits(
        self,
        tokens: Sequence[int],
        *,
        first_row: int = 0,
        out: npt.NDArray[np.float32] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return the logits after each token from ``first_row`` on: see ``Session.logits``."""
        return self._session.logits(tokens, first_row=first_row, out=out)

    def cancel(self) -> None:
        """End every running ``generate`` and ``chat`` of all sessions, from any thread."""
        self._opened.native.owner.check()
        for session in tuple(self._opened.sessions):
            session.cancel()

    def run_pass(self, items: Sequence[PassItem]) -> PassReport:
        """Evaluate tokens of several sessions in one pass over the weights.

        Together at most ``info.plan.chunk_tokens`` tokens, and logits of at most
        ``info.plan.logits_rows`` of them unless only one item wants some. The results are the same
        bits as in passes of one session each.

        Raises:
            QsfArgumentError: an item cannot be evaluated; nothing was.
            QsfIOError, QsfFormatError: the weights could not be read, or are damaged. No session
                holds other tokens than before.
        """
        return run_items(self._opened, items)

    def choose(self, choices: Sequence[Choice]) -> list[Chosen | QsfError]:
        """Choose the next token for each of several sessions.

        Returns:
            For each session the choice, or the error: logits that are not finite, a mask that
            allows no token.

        Raises:
            QsfArgumentError: an argument is out of range, or a session has no logits; nothing was
                chosen.
        """
        return choose_items(self._opened, choices)

    @taking(GenerationOptions)
    def batch(
        self, prompts: Iterable[str | Sequence[int] | Sequence[Mapping[str, Any]]], options: Any
    ) -> Iterator[BatchAnswer]:
        """Answer many prompts, as many at a time as the model has sessions (``sessions=N``).

        Each pass over the weights serves all of them. Every answer is what ``generate`` (``chat``
        for messages) gives with the same options, to the bit; answers come as they are finished.

        Args:
            prompts: texts or token ids to continue, or lists of messages to answer. They are read
                when a session is free, so the iterable may be endless. If neighbouring prompts
                share 32 first tokens or more, these are evaluated and held once.
            {options}

        Raises:
            QsfArgumentError: an option is out of range, or is for a single prompt. An error of one
                prompt is in its answer.
            QsfCancelledError: ``cancel`` was called during a pass.
            QsfIOError, QsfFormatError: the weights could not be read, or are damaged.
        """
        return self.start_batch(options).answers(self._session, prompts)

    def start_batch(self, options: GenerationOptions) -> Batch:
        """Return a ``Batch`` with these options.

        Raises QsfArgumentError for an option of single prompts.
        """
        from qsf.batch import Batch  # few need it

        return Batch(self._opened, options)

    def _generate(self, prompt: str | Sequence[int], options: GenerationOptions) -> _Run:
        return self._session._generate(prompt, options)

    def _chat(self, messages: Any, options: GenerationOptions) -> _Run:
        return self._session._generate(*self._opened.prompt_of(messages, options))


def checked_path(path: object) -> str | os.PathLike[str]:
    """Return ``path``. Raises QsfArgumentError unless its type is that of a path."""
    if not isinstance(path, str) and not hasattr(path, "__fspath__"):
        raise QsfArgumentError(f"path must be a path, not {path!r:.200}", argument="path")
    if "\0" in str(path):
        raise QsfArgumentError(f"path cannot contain a zero byte: {path!r:.200}", argument="path")
    return path
