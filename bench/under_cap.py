"""Measure QSF, and llama.cpp beside it, in a memory control group: where the limit is real.

For each limit the rounds take turns: the plain sequential read of the file (O_DIRECT, several
readers), `qsf-run` with a budget that equals the limit, the read again, and llama.cpp (mmap,
repacking off). Each is a process of its own that enters a new group before it starts
(memory_group.py); caches are dropped before each.

What is asked: the decode speed is at least 85 % of what the best read allows, which is
bandwidth / (bytes that a token needs - bytes that stay in memory), compared within a round; at
300M three times llama.cpp, at 3G four times; peaks below the limit, nobody killed.

Limits are in MB and GB of 2^20 and 2^30 bytes, as --ram-budget; bandwidth in 10^9 bytes, the mean
of the best before and after. Peak RSS is VmHWM at the end of the process; llama.cpp's has the
pages of the mapped file in it. The peak of a group has the page cache in it.

llama.cpp has a context of 256 tokens, the least that it makes: with 512 its KV cache alone, of
f16 at the 7B shape 256 MB, gets it killed at 300M. --peer-python needs llama-cpp-python, built as
peer.py describes.

Usage: python bench/under_cap.py MODEL.qsf [--peer PEER.gguf --peer-python PYTHON]
           [--limit 300M 512M 1G 2G 3G] [--tokens 64] [--rounds 3] [--io METHOD]
           [--max-seq-len N] [--disk-bench "build/bench/bench_disk --method direct"] [--json OUT]
"""

# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import re
import shlex
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memory_group import (
    FACTS_NAME,
    CapError,
    Outcome,
    drop_caches,
    limit_name,
    number_after,
    parse_limit,
    run_capped,
)

PROMPT = "Once upon a time"
ASKED_OF_DISK = 0.85
ASKED_OF_PEER = {300 << 20: 3.0, 3 << 30: 4.0}
READ_BYTES = 1 << 20


# ---- in the measured processes ----

# `qsf-run` and nothing more: all that is imported here, it imports too.
QSF_WORKER = """
import atexit, json, os
from dataclasses import asdict
from qsf.model import Model

def number(path, key):
    with open(path) as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key))

facts = {}

def counted(model):
    return {
        "disk_bytes": number("/proc/self/io", "read_bytes:"),
        "session": asdict(model.session_stats),
    }

def write():
    facts["peak_bytes"] = number("/proc/self/status", "VmHWM:") * 1024
    with open(os.environ["CAPPED_FACTS"], "w") as file:
        json.dump(facts, file)

atexit.register(write)
generate, leave = Model.generate, Model.__exit__

def begin(model, *arguments, **options):
    facts["before"] = counted(model)
    return generate(model, *arguments, **options)

def end(model, *error):
    if model.stats is not None:
        facts["after"] = counted(model)
        facts["info"] = asdict(model.info)
        facts["stats"] = asdict(model.stats)
        facts["rate"] = model.stats.step_rate
    return leave(model, *error)

Model.generate, Model.__exit__ = begin, end
from qsf.entry import run
run()
"""


