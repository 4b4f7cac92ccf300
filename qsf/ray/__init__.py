"""Several machines by Ray (``pip install 'qsf[ray]'``): answers to the prompts of a dataset.

Only this package imports Ray, and only when it is used.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from qsf.ray.batch import map
from qsf.ray.cluster import connect

__all__ = ["connect", "map"]
