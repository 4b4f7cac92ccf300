"""The request of a run of ``python -m qsf.bench``: options, checked against each other."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from qsf.errors import QsfArgumentError
from qsf_bench.models.shapes import find_shape
from qsf_bench.options import DEFAULT_ROUTING, DEFAULT_SHAPE, DEFAULT_TYPES, Options
from qsf_bench.run.tasks import LLAMA, LLAMA_KV_TYPES, Test, setting_words

NO_BASELINE = "none"

# A pass of a streamed model takes seconds, so the default tests are short.
_DEFAULT_PROMPT, _DEFAULT_GEN = 512, 128
_CAPPED_PROMPT, _CAPPED_GEN = 32, 16


@dataclass(frozen=True, slots=True)
class Setting:
    """Threads and memory limits with which all files are measured."""

    n_threads: int
    budget_mb: int | None  # of QSF
    cap_mb: int | None  # of the memory control group

    @property
    def has_baseline(self) -> bool:
        """True if a baseline can run with this limit: baselines have no budget, only a group's
        limit.
        """
        return self.budget_mb is None or self.cap_mb is not None

    def __str__(self) -> str:
        budget_mb = None if self.budget_mb == self.cap_mb else self.budget_mb
        return setting_words(self.n_threads, budget_mb, self.cap_mb)


@dataclass(frozen=True, slots=True)
class Request:
    """The options, and values derived from them."""

    options: Options
    shapes: tuple[str, ...]  # of random weights with `types`; none: the options name models
    types: tuple[str, ...]
    settings: tuple[Setting, ...]
    tests: tuple[Test, ...]
    llama: bool | None  # True: required, False: not used, None: used if installed


def make_request(options: Options, *, n_cores: int) -> Request:
    """Fill in the defaults, some of which depend on the cores, and refuse options that exclude each
    other.

    Raises:
        QsfArgumentError: an option contradicts another.
    """
    llama = _wants_llama(options)
    _refuse_conflicts(options, llama)
    memory = _memory(options)
    if llama and not any(Setting(1, *limits).has_baseline for limits in memory):
        budgets = ",".join(map(str, options.ram_budget or ()))
        raise QsfArgumentError(
            f"llama.cpp cannot run beside --ram-budget {budgets}, for it has no budget: "
            "--ram-budget none measures both, --cgroup limits both"
        )
    is_capped = options.cgroup is not None
    threads = options.threads or ((n_cores,) if is_capped or n_cores == 1 else (1, n_cores))
    return Request(
        options=options,
        shapes=() if options.models else options.shape or (DEFAULT_SHAPE,),
        types=() if options.models else options.quant or DEFAULT_TYPES,
        settings=tuple(Setting(n, budget, cap) for budget, cap in memory for n in threads),
        tests=_tests(options, is_capped=is_capped),
        llama=llama,
    )


def _memory(options: Options) -> list[tuple[int | None, int | None]]:
    """Return pairs of budget and group limit in MB."""
    caps: tuple[int | None, ...] = options.cgroup or (None,)
    if options.ram_budget is None:
        return [(cap, cap) for cap in caps]
    for cap in caps:
        for budget in options.ram_budget:
            if cap is not None and (budget is None or budget > cap):
                raise QsfArgumentError(
                    f"--ram-budget {budget or 'none'} is more than --cgroup {cap}M allows: QSF "
                    "would be killed there"
                )
    return [(budget, cap) for cap in caps for budget in options.ram_budget]


def _tests(options: Options, *, is_capped: bool) -> tuple[Test, ...]:
    prompts = options.prompt or (_CAPPED_PROMPT if is_capped else _DEFAULT_PROMPT,)
    gens = options.gen or (_CAPPED_GEN if is_capped else _DEFAULT_GEN,)
    evens = [routing != DEFAULT_ROUTING for routing in options.routing]
    tests = [Test("pp", n, at, e) for at in options.depth for n in prompts if n for e in evens]
    tests += [Test("tg", n, at, e) for at in options.depth for n in gens if n for e in evens]
    if not tests:
        raise QsfArgumentError("--prompt 0 and --gen 0 leave nothing to measure")
    return tuple(tests)


# ---- baselines ----


def _wants_llama(options: Options) -> bool | None:
    """Return whether llama-cpp-python must be measured; None: if it is installed."""
    named = dict.fromkeys(options.baseline)
    for name in named:
        if name not in (LLAMA, NO_BASELINE):
            raise QsfArgumentError(
                f"--baseline {name} is unknown; available: {LLAMA}, {NO_BASELINE}"
            )
    if len(named) > 1:
        raise QsfArgumentError(
            f"--baseline {LLAMA} and --baseline {NO_BASELINE} exclude each other"
        )
    if not named:
        return True if options.baseline_python or options.baseline_model else None
    return LLAMA in named


def _refuse_conflicts(options: Options, llama: bool | None) -> None:
    """Refuse options that contradict each other."""
    models, gguf = options.models, options.baseline_model
    if models and (options.shape is not None or options.quant is not None):
        name = "--shape" if options.shape is not None else "--quant"
        raise QsfArgumentError(f"{name} is for random weights: leave it out beside MODEL")
    if options.routing != (DEFAULT_ROUTING,):
        _refuse_routing(options)
    for name, n_times in Counter(path.name for path in [*models, *dict.fromkeys(gguf)]).items():
        if n_times > 1:
            raise QsfArgumentError(
                f"{n_times} files are called {name}: results are told apart by names, so give "
                "each file once, with one of its own"
            )
    if llama is False and options.baseline_python is not None:
        raise QsfArgumentError("--baseline-python is of no use with --baseline none")
    if llama is False and gguf:
        raise QsfArgumentError("--baseline-model is of no use with --baseline none")
    if gguf and len(gguf) != len(models):
        raise QsfArgumentError(
            f"there are {len(models)} MODELs and {len(gguf)} --baseline-model: each MODEL needs "
            "its own, in the same order"
        )
    if options.kv_type not in (None, *LLAMA_KV_TYPES) and llama:
        raise QsfArgumentError(
            f"--kv-type {options.kv_type} is QSF's alone: llama.cpp has "
            f"{', '.join(LLAMA_KV_TYPES)}, or leave it out with --baseline {NO_BASELINE}"
        )


def _refuse_routing(options: Options) -> None:
    name = f"--routing {','.join(options.routing)}"
    if options.models:
        raise QsfArgumentError(f"{name} is for random weights: leave it out beside MODEL")
    for shape in options.shape or (DEFAULT_SHAPE,):
        if not find_shape(shape).n_experts:
            raise QsfArgumentError(f"{name} is for shapes with experts, and {shape} has none")
