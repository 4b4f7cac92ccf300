"""llama-server's own requests: /completion, and /infill between a prefix and a suffix."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from qsf.errors import shown
from qsf.options import Whole
from qsf.passes import Chosen
from qsf.serve.api import openai
from qsf.serve.api.answering import Choice, Form, Sent
from qsf.serve.api.completion_request import MAX_TOP, CompletionRequest, read_infill
from qsf.serve.api.timings import timings
from qsf.serve.http.fields import Fields, as_body
from qsf.serve.http.problems import Problem, invalid
from qsf.serve.scheduling.job import Event
from qsf.serve.serving import Serving

MAX_FILES = 64
# llama-server's names of fields that completions share.
_NAMES = {
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "prompt": "prompt",
}
# Fields for llama-server's own settings, without effect on texts here.
_NO_EFFECT = (
    *("cache_prompt", "id_slot", "n_keep", "samplers", "return_tokens"),
    *("t_max_predict_ms", "repeat_last_n", "response_fields", "n_indent"),
    *("min_keep", "t_max_prompt_ms"),
)
_STOPS = {"end": "eos", "stop": "word", "length": "limit"}


def read_completion(body: dict[str, Any], serving: Serving) -> CompletionRequest:
    """Return the checked request to /completion. Raises Problem."""
    return _read(Fields(body), body, serving, None)


def read_infill_request(body: dict[str, Any], serving: Serving) -> CompletionRequest:
    """Return the checked request to /infill. Raises Problem."""
    fields = Fields(body)
    prefix = fields.text("input_prefix", "") or ""
    suffix = fields.text("input_suffix", "") or ""
    files = [_file(value) for value in fields.list("input_extra", MAX_FILES)]
    begun = fields.text("prompt", "") or ""  # the beginning of the middle
    tokens = read_infill(serving, prefix, suffix, files, "input_prefix")
    if begun:
        tokens += serving.model.tokenizer.encode(begun, add_prefix=False, parse_special=False)
    request = _read(fields, body, serving, tokens)
    request.is_infill = True
    return request


def _file(value: Any) -> tuple[str, str]:
    fields = value if isinstance(value, dict) else {}
    name, text = fields.get("filename"), fields.get("text")
    if not isinstance(name, str) or not isinstance(text, str):
        why = f"input_extra must have filename and text, not {shown(value)}"
        raise invalid("input_extra", why)
    return name, text


def _read(
    fields: Fields, body: dict[str, Any], serving: Serving, tokens: list[int] | None
) -> CompletionRequest:
    own = ("n_probs", "input_prefix", "input_suffix", "input_extra", *_NO_EFFECT)
    new = {_NAMES.get(name, name): value for name, value in body.items() if name not in own}
    fields.ignore(*own)
    if n_top := fields.take("n_probs", Whole(0, MAX_TOP)):
        new["logprobs"] = n_top
    fields.refuse({"post_sampling_probs": "n_probs tells log-probabilities before sampling"})
    new.setdefault("max_tokens", -1)
    schema = new.pop("json_schema", None)
    if schema:
        new["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    if tokens is not None:
        new["prompt"] = tokens
    return openai.read_completion(as_body(new, body, _NAMES), serving)


class CompletionForm(Form):
    """Answers of /completion and /infill."""

    def __init__(self, request: CompletionRequest, serving: Serving) -> None:
        self.name = f"completion-{time.time_ns():x}"
        self._request, self._serving = request, serving

    def more(self, index: int, choice: Choice, event: Event) -> list[Sent]:
        """Return a piece of the text."""
        times = {"timings": timings([choice])} if self._request.has_timings else {}
        piece = {"index": index, "content": event.text, "tokens": [], "stop": False, **times}
        return [("", {**piece, **self._probabilities(event.tokens)})] if event.text else []

    def end(self, index: int, choice: Choice) -> list[Sent]:
        """Return the stop reason."""
        return [("", {**self._entry(index, choice), "content": ""})]

    def fail(self, problem: Problem) -> list[Sent]:
        """Return the error."""
        return [("", problem.body())]

    def whole(self, choices: Sequence[Choice]) -> Any:
        """Return the whole text; for several prompts a list."""
        entries = [self._entry(i, choice) for i, choice in enumerate(choices)]
        return entries[0] if len(entries) == 1 else entries

    def _probabilities(self, tokens: Sequence[Chosen]) -> dict[str, Any]:
        """Return the tokens with their log-probabilities, if ``n_probs`` asks for them."""
        tokenizer = self._serving.model.tokenizer

        def entry(token: int, logprob: float | None) -> dict[str, Any]:
            return {"id": token, **openai.token_entry(token, logprob or 0.0, tokenizer)}

        entries = [
            {**entry(one.token, one.logprob), "top_logprobs": [entry(*other) for other in one.top]}
            for one in tokens
        ]
        has_logprob = self._request.choosing.has_logprob
        return {"completion_probabilities": entries} if has_logprob else {}

    def _entry(self, index: int, choice: Choice) -> dict[str, Any]:
        job = choice.job
        return {
            **self._probabilities(choice.tokens),
            "index": index,
            "content": choice.text,
            "tokens": [],
            "id_slot": job.slot,
            "model": self._serving.name,
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
