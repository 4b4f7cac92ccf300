"""qsf-convert as people use it: its exit code and what it prints.

A process is started where one is needed: for signals, limits, peaks of memory, and once for the
whole way. Everything else is the same function in this process, without the second of a start.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from make import hf_makers
from make.commands import Here
from qsf.file.reader import Reader

COMMAND = [sys.executable, "-m", "qsf_converter.cli"]


# Away from the project, whose qsf/ has no converter and would be found before the installed one.
ELSEWHERE = Path(tempfile.gettempdir())


def run(
    *arguments: object, command: list[str] = COMMAND, cwd: Path = ELSEWHERE
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, check=False, cwd=cwd
    )


def assert_one_error(done: subprocess.CompletedProcess[str], message: str, code: int = 1) -> None:
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if "warning:" not in line]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("qsf-convert: error: ")
    assert message in lines[0]


def sparse_llama(folder: Path, n_layers: int) -> int:
    """A model of zeros that takes no room on the disk; returns its bytes."""
    config = {
        **hf_makers.LLAMA_CONFIG,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "vocab_size": 40000,
        "num_hidden_layers": n_layers,
    }
    hf_makers.write_model(folder, config, None)
    header: dict[str, Any] = {}
    at = 0
    for name, shape in hf_makers.llama_shapes(config).items():
        n_bytes = 2 * (shape[0] * shape[1] if len(shape) == 2 else shape[0])
        entry = {"dtype": "F16", "shape": shape, "data_offsets": [at, at + n_bytes]}
        header[name] = entry
        at += n_bytes
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return at


def test_conversion_reports_what_it_did(tmp_path: Path, here: Here) -> None:
    folder, _ = hf_makers.llama(tmp_path / "m")
    out = tmp_path / "model.bin"
    done = run(folder, out)
    assert done.returncode == 0, done.stderr
    summary = done.stdout.splitlines()
    assert summary[0].startswith(f"{out}: ")
    assert "bits a weight" in summary[0]
    assert ", peak memory " in summary[0]
    assert summary[1].startswith("auto, in the bytes of Q4_K_M: ")
    assert summary[2].startswith("KV cache ")
    assert summary[3].startswith("least like its source: ")
    (line,) = summary[4:]
    words = shlex.split(line.removeprefix("next: "))
    assert words[1:] == ["run", str(out), "--prompt", "Once upon a time"]
    # It works as it stands where the command was typed.
    assert shutil.which(words[0]) is not None or (ELSEWHERE / words[0]).is_file()
    assert "100%" in done.stderr
    with Reader(out) as reader:
        reader.verify()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "model.bin"]
    done = here(folder, out, "--force", "--verbose")
    assert sum(" mse " in line for line in done.stdout.splitlines()) == 4  # 3 worst, 1 heading
    with Reader(out) as reader:
        table = done.stdout.split("\ntensor ")[1].split("\n\n")[0].splitlines()[1:]
        assert len(reader.tensors) == len([line for line in table if not line.startswith("next:")])
    done = here(folder, out, "--force", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = here("--help")
    for said in ("--quant-type", "--embed-type", "--force", "Examples:", "130 interrupted"):
        assert said in done.stdout
    assert "none, lz4, lz4hc, zstd" in " ".join(done.stdout.split())


def test_wrong_places_are_one_line(
    tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hf_makers.llama(tmp_path / "m")
    (tmp_path / "empty").mkdir()
    (tmp_path / "locked").mkdir(mode=0o555)
    for source, out, message, code in (
        ("gone", "out.qsf", "gone: there is no such file or folder", 1),
        ("m/config.json", "out.qsf", "not a file", 1),
        ("empty", "out.qsf", "no config.json", 1),
        ("m", "gone/out.qsf", "gone: no such directory", 1),
        ("m", "empty", "is a directory", 1),
        ("m", "m/config.json", "m/config.json exists; --force replaces it", 2),
        *([("m", "locked/out.qsf", "not writable", 1)] if os.geteuid() else []),
    ):
        assert_one_error(here(source, out), message, code)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "locked", "m"]


@pytest.mark.parametrize(
    ("number", "compress"),
    [(signal.SIGINT, "none"), pytest.param(signal.SIGTERM, "zstd", marks=pytest.mark.slow)],
)
def test_a_signal_leaves_nothing(tmp_path: Path, number: int, compress: str) -> None:
    sparse_llama(tmp_path / "m", 24)
    # A process started in the background may have inherited an ignored SIGINT.
    code = (
        "import signal; from qsf_converter.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\nmain()"
    )
    words = [str(tmp_path / "m"), str(tmp_path / "out.qsf"), "--quiet", "--compress", compress]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ELSEWHERE,
    )
    while process.poll() is None and len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.01)
    process.send_signal(number)
    stdout, stderr = process.communicate()
    assert process.returncode == 128 + number, stderr
    assert stdout == ""
    assert len(stderr.splitlines()) == 1
    assert "nothing was written" in stderr
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.slow
@pytest.mark.parametrize("compress", ["none", "zstd"])
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path, compress: str) -> None:
    n_bytes = sparse_llama(tmp_path / "m", 3)
    assert n_bytes > 250e6
    done = run(tmp_path / "m", tmp_path / "out.qsf", "--threads", 1, "--compress", compress,
               "--quant-type", "4bit")  # fmt: skip
    assert done.returncode == 0, done.stderr
    peak_mb = float(done.stdout.rsplit("peak memory ", 1)[1].split()[0])
    (tmp_path / "out.qsf").unlink()
    assert peak_mb < 200  # two pieces of 32 MB of f32, with their sources and results
