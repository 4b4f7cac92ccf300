"""Requests without generated text: embeddings and reranking."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from qsf.batch import reading_of
from qsf.errors import QsfArgumentError, shown
from qsf.options import Whole
from qsf.serve.api.answering import Choice, Form
from qsf.serve.api.completion_request import (
    CompletionRequest,
    encode_text,
    fit,
    ignored_fields,
    read_prompts,
)
from qsf.serve.http.fields import Fields
from qsf.serve.http.problems import Problem, invalid
from qsf.serve.scheduling.job import Choosing, Reading
from qsf.serve.serving import Serving
from qsf.text.embedding import unit_vector
from qsf.text.reranking import TASK

MAX_TEXTS = 2048
MAX_DOCUMENTS = 512
FORMATS = ("float", "base64")
_MOST_VALUES = {"float": 1 << 17, "base64": 1 << 19}  # bytes of an answer, which is made in memory


def read_embeddings(
    body: dict[str, Any], serving: Serving, name: str = "input"
) -> CompletionRequest:
    """Return the checked request to /v1/embeddings. Raises Problem.

    ``name``: of the field with the texts.
    """
    fields = Fields(body)
    fields.text("model")
    fields.ignore("user")
    how, dim = serving.model.text_vectors, serving.model.info.dim
    _check(how.check_vectors)
    form = _word(fields, "encoding_format", FORMATS) or FORMATS[0]
    pooling = _word(fields, "pooling", how.poolings) or how.pooling
    dimensions = fields.take("dimensions", Whole(1, dim), dim)
    if not fields.flag("normalize", True):
        why = "normalize must be true: vectors have the length 1"
        raise invalid("normalize", why, "unsupported_parameter")
    value = fields.raw(name)
    if value is None:
        raise invalid(name, f"{name} is missing")
    is_cut = fields.flag("truncate")
    cuts = is_cut or how.max_tokens > 0
    prompts = read_prompts(value, serving, name, MAX_TEXTS, is_cut=cuts)
    most = max(1, _MOST_VALUES[form] // dimensions)
    if len(prompts) > most:
        text = f"{name} has {len(prompts)} texts of {dimensions} values as {form}: send at most "
        raise invalid(name, f"{text}{most} at a time")
    has_text = isinstance(value, str) or any(isinstance(text, str) for text in value)
    most = serving.ctx_tokens if is_cut else 0
    if has_text:
        completed = [how.complete(prompt, most) for prompt in prompts]
    else:
        completed = [(prompt[: most or None], 0 < most < len(prompt)) for prompt in prompts]
    reading = Reading(pooling=pooling, dim=dim, is_whole=how.is_encoder)
    extra = {"form": form, "dimensions": dimensions}
    return _request(fields, serving, completed, name, reading, extra)


def read_rerank(body: dict[str, Any], serving: Serving) -> CompletionRequest:
    """Return the checked request to /v1/rerank. Raises Problem."""
    fields = Fields(body)
    fields.text("model")
    query = fields.text("query")
    if query is None:
        raise invalid("query", "query is missing")
    documents = [_document(value) for value in fields.list("documents", MAX_DOCUMENTS)]
    if not documents:
        raise invalid("documents", "documents must be a list of at least one text")
    top_n = fields.take("top_n", Whole(1), len(documents))
    task = fields.text("instruction") or TASK
    has_documents = fields.flag("return_documents")
    how, dim = serving.model.text_vectors, serving.model.info.dim
    reranker = _check(partial(how.reranker, serving.model.tokenizer))
    encode = partial(encode_text, serving=serving, name="documents", is_foreign=True, is_cut=True)
    most = min(serving.ctx_tokens, how.max_tokens or serving.ctx_tokens)
    try:
        pairs = [reranker.prompt(query, text, task, encode, most) for text in documents]
    except QsfArgumentError as error:
        raise invalid("query", str(error), "context_length_exceeded") from None
    extra = {"documents": documents, "has_documents": has_documents, "top_n": top_n}
    extra["reranker"] = reranker
    return _request(fields, serving, pairs, "documents", reading_of(reranker, how, dim), extra)


_T = TypeVar("_T")


def _check(use: Callable[[], _T]) -> _T:
    """Return what ``use`` returns. Raises Problem if the model does not have it."""
    try:
        return use()
    except QsfArgumentError as error:
        raise Problem(400, "unsupported_model", str(error)) from None


def _word(fields: Fields, name: str, words: Sequence[str]) -> str | None:
    word = fields.text(name)
    if word is not None and word not in words:
        raise invalid(name, f"{name} must be {' or '.join(words)}, not {shown(word)}")
    return word


def _document(value: Any) -> str:
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise invalid("documents", f"documents must be texts, not {shown(value)}")
    return text


def _request(
    fields: Fields,
    serving: Serving,
    completed: Sequence[tuple[list[int], bool]],
    name: str,
    reading: Reading,
    extra: dict[str, Any],
) -> CompletionRequest:
    prompts = [prompt for prompt, _ in completed]
    extra["cut"] = [index for index, (_, is_cut) in enumerate(completed) if is_cut]
    return CompletionRequest(
        prompts=prompts,
        choosing=Choosing(params=serving.model.sampling_params(), seed=0),
        **fit(prompts, None, serving, name, least=0),
        stops=(),
        reading=reading,
        ignored=ignored_fields([fields], serving),
        extra=extra,
    )


class _WholeForm(Form):
    """The form of an answer that is never a stream."""

    def __init__(self, request: CompletionRequest, serving: Serving) -> None:
        self.name = f"read-{os.urandom(12).hex()}"
        self.extra = request.extra
        self.model = serving.name

    @staticmethod
    def usage(choices: Sequence[Choice]) -> dict[str, int]:
        """Return how many tokens the prompts have, cached ones included."""
        n_prompt = sum(choice.job.n_prompt for choice in choices)
        return {"prompt_tokens": n_prompt, "total_tokens": n_prompt}

    @property
    def cuts(self) -> dict[str, Any]:
        """The indices of texts that were cut, if any, as a field of the answer."""
        return {"truncated": self.extra["cut"]} if self.extra["cut"] else {}


class EmbeddingsForm(_WholeForm):
    """Answers of /v1/embeddings."""

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the vectors, in the order of the texts."""
        entries = (
            {"object": "embedding", "index": i, "embedding": self.vector(choice)}
            for i, choice in enumerate(choices)
        )
        return {
            "object": "list",
            "data": list(entries),
            "model": self.model,
            "usage": self.usage(choices),
            **self.cuts,
        }

    def vector(self, choice: Choice) -> str | list[float]:
        """Return the vector of a text in the requested encoding."""
        vector = unit_vector(choice.values, self.extra["dimensions"])
        if self.extra["form"] == "float":
            return [float(f"{value:.9g}") for value in vector]  # the digits of an f32
        if sys.byteorder == "big":
            vector.byteswap()
        return base64.b64encode(vector.tobytes()).decode()


class RerankForm(_WholeForm):
    """Answers of /v1/rerank, in the form of Jina, Cohere and llama-server."""

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the probability that each document fits, best first."""
        results: list[dict[str, Any]] = []
        for i, choice in enumerate(choices):
            score = self.extra["reranker"].score(choice.values)
            result: dict[str, Any] = {"index": i, "relevance_score": score}
            if self.extra["has_documents"]:
                result["document"] = {"text": self.extra["documents"][i]}
            results.append(result)
        results.sort(key=lambda result: -result["relevance_score"])
        return {
            "id": self.name,
            "object": "list",
            "model": self.model,
            "results": results[: self.extra["top_n"]],
            "usage": self.usage(choices),
            **self.cuts,
        }
