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

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,negative_data_rejection,unsupported_method"
)


def test_it_has_the_routes(tiny_llama_4bit: Path) -> None:
    with serving(tiny_llama_4bit) as client:
        paths = client.get("/openapi.json").json["paths"]
        described = {
            (method.upper(), path) for path, operations in paths.items() for method in operations
        }
        assert described == set(client.server.routes)
        for (method, path), route in client.server.routes.items():
            operation = paths[path][method.lower()]
            assert ("requestBody" in operation) == (route.body is not None)
            assert ("security" in operation) == route.is_open


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
