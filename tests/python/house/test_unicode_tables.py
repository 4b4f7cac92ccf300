"""tools/make_unicode_tables.py: its numbers, and that unicode_tables.inc is what it writes."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import importlib.util
import re
import zlib
from pathlib import Path

import numpy as np
import pytest

from qsf_converter.text.characters import named

tokenizers = pytest.importorskip("tokenizers")
ROOT = Path(__file__).resolve().parents[3]
spec = importlib.util.spec_from_file_location("tables", ROOT / "tools" / "make_unicode_tables.py")
assert spec is not None
assert spec.loader is not None
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)

SETS = ROOT / "converter" / "qsf_converter" / "text" / "character_sets.bin"
FILE = ROOT / "csrc" / "text" / "unicode_tables.inc"


def require_version() -> None:
    """Skip where another version of the library is installed than the file was made from."""
    match = re.search(r"the library tokenizers ([0-9.]+[0-9])", FILE.read_text("ascii"))
    assert match is not None
    if tokenizers.__version__ != match[1]:
        pytest.skip(f"tokenizers is {tokenizers.__version__}, the tables are of {match[1]}")


def test_the_file_has_the_library_s_compositions() -> None:
    require_version()
    decompositions = tables.read_decompositions()
    compositions = tables.read_compositions(decompositions)
    tables.check_sizes(decompositions, compositions)
    text = "".join(re.findall(r'^"(.*)",$', FILE.read_text("ascii"), re.MULTILINE))
    numbers = [*tables.list_decompositions(decompositions), *tables.list_compositions(compositions)]
    assert text.endswith("".join(map(tables.write_number, numbers)))


def test_sets_of_characters_are_those_of_the_library() -> None:
    require_version()
    assert np.flatnonzero(named("Han")).tolist() == tables.members("Han")


@pytest.mark.slow
def test_the_file_is_what_the_tool_writes() -> None:
    require_version()
    assert FILE.read_text("ascii") == tables.write_file()
    assert zlib.decompress(SETS.read_bytes()).decode() == tables.read_sets()
