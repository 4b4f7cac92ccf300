"""What a model computes: the sections ARCH, ROPE and KIND (docs/format.md, sections 6 to 8).

The engine's reader checks what is packed here.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

from qsf.errors import QsfError
from qsf.file.layout import *
from qsf.native._facts import ARCH_KEYS, KIND_KEYS, KindFields
from qsf.native._qsf import ffi, lib
from qsf.native.binding import check_status

U32: Final = 1
F32: Final = 2
F32_ARRAY: Final = 3

Value = int | float | tuple[float, ...]


_NEW: Final = 11  # keys of ARCH from this one on are written only if different from the default


def pack_values(
    section: str,
    keys: Iterable[tuple[int, str, int]],
    values: Mapping[str, Value],
    error: type[QsfError],
) -> bytes:
    """Return the entries of the keys (number, field, type) that have a value."""
    out = bytearray()
    for number, name, kind in keys:
        if name not in values:
            continue
        value = values[name]
        out += struct.pack("<HBB", number, kind, 0)
        try:
            if isinstance(value, tuple):
                out += struct.pack(f"<I{len(value)}f", len(value), *value)
            else:
                out += struct.pack("<f" if kind == F32 else "<I", value)
        except (struct.error, OverflowError) as fault:
            raise error(f"{section}: {name} is {value}: {fault}") from None
    return bytes(out)


STATE_COLS: Final = 32  # columns of a state that lie together in memory


class LayerKind(KindFields):
    """What a layer computes; fields as ``qsf_layer_kind``. ``plain_kind`` makes one of a header."""

    __slots__ = ()

    @property
    def has_attention(self) -> bool:
        return self.mixer in (Mixer.ATTENTION, Mixer.ATTENTION_AND_SSD, Mixer.RELATIVE)

    @property
    def has_ssd(self) -> bool:
        return self.mixer in (Mixer.SSD, Mixer.ATTENTION_AND_SSD)

    @property
    def values(self) -> int:
        return self.n_value_heads * self.value_dim

    @property
    def value_head_dim(self) -> int:
        return self.latent_rank or self.head_dim

    @property
    def query_dim(self) -> int:
        """Dimensions of a query of latent attention, before K_UP."""
        return self.nope_dim + self.head_dim - self.latent_rank

    def state_bytes(self, dim: int) -> int:
        """Return the bytes of a recurrent state: a convolution's inputs, and matrices of heads."""
        columns = padded(self.value_dim, STATE_COLS)
        rows = self.n_taps and (self.n_taps - 1) * self.channels(dim)
        return 4 * (rows + self.n_value_heads * self.key_dim * columns)

    def channels(self, dim: int) -> int:
        if self.mixer == Mixer.SHORT_CONV:
            return dim
        if self.mixer == Mixer.RELATIVE:  # of keys, of values, behind attention and FFN
            return 2 * self.n_kv_heads * self.head_dim + 2 * dim
        return 2 * self.n_key_heads * self.key_dim + self.values


@dataclass(frozen=True, slots=True)
class RopeSet:
    """Frequencies of RoPE. If sets share a number, the session's context selects one."""

    number: int
    frequencies: tuple[float, ...]  # of the pairs, radians a position
    is_interleaved: bool = False  # pairs (2i, 2i + 1), else (i, i + number of pairs)
    least_context: int = 0  # smallest context of a session; 0 for the first set of a number
    factor: float = 1.0  # multiplies cos and sin


def plain_kind(header: Header, arch: Arch, *, is_gated: bool = True) -> LayerKind:
    """Return the kind of every layer of a file that has no section KIND."""
    return LayerKind(
        n_heads=header.n_heads,
        n_kv_heads=header.n_kv_heads or header.n_heads,
        head_dim=header.head_dim,
        window_tokens=arch.window_tokens,
        rope_set=0 if header.positions == Positions.ROPE else ROPE_NONE,
        ffn=Ffn.GATED if is_gated else Ffn.PLAIN,
        ffn_dim=header.ffn_dim,
        activation=header.activation,
    )


