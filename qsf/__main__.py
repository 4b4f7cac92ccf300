"""``python -m qsf``: the command ``qsf``, also where its script is not on the path."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from qsf.shell import entry

if __name__ == "__main__":
    entry.front()
