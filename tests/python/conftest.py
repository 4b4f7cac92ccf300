"""Fixtures for all tests: the bundled models, their .qsf files, the shared folder."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from make.commands import here as here
from make.commands import process as process
from make.commands import qsf as qsf
from make.commands import run as run
from make.commands import start as start

if TYPE_CHECKING:
    from make.golden_families import Case

# As the commands do (qsf/shell/entry.py), and for all children. OpenBLAS reads these names when
# numpy is imported; its threads would wait in loops, and calibrations take eight times as long.
assert "numpy" not in sys.modules, "a plugin or an import above has loaded numpy"
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

# A shell starts what runs in the background with SIGINT ignored, nohup with SIGHUP, and children
# inherit that: tests of signals would fail, or hang, by where they were started from.
for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(_number) is signal.SIG_IGN:
        is_interrupt = _number == signal.SIGINT
        signal.signal(_number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)

ROOT = Path(__file__).resolve().parents[2]

# `make test` tries the same few examples everywhere; `make check-slow` and `make fuzz` set the
# number of other ones.
_n_examples = os.environ.get("QSF_EXAMPLES", "")
settings.register_profile(
    "project",
    max_examples=int(_n_examples or 12),
    derandomize=not _n_examples,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("project")


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where this test run remembers things, in place of the user's own folders."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        for name in ("HF_HOME", "HF_HUB_CACHE", "HF_TOKEN"):
            patch.delenv(name, raising=False)
        yield folder


@pytest.fixture(scope="session", autouse=True)
def measured_tokens() -> Iterator[Callable[[int], int]]:
    """No conversion in this process measures costs: that takes longer than all the rest of it.

    The value is what measures them; ``measured_costs`` puts it back for a test.
    """
    from qsf_converter import costs

    original = costs.n_measured_tokens
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "n_measured_tokens", lambda _n_weights: 0)
        yield original


@pytest.fixture
def measured_costs(measured_tokens: Callable[[int], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions of this test measure the costs of arithmetic, as those of users do."""
    monkeypatch.setattr("qsf_converter.costs.n_measured_tokens", measured_tokens)


@pytest.fixture(scope="session", autouse=True)
def auto_weights() -> Iterator[int]:
    """No conversion in this process takes ``auto`` unasked; the value is up to where users' do."""
    from qsf_converter.convert import AUTO_WEIGHTS

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["qsf_converter.convert"], "AUTO_WEIGHTS", 0)
        yield AUTO_WEIGHTS


@pytest.fixture(scope="session")
def project_root() -> Path:
    """The folder of the project."""
    return ROOT


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Third-party data that the project does not contain; tests that want it skip without."""
    path = Path(os.environ.get("QSF_SHARED", ROOT.parent / "shared"))
    if not path.is_dir():
        pytest.skip(f"{path} is absent (QSF_SHARED names another place)")
    return path


@pytest.fixture(scope="session")
def tiny_llama_dir() -> Path:
    """The bundled LLaMA model, as HuggingFace stores it."""
    return ROOT / "examples" / "tiny-llama"


@pytest.fixture(scope="session")
def tiny_gpt2_dir() -> Path:
    """The bundled GPT-2 model, as HuggingFace stores it."""
    return ROOT / "tests" / "models" / "tiny-gpt2"


@pytest.fixture(scope="session")
def tiny_moe_dir() -> Path:
    """The bundled mixture of experts, as HuggingFace stores it."""
    return ROOT / "tests" / "models" / "tiny-moe"


@pytest.fixture(scope="session")
def converted(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_llama_dir: Path,
    tiny_gpt2_dir: Path,
    tiny_moe_dir: Path,
) -> Callable[[str, str], Path]:
    """``converted("tiny-llama", "4bit")``: the .qsf file, made once per test run."""
    from qsf_converter.convert import convert

    sources = {"tiny-llama": tiny_llama_dir, "tiny-gpt2": tiny_gpt2_dir, "tiny-moe": tiny_moe_dir}
    folder = tmp_path_factory.mktemp("converted")

    def get(model: str, quant_type: str) -> Path:
        path = folder / f"{model}-{quant_type}.qsf"
        if not path.exists():
            convert(sources[model], path, quant_type=quant_type)
        return path

    return get


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Path]:
    """``golden(case)``: a golden case in f16 as a .qsf file, made once by all workers together."""
    from qsf_converter.convert import convert

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "golden"
    folder.mkdir(exist_ok=True)

    def get(case: Case) -> Path:
        key = zlib.crc32(json.dumps([case.config, case.shapes]).encode())
        path = folder / f"{case.name}-{key:08x}.qsf"
        if not path.exists():
            source = case.write(tmp_path_factory.mktemp(case.name))
            convert(source, path, quant_type="f16", embed_type="f16", force=True)
        return path

    return get


@pytest.fixture(scope="session")
def tiny_llama_4bit(converted: Callable[[str, str], Path]) -> Path:
    """The bundled LLaMA model with 4-bit weights."""
    return converted("tiny-llama", "4bit")


@pytest.fixture(scope="session")
def tiny_llama_8bit(converted: Callable[[str, str], Path]) -> Path:
    """The bundled LLaMA model with 8-bit weights."""
    return converted("tiny-llama", "8bit")


@pytest.fixture(scope="session")
def tiny_llama_f16(converted: Callable[[str, str], Path]) -> Path:
    """The bundled LLaMA model with f16 weights."""
    return converted("tiny-llama", "f16")


@pytest.fixture(scope="session")
def tiny_chat_dir(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Path:
    """The bundled LLaMA model with a chat template and generation defaults of its own."""
    source = tmp_path_factory.mktemp("chat") / "tiny-chat"
    shutil.copytree(tiny_llama_dir, source)
    tokenizer = json.loads((source / "tokenizer_config.json").read_text("utf-8"))
    tokenizer["chat_template"] = (
        "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (source / "tokenizer_config.json").write_text(json.dumps(tokenizer), "utf-8")
    generation = {"eos_token_id": [1, 5], "temperature": 0.25, "top_k": 3}
    (source / "generation_config.json").write_text(json.dumps(generation), "utf-8")
    return source


@pytest.fixture(scope="session")
def tiny_chat_8bit(tiny_chat_dir: Path) -> Path:
    """``tiny_chat_dir`` with 8-bit weights."""
    from qsf_converter.convert import convert

    path = tiny_chat_dir.with_suffix(".qsf")
    convert(tiny_chat_dir, path, quant_type="8bit")
    return path


@pytest.fixture(scope="session")
def tiny_padded_8bit(tiny_chat_dir: Path) -> Path:
    """The same with 77 rows in its vocabulary that are no tokens, as Qwen models have them.

    They are copies of tokens: a sampler that does not leave them out chooses them.
    """
    import numpy as np
    from safetensors.numpy import load_file, save_file

    from qsf_converter.convert import convert

    source = tiny_chat_dir.with_name("tiny-padded")
    shutil.copytree(tiny_chat_dir, source)
    tensors = load_file(source / "model.safetensors")
    rows = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = np.concatenate([rows, rows[260:337]])
    save_file(tensors, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text("utf-8"))
    config["vocab_size"] += 77
    (source / "config.json").write_text(json.dumps(config), "utf-8")
    path = source.with_suffix(".qsf")
    convert(source, path, quant_type="8bit")
    return path


@pytest.fixture(scope="session")
def tiny_gpt2_8bit(converted: Callable[[str, str], Path]) -> Path:
    """The bundled GPT-2 model with 8-bit weights."""
    return converted("tiny-gpt2", "8bit")
