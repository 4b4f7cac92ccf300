"""/openapi.json says what the server does: against its routes, and by schemathesis's requests."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from make.served import serving
from qsf import Model
from qsf.serve.api.openapi import describe

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,negative_data_rejection,unsupported_method"
)


def test_it_has_the_routes(tiny_llama_4bit: Path) -> None:
    with serving(tiny_llama_4bit) as client:
        paths = client.get("/openapi.json").json["paths"]
        described = {
            (method.upper(), path.replace("{model}", client.server.serving.name))
            for path, operations in paths.items()
            for method in operations
        }
        table = client.server._endpoints
        assert described == set(table)
        for (method, path), endpoint in table.items():
            path = path.replace(client.server.serving.name, "{model}")
            operation = paths[path][method.lower()]
            assert ("requestBody" in operation) == endpoint.has_body
            assert ("security" in operation) == endpoint.is_open


def test_limits_are_those_of_the_checks() -> None:
    schemas = describe("1", "m")["paths"]["/v1/completions"]["post"]["requestBody"]
    fields = schemas["content"]["application/json"]["schema"]["properties"]
    assert fields["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 100}
    assert fields["logprobs"]["anyOf"][0] == {"type": "integer", "minimum": 0, "maximum": 20}


def test_all_that_readers_take_is_described() -> None:
    paths = describe("1", "m")["paths"]

    def fields(path: str) -> set[str]:
        body = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        return set(body["properties"])

    assert fields("/v1/chat/completions") >= {"n", "stop", "grammar", "logit_bias", "tool_choice"}
    assert fields("/v1/completions") >= {"echo", "best_of", "suffix", "ignore_eos"}
    assert fields("/v1/responses") >= {"input", "instructions", "reasoning", "text", "tools"}
    assert fields("/v1/messages") >= {"system", "stop_sequences", "thinking", "top_k"}
    assert fields("/tokenize") >= {"content", "prompt", "messages", "add_special_tokens"}
    assert fields("/apply-template") >= {"add_generation_prompt", "chat_template_kwargs"}


@pytest.mark.slow
def test_schemathesis_finds_nothing(tiny_chat_8bit: Path, tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    options: Any = {"max_seq_len": 64, "sessions": 2, "threads": 1}  # short answers
    with (
        Model(tiny_chat_8bit, ram_budget=None, **options) as model,
        serving(tiny_chat_8bit, model, parallel=2, constraints=True, any_model=True) as client,
    ):
        words = [sys.executable, "-m", "schemathesis.cli", "run", f"{client.url}/openapi.json"]
        words += ["--checks", CHECKS, "--max-examples", "20", "--generation-deterministic"]
        words += ["--request-timeout", "600", "--phases", "coverage,fuzzing"]
        words += ["--suppress-health-check", "all"]
        done = subprocess.run(
            words, cwd=tmp_path, env={**os.environ, "NO_COLOR": "1"}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert client.get("/health").status == 200
