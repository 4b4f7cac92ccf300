"""RoPE of the original model: frequencies, and the rotation of heads."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from qsf.file.layout import Arch, Header, Positions, RopeScaling
from qsf_converter.sources.checkpoint import Float32Array


def rotate(
    x: Float32Array, cos: Float32Array, sin: Float32Array, is_interleaved: bool
) -> Float32Array:
    """RoPE on the first 2 * n angles of each head; x [heads, tokens, head_dim]."""
    n = cos.shape[1]
    out: Float32Array = x.copy()
    first, second = (
        (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
        if is_interleaved
        else (slice(0, n), slice(n, 2 * n))
    )
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def rope_frequencies(header: Header, arch: Arch) -> NDArray[np.float64]:
    """Angles per position, one for each pair of dimensions; scaled as ``scaling`` says."""
    if header.positions != Positions.ROPE:
        return np.empty(0)
    n_dims = arch.rope_dims or header.head_dim
    frequencies = header.rope_theta ** -(np.arange(0, n_dims, 2) / n_dims)
    if arch.rope_scaling == RopeScaling.LINEAR:
        return np.asarray(frequencies / arch.rope_factor)
    if arch.rope_scaling == RopeScaling.LLAMA3:
        turns = arch.rope_original_tokens * frequencies / (2 * math.pi)
        low, high = arch.rope_low_freq_factor, arch.rope_high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return np.asarray(frequencies * (kept + (1 - kept) / arch.rope_factor))
    return np.asarray(frequencies)
