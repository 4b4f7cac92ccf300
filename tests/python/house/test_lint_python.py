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
