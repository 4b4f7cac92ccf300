"""How model families write calls of functions; the chat template shows which form a model uses."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from qsf.errors import shown
from qsf.foreign_json import JsonError, read_json
from qsf.text.channels import CALL_BEGIN, CALL_MARKERS, CALL_MIDDLE
from qsf.text.constraints import lark_json

if TYPE_CHECKING:
    from qsf.text.tokenizer import Tokenizer

QUOTE: Final = '<|"|>'  # of Gemma 4
_OUTPUT_BYTES = 4 << 20  # most memory for parsing values that the model wrote


@dataclass(frozen=True, slots=True)
class Format:
    """How a family writes calls: ``first``, calls with ``between`` them, ``last``.

    A call is ``before``, the name, ``middle``, the arguments, ``after``.

    Attributes:
        name: the family's.
        signs: texts that all stand in the chat template.
        begin: what no other text has, and calls begin with; "": a call is the whole answer.
        end: what ends a call, or all of them; "": their JSON does.
        arguments: how arguments are written: "json", "parameter" or "arg_key" elements, "python",
            "marked" texts.
        is_numbered: after the name comes ":" and the number of the call in the conversation.
        result_role: whose message the result of a call is, where the template names no such role.
    """

    name: str
    signs: tuple[str, ...]
    begin: str
    end: str
    before: str
    middle: str
    after: str
    first: str = ""
    between: str = ""
    last: str = ""
    arguments: str = "json"
    is_numbered: bool = False
    result_role: str = "user"

    @property
    def is_elements(self) -> bool:
        """Arguments are elements or have marks, and are read when the call is complete."""
        return self.arguments in (*_ELEMENTS, "marked")

    @property
    def is_python(self) -> bool:
        return self.arguments == "python"

    @property
    def head(self) -> re.Pattern[str]:
        """A call up to its arguments; arguments that are elements have none."""
        if '{"' in self.before or self.arguments != "json":
            return JSON_HEAD
        before, middle = self.before.removeprefix(self.begin), self.middle.strip()
        return re.compile(
            rf"\s*{re.escape(before)}(?P<name>[\w.-]+)(?::\d+|\[CALL_ID\]\w*)?\s*"
            rf"{re.escape(middle)}\s*(?=\{{)"
        )

    @property
    def behind(self) -> tuple[str, ...]:
        """What may stand after the arguments of a call."""
        after = () if '{"' in self.before else (self.after.strip(),)
        signs = ("]", "<|python_end|>", self.end, self.last.strip(), *after)
        return tuple(sign for sign in signs if sign)

    @property
    def is_single(self) -> bool:
        """An answer has at most one call: in Harmony a call ends the answer."""
        return self.begin == CALL_BEGIN

    def write(self, calls: Iterable[tuple[str, Mapping[str, Any], int]]) -> str:
        """Return calls (name, arguments, number) as a model of the family writes them."""
        texts = (
            f"{self.before}{name}{f':{number}' if self.is_numbered else ''}"
            f"{self.middle}{self._written(values)}{self.after}"
            for name, values, number in calls
        )
        return f"{self.first}{self.between.join(texts)}{self.last}"

    def _written(self, values: Mapping[str, Any]) -> str:
        if self.arguments == "json":
            return json.dumps(values, ensure_ascii=False)
        if self.arguments == "python":
            texts = {k: json.dumps(v) if isinstance(v, str) else repr(v) for k, v in values.items()}
            return ", ".join(f"{name}={text}" for name, text in texts.items())
        if self.arguments == "marked":
            return _write_marked(values)[1:-1]  # the form has the braces
        shape = {
            "parameter": "<parameter={}>\n{}\n</parameter>\n",
            "arg_key": "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n",
        }[self.arguments]
        texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}
        return "".join(shape.format(key, text) for key, text in texts.items())


JSON_HEAD = re.compile(
    r'\s*(?:\[\s*)?\{\s*(?:"tool_call_id"\s*:\s*"[^"\\]*"\s*,\s*)?"(?:tool_)?name"\s*:\s*'
    r'"(?P<name>[^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_OBJECT: Any = {"before": '{"name": "', "middle": '", "arguments": ', "after": "}"}
_LIST: Any = {**_OBJECT, "between": ", ", "last": "]"}
_PYTHON: Any = {"before": "", "middle": "(", "after": ")", "between": ", ", "arguments": "python"}
_DEEPSEEK: Any = {
    "begin": "<｜tool▁calls▁begin｜>",
    "end": "<｜tool▁calls▁end｜>",
    "first": "<｜tool▁calls▁begin｜>",
    "last": "<｜tool▁calls▁end｜>",
}
# The format that a model is asked to write if its template describes no known one.
GENERIC = Format(
    "Hermes and Qwen", ("<tool_call>",), "<tool_call>", "</tool_call>",
    '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", between="\n",
)  # fmt: skip
# A template has the first format whose signs it all contains.
FORMATS = (
    Format(
        "Qwen3-Coder", ("<tool_call>", "<function="), "<tool_call>", "</tool_call>",
        "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", between="\n",
        arguments="parameter",
    ),
    Format(
        "GLM", ("<tool_call>", "<arg_key>"), "<tool_call>", "</tool_call>",
        "<tool_call>", "\n", "</tool_call>", between="\n", arguments="arg_key",
    ),
    GENERIC,
    Format(
        "DeepSeek V3 and R1", ("<｜tool▁calls▁begin｜>", "```json"), **_DEEPSEEK,
        before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>", middle="\n```json\n",
        after="\n```<｜tool▁call▁end｜>", between="\n",
    ),
    Format(
        "DeepSeek V3.1", ("<｜tool▁calls▁begin｜>",), **_DEEPSEEK,
        before="<｜tool▁call▁begin｜>", middle="<｜tool▁sep｜>", after="<｜tool▁call▁end｜>",
    ),
    Format(
        "Kimi K2", ("tool_declare<|im_middle|>",),
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
        "<|tool_call_begin|>functions.", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
        first="<|tool_calls_section_begin|>", last="<|tool_calls_section_end|>", is_numbered=True,
    ),
    Format(
        "LFM2", ("<|im_start|>", "List of tools: "), "<|tool_call_start|>", "<|tool_call_end|>",
        first="<|tool_call_start|>[", last="]<|tool_call_end|>", **_PYTHON,
    ),
    Format(
        "Phi-4-mini", ("<|tool|>",), "<|tool_call|>", "<|/tool_call|>", first="<|tool_call|>[",
        **{**_LIST, "last": "]<|/tool_call|>"}, result_role="tool_response",
    ),
    Format(
        "Gemma 4", ("<|tool_call>", "<tool_call|>"), "<|tool_call>", "<tool_call|>",
        "<|tool_call>call:", "{", "}<tool_call|>", arguments="marked",
    ),
    Format("Granite", ("<|tool_call|>",), "<|tool_call|>", "", first="<|tool_call|>[", **_LIST),
    Format("Mistral", ("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]", "", "[TOOL_CALLS]", "[ARGS]", ""),
    Format("Mistral", ("[TOOL_CALLS]",), "[TOOL_CALLS]", "", first="[TOOL_CALLS][", **_LIST),
    Format(
        "Cohere", ("<|START_ACTION|>",), "<|START_ACTION|>", "<|END_ACTION|>",
        '{"tool_call_id": "0", "tool_name": "', '", "parameters": ', "}",
        first="<|START_ACTION|>[", between=", ", last="]<|END_ACTION|>",
    ),
    Format(
        "MiniMax", ("<tool_calls>",), "<tool_calls>", "</tool_calls>",
        '{"name": "', '", "arguments": ', "}",
        first="<tool_calls>\n", between="\n", last="\n</tool_calls>",
    ),
    Format(
        "Llama 4, pythonic", ("func_name1(param",), "", "", first="[", last="]", **_PYTHON,
    ),
    Format(
        "Llama 3 and 4", ("dictionary of argument name and its value",), "", "",
        '{"name": "', '", "parameters": ', "}",
    ),
    Format(
        "gpt-oss", ("<|channel|>commentary",), CALL_BEGIN, "<|call|>", CALL_BEGIN, CALL_MIDDLE, "",
    ),
)  # fmt: skip
# Texts of special tokens that calls contain.
_MARKERS = ("<|tool_call|>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
            "<|python_tag|>", "<|START_ACTION|>", "<|END_ACTION|>", "<tool_calls>", "</tool_calls>",
            "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|/tool_call|>",
            "<|python_start|>", "<|python_end|>", "<|tool_call_start|>", "<|tool_call_end|>",
            "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
            "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
            "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
            "<|tool_call>", "<tool_call|>", QUOTE, *CALL_MARKERS)  # fmt: skip


def find_format(template: str) -> Format | None:
    """Return the format of calls for a chat template; None: unknown."""
    return next((f for f in FORMATS if all(sign in template for sign in f.signs)), None)


def marker_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the special tokens that calls may contain, with their texts."""
    names = {
        token: tokenizer.token_bytes(token, skip_special=False) for token in tokenizer.special_ids
    }
    return {t: name.decode() for t, name in names.items() if name in map(str.encode, _MARKERS)}


