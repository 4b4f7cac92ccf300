# SPDX-License-Identifier: Apache-2.0
"""Adapters beside the weights: as PEFT computes with them, checked byte by byte, of one base."""

from __future__ import annotations

import contextlib
import json
import random
import re
import struct
import zlib
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import qsf
from make import calibrated_models, mutants, tiny_checkpoints
from make import golden_adapters as made
from make.commands import Run
from make.golden_adapters import A, K, Q, pair, write_adapter
from make.stored import Reader
from qsf.errors import QsfArgumentError, QsfConversionError, QsfError, QsfFormatError
from qsf.file.layout import TensorType as T
from qsf.model import Model
from qsf.passes import PassItem, run_items
from qsf.report.record import read_meta
from qsf_converter import convert, convert_adapter
from qsf_converter.calibrate import changes, transforms

EXACT: dict[str, Any] = {"exact": True, "kv_type": "f32", "ram_budget": None}
TOKENS = [0, 5, 9, 14, 2, 33, 41, 60]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    convert(tiny_checkpoints.make_llama(tmp_path / "m"), tmp_path / "m.qsf", quant_type="4bit")
    return tmp_path / "m.qsf"


def made_for(
    base: Path, folder: Path, name: str = "a", tensors: Any = None, **options: Any
) -> Path:
    """An adapter, by default of Q and K of layer 0, for a base of `make_llama`."""
    tensors = tensors or pair(Q) | pair(K, n_out=48)
    out = folder / f"{name}.qsf"
    rank = next(iter(tensors.values())).shape[0]
    adapter = write_adapter(folder / name, tensors, r=rank)
    convert_adapter(str(adapter), base, out, **options)
    return out


@pytest.mark.parametrize("case", [case for case in made.CASES if "dora" not in case])
def test_engine_agrees_with_peft(case: str, tmp_path: Path) -> None:
    base, used = made.CASES[case]
    file, lora = tmp_path / "m.qsf", []
    convert(made.base(base, tmp_path / "base"), file, quant_type="f32", measure=False)
    for name, scale in used.items():
        out = tmp_path / f"{name}.qsf"
        convert_adapter(str(made.adapter(name, tmp_path / name)), file, out, quant_type="f16")
        lora.append(f"{out}:{scale}")
    with qsf.Model(file, lora=lora, **EXACT) as model:
        logits = made.columns(model.logits(made.TOKENS))
    want = made.logits(case)
    assert np.abs(logits - want).max() < 2e-5 * np.abs(want).max()


def test_8_bits_are_near_and_a_scale_of_0_is_refused(base: Path, tmp_path: Path) -> None:
    logits = []
    for quant_type in ("f16", "8bit"):
        adapter = made_for(base, tmp_path, quant_type, quant_type=quant_type)
        with qsf.Model(base, lora=f"{adapter}:0.1", **EXACT) as model:
            logits.append(np.asarray(model.logits(TOKENS), np.float64))
    f16, q8 = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in logits)
    assert (np.exp(f16) * (f16 - q8)).sum(axis=1).mean() < 1e-4
    with pytest.raises(QsfArgumentError, match="the scale 0"):
        qsf.Model(base, lora=f"{adapter}:0")


