# SPDX-License-Identifier: Apache-2.0
"""The models that benches run on: bench/make_model.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import qsf
from qsf import _native
from qsf.converter.convert import QUANT_TYPES
from qsf.format import Dtype, Reader


@pytest.fixture(scope="module")
def make_model(project_root: Path) -> ModuleType:
    path = project_root / "bench" / "make_model.py"
    spec = importlib.util.spec_from_file_location("make_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_model"] = module
    sys.path.append(str(path.parent))  # for the other scripts that it uses
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("quant_type", QUANT_TYPES.values(), ids=QUANT_TYPES.keys())
def test_models_of_every_type_run(
    make_model: ModuleType, tmp_path: Path, family: str, quant_type: Dtype
) -> None:
    n_kv_heads = 4 if family == "gpt2" else 2
    shape = make_model.Shape(2, 128, 200, 4, n_kv_heads, 261, 32, family=family)
    path = tmp_path / "m.qsf"
    make_model.write_model(path, shape, quant_type, Dtype.Q8)
    with Reader(path) as reader:
        reader.verify()
    _native.verify_file(path)
    with qsf.Model(path, ram_budget=None) as model:
        logits = model.logits([3, 260, 7])
    assert np.isfinite(logits).all()
    assert logits.std() > 0.01
