"""A request: its checked fields, and the jobs made of them."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from qsf.errors import QsfArgumentError, QsfError, shown
from qsf.options import GenerationOptions, Kind, Number, Texts, Whole, described
from qsf.serve.http.fields import Fields
from qsf.serve.http.problems import Problem, invalid
from qsf.serve.scheduling.job import Choosing, Event, Job, Reading
from qsf.serve.tools.request import ArgumentsConstraint
from qsf.text.channels import answer_decoder
from qsf.text.infill import infill_end_ids, infill_tokens
from qsf.text.sampling import StopMatcher
from qsf.text.thinking import ThoughtsLimit

if TYPE_CHECKING:
    from qsf.serve.serving import Serving
    from qsf.serve.tools.request import Tools
    from qsf.text.constraints import Constraint

MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_BIASES = 1024
MAX_MESSAGES = 256
MAX_TOP = 20
SAMPLING = {o.name: o.kind for o in described(GenerationOptions)}
_NAMES = ("temperature", "min_p", "repetition_penalty")
PENALTY = Number(-2, 2)
BIAS = Number(-100, 100)
MOST_CHOICES = Whole(1, 128)
NO_LIMIT = -1  # number of tokens: no limit; top_k: off
TOP_K = Whole(NO_LIMIT)


class MostTokens(Whole):
    """The most tokens of an answer: at least so many, or -1 for no limit."""

    def __init__(self, least: int = 1) -> None:
        super().__init__(least)
        self.rule += f", or {NO_LIMIT} for all that fit"

    def is_valid(self, value: Any) -> bool:
        """Return whether the value is in range or NO_LIMIT."""
        return super().is_valid(value) or value == NO_LIMIT


MOST_TOKENS = MostTokens()
ANY_TOKENS = MostTokens(0)  # 0: the prompt is evaluated alone
# Samplers of other programs: the value that turns each off, and what to use instead.
_OTHER_SAMPLERS = {
    "typical_p": (1, "min_p"),
    "tfs_z": (1, "min_p"),
    "mirostat": (0, "temperature with min_p"),
    "xtc_probability": (0, "a higher temperature with min_p"),
    "dry_multiplier": (0, "frequency_penalty or repetition_penalty"),
}
_OF_OTHER_SAMPLERS = (
    *("mirostat_tau", "mirostat_eta", "xtc_threshold", "dry_base", "dry_allowed_length"),
    *("dry_penalty_last_n", "dry_sequence_breakers"),
)
SEED = Whole(-(2**63), 2**64 - 1)
# Share of the answer's tokens for thoughts by effort, as OpenRouter defines it.
_SHARES = {"none": 0.0, "minimal": 0.1, "low": 0.2, "medium": 0.5, "high": 0.8, "xhigh": 0.95}


@dataclass(slots=True, kw_only=True)
class CompletionRequest:
    """A checked request: its prompts as tokens, and how to continue them.

    Each prompt gets ``n`` choices.
    """

    prompts: list[list[int]]
    choosing: Choosing
    max_tokens: int
    stops: Sequence[str]
    max_thoughts: int | None = None  # tokens after which thoughts are ended
    is_cut: bool = False  # max_tokens was reduced to what fits in the context
    n: int = 1
    begins_text: bool = False
    ignores_end: bool = False
    is_stream: bool = False
    is_lines: bool = False  # the stream has lines of JSON instead of events
    has_usage: bool = False
    has_progress: bool = False
    has_timings: bool = False
    has_pings: bool = True
    salt: str = ""
    wants_scores: bool = False
    constraint: Constraint | None = None
    tools: Tools | None = None
    reading: Reading | None = None
    is_infill: bool = False
    keep_seconds: float | None = None  # that the model stays in memory; None: not said
    ignored: Sequence[str] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def unenforced(self) -> str:
        """Keywords of schemas that are not enforced while the answer is written; "": none."""
        strict = () if self.tools is None else self.tools.strict.values()
        forms = [form for form in (self.constraint, *strict) if form is not None]
        return ", ".join(sorted({name for form in forms for name in form.unenforced}))


def read_choosing(fields: Fields, serving: Serving, *, n_top: int, has_logprob: bool) -> Choosing:
    """Return how tokens are chosen. Raises Problem for samplers that QSF lacks."""
    for name, (off, use) in _OTHER_SAMPLERS.items():
        if fields.raw(name) not in (None, off):
            text = f"{name} is not supported: use {use}, or {off}, which is off"
            raise invalid(fields.name(name), text, "unsupported_parameter")
    fields.ignore(*_OF_OTHER_SAMPLERS)
    params: dict[str, Any] = {name: fields.take(name, SAMPLING[name]) for name in _NAMES}
    top_k = fields.take("top_k", TOP_K)
    params["top_k"] = 0 if top_k == NO_LIMIT else top_k
    top_p = fields.take("top_p", Number(0, 1))
    if top_p == 0:  # OpenAI's smallest value: only the most probable token
        params["top_k"] = 1
    else:
        params["top_p"] = top_p
    seed = fields.take("seed", SEED)
    if seed is None:
        seed = int.from_bytes(os.urandom(4), "little")
    return Choosing(
        params=serving.model.sampling_params(**params),
        seed=seed % 2**64,
        presence_penalty=fields.take("presence_penalty", PENALTY, 0.0),
        frequency_penalty=fields.take("frequency_penalty", PENALTY, 0.0),
        logit_bias=_read_biases(fields, serving),
        n_top=n_top,
        has_logprob=has_logprob,
    )


def _read_biases(fields: Fields, serving: Serving) -> Mapping[int, float]:
    n_vocab = serving.model.info.n_vocab
    name = fields.name("logit_bias")
    biases = {}
    for key, value in _bias_entries(fields, serving):
        if not key.isascii() or not key.isdigit() or len(key) > 9 or int(key) >= n_vocab:
            raise invalid(
                name, f"{name} must be for token ids below {n_vocab}, and one is {shown(key)}"
            )
        if not BIAS.is_valid(value):
            raise invalid(
                name, f"{name} must be from -100 to 100, and for token {key} it is {shown(value)}"
            )
        biases[int(key)] = float(value)
    return biases


def _bias_entries(fields: Fields, serving: Serving) -> Iterable[tuple[str, Any]]:
    """Return biases by token id: OpenAI's object, or llama-server's pairs of an id or a text, all
    of whose tokens are meant, and a number or false, which means never.
    """
    if not isinstance(fields.raw("logit_bias"), list):
        return fields.mapping("logit_bias", MAX_BIASES).items()
    entries: list[tuple[str, Any]] = []
    for pair in fields.list("logit_bias", MAX_BIASES):
        key, bias = pair if isinstance(pair, list) and len(pair) == 2 else (None, None)
        tokens: list[Any] = [key]
        if isinstance(key, str):
            tokens = encode_text(key, serving, fields.name("logit_bias"), is_foreign=True)
        entries += [(str(token), BIAS.least if bias is False else bias) for token in tokens]
    return entries


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The thinking options of a request.

    Attributes:
        arguments: of the chat template.
        budget: the most tokens of thoughts; None: not given.
        share: the most tokens of thoughts as a share of the answer's tokens.
    """

    arguments: dict[str, Any]
    budget: int | None
    share: float

    def most(self, max_tokens: int) -> int | None:
        """Return the most tokens of thoughts in an answer of ``max_tokens``; None: any."""
        if self.budget is not None:
            return None if self.budget == NO_LIMIT else self.budget
        return None if self.share == 1 else int(self.share * max_tokens)


