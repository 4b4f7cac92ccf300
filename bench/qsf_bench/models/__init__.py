"""Models to measure: shapes, files of random weights, and the work that a file means."""
# SPDX-License-Identifier: Apache-2.0