def pack_kinds(
    layers: Sequence[LayerKind], header: Header, arch: Arch, error: type[QsfError]
) -> bytes | None:
    """Return the section KIND, or None if every layer has the plain kind."""
    if len(layers) != header.n_layers:
        raise error(f"KIND: {len(layers)} kinds of layers, the header has {header.n_layers} layers")
    plain = plain_kind(header, arch)
    kinds = list(dict.fromkeys(layers))
    if len(kinds) > MAX_LAYER_KINDS:
        raise error(f"KIND: {len(kinds)} kinds, allowed: 1 .. {MAX_LAYER_KINDS}")
    if len(kinds) == 1 and kinds[0].ffn != Ffn.NONE and replace(kinds[0], ffn=Ffn.GATED) == plain:
        return None
    out = bytearray(struct.pack("<HH", len(kinds), 0))
    out += bytes(kinds.index(kind) for kind in layers)
    out += bytes(padded(len(out), 4) - len(out))
    for i, kind in enumerate(kinds):
        values: dict[str, Value] = {}
        for _, name, type_of in KIND_KEYS:
            value = getattr(kind, name)
            if value != getattr(plain, name):
                values[name] = int(value) if type_of == U32 else value
        data = pack_values(f"KIND: kind {i}", KIND_KEYS, values, error)
        out += struct.pack("<I", len(data)) + data
    return bytes(out)


def pack_arch(arch: Arch, error: type[QsfError]) -> bytes:
    values: dict[str, Value] = {}
    for number, name, kind in ARCH_KEYS:
        value = getattr(arch, name)
        if value is None or (number >= _NEW and value == getattr(DEFAULT_ARCH, name)):
            continue
        values[name] = float(value) if kind == F32 else int(value)
    return pack_values("ARCH", ARCH_KEYS, values, error)


SET_HEAD: Final = struct.Struct("<BBHIf")


def pack_rope(sets: Sequence[RopeSet], error: type[QsfError]) -> bytes:
    try:
        out = bytearray(struct.pack("<HH", len(sets), 0))
        for s in sets:
            n_pairs = len(s.frequencies)
            out += SET_HEAD.pack(s.number, s.is_interleaved, n_pairs, s.least_context, s.factor)
            out += struct.pack(f"<{n_pairs}f", *s.frequencies)
    except (struct.error, OverflowError) as fault:
        raise error(f"ROPE: {fault}") from None
    return bytes(out)


def pack_tables(
    header: Header,
    arch: Arch,
    layers: Sequence[LayerKind],
    sets: Sequence[RopeSet],
    error: type[QsfError],
) -> dict[str, bytes]:
    """Return the sections ARCH, ROPE and KIND that the file needs, by their tags.

    Args:
        header: of the file.
        arch: of the file.
        layers: the kind of each layer; empty: what header and ``arch`` say.
        sets: the RoPE sets; empty: one, from header and ``arch``.
        error: raised for values that no reader accepts, the header's too.
    """
    tables = {"ARCH": pack_arch(arch, error)}
    if sets:
        tables["ROPE"] = pack_rope(sets, error)
    kinds = pack_kinds(layers, header, arch, error) if layers else None
    if kinds is not None:
        tables["KIND"] = kinds
    _check_tables(header, tables, error)
    return tables


def _check_tables(header: Header, tables: Mapping[str, bytes], error: type[QsfError]) -> None:
    """Let the engine's reader check header and sections. Raises ``error`` with its text."""
    struct_of = ffi.new("qsf_header *")
    try:
        for name, value in asdict(header).items():
            setattr(struct_of, name, TOKEN_NONE if value is None else value)
    except OverflowError as fault:
        raise error(f"header: {fault}") from None
    struct_of.n_kv_heads = header.n_kv_heads or header.n_heads
    copies = [ffi.new("unsigned char[]", tables.get(tag, b"")) for tag in ("ARCH", "ROPE", "KIND")]
    parts = ffi.new("qsf_table[3]")
    for part, copy in zip(parts, copies, strict=True):
        if len(copy) > 1:  # cffi ends each with a zero
            part.bytes, part.n_bytes = copy, len(copy) - 1
    try:
        check_status(lib.qsf_contents_check(struct_of, *(ffi.addressof(part) for part in parts)))
    except QsfError as fault:
        raise error(str(fault)) from None
