# SPDX-License-Identifier: Apache-2.0
"""llama.cpp for tests of qsf.bench: the real one, where there is one."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest


def baseline_python() -> str:
    """Return an interpreter that has llama-cpp-python; skip the test where there is none."""
    named = os.environ.get("QSF_BASELINE_PYTHON")
    if named:
        return named
    if importlib.util.find_spec("llama_cpp") is not None:
        return sys.executable
    pytest.skip("no llama-cpp-python: QSF_BASELINE_PYTHON names an interpreter that has it")
