"""The arguments of ``Model(path, ...)``, checked and turned into the engine's options."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from qsf import _native
from qsf.errors import QsfArgumentError
from qsf.kv_type import parse_kv_type

BYTES_PER_MB = 2**20

# What Python itself still takes after the engine was opened: the growing text and token
# lists, encoder caches. Measured: generating takes below 1 MiB, encoding a prompt of 16 KB
# (4000 tokens) up to 6.
_RESERVE_BYTES = 8 * BYTES_PER_MB


def options_of(
    ram_budget: int | None,
    threads: int | None,
    max_seq_len: int | None,
    *,
    is_pinned: bool,
    is_exact: bool,
    kv_type: str | None,
    kv_rotation: bool | None,
) -> _native.Options:
    """Return the options, all sizes in bytes. Raises QsfArgumentError."""
    for name, value in (
        ("ram_budget", ram_budget),
        ("threads", threads),
        ("max_seq_len", max_seq_len),
    ):
        if value is not None and (
            not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**32
        ):
            raise QsfArgumentError(f"{name} must be a whole number of at least 1, not {value!r}")
    kv_bits: tuple[int, int] | tuple[None, None] = (None, None)
    if kv_type is not None:
        try:
            kv_bits = parse_kv_type(kv_type)
        except ValueError as error:
            raise QsfArgumentError(str(error)) from None
    return _native.Options(
        budget_bytes=0 if ram_budget is None else ram_budget * BYTES_PER_MB,
        reserve_bytes=_RESERVE_BYTES,
        n_threads=threads,
        ctx_tokens=max_seq_len,
        max_sessions=1,
        is_pinned=is_pinned,
        is_exact=is_exact,
        kv_k_type=kv_bits[0],
        kv_v_type=kv_bits[1],
        kv_rotation=kv_rotation,
    )


def does_not_fit(plan: _native.MemoryPlan) -> str:
    """Return how much is needed and what would make it fit."""
    taken = (plan.process_bytes + plan.reserve_bytes) / BYTES_PER_MB
    needed = -(-plan.min_budget_bytes // BYTES_PER_MB)
    return (
        f"the model does not fit in {plan.budget_bytes / BYTES_PER_MB:.0f} MB, of which the "
        f"process takes {taken:.0f} before it is opened: ram_budget={needed} would do"
    )
