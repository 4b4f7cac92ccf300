# SPDX-License-Identifier: Apache-2.0
"""Adapters of low rank: merged as PEFT computes with them, and refused by name otherwise."""

from __future__ import annotations

import contextlib
import random
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import qsf
from make import gguf_files, mutants, tiny_checkpoints, torch_files
from make import golden_adapters as made
from make.commands import Run
from make.golden_adapters import CONFIG, WEIGHTS, Q, Tensors, pair
from make.golden_adapters import write_adapter as write
from make.refusals import refusals
from make.stored import Reader
from qsf.errors import QsfArgumentError, QsfConversionError, QsfError
from qsf.report.record import read_meta
from qsf_converter import convert
from qsf_converter.calibrate.state import state_key
from qsf_converter.calibrate.texts import CalibrationText
from qsf_converter.request import Request
from qsf_converter.sources.checkpoint import KEPT
from qsf_converter.sources.source import open_source

IDS = {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1}


def merged(base: Path, *adapters: str | Path) -> Tensors:
    """All tensors of a base with adapters, in f32."""
    with open_source(base, [str(adapter) for adapter in adapters]) as source:
        stored = source.checkpoint
        return {n: np.array(stored.read_rows(n, 0, t.n_rows)) for n, t in stored.tensors.items()}


@pytest.mark.parametrize("case", made.CASES)
def test_engine_agrees_with_peft(case: str, tmp_path: Path) -> None:
    base, used = made.CASES[case]
    lora = [f"{made.adapter(name, tmp_path / name)}:{scale}" for name, scale in used.items()]
    out = tmp_path / "m.qsf"
    convert(made.base(base, tmp_path / "base"), out, quant_type="f32", lora=lora, measure=False)
    with qsf.Model(out, exact=True, kv_type="f32", ram_budget=None) as model:
        logits = made.columns(model.logits(made.TOKENS))
    want = made.logits(case)
    assert np.abs(logits - want).max() < 2e-5 * np.abs(want).max()


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 9), st.floats(-4, 4).filter(bool), st.integers(1, 32), st.booleans(),
    st.integers(0, 78),
)  # fmt: skip
def test_any_range_of_rows_is_the_sum(
    rank: int, scale: float, alpha: int, is_rs: bool, start: int
) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        base = tiny_checkpoints.make_llama(folder / "m", storage="fp32")
        tensors = pair(rank=rank)
        path = write(folder / "a", tensors, r=rank, lora_alpha=alpha, use_rslora=is_rs)
        a, b = (values.astype(np.float64) for values in tensors.values())
        name = Q.removeprefix("base_model.model.") + ".weight"
        own = load_file(base / "model.safetensors")[name]
        want = own + scale * alpha / (rank**0.5 if is_rs else rank) * (b @ a)
        with open_source(base, [f"{path}:{scale!r}"]) as source:
            rows = source.checkpoint.read_rows(name, start, 96)
    np.testing.assert_allclose(rows, want[start:], rtol=1e-6, atol=1e-6)


def test_files_of_torch_are_read_and_the_rest_is_as_it_was(tmp_path: Path) -> None:
    base, tensors = tiny_checkpoints.make_llama(tmp_path / "m"), pair()
    one, two = write(tmp_path / "a", tensors), write(tmp_path / "b", tensors)
    (two / WEIGHTS).unlink()
    torch_files.save(
        two / "adapter_model.bin", {n: torch_files.dense(v) for n, v in tensors.items()}
    )
    plain, first, second = merged(base), merged(base, one), merged(base, two)
    changed = {name for name in plain if not np.array_equal(plain[name], first[name])}
    assert changed == {Q.removeprefix("base_model.model.") + ".weight"}
    for name, values in first.items():
        np.testing.assert_array_equal(values, second[name])


# ---- GGUF files ----
def write_gguf(path: Path, folder: Path, *, n_heads: int = 4, **changes: Any) -> Path:
    """Write a PEFT folder's adapter for Q and O of LLaMA as llama.cpp's converter does."""
    writer = gguf.GGUFWriter(path, "llama")
    fields = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 4.0}
    for key, value in {**fields, **changes}.items():
        gguf_files.add(writer, key, value)
    for name, values in load_file(folder / WEIGHTS).items():
        kind = "q" if "q_proj" in name else "output"
        if kind == "q" and "lora_B" in name:
            values = gguf_files.interleave(values, n_heads)
        part = "a" if "lora_A" in name else "b"
        writer.add_tensor(f"blk.0.attn_{kind}.weight.lora_{part}", values)
    gguf_files.close(writer)
    return path


