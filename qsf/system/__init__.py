"""What depends on the operating system: the only room that names what Windows and macOS lack.

Locks, open flags and reads at an offset, signals, limits, /proc, sessions of processes. A module
imports only small ones: the imports of ``qsf run`` count in its budget.
"""
# SPDX-License-Identifier: Apache-2.0
