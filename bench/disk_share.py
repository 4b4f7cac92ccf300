"""Time tokens of a mixture against what memory and a disk of known speed allow; see slow_disk.c.

Usage: python bench/disk_share.py MODEL.qsf BUDGET_MB FILL N MB_S,... ROUNDS. FILL tokens fill the
slots of experts at full speed, then N are timed at each speed of the disk, by turns. With N = 0 a
prompt of 1024 tokens is timed instead. The limit: weights that every token needs from memory, and
then the bytes that were read at the disk's speed.
"""
# SPDX-License-Identifier: Apache-2.0

import os
import sys
import time
from pathlib import Path
from statistics import median

from qsf.native import binding
from qsf.native.opening import open_native
from qsf.options import ModelOptions
from qsf_bench.models.facts import read_facts
from qsf_bench.run.worker_qsf import tokens_of

path, budget_mb, n_fill, n_timed = Path(sys.argv[1]), *map(int, sys.argv[2:5])
rates, n_rounds = sys.argv[5].split(","), int(sys.argv[6])
os.environ["SLOW_READS_MB_S"] = "0"
memory = 1e9 * binding.measure_roofline(2, 1 << 30, 400).read_gb_per_s
n_ctx = max(1024, n_fill + n_timed * len(rates) * n_rounds) + 8
model = open_native(
    path,
    ModelOptions(ram_budget=budget_mb, threads=2, max_seq_len=n_ctx, io="direct", draft="off"),
)
info, session = model.info(), model.create_session()
tokens = tokens_of(n_ctx, info.n_vocab, is_even=False)
for token in tokens[:n_fill]:
    session.step(token)
of_plan = info.plan.expert_token_bytes + info.plan.streamed_bytes
first_seconds = max(0, read_facts(path).token_bytes - of_plan) / memory
rows = {rate: [] for rate in rates}
at = n_fill
for rate in rates * n_rounds:
    os.environ["SLOW_READS_MB_S"] = rate
    before, began, n_done = session.stats(), time.perf_counter(), 0
    if n_timed == 0:
        session.rewind(0)
    while n_timed == 0 and n_done < 1024:
        n_done = session.sync_chunk(tokens[:1024])
    for token in tokens[at : at + n_timed]:
        session.step(token)
    n = n_timed or 1024
    seconds = (time.perf_counter() - began) / n
    read_bytes = (session.stats().read_bytes - before.read_bytes) / n
    limit = first_seconds + read_bytes / (float(rate) * 1e6)
    rows[rate].append((limit / seconds, 1 / seconds, read_bytes / 1e6))
    at += n_timed
for rate, values in rows.items():
    share, speed, read_mb = ([row[i] for row in values] for i in range(3))
    print(
        f"{budget_mb} MB, {rate} MB/s: {median(speed):.3g} tok/s ({min(speed):.3g}-{max(speed):.3g}), "
        f"{median(read_mb):.0f} MB read a token, {100 * median(share):.0f} % of the limit "
        f"({100 * min(share):.0f}-{100 * max(share):.0f})"
    )
