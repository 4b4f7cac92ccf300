"""``qsf`` on a pseudo-terminal, as a user types: chat, paste, Ctrl-C, resize, commands."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from make.commands import Run
from make.fake_hub import REPO, FakeHub
from make.fake_hub import hub as hub
from make.terminals import OnTerminal
from qsf.cli.run.main import echo_of

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals"),
    pytest.mark.filterwarnings("ignore:.*forkpty.*:DeprecationWarning"),
]

GREEDY = ("-n", 5, "--temperature", 0)


def test_a_chat_with_every_command(
    on_terminal: OnTerminal, tiny_chat_8bit: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "saved.json"
    chat = on_terminal(tiny_chat_8bit, *GREEDY)
    chat.read_until(", context 512. /help says what can be typed.")
    for line, answer in (
        ("/help", "Ctrl-C stops an answer"),
        ("/nonsense", "(/nonsense is not known; there are /system"),
        ("/retry", "(there is no question yet)"),
        ("/system Be brief.", "(the model is told so from now on)"),
        ("Hi", "5 tokens, "),
        ("/context", " of 512 tokens, "),
        ("/retry", "5 tokens, "),
        ("/set temperature hot", "(temperature: 'hot' is not a number from 0 to 100)"),
        ("/set max-tokens 3", "\n"),
        ("And you?", "(cut after 3 tokens: /set max-tokens -1 lets it end)"),
        (f"/save {saved}", "(5 messages are in "),
        ("/undo", "(the last question and its answer are forgotten)"),
        ("/reset", "(the conversation is forgotten)"),
        (f"/load {saved}", "the next answer reads them again)"),
        ("/load absent.json", "(absent.json: No such file or directory)"),
    ):
        chat.ask(line + "\n", answer)
    chat.ask("\x03", "(Ctrl-D or /exit ends)")
    chat.ask("\x04", "\n")
    assert chat.wait() == 0
    assert "Traceback" not in chat.text
    roles = [message["role"] for message in json.loads(saved.read_text("utf-8"))]
    assert roles == ["system", "user", "assistant", "user", "assistant"]


def test_pasted_lines_and_quoted_lines_are_one_message(
    on_terminal: OnTerminal, tiny_chat_8bit: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "saved.json"
    chat = on_terminal("chat", tiny_chat_8bit, *GREEDY)
    chat.ask("\x1b[200~one\ntwo\x1b[201~\n", "5 tokens, ")
    chat.resize(10, 20)
    chat.ask('"""three\n', ". ")
    chat.type('\nfour"""\n')
    chat.read_until("5 tokens, ")
    chat.ask(f"/save {saved}\n", "(4 messages")
    chat.ask("/exit\n", "\n")
    assert chat.wait() == 0
    asked = [m["content"] for m in json.loads(saved.read_text("utf-8")) if m["role"] == "user"]
    assert asked == ["one\ntwo", "three\n\nfour"]


def test_lines_are_remembered_over_runs(
    on_terminal: OnTerminal, tiny_chat_8bit: Path, tmp_path: Path
) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    for typed in ("/system A bird.\n", "\x1b[A\n"):  # the second time: the key "up"
        chat = on_terminal("chat", tiny_chat_8bit, environment=environment)
        chat.ask(typed, "(the model is told so from now on)")
        chat.ask("\x04", "\n")
        assert chat.wait() == 0
    history = tmp_path / "qsf" / "history"
    assert set(history.read_text("utf-8").splitlines()) == {"/system A bird."}
    assert history.stat().st_mode & 0o077 == 0


