"""What a run of ``python -m qsf.bench`` is to do: its options, checked, with their defaults."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from qsf.bench.models.shapes import find_shape, name_of
from qsf.bench.options import DEFAULT_SHAPE, DEFAULT_TYPES, MODEL_OPTIONS, Options
from qsf.bench.run.llama_bench import KV_TYPES as BASELINE_KV_TYPES
from qsf.bench.run.memory_group import parse_limit
from qsf.bench.run.tasks import LLAMA, QSF, Test, setting_words
from qsf.errors import QsfArgumentError
from qsf.options import parse_kv_type
from qsf_converter.rounding.plan import QUANT_TYPES

NO_BASELINE = "none"

_MAX_THREADS = 256
_MAX_TOKENS = 1 << 20
_MAX_MB = 1 << 24
_T = TypeVar("_T")

# A pass of a streamed model takes seconds: there the tests are short unless asked otherwise.
_DEFAULT_PROMPT, _DEFAULT_GEN = 512, 128
_CAPPED_PROMPT, _CAPPED_GEN = 32, 16


@dataclass(frozen=True, slots=True)
class Setting:
    """Threads and memory limits that all files are measured under."""

    n_threads: int
    budget_mb: int | None  # of QSF
    cap_mb: int | None  # of the memory control group

    @property
    def has_baseline(self) -> bool:
        """Whether a baseline can run under it: it has no budget, only a group's limit."""
        return self.budget_mb is None or self.cap_mb is not None

    def __str__(self) -> str:
        """Return it in words."""
        budget_mb = None if self.budget_mb == self.cap_mb else self.budget_mb
        return setting_words(self.n_threads, budget_mb, self.cap_mb)


@dataclass(frozen=True, slots=True)
class Request:
    """The options, checked. MB are 2^20 bytes."""

    models: tuple[Path, ...]  # .qsf files of different names; none: `shapes` in `types`
    baseline_models: tuple[Path, ...]  # .gguf files, one for each model; none: random weights
    shapes: tuple[str, ...]
    types: tuple[str, ...]
    settings: tuple[Setting, ...]
    tests: tuple[Test, ...]
    n_rounds: int
    llama: bool | None  # llama-cpp-python: must be there, must not be used, None: if installed
    llama_python: Path | None
    programs: dict[str, Path]  # llama-bench programs by the user's names
    kv_type: str | None
    io: str | None
    cache: Path | None
    is_cold: bool  # the file leaves the page cache before runs that stream


def make_request(options: Options, *, n_cores: int) -> Request:
    """Check the options and fill in the defaults, some of which depend on the cores.

    Raises:
        QsfArgumentError: an option is wrong, or cannot be honoured beside another.
    """
    llama, programs = _baselines(options)
    _refuse_conflicts(options, llama, programs)
    caps = (None,) if options.cgroup is None else _list_of(options.cgroup, "--cgroup", _cap)
    memory = _memory(options, caps)
    if (llama or programs) and not any(Setting(1, *limits).has_baseline for limits in memory):
        raise QsfArgumentError(
            f"llama.cpp cannot run beside --ram-budget {options.ram_budget}, for it has no budget: "
            "--ram-budget none measures both, --cgroup limits both"
        )
    all_cores = str(n_cores) if caps != (None,) or n_cores == 1 else f"1,{n_cores}"
    threads = options.threads if options.threads is not None else all_cores
    return Request(
        models=options.models,
        baseline_models=options.baseline_model,
        shapes=()
        if options.models
        else _list_of(
            DEFAULT_SHAPE if options.shape is None else options.shape, "--shape", _shape_name
        ),
        types=() if options.models else _types(options.quant),
        settings=tuple(
            Setting(n, budget, cap)
            for budget, cap in memory
            for n in _list_of(threads, "--threads", _whole(1, _MAX_THREADS))
        ),
        tests=_tests(options, is_capped=caps != (None,)),
        n_rounds=options.rounds,
        llama=llama,
        llama_python=options.baseline_python,
        programs=programs,
        kv_type=options.kv_type,
        io=None if options.io == "auto" else options.io,
        cache=options.cache,
        is_cold=not options.warm,
    )


def _memory(options: Options, caps: tuple[int | None, ...]) -> list[tuple[int | None, int | None]]:
    """Return pairs of budget and group limit in MB."""
    if options.ram_budget is None:
        return [(cap, cap) for cap in caps]
    budgets = _list_of(options.ram_budget, "--ram-budget", _budget)
    for cap in caps:
        for budget in budgets:
            if cap is not None and (budget is None or budget > cap):
                raise QsfArgumentError(
                    f"--ram-budget {budget or 'none'} is more than --cgroup {cap}M allows: QSF "
                    "would be killed there"
                )
    return [(budget, cap) for cap in caps for budget in budgets]


def _tests(options: Options, *, is_capped: bool) -> tuple[Test, ...]:
    sizes = {}
    for name, asked, usual in (
        ("--prompt", options.prompt, _CAPPED_PROMPT if is_capped else _DEFAULT_PROMPT),
        ("--gen", options.gen, _CAPPED_GEN if is_capped else _DEFAULT_GEN),
        ("--depth", options.depth, 0),
    ):
        text = str(usual) if asked is None else asked
        sizes[name] = _list_of(text, name, _whole(0, _MAX_TOKENS))
    tests = [Test("pp", n, at) for at in sizes["--depth"] for n in sizes["--prompt"] if n]
    tests += [Test("tg", n, at) for at in sizes["--depth"] for n in sizes["--gen"] if n]
    if not tests:
        raise QsfArgumentError("--prompt 0 and --gen 0 leave nothing to measure")
    return tuple(tests)


