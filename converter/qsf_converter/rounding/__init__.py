"""From weights to quantised tiles: what each tensor becomes, and how it is rounded."""
# SPDX-License-Identifier: Apache-2.0
