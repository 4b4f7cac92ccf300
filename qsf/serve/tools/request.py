"""What a request demands of its answer: the functions that it may or must call, and its form."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from msgspec import Meta

from qsf.errors import QsfArgumentError, QsfError, shown
from qsf.foreign_json import JsonError
from qsf.serve.http.body import Part, read_inner, read_part
from qsf.serve.http.problems import Problem, invalid
from qsf.serve.tools.call_formats import GENERIC, Format, calls_grammar, find_format, marker_tokens
from qsf.serve.tools.call_reader import CallReader
from qsf.text.channels import CALL_MARKERS
from qsf.text.constraints import KINDS
from qsf.text.tokenizer import IncrementalDecoder

if TYPE_CHECKING:
    from qsf.serve.serving import Serving
    from qsf.text.constraints import Constraint, Constraints

MAX_TOOLS = 128
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_NO_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


class AnswerForm(NamedTuple):
    """A kind of ``Constraints.make``, its value, and the request's field.

    ``is_strict``: all keywords of its schemas must be enforced.
    """

    kind: str
    value: Any
    place: str
    is_strict: bool = False


class JsonSchema(Part):
    IGNORED: ClassVar[tuple[str, ...]] = ("name", "description")

    schema: Any = None
    strict: bool | None = None


class ResponseFormat(JsonSchema):
    """The form of an answer; Responses have the schema in the same object."""

    type: Literal["text", "json_object", "json_schema"] | None = None
    json_schema: JsonSchema | None = None


def read_form(
    wanted: ResponseFormat | None,
    name: str,
    structured_outputs: Mapping[str, Any] | None,
    grammar: str | None,
) -> AnswerForm | None:
    """Return the form that the answer must have; None: any. ``name``: of the field ``wanted``."""
    forms: list[AnswerForm] = []
    if wanted is not None and wanted.type == "json_object":
        forms.append(AnswerForm("json", {"type": "object"}, name))
    elif wanted is not None and wanted.type == "json_schema":
        inner = wanted.json_schema
        place = f"{name}.schema" if inner is None else f"{name}.json_schema.schema"
        inner = inner or wanted
        forms.append(AnswerForm("json", inner.schema, place, bool(inner.strict)))
    for kind, value in (structured_outputs or {}).items():
        place = f"structured_outputs.{kind}"
        if kind not in KINDS:
            raise invalid(place, f"{place} is not known", "unsupported_parameter")
        if value is not None:
            forms.append(AnswerForm(kind, value, place))
    if grammar is not None:
        forms.append(AnswerForm("grammar", grammar, "grammar"))
    if len(forms) > 1:
        names = " and ".join(form.place for form in forms)
        raise invalid(forms[0].place, f"{names} are both given: an answer has one form")
    return forms[0] if forms else None


def constrain(constraints: Constraints | str, form: AnswerForm) -> Constraint:
    """Return the constraint of a form. Raises Problem for a form that cannot be enforced."""
    try:
        constraint = need_constraints(constraints, form.place).make(*form[:3])
    except QsfArgumentError as error:
        raise invalid(form.place, str(error), "invalid_grammar") from None
    if form.is_strict and constraint.unenforced:
        text = f"{form.place} is strict, and {', '.join(sorted(constraint.unenforced))} cannot be "
        raise invalid(form.place, f"{text}enforced while an answer is written", "invalid_grammar")
    return constraint


def need_constraints(constraints: Constraints | str, place: str) -> Constraints:
    """Return the maker of constraints. Raises Problem if the server has none."""
    if isinstance(constraints, str):
        raise Problem(
            400, "unsupported_parameter", f"{place} cannot be enforced: {constraints}", param=place
        )
    return constraints


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str | None
    schema: Mapping[str, Any]  # of the function's arguments
    is_strict: bool

    @property
    def described(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description or ""}
        return {"type": "function", "function": {**function, "parameters": self.schema}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """The tools of a request.

    Attributes:
        tools: all of them, for the template.
        choice: "auto", "required", or the name of the function to call.
        markers: special tokens that calls contain, with their texts.
        strict: schemas of arguments to enforce, by function name.
    """

    tools: Sequence[Tool]
    choice: str
    is_parallel: bool
    form: Format
    markers: Mapping[int, str]
    strict: Mapping[str, Constraint]

    @property
    def names(self) -> set[str]:
        return {tool.name for tool in self.tools}

    @property
    def described(self) -> list[dict[str, Any]]:
        return [tool.described for tool in self.tools]

    def reader(self) -> CallReader:
        schemas = {tool.name: tool.schema for tool in self.tools}
        return CallReader(self.form, schemas, is_parallel=self.is_parallel)

    def decoder(self, decoder: IncrementalDecoder) -> IncrementalDecoder:
        """Return a decoder that shows special tokens of calls, but not those of channels."""
        markers = {t: name for t, name in self.markers.items() if name not in CALL_MARKERS}
        return _WithMarkers(decoder, markers) if markers else decoder


class _WithMarkers(IncrementalDecoder):
    def __init__(self, decoder: IncrementalDecoder, markers: Mapping[int, str]) -> None:
        self._decoder = decoder
        self._markers = markers

    def push(self, token_id: int) -> str:
        if token_id in self._markers:
            return self._decoder.flush() + self._markers[token_id]
        return self._decoder.push(token_id)

    def flush(self) -> str:
        return self._decoder.flush()

    def take_reasoning(self) -> str:
        return self._decoder.take_reasoning()

    @property
    def is_thinking(self) -> bool:
        return self._decoder.is_thinking

    def end_of_thoughts(self) -> list[int]:
        return self._decoder.end_of_thoughts()


class ArgumentsConstraint:
    """Constrains only the arguments of calls of strict functions."""

    def __init__(self, strict: Mapping[str, Constraint], reader: CallReader) -> None:
        """Follow what ``reader`` reads, and constrain it."""
        self._strict = strict
        self._reader = reader
        self._inner: Constraint | None = None

    def forced(self) -> int | None:
        return None if self._inner is None else self._inner.forced()

    def mask(self) -> bytes | None:
        return None if self._inner is None else self._inner.mask()

    def take(self, token: int) -> bool:
        """Record that the reader has received the text of ``token``. Raises QsfError."""
        name = self._reader.open_name
        if name is None or name not in self._strict:
            self._inner = None
        elif self._inner is None:
            self._inner = self._strict[name].copy()
            if not self._inner.take_text(self._reader.open_arguments):
                raise QsfError(f"the arguments of {name} cannot become what its schema describes")
        else:
            self._inner.take(token)
        return False


def read_tools(
    tools: Sequence[Tool], choice: Any, serving: Serving, *, is_parallel: bool
) -> Tools | None:
    """Return the tools of a request; None: no function may be called.

    Raises Problem for tools that this model or this server does not support.

    Args:
        tools: the functions.
        choice: "none", "auto", "required", or a name; None: "auto" if there are tools.
        serving: the model.
        is_parallel: an answer may have several calls.
    """
    choice = _check_tools(tools, choice)
    if not tools or choice == "none":
        return None
    form = find_format(serving.model.chat_template.tool_source)
    is_known = form is not None
    form = form or GENERIC
    if not is_known:  # a model that knows no calls cannot be trusted with them
        need_constraints(serving.constraints, "tools")
    strict = [tool for tool in tools if choice == "auto" and (tool.is_strict or not is_known)]
    if strict and form.arguments != "json":
        raise invalid(
            "tools",
            f"tools: {strict[0].name} is strict, which this model's form of calls ({form.name}) "
            "allows only with tool_choice required",
            "unsupported_parameter",
        )
    forms = {
        tool.name: AnswerForm("json_then_text", dict(tool.schema), "tools", tool.is_strict)
        for tool in strict
    }
    return Tools(
        tools=tools,
        choice=choice,
        is_parallel=is_parallel and not form.is_single,
        form=form,
        markers=marker_tokens(serving.model.tokenizer),
        strict={name: constrain(serving.constraints, wanted) for name, wanted in forms.items()},
    )


def _check_tools(tools: Sequence[Tool], choice: Any) -> str:
    """Return the choice: "none", "auto", "required" or a name. Raises Problem."""
    names = [tool.name for tool in tools]
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"tools has {len(tools)} entries, and {MAX_TOOLS} is the limit")
    for name in names:
        if _NAME.fullmatch(name) is None:
            rule = "1 to 64 letters, digits, '_', '-' or '.'"
            raise invalid("tools", f"tools: a name must be {rule}, not {shown(name)}")
    if len(set(names)) < len(names):
        name = next(name for name in names if names.count(name) > 1)
        raise invalid("tools", f"tools has two functions called {name}")
    if choice is None:
        choice = "auto"
    if not isinstance(choice, str):
        raise invalid(
            "tool_choice",
            f"tool_choice must be none, auto, required or a function of tools, not {shown(choice)}",
            "unsupported_parameter",
        )
    if choice == "required" and not tools:
        raise invalid("tool_choice", f"tool_choice is {choice}, and tools is empty")
    if choice not in ("none", "auto", "required", *names):
        raise invalid("tool_choice", f"tool_choice is {shown(choice)}, and tools has no such one")
    return choice


def tools_constraint(
    tools: Tools | None, form: AnswerForm | None, serving: Serving
) -> Constraint | None:
    """Return the form that an answer must have; None: any.

    A required call excludes any other form; if calls are optional, an answer without calls has the
    requested form.
    """
    if tools is None or (tools.choice == "auto" and form is None):
        return None if form is None else constrain(serving.constraints, form)
    place = "tool_choice" if tools.choice != "auto" or form is None else form.place
    need_constraints(serving.constraints, place)
    answer = form.value if tools.choice == "auto" and form is not None else None
    if answer is not None and form is not None and form.kind != "json":
        raise invalid(
            place, f"{place} and tools are both given: beside calls only JSON is possible"
        )
    if isinstance(answer, str):
        answer = read_inner(answer)
    chosen = [tool for tool in tools.tools if tools.choice in ("auto", "required", tool.name)]
    try:
        grammar = calls_grammar(
            tools.form,
            {tool.name: tool.schema for tool in chosen},
            tools.markers,
            is_parallel=tools.is_parallel and tools.choice in ("auto", "required"),
            answer=answer,
        )
    except ValueError as error:
        raise invalid(place, f"{place}: {error}", "invalid_grammar") from None
    is_strict = any(tool.is_strict for tool in chosen) or (form is not None and form.is_strict)
    return constrain(serving.constraints, AnswerForm("lark", grammar, place, is_strict))


# ---- OpenAI's chat completions ----


Offered = Annotated[list[Any], Meta(max_length=MAX_TOOLS)]


class Function(Part):
    """A function in a request; the last two are the schema of its arguments in other APIs."""

    name: Any = None
    description: str | None = None
    strict: bool | None = None
    parameters: Any = None
    input_schema: Any = None


def read_function(value: Any, schema_name: str = "parameters") -> Tool:
    """Return a function from its description in a request. Raises Problem."""
    if not isinstance(value, dict):
        raise invalid("tools", f"tools must be objects, not {shown(value)}")
    function, _ = read_part(Function, value, "tools.")
    name, schema = function.name, getattr(function, schema_name)
    if not isinstance(name, str):
        raise invalid("tools", f"tools: a function has no name, but {shown(name)}")
    schema = _NO_PARAMETERS if schema is None else schema
    types = schema.get("type", "object") if isinstance(schema, dict) else []
    if "object" not in (types if isinstance(types, list) else [types]):
        text = f"tools: {schema_name} of {shown(name)} must be the schema of an object"
        raise invalid("tools", text)
    return Tool(name, function.description, schema, bool(function.strict))


def read_chat_tools(
    values: Sequence[Any] | None,
    choice: Any,
    is_parallel: bool | None,
    serving: Serving,
    *,
    is_nested: bool = True,
) -> Tools | None:
    """Return the tools of a request; ``is_nested``: a tool has its function in an object."""
    tools: list[Tool] = []
    for value in values or ():
        kind = value.get("type") if isinstance(value, dict) else value
        if kind != "function" or not isinstance(value, dict):
            raise invalid(
                "tools", f"tools must be functions, not {shown(kind)}", "unsupported_parameter"
            )
        tools.append(read_function(value.get("function") if is_nested else value))
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        choice = _function_name(choice)
    elif kind == "allowed_tools":
        tools, choice = _read_allowed(choice.get("allowed_tools", choice), tools)
    return read_tools(tools, choice, serving, is_parallel=is_parallel is not False)


def _function_name(value: dict[str, Any]) -> Any:
    """Return the function name, which chat completions nest in an object and Responses do not."""
    function = value.get("function")
    return function.get("name") if isinstance(function, dict) else value.get("name")


def _read_allowed(value: Any, tools: Sequence[Tool]) -> tuple[list[Tool], str]:
    place = "tool_choice.allowed_tools"
    if not isinstance(value, dict) or not isinstance(value.get("tools"), list):
        raise invalid("tool_choice", f"{place} must have mode and tools, not {shown(value)}")
    mode = value.get("mode")
    if mode not in ("auto", "required"):
        raise invalid("tool_choice", f"{place}: mode must be auto or required, not {shown(mode)}")
    names = [
        _function_name(entry) if isinstance(entry, dict) else entry for entry in value["tools"]
    ]
    for name in names:
        if not any(tool.name == name for tool in tools):
            raise invalid("tool_choice", f"{place} has {shown(name)}, and tools has no such one")
    return [tool for tool in tools if tool.name in names], mode


def chat_turns(messages: Sequence[Any]) -> list[Any]:
    """Return messages with their calls in the form of chat templates."""
    return [_chat_turn(message) if isinstance(message, dict) else message for message in messages]


def _chat_turn(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    _check_id(message.get("tool_call_id"), "tool_call_id")
    if not isinstance(calls, list | None):
        raise invalid("messages", f"messages: tool_calls must be a list, not {shown(calls)}")
    if not calls:  # templates may test whether the key exists
        return {name: value for name, value in message.items() if name != "tool_calls"}
    turn = {**message, "tool_calls": [_chat_call(call) for call in calls]}
    turn["content"] = message.get("content") or ""
    return turn


def _chat_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid("messages", f"messages: tool_calls must name functions, not {shown(call)}")
    _check_id(call.get("id"), "the id of a call")
    return call_turn(call.get("id"), function["name"], function.get("arguments"))


def _check_id(value: Any, name: str) -> None:
    if not isinstance(value, str | None):
        raise invalid("messages", f"messages: {name} must be a text, not {shown(value)}")


def call_turn(call_id: Any, name: str, arguments: Any, place: str = "messages") -> dict[str, Any]:
    """Return a call in the form of chat templates: its arguments are an object.

    Arguments that were cut are reduced to their complete part.
    """
    if isinstance(arguments, str):
        try:
            arguments = _read_arguments(arguments)
        except JsonError as error:
            text = f"{place}: the arguments of {shown(name)}: {error}"
            raise invalid(place, text) from None
    if not isinstance(arguments, dict | None):
        text = f"{place}: the arguments of {shown(name)} must be an object, not {shown(arguments)}"
        raise invalid(place, text)
    function = {"name": name, "arguments": {} if arguments is None else arguments}
    return {"id": call_id, "type": "function", "function": function}


def _read_arguments(text: str) -> Any:
    try:
        return read_inner(text or "{}")
    except JsonError:
        for candidate in completed(text):
            with suppress(JsonError):
                return read_inner(candidate)
        raise


# ---- arguments of a call that was cut ----

# A text without closing quote goes to the end, else the search would take quadratic time.
_TOKEN = re.compile(
    r'(?P<text>"(?:[^"\\]|\\.)*(?:"|\\?\Z))|(?P<sign>[{}\[\],])|(?P<word>[-+.\w]+)|\S', re.DOTALL
)
# Kinds of the tokens that may follow the last complete value.
_RESTS: tuple[list[str], ...] = (
    [],
    ["text"],
    ["word"],
    ["text", ":"],
    ["text", ":", "text"],
    ["text", ":", "word"],
)


def completed(text: str) -> list[str]:
    """Return completions of the beginning of an object, the longest first.

    Each may be invalid JSON. []: the text does not begin an object.
    """
    closers: list[str] = []
    at, rest = 0, [""]  # the end of the last complete value, and what follows it
    for match in _TOKEN.finditer(text):
        sign = match[0]
        if match.lastgroup != "sign":
            if len(rest) < 4:
                rest.append(match.lastgroup or sign)
            continue
        if sign in "{[":
            closers.append("}" if sign == "{" else "]")
        elif sign in "}]" and (not closers or closers.pop() != sign):
            return []
        at, rest = match.start() if sign == "," else match.end(), []
    if not closers or rest not in _RESTS:
        return []
    ends = "".join(reversed(closers))
    return [f'{text}"{ends}', text + ends, text[:at] + ends]
