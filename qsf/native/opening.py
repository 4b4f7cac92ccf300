"""The arguments of ``Model(path, ...)``: checked, turned into the engine's options, obeyed."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from qsf.errors import QsfArgumentError, QsfMemoryError, QsfUnsupportedError
from qsf.native import binding, io_known
from qsf.native.kv_type import parse_kv_type

if TYPE_CHECKING:
    import os

BYTES_PER_MB = 2**20

# What Python itself still takes after the engine was opened: the growing text and token
# lists, encoder caches. Measured: generating takes below 1 MiB, encoding a prompt of 16 KB
# (4000 tokens) up to 6.
_RESERVE_BYTES = 8 * BYTES_PER_MB

# Encoding a text of the longest that a context takes (qsf.text.tokenizer.max_text_bytes). 8 MB are
# enough for the 4096 tokens that a model gets where nobody asks for more.
_RESERVE_BYTES_PER_TOKEN = 2 << 10
_MAX_RESERVE_BYTES = 32 * BYTES_PER_MB  # longer contexts: see docs/memory.md

# Below these an option gives back too little to be worth naming.
_WORTH_BYTES = BYTES_PER_MB


def options_of(
    ram_budget: int | str | None,
    threads: int | None,
    max_seq_len: int | None,
    *,
    is_pinned: bool,
    is_exact: bool,
    kv_type: str | None,
    kv_rotation: bool | None,
    io: str | None,
    io_depth: int | None,
    quality: float,
) -> binding.Options:
    """Return the options, all sizes in bytes. Raises QsfArgumentError."""
    for name, value in (
        ("ram_budget", None if ram_budget == "auto" else ram_budget),
        ("threads", threads),
        ("max_seq_len", max_seq_len),
        ("io_depth", io_depth),
    ):
        if value is not None and (
            not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**32
        ):
            also = ' or "auto"' if name == "ram_budget" else ""
            raise QsfArgumentError(
                f"{name} must be a whole number of at least 1{also}, not {value!r}"
            )
    if isinstance(quality, bool) or not isinstance(quality, int | float) or not 0 <= quality <= 1:
        raise QsfArgumentError(f"quality must be a number from 0 to 1, not {quality!r}")
    if io_depth is not None and io_depth > io_known.MAX_DEPTH:
        raise QsfArgumentError(f"io_depth must be at most {io_known.MAX_DEPTH}, not {io_depth}")
    if io is not None and (not isinstance(io, str) or io not in io_known.METHODS):
        names = ", ".join(io_known.METHODS)
        raise QsfArgumentError(f"io must be one of {names}, not {io!r}")
    kv_bits: tuple[int, int] | tuple[None, None] = (None, None)
    if kv_type is not None:
        try:
            kv_bits = parse_kv_type(kv_type)
        except ValueError as error:
            raise QsfArgumentError(str(error)) from None
    return binding.Options(
        budget_bytes=_budget_bytes(ram_budget),
        reserve_bytes=_reserve_bytes(max_seq_len or 0),
        n_threads=threads,
        ctx_tokens=max_seq_len,
        max_sessions=1,
        is_pinned=is_pinned,
        is_exact=is_exact,
        kv_k_type=kv_bits[0],
        kv_v_type=kv_bits[1],
        kv_rotation=kv_rotation,
        io_method=None if io is None else io_known.METHODS[io],
        io_depth=io_depth,
        quality=quality,
    )


def _budget_bytes(ram_budget: int | str | None) -> int:
    if ram_budget is None:
        return 0
    return binding.BUDGET_AUTO if isinstance(ram_budget, str) else ram_budget * BYTES_PER_MB


def _reserve_bytes(n_tokens: int) -> int:
    wanted = max(_RESERVE_BYTES, _RESERVE_BYTES_PER_TOKEN * n_tokens)
    return min(wanted, _MAX_RESERVE_BYTES)


def with_reserve(options: binding.Options, reserve_bytes: int) -> binding.Options:
    """Return the options with at least so much left to Python."""
    return replace(options, reserve_bytes=max(options.reserve_bytes or 0, reserve_bytes))


def with_known_io(path: str | os.PathLike[str], options: binding.Options) -> binding.Options:
    """Return the options with what an earlier probe found on the disk of ``path``."""
    if options.io_method:
        return options
    known = io_known.recall(path)
    if known is None:
        return options
    return replace(options, io_known_method=known[0], io_known_depth=known[1])


def open_native(path: str | os.PathLike[str], options: binding.Options) -> binding.NativeModel:
    """Open the file; what a probe finds is remembered.

    Raises:
        QsfMemoryError: the text says how much is needed, and of what.
        QsfUnsupportedError: where the method of reading cannot be had, the text begins with
            the argument.
    """
    try:
        native = binding.NativeModel(path, options)
    except QsfMemoryError as error:
        plan = binding.plan_model(path, options)
        if plan.is_enough:
            raise
        raise QsfMemoryError(does_not_fit(plan), plan) from error
    except QsfUnsupportedError as error:
        if not options.io_method:
            raise
        # The file is looked at first: where that goes well, it is the method.
        binding.plan_model(path, replace(options, io_method=None, io_depth=None))
        asked = next(name for name, n in io_known.METHODS.items() if n == options.io_method)
        raise QsfUnsupportedError(f"io={asked}: {error}") from error
    info = native.info()
    if info.io_is_probed:
        io_known.remember(path, info.io_method, info.io_depth)
    return native


def io_origin(options: binding.Options, info: binding.ModelInfo) -> str:
    """Return where the way of reading comes from, for people to read."""
    if options.io_method:
        return "as asked"
    if info.io_is_probed:
        return "found by a probe"
    if (options.io_known_method, options.io_known_depth) == (info.io_method, info.io_depth):
        return "known from an earlier probe"
    return "chosen"


def does_not_fit(plan: binding.MemoryPlan, *, is_command: bool = False) -> str:
    """Return how much is needed, what is short of it, and what would make it fit.

    With ``is_command`` arguments are named as the options of ``qsf-run``.
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
        ways.append(f"{name('ram_budget')}{equals}{needed} would do")
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
    # The plan is the least one, so what it still takes more of than need be was asked for.
    if plan.kv_bytes >= _WORTH_BYTES:
        ways.append(f"{name('max_seq_len')} with a shorter context (it takes {_mb(plan.kv_bytes)})")
        if max(plan.kv_k_bits, plan.kv_v_bits) > 2:
            ways.append(f"{name('kv_type')} with fewer bits")
    if plan.io_depth > 1 and plan.stream_bytes >= _WORTH_BYTES:
        ways.append(f"{name('io_depth')} with fewer reads (they take {_mb(plan.stream_bytes)})")
    return f"{text}: {', or '.join(ways)}"


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / BYTES_PER_MB:,.1f}"
