"""The quality report as one HTML page that needs nothing else: no script, no font, no network.

The page is made of what the file holds, so that ``qsf-convert --report`` and
``qsf-inspect --report`` write the same. Names come from a checkpoint somebody else made:
everything goes through `text`.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qsf.errors import QsfError
from qsf.file.family import family_of
from qsf.file.layout import dtype_name
from qsf.file.reader import Reader
from qsf.page import html as parts
from qsf.page.svg import (
    N_CATEGORIES,
    Cell,
    columns_chart,
    heat_map,
    is_log_scale,
    legend,
    scale_ends,
    shades,
    stacked_bar,
    text,
)
from qsf.report.meta import read_meta
from qsf.report.record import Evaluation, LayerReport, Quality, TensorReport
from qsf.shell.output import write_text

_MB = 2**20
_MAX_ROWS = 5_000  # of the table; also the largest models have fewer tensors
_MAX_KINDS = 32
_MAX_COLUMNS = 400
_N_BARS = 12
_N_WORST = 8


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What the page says of the file beside its quality."""

    name: str
    file_bytes: int
    n_layers: int
    architecture: str
    dtype: str
    source: str = ""
    provenance: dict[str, str] = field(default_factory=dict)


def write_page(model: Path, out: Path, *, overwrite: bool) -> None:
    """Write the page of the file ``model`` to ``out``, complete or not at all.

    Raises QsfError when the file has no quality report, QsfArgumentError when ``out`` exists and
    ``overwrite`` is false, QsfIOError when the system refuses, QsfFormatError for a bad file.
    """
    with Reader(model) as reader:
        facts, quality = read_file(reader)
    write_text(out, page(facts, quality), overwrite=overwrite)


def read_file(reader: Reader) -> tuple[FileFacts, Quality]:
    """Return what the page of an open file needs. Raises QsfError when it has no report."""
    meta = read_meta(reader) or {}
    quality = Quality.from_meta(meta.get("quality"))
    if quality is None:
        raise QsfError(f"{reader.path}: the file holds no quality report; convert the model again")
    source, converter = _object(meta, "source"), _object(meta, "converter")
    named = {
        "Converted by": f"{_short(converter, 'name')} {_short(converter, 'version')}".strip(),
        "Licence of the weights": _short(meta, "licence"),
        "SHA-256 of the source weights": _short(source, "weights_sha256"),
    }
    facts = FileFacts(
        name=reader.path.name,
        file_bytes=reader.file_bytes,
        n_layers=reader.header.n_layers,
        architecture=family_of(reader),
        dtype=dtype_name(reader.header.dtype),
        source=_short(source, "name"),
        provenance={name: value for name, value in named.items() if value},
    )
    return facts, quality


def _object(meta: dict[str, Any], key: str) -> dict[str, Any]:
    value = meta.get(key)
    return value if isinstance(value, dict) else {}


def _short(entry: dict[str, Any], key: str) -> str:
    value = entry.get(key)
    return value[:200] if isinstance(value, str) else ""


def page(facts: FileFacts, quality: Quality) -> str:
    """Return the page."""
    origin = f", converted from {facts.source}" if facts.source else ""
    sections = [
        _sizes(facts, quality),
        *_maps(quality),
        _worst(quality),
        _importance(quality.layers),
        _calibration(quality),
        _table(quality.tensors),
    ]
    body = "\n".join(section for section in sections if section)
    return parts.document(
        "Quality report",
        facts.name,
        f"{facts.architecture}, {facts.n_layers} layers, {facts.dtype}{origin}",
        f"{_figures(facts, quality)}\n{body}",
        parts.facts(facts.provenance),
        title=f"{facts.name}: quality report",
    )


# ---- numbers ----


def _percent(fraction: float) -> str:
    """Three digits, also when they are zeros: figures stand below each other."""
    value = 100 * fraction
    if value == 0:
        return "0 %"
    return f"{value:#.3g} %" if value < 100 else f"{value:.5g} %"


def _share(fraction: float) -> str:
    return f"{100 * fraction:.1f} %" if fraction >= 0.001 else "< 0.1 %"


