"""The engine's reader as Python has it: its records, and what it finds."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from make.kind_models import MIXED, SETS, write_model
from qsf.errors import QsfArgumentError, QsfFormatError
from qsf.file.layout import to_f32
from qsf.file.reader import Reader
from qsf_converter import convert


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
