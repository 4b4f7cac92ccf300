"""Answers that must have a form: JSON schemas, regular expressions, choices, grammars.

llguidance says which tokens may come next; the engine chooses among these. What cannot be enforced
is refused, never dropped.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qsf.errors import QsfArgumentError, QsfError
from qsf.file.reader import Reader
from qsf.serve.fields import Fields, shown
from qsf.serve.problems import Problem, invalid
from qsf.text.parts import read_text_parts
from qsf.text.sampling import end_ids

if TYPE_CHECKING:
    from qsf.text.tokenizer import Tokenizer

_MAX_GRAMMAR_BYTES = 64 << 10
_MAX_PROPERTIES = 500
_MAX_CHOICES = 1000
# The commonest form of JSON. With one form only, most of it is a token that nothing competes with.
_JSON_FORM = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
# A quarter of what llguidance allows itself.
_LIMITS = {
    "initial_lexer_fuel": 250_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 12_500,
    "max_lexer_states": 62_500,
    "max_grammar_size": 125_000,
}
_KINDS = ("json", "regex", "choice", "grammar")


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, end_id: int) -> None:
        self.eos_token_id = end_id
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [
            tokenizer.token_bytes(token, skip_special=False) for token in range(tokenizer.n_vocab)
        ]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        string = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(string, add_prefix=False, parse_special=False)


class Constraint:
    """What an answer may still be. Used by one thread at a time."""

    def __init__(self, matcher: Any) -> None:
        """Take a matcher of llguidance."""
        self._matcher = matcher

    def copy(self) -> Constraint:
        """Return the same, to be used for another answer."""
        return Constraint(self._matcher.deep_copy())

    def mask(self) -> bytes:
        """Return which tokens may come next, a bit each. Raises QsfError."""
        mask: bytes = self._matcher.compute_bitmask()
        self._check()
        return mask

    def take(self, token: int) -> bool:
        """Take the token that was chosen; return whether nothing may follow. Raises QsfError."""
        self._matcher.consume_token(token)
        self._check()
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise QsfError(f"the grammar cannot be followed: {self._matcher.get_error()[:300]}")


class Constraints:
    """Makes constraints for the vocabulary of one file (extra ``constraints``)."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read the vocabulary; it takes some megabytes, so before the model is opened.

        Raises:
            QsfArgumentError: the package is missing, or the file has no token that ends a text.
        """
        try:
            import llguidance
        except ImportError as error:
            raise QsfArgumentError(
                "constraints need the Python package llguidance (extra constraints): "
                "pip install llguidance"
            ) from error
        parts = read_text_parts(path)
        with Reader(path) as reader:
            ends = sorted(end_ids(reader.header.eos_id, parts.generation))
            n_vocab = reader.header.n_vocab
        if parts.tokenizer is None or not ends:
            raise QsfArgumentError("constraints need a tokenizer, and a token that ends a text")
        wrapper = llguidance.TokenizerWrapper(_Vocabulary(parts.tokenizer, ends[0]))
        self._library: Any = llguidance
        self._tokenizer = self._library.LLTokenizer(
            wrapper, n_vocab=n_vocab, eos_token=ends, slices=[]
        )

    def make(self, kind: str, value: Any, name: str) -> Constraint:
        """Return the constraint of a kind: "json" (a schema), "regex", "choice", "grammar".

        Raises Problem, which names the field ``name``, for what cannot be enforced.
        """
        try:
            grammar = self._grammar(kind, value, name)
        except ValueError as error:
            raise invalid(name, f"{name}: {error}", "invalid_grammar") from None
        limits = self._library.LLParserLimits(**_LIMITS)
        matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            text = " ".join(matcher.get_error().split())
            raise invalid(name, f"{name} cannot be enforced: {text[:300]}", "invalid_grammar")
        return Constraint(matcher)

    def _grammar(self, kind: str, value: Any, name: str) -> str:
        size = len(json.dumps(value))
        if size > _MAX_GRAMMAR_BYTES:
            raise ValueError(f"{size} bytes, and {_MAX_GRAMMAR_BYTES} is the limit")
        if kind == "json":
            return self._json_grammar(value)
        if kind == "choice":
            if not _is_texts(value) or not 1 <= len(value) <= _MAX_CHOICES:
                raise ValueError(f"must be 1 to {_MAX_CHOICES} texts, not {shown(value)}")
        elif not isinstance(value, str) or not value:
            raise ValueError(f"must be a text, not {shown(value)}")
        elif "\0" in value:
            raise ValueError("has a zero byte")
        grammar: str = self._library.grammar_from(kind, value)
        return grammar

    def _json_grammar(self, schema: Any) -> str:
        if isinstance(schema, str):
            schema = json.loads(schema)
        if not isinstance(schema, dict):
            raise ValueError(f"must be a JSON schema, not {shown(schema)}")
        n_properties = sum(len(one) for one in _properties(schema))
        if n_properties > _MAX_PROPERTIES:
            raise ValueError(f"{n_properties} properties, and {_MAX_PROPERTIES} is the limit")
        if "x-guidance" in schema:
            raise ValueError("x-guidance is not for requests")
        grammar: str = self._library.LLMatcher.grammar_from_json_schema(
            schema, overrides=_JSON_FORM
        )
        return grammar


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) and one for one in value)


def _properties(value: Any) -> Iterable[Mapping[str, Any]]:
    """Yield all objects that are called "properties" in a schema."""
    stack = [value]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            if isinstance(part.get("properties"), dict):
                yield part["properties"]
            stack += part.values()
        elif isinstance(part, list):
            stack += part


def read_constraint(
    fields: Fields, constraints: Constraints | None, formats: Fields, name: str
) -> Constraint | None:
    """Return the form that an answer must have; None: any.

    Args:
        fields: of the request, for ``structured_outputs`` and ``grammar``.
        constraints: None where the server was started without.
        formats: OpenAI's object with the type of the answer.
        name: of this object.
    """
    asked: list[tuple[str, Any, str]] = []
    kind = formats.text("type", "text")
    if kind == "json_object":
        asked.append(("json", {"type": "object"}, name))
    elif kind == "json_schema":
        place = formats.object("json_schema") if "json_schema" in formats else formats
        place.ignore("name", "description", "strict")
        asked.append(("json", place.raw("schema"), place.name("schema")))
    elif kind != "text":
        raise invalid(name, f"{name}.type must be text, json_object or json_schema, not {kind!r}")
    outputs = fields.object("structured_outputs")
    for one in _KINDS:
        if one in outputs:
            asked.append((one, outputs.raw(one), outputs.name(one)))
    outputs_rest: Sequence[str] = outputs.rest()
    if outputs_rest:
        raise invalid(outputs_rest[0], f"{outputs_rest[0]} is not known", "unsupported_parameter")
    if "grammar" in fields:
        asked.append(("grammar", fields.raw("grammar"), "grammar"))
    if not asked:
        return None
    if len(asked) > 1:
        names = " and ".join(place for _, _, place in asked)
        raise invalid(asked[0][2], f"{names} are both given: an answer has one form")
    kind, value, place_name = asked[0]
    if constraints is None:
        raise Problem(
            400,
            "unsupported_parameter",
            f"{place_name} is not supported: the server was started without --constraints",
            param=place_name,
        )
    return constraints.make(kind, value, place_name)
