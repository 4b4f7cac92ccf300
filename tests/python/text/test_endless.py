"""Recursion that cannot end, in schemas and in grammars of both notations."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsf.text.endless import is_endless_grammar, is_endless_schema


def chain(next_link: Any) -> Any:
    """A list whose links have to name the next one."""
    link = {"type": "object", "properties": {"next": next_link}, "required": ["next"]}
    return {"$defs": {"link": link}, "$ref": "#/$defs/link"}


LINK: Any = {"$ref": "#/$defs/link"}


@pytest.mark.parametrize(
    ("schema", "is_endless"),
    [
        ({}, False),
        ({"$ref": "#"}, True),
        (chain(LINK), True),
        (chain({"anyOf": [LINK, {"type": "null"}]}), False),
        (chain({"type": "array", "items": LINK}), False),
        (chain({"type": "array", "items": LINK, "minItems": 1}), True),
        (chain({"type": "array", "prefixItems": [True], "items": LINK, "minItems": 1}), False),
        (chain({"allOf": [{"type": "null"}, LINK]}), True),
        (chain({"type": ["object", "null"], "required": ["next"]}), False),
        (chain({"$ref": "elsewhere.json#/a"}), False),
        (chain({"$ref": "#/absent/0"}), False),
        ({"prefixItems": [{"$ref": "#/prefixItems/0"}], "type": "array", "minItems": 1}, True),
    ],
)
def test_schemas(schema: Any, is_endless: bool) -> None:
    assert is_endless_schema(schema) == is_endless


@pytest.mark.parametrize(
    ("start", "is_endless"),
    [
        ('"a" start', True),
        ('"a" start | "b"', False),
        ('"a" start?', False),
        ('"a" [start] "(" // ) start', False),
        ('"a" start+', True),
        ('("x" start)*', False),
        ('"a" start{0,3}', False),
        ('"a" start{1,3}', True),
        ('"a" start~0..2', False),
        ('"a" start~2', True),
        ("pair\npair: start start", True),
        ('pair\npair[capture="x"]: start start\n  | /[|(]/', False),
        ('%json {"$ref": "#"} "."', True),
        ('%json {"type": "object"} "."', False),
        ("start | absent", False),
        ('start "." | WORD\nWORD: /[a-z]+/\n%ignore /start: x/', False),
    ],
)
def test_grammars(start: str, is_endless: bool) -> None:
    assert is_endless_grammar(f"%llguidance {{}}\nstart: {start}\n") == is_endless


BODIES = st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=3)


@given(st.lists(BODIES, min_size=1, max_size=4))
def test_the_answer_is_that_of_a_search(rules: list[list[list[int]]]) -> None:
    """A number in a rule means that rule, or a terminal where there is none of the number."""
    names = [*("start", "one", "two", "three")[: len(rules)], *['"x"'] * 6]
    lines = [
        f"{name}: " + " | ".join(" ".join([*(names[i] for i in part), '"y"']) for part in body)
        for name, body in zip(names, rules, strict=False)
    ]

    def ends_within(rule: int, depth: int) -> bool:
        return rule >= len(rules) or (
            depth > 0 and any(all(ends_within(i, depth - 1) for i in p) for p in rules[rule])
        )

    assert is_endless_grammar("\n".join(lines)) != ends_within(0, len(rules))
