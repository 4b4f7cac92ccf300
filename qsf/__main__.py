"""``python -m qsf``: the command ``qsf``, even if its script is not in PATH."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from qsf.shell import entry

if __name__ == "__main__":
    entry.front()
