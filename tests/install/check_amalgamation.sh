#!/usr/bin/env bash
# Compiles qsf.c as its first comment says, and compares the text of a program with that of the one
# that has the library (build/c/example_generate): here by gcc and clang at -O0 to -O3, then with
# -O3 for each system, where qemu or wine runs it. Usage: check_amalgamation.sh ZIG FOLDER TARGET...
set -euo pipefail

tree=$(cd "$(dirname "$0")/../.." && pwd)
zig=$1 folder=$2
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

compare() { # NAME, then a program
    local name=$1
    shift
    texts "$@" >said || fail "$name does not run"
    cmp said expected || fail "$name: another text than the library's"
    echo "qsf.c: $name: $(stat -c %s "${@: -1}") bytes, the same text"
}

for flags in -O0 -O1 -O2 "-O3 -march=native -std=c11"; do
    for cc in "${CC:-gcc}" "$zig cc -fno-sanitize=undefined"; do # its traps take 256 KB a thread
        # shellcheck disable=SC2086
        $cc $flags -Wall -Wextra -Werror -o app qsf.c "$tree/examples/generate.c" -I. -lpthread -lm
        compare "${cc##*/} $flags" ./app
    done
done

# Without its pragma it would fuse products with sums where the processor can: it must say so.
sed '/^#pragma \(STDC FP_CONTRACT\|GCC optimize\)/d' qsf.c >fused.c
"${CC:-gcc}" -O1 -std=gnu17 -ffp-contract=fast -o app fused.c "$tree/examples/generate.c" -I. -lpthread -lm
rm fused.c
if grep -qw fma /proc/cpuinfo; then
    ! ./app "${models[0]}" 4 x 2>said || fail "it computes with fused products"
    grep -q -- -ffp-contract=off said || fail "fused products: $(cat said)"
fi

for target; do
    run=()
    case $target in
    *-windows-*) run=(wine) ;;
    x86_64-linux-*) ;;
    *-linux-*) run=("qemu-${target%%-*}") ;;
    esac
    static=""
    case $target in *-linux-*) static=-static ;; esac
    "$zig" cc -target "$target" -mcpu=baseline -O3 -s $static -o app.exe \
        qsf.c "$tree/examples/generate.c" -I. -lpthread -lm
    case $target in
    *-macos* | aarch64-windows-*) echo "qsf.c: $target: $(stat -c %s app.exe) bytes, built" ;;
    *) compare "$target" "${run[@]}" ./app.exe ;;
    esac
done
rm -f app app.exe app.pdb said
