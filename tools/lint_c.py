"""Checks the rules of the C sources that no compiler checks.

Which room of csrc/ may include which, that no modules include or call each other in a circle,
which calls are allowed where, and the form of every file. Prints one line per violation; exits
with 1 if there is any.

Usage: python tools/lint_c.py [PROJECT_ROOT]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from lint_python import run

# A room may include itself, the public header and the rooms named here; nothing else.
MAY_INCLUDE: dict[str, frozenset[str]] = {
    "include": frozenset(),
    "base": frozenset(),
    "types": frozenset(),
    "platform": frozenset({"base"}),
    "memory": frozenset({"base", "platform"}),
    "io": frozenset({"base", "platform"}),
    "machine": frozenset({"base", "platform", "memory"}),
    "checksum": frozenset({"base", "platform"}),
    "format": frozenset({"base", "types", "platform", "memory", "checksum"}),
    "stream": frozenset({"base", "types", "platform", "memory", "io", "checksum", "format"}),
    "kernels": frozenset({"base", "types", "platform"}),
    "quantise": frozenset({"base", "types", "platform", "kernels"}),
    "text": frozenset({"base", "platform", "memory"}),
    "speculate": frozenset({"base", "memory"}),
    "cache": frozenset({"base", "types", "platform", "memory", "checksum", "format", "kernels"}),
    "model": frozenset(
        {"base", "types", "platform", "memory", "checksum", "format", "stream", "kernels", "cache"}
    ),
    "plan": frozenset(
        {"base", "types", "platform", "memory", "io", "format", "stream", "cache", "model"}
    ),
    "engine": frozenset(
        {"base", "types", "platform", "memory", "io", "machine", "checksum", "format", "stream"}
        | {"kernels", "text", "speculate", "cache", "model", "plan"}
    ),
}
BANNED: dict[str, frozenset[str]] = {  # calls, and the rooms where they are allowed
    "malloc|calloc|realloc|aligned_alloc|posix_memalign|free": frozenset({"platform"}),
    "printf|fprintf|puts|putchar|fputs|perror": frozenset(),
    "exit|abort|_Exit|quick_exit": frozenset(),
    "strcpy|strcat|sprintf|vsprintf|gets|strtok|atoi|alloca": frozenset(),
    "fopen|fread": frozenset(),
    "(?:__builtin_)?fmaf?": frozenset({"base"}),  # see base/fused.h
    "mkstemp|fdopen|fileno|popen|realpath": frozenset({"platform"}),
}
# Only these folders name an operating system: its headers, its macros, its files. The others
# include C11's headers, those of instruction sets and of the codecs. A folder -> those that may
# include its headers.
SYSTEM_FOLDERS = {
    "csrc/platform/posix/": ("csrc/platform/posix/", "csrc/platform/linux/"),
    "csrc/platform/linux/": ("csrc/platform/linux/",),
    "csrc/platform/macos/": ("csrc/platform/macos/",),
    "csrc/platform/win32/": ("csrc/platform/win32/",),
}
SYSTEM_FREE_HEADER = re.compile(
    r"(assert|ctype|errno|fenv|float|inttypes|limits|locale|math|std(align|arg|atomic|bool|def|int|io"
    r"|lib)|string|immintrin|arm_acle|arm_neon|cpuid|lz4|lz4hc|zstd|sanitizer/asan_interface)$"
)
SYSTEM_MACRO = re.compile(r"\b(__linux__|__ANDROID__|__APPLE__|__unix__|_WIN32|__MINGW32__)\b")
SYSTEM_PATH = re.compile(r'"[^"\n]*/(?:proc|sys|dev)/')
SYSTEM_HEADER = re.compile(r"^\s*#\s*include\s*<([^>]+)\.h>")
MACROS_ALLOWED_IN = "csrc/include/qsf_library.h"  # how a library exports names
MAX_COLUMNS = 100
MAX_FUNCTION_LINES = 80

SPDX = "/* SPDX-License-Identifier: Apache-2.0 */"
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"')
DEFINITION = re.compile(r"^(?!static\b|typedef\b)\w[\w \t*]*?\b(\w+)\([^;{}]*\)\s*\{", re.MULTILINE)
CALL = re.compile(r"\b(\w+)\(")
NOT_CODE = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)
Violation = tuple[int, str]  # line number from 1, what is wrong
# Module to the modules that it includes, or whose functions it calls, and where.
Arrows = dict[str, dict[str, tuple[Path, int]]]


def blank(match: re.Match[str]) -> str:
    """Replace a comment or literal by spaces, keeping its line breaks."""
    return re.sub(r"[^\n]", " ", match.group())


def check_form(path: Path, text: str) -> Iterator[Violation]:
    """Check what holds for every C file: head, width, characters."""
    lines = text.splitlines()
    if not lines or not lines[0].startswith(f"/* {path.name} - "):
        yield 1, f"the first line is not `/* {path.name} - what it owns.`"
    if SPDX not in lines[:40]:
        yield 1, f"there is no line `{SPDX}` after the first comment"
    for line_idx, line in enumerate(lines, 1):
        if not line.isascii():
            yield line_idx, "a character that is not ASCII"
        if len(line) > MAX_COLUMNS:
            yield line_idx, f"{len(line)} columns, at most {MAX_COLUMNS}"
        if line.rstrip() != line or "\t" in line:
            yield line_idx, "a tab or a space at the end"


def check_functions(code: str) -> Iterator[Violation]:
    """Find functions that do not fit on a screen; `code` is without comments."""
    start = 0
    for line_idx, line in enumerate(code.splitlines(), 1):
        if line.startswith("{"):
            start = line_idx
        elif line.startswith("}") and start:
            if line_idx - start > MAX_FUNCTION_LINES:
                yield start, f"a function of {line_idx - start} lines, at most {MAX_FUNCTION_LINES}"
            start = 0


def check_room(room: str, text: str, code: str) -> Iterator[Violation]:
    if room not in MAY_INCLUDE:
        yield 1, f"csrc/{room} is not a room; known: {', '.join(MAY_INCLUDE)}"
        return
    for line_idx, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        if match is None:
            continue
        other = match.group(1).split("/", 1)[0]
        if "/" not in match.group(1) and room == "include":
            continue  # the public headers are installed together in one folder
        if "/" not in match.group(1):
            yield line_idx, f'"{match.group(1)}" is not written from csrc/ down'
        elif other not in MAY_INCLUDE[room] | {room, "include"}:
            yield line_idx, f"{room}/ may not include {match.group(1)}"
    for names, rooms in BANNED.items():
        if room in rooms:
            continue
        for call in re.finditer(rf"(?<![\w.>])({names})\s*\(", code):
            where = f"only allowed in {', '.join(sorted(rooms))}/" if rooms else "not allowed"
            yield code.count("\n", 0, call.start()) + 1, f"{call.group(1)}() is {where}"


def check_system(name: str, text: str, code: str) -> Iterator[Violation]:
    """Find what names an operating system in the file `name` outside of the folders for it."""
    inside = next((folder for folder in SYSTEM_FOLDERS if name.startswith(folder)), None)
    for line_idx, (line, line_code) in enumerate(
        zip(text.splitlines(), code.splitlines(), strict=True), 1
    ):
        include = INCLUDE.match(line)
        for folder, users in SYSTEM_FOLDERS.items():
            if include and f"csrc/{include[1]}".startswith(folder) and inside not in users:
                yield line_idx, f"only {', '.join(users)} may include {include[1]}"
        if inside is not None:
            continue
        where = f"only allowed in {', '.join(SYSTEM_FOLDERS)}"
        header = SYSTEM_HEADER.match(line)
        if header and not SYSTEM_FREE_HEADER.match(header[1]):
            yield line_idx, f"<{header[1]}.h> is {where}"
        macro = SYSTEM_MACRO.search(line_code)
        if macro and name != MACROS_ALLOWED_IN:
            yield line_idx, f"{macro[1]} is {where}"
        path = SYSTEM_PATH.search(line)
        if path:
            yield line_idx, f"a path of the system is {where}"


def module_of(path: Path) -> str:
    """Return the module that a file under csrc/ belongs to: its header and its source are one."""
    return path.with_suffix("").as_posix()


def note_includes(name: Path, text: str, includes: Arrows) -> None:
    module = module_of(name)
    for line_idx, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        if match is None:
            continue
        is_beside = "/" not in match.group(1)  # of the public headers
        other = module_of(name.parent / match.group(1) if is_beside else Path(match.group(1)))
        if other != module:
            includes.setdefault(module, {}).setdefault(other, (name, line_idx))


def calls_of(codes: dict[Path, str]) -> Arrows:
    """Return the calls between the modules of a room.

    `codes` are the sources under csrc/, without comments and literals.
    """
    owners = {name: path for path, code in codes.items() for name in DEFINITION.findall(code)}
    calls: Arrows = {}
    for path, code in codes.items():
        module = module_of(path)
        for call in CALL.finditer(code):
            owner = owners.get(call[1], path)
            if owner.parts[0] == path.parts[0] and module_of(owner) != module:
                line = code.count("\n", 0, call.start()) + 1
                calls.setdefault(module, {}).setdefault(module_of(owner), (path, line))
    return calls


def check_circles(arrows: Arrows, kind: str) -> Iterator[str]:
    """Find a circle that the arrows form."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        circle = error.args[1][::-1]  # each module before the one that it needs
        name, line = arrows[circle[-2]][circle[-1]]
        yield f"csrc/{name}:{line}: a circle of {kind}: {' -> '.join(circle)}"


