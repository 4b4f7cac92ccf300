"""Write random weights of a mixture whose expert e of a layer equals its expert e mod 16.

Usage: python bench/repeated_experts.py SHAPE OUT.qsf. The other experts become holes of the file,
and OUT.qsf.map tells slow_disk.c where to read them. The file is of use with that library only.
"""
# SPDX-License-Identifier: Apache-2.0

import ctypes
import os
import sys
from pathlib import Path

import numpy as np

from qsf.file.layout import Role
from qsf.file.reader import Reader
from qsf_bench.models import random_qsf, shapes
from qsf_bench.models.cache import embed_type_beside_baseline, parse_quant_type

PERIOD = 16
PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE

begin_unit, write_unit = random_qsf.Writer.begin_unit, random_qsf._write_unit
units = []


def note_unit(writer, unit, **options):
    units.append(unit)
    return begin_unit(writer, unit, **options)


def write_repeated(writer, weights, dtype, entries):
    if units[-1].role == Role.EXPERT:
        weights._random = np.random.default_rng((units[-1].layer, units[-1].expert % PERIOD))
    write_unit(writer, weights, dtype, entries)


random_qsf.Writer.begin_unit, random_qsf._write_unit = note_unit, write_repeated
shape, out = shapes.find_shape(sys.argv[1]), Path(sys.argv[2])
embed_type = random_qsf.embed_type_of("4bit", embed_type_beside_baseline(shape, "4bit"))
random_qsf.write_model(out, shape, parse_quant_type("4bit"), embed_type)
experts: dict[int, list[tuple[int, int]]] = {}
with Reader(out) as reader:
    for unit in reader.units:
        if unit.id.role == Role.EXPERT:
            experts.setdefault(unit.id.layer, []).append((unit.off, unit.crc32))
fd = os.open(out, os.O_RDWR)
os.fsync(fd)
lines = []
for layer in experts.values():
    first, stride, n = layer[0][0], layer[1][0] - layer[0][0], len(layer)
    assert layer == [(first + i * stride, layer[i % PERIOD][1]) for i in range(n)]
    hole = ctypes.c_long(first + PERIOD * stride), ctypes.c_long((n - PERIOD) * stride)
    assert ctypes.CDLL(None).fallocate(fd, PUNCH_HOLE, *hole) == 0
    lines.append(f"{first} {stride} {n} {PERIOD}\n")
Path(f"{out}.map").write_text("".join(lines))
