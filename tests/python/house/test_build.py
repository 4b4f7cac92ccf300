"""The lints of the project find what they are for; the header and the library agree."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

from make.refusals import table
from qsf.system import confine, process

ROOT = Path(__file__).resolve().parents[3]


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


lint_python = load_tool("lint_python")
lint_lines = load_tool("lint_lines")
lint_c = load_tool("lint_c")
check_exports = load_tool("check_exports")

HEAD = "/* {name} - a test file. */\n/* SPDX-License-Identifier: Apache-2.0 */\n"
LONG = "def long() -> None:\n    '''Say\n\n    why.'''\n" + "    pass\n" * 80
DOCSTRING = "def long() -> None:\n    '''Say\n\n    why.'''\n" + "    pass\n" * 59

# Files of a project, and a part of what is found; "": nothing. The others: tests/data/tables.json.
Rule = tuple[dict[str, str], str]
LARGE: list[Rule] = [
    ({"csrc/base/bad.c": "void f(void)\n{\n" + "    g();\n" * 81 + "}\n"}, "function of 82"),
    ({"qsf/file/a.py": DOCSTRING}, ""),
    ({"qsf/file/a.py": LONG}, "long: a function of 81 lines, at most 80"),
]


@pytest.mark.parametrize(
    ("files", "expected"), [*table("tables")["lints"], *LARGE], ids=lambda value: str(value)[:40]
)
def test_each_rule_has_a_file_that_breaks_it(
    tmp_path: Path, files: dict[str, str], expected: str
) -> None:
    is_c = next(iter(files)).startswith("csrc/")
    for name, body in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        head = HEAD.format(name=path.name) if is_c else ""
        path.write_text(head + body, encoding="utf-8")
    found = (lint_c if is_c else lint_python).check(tmp_path)
    assert len(found) == bool(expected), found
    assert expected in "".join(found)


def test_a_room_that_grows_beyond_its_lines_is_named() -> None:
    cap = lint_lines.CAPS["csrc/io"]
    assert lint_lines.check({"csrc/io/a.c": cap, "examples/a.py": 9}) == []
    assert lint_lines.check({"tools/a.py": 801}) == ["tools/a.py: 801 lines, at most 800"]
    (fault,) = lint_lines.check({"csrc/io/a.c": cap, "csrc/io/b.h": 1})
    assert fault.startswith(f"csrc/io: {cap + 1} lines, at most {cap}")
    assert lint_lines.check({"csrc/cellar/a.c": 1}) == [
        "csrc/cellar/a.c: in no room of tools/lint_lines.py"
    ]


def test_lint_finds_a_wrong_head(tmp_path: Path) -> None:
    path = tmp_path / "csrc" / "base" / "bad.c"
    path.parent.mkdir(parents=True)
    path.write_text("/* other.c - no. */\nint x;\n", "utf-8")
    found = lint_c.check(tmp_path)
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


# ---- no instruction above a file's level is outside of its place ----
leaks = load_tool("check_isa_leaks").leaks


def _code(kind: str, function: str, *lines: str) -> str:
    body = "".join(f"   0:\t{line}\n" for line in lines)
    return f"x.o:     file format elf64-{kind}\n\n0000000000000000 <{function}>:\n{body}"


X86, ARM = "x86-64", "littleaarch64"


@pytest.mark.parametrize(
    ("file", "kind", "function", "line", "is_leak"),
    [
        ("ops", X86, "add", "vaddps %ymm0,%ymm1,%ymm2", True),
        ("ops", X86, "add", "paddd %xmm0,%xmm1", False),
        ("matmul_avx2", X86, "dot", "vpdpbusd %ymm15,%ymm15,%ymm0", True),
        ("matmul_avx2", X86, "dot", "vpmaddubsw %ymm0,%ymm1,%ymm2", False),
        ("roofline", X86, "read_avx512", "vpxorq %zmm0,%zmm1,%zmm2", False),
        ("crc32_x86", X86, "qsf_crc32_by_clmul", "vpclmulqdq $0x0,%zmm0,%zmm1,%zmm2", True),
        ("matmul_neon", ARM, "dot", "sdot\tv1.4s, v17.16b, v6.4b[0]", True),
        ("matmul_dotprod", ARM, "dot", "sdot\tv1.4s, v17.16b, v6.4b[0]", False),
    ],
)
def test_a_leak_is_named_with_its_function(
    file: str, kind: str, function: str, line: str, is_leak: bool
) -> None:
    """Once for each level; what the file or the function is for may be used."""
    found = list(leaks(file, _code(kind, function, "ret", line, line)))
    assert bool(found) == is_leak
    assert len(found) == len(set(found))
    assert all(text.startswith(f"{file}: {function} has an instruction of ") for text in found)


# ---- the package without the modules and names that Windows lacks ----


# Python as Windows has it, as far as Linux can show it: what is missing there is removed.
WINDOWS = """
import os, signal, sys, mmap, select, subprocess, asyncio, threading, types, socket, errno, ctypes
import _signal, _socket
pair = _socket.socketpair
socket.socketpair = lambda: pair()
for name in ("fcntl", "resource", "termios", "readline", "pwd", "grp"):
    sys.modules[name] = None
