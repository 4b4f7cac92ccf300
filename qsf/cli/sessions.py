"""``qsf sessions``: the files that ``qsf run --session`` and ``Session.save`` keep sessions in."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from qsf.errors import QsfArgumentError, QsfError, QsfIOError, one_line
from qsf.file.session_file import SessionFile, is_session_file
from qsf.shell import command, typer_app

_MB = 2**20
_MAX_SHOWN = 60  # characters of a message in a list

app = typer_app.create_app()
main = typer_app.runner(app, "qsf sessions")

_Files = Annotated[list[Path], typer.Argument(help="session files")]
_Json = Annotated[bool, typer.Option("--json", help="print JSON")]


@app.callback()
def about() -> None:
    """List, show and remove files with sessions: a conversation and its KV cache."""


@app.command("list")
def list_sessions(
    folder: Annotated[Path, typer.Argument(help="where they are")] = Path(),
    is_json: _Json = False,
) -> None:
    """List the session files of a folder."""
    try:
        paths = [path for path in folder.iterdir() if is_session_file(path)]
        paths.sort(key=lambda path: -path.stat().st_mtime)
    except OSError as error:
        raise QsfIOError(f"{folder}: {error.strerror}") from error
    sessions = [_facts(path) for path in paths]
    if is_json:
        command.show_json(sessions)
        return
    if not sessions:
        command.show_lines(f"no session files in {folder}: qsf run --session FILE keeps one")
        return
    width = max(len(facts["file"]) for facts in sessions)
    command.show_lines(
        f"{'file':<{width}}  {'tokens':>7} {'MB':>8}  {'written':<16}  last question"
    )
    for facts in sessions:
        command.show_lines(
            f"{one_line(facts['file']):<{width}}  {facts['tokens']:>7} "
            f"{facts['bytes'] / _MB:>8.1f}  {facts['written']:<16}  {_question(facts)}"
        )


@app.command()
def show(files: _Files, is_json: _Json = False) -> None:
    """Say what is in session files, check them, and print the conversation."""
    shown = []
    for path in files:
        with SessionFile(path) as file:
            file.check_blocks()
        shown.append(_facts(path))
    if is_json:
        command.show_json(shown)
        return
    for facts in shown:
        line = (
            f"{facts['file']}: {facts['tokens']} tokens of {facts['model']}, KV cache "
            f"{facts['kv_type']}, {facts['bytes'] / _MB:.1f} MB, all checksums right"
        )
        command.show_lines(one_line(line))
        for message in facts["messages"]:
            command.show_lines(f"{one_line(message['role'])}: {message['content']}")


@app.command()
def rm(files: _Files) -> None:
    """Remove session files."""
    for path in files:
        if not is_session_file(path):
            reason = "is no session file" if path.exists() else "there is no such file"
            raise QsfArgumentError(f"{path}: {reason}")
    for path in files:
        n_bytes = path.stat().st_size
        path.unlink()
        command.show_lines(f"removed {one_line(str(path))}, {n_bytes / _MB:,.1f} MB")


def _facts(path: Path) -> dict[str, Any]:
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
    facts = {"file": str(path), "bytes": path.stat().st_size, "written": written}
    try:
        with SessionFile(path) as file:
            head = file.head
    except QsfError as error:
        nothing = {"tokens": 0, "model": "", "kv_type": "", "messages": []}
        return facts | nothing | {"error": str(error)}
    return facts | {
        "tokens": len(head.tokens),
        "model": head.model,
        "kv_type": head.kv_type,
        "messages": list(head.messages),
    }


def _question(facts: dict[str, Any]) -> str:
    if "error" in facts:
        return "damaged"
    user_texts = [m["content"] for m in facts["messages"] if m["role"] == "user"]
    text = one_line(str(user_texts[-1])) if user_texts else ""
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"
