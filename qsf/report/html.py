"""The quality report as one HTML page that needs nothing else: no script, no font, no network.

The page depends on the file alone, so ``qsf convert --report`` and ``qsf inspect --report`` write
the same. Names come from an untrusted checkpoint: `_text` escapes all of them.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from qsf.errors import QsfError, clean
from qsf.file.family import family_of
from qsf.file.layout import dtype_name
from qsf.file.reader import Reader
from qsf.report.meta import read_meta
from qsf.report.record import LayerReport, Quality, TensorReport
from qsf.report.text import full_lines, percent_text, verdict
from qsf.shell.output import write_text

_MAX_KINDS = 32
_MAX_LAYERS = 400
_STRONGEST = 60  # of the colour; text on a stronger one is hard to read
_STYLE = """
:root{color-scheme:light dark;--page:#faf9f6;--ink:#1c1d1f;--soft:#5b6067;--line:#e4e1da}
@media(prefers-color-scheme:dark){
:root{--page:#131518;--ink:#e9e9ea;--soft:#a4a9b1;--line:#30343b}}
body{margin:0 auto;max-width:1100px;padding:20px;background:var(--page);color:var(--ink);
font:16px/1.5 system-ui,sans-serif}
h1{margin:0;overflow-wrap:anywhere}
p{color:var(--soft);overflow-wrap:anywhere}
div{overflow:auto;max-height:85vh}
pre,table{font:13px/1.45 ui-monospace,Menlo,Consolas,monospace}
table{border-collapse:separate;border-spacing:0}
th,td{padding:3px 9px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
thead th{position:sticky;top:0;background:var(--page)}
@media print{div{max-height:none;overflow:visible}}
"""


def write_page(model: Path, out: Path, *, overwrite: bool) -> None:
    """Write the page of the file ``model`` to ``out``, complete or not at all.

    Raises QsfError when the file has no quality report, QsfArgumentError when ``out`` exists and
    ``overwrite`` is false, QsfIOError when the system refuses, QsfFormatError for a bad file.
    """
    with Reader(model) as reader:
        text = page(reader)
    write_text(out, text, overwrite=overwrite)


def read_quality(reader: Reader) -> Quality:
    """Return the quality report of an open file. Raises QsfError if it has none."""
    quality = Quality.from_meta((read_meta(reader) or {}).get("quality"))
    if quality is None:
        raise QsfError(f"{reader.path}: the file holds no quality report; convert the model again")
    return quality


def page(reader: Reader) -> str:
    """Return the page of an open file. Raises QsfError if it has no report."""
    quality = read_quality(reader)
    name = _text(reader.path.name)
    notes = "".join(f"<p>{_text(note)}</p>\n" for note in _origin(reader))
    lines = _text("\n".join(map(clean, full_lines(quality))))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{name}: quality report</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{name}</h1>
<p><strong>{_text(verdict(quality))}</strong></p>
{notes}{_map(quality)}{_scrolled("the whole report", f"<pre>{lines}</pre>")}
</body>
</html>
"""


def _text(value: str) -> str:
    """Return ``value`` escaped for HTML, as text or attribute."""
    return html.escape("\n".join(map(clean, value.split("\n"))))


def _origin(reader: Reader) -> Iterator[str]:
    """Yield the model's family and size, and its source."""
    header, meta = reader.header, read_meta(reader) or {}
    bits = dtype_name(header.dtype)
    yield f"{family_of(reader)}, {header.n_layers} layers, {bits}, {reader.file_bytes:,} bytes"
    source, converter = _object(meta, "source"), _object(meta, "converter")
    named = {
        "converted from": _short(source, "name"),
        "stored as": _short(source, "stored"),
        "by": f"{_short(converter, 'name')} {_short(converter, 'version')}".strip(),
        "licence": _short(meta, "licence"),
        "SHA-256 of the source weights": _short(source, "weights_sha256"),
    }
    if any(named.values()):
        yield ", ".join(f"{label} {value}" for label, value in named.items() if value)


def _object(meta: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = meta.get(key)
    return value if isinstance(value, dict) else {}


def _short(entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key)
    return value[:200] if isinstance(value, str) else ""


# ---- the map of layers ----


def _map(quality: Quality) -> str:
    """Return a table of types and errors by layer and matrix, coloured by error."""
    matrices = {
        (t.layer, t.kind): t for t in quality.tensors if t.layer is not None and t.n_rows > 1
    }
    if not matrices:
        return ""
    kinds = list(dict.fromkeys(kind for _, kind in matrices))[:_MAX_KINDS]
    strengths = _strengths(t.error for t in matrices.values())
    importances = {layer.layer: layer for layer in quality.layers}
    heads = ["layer", *(["importance"] if importances else []), *kinds]
    rows = [
        f"<tr><th>{layer}</th>"
        + (_importance(importances.get(layer)) if importances else "")
        + "".join(_cell(matrices.get((layer, kind)), strengths) for kind in kinds)
        + "</tr>\n"
        for layer in sorted({layer for layer, _ in matrices if layer is not None})[:_MAX_LAYERS]
    ]
    note = (
        "Type and relative error of each matrix: the root of its squared error over its squared "
        "weights. The colour follows the logarithm of the error. Importance is what the model "
        "loses without a layer, measured on the calibration text."
    )
    head = "".join(f"<th>{_text(name)}</th>" for name in heads)
    body = f"<thead><tr>{head}</tr></thead>\n<tbody>{''.join(rows)}</tbody>"
    return f"<p>{note}</p>\n{_scrolled('errors by layer', f'<table>{body}</table>')}"


def _strengths(errors: Iterable[float]) -> dict[float, int]:
    """Return the strength of each error's colour in per cent, by its logarithm.

    The scale spans at least a factor of 4, so that almost equal errors look alike.
    """
    logs = {error: math.log(error) for error in errors if error > 0}
    low, high = min(logs.values(), default=0.0), max(logs.values(), default=0.0)
    span = max(high - low, math.log(4))
    return {error: round(_STRONGEST * (1 - (high - log) / span)) for error, log in logs.items()}


def _cell(tensor: TensorReport | None, strengths: Mapping[float, int]) -> str:
    if tensor is None:
        return "<td></td>"
    strength = strengths.get(tensor.error, 0)
    style = f"background:rgb(224 112 32/{strength}%)"
    about = f"{tensor.name}: {tensor.bits_per_weight:.4g} bits, {tensor.action}"
    return (
        f'<td style="{style}" title="{_text(about)}"><small>{_text(tensor.type)}</small> '
        f"{percent_text(tensor.error)}</td>"
    )


def _importance(layer: LayerReport | None) -> str:
    return f"<td>{'' if layer is None else f'{layer.importance:.4g}'}</td>"


def _scrolled(label: str, content: str) -> str:
    """Wrap an element that may be wider than the screen: mouse and keyboard can scroll it."""
    return f'<div role="region" tabindex="0" aria-label="{label}">{content}</div>'
