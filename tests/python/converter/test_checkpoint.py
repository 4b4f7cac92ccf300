# SPDX-License-Identifier: Apache-2.0
"""Safetensors, pickles, and what is opened as a model: directories with weights, GGUF files."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import resource
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from make import gguf_files, hf_makers, tiny_checkpoints, torch_files
from make.refusals import refusals
from make.stored import write_fresh
from make.tiny_checkpoints import raw_safetensors
from make.torch_files import StoredTensor
from qsf.errors import QsfConversionError, QsfIOError
from qsf_converter import convert
from qsf_converter.sources import checkpoint_torch
from qsf_converter.sources.checkpoint import to_float32
from qsf_converter.sources.checkpoint_gguf import GgufCheckpoint
from qsf_converter.sources.checkpoint_safetensors import SafetensorsCheckpoint
from qsf_converter.sources.checkpoint_torch import TorchCheckpoint, read_state_dict
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


@pytest.mark.parametrize(("weight_map", "message"), refusals("indexes"))
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


# ---- pytorch_model.bin ----
BIN = "pytorch_model.bin"


def read_pickled(checkpoint: TorchCheckpoint | SafetensorsCheckpoint, name: str) -> np.ndarray:
    tensor = checkpoint.tensors[name]
    return checkpoint.read_rows(name, 0, tensor.n_rows).reshape(tensor.shape)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_pickled_values_are_those_that_were_saved(
    tmp_path: Path, dtype: type, protocol: int
) -> None:
    saved = weights(dtype)
    how: dict[str, Any] = {"top": "my model", "byteorder": None, "zip64": True}
    torch_files.save(
        tmp_path / BIN, {**saved, "step": 7}, protocol=protocol, **(how if protocol == 4 else {})
    )
    with TorchCheckpoint(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == set(saved)
        for name, values in saved.items():
            assert checkpoint.tensors[name].shape == values.shape
            np.testing.assert_array_equal(read_pickled(checkpoint, name), values)
        for start, stop in ((0, 7), (0, 0), (3, 5), (6, 7)):
            rows = checkpoint.read_rows("a", start, stop)
            np.testing.assert_array_equal(rows.reshape(-1, 5), saved["a"][start:stop])
        with pytest.raises(IndexError):
            checkpoint.read_rows("a", 5, 8)
        with (tmp_path / BIN).open("r+b") as file:
            file.truncate(100)
        with pytest.raises(QsfIOError, match="bytes early in tensor a"):
            checkpoint.read_rows("a", 0, 7)


def test_bf16_parameters_and_other_types(tmp_path: Path) -> None:
    values = np.array([[1.0, -2.5], [0.5, 3.0]], np.float32)
    tensors = {
        "x": torch_files.bf16(values),
        "p": torch_files.dense(values, is_parameter=True),
        "mask": np.ones((2, 2), np.int64),
    }
    torch_files.save(tmp_path / BIN, tensors)
    with TorchCheckpoint(tmp_path) as checkpoint:
        np.testing.assert_array_equal(to_float32(read_pickled(checkpoint, "x")), values)
        np.testing.assert_array_equal(read_pickled(checkpoint, "p"), values)
        with pytest.raises(QsfConversionError, match="mask is stored as I64; only F32, F16, BF16"):
            checkpoint.read_rows("mask", 0, 1)


def test_views_of_one_storage(tmp_path: Path) -> None:
    """Shared, shifted, transposed and cut storages, as fused and tied weights are saved."""
    pool = np.arange(60, dtype=np.float32)
    views = {
        "whole": StoredTensor(pool, (12, 5), (5, 1)),
        "tied": StoredTensor(pool, (12, 5), (5, 1)),
        "rows": StoredTensor(pool, (4, 5), (5, 1), offset=20),
        "transposed": StoredTensor(pool, (5, 12), (1, 5)),
        "columns": StoredTensor(pool, (12, 2), (5, 1), offset=3),
        "both": StoredTensor(pool, (2, 11), (1, 5), offset=8),
        "one row": StoredTensor(pool, (1, 5), (77, 1), offset=55),
        "column": StoredTensor(pool, (12, 1), (5, 9), offset=4),
        "vector": StoredTensor(pool, (7,), (1,), offset=53),
        "empty": StoredTensor(pool, (0, 5), (5, 1), offset=60),
    }
    torch_files.save(tmp_path / BIN, views)
    with TorchCheckpoint(tmp_path) as checkpoint:
        for name, view in views.items():
            steps = [4 * step for step in view.strides]
            expected = np.lib.stride_tricks.as_strided(pool[view.offset :], view.shape, steps)
            np.testing.assert_array_equal(read_pickled(checkpoint, name), expected, err_msg=name)
            if len(view.shape) == 2:
                for start in range(view.shape[0]):
                    rows = checkpoint.read_rows(name, start, start + 1)
                    np.testing.assert_array_equal(rows[0], expected[start], err_msg=name)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((3, 4), (0, 1)), ((3, 4), (2, 1)), ((3, 4), (1, 2)), ((5,), (2,)), ((2, 2, 2), (4, 1, 2)),
     ((1 << 40, 1 << 22), (0, 0))],  # which takes no memory
)  # fmt: skip
def test_other_strides_are_refused_when_they_are_read(
    tmp_path: Path, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    odd = StoredTensor(np.zeros(20, np.float32), shape, strides)
    torch_files.save(tmp_path / BIN, {"odd": odd, "fine": np.ones(2, np.float32)})
    with TorchCheckpoint(tmp_path) as checkpoint:
        assert read_pickled(checkpoint, "fine").tolist() == [1, 1]
        with pytest.raises(QsfConversionError, match=r"odd of shape .* has strides .*contiguous"):
            checkpoint.read_rows("odd", 0, 1)


@pytest.mark.parametrize(
    "change",
    [{"offset": 1}, {"shape": (5, 4)}, {"strides": (5, 1)}, {"shape": (1 << 62, 1 << 62)},
     {"strides": (1 << 62, 1)}, {"offset": 1 << 62}, {"strides": (-4, 1)}, {"shape": (-4, -4)},
     {"offset": -1}, {"offset": True}, {"shape": (4,)}, {"offset": 1 << 2000}, {"n_items": 17},
     {"n_items": 1 << 62}, {"n_items": -1}],
)  # fmt: skip
def test_tensors_outside_their_storage_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    tensor = StoredTensor(np.zeros(16, np.float32), (4, 4), (4, 1))
    for name, value in change.items():
        setattr(tensor, name, value)
    torch_files.save(tmp_path / BIN, {"x": tensor})
    with pytest.raises(QsfConversionError, match=r"pytorch_model\.bin: "):
        TorchCheckpoint(tmp_path)


class Call:
    """Pickled as a call of anything."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.said = function, arguments

    def __reduce__(self) -> Any:
        return self.said