class _Lark:
    """Builds a grammar rule by rule."""

    def __init__(self, markers: Mapping[int, str]) -> None:
        self.rules: list[str] = []
        self._token_of = {name: token for token, name in markers.items()}
        names = "|".join(map(re.escape, self._token_of))
        self._cut = re.compile(f"({names})") if names else None

    def text(self, text: str) -> str:
        """Return grammar that matches a text; special tokens are matched by id."""
        parts = self._cut.split(text) if self._cut else [text]
        arguments = [
            f"<[{self._token_of[part]}]>" if part in self._token_of else json.dumps(part)
            for part in parts
            if part
        ]
        return " ".join(arguments)

    def rule(self, body: str, attribute: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{attribute}: {body}")
        return name


def calls_grammar(
    form: Format,
    functions: Mapping[str, Mapping[str, Any]],
    markers: Mapping[int, str],
    *,
    is_parallel: bool,
    answer: Mapping[str, Any] | None = None,
) -> str:
    """Return the Lark grammar of answers that call functions.

    Raises ValueError for a schema that cannot be enforced.

    Args:
        form: the format of calls.
        functions: schemas of arguments by function name.
        markers: see ``marker_tokens``.
        is_parallel: an answer may have several calls.
        answer: a schema; the answer may also be JSON of it instead of a call.
    """
    lark = _Lark(markers)
    middle = (
        f"/:[0-9]{{1,3}}/ {lark.text(form.middle)}" if form.is_numbered else lark.text(form.middle)
    )
    calls = [
        lark.rule(
            f"{lark.text(form.before + name)} {middle} {_arguments(lark, form, schema)} "
            f"{lark.text(form.after)}"
        )
        for name, schema in functions.items()
    ]
    call = lark.rule(" | ".join(calls))
    more = f" ({lark.text(form.between)} {call})*" if is_parallel and form.begin else ""
    whole = f"{lark.text(form.first)} {call}{more} {lark.text(form.last)}"
    if answer is not None:
        whole += f" | {lark_json(answer)}"
    return "\n".join([f"start: {whole}", *lark.rules])


def _arguments(lark: _Lark, form: Format, schema: Mapping[str, Any]) -> str:
    if form.arguments == "json":
        return lark.rule(lark_json(schema))
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    if form.arguments in ("python", "marked"):
        return _keywords(lark, schema, shared, form.arguments)
    parts = []
    for name, inner in schema.get("properties", {}).items():
        if form.arguments == "parameter":
            start, end = f"<parameter={name}>\n", "\n</parameter>\n"
        else:
            start, end = f"<arg_key>{name}</arg_key>\n<arg_value>", "</arg_value>\n"
        part = f"{lark.text(start)} {_value(lark, inner, shared, end)}"
        parts.append(part if name in schema.get("required", ()) else f"({part})?")
    return " ".join(parts)


_TEXT_LIMITS = {"pattern", "format", "minLength", "maxLength"}
_PYTHON_WORDS = {"boolean": '"True" | "False"', "null": '"None"'}


def _keywords(
    lark: _Lark, schema: Mapping[str, Any], shared: Mapping[str, Any], arguments: str
) -> str:
    sign, comma, write = ("=", ", ", _python) if arguments == "python" else (":", ",", _marked)
    properties, required = schema.get("properties", {}), schema.get("required", ())
    first, later = lark.rule('""'), lark.rule('""')  # of what follows: as its beginning, or not
    ordered = sorted(properties, key=lambda name: name not in required)
    for name in reversed(ordered):
        inner = properties[name]
        if not isinstance(inner, dict):
            raise ValueError(f"a property must have a schema, not {shown(inner)}")
        part = f"{lark.text(name + sign)} {write(lark, inner, shared)}"
        is_free = name not in required
        first, later = (
            lark.rule(f"{part} {later}" + (f" | {first}" if is_free else "")),
            lark.rule(f"{lark.text(comma)} {part} {later}" + (f" | {later}" if is_free else "")),
        )
    return first


def _python(lark: _Lark, schema: Mapping[str, Any], shared: Mapping[str, Any]) -> str:
    word = _PYTHON_WORDS.get(str(schema.get("type")))
    return lark.rule(word or lark_json({**shared, **schema}))


def _marked(lark: _Lark, schema: Any, shared: Mapping[str, Any]) -> str:
    """Return the rule of a value of Gemma 4; what its form cannot say is JSON, which is read."""
    if not isinstance(schema, dict):
        raise ValueError(f"a value must have a schema, not {shown(schema)}")
    texts = [schema["const"]] if "const" in schema else schema.get("enum", ())
    is_text = schema.get("type") == "string" and not _TEXT_LIMITS & schema.keys()
    if is_text or (texts and all(isinstance(text, str) for text in texts)):
        return f"{lark.text(QUOTE)} {_value(lark, schema, shared, QUOTE)}"
    if schema.get("type") == "object" and schema.get("properties"):
        return f'"{{" {_keywords(lark, schema, shared, "marked")} "}}"'
    if schema.get("type") == "array" and not schema.keys() - {"type", "items", "description"}:
        item = lark.rule(_marked(lark, schema.get("items", {}), shared))
        return lark.rule(f'"[" ({item} ("," {item})*)? "]"')
    return lark.rule(lark_json({**shared, **schema}))


def _value(lark: _Lark, schema: Any, shared: Mapping[str, Any], end: str) -> str:
    """Return the rule of a value whose texts are not JSON, followed by the text that ends it."""
    if not isinstance(schema, dict):
        raise ValueError(f"a property must have a schema, not {shown(schema)}")
    texts = [schema["const"]] if "const" in schema else schema.get("enum", ())
    if texts and all(isinstance(text, str) for text in texts):
        return f"{lark.rule(' | '.join(map(lark.text, texts)))} {lark.text(end)}"
    if schema.get("type") != "string":
        return f"{lark.rule(lark_json({**shared, **schema}))} {lark.text(end)}"
    limits = sorted(_TEXT_LIMITS & schema.keys())
    if limits:
        raise ValueError(f"{limits[0]} of a text cannot be enforced in calls of this model's form")
    if lark.text(end) == json.dumps(end):
        return lark.rule("/(?s:.*)/", f"[suffix={json.dumps(end)}]")
    return f"{lark.rule('/(?s:.*)/')} {lark.text(end)}"


# ---- reading calls ----


def read_output(text: str) -> Any:
    """Return the value of JSON that the model wrote. Raises JsonError."""
    return read_json(text, memory_bytes=_OUTPUT_BYTES)


def read_whole(form: Format, body: str, schemas: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the calls (name, arguments in JSON) between the begin and end marks; []: none."""
    try:
        if form.arguments == "marked":
            name, arguments = read_marked(body)
            text = json.dumps(read_output(arguments), ensure_ascii=False)
            return [(name, text)] if name in schemas else []
        if form.is_elements:
            return [_read_elements(form, body, schemas)]
        value = read_output(body)
        entries = value if isinstance(value, list) else [value]
        calls = [
            (entry["tool_name"] if "tool_name" in entry else entry["name"], _arguments_text(entry))
            for entry in entries
        ]
        return calls if all(name in schemas for name, _ in calls) else []
    except (ValueError, KeyError, TypeError):
        return []


def _arguments_text(entry: Mapping[str, Any]) -> str:
    names = [name for name in ("arguments", "parameters") if name in entry]
    value: Any = entry[names[0]] if names else {}
    value = read_output(value) if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise ValueError("arguments are an object")
    return json.dumps(value, ensure_ascii=False)


_ELEMENTS = {
    "parameter": (re.compile(r"\s*<function=([^<>\n]+)>"), "</parameter>"),
    "arg_key": (re.compile(r"\s*([^\s<]+)"), "</arg_value>"),
}
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?")


def _read_elements(form: Format, body: str, schemas: Mapping[str, Any]) -> tuple[str, str]:
    head, end = _ELEMENTS[form.arguments]
    match = head.match(body)
    if match is None or match[1] not in schemas:
        raise ValueError("no call")
    properties = schemas[match[1]].get("properties", {})
    read = _read_parameter if form.arguments == "parameter" else _read_pair
    pairs = [read(text) for text in body[match.end() :].split(end)[:-1]]
    values = {key: _read_value(text, properties.get(key, {})) for key, text in filter(None, pairs)}
    return match[1], json.dumps(values, ensure_ascii=False)


def _read_parameter(text: str) -> tuple[str, str] | None:
    match = _PARAMETER.search(text)
    return None if match is None else (match[1], text[match.end() :].removesuffix("\n"))


def _read_pair(text: str) -> tuple[str, str] | None:
    key, _, rest = text.partition("<arg_key>")[2].partition("</arg_key>")
    _, sign, value = rest.partition("<arg_value>")
    return (key, value) if sign else None


def _read_value(text: str, schema: Any) -> Any:
    facts = schema if isinstance(schema, dict) else {}
    if facts.get("type") == "string" or text in facts.get("enum", ()):
        return text
    try:
        return read_output(text)
    except JsonError:
        return text


# ---- Gemma 4's notation, f{city:<|"|>Ulm<|"|>,days:3} ----

_MARKED_HEAD = re.compile(r"\s*call:\s*(?P<name>[\w.-]+)\s*(?=\{)")
_MARKED_TOKEN = re.compile(
    r"""<\|"\|>(?P<text>.*?)<\|"\|>|(?P<json>"(?:[^"\\]|\\.)*")|"""
    r"""(?P<word>[^\s{}\[\],:"]+)(?=\s*(?P<is>:)?)|(?P<other>[\s{}\[\],:])""",
    re.DOTALL,
)