def _size(n_bytes: float) -> str:
    return f"{n_bytes / _MB:.1f} MB" if n_bytes >= _MB else f"{n_bytes / 1024:.1f} kB"


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


# ---- the figures at the top ----


def _figures(facts: FileFacts, quality: Quality) -> str:
    n_weights = quality.n_weights
    worst = quality.worst(1)[0]
    figures = [
        ("Size of the file", _size(facts.file_bytes), f"{facts.file_bytes:,} bytes"),
        ("Weights", f"{n_weights / 1e6:,.1f} M", _count(len(quality.tensors), "tensor")),
        ("Bits a weight", f"{facts.file_bytes * 8 / n_weights:.2f}", "whole file"),
    ]
    if quality.evaluation is not None:
        figures += _evaluation_figures(quality.evaluation)
    figures.append(("Least cosine of a tensor", f"{worst.cosine:.5g}", worst.name))
    return parts.figures(figures) + _measured(quality)


def _evaluation_figures(e: Evaluation) -> list[tuple[str, str, str]]:
    original = ""
    if e.perplexity_original is not None:
        original = f"original {e.perplexity_original:.5g}"
    if e.increase is not None:
        original += f", {100 * e.increase:+.2f} %"
    figures = [("Perplexity", f"{e.perplexity:.5g}", original)]
    if e.kl_mean is not None:
        figures.append(("KL divergence, mean", f"{e.kl_mean:.3g}", "nats a token"))
    if e.kl_p99 is not None:
        figures.append(("KL divergence, 99 %", f"{e.kl_p99:.3g}", "of the tokens are below"))
    if e.top1_agreement is not None:
        figures.append(
            (
                "Same first choice",
                f"{100 * e.top1_agreement:.1f} %",
                "of the tokens, as the original",
            )
        )
    return figures


def _measured(quality: Quality) -> str:
    e = quality.evaluation
    if e is None:
        note = "Perplexity and KL divergence against the original were not measured."
    else:
        protocol = f", protocol {e.protocol}" if e.protocol else ""
        note = (
            f"Measured on {e.text or 'a text'}: {_count(e.tokens, 'token')} with a context of "
            f"{e.ctx_tokens:,}{protocol}."
        )
    if quality.n_unreadable:
        note += f" {quality.n_unreadable} entries of the report could not be read."
    return f'<p class="note">{text(note)}</p>'


# ---- sizes ----


def _sizes(facts: FileFacts, quality: Quality) -> str:
    types = quality.by_type()
    total = sum(entry.n_bytes for entry in types)
    shown = list(types[: N_CATEGORIES - 1]) if len(types) > N_CATEGORIES else list(types)
    named = [(entry.type, entry.n_bytes, entry.bits_per_weight) for entry in shown]
    category = {name: idx for idx, (name, _, _) in enumerate(named)}
    if len(shown) < len(types):
        rest = types[len(shown) :]
        rest_bytes = sum(entry.n_bytes for entry in rest)
        bits = rest_bytes * 8 / sum(entry.n_weights for entry in rest)
        named.append(("others", rest_bytes, bits))
    pieces = [
        (n_bytes / total, idx, f"{name}: {_size(n_bytes)}, {_share(n_bytes / total)}")
        for idx, (name, n_bytes, _) in enumerate(named)
    ]
    keys = "".join(
        f'<li><i class="c{idx}"></i>{text(name)} <span class="soft">{bits:.2f} bits, '
        f"{_size(n_bytes)} ({_share(n_bytes / total)})</span></li>"
        for idx, (name, n_bytes, bits) in enumerate(named)
    )
    stack = stacked_bar("bytes by type: " + "; ".join(p[2] for p in pieces), pieces)
    note = f"{_size(total)} of tensors by type, and by what they are in the model."
    if total > facts.file_bytes:
        note += f" Compressed, the whole file takes {_size(facts.file_bytes)}."
    return parts.section(
        "Where the bytes are",
        note,
        f'{stack}<ul class="keys">{keys}</ul>{_kind_bars(quality.tensors, category)}',
    )


