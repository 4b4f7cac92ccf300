"""qsf run: text from a model."""
# SPDX-License-Identifier: Apache-2.0
