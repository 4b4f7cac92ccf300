#!/usr/bin/env bash
# Installs the C library of a build folder and uses it outside of the tree: with the commands of
# docs/c.md and with CMake. ctest calls it.
# Usage: check_install.sh BUILD_FOLDER CMAKE CC
set -euo pipefail

tree=$(cd "$(dirname "$0")/../.." && pwd)
build=$1 cmake=$2
export CC=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
fail() { echo "check_install: $*" >&2; exit 1; }

# ---- what is installed, and where DESTDIR puts it ----
prefix=$work/prefix
"$cmake" --install "$build" --component library --prefix "$prefix" >/dev/null
DESTDIR=$work/staged "$cmake" --install "$build" --component library --prefix /opt/qsf >/dev/null
libdir=$(dirname "$(find "$prefix" -name libqsf.a)")
[ -e "staged/opt/qsf/${libdir#"$prefix/"}/libqsf.a" ] || fail "DESTDIR was not heeded"
grep -qx prefix=/opt/qsf "staged/opt/qsf/${libdir#"$prefix/"}/pkgconfig/qsf.pc" ||
    fail "qsf.pc names the folder of DESTDIR"
! grep -rq -e "$tree" -e "$build" "$libdir/cmake" "$libdir/pkgconfig" ||
    fail "installed files name the tree that they were built in"

# ---- the shared library: its name, and nothing but the functions of the header ----
readelf -d "$libdir/libqsf.so" | grep -Eq 'SONAME.*\[libqsf\.so\.[0-9]+\.[0-9]+\]' ||
    fail "libqsf.so has no versioned SONAME"
python3 "$tree/tools/check_exports.py" "$libdir/libqsf.a" --shared "$libdir/libqsf.so"

# ---- the program and the commands of docs/c.md ----
export PKG_CONFIG_PATH=$libdir/pkgconfig LD_LIBRARY_PATH=$libdir
[ "$(pkg-config --modversion qsf)" = "$(sed -n 's/^version = "\(.*\)".*/\1/p' "$tree/pyproject.toml")" ] ||
    fail "qsf.pc has another version than pyproject.toml"
pkg-config --libs --static qsf | grep -q -- '-llz4.*-lzstd' ||
    fail "qsf.pc does not say what the static library needs"
cp "$tree/qsf/selftest.qsf" model.qsf
blocks() { awk -v kind="$1" '$0 == "```" kind { on = 1; next } /^```/ { on = 0 } on' "$tree/docs/c.md"; }
blocks c >story.c
blocks sh | sed 's/^cc /$CC -Wall -Werror /' | grep -v '^make ' >commands.sh
grep -q '^./story' commands.sh || fail "docs/c.md does not run its program"
bash -euo pipefail commands.sh >said
[ "$(wc -l <said)" -ge 2 ] || fail "the program of docs/c.md said: $(cat said)"

# ---- CMake's find_package, both libraries ----
cp "$tree/tests/install/consumer/CMakeLists.txt" "$tree/examples/generate.c" .
"$cmake" -S . -B out -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_C_COMPILER="$CC" >log 2>&1 &&
    "$cmake" --build out >>log 2>&1 || { cat log; fail "find_package(qsf)"; }
expected=$("$build/example_generate" model.qsf 4 "a word")
for kind in qsf qsf_static; do
    [ "$(out/with_$kind model.qsf 4 "a word")" = "$expected" ] || fail "with_$kind"
done
! readelf -d out/with_qsf_static | grep -q libqsf || fail "with_qsf_static needs libqsf.so"
echo "check_install: the library works outside of the tree"
