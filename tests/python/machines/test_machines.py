"""``qsf run --ray ADDRESS --machines N``, ``qsf.ray.open``: the layers of a model over machines."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

import qsf
from make.commands import Run
from qsf.errors import (
    QsfArgumentError,
    QsfCancelledError,
    QsfFormatError,
    QsfIOError,
    QsfUnsupportedError,
)
from qsf.options import ModelOptions
from qsf.ray import batch, cluster, stages

needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="needs the Python package ray: pip install 'qsf[ray]'"
)
quiet = pytest.mark.filterwarnings("ignore")  # Ray's own: open files at the end
EXAMPLES = Path(__file__).parents[3] / "examples"
HOW: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "seed": 3}
PROMPT = "Once upon a time"


def test_the_clusters_of_the_examples_ask_for_a_token() -> None:
    ray_up = yaml.safe_load((EXAMPLES / "ray-cluster.yaml").read_text("utf-8"))
    for commands in (ray_up["head_start_ray_commands"], ray_up["worker_start_ray_commands"]):
        assert commands[0] == "ray stop"
        assert commands[1].startswith("RAY_AUTH_MODE=token ray start ")
    if (ray := find_spec("ray")) is not None and ray.origin is not None:
        schema = Path(ray.origin).parent / "autoscaler" / "ray-schema.json"
        jsonschema.validate(ray_up, json.loads(schema.read_text("utf-8")))
    pods = yaml.safe_load((EXAMPLES / "kuberay.yaml").read_text("utf-8"))["spec"]
    assert pods["authOptions"] == {"mode": "token"}
    (workers,) = pods["workerGroupSpecs"]
    assert workers["template"]["spec"] == pods["headGroupSpec"]["template"]["spec"]
    assert isinstance(pods["headGroupSpec"]["rayStartParams"]["include-dashboard"], str)


def test_cuts_are_as_the_budgets_where_they_are_allowed() -> None:
    def anywhere(_cut: int) -> bool:
        return True

    assert stages.choose_cuts([10] * 8, [100, 100], anywhere) == [4]
    assert stages.choose_cuts([10] * 8, [300, 100], anywhere) == [6]
    assert stages.choose_cuts([40, 10, 10, 10, 10], [50, 50], anywhere) == [1]
    assert stages.choose_cuts([10] * 9, [50, 50, 50], anywhere) == [3, 6]
    assert stages.choose_cuts([10] * 8, [100, 100], lambda cut: cut < 3) == [2]
    assert stages.choose_cuts([10] * 4, [1000, 1, 1, 1], anywhere) == [1, 2, 3]
    assert stages.choose_cuts([10] * 4, [0, 0], anywhere) == [1]
    with pytest.raises(QsfArgumentError, match="3 are too many: the model can be cut at 1 places"):
        stages.choose_cuts([10] * 8, [1, 1, 1], lambda cut: cut == 3)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster of three nodes, all on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        ray = cluster.import_ray()
        patch.setenv("RAY_AUTH_TOKEN", "5" * 64)
        cluster.import_ray("ray._raylet").AuthenticationTokenLoader.instance().reset_cache()
        node = {"num_cpus": 1, "object_store_memory": 80_000_000}
        made = cluster.import_ray("ray.cluster_utils").Cluster(
            initialize_head=True, head_node_args={**node, "include_dashboard": False}
        )
        for _ in range(2):
            made.add_node(**node)
        made.wait_for_nodes()
        yield made.address
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The actors of the stages that are opened here, the first layers' first."""
    found: list[Any] = []
    init = stages.Rows.__init__

    def record(self: stages.Rows, actor: Any, *how: Any) -> None:
        found.append(actor)
        init(self, actor, *how)

    monkeypatch.setattr(stages.Rows, "__init__", record)
    return found


def pid_of(actor: Any) -> int:
    return int(stages.wait(actor.pid.remote, "a stage", 30))


@needs_ray
@quiet
@pytest.mark.slow
def test_killed_stages_answer_again_with_the_same_text(
    tiny_llama_8bit: Path, address: str, actors: list[Any]
) -> None:
    with qsf.Model(tiny_llama_8bit, ram_budget=None) as whole:
        want = "".join(whole.generate(PROMPT, **HOW))
    with qsf.ray.open(tiny_llama_8bit, machines=3, address=address, ram_budget=400) as model:
        assert "".join(model.generate(PROMPT, **HOW)) == want
        assert len({pid_of(actor) for actor in actors} | {os.getpid()}) == 3
        for actor in actors:
            model.session.rewind(0)
            pid, got = pid_of(actor), ""
            for n, piece in enumerate(model.generate(PROMPT, **HOW)):
                got += piece
                if n == 3:
                    os.kill(pid, signal.SIGKILL)
            assert got == want
            assert pid_of(actor) != pid
    with pytest.raises(QsfIOError, match="a stage is lost"):  # closed with the model
        pid_of(actors[0])


