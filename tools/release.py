"""Builds a release in two folders from what is committed, and compares it bit for bit.

The two clones differ in path and umask, share no cache, and have the time of the commit. dist/ gets
the source package, the wheels, the programs, the one C file, what packagers need (packaging/),
qsf.cdx.json (what is inside: CycloneDX), BUILD.txt (tools, sizes, exported names) and SHA256SUMS.

Usage: python tools/release.py TAG HOME | --trial     (--trial: HEAD, whatever its tag)
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLONES = (("first", 0o022), ("the-second-elsewhere", 0o077))  # folder of build/release/, umask
OURS = re.compile(r"CC|CCACHE_.*|C?FLAGS|CPPFLAGS|LDFLAGS|CMAKE_.*|QSF_.*|CI|WERROR|PY(PI|THON).*")
NAMES = "import check_exports as c; print(*sorted(c.declared(c.public_header())), sep='\\n')"
SDIST = "import sys, scikit_build_core.build as b; print(b.build_sdist(sys.argv[1]))"

NEXT = """
What a person has to do:
  1. Sign:     git tag -s, if the tag is not signed; gpg --armor --detach-sign dist/SHA256SUMS
  2. Try:      twine upload -r testpypi dist/qsf-VERSION.tar.gz dist/*.whl; then, installed from
               there into an empty environment: python -m qsf.selftest
  3. Publish:  git push origin TAG; twine upload the same files; all of dist/ to the tag's page
  4. Package:  qsf-VERSION-packaging.tar.gz: debian/ into the source package, the others to
               homebrew-core, winget-pkgs and conda-forge/staged-recipes
  5. Go on:    the next version in pyproject.toml, its chapter "unreleased" in CHANGELOG.md"""


def output_of(*command: str | Path, where: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """Run a command and return what it printed; one that fails ends the release."""
    done = subprocess.run(command, cwd=where, env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"release: {' '.join(map(str, command))}: exit code {done.returncode}")
    return done.stdout.strip()


def refusals(tag: str, version: str, changelog: str, changes: str, home: str) -> list[str]:
    """Return why this cannot be released; `tag` is empty for a trial, `changes` those of git."""
    faults = [f"not committed, so not in it: {changes}"] if changes else []
    if tag and not home.startswith("https://"):
        faults.append("say where the project is, for packages: URL=https://github.com/OWNER/qsf")
    if not re.search(rf"^## {re.escape(version)} - ", changelog, re.MULTILINE):
        faults.append(f"CHANGELOG.md has no chapter '## {version} - DATE'")
    if tag and tag != f"v{version}":
        faults.append(f"the tag is {tag}, pyproject.toml has {version}: the tag must be v{version}")
    if tag and re.search(rf"^## {re.escape(version)} - unreleased", changelog, re.MULTILINE):
        faults.append(f"CHANGELOG.md says that {version} is unreleased: write the date")
    return faults


def pack(archive: Path, files: dict[str, Path], epoch: int) -> None:
    """Write a .tar.gz or .zip that depends on contents, names and epoch only."""
    raw = io.BytesIO()
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
            for name, path in sorted(files.items()):
                packed.writestr(zipfile.ZipInfo(name, time.gmtime(epoch)[:6]), path.read_bytes(),
                                zipfile.ZIP_DEFLATED)  # fmt: skip
        return
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, path in sorted(files.items()):
            member = tarfile.TarInfo(f"{archive.name.removesuffix('.tar.gz')}/{name}")
            member.size, member.mtime = path.stat().st_size, epoch
            member.mode = 0o755 if path.name in ("qsf", "rules") else 0o644
            tar.addfile(member, io.BytesIO(path.read_bytes()))
    archive.write_bytes(gzip.compress(raw.getvalue(), 9, mtime=epoch))


def settle(path: Path) -> None:
    """Give all members of a wheel modes that do not follow from the umask of who built it."""
    with zipfile.ZipFile(path) as wheel:
        rows = [(item, wheel.read(item)) for item in wheel.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for item, data in rows:
            mode = item.external_attr >> 16
            item.external_attr &= 0xFFFF
            item.external_attr |= (mode & ~0o777 | (0o755 if mode & 0o100 else 0o644)) << 16
            wheel.writestr(item, data)


def members(path: Path) -> dict[str, str]:
    """Return what is in an archive: place and name -> time, mode and hash; {} if it is none."""
    rows = []
    if path.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(path) as wheel:
            for item in wheel.infolist():
                about = f"{item.date_time} {item.external_attr:o}"
                rows.append((item.filename, f"{about} {sha256(wheel.read(item))}"))
    elif path.name.endswith(".tar.gz"):
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member)
                about = f"{member.mtime} {member.mode:o} {member.uname}"
                rows.append((member.name, f"{about} {sha256(file.read() if file else b'')}"))
    return {f"{place:05} {name}": about for place, (name, about) in enumerate(rows)}


def differences(first: Path, second: Path) -> list[str]:
    """Return a line for each file, or member of an archive, that two folders do not share."""
    faults = []
    for name in sorted({path.name for path in [*first.iterdir(), *second.iterdir()]}):
        in_first, in_second = first / name, second / name
        if not (in_first.exists() and in_second.exists()):
            faults.append(f"{name}: only one build made it")
        elif in_first.read_bytes() != in_second.read_bytes():
            a, b = members(in_first), members(in_second)
            unlike = [f"{key[6:]} ({a.get(key)}; {b.get(key)})"
                      for key in sorted({*a, *b}) if a.get(key) != b.get(key)]  # fmt: skip
            faults.append(f"{name} differs: {'; '.join(unlike) or 'not in its members'}")
    return faults


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def build(clone: Path, umask: int, commit: str, home: str) -> Path:
    """Clone the commit, build everything there, and return the folder of what was made."""
    output_of("git", "clone", "-q", "--no-checkout", ROOT, clone)
    os.umask(umask)
    output_of("git", "checkout", "-q", "--detach", commit, where=clone)
    epoch = int(output_of("git", "show", "-s", "--format=%ct", commit))
    env = {name: value for name, value in os.environ.items() if not OURS.fullmatch(name)}
    env |= {"SOURCE_DATE_EPOCH": str(epoch), "CCACHE_DISABLE": "1", "LC_ALL": "C", "TZ": "UTC",
            "ZIG_GLOBAL_CACHE_DIR": str(clone / "build" / "zig")}  # fmt: skip
    print(f"release: building in {clone}", flush=True)
    print(output_of("make", "wheels", "program", "amalgamation", where=clone, env=env), flush=True)
    dist, python, made = clone / "dist", clone / ".venv" / "bin" / "python", clone / "build"
    for wheel in dist.glob("*.whl"):
        settle(wheel)
    sdist = dist / output_of(python, "-c", SDIST, "dist", where=clone, env=env).splitlines()[-1]
    version = sdist.name.removesuffix(".tar.gz").removeprefix("qsf-")
    with tarfile.open(sdist) as tar:
        inside = {name.partition("/")[2] for name in tar.getnames()}
    tracked = output_of("git", "ls-files", where=clone).splitlines()
    missing = [name for name in tracked if name not in inside and not name.startswith(".ci/")]
    if missing:
        sys.exit(f"release: not in {sdist.name}: {' '.join(missing)}")
    texts = {"LICENSE": clone / "LICENSE", **{f"licenses/{path.name}": path for path in
                                              (clone / "licenses").glob("*.txt")}}  # fmt: skip
    for program in [*made.glob("*-*/program/qsf"), *made.glob("*-*/program/qsf.exe")]:
        kind = "zip" if program.suffix else "tar.gz"
        pack(dist / f"qsf-{version}-{program.parts[-3]}.{kind}", {program.name: program, **texts},
             epoch)  # fmt: skip
    source = {name: made / "amalgamation" / name for name in ("qsf.c", "qsf.h")}
    pack(dist / f"qsf-{version}-c.tar.gz", {**source, **texts}, epoch)
    filled = made / "packaging"
    print(output_of(sys.executable, "tools/make_packages.py", dist, home, str(epoch), filled,
                    where=clone))  # fmt: skip
    files = {str(path.relative_to(filled)): path for path in filled.rglob("*") if path.is_file()}
    pack(dist / f"qsf-{version}-packaging.tar.gz", files, epoch)

    zig = output_of(python, "-m", "ziglang", "version")
    stamp = output_of("git", "show", "-s", "--format=%cd", "--date=format-local:%Y-%m-%dT%H:%M:%SZ",
                 commit, env=env)  # fmt: skip
    bom = output_of(sys.executable, "tools/make_sbom.py", next(dist.glob("*.whl")), made / "codecs",
               zig, stamp, where=clone)  # fmt: skip
    (dist / "qsf.cdx.json").write_text(f"{bom}\n")
    musl = made / "x86_64-linux-musl"
    names = output_of(python, "tools/check_exports.py", musl / "libqsf.a",
                 "--shared", musl / "libqsf.so", where=clone)  # fmt: skip
    tools = [output_of(tool, "--version").splitlines()[0]
             for tool in ("gcc", "ld", clone / ".venv" / "bin" / "cmake", python)]  # fmt: skip
    sizes = [f"{path.stat().st_size:>9} {path.name}" for path in sorted(dist.iterdir())]
    (dist / "BUILD.txt").write_text("\n".join(
        [f"QSF {version}, commit {commit}, SOURCE_DATE_EPOCH={epoch}", *tools, f"zig {zig}", names,
         output_of(python, "-c", NAMES, where=clone / "tools"), "bytes", *sizes, ""]))  # fmt: skip
    sums = [f"{sha256(path.read_bytes())}  {path.name}\n" for path in sorted(dist.iterdir())]
    (dist / "SHA256SUMS").write_text("".join(sums))
    return dist


