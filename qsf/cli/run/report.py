"""What ``qsf run`` says about a model: facts, memory map, statistics, timeline.

Functions from records to lines of text; nothing here prints.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from qsf.kv import kv_type_name
from qsf.shell import command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qsf.model import Model
    from qsf.native.binding import MemoryEvent, MemoryPlan, SessionStats, UnitTime
    from qsf.text.generation import GenerationStats
    from qsf.text.sampling import SamplingParams


_SHOWN_BYTES = 2**20 // 20  # smaller sizes would be shown as 0.0 MB
_MANY_ROWS = 24  # longer timelines merge more units into a line


def mb(n_bytes: int) -> str:
    """Return bytes in MB of 2^20, as everywhere."""
    return f"{n_bytes / 2**20:,.1f}"


def _seconds(ns: int) -> str:
    return f"{ns / 1e9:.2f} s"


def _kv_text(plan: MemoryPlan) -> str:
    return kv_type_name(plan.kv_k_bits, plan.kv_v_bits)


# ---- before ----


def facts_lines(model: Model, params: SamplingParams) -> list[str]:
    """Return lines about the file and the engine, then the memory map."""
    from qsf.native import binding

    info = model.info
    machine = binding.describe_machine()
    rows = (
        ("model", f"{info.architecture}, {info.n_parameters:,} parameters, {info.quant_type}, "
                  f"file {mb(info.file_bytes)} MB"),
        ("shape", f"{info.n_layers} layers of {info.dim}, FFN {info.ffn_dim}, {info.n_heads} heads "
                  f"and {info.n_kv_heads} KV heads of {info.head_dim}"),
        ("tokens", f"{info.n_vocab:,} in the vocabulary, context {info.plan.ctx_tokens} of "
                   f"{info.max_tokens}, prompt in chunks of {info.plan.chunk_tokens}"),
        ("kernels", f"{info.isa_name} (here: {' '.join(machine.isa_available)}), "
                    f"{info.plan.n_threads} threads"),
        ("KV cache", _kv_text(info.plan) + (", rotated" if info.plan.kv_is_rotated else "")),
        ("i/o", _io_text(model)),
        ("drafts", _drafts_text(info.plan)),
        ("sampling", f"temperature {params.temperature:g}, top-p {params.top_p:g}, "
                     f"top-k {params.top_k}, min-p {params.min_p:g}, repetition penalty "
                     f"{params.repetition_penalty:g}"),
    )  # fmt: skip
    return [f"{name:9} {text}" for name, text in rows] + plan_lines(info.plan)


def skip_lines(plan: MemoryPlan) -> list[str]:
    """Return which layers are skipped, and whether more were requested; "" if all layers run."""
    if plan.n_skips_asked == 0:
        return []
    n_skipped, n_wanted = plan.n_layers_skipped, plan.n_skips_asked
    line = f"layers skipped: {n_skipped} of {plan.n_layers}, {_ranges(plan.skipped_layers)}"
    if n_wanted > n_skipped:
        line += f" ({n_wanted} were asked for, but the first two and the last two always run)"
    return [line]


def fewer_skips_lines(plan: MemoryPlan) -> list[str]:
    """Return a warning if fewer layers could be skipped than were requested."""
    return skip_lines(plan) if plan.n_layers_skipped < plan.n_skips_asked else []


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ranges, such as "3, 5-8"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


def _io_text(model: Model) -> str:
    info = model.info
    is_streamed = (
        info.plan.n_units_resident < info.plan.n_units
        or info.plan.expert_slots < info.plan.n_experts
    )
    rest = "" if is_streamed else "; all weights are in memory"
    return f"{info.io_name} x{max(info.io_depth, 1)}, {model.io_origin}{rest}"


def _drafts_text(plan: MemoryPlan) -> str:
    from qsf.native.binding import DRAFTER_HELD

    if plan.draft_rows:
        guesser = "the draft model" if plan.drafter_bytes else "the file's MTP head"
        has_one = plan.drafter_bytes or plan.mtp_state == DRAFTER_HELD
        return f"at most {plan.draft_rows} in a pass{f', also by {guesser}' if has_one else ''}"
    if 4 * plan.expert_slots < 3 * plan.n_experts:
        return (
            f"none: wrong ones would read experts in vain, of which {plan.expert_slots} of "
            f"{plan.n_experts} are in memory"
        )
    return "none"


def _mtp_lines(plan: MemoryPlan) -> list[str]:
    """Return whether the file's MTP head guesses, or why not; empty if there is none."""
    from qsf.native.binding import DRAFTER_HELD, DRAFTER_NONE

    if plan.mtp_state == DRAFTER_NONE:
        return []
    if plan.mtp_state == DRAFTER_HELD:
        return ["drafts also by the file's MTP head"]
    why = "there is no room for drafts beside the context"
    if 4 * plan.expert_slots < 3 * plan.n_experts:
        why = "wrong drafts would read experts in vain"
    return [f"without the file's MTP head: {why}"]


