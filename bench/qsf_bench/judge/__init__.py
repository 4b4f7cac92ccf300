"""From measured times to results: limits of the machine, rows, ratios."""
# SPDX-License-Identifier: Apache-2.0
