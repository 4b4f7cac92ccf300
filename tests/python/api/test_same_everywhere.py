# SPDX-License-Identifier: Apache-2.0
"""Settings change speed and memory, never a bit of the logits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import qsf
from make.fine_files import convert_fine
from make.gpt_oss import make_gpt_oss
from make.streamed_models import (
    IO_METHODS,
    least_options,
    make_streamed_gpt2,
    make_streamed_llama,
    require_method,
)
from make.tiny_checkpoints import make_gpt2, make_llama, make_mistral
from qsf.native import binding
from qsf_converter import convert
from qsf_converter.rounding.plan import QUANT_TYPES

MAKERS: dict[str, Callable[..., Path]] = {
    "llama": make_llama, "mistral": make_mistral, "gpt2": make_gpt2, "gpt_oss": make_gpt_oss
}  # fmt: skip
TOKENS = np.random.default_rng(8).integers(0, 101, 60).tolist()

# Every type once as the type of everything, and the families with the usual mixtures.
MODELS: list[tuple[str, str, str | None]] = [("llama", quant, quant) for quant in QUANT_TYPES]
MODELS += [(f"fine {maker}", "4bit", None) for maker in MAKERS]  # 16-bit activations
MODELS += [("fine llama", quant, None) for quant in ("2bit", "3bit", "4bit-nl", "ternary-dense")]
MODELS += [(maker, quant, None) for maker in MAKERS for quant in ("4bit", "8bit")]  # MXFP4: gpt_oss
MODELS += [("mistral", "f16", None), ("gpt2", "f16", None), ("gpt2", "2bit", "ternary-dense")]

DUMP = """
import sys, qsf, numpy
isa, out, tokens, *paths = sys.argv[1:]
for i, path in enumerate(paths):
    for exact in (False, True):
        with qsf.Model(path, threads=2, exact=exact, ram_budget=None) as model:
            assert model.info.isa_name == isa, model.info.isa_name
            logits = model.logits([int(t) for t in tokens.split(",")])
        numpy.save(f"{out}-{i}-{exact}.npy", logits)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("same")
    for name, make in MAKERS.items():
        make(folder / name, seed=21)
    return folder


def converted(folder: Path, maker: str, quant_type: str, embed_type: str | None) -> Path:
    path = folder / f"{maker}-{quant_type}-{embed_type}.qsf"
    if not path.exists():
        call = convert_fine if maker.startswith("fine ") else convert
        source = folder / maker.removeprefix("fine ")
        call(source, path, quant_type=quant_type, embed_type=embed_type)
    return path


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: "-".join(map(str, model)))
def model_path(request: pytest.FixtureRequest, folder: Path) -> Path:
    return converted(folder, *request.param)


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


def test_instruction_sets(folder: Path, tmp_path: Path) -> None:
    """Each level in a process of its own, which says what it used and runs all models."""
    available = binding.describe_machine().isa_available
    assert "scalar" in available
    paths = [str(converted(folder, *model)) for model in MODELS]
    tokens = ",".join(map(str, TOKENS))
    for isa in available:
        arguments = [isa, str(tmp_path / isa), tokens, *paths]
        env = {**os.environ, "QSF_ISA": isa}
        subprocess.run([sys.executable, "-c", DUMP, *arguments], env=env, check=True)
    for i, model in enumerate(MODELS):
        for exact in (False, True):
            first = np.load(tmp_path / f"scalar-{i}-{exact}.npy")
            assert np.isfinite(first).all()
            for isa in available:
                other = np.load(tmp_path / f"{isa}-{i}-{exact}.npy")
                assert np.array_equal(first, other), (isa, model, exact)


# ---- reading ----


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def streamed(request: pytest.FixtureRequest, folder: Path) -> tuple[Path, NDArray[np.float32]]:
    """A model too large for the least budget, and its logits with all weights in memory."""
    make = {"llama": make_streamed_llama, "gpt2": make_streamed_gpt2}[request.param]
    path = make(folder / "streamed")
    logits = logits_with(path, kv_type="8bit", max_seq_len=128)
    assert np.isfinite(logits).all()
    return path, logits


@pytest.mark.parametrize("method", IO_METHODS)
@pytest.mark.parametrize(
    ("depth", "n_threads"),
    [(4, 2), *(pytest.param(*both, marks=pytest.mark.slow) for both in ((1, 1), (1, 2), (4, 1)))],
)
def test_ways_of_reading(
    streamed: tuple[Path, NDArray[np.float32]], method: str, depth: int, n_threads: int
) -> None:
    path, resident = streamed
    require_method(path, method)
    options = least_options(path, io=method, io_depth=depth, threads=n_threads)
    with qsf.Model(path, **options) as model:
        info = model.info
        assert (info.io_name, info.io_depth) == (method, depth)
        assert info.plan.n_units_resident < info.plan.n_units
        assert np.array_equal(resident, model.logits(TOKENS))
        assert np.array_equal(resident[:1], model.logits(TOKENS[:1]))
        assert np.array_equal(resident, model.logits(TOKENS))
        assert sum(unit.read_bytes for unit in model.timeline) > 0


def test_budgets_between(streamed: tuple[Path, NDArray[np.float32]]) -> None:
    """From almost nothing in memory to everything: rings of all sizes, units in any mixture."""
    path, resident = streamed
    counts = set()
    options = least_options(path)
    for more_mb in (0, 1, 2, 3, 5, 8, 13, 21, 34, 55):
        budget = options["ram_budget"] + more_mb
        with qsf.Model(path, **{**options, "ram_budget": budget}) as model:
            plan = model.info.plan
            counts.add(plan.n_units_resident)
            assert np.array_equal(resident, model.logits(TOKENS))
    assert min(counts) < plan.n_units == max(counts)