def drafter_lines(plan: MemoryPlan) -> list[str]:
    """Return why the draft model is not loaded; empty if it is, or if none was requested."""
    from qsf.native.binding import DRAFTER_COLD, DRAFTER_HELD, DRAFTER_NONE, DRAFTER_NOT_WORTH

    if plan.drafter_state in (DRAFTER_NONE, DRAFTER_HELD):
        return []
    why = {
        DRAFTER_NOT_WORTH: "a pass would read more than 2.25 times as much from the file; layers in"
        " memory save more",
        DRAFTER_COLD: "it reads the model's keys and values, of which some would be in a file"
        " (--kv-policy disk)",
    }.get(
        plan.drafter_state, "there is no room for them beside the model, its context and its drafts"
    )
    return [f"without the draft model, which takes {mb(plan.drafter_wanted_bytes)} MB: {why}"]


def plan_lines(plan: MemoryPlan) -> list[str]:
    reads = "1 read" if plan.io_depth == 1 else f"{plan.io_depth} reads"
    rows = f" and {plan.embedding_rows:,} rows" if plan.embedding_rows else ""
    drafts = f", {plan.draft_rows} drafts" if plan.draft_rows else ""
    readers = " and readers" if plan.io_depth or plan.n_experts else ""
    experts = f"{plan.expert_slots} of {plan.n_experts} experts"
    parts = {
        "process before opening": plan.process_bytes - plan.text_bytes,
        "text: the tokenizer": plan.text_bytes,
        "reserved for Python": plan.reserve_bytes,
        f"weights, {plan.n_units_resident} of {plan.n_units} units": plan.weights_bytes,
        f"ring for the others, filled by {reads}": plan.ring_bytes,
        "decode buffer": plan.stream_bytes - plan.ring_bytes,
        f"embedding, a band{rows}": plan.embedding_bytes,
        f"{experts}, {plan.expert_transit_slots} in transit": plan.experts_bytes,
        _kv_cache_text(plan): plan.kv_bytes - plan.state_bytes,
        "recurrent states and their snapshots": plan.state_bytes,
        f"activations, chunks of {plan.chunk_tokens}{drafts}": plan.scratch_bytes,
        "draft model": plan.drafter_bytes,
        "adapters": plan.adapters_bytes,
        "tables": plan.tables_bytes,
        f"stacks, {plan.n_threads} threads{readers}": plan.stacks_bytes,
    }
    shown = {
        name: mb(n_bytes)
        for name, n_bytes in parts.items()
        if n_bytes >= _SHOWN_BYTES or name.startswith("weights")
    }
    shown["total"] = mb(plan.taken_bytes)
    shown["budget"] = mb(plan.budget_bytes) if plan.budget_bytes else "none"
    if plan.ceiling_bytes and plan.ceiling_bytes != plan.budget_bytes:
        shown["ceiling: what the machine gives"] = mb(plan.ceiling_bytes)
    if plan.streamed_bytes:
        shown["read from the file per token"] = mb(plan.streamed_bytes)
    if plan.kv_cold_token_bytes:
        shown["and keys and values, at most"] = mb(plan.kv_cold_token_bytes)
    if plan.expert_slots < plan.n_experts:
        name = f"and at most {plan.experts_a_token} experts that are not in memory"
        shown[name] = mb(plan.expert_token_bytes)
    lines = [
        "memory, MB of 2^20 bytes",
        *(f"  {name:40}{size:>10}" for name, size in shown.items()),
    ]
    return lines + hit_lines(plan) + _mtp_lines(plan) + drafter_lines(plan) + skip_lines(plan)


