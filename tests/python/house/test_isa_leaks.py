"""The check that no instruction above a file's level is outside of its place."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pytest
from house.test_build import load_tool

leaks = load_tool("check_isa_leaks").leaks


def _code(kind: str, function: str, *lines: str) -> str:
    body = "".join(f"   0:\t{line}\n" for line in lines)
    return f"x.o:     file format elf64-{kind}\n\n0000000000000000 <{function}>:\n{body}"


@pytest.mark.parametrize(
    ("file", "kind", "function", "line"),
    [
        ("ops", "x86-64", "add", "vaddps %ymm0,%ymm1,%ymm2"),
        ("ops", "x86-64", "add", "pshufb %xmm0,%xmm1"),
        ("ops", "x86-64", "add", "popcnt %rax,%rbx"),
        ("matmul_avx2", "x86-64", "dot", "vpdpbusd %ymm15,%ymm15,%ymm0"),
        ("matmul_avxvnni", "x86-64", "dot", "vmovdqu8 %ymm17,(%rax)"),
        ("matmul_avx512", "x86-64", "dot", "tdpbusd %tmm0,%tmm1,%tmm2"),
        ("crc32_x86", "x86-64", "qsf_crc32_by_clmul", "vpclmulqdq $0x0,%zmm0,%zmm1,%zmm2"),
        ("matmul_neon", "littleaarch64", "dot", "sdot\tv1.4s, v17.16b, v6.4b[0]"),
        ("matmul_dotprod", "littleaarch64", "dot", "smmla\tv21.4s, v31.16b, v4.16b"),
        ("crc32", "littleaarch64", "crc", "crc32x\tw0, w0, x1"),
    ],
)
def test_a_leak_is_found(file: str, kind: str, function: str, line: str) -> None:
    """An instruction of a higher level is named with its function, once for each level."""
    found = list(leaks(file, _code(kind, function, "ret", line, line)))
    assert found
    assert len(found) == len(set(found))
    assert all(text.startswith(f"{file}: {function} has an instruction of ") for text in found)


@pytest.mark.parametrize(
    ("file", "kind", "function", "line"),
    [
        ("ops", "x86-64", "add", "movzbl (%rdi),%eax"),
        ("ops", "x86-64", "add", "paddd %xmm0,%xmm1"),
        ("matmul_avx2", "x86-64", "dot", "vpmaddubsw %ymm0,%ymm1,%ymm2"),
        ("matmul_avxvnni", "x86-64", "dot", "{vex} vpdpbusd %ymm15,%ymm15,%ymm0"),
        ("matmul_avx512", "x86-64", "dot", "vpdpbusd %zmm17,%zmm1,%zmm2"),
        ("roofline", "x86-64", "madds_amx", "tdpbusd %tmm0,%tmm1,%tmm2"),
        ("matmul_dotprod", "littleaarch64", "dot", "sdot\tv1.4s, v17.16b, v6.4b[0]"),
    ],
)
def test_its_own_instructions_are_none(file: str, kind: str, function: str, line: str) -> None:
    """The baseline, and the level that a file or a function is for, may be used."""
    assert list(leaks(file, _code(kind, function, line))) == []
