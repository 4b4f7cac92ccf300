"""Fills in the files of packaging/: for Homebrew, winget, conda-forge and Debian.

Each fact comes from its one place: names, version, licence and requirements from the source package
(from pyproject.toml), hashes from the files in DIST, the time from the commit. A file that names an
archive which is not in DIST is left out, and this is said.

Usage: python tools/make_packages.py DIST HOME EPOCH OUT
HOME: the project's address; what is released is at HOME/releases/download/vVERSION/
"""

from __future__ import annotations

import email
import hashlib
import re
import sys
import tarfile
from datetime import datetime, timezone
from email.utils import format_datetime
from pathlib import Path

PACKAGING = Path(__file__).resolve().parents[1] / "packaging"


def conda_names(requirements: list[str]) -> str:
    """Return requirements as rows of a YAML list, in conda's form: "numpy >=1.24"."""
    rows = [re.sub(r"^([\w.-]+)", r"\1 ", text.replace(" ", "")).strip() for text in requirements]
    return "\n    - ".join(sorted(rows))


def facts(sdist: Path, home: str, epoch: int) -> dict[str, str]:
    folder = sdist.name.removesuffix(".tar.gz")
    with tarfile.open(sdist) as tar:
        texts = [file.read().decode() for name in ("PKG-INFO", "pyproject.toml")
                 if (file := tar.extractfile(f"{folder}/{name}"))]  # fmt: skip
    about = email.message_from_string(texts[0])
    build = re.findall(r"^requires = \[(.*)\]", texts[1], re.MULTILINE)[0]
    needs = [need.partition(";")[0] for need in about.get_all("Requires-Dist", [])
             if "extra ==" not in need]  # fmt: skip
    version = str(about["Version"])
    return {
        "VERSION": version,
        "SERIES": version.rpartition(".")[0],
        "DESCRIPTION": str(about["Summary"]),
        "LICENSE": str(about["License-Expression"]),
        "PYTHON": str(about["Requires-Python"]),
        "REQUIREMENTS": conda_names(needs),
        "BUILD_REQUIREMENTS": conda_names(re.findall(r'"([^"]+)"', build)),
        "HOME": home,
        "URL": f"{home}/releases/download/v{version}",
        "DATE": format_datetime(datetime.fromtimestamp(epoch, timezone.utc)),
    }


def fill(text: str, values: dict[str, str], dist: Path) -> str:
    """Replace @NAME@ and @SHA256 FILE@; FileNotFoundError if FILE is not in `dist`."""
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return re.sub(
        r"@SHA256 ([^@\s]+)@",
        lambda match: hashlib.sha256((dist / match[1]).read_bytes()).hexdigest(),
        text,
    )


def main() -> None:
    dist, home, epoch, out = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    (sdist,) = (path for path in dist.glob("qsf-*.tar.gz") if path.name.count("-") == 1)
    values = facts(sdist, home, epoch)
    for path in sorted(path for path in PACKAGING.rglob("*") if path.is_file()):
        name = fill(str(path.relative_to(PACKAGING)), values, dist)
        try:
            text = fill(path.read_text("utf-8"), values, dist)
        except FileNotFoundError as error:
            print(f"make_packages: {name} is left out: {error.filename} is not there")
            continue
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text, "utf-8")
        (out / name).chmod(path.stat().st_mode & 0o777 | 0o644)


if __name__ == "__main__":
    main()
