"""What a run of ``python -m qsf.bench`` is to do: its options, checked, with their defaults."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from qsf.bench.memory_group import parse_limit
from qsf.bench.shapes import find_shape, name_of
from qsf.bench.tasks import Test
from qsf.bench.worker_llama import KV_TYPES as PEER_KV_TYPES
from qsf.errors import QsfArgumentError
from qsf.options import IO_METHODS, parse_kv_type
from qsf_converter.rounding.plan import QUANT_TYPES

DEFAULT_SHAPE = "tinyllama-1.1b"
DEFAULT_TYPES = ("4bit", "2bit")
DEFAULT_ROUNDS = 3
NO_PEER = "none"
PEER = "llama.cpp"

_MAX_THREADS = 256
_MAX_TOKENS = 1 << 20
_MAX_MB = 1 << 24
_T = TypeVar("_T")

# A pass of a streamed model takes seconds: there the tests are short unless asked otherwise.
_DEFAULT_PROMPT, _DEFAULT_GEN = 512, 128
_CAPPED_PROMPT, _CAPPED_GEN = 32, 16


@dataclass(frozen=True, slots=True)
class Setting:
    """Under what all files are measured: one of memory and threads."""

    n_threads: int
    budget_mb: int | None  # of QSF
    cap_mb: int | None  # of the memory control group

    @property
    def has_peer(self) -> bool:
        """Whether the peer can be set so: it has no budget, only a group's limit."""
        return self.budget_mb is None or self.cap_mb is not None

    def __str__(self) -> str:
        """Return it in words."""
        words = [f"{self.n_threads} thread{'' if self.n_threads == 1 else 's'}"]
        if self.budget_mb is not None and self.budget_mb != self.cap_mb:
            words.append(f"budget {self.budget_mb} MB")
        if self.cap_mb is not None:
            words.append(f"cgroup {self.cap_mb} MB")
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Request:
    """The options, checked. MB are 2^20 bytes."""

    models: tuple[Path, ...]  # .qsf files of different names; none: `shapes` in `types`
    peer_models: tuple[Path, ...]  # .gguf files, one for each model; none: random weights
    shapes: tuple[str, ...]
    types: tuple[str, ...]
    settings: tuple[Setting, ...]
    tests: tuple[Test, ...]
    n_rounds: int
    peer: str | None  # PEER: it must be there; None: if it is there; NO_PEER
    peer_python: Path | None
    kv_type: str | None
    io: str | None
    cache: Path | None
    is_cold: bool  # the file leaves the page cache before runs that stream
    text: Path | None
    against: Path | None


