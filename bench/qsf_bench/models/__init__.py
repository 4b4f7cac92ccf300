"""Models to measure: shapes, files of random weights, and their work."""
# SPDX-License-Identifier: Apache-2.0
