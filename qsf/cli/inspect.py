"""``qsf inspect``: says what is in a .qsf file, and checks it."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from qsf.errors import QsfArgumentError, QsfError, clean
from qsf.file.family import family_of
from qsf.file.kinds import (
    KV_LENT,
    ROPE_NONE,
    ExpertScore,
    ExpertWeights,
    Ffn,
    GroupScore,
    LayerKind,
    Mixer,
    QkNorm,
)
from qsf.file.layout import (
    EXACT,
    Activation,
    Compression,
    Dtype,
    Layout,
    Norm,
    Positions,
    RopeScaling,
    Tensor,
    TensorType,
    Unit,
    dtype_name,
)
from qsf.file.reader import Reader
from qsf.foreign_json import JsonError, read_json
from qsf.report.record import read_meta
from qsf.report.text import full_lines, read_quality, table_lines, write_page
from qsf.shell import command, typer_app
from qsf.shell.output import check_not_a_source, check_output
from qsf.shell.progress import ProgressLine
from qsf.text.channels import ends_with_channels
from qsf.text.parts import read_text_parts
from qsf.text.sampling import end_ids, end_texts

PROGRAM = "qsf-inspect"

_EPILOG = """Examples:
  qsf inspect model.qsf
  qsf inspect model.qsf --tensors
  qsf inspect model.qsf --json > model.json
  qsf inspect model.qsf --verify
  qsf inspect model.qsf --quality
  qsf inspect model.qsf --report model.html

