"""How many sequences are served together: fewer where recurrent states leave no room."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from pathlib import Path

import pytest

from qsf import Model
from qsf.cli import serve
from qsf.cli.serve_options import parse
from qsf.file.layout import Dtype
from qsf.options import call_with
from qsf_bench.models.random_qsf import write_model
from qsf_bench.models.shapes import Shape


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Path:
    """A small model with states of 19 MB."""
    shape = Shape(
        24, 128, 128, 2, 1, 2048, 8192, "qwen3_5_text", 64, is_tied=True, n_value_heads=16
    )
    file = tmp_path_factory.mktemp("states") / "m.qsf"
    write_model(file, shape, Dtype.Q4, Dtype.Q8, tokenizer_from=tiny_llama_dir)
    return file


@pytest.mark.parametrize(
    ("more_mb", "options", "n_sequences", "n_sessions"),
    [
        (700, (), 4, 8),
        (400, (), 4, 4),
        (230, (), 2, 2),
        (140, (), 1, 1),
        (400, ("--parallel", "3"), 3, 3),
    ],
)
def test_states_and_a_context_have_room(
    path: Path, more_mb: int, options: tuple[str, ...], n_sequences: int, n_sessions: int
) -> None:
    taken_mb = Model.plan(path, ram_budget="auto").process_bytes >> 20
    request = parse([str(path), "--ram-budget", str(taken_mb + more_mb), *options])
    opening = serve._opening(path, request, False)
    assert (opening.kv_contexts, opening.sessions) == (n_sequences, n_sessions)
    plan = call_with(Model.plan, path, opening)
    assert plan.is_enough
    assert plan.ctx_tokens >= 2048
    assert request.serving.parallel_of(plan.kv_contexts) == n_sequences


def test_a_number_that_was_given_is_kept(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main([str(path), "--ram-budget", "200", "--parallel", "8", "--plan"]) == 1
    assert "or --parallel with fewer than now (their states take " in capsys.readouterr().err