for module, names in (
    (os, "O_CLOEXEC O_NONBLOCK O_NOFOLLOW O_DIRECTORY O_DIRECT pread preadv pwrite fchmod "
         "posix_fadvise kill fork geteuid getuid sysconf statvfs"),
    (signal, "SIGHUP SIGKILL SIGBUS SIGURG SIGXCPU pthread_kill pthread_sigmask"),
    (_signal, "SIGHUP pthread_sigmask"), (_socket, "socketpair"), (mmap, "MAP_PRIVATE"),
):
    for name in names.split():
        delattr(module, name)
signal.SIGBREAK = signal.SIGTTIN
_held = set()
class Kernel32:
    def LockFileEx(self, handle, *_):
        key = os.fstat(handle.value).st_ino
        return key not in _held and not _held.add(key)
ctypes.WinDLL = lambda *_, **__: Kernel32()
ctypes.get_last_error = lambda: 33
sys.modules["msvcrt"] = types.SimpleNamespace(get_osfhandle=lambda fd: fd)
"""


def on_windows(script: str, *arguments: str | Path) -> str:
    program = WINDOWS + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_of_the_packages_can_be_imported() -> None:
    printed = on_windows("""
        import importlib, pkgutil
        import qsf, qsf_bench, qsf_converter
        names = [m.name for p in (qsf, qsf_bench, qsf_converter) for m in pkgutil.walk_packages(
                 p.__path__, p.__name__ + ".") if not m.name.endswith(("build_ffi", "libqsf"))
                 and not m.name.endswith(("__main__", "render_child", "qsf.bench"))]
        for name in names:
            importlib.import_module(name)
        print(len(names))
    """)
    assert int(printed) > 200


def test_files_are_read_written_locked_and_removed(tmp_path: Path) -> None:
    printed = on_windows(
        """
        from pathlib import Path
        from qsf.system import files
        path = Path(sys.argv[1])
        fd = files.create_new(path)
        assert files.write_at(fd, memoryview(b"abcdef"), 2) == 6
        assert files.read_at(fd, 3, 4) == b"cde"
        buffer = memoryview(bytearray(16))
        assert files.read_into(fd, buffer, 1) == 7 and bytes(buffer[:7]) == b"\\0abcdef"
        files.make_private(fd)
        files.forget_cached(fd)
        files.sync_folder(path.parent)
        os.lseek(fd, 5, os.SEEK_SET)
        files.lock(fd)
        assert os.lseek(fd, 0, os.SEEK_CUR) == 5
        other = files.open_no_link(path)
        try:
            files.try_lock(other)
        except BlockingIOError as error:
            print("held", error.errno == errno.EACCES)
        link = path.with_name("link")
        link.symlink_to(path)
        try:
            files.open_no_link(link)
        except OSError as error:
            print("link", error.errno == errno.ELOOP)
        files.unlink_locked(fd, path)
        print("there", path.exists(), os.read(fd, 1))
        os.close(fd)
        with files.new_memory(4096) as block:
            print(len(block))
        """,
        tmp_path / "file",
    )
    assert printed.splitlines() == ["held True", "link True", "there False b''", "4096"]


def test_a_signal_reaches_the_watcher_during_a_long_call_and_a_server() -> None:
    printed = on_windows("""
        import ctypes
        from qsf.system.signals import HANGUP, STOPPING, Watcher, handle_stopping
        from qsf.system.signals import interruptible_wait
        signal.signal(signal.SIGINT, lambda *_: print("back", flush=True))
        with Watcher(lambda number: print("watched", number, flush=True)):
            threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
            ctypes.PyDLL(None)  # loads it before the sleep
            ctypes.CDLL(None).usleep(800_000)
        with interruptible_wait():
            print(HANGUP == signal.SIGBREAK, len(STOPPING))
        class Loop(asyncio.SelectorEventLoop):
            def add_signal_handler(self, *_):
                raise NotImplementedError
        async def wait():
            stopped = asyncio.Event()
            handle_stopping(asyncio.get_running_loop(), lambda n: (print(n), stopped.set()))
            asyncio.get_running_loop().call_later(0.1, signal.raise_signal, signal.SIGTERM)
            await stopped.wait()
        Loop().run_until_complete(wait())
    """)
    assert printed.splitlines() == [f"watched {2}", "back", "True 3", "15"]


def test_text_is_generated_and_a_chat_needs_no_readline(tmp_path: Path) -> None:
    printed = on_windows("""
        from qsf.cli.run.chat import line_editing, prefilled
        from qsf.system.keys import unseen_keys
        with line_editing(lambda *_: []), prefilled("a"), unseen_keys():
            pass
        from qsf.cli.run import main
        sys.exit(main.main(["qsf/selftest.qsf", "--prompt", "a word", "-n", "24"]))
    """)
    assert len(printed) > 8


def test_ends_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {-9: process.KILLED, -11: process.NESTED, -15: "", -37: ""}  # 37: one without a name
    assert {code: process.how_ended(code) for code in ends} == ends
    monkeypatch.setattr("sys.platform", "win32")
    ends = {0xC0000409: "memory", 0xC00000FD: "stack", 1816: "time", 1: "", 0: ""}
    assert {code: process.how_ended(code) for code in ends} == ends


def test_the_limits_of_a_job_are_where_windows_reads_them() -> None:
    limits = confine.job_limits(5 << 20, 10)
    assert len(limits) == 144  # of 64-bit Windows
    assert int.from_bytes(limits[:8], "little") == 100_000_000  # steps of 100 ns
    assert int.from_bytes(limits[16:20], "little") == 0x102
    assert int.from_bytes(limits[112:120], "little") == 5 << 20
