"""``qsf serve``: one process, one model, one memory budget, many requests at a time."""
# SPDX-License-Identifier: Apache-2.0