def read_plainly(path: str, n_bytes: int, reader_counts: list[int]) -> None:
    """Print how fast the file can be read past the page cache, as bench_disk does."""
    file_bytes = Path(path).stat().st_size // READ_BYTES * READ_BYTES
    n_reads = min(n_bytes, file_bytes) // READ_BYTES
    if n_reads == 0:
        raise SystemExit(f"{path} has less than {READ_BYTES} bytes: no speed can be measured")
    rates: dict[str, float] = {}
    first = 0
    for n_readers in reader_counts:
        numbers = iter(range(first, first + n_reads))  # each count goes on where the last ended
        first += n_reads
        failures: list[OSError] = []

        def read(numbers: Iterator[int] = numbers, failures: list[OSError] = failures) -> None:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
                with mmap.mmap(-1, READ_BYTES) as buffer:
                    for number in numbers:
                        os.preadv(fd, [buffer], number * READ_BYTES % file_bytes)
                os.close(fd)
            except OSError as error:
                failures.append(error)

        threads = [threading.Thread(target=read) for _ in range(n_readers)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - began
        if failures:
            raise SystemExit(f"{path} cannot be read past the page cache: {failures[0]}")
        name = f"direct x{n_readers}"
        rates[name] = n_reads * READ_BYTES / seconds / 1e9
        print(f"{name} {rates[name]:.3f} GB/s")
    best = max(rates, key=rates.__getitem__)
    print(f"best {best} {rates[best]:.3f} GB/s")


def run_llama(path: str, n_threads: int, ctx_tokens: int, n_steps: int) -> dict[str, Any]:
    """Evaluate five tokens, then so many one at a time; returns the facts."""
    import llama_cpp as api

    lines: list[str] = []

    @api.llama_log_callback  # type: ignore[untyped-decorator]
    def keep(_level: int, text: bytes, _user: object) -> None:
        lines.append(text.decode("utf-8", "replace"))

    api.llama_log_set(keep, None)
    api.llama_backend_init()
    model_params = api.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model_params.use_extra_bufts = False  # no repacking: weights stay in the mapped file
    if hasattr(model_params, "load_mode"):
        model_params.load_mode = api.LLAMA_LOAD_MODE_MMAP
    else:
        model_params.use_mmap = True
    began = time.perf_counter()
    model = api.llama_model_load_from_file(path.encode(), model_params)
    params = api.llama_context_default_params()
    params.n_ctx = ctx_tokens
    params.n_threads = params.n_threads_batch = n_threads
    context = api.llama_init_from_model(model, params) if model else None
    if not context:
        raise SystemExit("".join(lines))
    load_seconds = time.perf_counter() - began

    def evaluate(tokens: list[int]) -> None:
        ids = (api.llama_token * len(tokens))(*tokens)
        if api.llama_decode(context, api.llama_batch_get_one(ids, len(tokens))):
            raise SystemExit("llama_decode failed")
        api.llama_synchronize(context)

    evaluate([1, 2, 3, 4, 5])
    disk_bytes = number_after(Path("/proc/self/io").read_text(), "read_bytes")
    seconds = []
    for token in range(6, 6 + n_steps):
        began = time.perf_counter()
        evaluate([token])
        seconds.append(time.perf_counter() - began)
    disk_bytes = number_after(Path("/proc/self/io").read_text(), "read_bytes") - disk_bytes
    buffers = re.findall(r"(\S+) model buffer size = +([\d.]+) MiB", "".join(lines))
    return {
        "rate": n_steps / sum(seconds),
        "seconds": seconds,
        "load_seconds": load_seconds,
        "disk_bytes_per_token": disk_bytes / n_steps,
        "peak_bytes": number_after(Path("/proc/self/status").read_text(), "VmHWM") * 1024,
        "engine": f"llama.cpp {api.__version__} " + " ".join(f"{k}:{n}" for k, n in buffers),
    }


def work(kind: str, plan: dict[str, Any]) -> None:
    """Be one of the measured processes."""
    if kind == "disk":
        read_plainly(plan["path"], plan["n_bytes"], plan["readers"])
        return
    facts = run_llama(**plan)
    Path(os.environ[FACTS_NAME]).write_text(json.dumps(facts))


# ---- what they found ----


def parse_best(output: str) -> tuple[str, float]:
    """Return how the disk was read fastest, and its GB/s, from the last line of bench_disk."""
    lines = output.strip().splitlines() or [""]
    found = re.fullmatch(r"best (\S+ x\d+) ([\d.]+) GB/s", lines[-1].strip())
    if found is None:
        raise ValueError(f"the reader of the disk ended with {lines[-1]!r}")
    return found[1], float(found[2])


@dataclass(frozen=True, slots=True)
class Round:
    """What ran in turn at one limit."""

    limit_bytes: int
    n_tokens: int  # that were asked for
    disk: Outcome
    qsf: Outcome
    disk_after: Outcome
    peer: Outcome | None = None
    load: float = 0.0  # of the machine when it began

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the best plain read, before and after."""
        best = [parse_best(done.output)[1] for done in (self.disk, self.disk_after)]
        return statistics.mean(best) * 1e9

    @property
    def n_passes(self) -> int:
        """Passes over the weights of the generation that was measured."""
        stats, plan = self.qsf.facts["stats"], self.qsf.facts["info"]["plan"]
        n_chunks = -(-stats["evaluated_tokens"] // plan["chunk_tokens"])
        return int(n_chunks + stats["step_tokens"])

    @property
    def streamed_bytes(self) -> float:
        """Bytes that a token needs and that do not stay in memory."""
        plan = self.qsf.facts["info"]["plan"]
        if "streamed_bytes" in plan:
            return float(plan["streamed_bytes"])
        after, before = (self.qsf.facts[when]["session"] for when in ("after", "before"))
        return float(after["read_bytes"] - before["read_bytes"]) / self.n_passes

    @property
    def disk_bytes_per_token(self) -> float:
        """Bytes that the kernel has read from the disk for the process, per pass."""
        facts = self.qsf.facts
        n_bytes = facts["after"]["disk_bytes"] - facts["before"]["disk_bytes"]
        return float(n_bytes) / self.n_passes

    @property
    def has_generated(self) -> bool:
        """Whether QSF did what it was asked for."""
        stats = self.qsf.facts.get("stats", {})
        return self.qsf.exit_code == 0 and stats.get("generated_tokens") == self.n_tokens

    @property
    def disk_limit(self) -> float | None:
        """Tokens per second that the disk allows; None: nothing is streamed."""
        return self.bandwidth / self.streamed_bytes if self.streamed_bytes else None

    @property
    def fraction(self) -> float | None:
        """The part of the disk's limit that QSF reaches."""
        return float(self.qsf.facts["rate"]) / self.disk_limit if self.disk_limit else None

    @property
    def ratio(self) -> float | None:
        """QSF's speed in that of the peer; None: there is no peer, or one of them failed."""
        rates = [done.facts.get("rate", 0.0) for done in (self.qsf, self.peer) if done is not None]
        return float(rates[0] / rates[1]) if len(rates) == 2 and all(rates) else None


def spread(measured: Iterable[float | None], digits: int = 2) -> str:
    """Median, with least and most behind it where there are several."""
    values = [value for value in measured if value is not None]
    if not values:
        return "-"
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.{digits}f}..{max(values):.{digits}f})"


