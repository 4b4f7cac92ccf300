"""``qsf convert``: a HuggingFace model directory, or a GGUF file, becomes one .qsf file.

Exit codes: 0 done, 1 the model cannot be converted or the system refused, 2 wrong usage,
130 interrupted, 143 terminated. Every error is one line on stderr.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from qsf.errors import QsfArgumentError, error_line
from qsf.file.reader import Reader
from qsf.native.binding import describe_machine
from qsf.report.record import Report
from qsf.report.text import full_lines, summary_lines, write_page
from qsf.shell import command, typer_app
from qsf.shell.output import check_output
from qsf.shell.progress import ProgressLine, duration_text
from qsf.system import process
from qsf_converter.adapter_file import convert_adapter
from qsf_converter.calibrate.state import folder_of
from qsf_converter.convert import convert_as
from qsf_converter.request import (
    AUTO,
    DEFAULT_CALIBRATION_TOKENS,
    DEFAULT_TERNARY_RULE,
    LEAST_CALIBRATION_TOKENS,
    MIXED,
    Request,
    bytes_of,
)
from qsf_converter.rounding.compression import COMPRESSIONS, DEFAULT_COMPRESSION
from qsf_converter.rounding.plan import DEFAULT_QUANT_TYPE, ENCODER_QUANT_TYPE, KEEP, QUANT_TYPES
from qsf_converter.rounding.tiles import bits_per_weight
from qsf_converter.sources.checkpoint import KEPT, MXFP4
from qsf_converter.sources.checkpoint_gguf import readable_types
from qsf_converter.sources.gguf_config import families
from qsf_converter.sources.quantised import METHODS

PROGRAM = "qsf-convert"

_MB = 2**20  # as qsf run and system monitors count

_EPILOG = f"""Examples:
  qsf convert examples/tiny-llama tiny.qsf
  qsf convert examples/tiny-llama tiny.qsf --quant-type 8bit --force
  qsf convert examples/tiny-llama tiny.qsf --quant-type 2bit --embed-type 4bit
  qsf convert examples/tiny-llama tiny.qsf --compress zstd
  qsf convert examples/tiny-llama tiny.qsf --report tiny.html
  qsf convert examples/tiny-llama tiny.qsf --quant-type 3bit --calibration bundled
  qsf convert examples/tiny-llama tiny.qsf --target-size 1.5MB --calibration my.txt
  qsf convert examples/tiny-llama tiny.qsf --lora my-adapter --lora other:0.5
  qsf convert --lora my-adapter --for tiny.qsf my-adapter.qsf

{
    textwrap.fill(
        "Bits a weight: "
        + ", ".join(f"{name} {bits_per_weight(t):g}" for name, t in QUANT_TYPES.items())
        + ". The ternary types are for models trained so. Other models lose much below 4 bits, "
        "less if calibrated.",
        78,
        break_on_hyphens=False,
    )
}