def _kv_cache_text(plan: MemoryPlan) -> str:
    sessions = f"{plan.kv_contexts} sessions of " if plan.kv_contexts > 1 else ""
    policy = "" if plan.kv_policy == "none" else f", {plan.kv_policy}"
    resident = ""
    if plan.kv_resident_tokens < plan.ctx_tokens:
        resident = f"{plan.kv_resident_tokens} of "
    return f"KV cache, {sessions}{resident}{plan.ctx_tokens} tokens, {_kv_text(plan)}{policy}"


def streaming_lines(plan: MemoryPlan, auto: MemoryPlan) -> list[str]:
    """Return what a small budget costs if ``auto``, the plan with all free memory, is faster."""
    if not auto.is_enough or auto.streamed_bytes >= plan.streamed_bytes:
        return []
    from qsf.native.binding import size_text

    rest = f"only {mb(auto.streamed_bytes)} MB" if auto.streamed_bytes else "nothing"
    return [
        f"{mb(plan.streamed_bytes)} MB are read from the file for each token, to stay in "
        f"{size_text(plan.budget_bytes)}; --ram-budget auto would read {rest}, {auto.memory_text}"
    ]


def greeting_lines(model: Model, name: str, type_name: str) -> list[str]:
    info = model.info
    return [
        f"{name}: {info.architecture}, {info.n_parameters / 1e6:,.0f}M weights, {type_name}, "
        f"{info.plan.text}. /help says what can be typed."
    ]


# ---- after the answer ----


def ending_lines(model: Model, stats: GenerationStats) -> list[str]:
    if stats.stop_reason != "context":
        return []
    n_tokens = model.info.plan.ctx_tokens
    if n_tokens < model.info.max_tokens:
        return [
            f"(the context of {n_tokens} tokens is full; --max-seq-len asks for a longer one, "
            "which a larger --ram-budget may take; --kv-policy goes on without the middle)"
        ]
    return [
        f"(the context of {n_tokens} tokens is full; the model was made for no more: --kv-policy "
        "goes on without the middle)"
    ]


def speed_line(stats: GenerationStats) -> str:
    parts = [_counted(stats.generated_tokens, stats.step_rate)]
    if stats.generated_tokens:
        parts.append(f"first after {stats.first_token_seconds:.1f} s")
    return ", ".join(parts)


def answer_record(model: Model, stats: GenerationStats, text: str) -> dict[str, Any]:
    return {
        "text": text,
        "ids": list(stats.token_ids),
        "stop_reason": stats.stop_reason,
        "seed": stats.seed,
        "prompt_tokens": stats.prompt_tokens,
        "generated_tokens": stats.generated_tokens,
        "prompt_tokens_per_s": stats.prompt_rate,
        "tokens_per_s": stats.step_rate,
        "first_token_s": stats.first_token_seconds,
        "peak_bytes": stats.peak_bytes,
        "budget_bytes": model.info.plan.budget_bytes,
        "context_tokens": model.info.plan.ctx_tokens,
    }


def json_line(record: dict[str, Any]) -> str:
    return command.json_text(record) + "\n"


def _counted(n_tokens: int, rate: float) -> str:
    # Far below one token a second, one decimal is not enough.
    speed = f", {rate:.1f} tok/s" if rate >= 1 else f", {rate:.3f} tok/s" if rate else ""
    return f"{n_tokens} token{'' if n_tokens == 1 else 's'}{speed}"


