"""From what a user calls a model to its .qsf file: names, the HuggingFace cache, conversions kept.

Nothing here is imported where a .qsf file is named: its first bytes are enough (``names.is_qsf``).
Downloads and conversions run in processes of their own, which have ended before the model is
opened, so that none of their memory is in the budget.
"""
# SPDX-License-Identifier: Apache-2.0
