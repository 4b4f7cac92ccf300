"""Measure what a pass over the layers costs: by its number of tokens, and by the tokens before it.

All in one process that holds the model in memory; the cases take turns, round by round, so that
what disturbs the machine disturbs all of them. A pass of n tokens is what speculation and batched
decoding pay; the depth shows what attention costs.

Usage: python bench/passes.py MODEL.qsf [--threads 1] [--tokens 1 2 4 8 16] [--depths 0 2048]
"""

# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import argparse
import random
import statistics
import time
from array import array

from qsf.native import binding


def random_tokens(n_tokens: int, n_vocab: int) -> array[int]:
    """Return tokens: the same ones every time."""
    chosen = random.Random(n_tokens)
    return array("I", (chosen.randrange(n_vocab) for _ in range(n_tokens)))


def sync(session: binding.NativeSession, tokens: array[int]) -> None:
    """Make the session hold exactly ``tokens``."""
    while session.sync_chunk(tokens) < len(tokens):
        pass


def seconds_of_pass(session: binding.NativeSession, before: array[int], new: array[int]) -> float:
    """Return the time of one pass of ``new`` after ``before``, which the session holds."""
    session.rewind(len(before))
    began = time.perf_counter()
    sync(session, before + new)
    return time.perf_counter() - began


def measure(
    session: binding.NativeSession, n_vocab: int, cases: list[tuple[int, int]], rounds: int
) -> dict[tuple[int, int], list[float]]:
    """Return the seconds of every round of each case (depth, tokens of the pass)."""
    seconds: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    for round_idx in range(rounds + 1):
        for depth, n_tokens in cases:
            before = random_tokens(max(depth, 1), n_vocab)
            sync(session, before)
            for _ in range(8):
                taken = seconds_of_pass(session, before, random_tokens(n_tokens, n_vocab))
                if round_idx > 0:  # the first round warms up
                    seconds[depth, n_tokens].append(taken)
    return seconds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", metavar="MODEL.qsf")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 2048])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    cases = [(0, n) for n in args.tokens] + [(d, 1) for d in args.depths if d]
    if (0, 1) not in cases:
        cases.insert(0, (0, 1))
    ctx_tokens = max(depth + n for depth, n in cases) + 1
    model = binding.NativeModel(
        args.model,
        binding.Options(budget_bytes=0, n_threads=args.threads, ctx_tokens=ctx_tokens),
    )
    info = model.info()
    seconds = measure(model.create_session(), info.n_vocab, cases, args.rounds)
    one = statistics.median(seconds[0, 1])
    print(f"{args.model}, {info.isa_name}, {args.threads} threads, {args.rounds} rounds of 8\n")
    print("| tokens before | tokens in the pass | ms, median (least..most) | of one at depth 0 |")
    print("|---|---|---|---|")
    for (depth, n_tokens), all_seconds in seconds.items():
        median = statistics.median(all_seconds)
        print(
            f"| {depth} | {n_tokens} | {median * 1e3:.2f} "
            f"({min(all_seconds) * 1e3:.2f}..{max(all_seconds) * 1e3:.2f}) | {median / one:.2f} |"
        )


if __name__ == "__main__":
    main()
