#!/usr/bin/env bash
# Runs COMMAND and says meanwhile how long it has taken and how many files FOLDER has compiled.
# Usage: tools/show_progress.sh FOLDER COMMAND...
set -euo pipefail
folder=$1
shift

"$@" &
command=$!
trap 'kill "$command" 2>/dev/null || true' EXIT
every=10
[ ! -t 2 ] || every=1
while kill -0 "$command" 2>/dev/null; do
    sleep 1
    if [ $((SECONDS % every)) = 0 ]; then
        n=$( (find "$folder" -name '*.o' 2>/dev/null || true) | wc -l) # it is not there at first
        if [ -t 2 ]; then
            printf '\r  %d s, %d C files compiled ' "$SECONDS" "$n" >&2
        else
            printf '  %d s, %d C files compiled\n' "$SECONDS" "$n" >&2
        fi
    fi
done
[ ! -t 2 ] || printf '\r%40s\r' '' >&2
status=0
wait "$command" || status=$?
trap - EXIT
exit "$status"
