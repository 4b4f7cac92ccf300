"""Calibration: rounding by what the model computes on a text."""
# SPDX-License-Identifier: Apache-2.0
