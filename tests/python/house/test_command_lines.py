"""Each command line of README.md and docs/use.md runs, in a folder with the files they name."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from make.calibrated_models import rewrite, small_llama
from make.commands import Run
from make.refusals import table
from qsf_converter import convert

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = ("README.md", "docs/use.md")

# The command lines that do not run here, by how they begin, and why.
LEFT_OUT = table("tables")["commands left out"]


def command_lines(document: str) -> list[str]:
    """The commands of the code blocks of a document, without comments."""
    text = (ROOT / document).read_text("utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in (re.sub(r"\s+#.*", "", line).strip() for line in lines) if line]


def reason_to_leave_out(line: str) -> str:
    return next((why for start, why in LEFT_OUT.items() if line.startswith(start)), "")


@pytest.fixture
def folder(tmp_path: Path, tiny_chat_8bit: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the documents name: models, texts, and a checkpoint with a chat template."""
    words = tiny_chat_8bit.parent / "tiny-chat"
    checkpoint = tmp_path / "path" / "to" / "hf-model"
    checkpoint.parent.mkdir(parents=True)
    small_llama(checkpoint, tokenizer_from=words, n_layers=6, head_dim=16, max_tokens=512)
    convert(checkpoint, tmp_path / "model.qsf")
    (tmp_path / "large.qsf").symlink_to("model.qsf")
    importance = [3.0, 1.0, 2.0, 1.5, 2.5, 4.0]
    rewrite(tmp_path / "model.qsf", tmp_path / "calibrated.qsf", importances=importance)
    story = "Once upon a time there was a cat. It saw a small house and ran to its mother. " * 15
    (tmp_path / "test.txt").write_text(story[:1000], "utf-8")
    lines = "".join(json.dumps({"text": story}) + "\n" for _ in range(2))
    (tmp_path / "my-texts.jsonl").write_text(lines, "utf-8")
    (tmp_path / "asked.jsonl").write_text('"Who are you?"\n{"prompt": "Hello", "id": 7}\n', "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_line(words: list[str], qsf: Run, process: Run) -> subprocess.CompletedProcess[str]:
    """In this process, but for those that count the memory of theirs."""
    assert words[0] == "qsf"
    if words[1] == "convert":
        Path(words[3]).unlink(missing_ok=True)  # what an earlier line has left
    call = process if words[1] in ("run", "chat") else qsf
    return call(*words[1:], stdin="Who are you?\n" if words[1] == "chat" else "")


@pytest.mark.parametrize(
    "document", ["README.md", pytest.param("docs/use.md", marks=pytest.mark.slow)]
)
def test_every_command_line_runs(document: str, folder: Path, qsf: Run, process: Run) -> None:
    n_run = 0
    for line in command_lines(document):
        if reason_to_leave_out(line):
            continue
        done = run_line(shlex.split(line), qsf, process)
        assert done.returncode == 0, f"{line}: {done.stderr}"
        assert done.stdout or "--answers" in line, line
        n_run += 1
    assert n_run > 5


def test_what_is_left_out_is_in_a_document() -> None:
    lines = [line for document in DOCUMENTS for line in command_lines(document)]
    for start in LEFT_OUT:
        assert any(line.startswith(start) for line in lines), start
