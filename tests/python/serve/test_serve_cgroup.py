"""The budget under load where it is real: ``qsf serve`` in a control group with it as the limit."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from make.served import started
from make.streamed_models import write_random_llama
from qsf_bench.memory_group import CapError, memory_group

pytestmark = pytest.mark.slow

BUDGET_MB = 110
START = "Once upon a time there was a little girl"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Path:
    return write_random_llama(tmp_path_factory.mktemp("serve") / "m.qsf", tiny_llama_dir)


def ask(url: str, fields: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(fields).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_ten_times_the_pool_in_the_budget(model: Path, tmp_path: Path) -> None:
    """What many conversations hold goes to files, whose page cache the group counts as well."""
    prompts = [list(range(first, first + 230)) for first in range(1, 1201, 100)]
    asked = [{"prompt": prompt, "max_tokens": 6, "temperature": 0} for prompt in prompts]
    options = ["--parallel", "3", "--ctx-size", "256", "--kv-contexts", "1"]
    options += ["--session-dir", str(tmp_path / "kept"), "--queue", "64"]
    try:
        with memory_group(BUDGET_MB << 20) as group:
            command = [sys.executable, "-m", "qsf", "serve", str(model), "--port", "0"]
            command += ["--ram-budget", str(BUDGET_MB), *options]
            with started(group.enter_and_run(command)) as process:
                assert process.stderr is not None
                url = process.stderr.readline().split()[-1]
                threading.Thread(target=process.stderr.read, daemon=True).start()
                rounds = []
                for _ in range(2):
                    with ThreadPoolExecutor(len(asked)) as pool:
                        rounds.append(list(pool.map(lambda one: ask(url, one), asked)))
                    assert ask(url, {"prompt": "\u4e2d " * 140_000})[0] == 400
                metrics = urllib.request.urlopen(f"{url}/metrics", timeout=60).read().decode()
                process.terminate()
                assert process.wait(60) == 0
            assert group.n_oom_kills() == 0
    except CapError as error:
        pytest.skip(str(error))
    texts = [[answer["choices"][0]["text"] for _, answer in answers] for answers in rounds]
    assert {status for answers in rounds for status, _ in answers} == {200}
    assert texts[0] == texts[1]
    counts = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line[:1] != "#")
    # All but what memory has came back from files; nothing was lost.
    assert float(counts["qsf:kv_restored_tokens_total"]) > 8 * 200
    assert float(counts["qsf:kv_tokens_on_disk"]) > 10 * 200
    assert float(counts["qsf:session_files_failures"]) == 0