def _kind_bars(tensors: Sequence[TensorReport], category: dict[str, int]) -> str:
    """Bytes by kind; a bar has the colour of the type that holds most of them."""
    n_bytes: dict[str, float] = {}
    types: dict[str, Counter[str]] = {}
    for tensor in tensors:
        n_bytes[tensor.kind] = n_bytes.get(tensor.kind, 0.0) + tensor.n_bytes
        types.setdefault(tensor.kind, Counter())[tensor.type] += int(tensor.n_bytes) + 1
    ordered = sorted(n_bytes.items(), key=lambda item: -item[1])
    total, largest = sum(n_bytes.values()), ordered[0][1]
    rows = [
        (kind, size / largest, category.get(types[kind].most_common(1)[0][0], N_CATEGORIES - 1),
         _size(size), _share(size / total))
        for kind, size in ordered[:_N_BARS]
    ]  # fmt: skip
    rest = sum(size for _, size in ordered[_N_BARS:])
    if rest:
        name = f"{len(ordered) - _N_BARS} others"
        rows.append((name, rest / largest, N_CATEGORIES - 1, _size(rest), _share(rest / total)))
    return parts.bars(rows)


# ---- heat maps ----


def _maps(quality: Quality) -> Iterator[str]:
    """Yield the plots by layer and kind of matrix: what they lost, and what they cost."""
    matrices = [t for t in quality.tensors if t.layer is not None and t.n_rows > 1]
    kinds = list(dict.fromkeys(t.kind for t in matrices))[:_MAX_KINDS]
    layers = sorted({t.layer for t in matrices if t.layer is not None})[:_MAX_COLUMNS]
    if not matrices:
        return
    errors = [t.error for t in matrices]
    note = (
        "Relative error of each matrix: the root of its squared error over its squared weights. "
        "Layers from left to right; colours follow the logarithm. Norms and biases are left out."
    )
    if max(errors) > 0:
        yield parts.section(
            "Error by layer and matrix",
            note,
            _map("error by layer and matrix", kinds, layers, matrices, "e", errors, _percent)
            + legend("e", *map(_percent, scale_ends(errors, is_log=True))),
        )
    else:
        yield parts.section(
            "Error by layer and matrix", "All matrices are stored without loss.", ""
        )
    bits = [t.bits_per_weight for t in matrices]
    bits_note = "Bits a weight of each matrix, with its scales: more where they matter more."
    if max(bits) - min(bits) < 1e-6:
        bits_note = f"All matrices of the layers are stored with {bits[0]:.4g} bits a weight."
    low, high = scale_ends(bits, is_log=False)
    yield parts.section(
        "Bits by layer and matrix",
        bits_note,
        _map("bits by layer and matrix", kinds, layers, matrices, "b", bits, _bits)
        + legend("b", f"{_bits(low)} bits", f"{_bits(high)} bits"),
    )


def _bits(bits: float) -> str:
    return f"{bits:.4g}"


def _map(
    label: str,
    kinds: Sequence[str],
    layers: Sequence[int],
    matrices: Sequence[TensorReport],
    palette: str,
    values: Sequence[float],
    show: Callable[[float], str],
) -> str:
    cells = {
        (t.kind, t.layer): Cell(
            shade,
            show(value).removesuffix(" %"),
            f"{t.name}: {t.type}, {t.bits_per_weight:.4g} bits, error {_percent(t.error)}, "
            f"cosine {t.cosine:.5g}, {t.action}",
        )
        for t, value, shade in zip(
            matrices, values, shades(values, is_log=palette == "e"), strict=True
        )
        if t.layer is not None
    }
    return parts.scroll(label, heat_map(label, kinds, layers, cells, palette=palette))


# ---- the rest ----


def _worst(quality: Quality) -> str:
    ordered = sorted(quality.tensors, key=lambda t: -t.error)[:_N_WORST]
    ordered = [t for t in ordered if t.error > 0]
    if not ordered:
        return ""
    rows = [(t.name, t.error / ordered[0].error, 1, _percent(t.error), t.type) for t in ordered]
    return parts.section(
        "Largest errors", "The tensors that are least like their source.", parts.bars(rows)
    )


