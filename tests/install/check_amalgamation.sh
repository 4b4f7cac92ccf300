#!/usr/bin/env bash
# Compiles qsf.c as its first comment says, and compares the text of a program with that of the one
# that has the library (build/c/example_generate): here by gcc and clang at -O0 and -O3, then for
# each system at -O0, where qemu or wine runs it. Usage: check_amalgamation.sh ZIG FOLDER TARGET...
set -euo pipefail

tree=$(cd "$(dirname "$0")/../.." && pwd)
zig=$1 folder=$2 cores=$(getconf _NPROCESSORS_ONLN)
shift 2
cd "$folder"
fail() { echo "check_amalgamation: $*" >&2; exit 1; }

models=("$tree/qsf/selftest.qsf" "$tree/build/tiny-llama.qsf")
texts() { # of a program, perhaps with its emulator
    for model in "${models[@]}"; do
        "$@" "$model" 60 "Once upon a time" </dev/null | tr -d '\r' || return 1
    done
}
texts "$tree/build/c/example_generate" >expected
[ "$(wc -c <expected)" -gt 150 ] || fail "the library's program says too little"

build() { # FILE, then a compiler and its flags: in the background, as many at a time as there are cores
    local out=$1
    shift
    while [ "$(jobs -rp | wc -l)" -ge "$cores" ]; do wait -n || fail "qsf.c does not compile"; done
    "$@" -o "$out" "$tree/examples/generate.c" -I. -lpthread -lm &
}
built() { # all of them
    while [ -n "$(jobs -p)" ]; do wait -n || fail "qsf.c does not compile"; done
}

compare() { # NAME, then a program
    local name=$1
    shift
    texts "$@" >said || fail "$name does not run"
    cmp said expected || fail "$name: another text than the library's"
    echo "qsf.c: $name: $(stat -c %s "${@: -1}") bytes, the same text"
}

levels=(-O0 "-O3 -march=native -std=c11")
rm -rf apps
mkdir apps
for flags in "${levels[@]}"; do
    # shellcheck disable=SC2086
    build "apps/gcc $flags" "${CC:-gcc}" $flags -Wall -Wextra -Werror qsf.c
    # Its traps take 256 KB a thread.
    # shellcheck disable=SC2086
    build "apps/clang $flags" "$zig" cc -fno-sanitize=undefined $flags -Wall -Wextra -Werror qsf.c
done
# Without its pragma it would fuse products with sums where the processor can (gcc from -O2 on): it
# must say so.
sed '/^#pragma \(STDC FP_CONTRACT\|GCC optimize\)/d' qsf.c >fused.c
build apps/fused "${CC:-gcc}" -O2 -std=gnu17 -ffp-contract=fast fused.c
for target; do
    static=""
    case $target in *-linux-*) static=-static ;; esac
    # shellcheck disable=SC2086
    build "apps/$target.exe" "$zig" cc -target "$target" -mcpu=baseline -O0 -fno-sanitize=undefined \
        -s $static qsf.c
done
built

for flags in "${levels[@]}"; do
    compare "gcc $flags" "apps/gcc $flags"
    compare "clang $flags" "apps/clang $flags"
done
if grep -qw fma /proc/cpuinfo; then
    ! apps/fused "${models[0]}" 4 x 2>said || fail "it computes with fused products"
    grep -q -- -ffp-contract=off said || fail "fused products: $(cat said)"
fi
for target; do
    run=()
    case $target in
    *-windows-*) run=(wine) ;;
    x86_64-linux-*) ;;
    *-linux-*) run=("qemu-${target%%-*}") ;;
    esac
    case $target in
    *-macos* | aarch64-windows-*) echo "qsf.c: $target: $(stat -c %s "apps/$target.exe") bytes, built" ;;
    *) compare "$target" "${run[@]}" "apps/$target.exe" ;;
    esac
done
rm -rf apps fused.c said
