"""The converter as a library: what it refuses, and that a failure leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from make import hf_makers
from make.tiny_checkpoints import LLAMA3_SCALING
from qsf.errors import QsfArgumentError, QsfConversionError, QsfError, QsfIOError
from qsf.file.reader import Reader
from qsf_converter import convert


def refuse(folder: Path, message: str, error: type[QsfError] = QsfConversionError) -> None:
    """Converting raises, says why, and leaves nothing beside the model."""
    out = folder.parent / "out.qsf"
    before = sorted(folder.parent.iterdir())
    with pytest.raises(error, match=message):
        convert(folder, out)
    assert sorted(folder.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["DbrxForCausalLM"]},
            "DbrxForCausalLM is not supported: a mixture of experts of another form; the nearest",
        ),
        (
            {"architectures": ["NoForCausalLM"]},
            "NoForCausalLM is not supported; `qsf convert --families` lists what is",
        ),
        ({"architectures": None, "model_type": "deberta"}, "names no architecture.*deberta"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "spiral", "factor": 4.0}}, "'spiral' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "short_factor = None is not a list of 5"),
        ({"rope_interleaved": True}, "rope_interleaved = True is not supported for Llama"),
        ({"a_new_idea": 7}, "a_new_idea = 7 is not supported for LlamaForCausalLM"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "not a positive number"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 1}}},
            "rope_parameters.full_attention is missing",
        ),
        ({"rope_scaling": "linear"}, "not an object"),
        (
            {"rope_scaling": {**LLAMA3_SCALING, "high_freq_factor": 1}},
            "is not above low_freq_factor",
        ),
        ({"hidden_act": "gelu_10"}, "hidden_act = 'gelu_10' is not supported; supported: gelu_new"),
        ({"quantization_config": {"bits": 4}}, "quant_method = None .* unquantised checkpoint"),
        ({"quantization_config": 4}, "quantization_config = 4 is not an object"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"mlp_bias": True}, "no tensor model.layers.0.mlp.gate_proj.bias"),
        ({"num_key_value_heads": 3}, "cannot share 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0 is not within"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers = '2'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"head_dim": 9}, "even head_dim"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "not true or false"),
        ({"vocab_size": 51}, r"embed_tokens.weight has shape \[50, 72\].*\[51, 72\]"),
        ({"num_hidden_layers": 3}, r"no tensor model.layers.2.input_layernorm.weight"),
    ],
)
def test_configurations_that_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m")
    config = {**hf_makers.LLAMA_CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    refuse(folder, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"scale_attn_weights": False}, "scale_attn_weights"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"activation_function": "tanh"}, "activation_function"),
        ({"n_head": 5}, "not a multiple"),
    ],
)
def test_gpt2_configurations_that_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder, _ = hf_makers.gpt2(tmp_path / "m", **changes)
    refuse(folder, message)


def test_mistral_with_mixed_attention_is_refused(tmp_path: Path) -> None:
    folder, _ = hf_makers.llama(
        tmp_path / "m",
        architectures=["MistralForCausalLM"],
        layer_types=["full_attention", "sliding_attention"],
    )
    refuse(folder, "layer_types")


@pytest.mark.parametrize("content", ["", "{", "[]", "nul", "[" * 100000])
def test_a_config_that_is_not_json(tmp_path: Path, content: str) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m")
    (folder / "config.json").write_text(content)
    refuse(folder, r"config\.json: ")


def test_missing_directories(tmp_path: Path) -> None:
    refuse(tmp_path / "gone", "no such directory", QsfIOError)
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", "no config.json")


@pytest.mark.parametrize("value", [np.nan, np.inf, 7e4])
@pytest.mark.parametrize(
    ("name", "position"),
    [
        ("transformer.h.1.attn.c_attn.weight", (47, 100)),
        ("transformer.h.0.mlp.c_proj.weight", (191, 3)),
        ("transformer.h.0.attn.c_attn.bias", (77,)),
        ("transformer.wte.weight", (39, 47)),
        ("transformer.wpe.weight", (20, 1)),
    ],
)
def test_bad_values_are_named(
    tmp_path: Path, name: str, position: tuple[int, ...], value: float
) -> None:
    folder, weights = hf_makers.gpt2(tmp_path / "m", np.float32)
    weights[name][position] = value
    save_file(weights, folder / "model.safetensors")
    fits = value == 7e4 and (name.endswith("bias") or "wte" in name)  # f32; 8-bit: up to 8e6
    # 4 bits: 7e4 / 15 is a good scale, but a block from -7e4 has no f16 for its min.
    if value == 7e4 and "h." in name and name.endswith("weight"):
        weights[name][position] = -value
        save_file(weights, folder / "model.safetensors")
    if fits:
        convert(folder, tmp_path / "out.qsf")
    else:
        where = ", ".join(map(str, position))
        refuse(folder, rf"tensor {name} at \[{where}\]: ".replace(".", r"\."))


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    folder, weights = hf_makers.llama(tmp_path / "m")
    name = "model.layers.0.self_attn.k_proj.weight"
    weights[name] = np.zeros((20, 72), np.int8)
    save_file(weights, folder / "model.safetensors")
    refuse(folder, f"{name} is stored as I8")


def test_two_names_for_one_tensor(tmp_path: Path) -> None:
    folder, weights = hf_makers.llama(tmp_path / "m")
    save_file({**weights, "norm.weight": np.ones(72)}, folder / "model.safetensors")
    refuse(folder, "has norm.weight and model.norm.weight")


def test_options_that_are_refused(tmp_path: Path) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m")
    with pytest.raises(
        QsfArgumentError, match=r"5bit is unknown; available: 2bit, .* f32, mixed, keep"
    ):
        convert(folder, tmp_path / "out.qsf", quant_type="5bit")
    with pytest.raises(QsfArgumentError, match="embed type q5x is unknown"):
        convert(folder, tmp_path / "out.qsf", embed_type="q5x")


def test_existing_files_are_kept_unless_told(tmp_path: Path) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m")
    out = tmp_path / "out.model"
    out.write_text("precious")
    with pytest.raises(QsfArgumentError, match="exists"):
        convert(folder, out)
    assert out.read_text() == "precious"
    (folder / "config.json").rename(folder / "config.txt")
    with pytest.raises(QsfConversionError):
        convert(folder, out, force=True)
    assert out.read_text() == "precious"
    (folder / "config.txt").rename(folder / "config.json")
    convert(folder, out, force=True)
    with Reader(out) as reader:
        reader.verify()
    for name in ("model.safetensors", "config.json"):
        with pytest.raises(QsfArgumentError, match="of the model itself"):
            convert(folder, folder / name, force=True)


def test_a_link_to_nothing_is_kept_unless_told(tmp_path: Path) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m")
    out = tmp_path / "out.qsf"
    out.symlink_to("nothing.qsf")
    with pytest.raises(QsfArgumentError, match="exists; --force replaces it"):
        convert(folder, out)
    assert out.readlink() == Path("nothing.qsf")
    convert(folder, out, force=True)
    with Reader(out) as reader:
        reader.verify()
    assert not out.is_symlink()
    assert not (tmp_path / "nothing.qsf").exists()


JSON_NAMES = [
    "config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json",
    "model.safetensors.index.json",
]  # fmt: skip
WEIGHT_NAMES = ["model.safetensors", "pytorch_model.bin", "m.gguf"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in JSON_NAMES for kind in ("pipe", "device", "large")),
        *((name, kind) for name in WEIGHT_NAMES for kind in ("pipe", "device")),
    ],
)
def test_files_that_never_end_are_refused(tmp_path: Path, name: str, kind: str) -> None:
    """Nothing waits for a writer, and nothing is read to its end."""
    folder, _ = hf_makers.llama(tmp_path / "m")
    if name in ("model.safetensors.index.json", "pytorch_model.bin", "m.gguf"):
        (folder / "model.safetensors").unlink()
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(65 << 30)
    said = "66560 MB, allowed: up to 64" if kind == "large" else "not a regular file"
    refuse(path if name == "m.gguf" else folder, said)


def test_bad_outputs(tmp_path: Path) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m")
    with pytest.raises(QsfIOError, match="is a directory"):
        convert(folder, tmp_path)
    with pytest.raises(QsfIOError, match="no such directory"):
        convert(folder, tmp_path / "gone" / "out.qsf")


def test_too_little_space_is_seen_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    folder, _ = hf_makers.llama(tmp_path / "m")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    refuse(folder, "only 0 MB are free", QsfIOError)


def test_a_full_disk_at_any_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = hf_makers.gpt2(tmp_path / "m")
    real, n_writes, fail_at = os.pwrite, 0, -1

    def pwrite(fd: int, data: Any, off: int) -> int:
        nonlocal n_writes
        n_writes += 1
        if n_writes == fail_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, off)

    monkeypatch.setattr(os, "pwrite", pwrite)
    convert(folder, tmp_path / "whole.qsf")
    assert n_writes > 20
    for number in range(1, n_writes + 1, 4):
        n_writes, fail_at = 0, number
        refuse(folder, "No space left on device", QsfIOError)


def test_an_interrupt_anywhere_leaves_nothing(tmp_path: Path) -> None:
    folder, _ = hf_makers.gpt2(tmp_path / "m")
    n_calls = 0

    def count(done: int, total: int) -> None:
        nonlocal n_calls
        n_calls += 1

    convert(folder, tmp_path / "whole.qsf", progress=count)
    before = sorted(tmp_path.iterdir())
    for stop_at in range(1, n_calls + 1, 5):
        seen = 0

        def interrupt(done: int, total: int, stop_at: int = stop_at) -> None:
            nonlocal seen
            seen += 1
            if seen == stop_at:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            convert(folder, tmp_path / "out.qsf", progress=interrupt)
        assert sorted(tmp_path.iterdir()) == before
    assert not [t for t in threading.enumerate() if t.name.startswith("quantise")]


@pytest.mark.skipif(os.name != "posix", reason="needs hard links")
def test_output_that_is_the_weights_under_another_name(tmp_path: Path) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m")
    (tmp_path / "link").hardlink_to(folder / "model.safetensors")
    with pytest.raises(QsfArgumentError, match="of the model itself"):
        convert(folder, tmp_path / "link", force=True)
