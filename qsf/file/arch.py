"""The section ARCH: architecture key-values (docs/format.md, section 6)."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import Any, Final

from qsf.errors import QsfError
from qsf.file.keyvalues import F32, U32, Key, Value, as_stored, pack_values
from qsf.file.layout import DEFAULT_ARCH, MAX_OWN_WIDTH, Arch, Header, RopeScaling

ARCH_KEYS: Final = (
    Key(1, "norm_epsilon", F32),
    Key(2, "rope_scaling", U32, most=max(RopeScaling)),
    Key(3, "rope_factor", F32),
    Key(4, "rope_low_freq_factor", F32),
    Key(5, "rope_high_freq_factor", F32),
    Key(6, "rope_original_tokens", U32, least=1),
    Key(7, "rope_dims", U32, most=4096),
    Key(8, "rope_interleaved", U32, most=1),
    Key(9, "tied_head", U32, most=1),
    Key(10, "window_tokens", U32),
    Key(11, "embedding_factor", F32),
    Key(12, "logit_cap", F32),
    Key(13, "own_width", U32, most=MAX_OWN_WIDTH),
    Key(14, "is_encoder", U32, most=1),
    Key(0x8010, "kv_key_bits", U32, least=2, most=32),
    Key(0x8011, "kv_value_bits", U32, least=2, most=32),
    Key(0x8012, "act_bits", U32, least=8, most=16),
)
_NEW: Final = (
    "embedding_factor",
    "logit_cap",
    "own_width",
    "is_encoder",
    "kv_key_bits",
    "kv_value_bits",
    "act_bits",
)  # written only if different from the default


def check_arch(values: dict[str, Any], header: Header, error: type[QsfError]) -> None:
    for name in ("kv_key_bits", "kv_value_bits"):
        bits = values.get(name, 2)
        if bits & (bits - 1):
            raise error(f"ARCH: {name} is {bits}, allowed: 2, 4, 8, 16, 32")
    if (bits := values.get("act_bits", 8)) not in (8, 16):
        raise error(f"ARCH: act_bits is {bits}, allowed: 8, 16")
    dims = values.get("rope_dims")
    if dims is not None and (dims % 2 != 0 or dims > header.head_dim):
        raise error(
            f"ARCH: rope_dims is {dims}, allowed: even and at most the head dimension of"
            f" {header.head_dim}"
        )
    low = values.get("rope_low_freq_factor", DEFAULT_ARCH.rope_low_freq_factor)
    high = values.get("rope_high_freq_factor", DEFAULT_ARCH.rope_high_freq_factor)
    if not high > low:
        raise error(f"ARCH: rope_high_freq_factor is {high:g}, allowed: above the low one, {low:g}")


def pack_arch(arch: Arch, header: Header, error: type[QsfError]) -> bytes:
    """Return the ``ARCH`` section, or raise ``error`` for a value that no reader accepts."""
    values: dict[str, Value] = {}
    for key in ARCH_KEYS:
        value = getattr(arch, key.name)
        if value is None or (key.name in _NEW and value == getattr(DEFAULT_ARCH, key.name)):
            continue
        values[key.name] = as_stored(float(value) if key.type == F32 else int(value))
    data = pack_values("ARCH", ARCH_KEYS, values, error)
    check_arch(values, header, error)
    return data
