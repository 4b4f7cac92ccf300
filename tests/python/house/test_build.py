"""The lint of the C sources finds what it is for; the header and the library agree."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


load_tool("lint_python")  # which lint_c uses
lint_c = load_tool("lint_c")
check_exports = load_tool("check_exports")

HEAD = "/* {name} - a test file. */\n/* SPDX-License-Identifier: Apache-2.0 */\n"


def lint(root: Path, name: str, body: str, *, head: str = HEAD) -> list[str]:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head.format(name=path.name) + body, encoding="utf-8")
    found: list[str] = lint_c.check(root)
    return found


# Files of a project, and a part of what is found in the last; "": nothing.
RULES: list[tuple[dict[str, str], str]] = [
    ({"csrc/include/ok.h": '#include "qsf_library.h"\n'}, ""),
    ({"csrc/memory/ok.c": '#include "platform/heap.h"\n#include <stdio.h>\n'}, ""),
    ({"csrc/base/ok.c": '/* malloc(8) */\nint n = snprintf(b, 8, "printf(x)");\n'}, ""),
    ({"csrc/format/ok.c": "#include <zstd.h>\n/* /proc/self/io, __linux__ */\n"}, ""),
    ({"csrc/platform/posix/ok.c": "#include <pthread.h>\n#if defined(__APPLE__)\n#endif\n"}, ""),
    ({"csrc/base/bad.c": '#include "platform/heap.h"\n'}, "base/ may not include"),
    ({"csrc/format/bad.h": '#  include "engine/run.h"\n'}, "format/ may not include"),
    ({"csrc/format/bad.c": '#include "reader.h"\n'}, "not written from csrc/ down"),
    ({"csrc/utils/bad.c": ""}, "not a room"),
    ({"csrc/format/bad.c": "void *p = malloc(8);\n"}, "malloc() is only allowed in platform/"),
    ({"csrc/engine/bad.c": 'printf("x");\n'}, "printf() is not allowed"),
    ({"csrc/engine/bad.c": "#include <pthread.h>\n"}, "<pthread.h> is only allowed in csrc/pl"),
    ({"csrc/machine/bad.c": "#if defined(__linux__)\n"}, "__linux__ is only allowed in csrc/pl"),
    ({"csrc/machine/bad.c": 'f("/proc/self/io");\n'}, "a path of the system is only allowed"),
    (
        {"csrc/platform/posix/bad.c": '#include "platform/linux/procfile.h"\n'},
        "only csrc/platform/linux/ may include platform/linux/procfile.h",
    ),
    ({"csrc/base/bad.c": "/* \u00e9 */\n"}, "not ASCII"),
    ({"csrc/base/bad.c": "/*" + " " * 98 + "x*/\n"}, "103 columns"),
    ({"csrc/base/bad.c": "int x;\n" * 800}, "802 lines"),
    ({"csrc/base/bad.c": "int x; \n"}, "space at the end"),
    ({"csrc/base/bad.c": "void f(void)\n{\n" + "    g();\n" * 81 + "}\n"}, "function of 82"),
    ({"csrc/base/twice.c": "", "csrc/format/twice.c": ""}, "taken by csrc/base/twice.c"),
    (
        {
            "csrc/format/one.c": '#include "format/two.h"\n',
            "csrc/format/two.h": '#include "format/one.h"\n',
        },
        "format/one -> format/two -> format/one",
    ),
    (
        {
            "csrc/io/one.c": "int one(void)\n{\n    return two();\n}\n",
            "csrc/io/two.c": "int two(void)\n{\n    return one();\n}\n",
        },
        "a circle of calls: io/one -> io/two -> io/one",
    ),
]


@pytest.mark.parametrize(("files", "expected"), RULES, ids=lambda value: str(value)[:40])
def test_each_rule_has_a_file_that_breaks_it(
    tmp_path: Path, files: dict[str, str], expected: str
) -> None:
    for name, body in files.items():
        found = lint(tmp_path, name, body)
    assert len(found) == bool(expected), found
    assert not expected or (found[0].startswith(f"{name}:") and expected in found[0])


def test_lint_finds_a_wrong_head(tmp_path: Path) -> None:
    found = lint(tmp_path, "csrc/base/bad.c", "int x;\n", head="/* other.c - no. */\n")
    assert len(found) == 2
    assert any("the first line is not" in line for line in found)
    assert any("SPDX" in line for line in found)


def test_every_declared_function_is_found_in_the_header() -> None:
    header = check_exports.public_header()
    names = check_exports.declared(header)
    assert len(names) == len(re.findall(r"^QSF_API ", header, re.MULTILINE))
    assert {"qsf_version", "qsf_model_open", "qsf_session_sync"} <= names


def test_exports_finds_what_is_wrong() -> None:
    symbols = check_exports.defined("qsf_a T 0 1\nqsf_b U\nhelper T 0 1\nqsf_c D 0 4\n")
    assert symbols == {"qsf_a", "helper", "qsf_c"}
    assert check_exports.check({"qsf_a"}, {"qsf_a"}) == []
    found = check_exports.check(symbols, {"qsf_a", "qsf_b"})
    assert len(found) == 2
    assert "helper" in found[0]
    assert "qsf_b" in found[1]
    shared = {"qsf_a", "_init"}
    assert check_exports.check(shared - {"_init"}, {"qsf_a"}, shared=shared) == []
    found = check_exports.check({"qsf_a"}, {"qsf_a"}, shared={"qsf_b"})
    assert found == ["libqsf.so exports qsf_b", "libqsf.so does not export qsf_a"]


def test_the_library_has_the_version_of_pyproject() -> None:
    from qsf.native._qsf import ffi, lib

    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    match = re.search(r'^version = "([0-9.]+)"', text, re.MULTILINE)
    assert match is not None
    assert ffi.string(lib.qsf_version()).decode() == match.group(1)


def test_a_section_without_a_mutant_fails_the_lint(project_root: Path, tmp_path: Path) -> None:
    places = ["docs/format.md", "csrc/format/directory.c"]
    mutants = "tests/python/make/mutants.py"
    for place in [*places, mutants]:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text((project_root / place).read_text("utf-8"), "utf-8")
    assert lint_c.check_sections(tmp_path) == []
    text = (tmp_path / mutants).read_text("utf-8")
    (tmp_path / mutants).write_text(text.replace('    "CHAT": _chat,\n', ""), "utf-8")
    assert lint_c.check_sections(tmp_path) == [
        f"{mutants}:1: section CHAT is missing: {', '.join(places)}"
    ]
