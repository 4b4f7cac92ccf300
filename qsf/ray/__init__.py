"""Several machines by Ray (``pip install 'qsf[ray]'``): many prompts, or one model over them.

Only this package imports Ray, and only when it is used.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from qsf.ray.batch import map
from qsf.ray.cluster import connect
from qsf.ray.stages import open

__all__ = ["connect", "map", "open"]
