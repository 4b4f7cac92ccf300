#!/usr/bin/env bash
# Fetches the sources of LZ4 and ZSTD for builds of another system (cmake/zig.cmake), from the Python
# package index: the source packages of lz4 and zstandard carry them. Each is checked by its SHA-256.
# Usage: tools/fetch_codecs.sh FOLDER
set -euo pipefail

folder=${1:?Usage: tools/fetch_codecs.sh FOLDER}
[ ! -e "$folder/lz4hc.c" ] || exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"${PYTHON:-python3}" -m pip download -q --no-deps --no-binary :all: -d "$work" \
    lz4==4.4.5 zstandard==0.25.0
sha256sum --quiet -c - <<EOF
5f0b9e53c1e82e88c10d7c180069363980136b9d7a8306c4dca4f760d60c39f0  $work/lz4-4.4.5.tar.gz
7713e1179d162cf5c7906da876ec2ccb9c3a9dcbdffef0cc7f70c3667a205f0b  $work/zstandard-0.25.0.tar.gz
EOF
mkdir -p "$folder"
tar xzf "$work/lz4-4.4.5.tar.gz" -C "$folder" --strip-components=2 lz4-4.4.5/lz4libs/lz4{,hc}.{c,h}
tar xzf "$work/zstandard-0.25.0.tar.gz" -C "$folder" --strip-components=2 zstandard-0.25.0/zstd/zstd.{c,h} \
    zstandard-0.25.0/zstd/zstd_errors.h
