"""Prints what is inside a release and what it needs, as CycloneDX 1.6 (JSON).

Names, versions, licences and SHA-256: LZ4 and ZSTD from their sources, what zig links into static
programs, the Python packages that the wheel asks for (with the licence that the installed one
states).

Usage: python tools/make_sbom.py WHEEL CODECS ZIG_VERSION TIME   (CODECS: of tools/fetch_codecs.sh)
"""

from __future__ import annotations

import email
import hashlib
import importlib.metadata
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

CODECS = {"lz4": "BSD-2-Clause", "zstd": "BSD-3-Clause"}


def hashes(data: bytes) -> list[dict[str, str]]:
    """Return the hash of one file, in CycloneDX's form."""
    return [{"alg": "SHA-256", "content": hashlib.sha256(data).hexdigest()}]


def part(name: str, version: str, stated: str, kind: str = "library", **more: Any) -> Any:
    """Return one component; `stated` is its licence, an SPDX expression or a text."""
    spdx = re.fullmatch(r"[\w.+-]+(-[\w.+-]+)+|MIT|[\w.+-]+( (AND|OR) [\w.+-]+)+", stated)
    licenses = [{"expression": stated}] if spdx else [{"license": {"name": stated}}]
    return {"type": kind, "name": name, "version": version, "licenses": licenses, **more}


def stated_license(package: str) -> str:
    """Return the licence that an installed Python package states."""
    about = importlib.metadata.metadata(package).json
    classes = [text.split(" :: ")[-1] for text in about.get("classifier", [])
               if text.startswith("License ::")]  # fmt: skip
    licence = about.get("license_expression") or ", ".join(classes) or about.get("license")
    return str(licence or "not stated").split("\n")[0]


def codec_sources(folder: Path) -> list[Any]:
    """Return LZ4 and ZSTD with the hashes of the sources that are compiled."""
    parts = []
    for name, license_id in CODECS.items():
        header = (folder / f"{name}.h").read_text("utf-8")
        numbers = re.findall(r"define \w+_VERSION_(?:MAJOR|MINOR|RELEASE) +(\d+)", header)
        files = [{"type": "file", "name": file, "hashes": hashes((folder / file).read_bytes())}
                 for file in sorted(path.name for path in folder.glob(f"{name}*"))]  # fmt: skip
        parts.append(part(name, ".".join(numbers), license_id, components=files,
                          description="from source, in wheels, programs and qsf.c"))  # fmt: skip
    return parts


def of_wheel(path: Path) -> tuple[str, list[Any]]:
    """Return the wheel's version, and the packages that it asks for."""
    parts = []
    with zipfile.ZipFile(path) as wheel:
        names = sorted(wheel.namelist())
        about = email.message_from_bytes(
            wheel.read(next(name for name in names if name.endswith(".dist-info/METADATA")))
        )
    for need in sorted(
        text for text in about.get_all("Requires-Dist", []) if "extra ==" not in text
    ):
        name, versions = re.findall(r"^([\w.-]+)\s*([^;]*)", need)[0]
        parts.append(part(name, versions, stated_license(name), purl=f"pkg:pypi/{name.lower()}",
                          description="not inside: pip installs it with the wheel"))  # fmt: skip
    return str(about["Version"]), parts


def main() -> None:
    wheel, codecs, zig, time = sys.argv[1:]
    version, parts = of_wheel(Path(wheel))
    linked = [part(name, f"of zig {zig}", "MIT", description="in the programs")
              for name in ("musl", "compiler-rt")]  # fmt: skip
    parts = [*codec_sources(Path(codecs)), *linked, *parts]
    for row in parts:
        row["bom-ref"] = f"{row['name']}: {row['description']}"
    qsf = part("qsf", version, "Apache-2.0", kind="application")
    print(json.dumps({"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
                      "metadata": {"timestamp": time, "component": qsf},
                      "components": parts}, indent=2))  # fmt: skip


if __name__ == "__main__":
    main()
