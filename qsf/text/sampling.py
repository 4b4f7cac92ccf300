"""How tokens are chosen and when a text stops: parameters, their defaults, stop rules.

The choice itself, which touches every logit, is made in C (``qsf_session_sample``).
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qsf.errors import QsfArgumentError, QsfFormatError, shown
from qsf.options import GenerationOptions, described

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_OPTIONS = {o.name: o for o in described(GenerationOptions) if o.name in _NAMES}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next token. Checked when made: the ranges are those of qsf/options.py.

    Attributes:
        temperature: [0, 100]; 0 always takes the most probable token.
        top_p: (0, 1]; the smallest set of tokens with this much probability. 1: off.
        top_k: >= 0; only the most probable k tokens. 0: off.
        min_p: [0, 1]; only tokens at least this probable relative to the first. 0: off.
        repetition_penalty: [0.01, 100]; makes every token of the prompt and the text so far
            less probable when above 1. 1: off.

    Raises:
        QsfArgumentError: a value is outside its range.

    Example::

        SamplingParams(temperature=0.0)    # greedy
    """

    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 40
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, option in _OPTIONS.items():
            value = getattr(self, name)
            if value is None:  # GenerationOptions: "as the file recommends"
                raise QsfArgumentError(f"{name} must be {option.kind.rule}", argument=name)
            option.check(value)


def sampling_fields(options: GenerationOptions) -> dict[str, float | None]:
    """Return the sampling parameters among ``options``; None: not given."""
    return {name: getattr(options, name) for name in _NAMES}


def resolve_sampling(
    generation: Mapping[str, Any] | None = None, **chosen: float | None
) -> SamplingParams:
    """Return each parameter: the requested value, else the file's recommendation, else the default.

    Args:
        generation: the ``generation`` object of the file's CHAT section (the checkpoint's
            ``generation_config.json``). ``do_sample: false`` recommends temperature 0.
        chosen: fields of ``SamplingParams``; None counts as absent.

    Raises:
        QsfArgumentError: a requested value is outside its range.
        QsfFormatError: a recommended value that is not overridden is outside its range.
    """
    chosen = {name: value for name, value in chosen.items() if value is not None}
    unknown = sorted(set(chosen) - set(_NAMES))
    if unknown:
        raise QsfArgumentError(
            f"no such sampling parameter: {', '.join(unknown)}", argument=unknown[0]
        )
    SamplingParams(**chosen)  # type: ignore[arg-type]  # names the argument at fault
    recommended = {
        name: generation[name]
        for name in _NAMES
        if generation is not None and generation.get(name) is not None
    }
    if generation is not None and generation.get("do_sample") is False:
        recommended["temperature"] = 0.0
    try:
        return SamplingParams(**{**recommended, **chosen})
    except QsfArgumentError as error:
        raise QsfFormatError(
            f"the file's generation defaults: {error}", argument=error.argument
        ) from error


def end_ids(eos_id: int | None, generation: Mapping[str, Any] | None = None) -> frozenset[int]:
    """Return the tokens that end a text: the file's EOS and those of its generation defaults.

    Raises:
        QsfFormatError: the generation defaults contain a value that is not a token id.
    """
    named = (generation or {}).get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise QsfFormatError(f"the file's generation defaults: eos_token_id is {shown(named)}")
    return frozenset(ids if eos_id is None else [*ids, eos_id])


def end_texts(generation: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """Return the texts that end an answer: ``stop_strings`` of the file's generation defaults.

    Raises:
        QsfFormatError: they are not texts, or empty.
    """
    named = (generation or {}).get("stop_strings") or []
    texts = named if isinstance(named, list) else [named]
    if not all(isinstance(text, str) and text for text in texts):
        raise QsfFormatError(f"the file's generation defaults: stop_strings is {shown(named)}")
    return tuple(texts)


class StopMatcher:
    """Passes text through until a stop string, or a text that ends the answer, is complete.

    Text that may be the beginning of a stop string is held back, so no part of one is ever
    emitted, however the text is cut into pieces. If two stop strings overlap, the first complete
    one counts; if both end together, the longer one.

    Example::

        matcher = StopMatcher(["END"])
        matcher.push("the E")    # "the "
        matcher.push("ND of")    # "", and matcher.is_stopped
    """

    def __init__(self, stops: Iterable[str], ends: Sequence[str] = ()) -> None:
        """Raise QsfArgumentError if a stop string is empty. ``ends``: the file's own."""
        asked = tuple(stops)
        for stop in asked:
            if not isinstance(stop, str) or not stop:
                raise QsfArgumentError(
                    f"a stop string must be a text that is not empty: {stop!r}", argument="stop"
                )
        self._asked = frozenset(asked)
        self._stops = (*asked, *ends)
        self._held = ""
        self.is_stopped = False
        self.stopped_by: str | None = None  # unless a text of the file's own ended it

    def push(self, piece: str) -> str:
        """Return the text that can be shown now. After a match: ""."""
        if self.is_stopped:
            return ""
        text = self._held + piece
        hits = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if hits:
            _, start, found = min(hits)
            self.is_stopped, self._held = True, ""
            self.stopped_by = found if found in self._asked else None
            return text[:start]
        n_held = max((n_overlap(text, stop) for stop in self._stops), default=0)
        n_shown = len(text) - n_held
        self._held = text[n_shown:]
        return text[:n_shown]

    def flush(self) -> str:
        """Return the held-back text: the text ended without a stop string."""
        held, self._held = self._held, ""
        return held


def n_overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a prefix of ``stop``."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
