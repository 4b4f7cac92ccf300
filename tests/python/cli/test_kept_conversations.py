"""``qsf run --session``, ``/save``, ``/load`` and ``qsf sessions``; ``--prompts``."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import re
import signal
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from make.commands import Run, Start, check_refused
from qsf.file.session_file import SessionFile, write_session

GREEDY = ("-n", 6, "--temperature", 0)


def evaluated(stderr: str) -> int:
    return int(stderr.split("prompt ")[1].split()[0])


def test_a_session_goes_on_as_if_it_had_stayed(
    run: Run, qsf: Run, tiny_chat_8bit: Path, tmp_path: Path
) -> None:
    asked = "Hi", "And you?", "Why?"
    stayed = run(tiny_chat_8bit, "-i", *GREEDY, stdin="\n".join(asked) + "\n").stdout
    apart, told = "", []
    for prompt in asked:
        done = run(tiny_chat_8bit, "-p", prompt, *GREEDY, "--session", "talk.qsfs", "-v")
        assert done.returncode == 0, done.stderr
        apart += done.stdout
        told.append(done.stderr)
    assert apart == stayed
    by_messages = run(tiny_chat_8bit, "-p", "Hi", *GREEDY, "--session", "talk.json")
    again = run(tiny_chat_8bit, "-p", "And you?", *GREEDY, "--session", "talk.json")
    assert by_messages.stdout + again.stdout == "".join(stayed.splitlines(keepends=True)[:2])
    assert isinstance(json.loads((tmp_path / "talk.json").read_text("utf-8")), list)
    listed = qsf("sessions", "list", "--json")
    facts = json.loads(listed.stdout)[0]
    assert facts["file"] == "talk.qsfs"
    assert [m["content"] for m in facts["messages"][::2]] == list(asked)
    assert facts["tokens"] > 20


def test_a_chat_saves_and_loads(run: Run, tiny_chat_8bit: Path, tmp_path: Path) -> None:
    first = run(
        tiny_chat_8bit, "-i", *GREEDY, stdin="Hi\n/save kept\n/reset\n/load kept\n/context\n"
    )
    assert first.stderr.count("(2 messages are in kept)") == 1
    assert "(2 messages from kept: " in first.stderr
    held = first.stderr.split("(2 messages from kept: ")[1]
    assert " tokens, " in held
    assert "(0 of" not in held
    (tmp_path / "kept").write_bytes((tmp_path / "kept").read_bytes()[:-1])
    broken = run(tiny_chat_8bit, "-i", *GREEDY, stdin="/load kept\n")
    assert "truncated or extended" in broken.stderr
    assert broken.returncode == 0


def test_what_cannot_go_on_is_evaluated_again(
    run: Run, tiny_chat_8bit: Path, tmp_path: Path
) -> None:
    options = (*GREEDY, "--session", "talk.qsfs")
    assert run(tiny_chat_8bit, "-p", "Hi", *options).returncode == 0
    kept = (tmp_path / "talk.qsfs").read_bytes()
    want = run(tiny_chat_8bit, "-p", "And you?", *options).stdout

    broken = bytearray(kept)
    broken[-100] ^= 1  # of the KV cache
    (tmp_path / "talk.qsfs").write_bytes(broken)
    damaged = run(tiny_chat_8bit, "-p", "And you?", *options)
    assert damaged.stdout == want
    assert "do not have their checksum" in damaged.stderr
    assert "evaluated again" in damaged.stderr

    (tmp_path / "talk.qsfs").write_bytes(kept)
    other = run(tiny_chat_8bit, "-p", "And you?", *options, "--kv-type", "f16")
    assert other.returncode == 0
    assert "with a KV cache of 8bit" in other.stderr

    broken = bytearray(kept)
    broken[130] ^= 1  # of the messages
    (tmp_path / "talk.qsfs").write_bytes(broken)
    refused = run(tiny_chat_8bit, "-p", "And you?", *options, "-q")
    check_refused(refused, 1, "is damaged")
    assert (tmp_path / "talk.qsfs").read_bytes() == broken


def test_sessions_are_listed_shown_and_removed(
    run: Run, qsf: Run, tiny_chat_8bit: Path, tmp_path: Path
) -> None:
    assert "no session files" in qsf("sessions", "list").stdout
    run(tiny_chat_8bit, "-p", "Hi\x1b[31m there", *GREEDY, "--session", "talk.qsfs")
    (tmp_path / "other.txt").write_text("mine", "utf-8")
    listed = qsf("sessions", "list").stdout
    assert "talk.qsfs" in listed
    assert "there" in listed
    assert "\x1b" not in listed
    assert "other.txt" not in listed
    shown = qsf("sessions", "show", "talk.qsfs")
    assert "all checksums right" in shown.stdout
    assert "user: Hi" in shown.stdout
    assert "\x1b" not in shown.stdout
    with SessionFile(tmp_path / "talk.qsfs") as file:
        head = replace(file.head, kv_type="k8\x1b[2J\n", model="\x9b31m", tokens=array("I"))
    head = replace(head, has_logits=False, state_bytes=0)
    write_session(tmp_path / "steer\x1b[2J", head, lambda *_: 0)
    for words in (["list"], ["show", "steer\x1b[2J"], ["rm", "steer\x1b[2J"]):
        for form in ([], ["--json"]) if words[0] != "rm" else ([],):
            printed = qsf("sessions", *words, *form)
            assert printed.returncode == 0
            assert printed.stdout.replace("\n", "").isprintable()
    data = bytearray((tmp_path / "talk.qsfs").read_bytes())
    data[-1] ^= 1
    (tmp_path / "broken").write_bytes(data)
    data[128] ^= 1
    (tmp_path / "worse").write_bytes(data)
    assert qsf("sessions", "show", "broken").returncode == 1
    assert "damaged" in qsf("sessions", "list").stdout
    refused = qsf("sessions", "rm", "talk.qsfs", "other.txt")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "is no session file" in refused.stderr
    assert (tmp_path / "talk.qsfs").exists()
    assert qsf("sessions", "rm", "talk.qsfs", "broken").returncode == 0
    assert not (tmp_path / "talk.qsfs").exists()
    assert (tmp_path / "other.txt").exists()
    assert qsf("sessions", "list", "nowhere").returncode == 1


# ---- ``qsf run --prompts``: many prompts of a file, and going on after an interruption ----
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
