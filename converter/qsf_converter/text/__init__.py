"""The section TEXT: what of a tokenizer.json the engine encodes and decodes with."""
# SPDX-License-Identifier: Apache-2.0
