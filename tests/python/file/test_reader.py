"""The engine's reader as Python has it, against the one of the tests: the same records."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from pathlib import Path

import pytest

from make.kind_models import MIXED, write_model
from oracle.file.reader import Reader as Oracle
from qsf.errors import QsfArgumentError, QsfFormatError
from qsf.file.reader import Reader
from qsf_converter import convert

RECORDS = (
    "file_bytes", "header", "arch", "layer_kinds", "rope_sets", "sections", "units", "tensors",
    "layers", "experts", "embedding", "final",
)  # fmt: skip


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


@FILES
def test_records_and_sections_are_those_of_the_oracle(path: Path) -> None:
    with Reader(path) as reader, Oracle(path) as oracle:
        for name in RECORDS:
            assert getattr(reader, name) == getattr(oracle, name), name
        for tag in oracle.sections:
            assert reader.read_section(tag) == oracle.read_section(tag)
        for i in range(oracle.header.n_layers):
            assert reader.experts_of(i) == oracle.experts_of(i)
        assert reader.n_extents == len(oracle.extents)


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
    with Oracle(path) as oracle:
        extents = [e for e in oracle.extents if e.crc32 is not None]
    for extent in extents:
        data = bytearray(path.read_bytes())
        data[extent.off + extent.n_bytes // 2] ^= 4
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
