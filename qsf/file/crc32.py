"""CRC32 of a run of zeros in logarithmic time, for files with holes."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import Final

_POLYNOMIAL: Final = 0xEDB88320  # bit 31 is x^0, as in the checksum itself


def _times(a: int, b: int) -> int:
    """Multiply two polynomials modulo the CRC32 polynomial."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def crc32_of_zeros(n_bytes: int, crc32: int = 0) -> int:
    """Return ``zlib.crc32(bytes(n_bytes), crc32)`` in time proportional to log2(n_bytes)."""
    power = 1 << 31  # x^(8 n_bytes): n_bytes zeros multiply the register by it
    square = 1 << 23  # x^8
    left = n_bytes
    while left:
        if left & 1:
            power = _times(power, square)
        square = _times(square, square)
        left >>= 1
    return _times(crc32 ^ 0xFFFFFFFF, power) ^ 0xFFFFFFFF
