# SPDX-License-Identifier: Apache-2.0
"""The lint of the Python sources finds what it is for, and nothing else."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
_SPEC = importlib.util.spec_from_file_location("lint_python", ROOT / "tools/lint_python.py")
assert _SPEC is not None
assert _SPEC.loader is not None
lint_python = importlib.util.module_from_spec(_SPEC)
sys.modules["lint_python"] = lint_python
_SPEC.loader.exec_module(lint_python)

TYPE_CHECKED = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {}\n"
CONVERTER = "converter/qsf_converter"
LONG = "def long() -> None:\n    '''Say\n\n    why.'''\n" + "    pass\n" * 80
WIDE = "def f():\n    '''Say\n\n\n    why.'''\n"
SHIFTED = "def f(x):\n    '''Say.\n\n    Args:\n            x: y.\n    '''\n"
DOCSTRING = "def long() -> None:\n    '''Say\n\n    why.'''\n" + "    pass\n" * 59


def lint(root: Path, files: dict[str, str]) -> list[str]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    violations: list[str] = lint_python.check(root)
    return violations


@pytest.mark.parametrize(
    "files",
    [
        {"qsf/file/a.py": "from qsf.errors import QsfError\n", "qsf/errors.py": ""},
        {"qsf/file/a.py": "import qsf.file.b\n", "qsf/file/b.py": ""},
        {
            "qsf/file/a.py": TYPE_CHECKED.format("from qsf.model import Model"),
            "qsf/model.py": "",
        },
        {
            "qsf/cli/evaluate.py": "def f():\n    import qsf_converter.original.logits\n",
            f"{CONVERTER}/original/logits.py": "",
        },
        {"qsf/file/a.py": "TEXT = 'qsf_converter.cli is a module'\n", f"{CONVERTER}/cli.py": ""},
        {"qsf/system/a.py": "import fcntl\nimport os\nos.O_CLOEXEC\nopen('/proc/self/io')\n"},
        {"bench/qsf_bench/models/a.py": "import resource\n"},
        {"qsf/file/a.py": "import os, signal\nos.O_RDONLY, signal.SIGINT, os.getpid()\n"},
        {"qsf/foreign_json.py": "import json\njson.loads('1')\n"},
        {"qsf/file/a.py": DOCSTRING},
        {"qsf/file/a.py": "#\n" * 800},
        {"qsf/file/a.py": "re.compile(r'\\s*(?:,\\s*)?b(?:a|\\\\.)*(a+b)*(?:xa+)*')\n"},
    ],
)
def test_lint_accepts(files: dict[str, str], tmp_path: Path) -> None:
    assert lint(tmp_path, files) == []


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"qsf/file/a.py": "import json\njson.loads('1')\n"}, "qsf/file/a.py:2: JSON is parsed"),
        ({"qsf/file/a.py": WIDE}, "qsf/file/a.py:1: f: its docstring"),
        ({"qsf/file/a.py": SHIFTED}, "qsf/file/a.py:1: f: its docstring"),
        ({f"{CONVERTER}/convert.py": "from json import load\n"}, "convert.py:1: JSON is parsed"),
        (
            {"qsf/file/a.py": "from qsf.model import Model\n", "qsf/model.py": ""},
            "qsf/file/a.py:1: qsf.file may not import qsf.model",
        ),
        (
            {"qsf/file/a.py": "def f():\n    from qsf import model\n", "qsf/model.py": ""},
            "qsf/file/a.py:2: qsf.file may not import qsf.model",
        ),
        (
            {"qsf/cli/run/a.py": "import qsf_converter.cli\n", f"{CONVERTER}/cli.py": ""},
            "qsf/cli/run/a.py:1: qsf.cli may not import qsf_converter.cli",
        ),
        (
            {"qsf/cli/run/a.py": "load('qsf_converter.cli')\n", f"{CONVERTER}/cli.py": ""},
            "qsf/cli/run/a.py:1: qsf.cli may not import qsf_converter.cli",
        ),
        (
            {"qsf/file/a.py": "import qsf.file.b\n", "qsf/file/b.py": "import qsf.file.a\n"},
            "a circle of modules: qsf.file.a -> qsf.file.b -> qsf.file.a",
        ),
        (
            {
                "qsf/file/a.py": TYPE_CHECKED.format("from qsf.model import Model"),
                "qsf/model.py": "from qsf.file import a\n",
            },
            "a circle of modules: qsf.file.a -> qsf.model -> qsf.file.a",
        ),
        ({"qsf/cellar/a.py": ""}, "qsf.cellar is not a room"),
        (
            {"qsf/file/a.py": "def f():\n    import fcntl\n"},
            "a.py:2: fcntl is only allowed in qsf.s",
        ),
        (
            {f"{CONVERTER}/text.py": "from resource import getrlimit\n"},
            "resource is only allowed in",
        ),
        ({"qsf/file/a.py": "x = os.O_RDONLY | os.O_CLOEXEC\n"}, "os.O_CLOEXEC is only allowed in"),
        ({"qsf/file/a.py": "os.pread(fd, 1, 0)\n"}, "os.pread is only allowed in"),
        ({"qsf/file/a.py": "signal.SIGHUP\n"}, "signal.SIGHUP is only allowed in"),
        ({"qsf/file/a.py": "Popen(a, start_new_session=True)\n"}, "start_new_session is only"),
        ({"qsf/file/a.py": "open(f'/proc/{pid}/io')\n"}, "/proc/ is only allowed in"),
        ({"qsf/file/a.py": LONG}, "long: a function of 81 lines, at most 80"),
        ({"qsf/file/a.py": "#\n" * 801}, "qsf/file/a.py:801: at most 800 lines"),
        ({"tools/a.py": "#\n" * 801}, "tools/a.py:801: at most 800 lines"),
        (
            {"qsf/file/a.py": "re.compile(rb'a\\s*,?\\s*b')\n"},
            "a.py:1: \\s*,?\\s*: its time may grow",
        ),
        ({"qsf/file/a.py": "re.match(r'\\s*\\[?\\s*{', x)\n"}, "its time may grow"),
        ({"qsf/file/a.py": "re.sub(rf'(?:x?a+)*{b}', '', x)\n"}, "its time may grow"),
    ],
)
def test_lint_finds(files: dict[str, str], expected: str, tmp_path: Path) -> None:
    violations = lint(tmp_path, files)
    assert len(violations) == 1, violations
    assert expected in violations[0]


def test_the_table_of_rooms_has_no_circle() -> None:
    rooms = {room: set(may) for room, may in lint_python.MAY_IMPORT.items()}
    assert lint_python.find_circles(rooms) == []
    rooms["qsf.errors"] = {"qsf.model"}
    assert lint_python.find_circles(rooms) != []


def test_every_late_import_is_there() -> None:
    """A reason whose import is gone goes too."""
    modules = lint_python.read_modules(ROOT)
    for importing, imported in lint_python.LATE_IMPORTS:
        found = {i.module for i in lint_python.imports_of(modules[importing], modules)}
        assert imported in found
