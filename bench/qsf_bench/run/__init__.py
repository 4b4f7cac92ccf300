"""Measured processes: tasks, their workers, and the order of runs."""
# SPDX-License-Identifier: Apache-2.0
