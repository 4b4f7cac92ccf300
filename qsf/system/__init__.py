"""What depends on the operating system: the one room that names what Windows has not.

Locks, open flags and reads at an offset, signals, limits, /proc, sessions of processes. A module
imports only small ones: what ``qsf-run`` imports counts in its budget.
"""
# SPDX-License-Identifier: Apache-2.0
