"""Checks the rules of the Python sources that neither ruff, mypy nor import-linter checks.

Who names a system, slow regular expressions, and the length of functions. Prints one line per
violation; exits with 1 if there is any.

Usage: python tools/lint_python.py [PROJECT_ROOT]
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Name of a package -> its folder.
PACKAGES = {
    "qsf": "qsf",
    "qsf_converter": "converter/qsf_converter",
    "qsf_bench": "bench/qsf_bench",
}

# Space beside space, with at most one optional sign between; a repetition of a repetition.
SLOW_PATTERNS = re.compile(
    r"\\s[*+]\??(?:\\?[^\\()]\?)?\\s[*+]|\((?:\?:)?(?:\\?[^\\()|?*+]\?)*\\?[^\\()|?*+][*+]\)[*+]"
)
# Only this room may use what Windows lacks. qsf_bench measures Linux and may use it, too.
SYSTEM_ROOM = "qsf.system"
SYSTEM_BOUND = ("qsf", "qsf_converter")  # the packages that are bound to the rule
_SYSTEM_NAMES = re.compile(
    r"os\.(O_(CLOEXEC|NONBLOCK|NOFOLLOW|DIRECT|DIRECTORY|TMPFILE|SYNC)|p(read|write)v?|fork\w*|kill|"
    r"killpg|get[eu]?uid|fch\w+|chown|posix_\w+|register_at_fork|mkfifo|sched_\w+|sysconf|statvfs|"
    r"wait\w*|setsid|nice|uname)$|"
    r"signal\.(SIG(HUP|KILL|BUS|URG|XCPU|XFSZ|USR1|USR2|PIPE|ALRM|CHLD|QUIT|TSTP)|pthread_\w+|alarm|"
    r"setitimer|sigwait)$|.*\.add_signal_handler$"
)
_SYSTEM_KEYWORDS = frozenset({"start_new_session", "preexec_fn", "pass_fds", "dir_fd"})
_SYSTEM_PATHS = ("/proc/", "/sys/", "/dev/")
MAX_FUNCTION_LINES = 80  # without the docstring
Violation = tuple[str, int, str]  # path, line number from 1, what is wrong


@dataclass(frozen=True)
class Module:
    """One Python file of the packages."""

    name: str
    path: str
    tree: ast.Module


def read_modules(root: Path) -> list[Module]:
    modules = []
    for package, folder in PACKAGES.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            name = ".".join([package, *(part for part in parts if part != "__init__")])
            tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
            modules.append(Module(name, str(path.relative_to(root)), tree))
    return modules


def check_system(module: Module) -> Iterator[Violation]:
    """Find what Windows has not outside of the room for it."""
    package = module.name.split(".", maxsplit=1)[0]
    if package not in SYSTEM_BOUND or module.name.startswith(SYSTEM_ROOM):
        return
    for node in ast.walk(module.tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and _SYSTEM_NAMES.match(ast.unparse(node)):
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


def check_patterns(module: Module) -> Iterator[Violation]:
    """Find regular expressions that may read the same text in many ways, and so are slow."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re.") and node.args:
            pattern = ast.unparse(node.args[0]).replace("\\\\", "\\")
            for slow in SLOW_PATTERNS.finditer(pattern):
                text = f"{slow[0]}: its time may grow faster than the text"
                yield module.path, node.lineno, text


def check(root: Path) -> list[str]:
    """Return the violations under the project folder ``root``, one line of text each."""
    modules = read_modules(root)
    violations: list[Violation] = []
    for module in modules:
        violations += [
            *check_functions(module),
            *check_system(module),
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
