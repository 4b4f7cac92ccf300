"""Blocks of GGUF files are kept: the same f32 values, bit by bit, in a file of the same size."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from make import gguf_files, tiny_checkpoints
from make.stored import Reader
from oracle import reference
from oracle.kept_tiles import decode_tiles
from qsf import Model
from qsf.errors import QsfArgumentError, QsfConversionError
from qsf.file.layout import Dtype, Layout, dtype_name, tensor_bytes
from qsf_converter import convert
from qsf_converter.request import Request
from qsf_converter.rounding.gguf_tiles import exact_shifts, gguf_tiles
from qsf_converter.rounding.key_channels import with_equal_keys
from qsf_converter.rounding.plan import make_plan
from qsf_converter.sources.checkpoint import KEPT, to_float32
from qsf_converter.sources.source import open_source

ROWS_AT_ONCE = 4096
WRITABLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # to which the package gguf rounds


def random_rows(kind: str, n_rows: int, n_blocks: int, seed: int) -> np.ndarray:
    """Rows of blocks with any codes and any finite scales and mins."""
    rng = np.random.default_rng(seed)
    _, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (n_rows, n_blocks, n_bytes), np.uint8)
    halves = 208 // 2 if kind == "Q6_K" else 0  # where the f16 are
    for i in range(halves, halves + (2 if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 1)):
        values = rng.standard_normal((n_rows, n_blocks)).astype("<f2")
        values[rng.random(values.shape) < 0.1] = rng.choice([0.0, -0.0, 6e-8, 65504])
        blocks[..., 2 * i : 2 * i + 2] = values[..., None].view(np.uint8)
    return blocks.reshape(n_rows, -1)


@pytest.mark.parametrize("kind", KEPT)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 1 << 32))
def test_tiles_have_the_values_of_the_blocks(
    kind: str, n_rows: int, n_blocks: int, seed: int
) -> None:
    rows = random_rows(kind, n_rows, n_blocks, seed)
    tiles, _ = gguf_tiles(KEPT[kind], rows)
    want = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    assert len(tiles) == tensor_bytes(n_rows, want.shape[1], KEPT[kind], Layout.TILES)
    have = decode_tiles(KEPT[kind], tiles, *want.shape)
    np.testing.assert_array_equal(have.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("kind", KEPT)
@given(st.integers(0, 1 << 32))
def test_shifts_of_rows_are_exact(kind: str, seed: int) -> None:
    rows = random_rows(kind, 8, 2, seed)
    type_ = gguf.GGMLQuantizationType[kind]
    for shifts, sign in zip(exact_shifts(KEPT[kind], rows), (-1, 1), strict=True):
        exponents = tuple(int(sign * min(shift, 12)) for shift in shifts)
        tiles, _ = gguf_tiles(KEPT[kind], rows, exponents)
        want = np.ldexp(gguf.quants.dequantize(rows, type_), np.array(exponents)[:, None])
        have = decode_tiles(KEPT[kind], tiles, *want.shape)
        np.testing.assert_array_equal(have.view(np.uint32), want.view(np.uint32))


def assert_kept(source_path: Path, path: Path) -> set[str]:
    """Each matrix of the file has the f32 values that the package gguf reads in the source.

    Returns the types that the matrices have.
    """
    with open_source(source_path) as source, Reader(path) as reader:
        policy = Request(quant_type="keep").first_policy()
        plan = make_plan(source.family, source.facts, source.checkpoint, policy)
        plan = with_equal_keys(plan, source.checkpoint)  # exact powers of two in Q and K
        kept = [target for target in plan.targets if target.dtype in KEPT.values()]
        for target in kept:
            assert target.rule.target is not None
            unit = next(unit for unit in reader.units if unit.id == target.unit)
            tensor = reader.tensor(unit.idx, target.rule.target)
            assert tensor is not None
            assert tensor.dtype == target.dtype
            data = reader.read_tensor(tensor)
            for start in range(0, target.n_rows, ROWS_AT_ONCE):
                stop = min(start + ROWS_AT_ONCE, target.n_rows)
                rows = source.checkpoint.read_rows(target.source.name, start, stop)
                sizes = [
                    tensor_bytes(n, target.n_cols, tensor.dtype, Layout.TILES)
                    for n in (start, stop)
                    if n
                ]
                part = data[sizes[0] if start else 0 : sizes[-1]]
                have = decode_tiles(tensor.dtype, part, stop - start, target.n_cols)
                want = to_float32(rows)
                if target.exponents:
                    want = np.ldexp(want, np.asarray(target.exponents)[start:stop, None])
                np.testing.assert_array_equal(have.view(np.uint32), want.view(np.uint32))
        return {dtype_name(target.dtype) for target in kept}


@pytest.mark.parametrize("kind", WRITABLE)
def test_a_quantised_file_is_kept_by_default(tmp_path: Path, kind: str) -> None:
    folder = tiny_checkpoints.make_llama(tmp_path / "m", dim=96, head_dim=32, ffn_dim=160)
    path = gguf_files.write(folder, tmp_path / "m.gguf", kind=gguf.GGMLQuantizationType[kind])
    report = convert(path, tmp_path / "m.qsf")
    assert f"kept as they are: {kind.lower()}" in report.notes
    assert not any("rounded again" in line for line in report.warnings)
    assert assert_kept(path, tmp_path / "m.qsf") == {kind.lower()}


@pytest.mark.parametrize("kind", WRITABLE)
def test_logits_are_those_of_the_kept_weights(tmp_path: Path, kind: str) -> None:
    folder = tiny_checkpoints.make_llama(tmp_path / "m", dim=96, head_dim=32, ffn_dim=160)
    path = gguf_files.write(folder, tmp_path / "m.gguf", kind=gguf.GGMLQuantizationType[kind])
    convert(path, tmp_path / "m.qsf")
    tokens = np.random.default_rng(4).integers(0, 101, 20)
    want = reference.forward(reference.load_qsf(tmp_path / "m.qsf"), tokens).logits
    with Model(tmp_path / "m.qsf", exact=True, kv_type="f32", ram_budget=None) as model:
        exact = model.logits([int(t) for t in tokens])
    np.testing.assert_allclose(exact, want, rtol=0, atol=1e-4 * want.std())


def test_a_type_that_is_asked_for_rounds_again_and_says_so(tmp_path: Path) -> None:
    folder = tiny_checkpoints.make_llama(tmp_path / "m", dim=96, head_dim=32, ffn_dim=160)
    path = gguf_files.write(folder, tmp_path / "m.gguf", kind=gguf.GGMLQuantizationType.Q4_1)
    report = convert(path, tmp_path / "m.qsf", quant_type="4bit")
    assert any("--quant-type keep loses nothing" in line for line in report.warnings)
    report = convert(path, tmp_path / "k.qsf", quant_type="keep", embed_type="f16")
    with Reader(tmp_path / "k.qsf") as reader:
        assert {t.dtype for t in reader.unit(0).tensors} == {Dtype.F16}
        assert Dtype.Q4_1 in {t.dtype for t in reader.unit(1).tensors}


def test_there_must_be_something_to_keep(tmp_path: Path) -> None:
    folder = tiny_checkpoints.make_llama(tmp_path / "m")
    with pytest.raises(QsfArgumentError, match="keep is for GGUF files of Q4_0"):
        convert(folder, tmp_path / "m.qsf", quant_type="keep")
    with pytest.raises(QsfArgumentError, match="keep rounds nothing"):
        convert(folder, tmp_path / "m.qsf", quant_type="keep", calibration="bundled")


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoints.make_llama(tmp_path / "m", dim=96, head_dim=32, ffn_dim=160)
    path = gguf_files.write(folder, tmp_path / "m.gguf", kind=gguf.GGMLQuantizationType.Q8_0)
    with open_source(path) as source:
        located = source.checkpoint._located["model.embed_tokens.weight"]  # type: ignore[attr-defined]
        at = located.file_off + 2 * located.tensor.row_bytes
    data = bytearray(path.read_bytes())
    data[at : at + 2] = np.array([np.inf], "<f2").tobytes()
    path.write_bytes(data)
    with pytest.raises(
        QsfConversionError, match=r"embed_tokens\.weight: a scale of row 2 is infinite"
    ):
        convert(path, tmp_path / "m.qsf")


@pytest.mark.slow
def test_real_models_are_kept(tmp_path: Path) -> None:
    folder = os.environ.get("QSF_REAL_MODELS")
    if folder is None:
        pytest.skip("QSF_REAL_MODELS names no folder of GGUF files")
    for path in sorted(Path(folder).glob("*.gguf")):
        out = tmp_path / "kept.qsf"
        convert(path, out, force=True)
        types = assert_kept(path, out)
        size = out.stat().st_size / path.stat().st_size
        print(f"{path.name}: {', '.join(sorted(types))}, {100 * size:.1f} % of its bytes")
        assert size <= 1.03