Exit codes: 0 done, 1 failed, 2 wrong options, 130 interrupted, 143 terminated.
"""

app = typer_app.create_app()
run = typer_app.runner(app, PROGRAM)


@app.command(epilog=_EPILOG)
def inspect(
    model: Annotated[Path, typer.Argument(help="a .qsf file", metavar="MODEL")],
    tensors: Annotated[bool, typer.Option("--tensors", help="list every tensor")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON for programs")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="check the checksum of every byte")
    ] = False,
    quality: Annotated[
        bool, typer.Option("--quality", help="show how well each tensor matches its source")
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(help="write the quality report as a web page", metavar="FILE.html"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace FILE.html if it exists")] = False,
    version: Annotated[bool, typer_app.version_option(PROGRAM)] = False,
) -> None:
    """Show what is in a .qsf file: model, sections, layers, tensors, sizes."""
    if model.is_dir():
        raise QsfError(command.explain_folder(model))
    if model.suffix.lower() == ".gguf" and model.is_file():
        if model.stat().st_size == 0:
            raise QsfError(f"{model} is an empty file: download or copy it again")
        made = f"{command.runnable()} convert {model} model.qsf"
        raise QsfError(f"{model} is a GGUF file, which {made} makes a .qsf file of")
    if quality and (verify or tensors):
        raise QsfArgumentError("--quality goes with --json and --report only")
    if report is not None:
        write_report(model, report, overwrite=force)
        if not (verify or quality or tensors or as_json):
            typer.echo(f"{clean(str(report))}: written")
            return
    with Reader(model) as reader:
        if verify:
            _verify(reader, as_json)
        elif quality and as_json:
            typer.echo(json.dumps(describe_quality(reader), indent=2))
        elif quality:
            for line in quality_lines(reader):
                typer.echo(clean(line))
        elif as_json:
            typer.echo(json.dumps(describe(reader), indent=2))
        else:
            for line in report_lines(reader, with_tensors=tensors):
                typer.echo(clean(line))


def _verify(reader: Reader, as_json: bool) -> None:
    line = ProgressLine(enabled=sys.stderr.isatty(), unit="MB", scale=2**20)
    try:
        reader.verify(line.update)
    finally:
        line.close()
    n_bytes, n_extents = reader.file_bytes, reader.n_extents
    if as_json:
        typer.echo(json.dumps({"ok": True, "bytes": n_bytes, "extents": n_extents}))
    else:
        typer.echo(f"ok: {n_bytes} bytes verified in {n_extents} extents")


def _parameters(tensors: tuple[Tensor, ...]) -> int:
    # Outlier tables repeat weights of their matrix, so they do not count as weights.
    return sum(t.n_rows * t.n_cols for t in tensors if t.layout != Layout.OUTLIERS)


def _all_tensors(reader: Reader) -> tuple[Tensor, ...]:
    """Return the tensors of all units; experts share those of their template."""
    return tuple(t for u in reader.units for t in u.tensors)


def _bits_per_weight(tensors: tuple[Tensor, ...]) -> float:
    return 8 * sum(t.data_bytes for t in tensors) / _parameters(tensors)


def _by_type(reader: Reader) -> list[dict[str, Any]]:
    """Return number, parameters and bytes of the tensors of each type and quantisation."""
    groups: dict[tuple[int, int], list[Tensor]] = {}
    for t in _all_tensors(reader):
        groups.setdefault((t.type, t.dtype), []).append(t)
    return [
        {
            "type": TensorType(kind).name.lower(),
            "dtype": dtype_name(dtype),
            "tensors": len(group),
            "parameters": _parameters(tuple(group)),
            "bytes": sum(t.data_bytes for t in group),
        }
        for (kind, dtype), group in sorted(groups.items())
    ]


def _header_fields(reader: Reader) -> dict[str, Any]:
    h = reader.header
    return {
        **asdict(h),
        "architecture": family_of(reader),
        "dtype": dtype_name(h.dtype),
        "activation": Activation(h.activation).name.lower(),
        "norm": Norm(h.norm).name.lower(),
        "positions": Positions(h.positions).name.lower(),
    }


def _arch_fields(reader: Reader) -> dict[str, Any]:
    scaling = RopeScaling(reader.arch.rope_scaling).name.lower()
    return {**asdict(reader.arch), "rope_scaling": scaling}


def describe(reader: Reader) -> dict[str, Any]:
    tensors = _all_tensors(reader)
    return {
        "path": str(reader.path),
        "file_bytes": reader.file_bytes,
        "header": _header_fields(reader),
        "arch": _arch_fields(reader),
        "layer_kinds": describe_kinds(reader),
        "rope_sets": describe_rope(reader),
        "sections": [asdict(s) for s in reader.sections.values()],
        "units": [
            {
                "idx": u.idx,
                "role": u.id.role.name.lower(),
                "layer": u.id.layer,
                "expert": u.id.expert,
                "off": u.off,
                "stored_bytes": u.stored_bytes,
                "raw_bytes": u.raw_bytes,
                "crc32": u.crc32,
                "dtype": dtype_name(u.dtype),
                "compression": Compression(u.compression).name.lower(),
                "importance": u.importance,
                "tensors": len(u.tensors),
            }
            for u in reader.units
        ],
        "tensors": [
            {
                **asdict(t),
                "type": TensorType(t.type).name.lower(),
                "dtype": dtype_name(t.dtype),
                "layout": Layout(t.layout).name.lower(),
            }
            for t in reader.tensors
        ],
        "tensors_by_type": _by_type(reader),
        "parameters": _parameters(tensors),
        "bits_per_weight": _bits_per_weight(tensors),
        "has_tokenizer": "TEXT" in reader.sections,
        "tokenizer": _tokenizer(reader),
        "has_chat_template": _has_template(reader),
        "end_tokens": _end_tokens(reader),
        "end_texts": _end_texts(reader),
        "meta": read_meta(reader),
    }


def report_lines(reader: Reader, *, with_tensors: bool) -> Iterator[str]:
    """Yield the lines for people; texts of the file are in them as they are."""
    tensors = _all_tensors(reader)
    yield f"{reader.path}: {reader.file_bytes:,} bytes"
    yield from _fields("model", _header_fields(reader))
    yield from _fields("architecture", _arch_fields(reader))
    yield from kind_lines(reader)
    yield from _report_sections(reader)
    yield from _report_units(reader)
    yield from _report_experts(reader)
    yield ""
    columns = {"tensor type": "<20", "quantisation": "<14"}
    columns |= {"tensors": ">7", "parameters": ">15,", "bytes": ">15,"}
    yield from table_lines(columns, (tuple(group.values()) for group in _by_type(reader)))
    if with_tensors:
        yield from _report_tensors(reader)
    yield ""
    yield (f"{_parameters(tensors):,} parameters, {_bits_per_weight(tensors):.2f} bits per weight")
    used = _tokenizer(reader)
    yield "tokenizer: no" if used is None else f"tokenizer: yes, that of the {used}"
    yield f"chat template: {'yes' if _has_template(reader) else 'no'}"
    ends = [f"{end['text']} ({end['id']})" for end in _end_tokens(reader)]
    ends += [f"the text {json.dumps(text)}" for text in _end_texts(reader)]
    yield f"an answer ends at: {', '.join(ends) or 'no token'}"
    yield from _report_meta(reader)


def _tokenizer(reader: Reader) -> str | None:
    """Return which program part encodes and decodes text for this file."""
    return "engine" if "TEXT" in reader.sections else None


def _end_tokens(reader: Reader) -> list[dict[str, Any]]:
    """Return the tokens that end an answer; their texts are "" without a tokenizer."""
    try:
        parts = read_text_parts(reader.path)
        ends = end_ids(reader.header.eos_id, parts.generation)
    except QsfError:  # --verify says what is damaged
        return []
    tokenizer = parts.tokenizer
    return [
        {
            "id": end,
            "text": ""
            if tokenizer is None
            else tokenizer.token_bytes(end, skip_special=False).decode("utf-8", "replace"),
        }
        for end in sorted(ends_with_channels(ends, tokenizer))
    ]


def _end_texts(reader: Reader) -> tuple[str, ...]:
    try:
        return end_texts(read_text_parts(reader.path).generation)
    except QsfError:
        return ()


def _has_template(reader: Reader) -> bool:
    """Return whether messages are rendered by a template of the file."""
    if "CHAT" not in reader.sections:
        return False
    try:
        chat = read_json(reader.read_section("CHAT"))
    except JsonError:
        return False
    return isinstance(chat, dict) and bool(chat.get("chat_template"))


def _fields(title: str, fields: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield title
    for name, value in fields.items():
        shown = f"{value:.7g}" if isinstance(value, float) else value
        yield f"  {name:<22} {'none' if value is None else shown}"


def _report_sections(reader: Reader) -> Iterator[str]:
    yield ""
    columns = {"section": "<8", "offset": ">15,", "bytes": ">15,", "crc32": ">9x", "required": ""}
    yield from table_lines(
        columns,
        (
            (s.tag, s.off, s.n_bytes, s.crc32, "yes" if s.is_required else "no")
            for s in reader.sections.values()
        ),
    )


def _matrix_types(unit: Unit) -> str:
    """Return the type of the unit's matrices, which for embedding and head is not the file's.

    Matrices of EXACT are not counted.
    """
    dtypes = {t.dtype for t in unit.tensors if t.layout == Layout.TILES and t.type not in EXACT}
    if len(dtypes) > 1:
        return dtype_name(Dtype.MIXED)
    return dtype_name(dtypes.pop()) if dtypes else "-"


def _report_units(reader: Reader) -> Iterator[str]:
    yield ""
    columns = {
        "unit": "<10", "stored bytes": ">15,", "raw bytes": ">15,", "type": "<14",
        "compression": "<12", "tensors": ">7",
    }  # fmt: skip
    is_measured = len({u.importance for u in reader.layers}) > 1  # chosen by calibration
    rows = (
        (
            u.id.name, u.stored_bytes, u.raw_bytes, _matrix_types(u),
            Compression(u.compression).name.lower(), len(u.tensors),
            *([u.importance] if is_measured else []),
        )
        for u in (reader.embedding, *reader.layers, reader.final)
    )  # fmt: skip
    yield from table_lines(columns | ({"importance": ">10.4g"} if is_measured else {}), rows)


def _report_experts(reader: Reader) -> Iterator[str]:
    """Yield a line for each run of layers with the same number of experts and chosen ones."""
    if not reader.experts:
        return
    yield ""
    columns = {"experts of": "<16", "experts": ">7", "chosen": ">6", "bytes of one": ">15"}
    yield from table_lines({**columns, "type": "<14"}, _expert_rows(reader))


def _expert_rows(reader: Reader) -> Iterator[tuple[str, int, int, str, str]]:
    kinds = enumerate(reader.layer_kinds)
    for (n_experts, n_chosen), run in itertools.groupby(
        kinds, lambda k: (k[1].n_experts, k[1].n_chosen)
    ):
        layers = [i for i, _ in run]
        if n_experts == 0:
            continue
        units = [u for i in layers for u in reader.experts_of(i)]
        sizes = sorted({u.raw_bytes for u in units})
        types = sorted({_matrix_types(u) for u in units})
        shown = " .. ".join(f"{size:,}" for size in dict.fromkeys((sizes[0], sizes[-1])))
        yield _runs(layers), n_experts, n_chosen, shown, ", ".join(types)


def _report_tensors(reader: Reader) -> Iterator[str]:
    yield ""
    columns = {
        "unit": ">5", "tensor": "<20", "index": ">5", "rows": ">9", "columns": ">9",
        "quantisation": "<14", "offset": ">13,", "bytes": ">13,",
    }  # fmt: skip
    rows = (
        (
            t.unit_idx, TensorType(t.type).name.lower(), t.index, t.n_rows, t.n_cols,
            dtype_name(t.dtype), t.data_off, t.data_bytes,
        )
        for t in reader.tensors
    )  # fmt: skip
    yield from table_lines(columns, rows)


def _report_meta(reader: Reader) -> Iterator[str]:
    """Yield the short values of META; the long ones, such as a report, are for ``--json``."""
    meta = read_meta(reader)
    if meta is None:
        yield "provenance: " + ("not readable" if "META" in reader.sections else "none")
        return
    yield "provenance"
    for name, value in meta.items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        for key, v in inner:
            if isinstance(v, str | int | float):
                yield f"  {(name + ' ' + key).strip():<22} {str(v)[:200]}"


_NAMES_OF: Final = {
    "activation": Activation,
    "ffn": Ffn,
    "qk_norm": QkNorm,
    "mixer": Mixer,
    "expert_score": ExpertScore,
    "expert_weights": ExpertWeights,
    "group_score": GroupScore,
}
_IN_HEAD: Final = ("n_heads", "n_kv_heads", "head_dim", "window_tokens", "rope_set")
_IN_HEAD_TOO: Final = ("ffn", "ffn_dim", "activation")


def describe_kinds(reader: Reader) -> list[dict[str, Any]]:
    """Return the kinds of layers in the order of their first layer, each with its layers."""
    return [{"layers": layers, **asdict(kind), **_names(kind)} for kind, layers in _kinds(reader)]


def describe_rope(reader: Reader) -> list[dict[str, Any]]:
    """Return the RoPE sets of the section ROPE, with the number of their frequencies."""
    return [{**asdict(s), "frequencies": len(s.frequencies)} for s in reader.rope_sets]


def kind_lines(reader: Reader) -> Iterator[str]:
    """Yield two lines or three for each kind of layer; none for files without KIND."""
    if "KIND" not in reader.sections:
        return
    yield ""
    yield "layers"
    for kind, layers in _kinds(reader):
        yield f"  {_runs(layers)}"
        window = f"window {kind.window_tokens}" if kind.window_tokens else "no window"
        rope = "no rotation" if kind.rope_set == ROPE_NONE else f"RoPE set {kind.rope_set}"
        names = _names(kind)
        ffn = f"FFN {names['ffn']} {kind.ffn_dim} {names['activation']}"
        if kind.has_attention:
            heads = f"{kind.n_heads} heads of {kind.head_dim}"
            yield f"    {heads}, {kind.n_kv_heads} for keys and values, {window}, {rope}, {ffn}"
        else:
            yield f"    {ffn}"
        others = [
            f"{field.name} {_shown(names.get(field.name, getattr(kind, field.name)))}"
            for field in fields(LayerKind)
            if field.name not in (*_IN_HEAD, *_IN_HEAD_TOO)
            and getattr(kind, field.name) != field.default
        ]
        if others:
            yield f"    {', '.join(others)}"
    for s in reader.rope_sets:
        pairs = "pairs side by side" if s.is_interleaved else "pairs of halves"
        least = f", contexts from {s.least_context}" if s.least_context else ""
        yield (f"  RoPE set {s.number}: {len(s.frequencies)} {pairs}, factor {s.factor:.7g}{least}")


def _kinds(reader: Reader) -> list[tuple[LayerKind, list[int]]]:
    layers_of: dict[LayerKind, list[int]] = {}
    for i, kind in enumerate(reader.layer_kinds):
        layers_of.setdefault(kind, []).append(i)
    return list(layers_of.items())


def _names(kind: LayerKind) -> dict[str, str]:
    names = {name: of(getattr(kind, name)).name.lower() for name, of in _NAMES_OF.items()}
    return names | ({"kv_source": "another model"} if kind.kv_source == KV_LENT else {})


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({len(value)})"
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def _runs(layers: Sequence[int]) -> str:
    """Return ascending layers as text: layers 0 .. 4, 6."""
    runs = []
    for _, run in itertools.groupby(enumerate(layers), lambda pair: pair[1] - pair[0]):
        numbers = [layer for _, layer in run]
        first, last = numbers[0], numbers[-1]
        runs.append(str(first) if first == last else f"{first} .. {last}")
    return f"{'layer' if len(layers) == 1 else 'layers'} {', '.join(runs)}"


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
    """Write the report of ``model`` as a page to ``out``; see `qsf.report.text.write_page`."""
    check_output(out, overwrite=overwrite)
    check_not_a_source(out, [model])
    write_page(model, out, overwrite=overwrite)


if __name__ == "__main__":
    sys.exit(run())
