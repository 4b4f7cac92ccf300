# SPDX-License-Identifier: Apache-2.0
"""A GGUF file of every family gives the file that its checkpoint gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from make import gguf_families, golden_families
from make.golden_families import Case
from oracle.file.reader import Reader
from qsf_converter import convert
from qsf_converter.sources.architectures import FAMILIES
from qsf_converter.sources.gguf_config import ALL_DIALECTS

# llama.cpp knows these from the model's name or size, and files do not say them.
ASSUMED: dict[str, dict[str, Any]] = {
    "gemma": {"dtype": "bfloat16"},
    "gemma2": {"dtype": "bfloat16", "query_pre_attn_scalar": 24},
    "gemma3_text": {"dtype": "bfloat16", "query_pre_attn_scalar": 24},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
}
# Windows of Qwen and scalings that llama.cpp does not write into files of that architecture.
NOT_SAID = (
    "qwen2-window", "starcoder2-window", "llama-dynamic", "llama-yarn-more", "llama-yarn-factor",
    "llama-llama3", "llama-proportional", "falcon-alibi", "gemma3-nested", "mistral-nested", "gptj",
    "stablelm-heads", "olmoe-sum", "qwen2_moe-sum", "qwen3_moe-sparse",
    # llama.cpp has no architecture for these, or writes them as one that is tried.
    "cwm", "helium", "internlm3", "internlm3-plain", "hyperclovax", "hyperclovax-plain",
    "vaultgemma", "solar_open", "granitemoehybrid", "granitemoehybrid-nope",
)  # fmt: skip


def cases() -> dict[str, Case]:
    found = {}
    for name, case in golden_families.cases().items():
        if name not in NOT_SAID:
            case = _text_part(case)
            changes = ASSUMED.get(case.config["model_type"], {})
            found[name] = replace(case, config={**case.config, **changes})
    return found


def _text_part(case: Case) -> Case:
    """Return the text's part of a model that sees, as a model: files of llama.cpp hold that."""
    text = case.config.get("text_config")
    if text is None:
        return case
    family = next(f for f in FAMILIES.values() if f.model_type == text["model_type"])
    shapes = {
        name.replace("model.language_model.", "model."): shape
        for name, shape in case.shapes.items()
        if "visual" not in name
    }
    return replace(case, config={**text, "architectures": [family.name]}, shapes=shapes)


@pytest.mark.parametrize("name", cases())
def test_both_sources_give_one_file(name: str, tmp_path: Path) -> None:
    case = cases()[name]
    sources = {
        "gguf": gguf_families.write_case(case, tmp_path / "m.gguf"),
        "checkpoint": case.write(tmp_path / "m"),
    }
    reports = {}
    for kind, source in sources.items():
        reports[kind] = convert(source, tmp_path / f"{kind}.qsf", quant_type="4bit")
    assert not [text for text in reports["gguf"].warnings if "tokenizer" not in text]
    with Reader(tmp_path / "gguf.qsf") as found, Reader(tmp_path / "checkpoint.qsf") as expected:
        assert found.header == expected.header
        assert found.arch == expected.arch
        assert found.rope_sets == expected.rope_sets
        assert found.layer_kinds == expected.layer_kinds
        for i in range(len(expected.units)):
            assert found.read_unit(i) == expected.read_unit(i), i
        assert [u.id for u in found.units] == [u.id for u in expected.units]
        assert found.sections.keys() == expected.sections.keys()


def test_every_dialect_is_tried() -> None:
    tried = {gguf_families.ARCHITECTURES[case.config["model_type"]] for case in cases().values()}
    assert tried | {"gpt2"} == ALL_DIALECTS.keys()
