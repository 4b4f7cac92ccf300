"""Layers skipped by importance: which, and what the model computes without them."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from make.calibrated_models import rewrite
from make.tiny_checkpoints import make_llama
from qsf.errors import QsfArgumentError, QsfFormatError
from qsf.file.reader import Reader
from qsf.native import binding
from qsf_converter import convert

# Of ten layers; the ends matter least, so that only the rule keeps them. Then 6, 3, 7, 2, 5, 4.
IMPORTANCES = (0.0, 0.01, 0.5, 0.2, 0.9, 0.8, 0.1, 0.4, 0.0, 0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("skip")


# ---- which layers, by hand: '-' is one that is skipped ----
FEW = (1.0, 2.0, 3.0, 4.0, 5.0)
ALIKE = (1.0,) * 9 + (2.0,)
CHOICES = [
    (1.0, IMPORTANCES, "rrrrrrrrrr"),
    (0.96, IMPORTANCES, "rrrrrrrrrr"),
    (0.95, IMPORTANCES, "rrrrrr-rrr"),  # half a layer counts as one
    (0.8, IMPORTANCES, "rrr-rr-rrr"),
    (0.7, IMPORTANCES, "rrr-rr--rr"),
    (0.55, IMPORTANCES, "rr--r---rr"),
    (0.0, IMPORTANCES, "rr------rr"),
    (0.9, ALIKE, "rrrr-rrrrr"),  # the middle first, the earlier of two
    (0.7, ALIKE, "rrr---rrrr"),
    (0.88, ALIKE[1:], "rrrr-rrrr"),
    (0.9, FEW, "rr-rr"),  # 1 - 0.9 is a little less than 0.1
]  # fmt: skip


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Path:
    """Ten small layers, without importances."""
    make_llama(folder / "tiny", seed=8, n_layers=10, max_tokens=64)
    convert(folder / "tiny", folder / "tiny.qsf", quant_type="4bit")
    return folder / "tiny.qsf"


@pytest.mark.parametrize(("quality", "importances", "want"), CHOICES)
def test_the_least_important_layers_are_skipped(
    tiny: Path, tmp_path: Path, quality: float, importances: tuple[float, ...], want: str
) -> None:
    """The bits are those of a file without them, in all memory and in the least."""
    path, n_layers = tmp_path / "m.qsf", len(importances)
    short = rewrite(tiny, tmp_path / "short.qsf", without=range(n_layers, 10))
    rewrite(short, path, importances=importances)
    skipped = [layer for layer in range(n_layers) if want[layer] == "-"]
    rewrite(short, tmp_path / "cut.qsf", without=skipped)
    how: dict[str, Any] = {"budget_bytes": 0, "kv_k_type": 4, "kv_v_type": 4}
    asked: dict[str, Any] = how | {"quality": quality}
    cut = logits(tmp_path / "cut.qsf", how)
    plan = binding.plan_model(path, binding.Options(**asked))
    assert list(plan.skipped_layers) == skipped
    assert plan.n_units == n_layers + 2 - len(skipped)
    assert np.array_equal(logits(path, asked), cut)
    least = binding.plan_model(path, binding.Options(**asked | {"budget_bytes": 1 << 20}))
    asked["budget_bytes"] = least.min_budget_bytes + (1 << 20)
    assert np.array_equal(logits(path, asked), cut)
    assert not skipped or not np.array_equal(logits(path, how), cut)


def logits(path: Path, options: dict[str, Any]) -> np.ndarray:
    """The logits after some tokens."""
    model = binding.NativeModel(path, binding.Options(**options))
    session, out = model.create_session(), np.empty(model.n_vocab, np.float32)
    session.sync_chunk(array("I", [3, 1, 4, 1, 5]))
    session.step(9)
    session.read_logits(out)
    session.close()
    model.close()
    return out


def test_nobody_reads_a_skipped_layer(tiny: Path, tmp_path: Path) -> None:
    """Damage there goes unseen; elsewhere it is named as in the file."""
    path = rewrite(tiny, tmp_path / "m.qsf", importances=IMPORTANCES)
    options = {"budget_bytes": 0, "quality": 0.8}
    data = bytearray(path.read_bytes())
    for layer, is_read in ((3, False), (5, True)):
        with Reader(path) as reader:
            data[reader.layers[layer].off + 5000] ^= 1
        path.write_bytes(data)
        if not is_read:
            logits(path, options)
            continue
        with pytest.raises(QsfFormatError, match="unit 6 "):
            logits(path, options)


@pytest.mark.parametrize("n_layers", [4, 10])
def test_what_no_model_can_skip_is_refused(tiny: Path, tmp_path: Path, n_layers: int) -> None:
    path = rewrite(tiny, tmp_path / "m.qsf", without=range(n_layers, 10))
    said = "no layer can be skipped" if n_layers == 4 else "no importances for its 10 layers"
    with pytest.raises(QsfArgumentError, match=said):
        logits(path, {"budget_bytes": 0, "quality": 0.5})
