"""A wheel of `make wheels` runs where there is neither a compiler nor liblz4 and libzstd."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from make import gguf_files
from make.gguf_files import Type

ROOT = Path(__file__).resolve().parents[3]
WHERE_LIBRARIES_ARE = """
import qsf
model = qsf.Model("story.qsf")
print(qsf.__file__)
print(*sorted({line.split()[-1] for line in open("/proc/self/maps")
               if "liblz4" in line or "libzstd" in line}), sep="\\n", end="")
"""


def stripped(environment: Path) -> dict[str, str]:
    """What a program sees that finds the environment's commands and no others."""
    return {"PATH": str(environment / "bin"), "HOME": str(environment)}


def said(command: list[str], where: Path, variables: dict[str, str]) -> str:
    done = subprocess.run(
        command, cwd=where, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_wheel_needs_no_compiler_and_no_libraries(tmp_path: Path) -> None:
    wheels, clean = tmp_path / "wheels", tmp_path / "clean"
    machine = platform.machine()
    system = f"SYSTEMS=manylinux_2_17_{machine}={machine}-linux-gnu.2.17"
    said(["make", "wheels", f"WHEELS={wheels}", system], ROOT, dict(os.environ))
    (wheel,) = wheels.iterdir()
    assert re.fullmatch(rf"qsf-[0-9.]+-py3-none-manylinux_2_17_{machine}\.whl", wheel.name)
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    needed = re.findall(rb"GLIBC_2\.(\d+)", archive.read("qsf/native/libqsf.so"))
    assert 0 < max(map(int, needed)) <= 17
    for license_text in ("LICENSE", "licenses/lz4.txt", "licenses/zstd.txt"):
        assert any(name.endswith(f".dist-info/licenses/{license_text}") for name in names)

    venv.create(clean, with_pip=True)
    pip = [str(clean / "bin" / "python"), "-m", "pip", "install", "-q", "--only-binary", ":all:"]
    said([*pip, str(wheel)], tmp_path, dict(os.environ))
    inside = stripped(clean)
    checkpoint = ROOT / "examples" / "tiny-llama"
    said([str(clean / "bin" / "qsf-convert"), str(checkpoint), "story.qsf"], tmp_path, inside)
    where, *libraries = said(
        [str(clean / "bin" / "python"), "-c", WHERE_LIBRARIES_ARE], tmp_path, inside
    ).splitlines()
    assert where.startswith(str(clean))
    assert libraries == []  # LZ4 and ZSTD are in libqsf.so

    story = ["run", "story.qsf", "--prompt", "Once upon a time", "-n", "20", "--temperature", "0"]
    here = said([sys.executable, "-m", "qsf", *story], tmp_path, dict(os.environ))
    assert said([str(clean / "bin" / "python"), "-m", "qsf", *story], tmp_path, inside) == here
    assert len(here) > 40

    gguf = gguf_files.write(checkpoint, tmp_path / "m.gguf", kind=Type.Q5_1)
    words = [str(gguf), "m.qsf", "--quant-type", "8bit", "--allow-no-tokenizer"]
    said([str(clean / "bin" / "qsf"), "convert", *words], tmp_path, inside)
    find_hub = "import huggingface_hub, h11, msgspec"  # qsf pull, qsf serve
    said([str(clean / "bin" / "python"), "-c", find_hub], tmp_path, inside)
