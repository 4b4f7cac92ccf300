"""Writes the library as one C file and one header: qsf.c and qsf.h.

    cc -O3 qsf.c app.c -lpthread -lm

The headers of csrc/ come first, once each. Then each source is a *scope*: templates and lanes are
in it, its names that another scope has too get its name, its macros end with it. Functions are
compiled for their instruction set by the attributes of platform/cpu.h. The folders of systems are
behind the systems' macros. LZ4 and the decoder of ZSTD are inside.

Usage: python tools/amalgamate.py CODECS OUT     (CODECS: the folder of tools/fetch_codecs.sh)
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
SYSTEMS = {  # folder of csrc/platform/ -> where it is compiled (CMakeLists.txt: QSF_PLATFORM)
    "posix": "!defined(_WIN32)",
    "linux": "defined(__linux__)",
    "macos": "defined(__APPLE__)",
    "win32": "defined(_WIN32)",
    "absent": "!defined(__linux__)",
}
CODEC = "stream/codec.c"  # what LZ4 and ZSTD include comes late: windows.h defines words of ours
COMMENT = re.compile(r'/\*.*?\*/|//[^\n]*|("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')', re.DOTALL)
ONCE = "#pragma once\n"  # of the headers of csrc/; the public ones have a macro
GUARD = re.compile(rf"^(?:{ONCE}|#define \w+_H$)", re.MULTILINE)
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include "([^"]+)".*\n', re.MULTILINE)
MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.MULTILINE)
CODE_BEFORE = re.compile(
    r"^(?!\s*$|\s*#\s*(include|if|ifn?def|endif)\b|\s*#\s*define (ZSTD_\w+|\w+_H)$)", re.MULTILINE
)
# Names that a file has for itself: functions and tables, types, tags, constants of enumerations.
FUNCTION = re.compile(
    r"^(?:QSF_FORCED_INLINE|static|_Thread_local)\b[^;{}()=]*?\b(\w+)\s*(?:\[|\(|=|;)", re.MULTILINE
)
TYPE = re.compile(r"^(?:typedef\b[^;{}]*?\b(\w+)\s*;|\}\s*(\w+)\s*;)", re.MULTILINE)
TAG = re.compile(r"^(?:typedef )?(?:struct|union|enum)\s+(\w+)\s*\{", re.MULTILINE)
ENUM = re.compile(r"^(?:typedef )?enum\b[^;{}]*\{([^}]*)\}", re.MULTILINE)
MADE = re.compile(r"^LANES_OF_2\((\w+), ", re.MULTILINE)  # by the macro of lanes_*.h
FUNCTION_TYPE = re.compile(r"^typedef\b[^;{}()]*?\b(\w+)\(", re.MULTILINE)

HEAD = """\
/* qsf.c - QSF {version} in one file, made by tools/amalgamate.py from sources of SHA-256
 * {digest}
 * Copyright 2026 the QSF authors; SPDX-License-Identifier: Apache-2.0
 * It contains LZ4 (Yann Collet; BSD-2-Clause) and ZSTD (Meta Platforms, Inc.; BSD-3-Clause).
 *
 *     cc -O3 qsf.c app.c -lpthread -lm        gcc 12 or clang 14, or newer
 *
 * -DQSF_SYSTEM_CODECS and -llz4 -lzstd: the system's LZ4 and ZSTD. -DQSF_ASSERT: checks of its own
 * state. -DQSF_IS_RELEASE, with gcc, -O3 and no sanitizer: a faster loop for AVX-512.
 */
