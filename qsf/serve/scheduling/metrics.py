"""Metrics of the server in Prometheus's text format; vLLM's names for shared metrics."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from qsf.native.binding import describe_machine
from qsf.system import process

if TYPE_CHECKING:
    from collections.abc import Iterable

    from qsf.serve.scheduling.job import Event, Job

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_COUNTERS = (
    *("requests_total", "prompt_tokens_total", "generation_tokens_total", "forced_tokens_total"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total"),
    *("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"),
    "kv_saved_seconds_total",  # evaluation time saved by reading files
    *("kv_restored_tokens_total", "kv_dropped_tokens_total", "kv_swaps_total"),
    *("passes_total", "pass_seconds_total"),
)


class Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> Iterable[str]:
        n_values = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            n_values += count
            yield f'{name}_bucket{{le="{bound}"}} {n_values}'
        yield f"{name}_sum {self._sum:.6f}"
        yield f"{name}_count {n_values}"


class Metrics:
    """Counters and histograms; updated by the scheduler's thread, and for answers by the event
    loop.
    """

    def __init__(self) -> None:
        self.counters: dict[str, float] = dict.fromkeys(_COUNTERS, 0)
        self.ends: dict[str, int] = {}
        self.rejections: dict[str, int] = {}
        self.histograms = {
            "time_to_first_token_seconds": Histogram(_SECONDS),
            "inter_token_latency_seconds": Histogram(_SECONDS),
            "e2e_request_latency_seconds": Histogram(_SECONDS),
            "request_queue_time_seconds": Histogram(_SECONDS),
            "pass_rows": Histogram(_ROWS),
        }

    def count(self, name: str, value: float = 1) -> None:
        self.counters[name] += value

    def count_prompt(self, job: Job) -> None:
        self.counters["prompt_tokens_total"] += job.n_prompt
        self.counters["prefix_cache_queries_total"] += job.n_prompt
        self.counters["prefix_cache_hits_total"] += job.n_cached
        self.histograms["request_queue_time_seconds"].add(job.admitted - job.arrived)

    def count_pass(self, n_tokens: int, n_drafts: int, seconds: float) -> None:
        self.counters["passes_total"] += 1
        self.counters["pass_seconds_total"] += seconds
        self.counters["spec_decode_num_draft_tokens_total"] += n_drafts
        self.histograms["pass_rows"].add(n_tokens + n_drafts)

    def count_token(self, job: Job, now: float) -> None:
        """Count a chosen token; ``job`` is in the state before it."""
        self.counters["generation_tokens_total"] += 1
        if job.first:
            self.histograms["inter_token_latency_seconds"].add(now - job.last)
        else:
            self.histograms["time_to_first_token_seconds"].add(now - job.arrived)

    def count_forced(self, n_tokens: int) -> None:
        self.counters["generation_tokens_total"] += n_tokens
        self.counters["forced_tokens_total"] += n_tokens

    def count_end(self, job: Job, event: Event, now: float) -> None:
        reason = event.reason or (event.problem.code if event.problem is not None else "")
        self.ends[reason] = self.ends.get(reason, 0) + 1
        self.histograms["e2e_request_latency_seconds"].add(now - job.arrived)

    def count_rejection(self, code: str) -> None:
        self.rejections[code] = self.rejections.get(code, 0) + 1

    def text(self, gauges: dict[str, float]) -> str:
        lines = _process_lines()
        for kind, values in (("gauge", gauges), ("counter", self.counters)):
            for name, value in values.items():
                lines += [f"# TYPE qsf:{name} {kind}", f"qsf:{name} {value:.9g}"]
        for name, label, counts in (
            ("request_success_total", "finished_reason", self.ends),
            ("rejected_total", "code", self.rejections),
        ):
            lines.append(f"# TYPE qsf:{name} counter")
            lines += [f'qsf:{name}{{{label}="{key}"}} {n}' for key, n in sorted(counts.items())]
        for name, histogram in self.histograms.items():
            lines += [f"# TYPE qsf:{name} histogram", *histogram.lines(f"qsf:{name}")]
        return "\n".join(lines) + "\n"


def _process_lines() -> list[str]:
    """Return memory of this process, and its open files if the system reports them."""
    lines = [
        "# TYPE process_resident_memory_bytes gauge",
        f"process_resident_memory_bytes {describe_machine().resident_bytes}",
    ]
    n_files = process.open_file_count()
    if n_files is not None:
        lines += ["# TYPE process_open_fds gauge", f"process_open_fds {n_files}"]
    return lines
