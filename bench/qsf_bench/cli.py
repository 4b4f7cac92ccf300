"""``python -m qsf.bench``: how fast models are in QSF and in llama.cpp, in turns.

The report goes to standard output, progress and errors to standard error.

Exit codes: 0 done, 1 failed, 2 wrong options, 130 interrupted, 143 terminated.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from qsf.errors import QsfArgumentError
from qsf.evaluate.evaluation import evaluate
from qsf.find.prepare import find_model
from qsf.model import Model
from qsf.native import binding, roofline
from qsf.options import ModelOptions, Size, Whole
from qsf.shell import command, typer_app
from qsf.shell.arguments import Parser, parser_of
from qsf.shell.output import check_output, write_text
from qsf.shell.progress import Steps
from qsf.system import process
from qsf_bench import table
from qsf_bench.files import FileFacts, default_folder, find_or_make, is_gguf, read_facts
from qsf_bench.memory_group import memory_group
from qsf_bench.models import shapes
from qsf_bench.models.random_gguf import BASELINE_TYPES
from qsf_bench.tasks import LLAMA, QSF, Runs, Task, Test, find_baseline, run_rounds
from qsf_bench.worker_llama import KV_TYPES
from qsf_converter.rounding.plan import QUANT_TYPES

PROGRAM = "python -m qsf.bench"
HOW = "`pip install xllamacpp` brings it in seconds, `make baseline` builds it for this processor"

KL_TOKENS = 512

Pair = tuple[FileFacts, FileFacts | None]  # QSF's file, and llama.cpp's of the same model


def main() -> NoReturn:
    """Run ``python -m qsf.bench`` on the command line's arguments and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run ``python -m qsf.bench`` and return its exit code."""

    def app(arguments: list[str], **_: Any) -> int:
        try:
            options = _parser().parse_args(arguments)
        except SystemExit:  # --help, --version
            return 0
        return bench_command(options)

    return typer_app.run(app, arguments, program=PROGRAM, when_cut_off="nothing was written")


def bench_command(options: argparse.Namespace) -> int:
    """Measure and report; returns the exit code. Raises QsfError."""
    check(options)
    baseline = "" if options.no_baseline else find_baseline()
    notes = [] if baseline or options.no_baseline else [f"llama.cpp was not measured: {HOW}"]
    if not baseline and options.baseline_model:
        raise QsfArgumentError(f"--baseline-model needs llama.cpp: {HOW}")
    steps = Steps(enabled=not options.quiet, program=PROGRAM)
    try:
        pairs = find_files(options, steps, with_baseline=bool(baseline))
        threads = options.threads or sorted({1, binding.describe_machine().n_cores})
        machine = describe_machine(threads, steps)
        kls = measure_kls(options, pairs, steps) if options.against else {}
        runs = [Runs(task) for task in tasks_of(options, pairs, threads)]
        stopped = None
        steps.begin(f"{options.rounds} rounds of {len(runs)} runs")
        try:
            run_rounds(runs, options.rounds, steps.update)
        except command.StoppedError as error:
            stopped = error
    finally:
        steps.close()
    for each in runs:
        notes += [f"{each.task.words}: {why}" for why in dict.fromkeys(each.failures)]
    facts = {str(each.path): each for pair in pairs for each in pair if each}
    baseline_of = {str(ours.path): str(theirs.path) for ours, theirs in pairs if theirs}
    rows = table.rows_of(runs, facts, baseline_of, kls)
    if kls:
        notes.append(
            f"KL: {KL_TOKENS} tokens against {options.against}; llama.cpp's: of its weights"
        )
    notes += [f"{name}: {version}" for name, version in {r.engine: r.version for r in rows}.items()]
    if stopped and not rows:
        raise stopped
    print(table.as_text(rows, machine, notes), end="", flush=True)
    if options.json:
        words = " ".join([PROGRAM, *(Path(word).name for word in sys.argv[1:])])
        text = table.as_json(rows, machine, notes, words)
        write_text(options.json, text, overwrite=True)
    if options.html:
        write_text(options.html, table.as_page(rows, machine, notes), overwrite=True)
    if stopped:
        stopped.outcome = "the report has what was measured until then"
        raise stopped
    return command.EXIT_FAILED if any(each.failures for each in runs) else 0


def check(options: argparse.Namespace) -> None:
    """Refuse options that exclude each other, and outputs that cannot be written."""
    if options.models and (options.shape or options.quant):
        raise QsfArgumentError("--shape and --quant are for random weights: leave MODEL out")
    if options.baseline_model and len(options.models) != 1:
        raise QsfArgumentError("--baseline-model needs one MODEL, which it is compared with")
    if options.no_baseline and options.baseline_model:
        raise QsfArgumentError("--baseline-model and --no-baseline exclude each other")
    if not tests_of(options):
        raise QsfArgumentError("--prompt 0 and --gen 0 leave nothing to measure")
    for cap_mb in options.cgroup:
        if any(mb > cap_mb for mb in options.ram_budget):
            raise QsfArgumentError(
                f"--ram-budget {max(options.ram_budget)} is more than --cgroup {cap_mb} MB allows"
            )
        with memory_group(cap_mb << 20):  # before minutes of making files: may this user do so?
            pass
    for path in (options.json, options.html):
        if path is not None and path in options.models:
            raise QsfArgumentError(f"{path} is read as well: give the output another name")
        if path is not None:
            check_output(path, overwrite=True)


