"""The check that no instruction above a file's level is outside of its place."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pytest
from house.test_build import load_tool

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
        ("roofline", X86, "madds_amx", "tdpbusd %tmm0,%tmm1,%tmm2", False),
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
