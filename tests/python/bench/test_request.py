# SPDX-License-Identifier: Apache-2.0
"""The options of ``python -m qsf.bench``: defaults, lists, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from make.bench_records import request_of as request
from qsf.errors import QsfArgumentError
from qsf_bench.request import Setting
from qsf_bench.run.tasks import Task, Test, parse_task

MODEL = [Path("m.qsf")]


def test_without_options_two_types_run_on_one_thread_and_on_all_cores() -> None:
    found = request()
    assert (found.shapes, found.types) == (("tinyllama-1.1b",), ("4bit", "2bit"))
    assert found.settings == (Setting(1, None, None), Setting(2, None, None))
    assert [(test.name, test.depth) for test in found.tests] == [("pp512", 0), ("tg128", 0)]
    assert request(n_cores=1).settings == (Setting(1, None, None),)


def test_in_a_group_tests_are_short_and_the_budget_is_its_limit() -> None:
    found = request(cgroup="300M,1.5G")
    assert found.settings == (Setting(2, 300, 300), Setting(2, 1536, 1536))
    assert [test.name for test in found.tests] == ["pp32", "tg16"]
    assert all(setting.has_baseline for setting in found.settings)
    found = request(cgroup="300M", ram_budget="200,300", threads="1", prompt="0", gen="4")
    assert found.settings == (Setting(1, 200, 300), Setting(1, 300, 300))
    assert [test.name for test in found.tests] == ["tg4"]


def test_the_baseline_has_no_budgets() -> None:
    found = request(*MODEL, ram_budget="none,400", threads="2")
    assert [setting.has_baseline for setting in found.settings] == [True, False]
    assert [str(setting) for setting in found.settings] == [
        "2 threads",
        "2 threads, budget 400 MB",
    ]
    assert str(Setting(1, 300, 300)) == "1 thread, cgroup 300 MB"


def test_lists_are_every_combination_once() -> None:
    found = request(prompt="32, 512,32", gen="8", depth="0,64")
    assert [(test.kind, test.n_tokens, test.depth) for test in found.tests] == [
        ("pp", 32, 0),
        ("pp", 512, 0),
        ("pp", 32, 64),
        ("pp", 512, 64),
        ("tg", 8, 0),
        ("tg", 8, 64),
    ]


def test_mixtures_can_be_routed_in_two_ways() -> None:
    found = request(shape="olmoe-1b-7b", prompt="8", gen="4", routing="local,even")
    assert [test.name for test in found.tests] == ["pp8", "pp8-even", "tg4", "tg4-even"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"threads": "0"}, "--threads: '0' is not a whole number of at least 1"),
        ({"threads": "1,,2"}, "--threads: '1,,2' is not a list"),
        ({"prompt": "x"}, "--prompt: 'x' is not a whole number"),
        ({"gen": "-1"}, "--gen: '-1' is not a whole number"),
        ({"prompt": "0", "gen": "0"}, "leave nothing to measure"),
        ({"cgroup": "300"}, "--cgroup: '300' is not a limit of memory: it must be a whole"),
        ({"cgroup": "0.5M"}, "--cgroup: '0.5M'"),
        ({"ram_budget": "lots"}, "--ram-budget: 'lots' is not a number of MB, or none"),
        ({"ram_budget": "none", "cgroup": "300M"}, "--ram-budget none is more than --cgroup 300M"),
        ({"ram_budget": "400", "cgroup": "300M"}, "--ram-budget 400 is more than --cgroup 300M"),
        ({"threads": ""}, "--threads: '' is not a list"),
        ({"shape": ""}, "--shape: '' is not a list"),
        ({"shape": "tiny,7a"}, "--shape: shape '7a' is unknown; known: tiny, gpt2"),
        ({"quant": "5bit"}, "--quant: 5bit is unknown; available: 2bit"),
        ({"rounds": 0}, "--rounds: '0' is not a whole number of at least 1"),
        ({"baseline": "vllm"}, "--baseline vllm is unknown; available: llama.cpp, none"),
        ({"baseline": "llama.cpp none"}, "exclude each other"),
        ({"kv_type": "k9"}, "--kv-type"),
        ({"io": "fast"}, "--io: fast is unknown; available: auto, buffered"),
        ({"baseline_model": [Path("a.gguf")]}, "0 MODELs and 1 --baseline-model"),
        ({"routing": "odd"}, "--routing: odd is unknown; available: local, even"),
        ({"routing": "even"}, "--routing even is for shapes with experts, and tinyllama-1.1b has"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(QsfArgumentError) as error:
        request(**options)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shape": "gpt2"}, "--shape is for random weights"),
        ({"quant": "4bit"}, "--quant is for random weights"),
        ({"routing": "even"}, "--routing even is for random weights"),
        (
            {"baseline": "none", "baseline_model": [Path("a.gguf")]},
            "of no use with --baseline none",
        ),
        (
            {"baseline": "none", "baseline_python": Path("p")},
            "--baseline-python is of no use with --baseline none",
        ),
        ({"baseline": "llama.cpp", "ram_budget": "200,400"}, "beside --ram-budget 200,400, for it"),
        (
            {"baseline_model": [Path("a.gguf")], "ram_budget": "200"},
            "beside --ram-budget 200, for",
        ),
        (
            {"baseline": "llama.cpp", "kv_type": "k8v4"},
            "k8v4 is QSF's alone: llama.cpp has f16, 8bit",
        ),
        ({"baseline_model": [Path("a.gguf")], "kv_type": "2bit"}, "--kv-type 2bit is QSF's alone"),
        ({"baseline_model": [Path("x/m.qsf")]}, "2 files are called m.qsf"),
    ],
)
def test_options_that_exclude_each_other(options: dict[str, Any], said: str) -> None:
    with pytest.raises(QsfArgumentError) as error:
        request(*MODEL, **options)
    assert said in str(error.value)


def test_a_task_survives_its_json() -> None:
    task = Task("qsf", "m.qsf", 2, (Test("pp", 512, 16), Test("tg", 128)), cap_mb=300)
    known = task.as_json()
    assert parse_task(known) == task
    assert [(test["name"], test["ctx_tokens"]) for test in known["tests"]] == [
        ("pp512", 528),
        ("tg128", 129),
    ]
