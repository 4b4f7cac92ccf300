"""Opens a file with ``ModelOptions``: the engine's options, and errors that name larger ones."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
import os
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from qsf.errors import QsfArgumentError, QsfFormatError, QsfMemoryError, QsfUnsupportedError
from qsf.kv import parse_kv_policy, parse_kv_type, resident_tokens
from qsf.native import binding
from qsf.native._qsf import lib
from qsf.options import IO_METHODS, Budget, ModelOptions

BYTES_PER_MB = 2**20
_ROTATIONS = {None: None, True: lib.QSF_KV_ROTATION_ON, False: lib.QSF_KV_ROTATION_OFF}

# Memory that Python takes after the engine was opened: the growing text and token lists, encoder
# caches. Measured: below 1 MiB for generating, up to 6 for encoding a prompt of 16 KB (4000
# tokens).
_RESERVE_BYTES = 8 * BYTES_PER_MB

# Memory for encoding the longest text of a context (qsf.text.tokenizer.max_text_bytes), for each
# token; at most 32 MB, see docs/memory.md.
_RESERVE_BYTES_PER_TOKEN = 2 << 10
_LEAST_AUTO_BYTES = 200 * BYTES_PER_MB

# Options that would save less than this are not named.
_WORTH_BYTES = BYTES_PER_MB


def native_options(options: ModelOptions, reserve_bytes: int = 0) -> binding.Options:
    """Return the engine's options in bytes; the plan leaves Python at least ``reserve_bytes``."""
    key_bits, value_bits = (
        (None, None) if options.kv_type is None else parse_kv_type(options.kv_type)
    )
    policy = parse_kv_policy(options.kv_policy)
    n_resident = resident_tokens(options.kv_policy)
    first, end = options.layers or (0, 0)
    return binding.Options(
        budget_bytes=_budget_bytes(options.ram_budget),
        reserve_bytes=max(reserve_bytes, _RESERVE_BYTES, options.reserve_mb * BYTES_PER_MB),
        reserve_token_bytes=_RESERVE_BYTES_PER_TOKEN,
        n_threads=options.threads,
        ctx_tokens=options.max_seq_len,
        max_sessions=options.sessions,
        kv_contexts=options.kv_contexts,
        draft_rows=0 if options.draft == "off" else options.draft_rows,
        draft_path=None if options.draft in ("auto", "off") else options.draft,
        pin_threads=options.pin_threads,
        exact=options.exact,
        kv_k_type=key_bits,
        kv_v_type=value_bits,
        kv_rotation=_ROTATIONS[options.kv_rotation],
        kv_window_tokens=policy.window_tokens if policy else None,
        kv_pinned_tokens=policy.pinned_tokens if policy and policy.window_tokens else None,
        kv_folder=None if n_resident is None else temporary_folder(),
        kv_resident_tokens=n_resident,
        ctx_is_fixed=policy is not None,
        io_method=None if options.io is None else IO_METHODS.index(options.io),
        io_depth=options.io_depth,
        quality=options.quality,
        adapters=tuple(
            (each.path, 0.0 if each.name else each.scale) for each in read_adapters(options)
        )
        or None,
        first_layer=first,
        n_layers=end - first,
    )


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of ``ModelOptions.lora``: with a name it changes only sessions that choose it."""

    path: str
    scale: float
    name: str = ""

    @property
    def text(self) -> str:
        """As ``read_adapter`` takes it."""
        return f"{self.name}{'=' if self.name else ''}{self.path}:{self.scale!r}"


def read_adapter(text: str) -> Adapter:
    """Read ``NAME=PATH:SCALE``, of which all but the path may be left out.

    Raises QsfArgumentError for a scale that is not finite, or 0.
    """
    path, scale = _path_and_scale(text)
    named = re.fullmatch(r"([\w.-]+)=(.+)", path, re.DOTALL)
    if named is None or Path(path).exists():
        return Adapter(path, scale)
    return Adapter(named[2], scale, named[1])


def _path_and_scale(text: str) -> tuple[str, float]:
    place, colon, said = text.rpartition(":")
    if not place or not colon or Path(text).exists():
        return text, 1.0
    try:
        scale = float(said)
    except ValueError:
        return text, 1.0  # a colon can be part of a path
    if not math.isfinite(scale) or scale == 0:
        raise QsfArgumentError(f"--lora {text}: the scale {said} is not a finite number, or is 0")
    return place, scale


def read_adapters(options: ModelOptions) -> tuple[Adapter, ...]:
    """Return the adapters. Raises QsfArgumentError for a scale, and for two of one name."""
    adapters = tuple(map(read_adapter, options.adapters))
    names = [each.name for each in adapters if each.name]
    for name in names:
        if names.count(name) > 1:
            raise QsfArgumentError(f"--lora: two adapters are called {name}", argument="lora")
    return adapters


def temporary_folder() -> str:
    """Return the folder of files that are larger than memory: TMPDIR, else /var/tmp or /tmp.

    On Windows it is TEMP.
    """
    usual = "/var/tmp" if Path("/var/tmp").is_dir() else "/tmp"
    return os.environ.get("TEMP" if sys.platform == "win32" else "TMPDIR") or usual


def budget_mb(ram_budget: int | str | None) -> int | str | None:
    value = Budget().parse(ram_budget) if isinstance(ram_budget, str) else ram_budget
    if isinstance(value, str) and value.endswith("%"):
        memory_bytes = binding.describe_machine().memory_bytes
        return max(1, int(memory_bytes * float(value[:-1]) / 100) // BYTES_PER_MB)
    return value


def _budget_bytes(ram_budget: int | str | None) -> int:
    n_mb = budget_mb(ram_budget)
    if n_mb is None:
        return 0
    return binding.BUDGET_AUTO if isinstance(n_mb, str) else n_mb * BYTES_PER_MB


def text_budget_bytes(options: ModelOptions) -> int | None:
    """Return the memory that a tokenizer may take before a plan exists; None: no limit."""
    n_mb = budget_mb(options.ram_budget)
    if isinstance(n_mb, str):
        return max(_LEAST_AUTO_BYTES, binding.describe_machine().available_bytes // 2)
    return None if n_mb is None else n_mb * BYTES_PER_MB


def plan_native(
    path: str | os.PathLike[str], options: ModelOptions, reserve_bytes: int = 0
) -> binding.MemoryPlan:
    """Return the memory plan, even if the budget is too small for it."""
    plan = binding.plan_model(path, native_options(options, reserve_bytes))
    return with_policy(plan, options)


def with_policy(plan: binding.MemoryPlan, options: ModelOptions) -> binding.MemoryPlan:
    """Return the plan after checking that the KV policy fits in its context."""
    policy = parse_kv_policy(options.kv_policy)
    if policy is not None:
        policy.check_context(plan.ctx_tokens)
    return replace(plan, kv_policy=options.kv_policy)


def open_native(
    path: str | os.PathLike[str], options: ModelOptions, reserve_bytes: int = 0
) -> binding.NativeModel:
    """Open the file; the plan leaves at least ``reserve_bytes`` to Python.

    Raises:
        QsfMemoryError: the text says how much is needed, and of what.
        QsfUnsupportedError: if the method of reading is not available, ``argument`` is "io".
    """
    try:
        native = binding.NativeModel(path, native_options(options, reserve_bytes))
        if options.rows is not None:
            native.set_source(options.rows)
        return native
    except QsfMemoryError as error:
        plan = plan_native(path, options, reserve_bytes)
        if plan.is_enough:
            raise
        raise QsfMemoryError(does_not_fit(plan), plan) from error
    except QsfFormatError as error:
        error.path = os.fspath(path)
        if not isinstance(error, QsfUnsupportedError) or options.io in (None, "auto"):
            raise
        # The file is checked first: if the check succeeds, the way of reading is not supported.
        plan_native(path, replace(options, io=None, io_depth=None), reserve_bytes)
        raise QsfUnsupportedError(f"io={options.io}: {error}", argument="io") from error


def io_origin(options: ModelOptions) -> str:
    """Return who chose the way of reading: the user or the engine."""
    return "chosen" if options.io in (None, "auto") else "as asked"


def does_not_fit(plan: binding.MemoryPlan, *, is_command: bool = False) -> str:
    """Return how much memory is needed, what is too small, and which options would make it fit.

    With ``is_command`` arguments are named as the options of ``qsf run``.
    """

    def name(argument: str) -> str:
        return "--" + argument.replace("_", "-") if is_command else argument

    needed = -(-plan.min_budget_bytes // BYTES_PER_MB)
    taken = _mb(plan.process_bytes + plan.reserve_bytes)
    ways: list[str] = []
    if 0 < plan.budget_bytes < plan.min_budget_bytes:
        text = (
            f"the model does not fit in {_mb(plan.budget_bytes)} MB, of which Python and the "
            f"tokenizer take {taken}"
        )
        equals = " " if is_command else "="
        ways.append(f"set {name('ram_budget')}{equals}{needed}")
        if 0 < plan.ceiling_bytes < plan.budget_bytes:
            ways[0] += (
                f", if the machine or its control group had them: they leave this process "
                f"{_mb(plan.ceiling_bytes)} MB"
            )
    else:
        text = (
            f"the model needs {needed} MB, Python's and the tokenizer's {taken} included, but the "
            f"machine or its control group leaves this process {_mb(plan.ceiling_bytes)}"
        )
        ways.append("memory must be freed, or the group's limit raised")
    # The plan is the smallest possible: if a part is large, an option requested it.
    if plan.state_bytes >= _WORTH_BYTES and plan.max_sessions > 1:
        count = "--parallel" if is_command else "sessions"
        ways.append(f"{count} with fewer than now (their states take {_mb(plan.state_bytes)})")
    context_bytes = plan.kv_bytes - plan.state_bytes
    if context_bytes >= _WORTH_BYTES:
        taken = _mb(context_bytes)
        ways.append(f"{name('max_seq_len')} with a shorter context (it takes {taken})")
        if plan.max_sessions > 1 and not is_command:
            ways.append("sessions with fewer than the present " + str(plan.max_sessions))
        if max(plan.kv_k_bits, plan.kv_v_bits) > 2:
            ways.append(f"{name('kv_type')} with fewer bits")
    if plan.io_depth > 1 and plan.stream_bytes >= _WORTH_BYTES:
        ways.append(f"{name('io_depth')} with fewer reads (they take {_mb(plan.stream_bytes)})")
    return f"{text}: {', or '.join(ways)}"


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / BYTES_PER_MB:,.1f}"
