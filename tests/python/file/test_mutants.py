"""Mutants of every section, with a limit of memory: a typed error or a normal result."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from make.limited import outcomes
from make.mutants import SECTIONS, mutant

N_MUTANTS = 24


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings in Linux only")
@pytest.mark.parametrize("tag", SECTIONS)
def test_mutants_give_typed_errors(
    tag: str, tmp_path: Path, tiny_llama_4bit: Path, tiny_gpt2_8bit: Path
) -> None:
    base = tiny_gpt2_8bit if tag == "WPOS" else tiny_llama_4bit
    data = base.read_bytes()
    paths = []
    for seed in range(N_MUTANTS):
        path = tmp_path / f"{seed}.qsf"
        path.write_bytes(mutant(data, tag, seed))
        paths.append(path)
    results = outcomes(base, [base, *paths])
    assert results[0] == "fine"
    assert [line for line in results if line.startswith(("WRONG", "CRASH"))] == []
    assert len(results) == N_MUTANTS + 1
    is_refused = any(line.startswith("Qsf") for line in results)
    assert is_refused or tag == "META", "broken META is said by qsf-inspect and stops nothing"
