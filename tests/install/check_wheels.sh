#!/usr/bin/env bash
# Runs what the wheels of a folder have: here, as processors without AVX and without SSE4, on ARM by
# the Python of Debian under qemu, and the library for Windows by wine; each writes the same text.
# Usage: check_wheels.sh PYTHON FOLDER ZIG
set -euo pipefail

tree=$(cd "$(dirname "$0")/../.." && pwd)
python=$(realpath -s "$1") wheels=$(realpath "$2") zig=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
fail() { echo "check_wheels: $*" >&2; exit 1; }

[ "$(ls "$wheels"/qsf-*.whl | wc -l)" = 8 ] || fail "$wheels has not eight wheels"
for wheel in "$wheels"/qsf-*.whl; do
    "$python" -m zipfile -e "$wheel" "${wheel##*-none-}"
    ls "${wheel##*-none-}"/qsf/native/libqsf.* >/dev/null
done
packages=$("$python" -c 'import cffi; print(cffi.__path__[0])')/..
text() { # NAME, then what runs Python
    local name=$1
    shift
    "$@" -m qsf run "$tree/qsf/selftest.qsf" --prompt "a word" -n 24 --temperature 0 >said \
        2>log || { cat log; fail "$name does not run"; }
    cmp said expected || fail "$name: another text"
    echo "wheel: $name: the same text"
}
"$python" -m qsf run "$tree/qsf/selftest.qsf" --prompt "a word" -n 24 --temperature 0 >expected 2>log
[ "$(wc -c <expected)" -gt 20 ] || fail "too little text"

# -S: without the package that is installed there
export PYTHONDONTWRITEBYTECODE=1
here=(env "PYTHONPATH=$work/manylinux_2_17_x86_64.whl:$packages")
text "x86-64" "${here[@]}" "$python" -S
for cpu in Nehalem core2duo; do
    text "x86-64, $cpu" "${here[@]}" qemu-x86_64 -cpu $cpu "$python" -S
done

if ! dpkg --print-foreign-architectures | grep -qx arm64; then
    dpkg --add-architecture arm64 && apt-get update -q >/dev/null
fi
version=$(apt-cache depends python3-minimal:arm64 | sed -n 's/.*Depends: \(python3[.0-9]*\)-minimal.*/\1/p')
[ -n "$version" ] || fail "there is no package python3-minimal:arm64"
packages=$(printf '%s:arm64 ' "$version-minimal" "lib$version-minimal" "lib$version-stdlib" \
    python3-cffi-backend libffi8 libc6 zlib1g libexpat1)
apt-get download -q $packages >log 2>&1 || { cat log; fail "no Python for ARM"; }
for package in *.deb; do dpkg -x "$package" root; done
export QEMU_LD_PREFIX=$work/root
for cpu in cortex-a53 max; do
    text "ARM, $cpu" env "PYTHONPATH=$work/manylinux_2_17_aarch64.whl" \
        qemu-aarch64 -cpu $cpu "root/usr/bin/$version"
done

"$zig" cc -target x86_64-windows-gnu -I "$tree/csrc/include" "$tree/examples/generate.c" \
    win_amd64.whl/qsf/native/libqsf.dll -o win_amd64.whl/qsf/native/generate.exe
for model in "$tree/qsf/selftest.qsf" "$tree/build/tiny-llama.qsf"; do
    wine win_amd64.whl/qsf/native/generate.exe "$model" 24 "a word" </dev/null | tr -d '\r' >said
    "$tree/build/c/example_generate" "$model" 24 "a word" | cmp said - || fail "Windows: another text"
done
echo "wheel: Windows, its library in wine: the same text"
