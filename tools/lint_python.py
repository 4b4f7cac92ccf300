"""Checks the rules of the Python sources that neither ruff nor mypy checks.

Which room (package) of qsf/ and converter/ may import which, no circles between rooms nor between
modules, who parses JSON, slow regular expressions, and the length of files and functions. An import
inside a function counts like one at the top; an import for type checkers only does not. Prints one
line per violation; exits with 1 if there is any.

Usage: python tools/lint_python.py [PROJECT_ROOT]
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# Name of a package -> its folder.
PACKAGES = {
    "qsf": "qsf",
    "qsf_converter": "converter/qsf_converter",
    "qsf_bench": "bench/qsf_bench",
}
OTHER_FOLDERS = ("tools", "bench", "tests/python")  # only the length of files

# Sets of rooms that the table uses.
_BASE = frozenset(
    {"qsf.errors", "qsf.closable", "qsf.kv", "qsf.native", "qsf.file", "qsf.text", "qsf.system"}
)
_MODEL = _BASE | {
    "qsf.options",
    "qsf.saved_sessions",
    "qsf.session",
    "qsf.passes",
    "qsf.batch",
    "qsf.model",
}
_CONVERTER = frozenset(
    {
        "qsf_converter.text",
        "qsf_converter.sources",
        "qsf_converter.rounding",
        "qsf_converter.request",
        "qsf_converter.original",
        "qsf_converter.calibrate",
    }
)
_BENCH_BASE = (
    _MODEL
    | {"qsf.shell", "qsf.find"}
    | {"qsf_converter.sources", "qsf_converter.rounding", "qsf_converter.text"}
)
_SERVE = frozenset(
    f"qsf.serve.{name}" for name in ("serving", "http", "tools", "scheduling", "hosts", "api")
)
# A room is a package inside qsf, qsf.serve or qsf_converter, or a module directly in one of them.
# It may import itself and the rooms named here; nothing else.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "qsf.errors": frozenset(),
    "qsf.closable": frozenset(),
    "qsf.kv": frozenset({"qsf.errors"}),
    "qsf.system": frozenset(),
    "qsf.foreign_json": frozenset({"qsf.system"}),
    "qsf.native": frozenset({"qsf.errors", "qsf.kv", "qsf.options", "qsf.system"}),
    "qsf.file": frozenset({"qsf.errors", "qsf.closable", "qsf.native", "qsf.system"}),
    "qsf.text": frozenset(
        {"qsf.errors", "qsf.file", "qsf.kv", "qsf.native", "qsf.options", "qsf.system"}
    ),
    "qsf.options": frozenset({"qsf.errors", "qsf.kv"}),
    "qsf.option_arguments": frozenset({"qsf.options"}),
    "qsf.saved_sessions": _BASE | {"qsf.options"},
    "qsf.session": _BASE | {"qsf.options", "qsf.option_arguments", "qsf.saved_sessions"},
    "qsf.passes": _BASE | {"qsf.session"},
    "qsf.batch": _BASE | {"qsf.options", "qsf.session", "qsf.serve.scheduling"},
    "qsf.model": (_MODEL - {"qsf.model"}) | {"qsf.option_arguments", "qsf.find"},
    "qsf": frozenset(),
    "qsf.shell": frozenset({"qsf.errors", "qsf.file", "qsf.options", "qsf.system"}),
    "qsf.__main__": frozenset({"qsf.shell"}),
    "qsf.report": frozenset({"qsf.errors", "qsf.file", "qsf.kv", "qsf.shell"}),
    "qsf.find": frozenset({"qsf.errors", "qsf.file", "qsf.shell", "qsf.system"}),
    "qsf.serve": frozenset(),
    "qsf.serve.serving": frozenset(),
    "qsf.serve.http": _BASE | {"qsf.options"},
    "qsf.serve.tools": _BASE | {"qsf.serve.http"},
    "qsf.serve.scheduling": _BASE
    | {"qsf.options", "qsf.saved_sessions", "qsf.session", "qsf.passes", "qsf.serve.http"},
    "qsf.serve.hosts": _BASE | {"qsf.serve.serving", "qsf.serve.http", "qsf.serve.scheduling"},
    "qsf.serve.api": _MODEL | {room for room in _SERVE if room != "qsf.serve.api"},
    "qsf.serve.server": _MODEL | _SERVE | {"qsf.shell"},
    "qsf.inspect": frozenset({"qsf.errors", "qsf.file", "qsf.shell", "qsf.report"}),
    "qsf.evaluate": _MODEL | {"qsf.shell"},
    "qsf_converter.sources": _BASE | {"qsf_converter.text"},
    "qsf_converter.rounding": _BASE | {"qsf_converter.sources"},
    "qsf_converter.request": _BASE | {"qsf_converter.rounding"},
    "qsf_converter.text": _BASE,
    "qsf_converter.original": _BASE
    | {"qsf.evaluate", "qsf_converter.sources", "qsf_converter.rounding", "qsf_converter.text"},
    "qsf_converter.calibrate": _BASE | (_CONVERTER - {"qsf_converter.calibrate"}),
    "qsf_converter.costs": _MODEL | {"qsf.evaluate", "qsf_converter.calibrate"},
    "qsf_converter.meta": _BASE | _CONVERTER | {"qsf.report", "qsf_converter.costs"},
    "qsf_converter.convert": _BASE
    | _CONVERTER
    | {"qsf.report", "qsf.shell", "qsf_converter.costs", "qsf_converter.meta"},
    "qsf_converter": frozenset({"qsf.report", "qsf_converter.request", "qsf_converter.convert"}),
    "qsf_converter.cli": _BASE
    | _CONVERTER
    | {"qsf.report", "qsf.shell", "qsf.find", "qsf_converter.convert"},
    "qsf.cli": _MODEL
    | _SERVE
    | {
        "qsf.shell",
        "qsf.find",
        "qsf.serve.server",
        "qsf.inspect",
        "qsf.evaluate",
        "qsf.report",
        "qsf.option_arguments",
    },
    "qsf.selftest": _MODEL | {"qsf"},
    "qsf.bench": frozenset({"qsf.shell"}),  # only the name of `qsf_bench`
    # A program on top of both packages, which makes the models that it measures.
    "qsf_bench.models": _BENCH_BASE,
    "qsf_bench.files": _BENCH_BASE | {"qsf_bench.models"},
    "qsf_bench.memory_group": _BENCH_BASE,
    "qsf_bench.processes": _BENCH_BASE | {"qsf_bench.memory_group"},
    "qsf_bench.worker_llama": frozenset(),
    "qsf_bench.worker_qsf": _BENCH_BASE | {"qsf_bench.worker_llama"},
    "qsf_bench.tasks": _BENCH_BASE | {"qsf_bench.memory_group", "qsf_bench.processes"},
    "qsf_bench.table": frozenset({"qsf_bench.files", "qsf_bench.tasks"}),
    "qsf_bench.cli": _BENCH_BASE
    | {f"qsf_bench.{name}" for name in ("models", "files", "memory_group", "tasks", "table")}
    | {"qsf_bench.worker_llama"},
    "qsf_bench": frozenset(),
}

# Space beside space, with at most one optional sign between; a repetition of a repetition.
SLOW_PATTERNS = re.compile(
    r"\\s[*+]\??(?:\\?[^\\()]\?)?\\s[*+]|\((?:\?:)?(?:\\?[^\\()|?*+]\?)*\\?[^\\()|?*+][*+]\)[*+]"
)
# The imports of qsf_converter that qsf may have: in a function, or as a name in a string, so that
# running a model imports none of it. (importing module, imported module) -> why.
LATE_IMPORTS: dict[tuple[str, str], str] = {
    ("qsf.shell.entry", "qsf_converter.cli"): "the entry point of qsf-convert",
    ("qsf", "qsf_converter.convert"): "qsf.convert, which is loaded when somebody names it",
    (
        "qsf.cli.evaluate",
        "qsf_converter.original.logits",
    ): "--against an original checkpoint, which only the converter can read",
}

# Only this room may use what Windows lacks. qsf_bench measures Linux and may use it, too.
SYSTEM_ROOM = "qsf.system"
SYSTEM_BOUND = ("qsf", "qsf_converter")  # the packages that are bound to the rule
_SYSTEM_MODULES = frozenset(
    {"fcntl", "resource", "select", "termios", "tty", "pty", "pwd", "grp", "syslog"}
)
_SYSTEM_NAMES = re.compile(
    r"os\.(O_(CLOEXEC|NONBLOCK|NOFOLLOW|DIRECT|DIRECTORY|TMPFILE|SYNC)|p(read|write)v?|fork\w*|kill|"
    r"killpg|get[eu]?uid|fch\w+|chown|posix_\w+|register_at_fork|mkfifo|sched_\w+|sysconf|statvfs|"
    r"wait\w*|setsid|nice|uname)$|"
    r"signal\.(SIG(HUP|KILL|BUS|URG|XCPU|XFSZ|USR1|USR2|PIPE|ALRM|CHLD|QUIT|TSTP)|pthread_\w+|alarm|"
    r"setitimer|sigwait)$|.*\.add_signal_handler$"
)
_SYSTEM_KEYWORDS = frozenset({"start_new_session", "preexec_fn", "pass_fds", "dir_fd"})
_SYSTEM_PATHS = ("/proc/", "/sys/", "/dev/")
# What every room may import.
EVERYWHERE = frozenset({"qsf.foreign_json"})

# The functions that parse JSON; the size of foreign JSON is checked before. The package of
# benchmarks reads what its own processes have written.
JSON_PARSERS = ("load", "loads", "JSONDecoder")
MAY_PARSE_JSON = ("qsf.foreign_json", "qsf_bench")

MAX_LINES = 800
MAX_FUNCTION_LINES = 80  # without the docstring
MISPLACED = re.compile(
    r"^ +(Args|Attributes|Raises):$|^(Args|Attributes|Raises):\n {5,}", re.MULTILINE
)

Violation = tuple[str, int, str]  # path, line number from 1, what is wrong


@dataclass(frozen=True)
class Import:
    """One module that is imported, or named in a string."""

    module: str
    line: int


@dataclass(frozen=True)
class Module:
    """One Python file of the packages."""

    name: str
    path: str
    tree: ast.Module


def read_modules(root: Path) -> dict[str, Module]:
    modules = {}
    for package, folder in PACKAGES.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            name = ".".join([package, *(part for part in parts if part != "__init__")])
            tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
            modules[name] = Module(name, str(path.relative_to(root)), tree)
    return modules


def room_of(module: str) -> str:
    """Return the room of a module: the first parts of its name, two or inside qsf.serve three."""
    return ".".join(module.split(".")[: 3 if module.startswith("qsf.serve.") else 2])


def imports_of(
    module: Module, modules: Iterable[str], *, with_types: bool = False
) -> Iterator[Import]:
    """Yield the modules of the packages that a module imports anywhere.

    With ``with_types``, also those that only type checkers import.
    """
    all_names = set(modules)
    for node in ast.walk(module.tree) if with_types else _nodes(module.tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [
                f"{node.module}.{alias.name}"
                if f"{node.module}.{alias.name}" in all_names
                else node.module
                for alias in node.names
            ]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_hidden = _is_hidden_import(module.name, node.value)
            names = [node.value.partition(":")[0]] if is_hidden else []
        for name in sorted(set(names) & all_names):
            yield Import(name, getattr(node, "lineno", 1))


def _is_hidden_import(module: str, text: str) -> bool:
    """Return whether a string in qsf may load a module of qsf_converter by its name."""
    return not module.startswith("qsf_converter") and text.startswith("qsf_converter.")


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but those that only type checkers see."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from (other, *_nodes(other))
            continue
        yield node
        yield from _nodes(node)


def check_imports(modules: Mapping[str, Module]) -> Iterator[Violation]:
    for module in modules.values():
        room = room_of(module.name)
        if room not in MAY_IMPORT:
            yield module.path, 1, f"{room} is not a room; known: {', '.join(MAY_IMPORT)}"
            continue
        for imported in imports_of(module, modules):
            if (module.name, imported.module) in LATE_IMPORTS:
                continue
            if room_of(imported.module) not in MAY_IMPORT[room] | EVERYWHERE | {room}:
                yield module.path, imported.line, f"{room} may not import {imported.module}"


def check_circles(modules: Mapping[str, Module]) -> Iterator[Violation]:
    """Find circles between modules, those of types too, and between the rooms of the table."""
    graph = {
        name: {imported.module for imported in imports_of(module, modules, with_types=True)}
        - {name}
        for name, module in modules.items()
    }
    for circle in find_circles(graph):
        yield modules[circle[0]].path, 1, f"a circle of modules: {' -> '.join(circle)}"
    for circle in find_circles({room: set(may) for room, may in MAY_IMPORT.items()}):
        yield "tools/lint_python.py", 1, f"a circle of rooms in MAY_IMPORT: {' -> '.join(circle)}"


def check_system(module: Module) -> Iterator[Violation]:
    """Find what Windows has not outside of the room for it."""
    package = module.name.split(".", maxsplit=1)[0]
    if package not in SYSTEM_BOUND or room_of(module.name) == SYSTEM_ROOM:
        return
    for node in ast.walk(module.tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name in _SYSTEM_MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module in _SYSTEM_MODULES:
            names = [str(node.module)]
        elif isinstance(node, ast.Attribute) and _SYSTEM_NAMES.match(ast.unparse(node)):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.keyword) and node.arg in _SYSTEM_KEYWORDS:
            names = [str(node.arg)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if node.value.startswith(_SYSTEM_PATHS) else []
        for name in names:
            yield (
                module.path,
                getattr(node, "lineno", 1),
                f"{name} is only allowed in {SYSTEM_ROOM}",
            )


def find_circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return one circle through each edge that closes one, found depth first."""
    circles: list[list[str]] = []
    state: dict[str, int] = {}  # 1: on the path, 2: done
    path: list[str] = []

    def visit(name: str) -> None:
        state[name] = 1
        path.append(name)
        for other in sorted(graph.get(name, ())):
            if state.get(other) == 1:
                circles.append([*path[path.index(other) :], other])
            elif other not in state:
                visit(other)
        path.pop()
        state[name] = 2

    for name in sorted(graph):
        if name not in state:
            visit(name)
    return circles


