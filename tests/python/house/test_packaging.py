"""packaging/ and .github/: facts come from one place, and what is filled in is true."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import shutil
import sys
import tarfile
from pathlib import Path

import pytest
import yaml
from house.test_build import ROOT, load_tool

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
