"""Measured processes: tasks, the workers that do them, and who runs when."""
# SPDX-License-Identifier: Apache-2.0
