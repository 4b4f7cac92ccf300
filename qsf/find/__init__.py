"""From a model's name to its .qsf file: names, the HuggingFace cache, kept conversions.

A .qsf file is recognised by its first bytes (``names.is_qsf``), without importing this package.
Downloads and conversions run in processes of their own, which end before the model is opened, so
that their memory is not in the budget.
"""
# SPDX-License-Identifier: Apache-2.0
