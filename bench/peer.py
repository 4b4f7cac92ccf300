"""Measure QSF and llama.cpp beside each other: the same shapes, machine and minutes.

Every run is a process of its own that warms up first; the files take turns (A B C A B C ...), so
that what disturbs the machine disturbs all of them, and a first round is thrown away. The first
file is compared with each of the others, round by round. With `--quiet` a run waits until others
take less than so many percent of the processors, and is repeated if they come back (Linux only).

Tests, as those of llama-bench: pp512, a prompt of 512 tokens of which only the last one's logits
are wanted, and tg128, 128 tokens one at a time, with `--depth` tokens before them. llama.cpp is
set as llama-bench sets it: n_ubatch 512, KV cache of f16, flash attention and loading "auto", a
context just large enough. QSF has no ram_budget, and the KV cache and chunks it has by default.

A .qsf file is run with `qsf`, by this interpreter; a .gguf file by `--peer-python`, which needs
    CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python llama-cpp-python gguf
On processors with AMX, gcc 12 makes a llama.cpp that crashes: its `_tile_loadconfig` loses stores.
Another compiler, or flags without AMX (-DCMAKE_CXX_FLAGS=-mno-amx-int8 and the like), helps.

Usage: python bench/peer.py MODEL.qsf PEER.gguf ... [--threads 1 2] [--rounds 5] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Eval = Callable[["array[int]"], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What one process does."""

    path: str
    n_threads: int
    n_prompt: int
    n_steps: int
    depth: int


@dataclass(frozen=True, slots=True)
class Run:
    """What one process found: tokens per second of each test, and facts about file and engine."""

    rates: dict[str, float]
    n_weights: int
    peak_bytes: int
    engine: str


# ---- in the measured process ----


def random_tokens(n_tokens: int, n_vocab: int) -> array[int]:
    """Return tokens: the same in every process of one vocabulary."""
    chosen = random.Random(n_tokens)
    return array("I", (chosen.randrange(n_vocab) for _ in range(n_tokens)))


def run_tests(plan: Plan, n_vocab: int, open_context: Callable[[int], Any]) -> dict[str, float]:
    """Run the tests; ``open_context`` gives a context manager with (prompt, step, forget)."""
    rates = {}
    if plan.n_prompt:
        tokens = random_tokens(plan.n_prompt, n_vocab)
        with open_context(plan.n_prompt) as (prompt, _, forget):
            prompt(tokens)
            forget()
            began = time.perf_counter()
            prompt(tokens)
            rates[f"pp{plan.n_prompt}"] = plan.n_prompt / (time.perf_counter() - began)
    if plan.n_steps:
        before = random_tokens(max(1, plan.depth), n_vocab)
        tokens = random_tokens(plan.n_steps, n_vocab)
        with open_context(len(before) + 1 + plan.n_steps) as (prompt, step, _):
            prompt(before)
            step(tokens[:1])
            began = time.perf_counter()
            for i in range(plan.n_steps):
                step(tokens[i : i + 1])
            name = f"tg{plan.n_steps}" + (f" @ {plan.depth}" if plan.depth else "")
            rates[name] = plan.n_steps / (time.perf_counter() - began)
    return rates


def run_qsf(plan: Plan) -> Run:
    """Measure QSF in this process."""
    from qsf import _native

    def options(n_tokens: int) -> _native.Options:
        return _native.Options(budget_bytes=0, n_threads=plan.n_threads, ctx_tokens=n_tokens)

    @contextmanager
    def open_context(n_tokens: int) -> Iterator[tuple[Eval, Eval, Callable[[], None]]]:
        model = _native.NativeModel(plan.path, options(n_tokens))
        session = model.create_session()

        def prompt(tokens: array[int]) -> None:
            while session.sync_chunk(tokens) < len(tokens):
                pass

        yield prompt, lambda tokens: session.step(tokens[0]), lambda: session.rewind(0)
        session.close()
        model.close()

    model = _native.NativeModel(plan.path, options(8))
    info = model.info()
    model.close()
    rates = run_tests(plan, info.n_vocab, open_context)
    peak_bytes = _native.describe_machine().peak_bytes
    return Run(rates, info.n_parameters, peak_bytes, f"QSF {_native.version()} {info.isa_name}")


