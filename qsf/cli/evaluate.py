"""``qsf eval``: how well a .qsf file predicts a text, and how far it is from its original.

Results go to standard output, progress and errors to standard error.

Exit codes: 0 done, 1 failed, 2 wrong options, 130 interrupted, 143 terminated.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from qsf.errors import QsfArgumentError, QsfError, QsfFormatError, QsfMemoryError, one_line
from qsf.evaluate.evaluation import (
    DEFAULT_PROTOCOL,
    PROTOCOLS,
    Evaluation,
    LogitSource,
    ShortenedLogits,
    checked_stride,
    default_ctx_tokens,
    evaluate,
    judged_kv_type,
    perplexity_change,
    working_bytes,
)
from qsf.file.foreign_text import text_of
from qsf.file.open_file import is_qsf_file
from qsf.file.reader import Reader
from qsf.kv import kv_type_name, parse_kv_policy
from qsf.model import Model
from qsf.native import binding
from qsf.native.opening import budget_mb, does_not_fit
from qsf.options import ModelOptions, call_with
from qsf.report.record import cost_lines, read_meta
from qsf.shell import command, typer_app
from qsf.shell.progress import ProgressLine
from qsf.system.signals import Watcher
from qsf.text.parts import require_tokenizer

PROGRAM = "qsf-eval"

_MB = 2**20
_MAX_TEXT_BYTES = 16 << 20

_EPILOG = """Examples:
  qsf eval model.qsf --text test.txt
  qsf eval model.qsf --text test.txt --against tiny-llama
  qsf eval model.qsf --text test.txt --against other.qsf --max-tokens 20000
  qsf eval model.qsf --text test.txt --protocol llama.cpp --ctx 512
  qsf eval model.qsf --text test.txt --protocol sliding --ctx 1024 --stride 512
  qsf eval model.qsf --text test.txt --json - > figures.json

