"""Levels of schemas and of grammars: how many are taken, and the time of counting them."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from make.steps import count_lines, is_linear
from qsf.text.schemas import check_grammar, check_schema


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
    check_grammar("start: " + '"(" ' * 3000 + "a0 # " + "(" * 3000)  # texts and comments
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
