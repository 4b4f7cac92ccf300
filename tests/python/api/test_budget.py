# SPDX-License-Identifier: Apache-2.0
"""The budget is a law for the whole process, or the run is refused before it starts."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import qsf
from make.streamed_models import make_large_llama
from make.text_families import MARK, spm_json
from make.tiny_checkpoints import make_llama
from qsf.errors import QsfMemoryError
from qsf.native._qsf import ffi, lib
from qsf.options import ModelOptions
from qsf_converter import convert


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 40 MB of weights: more than the least budget leaves."""
    folder = tmp_path_factory.mktemp("budget")
    checkpoint = make_large_llama(folder / "hf")
    convert(checkpoint, folder / "m.qsf", quant_type="8bit")
    return folder / "m.qsf"


def test_too_small_is_refused_with_what_would_do(large_model: Path) -> None:
    plan = qsf.Model.plan(large_model, ram_budget=10)
    assert not plan.is_enough
    with pytest.raises(QsfMemoryError) as caught:
        qsf.Model(large_model, ram_budget=10)
    assert re.search(r"set ram_budget=\d+", str(caught.value))


def plan_of(path: Path, budget_bytes: int) -> tuple[int, Any]:
    """Return the status and the plan as the engine fills it, by the C API itself."""
    options = ffi.new("qsf_options *")
    lib.qsf_options_default(options)
    options.budget_bytes = budget_bytes
    plan = ffi.new("qsf_plan *")
    return lib.qsf_model_plan(str(path).encode(), options, plan), plan


RUN_ANY = """
import json, sys, qsf
options = json.loads(sys.argv[2])
if options["ram_budget"] == "least":
    least = qsf.Model.plan(sys.argv[1], **{**options, "ram_budget": 1}).min_budget_bytes
    options["ram_budget"] = -(-least // 2**20) + 1
if not qsf.Model.plan(sys.argv[1], **options).is_enough:
    sys.exit(3)
with qsf.Model(sys.argv[1], **options) as model:
    more = [model.create_session() for _ in range(1, options["sessions"])]
    for session in (model.session, *more):
        list(session.generate([1, 2, 3] * 40, max_tokens=20, temperature=0))
    plan = model.info.plan
    print(plan.text)
    print(plan.budget_bytes >> 20, plan.n_units_resident)
status = open("/proc/self/status").read()
print(int(status.split("VmHWM:")[1].split()[0]))
"""


def random_options(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    return {
        "ram_budget": rng.choice(["auto", 60, rng.randint(40, 120), 200, None]),
        "sessions": rng.choice([1, 1, 2, 4]),
        "max_seq_len": rng.choice([None, 160, 256]),
        "threads": rng.choice([1, 2]),
        "kv_type": rng.choice([None, "f16", "k8v4"]),
        "draft": rng.choice(["auto", "off"]),
    }


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "options",
    [{"sessions": 1, "ram_budget": mb} for mb in ("least", 70, 200)]
    + [random_options(1)]  # no budget
    + [pytest.param(random_options(i), marks=pytest.mark.slow) for i in range(2, 200)],
    ids=str,
)
def test_any_run_stays_below_what_its_line_says(large_model: Path, options: dict[str, Any]) -> None:
    command = [sys.executable, "-c", RUN_ANY, str(large_model), json.dumps(options)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode == 3:  # refused: the budget is too small
        return
    assert done.returncode == 0, (options, done.stderr)
    line, counts, peak_kb = done.stdout.splitlines()
    said = re.match(r"in memory (\d+) MB of at most ([\d.]+) ([MG])B, context \d+", line)
    assert said is not None, line
    assert int(peak_kb) <= int(said[1]) << 10, (options, line)
    budget_mb, n_resident = map(int, counts.split())
    assert budget_mb == 0 or int(said[1]) <= budget_mb
    if "draft" not in options:  # the least budget streams most of the layers, the others less
        assert (
            n_resident
            in {"least": range(4), 70: range(4, 9), 200: range(7, 9)}[options["ram_budget"]]
        )


def test_the_default_budget_is_half_of_what_is_free(large_model: Path) -> None:
    machine = ffi.new("qsf_machine *")
    assert lib.qsf_machine_describe(machine) == lib.QSF_OK
    status, plan = plan_of(large_model, lib.QSF_BUDGET_AUTO)
    assert status == lib.QSF_OK
    assert ModelOptions().ram_budget == "auto"
    free_bytes = plan.process_bytes + machine.available_bytes
    if machine.available_bytes > 2**30:  # others take and free some at the same time
        assert 0.4 * free_bytes < plan.budget_bytes < 0.6 * free_bytes
    assert plan.engine_bytes <= plan.budget_bytes - plan.process_bytes
    if machine.available_bytes > 2**30:
        assert plan.n_units_resident == plan.n_units


def test_a_budget_beyond_the_machine_is_cut(large_model: Path) -> None:
    machine = ffi.new("qsf_machine *")
    assert lib.qsf_machine_describe(machine) == lib.QSF_OK
    if machine.available_bytes == 0:
        pytest.skip("this system does not say what is available")
    for budget_bytes in (0, 2**60):
        _status, plan = plan_of(large_model, budget_bytes)
        assert plan.budget_bytes == budget_bytes
        assert 0 < plan.ceiling_bytes < plan.process_bytes + machine.memory_bytes


# ---- what Python and the tokenizer take ----
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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_looking_at_the_plan_is_lean_too(wide_model: Path) -> None:
    peak_mb, _ = run_lean("--plan", str(wide_model))
    assert peak_mb < MOST_MB