def test_gguf_and_peft_adapters_are_one_on_any_base(tmp_path: Path) -> None:
    base = tiny_checkpoints.make_llama(tmp_path / "m")
    file = gguf_files.write(base, tmp_path / "m.gguf", changes=IDS)
    tensors = pair() | pair(Q.replace("q_proj", "o_proj"), 80, 96)
    folder = write(tmp_path / "a", tensors)
    adapter = write_gguf(tmp_path / "a.gguf", folder)
    want = merged(base, f"{folder}:0.5")
    for path in (base, file):
        for lora in (folder, adapter):
            have = merged(path, f"{lora}:0.5")
            assert have.keys() == want.keys()
            for name, values in want.items():
                if values.dtype == np.float32:
                    np.testing.assert_array_equal(have[name], values)
    assert sum(values.dtype == np.float32 for values in want.values()) == 2


def test_blocks_that_no_adapter_changes_are_kept(tmp_path: Path) -> None:
    base = tiny_checkpoints.make_llama(tmp_path / "m", dim=64, n_heads=2, head_dim=32, ffn_dim=96)
    kind = gguf_files.Type.Q4_0
    file = gguf_files.write(base, tmp_path / "m.gguf", kind=kind, changes=IDS)
    adapter = write(tmp_path / "a", pair(n_out=64, n_in=64))
    convert(file, tmp_path / "m.qsf", lora=[adapter], measure=False)
    with Reader(tmp_path / "m.qsf") as reader:
        meta = read_meta(reader)
    assert meta is not None
    types = {t["source"]: t["type"] for t in meta["quality"]["tensors"] if t["n_rows"] > 1}
    changed = Q.removeprefix("base_model.model.") + ".weight"
    assert types.pop(changed) == "8bit"
    assert set(types.values()) == {"q4_0"}
    assert "Q4_0" in KEPT


# ---- what is said ----
def test_the_file_and_show_say_which_adapters_it_has(tmp_path: Path, qsf: Run) -> None:
    base = tiny_checkpoints.make_llama(tmp_path / "m")
    adapter, out = write(tmp_path / "tuned", pair()), tmp_path / "m.qsf"
    digests = set()
    for alpha in (4, 5):
        write(adapter, pair(), lora_alpha=alpha)
        convert(base, out, lora=[f"{adapter}:-0.5"], measure=False, force=True)
        with Reader(out) as reader:
            (said,) = (read_meta(reader) or {})["adapters"]
        assert (said["name"], said["scale"]) == ("tuned", -0.5)
        digests.add(said["sha256"])
    assert len(digests) == 2
    assert "tuned x -0.5" in qsf("show", out).stdout


def test_no_output_takes_the_place_of_an_adapter(tmp_path: Path) -> None:
    base = tiny_checkpoints.make_llama(tmp_path / "m")
    adapter = write(tmp_path / "a", pair())
    with pytest.raises(QsfArgumentError, match="adapter_model"):
        convert(base, adapter / WEIGHTS, lora=[adapter], force=True)


def test_a_calibration_belongs_to_its_adapters(tmp_path: Path) -> None:
    base = tiny_checkpoints.make_llama(tmp_path / "m")
    one, two = write(tmp_path / "a", pair()), write(tmp_path / "b", pair(rank=3), r=3)
    text = CalibrationText(np.zeros((1, 8), np.int32), np.zeros((1, 8), np.int32), "t", "0")
    keys = set()
    for adapters in ([], [f"{one}"], [f"{one}:0.5"], [f"{two}"], [f"{one}", f"{two}"]):
        with open_source(base, adapters) as source:
            keys.add(state_key(source, Request(), text))
    assert len(keys) == 5


# ---- what is refused ----
FIELDS = [*refusals("adapters"), ({"lora_alpha": float("nan")}, "lora_alpha = nan is not a number")]