def malicious(folder: Path) -> dict[str, tuple[bytes, str]]:
    """Pickles that run something in an ordinary unpickler, and what is refused in them."""
    mark = folder / "executed"
    code = f"open({str(mark)!r}, 'w')"
    return {
        "system": (pickle.dumps(Call(os.system, f"touch {mark}"), 2), f"{os.name}.system"),
        "eval": (pickle.dumps(Call(eval, code), 2), "__builtin__.eval"),
        "exec in a value": (pickle.dumps({"x": Call(exec, code)}, 4), "builtins.exec"),
        "getattr": (pickle.dumps(Call(getattr, "", "x"), 2),
                    "__builtin__.getattr"),
        "inst": (f"(S'touch {mark}'\nios\nsystem\n.".encode(), "instruction"),
        "object": (b"(cos\nsystem\no.", "os.system"),
        "dotted": (b"\x80\x04\x8c\x05torch\x8c\x10_utils.os.system\x93.", "torch._utils.os.system"),
        "other of torch": (b"\x80\x02ctorch\nload\n)R.", "torch.load"),
        "extension": (b"\x80\x02\x82\x01.", "instruction EXT1"),
        "build a tensor's state": (
            b"\x80\x02ccollections\nOrderedDict\n)R}b}b(K\x01K\x02tK\x03b.", "attributes"),
        "numpy": (pickle.dumps(np.zeros(3), 2), "numpy"),
    }  # fmt: skip


