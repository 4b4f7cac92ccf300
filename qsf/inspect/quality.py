"""``qsf-inspect --quality`` and ``--report``: the file's quality report."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsf.report.html import read_quality, write_page
from qsf.report.text import full_lines
from qsf.shell.output import check_not_a_source, check_output

if TYPE_CHECKING:
    from qsf.file.reader import Reader


def quality_lines(reader: Reader) -> Iterator[str]:
    """Yield the whole report for people. Raises QsfError if the file has no report."""
    quality = read_quality(reader)
    bits = reader.file_bytes * 8 / quality.n_weights
    yield f"{reader.path}: {reader.file_bytes:,} bytes, {bits:.2f} bits a weight"
    yield from full_lines(quality)


def describe_quality(reader: Reader) -> dict[str, Any]:
    """Return the output of ``--quality --json``. Raises QsfError if the file has no report."""
    quality = read_quality(reader)
    return {
        "path": str(reader.path),
        "file_bytes": reader.file_bytes,
        "bits_per_weight": reader.file_bytes * 8 / quality.n_weights,
        "tensors_by_type": [
            {
                "type": total.type,
                "tensors": total.n_tensors,
                "parameters": total.n_weights,
                "bits_per_weight": total.bits_per_weight,
                "cosine": total.cosine,
            }
            for total in quality.by_type()
        ],
        "quality": quality.meta(),
    }


def write_report(model: Path, out: Path, *, overwrite: bool) -> None:
    """Write the report of ``model`` as a page to ``out``; see `qsf.report.html.write_page`."""
    check_output(out, overwrite=overwrite)
    check_not_a_source(out, [model])
    write_page(model, out, overwrite=overwrite)
