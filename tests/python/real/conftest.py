"""The models in the folder that QSF_REAL_MODELS names, and a table of what was measured on them."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from real.models import RealModel

_FOLDER = os.environ.get("QSF_REAL_MODELS")
_SOURCES = sorted(Path(_FOLDER).glob("*.gguf")) if _FOLDER else []
# Without models the tests are there too, and say why they are skipped.
_PARAMS: Sequence[Path | None] = _SOURCES or [None]
_COLUMNS = (
    *("ids of llama.cpp", "answers as f16 KV", "answers as llama.cpp"),
    *("perplexity, f16 KV", "with defaults"),
)
_KV_COLUMNS = (
    *("8bit", "k8v4", "4bit", "bytes a position: f16, 8bit, k8v4, 4bit"),
    "tok/s after 1536 tokens: the same",
)
_PLACE = re.compile(
    r"(<!-- make check-real: begin -->\n).*?(<!-- make check-real: end -->)", re.DOTALL
)
_MODELS: list[RealModel] = []


@pytest.fixture(scope="session")
def converted_models(tmp_path_factory: pytest.TempPathFactory) -> list[RealModel]:
    """All models of the folder, converted as `qsf convert` does it by default."""
    folder = tmp_path_factory.mktemp("real")
    for source in _SOURCES:
        path = folder / f"{source.stem}.qsf"
        words = [sys.executable, "-m", "qsf", "convert", str(source), str(path)]
        done = subprocess.run(words, capture_output=True, encoding="utf-8", check=False)
        _MODELS.append(RealModel(source, path, done, _MODELS))
    return _MODELS


@pytest.fixture(scope="session", params=_PARAMS, ids=lambda path: path and path.stem)
def real(request: pytest.FixtureRequest, converted_models: list[RealModel]) -> RealModel:
    """One model after the other."""
    if request.param is None:
        pytest.skip("no real models: make check-real MODELS=FOLDER")
    return next(model for model in converted_models if model.source == request.param)


def pytest_sessionfinish() -> None:
    """Write the table into the file that QSF_REAL_TABLE names."""
    target = os.environ.get("QSF_REAL_TABLE")
    if not target or not _MODELS:
        return
    table = f"{_table(_COLUMNS)}\n\n{_table(_KV_COLUMNS)}"
    text, n_places = _PLACE.subn(
        lambda m: f"{m[1]}{table}\n{m[2]}", Path(target).read_text("utf-8")
    )
    if n_places != 1:
        raise pytest.UsageError(f"{target} has {n_places} places for the table of make check-real")
    Path(target).write_text(text, "utf-8")


def _table(columns: Sequence[str]) -> str:
    lines = [f"| model | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for model in _MODELS:
        figures = [model.figures.get(column, "not measured") for column in columns]
        lines.append(f"| {model.name} | {' | '.join(figures)} |")
    return "\n".join(lines)
