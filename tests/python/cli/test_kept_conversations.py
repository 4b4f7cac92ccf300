"""``qsf run --session``, ``/save``, ``/load`` and ``qsf sessions``: conversations that last."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from pathlib import Path

from make.commands import Run, check_refused
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
