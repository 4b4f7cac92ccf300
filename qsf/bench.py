"""``python -m qsf.bench`` and ``qsf bench``: the name of the benchmark, `qsf_bench`.

It stands on top of qsf and qsf_converter, and nothing imports it: this runs it by its name.
"""
# SPDX-License-Identifier: Apache-2.0

from qsf.shell import entry

if __name__ == "__main__":
    entry.bench()
