"""What is opened as a model: directories with weights of either kind, GGUF files, nothing else."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from make import gguf_files, hf_makers, tiny_checkpoints, torch_files
from make.commands import Here
from make.stored import Reader
from oracle import reference
from qsf.errors import QsfArgumentError, QsfConversionError, QsfIOError
from qsf_converter import convert
from qsf_converter.sources.checkpoint_gguf import GgufCheckpoint
from qsf_converter.sources.checkpoint_safetensors import SafetensorsCheckpoint
from qsf_converter.sources.checkpoint_torch import TorchCheckpoint
from qsf_converter.sources.source import open_source

COMMAND = [sys.executable, "-m", "qsf_converter.cli"]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """In another folder than the project, whose qsf/ would be found first."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tempfile.gettempdir(),
    )


def test_safetensors_are_preferred(tmp_path: Path) -> None:
    folder, weights = hf_makers.llama(tmp_path / "m")
    torch_files.save(folder / "pytorch_model.bin", weights)
    with open_source(folder) as source:
        assert isinstance(source.checkpoint, SafetensorsCheckpoint)
        assert [path.name for path in source.files] == [
            "model.safetensors",
            "tokenizer.json",
            "config.json",
        ]
    (folder / "model.safetensors").unlink()
    with open_source(folder) as source:
        assert isinstance(source.checkpoint, TorchCheckpoint)
        assert [path.name for path in source.files] == [
            "pytorch_model.bin",
            "tokenizer.json",
            "config.json",
        ]
    (folder / "pytorch_model.bin").unlink()
    torch_files.save_shards(folder, weights, 2)
    hf_makers.write_shards(folder, weights, 3)
    with open_source(folder) as source:
        assert isinstance(source.checkpoint, SafetensorsCheckpoint)
        assert len(source.checkpoint.paths) == 3


def test_a_gguf_file_under_any_name(tmp_path: Path) -> None:
    folder = tiny_checkpoints.make_llama(tmp_path / "m")
    for name in ("m.gguf", "m.GGUF", "blob"):
        gguf_files.write(folder, tmp_path / name)
        with open_source(tmp_path / name) as source:
            assert isinstance(source.checkpoint, GgufCheckpoint)
            assert source.origin.name == "m" if "m" in name else "blob"
    (tmp_path / "not.gguf").write_bytes(b"x" * 100)
    with pytest.raises(QsfConversionError, match=r"not\.gguf: not a GGUF file"):
        convert(tmp_path / "not.gguf", tmp_path / "out.qsf")
    (tmp_path / "blob").write_bytes(b"x" * 100)
    with pytest.raises(QsfConversionError, match=r"blob: a model directory or a GGUF file is exp"):
        convert(tmp_path / "blob", tmp_path / "out.qsf")


def test_the_source_is_never_replaced(tmp_path: Path) -> None:
    folder, weights = hf_makers.llama(tmp_path / "m")
    path = gguf_files.write(folder, tmp_path / "m.gguf")
    (folder / "model.safetensors").unlink()
    torch_files.save(folder / "pytorch_model.bin", weights)
    for source, out in ((path, path), (folder, folder / "pytorch_model.bin")):
        before = out.read_bytes()
        with pytest.raises(QsfArgumentError, match="is a file of the model itself"):
            convert(source, out, force=True)
        assert out.read_bytes() == before


def test_absence_names_what_was_looked_for(tmp_path: Path) -> None:
    folder = hf_makers.write_model(tmp_path / "m", hf_makers.LLAMA_CONFIG, None)
    wanted = (
        "none of model.safetensors, model.safetensors.index.json, pytorch_model.bin, "
        "pytorch_model.bin.index.json"
    )
    with pytest.raises(QsfConversionError, match=wanted) as caught, open_source(folder):
        pass
    assert "there are" not in str(caught.value)
    (folder / "consolidated.00.pth").write_bytes(b"")
    (folder / "model-Q4_K_M.gguf").write_bytes(b"")
    with (
        pytest.raises(
            QsfConversionError,
            match=r"there are consolidated\.00\.pth, model-Q4_K_M.*"
            r"to convert model-Q4_K_M\.gguf, name the file itself",
        ),
        open_source(folder),
    ):
        pass  # fmt: skip
    (folder / "config.json").unlink()
    with pytest.raises(QsfConversionError, match=r"no config.json.*name the file itself"):
        convert(folder, tmp_path / "out.qsf")
    with pytest.raises(QsfIOError, match="gone: no such directory"):
        convert(tmp_path / "gone", tmp_path / "out.qsf")


