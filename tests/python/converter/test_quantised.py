# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are published quantised: the values of the packages that publish them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from make import tiny_checkpoints
from qsf.errors import QsfConversionError
from qsf.file.reader import Reader
from qsf_converter import convert
from qsf_converter.sources.checkpoint import Checkpoint, to_float32
from qsf_converter.sources.checkpoint_safetensors import SafetensorsCheckpoint
from qsf_converter.sources.quantised import METHODS, dequantised, method_of
from qsf_converter.sources.source import open_source

GOLDEN = Path(__file__).parents[2] / "golden" / "quantised.safetensors"
W = "m.weight"
Stored = dict[str, tuple[str, tuple[int, ...], bytes]]  # type, shape, bytes


def read_file(path: Path) -> tuple[Stored, dict[str, str]]:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    more = header.pop("__metadata__", {})
    return {
        name: (e["dtype"], tuple(e["shape"]), data[slice(*(end + at for at in e["data_offsets"]))])
        for name, e in header.items()
    }, more


def write_file(folder: Path, stored: Stored, method: dict[str, Any] | None) -> None:
    folder.mkdir(exist_ok=True)
    header, body = {}, b""
    for name, (dtype, shape, data) in stored.items():
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        body += data
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
    path = folder / "config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**config, "quantization_config": method}))


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Checkpoint]:
    config = json.loads((folder / "config.json").read_text())
    with SafetensorsCheckpoint(folder) as stored:
        yield dequantised(stored, method_of(config, folder))


def values(checkpoint: Checkpoint, name: str, start: int = 0, stop: int | None = None) -> Any:
    stop = checkpoint.tensors[name].n_rows if stop is None else stop
    return to_float32(checkpoint.read_rows(name, start, stop))


GOLDEN_TENSORS, GOLDEN_METHODS = read_file(GOLDEN)
CASES = sorted(GOLDEN_METHODS)


def case_of(name: str) -> tuple[dict[str, Any], Stored, tuple[str, tuple[int, ...], bytes]]:
    own = {
        k.removeprefix(f"{name}/"): v for k, v in GOLDEN_TENSORS.items() if k.startswith(f"{name}/")
    }
    return json.loads(GOLDEN_METHODS[name]), own, own.pop(f"={W}")


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_package_that_made_them(name: str, tmp_path: Path) -> None:
    method, stored, (dtype, shape, data) = case_of(name)
    write_file(tmp_path, stored, method)
    with opened(tmp_path) as checkpoint:
        assert list(checkpoint.tensors) == [W]
        assert checkpoint.tensors[W].shape == shape
        found = values(checkpoint, W)
        if dtype == "BF16":  # theirs are rounded
            raw = found.view(np.uint32)
            raw = (raw + 0x7FFF + (raw >> 16 & 1)) >> 16
            np.testing.assert_array_equal(raw, np.frombuffer(data, "<u2").reshape(shape))
        else:
            expected = np.frombuffer(data, {"F16": "<f2", "F32": "<f4"}[dtype]).reshape(shape)
            np.testing.assert_array_equal(found.astype(expected.dtype), expected)
        for start, stop in ((0, 1), (3, 20), (31, 32), (5, 5)):
            np.testing.assert_array_equal(values(checkpoint, W, start, stop), found[start:stop])
