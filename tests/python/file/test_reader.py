"""The engine's reader as Python has it: its records, what it finds, META and TOKN; tiles."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from make.kind_models import MIXED, SETS, write_model
from make.qsf_files import tiny_header, write_tiny
from make.stored import unpack_tokenizer
from oracle.naive_tiles import NL_LEVELS, WITH_MIN, naive_tiles, pack
from qsf.errors import QsfArgumentError, QsfFormatError
from qsf.file.blocks import pack_tokenizer
from qsf.file.family import family_of, type_of
from qsf.file.layout import KEPT, Architecture, Dtype, Layout, dtype_name, tensor_bytes, to_f32
from qsf.file.reader import Reader
from qsf_converter import convert
from qsf_converter.rounding.quantisers import quantise_rows
from qsf_converter.rounding.tiles import TILE_DTYPES, dequantise_tiles, tile_bytes


@pytest.fixture
def path(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    tiny_llama_4bit: Path,
    tiny_gpt2_8bit: Path,
    tiny_moe_dir: Path,
) -> Path:
    if request.param == "experts":
        convert(tiny_moe_dir, tmp_path / "m.qsf", quant_type="4bit")
    elif request.param == "kinds":
        write_model(tmp_path / "m.qsf", MIXED)
    else:
        return tiny_llama_4bit if request.param == "rope" else tiny_gpt2_8bit
    return tmp_path / "m.qsf"


FILES = pytest.mark.parametrize("path", ["rope", "learned", "experts", "kinds"], indirect=True)


def test_kinds_are_those_that_were_written(tmp_path: Path) -> None:
    with Reader(write_model(tmp_path / "m.qsf", MIXED)) as reader:
        for have, layer in zip(reader.layer_kinds, MIXED, strict=True):
            fields = asdict(layer.kind).items()
            floats = {name: to_f32(value) for name, value in fields if isinstance(value, float)}
            assert have == replace(layer.kind, **floats)  # type: ignore[arg-type]
        for one, other in zip(reader.rope_sets, SETS, strict=True):
            frequencies = tuple(map(to_f32, other.frequencies))
            assert one == replace(other, frequencies=frequencies, factor=to_f32(other.factor))
        assert "KIND" in reader.sections


@FILES
def test_progress_of_verifying_ascends_to_the_end(path: Path) -> None:
    done: list[tuple[int, int]] = []
    with Reader(path) as reader:
        reader.verify(lambda *pair: done.append(pair))
        assert len(done) == reader.n_extents
    assert done == sorted(done)
    assert done[-1] == (path.stat().st_size,) * 2


@FILES
def test_a_changed_byte_of_any_extent_is_found(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "changed.qsf"
    with Reader(path) as reader:
        ranges = [(s.off, s.n_bytes) for s in reader.sections.values()]
        ranges += [(u.off, u.stored_bytes) for u in reader.units]
    for off, n_bytes in ranges:
        data = bytearray(path.read_bytes())
        data[off + n_bytes // 2] ^= 4
        copy.write_bytes(data)
        with pytest.raises(QsfFormatError, match="checksum") as caught, Reader(copy) as reader:
            reader.verify()
        assert caught.value.is_damage
        assert str(caught.value).startswith(f"{copy}: ")


def test_what_was_read_stays_after_closing(tiny_llama_4bit: Path) -> None:
    reader = Reader(tiny_llama_4bit)
    units = reader.units
    reader.close()
    reader.close()
    assert reader.units is units
    with pytest.raises(QsfArgumentError, match="the file is closed"):
        reader.read_section("UNIT")
    with pytest.raises(QsfArgumentError, match="the file is closed"):
        reader.verify()
    with pytest.raises(QsfArgumentError, match="the file is closed"):
        _ = reader.layer_kinds


# ---- what the sections META and TOKN say ----
@pytest.mark.parametrize(
    ("meta", "family"),
    [
        (b'{"source": {"name": "m", "architecture": "Qwen2ForCausalLM"}}', "qwen2"),
        (b'{"source": {"name": "m", "architecture": "Gemma3ForConditionalGeneration"}}', "gemma3"),
        (b'{"source": {"name": "m", "architecture": "GPT2LMHeadModel"}}', "gpt2"),
        (b'{"source": {"architecture": "ForCausalLM"}}', "other"),
        (b'{"source": {"architecture": "a\\u001b[2J"}}', "other"),
        (b'{"quality": {}, "source": {"architecture": "Qwen2ForCausalLM"}}', "other"),
        (b"[" * 100_000, "other"),
        (b"", "other"),
    ],
)
def test_the_family_is_the_converters(tmp_path: Path, meta: bytes, family: str) -> None:
    path = tmp_path / "m.qsf"
    header = tiny_header(architecture=Architecture.OTHER)
    write_tiny(path, header=header, sections={"META": meta} if meta else {})
    with Reader(path) as reader:
        assert family_of(reader) == family


@pytest.mark.parametrize(
    ("meta", "name"),
    [
        (b'{"source": {"name": "m", "architecture": "a", "type": "Q4_K_M"}}', "Q4_K_M"),
        (b'{"source": {"name": "\\"type\\": \\"Q8_0\\""}}', ""),
        (b'{"source": {"name": "m"}, "x": {"type": "Q8_0"}}', ""),
        (b"", ""),
    ],
)
def test_the_type_is_a_kept_ggufs(tmp_path: Path, meta: bytes, name: str) -> None:
    path = tmp_path / "m.qsf"
    write_tiny(path, header=tiny_header(), sections={"META": meta} if meta else {})
    with Reader(path) as reader:
        assert type_of(reader) == (name or dtype_name(reader.header.dtype))


JSON = b'{"model": {"vocab": {' + b", ".join(b'"t%d": %d' % (i, i) for i in range(2000)) + b"}}}"


def test_it_is_smaller_and_comes_back() -> None:
    section = pack_tokenizer(JSON)
    assert section[:4] == b"LZ4\n"
    assert len(section) < 0.6 * len(JSON)
    assert unpack_tokenizer(section) == JSON


def test_what_does_not_shrink_is_stored_as_it_is() -> None:
    assert pack_tokenizer(b"{}") == b"{}"
    assert unpack_tokenizer(JSON) == JSON  # older files have it raw


# ---- the bytes of tiles: against docs/format.md, value by value ----


# Those that weights are rounded to; others: converter/test_gguf_kept.py.
ALL_TYPES = [dtype for dtype in Dtype if dtype not in (Dtype.MIXED, *KEPT)]
QUANTISED = [dtype for dtype in ALL_TYPES if dtype not in (Dtype.F16, Dtype.F32)]
N_CODES = {Dtype.TERNARY: 3, Dtype.TERNARY_DENSE: 3, Dtype.Q8: 256, Dtype.Q3: 8, Dtype.Q4: 16,
           Dtype.Q4_SYM: 16, Dtype.Q4_NL: 16, Dtype.Q2: 4, Dtype.Q2_SYM: 4}  # fmt: skip


def random_rows(n_rows: int, n_cols: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, n_rows, n_cols])
    return rng.standard_normal((n_rows, n_cols)).astype(np.float32)


@pytest.mark.parametrize("dtype", ALL_TYPES)
@pytest.mark.parametrize(("n_rows", "n_cols"), [(16, 64), (33, 130)])
def test_layout_is_the_documented_one(dtype: Dtype, n_rows: int, n_cols: int) -> None:
    rows = random_rows(n_rows, n_cols)
    assert quantise_rows(dtype, rows, rule="nearest") == naive_tiles(dtype, rows)


@given(dtype=st.sampled_from(QUANTISED), n_tiles=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_any_codes_come_back(dtype: Dtype, n_tiles: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, N_CODES[dtype], (16, n_tiles, 64)).astype(np.uint8)
    # The first and the last code of each block, in any columns, so that the scale is 1.
    ends = np.array([0, N_CODES[dtype] - 1], np.uint8)
    if dtype == Dtype.Q8:
        codes, ends = np.maximum(codes, 1), np.array([1, 255], np.uint8)
    if dtype in (Dtype.Q4_SYM, Dtype.Q4_NL):
        ends = ends[:1]
    for block in codes.reshape(-1, 64):
        block[rng.permutation(64)[: len(ends)]] = ends
    zero = {Dtype.Q8: 128, Dtype.Q4_SYM: 8, Dtype.Q2_SYM: 1.5}.get(dtype, 1)
    if dtype in WITH_MIN:
        zero = 0
    rows = codes.reshape(16, -1).astype(np.float32) - np.float32(zero)
    if dtype == Dtype.Q4_NL:
        rows = np.array(NL_LEVELS, np.float32)[codes].reshape(16, -1)
    tiles = quantise_rows(dtype, rows, rule="nearest")
    np.testing.assert_array_equal(dequantise_tiles(dtype, tiles, *rows.shape), rows)
    size, head = tile_bytes(dtype, 16, 64), 64 if dtype in WITH_MIN else 32
    for t in range(n_tiles):
        assert tiles[t * size + head : (t + 1) * size] == pack(dtype, codes[:, t].tolist())


@pytest.mark.parametrize("dtype", ALL_TYPES)
def test_tile_bytes(dtype: Dtype) -> None:
    size = tensor_bytes(16, 64, dtype, Layout.TILES)
    assert TILE_DTYPES[dtype].itemsize == size
    assert tile_bytes(dtype, 17, 65) == tensor_bytes(17, 65, dtype, Layout.TILES) == 4 * size
    assert len(quantise_rows(dtype, random_rows(17, 65))) == 4 * size


@pytest.mark.parametrize("dtype", ALL_TYPES)
def test_padding_is_zero(dtype: Dtype) -> None:
    tile = np.frombuffer(
        quantise_rows(dtype, random_rows(3, 70) + np.float32(5)), TILE_DTYPES[dtype]
    )[1]
    if dtype in (Dtype.F16, Dtype.F32):
        assert not tile["values"][6:].any()
        assert not tile["values"][:, 3:].any()
        return
    # The codes of a tile whose only codes that are not zero are those of 3 rows x 6 columns.
    kept = np.array(naive_codes(dtype, tile))
    assert not tile["scales"][3:].any()
    assert not kept[3:].any(), "padded rows"
    assert not kept[:, 6:].any(), "padded columns"
    assert kept[:3, :6].any()
    if dtype in WITH_MIN:
        assert not tile["mins"][3:].any()


def naive_codes(dtype: Dtype, tile: np.void) -> np.ndarray:
    """The codes of a tile as its values with scales of 1 and no mins."""
    plain = tile.copy()
    plain["scales"] = 1
    if dtype in WITH_MIN:
        plain["mins"] = 0
        zero = 0.0
    else:
        zero = {Dtype.Q8: 128, Dtype.Q4_SYM: 8, Dtype.Q4_NL: 32, Dtype.Q2_SYM: 1.5}.get(dtype, 1)
    codes: np.ndarray = dequantise_tiles(dtype, plain.tobytes(), 16, 64) + np.float32(zero)
    return codes