def check_functions(module: Module) -> Iterator[Violation]:
    """Find functions that do not fit on a screen."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        n_lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if ast.get_docstring(node) is not None:
            docstring = node.body[0]
            n_lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
        if n_lines > MAX_FUNCTION_LINES:
            yield (
                module.path,
                node.lineno,
                f"{node.name}: a function of {n_lines} lines, at most {MAX_FUNCTION_LINES}",
            )


def check_json(module: Module) -> Iterator[Violation]:
    """Find JSON that is parsed without a limit of memory."""
    if module.name.startswith(MAY_PARSE_JSON):
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute):
            is_parser = ast.unparse(node.value) == "json" and node.attr in JSON_PARSERS
        else:
            is_parser = isinstance(node, ast.ImportFrom) and (node.module or "").startswith("json")
        if is_parser:
            yield module.path, getattr(node, "lineno", 1), "JSON is parsed by qsf.foreign_json only"


def check_patterns(module: Module) -> Iterator[Violation]:
    """Find regular expressions that may read the same text in many ways, and so are slow."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re.") and node.args:
            pattern = ast.unparse(node.args[0]).replace("\\\\", "\\")
            for slow in SLOW_PATTERNS.finditer(pattern):
                text = f"{slow[0]}: its time may grow faster than the text"
                yield module.path, node.lineno, text