def verdict(rounds: list[Round]) -> str:
    """Return PASS, or what is short of the issue's asks."""
    short = []
    for done in rounds:
        if not done.has_generated:
            reason = done.qsf.errors.strip().splitlines()[-1:] or ["nothing was said"]
            short.append(f"QSF ended with {done.qsf.exit_code}: {reason[0]}")
        if done.qsf.group["n_oom_kills"]:
            short.append("QSF was killed for its memory")
        for name, n_bytes in (
            ("RSS", done.qsf.peak_bytes),
            ("group", done.qsf.group.get("peak_bytes", 0)),
        ):
            if n_bytes > done.limit_bytes:
                short.append(f"peak of {name} {n_bytes / 2**20:.1f}M")
    whole = [done for done in rounds if done.has_generated]
    fractions = [done.fraction for done in whole if done.fraction is not None]
    if fractions and (reached := statistics.median(fractions)) < ASKED_OF_DISK:
        short.append(f"{100 * reached:.0f} of {100 * ASKED_OF_DISK:.0f} %")
    asked = ASKED_OF_PEER.get(rounds[0].limit_bytes)
    ratios = [done.ratio for done in whole if done.ratio is not None]
    if asked and ratios and statistics.median(ratios) < asked:
        short.append(f"{statistics.median(ratios):.2f}x of {asked:g}x")
    return f"short: {'; '.join(dict.fromkeys(short))}" if short else "PASS"


COLUMNS = (
    "limit",
    "read, GB/s",
    "MB a token",
    "disk allows, tok/s",
    "QSF, tok/s",
    "of it, %",
    "QSF peak RSS, group, MB",
    "llama.cpp, tok/s",
    "QSF / llama.cpp",
    "asked",
)


def row(rounds: list[Round]) -> tuple[str, ...]:
    """Return the cells of one limit."""
    whole = [done for done in rounds if done.has_generated]
    peers = [done.peer for done in rounds if done.peer is not None]
    rss = max(done.qsf.peak_bytes for done in rounds)
    group = max(done.qsf.group.get("peak_bytes", 0) for done in rounds)
    peer_rates = spread([peer.facts.get("rate") for peer in peers])
    failed = [peer.exit_code for peer in peers if "rate" not in peer.facts]
    return (
        limit_name(rounds[0].limit_bytes),
        spread([done.bandwidth / 1e9 for done in rounds]),
        spread([done.streamed_bytes / 1e6 for done in whole[:1]], 0),
        spread([done.disk_limit for done in whole]),
        spread([done.qsf.facts["rate"] for done in whole]),
        spread([done.fraction and 100 * done.fraction for done in whole], 0),
        f"{rss / 2**20:.1f}, {group / 2**20:.1f}",
        peer_rates + (f", ended with {failed[0]}" if failed else ""),
        spread([done.ratio for done in whole], 1),
        verdict(rounds),
    )


def table(all_rounds: dict[int, list[Round]]) -> str:
    """Return the table: median (least..most) of the rounds at each limit."""
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    lines += [row(rounds) for rounds in all_rounds.values() if rounds]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def describe(done: Round) -> dict[str, Any]:
    """Return all that is known of a round, for the JSON."""
    known = asdict(done) | {"bandwidth": done.bandwidth, "ratio": done.ratio}
    if done.has_generated:
        names = ("streamed_bytes", "disk_bytes_per_token", "disk_limit", "fraction")
        known |= {name: getattr(done, name) for name in names}
    return known


# ---- in the process that compares ----


