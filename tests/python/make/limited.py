"""A process with a limit of memory, in which hostile input is tried."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

# Each line of input is a path; each line of output what became of it. The limit is of private
# memory; what the interpreter and the sample take does not count.
_PROGRAM = """
import json, os, resource, sys
from qsf.errors import QsfError
from make.use_file import use_file
free_bytes = int(sys.argv[1])
use_file(sys.argv[2])
data_bytes = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_DATA, (data_bytes + free_bytes,) * 2)
resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
for line in sys.stdin:
    try:
        use_file(json.loads(line))
        outcome = "fine"
    except QsfError as error:
        outcome = type(error).__name__ + ": " + str(error)
    except BaseException as error:
        outcome = "WRONG " + repr(error)
    print(json.dumps(outcome), flush=True)
"""


def outcomes(sample: Path, paths: Iterable[Path], *, free_mb: int = 256) -> list[str]:
    """Return what becomes of each file in one process that may take ``free_mb`` MB.

    "fine", or the type and text of a QsfError; "WRONG" and what else was raised; "CRASH" and the
    exit code for the file that ends the process, which nothing should. ``sample`` is a good file:
    what using it takes is not counted.
    """
    names = [str(path) for path in paths]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(free_mb << 20), str(sample)],
        input="".join(json.dumps(name) + "\n" for name in names),
        capture_output=True,
        encoding="utf-8",
        cwd=Path(__file__).parents[1],
        check=False,
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    if len(results) < len(names):
        results.append(f"CRASH {done.returncode}: {names[len(results)]}: {done.stderr[-300:]}")
    return results
