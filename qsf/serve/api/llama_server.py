"""llama-server's own requests: /completion, and /infill between a prefix and a suffix."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from qsf.passes import Chosen
from qsf.serve.api import openai
from qsf.serve.api.answering import Choice, Encoder, Route, Sent, timings
from qsf.serve.api.ask import (
    AnyTokens,
    Ask,
    Repetition,
    Top,
    encode_text,
    one_of,
    read_infill,
    texts_or_ids,
)
from qsf.serve.api.openai import scored_tokens
from qsf.serve.http.body import Part
from qsf.serve.scheduling.job import Event
from qsf.serve.serving import Serving
from qsf.serve.tools.request import JsonSchema, ResponseFormat

_MAX_FILES = 64
_MIXED: dict[str, Any] = {
    "type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 0}]}
}  # fmt: skip
_STOPS = {"end": "eos", "stop": "word", "length": "limit"}


class Completion(openai.Completion, kw_only=True):
    # Fields for llama-server's own settings, without effect on texts here
    IGNORED: ClassVar[tuple[str, ...]] = (
        *openai.Completion.IGNORED,
        *("cache_prompt", "id_slot", "n_keep", "samplers", "return_tokens"),
        *("t_max_predict_ms", "repeat_last_n", "response_fields", "n_indent"),
        *("min_keep", "t_max_prompt_ms"),
    )
    REFUSED: ClassVar[Mapping[str, str]] = {
        name: why for name, why in openai.Completion.REFUSED.items() if name != "json_schema"
    } | {"post_sampling_probs": "n_probs tells log-probabilities before sampling"}

    prompt: Annotated[Any, texts_or_ids(openai.MAX_PROMPTS, _MIXED)]
    n_predict: AnyTokens | None = None
    repeat_penalty: Repetition | None = None
    n_probs: Top | None = None
    json_schema: dict[str, Any] | None = None


class File(Part, kw_only=True):
    """Text that comes before an infill."""

    filename: str
    text: str


class Infill(Completion):
    """The body of a request to /infill; the prompt is the beginning of the middle."""

    prompt: str | None = None
    input_prefix: str | None = None
    input_suffix: str | None = None
    input_extra: Annotated[list[File], Meta(max_length=_MAX_FILES)] | None = None


def read_completion(fields: Completion, serving: Serving) -> Ask:
    prompt = fields.prompt
    if isinstance(prompt, list) and {*map(type, prompt)} == {int, str}:  # one prompt
        ids: list[int] = []
        for i, part in enumerate(prompt):
            is_text = isinstance(part, str)
            ids += encode_text(part, serving, "prompt", is_first=i == 0) if is_text else [part]
        prompt = ids
    return _read(fields, serving, prompt)


def read_infill_request(fields: Infill, serving: Serving) -> Ask:
    files = [(file.filename, file.text) for file in fields.input_extra or ()]
    prefix, suffix = fields.input_prefix or "", fields.input_suffix or ""
    tokens = read_infill(serving, prefix, suffix, files, "input_prefix")
    if fields.prompt:
        tokens += serving.model.tokenizer.encode(
            fields.prompt, add_prefix=False, parse_special=False
        )
    ask = _read(fields, serving, tokens)
    ask.is_infill = True
    return ask


def _read(fields: Completion, serving: Serving, prompt: Any) -> Ask:
    most = one_of(n_predict=fields.n_predict, max_tokens=fields.max_tokens)
    if fields.n_probs:
        fields.logprobs = fields.n_probs
    if fields.json_schema:
        schema = JsonSchema(schema=fields.json_schema)
        fields.response_format = ResponseFormat(type="json_schema", json_schema=schema)
    repetition = one_of(
        repeat_penalty=fields.repeat_penalty, repetition_penalty=fields.repetition_penalty
    )
    return openai.complete(fields, serving, prompt, -1 if most is None else most, repetition)


class CompletionEncoder(Encoder):
    prefix = "completion-"

    def more(self, choice: Choice, event: Event) -> list[Sent]:
        times = {"timings": timings([choice])} if self.ask.has_timings else {}
        piece = {"index": choice.index, "content": event.text, "tokens": [], "stop": False, **times}
        return [("", {**piece, **self._probabilities(event.tokens)})] if event.text else []

    def end(self, choice: Choice) -> list[Sent]:
        return [("", {**self._entry(choice), "content": ""})]

    def whole(self) -> Any:
        """Return the whole text; for several prompts a list."""
        entries = [self._entry(choice) for choice in self.choices]
        return entries[0] if len(entries) == 1 else entries

    def _probabilities(self, tokens: Sequence[Chosen]) -> dict[str, Any]:
        """Return the tokens with their log-probabilities, if ``n_probs`` asks for them."""
        if not self.ask.choosing.has_logprob:
            return {}
        tokenizer = self.serving.model.tokenizer
        return {"completion_probabilities": scored_tokens(tokens, tokenizer, has_ids=True)}

    def _entry(self, choice: Choice) -> dict[str, Any]:
        job = choice.job
        return {
            **self._probabilities(choice.tokens),
            "index": choice.index,
            "content": choice.text,
            "tokens": [],
            "id_slot": job.slot,
            "model": self.serving.name,
            "stop": True,
            "stop_type": _STOPS.get(choice.reason, "none"),
            "stopping_word": job.matcher.stopped_by or "",
            "tokens_predicted": job.n_generated,
            "tokens_evaluated": job.n_prompt,
            "tokens_cached": job.n_cached,
            "truncated": False,
            "has_new_line": "\n" in choice.text,
            "timings": timings([choice]),
        }


ROUTES = (
    Route("/completion", "continue a text", Completion, read_completion, CompletionEncoder),
    Route("/infill", "write between two texts", Infill, read_infill_request, CompletionEncoder),
)