def read_thoughts(fields: Fields, serving: Serving, effort_name: str, *budgets: str) -> Thoughts:
    """Return how much thinking is requested: an effort, or a budget under one of several names.

    If the chat template takes no effort, thoughts get a share of the answer's tokens instead.
    """
    effort = fields.text(effort_name)
    budget = read_same(fields, Whole(NO_LIMIT), *budgets)
    if effort is None:
        return Thoughts({}, budget, 1)
    knows_it = "reasoning_effort" in serving.model.chat_template.source
    arguments: dict[str, Any] = {"reasoning_effort": effort}
    if effort == "none":
        arguments["enable_thinking"] = False
    return Thoughts(arguments, budget, 1 if knows_it else _SHARES.get(effort, 1))


def read_same(fields: Fields, kind: Kind, *names: str) -> Any:
    """Return the value of a field that has several names."""
    values = {name: fields.take(name, kind) for name in names}
    given = {name: value for name, value in values.items() if value is not None}
    if len(set(given.values())) > 1:
        text = " and ".join(f"{name} is {value}" for name, value in given.items())
        raise invalid(names[0], f"{text}: they mean the same")
    return next(iter(given.values()), None)


def read_infill(
    serving: Serving, prefix: str, suffix: str, files: Sequence[tuple[str, str]], name: str
) -> list[int]:
    """Return the prompt for infilling between two texts. Raises Problem."""
    ctx_tokens = serving.ctx_tokens
    try:
        return infill_tokens(serving.model.tokenizer, prefix, suffix, files, ctx_tokens)
    except QsfArgumentError as error:
        raise too_long(error, name) from None