def run_llama(plan: Plan) -> Run:
    """Measure llama.cpp in this process."""
    import resource

    import llama_cpp as api

    lines: list[str] = []

    @api.llama_log_callback  # type: ignore[untyped-decorator]
    def keep(_level: int, text: bytes, _user: object) -> None:
        lines.append(text.decode("utf-8", "replace"))

    api.llama_log_set(keep, None)
    api.llama_backend_init()
    model_params = api.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model = api.llama_model_load_from_file(plan.path.encode(), model_params)
    if not model:
        raise SystemExit("".join(lines))

    @contextmanager
    def open_context(n_tokens: int) -> Iterator[tuple[Eval, Eval, Callable[[], None]]]:
        params = api.llama_context_default_params()
        params.n_ctx = n_tokens
        params.n_batch = 2048
        params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = plan.n_threads
        context = api.llama_init_from_model(model, params)
        if not context:
            raise SystemExit("".join(lines))

        def evaluate(tokens: array[int]) -> None:
            for first in range(0, len(tokens), 2048):
                some = tokens[first : first + 2048]
                ids = (api.llama_token * len(some))(*some)
                if api.llama_decode(context, api.llama_batch_get_one(ids, len(some))):
                    raise SystemExit("llama_decode failed")
            api.llama_synchronize(context)

        memory = api.llama_get_memory(context)
        yield evaluate, evaluate, lambda: api.llama_memory_clear(memory, False)
        api.llama_free(context)

    n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    rates = run_tests(plan, n_vocab, open_context)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    buffers = re.findall(r"(\S+) model buffer size = +([\d.]+) MiB", "".join(lines))
    engine = f"llama.cpp {api.__version__} " + " ".join(f"{k}:{size}" for k, size in buffers)
    return Run(rates, api.llama_model_n_params(model), peak_bytes, engine)


# ---- in the process that compares ----


