"""packaging/ and .github/: one place for facts; `make release`; wheels alone."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from house.test_build import ROOT, load_tool

from make import gguf_files
from make.gguf_files import Type

make_packages = load_tool("make_packages")
PROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
VERSION, LICENSE, SUMMARY = (
    re.findall(rf'^{name} = "(.*?)"', PROJECT, re.MULTILINE)[0]
    for name in ("version", "license", "description")
)
DEPENDENCIES = re.findall(r"^dependencies = \[\n(.*?)^\]", PROJECT, re.MULTILINE | re.DOTALL)[0]
HOME = "https://forge.invalid/someone/qsf"
ZIPS = [f"qsf-{VERSION}-{cpu}-windows-gnu.zip" for cpu in ("x86_64", "aarch64")]
# Beside the source package, and named like it but for the system.
PROGRAMS = [f"qsf-{VERSION}-{of}.tar.gz" for of in ("aarch64-macos.11.0", "riscv64-linux-musl")]
TEMPLATES = [path for path in make_packages.PACKAGING.rglob("*") if path.is_file()]


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files for a release whose archives are small."""
    metadata = importlib.metadata.distribution("qsf").read_text("METADATA")
    assert metadata is not None
    (tmp_path / "PKG-INFO").write_text(metadata, "utf-8")
    dist = tmp_path / "dist"
    dist.mkdir()
    with tarfile.open(dist / f"qsf-{VERSION}.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "PKG-INFO", f"qsf-{VERSION}/PKG-INFO")
        tar.add(ROOT / "pyproject.toml", f"qsf-{VERSION}/pyproject.toml")
    for name in (*ZIPS, *PROGRAMS):
        (dist / name).write_bytes(name.encode())
    fill(monkeypatch, tmp_path)
    return tmp_path


def fill(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    words = ["make_packages", str(folder / "dist"), HOME, "1700000000", str(folder / "out")]
    monkeypatch.setattr(sys, "argv", words)
    make_packages.main()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_template_has_no_fact_of_its_own() -> None:
    assert len(TEMPLATES) > 10
    for path in TEMPLATES:
        for fact in (VERSION, LICENSE, SUMMARY, *re.findall(r'"(\w+)>=', DEPENDENCIES)):
            assert not re.search(rf"(?<![\w-]){re.escape(fact)}[ \"\n]", path.read_text()) or (
                fact == "lz4" and path.name == "qsf.rb"
            ), f"{path}: {fact}"


def test_packagers_take_the_source_package(filled: Path) -> None:
    files = [path for path in (filled / "out").rglob("*") if path.is_file()]
    assert len(files) == len(TEMPLATES)
    for path in files:
        assert not re.search(r"@[A-Z]", path.read_text("utf-8")), path
        assert "@" not in path.name
    digest = sha256(filled / "dist" / f"qsf-{VERSION}.tar.gz")
    url = f"{HOME}/releases/download/v{VERSION}/qsf-{VERSION}.tar.gz"
    formula = (filled / "out" / "homebrew" / "qsf.rb").read_text()
    for line in (f'url "{url}"', f'sha256 "{digest}"', f'license "{LICENSE}"', f'desc "{SUMMARY}"'):
        assert f"  {line}\n" in formula
    recipe = yaml.safe_load((filled / "out" / "conda-forge" / "recipe.yaml").read_text())
    assert recipe["package"] == {"name": "qsf", "version": VERSION}
    assert recipe["source"] == {"url": url, "sha256": digest}
    assert recipe["about"]["license"] == LICENSE
    needs = {row.replace(" ", "") for row in recipe["requirements"]["run"]}
    (python,) = re.findall(r'^requires-python = "(.*?)"', PROJECT, re.MULTILINE)
    assert needs == {f"python{python}", *re.findall(r'^ +"([^";]+)', DEPENDENCIES, re.MULTILINE)}
    first, *_, last = (filled / "out" / "debian" / "changelog").read_text().strip().splitlines()
    assert first.startswith(f"qsf ({VERSION}-1) ")
    assert last.endswith("  Tue, 14 Nov 2023 22:13:20 +0000")
    series = VERSION.rpartition(".")[0]
    assert f"Package: libqsf{series}\n" in (filled / "out" / "debian" / "control").read_text()


def test_winget_takes_the_programs_for_windows_that_are_there(
    filled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [yaml.safe_load(path.read_text()) for path in (filled / "out" / "winget").iterdir()]
    assert {part["ManifestType"] for part in parts} == {"version", "defaultLocale", "installer"}
    assert {part["PackageVersion"] for part in parts} == {VERSION}
    (rows,) = [part["Installers"] for part in parts if "Installers" in part]
    for row, name in zip(rows, ZIPS, strict=True):
        assert row["InstallerUrl"].endswith(f"/v{VERSION}/{name}")
        assert row["InstallerSha256"] == sha256(filled / "dist" / name)
    shutil.rmtree(filled / "out")
    (filled / "dist" / ZIPS[1]).unlink()
    fill(monkeypatch, filled)
    assert not (filled / "out" / "winget" / "QSF.qsf.installer.yaml").exists()
    assert f"{ZIPS[1]} is not there" in capsys.readouterr().out


def test_workflows_name_verbs_and_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    verbs = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    targets = set(re.findall(r"[\w.]+-(?:linux|windows|macos)[\w.-]*", makefile))
    n_jobs = 0
    for path in (ROOT / ".github" / "workflows").iterdir():
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            n_jobs += 1
            lines = "\n".join(str(step.get("run", "")) for step in job["steps"])
            assert set(re.findall(r"^make ([a-z-]+)", lines, re.MULTILINE)) <= verbs, path
            for row in job.get("strategy", {}).get("matrix", {}).get("include", []):
                assert row.get("target", "x86_64-linux-musl") in targets, path
    assert n_jobs > 5


# ---- make release ----
release, sbom = load_tool("release"), load_tool("make_sbom")
DATED = "# Changelog\n\n## 1.2.0 - 2026-12-01\n"


@pytest.mark.parametrize(
    ("tag", "changelog", "changes", "home", "fault"),
    [
        ("v1.2.0", DATED, "", HOME, ""),
        ("", "## 1.2.0 - unreleased\n", "", "", ""),
        ("v1.3.0", DATED, "", HOME, "the tag must be v1.2.0"),
        ("v1.2.0", "## 1.2.0 - unreleased\n", "", HOME, "write the date"),
        ("v1.2.0", "## 1.1.0 - 2026-01-01\n", "", HOME, "has no chapter '## 1.2.0 - DATE'"),
        ("", DATED, "M qsf/model.py", HOME, "not committed, so not in it: M qsf/model.py"),
        ("v1.2.0", DATED, "", "", "URL=https://"),
    ],
)
def test_a_release_out_of_order_is_refused(
    tag: str, changelog: str, changes: str, home: str, fault: str
) -> None:
    found = release.refusals(tag, "1.2.0", changelog, changes, home)
    assert len(found) == bool(fault)
    assert fault in "".join(found)


def test_archives_depend_on_contents_and_epoch_only(tmp_path: Path) -> None:
    for name, mode, time in (("one", 0o600, 1e9), ("two", 0o777, 1.5e9)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "qsf").write_bytes(b"program")
        (folder / "qsf").chmod(mode)
        os.utime(folder / "qsf", (time, time))
        for name in ("qsf-1-x.tar.gz", "qsf-1-w.zip"):
            release.pack(folder / name, {"qsf": folder / "qsf"}, 1_700_000_000)
        (folder / "qsf").unlink()
    assert release.differences(tmp_path / "one", tmp_path / "two") == []
    (row,) = release.members(tmp_path / "one" / "qsf-1-x.tar.gz").items()
    assert row == ("00000 qsf-1-x/qsf", f"1700000000 755  {release.sha256(b'program')}")


def test_the_modes_of_a_wheel_do_not_follow_from_the_umask(tmp_path: Path) -> None:
    for name, modes in (
        ("one", (0o100664, 0o100775, 0o40755)),
        ("two", (0o100600, 0o100700, 0o40700)),
    ):
        (tmp_path / name).mkdir()
        with zipfile.ZipFile(tmp_path / name / "q.whl", "w") as wheel:
            for member, mode in zip(("a.py", "b.so", "c/"), modes, strict=True):
                item = zipfile.ZipInfo(member, (2026, 1, 1, 0, 0, 0))
                item.external_attr = mode << 16
                wheel.writestr(item, b"" if member == "c/" else b"text")
    assert release.differences(tmp_path / "one", tmp_path / "two") != []
    for name in ("one", "two"):
        release.settle(tmp_path / name / "q.whl")
    assert release.differences(tmp_path / "one", tmp_path / "two") == []


def test_a_difference_names_the_member(tmp_path: Path) -> None:
    for name, text, minute in (("one", b"a", 1), ("two", b"b", 1), ("late", b"a", 2)):
        (tmp_path / name).mkdir()
        with zipfile.ZipFile(tmp_path / name / "q.whl", "w") as wheel:
            wheel.writestr(zipfile.ZipInfo("same.py", (2026, 1, 1, 0, 1, 0)), b"same")
            wheel.writestr(zipfile.ZipInfo("_qsf.so", (2026, 1, 1, 0, minute, 0)), text)
    for other in ("two", "late"):
        (found,) = release.differences(tmp_path / "one", tmp_path / other)
        assert found.startswith("q.whl differs: _qsf.so (")
        assert "same.py" not in found
    (tmp_path / "two" / "more").touch()
    assert "more: only one build made it" in release.differences(tmp_path / "one", tmp_path / "two")


def test_the_list_of_parts_is_that_of_wheel_and_sources(tmp_path: Path) -> None:
    path = tmp_path / "qsf-1.2.0.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(
            "qsf-1.2.0.dist-info/METADATA",
            "Version: 1.2.0\nRequires-Dist: numpy>=1.24\nRequires-Dist: zstandard; extra == 'z'\n",
        )
    version, (numpy,) = sbom.of_wheel(path)
    assert version == "1.2.0"
    assert (numpy["version"], numpy["purl"]) == (">=1.24", "pkg:pypi/numpy")
    assert "BSD" in str(numpy["licenses"])
    for name, macro in (("lz4", "LZ4"), ("zstd", "ZSTD")):
        numbers = [f"#define {macro}_VERSION_{part} 1\n" for part in ("MAJOR", "MINOR", "RELEASE")]
        (tmp_path / f"{name}.h").write_text("".join(numbers))
        (tmp_path / f"{name}.c").write_text("source")
    found = [(part["name"], part["version"]) for part in sbom.codec_sources(tmp_path)]
    assert found == [("lz4", "1.1.1"), ("zstd", "1.1.1")]


# ---- A wheel of `make wheels` runs where there is neither a compiler nor liblz4 and libzstd ----
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