def read_stops(fields: Fields, name: str = "stop") -> list[str]:
    """Return the stop strings."""
    value = fields.take(name, Texts(), [])
    stops = [value] if isinstance(value, str) else list(value)
    if len(stops) > MAX_STOPS:
        name = fields.name(name)
        raise invalid(name, f"{name} has {len(stops)} texts, and {MAX_STOPS} is the limit")
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_CHARS:  # it is compared with the end of the text at each token
        name = fields.name(name)
        text = f"{name} has a text of {longest} characters, and {MAX_STOP_CHARS} is the limit"
        raise invalid(name, text)
    return stops


def read_choices(fields: Fields, serving: Serving) -> int:
    """Return the number of requested answers."""
    n = fields.take("n", MOST_CHOICES, 1)
    if n > serving.most_choices:
        raise invalid("n", f"n is {n}, and this server makes {serving.most_choices} at a time")
    return int(n)


def read_messages(fields: Fields) -> list[Any]:
    """Return ``messages``: at least one."""
    messages = fields.list("messages", MAX_MESSAGES)
    if not messages:
        raise invalid("messages", "messages must be a list of at least one message")
    return messages


def ignored_fields(fields: Sequence[Fields], serving: Serving) -> Sequence[str]:
    """Return the names of fields without effect. A strict server raises Problem for these."""
    names = [name for part in fields for name in part.rest()]
    if names and serving.is_strict:
        raise invalid(
            names[0],
            f"{names[0]} is not known here, and the server is strict",
            "unsupported_parameter",
        )
    return names


def fit(
    prompts: list[list[int]], wanted: int | None, serving: Serving, name: str, *, least: int = 1
) -> dict[str, Any]:
    """Return how many tokens an answer may have, as fields of ``CompletionRequest``.

    ``wanted``: None or NO_LIMIT mean all that fit. A larger number is reduced to what fits, unless
    the server is strict. Raises Problem if not even ``least`` fit.
    """
    ctx_tokens = serving.ctx_tokens
    n_prompt = max(map(len, prompts))
    if min(map(len, prompts)) == 0:
        raise invalid(name, f"{name} is empty: there is no token to begin with")
    n_free = ctx_tokens - n_prompt
    if wanted == NO_LIMIT:
        wanted = None
    least = least if wanted is None else min(least, wanted)
    is_cut = n_free < (wanted or least)
    if n_free < least or (is_cut and serving.is_strict):
        answer = f" and max_tokens is {wanted}" if wanted else ""
        raise invalid(
            name,
            f"{name} has {n_prompt} tokens{answer}, but the context holds {ctx_tokens}",
            "context_length_exceeded",
        )
    return {"max_tokens": min(n_free if wanted is None else wanted, n_free), "is_cut": is_cut}