def tests_of(options: argparse.Namespace) -> tuple[Test, ...]:
    """Return the tests; a pass of a model in a memory group takes seconds, so these are short."""
    prompts = options.prompt or [32 if options.cgroup else 512]
    gens = options.gen or [16 if options.cgroup else 128]
    depths = options.depth or [0]
    return (
        *(Test("pp", n, depth) for depth in depths for n in prompts if n),
        *(Test("tg", n, depth) for depth in depths for n in gens if n),
    )


# ---- files ----


def find_files(options: argparse.Namespace, steps: Steps, *, with_baseline: bool) -> list[Pair]:
    """Return the files to measure; converts and makes missing ones. Raises QsfError."""
    pairs: list[Pair] = []
    for path in options.models:
        ours = find_model(str(path), is_quiet=options.quiet)
        other = options.baseline_model or (path if path.is_file() and is_gguf(path) else None)
        pairs.append((read_facts(ours), read_facts(other) if other and with_baseline else None))
    ggufs = [theirs for _, theirs in pairs if theirs]
    if options.models and len(ggufs) == 1:  # .qsf files stand beside it
        n_weights = ggufs[0].n_weights
        pairs = [(a, ggufs[0] if a.n_weights == n_weights else b) for a, b in pairs]
    folder = options.cache or default_folder()
    for name in [] if options.models else options.shape or ["tinyllama-1.1b"]:
        shape = shapes.find_shape(name)
        for type_name in options.quant or ["4bit", "2bit"]:
            is_llama = with_baseline and shape.family == "llama"  # of others no GGUF is made
            other_type = BASELINE_TYPES.get(type_name) if is_llama else None
            paths = []
            for each in filter(None, (type_name, other_type)):
                steps.begin(f"random weights, {name} {each}")
                paths.append(
                    find_or_make(name, shape, each, folder, lambda n, all_: steps.update(n / all_))
                )
            theirs = read_facts(paths[1]) if other_type else None
            pairs.append((read_facts(paths[0]), theirs))
    n_tokens = max(test.ctx_tokens for test in tests_of(options))
    for facts, _ in pairs:
        if n_tokens > facts.max_tokens:
            raise QsfArgumentError(
                f"the tests need a context of {n_tokens} tokens, {facts.path.name} was made for "
                f"{facts.max_tokens}: --prompt, --gen and --depth ask for less"
            )
    return pairs


def tasks_of(
    options: argparse.Namespace, pairs: Sequence[Pair], threads: Sequence[int]
) -> list[Task]:
    """Return the tasks of a round: of each pair QSF's first, with all limits, then llama.cpp's."""
    tests, kv_type = tests_of(options), options.kv_type
    tasks = []
    for ours, theirs in pairs:
        for cap_mb in options.cgroup or [None]:
            for n_threads in threads:
                tasks += [
                    Task(QSF, str(ours.path), n_threads, tests, budget_mb, cap_mb, kv_type)
                    for budget_mb in options.ram_budget or [cap_mb or 0]
                ]
                if theirs is not None:
                    path = str(theirs.path)
                    tasks.append(Task(LLAMA, path, n_threads, tests, None, cap_mb, kv_type))
    return list(dict.fromkeys(tasks))


def measure_kls(
    options: argparse.Namespace, pairs: Sequence[Pair], steps: Steps
) -> dict[str, float]:
    """Return the KL divergence in nats from ``--against``, by path. Raises QsfError.

    A GGUF has that of the copy of its weights that QSF keeps.
    """
    path = find_model(options.against, is_quiet=options.quiet)
    bits = read_facts(path).bits_per_weight
    if bits < 8:
        raise QsfArgumentError(f"--against {options.against} has {bits:.1f} bits a weight: 8 or 16")
    text = Path(__file__).with_name("held_out.txt").read_text("utf-8")
    opening = ModelOptions(draft="off", max_seq_len=KL_TOKENS, kv_type="f16")
    kls = {}
    with Model.opened(path, opening) as reference:
        names = options.models or [ours.path for ours, _ in pairs]
        for given, (ours, _) in zip(names, pairs, strict=True):
            steps.begin(f"KL of {ours.path.name}")
            with Model.opened(ours.path, opening) as model:
                figures = evaluate(
                    model, text, ctx_tokens=KL_TOKENS, max_tokens=KL_TOKENS, against=reference,
                    progress=lambda n, n_all: steps.update(n / n_all),
                )  # fmt: skip
            if figures.kl_mean is not None:
                kls[str(given)] = kls[str(ours.path)] = figures.kl_mean
    return kls


