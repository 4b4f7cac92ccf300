#!/usr/bin/env bash
# Installs the system packages that the build needs and that are missing, or prints how to.
# Usage: tools/bootstrap.sh [arm|old|targets|page|baseline]     (also what `make check-arm`,
# `make check-old`, `make check-targets`, `make check-slow` or `make baseline` needs)
set -euo pipefail

has_header() { echo "#include <$1>" | "${CC:-cc}" -E - >/dev/null 2>&1; }

python_has_venv() {
    local python
    for python in python3.13 python3.12 python3.11 python3.10 python3; do
        if "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' \
            >/dev/null 2>&1; then
            return 0
        fi
    done
    return 1
}

missing=()
command -v "${CC:-cc}" >/dev/null || missing+=(gcc libc6-dev)
command -v make >/dev/null || missing+=(make)
command -v pkg-config >/dev/null || missing+=(pkg-config) # make test-c uses the installed library
has_header lz4.h || missing+=(liblz4-dev)
has_header zstd.h || missing+=(libzstd-dev)
python_has_venv || missing+=(python3 python3-venv)
if [ "${1:-}" = arm ]; then
    command -v aarch64-linux-gnu-gcc >/dev/null ||
        missing+=(gcc-aarch64-linux-gnu libc6-dev-arm64-cross)
    command -v qemu-aarch64 >/dev/null || command -v qemu-aarch64-static >/dev/null ||
        missing+=(qemu-user)
    [ -e /usr/lib/aarch64-linux-gnu/liblz4.a ] || missing+=(liblz4-dev:arm64)
    [ -e /usr/lib/aarch64-linux-gnu/libzstd.a ] || missing+=(libzstd-dev:arm64)
fi
if [ "${1:-}" = old ]; then
    command -v qemu-x86_64 >/dev/null || command -v qemu-x86_64-static >/dev/null ||
        missing+=(qemu-user)
fi
if [ "${1:-}" = targets ]; then
    command -v qemu-arm >/dev/null || missing+=(qemu-user)
    command -v wine >/dev/null || missing+=(wine wine64)
    command -v aarch64-linux-gnu-objdump >/dev/null || missing+=(binutils-aarch64-linux-gnu)
fi
if [ "${1:-}" = page ]; then # a browser, for the test that looks at the HTML reports
    command -v chromium >/dev/null || command -v chromium-browser >/dev/null ||
        command -v google-chrome >/dev/null || missing+=(chromium)
fi
if [ "${1:-}" = baseline ]; then # a clang whose AMX and AVX-512 code works, with OpenMP
    newest=""
    for major in 19 20 21 22 18 17 16; do
        if command -v "clang++-$major" >/dev/null; then newest=""; break; fi
        if [ -z "$newest" ] && [ -n "$(apt-cache search --names-only "^clang-$major\$" 2>/dev/null)" ]
        then newest=$major; fi
    done
    [ -z "$newest" ] || missing+=("clang-$newest" "libomp-$newest-dev")
fi
[ ${#missing[@]} -gt 0 ] || exit 0

sudo=()
[ "$(id -u)" = 0 ] || sudo=(sudo)
foreign=""
case " ${missing[*]} " in *:arm64*) foreign="dpkg --add-architecture arm64" ;; esac
if command -v apt-get >/dev/null &&
    { [ ${#sudo[@]} = 0 ] || sudo -n true 2>/dev/null; }; then
    echo "Installing: ${missing[*]}"
    if [ -n "$foreign" ]; then "${sudo[@]}" dpkg --add-architecture arm64; fi
    "${sudo[@]}" apt-get update -q
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -q --no-install-recommends "${missing[@]}"
    exit 0
fi
echo "Some system packages are missing. Install them, then run make again:" >&2
if [ -n "$foreign" ]; then echo "    sudo $foreign" >&2; fi
echo "    sudo apt-get update && sudo apt-get install -y ${missing[*]}" >&2
exit 1