# ---- baselines ----


def _baselines(options: Options) -> tuple[bool | None, dict[str, Path]]:
    """Return whether llama-cpp-python is wanted, and the llama-bench programs by name."""
    llama: bool | None = None
    programs: dict[str, Path] = {}
    for value in options.baseline:
        name, is_program, path = value.partition("=")
        if value in (LLAMA, NO_BASELINE):
            if llama not in (None, value == LLAMA):
                raise QsfArgumentError(f"--baseline {LLAMA} and --baseline {NO_BASELINE} exclude "
                                       "each other")  # fmt: skip
            llama = value == LLAMA
        elif not is_program:
            raise QsfArgumentError(
                f"--baseline {value} is unknown; available: {LLAMA}, {NO_BASELINE}, or NAME=PATH "
                "of a llama-bench"
            )
        elif not re.fullmatch(r"[\w.+-]{1,32}", name) or name in (LLAMA, QSF, NO_BASELINE):
            raise QsfArgumentError(
                f"--baseline {value}: the name must be 1 to 32 letters, digits or .+-_, and not "
                f"{LLAMA}, {QSF} or {NO_BASELINE}"
            )
        elif name in programs:
            raise QsfArgumentError(f"--baseline {name} is given twice: each needs its own name")
        else:
            programs[name] = Path(path)
    if llama is None and (options.baseline_python or options.baseline_model) and not programs:
        llama = True
    return llama, programs


def _refuse_conflicts(options: Options, llama: bool | None, programs: dict[str, Path]) -> None:
    """Refuse what cannot be honoured together."""
    models, gguf = options.models, options.baseline_model
    if models and (options.shape is not None or options.quant is not None):
        name = "--shape" if options.shape is not None else "--quant"
        raise QsfArgumentError(f"{name} is for random weights: leave it out beside MODEL")
    for name, n_times in Counter(path.name for path in [*models, *dict.fromkeys(gguf)]).items():
        if n_times > 1:
            raise QsfArgumentError(
                f"{n_times} files are called {name}: results are told apart by names, so give "
                "each file once, with one of its own"
            )
    if llama is False and options.baseline_python is not None:
        raise QsfArgumentError("--baseline-python is of no use with --baseline none")
    if llama is False and gguf and not programs:
        raise QsfArgumentError("--baseline-model is of no use with --baseline none")
    if gguf and len(gguf) != len(models):
        raise QsfArgumentError(
            f"there are {len(models)} MODELs and {len(gguf)} --baseline-model: each MODEL needs "
            "its own, in the same order"
        )
    if options.rounds not in range(1, 101):
        raise QsfArgumentError(f"--rounds {options.rounds}: expected 1 to 100")
    io_methods = MODEL_OPTIONS["io"].kind.choices or ()
    if options.io is not None and options.io not in io_methods:
        raise QsfArgumentError(f"--io {options.io} is unknown; available: {', '.join(io_methods)}")
    _check_kv_type(options.kv_type, is_baseline_wanted=bool(llama or programs))


def _check_kv_type(text: str | None, *, is_baseline_wanted: bool) -> None:
    if text is None:
        return
    try:
        parse_kv_type(text)
    except ValueError as error:
        raise QsfArgumentError(f"--kv-type: {error}") from None
    if text not in BASELINE_KV_TYPES and is_baseline_wanted:
        raise QsfArgumentError(
            f"--kv-type {text} is QSF's alone: llama.cpp has {', '.join(BASELINE_KV_TYPES)}, or "
            f"leave it out with --baseline {NO_BASELINE}"
        )


# ---- lists ----


def _list_of(text: str, option: str, parse: Callable[[str], _T]) -> tuple[_T, ...]:
    """Return the parts of "1,2", each once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise QsfArgumentError(f"{option} {text!r} is not a list such as 1,2")
    try:
        return tuple(dict.fromkeys(parse(part) for part in parts))
    except ValueError as error:
        raise QsfArgumentError(f"{option}: {error}") from None


def _whole(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = int(text) if re.fullmatch(r"[0-9]{1,12}", text) else -1
        if not least <= number <= most:
            raise ValueError(f"{text!r} is not a whole number from {least} to {most}")
        return number

    return parse


def _budget(text: str) -> int | None:
    if text == "none":
        return None
    try:
        return _whole(1, _MAX_MB)(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number of MB, or none") from None


def _cap(text: str) -> int:
    """Return the MB of "300M" or "1.5G"."""
    return parse_limit(text) >> 20


def _types(quant: str | None) -> tuple[str, ...]:
    types = _list_of(quant, "--quant", str) if quant is not None else DEFAULT_TYPES
    for name in types:
        if name not in QUANT_TYPES:
            raise QsfArgumentError(
                f"--quant {name} is unknown; available: {', '.join(QUANT_TYPES)}"
            )
    return types


def _shape_name(text: str) -> str:
    return name_of(find_shape(text))