def main() -> None:
    """Build twice, compare, and say what a person has to do."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tag", nargs="?", default="")
    parser.add_argument("home", nargs="?", default="", help="the project's address")
    parser.add_argument("--trial", action="store_true", help="HEAD, whatever its tag")
    given = parser.parse_args()
    if bool(given.tag) == given.trial:
        sys.exit("release: say which: TAG=v1.2.3, or TRIAL=yes for what HEAD has")
    commit = output_of("git", "rev-parse", "--verify", f"{given.tag or 'HEAD'}^{{commit}}")
    project = output_of("git", "show", f"{commit}:pyproject.toml")
    version = re.findall(r'^version = "([^"]+)"', project, re.MULTILINE)[0]
    changes = output_of("git", "status", "--porcelain") if given.trial else ""
    faults = refusals(
        given.tag, version, output_of("git", "show", f"{commit}:CHANGELOG.md"), changes, given.home
    )
    if faults:
        sys.exit("\n".join(f"release: {fault}" for fault in faults))
    shutil.rmtree(ROOT / "build" / "release", ignore_errors=True)
    home = given.home or "https://qsf.invalid"  # of a trial
    first, second = (
        build(ROOT / "build" / "release" / name, umask, commit, home) for name, umask in CLONES
    )
    faults = differences(first, second)
    if faults:
        sys.exit("\n".join(f"release: {fault}" for fault in faults))
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    shutil.copytree(first, ROOT / "dist")
    print((ROOT / "dist" / "BUILD.txt").read_text())
    print(f"release: two builds, the same bits: dist/{' of a trial' if given.trial else ''}{NEXT}")


if __name__ == "__main__":
    main()
