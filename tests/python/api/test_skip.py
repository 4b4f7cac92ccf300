"""Layers skipped by importance: ``quality`` and ``qsf-run --quality``."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import qsf
from make.commands import PROMPT, Run, check_refused
from make.golden import MODELS
from make.importances import rewrite
from make.streamed_models import least_options
from make.tiny_checkpoints import make_llama
from qsf.errors import QsfArgumentError
from qsf_converter import convert

TOKENS = np.random.default_rng(4).integers(0, 2048, 40).tolist()

# Of ten layers; the ends matter least, so that only the rule keeps them. Then 6, 3, 7, 2, 5, 4.
IMPORTANCES = (0.0, 0.01, 0.5, 0.2, 0.9, 0.8, 0.1, 0.4, 0.0, 0.0)
SKIPPED = {1.0: (), 0.9: (6,), 0.8: (3, 6), 0.7: (3, 6, 7), 0.0: (2, 3, 4, 5, 6, 7)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("skip")


@pytest.fixture(scope="module")
def measured(folder: Path) -> Path:
    """A LLaMA with a tokenizer, ten layers of 0.6 MB and importances; ``unmeasured`` is beside."""
    make_llama(
        folder / "llama", seed=7, tokenizer_from=MODELS["tiny-llama"], n_layers=10, dim=192,
        n_heads=3, n_kv_heads=3, head_dim=64, ffn_dim=832, n_vocab=2048, max_tokens=256,
    )  # fmt: skip
    convert(folder / "llama", folder / "unmeasured.qsf", quant_type="8bit")
    return rewrite(folder / "unmeasured.qsf", folder / "m.qsf", importances=IMPORTANCES)


@pytest.fixture(scope="module")
def unmeasured(measured: Path) -> Path:
    return measured.parent / "unmeasured.qsf"


def logits_with(path: Path, **options: Any) -> NDArray[np.float32]:
    with qsf.Model(path, **{"ram_budget": None, **options}) as model:
        return model.logits(TOKENS)


# ---- what it computes; numbers: test_forward.py ----


@pytest.mark.parametrize("quality", [0.7, 0.0])
def test_the_bits_of_a_file_without_those_layers(measured: Path, quality: float) -> None:
    """Whatever the threads, and with the rest in memory or streamed."""
    name = f"cut-{quality}.qsf"
    cut = rewrite(measured, measured.parent / name, without=SKIPPED[quality])
    want = logits_with(cut, kv_type="8bit")
    assert not np.array_equal(want, logits_with(measured, kv_type="8bit"))
    for threads in (1, 3):
        options = least_options(measured, quality=quality, threads=threads)
        with qsf.Model(measured, **options) as model:
            assert model.info.plan.streamed_bytes > 0
            assert np.array_equal(want, model.logits(TOKENS))
        options["ram_budget"] = None
        assert np.array_equal(want, logits_with(measured, **options))


# ---- what it takes ----


def test_skipped_layers_take_no_memory_and_are_not_read(measured: Path) -> None:
    plans = {q: qsf.Model.plan(measured, ram_budget=None, quality=q) for q in SKIPPED}
    whole = plans[1.0]
    assert (whole.n_layers, whole.n_layers_skipped, whole.skipped_layers) == (10, 0, ())
    for quality, skipped in SKIPPED.items():
        plan = plans[quality]
        assert plan.skipped_layers == skipped
        assert plan.n_layers == 10
        assert plan.n_units == 12 - len(skipped) == plan.n_units_resident
        layer_bytes = (whole.weights_bytes - plan.weights_bytes) / max(len(skipped), 1)
        assert len(skipped) == 0 or layer_bytes > 500_000
        kv_bytes = whole.kv_bytes - plan.kv_bytes  # the vocabulary's logits are in it too
        layer_kv_bytes = whole.kv_bytes - plans[0.9].kv_bytes
        # Each allocation is rounded up to 64 bytes.
        assert kv_bytes == pytest.approx(len(skipped) * layer_kv_bytes, abs=2 * 64)
        assert plan.kv_bytes < whole.kv_bytes or not skipped
    assert plans[0.0].n_skips_asked == 10


def test_bytes_read_per_token(measured: Path) -> None:
    read_bytes = {}
    for quality in (1.0, 0.7):
        with qsf.Model(measured, **least_options(measured, quality=quality)) as model:
            model.logits(TOKENS[:1])
            units = model.timeline
            read_bytes[quality] = sum(unit.read_bytes for unit in units)
            assert read_bytes[quality] == model.info.plan.streamed_bytes > 0
            names = ["embedding", *(f"layer {i}" for i in range(10)), "final"]
            assert [unit.name for unit in units] == names
            skipped = [unit for unit in units if unit.is_skipped]
            assert [unit.name for unit in skipped] == [f"layer {i}" for i in SKIPPED[quality]]
            for unit in skipped:
                numbers = [getattr(unit, field.name) for field in fields(unit)[3:]]
                assert not any(numbers)
                assert not unit.is_resident
    assert read_bytes[0.7] < read_bytes[1.0]


# ---- what is refused ----


@pytest.mark.parametrize("quality", [-0.1, 1.5, float("nan"), "0.5", None, True])
def test_wrong_qualities(measured: Path, quality: Any) -> None:
    for call in (qsf.Model, qsf.Model.plan):
        with pytest.raises(QsfArgumentError, match="quality must be a number from 0 to 1, not"):
            call(measured, quality=quality)


def test_a_file_without_importances(unmeasured: Path, folder: Path) -> None:
    for call in (qsf.Model, qsf.Model.plan):
        with pytest.raises(QsfArgumentError, match=r"for its 10 layers .* qsf-convert --calib"):
            call(unmeasured, quality=0.9)
    alike = rewrite(unmeasured, folder / "alike.qsf", importances=[0.25] * 10)
    with pytest.raises(QsfArgumentError, match=r"all are 0\.25"):
        qsf.Model(alike, quality=0.9)
    with qsf.Model(alike, quality=1, ram_budget=None) as model:
        assert model.skipped_layers == ()


def test_a_model_of_four_layers(measured: Path, folder: Path) -> None:
    four = rewrite(measured, folder / "four.qsf", without=range(2, 8))
    with pytest.raises(QsfArgumentError, match=r"no layer can be skipped.* has 4"):
        qsf.Model(four, quality=0.5)


# ---- the command ----


def test_quality_on_the_command_line(run: Run, measured: Path) -> None:
    options = ("-p", PROMPT, "-n", 4, "--temperature", 0)
    done = run(measured, *options, "--quality", 0.7, "--verbose")
    assert done.returncode == 0, done.stderr
    assert "layers skipped: 3 of 10, 3, 6-7\n" in done.stderr
    lines = [" ".join(line.split()) for line in done.stderr.splitlines()]
    assert "layer 3 skipped - - - -" in lines
    assert "layers 6-7 skipped - - - -" in lines
    assert "weights, 9 of 9 units" in done.stderr
    assert "10 layers of 192" in done.stderr
    whole = run(measured, *options)
    assert whole.stdout not in ("", done.stdout)
    assert run(measured, *options, "--quality", 1).stdout == whole.stdout
    assert "skipped" not in whole.stderr


def test_less_quality_than_can_be_had(run: Run, measured: Path) -> None:
    """Said unasked, but not to whom wants to hear nothing."""
    said = "layers skipped: 6 of 10, 2-7 (8 were asked for, but the first two and the last two"
    for options in ((), ("--verbose",)):
        done = run(measured, "-p", PROMPT, "-n", 2, "--quality", 0.2, *options)
        assert (done.returncode, done.stderr.count(said)) == (0, 1)
    done = run(measured, "-p", PROMPT, "-n", 2, "--quality", 0.2, "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    plan = run(measured, "--plan", "--quality", 0.2)
    assert (plan.returncode, plan.stdout.count(said)) == (0, 1)


def test_the_command_refuses_as_the_library_does(run: Run, unmeasured: Path) -> None:
    said = "(all are 1); qsf-convert --calibration makes a file that has them"
    check_refused(run(unmeasured, "-p", "x", "--quality", "0.5"), 1, said)
    check_refused(run(unmeasured, "--plan", "--quality", "0"), 1, said)
