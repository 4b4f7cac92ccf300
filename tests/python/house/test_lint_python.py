# SPDX-License-Identifier: Apache-2.0
"""The lint of the Python sources finds what it is for, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from house.test_build import load_tool

lint_python = load_tool("lint_python")
lint_lines = load_tool("lint_lines")

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


# Files of a project, and a part of what is found; "": nothing.
RULES: list[tuple[dict[str, str], str]] = [
    ({"qsf/system/a.py": "import fcntl\nimport os\nos.O_CLOEXEC\nopen('/proc/self/io')\n"}, ""),
    ({"qsf/foreign_json.py": "import json\njson.loads('1')\n"}, ""),
    ({"qsf/file/a.py": DOCSTRING + "#\n" * 700}, ""),
    ({"qsf/file/a.py": "re.compile(r'\\s*(?:,\\s*)?b(?:a|\\\\.)*(a+b)*(?:xa+)*')\n"}, ""),
    ({"qsf/file/a.py": "import json\njson.loads('1')\n"}, "qsf/file/a.py:2: JSON is parsed"),
    ({"qsf/file/a.py": WIDE}, "qsf/file/a.py:1: f: its docstring"),
    ({"qsf/file/a.py": SHIFTED}, "qsf/file/a.py:1: f: its docstring"),
    ({"qsf/file/a.py": "def f():\n    import fcntl\n"}, "a.py:2: fcntl is only allowed in qsf.s"),
    ({"qsf/file/a.py": "os.pread(fd, 1, 0)\n"}, "os.pread is only allowed in"),
    ({"qsf/file/a.py": "signal.SIGHUP\n"}, "signal.SIGHUP is only allowed in"),
    ({"qsf/file/a.py": "Popen(a, start_new_session=True)\n"}, "start_new_session is only"),
    ({"qsf/file/a.py": "open(f'/proc/{pid}/io')\n"}, "/proc/ is only allowed in"),
    ({"qsf/file/a.py": LONG}, "long: a function of 81 lines, at most 80"),
    ({"tools/a.py": "#\n" * 801}, "tools/a.py:801: at most 800 lines"),
    ({"qsf/file/a.py": "re.compile(rb'a\\s*,?\\s*b')\n"}, "\\s*,?\\s*: its time may grow"),
    ({"qsf/file/a.py": "re.sub(rf'(?:x?a+)*{b}', '', x)\n"}, "its time may grow"),
]


@pytest.mark.parametrize(("files", "expected"), RULES, ids=lambda value: str(value)[:40])
def test_each_rule_has_a_file_that_breaks_it(
    files: dict[str, str], expected: str, tmp_path: Path
) -> None:
    violations = lint(tmp_path, files)
    assert len(violations) == bool(expected), violations
    assert expected in "".join(violations)


def test_a_room_that_grows_beyond_its_lines_is_named() -> None:
    cap = lint_lines.CAPS["csrc/io"]
    assert lint_lines.check({"csrc/io/a.c": cap, "examples/a.py": 9}) == []
    (fault,) = lint_lines.check({"csrc/io/a.c": cap, "csrc/io/b.h": 1})
    assert fault.startswith(f"csrc/io: {cap + 1} lines, at most {cap}")
    assert lint_lines.check({"csrc/cellar/a.c": 1}) == [
        "csrc/cellar/a.c: in no room of tools/lint_lines.py"
    ]
