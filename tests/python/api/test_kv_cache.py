# SPDX-License-Identifier: Apache-2.0
"""The types of the KV cache: names, defaults and memory; numbers: test_forward.py."""

from __future__ import annotations

from pathlib import Path

import pytest

import qsf
from make.kind_models import LATENT, write_model
from make.tiny_checkpoints import make_llama
from qsf.errors import QsfArgumentError
from qsf.file.layout import Dtype
from qsf.kv import kv_type_name, parse_kv_type
from qsf_converter import convert


@pytest.fixture(scope="module")
def long_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, 4 heads of 16 on 2 KV heads."""
    folder = tmp_path_factory.mktemp("kv")
    convert(
        make_llama(folder / "hf", seed=7, head_dim=16, max_tokens=600),
        folder / "m.qsf",
        quant_type="f16",
    )
    return folder / "m.qsf"


def test_options_and_what_the_plan_says(long_llama: Path) -> None:
    plan = qsf.Model.plan(long_llama, ram_budget=None)
    assert (plan.kv_k_bits, plan.kv_v_bits, plan.kv_is_rotated) == (8, 8, True)
    plan = qsf.Model.plan(long_llama, ram_budget=None, exact=True)
    assert (plan.kv_k_bits, plan.kv_v_bits, plan.kv_is_rotated) == (32, 32, False)
    plan = qsf.Model.plan(long_llama, ram_budget=None, kv_type="k8v16")
    assert (plan.kv_k_bits, plan.kv_v_bits, plan.kv_is_rotated) == (8, 16, True)
    plan = qsf.Model.plan(long_llama, ram_budget=None, kv_type="f16", kv_rotation=True)
    assert plan.kv_is_rotated
    for rotation in (None, False):
        plan = qsf.Model.plan(long_llama, ram_budget=None, kv_type="k8v4", kv_rotation=rotation)
        assert plan.kv_is_rotated == (rotation is None)
    sizes = [
        qsf.Model.plan(long_llama, ram_budget=None, kv_type=kv_type).kv_bytes
        for kv_type in ("f32", "f16", "8bit", "4bit", "2bit")
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 5 * sizes[3]


def test_a_latent_is_stored_once(tmp_path: Path) -> None:
    """The values are the first dimensions of the keys, which have two blocks of 64 here."""
    path = write_model(tmp_path / "m.qsf", LATENT[:1], dtype=Dtype.F16)
    for kv_type, block_bytes in (("8bit", 66), ("4bit", 36), ("f16", 128), ("k8v16", 66)):
        sizes = [
            qsf.Model.plan(
                path, ram_budget=None, kv_type=kv_type, max_seq_len=n_tokens
            ).kv_pool_bytes
            for n_tokens in (64, 320)
        ]
        assert sizes[1] - sizes[0] == (320 - 64) * 2 * block_bytes


def test_what_cannot_be(long_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(QsfArgumentError, match=r"kv_type must be a type of KV cache.*'k3v4'"):
        qsf.Model(long_llama, kv_type="k3v4")
    with pytest.raises(QsfArgumentError, match="exact arithmetic needs 32 bits"):
        qsf.Model(long_llama, exact=True, kv_type="4bit")
    convert(make_llama(tmp_path / "hf", head_dim=10), tmp_path / "m.qsf")
    assert not qsf.Model.plan(tmp_path / "m.qsf", ram_budget=None).kv_is_rotated
    with pytest.raises(QsfArgumentError, match="heads of 10 dimensions cannot be rotated"):
        qsf.Model(tmp_path / "m.qsf", ram_budget=None, kv_rotation=True)


@pytest.mark.parametrize(
    ("head_dim", "is_rotated"), [(8, False), (10, False), (16, True), (80, True)]
)
def test_the_default_has_8_bits(tmp_path: Path, head_dim: int, is_rotated: bool) -> None:
    """Whatever the budget: the least plan has the same types as the largest."""
    convert(make_llama(tmp_path / "hf", head_dim=head_dim), tmp_path / "m.qsf")
    for ram_budget in (None, 1):
        plan = qsf.Model.plan(tmp_path / "m.qsf", ram_budget=ram_budget)
        assert (plan.kv_k_bits, plan.kv_v_bits, plan.kv_is_rotated) == (8, 8, is_rotated)
    assert not plan.is_enough


@pytest.mark.parametrize("name", ["f32", "f16", "8bit", "4bit", "2bit", "k8v4", "k4v2", "k16v8"])
def test_names(name: str) -> None:
    assert kv_type_name(*parse_kv_type(name)) == name


@pytest.mark.parametrize("name", ["", "3bit", "k8", "k8v3", "K8V4", "k8v4 ", "16"])
def test_names_of_nothing(name: str) -> None:
    with pytest.raises(ValueError, match="is not a type of KV cache"):
        parse_kv_type(name)
