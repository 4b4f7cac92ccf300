"""Mutants of every section, with a limit of memory: a typed error or a normal result."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from make.limited import outcomes
from make.mutants import SECTIONS, mutant
from make.outlier_files import add_outliers
from make.recurrent_models import write_recurrent
from qsf.file.kinds import RopeSet
from qsf.file.reader import Reader
from qsf_converter import convert

# `make fuzz` asks for more, and for others.
N_MUTANTS = int(os.environ.get("QSF_FUZZ_EXAMPLES", "24"))
FIRST_SEED = int(os.environ.get("QSF_FUZZ_SEED", "0"))


def of_kinds(source: Path, path: Path) -> Path:
    """Copy a model; every second layer gets a window, ALiBi, a cap and other frequencies."""
    with Reader(source) as r:
        plain = r.layer_kinds[0]
    slopes = tuple(0.5**i for i in range(plain.n_heads))
    other = replace(plain, window_tokens=40, rope_set=1, alibi_slopes=slopes, score_cap=20.0)
    sets = [RopeSet(i, tuple(0.8**j for j in range(plain.head_dim // 2))) for i in range(2)]
    sets.insert(1, replace(sets[0], least_context=4000, factor=1.1))
    n_layers = r.header.n_layers
    kinds = [other if i % 2 else plain for i in range(n_layers)]
    add_outliers(source, path, lambda _: [], layer_kinds=kinds, rope_sets=sets)
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings in Linux only")
@pytest.mark.parametrize("n_mutants", [8, pytest.param(N_MUTANTS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tag", SECTIONS)
def test_mutants_give_typed_errors(
    tag: str,
    n_mutants: int,
    tmp_path: Path,
    tiny_llama_4bit: Path,
    tiny_gpt2_8bit: Path,
    tiny_moe_dir: Path,
) -> None:
    base = tiny_gpt2_8bit if tag == "WPOS" else tiny_llama_4bit
    if tag == "UNIT":
        convert(tiny_moe_dir, base := tmp_path / "experts.qsf", quant_type="4bit")
    elif tag in ("KIND", "ROPE"):
        base = of_kinds(base, tmp_path / "kinds.qsf")
    check_mutants(base, tag, n_mutants, tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings in Linux only")
@pytest.mark.parametrize("tag", ["KIND", "TENS"])
@pytest.mark.parametrize("case", ["lfm2", "qwen3_next", "nemotron_h-moe", "falcon_h1"])
def test_mutants_of_mixers_give_typed_errors(case: str, tag: str, tmp_path: Path) -> None:
    check_mutants(write_recurrent(tmp_path, case=case), tag, 40, tmp_path)


def check_mutants(base: Path, tag: str, n_mutants: int, folder: Path) -> None:
    data = base.read_bytes()
    paths = []
    for seed in range(FIRST_SEED, FIRST_SEED + n_mutants):
        path = folder / f"{seed}.qsf"
        path.write_bytes(mutant(data, tag, seed))
        paths.append(path)
    results = outcomes(base, [base, *paths])
    assert results[0] == "fine"
    assert [line for line in results if line.startswith(("WRONG", "CRASH"))] == []
    assert len(results) == n_mutants + 1
    is_refused = any(line.startswith("Qsf") for line in results)
    assert is_refused or tag == "META", "broken META is said by qsf-inspect and stops nothing"
