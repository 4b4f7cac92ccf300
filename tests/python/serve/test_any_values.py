"""Any JSON value in any field of any API is answered, or refused by a text that names the field."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from make.refusals import table
from make.served import Client

BODIES: dict[str, dict[str, Any]] = table("bodies")
# Fields that errors call by another name
NAMES = {"model": ""}
OF_OTHER_MODELS = {"/v1/rerank", "/infill"}  # the tiny model lacks their tokens
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from([None, True, 0, -1, 1, 2**70, 0.5, 1e308, "", "a", "\x00", "\ud800", "user",
                     "function", "{", "1e5", "#", [], {}, "x" * 300, "none", "text"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["type", "role", "content", "text", "name", "function", "arguments", "id",
                         "$ref", "anyOf", "properties", "items", "pattern", "const", "", "x"]),
        inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The paths of all values inside a value."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, each in inner:
        yield (key,)
        yield from ((key, *path) for path in places(each))


PLACES = [(path, place) for path, body in BODIES.items() for place in places(body)]


@given(st.sampled_from(PLACES), VALUES)
def test_any_value_is_answered_or_refused_by_name(
    client: Client, where: tuple[str, tuple[Any, ...]], value: Any
) -> None:
    path, place = where
    body = json.loads(json.dumps(BODIES[path]))
    node: Any = body
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    answer = client.post(path, body)
    assert 200 <= answer.status < 500, (path, place, value, answer.body[:300])
    if answer.status == 200 or path in OF_OTHER_MODELS:
        return
    error = answer.json["error"]
    text = error if path.startswith("/api/") else error["message"]
    assert isinstance(text, str)
    named = f"{text} {error.get('param') if isinstance(error, dict) else ''}"
    is_general = "the body" in text or "the context holds" in text
    assert is_general or NAMES.get(place[0], place[0]) in named, (path, place, value, text)


def test_the_bodies_are_good(client: Client) -> None:
    for path in BODIES.keys() - OF_OTHER_MODELS:
        answer = client.post(path, BODIES[path])
        assert answer.status == 200, answer.body[:300]
