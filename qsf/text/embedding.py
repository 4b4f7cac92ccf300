"""Texts as vectors: a file's settings, and the vector made from hidden states."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qsf.errors import QsfArgumentError
from qsf.text.reranking import Classifier, Reranker, reranker_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from qsf.file.layout import Arch, Header
    from qsf.text.tokenizer import Tokenizer

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