def stats_lines(model: Model, stats: GenerationStats, *, is_verbose: bool) -> list[str]:
    parts = [f"prompt {_counted(stats.prompt_tokens, stats.prompt_rate)}"]
    if stats.evaluated_tokens < stats.prompt_tokens:
        parts[0] += f" ({stats.prompt_tokens - stats.evaluated_tokens} known from before)"
    parts.append(f"generated {_counted(stats.generated_tokens, stats.step_rate)}")
    if stats.generated_tokens:
        parts.append(f"first token {stats.first_token_seconds:.3f} s")
    if stats.stop_reason == "length" and stats.generated_tokens:
        parts.append("cut by --max-tokens")
    if stats.stop_reason == "context":
        parts.append("cut: the context is full (--max-seq-len)")
    if stats.n_shortened:
        parts.append(f"context full {stats.n_shortened} times, its middle forgotten")
    parts += [f"peak RSS {mb(stats.peak_bytes)} MB", model.info.plan.text]
    lines = [" | ".join(parts)]
    if is_verbose:
        done = model.session_stats
        lines.append(f"stopped by {stats.stop_reason}, seed {stats.seed}")
        lines.append(
            f"since opening: {done.n_loops} loops, {done.n_parallel_regions} shared between "
            f"threads, {done.parallel_ns / 1e9:.3f} s in those"
        )
        lines += phase_lines(done) + draft_lines(done) + cold_lines(done)
    return lines


def cold_lines(stats: SessionStats) -> list[str]:
    """Return the cost of cold pages of the KV cache; empty if all pages were in memory."""
    if not stats.kv_written_bytes:
        return []
    n_tokens = stats.prompt_tokens + stats.step_tokens
    return [
        f"keys and values: {mb(stats.kv_written_bytes)} MB written to a file and "
        f"{mb(stats.kv_read_bytes)} MB read, {mb(stats.kv_read_bytes // max(n_tokens, 1))} a token"
    ]


def draft_record(stats: SessionStats) -> dict[str, int]:
    """Return how many drafts were evaluated and how many were right, for ``--json``."""
    return {"drafted_tokens": sum(stats.n_drafted), "accepted_tokens": sum(stats.n_accepted)}


def draft_lines(stats: SessionStats) -> list[str]:
    """Return the gain of drafts; "" if no draft was evaluated."""
    from qsf.native.binding import GUESSERS

    if not any(stats.n_drafted):
        return []
    parts = [
        f"{n_right} of {n} from {name}"
        for n_right, n, name in zip(stats.n_accepted, stats.n_drafted, GUESSERS, strict=True)
        if n
    ]
    n_passes = stats.n_step_passes
    return [
        f"drafts: {stats.step_tokens / n_passes:.2f} tokens and "
        f"{stats.n_step_rows / n_passes:.2f} rows a pass; right were {', '.join(parts)}"
    ]


def phase_lines(stats: SessionStats) -> list[str]:
    """Return the parts of the time, largest first; "" if nothing was timed.

    The time of choosing tokens is no part of evaluating them: it comes last.
    """
    from qsf.native import binding

    total_ns = sum(stats.phase_ns)
    n_tokens = stats.prompt_tokens + stats.step_tokens
    if total_ns == 0 or n_tokens == 0:
        return []
    phases = sorted(zip(stats.phase_ns, binding.phase_names(), strict=True), reverse=True)
    parts = [
        f"{name} {100 * ns / total_ns:.0f} %"
        for ns, name in phases
        if 200 * ns >= total_ns  # half of a percent
    ]
    line = f"time per token: {total_ns / n_tokens / 1e6:.3g} ms: " + ", ".join(parts)
    if stats.n_samples:
        line += f"; choosing {stats.sample_ns / stats.n_samples / 1e6:.3f} ms"
    return [line]


def timeline_lines(model: Model) -> list[str]:
    """Return where time was spent since opening, by unit, and the events of memory pressure."""
    stats, units = model.session_stats, model.timeline
    lines = [total_line(stats, units)]
    lines += table_lines(units)
    if stats.n_embedding_rows:
        rate = 100 * stats.n_embedding_hits / stats.n_embedding_rows
        lines.append(
            f"embedding rows: {stats.n_embedding_rows} asked for, {stats.n_embedding_hits} found "
            f"in the cache ({rate:.0f} %)"
        )
    lines += _expert_lines(model)
    events = model.memory_events
    if events:
        lines.append("memory: " + "; ".join(_event_text(event) for event in events))
    return lines


