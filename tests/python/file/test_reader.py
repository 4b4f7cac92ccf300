"""The engine's reader as Python has it: its records, what it finds, what META and TOKN say."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from make.kind_models import MIXED, SETS, write_model
from make.qsf_files import tiny_header, write_tiny
from make.stored import unpack_tokenizer
from qsf.errors import QsfArgumentError, QsfFormatError
from qsf.file.blocks import pack_tokenizer
from qsf.file.family import family_of, type_of
from qsf.file.layout import Architecture, dtype_name, to_f32
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
