"""Converts HuggingFace models and GGUF files to .qsf files.

>>> from qsf_converter import convert
>>> report = convert("path/to/hf-model", "model.qsf", quant_type="4bit")  # doctest: +SKIP
>>> print(f"{report.bits_per_weight:.2f} bits a weight")  # doctest: +SKIP
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from qsf.report.record import Report
from qsf_converter.adapter_file import convert_adapter
from qsf_converter.convert import convert, convert_as
from qsf_converter.request import Request

__all__ = ["Report", "Request", "convert", "convert_adapter", "convert_as"]