#ifdef __cplusplus
#error "qsf.c is C: compile it as C11 or newer; qsf.h may be included from C++"
#endif
#ifdef __FAST_MATH__
#error "qsf.c must not be compiled with -ffast-math: it gives the same bits on every machine"
#endif
#if defined(_WIN32) && !defined(__clang__)
#error "QSF for Windows needs clang: gcc misaligns 32-byte registers there (bug 54412)"
#endif
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#if !defined(QSF_ASSERT) && !defined(NDEBUG)
#define NDEBUG
#endif
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#pragma clang diagnostic ignored "-Wunused-function" /* inline ones of headers */
#else
#pragma GCC optimize("fp-contract=off", "no-math-errno")
#pragma GCC diagnostic ignored "-Wformat-truncation" /* long texts of errors are cut */
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#define QSF_VERSION "{version}"
"""
CODECS_HEAD = """\
/* ---- LZ4 and ZSTD, without their comments ---- */
#ifndef QSF_SYSTEM_CODECS
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#define LZ4LIB_VISIBILITY static
#define LZ4_HEAPMODE 0
#define ZSTDLIB_VISIBLE
#define ZSTDERRORLIB_VISIBLE
#define ZSTD_DISABLE_ASM 1
#define ZSTD_STATIC_LINKING_ONLY
"""


def without_comments(text: str) -> str:
    """Return C code without comments; literals stay."""
    return COMMENT.sub(lambda match: match[1] or " ", text)


def read(name: str) -> str:
    """Return the text of a file of csrc/ without its line of the licence and `ONCE`."""
    text = (CSRC / name).read_text(encoding="ascii")
    return text.replace("/* SPDX-License-Identifier: Apache-2.0 */\n", "").replace(ONCE, "")


def target(name: str, included: str) -> str:
    """Return the file of csrc/ that the file `name` includes."""
    return included if "/" in included else f"{Path(name).parent}/{included}"


def is_guarded(name: str) -> bool:
    """Return whether a second inclusion of the header does nothing."""
    return GUARD.search((CSRC / name).read_text(encoding="ascii")) is not None


def find_inner(names: list[str]) -> set[str]:
    """Return the headers without guard and those that some file includes after code of its own."""
    inner = set()
    for name in names:
        text = without_comments(read(name))
        if name.endswith(".h") and not is_guarded(name):
            inner.add(name)
        for include in INCLUDE.finditer(text):
            if CODE_BEFORE.search(text[: include.start()]):
                inner.add(target(name, include[1]))
    return inner


def paste(name: str, done: set[str], inner: set[str], is_inner: bool) -> str:
    """Return the file with the headers that belong into it: of `inner`, or those not in `done`."""

    def expand(include: re.Match[str]) -> str:
        other = target(name, include[1])
        if (other in inner) != is_inner or other in done:
            return ""
        if is_guarded(other):
            done.add(other)
        return paste(other, done, inner, is_inner)

    return INCLUDE.sub(expand, read(name))


def own_names(text: str) -> set[str]:
    """Return the names of a scope that end with a file: not those of external functions."""
    code = without_comments(text)
    names = {name for pattern in (FUNCTION, MADE, TYPE, FUNCTION_TYPE, TAG)
             for groups in pattern.findall(code)
             for name in ([groups] if isinstance(groups, str) else groups) if name}  # fmt: skip
    for members in ENUM.findall(code):
        names.update(re.findall(r"(?:^|,)\s*(\w+)", members))
    return {name for name in names if not name.lower().startswith("qsf_")}  # one in all of csrc/


def rename(name: str, text: str, names: set[str], members: set[str]) -> str:
    """Add the name of the source to `names` by macros, after its headers and until the end.

    Macros also reach names that ## makes. A name that is a member of a structure that all share is
    replaced where it is not one.
    """
    suffix = Path(name).stem
    members = names & members
    for own in members:
        text = re.sub(rf"(?<![\w.])(?<!->){own}\b", f"{own}_{suffix}", text)
    macros = sorted(names - members)
    headers = re.findall("#include <.*\n", read(name))
    at = text.index(headers[-1]) + len(headers[-1]) if headers else 0
    begin = "".join(f"#define {own} {own}_{suffix}\n" for own in macros)
    return text[:at] + begin + text[at:] + undefine({*MACRO.findall(text), *macros})


def undefine(macros: set[str]) -> str:
    """Return the lines that end these macros."""
    return "".join(f"#undef {name}\n" for name in sorted(macros))


def decoder_of_zstd(text: str) -> str:
    """Cut threads and what compresses from ZSTD's one file; every header is in common/."""
    text = text.replace("#define ZSTD_MULTITHREAD\n", "", 1)
    begin = text.index("/**** start inlining compress/")
    end = text.index("/**** start inlining decompress/")
    stop = text.index("/**** start inlining dictBuilder/")
    return text[:begin] + text[end:stop]