def describe_machine(threads: Sequence[int], steps: Steps) -> str:
    """Return processor, cores, instruction set, and GB/s that plain loops read from memory."""
    steps.begin("the machine's memory")
    machine = binding.describe_machine()
    rates = roofline.measure_memory(threads, lambda _: None)
    speeds = [f"{rate:.0f} GB/s with {n}" for n, rate in rates.items()]
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return (
        f"{process.processor_name()}, {machine.n_cores} cores, {machine.isa_name}; memory reads "
        f"{', '.join(speeds)} thread(s){load}"
    )


# ---- options ----


def _list_of(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return a parser of comma-separated lists, whose errors argparse shows."""

    def parse_list(text: str) -> list[Any]:
        try:
            return [parse(part) for part in dict.fromkeys(text.split(","))]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_list


def _type_name(text: str) -> str:
    if text not in QUANT_TYPES:
        raise QsfArgumentError(f"{text} is unknown; available: {', '.join(QUANT_TYPES)}")
    return text


def _shape_name(text: str) -> str:
    shapes.find_shape(text)
    return text


class _Parser(Parser):
    def error(self, message: str) -> NoReturn:
        raise QsfArgumentError(f"{message.removeprefix('argument ')} (see {PROGRAM} --help)")


def _parser() -> _Parser:
    typed = command.typed(PROGRAM)
    parser = _Parser(
        prog=typed,
        usage=f"{typed} [OPTIONS] [MODEL ...]",
        description="Measure how fast models are here, in turns with llama.cpp.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    add, tokens = parser.add_argument, _list_of(Whole(0, 1 << 20).parse)
    # fmt: off
    add("models", nargs="*", type=Path, metavar="MODEL",
        help=".qsf files, or GGUF files, which both engines run (default: random weights)")
    add("--baseline-model", type=Path, metavar="FILE.gguf",
        help="what llama.cpp runs beside MODEL (default: the one GGUF among them)")
    add("--against", metavar="MODEL",
        help="add the KL divergence from MODEL, of 8 or 16 bits, over 512 tokens")
    add("--no-baseline", action="store_true", help="measure QSF alone")
    add("--shape", type=_list_of(_shape_name), metavar="NAME,...",
        help="shapes of random weights: see below (default: tinyllama-1.1b)")
    add("--quant", type=_list_of(_type_name), metavar="TYPE,...",
        help="types of random weights: see below (default: 4bit,2bit)")
    add("--threads", type=_list_of(Whole(1, 256).parse), metavar="N,...",
        help="numbers of threads (default: 1 and all cores)")
    add("--prompt", type=tokens, metavar="N,...",
        help="lengths of prompts in tokens; 0: none (default: 512; 32 with --cgroup)")
    add("--gen", type=tokens, metavar="N,...",
        help="numbers of tokens to generate; 0: none (default: 128; 16 with --cgroup)")
    add("--depth", type=tokens, metavar="N,...",
        help="tokens in the context before each test (default: 0)")
    add("--ram-budget", type=_list_of(Whole(0, 1 << 24).parse), metavar="MB,...", default=[],
        help="budgets of QSF, 0: none; llama.cpp has none (default: 0; the limit of --cgroup)")
    add("--cgroup", type=_list_of(Size(1, 1 << 24).parse), metavar="300M,...",
        default=[], help="run all in memory control groups (Linux, root or a delegated group)")
    add("--kv-type", choices=KV_TYPES, help="KV cache of both (default: QSF's own; f16)")
    add("--rounds", type=parser_of(Whole(1, 100)), default=3, metavar="N",
        help="rounds; each runs everything once (default: 3)")
    add("--json", type=Path, metavar="FILE", help="write the results as JSON, too")
    add("--html", type=Path, metavar="FILE", help="write the report as a web page, too")
    add("--cache", type=Path, metavar="FOLDER",
        help="folder of random weights (default: ~/.cache/qsf/bench)")
    add("-q", "--quiet", action="store_true", help="no progress on standard error")
    add("--version", action="version", version=command.version_line(PROGRAM),
        help="print the version")
    add("-h", "--help", action="help", help="show this help")
    # fmt: on
    return parser


_EPILOG = f"""\
Examples:
  qsf bench model-Q4_K_M.gguf
  qsf bench model.qsf --baseline-model model-Q4_K_M.gguf --threads 2 --depth 0,2048
  qsf bench model.qsf model-Q4_K_M.gguf --against model-Q8_0.gguf
  qsf bench --shape llama2-7b --quant 4bit --cgroup 300M
  qsf bench --quant 4bit --ram-budget 0,400,200 --html page.html

Shapes: {", ".join(shapes.SHAPES)}
Types: {", ".join(QUANT_TYPES)}

llama.cpp: {HOW}.

Exit codes: 0 done, 1 failed, 2 wrong options, 130 interrupted, 143 terminated."""
