#!/usr/bin/env bash
# Compares the program (program/) with the Python command: the same text byte for byte, of models,
# options and conversations. Usage: check_program.sh PYTHON_FOLDER COMMAND...
# PYTHON_FOLDER has qsf and qsf-convert; COMMAND is the program, perhaps after its emulator.
set -euo pipefail

tree=$(cd "$(dirname "$0")/../.." && pwd)
python=$1
shift
program=("$@")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "check_program: $*" >&2; exit 1; }
export XDG_CONFIG_HOME=$work

# ---- models: of bytes, of words, and one with a chat template ----
cp -r "$tree/examples/tiny-llama" "$work/chat"
cat >"$work/chat/template.py" <<'PY'
import json, sys
path = sys.argv[1] + "/tokenizer_config.json"
config = json.load(open(path))
config["chat_template"] = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
json.dump(config, open(path, "w"))
PY
"$python/python" "$work/chat/template.py" "$work/chat"
sed -i 's/{/{"stop_strings": [],/' "$work/chat/generation_config.json"
"$python/qsf" convert -q "$work/chat" "$work/chat.qsf" 2>/dev/null
sed -i 's/\[\]/[" girl", " friend"]/' "$work/chat/generation_config.json"
"$python/qsf" convert -q "$work/chat" "$work/ends.qsf" 2>/dev/null
[ -e "$tree/build/tiny-llama.qsf" ] || "$python/qsf" convert -q "$tree/examples/tiny-llama" "$tree/build/tiny-llama.qsf"
tiny=$tree/build/tiny-llama.qsf

n_compared=0
compare() { # the arguments of `run`; standard input is $input
    "$python/qsf" run "$@" -q <<<"${input:-}" >"$work/expected" || fail "qsf run $*"
    "${program[@]}" run "$@" -q <<<"${input:-}" >"$work/said" || fail "program: run $*"
    cmp "$work/said" "$work/expected" || fail "another text: $*"
    n_compared=$((n_compared + 1))
}
for model in "$tree/qsf/selftest.qsf" "$tiny"; do
    compare "$model" --prompt "Once upon a time" --temperature 0 --max-tokens 40
    compare "$model" --prompt "Once upon a time" --seed 7 --max-tokens 40
    compare "$model" --prompt "a <|end_of_text|> b" --seed 3 -n 9 --no-special
done
input="The dog and the cat" compare "$tiny" --seed 5 --top-k 0 --top-p 1 --repetition-penalty 1.3 -n 40
compare "$tiny" -p "One day" --seed 9 --temp 1.5 --min-p 0.05 --kv-type k8v4 --ram-budget 150MB -n 40
compare "$tiny" -p "Once upon a time" --temperature 0 --stop girl --stop " happy" -n 90
compare "$tiny" -p "Once upon a time" --temperature 0 --draft off --io direct -t 1 -n 30
compare "$work/ends.qsf" -p "Once upon a time" --raw --temperature 0 -n 90
compare "$work/chat.qsf" -p " Who <|end_of_text|> are you? " --seed 1 -n 30
compare "$work/chat.qsf" -p "Who are you?" --system "Be brief." --seed 1 -n 30
compare "$work/chat.qsf" -p "Who are you?" --raw --seed 1 -n 30

chat() { printf 'Hello\nWho is <|end_of_text|> it?\n/exit\n'; }
for model in "$work/chat.qsf" "$tiny"; do
    chat | "$python/qsf" chat "$model" --seed 4 -n 20 -q >"$work/expected" 2>/dev/null
    chat | "${program[@]}" chat "$model" --seed 4 -n 20 -q >"$work/said" 2>/dev/null
    cmp "$work/said" "$work/expected" || fail "another conversation: $model"
done

# ---- what ends no conversation: a full context, lines that are too long or not UTF-8 ----
full() {
    printf 'Once upon a time there was a dog.\nAnd a cat?\n\xff\xfe\nAnd a bird in a tree?\n'
    printf 'word %.0s' {1..300}
    printf '\nWho else was there?\n/bye\nnever\n'
}
for model in "$work/chat.qsf" "$tiny"; do
    full | "$python/qsf" chat "$model" --seed 4 -n 30 -c 64 -q >"$work/expected" 2>/dev/null
    full | "${program[@]}" chat "$model" --seed 4 -n 30 -c 64 -q >"$work/said" 2>"$work/notes" ||
        fail "a full context ends a chat: $(cat "$work/notes")"
    cmp "$work/said" "$work/expected" || fail "another conversation in a full context: $model"
    for note in "not UTF-8" "tokens, the context has 64)" "forgotten)"; do
        grep -qF "$note" "$work/notes" || fail "not said: $note: $(cat "$work/notes")"
    done
done
printf '\xEF\xBB\xBFOnce upon a time\n' >"$work/mark.txt"
compare "$tiny" -f "$work/mark.txt" --temperature 0 -n 9

# ---- the other commands, and errors of one line ----
keys='import json,sys; r=json.loads(sys.stdin.read()); print(r["text"], r["ids"], r["stop_reason"], "accepted_tokens" in r)'
for model in "$tiny" "$work/ends.qsf"; do
    ask=(run "$model" -p "Once upon a time" --raw --temperature 0 -n 90 --stop cat --json)
    [ "$("${program[@]}" "${ask[@]}" | "$python/python" -c "$keys")" = \
        "$("$python/qsf" "${ask[@]}" | "$python/python" -c "$keys")" ] || fail "--json says something else"
done
for command in plan inspect; do
    "${program[@]}" "$command" "$tiny" --json | "$python/python" -c 'import json,sys; json.load(sys.stdin)'
    "${program[@]}" "$command" "$tiny" >/dev/null
done
"${program[@]}" verify "$tiny" >/dev/null || fail "verify refuses a whole file"
head -c 1000000 "$tiny" >"$work/cut.qsf"
for refused in "verify $work/cut.qsf" "run $tiny -p x --ram-budget 1" "run $work/none -p x" \
    "run $tiny -p x --temp hot" "run $tiny -p x --no-such" "walk $tiny" \
    "run $tiny -p x --seed 18446744073709551616" "run $tiny -p x -n -1.0" "run $tiny -p x -n -0.5" \
    "run $tiny -p x --top-k 40.5" "run $tiny -p x -n 0x10" "run $tiny -p x --temp nan" \
    "inspect $tiny --temp 1" "verify $tiny -t 1" "chat $tiny --json" "plan $tiny --seed 1"; do
    # shellcheck disable=SC2086
    ! "${program[@]}" $refused >/dev/null 2>"$work/said" || fail "not refused: $refused"
    [ "$(wc -l <"$work/said")" = 1 ] || fail "not one line: $refused: $(cat "$work/said")"
done
# ---- Ctrl-C while a chat waits for a line; wine passes no signals on ----
if [[ ${program[0]##*/} != wine* ]]; then
    mkfifo "$work/line"
    "${program[@]}" chat "$tiny" <"$work/line" >/dev/null 2>"$work/said" &
    exec 8>"$work/line"
    until grep -q 'no chat template' "$work/said"; do sleep 0.1; done
    sleep 0.2
    kill -INT $!
    for ((i = 0; i < 100; i++)); do kill -0 $! 2>/dev/null || break; sleep 0.1; done
    kill -KILL $! 2>/dev/null || true
    code=0
    wait $! || code=$?
    exec 8>&-
    [ "$code" = 130 ] || fail "Ctrl-C ends a chat with $code"
fi
echo "check_program: ${program[*]##*/}: $n_compared texts and 4 conversations, as the Python command"
