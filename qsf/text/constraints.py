"""Answers that must have a form: JSON schemas, regular expressions, choices, grammars.

llguidance computes which tokens may come next; the engine chooses among these. A form that cannot
be enforced is refused, never ignored; keywords of a schema that cannot are named.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from qsf.errors import QsfArgumentError, shown
from qsf.file.reader import Reader
from qsf.foreign_json import read_json
from qsf.text.channels import ends_with_channels
from qsf.text.parts import read_text_parts
from qsf.text.sampling import end_ids
from qsf.text.schemas import (
    MAX_LEVELS,
    check_expressions,
    check_grammar,
    check_schema,
    keywords_of,
    simplified,
)

if TYPE_CHECKING:
    from qsf.text.tokenizer import Tokenizer

_MAX_GRAMMAR_BYTES = 64 << 10
_MAX_PROPERTIES = 500
_MAX_CHOICES = 1000
# The usual layout of JSON. With one layout only, most of its tokens are forced.
_JSON_FORM = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_JSON_FORM |= {"lenient": True}  # keywords that llguidance lacks are warnings
# A quarter of llguidance's own limit, but for rows: properties that may be missing take 4 each.
_LIMITS = {
    "max_items_in_row": 5 * _MAX_PROPERTIES,
    "initial_lexer_fuel": 250_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 12_500,
    "max_lexer_states": 62_500,
    "max_grammar_size": 125_000,
}
# Memory of llguidance's tables for each token, slices included. Measured: 370 to 420.
_TOKEN_BYTES = 400
_STACK_BYTES = 16 << 20  # more than twice what the deepest grammar takes (``schemas.MAX_LEVELS``)
_LARK = re.compile(r"^[^\S\n]*(?:%llguidance\b|start\s*:)", re.MULTILINE)
KINDS = ("json", "regex", "choice", "grammar")


class _Vocabulary:
    """The interface of a tokenizer that llguidance needs."""

    def __init__(self, tokenizer: Tokenizer, n_vocab: int, end_id: int) -> None:
        self.eos_token_id = end_id
        self.bos_token_id = tokenizer.bos_id
        # The model may have more rows than its tokenizer has tokens; llguidance uses this list.
        names = (tokenizer.token_bytes(i, skip_special=False) for i in range(tokenizer.n_vocab))
        self.tokens = [*names, *[b""] * (n_vocab - tokenizer.n_vocab)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        string = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(string, add_prefix=False, parse_special=False)


class Constraint:
    """The state of a constraint while an answer is generated. Used by one thread at a time."""

    def __init__(
        self, matcher: Any, tokenizer: Any, name: str, unenforced: frozenset[str], schema: Any
    ) -> None:
        self.unenforced = unenforced  # keywords of its schemas
        self.schema = schema  # of the whole text; None: that is not JSON alone
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._name = name  # of the argument with the form
        self._forced: deque[int] = deque()  # forced tokens, as far as they are known

    def copy(self) -> Constraint:
        matcher = self._matcher.deep_copy()
        return Constraint(matcher, self._tokenizer, self._name, self.unenforced, self.schema)

    def forced(self) -> int | None:
        """Return the forced token; None: there is a choice. Raises QsfError.

        A forced text is split into the tokens that the tokenizer would choose.
        """
        if not self._forced:
            self._forced.extend(self._matcher.compute_ff_tokens())
            self._check()
        return self._forced[0] if self._forced else None

    def mask(self) -> bytes | None:
        """Return the mask of allowed tokens, a bit each; None: all. Raises QsfError."""
        mask: bytes = self._matcher.compute_bitmask()
        self._check()
        token = self.forced()
        if token is None:
            return mask
        only = bytearray(len(mask))
        only[token // 8] = 1 << token % 8
        return bytes(only)

    def take(self, token: int) -> bool:
        """Record the chosen token; return True at the end of the form. Raises QsfError."""
        if self._forced:
            self._forced.popleft()
        self._matcher.consume_token(token)
        self._check()
        return bool(self._matcher.is_stopped())

    def take_text(self, text: str) -> bool:
        """Record text that precedes the tokens; return whether the form allows it."""
        tokens = self._tokenizer.tokenize_str(text)
        return int(self._matcher.try_consume_tokens(tokens)) == len(tokens)

    def _check(self) -> None:
        if self._matcher.is_error():
            text = f"{self._name} cannot be followed: {_error_text(self._matcher)}"
            raise QsfArgumentError(text, argument=self._name)


class Constraints:
    """Makes constraints for the vocabulary of one file (extra ``constraints``)."""

    def __init__(self, path: str | os.PathLike[str], most_bytes: int | None = None) -> None:
        """Read the vocabulary; it takes some megabytes, so do this before opening the model.

        Raises:
            QsfArgumentError: the package is missing, the file has no token that ends a text, or the
                tables for the vocabulary exceed ``most_bytes``.
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
            named = end_ids(reader.header.eos_id, parts.generation)
            ends = sorted(ends_with_channels(named, parts.tokenizer))
            n_vocab = reader.header.n_vocab
        if parts.tokenizer is None or not ends:
            raise QsfArgumentError("constraints need a tokenizer, and a token that ends a text")
        if most_bytes is not None and _TOKEN_BYTES * n_vocab > most_bytes:
            raise QsfArgumentError(
                f"constraints need {_TOKEN_BYTES * n_vocab >> 20} MB for a vocabulary of {n_vocab} "
                f"tokens, and at most {most_bytes >> 20} MB may be taken"
            )
        vocabulary = _Vocabulary(parts.tokenizer, n_vocab, ends[0])
        wrapper = llguidance.TokenizerWrapper(vocabulary)
        self._library: Any = llguidance
        self._tokenizer = self._library.LLTokenizer(wrapper, eos_token=ends)
        wrapper.tokens = vocabulary.tokens = []  # llguidance has its own list

    def make(self, kind: str, value: Any, name: str) -> Constraint:
        """Return the constraint of a kind: one of ``KINDS`` ("json" is a schema), or "lark".

        "json_then_text" is a schema after which any text may follow. Raises QsfArgumentError,
        which names ``name``, if it cannot be enforced.
        """
        try:
            grammar = self._grammar(kind, value)
            if kind in ("grammar", "lark"):
                check_grammar(grammar)
        except ValueError as error:
            raise QsfArgumentError(f"{name}: {error}") from None
        except RecursionError:
            raise QsfArgumentError(f"{name}: its brackets are nested too deeply") from None
        matcher = _on_large_stack(lambda: self._matcher(grammar))
        if matcher.is_error():
            raise QsfArgumentError(f"{name} cannot be enforced: {_error_text(matcher)}")
        unenforced = keywords_of(matcher.get_grammar_warnings())
        schema = (read_json(value) if isinstance(value, str) else value) if kind == "json" else None
        return Constraint(matcher, self._tokenizer, name, unenforced, schema)

    def _matcher(self, grammar: str) -> Any:
        limits = self._library.LLParserLimits(**_LIMITS)
        matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # an error here is the grammar's: no token was chosen yet
        return matcher

    def _grammar(self, kind: str, value: Any) -> str:
        size = len(json.dumps(value))
        if size > _MAX_GRAMMAR_BYTES:
            raise ValueError(f"{size} bytes, and {_MAX_GRAMMAR_BYTES} is the limit")
        if kind == "json":
            return self._json_grammar(value)
        if kind == "json_then_text":
            grammar = f"start: {lark_json(value)} rest\nrest: /(?s:.*)/"
            return str(self._library.LLMatcher.grammar_from_lark(grammar))
        if kind == "choice":
            if not _is_texts(value) or not 1 <= len(value) <= _MAX_CHOICES:
                raise ValueError(f"must be 1 to {_MAX_CHOICES} texts, not {shown(value)}")
        elif not isinstance(value, str) or not value:
            raise ValueError(f"must be a text, not {shown(value)}")
        elif "\0" in value:
            raise ValueError("has a zero byte")
        elif kind == "regex":
            check_expressions([value])
        elif (
            kind == "lark"
        ):  # llguidance's "grammar" guesses the notation, which a schema could mislead
            return str(self._library.LLMatcher.grammar_from_lark(value))
        elif kind == "grammar":
            return str(self._library.LLMatcher.grammar_from_lark(_lark_of(value)))
        return str(self._library.grammar_from(kind, value))

    def _json_grammar(self, schema: Any) -> str:
        if isinstance(schema, str):
            schema = read_json(schema)
        _check_schema(schema)
        grammar: str = self._library.LLMatcher.grammar_from_json_schema(
            json.dumps(simplified(schema)), overrides=_JSON_FORM
        )
        return grammar