Exit codes: 0 done, 1 failed, 2 wrong options, 130 interrupted, 143 terminated.
"""

app = typer_app.create_app()


# ---- the options, in the order of --help ----

_Model = Annotated[
    Path,
    typer.Argument(
        help="directory with config.json and weights, a .gguf file, or a name such as "
        "Qwen/Qwen3-4B",
        metavar="MODEL",
    ),
]
_Out = Annotated[
    Path | None,
    typer.Argument(help="file to write", metavar="OUT", show_default=False),
]
_For = Annotated[
    Path | None,
    typer.Option(
        "--for",
        help="do not convert a model: write OUT, a small file with the adapter of --lora, for "
        "`qsf run FILE --lora OUT`. --quant-type is 8bit (default) or f16",
        metavar="FILE",
    ),
]
_QuantType = Annotated[
    str | None,
    typer.Option(
        help=f"type of the layers' matrices: {', '.join(QUANT_TYPES)}; mixed, which chooses "
        "one for each matrix; auto, which chooses and fits them within the bytes of llama.cpp's "
        "Q4_K_M; or keep, which stores the blocks of a quantised GGUF file as they are",
        show_default=f"{AUTO} up to 2B weights, else {DEFAULT_QUANT_TYPE}; {ENCODER_QUANT_TYPE} "
        f"for encoders; {MIXED} with a target size; ternary for such weights; {KEEP} for a "
        "quantised GGUF file",
    ),
]
_EmbedType = Annotated[
    str | None,
    typer.Option(
        help="type of the embeddings and the output head: one of the same. Below 8 bits, the "
        "rows of frequent tokens in a large head of its own keep 8",
        show_default="8bit, f16 with --quant-type f16, chosen with mixed, kept with keep",
    ),
]
_TernaryRule = Annotated[
    str,
    typer.Option(
        help="how ternary types round: search finds the best scale of each block and keeps "
        "ternary weights exact; absmean is BitNet's rule, one scale for each matrix"
    ),
]
_Lora = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        help="merge an adapter of low rank into the weights before they are rounded: a folder of "
        "PEFT (LoRA, DoRA) or a GGUF file, with :0.5 behind it at half its strength; may be given "
        "several times",
        metavar="ADAPTER[:SCALE]",
    ),
]
_Compress = Annotated[
    str,
    typer.Option(
        help=f"compression of the layers: {', '.join(COMPRESSIONS)}. A layer that it makes less "
        "than 3 % smaller is stored as it is",
        metavar="TYPE",
    ),
]
_ReportOut = Annotated[
    Path | None,
    typer.Option(
        "--report", help="also write the quality report as a web page", metavar="FILE.html"
    ),
]
_Force = Annotated[bool, typer.Option("--force", help="replace OUT, and the report, if they exist")]
_Yes = Annotated[bool, typer.Option("--yes", "-y", help="download a model without asking")]
_AllowNoTokenizer = Annotated[
    bool,
    typer.Option(
        "--allow-no-tokenizer",
        help="convert a model without a usable tokenizer too: qsf run refuses such a file, Python "
        "can use it on token ids",
    ),
]
_AllowNoTemplate = Annotated[
    bool,
    typer.Option(
        "--allow-no-template",
        help="convert a model whose chat template cannot be rendered too: without it, the file "
        "continues texts and does not answer",
    ),
]
_NoMeasure = Annotated[
    bool,
    typer.Option(
        "--no-measure",
        help="leave the file's defaults at f16 keys and values, and at activations of 16 bits with "
        "the weights of a GGUF file, without measuring whether 8 bits would do",
    ),
]
_Threads = Annotated[
    int | None, typer.Option(help="threads that quantise", min=1, show_default="one per core")
]
_Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="at the end, say what became of the tensors")
]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print warnings and errors only")]
_CalibrationText = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        help="round by what the model computes on this text: a file of text or JSONL, or "
        "'bundled' for our own. The result is much closer to the original and takes minutes to "
        "hours; the same command continues an interrupted run",
        metavar="FILE",
    ),
]
_CalibrationTokens = Annotated[
    int | None,
    typer.Option(
        help="tokens of that text",
        min=LEAST_CALIBRATION_TOKENS,
        show_default=str(DEFAULT_CALIBRATION_TOKENS),
    ),
]
_TargetSize = Annotated[
    float | None,
    typer.Option(
        help="largest size of OUT, in MB or as 1.5GB; a type is chosen for each tensor",
        metavar="SIZE",
        parser=typer_app.parser_of(typer_app.megabytes),
    ),
]
_TargetBpw = Annotated[
    float | None, typer.Option(help="the same as bits of OUT for each weight", min=0.01, max=32)
]
_Version = Annotated[bool, typer_app.version_option(PROGRAM)]


def _list_families(wanted: bool) -> None:
    if wanted:
        for title, names, dialects in families():
            typer.echo(f"{title}: {', '.join([*names, *(f'GGUF {name}' for name in dialects)])}")
        for method, (what, _) in METHODS.items():
            typer.echo(f"Weights quantised by {method}: {what}")
        typer.echo(f"Weights in GGUF, kept: {', '.join((*KEPT, MXFP4))}")
        typer.echo(f"Weights in GGUF, read: {', '.join(readable_types())}")
        raise typer.Exit


_Families = Annotated[
    bool,
    typer.Option(
        "--families",
        help="list the families of models and the quantised weights that can be converted",
        callback=_list_families,
        is_eager=True,
    ),
]


@app.command(name=PROGRAM, epilog=_EPILOG)
def convert_command(
    model_dir: _Model,
    out: _Out = None,
    quant_type: _QuantType = None,
    embed_type: _EmbedType = None,
    ternary_rule: _TernaryRule = DEFAULT_TERNARY_RULE,
    compress: _Compress = DEFAULT_COMPRESSION,
    lora: _Lora = None,
    base: _For = None,
    report_out: _ReportOut = None,
    force: _Force = False,
    allow_no_tokenizer: _AllowNoTokenizer = False,
    allow_no_template: _AllowNoTemplate = False,
    no_measure: _NoMeasure = False,
    threads: _Threads = None,
    verbose: _Verbose = False,
    quiet: _Quiet = False,
    yes: _Yes = False,
    calibration: _CalibrationText = None,
    calibration_tokens: _CalibrationTokens = None,
    target_size: _TargetSize = None,
    target_bpw: _TargetBpw = None,
    families_: _Families = False,
    version: _Version = False,
) -> None:
    """Convert a HuggingFace or GGUF model to one .qsf file with everything needed to run it."""
    if base is not None:
        given = {
            "--embed-type": embed_type, "--calibration": calibration, "--report": report_out,
            "--calibration-tokens": calibration_tokens, "--target-size": target_size,
            "--target-bpw": target_bpw, "--threads": threads, "--no-measure": no_measure,
            "--compress": compress != DEFAULT_COMPRESSION,
            "--ternary-rule": ternary_rule != DEFAULT_TERNARY_RULE,
        }  # fmt: skip
        for flag, value in given.items():
            if value not in (None, False):
                raise QsfArgumentError(f"{flag} is for a model, and --for makes an adapter")
        places = [model_dir, out]
        _convert_adapter(lora or [], base, places, quant_type, is_forced=force, is_quiet=quiet)
        return
    if out is None:
        raise QsfArgumentError("OUT is missing: qsf convert MODEL OUT")
    if calibration is None and calibration_tokens is not None:
        raise QsfArgumentError("--calibration-tokens is only for --calibration")
    if not model_dir.exists():
        from qsf.find.prepare import find_source

        model_dir = find_source(str(model_dir), is_quiet=quiet, is_yes=yes)
    _check_report(report_out, out, model_dir, is_forced=force)
    request = Request(
        quant_type=quant_type,
        embed_type=embed_type,
        calibration=calibration,
        calibration_tokens=calibration_tokens or DEFAULT_CALIBRATION_TOKENS,
        target_bytes=bytes_of(target_size),
        target_bpw=target_bpw,
        ternary_rule=ternary_rule,
        compress=compress,
        needs_tokenizer=not allow_no_tokenizer,
        needs_template=not allow_no_template,
        overwrite=force,
        measures_costs=not no_measure,
        n_threads=threads,
        adapters=tuple(lora or ()),
    )
    report = _convert(request, model_dir, out, is_quiet=quiet)
    for warning in report.warnings:
        print(f"{command.typed(PROGRAM)}: warning: {error_line(warning)}", file=sys.stderr)
    if report_out is not None:
        write_page(out, report_out, overwrite=force)
    if not quiet:
        _print_summary(report, out, report_out, is_verbose=verbose)
        if not allow_no_tokenizer:
            file = shlex.quote(str(out))
            with Reader(out) as reader:
                arch = reader.arch
            words = f'run {file} --prompt "Once upon a time"'
            words = f"embed {file} -" if arch.is_encoder else words
            words = f"run MODEL --draft {file}" if arch.target_dim else words
            print(f"next: {command.runnable()} {words}")


def _convert_adapter(
    lora: list[str],
    base: Path,
    places: list[Path | None],
    quant_type: str | None,
    *,
    is_forced: bool,
    is_quiet: bool,
) -> None:
    (out, more) = places
    if len(lora) != 1 or out is None or more is not None:
        raise QsfArgumentError("with --for it is: qsf convert --lora ADAPTER --for FILE OUT")
    n, rank = convert_adapter(lora[0], base, out, quant_type=quant_type, overwrite=is_forced)
    if is_quiet:
        return
    size = out.stat().st_size / _MB
    print(f"{out}: {n} matrices of rank {rank} at most, {size:.1f} MB, for {base}")
    print(f"next: {command.runnable()} run {shlex.quote(str(base))} --lora {shlex.quote(str(out))}")


def _convert(request: Request, model_dir: Path, out: Path, *, is_quiet: bool) -> Report:
    """Convert with progress on the terminal; if interrupted, say what the next call can reuse."""
    n_tokens = None if request.calibration is None else request.calibration_tokens
    progress = _Progress(enabled=not is_quiet, n_tokens=n_tokens)
    try:
        return convert_as(request, model_dir, out, progress=progress.update, phase=progress.begin)
    except command.StoppedError as stopped:
        saved = folder_of(out)
        if request.calibration is not None and saved.is_dir():
            stopped.outcome = f"the same command continues from there ({saved})"
        raise
    finally:
        progress.close()


_PURPOSES = {"measuring the arithmetic": ", once; qsf convert --no-measure leaves it out"}


class _Progress:
    """Progress lines, one after another: first for measurements, then for the conversion.

    ``n_tokens``: of a calibration, which counts them, as if all layers took one after another.
    """

    def __init__(self, *, enabled: bool, n_tokens: int | None) -> None:
        self._enabled = enabled
        self._n_tokens = n_tokens
        self._line: ProgressLine | None = None
        self._is_converting = False

    def begin(self, name: str) -> Callable[[int, int], None]:
        self.close()
        if self._enabled:
            print(f"{name}{_PURPOSES.get(name, '')} ...", file=sys.stderr, flush=True)
        self._line = ProgressLine(enabled=self._enabled, unit="tokens")
        self._is_converting = False
        return self._line.update

    def update(self, done: int, total: int) -> None:
        unit, scale = "MB", float(_MB)
        if self._n_tokens is not None:
            unit, scale = "tokens", max(total, 1) / self._n_tokens
        if self._line is None or not self._is_converting:
            self.close()
            self._is_converting = True
            self._line = ProgressLine(enabled=self._enabled, unit=unit, scale=scale)
        self._line.update(done, total)

    def close(self) -> None:
        if self._line is not None:
            self._line.close()


def _check_report(report_out: Path | None, out: Path, model_dir: Path, *, is_forced: bool) -> None:
    """Refuse an output that would fail after the long work, or destroy another file."""
    if report_out is None:
        return
    check_output(report_out, overwrite=is_forced)
    if report_out.resolve() == out.resolve():
        raise QsfArgumentError(f"the report and the model are the same file: {out}")
    if report_out.exists() and report_out.resolve().parent == model_dir.resolve():
        raise QsfArgumentError(f"{report_out} is a file of the model itself")


def main() -> NoReturn:
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    process.unmap_freed_arrays()
    return typer_app.run(app, arguments, program=PROGRAM, when_cut_off="nothing was written")


def _print_summary(report: Report, out: Path, report_out: Path | None, *, is_verbose: bool) -> None:
    memory = f", peak memory {describe_machine().peak_bytes / _MB:.0f} MB"
    size, *quality = summary_lines(report, str(out))
    print(f"{size} in {duration_text(report.elapsed_s)}{memory}")
    for line in report.notes:
        print(line)
    for line in full_lines(report.quality) if is_verbose else quality:
        print(line)
    if report_out is not None:
        print(f"report: {report_out}")


if __name__ == "__main__":
    main()