def make_request(
    models: Sequence[Path],
    *,
    n_cores: int,
    shape: str | None = None,
    quant: str | None = None,
    threads: str | None = None,
    prompt: str | None = None,
    gen: str | None = None,
    depth: str = "0",
    ram_budget: str | None = None,
    cgroup: str | None = None,
    rounds: int = DEFAULT_ROUNDS,
    peer: str | None = None,
    peer_python: Path | None = None,
    peer_models: Sequence[Path] = (),
    kv_type: str | None = None,
    io: str | None = None,
    cache: Path | None = None,
    is_warm: bool = False,
    text: Path | None = None,
    against: Path | None = None,
) -> Request:
    """Check the options, as texts of the command line, and fill in what is left out.

    Args:
        models: the files that are given.
        n_cores: of the machine: by default tests run on one thread and on all cores, in a control
            group on all cores.
        shape: see ``python -m qsf.bench --help``, as all others.

    Raises:
        QsfArgumentError: an option is wrong, or cannot be honoured beside another.
    """
    _refuse_conflicts(models, shape, quant, peer, peer_python, peer_models, text, against)
    caps = _list_of(cgroup, "--cgroup", _cap) if cgroup is not None else (None,)
    is_capped = caps != (None,)
    if ram_budget is None:
        memory = [(cap, cap) for cap in caps]
    else:
        budgets = _list_of(ram_budget, "--ram-budget", _budget)
        memory = [(budget, cap) for cap in caps for budget in budgets]
    for budget, cap in memory:
        if cap is not None and (budget is None or budget > cap):
            raise QsfArgumentError(
                f"--ram-budget {budget or 'none'} is more than --cgroup {cap}M allows: QSF would "
                "be killed there"
            )
    is_peer_wanted = peer == PEER or peer_python is not None or bool(peer_models)
    if is_peer_wanted and not any(Setting(1, budget, cap).has_peer for budget, cap in memory):
        raise QsfArgumentError(
            f"llama.cpp cannot be put beside --ram-budget {ram_budget}, for it has no such thing: "
            "--ram-budget none measures both, --cgroup binds both"
        )
    all_cores = str(n_cores) if is_capped or n_cores == 1 else f"1,{n_cores}"
    n_threads = _list_of(
        threads if threads is not None else all_cores, "--threads", _whole(1, _MAX_THREADS)
    )
    prompts = _list_of(
        prompt if prompt is not None else str(_CAPPED_PROMPT if is_capped else _DEFAULT_PROMPT),
        "--prompt",
        _whole(0, _MAX_TOKENS),
    )
    gens = _list_of(
        gen if gen is not None else str(_CAPPED_GEN if is_capped else _DEFAULT_GEN),
        "--gen",
        _whole(0, _MAX_TOKENS),
    )
    depths = _list_of(depth, "--depth", _whole(0, _MAX_TOKENS))
    tests = [Test("pp", n, at) for at in depths for n in prompts if n]
    tests += [Test("tg", n, at) for at in depths for n in gens if n]
    if not tests:
        raise QsfArgumentError("--prompt 0 and --gen 0 leave nothing to measure")
    if rounds < 1:
        raise QsfArgumentError(f"--rounds is {rounds}: at least 1 is needed")
    if kv_type is not None:
        _check_kv_type(kv_type, peer, peer_models)
    if io is not None and io not in IO_METHODS:
        raise QsfArgumentError(f"--io {io} is unknown; available: {', '.join(IO_METHODS)}")
    return Request(
        models=tuple(models),
        peer_models=tuple(peer_models),
        shapes=()
        if models
        else _list_of(DEFAULT_SHAPE if shape is None else shape, "--shape", _shape_name),
        types=() if models else _types(quant),
        settings=tuple(Setting(n, budget, cap) for budget, cap in memory for n in n_threads),
        tests=tuple(tests),
        n_rounds=rounds,
        peer=peer,
        peer_python=peer_python,
        kv_type=kv_type,
        io=None if io == "auto" else io,
        cache=cache,
        is_cold=not is_warm,
        text=text,
        against=against,
    )


def _refuse_conflicts(
    models: Sequence[Path],
    shape: str | None,
    quant: str | None,
    peer: str | None,
    peer_python: Path | None,
    peer_models: Sequence[Path],
    text: Path | None,
    against: Path | None,
) -> None:
    """Refuse what cannot be honoured together."""
    if models and (shape is not None or quant is not None):
        name = "--shape" if shape is not None else "--quant"
        raise QsfArgumentError(f"{name} is for random weights: leave it out beside MODEL")
    names = Counter(path.name for path in [*models, *dict.fromkeys(peer_models)])
    for name in names:
        if names[name] > 1:
            raise QsfArgumentError(
                f"{names[name]} files are called {name}: results are told apart by names, so give "
                "each file once, with one of its own"
            )
    if peer not in (None, PEER, NO_PEER):
        raise QsfArgumentError(f"--peer {peer} is unknown; available: {PEER}, {NO_PEER}")
    if (peer_models or peer_python is not None) and peer == NO_PEER:
        name = "--peer-model" if peer_models else "--peer-python"
        raise QsfArgumentError(f"{name} is of no use with --peer none")
    if peer_models and len(peer_models) != len(models):
        raise QsfArgumentError(
            f"there are {len(models)} MODELs and {len(peer_models)} --peer-model: each MODEL needs "
            "its own, in the same order"
        )
    if text is not None and not models:
        raise QsfArgumentError("--text is of no use for random weights: name a MODEL")
    if against is not None and text is None:
        raise QsfArgumentError("--against needs --text: what is to be compared")
    if text is not None and not peer_models and peer == PEER:
        raise QsfArgumentError(
            "--text with --peer llama.cpp needs --peer-model: random weights have no quality"
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


def _check_kv_type(text: str, peer: str | None, peer_models: Sequence[Path]) -> None:
    try:
        parse_kv_type(text)
    except ValueError as error:
        raise QsfArgumentError(f"--kv-type: {error}") from None
    if text not in PEER_KV_TYPES and (peer == PEER or peer_models):
        raise QsfArgumentError(
            f"--kv-type {text} is QSF's alone: llama.cpp has {', '.join(PEER_KV_TYPES)}, or leave "
            f"it out with --peer {NO_PEER}"
        )
