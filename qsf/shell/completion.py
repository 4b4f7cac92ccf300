"""``qsf completion``: scripts with which bash, zsh and fish complete commands and options.

A script is made once from the help of each command; a TAB then starts no program.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from qsf.shell.entry import VERBS

_USAGE = """\
Usage: qsf completion [--help] bash|zsh|fish

  bash    qsf completion bash > ~/.local/share/bash-completion/completions/qsf
  zsh     qsf completion zsh > ~/.zfunc/_qsf      (with ~/.zfunc in fpath)
  fish    qsf completion fish > ~/.config/fish/completions/qsf.fish

For one session: source <(qsf completion bash), or qsf completion fish | source
"""

_BASH = """\
_qsf() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" options=""
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{verbs}" -- "$word") $(compgen -f -- "$word"))
    elif [[ "$word" == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}}
complete -o filenames -F _qsf qsf
"""

_ZSH = """\
#compdef qsf
_qsf() {{
    local -a verbs options
    verbs=({verbs})
    case "$words[2]" in
{cases}
    esac
    if (( CURRENT == 2 )); then
        _describe command verbs
        _files
    elif [[ "$PREFIX" == -* ]]; then
        compadd -- $options
    else
        _files
    fi
}}
_qsf "$@"
"""


def main() -> int:
    """Print the script for the shell that is named, and return the exit code."""
    words = sys.argv[1:]
    if words in (["-h"], ["--help"]):
        sys.stdout.write(_USAGE)
        return 0
    if len(words) != 1 or words[0] not in ("bash", "zsh", "fish"):
        sys.stderr.write(f"qsf completion: error: one shell is needed: bash, zsh or fish\n{_USAGE}")
        return 2
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        options = dict(zip(VERBS, pool.map(options_of, VERBS), strict=True))
    sys.stdout.write({"bash": _bash, "zsh": _zsh, "fish": _fish}[words[0]](options))
    return 0


def options_of(verb: str) -> list[str]:
    shows_all = "--help-all" if verb in ("run", "chat") else "--help"
    done = subprocess.run(
        [sys.executable, "-c", "from qsf.shell.entry import front; front()", verb, shows_all],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
    )
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", done.stdout)))


def _bash(options: dict[str, list[str]]) -> str:
    cases = "\n".join(f'    {verb}) options="{" ".join(o)}" ;;' for verb, o in options.items())
    return _BASH.format(cases=cases, verbs=" ".join(options))


def _zsh(options: dict[str, list[str]]) -> str:
    cases = "\n".join(f"    {verb}) options=({' '.join(o)}) ;;" for verb, o in options.items())
    verbs = " ".join(f"'{verb}:{VERBS[verb][1]}'" for verb in options)
    return _ZSH.format(cases=cases, verbs=verbs)


def _fish(options: dict[str, list[str]]) -> str:
    lines = [
        f"complete -c qsf -n __fish_use_subcommand -a {verb} -d '{VERBS[verb][1]}'"
        for verb in options
    ]
    lines += [
        f"complete -c qsf -n '__fish_seen_subcommand_from {verb}' -l {option.removeprefix('--')}"
        for verb, flags in options.items()
        for option in flags
    ]
    return "\n".join(lines) + "\n"