def _expert_lines(model: Model) -> list[str]:
    stats = model.session_stats
    if stats.n_expert_uses == 0:
        return []
    plan = model.info.plan
    n_tokens = stats.prompt_tokens + stats.step_tokens
    rate = 100 * stats.n_expert_hits / stats.n_expert_uses
    return [
        f"experts: {stats.n_expert_uses} used, {stats.n_expert_hits} of them in memory"
        f" ({rate:.0f} %), {mb(stats.expert_read_bytes // max(n_tokens, 1))} read a token;"
        f" {plan.expert_slots} of {plan.n_experts} fit, a token uses {plan.experts_a_token};"
        f" {stats.n_expert_guesses} read ahead, {stats.n_expert_right_guesses} of them used"
    ]


def total_line(stats: SessionStats, units: Sequence[UnitTime]) -> str:
    """Return the sums over all units, and the overlap of reading and computing."""
    n_tokens = stats.prompt_tokens + stats.step_tokens
    tokens = f"{n_tokens} token{'' if n_tokens == 1 else 's'}"
    read_bytes = sum(unit.read_bytes for unit in units)
    compute_ns = sum(unit.compute_ns for unit in units)
    if read_bytes == 0:
        return f"time: computing {_seconds(compute_ns)}, nothing to read, {tokens}"
    rate = f", {read_bytes / stats.read_ns:.2f} GB/s" if stats.read_ns else ""
    parts = [
        f"time: reading {_seconds(stats.read_ns)} ({read_bytes / 1e9:.2f} GB{rate})",
        f"waiting for it {_seconds(stats.wait_ns)}",
        f"computing {_seconds(compute_ns)}",
        f"checksums {_seconds(stats.checksum_ns)} of the readers",
    ]
    if stats.decompress_ns:
        parts.append(f"decompressing {_seconds(stats.decompress_ns)}")
    parts.append(tokens)
    return ", ".join(parts) + _hidden_text(stats.read_ns, stats.wait_ns, compute_ns)


def _hidden_text(read_ns: int, wait_ns: int, compute_ns: int) -> str:
    """Return which share of the shorter of reading and computing overlapped with the other.

    While computing waits, a read or its checksum is under way; the rest of the reading overlapped.
    An estimate: reading between two tokens counts as well.
    """
    shorter_ns = min(read_ns, compute_ns)
    if shorter_ns == 0:
        return ""
    percent = 100 * min(max(read_ns - wait_ns, 0), shorter_ns) / shorter_ns
    if read_ns >= compute_ns:
        return f"; {percent:.0f} % of computing was hidden behind reading"
    return f"; {percent:.0f} % of reading was hidden behind computing"


# ---- the timeline by unit ----


@dataclass(slots=True)
class _Row:
    """Neighbouring units with similar times; their sums of bytes read and of milliseconds."""

    first: UnitTime
    last: UnitTime
    n_units: int
    sums: list[float]  # per pass: bytes, ms of reading, of waiting, of computing

    def looks_like(self, other: _Row, *, minds_times: bool) -> bool:
        mine, theirs = self.first, other.first
        if not (mine.name.startswith("layer") and theirs.name.startswith("layer")):
            return False
        if (mine.is_resident, mine.is_skipped) != (theirs.is_resident, theirs.is_skipped):
            return False
        pairs = zip(self.each(), other.each(), strict=True)
        size, _, *times = ((abs(a - b), max(a, b)) for a, b in pairs)
        if size[0] > 0.05 * size[1]:
            return False
        # Else they are too close to be told apart
        return not minds_times or all(apart <= max(0.5, 0.3 * most) for apart, most in times)

    def each(self) -> list[float]:
        return [value / self.n_units for value in self.sums]

    def add(self, other: _Row) -> None:
        self.last = other.last
        self.n_units += other.n_units
        self.sums = [a + b for a, b in zip(self.sums, other.sums, strict=True)]

    def line(self) -> str:
        name = self.first.name
        if self.n_units > 1:
            name = f"layers {name.split()[1]}-{self.last.name.split()[1]}"
        n_bytes, *times = self.each()
        where = "memory" if self.first.is_resident else "streamed"
        if self.first.is_skipped:
            where = "skipped"
        if where == "streamed" and name == "embedding" and not n_bytes:
            where = "rows"  # only the needed rows are read, and counted elsewhere
        size = f"{n_bytes / 2**20:.1f}" if n_bytes else "-"
        columns = "".join(f"{f'{ms:.2f}' if ms else '-':>10}" for ms in times)
        return f"  {name:14}{where:10}{size:>9}{columns}"