def test_the_last_question_can_be_edited(
    on_terminal: OnTerminal, run: Run, tiny_chat_8bit: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "saved.json"
    chat = on_terminal("chat", tiny_chat_8bit, *GREEDY)
    chat.ask("/edit\n", "(there is no question yet)")
    chat.ask("Hello\n", "5 tokens, ")
    chat.ask("/edit\n", "> Hello")
    chat.type("\x03")
    chat.read_until("(Ctrl-D or /exit ends)")
    chat.ask("/edit\n", "> Hello")
    chat.type(" there\n")
    chat.read_until("5 tokens, ")
    chat.ask(f"/save {saved}\n", "(2 messages")
    assert f"{tiny_chat_8bit.stem}: llama, 3M weights, 8bit, in " in chat.text
    for typed, answer in (
        ("\x15/context\n", "in 2 messages)"),
        ("\x15\n", "(nothing has changed)"),
    ):
        chat.ask("/edit\n", "(an empty line or Ctrl-C leaves it as it was)")
        chat.read_until("> Hello there")
        chat.type(typed)
        chat.read_until(answer)
    chat.ask("/edit\n", "> Hello there")
    chat.type("\x15/exit\n")
    assert chat.wait() == 0
    assert json.loads(saved.read_text("utf-8"))[0]["content"] == "Hello there"
    listed = run(tiny_chat_8bit, "-i", "--temp", 0, stdin="/set\n/quit\nHello\n")
    assert listed.stdout == ""
    for line in ("max-tokens           -1 (until the model ends)", "top-p                0.9"):
        assert f"{line}\n" in listed.stderr
    piped = run(tiny_chat_8bit, "-i", *GREEDY, stdin="Hello\n/edit\n")
    assert piped.returncode == 0
    assert "(/edit needs a terminal: /undo, and ask again)" in piped.stderr


def test_tab_completes_commands_settings_and_files(
    on_terminal: OnTerminal, tiny_chat_8bit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a long path would fill the line
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "talk.json").write_text("[]", "utf-8")
    chat = on_terminal("chat", tiny_chat_8bit, *GREEDY)
    chat.ask("/sys\tBe brief.\n", "(the model is told so from now on)")
    chat.ask("/set tempera\t0.5\n", "\n")
    chat.ask("/load fol\tta\t\n", "/load folder/talk.json")
    chat.ask("/thi\th\t\n", "(thoughts are not shown from now on)")
    chat.ask("/set\n", "temperature          0.5")
    chat.ask("a\tb\n", "5 tokens, ")  # in a message Tab does nothing
    chat.ask("/exi\t\n", "\n")
    assert chat.wait() == 0
    assert "> ab" in chat.text.replace("\a", "")


def test_keys_pressed_during_an_answer_wait_for_the_next_line(
    on_terminal: OnTerminal, tiny_chat_8bit: Path
) -> None:
    chat = on_terminal("chat", tiny_chat_8bit, "--temperature", 0, "--plain", "-n", 400)
    chat.read_until("> ")
    chat.type("Once upon a time\n")
    chat.read_until("time\r\n")
    chat.read_until(" ")  # the answer has begun
    chat.type("/context")
    chat.read_until(" tokens, ")
    answer = chat.text.split("time\r\n", 1)[1]
    assert "/context" not in answer
    chat.read_until("> /context")
    chat.type("\n")
    chat.read_until("tokens, ")
    chat.ask("\x04", "\n")
    assert chat.wait() == 0


@pytest.mark.parametrize(("environment", "is_dim"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colours_only_where_they_are_wanted(
    on_terminal: OnTerminal, tiny_chat_8bit: Path, environment: dict[str, str], is_dim: bool
) -> None:
    chat = on_terminal(tiny_chat_8bit, *GREEDY, environment={"TERM": "xterm", **environment})
    chat.ask("Hi\n", "5 tokens, ")
    chat.ask("\x04", "\n")
    assert chat.wait() == 0
    assert ("\x1b[2m" in chat.text) == is_dim


def test_a_download_is_asked_for_on_the_terminal(on_terminal: OnTerminal, hub: FakeHub) -> None:
    options = ("run", REPO, "-p", "Once upon a time", *GREEDY)
    question = f"{REPO} is not on this machine. Download 5.6 MB? [y/N] "
    refused = on_terminal(*options)
    refused.read_until(question)
    refused.type("\n")
    assert refused.wait() == 1
    assert f"{REPO} was not downloaded" in refused.text
    assert hub.fetched == []
    accepted = on_terminal(*options)
    accepted.read_until(question)
    accepted.type("y\n")
    assert accepted.wait() == 0
    assert ", there was a" in accepted.text
    assert "model.safetensors" in {name for name, _ in hub.fetched}


def test_the_echo_of_a_prompt_steers_no_terminal() -> None:
    assert echo_of("Once\x1b[2J upon\ta\n\u202etime\u00e9") == "Once[2J upon\ta\ntime\u00e9"
