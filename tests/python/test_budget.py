# SPDX-License-Identifier: Apache-2.0
"""The budget is a law for the whole process, or the run is refused before it starts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from golden import MODELS
from tiny_checkpoints import make_llama

import qsf
from qsf.converter import convert
from qsf.errors import QsfMemoryError

RUN = """
import sys, qsf
budget_mb = int(sys.argv[2])
with qsf.Model(sys.argv[1], ram_budget=budget_mb) as model:
    list(model.generate([1, 2, 3] * 40, max_tokens=60, temperature=0))
    plan = model.info.plan
    print(plan.n_units_resident, plan.n_units)
status = open("/proc/self/status").read()
print(int(status.split("VmHWM:")[1].split()[0]) * 1024)
"""


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 40 MB of weights: more than the least budget leaves."""
    folder = tmp_path_factory.mktemp("budget")
    checkpoint = make_llama(
        folder / "hf",
        seed=1,
        n_layers=6,
        dim=768,
        n_heads=12,
        n_kv_heads=12,
        head_dim=64,
        ffn_dim=2048,
        n_vocab=2048,
        max_tokens=512,
        tokenizer_from=MODELS["tiny-llama"],
    )
    convert(checkpoint, folder / "m.qsf", quant_type="8bit")
    return folder / "m.qsf"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_stays_below_the_budget(large_model: Path) -> None:
    resident_counts = set()
    probe = "import sys, qsf; print(qsf.Model.plan(sys.argv[1], ram_budget=1).min_budget_bytes)"
    command = [sys.executable, "-c", probe, str(large_model)]
    least = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    least_mb = -(-least // 2**20) + 1
    for budget_mb in (least_mb, least_mb + 8, least_mb + 20, least_mb + 60):
        command = [sys.executable, "-c", RUN, str(large_model), str(budget_mb)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        counts, peak = done.stdout.splitlines()
        resident_counts.add(counts)
        assert int(peak) <= budget_mb * 2**20
    assert len(resident_counts) > 1, "every budget gave the same plan"


def test_too_small_is_refused_with_what_would_do(large_model: Path) -> None:
    plan = qsf.Model.plan(large_model, ram_budget=10)
    assert not plan.is_enough
    with pytest.raises(QsfMemoryError) as caught:
        qsf.Model(large_model, ram_budget=10)
    assert re.search(r"ram_budget=\d+ would do", str(caught.value))
