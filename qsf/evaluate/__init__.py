"""qsf eval: how well a model predicts a text."""
# SPDX-License-Identifier: Apache-2.0
