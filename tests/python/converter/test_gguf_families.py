# SPDX-License-Identifier: Apache-2.0
"""A GGUF file of every family gives the file that its checkpoint gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qsf
from make import gguf_families, gguf_files, golden_families
from make.golden_families import Case
from make.refusals import table
from make.stored import Reader
from qsf.file.layout import Activation
from qsf_converter import convert
from qsf_converter.sources.gguf_config import ALL_DIALECTS

# llama.cpp knows these from the model's name or size, and files do not say them.
ASSUMED: dict[str, dict[str, Any]] = table("tables")["gguf assumed"]
# Windows of Qwen and scalings that llama.cpp does not write into files of that architecture.
NOT_SAID = (
    "qwen2-window", "starcoder2-window", "llama-dynamic", "llama-yarn-more", "llama-yarn-factor",
    "llama-llama3", "apertus-llama3", "llama-proportional", "falcon-alibi",
    "gemma3-nested", "mistral-nested", "gptj",
    "gemma4-nested",
    "stablelm-heads", "olmoe-sum", "qwen2_moe-sum", "qwen3_moe-sparse",
    # llama.cpp has no architecture for these, or writes them as one that is tried.
    "cwm", "helium", "internlm3", "internlm3-plain", "hyperclovax", "hyperclovax-plain",
    "qwen3_next-dense",  # of which GGUF files never have any
    "vaultgemma", "embedding_gemma2", "embedding_gemma2-nested", "granite_swa",
    "granite_swa-plain", "granitemoe_swa", "solar_open",
    "bailing_hybrid", "bailing_hybrid-plain", "granitemoehybrid", "granitemoehybrid-nope",
    "olmo_hybrid", "olmo_hybrid-rope", "lfm3", "lfm3-plain",
    "inkling2", "inkling2_loop", "inkling2_loop-nested",
    "nemotron_h-groups",  # how many groups are kept
)  # fmt: skip


# Their GGUF files have the value heads of a key head apart, and are run so.
TILED = ("qwen3_5", "qwen3_5-three", "qwen3_5_moe")
FOLDED = ("falcon_h1",)  # factors of the embedding and the head are in these
OF_BITNET_CPP = ("bitnet-b1.58", "bitnet-25")


def cases() -> dict[str, Case]:
    found = {}
    for name, case in golden_families.cases().items():
        if name not in (*NOT_SAID, *TILED, *FOLDED):
            case = case.text_part()
            changes = ASSUMED.get(case.config["model_type"], {})
            found[name] = replace(case, config={**case.config, **changes})
    return found


LATENT = [n for n, c in cases().items() if c.config["model_type"][:8] in ("deepseek", "youtu")]


@pytest.mark.parametrize(
    ("name", "is_older"), [(n, False) for n in cases()] + [(n, True) for n in LATENT]
)
def test_both_sources_give_one_file(
    name: str, is_older: bool, tmp_path: Path, golden: Callable[[Case], Path]
) -> None:
    case = cases()[name]
    source = gguf_families.write_case(case, tmp_path / "m.gguf", is_older=is_older)
    report = convert(source, tmp_path / "m.qsf", quant_type="f16", embed_type="f16")
    assert not [text for text in report.warnings if "tokenizer" not in text]
    with Reader(tmp_path / "m.qsf") as found, Reader(golden(case)) as expected:
        assert found.header == expected.header
        assert found.arch == expected.arch
        assert found.rope_sets == expected.rope_sets
        assert found.layer_kinds == expected.layer_kinds
        for i in range(len(expected.units)):
            assert found.read_unit(i) == expected.read_unit(i), i
        assert [u.id for u in found.units] == [u.id for u in expected.units]
        assert found.sections.keys() == expected.sections.keys()


def i2_s(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What bitnet.cpp's quantize_i2_s makes of a matrix, and the values that it stands for."""
    scale = np.abs(values).max()
    codes = np.where(np.abs(values) < 0.3 * scale, 1, np.where(values > 0, 2, 0)).ravel()
    packed = bytearray(values.size // 4 + 32)
    for i, code in enumerate(codes.tolist()):
        packed[i // 128 * 32 + i % 32] |= code << (6 - 2 * (i % 128 // 32))
    packed[values.size // 4 : values.size // 4 + 4] = scale.astype("<f4").tobytes()
    stands_for = ((codes - 1) * scale).astype(np.float32).reshape(values.shape)
    return np.frombuffer(bytes(packed), np.uint8), stands_for


@pytest.mark.parametrize("arch", OF_BITNET_CPP)
def test_files_of_bitnet_cpp_are_read(arch: str, tmp_path: Path) -> None:
    case = golden_families.cases()["bitnet"]
    wider = {72: 128, 80: 256, 24: 64}  # rows of whole blocks
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    shapes = {name: tuple(wider.get(n, n) for n in shape) for name, shape in case.shapes.items()}
    case = replace(case, config={**case.config, **sizes}, shapes=shapes)
    tensors = case.tensors()
    writer = gguf_families.begin(case, tmp_path / "m.gguf", also=arch)
    for (name, of_hf), (there, values) in zip(
        tensors.items(), gguf_families.converted_tensors(case, tensors), strict=True
    ):
        if values.ndim == 2 and there.startswith("blk."):
            packed, tensors[name] = i2_s(of_hf)
            gguf_files.add_blocks(writer, there, of_hf.shape, 36, packed)
        else:
            writer.add_tensor(there, values)
    gguf_files.add(writer, "tokenizer.ggml.model", "no_vocab")
    gguf_files.close(writer)
    report = convert(tmp_path / "m.gguf", tmp_path / "m.qsf", embed_type="f16")
    assert [text for text in report.warnings if "converted to ternary" in text]
    source = golden_families.write_checkpoint(tmp_path / "m", case.config, tensors)
    convert(source, tmp_path / "hf.qsf", quant_type="ternary", embed_type="f16")
    with Reader(tmp_path / "m.qsf") as found, Reader(tmp_path / "hf.qsf") as expected:
        assert found.header == expected.header
        for i in range(len(expected.units)):
            assert found.read_unit(i) == expected.read_unit(i), i


def test_files_of_bitnet_that_say_no_activation_have_silu(tmp_path: Path) -> None:
    case = golden_families.cases()["bitnet"]
    writer = gguf_families.begin(case, tmp_path / "m.gguf", also="bitnet")
    for name, values in gguf_families.converted_tensors(case, case.tensors()):
        writer.add_tensor(name, values)
    gguf_files.add(writer, "tokenizer.ggml.model", "no_vocab")
    gguf_files.close(writer)
    convert(tmp_path / "m.gguf", tmp_path / "m.qsf", quant_type="f16")
    with Reader(tmp_path / "m.qsf") as found:
        assert found.header.activation == Activation.SILU


@pytest.mark.parametrize("name", [*TILED, *FOLDED])
def test_files_of_another_form_compute_the_same(name: str, tmp_path: Path) -> None:
    case = golden_families.cases()[name]
    source = gguf_families.write_case(case, tmp_path / "m.gguf")
    report = convert(source, tmp_path / "m.qsf", quant_type="f16", embed_type="f16")
    assert not [text for text in report.warnings if "tokenizer" not in text]
    with qsf.Model(tmp_path / "m.qsf", exact=True, kv_type="f32", ram_budget=None) as model:
        off = np.abs(model.logits(case.tokens) - case.logits).max(axis=1)
    assert off.max() < 2e-4 * np.abs(case.logits).max()
    assert np.median(off) < 5e-6 * np.abs(case.logits).max()


def test_layers_that_predict_ahead_are_left_out_and_named(tmp_path: Path) -> None:
    case = golden_families.cases()["qwen3_5"]
    ahead = {f"mtp.{name}": (72, 144) for name in ("fc.weight", "layers.0.mlp.up_proj.weight")}
    source = replace(case, shapes={**case.shapes, **ahead}).write(tmp_path / "m")
    report = convert(source, tmp_path / "ahead.qsf", quant_type="4bit")
    assert [text for text in report.warnings if "2 tensors of multi-token prediction" in text]
    convert(case.write(tmp_path / "m2"), tmp_path / "plain.qsf", quant_type="4bit")
    with Reader(tmp_path / "ahead.qsf") as one, Reader(tmp_path / "plain.qsf") as other:
        assert [one.read_unit(i) for i in range(len(one.units))] == [
            other.read_unit(i) for i in range(len(other.units))
        ]


def test_layers_of_gguf_that_predict_ahead_are_left_out(tmp_path: Path) -> None:
    case = golden_families.cases()["qwen3_5"]
    n_layers = case.config["num_hidden_layers"]
    writer = gguf_families.begin(case, tmp_path / "m.gguf", n_ahead=1)
    for name, values in gguf_families.converted_tensors(case, case.tensors()):
        writer.add_tensor(name, values)
    writer.add_tensor(f"blk.{n_layers}.nextn.eh_proj.weight", np.zeros((72, 144), np.float16))
    gguf_files.close(writer)
    report = convert(tmp_path / "m.gguf", tmp_path / "m.qsf", quant_type="4bit")
    assert [text for text in report.warnings if "1 tensors of multi-token prediction" in text]
    with Reader(tmp_path / "m.qsf") as reader:
        assert reader.header.n_layers == n_layers


def test_every_dialect_is_tried() -> None:
    known = [golden_families.cases()[name] for name in TILED]
    tried = {gguf_families.arch_of(case.config) for case in (*cases().values(), *known)}
    assert tried | {"gpt2", "nomic-bert-moe", *OF_BITNET_CPP} == ALL_DIALECTS.keys()
