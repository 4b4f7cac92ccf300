"""Reading what torch.save writes: the same numbers, in ranges, and nothing is executed."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

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

from make import hf_makers, torch_files
from make.fresh import write_fresh
from make.refusals import refusals
from make.torch_files import StoredTensor
from qsf.errors import QsfConversionError, QsfIOError
from qsf_converter import convert
from qsf_converter.sources import checkpoint_torch
from qsf_converter.sources.checkpoint import to_float32
from qsf_converter.sources.checkpoint_safetensors import SafetensorsCheckpoint
from qsf_converter.sources.checkpoint_torch import TorchCheckpoint, read_state_dict

BIN = "pytorch_model.bin"


def weights(dtype: type = np.float32) -> hf_makers.Weights:
    return hf_makers.random_weights({"a": (7, 5), "b": (3,), "c.d": (2, 9), "e": (1, 4)}, dtype)


def read_all(checkpoint: TorchCheckpoint | SafetensorsCheckpoint, name: str) -> np.ndarray:
    tensor = checkpoint.tensors[name]
    return checkpoint.read_rows(name, 0, tensor.n_rows).reshape(tensor.shape)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_values_are_those_that_were_saved(tmp_path: Path, dtype: type, protocol: int) -> None:
    saved = weights(dtype)
    how: dict[str, Any] = {"top": "my model", "byteorder": None, "zip64": True}
    torch_files.save(
        tmp_path / BIN, {**saved, "step": 7}, protocol=protocol, **(how if protocol == 4 else {})
    )
    with TorchCheckpoint(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == set(saved)
        for name, values in saved.items():
            assert checkpoint.tensors[name].shape == values.shape
            np.testing.assert_array_equal(read_all(checkpoint, name), values)
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
        np.testing.assert_array_equal(to_float32(read_all(checkpoint, "x")), values)
        np.testing.assert_array_equal(read_all(checkpoint, "p"), values)
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
            np.testing.assert_array_equal(read_all(checkpoint, name), expected, err_msg=name)
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
        assert read_all(checkpoint, "fine").tolist() == [1, 1]
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
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
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