def table_lines(units: Sequence[UnitTime]) -> list[str]:
    """Return the timeline as a table: times per pass, one line for similar neighbouring units."""
    rows = []
    for unit in units:
        n_passes = max(unit.n_passes, 1)
        times = (unit.read_ns, unit.wait_ns, unit.compute_ns)
        sums = [unit.read_bytes / n_passes, *(ns / n_passes / 1e6 for ns in times)]
        rows.append(_Row(unit, unit, 1, sums))
    folded = _fold(rows, minds_times=True)
    if len(folded) > _MANY_ROWS:
        folded = _fold(folded, minds_times=False)
    head = "".join(f"{name:>10}" for name in ("read ms", "wait ms", "compute"))
    return [f"  {'unit, each':14}{'where':10}{'MB':>9}{head}", *(row.line() for row in folded)]


def _fold(rows: Sequence[_Row], *, minds_times: bool) -> list[_Row]:
    out: list[_Row] = []
    for row in rows:
        if out and out[-1].looks_like(row, minds_times=minds_times):
            out[-1].add(row)
        else:
            out.append(row)
    return out


def _event_text(event: MemoryEvent) -> str:
    verb = "gave back" if event.is_given_back else "took again"
    units = f"{event.n_units_resident} unit{'' if event.n_units_resident == 1 else 's'}"
    return (
        f"at {event.seconds} s: {verb} {mb(event.bytes)} MB, {mb(event.available_bytes)} MB were "
        f"available, {units} in memory since"
    )


# Hits in percent by slots in percent of all experts, from routing traces of Qwen3-30B-A3B replayed
# with the engine's eviction policy.
_TRACED: Final = (
    (0, 0), (1, 14), (2, 22), (4, 32), (6, 41), (8, 48), (10, 54), (15, 67), (20, 77), (30, 87),
    (40, 92), (100, 100),
)  # fmt: skip


def usual_hits(share: float) -> float:
    """Return the expected hit rate if ``share`` of all experts have slots."""
    percent = 100 * share
    for (x, y), (next_x, next_y) in pairwise(_TRACED):
        if percent <= next_x:
            return (y + (next_y - y) * (percent - x) / (next_x - x)) / 100
    return 1.0


def slots_with_twice(plan: MemoryPlan) -> int:
    """Return the number of experts with a slot in twice the memory, after all other units."""
    more_bytes = max(0, max(plan.budget_bytes, plan.taken_bytes) - plan.streamed_bytes)
    return min(plan.n_experts, plan.expert_slots + more_bytes // plan.expert_slot_bytes)


def hit_lines(plan: MemoryPlan) -> list[str]:
    """Return the expected hit rates with these slots and with twice the memory; [] if all fit."""
    if plan.expert_slots >= plan.n_experts:
        return []

    def text(n_slots: int) -> str:
        share = n_slots / plan.n_experts
        return f"{100 * share:.0f} to {100 * usual_hits(share):.0f} %"

    return [
        f"experts of a token that should be in memory: {text(plan.expert_slots)}, with twice the"
        f" memory {text(slots_with_twice(plan))} (all chosen alike; as in traces of trained models)"
    ]
