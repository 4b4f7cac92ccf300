"""Results of `qsf.bench` as a run would give them, made up from a seed."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import random

from qsf.native.roofline import Limits
from qsf_bench.judge.compare import Change, Comparison
from qsf_bench.judge.results import (
    Breakdown,
    Failure,
    Ratio,
    Results,
    Row,
    Spread,
    spread_of,
)
from qsf_bench.run.tasks import Cap

N_WEIGHTS = 1_100_048_384
_N_ROUNDS = 5
# Type, its bits a weight, GB/s that one thread reads of it and two do, 10^9 multiply-adds/s of one.
_TYPES = {
    "4bit": ("qsf", 4.55, 11.9, 21.4, 520.0),
    "2bit": ("qsf", 2.58, 8.4, 15.6, 470.0),
    "Q4_K_M": ("llama.cpp", 4.85, 9.1, 17.2, 92.0),
    "Q2_K": ("llama.cpp", 3.16, 5.2, 9.9, 71.0),
}
_BASELINES = {"4bit": "Q4_K_M", "2bit": "Q2_K"}
_SHARES = {
    "embedding": 0.001, "norm": 0.009, "qkv": 0.11, "attention": 0.02,
    "attn_out": 0.08, "gate_up": 0.42, "down": 0.21, "head": 0.12,
    "wait": 0.0, "decompress": 0.0, "other": 0.02, "sample": 0.004,
    "python": 0.006,
}  # fmt: skip
_KV_BYTES = {"qsf": 25_000, "llama.cpp": 45_056}  # a token of the context, all layers
_MEMORY = {1: 14.2, 2: 24.9}
_GMADDS = {1: 910.0, 2: 1790.0}


def _around(median: float, rng: random.Random, noise: float = 0.015) -> Spread:
    return spread_of([round(median * (1 + rng.gauss(0, noise)), 4) for _ in range(_N_ROUNDS)])


def _file_bytes(kind: str) -> int:
    return int(N_WEIGHTS * _TYPES[kind][1] / 8)


def _breakdown(wall_ms: float, wait: float, rng: random.Random) -> Breakdown:
    """Parts of a token of which the share ``wait`` is spent waiting for the disk."""
    shares = {name: share * (1 - wait) for name, share in _SHARES.items()}
    if wait:
        shares |= {"wait": wait * 0.9, "decompress": wait * 0.1}
    parts = {name: _around(wall_ms * share, rng, 0.03) for name, share in shares.items()}
    rest = wall_ms - sum(s.median for name, s in parts.items() if name != "other")
    parts["other"] = spread_of([rest] * _N_ROUNDS)
    beside = {"read": _around(wall_ms * 0.85, rng), "checksum": _around(wall_ms * 0.09, rng)}
    return Breakdown(wall_ms, parts, beside if wait else {})


def _row(
    kind: str,
    threads: int,
    test: str,
    depth: int,
    rng: random.Random,
    *,
    budget_mb: int | None = None,
    cap_mb: int | None = None,
) -> Row:
    engine, bits, one_gb, two_gb, gmadds = _TYPES[kind]
    file_bytes = _file_bytes(kind)
    is_tg = test.startswith("tg")
    n_bytes = file_bytes + depth * _KV_BYTES[engine]
    limit_mb = min(x for x in (budget_mb, cap_mb, 10**9) if x is not None)
    missing = max(0.0, file_bytes - (limit_mb - 60) * 1e6)  # that comes from the disk each pass
    madds = N_WEIGHTS * 0.97
    n_tokens = 1 if is_tg else 512
    compute_s = n_bytes / ((one_gb, two_gb)[threads - 1] * 1e9)
    if not is_tg:
        compute_s = n_tokens * madds / (gmadds * (1, 1.93)[threads - 1] * 1e9) * (1 + depth / 9000)
    disk_s = missing / 2.4e9
    seconds = max(compute_s, disk_s) + 0.1 * min(compute_s, disk_s)
    limits = {
        "memory": n_tokens / (n_bytes / (_MEMORY[threads] * 1e9)),
        "arithmetic": _GMADDS[threads] * 1e9 / madds,
    }
    if missing:
        limits["disk"] = n_tokens / (missing / 2.9e9)
    limited_by = min(limits, key=lambda name: limits[name])
    tok_per_s = _around(n_tokens / seconds, rng)
    wall_ms = 1000 / tok_per_s.median
    moved = missing if limited_by == "disk" else n_bytes
    breakdown = _breakdown(wall_ms, max(0.0, 1 - compute_s / seconds) if missing else 0.0, rng)
    return Row(
        engine=engine,
        shape="1.1B",
        type=kind,
        bits_per_weight=bits,
        file_bytes=file_bytes,
        threads=threads,
        test=test,
        depth=depth,
        budget_mb=budget_mb,
        tok_per_s=tok_per_s,
        peak_rss_bytes=int(min(file_bytes + 9e7, limit_mb * 1e6 - 3e6)),
        fraction_of_limit=tok_per_s.median / limits[limited_by],
        limited_by=limited_by,
        limit_tok_per_s=limits[limited_by],
        bytes_per_token=n_bytes,
        gb_per_s=tok_per_s.median / n_tokens * moved / 1e9,
        read_bytes_per_token=missing / n_tokens if missing else 0.0,
        kv_type="8bit" if engine == "qsf" else "f16",
        io="direct x4" if engine == "qsf" else "",
        file=f"1.1B-{kind}.{'qsf' if engine == 'qsf' else 'gguf'}",
        version="QSF 0.1.0" if engine == "qsf" else "llama.cpp 0.3.36",
        kernels="amx" if engine == "qsf" else "CPU_REPACK:604.45 CPU:71.78",
        n_weights=N_WEIGHTS,
        cap=None if cap_mb is None else Cap(cap_mb, int(cap_mb * 0.98e6), 0),
        breakdown=breakdown if engine == "qsf" else None,
        load_seconds=0.42,
    )


def _ratios(rows: list[Row]) -> list[Ratio]:
    """Each row of QSF in the one of llama.cpp that is its like."""
    found = []
    for idx, row in enumerate(rows):
        for other_idx, other in enumerate(rows):
            if _BASELINES.get(row.type) == other.type and row.key[3:8] == other.key[3:8]:
                pairs = zip(row.tok_per_s.values, other.tok_per_s.values, strict=True)
                spread = spread_of([one / two for one, two in pairs])
                found.append(
                    Ratio(idx, other_idx, spread.median, spread.min, spread.max, spread.values)
                )
    return found


def full_results(seed: int = 7) -> Results:
    """Everything that a run can give: types, threads, depths, budgets, caps, failures."""
    rng = random.Random(seed)
    rows = [
        _row(kind, threads, test, depth, rng)
        for kind in _TYPES
        for threads in (1, 2)
        for test in ("pp512", "tg128")
        for depth in (0, 2048)
    ]
    rows += [_row("4bit", 2, "tg128", 0, rng, budget_mb=mb) for mb in (200, 350, 550)]
    rows += [_row("2bit", 2, "tg128", 0, rng, budget_mb=mb) for mb in (120, 200, 350)]
    rows += [_row("4bit", 2, "tg128", 0, rng, cap_mb=mb) for mb in (300, 500, 800)]
    rows += [_row("Q4_K_M", 2, "tg128", 0, rng, cap_mb=mb) for mb in (500, 800)]
    return Results(
        machine={
            "cpu": "Example CPU @ 2.80 GHz",
            "n_cores": 2,
            "isa": "amx",
            "isa_available": ["scalar", "avx2", "amx"],
            "memory_bytes": 8_323_000_000,
            "system": "Linux-6.1.0-x86_64-with-glibc2.36",
            "qsf": "0.1.0",
            "commit": "0123abc",
            "baseline": "0.3.36",
            "date": "2025-01-02T03:04:05+00:00",
            "command": "python -m qsf.bench 1.1b --types 4bit,2bit --threads 1,2",
        },
        limits=Limits(
            {str(threads): gb for threads, gb in _MEMORY.items()},
            {"buffered x1": 1.31, "direct x1": 1.12, "direct x4": 2.93},
            {str(threads): gmadds for threads, gmadds in _GMADDS.items()},
        ),
        rows=rows,
        ratios=_ratios(rows),
        failures=[
            Failure(
                "llama.cpp",
                "1.1B-Q4_K_M.gguf",
                "tg128, 2 threads, cgroup 300 MB",
                "killed by the kernel (out of memory) after 41 s",
                3,
            )
        ],
        notes=[
            "The weights are random: speeds are those of the shape, the text is none.",
            "The governor of the processor could not be read; speeds may follow its temperature.",
        ],
        settings={
            "rounds": _N_ROUNDS,
            "warm_up": True,
            "plan": {"ctx_tokens": 2176, "kv_type": "8bit"},
            "tests": ["pp512", "tg128"],
            "depths": [0, 2048],
        },
    )


COMPARISON = Comparison(
    [Change("1.1B, qsf, 4bit", 33.1, 34.2, 0.034, 0.03, "faster", is_relative=True)],
    ["Measured on another day."],
)