def seconds_of_others(pid: int) -> float:
    """Return the processor time that the machine has spent, but on that process."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split()[1:9]]
    own = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    busy = sum(ticks) - ticks[3] - ticks[4] - int(own[11]) - int(own[12])  # 3, 4: idle
    return busy / os.sysconf("SC_CLK_TCK")


def is_disturbed(pid: int, quiet: float, wait: Callable[[], object]) -> bool:
    """Whether others than that process take more than ``quiet`` percent while ``wait`` waits."""
    began, before = time.monotonic(), seconds_of_others(pid)
    wait()
    n_cores = os.cpu_count() or 1
    taken = (seconds_of_others(pid) - before) / (time.monotonic() - began) / n_cores
    return 100 * taken > quiet


def measure(plan: Plan, peer_python: str, quiet: float) -> Run | None:
    """Run one process; None: others disturbed it."""
    n_waits = 0
    while quiet < 100 and is_disturbed(os.getpid(), quiet, lambda: time.sleep(0.5)):
        n_waits += 1
        if n_waits % 120 == 0:
            print(f"{plan.path}: waiting, others use the processors", file=sys.stderr)
    is_peer = plan.path.endswith(".gguf")
    command = [peer_python if is_peer else sys.executable, __file__, "--worker"]
    command.append(json.dumps(asdict(plan)))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while quiet < 100 and process.poll() is None:
            if is_disturbed(process.pid, quiet, lambda: time.sleep(0.5)):
                process.kill()
                return None
        output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{plan.path}: the measuring process failed ({process.returncode})")
    return Run(**json.loads(output.splitlines()[-1]))


def measure_until_quiet(plan: Plan, peer_python: str, quiet: float) -> Run:
    """Run one process, again and again while others disturb it."""
    while (run := measure(plan, peer_python, quiet)) is None:
        pass
    return run


def spread(values: list[float]) -> str:
    """Median, with least and most behind it."""
    digits = 2 if max(values) < 10 else 1
    middle = f"{statistics.median(values):.{digits}f}"
    return f"{middle} ({min(values):.{digits}f}..{max(values):.{digits}f})"


def describe(plans: list[Plan], peer_python: str, quiet: float) -> list[dict[str, Any]]:
    """Print and return what the files and engines are; the run for it is the warm-up of all."""
    print("| file | MB | bits per weight | peak MB | engine |\n|---|---|---|---|---|")
    facts = []
    for plan in plans:
        run = measure_until_quiet(plan, peer_python, quiet)
        name, n_bytes = Path(plan.path).name, Path(plan.path).stat().st_size
        bits = 8 * n_bytes / run.n_weights
        peak_mb = run.peak_bytes / 1e6
        print(f"| {name} | {n_bytes / 1e6:.0f} | {bits:.2f} | {peak_mb:.0f} | {run.engine} |")
        facts.append({"path": plan.path, "bytes": n_bytes, "bits_per_weight": bits})
        facts[-1] |= {"engine": run.engine, "peak_bytes": run.peak_bytes}
    return facts


def compare(
    plans: list[Plan], n_rounds: int, peer_python: str, quiet: float
) -> list[dict[str, Any]]:
    """Measure files in turn, print a row for each test and file, and return the rows."""
    rounds = [
        [measure_until_quiet(plan, peer_python, quiet) for plan in plans] for _ in range(n_rounds)
    ]
    rows = []
    for test in rounds[0][0].rates:
        for i, plan in enumerate(plans):
            rates = [runs[i].rates[test] for runs in rounds]
            ratios = [runs[0].rates[test] / runs[i].rates[test] for runs in rounds]
            shown = f"{Path(plan.path).name} | {plan.n_threads} | {test} | {spread(rates)}"
            print(f"| {shown} | {spread(ratios) if i else '-'} |", flush=True)
            peak_bytes = max(runs[i].peak_bytes for runs in rounds)
            rows.append(asdict(plan) | {"test": test, "rates": rates, "peak_bytes": peak_bytes})
    return rows


def main() -> None:
    """Compare the files of the command line, or be one of the measured processes."""
    if sys.argv[1:2] == ["--worker"]:
        plan = Plan(**json.loads(sys.argv[2]))
        run = run_llama(plan) if plan.path.endswith(".gguf") else run_qsf(plan)
        print(json.dumps(asdict(run)))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="+", metavar="FILE", help="a .qsf or .gguf file")
    parser.add_argument("--peer-python", default=sys.executable, help="runs the .gguf files")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512, help="tokens; 0: no such test")
    parser.add_argument("--steps", type=int, default=128, help="tokens; 0: no such test")
    parser.add_argument("--depth", type=int, default=0, help="tokens before the steps")
    parser.add_argument("--quiet", type=float, default=100, help="percent; 100: all runs count")
    parser.add_argument("--json", type=Path, help="also write every measured number there")
    args = parser.parse_args()
    how = (args.peer_python, args.quiet)
    tests = (args.prompt, args.steps, args.depth)
    plans = [[Plan(file, n_threads, *tests) for file in args.files] for n_threads in args.threads]
    facts = describe(plans[0], *how)
    print(f"\nMedian (least..most) of {args.rounds} rounds, load before {os.getloadavg()[0]:.2f}\n")
    print("| file | threads | test | tok/s | first file / this |\n|---|---|---|---|---|")
    rows = []
    for of_threads in plans:
        rows += compare(of_threads, args.rounds, *how)
    if args.json:
        args.json.write_text(json.dumps({"files": facts, "rows": rows}, indent=2), "utf-8")


if __name__ == "__main__":
    main()