def read_marked(body: str) -> tuple[str, str]:
    """Return name and arguments in JSON, which is not checked, of what is between the marks.

    Raises ValueError where no call is.
    """
    match = _MARKED_HEAD.match(body)
    if match is None:
        raise ValueError("no call")
    parts: list[str] = []
    at = match.end()
    while at < len(body):
        token = _MARKED_TOKEN.match(body, at)
        if token is None:
            raise ValueError("a text without its end")
        at = token.end()
        is_text = token["text"] is not None or token["is"] is not None
        parts.append(json.dumps(token["text"] or token["word"] or "") if is_text else token[0])
    return match["name"], "".join(parts)


def _write_marked(value: Any) -> str:
    """Return a value of arguments as a call has it."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_write_marked(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_write_marked, value)) + "]"
    return json.dumps(value)


# ---- Python's notation, f(city="Ulm", days=3) ----

_PYTHON_HEAD = re.compile(r"[\s\[,]*(?P<name>[A-Za-z_][\w.-]*)\s*\(")
_UNDECIDED = re.compile(r"[\s\[,]*(?:[\w.-]+\s*)?")
_PYTHON_TOKEN = re.compile(  # the quotes of a call come in pairs
    r"""(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<word>[A-Za-z_]\w*)(?P<is>\s*=)?|"""
    r"""(?P<other>[^'"A-Za-z_])""",
    re.DOTALL,
)
PYTHON_ENDS = ("", ")", "'\"")  # what opens and closes a call's arguments, and quotes
_WORDS = {"True": "true", "False": "false", "None": "null"}
_LETTER = re.compile(r'\\(?:x([0-9a-fA-F]{2})|(.))|(["\x00-\x1f])', re.DOTALL)


def read_head(text: str) -> tuple[str | None, int]:
    """Return the name of the function whose call begins a text, and the length up to its arguments.

    The name is "" if the text is too short to say, None if no call begins it.
    """
    match = _PYTHON_HEAD.match(text)
    if match is not None:
        return match["name"], match.end()
    return ("" if _UNDECIDED.fullmatch(text) else None), 0


def read_python(text: str) -> tuple[str, str]:
    """Return the name and the arguments in JSON of a call. The JSON is not checked.

    Raises ValueError if the text is no call.
    """
    match = _PYTHON_HEAD.match(text)
    if match is None or text[-1] != ")":
        raise ValueError("no call")
    parts: list[str] = []
    depth = 0
    for token in _PYTHON_TOKEN.finditer(text, match.end(), len(text) - 1):
        if token["text"] is not None:
            parts.append(_as_json(token["text"]))
        elif token["is"] is not None:
            if depth:
                raise ValueError("a name where a value belongs")
            parts.append(json.dumps(token["word"]) + ": ")
        elif token["word"] is not None:
            parts.append(_WORDS.get(token["word"], token["word"]))
        else:
            depth += token["other"] in "[{"
            depth -= token["other"] in "]}"
            parts.append(token["other"])
    return match["name"], "{" + "".join(parts).strip() + "}"


def _as_json(literal: str) -> str:
    """Return a Python string literal as JSON."""

    def letter(match: re.Match[str]) -> str:
        code, escaped, plain = match.groups()
        if code is not None or plain is not None:
            return f"\\u{int(code, 16) if code is not None else ord(plain):04x}"
        if escaped in '"\\/bfnrtu':
            return f"\\{escaped}"
        return "" if escaped == "\n" else escaped if escaped == "'" else f"\\\\{escaped}"

    return f'"{_LETTER.sub(letter, literal[1:-1])}"'