def test_rows_of_q_and_k_change_as_the_base_changed_them(tmp_path: Path) -> None:
    """Two channels of the keys are 64 times as large, which the conversion moves to the queries."""
    source = tiny_checkpoints.make_llama(tmp_path / "m", storage="fp32")
    tensors = load_file(source / A)
    name = K.removeprefix("base_model.model.") + ".weight"
    head_dim = 96 // 4
    tensors[name][[3, 3 + head_dim // 2]] *= 64
    save_file(tensors, source / A)
    adapter = write_adapter(tmp_path / "a", pair(Q) | pair(K, n_out=48))
    plain, merged, beside = (tmp_path / f"{name}.qsf" for name in ("plain", "merged", "beside"))
    convert(source, plain, quant_type="f32")
    convert(source, merged, quant_type="f32", lora=[adapter])
    convert_adapter(str(adapter), plain, beside, quant_type="f16")
    with Reader(plain) as reader:
        exponents = (read_meta(reader) or {})["key_exponents"]["0"]
    assert exponents[3] == exponents[3 + head_dim // 2] < -2
    with qsf.Model(merged, **EXACT) as model:
        want = model.logits(TOKENS)
    with qsf.Model(plain, lora=beside, **EXACT) as model:
        np.testing.assert_allclose(model.logits(TOKENS), want, rtol=1e-3, atol=2e-3)
    with qsf.Model(plain, **EXACT) as model:
        assert np.abs(model.logits(TOKENS) - want).max() > 0.1


# Modules of a layer of `small_llama`, with the rows and columns of their matrices
MODULES = {
    **{f"self_attn.{name}_proj": size for name, size in
       (("q", (32, 48)), ("k", (16, 48)), ("v", (16, 48)), ("o", (48, 32)))},
    **{f"mlp.{name}_proj": size for name, size in
       (("gate", (72, 48)), ("up", (72, 48)), ("down", (48, 72)))},
}  # fmt: skip


def test_an_adapter_changes_as_the_calibration_changed_its_base(
    tmp_path: Path, tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All heads rotated, all inputs scaled; without the section there would be another model."""
    monkeypatch.setattr(transforms, "_LEAST_GAIN", -100.0)
    source = calibrated_models.small_llama(tmp_path / "m", tiny_llama_dir, storage="fp32")
    tensors: dict[str, Any] = {}
    for i, (name, size) in enumerate(MODULES.items()):
        tensors |= pair(f"base_model.model.model.layers.{i % 2}.{name}", *size)
        tensors |= pair(f"base_model.model.model.layers.{1 - i % 2}.{name}", *size)
    adapter = write_adapter(tmp_path / "a", tensors, lora_alpha=0.2)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(calibrated_models.WORDS * 100), "utf-8")
    plain, merged, beside = (tmp_path / f"{name}.qsf" for name in ("plain", "merged", "beside"))
    convert(source, plain, quant_type="8bit", calibration=text, calibration_tokens=512)
    convert(source, merged, quant_type="f32", lora=[adapter])
    with Reader(plain) as reader:
        actions = {tensor["action"] for tensor in (read_meta(reader) or {})["quality"]["tensors"]}
        found = changes.unpack(reader.read_section("XFRM"))
    assert "rotated, scaled, feedback" in actions
    assert {kind for _, kind in found} == {T.Q, T.ATTN_OUT, T.FFN_GATE, T.FFN_DOWN}
    convert_adapter(str(adapter), plain, beside, quant_type="f16")

    def logits(path: Path, **options: Any) -> Any:
        with qsf.Model(path, **EXACT, **options) as model:
            return np.asarray(model.logits(TOKENS))

    want = logits(merged)
    effect = np.abs(logits(plain) - want).max()
    assert np.abs(logits(plain, lora=beside) - want).max() < 0.1 * effect
    monkeypatch.setattr("qsf_converter.adapter_file.unpack", lambda _: {})
    convert_adapter(str(adapter), plain, beside, quant_type="f16", overwrite=True)
    assert np.abs(logits(plain, lora=beside) - want).max() > 0.3 * effect
    for data in (b"x", changes.pack(found)[:-1], changes.pack(found)[:-4] + b"\xff\xff\xff\x7f"):
        with pytest.raises(QsfConversionError, match="XFRM is malformed"):
            changes.unpack(data)


def test_the_commands(base: Path, tmp_path: Path, qsf: Run) -> None:
    folder = write_adapter(tmp_path / "tuned", pair(Q))
    done = qsf("convert", "--lora", folder, "--for", base, "a.qsf")
    assert "1 matrices of rank 2" in done.stdout
    assert "run" in done.stdout
    assert f"--lora {tmp_path / 'tuned'}" not in done.stdout
    for more in (["--lora", folder], ["x.qsf"]):
        refused = qsf("convert", "--lora", folder, "--for", base, "b.qsf", *more)
        assert refused.returncode == 2
        assert "--lora ADAPTER --for FILE OUT" in refused.stderr
    assert qsf("convert", base).returncode == 2


def test_saved_sessions_belong_to_their_adapters(base: Path, tmp_path: Path) -> None:
    adapter, kept = made_for(base, tmp_path), tmp_path / "kept"
    with qsf.Model(base, lora=adapter, ram_budget=None) as model:
        want = model.logits(TOKENS)
        model.session.save(kept)
    for lora in ((), f"{adapter}:0.5", [adapter, adapter]):
        with qsf.Model(base, lora=lora, ram_budget=None) as model, pytest.raises(QsfError):
            model.session.load(kept)
    with qsf.Model(base, lora=[adapter], ram_budget=None) as model:
        assert model.info.plan.adapters_bytes >= adapter.stat().st_size
        model.session.load(kept)
        assert np.array_equal(model.logits(TOKENS), want)


# ---- an adapter of each session ----


def adapters_of(base: Path, folder: Path) -> list[str]:
    """One without a name, and three that sessions choose."""
    paths = {
        name: made_for(base, folder, name, tensors=pair(Q, rank=rank))
        for name, rank in (("all", 2), ("x", 3), ("y", 5), ("z", 17))
    }
    return [f"{paths['all']}:0.5", f"x={paths['x']}", f"y={paths['y']}:0.7", f"z={paths['z']}"]


def test_each_session_of_a_pass_has_its_own_adapter(base: Path, tmp_path: Path) -> None:
    lora = adapters_of(base, tmp_path)
    names = [None, "x", "y", "y", None, "z"]
    alone = {}
    for name in {*names}:
        used = [lora[0], *(text[2:] for text in lora[1:] if text[:1] == name)]
        with qsf.Model(base, lora=used, ram_budget=None) as model:
            alone[name] = model.logits(TOKENS)
    assert len({rows.tobytes() for rows in alone.values()}) == 4
    with qsf.Model(base, lora=lora, ram_budget=None, sessions=7, threads=2) as model:
        assert np.array_equal(model.logits(TOKENS), alone[None])
        sessions = [model.create_session() for _ in names]
        for session, name in zip(sessions, names, strict=True):
            session.adapter = name
            assert session.adapter == name
        run_items(model._opened, [PassItem(each, array("I", TOKENS)) for each in sessions])
        row = np.empty(model.info.n_vocab, np.float32)
        for session, name in zip(sessions, names, strict=True):
            session._native.read_logits(row)
            assert np.array_equal(row, alone[name][-1]), name
        sessions[1].adapter = "z"
        assert sessions[1].n_tokens == 0
        assert np.array_equal(sessions[1].logits(TOKENS), alone["z"])
        sessions[1].adapter = "z"
        assert sessions[1].n_tokens == len(TOKENS)
        with pytest.raises(QsfArgumentError, match=r"called 'all': there are x, y, z"):
            sessions[1].adapter = "all"
        for wrong in ([1.0], [0, 1e39, 0, 0], [0, "x", 0, 0]):
            with pytest.raises(QsfArgumentError):
                sessions[1].set_adapters(wrong)  # type: ignore[arg-type]
        assert np.array_equal(sessions[1].logits(TOKENS), alone["z"])


def test_forks_and_files_keep_the_adapter_of_a_session(base: Path, tmp_path: Path) -> None:
    lora = adapters_of(base, tmp_path)
    with qsf.Model(base, lora=lora, ram_budget=None, sessions=2) as model:
        model.session.adapter = "y"
        want = model.logits(TOKENS)
        model.session.save(tmp_path / "kept")
        with model.session.fork() as fork:
            assert fork.adapter == "y"
            assert np.array_equal(fork.logits([*TOKENS, 3])[-2], want[-1])
    with qsf.Model(base, lora=lora, ram_budget=None) as model:
        model.session.load(tmp_path / "kept")
        assert model.session.adapter == "y"
        assert model.session.n_tokens == len(TOKENS)
        assert np.array_equal(model.logits(TOKENS), want)


def test_vectors_and_damaged_files_leave_the_adapter(base: Path, tmp_path: Path) -> None:
    lora, kept = adapters_of(base, tmp_path), tmp_path / "kept"
    prompts = [[5, 9, 14], [2, 33]]
    with qsf.Model(base, lora=[lora[0], lora[1][2:]], ram_budget=None) as model:
        want = [list(vector) for vector in model.embed(prompts)]
    with qsf.Model(base, lora=lora, ram_budget=None) as model:
        model.session.adapter = "y"
        model.session.logits(TOKENS)
        model.session.save(kept)
    data = bytearray(kept.read_bytes())
    data[-1] ^= 1
    kept.write_bytes(data)
    with qsf.Model(base, lora=lora, ram_budget=None, sessions=2) as model:
        model.session.set_adapters(np.array([0.5, 1, 0, 0], np.float32))  # type: ignore[arg-type]
        assert [list(vector) for vector in model.embed(prompts)] == want
        assert model.session.adapter == "x"
        with pytest.raises(QsfFormatError):
            model.session.load(kept)
        assert model.session.adapter == "x"
        model.session.logits(TOKENS)
        model.session.save(kept)


def test_names_of_adapters(
    base: Path, tmp_path: Path, qsf: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = made_for(base, tmp_path)
    with pytest.raises(QsfArgumentError, match="two adapters are called x"):
        Model(base, lora=[f"x={adapter}", f"x={adapter}:2"])
    refused = qsf("run", base, "--lora", f"x={adapter}", "--prompt", "a")
    assert refused.returncode == 2
    assert "leave NAME= out" in refused.stderr
    odd = adapter.rename(tmp_path / "p=q.qsf")
    for text, name, scale in ((odd, "", 1), (f"{odd}:0.5", "", 0.5), (f"x={odd}:2", "x", 2)):
        with Model(base, lora=text, ram_budget=None) as model:
            assert (model.adapters[0].name, model.adapters[0].scale) == (name, scale)
    monkeypatch.chdir(tmp_path)
    with Model(base, lora="p=q.qsf:0.5", ram_budget=None) as model:
        assert (model.adapters[0].name, model.adapters[0].scale) == ("", 0.5)


# ---- what is refused ----
def test_another_base_is_refused_with_both_names(base: Path, tmp_path: Path) -> None:
    adapter = made_for(base, tmp_path)
    convert(tmp_path / "m", tmp_path / "other.qsf", quant_type="8bit")
    with pytest.raises(QsfArgumentError, match=r"a.qsf.*another file \(m.qsf\) than .*other.qsf"):
        qsf.Model(tmp_path / "other.qsf", lora=adapter)
    for wrong in (base, tmp_path / "m" / "config.json"):
        with pytest.raises(QsfFormatError, match="it is none of qsf convert"):
            qsf.Model(base, lora=wrong)


def test_what_does_not_fit_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.qsf"

    def refuse(said: str, tensors: dict[str, Any], **fields: Any) -> None:
        adapter = write_adapter(tmp_path / "x", tensors, **fields)
        with pytest.raises(QsfConversionError, match=said):
            convert_adapter(str(adapter), base, out)

    magnitude = {f"{Q}.lora_magnitude_vector": np.ones(96, "f4")}
    refuse("q_proj', as DoRA does", pair(Q) | magnitude, use_dora=True)
    refuse("has no such tensor", pair(Q.replace("layers.0", "layers.7")))
    refuse("it must be", pair(Q, n_out=80))
    refuse("the embedding", pair("base_model.model.model.embed_tokens", 101))
    refuse("'lm_head', which the file holds as HEAD", pair("base_model.model.lm_head", 101))
    with pytest.raises(QsfArgumentError, match="type f16 or 8bit, not 4bit"):
        made_for(base, tmp_path, quant_type="4bit")
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda meta: meta.pop("key_exponents"), "does not say how .* qsf convert MODEL"),
        (lambda meta: meta["quality"]["tensors"][5].update(action="rotated, scaled"),
         "its calibration changed the weights .*--force --calibration FILE"),
        (lambda meta: meta.update(key_exponents={"0": [1, 2]}), "key_exponents of layer 0"),
        (lambda meta: meta["source"].update(architecture="x"), "does not say how"),
    ],
)  # fmt: skip
def test_bases_that_changed_their_weights_are_refused(
    change: Any, said: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Reader(base) as reader:
        meta = read_meta(reader)
    assert meta is not None
    change(meta)
    monkeypatch.setattr("qsf_converter.adapter_file.read_meta", lambda _: meta)
    with pytest.raises(QsfConversionError, match=said) as caught:
        made_for(base, tmp_path)
    assert str(base) in str(caught.value)


def repaired(data: bytes) -> bytes:
    """With right checksums and its size, as a stranger would write it."""
    out = bytearray(data.ljust(128, b"\0"))
    struct.pack_into("<Q", out, 8, len(out))
    struct.pack_into("<I", out, 44, zlib.crc32(out[128:]))
    struct.pack_into("<I", out, 124, zlib.crc32(out[:124]))
    return bytes(out)


def test_every_changed_byte_is_found(base: Path, tmp_path: Path) -> None:
    adapter = made_for(base, tmp_path)
    data = adapter.read_bytes()
    assert repaired(data) == data
    for at in (*range(128), *range(128, len(data), 211)):
        adapter.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        with pytest.raises(QsfFormatError, match=re.escape(str(adapter))):
            qsf.Model(base, lora=adapter, ram_budget=None)
    for n_bytes in (0, 1, 127, 128, len(data) - 1):
        adapter.write_bytes(data[:n_bytes])
        with pytest.raises(QsfFormatError):
            qsf.Model(base, lora=adapter, ram_budget=None)
    adapter.write_bytes(data + b"\0")
    with pytest.raises(QsfFormatError):
        qsf.Model(base, lora=adapter, ram_budget=None)


def test_mutants_with_right_checksums_end_in_typed_errors(base: Path, tmp_path: Path) -> None:
    adapter = made_for(base, tmp_path)
    data, n_opened = adapter.read_bytes(), 0
    for seed in range(300):
        adapter.write_bytes(repaired(mutants.changed_bytes(random.Random(seed), data)))
        with contextlib.suppress(QsfError), qsf.Model(base, lora=adapter, ram_budget=None) as model:
            model.logits(TOKENS)
            n_opened += 1
    assert 0 < n_opened < 200  # numbers of A and B may be any
    for off, values in ((4, (0, 1, 3)), (32, (0, 3, 2**31)), (36, (0, 1, 2000)), (40, (3, 99)),
                        (48, (1, 0x7F)), (123, (1,)), (128, (9, 2**32 - 1)), (132, (7, 2**31)),
                        (136, (1, 97)), (140, (81,)), (144, (0, 3, 2**31)), (152, (1,)),
                        (160, (9, 2**32 - 1)), (164, (0,))):  # fmt: skip
        for value in values:
            changed = bytearray(data)
            changed[off : off + 4] = value.to_bytes(4, "little") if off < 120 or off > 127 else b"x"
            adapter.write_bytes(repaired(bytes(changed)))
            with pytest.raises(QsfFormatError):
                qsf.Model(base, lora=adapter, ram_budget=None)


def test_options(base: Path, tmp_path: Path) -> None:
    for wrong in (3, [3], [""], {"a": 1}):
        with pytest.raises(QsfArgumentError, match="lora must be a path"):
            qsf.Model(base, lora=wrong)  # type: ignore[arg-type]
    huge = write_adapter(tmp_path / "huge", pair(Q), lora_alpha=1e30)
    convert_adapter(str(huge), base, tmp_path / "huge.qsf")
    with pytest.raises(QsfArgumentError, match=r"times the scale 1e\+30 is not finite"):
        qsf.Model(base, lora=f"{tmp_path / 'huge.qsf'}:1e30", ram_budget=None)
    with pytest.raises(QsfArgumentError, match="n_adapters is 17"):
        qsf.Model(base, lora=[made_for(base, tmp_path)] * 17)
    with pytest.raises(QsfError, match=r"none\.qsf"):
        qsf.Model(base, lora=tmp_path / "none.qsf")
    assert json.loads((tmp_path / "a" / "adapter_config.json").read_text())["r"] == 2
