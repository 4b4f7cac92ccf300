"""The section TEXT: the part of a tokenizer.json that the engine encodes and decodes with."""
# SPDX-License-Identifier: Apache-2.0