@pytest.mark.parametrize(("fields", "said"), FIELDS)
def test_a_configuration_is_refused_by_name(
    fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    base = tiny_checkpoints.make_llama(tmp_path / "m")
    adapter = write(tmp_path / "a", pair(), **fields)
    with pytest.raises(QsfConversionError, match=said) as caught:
        merged(base, adapter)
    assert str(caught.value).startswith(str(adapter))


def changed(name: str, change: Callable[[Any], Any]) -> Tensors:
    tensors = pair()
    return {**tensors, f"{Q}.{name}.weight": change(tensors[f"{Q}.{name}.weight"])}


NO_NUMBER = np.float32("nan")
TENSORS = [
    ({}, "holds no tensors"),
    (pair("base_model.model." + "a." * 200), "is none of a LoRA"),
    ({f"{Q}.lora_A.weight": np.ones((2, 80), "f4")}, "q_proj' has no lora_B"),
    (pair("model.layers.0.self_attn.q_proj"), "none of a LoRA on a matrix"),
    (pair() | {f"{Q}.lora_B.bias": np.ones(96, "f4")}, r"lora_B\.bias.* is none of a LoRA"),
    (pair() | {f"{Q}.lora_magnitude_vector": np.ones(96, "f4")}, "magnitude_vector' is none"),
    (pair() | {"base_model.model.lm_head.weight": np.ones((101, 80), "f4")}, "lm_head.weight' is"),
    (
        {"base_model.model.model.embed_tokens.lora_embedding_A": np.ones((2, 101), "f4")},
        "lora_embedding_A' is none",
    ),
    (pair("base_model.model.model.embed_tokens", 101), "the embedding, or a head"),
    (pair("base_model.model.lm_head", 101), "the embedding, or a head that is the embedding"),
    (pair(Q.replace("layers.0", "layers.7")), "the model has no such tensor"),
    (pair(Q.replace("q_proj", "qkv_proj")), "the model has no such tensor"),
    (pair("base_model.model.model.norm"), "stores that as no matrix"),
    (pair(n_out=80), r"lora_B.weight has shape \[80, 2\], .* it must be \[96, 2\]"),
    (pair(n_in=96), r"lora_A.weight has shape \[2, 96\], .* it must be \[2, 80\]"),
    (changed("lora_A", lambda a: a[None]), "shape"),
    (changed("lora_B", lambda b: b[:, :1]), r"it must be \[96, 2\]"),
    (changed("lora_B", lambda b: b * NO_NUMBER), "lora_B.weight holds numbers that are not finite"),
    (changed("lora_A", lambda a: a.astype(np.int32)), "is stored as I32"),
]


@pytest.mark.parametrize(("tensors", "said"), TENSORS)
def test_tensors_are_refused_by_name(tensors: Tensors, said: str, tmp_path: Path) -> None:
    base = tiny_checkpoints.make_llama(tmp_path / "m", tied_head=True)
    with pytest.raises(QsfConversionError, match=said):
        merged(base, write(tmp_path / "a", {n: np.array(v) for n, v in tensors.items()}))


def test_an_untied_head_may_be_changed(tmp_path: Path) -> None:
    base = tiny_checkpoints.make_llama(tmp_path / "m", tied_head=False)
    adapter = write(tmp_path / "a", pair("base_model.model.lm_head", 101))
    assert merged(base, adapter)["lm_head.weight"].dtype == np.float32


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{a}:nan", "the scale nan"), ("{a}:inf", "the scale inf"), ("{a}:0", "the scale 0"),
        ("{a}:half", "no such adapter"), ("{a}x", "no such adapter"), ("", "PEFT"),
        ("{a}/" + WEIGHTS, "a PEFT folder is expected, or a GGUF file"), ("{m}", f"no {CONFIG}"),
    ],
)  # fmt: skip
def test_names_and_scales_are_refused(text: str, said: str, tmp_path: Path) -> None:
    base = tiny_checkpoints.make_llama(tmp_path / "m")
    adapter = write(tmp_path / "a", pair())
    with pytest.raises(QsfError, match=said):
        merged(base, text.format(a=adapter, m=base))


@pytest.mark.parametrize(("changes", "said"), refusals("gguf adapters"))
def test_gguf_adapters_are_refused_by_name(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    base = tiny_checkpoints.make_llama(tmp_path / "m")
    adapter = write_gguf(tmp_path / "a.gguf", write(tmp_path / "a", pair()))
    data = adapter.read_bytes()
    if "general.architecture" in changes:  # which the writer does not let us choose
        name = changes["general.architecture"].encode()
        old = (5).to_bytes(8, "little") + b"llama"
        adapter.write_bytes(data.replace(old, len(name).to_bytes(8, "little") + name, 1))
    else:
        write_gguf(adapter, tmp_path / "a", **changes)
    with pytest.raises(QsfConversionError, match=re.escape(said)):
        merged(base, adapter)


def test_gguf_adapters_of_transposed_matrices_are_refused(tmp_path: Path) -> None:
    base = tiny_checkpoints.make_gpt2(tmp_path / "m")
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "gpt2")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    for part, shape in (("a", (2, 78)), ("b", (78, 2))):
        writer.add_tensor(f"blk.0.attn_output.weight.lora_{part}", np.ones(shape, np.float32))
    gguf_files.close(writer)
    with pytest.raises(QsfConversionError, match="stores transposed"):
        merged(base, tmp_path / "a.gguf")


@pytest.mark.parametrize("kind", ["config", "weights", "gguf"])
def test_damaged_adapters_end_in_typed_errors(kind: str, tmp_path: Path) -> None:
    base = tiny_checkpoints.make_llama(tmp_path / "m")
    folder = write(tmp_path / "a", pair(), rank_pattern={"q_proj": 2}, alpha_pattern={"x": 1})
    adapter = folder if kind != "gguf" else write_gguf(tmp_path / "a.gguf", folder)
    file = {"config": folder / CONFIG, "weights": folder / WEIGHTS, "gguf": adapter}[kind]
    data = file.read_bytes()
    change = mutants.changed_json if kind == "config" else mutants.changed_bytes
    for seed in range(80):
        rng = random.Random(seed)
        file.write_bytes(change(rng, data))
        with contextlib.suppress(QsfError):
            merged(base, adapter)
        file.write_bytes(data[: rng.randrange(len(data))])
        with pytest.raises(QsfError):
            merged(base, adapter)