def check_sections(root: Path) -> list[str]:
    """Compare the sections that the reader knows with those of the format and of the mutants."""
    places = {
        "docs/format.md": r"^\| `([A-Z]{4})` \|",
        "csrc/format/directory.c": r'\{"([A-Z]{4})", ',
        "tests/python/make/mutants.py": r'^    "([A-Z]{4})": ',
    }
    tags = {}
    for place, pattern in places.items():
        path = root / place
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        tags[place] = set(re.findall(pattern, text, re.MULTILINE))
    every = set().union(*tags.values())
    return [
        f"{place}:1: section {tag} is missing: {', '.join(p for p in tags if tag in tags[p])}"
        for place in places
        for tag in sorted(every - tags[place])
    ]


def check(root: Path) -> list[str]:
    """Return the violations under the project folder `root`, one line of text each."""
    faults: list[str] = []
    seen: dict[str, Path] = {}
    includes: Arrows = {}
    codes: dict[Path, str] = {}
    for folder in ("csrc", "program", "tests/c", "tests/fuzz", "examples"):
        for path in sorted((root / folder).rglob("*.[ch]")):
            text = path.read_text(encoding="utf-8", errors="replace")
            code = NOT_CODE.sub(blank, text)
            name = path.relative_to(root)
            violations = [*check_form(path, text), *check_functions(code)]
            if folder == "csrc":
                violations += check_room(name.parts[1], text, code)
                violations += check_system(name.as_posix(), text, code)
                note_includes(name.relative_to("csrc"), text, includes)
                if path.suffix == ".c":
                    codes[name.relative_to("csrc")] = code
                if path.name in seen:
                    violations.append((1, f"the name is taken by {seen[path.name]}"))
                seen.setdefault(path.name, name)
            faults += [f"{name}:{line}: {fault}" for line, fault in sorted(violations)]
    faults += check_circles(includes, "includes")
    faults += check_circles(calls_of(codes), "calls")
    return faults + check_sections(root)


if __name__ == "__main__":
    sys.exit(run(check, "lint_c"))