Protocols: which tokens are scored. Compare figures of one protocol and --ctx.
  windows    windows side by side, all tokens but the first of each (the papers')
  llama.cpp  the same windows, begun with BOS, the second half (llama-perplexity)
  sliding    windows that overlap, what is new in each (HuggingFace, --stride)
  repeated   windows that end with 64 of their own tokens, 48 of these: what was read is found again

Exit codes: 0 done, 1 failed, 2 wrong options, 130 interrupted, 143 terminated.
"""

app = typer_app.create_app()
run = typer_app.runner(app, PROGRAM)


@dataclass(frozen=True, slots=True)
class _Request:
    """The command line, checked."""

    model: Path
    text: str
    ctx_tokens: int
    protocol: str
    stride_tokens: int | None
    max_tokens: int | None
    against: Path | None
    opening: ModelOptions  # of both models together


@dataclass(frozen=True, slots=True)
class _RunCache:
    """The evaluation of the same windows with the default KV cache of qsf run.

    Attributes:
        kv_type: type of the default cache.
        perplexity: with that cache.
        change_percent: how much larger the perplexity is than with the cache of the evaluation.
        change_error: standard error of the change, from paired tokens.
    """

    kv_type: str
    perplexity: float
    change_percent: float
    change_error: float


# ---- the options, in the order of --help ----

_Model = Annotated[Path, typer.Argument(help="a .qsf file", metavar="MODEL")]
_Text = Annotated[
    Path,
    typer.Option("--text", help='text to predict, UTF-8, at most 16 MB; "-" is standard input'),
]
_Ctx = Annotated[
    int | None,
    typer.Option(
        "--ctx", help="tokens of a window", min=2, show_default="the model's, at most 2048"
    ),
]
_Stride = Annotated[
    int | None,
    typer.Option(
        help="tokens from one window to the next, with --protocol sliding only",
        min=1,
        show_default="half of --ctx",
    ),
]
_Protocol = Annotated[
    str, typer.Option(help=f"which tokens are scored: {', '.join(PROTOCOLS)}; see below")
]
_Against = Annotated[
    Path | None,
    typer.Option(
        help="compare with the original, a HuggingFace model directory, which is computed in "
        "full precision, or with another .qsf file",
        metavar="MODEL",
    ),
]
_MaxTokens = Annotated[
    int | None, typer.Option(help="only so many tokens of the text", min=2, show_default="all")
]
_JsonOut = Annotated[
    str | None,
    typer.Option(
        "--json",
        help='write the figures as JSON; "-" prints nothing else on standard output',
        metavar="FILE|-",
    ),
]
_KvType = Annotated[
    str | None,
    typer_app.model_option(
        "kv_type", default_help="f16, and again that of qsf run; f32 with --exact"
    ),
]
_KvPolicy = Annotated[
    str,
    typer_app.model_option(
        "kv_policy",
        help="compare with the same file without this policy, by position: window:W, or recompute "
        "in half of --ctx",
        default_help="none",
    ),
]
_Exact = Annotated[bool, typer_app.model_option("exact")]
_Quality = Annotated[float, typer_app.model_option("quality")]
_Threads = Annotated[int | None, typer_app.model_option("threads")]
_RamBudget = Annotated[
    Any,
    typer_app.model_option(
        "ram_budget",
        help="ceiling in MB of 2^20 bytes for the whole process; auto: what the machine has to "
        "give to the .qsf files; 0: none. An original comes on top: one layer as f32, and at "
        "most 512 MB",
    ),
]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="show no progress")]
_Version = Annotated[bool, typer_app.version_option(PROGRAM)]


@app.command(name=PROGRAM, epilog=_EPILOG)
def evaluate_command(
    model: _Model,
    text: _Text,
    ctx: _Ctx = None,
    stride: _Stride = None,
    protocol: _Protocol = DEFAULT_PROTOCOL,
    against: _Against = None,
    max_tokens: _MaxTokens = None,
    json_out: _JsonOut = None,
    kv_type: _KvType = None,
    kv_policy: _KvPolicy = "none",
    exact: _Exact = False,
    quality: _Quality = 1.0,
    threads: _Threads = None,
    ram_budget: _RamBudget = "auto",
    quiet: _Quiet = False,
    version: _Version = False,
) -> None:
    """Measure how well a .qsf file predicts a text: perplexity and bits per byte.

    With --against also how far it is from another model, above all from the one it was made of.
    """
    _check_paths(model, against, json_out)
    require_tokenizer(model)
    ram_budget = budget_mb(ram_budget)
    ctx_tokens = _ctx_tokens(model, ctx)
    checked_stride(protocol, ctx_tokens, stride)
    request = _Request(
        model=model,
        text=_read_text(text, ram_budget),
        ctx_tokens=ctx_tokens,
        protocol=protocol,
        stride_tokens=stride,
        max_tokens=max_tokens,
        against=model if against is None and kv_policy != "none" else against,
        opening=ModelOptions(
            ram_budget=ram_budget,
            threads=threads,
            max_seq_len=ctx_tokens,
            draft="off",
            exact=exact,
            quality=quality,
            kv_type=judged_kv_type(kv_type, is_exact=exact),
            kv_policy=kv_policy,
        ),
    )
    evaluation, _ = _measure(request, is_quiet=quiet)
    run_cache = None
    if kv_type is None and not exact and kv_policy == "none":
        run_cache = _measure_run_cache(request, evaluation, is_quiet=quiet)
    _publish(request, evaluation, run_cache, text, json_out)


# ---- checks of the options ----


def _check_paths(model: Path, against: Path | None, json_out: str | None) -> None:
    """Refuse early what would fail after minutes of work."""
    if model.is_dir():
        raise QsfError(command.explain_folder(model))
    if against is not None and not against.exists():
        raise QsfError(f"{against}: no such file or directory")
    if json_out is None or json_out == "-":
        return
    if Path(json_out).is_dir() or not Path(json_out).resolve().parent.is_dir():
        raise QsfError(f"--json {json_out}: no file can be written there")


def _ctx_tokens(model: Path, ctx_tokens: int | None) -> int:
    with Reader(model) as reader:
        limit = reader.header.max_tokens
    if ctx_tokens is not None and ctx_tokens > limit:
        raise QsfArgumentError(f"--ctx {ctx_tokens} is longer than the model's context of {limit}")
    return default_ctx_tokens(limit) if ctx_tokens is None else ctx_tokens


def _read_text(path: Path, budget_mb: Any) -> str:
    """Return the text: no line end is changed.

    A text takes up to four times its bytes, so within a budget it may have a 16th of that.
    """
    is_budget = isinstance(budget_mb, int) and budget_mb > 0
    most = min(_MAX_TEXT_BYTES, budget_mb * _MB // 16) if is_budget else _MAX_TEXT_BYTES
    name = "standard input" if str(path) == "-" else str(path)
    with command.open_input(path) as file:
        data = command.read_at_most(file, most + 1)
    if len(data) > most:
        limit = f"a --ram-budget of {budget_mb} MB" if most < _MAX_TEXT_BYTES else "any text"
        raise QsfError(
            f"{name} is too long: more than {most} bytes, the most for {limit}: give a part of it"
        )
    text = text_of(data, name)
    if not text:
        raise QsfError(f"{name} is empty: there is no text to predict")
    return text


# ---- measuring ----


def _measure(request: _Request, *, is_quiet: bool) -> tuple[Evaluation, str]:
    """Evaluate; return the figures and the type of the model's KV cache."""
    line = ProgressLine(enabled=not is_quiet, unit="tokens")

    def leave(number: int) -> None:
        line.close()
        command.leave_at_once(number)  # nothing has been written

    try:
        with Watcher(leave), _opened(request) as (model, reference):
            plan = model.info.plan
            evaluation = evaluate(
                _source(model, request.ctx_tokens),
                request.text,
                ctx_tokens=request.ctx_tokens,
                protocol=request.protocol,
                stride_tokens=request.stride_tokens,
                max_tokens=request.max_tokens,
                against=reference,
                progress=line.update,
            )
    finally:
        line.close()
    if not is_quiet:
        command.say_line(plan.text)
    return evaluation, kv_type_name(plan.kv_k_bits, plan.kv_v_bits)


def _source(model: Model, ctx_tokens: int) -> Model | LogitSource:
    policy = parse_kv_policy(model.info.plan.kv_policy)
    if policy is None or model.info.plan.ctx_tokens >= ctx_tokens:
        return model
    return ShortenedLogits(model, policy, ctx_tokens)


def _measure_run_cache(request: _Request, evaluation: Evaluation, *, is_quiet: bool) -> _RunCache:
    """Evaluate the same windows again, with the KV cache that qsf run has by default."""
    opening = replace(request.opening, kv_type=None)
    cached, kv_type = _measure(replace(request, against=None, opening=opening), is_quiet=is_quiet)
    change = perplexity_change(cached.token_nll, evaluation.token_nll)
    return _RunCache(kv_type, cached.perplexity, *change)


@contextlib.contextmanager
def _opened(request: _Request) -> Iterator[tuple[Model, Model | LogitSource | None]]:
    with contextlib.ExitStack() as stack:
        budget_mb = request.opening.ram_budget
        if isinstance(budget_mb, int):
            budget_mb = max(1, budget_mb - _working_mb(request))
        reference: Model | LogitSource | None = None
        if request.against is not None and _is_qsf(request.against):
            # The second model counts the memory of the first as the process's, so it gets the whole
            # budget.
            half_mb = _half_budget(request, budget_mb)
            reference = stack.enter_context(_open(request, request.against, half_mb))
        model = stack.enter_context(_open(request, request.model, budget_mb, is_judged=True))
        if request.against is not None and reference is None:
            from qsf_converter.original.logits import open_original

            reference = stack.enter_context(open_original(request.against))
        yield model, reference


def _is_qsf(path: Path) -> bool:
    return is_qsf_file(path) or (path.is_file() and path.suffix == ".qsf")


def _working_mb(request: _Request) -> int:
    """Return the MB that measuring takes after the models have been opened: an upper bound."""
    with Reader(request.model) as reader:
        n_vocab = reader.header.n_vocab
    n_sources = 1 if request.against is None else 2
    return -(-working_bytes(n_vocab, n_sources, request.text, request.max_tokens) // _MB)


def _half_budget(request: _Request, budget_mb: int | str | None) -> int | None:
    """Return a budget in MB that leaves equal room for the other model."""
    if budget_mb is None:
        return None
    if isinstance(budget_mb, str):
        opening = replace(request.opening, quality=1.0, kv_policy="none")
        plan = call_with(Model.plan, str(request.against), opening)
        budget_mb = (plan.budget_bytes or plan.ceiling_bytes) // _MB
    process_mb = binding.describe_machine().resident_bytes // _MB
    return max(1, process_mb + (budget_mb - process_mb) // 2)


def _open(request: _Request, path: Path, budget_mb: Any, *, is_judged: bool = False) -> Model:
    opening = replace(request.opening, ram_budget=budget_mb)
    if path != request.model:
        opening = replace(opening, quality=1.0)
    if not is_judged:
        opening = replace(opening, kv_policy="none")
    elif opening.kv_policy.startswith("recompute"):
        opening = replace(opening, max_seq_len=request.ctx_tokens // 2)
    try:
        return Model.opened(path, opening)
    except QsfMemoryError as error:
        if error.plan is None:
            raise
        limit_mb = request.opening.ram_budget
        if not isinstance(limit_mb, int):
            text = does_not_fit(error.plan, is_command=True).replace("--max-seq-len", "--ctx")
            raise QsfMemoryError(f"{path}: {text}") from None
        least_mb = -(-error.plan.min_budget_bytes // _MB)
        working_mb = _working_mb(request)
        both = " for each of the two models" if budget_mb + working_mb < limit_mb else ""
        raise QsfMemoryError(
            f"{path} does not fit: of --ram-budget {limit_mb}, encoding the text and "
            f"comparing take {working_mb} MB (less with --max-tokens), which leaves {budget_mb}"
            f"{both}, and {least_mb} are needed (less with --ctx)"
        ) from None
    except QsfFormatError as error:
        if one_line(str(path)) in str(error):
            raise
        raise error.located(path) from error


# ---- output ----


def _publish(
    request: _Request,
    evaluation: Evaluation,
    run_cache: _RunCache | None,
    text_path: Path,
    json_out: str | None,
) -> None:
    if json_out is not None:
        document = {
            **evaluation.as_json(),
            "model": str(request.model),
            "against": None if request.against is None else str(request.against),
            "text": str(text_path),
            "text_bytes": len(request.text.encode()),
            "kv_type": request.opening.kv_type,
            "kv_policy": request.opening.kv_policy,
            "quality": request.opening.quality,
            "arithmetic": "f32" if request.opening.exact else "integer",
            "run_cache": None if run_cache is None else asdict(run_cache),
        }
        data = json.dumps(document, indent=2, allow_nan=False) + "\n"
        if json_out == "-":
            typer.echo(data, nl=False)
            return
        Path(json_out).write_text(data, encoding="utf-8")
    for name, value in report_lines(request, evaluation, run_cache, text_path):
        typer.echo(f"{name:<18} {one_line(value)}")


def report_lines(
    request: _Request, evaluation: Evaluation, run_cache: _RunCache | None, text_path: Path
) -> Iterator[tuple[str, str]]:
    """Yield the table for people: names and values."""
    e, opening = evaluation, request.opening
    arithmetic = "full-precision arithmetic" if opening.exact else "integer activations"
    skipping = f", quality {opening.quality:g}" if opening.quality < 1 else ""
    policy = "" if opening.kv_policy == "none" else f", {opening.kv_policy}"
    yield "model", f"{request.model}: KV cache {opening.kv_type}{policy}, {arithmetic}{skipping}"
    yield "text", f"{text_path}: {len(request.text.encode()):,} bytes, {e.text_tokens:,} tokens"
    yield "protocol", protocol_text(e)
    n_left = 0 if e.stride_tokens else max(e.text_tokens - e.windows * e.ctx_tokens, 0)
    left = f"; the last {n_left:,} fill no window: --protocol sliding scores them" if n_left else ""
    n_windows = f"{e.windows:,} window{'' if e.windows == 1 else 's'}"
    yield "tokens scored", f"{e.tokens:,} in {n_windows}{left}"
    yield "perplexity", f"{e.perplexity:.4f} +- {e.perplexity_error:.4f}"
    if e.bits_per_byte is not None:
        yield "bits per byte", f"{e.bits_per_byte:.4f}"
    if e.kl_mean is not None:
        yield from _comparison_lines(request, e)
    if run_cache is not None:
        yield "as qsf run does it", f"KV cache {run_cache.kv_type}"
        yield "  perplexity", f"{run_cache.perplexity:.4f}"
        yield ("  difference", f"{run_cache.change_percent:+.3f} % +- {run_cache.change_error:.3f}")
    for line in _stored_costs(request.model):
        yield "from conversion", line
    yield "time", f"{e.seconds:.1f} s; the model took {e.tokens_per_second:,.0f} tokens/s"


def _stored_costs(path: Path) -> list[str]:
    """Return the measured cost of the file's default arithmetic."""
    with Reader(path) as reader:
        return cost_lines(read_meta(reader))


def _comparison_lines(request: _Request, e: Evaluation) -> Iterator[tuple[str, str]]:
    kind = "" if request.against is None or _is_qsf(request.against) else ", in full precision"
    yield "against", f"{request.against}{kind}"
    yield "  its perplexity", f"{e.against_perplexity:.4f} +- {e.against_perplexity_error:.4f}"
    yield (
        "  difference",
        f"{e.perplexity_change_percent:+.3f} % +- {e.perplexity_change_error:.3f}",
    )
    yield "  KL mean", f"{e.kl_mean:.4g} +- {e.kl_mean_error:.2g} nats"
    yield "  KL median", f"{e.kl_median:.4g}"
    yield "  KL 99 %", f"{e.kl_p99:.4g}"
    yield "  KL max", f"{e.kl_max:.4g}"
    same, error = 100 * (e.top1_agreement or 0), 100 * (e.top1_agreement_error or 0)
    yield "  same top token", f"{same:.2f} % +- {error:.2f}"
    is_by_place = request.opening.kv_policy != "none" or e.protocol == "repeated"
    for place in e.places if is_by_place else ():
        yield (
            f"  from {place.position}",
            f"perplexity {place.perplexity:.3f}, there {place.against_perplexity:.3f}, "
            f"KL {place.kl_mean:.4g}",
        )


def protocol_text(evaluation: Evaluation) -> str:
    e = evaluation
    if e.protocol == "sliding":
        return f"sliding: windows of {e.ctx_tokens} tokens, every {e.stride_tokens}, what is new"
    scored = {
        "windows": "all but the first",
        "llama.cpp": "the second half, behind BOS",
        "repeated": "48 of the last 64, which stood before",
    }[e.protocol]
    return f"{e.protocol}: windows of {e.ctx_tokens} tokens, {scored} of each"


if __name__ == "__main__":
    sys.exit(run())
