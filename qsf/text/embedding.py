"""Texts as vectors, made from hidden states, and scores of documents for a query.

Scores are those of a cross-encoder's head, or of "yes" and "no".
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from sys import byteorder
from typing import TYPE_CHECKING, Any, Final

from qsf.errors import QsfArgumentError, QsfFormatError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from qsf.file.layout import Arch, Header
    from qsf.text.tokenizer import Tokenizer


# The prompt that Qwen3-Reranker was trained with (its model card): system message, the pair, no
# thoughts.
_HEAD: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_TAIL: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
TASK: Final = "Given a web search query, retrieve relevant passages that answer the query"
_SPECIAL: Final = ("<|im_start|>", "<|im_end|>")
_LABELS: Final = ("yes", "no")
_ACTIVATIONS: Final[Mapping[str, Callable[[float], float]]] = {
    "tanh": math.tanh,
    "gelu": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
}

Encode = Callable[[str], list[int]]


class Classifier:
    """What a cross-encoder computes of the pooled vector, which its dense layer has multiplied."""

    def __init__(self, facts: Mapping[str, Any], dim: int, epsilon: float) -> None:
        """Read the settings of section CHAT. Raises QsfFormatError."""
        self._epsilon = epsilon
        try:
            self._activate = _ACTIVATIONS[facts["activation"]]
            self._weight = _unpacked(facts["weight"], dim)
            (self._offset,) = _unpacked(facts.get("offset", "AAAAAA=="), 1)
            self._bias, self._norm, self._norm_bias = (
                _unpacked(facts[name], dim) if name in facts else None
                for name in ("bias", "norm", "norm_bias")
            )
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            text = f"the section CHAT has a classifier that is not one: {error!r}"
            raise QsfFormatError(text) from error

    def logit(self, pooled: Sequence[float]) -> float:
        """Return the score of a pair. Raises QsfFormatError if the vector has another width."""
        if len(pooled) != len(self._weight):
            widths = f"{len(self._weight)} numbers, and the dense matrix makes {len(pooled)}"
            raise QsfFormatError(f"the section CHAT has a classifier of {widths}")
        x = [self._activate(v) for v in _sum(pooled, self._bias)]
        if self._norm is not None:
            mean = math.fsum(x) / len(x)
            deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in x) / len(x) + self._epsilon)
            x = [(v - mean) / deviation * w for v, w in zip(x, self._norm, strict=True)]
            x = _sum(x, self._norm_bias)
        return math.fsum(v * w for v, w in zip(x, self._weight, strict=True)) + self._offset


def _sum(x: Sequence[float], bias: Sequence[float] | None) -> list[float]:
    return list(x) if bias is None else [v + b for v, b in zip(x, bias, strict=True)]


def _unpacked(text: str, n: int) -> array[float]:
    values = array("f", base64.b64decode(text, validate=True))
    if byteorder == "big":
        values.byteswap()
    if len(values) != n:
        raise ValueError(f"{len(values)} numbers instead of {n}")
    return values


@dataclass(frozen=True, slots=True)
class Reranker:
    """How a model scores a pair of texts.

    Attributes:
        labels: tokens whose probabilities after the prompt are compared; without a classifier.
        first, between, last: tokens around the texts of a pair.
    """

    classifier: Classifier | None
    labels: tuple[int, ...]
    first: tuple[int, ...]
    between: tuple[int, ...]
    last: tuple[int, ...]

    def prompt(
        self, query: str, document: str, task: str, encode: Encode, most: int
    ) -> tuple[list[int], bool]:
        """Return the tokens of a pair, and whether the document's end was cut to fit in ``most``.

        ``encode``: returns the tokens of a text without special ones; of a text that has more than
        ``most`` the beginning is enough.

        Raises:
            QsfArgumentError: there is no room for a document beside the query.
        """
        head: list[int] = []
        if self.classifier is not None:
            head, text = [*encode(query), *self.between], document
        else:
            text = f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}"
        head = [*self.first, *head]
        tokens = encode(text)
        n_kept = most - len(head) - len(self.last)
        is_cut = len(tokens) > n_kept
        if is_cut and len(encode(text[: len(text) - len(document)])) >= n_kept:
            raise QsfArgumentError(
                f"the query has {len(encode(query))} tokens: with a document they are more than "
                f"{most}, which is the limit",
                argument="query",
            )
        return [*head, *tokens[:n_kept], *self.last], is_cut

    def score(self, values: Sequence[float]) -> float:
        """Return the probability that the document fits, from what the model has computed."""
        logit = values[0] - values[1] if self.classifier is None else self.classifier.logit(values)
        return 1.0 / (1.0 + math.exp(min(-logit, 700.0)))


def reranker_of(
    tokenizer: Tokenizer,
    classifier: Classifier | None,
    between: tuple[int, ...],
    last: tuple[int, ...],
) -> Reranker:
    """Return how a model scores pairs. Raises QsfArgumentError if it does not."""

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_prefix=False))

    if classifier is not None:
        return Reranker(classifier, (), tuple(tokenizer.encode("")), between, last)
    labels = tuple(map(ids, _LABELS))
    if any(len(each) != 1 for each in labels) or None in map(tokenizer.token_id, _SPECIAL):
        raise QsfArgumentError(
            "rerank is for cross-encoders, such as bge-reranker, and for models that answer "
            '"yes" and "no" as Qwen3-Reranker does: this one has no classifier, and lacks their '
            "tokens"
        )
    return Reranker(None, tuple(token for (token,) in labels), ids(_HEAD), (), ids(_TAIL))


POOLINGS = ("last", "mean")
ENCODER_POOLINGS = ("mean", "cls")  # the first is what a model without settings has
ALL_POOLINGS = tuple(dict.fromkeys((*POOLINGS, *ENCODER_POOLINGS)))


@dataclass(frozen=True, slots=True)
class TextVectors:
    """How the model's makers compute vectors of texts.

    Attributes:
        pooling: the hidden state of the "last" token, the "mean" of all, or, of encoders, that of
            the first token ("cls").
        end_ids: tokens appended to a text.
        pair_ids: tokens between two texts.
        max_tokens: a text that has more, those that are appended included, is cut; 0: no limit.
        classifier: of a cross-encoder, which scores pairs of texts and makes no vectors.
    """

    pooling: str = POOLINGS[0]
    end_ids: tuple[int, ...] = ()
    is_encoder: bool = False
    pair_ids: tuple[int, ...] = ()
    max_tokens: int = 0
    classifier: Classifier | None = None

    def check_vectors(self) -> None:
        """Raise QsfArgumentError if the model makes no vectors of texts."""
        if self.classifier is not None:
            raise QsfArgumentError(
                "the model is a cross-encoder: it scores pairs of texts (rerank), and makes no "
                "vectors"
            )

    def reranker(self, tokenizer: Tokenizer) -> Reranker:
        """Return how the model scores pairs. Raises QsfArgumentError if it does not."""
        return reranker_of(tokenizer, self.classifier, self.pair_ids, self.end_ids)

    def complete(self, tokens: list[int], most: int = 0) -> tuple[list[int], bool]:
        """Return the tokens of a text with the appended ones, and whether the text was cut.

        ``most``: a further limit; 0: none.
        """
        limits = [n for n in (self.max_tokens, most) if n]
        n_kept = min(limits) - len(self.end_ids) if limits else len(tokens)
        return [*tokens[: max(n_kept, 0)], *self.end_ids], n_kept < len(tokens)

    @property
    def poolings(self) -> tuple[str, ...]:
        return ENCODER_POOLINGS if self.is_encoder else POOLINGS


def text_vectors(
    chat: Mapping[str, Any], tokenizer: Tokenizer | None, header: Header, arch: Arch
) -> TextVectors:
    """Return the settings of section CHAT; without settings, the last token, or the mean."""
    facts = chat.get("embedding")
    facts = facts if isinstance(facts, dict) else {}
    pooling, pair, most = facts.get("pooling"), facts.get("pair_tokens"), facts.get("max_tokens")
    head = facts.get("classifier")
    poolings = TextVectors(is_encoder=arch.is_encoder).poolings
    return TextVectors(
        pooling=pooling if pooling in poolings else poolings[0],
        end_ids=_ids(tokenizer, [facts.get("end_token")]),
        is_encoder=arch.is_encoder,
        pair_ids=_ids(tokenizer, pair if isinstance(pair, list) else ()),
        max_tokens=most if isinstance(most, int) and most > 0 else 0,
        classifier=None if head is None else Classifier(head, header.dim, arch.norm_epsilon),
    )


def _ids(tokenizer: Tokenizer | None, words: Sequence[Any]) -> tuple[int, ...]:
    found = [
        tokenizer.token_id(word)
        for word in words
        if tokenizer is not None and isinstance(word, str)
    ]
    return tuple(each for each in found if each is not None)


def unit_vector(values: Sequence[float], dimensions: int = 0) -> array[float]:
    """Return the first ``n`` values, or all, scaled to length 1, in f32; zeros stay zeros."""
    values = values[: dimensions or len(values)]
    length = math.sqrt(math.fsum(value * value for value in values))
    return array("f", [value / (length or 1.0) for value in values])
