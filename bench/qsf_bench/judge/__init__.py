"""From measured times to results: limits of the machine, rows, ratios, comparisons."""
# SPDX-License-Identifier: Apache-2.0
