"""Recursion that cannot end, in schemas and in grammars of both notations."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from make.steps import count_lines, is_linear
from qsf.text.schemas import check_grammar, check_schema


def is_endless(check: Callable[[Any], None], form: Any) -> bool:
    """Whether a check refuses a form because it never ends."""
    try:
        check(form)
    except ValueError as error:
        return "never ends" in str(error)
    return False


def chain(next_link: Any) -> Any:
    """A list whose links have to name the next one."""
    link = {"type": "object", "properties": {"next": next_link}, "required": ["next"]}
    return {"$defs": {"link": link}, "$ref": "#/$defs/link"}


LINK: Any = {"$ref": "#/$defs/link"}


@pytest.mark.parametrize(
    ("schema", "never_ends"),
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
def test_schemas(schema: Any, never_ends: bool) -> None:
    assert is_endless(check_schema, schema) == never_ends


@pytest.mark.parametrize(
    ("start", "never_ends"),
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
def test_grammars(start: str, never_ends: bool) -> None:
    assert is_endless(check_grammar, f"%llguidance {{}}\nstart: {start}\n") == never_ends


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

    assert is_endless(check_grammar, "\n".join(lines)) != ends_within(0, len(rules))


def rules(n: int, form: str) -> str:
    return "start: a0\n" + "".join(form.format(i, i + 1) for i in range(n)) + f'a{n}: "x"\n'


def definitions(n: int, make: Callable[[Any], Any]) -> Any:
    inner = {f"a{i}": make({"$ref": f"#/$defs/a{i + 1}"}) for i in range(n)}
    return {"$ref": "#/$defs/a0", "$defs": {**inner, f"a{n}": {"type": "string"}}}


def as_object(link: Any) -> Any:
    return {"type": "object", "properties": {"a": link}, "required": ["a"]}


def test_what_is_too_deep_is_refused() -> None:
    deep: list[tuple[Callable[[Any], None], Any]] = [
        (check_grammar, rules(3000, "a{}: a{}?\n")),
        (check_grammar, rules(600, 'a{}: (((("b" a{})?)*)+)\n')),
        (check_schema, definitions(1000, as_object)),
    ]
    for check, form in deep:
        with pytest.raises(ValueError, match=r"levels in all, and 2000 is the limit"):
            check(form)
    check_grammar(rules(1900, "a{}: a{}\n"))
    check_schema(definitions(400, as_object))


@pytest.mark.parametrize(
    "make",
    [
        lambda n: rules(n, "a{}: a{}\n"),
        lambda n: "start: " + "<" * n,
        lambda n: "start: " + '"\\"' * n,
        lambda n: "start: " + "/\\/" * n,
        lambda n: "start: " + "{ " * n,
        lambda n: "start: " + "%json {} " * n,
        lambda n: "start: " + " ".join(f"a{i}" for i in range(n)) + "\n"
        + "".join(f'a{i}: "x"\n' for i in range(n)),
    ],
)  # fmt: skip
def test_grammars_are_judged_in_linear_time(make: Callable[[int], str]) -> None:
    assert is_linear(lambda n: count_lines(lambda: check_grammar(make(n))), 200)


def test_schemas_are_judged_in_linear_time() -> None:
    def named(n: int) -> Any:  # the same large part by many names
        large = {"allOf": [{"type": "string"}] * n}
        return {"$defs": {"a": large}, "anyOf": [{"$ref": "#/$defs/a"}] * n}

    for make in (lambda n: definitions(n, as_object), named):
        assert is_linear(lambda n: count_lines(lambda: check_schema(make(n))), 100)  # noqa: B023
