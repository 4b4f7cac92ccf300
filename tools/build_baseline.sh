#!/usr/bin/env bash
# Builds llama.cpp for `python -m qsf.bench`, for this processor, and installs it.
# Usage: tools/build_baseline.sh PYTHON     (the interpreter that gets llama-cpp-python and gguf)
# Takes the newest clang with C++ of version 16 or newer: 14 and 15 lack AVX512_FP16 or tile
# intrinsics that llama.cpp's AMX code uses. Else the default compiler, without AMX if that is a gcc
# before 13, which loses stores before _tile_loadconfig: its llama.cpp crashes.
set -euo pipefail

major() { "$1" -dumpversion 2>/dev/null | cut -d. -f1; }

flags=-DGGML_NATIVE=ON
has_clang=no
for clang in clang-{30..16} clang; do
    cxx=${clang/clang/clang++}
    if command -v "$clang" >/dev/null && command -v "$cxx" >/dev/null &&
        [ "$(major "$clang")" -ge 16 ]; then
        export CC=$clang CXX=$cxx
        has_clang=yes
        break
    fi
done
if [ $has_clang = no ] && grep -qw amx_tile "${CPUINFO:-/proc/cpuinfo}" &&
    command -v gcc >/dev/null && [ "$(major gcc)" -lt 13 ]; then
    no_amx="-mno-amx-int8 -mno-amx-tile -mno-amx-bf16"
    flags+=" -DCMAKE_C_FLAGS='$no_amx' -DCMAKE_CXX_FLAGS='$no_amx'"
fi
export CMAKE_ARGS=$flags
echo "CC=${CC:-} CXX=${CXX:-} CMAKE_ARGS=\"$CMAKE_ARGS\""
exec "$1" -m pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python \
    llama-cpp-python gguf
