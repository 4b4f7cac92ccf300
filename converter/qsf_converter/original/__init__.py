"""The original model, computed in f32, for calibration and evaluation."""
# SPDX-License-Identifier: Apache-2.0
