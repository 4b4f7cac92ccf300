"""JSON schemas and grammars: what says nothing, what fits (beside jsonschema), what never ends."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from make.steps import count_lines, is_linear
from qsf.text.schemas import Check, check_grammar, check_schema, keywords_of, simplified

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from([None, True, False, 0, 1, 1.0, 2.5, "", "a", "abc"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=6,
)


def schemas_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    several = st.lists(inner, min_size=1, max_size=2)
    names = st.lists(st.sampled_from("ab"), max_size=2, unique=True)
    rules: dict[str, st.SearchStrategy[Any]] = {
        "type": st.sampled_from(
            ["object", "array", "string", "integer", "number", ["null", "string"]]),
        "const": VALUES, "enum": st.lists(VALUES, min_size=1, max_size=2), "allOf": several,
        "anyOf": several, "oneOf": several, "not": inner, "if": inner, "then": inner, "else": inner,
        "minimum": st.just(1), "exclusiveMaximum": st.just(2), "multipleOf": st.just(2),
        "minLength": st.just(1), "maxItems": st.just(2), "minProperties": st.just(1),
        "uniqueItems": st.booleans(), "prefixItems": several, "items": inner, "contains": inner,
        "minContains": st.integers(0, 2), "maxContains": st.integers(0, 2), "properties": named,
        "required": names, "additionalProperties": inner, "propertyNames": inner,
        "dependentRequired": st.dictionaries(st.sampled_from("ab"), names, max_size=1),
        "dependentSchemas": named, "$ref": st.just("#/$defs/a"),
    }  # fmt: skip
    return st.fixed_dictionaries({}, optional=rules)


LEAF = st.sampled_from([True, False, {}, {"type": "string"}, {"type": "integer"}])
SCHEMAS = schemas_of(st.recursive(LEAF, schemas_of, max_leaves=4))


@given(SCHEMAS, VALUES)
def test_values_are_checked_as_jsonschema_does(schema: Any, value: Any) -> None:
    schema = {**schema, "$defs": {"a": {"type": "array", "uniqueItems": True}}}
    wanted = jsonschema.Draft202012Validator(schema).is_valid(value)
    for form in (schema, simplified(schema)):
        assert Check(form).fits(value) in (wanted, None)


def test_a_check_claims_what_it_knows() -> None:
    assert Check({"unevaluatedProperties": False}).fits({"a": 1}) is None
    assert Check({"pattern": "^(?!a)"}).fits("a") is None
    assert Check({"not": {"pattern": "a"}}).fits("a") is None  # llguidance has not enforced that
    assert Check({"pattern": "b"}).fits("b") is True  # it has
    assert Check({"required": 5}).fits({}) is None
    assert Check({"uniqueItems": True}).fits([1, True, 1.0]) is False
    loop: Any = {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}
    assert Check(loop).fits(1) is None
    wide: Any = {
        "$defs": {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 4} for i in range(20)}
    }
    wide |= {"$ref": "#/$defs/a0"}
    assert count_lines(lambda: Check(wide).fits(1)) < 2_000_000


@pytest.mark.parametrize(
    ("schema", "simple"),
    [
        ({"propertyNames": {"type": "string"}, "type": "object"}, {"type": "object"}),
        ({"items": {"uniqueItems": False}, "not": False}, {"items": {}}),
        ({"uniqueItems": True, "const": {"uniqueItems": False}},) * 2,
        (
            {"properties": {"not": False, "a": {"then": {}}}},
            {"properties": {"not": False, "a": {}}},
        ),
        ({"$schema": "https://example.com/mine"}, {}),
        ({"$schema": "https://json-schema.org/draft/2020-12/schema"},) * 2,
        *(
            ({"pattern": pattern, "format": "email"}, {"format": "a pattern beyond llguidance"})
            for pattern in (r"^(?!x)", r"\bx\b", "^{.*}$", r"(?<a>x)\k<a>")
        ),
        *(({"pattern": pattern},) * 2 for pattern in (r"^\p{L}+\/$", "([")),
        (
            {"minimum": -(1 << 63), "maximum": 1e308, "maxLength": 5.0, "minLength": 1 << 40},
            {"minimum": -(1 << 62), "maximum": 1 << 62, "maxLength": 5, "minLength": 1 << 40},
        ),
        ({"minimum": 1e20, "const": 5.0, "exclusiveMinimum": True},) * 2,
    ],
)
def test_what_says_nothing_is_left_out(schema: Any, simple: Any) -> None:
    assert simplified(schema) == simple


def test_the_names_of_what_is_not_enforced() -> None:
    warnings = ['Unimplemented keys: ["contains", "not"]', "Unknown format: binary"]
    assert keywords_of(warnings) == {"contains", "not"}
    assert keywords_of(["oneOf not fully supported, falling back to anyOf."]) == {"oneOf"}
    assert keywords_of(["Unknown format: a pattern beyond llguidance"]) == {"pattern"}


# ---- levels of schemas and of grammars: how many are taken, and the time of counting them ----
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
