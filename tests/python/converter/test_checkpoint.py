# SPDX-License-Identifier: Apache-2.0
"""Reading safetensors, and what is opened as a model: directories with weights, GGUF files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from make import gguf_files, hf_makers, tiny_checkpoints, torch_files
from make.commands import Here
from make.fresh import write_fresh
from make.refusals import refusals
from make.tiny_checkpoints import raw_safetensors
from oracle import reference
from qsf.errors import QsfArgumentError, QsfConversionError, QsfIOError
from qsf_converter import convert
from qsf_converter.sources.checkpoint import to_float32
from qsf_converter.sources.checkpoint_gguf import GgufCheckpoint
from qsf_converter.sources.checkpoint_safetensors import SafetensorsCheckpoint
from qsf_converter.sources.checkpoint_torch import TorchCheckpoint
from qsf_converter.sources.source import open_source


def weights(dtype: type = np.float32) -> hf_makers.Weights:
    return hf_makers.random_weights({"a": (7, 5), "b": (3,), "c.d": (2, 9), "e": (1, 4)}, dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("n_shards", [0, 3])
def test_values_are_those_that_were_saved(tmp_path: Path, n_shards: int, dtype: type) -> None:
    saved = weights(dtype)
    if n_shards:
        hf_makers.write_shards(tmp_path, saved, n_shards)
    else:
        save_file(saved, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == set(saved)
        assert len(checkpoint.paths) == (n_shards or 1)
        for name, values in saved.items():
            tensor = checkpoint.tensors[name]
            assert tensor.shape == values.shape
            raw = checkpoint.read_rows(name, 0, tensor.n_rows)
            assert raw.dtype == dtype
            np.testing.assert_array_equal(raw.reshape(values.shape), values)
        for start, stop in itertools.combinations_with_replacement(range(8), 2):
            rows = checkpoint.read_rows("a", start, stop)
            np.testing.assert_array_equal(rows.reshape(-1, 5), saved["a"][start:stop])
        with pytest.raises(IndexError):
            checkpoint.read_rows("a", 5, 8)


def test_shards_whose_index_is_lost(tmp_path: Path) -> None:
    folder, saved = hf_makers.llama(tmp_path / "m")
    convert(folder, tmp_path / "one.qsf", quant_type="f16")
    (folder / "model.safetensors").unlink()
    hf_makers.write_shards(folder, saved, 3)
    (folder / "model.safetensors.index.json").unlink()
    convert(folder, tmp_path / "m.qsf", quant_type="f16")
    assert (tmp_path / "m.qsf").read_bytes() == (tmp_path / "one.qsf").read_bytes()
    shard = folder / "model-00003-of-00003.safetensors"
    shard.write_bytes((folder / "model-00002-of-00003.safetensors").read_bytes())
    with pytest.raises(QsfConversionError, match=r"00003.safetensors: tensor .* another shard"):
        convert(folder, tmp_path / "m.qsf", force=True)
    shard.unlink()
    with pytest.raises(QsfConversionError, match=r"no weights: .*; there are model-00001-of-"):
        convert(folder, tmp_path / "m.qsf", force=True)


def test_pointers_of_git_lfs_are_named(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 132\n"
    for name in ("model.safetensors", "tokenizer.json", "m.gguf"):
        folder = hf_makers.llama(tmp_path / name)[0]
        (folder / name).write_bytes(pointer)
        place = folder / name if name == "m.gguf" else folder
        with pytest.raises(QsfConversionError, match=f"{name}: only a pointer of Git LFS is here"):
            convert(place, tmp_path / "m.qsf")


def test_null_is_false_where_transformers_takes_it_so(tmp_path: Path) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config |= dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings"))
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    with open_source(folder) as source:
        assert not source.facts.arch.tied_head


def test_bf16_is_the_upper_half_of_f32(tmp_path: Path) -> None:
    values = np.array([[1.0, -2.5, 3e38, 1e-40], [0.1, -0.0, np.inf, 65504.0]], np.float32)
    data = hf_makers.bf16_bytes(values)
    (tmp_path / "model.safetensors").write_bytes(raw_safetensors({"x": ("BF16", (2, 4), data)}))
    expected = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        np.testing.assert_array_equal(to_float32(checkpoint.read_rows("x", 0, 2)), expected)
        np.testing.assert_array_equal(to_float32(checkpoint.read_rows("x", 1, 2)), expected[1:])


def read_all(folder: Path, step: int) -> str:
    with SafetensorsCheckpoint(folder) as checkpoint:
        for tensor in checkpoint.tensors.values():
            for start in range(0, tensor.n_rows, step):
                checkpoint.read_rows(tensor.name, start, min(start + step, tensor.n_rows))
        return checkpoint.digest()


def test_the_digest_has_all_rows_after_a_sample_of_them(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "model.safetensors")
    expected = read_all(tmp_path, 2)
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        for tensor in checkpoint.tensors.values():
            for start, stop in ((0, 1), (3, 4), (0, 3), (2, 7)):
                if stop <= tensor.n_rows or start == 0:
                    checkpoint.read_rows(tensor.name, start, min(stop, tensor.n_rows))
        assert checkpoint.digest() == expected
        assert checkpoint.digest() == expected


def test_digest_depends_on_the_weights_only(tmp_path: Path) -> None:
    saved = weights()
    for name in ("one", "shards", "other"):
        (tmp_path / name).mkdir()
    save_file(saved, tmp_path / "one" / "model.safetensors")
    hf_makers.write_shards(tmp_path / "shards", saved, 2)
    whole = read_all(tmp_path / "one", 100)
    assert whole == read_all(tmp_path / "one", 2) == read_all(tmp_path / "shards", 3)
    saved["c.d"][1, 8] += 1
    save_file(saved, tmp_path / "other" / "model.safetensors")
    assert read_all(tmp_path / "other", 2) != whole


def test_files_are_closed(tmp_path: Path) -> None:
    hf_makers.write_shards(tmp_path, weights(), 2)
    fd_dir = Path("/proc/self/fd")
    if not fd_dir.exists():
        pytest.skip("no /proc here")

    def open_shards() -> int:
        links = [fd.readlink() for fd in fd_dir.iterdir() if fd.is_symlink()]
        return sum(link.suffix == ".safetensors" for link in links)

    with SafetensorsCheckpoint(tmp_path):
        assert open_shards() == 2
    assert open_shards() == 0
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(QsfConversionError):
        SafetensorsCheckpoint(tmp_path)
    assert open_shards() == 0


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(weights(np.float16), path)
    content = path.read_bytes()
    for n in range(len(content)):
        write_fresh(path, content[:n])
        with pytest.raises(QsfConversionError):
            SafetensorsCheckpoint(tmp_path)
    path.write_bytes(content + b"\0")
    with pytest.raises(QsfConversionError, match="damaged"):
        SafetensorsCheckpoint(tmp_path)


def write_header(path: Path, header: object, n_data_bytes: int) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(n_data_bytes))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        *refusals("safetensors"),
        (b"{", "damaged safetensors header"),
        (b'{"x": 1, "x": 2}', "twice"),
        (b"[" * 100000, "damaged safetensors header"),
    ],
)
def test_damaged_headers_are_refused(tmp_path: Path, header: object, message: str) -> None:
    write_header(tmp_path / "model.safetensors", header, 16)
    with pytest.raises(QsfConversionError, match=message):
        SafetensorsCheckpoint(tmp_path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    for content in (b"", b"abc", b"\xff" * 8, b"version 2" + b" " * 99):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(QsfConversionError, match="not a safetensors file"):
            SafetensorsCheckpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(QsfIOError, match=r"model\.safetensors"):
        SafetensorsCheckpoint(tmp_path)


def test_other_types_may_be_present_but_not_read(tmp_path: Path) -> None:
    tensors = {"mask": ("BOOL", (4,), bytes(4)), "new": ("F6_E2M3", (4,), bytes(3))}
    (tmp_path / "model.safetensors").write_bytes(raw_safetensors(tensors))
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        for name in tensors:
            with pytest.raises(QsfConversionError, match=f"{name} is stored as"):
                checkpoint.read_rows(name, 0, 1)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"x": "../model.safetensors"}, "not a plain file name"),
        ({"x": "/etc/passwd"}, "not a plain file name"),
        ({"x": ".."}, "not a plain file name"),
        ({"x": 5}, "not a plain file name"),
        ({}, "weight_map"),
        (None, "weight_map"),
        ({"x": "gone.safetensors"}, "1 of 1 shards are missing: gone.safetensors"),
        ({"y": "there.safetensors"}, "no tensor y"),
    ],
)
def test_bad_indexes_are_refused(tmp_path: Path, weight_map: object, message: str) -> None:
    save_file({"x": np.zeros(4, np.float32)}, tmp_path / "there.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(QsfConversionError, match=message):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "[" * 100000])
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(QsfConversionError, match="not a shard index"):
        SafetensorsCheckpoint(tmp_path)


def test_absence_is_explained(tmp_path: Path) -> None:
    with pytest.raises(QsfConversionError, match="no safetensors weights"):
        SafetensorsCheckpoint(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(QsfConversionError, match="only model-00001-of-00002"):
        SafetensorsCheckpoint(tmp_path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(weights(), path)
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 4)
        last = list(checkpoint.tensors.values())[-1]  # in the order of the file
        with pytest.raises(QsfIOError, match="ends 4 bytes early"):
            checkpoint.read_rows(last.name, 0, last.n_rows)


# ---- what is opened as a model ----


def test_safetensors_are_preferred(tmp_path: Path) -> None:
    folder, weights = hf_makers.llama(tmp_path / "m")
    torch_files.save(folder / "pytorch_model.bin", weights)
    with open_source(folder) as source:
        assert isinstance(source.checkpoint, SafetensorsCheckpoint)
        names = [path.name for path in source.files]
        assert names == ["model.safetensors", "tokenizer.json", "config.json"]
    (folder / "model.safetensors").unlink()
    with open_source(folder) as source:
        assert isinstance(source.checkpoint, TorchCheckpoint)
        names = [path.name for path in source.files]
        assert names == ["pytorch_model.bin", "tokenizer.json", "config.json"]
    (folder / "pytorch_model.bin").unlink()
    torch_files.save_shards(folder, weights, 2)
    hf_makers.write_shards(folder, weights, 3)
    with open_source(folder) as source:
        assert isinstance(source.checkpoint, SafetensorsCheckpoint)
        assert len(source.checkpoint.paths) == 3


def test_a_gguf_file_under_any_name(tmp_path: Path) -> None:
    folder = tiny_checkpoints.make_llama(tmp_path / "m")
    for name in ("m.gguf", "m.GGUF", "blob"):
        gguf_files.write(folder, tmp_path / name)
        with open_source(tmp_path / name) as source:
            assert isinstance(source.checkpoint, GgufCheckpoint)
            assert source.origin.name == "m" if "m" in name else "blob"
    (tmp_path / "not.gguf").write_bytes(b"x" * 100)
    with pytest.raises(QsfConversionError, match=r"not\.gguf: not a GGUF file"):
        convert(tmp_path / "not.gguf", tmp_path / "out.qsf")
    (tmp_path / "blob").write_bytes(b"x" * 100)
    with pytest.raises(QsfConversionError, match=r"blob: a model directory or a GGUF file is exp"):
        convert(tmp_path / "blob", tmp_path / "out.qsf")


def test_the_source_is_never_replaced(tmp_path: Path) -> None:
    folder, weights = hf_makers.llama(tmp_path / "m")
    path = gguf_files.write(folder, tmp_path / "m.gguf")
    (folder / "model.safetensors").unlink()
    torch_files.save(folder / "pytorch_model.bin", weights)
    for source, out in ((path, path), (folder, folder / "pytorch_model.bin")):
        before = out.read_bytes()
        with pytest.raises(QsfArgumentError, match="is a file of the model itself"):
            convert(source, out, force=True)
        assert out.read_bytes() == before


def test_absence_names_what_was_looked_for(tmp_path: Path) -> None:
    folder = hf_makers.write_model(tmp_path / "m", hf_makers.LLAMA_CONFIG, None)
    wanted = (
        "none of model.safetensors, model.safetensors.index.json, pytorch_model.bin, "
        "pytorch_model.bin.index.json"
    )
    with pytest.raises(QsfConversionError, match=wanted) as caught, open_source(folder):
        pass
    assert "there are" not in str(caught.value)
    (folder / "consolidated.00.pth").write_bytes(b"")
    (folder / "model-Q4_K_M.gguf").write_bytes(b"")
    with (
        pytest.raises(
            QsfConversionError,
            match=r"there are consolidated\.00\.pth, model-Q4_K_M.*"
            r"to convert model-Q4_K_M\.gguf, name the file itself",
        ),
        open_source(folder),
    ):
        pass  # fmt: skip
    (folder / "config.json").unlink()
    with pytest.raises(QsfConversionError, match=r"no config.json.*name the file itself"):
        convert(folder, tmp_path / "out.qsf")
    with pytest.raises(QsfIOError, match="gone: no such directory"):
        convert(tmp_path / "gone", tmp_path / "out.qsf")


# ---- the command ----


def test_the_command_converts_a_gguf_file(tmp_path: Path, tiny_llama_dir: Path, here: Here) -> None:
    """What it writes computes what the model in the directory computes."""
    path = gguf_files.write(tiny_llama_dir, tmp_path / "m.gguf", tokenizer=True)
    out = tmp_path / "m.qsf"
    done = here(path, out, "--quant-type", "f16", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert ", a .gguf file, or a name" in " ".join(here("--help").stdout.split())
    tokens = np.arange(3, 40)
    expected = reference.forward(reference.load_huggingface(tiny_llama_dir), tokens).logits
    np.testing.assert_array_equal(
        reference.forward(reference.load_qsf(out), tokens).logits, expected
    )
