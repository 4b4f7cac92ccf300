"""``qsf ps`` lists the servers that run, ``qsf stop`` stops one."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from make.commands import Run
from make.served import Client, started
from qsf.cli import servers
from qsf.cli.announced import Running, running_servers
from qsf.system import files


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "qsf" / "servers"


@pytest.fixture
def listed(qsf: Run) -> Callable[[], Any]:
    return lambda: json.loads(qsf("ps", "--json").stdout)


def wait_for_start(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    while " at " not in (line := process.stderr.readline()):
        assert line


@pytest.fixture
def server(tiny_llama_4bit: Path) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-m", "qsf", "serve", str(tiny_llama_4bit), "--port", "0"]
    with started([*words, "--alias", "tiny", "--ram-budget", "120"]) as process:
        wait_for_start(process)
        yield process


def test_one_is_listed_and_stopped(
    qsf: Run, listed: Callable[[], Any], server: subprocess.Popen[str], state: Path
) -> None:
    (facts,) = listed()
    assert (facts["name"], facts["pid"]) == ("tiny", server.pid)
    assert re.fullmatch(r"in memory \d+ MB of at most 120 MB", facts["memory"])
    assert facts["url"].startswith("http://127.0.0.1:")
    assert f"tiny  {facts['url']}  {facts['memory']}  process" in qsf("ps").stdout
    wrong = qsf("stop", "other")
    assert "no server is other; these run: tiny" in wrong.stderr
    done = qsf("stop")
    assert done.stdout == f"stopped tiny at {facts['url']}\n"
    assert server.wait(10) == 0
    assert listed() == []
    assert list(state.iterdir()) == []
    assert "no server runs" in qsf("stop").stderr
    assert "qsf serve MODEL" in qsf("ps").stdout


def test_one_of_several_models_leaves_memory(
    qsf: Run, listed: Callable[[], Any], tiny_llama_4bit: Path, tiny_chat_8bit: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    for name, path in (("four", tiny_llama_4bit), ("chat", tiny_chat_8bit)):
        (folder / f"{name}.qsf").symlink_to(path)
    where = tmp_path / "socket"
    words = [sys.executable, "-m", "qsf", "serve", str(folder), "--host", str(where)]
    with started([*words, "--keep-alive", "2h", "--ram-budget", "200"]) as process:
        wait_for_start(process)
        (facts,) = listed()
        assert 6900 < facts["models"]["chat"] <= 7201
        assert "  chat is in memory, leaves in " in qsf("ps").stdout
        wrong = qsf("stop", "four")  # which is not in memory
        assert "no server is four; these run: chat, four" in wrong.stderr
        assert qsf("stop", "chat").stdout == f"chat leaves memory at {where}\n"
        for _ in range(50):
            if listed()[0]["models"] == {}:
                break
        assert listed()[0]["models"] == {}
        assert qsf("stop").stdout == f"stopped chat, four at {where}\n"
        assert process.wait(10) == 0


@pytest.mark.skipif(os.name != "posix", reason="named pipes and locks of POSIX")
def test_strange_files_are_no_servers(qsf: Run, listed: Callable[[], Any], state: Path) -> None:
    """A pid of 0 or -1 would signal a whole group, a named pipe would wait for ever."""
    state.mkdir(parents=True)
    facts = {"pid": os.getpid(), "name": "x", "url": "y", "memory": "z", "started": 0}
    (state / f"{os.getpid()}.json").write_text(json.dumps(facts), "utf-8")  # not locked
    (state / "3.json").symlink_to("/etc/passwd")
    os.mkfifo(state / "9.json")
    (state / "2.json").mkdir()
    good: dict[str, Any] = {
        "name": "x",
        "url": "http://127.0.0.1:1",
        "memory": "1 MB",
        "started": 5,
    }
    strange: list[dict[str, Any]] = [{"pid": 0}, {"pid": -1}, {"pid": 1}, {"pid": 2**40},
               {"pid": 77, "started": "5"},
               {"pid": 78, "name": None}, {"pid": 79, "url": []}, {"pid": True}]  # fmt: skip
    with ExitStack() as stack:
        for facts in (*strange, {"pid": 4, "url": "http://[::1"}, {"pid": 5, "url": "http://x:y"}):
            path = state / f"{facts['pid']}.json"
            path.write_text(json.dumps(good | facts))
            fd = os.open(path, os.O_RDWR)
            stack.callback(os.close, fd)
            files.try_lock(fd)
        assert {server.pid for server in running_servers()} == {4, 5}
        assert [each["models"] for each in listed()] == [{}, {}]
    assert running_servers() == []
    assert qsf("stop", str(os.getpid())).returncode == 1


@pytest.mark.parametrize("facts", [None, [], {"models": 1}, {"models": [{"name": 1}]},
                                   {"models": [{"name": "a", "expires_at": "never"}]}])  # fmt: skip
def test_an_answer_of_another_program_names_no_models(
    facts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "_ask", lambda *_: (200, facts))
    assert servers._in_memory(Running(9, "x", "/s", "in memory 1 MB", 1)) == {}


def test_the_budget_that_a_refusal_names_will_do(
    tiny_llama_8bit: Path, converted: Callable[[str, str], Path]
) -> None:
    """Also where grammars have no room, and it says why the draft model is left out."""
    words = [sys.executable, "-m", "qsf", "serve", str(tiny_llama_8bit), "--port", "0"]
    words += ["--draft", str(converted("tiny-llama", "2bit")), "--ram-budget"]
    refused = subprocess.run([*words, "1"], capture_output=True, text=True, check=False)
    named = re.search(r"set --ram-budget (\d+),", refused.stderr)
    assert named is not None, refused.stderr
    with started([*words, named[1]]) as process:
        wait_for_start(process)
        assert process.stderr is not None
        assert f"of at most {named[1]} MB, " in process.stderr.readline()
        assert "without the draft model, which takes " in process.stderr.readline()


def random_words(seed: int) -> list[str]:
    rng = random.Random(seed)
    choices: dict[str, list[object]] = {
        "--ram-budget": [None, rng.randint(70, 110), 200],
        "--max-seq-len": [None, 96, 256],
        "--kv-type": [None, "f16", "k8v4"],
        "--threads": [1, 2],
        "--parallel": [1, 2, 4],
        "--constraints": [None, "off"],
    }
    drawn = {flag: rng.choice(values) for flag, values in choices.items()}
    return [str(word) for flag, value in drawn.items() if value for word in (flag, value)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "words", [pytest.param(random_words(i), marks=[pytest.mark.slow] * (i > 1)) for i in range(40)]
)
def test_any_server_stays_below_what_its_line_says(tiny_llama_8bit: Path, words: list[str]) -> None:
    command = [sys.executable, "-m", "qsf", "serve", str(tiny_llama_8bit), "--port", "0", *words]
    with started(command) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        if "does not fit" in first:
            return
        client = Client(int(first.rpartition(":")[2]), None, None)  # type: ignore[arg-type]
        said = re.search(r"in memory (\d+) MB of at most ", process.stderr.readline())
        assert said is not None
        asked = {"prompt": "Once upon a time " * 12, "max_tokens": 24}
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda _: client.post("/v1/completions", asked), range(8)))
        assert {answer.status for answer in answers} == {200}
        status = Path(f"/proc/{process.pid}/status").read_text("ascii")
        assert int(status.split("VmHWM:")[1].split()[0]) <= int(said[1]) << 10
