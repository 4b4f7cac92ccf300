"""Write the seeds of the fuzz targets that have kinds of layers, experts or own embeddings.

Usage: python tests/fuzz/make_expert_seeds.py tests/fuzz/corpus
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import struct
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "python"))

from make.kind_attacks import EXPERT_ATTACKS, EXPERTS  # noqa: E402
from make.kind_models import MIXED, SHARED, Layer, T, kind, write_model  # noqa: E402
from qsf.file.kinds import ExpertScore, ExpertWeights, Ffn, GroupScore  # noqa: E402
from qsf.file.layout import Arch, Dtype, TensorType  # noqa: E402
from qsf.file.reader import Reader  # noqa: E402

# One of each rule of the reader; tests/python/make/kind_attacks.py has them all.
READER_SEEDS = {
    "experts_more_than_chosen": "kind: chosen 5 of 4",
    "experts_missing": "UNIT: one is missing",
    "experts_half_an_entry": "UNIT: half an entry",
    "experts_wrap": "UNIT: wraps",
    "experts_overlap": "UNIT: the same place",
    "experts_descend": "UNIT: descends",
    "experts_of_no_bytes": "UNIT: raw 0",
    "experts_later_template": "UNIT: a later template",
    "experts_no_template": "UNIT: template behind all",
    "experts_tensor_behind": "TENS: behind the experts",
    "experts_tensor_shape": "TENS: shape of an expert",
}
LAYER = Layer(
    kind(
        ffn=Ffn.NONE, n_experts=6, n_chosen=3, expert_dim=17, weights_factor=2.5, n_groups=3,
        n_groups_kept=2, group_score=GroupScore.TWO_LARGEST, expert_score=ExpertScore.SIGMOID,
        expert_weights=ExpertWeights.BY_SUM, weights_epsilon=1e-20,
    ),
    (T.SELECTION_BIAS,),
)  # fmt: skip
# What every number of a tensor becomes. Weights above 1e38 overflow every score.
MODEL_SEEDS: dict[str, tuple[bytes, TensorType | None, float]] = {
    "experts": (b"\x02\x0a\x02\xff", None, 0.0),
    "experts_no_slots": (b"\x01\x27\x03\x00", None, 0.0),
    "experts_router_nan": (b"\x02\x0a\x02\xff", T.EXPERT_ROUTER, float("nan")),
    "experts_router_overflow": (b"\x00\x0a\x04\x40", T.EXPERT_ROUTER, 3e38),
    "experts_router_ties": (b"\x02\x0a\x02\xff", T.EXPERT_ROUTER, 0.0),
    "experts_bias_infinite": (b"\x02\x4a\x41\x20", T.SELECTION_BIAS, float("-inf")),
}


def write_reader_seeds(folder: Path) -> None:
    """Write two whole files and one for each attack."""
    write_model(folder / "kinds", MIXED[:2], dtype=Dtype.Q4)
    (folder / "experts").write_bytes(EXPERTS)
    attacks = {name: change for name, _, change in EXPERT_ATTACKS}
    for name, attack in READER_SEEDS.items():
        data = bytearray(EXPERTS)
        attacks[attack](data)
        (folder / name).write_bytes(data)


def write_model_seeds(folder: Path) -> None:
    """Write models whose routers say odd things, each after the options of fuzz_model.c."""
    with tempfile.TemporaryDirectory() as temporary:
        path = write_model(Path(temporary) / "m.qsf", [LAYER], dtype=Dtype.Q4)
        with Reader(path) as reader:
            tensors = {T(tensor.type): tensor for tensor in reader.units[1].tensors}
            unit_off = reader.units[1].off
        whole = path.read_bytes()
        arch = Arch(own_width=20, tied_head=True)
        own = write_model(path, SHARED[:2], dtype=Dtype.Q4, arch=arch).read_bytes()
    (folder / "own").write_bytes(b"\x02\x0a\x02\xff" + own)
    for name, (options, changed, value) in MODEL_SEEDS.items():
        data = bytearray(whole)
        if changed is not None:
            tensor = tensors[changed]
            at = unit_off + tensor.data_off
            numbers = struct.pack("<f", value) * (tensor.data_bytes // 4)
            data[at : at + len(numbers)] = numbers
        (folder / name).write_bytes(options + data)


if __name__ == "__main__":
    write_reader_seeds(Path(sys.argv[1]) / "reader")
    write_model_seeds(Path(sys.argv[1]) / "model")