def test_nothing_is_executed(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    for name, (data, message) in malicious(tmp_path).items():
        torch_files.save(tmp_path / "m" / BIN, {}, data=data)
        with pytest.raises(QsfConversionError) as caught:
            TorchCheckpoint(tmp_path / "m")
        assert message in str(caught.value), name
        assert len(str(caught.value).splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_damaged_pickles_are_refused() -> None:
    """Also lengths of which an ordinary unpickler takes the memory first."""
    for data, message in (
        *refusals("pickles"),
        ("\x80\x04I" + "9" * 100000 + "\n.", "instruction INT|digits"),
        ("\x80\x02" + "N" * (17 << 20), "too large to be right"),
    ):
        with pytest.raises(QsfConversionError, match=message):
            read_state_dict(data.encode("latin-1"))


def test_instructions_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_torch, "_MAX_INSTRUCTIONS", 1000)
    with pytest.raises(QsfConversionError, match="list, not a dictionary"):
        read_state_dict(b"\x80\x02" + b"]" * 998 + b".")
    with pytest.raises(QsfConversionError, match="more than 1000 instructions"):
        read_state_dict(b"\x80\x02" + b"]" * 999 + b".")


def test_hostile_pickles_cost_little() -> None:
    """What makes Python's own unpickler take 32 GB or overflow its stack; in a small process."""
    memo = b"\x80\x02}r\xff\xff\xff\x7f."  # the memo's entry 2^31 - 1
    deep_key = b"\x80\x02})" + b"\x85" * 200_000 + b"K\x01s."  # is hashed in an ordinary one
    deep = b"\x80\x02})" + b"\x85" * 200_000 + b"0."
    deep_value = b"\x80\x02}X\x01\0\0\0k)" + b"\x85" * 200_000 + b"s."
    script = (
        "import sys\n"
        "from qsf_converter.sources.checkpoint_torch import read_state_dict\n"
        "from qsf.errors import QsfConversionError\n"
        "for data in eval(sys.stdin.read()):\n"
        "    try: read_state_dict(data)\n"
        "    except QsfConversionError as error: print(error)\n"
    )
    limit = 1 << 30

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    done = subprocess.run(
        [sys.executable, "-c", script],
        input=repr([memo, deep_key, deep, deep_value]),
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limited,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr[-500:]
    said = done.stdout.splitlines()
    assert len(said) == 4
    assert ["no tensors" in said[0], "tuple as a key" in said[1], "POP" in said[2]] == [True] * 3
    assert "no tensors" in said[3]


# ---- the zip file ----
def test_every_truncation_and_any_flipped_byte_of_the_directory(tmp_path: Path) -> None:
    path = tmp_path / BIN
    torch_files.save(path, {"x": np.zeros(4, np.float32)})
    content = path.read_bytes()
    for n in range(0, len(content), 5):
        write_fresh(path, content[:n])
        with pytest.raises(QsfConversionError):
            TorchCheckpoint(tmp_path)
    n_refused = 0
    for at in range(content.index(b"PK\x01\x02"), len(content)):
        write_fresh(path, content[:at] + b"\xff" + content[at + 1 :])
        try:
            TorchCheckpoint(tmp_path).close()
        except QsfConversionError:
            n_refused += 1
    assert n_refused > 100  # versions, times and attributes are not looked at


def test_a_directory_of_any_size_takes_little_memory(tmp_path: Path) -> None:
    n_bytes = 1 << 30
    with (tmp_path / BIN).open("wb") as file:
        file.write(b"PK\x03\x04")
        file.seek(n_bytes)
        file.write(struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 1, 1, n_bytes, 0, 0))
    with pytest.raises(QsfConversionError, match="1073741824 bytes at once are too many"):
        TorchCheckpoint(tmp_path)


def test_other_zip_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / BIN
    saved = {"x": np.zeros((50, 50), np.float32)}
    torch_files.save(path, saved, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(QsfConversionError, match=r"compressed, which torch.save never does"):
        TorchCheckpoint(tmp_path)
    torch_files.save(path, saved, byteorder=b"big")
    with pytest.raises(QsfConversionError, match="big-endian"):
        TorchCheckpoint(tmp_path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("readme", "x")
    with pytest.raises(QsfConversionError, match=r"0 records called data.pkl"):
        TorchCheckpoint(tmp_path)
    archive = torch_files._Archive()
    data = torch_files.state_dict_pickle(saved, archive)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/data.pkl", data)
    with pytest.raises(QsfConversionError, match="tensor x: no record data/0"):
        TorchCheckpoint(tmp_path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/data.pkl", data)
        with pytest.warns(UserWarning, match="Duplicate"):
            file.writestr("a/data.pkl", data)
    with pytest.raises(QsfConversionError, match=r"two records are called 'a/data.pkl'"):
        TorchCheckpoint(tmp_path)


OLD_START = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03."


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (OLD_START + bytes(100), "old format.*weights_only=True"),
        (b"sys_info".ljust(257, b"\0") + b"ustar" + bytes(300), "old format"),
        (b"version https://git-lfs.github.com/spec/v1\n", "pointer of Git LFS"),
        (b"", "it is no zip file"),
        (pickle.dumps({"x": 1}, 2), "it is no zip file"),
        (b"PK\x03\x04", "truncated"),
    ],
)
def test_other_pickles_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / BIN).write_bytes(content)
    with pytest.raises(QsfConversionError, match=message):
        TorchCheckpoint(tmp_path)


# ---- as a source of conversion ----
def converted(folder: Path, out: Path) -> bytes:
    convert(folder, out, quant_type="8bit")
    return out.read_bytes()


@pytest.mark.parametrize("make", [hf_makers.llama, hf_makers.gpt2])
def test_the_same_file_as_from_safetensors(
    tmp_path: Path, make: Callable[..., tuple[Path, hf_makers.Weights]]
) -> None:
    """Byte for byte: digest and quality included, single or sharded."""
    folder, tensors = make(tmp_path / "m")
    expected = converted(folder, tmp_path / "a.qsf")
    (folder / "model.safetensors").unlink()
    torch_files.save(folder / BIN, tensors)
    assert converted(folder, tmp_path / "b.qsf") == expected
    (folder / BIN).unlink()
    torch_files.save_shards(folder, tensors, 3)
    assert converted(folder, tmp_path / "c.qsf") == expected
    (folder / "pytorch_model-00002-of-00003.bin").unlink()
    with pytest.raises(QsfConversionError, match="1 of 3 shards are missing: pytorch_model-00002"):
        TorchCheckpoint(folder)
    index = {"weight_map": {"x": "../x.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(QsfConversionError, match="not a plain file name"):
        TorchCheckpoint(folder)
    with pytest.raises(QsfConversionError, match="no PyTorch weights"):
        TorchCheckpoint(tmp_path)
