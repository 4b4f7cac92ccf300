"""The quality report for a terminal: short after a conversion, whole for ``qsf-inspect``."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from qsf.report.record import Evaluation, Quality, Report, TensorReport, TypeSum

_MB = 2**20  # as qsf-run and system monitors count
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
    parts = [
        *([] if e.kl_mean is None else [f"KL mean {e.kl_mean:.4g}"]),
        *([] if e.kl_p99 is None else [f"KL 99 % {e.kl_p99:.4g}"]),
        *(
            []
            if e.top1_agreement is None
            else [f"same first choice {percent_text(e.top1_agreement)}"]
        ),
    ]
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
        yield f"{'layer':>5} {'importance':>11} {'cosine':>9} {'KL skipped':>11}"
        for layer in quality.layers:
            yield (
                f"{layer.layer:>5} {layer.importance:>11.4g} {_optional(layer.cosine, 9)} "
                f"{_optional(layer.kl_skipped, 11)}"
            )
    if quality.calibration:
        yield ""
        yield "calibration"
        for name, value in quality.calibration.items():
            yield f"  {name:<22} {value}"


def _type_lines(types: Sequence[TypeSum]) -> Iterator[str]:
    yield (f"{'type':<14} {'tensors':>7} {'weights':>13} {'MB':>9} {'bits':>6} {'mean cosine':>12}")
    for t in types[:_MAX_TYPES]:
        yield (
            f"{t.type:<14} {t.n_tensors:>7} {t.n_weights:>13,} {t.n_bytes / _MB:>9.2f} "
            f"{t.bits_per_weight:>6.2f} {t.cosine:>12.6f}"
        )
    if len(types) > _MAX_TYPES:
        rest = types[_MAX_TYPES:]
        n_bytes = sum(t.n_bytes for t in rest)
        yield f"and {len(rest)} other types, {n_bytes / _MB:.2f} MB"


def _tensor_lines(tensors: Sequence[TensorReport]) -> Iterator[str]:
    has_outliers = any(t.outliers is not None for t in tensors)
    has_output = any(t.output_error is not None for t in tensors)
    more = f" {'outliers':>9}" * has_outliers + f" {'output err.':>11}" * has_output
    yield (
        f"{'tensor':<20} {'type':<14} {'rows':>8} {'columns':>8} {'bits':>6} {'cosine':>9} "
        f"{'error':>8} {'mse':>9} {'max error':>9}{more}  action"
    )
    for t in tensors:
        more = f" {_share(t.outliers, 9)}" * has_outliers
        more += f" {_share(t.output_error, 11)}" * has_output
        yield (
            f"{t.name:<20} {t.type:<14} {t.n_rows:>8} {t.n_cols:>8} {t.bits_per_weight:>6.2f} "
            f"{t.cosine:>9.6f} {percent_text(t.error):>8} {t.mse:>9.3g} {t.max_error:>9.3g}{more}"
            f"  {t.action}"
        )


def percent_text(fraction: float) -> str:
    """Return a fraction in per cent with three digits."""
    return "0 %" if fraction == 0 else f"{100 * fraction:.3g} %"


def _share(value: float | None, width: int) -> str:
    return f"{'-' if value is None else percent_text(value):>{width}}"


def _optional(value: float | None, width: int) -> str:
    return f"{'-' if value is None else f'{value:.4g}':>{width}}"
