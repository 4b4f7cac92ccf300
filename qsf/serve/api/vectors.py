"""Requests without generated text: embeddings, and reranking by yes and no."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import base64
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

from qsf.errors import shown
from qsf.options import Whole
from qsf.serve.api.answering import Choice, Form
from qsf.serve.api.completion_request import (
    CompletionRequest,
    encode_text,
    fit,
    ignored_fields,
    read_model,
    read_prompts,
)
from qsf.serve.http.fields import Fields
from qsf.serve.http.problems import Problem, invalid
from qsf.serve.scheduling.job import Choosing, Reading
from qsf.serve.serving import Serving
from qsf.text.embedding import unit_vector

MAX_TEXTS = 2048
MAX_DOCUMENTS = 512
FORMATS = ("float", "base64")
_MOST_VALUES = {"float": 1 << 17, "base64": 1 << 19}  # bytes of an answer, which is made in memory

# The prompt that Qwen3-Reranker was trained with (its model card): system message, the pair, no
# thoughts.
_HEAD = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_TAIL = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_TASK = "Given a web search query, retrieve relevant passages that answer the query"
_SPECIAL = ("<|im_start|>", "<|im_end|>")
_LABELS = ("yes", "no")


def read_embeddings(
    body: dict[str, Any], serving: Serving, name: str = "input"
) -> CompletionRequest:
    """Return the checked request to /v1/embeddings. Raises Problem.

    ``name``: of the field with the texts.
    """
    fields = Fields(body)
    read_model(fields, serving)
    fields.ignore("user")
    how, dim = serving.model.text_vectors, serving.model.info.dim
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
    prompts = read_prompts(value, serving, name, MAX_TEXTS, is_cut=is_cut)
    most = max(1, _MOST_VALUES[form] // dimensions)
    if len(prompts) > most:
        text = f"{name} has {len(prompts)} texts of {dimensions} values as {form}: send at most "
        raise invalid(name, f"{text}{most} at a time")
    has_text = isinstance(value, str) or any(isinstance(text, str) for text in value)
    end_ids = how.end_ids if has_text else ()
    n_kept = serving.ctx_tokens - len(end_ids) if is_cut else None
    prompts = [[*prompt[:n_kept], *end_ids] for prompt in prompts]
    reading = Reading(pooling=pooling, dim=dim, is_whole=how.is_encoder)
    extra = {"form": form, "dimensions": dimensions}
    return _request(fields, serving, prompts, name, reading, extra)


def read_rerank(body: dict[str, Any], serving: Serving) -> CompletionRequest:
    """Return the checked request to /v1/rerank. Raises Problem."""
    fields = Fields(body)
    read_model(fields, serving)
    query = fields.text("query")
    if query is None:
        raise invalid("query", "query is missing")
    documents = [_document(value) for value in fields.list("documents", MAX_DOCUMENTS)]
    if not documents:
        raise invalid("documents", "documents must be a list of at least one text")
    top_n = fields.take("top_n", Whole(1), len(documents))
    task = fields.text("instruction", _TASK)
    has_documents = fields.flag("return_documents")
    tokenizer = serving.model.tokenizer
    ids = [tokenizer.encode(label, add_prefix=False) for label in _LABELS]
    if any(len(each) != 1 for each in ids) or None in map(tokenizer.token_id, _SPECIAL):
        text = 'rerank is for models that answer "yes" and "no" as Qwen3-Reranker does'
        raise Problem(400, "unsupported_model", f"{text}: this one lacks its tokens")
    head, tail = (tokenizer.encode(text, add_prefix=False) for text in (_HEAD, _TAIL))
    pairs = (f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {text}" for text in documents)
    prompts = [
        [*head, *encode_text(pair, serving, "documents", is_foreign=True), *tail] for pair in pairs
    ]
    reading = Reading(labels=[token for (token,) in ids])
    extra = {"documents": documents, "has_documents": has_documents, "top_n": top_n}
    return _request(fields, serving, prompts, "documents", reading, extra)


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
    prompts: list[list[int]],
    name: str,
    reading: Reading,
    extra: dict[str, Any],
) -> CompletionRequest:
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
        """Return the probability of "yes" against "no" for each document, best first."""
        results: list[dict[str, Any]] = []
        for i, choice in enumerate(choices):
            yes, no = choice.values
            result: dict[str, Any] = {
                "index": i,
                "relevance_score": 1.0 / (1.0 + math.exp(min(no - yes, 700.0))),
            }
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
        }
