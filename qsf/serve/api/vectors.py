"""Requests without generated text: embeddings and reranking."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from msgspec import Meta

from qsf.batch import reading_of
from qsf.errors import QsfArgumentError, shown
from qsf.options import Whole
from qsf.serve.api.answering import Choice, Encoder, Route
from qsf.serve.api.ask import Ask, Ranking, encode_text, fit, read_prompts, texts_or_ids
from qsf.serve.http.body import Part, within
from qsf.serve.http.problems import Problem, invalid
from qsf.serve.scheduling.job import Choosing, Reading
from qsf.serve.serving import Serving
from qsf.text.embedding import TASK, unit_vector

MAX_TEXTS = 2048
MAX_DOCUMENTS = 512
_MOST_VALUES = {"float": 1 << 17, "base64": 1 << 19}  # bytes of an answer, which is made in memory
_Count = Annotated[int, within(Whole(1))]
Texts = Annotated[Any, texts_or_ids(MAX_TEXTS)]


class Embeddings(Part, kw_only=True):
    IGNORED: ClassVar[tuple[str, ...]] = ("user",)

    input: Texts
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Literal["cls", "mean", "last"] | None = None
    dimensions: _Count | None = None
    normalize: bool | None = None
    truncate: bool | None = None


class Document(Part, kw_only=True):
    text: str


class Rerank(Part, kw_only=True):
    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_DOCUMENTS)]
    top_n: _Count | None = None
    instruction: str | None = None
    return_documents: bool | None = None


def read_embeddings(fields: Embeddings, serving: Serving, name: str = "input") -> Ask:
    """Return the checked request to /v1/embeddings; ``name``: of the texts. Raises Problem."""
    how, dim = serving.model.text_vectors, serving.model.info.vector_dim
    _check(how.check_vectors)
    form, pooling = fields.encoding_format or "float", fields.pooling or how.pooling
    if pooling not in how.poolings:
        text = f"pooling must be {' or '.join(how.poolings)}, not {shown(pooling)}"
        raise invalid("pooling", text)
    dimensions = fields.dimensions or dim
    if dimensions > dim:
        text = f"dimensions must be a whole number from 1 to {dim}, not {dimensions}"
        raise invalid("dimensions", text)
    if fields.normalize is False:
        why = "normalize must be true: vectors have the length 1"
        raise invalid("normalize", why, "unsupported_parameter")
    value = fields.input
    if value is None:
        raise invalid(name, f"{name} is missing")
    is_cut = bool(fields.truncate)
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
    ask = _ask(serving, completed, name, Reading(pooling=pooling, dim=dim, is_whole=how.is_encoder))
    ask.dimensions, ask.is_base64 = dimensions, form == "base64"
    return ask


def read_rerank(fields: Rerank, serving: Serving) -> Ask:
    documents = [value if isinstance(value, str) else value.text for value in fields.documents]
    task = fields.instruction or TASK
    how, dim = serving.model.text_vectors, serving.model.info.vector_dim
    reranker = _check(partial(how.reranker, serving.model.tokenizer))
    encode = partial(encode_text, serving=serving, name="documents", is_foreign=True, is_cut=True)
    most = min(serving.ctx_tokens, how.max_tokens or serving.ctx_tokens)
    try:
        pairs = [reranker.prompt(fields.query, text, task, encode, most) for text in documents]
    except QsfArgumentError as error:
        raise invalid("query", str(error), "context_length_exceeded") from None
    ask = _ask(serving, pairs, "documents", reading_of(reranker, how, dim))
    top_n = fields.top_n or len(documents)
    ask.ranking = Ranking(documents, bool(fields.return_documents), top_n, reranker)
    return ask


_T = TypeVar("_T")


def _check(use: Callable[[], _T]) -> _T:
    """Return what ``use`` returns. Raises Problem if the model does not have it."""
    try:
        return use()
    except QsfArgumentError as error:
        raise Problem(400, "unsupported_model", str(error)) from None


def _ask(
    serving: Serving, completed: Sequence[tuple[list[int], bool]], name: str, reading: Reading
) -> Ask:
    prompts = [prompt for prompt, _ in completed]
    return Ask(
        prompts=prompts,
        choosing=Choosing(params=serving.model.sampling_params(), seed=0),
        **fit(prompts, None, serving, name, least=0),
        reading=reading,
        cuts=[index for index, (_, is_cut) in enumerate(completed) if is_cut],
    )


class _VectorsEncoder(Encoder):
    """The form of an answer that is never a stream."""

    prefix = "read-"

    def usage(self) -> dict[str, int]:
        """Return how many tokens the prompts have, cached ones included."""
        n_prompt = sum(choice.job.n_prompt for choice in self.choices)
        return {"prompt_tokens": n_prompt, "total_tokens": n_prompt}

    def _listed(self, **more: Any) -> dict[str, Any]:
        """Return an answer with the indices of texts that were cut, if any."""
        cuts = {"truncated": self.ask.cuts} if self.ask.cuts else {}
        shared = {"object": "list", "model": self.serving.name, "usage": self.usage()}
        return {**shared, **more, **cuts}


class EmbeddingsEncoder(_VectorsEncoder):
    def whole(self) -> dict[str, Any]:
        entries = [
            {"object": "embedding", "index": choice.index, "embedding": self.vector(choice)}
            for choice in self.choices
        ]
        return self._listed(data=entries)

    def vector(self, choice: Choice) -> str | list[float]:
        vector = unit_vector(choice.values, self.ask.dimensions)
        if not self.ask.is_base64:
            return [float(f"{value:.9g}") for value in vector]  # the digits of an f32
        if sys.byteorder == "big":
            vector.byteswap()
        return base64.b64encode(vector.tobytes()).decode()


class RerankEncoder(_VectorsEncoder):
    """Answers of /v1/rerank, in the form of Jina, Cohere and llama-server."""

    def whole(self) -> dict[str, Any]:
        ranking = self.ask.ranking
        assert ranking is not None
        results: list[dict[str, Any]] = []
        for i, choice in enumerate(self.choices):
            score = ranking.reranker.score(choice.values)
            result: dict[str, Any] = {"index": i, "relevance_score": score}
            if ranking.has_documents:
                result["document"] = {"text": ranking.documents[i]}
            results.append(result)
        results.sort(key=lambda result: -result["relevance_score"])
        return self._listed(id=self.name, results=results[: ranking.top_n])


_EMBEDDINGS = (Embeddings, read_embeddings, EmbeddingsEncoder)
_RERANK = (Rerank, read_rerank, RerankEncoder)
ROUTES = (
    Route("/v1/embeddings", "a vector for each text", *_EMBEDDINGS),
    Route("/v1/rerank", "documents by a query", *_RERANK),
    Route("/rerank", "documents by a query", *_RERANK),
)
