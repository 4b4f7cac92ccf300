"""``qsf run --prompts``: many prompts of a file, and going on after an interruption."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from make.commands import Run, Start, check_refused

MAN = {"prompt": "The old man", "id": "man"}
LINES: list[Any] = ["Once upon a time", MAN, "She", {"prompt": "A"}]
ALWAYS = ("--seed", 5, "-n", 12)


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES), "utf-8")
    return path


def records(text: str) -> list[dict[str, Any]]:
    return sorted(map(json.loads, text.splitlines()), key=lambda record: int(record["index"]))


def texts(text: str) -> list[str]:
    return [record["text"] for record in records(text)]


def test_each_line_is_answered_as_alone(run: Run, tiny_llama_8bit: Path, asked: Path) -> None:
    done = run(tiny_llama_8bit, "--prompts", asked, "--parallel", 3, *ALWAYS)
    assert done.returncode == 0, done.stderr
    have = records(done.stdout)
    assert [record.get("id") for record in have] == [None, "man", None, None]
    for line, record in zip(LINES, have, strict=True):
        prompt = line if isinstance(line, str) else line["prompt"]
        alone = json.loads(run(tiny_llama_8bit, "-p", prompt, "--json", *ALWAYS).stdout)
        assert record["text"] == alone["text"]
        assert record["ids"] == alone["ids"]
        assert record["stop_reason"] == alone["stop_reason"]


def test_prompts_from_standard_input_by_the_chat_template(run: Run, tiny_chat_8bit: Path) -> None:
    asked = "Hello"
    lines = [json.dumps(asked), json.dumps({"messages": [{"role": "user", "content": asked}]})]
    done = run(tiny_chat_8bit, "--prompts", "-", *ALWAYS, stdin="\n".join(lines))
    alone = run(tiny_chat_8bit, "-p", asked, "-q", *ALWAYS).stdout.removesuffix("\n")
    assert texts(done.stdout) == [alone, alone]
    done = run(tiny_chat_8bit, "--prompts", "-", "--raw", *ALWAYS, stdin=lines[1])
    assert "messages need a chat template" in records(done.stdout)[0]["error"]


def test_it_goes_on_where_it_was_interrupted(
    run: Run, tiny_llama_8bit: Path, asked: Path, tmp_path: Path
) -> None:
    answers = tmp_path / "answers.jsonl"
    asks = ("--prompts", asked, "--parallel", 2, *ALWAYS)
    want = texts(run(tiny_llama_8bit, *asks).stdout)
    many = (*asks, "--answers", answers)
    assert run(tiny_llama_8bit, *many).stdout == ""
    whole = answers.read_bytes()
    assert texts(whole.decode()) == want
    lines = whole.splitlines(keepends=True)
    for cut in (0, len(lines[0]) - 1, len(lines[0]), len(lines[0]) + 7, len(whole) - 1):
        answers.write_bytes(whole[:cut])
        done = run(tiny_llama_8bit, *many)
        assert done.returncode == 0, done.stderr
        assert texts(answers.read_text("utf-8")) == want
        n_done = whole[:cut].count(b"\n")
        assert (f"{n_done} prompts are answered" in done.stderr) == (n_done > 0)
    done = run(tiny_llama_8bit, *many, "-q")  # all are answered
    assert (done.returncode, done.stderr) == (0, "")
    assert texts(answers.read_text("utf-8")) == want


def test_a_signal_leaves_whole_lines(start: Start, tiny_llama_8bit: Path, tmp_path: Path) -> None:
    asked, answers = tmp_path / "asked.jsonl", tmp_path / "answers.jsonl"
    asked.write_text('"Once upon a time"\n' * 100_000, "utf-8")
    process = start(tiny_llama_8bit, "--prompts", asked, "-n", 3, "--answers", answers)
    with process:
        while not answers.exists() or answers.read_bytes().count(b"\n") < 5:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    text = answers.read_text("utf-8")
    assert text.endswith("\n")
    assert len({record["index"] for record in records(text)}) == text.count("\n")


def test_other_answers_are_refused(run: Run, tiny_llama_8bit: Path, asked: Path) -> None:
    answers = asked.with_name("answers.jsonl")
    many = ("--prompts", asked, "--answers", answers)
    run(tiny_llama_8bit, *many, *ALWAYS)
    check_refused(run(tiny_llama_8bit, *many, "--seed", 6, "-q"), 1, "give a new file")
    short = asked.with_name("short.jsonl")
    short.write_text(asked.read_text("utf-8").split("\n")[0], "utf-8")
    check_refused(
        run(tiny_llama_8bit, "--prompts", short, "--answers", answers, *ALWAYS, "-q"), 1, "lacks"
    )
    # The digests are indexed by line: a line far away would take more than the file has bytes.
    of_index = '{"index": %s, "of": "ff"}\n'
    for line, said in (
        ("something else\n", "no answer of qsf run"),
        *((of_index % i, "line 1: no answer of qsf run") for i in ("1e999", '"\\ud800"', "null")),
        (of_index % 1000000000, "answers a line beyond"),
    ):
        answers.write_text(line, "utf-8")
        check_refused(run(tiny_llama_8bit, *many, *ALWAYS), 1, said)
        assert answers.read_text("utf-8") == line


def test_an_id_comes_back_as_it_was(run: Run, tiny_llama_8bit: Path, tmp_path: Path) -> None:
    path, answers = tmp_path / "asked.jsonl", tmp_path / "answers.jsonl"
    ids = ["\ud800", "\x1b[31m\x9b1m", "\N{EURO SIGN}", [1, {"a": None}]]
    lines = [json.dumps({"prompt": "She", "id": name}) for name in ids]
    path.write_text("\n".join([*lines, '{"prompt": "She", "id": 1e999}', ""]), "utf-8")
    words = [tiny_llama_8bit, "--prompts", path, "-n", 1, "-q"]
    shown = run(*words).stdout
    run(*words, "--answers", answers)
    for text in (shown, answers.read_text("utf-8")):
        assert [record.get("id") for record in records(text)] == [*ids, None]
        assert "cannot be given back" in records(text)[-1]["error"]
        assert text.replace("\n", "").isprintable()
        assert "\N{EURO SIGN}" in text


WRONG_LINES = {
    "{": "not JSON",
    "[" * 100_000: "nested 100000 deep",
    "3": "must be a text, or an object",
    '{"prompt": "a", "messages": []}': "must be a text, or an object",
    '{"prompt": 3}': "prompt must be a text",
    '{"messages": "a"}': "need a chat template|must be a list",
    '{"prompt": "a", "temperature": 1}': "'temperature'; id, prompt and messages",
    json.dumps("word " * 3000): "context|too long",
}


def test_a_wrong_line_is_answered_with_its_error(run: Run, tiny_llama_8bit: Path) -> None:
    lines = "\n".join([*WRONG_LINES, '"She"', ""])
    done = run(tiny_llama_8bit, "--prompts", "-", "-n", 2, stdin=lines)
    assert done.returncode == 1
    assert f"{len(WRONG_LINES)} prompts have no answer" in done.stderr
    found = records(done.stdout)
    for record, said in zip(found, WRONG_LINES.values(), strict=False):
        assert re.search(said, record["error"])
    assert found[-1]["text"]
    assert len(found) == len(WRONG_LINES) + 1