@needs_ray
@quiet
@pytest.mark.slow
def test_a_silent_stage_is_named_and_a_cancel_is_heard(
    tiny_llama_8bit: Path, address: str, actors: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "_QUIET_SECONDS", 0.5)
    said: list[str] = []
    how: dict[str, Any] = {"address": address, "timeout": 2.5, "note": said.append}
    options = ModelOptions(ram_budget=400)
    with stages.open_stages(tiny_llama_8bit, options, 2, **how) as model:
        want = "".join(model.generate(PROMPT, **HOW))
        pid = pid_of(actors[0])
        model.session.rewind(0)
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(QsfIOError, match=r"layers 0 to \d on .*: no answer for 2.5 s"):
                list(model.generate(PROMPT, **HOW))
            assert said[-1].endswith("no answer for 0.5 s; waiting for 2.5 s")
            started = time.monotonic()
            with pytest.raises(QsfCancelledError):
                stages.wait(
                    actors[0].pid.remote, "it", 60, lambda: time.monotonic() > started + 0.2
                )
        finally:
            os.kill(pid, signal.SIGCONT)
        assert "".join(model.generate(PROMPT, **HOW)) == want


@needs_ray
@pytest.mark.slow
def test_a_server_over_machines(tiny_chat_8bit: Path, address: str) -> None:
    words = ["serve", str(tiny_chat_8bit), "--ray", address, "--machines", "2", "--port", "0"]
    words += ["--ram-budget", "400"]
    how: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
    messages = [{"role": "user", "content": "Hi"}]
    with qsf.Model(tiny_chat_8bit, ram_budget=None) as whole:
        want = "".join(whole.chat(messages, **how))
    with subprocess.Popen(
        [sys.executable, "-m", "qsf", *words], stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stderr is not None
            said = ""
            while "http://" not in said:
                line = server.stderr.readline()
                assert line, said
                said += line
            assert said.startswith("layers 0 to 2 on ")
            found = re.search(r"http://\S+", said)
            assert found is not None
            ask = urllib.request.Request(
                f"{found[0]}/v1/chat/completions",
                json.dumps({"messages": messages, **how}).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(ask, timeout=60) as response:
                answer = json.load(response)
        finally:
            server.terminate()
    assert answer["choices"][0]["message"]["content"] == want


@needs_ray
@quiet
@pytest.mark.slow
def test_commands_over_machines(run: Run, tiny_llama_8bit: Path, address: str) -> None:
    ask = (tiny_llama_8bit, "-p", PROMPT, "-n", 12, "--temperature", 0, "--ram-budget", 400)
    alone = run(*ask, "-q")
    over = (*ask, "--ray", address, "--machines")
    done = run(*over, 3)
    assert (done.returncode, done.stdout) == (0, alone.stdout), done.stderr
    assert done.stderr.count("layers ") == 3
    plan = run(*over, 2, "--plan")
    assert plan.stdout.startswith("layers 0 to 2 on "), plan.stderr
    assert "layers 3 to 5 on " in plan.stdout
    few = run(*over, 9)
    assert (few.returncode, few.stdout) == (1, "")
    assert "9 machines: the Ray cluster has 3" in few.stderr
    small = run(*over[:-3], "--ram-budget", 60, *over[-3:], 2)
    assert small.returncode == 1
    assert "does not fit in 60.0 MB" in small.stderr


# ---- ``qsf run --prompts --ray`` and ``qsf.ray.map``; who may be in a cluster ----


# Ray's own: open files at the end, its libraries' deprecations


def test_without_ray_the_package_is_named(
    run: Run, tiny_llama_8bit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "asked.jsonl").write_text('"Once"\n')
    done = run(tiny_llama_8bit, "--prompts", tmp_path / "asked.jsonl", "--ray", "local")
    assert (done.returncode, done.stdout) == (1, "")
    assert "pip install 'qsf[ray]'" in done.stderr
    with pytest.raises(QsfUnsupportedError, match="qsf\\[ray\\]"):
        qsf.ray.connect("auto")


def test_a_cluster_with_other_machines_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "has_token_mode", lambda: False)
    here, elsewhere = "127.0.0.1", "198.51.100.7"  # the second is of documentation
    cluster.check_access([here, "::1"], lambda: pytest.fail("asked, and all machines are here"))
    cluster.check_access([here, elsewhere], lambda: True)
    with pytest.raises(QsfArgumentError, match=r"198\.51\.100\.7, and no token"):
        cluster.check_access([here, elsewhere], lambda: False)


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
def test_a_token_that_others_may_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("0" * 64)
    monkeypatch.setattr(cluster, "has_token_mode", lambda: True)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    token.chmod(0o600)
    cluster.check_access(["127.0.0.1"], lambda: True)
    token.chmod(0o644)
    with pytest.raises(QsfArgumentError, match="mode 0644"):
        cluster.check_access(["127.0.0.1"], lambda: True)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "1" * 64)  # then no file is read
    cluster.check_access(["127.0.0.1"], lambda: True)


