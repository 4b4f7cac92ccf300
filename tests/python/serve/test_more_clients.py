"""Clients that are too large for every environment: `make build/clients.stamp` installs them."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from make.served import Client, serving

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = sorted(path for path in (ROOT / "tests" / "clients").glob("*_*.*"))
INSTALLED = ROOT / "build" / "clients"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(tiny_chat_8bit: Path) -> Iterator[Client]:
    with serving(tiny_chat_8bit, parallel=2, any_model=True) as found:
        yield found


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: str(path.stem))
def test_a_client_gets_the_text(program: Path, client: Client, tmp_path: Path) -> None:
    interpreter = INSTALLED / "bin" / "python"
    modules = tmp_path / "node_modules"
    if program.suffix == ".mjs":
        interpreter = Path(shutil.which("node") or "node")
        modules.symlink_to(INSTALLED / "node_modules")
    is_complete = INSTALLED.with_suffix(".stamp").exists() and interpreter.exists()
    if not is_complete or (modules.is_symlink() and not modules.is_dir()):
        pytest.skip("needs make build/clients.stamp, and for some Node 18 with npm")
    shutil.copy(program, tmp_path)
    done = subprocess.run(
        [str(interpreter), program.name, client.url],
        cwd=tmp_path,
        env={**os.environ, "HF_HOME": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "true"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    fields = {"messages": [{"role": "user", "content": "Tell me a story"}], "max_tokens": 20}
    answer = client.post("/v1/chat/completions", {**fields, "temperature": 0}).json
    text = answer["choices"][0]["message"]["content"]
    assert set(json.loads(done.stdout.splitlines()[-1])) <= {text}
