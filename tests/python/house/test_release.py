"""`make release`: what it refuses, what it finds different, what its list of parts says."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
from house.test_build import load_tool

release, sbom = load_tool("release"), load_tool("make_sbom")
HOME = "https://forge.invalid/someone/qsf"
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
