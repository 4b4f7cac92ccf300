"""Answers that must have a form: each is checked by its own reader, or refused."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from make.refusals import refusals, table
from make.served import Client, serving
from qsf.cli.serve import read_constraints
from qsf.cli.serve_options import ServeOptions
from qsf.errors import QsfError
from qsf.serve.scheduling.job import Job
from qsf.text.constraints import Constraint

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

CHAT: Any = [{"role": "user", "content": "Tell me a story"}]
PERSON: Any = table("tables")["person"]


@pytest.fixture(scope="module")
def client(tiny_padded_8bit: Path) -> Iterator[Client]:
    """Constraints are on where nobody says otherwise, also for a padded vocabulary."""
    with serving(tiny_padded_8bit, parallel=4) as found:
        yield found


def ask(client: Client, seed: int = 0, **fields: Any) -> tuple[str, str]:
    answer = client.post(
        "/v1/chat/completions", messages=CHAT, max_tokens=200, temperature=1.5, seed=seed, **fields
    )
    assert answer.status == 200, answer.body
    choice = answer.json["choices"][0]
    return choice["message"]["content"], choice["finish_reason"]


def is_person(value: Any) -> bool:
    return (
        list(value) == ["name", "age", "kind", "tags"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 12
        and isinstance(value["age"], int)
        and 0 <= value["age"] <= 120
        and value["kind"] in ("cat", "dog")
        and len(value["tags"]) <= 3
        and all(isinstance(tag, bool) for tag in value["tags"])
    )


def test_a_schema_is_followed(client: Client) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    texts = set()
    for seed in range(5):
        text, reason = ask(client, seed, response_format=schema)
        assert reason == "stop"
        assert is_person(json.loads(text)), text
        texts.add(text)
        assert ask(client, seed, structured_outputs={"json": PERSON}) == (text, reason)
    assert len(texts) > 3
    said = client.post(
        "/v1/responses",
        input="Tell me a story",
        text={"format": {"type": "json_schema", "name": "person", "schema": PERSON}},
    ).json
    assert is_person(json.loads(said["output"][0]["content"][0]["text"]))


def test_rows_that_are_no_tokens_are_never_chosen(client: Client) -> None:
    constraints = client.server.serving.constraints
    assert not isinstance(constraints, str)
    n_tokens, n_rows = client.model.tokenizer.n_vocab, client.model.info.n_vocab
    assert n_tokens == n_rows - 77
    for kind, value in (("regex", "(?s:.*)"), ("json", PERSON), ("lark", "start: /(.|\\n)+/")):
        mask = constraints.make(kind, value, "x").mask()
        assert mask is not None
        assert len(mask) >= -(-n_rows // 8)
        assert any(mask)
        assert not int.from_bytes(mask, "little") >> n_tokens


def test_constraints_are_left_out_where_they_take_too_much(tiny_padded_8bit: Path) -> None:
    auto = read_constraints(tiny_padded_8bit, ServeOptions(), 1 << 20)
    assert isinstance(auto, str)
    assert "for a vocabulary of 2125 tokens" in auto
    asked = read_constraints(tiny_padded_8bit, ServeOptions(constraints=True), 1 << 20)
    assert not isinstance(asked, str)


def test_other_forms_are_followed(client: Client) -> None:
    for seed in range(2):
        text, _ = ask(client, seed, structured_outputs={"choice": ["yes", "no", "perhaps"]})
        assert text in ("yes", "no", "perhaps")
        text, _ = ask(client, seed, structured_outputs={"regex": "[a-f]{3}-[0-9]{2,4}"})
        assert re.fullmatch("[a-f]{3}-[0-9]{2,4}", text), text
        text, _ = ask(client, seed, grammar='root ::= "<" [xyz]+ ">" | "none"')
        assert re.fullmatch("<[xyz]+>|none", text) or text.startswith("<"), text
        text, reason = ask(client, seed, response_format={"type": "json_object"})
        if reason == "stop":
            assert isinstance(json.loads(text), dict)


def test_a_constraint_holds_in_a_stream_beside_others(client: Client) -> None:
    fields = {"messages": CHAT, "n": 3, "seed": 4, "temperature": 1.5, "max_tokens": 200}
    form = {"structured_outputs": {"json": PERSON}}
    events = client.post("/v1/chat/completions", {**fields, **form, "stream": True}).events
    assert events.pop() == "[DONE]"
    texts = ["", "", ""]
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert all(is_person(json.loads(text)) for text in texts)
    assert ask(client, 5, **form)[0] == texts[1]


def test_forced_tokens_ride_in_the_next_pass(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is the same as with a pass for each token, in fewer passes."""
    counters = client.server._metrics.counters
    schema: Any = table("tables")["long names"]
    long = {"const": "Once upon a time there was a girl. " * 20}
    for form, most in (
        ({"json": schema}, 0.6),
        ({"json": PERSON}, 0.95),
        ({"json": long}, 0.1),  # more than a pass takes
        ({"choice": ["yes"]}, 0.5),
    ):
        fields = {"messages": CHAT, "seed": 3, "max_tokens": 300, "n": 2, "temperature": 1.5}
        answers, passes = [], []
        for is_forcing in (True, False):
            with monkeypatch.context() as patch:
                if not is_forcing:
                    patch.setattr(Job, "take_forced", lambda _: "")
                n_before = counters["passes_total"]
                asked = {**fields, "structured_outputs": form, "cache_salt": str(is_forcing)}
                answer = client.post("/v1/chat/completions", asked).json
                answers.append([c["message"]["content"] for c in answer["choices"]])
                passes.append(counters["passes_total"] - n_before)
                assert (answer["timings"]["forced_n"] > 0) == is_forcing
        assert answers[0] == answers[1]
        assert passes[0] <= most * passes[1], (form, passes)
    text, _ = ask(client, structured_outputs={"json": long}, logprobs=True)
    assert json.dumps(long["const"]).startswith(text)


