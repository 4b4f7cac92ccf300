"""The quality report: short after a conversion, whole for ``qsf inspect``, and as an HTML page.

The page needs nothing else: no script, no font, no network. It depends on the file alone, so
``qsf convert --report`` and ``qsf inspect --report`` write the same. Names come from an untrusted
checkpoint: `_text` escapes all of them.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qsf.errors import QsfError, clean
from qsf.file.family import family_of
from qsf.file.layout import dtype_name
from qsf.file.reader import Reader
from qsf.report.record import (
    Evaluation,
    LayerReport,
    Quality,
    Report,
    TensorReport,
    TypeSum,
    read_meta,
)
from qsf.shell.output import write_text

_MB = 2**20  # as qsf run and system monitors count
_MAX_TYPES = 5  # lines of the short table
_MAX_ACTIONS = 5
_N_WORST = 3
_N_LEAST = 5


def summary_lines(report: Report, name: str) -> Iterator[str]:
    """Yield the summary at the end of a conversion to the file ``name``: its size, its quality."""
    yield (
        f"{name}: {report.file_bytes / _MB:.1f} MB from {report.source_bytes / _MB:.1f} MB, "
        f"{report.bits_per_weight:.2f} bits a weight ({report.n_weights / 1e6:.1f} M weights)"
    )
    if report.compression is not None:
        yield report.compression
    evaluation = report.quality.evaluation
    if evaluation is not None:
        kl = "" if evaluation.kl_mean is None else f", KL mean {evaluation.kl_mean:.4g}"
        yield f"{_perplexity(evaluation)}{kl}"
    else:
        yield from (
            f"least like its source: {t.name}, {t.type}, error {percent_text(t.error)}"
            for t in report.quality.worst(1)
        )


# From which increase of the perplexity on, and what it means.
_GRADES = (
    (0.01, "as good as its original"),
    (0.03, "close to its original"),
    (0.10, "somewhat worse than its original"),
    (math.inf, "much worse than its original: a type with more bits is better"),
)


def verdict(quality: Quality) -> str:
    """Return how good the file is, in one sentence."""
    evaluation = quality.evaluation
    increase = None if evaluation is None else evaluation.increase
    if evaluation is None or increase is None or not math.isfinite(increase):
        (worst,) = quality.worst(1) or (None,)
        error = (
            "" if worst is None else f"; no tensor differs by more than {percent_text(worst.error)}"
        )
        return (
            f"Its answers were not compared with those of its original (--calibration does){error}."
        )
    grade = next(text for limit, text in _GRADES if increase < limit)
    agreement = evaluation.top1_agreement
    same = (
        ""
        if agreement is None
        else f", and {percent_text(agreement)} of its first choices are the same"
    )
    return (
        f"This file is {grade}: on {evaluation.text or 'a text'} it predicts "
        f"{percent_text(abs(increase))} {'worse' if increase > 0 else 'better'}{same}."
    )


def quality_lines(quality: Quality) -> Iterator[str]:
    """Yield the short report: types, the worst tensors, and the measurements of the model."""
    yield from _type_lines(quality.by_type())
    yield "least like their source:"
    for t in quality.worst(_N_WORST):
        yield (
            f"  {t.name:<16} {t.type:<8} cosine {t.cosine:.6f}  error {percent_text(t.error):>7}  "
            f"mse {t.mse:.3g}  max error {t.max_error:.3g}"
        )
    actions = quality.actions()
    shown = [f"{n} {action}" for action, n in actions[:_MAX_ACTIONS]]
    if len(actions) > _MAX_ACTIONS:
        shown.append(f"{sum(n for _, n in actions[_MAX_ACTIONS:])} otherwise")
    yield f"tensors: {', '.join(shown)}"
    if quality.layers:
        least = (f"{x.layer} ({x.importance:.3g})" for x in quality.least_important(_N_LEAST))
        yield f"least important layers: {', '.join(least)}"
    if quality.evaluation is not None:
        yield from evaluation_lines(quality.evaluation)


def evaluation_lines(e: Evaluation) -> Iterator[str]:
    """Yield the comparison with the original: perplexity, and KL divergence of the predictions."""
    where = f"{e.tokens} tokens of {e.text or 'a text'}, context {e.ctx_tokens}"
    protocol = f", {e.protocol}" if e.protocol else ""
    yield f"{_perplexity(e)}  [{where}{protocol}]"
    divergences = (("KL mean", e.kl_mean), ("KL 99 %", e.kl_p99))
    parts = [f"{name} {value:.4g}" for name, value in divergences if value is not None]
    if e.top1_agreement is not None:
        parts.append(f"same first choice {percent_text(e.top1_agreement)}")
    if parts:
        yield ", ".join(parts)


def _perplexity(e: Evaluation) -> str:
    against = ""
    if e.perplexity_original is not None:
        against = f", original {e.perplexity_original:.5g}"
    if e.increase is not None:
        against += f" ({100 * e.increase:+.2f} %)"
    return f"perplexity {e.perplexity:.5g}{against}"


def full_lines(quality: Quality) -> Iterator[str]:
    """Yield the whole report: the short one, then every tensor, every layer, the calibration."""
    yield from quality_lines(quality)
    if quality.n_unreadable:
        yield f"{quality.n_unreadable} entries of the report could not be read"
    yield ""
    yield from _tensor_lines(quality.tensors)
    if quality.layers:
        yield ""
        columns = {"layer": ">5", "importance": ">11.4g", "cosine": ">9.4g", "KL skipped": ">11.4g"}
        rows = ((x.layer, x.importance, x.cosine, x.kl_skipped) for x in quality.layers)
        yield from table_lines(columns, rows)
    if quality.calibration:
        yield ""
        yield "calibration"
        for name, value in quality.calibration.items():
            yield f"  {name:<22} {value}"


def table_lines(columns: Mapping[str, str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """Yield the titles and the rows of a table.

    ``columns`` has the format of the values by title, such as ">9,.1f"; None is shown as "-".
    """
    widths = [re.match(r"[<>]?\d*", form)[0] for form in columns.values()]  # type: ignore[index]
    yield " ".join(map(format, columns, widths)).rstrip()
    for row in rows:
        forms = zip(row, columns.values(), widths, strict=True)
        cells = (format("-", w) if value is None else format(value, f) for value, f, w in forms)
        yield " ".join(cells).rstrip()


def _type_lines(types: Sequence[TypeSum]) -> Iterator[str]:
    columns = {"type": "<14", "tensors": ">7", "weights": ">13,", "MB": ">9.2f", "bits": ">6.2f"}
    rows = (
        (t.type, t.n_tensors, t.n_weights, t.n_bytes / _MB, t.bits_per_weight, t.cosine)
        for t in types[:_MAX_TYPES]
    )
    yield from table_lines({**columns, "mean cosine": ">12.6f"}, rows)
    if len(types) > _MAX_TYPES:
        rest = types[_MAX_TYPES:]
        n_bytes = sum(t.n_bytes for t in rest)
        yield f"and {len(rest)} other types, {n_bytes / _MB:.2f} MB"


def _tensor_lines(tensors: Sequence[TensorReport]) -> Iterator[str]:
    columns = {
        "tensor": "<20", "type": "<14", "rows": ">8", "columns": ">8", "bits": ">6.2f",
        "cosine": ">9.6f", "error": ">8", "mse": ">9.3g", "max error": ">9.3g",
    }  # fmt: skip
    more = [
        (title, form, name)
        for title, form, name in (
            ("outliers", ">9", "outliers"), ("output err.", ">11", "output_error")
        )
        if any(getattr(t, name) is not None for t in tensors)
    ]  # fmt: skip
    columns |= {title: form for title, form, _ in more} | {" action": ""}
    rows = (
        (
            t.name, t.type, t.n_rows, t.n_cols, t.bits_per_weight, t.cosine, percent_text(t.error),
            t.mse, t.max_error, *(_share(getattr(t, name)) for _, _, name in more),
            f" {t.action}",
        )
        for t in tensors
    )  # fmt: skip
    yield from table_lines(columns, rows)


def percent_text(fraction: float) -> str:
    """Return a fraction in per cent with three digits."""
    return "0 %" if fraction == 0 else f"{100 * fraction:.3g} %"


def _share(value: float | None) -> str | None:
    return None if value is None else percent_text(value)


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
