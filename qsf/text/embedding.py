"""Texts as vectors: a file's settings, and the vector made from hidden states."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
    """

    pooling: str = POOLINGS[0]
    end_ids: tuple[int, ...] = ()
    is_encoder: bool = False

    @property
    def poolings(self) -> tuple[str, ...]:
        """The poolings that the model can have."""
        return ENCODER_POOLINGS if self.is_encoder else POOLINGS


def text_vectors(
    chat: Mapping[str, Any], tokenizer: Tokenizer | None, *, is_encoder: bool
) -> TextVectors:
    """Return the settings of section CHAT; without settings, the last token, or the mean."""
    facts = chat.get("embedding")
    facts = facts if isinstance(facts, dict) else {}
    pooling, end = facts.get("pooling"), facts.get("end_token")
    end_id = tokenizer.token_id(end) if tokenizer is not None and isinstance(end, str) else None
    poolings = TextVectors(is_encoder=is_encoder).poolings
    return TextVectors(
        pooling=pooling if pooling in poolings else poolings[0],
        end_ids=() if end_id is None else (end_id,),
        is_encoder=is_encoder,
    )


def unit_vector(values: Sequence[float], dimensions: int = 0) -> array[float]:
    """Return the first ``n`` values, or all, scaled to length 1, in f32; zeros stay zeros."""
    values = values[: dimensions or len(values)]
    length = math.sqrt(math.fsum(value * value for value in values))
    return array("f", [value / (length or 1.0) for value in values])
