# SPDX-License-Identifier: Apache-2.0
"""A model and its drafter, which reads the model's keys, values and hidden states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from make import golden_families
from qsf_converter import convert

MAX_TOKENS = 512


def write_pair(folder: Path, name: str = "target") -> tuple[Path, Path]:
    """Write both, with the weights of the golden cases; guesses for the model pay."""
    for file, case in zip((name, "drafter"), golden_families.drafted(), strict=True):
        text = case.config.get("text_config", {})
        more = {"text_config": {**text, "max_position_embeddings": MAX_TOKENS}} if text else {}
        case = replace(case, config={**case.config, "max_position_embeddings": MAX_TOKENS, **more})
        source = case.write(folder / file)
        convert(source, folder / f"{file}.qsf", quant_type="f16", embed_type="f16", force=True)
    return folder / f"{name}.qsf", folder / "drafter.qsf"
