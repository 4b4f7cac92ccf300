"""The promise of docs/format.md: files of every released version stay readable, with the same bits.

The files are never made anew. A released version adds its own, with what it computes from them;
a row that fails means that the change breaks files of users.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest

import qsf
from qsf.file.reader import Reader

ROOT = Path(__file__).resolve().parents[3]
IDS = [(7 * i + 3) % 101 for i in range(40)]
# (CRC32 of the file; of its f32 logits [40, vocabulary] of IDS with a KV cache of 8 bits)
GOLDEN = {
    "0.1": {
        "tests/golden/tiny-experts-4bit.qsf": (0x3791855B, 2883896225),
        "tests/golden/tiny-gpt2-8bit.qsf": (0x97B62317, 572875878),
        "tests/golden/tiny-llama-4bit.qsf": (0x01CCC08A, 2233631727),
        "qsf/selftest.qsf": (0x14E8075B, 2562999682),  # python -m qsf.selftest has its text
    }
}
FILES = [(version, name) for version, names in GOLDEN.items() for name in names]


@pytest.mark.parametrize(("version", "name"), FILES)
def test_a_file_of_this_version_gives_the_same_logits(version: str, name: str) -> None:
    path = ROOT / name
    file_crc, logits_crc = GOLDEN[version][name]
    assert zlib.crc32(path.read_bytes()) == file_crc, "made anew: it is no file of that version"
    with Reader(path) as reader:
        reader.verify()
    with qsf.Model(path, kv_type="8bit", ram_budget=None) as model:
        assert zlib.crc32(np.ascontiguousarray(model.logits(IDS)).tobytes()) == logits_crc


def test_every_frozen_file_has_its_row() -> None:
    found = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "golden").glob("*.qsf")}
    assert found == {name for _, name in FILES} - {"qsf/selftest.qsf"}