def test_a_grammar_that_fails_ends_its_own_request(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = Constraint.mask
    n_masks = 0

    def fail(self: Constraint) -> bytes | None:
        nonlocal n_masks
        n_masks += 1
        if n_masks == 4:
            raise QsfError("the grammar cannot be followed: too complex")
        return mask(self)

    monkeypatch.setattr(Constraint, "mask", fail)
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(ask, client, 1)
        answer = client.post(
            "/v1/chat/completions", messages=CHAT, structured_outputs={"json": PERSON}
        )
        assert (answer.status, answer.error["code"]) == (500, "engine_error")
        assert "too complex" in answer.error["message"]
        assert other.result()[0]


def test_what_cannot_be_enforced_is_refused(client: Client, tiny_llama_4bit: Path) -> None:
    deep: Any = {"type": "string"}
    for _ in range(28):
        deep = {"type": "array", "items": deep}
    schema = {"type": "object", "properties": {str(i): {} for i in range(501)}}
    for fields, name, said in (
        *refusals("constraints"),
        ({"grammar": "start: a\n" + "a: b?\nb: c\n" * 2000}, "grammar", "grammar"),
        ({"json": schema}, "json", "501 properties, and 500 is the limit"),
        ({"json": {"description": "x" * 70_000}}, "json", "65536 is the limit"),
        ({"grammar": "root ::= " + "(" * 5000}, "grammar", "grammar"),
        ({"regex": "(" * 5_000}, "regex", "cannot be enforced"),
        ({"regex": "(a?)" * 2000 + "a" * 2000}, "regex", "10000 characters, and 8192 is the limit"),
        ({"json": {"items": {"pattern": "a" * 9000}}}, "json", "9000 characters"),
        ({"grammar": "start: A\nA: " + '"a"? ' * 2000}, "grammar", "characters, and 8192"),
        ({"grammar": "\n" * 30_000}, "grammar", "No 'root' rule"),  # llguidance alone: 15 s
        ({"grammar": 'root ::= "a"\n' * 2001}, "grammar", "2001 rules, and 2000 is the limit"),
    ):
        answer = client.post(
            "/v1/chat/completions", messages=CHAT, max_tokens=5, structured_outputs=fields
        )
        assert answer.status == 400, fields
        assert answer.error["param"] == f"structured_outputs.{name}"
        assert said in answer.error["message"]
        assert "state" not in answer.error["message"]
    assert ask(client, structured_outputs={"json": deep})[0].startswith("[")
    with serving(tiny_llama_4bit, parallel=1, constraints=False) as plain:
        answer = plain.post("/v1/completions", prompt="x", response_format={"type": "json_object"})
        assert answer.status == 400
        assert "--constraints off" in answer.error["message"]


# ---- keywords that tokens cannot follow ----
UNIQUE: Any = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 3, "maxItems": 3}
UNIQUE |= {"uniqueItems": True}  # which no answer can have
NOT_ENFORCED = "x-qsf-unenforced"


def test_what_cannot_be_enforced_is_checked_and_said(client: Client) -> None:
    def form(schema: Any) -> Any:
        return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}

    fields: Any = {"messages": CHAT, "max_tokens": 60, "response_format": form(UNIQUE)}
    answer = client.post("/v1/chat/completions", fields)
    assert answer.headers[NOT_ENFORCED] == "uniqueItems; holds=no"
    fields["response_format"] = form({**UNIQUE, "minItems": 0, "maxItems": 1})
    answer = client.post("/v1/chat/completions", fields)
    assert answer.headers[NOT_ENFORCED] == "uniqueItems; holds=yes"
    fields["response_format"] = form(UNIQUE)
    answer = client.post("/v1/chat/completions", {**fields, "max_tokens": 1})
    assert answer.headers[NOT_ENFORCED] == "uniqueItems; holds=unknown"
    answer = client.post("/v1/chat/completions", {**fields, "stream": True})
    assert answer.headers[NOT_ENFORCED] == "uniqueItems"
    assert b"\n: x-qsf-unenforced: uniqueItems; holds=no\n\n" in answer.body


# ---- a sample of JSON schemas: every answer validates, or the schema is refused ----
SCHEMAS: dict[str, Any] = table("schemas")


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_every_answer_validates(client: Client, schema: Any) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    fields = {
        "messages": [{"role": "user", "content": "Tell me"}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
        "max_tokens": 250,
        "temperature": 1.5,
        "n": 4,
    }
    n_whole = 0
    for seed in (1, 5):
        answer = client.post("/v1/chat/completions", {**fields, "seed": seed})
        if answer.status == 400:  # refused, never dropped
            assert answer.error["code"] == "invalid_grammar"
            assert "multipleOf" in schema or "maxProperties" in schema, answer.error
            return
        for choice in answer.json["choices"]:
            if choice["finish_reason"] == "length":
                continue  # the beginning of one
            n_whole += 1
            value = json.loads(choice["message"]["content"])
            jsonschema.validate(value, schema, jsonschema.Draft202012Validator)
    assert n_whole > 0