def codecs(folder: Path) -> str:
    """Return LZ4 and the decoder of ZSTD, in whose place the system's headers may come."""
    lz4 = ""
    for name in ("lz4", "lz4hc"):
        text = (folder / f"{name}.c").read_text(encoding="utf-8")
        header = (folder / f"{name}.h").read_text(encoding="utf-8")
        text = text.replace(f'#include "{name}.h"', header, 1)
        lz4 += re.sub('#include "lz4.[ch]"', "", text) if lz4 else text
    zstd = decoder_of_zstd((folder / "zstd.c").read_text(encoding="utf-8"))
    texts = []
    for text, prefix in ((lz4, "LZ4_"), (zstd, "ZSTD_")):
        code = re.sub(r"\n\s*\n+", "\n", without_comments(text))
        own = {name for name in MACRO.findall(code) if not name.startswith((prefix, "_"))}
        texts.append(code + undefine(own - {"NDEBUG"}))
    return CODECS_HEAD + "".join(texts) + "#pragma GCC diagnostic pop\n#endif\n"


def behind(name: str, text: str) -> str:
    """Return the text of a file where its system is asked for."""
    condition = SYSTEMS.get(name.split("/")[1])
    return f"#if {condition}\n{text}#endif\n" if condition else text


def amalgamate(codecs_folder: Path) -> tuple[str, str]:
    """Return the texts of qsf.c and qsf.h."""
    names = sorted(path.relative_to(CSRC).as_posix() for path in CSRC.rglob("*.[ch]"))
    sources = [name for name in names if name.endswith(".c")]
    sources.sort(key=lambda name: (name.split("/")[1] in SYSTEMS, name == CODEC, "win32" in name))
    inner = find_inner(names)
    done: set[str] = set()
    public = paste("include/qsf.h", done, inner, False)
    done.add("include/qsf.h")

    heads = [name for name in names if name.endswith(".h") and name not in inner]
    texts = {}
    for name in sorted(heads, key=lambda name: name.split("/")[1] in SYSTEMS):
        if name not in done:
            done.add(name)
            texts[name] = behind(name, paste(name, done, inner, False))
    scopes = {name: paste(name, set(done), inner, True) for name in sources}
    count = Counter(own for text in (*texts.values(), *scopes.values()) for own in own_names(text))
    words = set(re.findall(r"\w+", without_comments("".join(texts.values()))))

    parts = ['#include "qsf.h"\n']
    parts += [text for name, text in texts.items() if name.split("/")[1] not in SYSTEMS]
    of_systems = [text for name, text in texts.items() if name.split("/")[1] in SYSTEMS]
    for name, text in scopes.items():
        if name.split("/")[1] in SYSTEMS and of_systems:
            parts += of_systems
            of_systems = []
        clashing = {own for own in own_names(text) if count[own] > 1}
        text = rename(name, text, clashing, words)
        if name == CODEC:
            parts.append(codecs(codecs_folder))
            text = re.sub(
                r"(#include <(lz4|lz4hc|zstd)\.h>)", r"#ifdef QSF_SYSTEM_CODECS\n\1\n#endif", text
            )
        parts.append(behind(name, f"\n/* ---- csrc/{name} ---- */\n{text}"))

    version = re.findall('^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    body = "".join(parts)
    digest = hashlib.sha256((public + body).encode()).hexdigest()
    return HEAD.replace("{version}", version[0]).replace("{digest}", digest) + body, public


def main() -> None:
    """Write both files into the folder."""
    out = Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    for name, text in zip(("qsf.c", "qsf.h"), amalgamate(Path(sys.argv[1])), strict=True):
        (out / name).write_text(text, encoding="utf-8")
        print(f"{out / name}: {text.count(chr(10))} lines, {len(text)} bytes")


if __name__ == "__main__":
    main()