def check_docstrings(module: Module) -> Iterator[Violation]:
    """Find docstrings with two empty lines, or with sections or entries too far to the right."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            text = ast.get_docstring(node) or ""
            if "\n\n\n" in text or MISPLACED.search(text):
                yield module.path, node.lineno, f"{node.name}: its docstring is badly laid out"


def check_lengths(root: Path) -> Iterator[Violation]:
    for folder in (*PACKAGES.values(), *OTHER_FOLDERS):
        for path in sorted((root / folder).rglob("*.py")):
            n_lines = len(path.read_text(encoding="utf-8").splitlines())
            if n_lines > MAX_LINES:
                yield str(path.relative_to(root)), n_lines, f"at most {MAX_LINES} lines"


def check(root: Path) -> list[str]:
    """Return the violations under the project folder ``root``, one line of text each."""
    modules = read_modules(root)
    violations = [*check_imports(modules), *check_circles(modules), *check_lengths(root)]
    for module in modules.values():
        violations += [
            *check_functions(module),
            *check_system(module),
            *check_json(module),
            *check_docstrings(module),
            *check_patterns(module),
        ]
    return [f"{path}:{line}: {text}" for path, line, text in sorted(violations)]


def run(check: Callable[[Path], list[str]], name: str) -> int:
    """Print the violations that a linter finds; the exit code is 1 if there are any."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    violations = check(root)
    for line in violations:
        print(line)
    print(f"{name}: {len(violations)} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(run(check, "lint_python"))
