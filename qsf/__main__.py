"""``python -m qsf``: the commands, also where their scripts are not on the path."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import sys

from qsf.shell import entry

_COMMANDS = {
    "run": entry.run,
    "convert": entry.convert,
    "inspect": entry.inspect,
    "eval": entry.evaluate,
    "bench": entry.bench,
}

_USAGE = """\
usage: python -m qsf COMMAND ...

  run       generate text from a .qsf file            (the same as qsf-run)
  convert   make one from a HuggingFace model         (the same as qsf-convert)
  inspect   say what is in one, and check it          (the same as qsf-inspect)
  eval      measure how well it predicts a text       (the same as qsf-eval)
  bench     measure how fast it is, beside llama.cpp  (the same as python -m qsf.bench)

python -m qsf COMMAND --help says more.
"""


def main() -> int:
    """Start the command that is named first; without one, say which there are."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in _COMMANDS:
        sys.argv = [f"qsf-{name}", *sys.argv[2:]]
        _COMMANDS[name]()
    is_help = name in ("-h", "--help")
    (sys.stdout if is_help else sys.stderr).write(_USAGE)
    return 0 if is_help else 2


if __name__ == "__main__":
    sys.exit(main())