# ---- the command ----


def test_the_command_converts_a_gguf_file(tmp_path: Path, tiny_llama_dir: Path, here: Here) -> None:
    """What it writes computes what the model in the directory computes."""
    path = gguf_files.write(tiny_llama_dir, tmp_path / "m.gguf", tokenizer=True)
    out = tmp_path / "m.qsf"
    done = here(path, out, "--quant-type", "f16", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    tokens = np.arange(3, 40)
    expected = reference.forward(reference.load_huggingface(tiny_llama_dir), tokens).logits
    np.testing.assert_array_equal(
        reference.forward(reference.load_qsf(out), tokens).logits, expected
    )
    text = [sys.executable, "-m", "qsf.cli.run.main", str(out), "-p", "Once upon", "-n", "4"]
    done = subprocess.run(text, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) >= 2


def test_the_command_converts_a_directory_of_torch(
    tmp_path: Path, tiny_llama_dir: Path, here: Here
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_llama_dir / name).read_bytes())
    weights = {
        name: values.astype(np.float16)
        for name, values in load_file(tiny_llama_dir / "model.safetensors").items()
    }
    torch_files.save(folder / "pytorch_model.bin", weights)
    done = here(folder, tmp_path / "m.qsf", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    convert(tiny_llama_dir, tmp_path / "expected.qsf")
    with Reader(tmp_path / "m.qsf") as found, Reader(tmp_path / "expected.qsf") as expected:
        metas = [json.loads(one.read_section("META")) for one in (found, expected)]
        for i in range(len(expected.units)):
            assert found.read_unit(i) == expected.read_unit(i)
    assert metas[0]["source"]["weights_sha256"] == metas[1]["source"]["weights_sha256"]


def test_what_the_command_cannot_convert_is_one_line(tmp_path: Path, here: Here) -> None:
    folder = hf_makers.write_model(tmp_path / "m", hf_makers.LLAMA_CONFIG, None)
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(20))
    torch_files.save(folder / "pytorch_model.bin", {}, data=b"cos\nsystem\n(S'true'\ntR.")
    for source, message in (
        (tmp_path / "m.gguf", "GGUF version 0 is not supported"),
        (folder, "its pickle asks for 'os.system'"),
    ):
        done = here(source, tmp_path / "out.qsf")
        assert (done.returncode, done.stdout) == (1, "")
        assert len(done.stderr.splitlines()) == 1
        assert message in done.stderr
    assert ", a .gguf file, or a name" in " ".join(here("--help").stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K", "F16"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, kind: str) -> None:
    """A sparse file of zeros; Q and K are reordered, quantised types become f32."""
    config = {
        **hf_makers.LLAMA_CONFIG,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "vocab_size": 40960,
    }
    stored = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, value in gguf_files._llama({**config, "num_hidden_layers": 3}).items():
        gguf_files.add(writer, f"llama.{key}", value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 3)
    n_weights = 0
    for name, shape in hf_makers.llama_shapes({**config, "num_hidden_layers": 3}).items():
        there = names.get_name(name, try_suffixes=(".weight",)) or name
        one = stored if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        n_items, n_bytes = gguf.GGML_QUANT_SIZES[one]
        size = int(np.prod(shape)) // n_items * n_bytes
        writer.add_tensor_info(there, shape, np.dtype(np.float16), size, raw_dtype=one)
        n_weights += int(np.prod(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with (tmp_path / "m.gguf").open("r+b") as file:
        file.truncate(1 << 30)
    assert n_weights > 120e6
    done = run(tmp_path / "m.gguf", tmp_path / "out.qsf", "--threads", 1, "--allow-no-tokenizer")
    assert done.returncode == 0, done.stderr
    peak_mb = float(done.stdout.rsplit("peak memory ", 1)[1].split()[0])
    assert peak_mb < 250  # as of safetensors, and a piece of f32 more
