"""``Ask``: a checked request of any API, and the jobs made of it."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from msgspec import Meta

from qsf.errors import QsfArgumentError, QsfError, shown
from qsf.options import GenerationOptions, Number, Texts, Whole, described
from qsf.serve.http.body import Part, within
from qsf.serve.http.problems import Problem, invalid
from qsf.serve.scheduling.job import Choosing, Event, Job, Reading
from qsf.serve.tools.request import ArgumentsConstraint, Offered, read_chat_tools
from qsf.text.channels import answer_decoder
from qsf.text.infill import infill_end_ids, infill_tokens
from qsf.text.sampling import StopMatcher
from qsf.text.thinking import ThoughtsLimit

if TYPE_CHECKING:
    from qsf.serve.serving import Serving
    from qsf.serve.tools.request import Tools
    from qsf.text.constraints import Constraint
    from qsf.text.embedding import Reranker

MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_BIASES = 1024
MAX_MESSAGES = 256
MAX_TOP = 20
NO_LIMIT = -1  # number of tokens: no limit; top_k: off
_SEED = Whole(-(2**63), 2**64 - 1)  # msgspec has no ranges beyond 64 bits with a sign
_BIAS = Number(-100, 100)
# Share of the answer's tokens for thoughts by effort, as OpenRouter defines it.
_SHARES = {"none": 0.0, "minimal": 0.1, "low": 0.2, "medium": 0.5, "high": 0.8, "xhigh": 0.95}
_RANGES: Any = {
    o.name: within(o.kind) for o in described(GenerationOptions) if isinstance(o.kind, Number)
}

# ---- types of fields ----

Penalty = Annotated[float, within(Number(-2, 2))]
Top = Annotated[int, within(Whole(0, MAX_TOP))]
_MOST = f"a whole number of at least 1, or {NO_LIMIT} for all that fit"
_ANY = f"a whole number of at least 0, or {NO_LIMIT} for all that fit"
MostTokens = Annotated[int, within(Whole(NO_LIMIT), _MOST, **{"not": {"const": 0}})]
AnyTokens = Annotated[int, within(Whole(NO_LIMIT), _ANY)]
_Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[
    _Stop | Annotated[list[_Stop], Meta(max_length=MAX_STOPS)], Meta(description=Texts.rule)
]
Repetition = Annotated[float, _RANGES["repetition_penalty"]]
Objects = Annotated[
    list[Any],
    Meta(
        min_length=1,
        max_length=MAX_MESSAGES,
        description="a list of at least one message",
        extra_json_schema={"items": {"type": "object"}},
    ),
]


def texts_or_ids(most: int, *others: dict[str, Any]) -> Meta:
    """Return the schema of a field with a text, token ids, or up to ``most`` of either."""
    text, ids = {"type": "string"}, {"type": "array", "items": {"type": "integer", "minimum": 0}}
    several = ({"type": "array", "items": items, "maxItems": most} for items in (text, ids))
    return Meta(extra_json_schema={"anyOf": [text, ids, *several, *others]})


class Sampling(Part):
    IGNORED: ClassVar[tuple[str, ...]] = (
        *("mirostat_tau", "mirostat_eta", "xtc_threshold", "dry_base", "dry_allowed_length"),
        *("dry_penalty_last_n", "dry_sequence_breakers"),
    )
    # Samplers of other programs: what to use instead, and the value that turns each off
    REFUSED: ClassVar[Mapping[str, str]] = {
        "typical_p": "use min_p, or 1, which is off",
        "tfs_z": "use min_p, or 1, which is off",
        "mirostat": "use temperature with min_p, or 0, which is off",
        "xtc_probability": "use a higher temperature with min_p, or 0, which is off",
        "dry_multiplier": "use frequency_penalty or repetition_penalty, or 0, which is off",
    }
    OFF: ClassVar[Mapping[str, Any]] = {"typical_p": 1, "tfs_z": 1}

    temperature: Annotated[float, _RANGES["temperature"]] | None = None
    top_k: Annotated[int, within(Whole(NO_LIMIT))] | None = None
    top_p: Annotated[float, within(Number(0, 1))] | None = None
    min_p: Annotated[float, _RANGES["min_p"]] | None = None
    seed: Annotated[int, Meta(description=_SEED.rule)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[
            Annotated[dict[str, Any], Meta(max_length=MAX_BIASES)]
            | Annotated[list[Any], Meta(max_length=MAX_BIASES)],
            Meta(
                extra_json_schema={
                    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                    "items": {"type": "array", "minItems": 2, "maxItems": 2},
                }
            ),
        ]
        | None
    ) = None


class Offering(Sampling):
    tools: Offered | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    grammar: str | None = None
    repetition_penalty: Repetition | None = None
    stream: bool | None = None

    def read_tools(self, serving: Serving, *, is_nested: bool = True) -> Tools | None:
        """Return the tools; ``is_nested``: a tool has its function in an object. Raises Problem."""
        choice, is_parallel = self.tool_choice, self.parallel_tool_calls
        return read_chat_tools(self.tools, choice, is_parallel, serving, is_nested=is_nested)


@dataclass(slots=True)
class Ranking:
    """What is told about documents that a request ranks."""

    documents: Sequence[str]
    has_documents: bool
    top_n: int
    reranker: Reranker


@dataclass(slots=True, kw_only=True)
class Ask:
    """A request: its prompts as tokens, and how to continue them.

    Each prompt gets ``n`` choices.
    """

    prompts: list[list[int]]
    choosing: Choosing
    max_tokens: int
    stops: Sequence[str] = ()
    max_thoughts: int | None = None  # tokens after which thoughts are ended
    is_cut: bool = False  # max_tokens was reduced to what fits in the context
    n: int = 1
    begins_text: bool = False
    ignores_end: bool = False
    is_stream: bool = False
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
    has_echo: bool = False  # the prompt is a part of the answer
    shows_thoughts: bool = True
    instructions: str | None = None
    dimensions: int = 0  # of a vector
    is_base64: bool = False
    cuts: Sequence[int] = ()  # texts whose end was left out
    ranking: Ranking | None = None
    adapters: tuple[float, ...] | None = None  # scales; None: as the name of the model says

    @property
    def unenforced(self) -> str:
        """Keywords of schemas that are not enforced while the answer is written; "": none."""
        strict = () if self.tools is None else self.tools.strict.values()
        forms = [form for form in (self.constraint, *strict) if form is not None]
        return ", ".join(sorted({name for form in forms for name in form.unenforced}))


def read_choosing(
    fields: Sampling,
    serving: Serving,
    repetition: float | None,
    *,
    n_top: int = 0,
    has_logprob: bool = False,
    place: str = "",
) -> Choosing:
    """Return how tokens are chosen. ``place`` is what errors put before names. Raises Problem."""
    params: dict[str, Any] = {"temperature": fields.temperature, "min_p": fields.min_p}
    params |= {"repetition_penalty": repetition, "top_p": fields.top_p}
    params["top_k"] = 0 if fields.top_k == NO_LIMIT else fields.top_k
    if fields.top_p == 0:  # OpenAI's smallest value: only the most probable token
        params |= {"top_k": 1, "top_p": None}
    seed = int.from_bytes(os.urandom(4), "little") if fields.seed is None else fields.seed
    if not _SEED.is_valid(seed):
        raise invalid(f"{place}seed", f"{place}seed must be {_SEED.rule}, not {shown(seed)}")
    return Choosing(
        params=serving.model.sampling_params(**params),
        seed=seed % 2**64,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=_read_biases(fields.logit_bias or {}, f"{place}logit_bias", serving),
        n_top=n_top,
        has_logprob=has_logprob,
    )


def _read_biases(value: Any, name: str, serving: Serving) -> Mapping[int, float]:
    n_vocab = serving.model.info.n_vocab
    biases = {}
    for key, bias in _bias_entries(value, name, serving):
        if not key.isascii() or not key.isdigit() or len(key) > 9 or int(key) >= n_vocab:
            raise invalid(
                name, f"{name} must be for token ids below {n_vocab}, and one is {shown(key)}"
            )
        if not _BIAS.is_valid(bias):
            raise invalid(
                name, f"{name} must be from -100 to 100, and for token {key} it is {shown(bias)}"
            )
        biases[int(key)] = float(bias)
    return biases


def _bias_entries(value: Any, name: str, serving: Serving) -> Iterable[tuple[str, Any]]:
    """Return biases by token id: OpenAI's object, or llama-server's pairs of an id or a text, all
    of whose tokens are meant, and a number or false, which means never.
    """
    if isinstance(value, dict):
        return value.items()
    entries: list[tuple[str, Any]] = []
    for pair in value:
        key, bias = pair if isinstance(pair, list) and len(pair) == 2 else (None, None)
        tokens: list[Any] = [key]
        if isinstance(key, str):
            tokens = encode_text(key, serving, name, is_foreign=True)
        entries += [(str(token), _BIAS.least if bias is False else bias) for token in tokens]
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


def read_thoughts(
    effort: str | None, serving: Serving, budget: int | None, given: Mapping[str, Any] | None = None
) -> Thoughts:
    """Return how much thinking is requested: an effort, or a budget.

    ``given`` are arguments of the chat template. If it takes no effort, thoughts get a share of the
    answer's tokens instead.
    """
    arguments: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    arguments |= {"enable_thinking": False} if effort == "none" else {}
    knows_it = "reasoning_effort" in serving.model.chat_template.source
    share = 1 if effort is None or knows_it else _SHARES.get(effort, 1)
    return Thoughts({**arguments, **(given or {})}, budget, share)


def one_of(**values: Any) -> Any:
    """Return the value of a field that has several names. Raises Problem if they differ."""
    given = {name: value for name, value in values.items() if value is not None}
    if len(set(given.values())) > 1:
        text = " and ".join(f"{name} is {value}" for name, value in given.items())
        raise invalid(next(iter(values)), f"{text}: they mean the same")
    return next(iter(given.values()), None)


def most_tokens(value: int | None, name: str) -> int | None:
    """Return the most tokens of an answer, which may not be 0. Raises Problem."""
    if value == 0:
        raise invalid(name, f"{name} must be {_MOST}, not 0")
    return value


def read_infill(
    serving: Serving, prefix: str, suffix: str, files: Sequence[tuple[str, str]], name: str
) -> list[int]:
    ctx_tokens = serving.ctx_tokens
    try:
        return infill_tokens(serving.model.tokenizer, prefix, suffix, files, ctx_tokens)
    except QsfArgumentError as error:
        raise too_long(error, name) from None


def as_list(stops: str | list[str] | None) -> list[str]:
    """Return the texts of a field that has one or several."""
    return [stops] if isinstance(stops, str) else stops or []


def fit(
    prompts: list[list[int]], wanted: int | None, serving: Serving, name: str, *, least: int = 1
) -> dict[str, Any]:
    """Return how many tokens an answer may have, as fields of ``Ask``.

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
    text: str,
    serving: Serving,
    name: str,
    *,
    is_first: bool = True,
    is_foreign: bool = False,
    is_cut: bool = False,
) -> list[int]:
    """Return the tokens of a text to be continued. Raises Problem.

    Args:
        is_first: the prompt begins with it.
        is_foreign: the text is a part of a prompt, in which names of special tokens are ordinary
            text.
        is_cut: of a text that is too long the beginning is enough, still longer than the context.
    """
    tokenizer, most = serving.model.tokenizer, serving.ctx_tokens
    options = {"add_prefix": is_first and not is_foreign, "parse_special": not is_foreign}
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
    ask: Ask,
    serving: Serving,
    sink: Callable[[Job, Event], None],
    *,
    owner: str,
    name: str,
    max_seconds: float | None,
) -> list[Job]:
    """Return the jobs: the choices of the first prompt, then those of the second, and so on."""
    model, tools = serving.model, ask.tools
    end_ids = frozenset() if ask.ignores_end else model.end_ids
    # In front, where no text of a client is
    adapted = "" if ask.adapters is None else f"adapters {ask.adapters} "
    salt = f"{adapted}{owner} {ask.salt}".strip()
    if ask.is_infill and not ask.ignores_end:
        end_ids |= infill_end_ids(model.tokenizer)
    jobs = []
    for index in range(len(ask.prompts) * ask.n):
        seed = (ask.choosing.seed + index % ask.n) % 2**64
        prompt = ask.prompts[index // ask.n]
        decoder = answer_decoder(
            model.tokenizer,
            begins_text=ask.begins_text,
            functions=() if tools is None else tools.names,
            # A constraint starts with the first token, so the answer has no reasoning.
            prompt=prompt if ask.constraint is None else (),
        )
        constraint: Any = None if ask.constraint is None else ask.constraint.copy()
        reader = None
        if tools is not None:
            decoder, reader = tools.decoder(decoder), tools.reader()
            if tools.strict and constraint is None:
                constraint = ArgumentsConstraint(tools.strict, reader)
        if ask.max_thoughts is not None and ask.constraint is None:
            n_vocab = model.info.n_vocab
            constraint = ThoughtsLimit(decoder, ask.max_thoughts, n_vocab, constraint)
        jobs.append(
            Job(
                prompt=array("I", prompt),
                choosing=replace(ask.choosing, seed=seed),
                max_tokens=ask.max_tokens,
                decoder=decoder,
                matcher=StopMatcher(ask.stops, () if ask.ignores_end else model.end_texts),
                end_ids=end_ids,
                sink=sink,
                index=index,
                owner=owner,
                salt=salt,
                adapters=ask.adapters,
                name=name,
                max_seconds=max_seconds,
                wants_progress=ask.has_progress,
                constraint=constraint,
                reader=reader,
                wants_scores=ask.wants_scores,
                reading=ask.reading,
            )
        )
    return jobs
