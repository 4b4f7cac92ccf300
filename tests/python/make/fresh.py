"""Bytes as a new file, for tests that write one path again and again."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from pathlib import Path


def write_fresh(path: Path, data: bytes | bytearray) -> None:
    """Write a new file in the place of an old one.

    Some file systems write a file that is truncated and filled again to the disk at once, which
    takes milliseconds.
    """
    path.unlink(missing_ok=True)
    path.write_bytes(data)
