"""``qsf plan``: what a memory budget costs in speed, before a model is run."""
# SPDX-License-Identifier: Apache-2.0
