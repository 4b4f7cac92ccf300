"""Calibration: rounding guided by the model's computations on a text."""
# SPDX-License-Identifier: Apache-2.0
