"""The checks of real models fail where answers differ, and say where."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from real.models import N_EQUAL, RealModel, check_same, count_equal
from real.questions import QUESTIONS


def test_a_failing_check_names_the_question_and_both_answers() -> None:
    done = subprocess.CompletedProcess[str]([], 0)
    model = RealModel(Path("some-model.gguf"), Path("some-model.qsf"), done, [])
    ours = [f"answer {i}" for i in range(len(QUESTIONS))]
    theirs = [*ours[:N_EQUAL], *["another"] * (len(QUESTIONS) - N_EQUAL)]
    count_equal(model, "llama.cpp", ours, theirs)
    assert model.figures == {"answers as llama.cpp": f"{N_EQUAL} of {len(QUESTIONS)}"}
    theirs[0] = "one more"
    parts = ("some-model", QUESTIONS[0], "defaults: 'answer 0'", "llama.cpp: 'one more'")
    with pytest.raises(AssertionError) as error:
        count_equal(model, "llama.cpp", ours, theirs)
    assert all(part in str(error.value) for part in parts)
    check_same(model, {"off": ours, "auto": ours}, QUESTIONS)
    with pytest.raises(AssertionError) as error:
        check_same(model, {"off": ours, "auto": theirs}, QUESTIONS)
    assert all(part in str(error.value) for part in (*parts[:2], "off: 'answer 0'", "'one more'"))