def test_a_worker_refuses_another_file(tiny_llama_8bit: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.qsf"
    other.write_bytes(tiny_llama_8bit.read_bytes()[:100] + bytes(28))
    generation, plain = qsf.options.GenerationOptions(), qsf.options.ModelOptions()
    headers = batch.headers_of(tiny_llama_8bit, plain)
    with pytest.raises(QsfFormatError, match=r"other\.qsf is another file on"):
        batch.Answerer(str(other), headers, plain, generation)
    changed = qsf.options.ModelOptions(lora=f"{other}:0.5")
    headers = batch.headers_of(tiny_llama_8bit, changed)
    other.write_bytes(bytes(128))
    with pytest.raises(QsfFormatError, match=r"other\.qsf:0\.5 is another file on"):
        batch.Answerer(str(tiny_llama_8bit), headers, changed, generation)


# ---- with Ray ----
@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Ray on this machine, with two workers' room."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_AUTH_TOKEN", raising=False)
        cluster.connect("local")
        yield cluster.import_ray()
        cluster.import_ray().shutdown()


@needs_ray
@quiet
@pytest.mark.slow
def test_answers_over_ray_are_those_of_one_machine(
    run: Run, tiny_chat_8bit: Path, tmp_path: Path, ray: Any
) -> None:
    asked = tmp_path / "asked.jsonl"
    lines = [{"id": i, "prompt": f"Tell me about {i} cats."} for i in range(20)]
    lines += [{"id": "bad", "messages": [{"role": "user"}]}, {"id": "worse"}]
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    how = ("--prompts", asked, "-n", 12, "--seed", 3, "--temperature", "0.8", "-q")
    alone = run(tiny_chat_8bit, *how)
    over = run(tiny_chat_8bit, *how, "--ray", "local", "--workers", 2, "--ram-budget", 400)
    assert over.returncode == alone.returncode == 1, over.stderr
    want = {line["index"]: line for line in map(json.loads, alone.stdout.splitlines())}
    got = {line["index"]: line for line in map(json.loads, over.stdout.splitlines())}
    assert got.keys() == want.keys()
    for index, line in got.items():
        assert line == {name: want[index][name] for name in line}
        assert ("error" in line) == (index >= 20)
        assert "error" in line or line.keys() >= {"text", "ids", "stop_reason", "seed"}


@needs_ray
@quiet
@pytest.mark.slow
def test_the_block_of_a_lost_worker_is_answered_again(
    tiny_llama_8bit: Path, tmp_path: Path, ray: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [f"There were {i} dogs" for i in range(12)]
    with qsf.Model(tiny_llama_8bit, sessions=2) as model:
        want = {a.index: a.text for a in model.batch(prompts, max_tokens=10, temperature=0)}
    died = tmp_path / "died"

    class Dying(batch.Answerer):
        def __call__(self, block: Any) -> Any:
            if not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__call__(block)

    monkeypatch.setattr(batch, "Answerer", Dying)
    rows = [{"i": i, "prompt": prompt} for i, prompt in enumerate(prompts)]
    how: dict[str, Any] = {"max_tokens": 10, "temperature": 0, "sessions": 2, "ram_budget": 400}
    data = cluster.import_ray("ray.data").from_items(rows)
    answers = qsf.ray.map(data, tiny_llama_8bit, workers=1, batch_size=4, **how).take_all()
    assert died.exists()
    assert {row["i"]: row["answer"] for row in answers} == want
    assert all(row["error"] is None and row["reason"] == "length" for row in answers)


@needs_ray
@quiet
@pytest.mark.slow
def test_a_block_that_kills_its_workers_ends_the_batch(
    ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "deaths"

    class Dying(batch.Answerer):
        def __init__(self, *_how: Any) -> None:
            pass

        def __call__(self, block: Any) -> Any:
            with log.open("a") as file:
                file.write("x")
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(batch, "Answerer", Dying)
    options = qsf.options.ModelOptions(ram_budget=300), qsf.options.GenerationOptions()
    with pytest.raises(qsf.QsfError, match="a worker failed"):
        list(batch.answer_rows([{"messages": "[]"}], "no.qsf", *options, 1))
    assert log.read_text() == "xxxx"
