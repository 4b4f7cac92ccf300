"""The original model, computed in f32: what calibration and evaluation compare with."""
# SPDX-License-Identifier: Apache-2.0
