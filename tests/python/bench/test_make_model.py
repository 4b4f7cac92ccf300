# SPDX-License-Identifier: Apache-2.0
"""The models that benches run on (qsf_bench.models.random_qsf): they open, run and are whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import qsf
from make.stored import Reader, verify_file
from oracle.reference import load_qsf
from qsf.file.layout import Compression, Dtype, Layout
from qsf_bench.models import random_qsf
from qsf_bench.models.shapes import Shape
from qsf_converter.rounding.plan import QUANT_TYPES


@pytest.fixture(autouse=True)
def small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_qsf, "POOL_TILES", 128)


@pytest.mark.parametrize(
    ("family", "quant_type"), [("gpt2", Dtype.Q4), *(("llama", t) for t in QUANT_TYPES.values())]
)
def test_models_of_every_type_run(tmp_path: Path, family: str, quant_type: Dtype) -> None:
    n_kv_heads = 4 if family == "gpt2" else 2
    shape = Shape(2, 128, 200, 4, n_kv_heads, 261, 32, family=family)
    path = tmp_path / "m.qsf"
    random_qsf.write_model(path, shape, quant_type, Dtype.Q8)
    with Reader(path) as reader:
        reader.verify()
    verify_file(path)
    with qsf.Model(path, ram_budget=None) as model:
        logits = model.logits([3, 260, 7])
    assert np.isfinite(logits).all()
    assert logits.std() > 0.01


@pytest.mark.parametrize("compression", [c for c in Compression if c])
def test_compressed_models_compute_the_same(tmp_path: Path, compression: Compression) -> None:
    shape = Shape(2, 128, 200, 4, 2, 261, 32)
    logits = []
    for used in (Compression.NONE, compression):
        path = tmp_path / f"{used.name}.qsf"
        random_qsf.write_model(
            path, shape, Dtype.TERNARY, Dtype.Q8, compression=used, n_real_layers=1
        )
        with Reader(path) as reader:
            assert reader.layers[1].compression == used  # the one without weights
        verify_file(path)
        with qsf.Model(path, ram_budget=None) as model:
            logits.append(model.logits([3, 260, 7]).tobytes())
    assert logits[0] == logits[1]


@pytest.mark.parametrize("n_real_layers", [0, 1])
def test_a_sparse_model_is_whole_and_takes_little_of_the_disk(
    tmp_path: Path, n_real_layers: int
) -> None:
    shape = Shape(6, 256, 1024, 4, 2, 261, 32)
    path = tmp_path / "m.qsf"
    random_qsf.write_model(path, shape, Dtype.Q8, Dtype.Q8, n_real_layers=n_real_layers)
    with Reader(path) as reader:
        layer_bytes = reader.layers[0].stored_bytes
        for unit in reader.layers:
            matrices = [t for t in unit.tensors if t.layout == Layout.TILES]
            is_real = unit.idx <= n_real_layers
            assert all(any(reader.read_tensor(t)) == is_real for t in matrices)
        reader.verify()
    verify_file(path)
    file = path.stat()
    assert file.st_blocks * 512 < file.st_size - (5 - n_real_layers) * layer_bytes
    with qsf.Model(path, ram_budget=None) as model:
        logits = model.logits([3, 260, 7])
    assert np.isfinite(logits).all()
    assert logits.std() > 0.01


def test_tokens_of_mixtures_choose_experts_alike_or_evenly(tmp_path: Path) -> None:
    shape = Shape(1, 512, 64, 4, 4, 256, 32, family="olmoe", n_experts=4, n_chosen=2)
    path = tmp_path / "m.qsf"
    random_qsf.write_model(path, shape, Dtype.Q4, Dtype.Q8)
    rows = load_qsf(path).weights["embedding"][:256]
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    run, free = rows[:128], rows[128:]
    near = float(np.mean(np.sum(run[1:] * run[:-1], axis=1)))
    far = float(np.mean(np.sum(run[32:] * run[:-32], axis=1)))
    none = float(np.mean(np.sum(free[1:] * free[:-1], axis=1)))
    assert (near, far, none) == pytest.approx((0.70, 0.5, 0.0), abs=0.06)
    with qsf.Model(path, ram_budget=None) as model:
        assert np.isfinite(model.logits([3, 200, 7])).all()