def _importance(layers: Sequence[LayerReport]) -> str:
    if not layers:
        return ""
    ordered = sorted(layers, key=lambda layer: layer.layer)[:_MAX_COLUMNS]
    values = [layer.importance for layer in ordered]
    n_marked = max(1, round(0.3 * len(ordered)))
    marked = {
        layer.layer for layer in sorted(ordered, key=lambda layer: layer.importance)[:n_marked]
    }
    scale = " The axis is logarithmic." if is_log_scale(values) else ""
    titles = [_layer_title(layer) for layer in ordered]
    label = "importance by layer"
    chart = columns_chart(
        label, [layer.layer for layer in ordered], values, titles, frozenset(marked)
    )
    return parts.section(
        "Layer importance",
        f"What the model loses without a layer, measured on the calibration text.{scale} "
        f"The {n_marked} least important are marked. Cosine: of what goes into the layer and what "
        "comes out. KL skipped: mean divergence without it, in nats.",
        parts.scroll(label, chart) + _layer_table(ordered),
    )


def _layer_title(layer: LayerReport) -> str:
    title = f"layer {layer.layer}: importance {layer.importance:.4g}"
    if layer.cosine is not None:
        title += f", cosine of input and output {layer.cosine:.4g}"
    if layer.kl_skipped is not None:
        title += f", KL when skipped {layer.kl_skipped:.4g}"
    return title


def _layer_table(layers: Sequence[LayerReport]) -> str:
    heads = ("Layer", "Importance", "Cosine", "KL skipped")
    rows = [
        (
            str(layer.layer),
            f"{layer.importance:.4g}",
            "" if layer.cosine is None else f"{layer.cosine:.4g}",
            "" if layer.kl_skipped is None else f"{layer.kl_skipped:.4g}",
        )
        for layer in layers
    ]
    return parts.scroll("layers", parts.table(heads, rows, {0}), kind="table tall")


def _calibration(quality: Quality) -> str:
    actions = {action: _count(n, "tensor") for action, n in quality.actions()[:24]}
    done = parts.section("What was done", "How the tensors got their values.", parts.facts(actions))
    if not quality.calibration:
        return done
    facts = {
        name: f"{value:,}" if isinstance(value, int) else f"{value:.5g}"
        if isinstance(value, float) else str(value)
        for name, value in quality.calibration.items()
    }  # fmt: skip
    note = "The text that errors and importance were measured on."
    return done + parts.section("Calibration", note, parts.facts(facts))


def _table(tensors: Sequence[TensorReport]) -> str:
    """All tensors in file order; columns without any value are left out."""
    columns: list[tuple[str, Callable[[TensorReport], str]]] = [
        ("Tensor", lambda t: t.name),
        ("Type", lambda t: t.type),
        ("Done", lambda t: t.action),
        ("Rows", lambda t: f"{t.n_rows:,}"),
        ("Columns", lambda t: f"{t.n_cols:,}"),
        ("Bits", lambda t: f"{t.bits_per_weight:.4g}"),
        ("Error", lambda t: _percent(t.error)),
        ("Cosine", lambda t: f"{t.cosine:.5g}"),
        ("MSE", lambda t: f"{t.mse:.3g}"),
        ("Max error", lambda t: f"{t.max_error:.3g}"),
    ]
    if any(t.outliers is not None for t in tensors):
        columns.append(("Outliers", lambda t: "" if t.outliers is None else _percent(t.outliers)))
    if any(t.output_error is not None for t in tensors):
        columns.append(
            ("Output error", lambda t: "" if t.output_error is None else _percent(t.output_error))
        )
    columns.append(("Source", lambda t: t.source))
    rows = [tuple(show(t) for _, show in columns) for t in tensors[:_MAX_ROWS]]
    more = f" The first {_MAX_ROWS:,} are shown." if len(tensors) > _MAX_ROWS else ""
    heads = [name for name, _ in columns]
    table = parts.table(heads, rows, {0, 1, 2, heads.index("Source")})
    note = f"{_count(len(tensors), 'tensor')} in the order of the file.{more}"
    return parts.section(
        "All tensors", note, parts.scroll("all tensors", table, kind="table tall"), is_long=True
    )
