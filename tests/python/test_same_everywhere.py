# SPDX-License-Identifier: Apache-2.0
"""Settings change speed and memory, never a bit of the logits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_checkpoints import make_gpt2, make_llama, make_mistral

import qsf
from qsf import _native
from qsf.converter import convert

MAKERS = {"llama": make_llama, "mistral": make_mistral, "gpt2": make_gpt2}
TOKENS = np.random.default_rng(8).integers(0, 101, 60).tolist()

DUMP = """
import sys, qsf, numpy
with qsf.Model(sys.argv[1], threads=int(sys.argv[2]), exact=sys.argv[3] == "1") as model:
    assert model.info.isa_name == sys.argv[4], model.info.isa_name
    numpy.save(sys.argv[5], model.logits([int(t) for t in sys.argv[6].split(",")]))
"""


@pytest.fixture(scope="module", params=[(m, q) for m in MAKERS for q in ("4bit", "8bit", "f16")])
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    maker, quant_type = request.param
    folder = tmp_path_factory.mktemp("same")
    convert(MAKERS[maker](folder / "hf", seed=21), folder / "m.qsf", quant_type=quant_type)
    return folder / "m.qsf"


def logits_with(path: Path, **options: object) -> NDArray[np.float32]:
    with qsf.Model(path, **{"ram_budget": None, **options}) as model:  # type: ignore[arg-type]
        return model.logits(TOKENS)


def test_threads(model_path: Path) -> None:
    one = logits_with(model_path, threads=1)
    for n_threads in (2, 3, 5):
        assert np.array_equal(one, logits_with(model_path, threads=n_threads))


def test_streamed_and_resident(model_path: Path) -> None:
    resident = logits_with(model_path, ram_budget=None)
    least = qsf.Model.plan(model_path, ram_budget=1).min_budget_bytes
    budget = -(-least // 2**20)
    plan = qsf.Model.plan(model_path, ram_budget=budget + 1)
    assert plan.is_enough
    assert np.array_equal(resident, logits_with(model_path, ram_budget=budget + 1))


def test_pieces(model_path: Path) -> None:
    with qsf.Model(model_path, ram_budget=None) as model:
        whole = model.logits(TOKENS)
        for n in (1, 2, 31, 32, 33, 59):
            assert np.array_equal(whole[:n], model.logits(TOKENS[:n]))


@pytest.mark.parametrize("exact", [False, True])
def test_instruction_sets(model_path: Path, tmp_path: Path, exact: bool) -> None:
    """Each level in a process of its own, and it says which one it used."""
    available = _native.describe_machine().isa_available
    results = []
    for isa in available:
        out = tmp_path / f"{isa}.npy"
        arguments = [str(model_path), "2", str(int(exact)), isa, str(out)]
        arguments.append(",".join(map(str, TOKENS)))
        env = {**os.environ, "QSF_ISA": isa}
        subprocess.run([sys.executable, "-c", DUMP, *arguments], env=env, check=True)
        results.append(np.load(out))
    assert "scalar" in available
    for other in results[1:]:
        assert np.array_equal(results[0], other)
    assert np.isfinite(results[0]).all()
