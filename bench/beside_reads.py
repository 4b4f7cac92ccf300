"""Measure tokens of a mixture of experts from disk, with a plain read of the file after each.

Some disks change their speed within seconds, so that a limit measured once says little. Here each
token is held against the two reads around it, by `bench_disk` (io_uring, 8 reads of 1 MiB): into
8 MiB of memory that is used again and again, the most that the disk gives, and into 192 MiB that
was not used lately, as slots of experts are. The limit of a token: what memory must give before
routers can choose, and then the bytes that the token read, at the speed of the disk.

Usage: python bench/beside_reads.py MODEL.qsf --budget-mb 2000 [--routing local] [--tokens 24]
       [--depth 96] [--threads 2] [--bench-disk build/bench/bench_disk]
"""

# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from array import array
from pathlib import Path
from typing import NamedTuple

from qsf.native import binding
from qsf.native.opening import open_native
from qsf.options import ModelOptions
from qsf_bench.models.facts import read_facts
from qsf_bench.run.worker_qsf import tokens_of

_READ_MB = 192
_MEMORY_BYTES = 1 << 30
_MEMORY_MS = 400


class Speeds(NamedTuple):
    """Of plain reads, in GB/s."""

    hot: float  # into memory that is used again and again
    cold: float


class Step(NamedTuple):
    """What a token took."""

    seconds: float
    read_bytes: int
    hits: float  # share of its experts
    waiting: float  # share of its time
    disk: Speeds  # around it


def plain_read(program: str, path: str) -> Speeds:
    """Read a part of the file twice."""
    command = [program, path, "--method", "uring", "--depth", "8", "--rounds", "1"]

    def run(*more: str) -> float:
        answer = subprocess.run(
            [*command, "--mb", str(_READ_MB), *more], check=True, capture_output=True, text=True
        )
        return float(answer.stdout.split()[-2])  # best uring x8 3.42 GB/s

    return Speeds(run(), run("--into-mb", str(_READ_MB)))


def measure(
    session: binding.NativeSession, tokens: array[int], args: argparse.Namespace
) -> list[Step]:
    """Evaluate the tokens one by one."""
    steps: list[Step] = []
    last = plain_read(args.bench_disk, args.model)
    for token in tokens:
        before = session.stats()
        began = time.perf_counter()
        session.step(token)
        seconds = time.perf_counter() - began
        after = session.stats()
        now = plain_read(args.bench_disk, args.model)
        n_uses = after.n_expert_uses - before.n_expert_uses
        steps.append(
            Step(
                seconds,
                after.read_bytes - before.read_bytes,
                (after.n_expert_hits - before.n_expert_hits) / max(n_uses, 1),
                (after.wait_ns - before.wait_ns) / 1e9 / seconds,
                Speeds((last.hot + now.hot) / 2, (last.cold + now.cold) / 2),
            )
        )
        last = now
    return steps


def spread(values: list[float], form: str) -> str:
    """Return the median and the middle half."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def main() -> None:
    """Print what the tokens took, and their shares of the limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", metavar="MODEL.qsf")
    parser.add_argument("--budget-mb", type=int, required=True)
    parser.add_argument("--routing", choices=("local", "even"), default="local")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--depth", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bench-disk", default="build/bench/bench_disk")
    args = parser.parse_args()
    memory = binding.measure_roofline(args.threads, _MEMORY_BYTES, _MEMORY_MS).read_gb_per_s
    n_ctx = args.depth + args.tokens + 1
    options = ModelOptions(
        ram_budget=args.budget_mb, threads=args.threads, max_seq_len=n_ctx, io="uring", draft="off"
    )
    model = open_native(args.model, options)
    plan = model.info().plan
    tokens = tokens_of(n_ctx, model.info().n_vocab, is_even=args.routing == "even")
    session = model.create_session()
    while session.sync_chunk(tokens[: args.depth]) < args.depth:
        pass
    session.step(tokens[args.depth])  # warms up
    steps = measure(session, tokens[args.depth + 1 :], args)

    token_bytes = read_facts(Path(args.model)).token_bytes
    first = max(0, token_bytes - plan.expert_token_bytes - plan.streamed_bytes)

    def share(step: Step, disk: float) -> float:
        return 100 * (first / memory + step.read_bytes / disk) / 1e9 / step.seconds

    print(f"{args.model}, {args.budget_mb} MB, {args.routing}, {len(steps)} tokens:")
    print("                  median (middle half)")
    print(f"ms a token        {spread([1e3 * s.seconds for s in steps], '.0f')}")
    print(f"MB read a token   {spread([s.read_bytes / 1e6 for s in steps], '.0f')}")
    print(f"experts in memory {spread([100 * s.hits for s in steps], '.0f')} %")
    print(f"waiting           {spread([100 * s.waiting for s in steps], '.0f')} %")
    print(f"memory            {memory:.1f} GB/s, first {first / 1e6:.0f} MB")
    print(f"disk, into 8 MiB  {spread([s.disk.hot for s in steps], '.2f')} GB/s")
    print(f"disk, into {_READ_MB}    {spread([s.disk.cold for s in steps], '.2f')} GB/s")
    print(f"of the limit      {spread([share(s, s.disk.hot) for s in steps], '.0f')} %")
    print(f"of that into {_READ_MB}  {spread([share(s, s.disk.cold) for s in steps], '.0f')} %")


if __name__ == "__main__":
    main()
