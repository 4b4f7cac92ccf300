"""GGUF files that are split: read from the first part, refused where one is missing or wrong."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from make import gguf_files, tiny_checkpoints
from make.stored import Reader
from qsf.errors import QsfArgumentError, QsfConversionError
from qsf.file.gguf_parts import name_without_part, part_names
from qsf.find import store
from qsf.find.download import wanted_files
from qsf.find.names import gguf_of, meaning_of
from qsf_converter import convert


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """The first of four parts; ``whole.gguf`` beside them is the same model."""
    folder = tiny_checkpoints.make_llama(tmp_path / "hf")
    gguf_files.write(folder, tmp_path / "whole.gguf")
    return gguf_files.write(folder, tmp_path / "m.gguf", n_in_part=6)


def test_the_parts_are_the_file(first: Path, tmp_path: Path) -> None:
    assert first.name == "m-00001-of-00004.gguf"
    for source in (first, tmp_path / "whole.gguf"):
        convert(source, tmp_path / f"{source.stem}.qsf")
    parts, whole = (tmp_path / f"{name}.qsf" for name in ("m-00001-of-00004", "whole"))
    with Reader(parts) as found, Reader(whole) as expected:
        assert found.header == expected.header
        for i in range(len(expected.units)):
            assert found.read_unit(i) == expected.read_unit(i)


def test_no_part_is_written_over(first: Path) -> None:
    last = first.with_name("m-00004-of-00004.gguf")
    before = last.read_bytes()
    with pytest.raises(QsfArgumentError, match="is a file of the model itself"):
        convert(first, last, force=True)
    assert last.read_bytes() == before


def test_a_part_that_is_missing_is_named(first: Path) -> None:
    first.with_name("m-00003-of-00004.gguf").unlink()
    with pytest.raises(QsfConversionError, match=r"m-00003-of-00004.gguf is missing.*part 3 of"):
        convert(first, first.with_name("out.qsf"))


def test_parts_that_do_not_belong_together(first: Path, tmp_path: Path) -> None:
    second, third = (first.with_name(f"m-0000{i}-of-00004.gguf") for i in (2, 3))
    out = tmp_path / "out.qsf"
    with pytest.raises(QsfConversionError, match=r"one of 4 parts: name the first, .*m-00001-of"):
        convert(second, out)
    shutil.copy(first, tmp_path / "renamed.gguf")
    with pytest.raises(QsfConversionError, match="part of the name"):
        convert(tmp_path / "renamed.gguf", out)
    shutil.copy(third, second)
    with pytest.raises(QsfConversionError, match=r"00002-of-00004.gguf: .* not part 2 of 4"):
        convert(first, out)
    data = third.read_bytes()
    at = data.index(b"split.no") + len("split.no") + 4
    second.write_bytes(data[:at] + b"\x01" + data[at + 1 :])
    with pytest.raises(QsfConversionError, match="is in an earlier part too"):
        convert(first, out)
    assert not out.exists()


def test_names_of_parts(first: Path, tmp_path: Path) -> None:
    assert part_names("m.gguf") == ("m.gguf",)
    assert part_names("m-00001-of-00000.gguf") == ("m-00001-of-00000.gguf",)
    assert part_names("m-00002-of-00002.gguf")[0] == "m-00001-of-00002.gguf"
    assert name_without_part("m-Q8_0-00001-of-00002.gguf") == "m-Q8_0.gguf"
    hub = ["m-Q4_0-00001-of-00002.gguf", "m-Q4_0-00002-of-00002.gguf", "m-Q8_0.gguf"]
    assert gguf_of(hub, "q4_0") == hub[0]
    assert wanted_files("org/m", dict.fromkeys(hub, 1), "Q4_0") == set(hub[:2])
    with pytest.raises(QsfConversionError, match=r"00002-of-00002\.gguf is missing"):
        wanted_files("org/m", dict.fromkeys(hub[:1], 1), "Q4_0")
    assert meaning_of(str(first)).path == first
    alone = tmp_path / "alone"
    alone.mkdir()
    for path in tmp_path.glob("m-*.gguf"):
        shutil.copy(path, alone)
    assert meaning_of(str(alone)).path == alone / first.name
    before = store.fingerprint_of(alone / first.name)
    (alone / "m-00003-of-00004.gguf").write_bytes(b"")
    assert store.fingerprint_of(alone / first.name) != before
