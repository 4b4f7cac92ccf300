# SPDX-License-Identifier: Apache-2.0
"""The defaults of the arithmetic: measured by the conversion, and stored in the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qsf
from make import gguf_files
from make.tiny_checkpoints import make_llama, read_checkpoint, with_large_keys, write_checkpoint
from qsf.cli import evaluate as eval_cli
from qsf.cli import inspect as inspect_cli
from qsf.cli.run import main as run_cli
from qsf.file.reader import Reader
from qsf.report.record import cost_lines, read_meta
from qsf_converter import convert
from qsf_converter.costs import Noise, n_measured_tokens

pytestmark = pytest.mark.usefixtures("measured_costs")


def recorded(path: Path) -> tuple[tuple[int, int], dict[str, Any] | None]:
    """Return the bits in ARCH and the record in META."""
    with Reader(path) as reader:
        reader.verify()
        bits = reader.arch.kv_key_bits, reader.arch.kv_value_bits
        return bits, json.loads(reader.read_section("META")).get("kv_cache")


def planned(path: Path, ram_budget: int | None = None, **options: Any) -> tuple[int, int]:
    plan = qsf.Model.plan(path, ram_budget=ram_budget, **options)
    return plan.kv_k_bits, plan.kv_v_bits


def test_the_cost_is_measured_and_stored(
    tmp_path: Path, tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m.qsf"
    phases: dict[str, list[tuple[int, int]]] = {}
    report = convert(
        tiny_llama_dir,
        out,
        quant_type="4bit",
        phase=lambda name: lambda done, total: phases.setdefault(name, []).append((done, total)),
    )
    bits, record = recorded(out)
    assert bits == (8, 8)
    assert record is not None
    assert (record["type"], record["measured"], record["tokens"]) == ("8bit", "8bit", 16)
    assert abs(record["change_percent"]) + 2 * record["change_error"] < 0.5
    assert record["change_error"] > 0
    assert 0.975 <= record["agreement"] <= 1
    steps = phases["measuring the arithmetic"]
    assert steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1]
    assert not any("KV cache" in warning for warning in report.warnings)
    assert planned(out) == planned(out, 1) == (8, 8)
    assert inspect_cli.run([str(out)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "kv_cache type 8bit" in shown
    assert "kv_cache change_percent" in shown
    (line,) = report.notes
    assert run_cli.main([str(out), "--plan", "--ram-budget", "auto"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == line
    assert run_cli.main([str(out), "--plan", "--ram-budget", "auto", "--kv-type", "f16"]) == 0
    assert "KV cache 8bit" not in capsys.readouterr().out
    text = tmp_path / "text"
    text.write_text("once upon a time there was a girl " * 20, "utf-8")
    assert eval_cli.run([str(out), "--text", str(text), "--ctx", "64"]) == 0
    assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    "change",
    [{"agreement": None}, {"change_percent": "a lot"}, {"change_error": 10**400}, {"type": ...},
     {"type": "\x1b[2J"}, {"measured": ["8bit"]}],
)  # fmt: skip
def test_a_strangers_record_of_a_cost_is_no_error(change: dict[str, Any]) -> None:
    record = {"type": "f16", "measured": "8bit", "change_percent": 1.0, "change_error": 0.1}
    whole = {**record, "agreement": 0.9}
    end = " perplexity by +1.00 % +- 0.10 and the likeliest token at 10.0 % of positions"
    assert cost_lines({"kv_cache": whole}) == [f"KV cache f16: 8bit changes{end}"]
    assert cost_lines({"kv_cache": whole}, with_kv_cache=False) == []
    wrong = {name: value for name, value in {**whole, **change}.items() if value is not ...}
    assert cost_lines({"kv_cache": wrong, "activations": wrong}) == []
    activations = {**whole, "bits": 16, "measured": 8}
    both = {"kv_cache": whole, "activations": activations}
    line = f"activations of 16 bits: 8 bits change{end}"
    assert cost_lines(both) == [line, f"KV cache f16: 8bit changes{end}"]
    for bits in ("\x1b[2J", 10**400, [8], None, 9):
        assert cost_lines({"activations": {**activations, "bits": bits}}) == []
    assert cost_lines({"kv_cache": 3, "activations": []}) == []
    assert cost_lines(None) == []


def test_a_model_that_needs_more_bits_gets_them(tmp_path: Path, tiny_llama_dir: Path) -> None:
    hf = with_large_keys(tiny_llama_dir, tmp_path / "hf", size=5000, n_pairs=4)
    out = tmp_path / "m.qsf"
    report = convert(hf, out, quant_type="8bit")
    bits, record = recorded(out)
    assert bits == (16, 16)
    assert record is not None
    assert (record["type"], record["measured"]) == ("f16", "8bit")
    assert record["change_percent"] + 2 * record["change_error"] > 0.5
    assert report.notes[-1].startswith("KV cache f16: 8bit changes perplexity by ")
    assert planned(out) == planned(out, 1) == (16, 16)
    assert planned(out, kv_type="k8v4") == (8, 4)
    assert planned(out, exact=True) == (32, 32)


def test_without_a_measurement_it_has_8_bits(tmp_path: Path, tiny_llama_dir: Path) -> None:
    """Without a tokenizer there is no text; a large model would take too long."""
    out = tmp_path / "m.qsf"
    convert(make_llama(tmp_path / "hf"), out)
    assert recorded(out) == ((0, 0), None)
    assert planned(out) == (8, 8)
    assert n_measured_tokens(10**12) == 0
    # What is not to be measured gets the safe defaults.
    gguf = gguf_files.write(
        tiny_llama_dir, tmp_path / "m.gguf", kind=gguf_files.Type.Q5_1, tokenizer=True
    )
    for source, act_bits in ((tiny_llama_dir, 8), (gguf, 16)):
        convert(source, tmp_path / "m.qsf", measure=False, force=True)
        assert recorded(tmp_path / "m.qsf") == ((16, 16), None)
        with Reader(tmp_path / "m.qsf") as reader:
            assert reader.arch.act_bits == act_bits


def test_a_measurement_goes_on_until_its_verdict_is_clear() -> None:
    rng = np.random.default_rng(5)

    def noise(size: float, n_tokens: int) -> Noise:
        reference = rng.normal(0, 3, (n_tokens, 4000)).astype(np.float32)
        noisy = reference + rng.normal(0, size, reference.shape).astype(np.float32)
        return Noise.between(noisy, reference)

    for size, is_cheap in ((0.02, True), (0.3, False)):
        found = noise(size, 32)
        assert abs(float(found.sizes.mean()) - size) < 0.02 * size
        assert (found.is_cheap(0.98), found.is_clear(0.98)) == (is_cheap, True)
    close = noise(0.019 / 0.28, 16).with_more(noise(0.021 / 0.28, 16))  # about the limit
    assert len(close.sizes) == 32
    assert not close.is_clear(0.98)
    rest = noise(0.05, 32).without(noise(0.03, 32))
    assert abs(float(rest.sizes.mean()) - 0.04) < 0.002


def with_large_channels(folder: Path, out: Path) -> Path:
    """The same model to the bit, whose norms put out every 8th channel 256 times as large."""
    config, tensors = read_checkpoint(folder)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for norm, names in {
            "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
        }.items():
            tensors[f"{at}.{norm}.weight"][::8] *= 256
            for name in names:
                tensors[f"{at}.{name}.weight"][:, ::8] /= 256
    return write_checkpoint(out, config, tensors, tokenizer_from=folder)


def test_a_kept_model_that_needs_finer_activations_gets_them(
    tmp_path: Path, tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for name in ("plain", "large"):
        hf = tiny_llama_dir
        if name == "large":
            hf = with_large_channels(hf, tmp_path / "hf")
        out = tmp_path / f"{name}.qsf"
        gguf = gguf_files.write(
            hf, tmp_path / f"{name}.gguf", kind=gguf_files.Type.Q5_1, tokenizer=True
        )
        report = convert(gguf, out)
        with Reader(out) as reader:
            record = (read_meta(reader) or {})["activations"]
            assert record["bits"] == reader.arch.act_bits
        assert report.notes[0].startswith(f"activations of {record['bits']} bits: 8 bits change ")
        assert run_cli.main([str(out), "--plan", "--ram-budget", "auto"]) == 0
        assert report.notes[0] in capsys.readouterr().out
        found[name] = record
    assert found["plain"]["bits"] == 8
    assert found["large"]["bits"] == 16
    assert found["large"]["agreement"] < found["plain"]["agreement"]
