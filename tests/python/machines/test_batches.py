"""``qsf run --prompts --ray`` and ``qsf.ray.map``; who may be in a cluster."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import qsf
from make.commands import Run
from qsf.errors import QsfArgumentError, QsfFormatError, QsfUnsupportedError
from qsf.ray import batch, cluster

needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="needs the Python package ray: pip install 'qsf[ray]'"
)
# Ray's own: open files at the end, its libraries' deprecations
quiet = pytest.mark.filterwarnings("ignore")


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