def commands(args: argparse.Namespace, limit_bytes: int) -> dict[str, list[str]]:
    """Return what runs in a round."""
    worker = [__file__, "--worker"]
    plan: dict[str, Any] = {"path": str(args.model), "n_bytes": args.read, "readers": args.readers}
    disk = [sys.executable, *worker, "disk", json.dumps(plan)]
    if args.disk_bench is not None:
        disk = [*shlex.split(args.disk_bench), str(args.model)]
    qsf = [sys.executable, "-c", QSF_WORKER, str(args.model), "--prompt", PROMPT]
    qsf += ["--ram-budget", str(limit_bytes >> 20), "--max-tokens", str(args.tokens)]
    qsf += ["--temperature", "0", "--verbose"]
    qsf += ["--io", args.io] if args.io else []
    qsf += ["--threads", str(args.threads)] if args.threads else []
    qsf += ["--max-seq-len", str(args.max_seq_len)] if args.max_seq_len else []
    found = {"disk": disk, "qsf": qsf, "disk_after": disk}
    if args.peer is not None:
        plan = {"path": str(args.peer), "n_steps": args.peer_tokens}
        plan |= {"n_threads": args.threads or os.cpu_count() or 1}
        plan |= {"ctx_tokens": args.peer_context}
        found["peer"] = [args.peer_python, *worker, "llama", json.dumps(plan)]
    return found


def measure(args: argparse.Namespace, limit_bytes: int) -> Round:
    """Run one round."""
    outcomes = {}
    load = os.getloadavg()[0]
    for kind, command in commands(args, limit_bytes).items():
        if not args.warm and (why := drop_caches()):
            print(f"caches are not dropped, so a run may begin warm: {why}", file=sys.stderr)
        done = outcomes[kind] = run_capped(command, limit_bytes)
        if kind.startswith("disk") and done.exit_code != 0:
            raise SystemExit(f"{command[0]} ended with {done.exit_code}: {done.errors.strip()}")
        shown = f"{done.facts['rate']:.3f} tok/s, " if "rate" in done.facts else ""
        shown += f"{parse_best(done.output)[1]:.3f} GB/s, " if kind.startswith("disk") else ""
        shown += f"{done.wall_seconds:.1f} s, peak {done.peak_bytes / 2**20:.1f}M"
        shown += f", ended with {done.exit_code}" if done.exit_code else ""
        print(f"{limit_name(limit_bytes)} {kind}: {shown}", file=sys.stderr)
        if done.exit_code != 0:
            print(done.errors.strip()[-1000:], file=sys.stderr)
    return Round(limit_bytes, args.tokens, **outcomes, load=load)


def parse_arguments() -> argparse.Namespace:
    """Return the command line, parsed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    limits = [parse_limit(text) for text in ("300M", "512M", "1G", "2G", "3G")]
    parser.add_argument("model", metavar="MODEL.qsf", type=Path)
    parser.add_argument("--peer", metavar="PEER.gguf", type=Path)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--peer-tokens", type=int, default=6, help="it is slow (default: 6)")
    parser.add_argument("--peer-context", type=int, default=256, help="tokens (default: 256)")
    parser.add_argument("--limit", type=parse_limit, nargs="+", default=limits)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of QSF and llama.cpp")
    parser.add_argument("--io", metavar="METHOD", help="of qsf-run")
    parser.add_argument("--max-seq-len", type=int, metavar="N", help="of qsf-run")
    parser.add_argument("--disk-bench", metavar="COMMAND", help="reads the disk, not this script")
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--read", type=parse_limit, default=1 << 30, help="by each number of them")
    parser.add_argument("--warm", action="store_true", help="do not drop caches")
    parser.add_argument("--json", type=Path, help="also write everything there")
    return parser.parse_args()


def leave(number: int, _frame: object) -> None:
    """End as Ctrl-C does: the group must not stay behind."""
    raise SystemExit(128 + number)


def main() -> None:
    """Measure and print the table, or be one of the measured processes."""
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], json.loads(sys.argv[3]))
        return
    args = parse_arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    all_rounds: dict[int, list[Round]] = {limit: [] for limit in args.limit}
    try:
        for limit, rounds in all_rounds.items():
            for _ in range(args.rounds):
                rounds.append(measure(args, limit))
    except CapError as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        if any(all_rounds.values()):
            loads = spread(done.load for rounds in all_rounds.values() for done in rounds)
            print(f"\n{args.model.name}, {args.tokens} tokens, load before a round {loads}")
            print(f"Median (least..most) of up to {args.rounds} rounds\n\n{table(all_rounds)}")
        if args.json is not None:
            machine = {"system": platform.platform(), "n_cores": os.cpu_count()}
            rounds_known = [describe(done) for rounds in all_rounds.values() for done in rounds]
            known = {"command": sys.argv, "machine": machine, "rounds": rounds_known}
            args.json.write_text(json.dumps(known, indent=2), "utf-8")


if __name__ == "__main__":
    main()
