#!/usr/bin/env bash
# Runs COMMAND, which installs Python packages and compiles in FOLDER, and says how far it is.
# Usage: tools/show_progress.sh FOLDER COMMAND...
set -euo pipefail
folder=$1
shift

# What is done and what there is: FOLDER's build file comes after the packages.
state() {
    local n_all n
    n_all=$(grep -c '^build .*\.o: ' "$folder/build.ninja" 2>/dev/null || true)
    n=$( (find "$folder" -name '*.o' -newer "$started" 2>/dev/null || true) | wc -l)
    if [ "$n" = 0 ]; then
        echo "Python packages"
    elif [ "$n" -lt "${n_all:-0}" ]; then
        echo "$n of $n_all C files"
    else
        echo "$n C files, linking"
    fi
}

started=$(mktemp)
"$@" &
command=$!
trap 'rm -f "$started"; kill "$command" 2>/dev/null || true' EXIT
every=10
[ ! -t 2 ] || every=1
while kill -0 "$command" 2>/dev/null; do
    sleep 1
    if [ $((SECONDS % every)) = 0 ]; then
        if [ -t 2 ]; then
            printf '\r  %d s: %-30s' "$SECONDS" "$(state)" >&2
        else
            printf '  %d s: %s\n' "$SECONDS" "$(state)" >&2
        fi
    fi
done
[ ! -t 2 ] || printf '\r%40s\r' '' >&2
status=0
wait "$command" || status=$?
trap 'rm -f "$started"' EXIT
exit "$status"
