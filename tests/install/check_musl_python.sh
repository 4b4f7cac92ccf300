#!/usr/bin/env bash
# The wheel for musl in a root that has a Python made for musl and nothing of glibc: the self test, a
# conversion and texts as here. Python, libffi and zlib are compiled from Debian's sources (70
# seconds of a core), once: FOLDER keeps them.
# Usage: check_musl_python.sh PYTHON WHEEL FOLDER [FILE.gguf]
set -euo pipefail

tree=$(cd "$(dirname "$0")/../.." && pwd)
python=$(realpath -s "$1") wheel=$(realpath "$2")
mkdir -p "$3"
work=$(realpath "$3") model=${4:+$(realpath "$4")}
root=$work/root
cd "$work"
fail() { echo "check_musl_python: $*" >&2; exit 1; }
skip() { echo "wheel: musl, its own Python: skipped, $*"; exit 0; }

build_python() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || skip "it needs root, and Debian's sources"
    apt-get install -y -q --no-install-recommends musl-tools bubblewrap dpkg-dev >log 2>&1 ||
        skip "Debian's packages are not there"
    mkdir -p lists/partial kernel "$root"/{lib,out,proc,dev,tmp}
    . /etc/os-release
    echo "deb-src http://deb.debian.org/debian $VERSION_CODENAME main" >sources.list
    local apt=(-o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=/dev/null
        -o "Dir::State::lists=$work/lists")
    apt-get "${apt[@]}" update >log 2>&1
    series=$(apt-cache "${apt[@]}" depends python3-minimal | sed -n 's/.*Depends: \(python3[.0-9]*\)-minimal.*/\1/p')
    apt-get "${apt[@]}" source --tar-only "$series" libffi zlib >log 2>&1 ||
        skip "Debian's sources are not there"
    local name
    for name in "$series" libffi zlib; do
        mkdir -p "$name"
        tar xf "$name"_*.orig.tar.* -C "$name" --strip-components=1
    done
    # musl-gcc without the headers of glibc that Python's setup.py adds, with those of the kernel
    for name in linux asm-generic x86_64-linux-gnu/asm; do
        ln -sfn "/usr/include/$name" "kernel/${name##*/}"
    done
    cat >cc <<END
#!/bin/bash
[ "\$1" != --print-multiarch ] || { echo x86_64-linux-musl; exit; }
args=()
for word; do case \$word in -[IL]/usr/* | -[IL]/lib/*) ;; *) args+=("\$word") ;; esac; done
exec musl-gcc "\${args[@]}" -idirafter $work/kernel
END
    chmod +x cc zlib/configure
    export CC=$work/cc CFLAGS="-O1 -g0 -fPIC" MAKEFLAGS="-j$(nproc)"
    (cd zlib && ./configure --prefix="$work/made" --static && make libz.a install) >log 2>&1
    (cd libffi && ./configure --build=x86_64-linux-musl --prefix="$work/made" --disable-shared \
        --disable-docs --disable-multi-os-directory && make install) >log 2>&1
    mkdir -p build
    # Not `make install`: it compiles all modules three times.
    (cd build && "../$series/configure" --build=x86_64-linux-musl --prefix=/usr --without-ensurepip \
        --without-doc-strings --disable-test-modules CPPFLAGS="-I$work/made/include" LDFLAGS="-L$work/made/lib" \
        PKG_CONFIG=false && make python sharedmods) >log 2>&1
    local lib="$root/usr/lib/$series"
    mkdir -p "$root/usr/bin" "$lib"
    (cd "$series/Lib" && tar c --exclude=test --exclude=tests --exclude=idlelib --exclude=lib2to3 .) | tar x -C "$lib"
    cp -r build/build/lib.*/ "$lib/lib-dynload"
    cp build/python "$root/usr/bin/$series"
    cp -L /lib/ld-musl-x86_64.so.1 "$root/lib"
    touch "$root/lib/is-whole"
}

set -E
trap 'tail -20 log; fail "Python for musl was not built"' ERR
[ -e "$root/lib/is-whole" ] || build_python
trap - ERR
series=$(ls "$root/usr/lib" | grep -x "python3\.[0-9]*")
# Debian 12's musl does not load newer wheels of numpy.
rm -rf "$root/usr/lib/$series/site-packages" out
mkdir out
"$python" -m pip install -q --target "$root/usr/lib/$series/site-packages" --platform musllinux_1_2_x86_64 \
    --platform musllinux_1_1_x86_64 --python-version "${series#python}" --only-binary=:all: "$wheel" 'numpy<2'

there() { # as in the root; OPENBLAS_* of this machine stays
    bwrap --bind "$root" / --proc /proc --dev /dev --tmpfs /tmp --bind out /out --unshare-net \
        --ro-bind "$tree/examples/tiny-llama" /tiny-llama ${model:+--ro-bind "$model" /model.gguf} \
        --setenv PATH /usr/bin --setenv HOME /tmp --unsetenv PYTHONPATH "/usr/bin/$series" -m "$@"
}
there qsf.selftest | tee out/selftest
grep -q "^result: *all passed" out/selftest || fail "the self test"
# auto, the default, sums with BLAS, whose order is a system's own.
there qsf convert /tiny-llama /out/there.qsf --quant-type 4bit --quiet
"$python" -m qsf convert "$tree/examples/tiny-llama" out/here.qsf --quant-type 4bit --quiet
cmp out/there.qsf out/here.qsf || fail "the conversion has other bytes"
for pair in "/out/there.qsf out/here.qsf" ${model:+"/model.gguf $model"}; do
    set -- $pair
    there qsf run "$1" -p "Once upon a time" -n 24 --temperature 0 >out/text
    "$python" -m qsf run "$2" -p "Once upon a time" -n 24 --temperature 0 | cmp - out/text ||
        fail "$1: another text"
done
echo "wheel: musl, its own Python: the self test, a conversion and the same text"