def _lark_of(grammar: str) -> str:
    """Return a grammar in Lark's notation or in GBNF as Lark; raises ValueError.

    llguidance's own ``any_to_lark`` takes the square of a text's empty lines.
    """
    if _LARK.search(grammar):
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    n_rules = grammar.count("::=")  # it takes the square of these
    if n_rules > MAX_LEVELS:
        raise ValueError(f"{n_rules} rules, and {MAX_LEVELS} is the limit")
    try:
        return str(gbnf_to_lark(grammar))
    except Exception as error:  # it has no type for its errors
        raise ValueError(f"not a GBNF grammar: {error}") from error


def _on_large_stack(call: Callable[[], Any]) -> Any:
    """Return what a call returns that may nest deeply; it runs in a thread of its own."""
    usual = threading.stack_size(_STACK_BYTES)
    try:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(call).result()
    finally:
        threading.stack_size(usual)


def _error_text(matcher: Any) -> str:
    """Return an error's text on one line, without the library's state."""
    text = " ".join(matcher.get_error().partition("<state>")[0].split())[:300]
    return "no text has this form" if text.startswith("NoExtension") else text


def lark_json(schema: Any) -> str:
    """Return a schema as a part of a Lark grammar. Raises ValueError if that is impossible."""
    _check_schema(schema)
    return "%json " + json.dumps({**simplified(schema), "x-guidance": _JSON_FORM})


def _check_schema(schema: Any) -> None:
    if not isinstance(schema, dict):
        raise ValueError(f"must be a JSON schema, not {shown(schema)}")
    all_properties = [each["properties"] for each in _objects(schema) if "properties" in each]
    n_properties = sum(len(each) for each in all_properties if isinstance(each, dict))
    if n_properties > _MAX_PROPERTIES:
        raise ValueError(f"{n_properties} properties, and {_MAX_PROPERTIES} is the limit")
    if "x-guidance" in schema:
        raise ValueError("x-guidance is not for requests")
    patterns = [each["pattern"] for each in _objects(schema) if "pattern" in each]
    check_expressions(text for text in patterns if isinstance(text, str))
    check_schema(schema)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) and text for text in value)


def _objects(value: Any) -> Iterable[Mapping[str, Any]]:
    stack = [value]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            yield part
            stack += part.values()
        elif isinstance(part, list):
            stack += part
