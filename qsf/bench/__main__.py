"""Where ``python -m qsf.bench`` starts."""
# SPDX-License-Identifier: Apache-2.0

from qsf.shell import entry

if __name__ == "__main__":
    entry.bench()
