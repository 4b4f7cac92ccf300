"""What Python and the tokenizer take of a budget that counts the whole process."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from make.text_families import MARK, spm_json
from make.tiny_checkpoints import make_llama
from qsf_converter import convert

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

N_VOCAB = 32000
MOST_MB = 60

# Large, or slow to import, or a door to such.
UNWANTED = """
asyncio cffi click concurrent ctypes difflib email ftplib http huggingface_hub jinja2 logging lz4
markupsafe multiprocessing numpy packaging pdb pickle pkg_resources pycparser pydantic pydoc
readline requests rich safetensors setuptools socket ssl subprocess tempfile tokenizers torch tqdm
transformers typer typing_extensions unittest uuid xml yaml zstandard qsf_converter
qsf.cli.inspect qsf.cli.run.chat qsf.find qsf.shell.typer_app qsf_bench importlib.metadata
"""

RUN = """
import sys
from qsf.cli.run import main as cli
code = cli.main(sys.argv[2:])
status = open("/proc/self/status").read()
print("peak", int(status.split("VmHWM:")[1].split()[0]) * 1024)
print("unwanted", *(name for name in sys.argv[1].split() if name in sys.modules))
sys.exit(code)
"""


def write_tokenizer(folder: Path) -> None:
    """Write a SentencePiece-like BPE of 32,000 tokens and 62,000 merges, as LLaMA 2 has."""
    words = [""]
    pieces = [MARK]
    for _ in range(4):
        words = [word + letter for word in words for letter in "etaoinshrdlu"]
        pieces += words
    pieces += [MARK + word for word in pieces[1:]]
    del pieces[N_VOCAB - 259 :]
    merges = [f"{piece[:i]} {piece[i:]}" for piece in pieces for i in range(1, len(piece))[:2]]
    assert len(merges) > 60000
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(spm_json(pieces, merges))
    (folder / "tokenizer_config.json").write_text("{}", "utf-8")


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with the vocabulary of a large one."""
    folder = tmp_path_factory.mktemp("lean")
    write_tokenizer(folder / "tokenizer")
    checkpoint = make_llama(folder / "hf", n_vocab=N_VOCAB, tokenizer_from=folder / "tokenizer")
    convert(checkpoint, folder / "wide.qsf", quant_type="4bit")
    return folder / "wide.qsf"


def run_lean(*arguments: str) -> tuple[float, str]:
    """Run ``qsf-run``, which imports nothing unwanted; return its peak in MB and its report."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, UNWANTED, *arguments],
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=True,
    )
    peak, unwanted = done.stdout.splitlines()[-2:]
    assert unwanted == "unwanted"
    return int(peak.split()[1]) / 2**20, done.stderr


@pytest.mark.parametrize("is_verbose", [False, True])
def test_a_run_takes_60_mb_beside_the_engine(wide_model: Path, is_verbose: bool) -> None:
    arguments = [str(wide_model), "-p", "once upon a time", "-n", "20", "--temperature", "0"]
    arguments += ["--verbose"] * is_verbose
    peak_mb, report = run_lean(*arguments)
    if is_verbose:
        parts = {
            name: float(mb.replace(",", ""))
            for name, mb in re.findall(r"^  (\S.*?) +([0-9.,]+)$", report, re.MULTILINE)
        }
        engine_mb = parts["total"] - parts["process before opening"] - parts["reserved for Python"]
        assert engine_mb > 0
        assert peak_mb - engine_mb < MOST_MB
        assert parts["process before opening"] + parts["reserved for Python"] < MOST_MB
    else:  # its weights are below 10 MB, so that little is left to be hidden in the engine's share
        assert peak_mb < MOST_MB + 10


def test_looking_at_the_plan_is_lean_too(wide_model: Path) -> None:
    peak_mb, _ = run_lean("--plan", str(wide_model))
    assert peak_mb < MOST_MB