def encode_text(
    text: str, serving: Serving, name: str, *, is_foreign: bool = False, is_cut: bool = False
) -> list[int]:
    """Return the tokens of a text to be continued. Raises Problem.

    Args:
        is_foreign: the text is a part of a prompt, in which names of special tokens are ordinary
            text.
        is_cut: of a text that is too long the beginning is enough, still longer than the context.
    """
    tokenizer, most = serving.model.tokenizer, serving.ctx_tokens
    options = {"add_prefix": not is_foreign, "parse_special": not is_foreign}
    try:
        if is_cut:
            return tokenizer.encode_beginning(text, most, **options)
        return tokenizer.encode(text, max_tokens=most, **options)
    except QsfArgumentError as error:
        raise too_long(error, name) from None


def read_prompts(
    value: Any, serving: Serving, name: str, most: int, *, is_cut: bool = False
) -> list[list[int]]:
    """Return the prompts: a text, token ids, or up to ``most`` of either; as ``encode_text``."""
    several = value if isinstance(value, list) and value and not _is_ids(value) else [value]
    if len(several) > most:
        raise invalid(name, f"{name} has {len(several)} entries, and {most} is the limit")
    return [_read_prompt(prompt, serving, name, is_cut=is_cut) for prompt in several]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(token, int) and not isinstance(token, bool) for token in value
    )


def _read_prompt(value: Any, serving: Serving, name: str, *, is_cut: bool) -> list[int]:
    if isinstance(value, str):
        return encode_text(value, serving, name, is_cut=is_cut)
    if not _is_ids(value):
        raise invalid(
            name, f"{name} must be a text, token ids, or a list of either, not {shown(value)}"
        )
    n_vocab = serving.model.info.n_vocab
    wrong = next((token for token in value if not 0 <= token < n_vocab), None)
    if wrong is not None:
        raise invalid(name, f"{name} has the token id {wrong}, and ids are below {n_vocab}")
    return list(value)


def too_long(error: QsfError, name: str) -> Problem:
    """Return the problem of a text that cannot be encoded, usually one that is too long."""
    is_long = error.argument == "prompt"
    text = str(error) if name in str(error) else f"{name}: {error}"  # some APIs send the text alone
    return invalid(name, text, "context_length_exceeded" if is_long else "invalid_value")


def make_jobs(
    request: CompletionRequest,
    serving: Serving,
    sink: Callable[[int, Event], None],
    *,
    owner: str,
    name: str,
    max_seconds: float | None,
) -> list[Job]:
    """Return the jobs: the choices of the first prompt, then those of the second, and so on."""
    model = serving.model
    end_ids = frozenset() if request.ignores_end else model.end_ids
    if request.is_infill and not request.ignores_end:
        end_ids |= infill_end_ids(model.tokenizer)
    jobs = []
    for index in range(len(request.prompts) * request.n):
        how = request.choosing
        seed = (how.seed + index % request.n) % 2**64
        prompt = request.prompts[index // request.n]
        decoder = answer_decoder(
            model.tokenizer,
            begins_text=request.begins_text,
            functions=() if request.tools is None else request.tools.names,
            # A constraint starts with the first token, so the answer has no reasoning.
            prompt=prompt if request.constraint is None else (),
        )
        constraint: Any = None if request.constraint is None else request.constraint.copy()
        reader = None
        if request.tools is not None:
            decoder = request.tools.decoder(decoder)
            reader = request.tools.reader()
            if request.tools.strict and constraint is None:
                constraint = ArgumentsConstraint(request.tools.strict, reader)
        if request.max_thoughts is not None and request.constraint is None:
            n_vocab = model.info.n_vocab
            constraint = ThoughtsLimit(decoder, request.max_thoughts, n_vocab, constraint)
        jobs.append(
            Job(
                prompt=array("I", prompt),
                choosing=replace(how, seed=seed),
                max_tokens=request.max_tokens,
                decoder=decoder,
                matcher=StopMatcher(request.stops),
                end_ids=end_ids,
                sink=lambda _job, event, index=index: sink(index, event),  # type: ignore[misc]
                owner=owner,
                salt=f"{owner} {request.salt}".strip(),
                name=name,
                max_seconds=max_seconds,
                wants_progress=request.has_progress,
                constraint=constraint,
                reader=reader,
                wants_scores=request.wants_scores,
                reading=request.reading,
            )
        )
    return jobs
