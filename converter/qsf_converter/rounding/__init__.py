"""From weights to quantised tiles: the type and the rounding of each tensor."""
# SPDX-License-Identifier: Apache-2.0
