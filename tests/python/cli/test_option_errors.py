"""What a user types wrong: one line, exit code 2, the option with its range and its unit."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from make.commands import Here, Run, check_refused
from make.refusals import refusals
from qsf.cli import evaluate, inspect
from qsf.cli.run import main as run_cli
from qsf.cli.run.options import RunOptions, read_defaults
from qsf.errors import QsfArgumentError
from qsf.native import binding
from qsf.native._qsf import lib
from qsf.native.opening import budget_mb
from qsf.options import GenerationOptions, ModelOptions, Number, Size, Whole, described

# A row has the words behind the command (M: a model, F: a folder, T: a text), and what is said.
COMMANDS = ("run", "serve", "eval", "inspect", "convert", "chta", "quantize")


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_options_are_one_line_and_code_2(
    qsf: Run, command: str, tiny_llama_8bit: Path, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "story.txt").write_text("Once upon a time there was a girl.", "utf-8")
    places = {"M": tiny_llama_8bit, "F": tiny_llama_dir, "T": "story.txt"}
    for line, said in refusals(f"qsf {command}"):
        line = line.replace("9{5000}", "9" * 5000)
        done = qsf(command, *(places.get(word, word) for word in line.split()))
        assert (done.returncode, done.stdout) == (2, ""), (command, line, done.stderr)
        assert done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith(("qsf: error: ", f"qsf {command}: error: ")), done.stderr
        assert said in done.stderr, line


def test_errors_begin_with_what_was_typed(qsf: Run, here: Here, tmp_path: Path) -> None:
    absent = tmp_path / "absent.qsf"
    assert qsf("chat", absent).stderr.startswith("qsf chat: error: ")
    assert qsf(absent).stderr.startswith("qsf run: error: ")
    for name, main in (("run", run_cli.main), ("inspect", inspect.run), ("eval", evaluate.run)):
        error = here(absent, "--nothing", command=main).stderr
        assert error.startswith(f"qsf-{name}: error: ")
        assert error.endswith(f"(see qsf-{name} --help)\n")


# ---- budgets, defaults ----
@pytest.mark.parametrize(
    ("text", "mb"),
    [("300", 300), ("300MB", 300), ("4GB", 4096), ("1.5G", 1536), ("2 GiB", 2048), ("0", None)],
)
def test_budgets_are_sizes_too(text: str, mb: int | None) -> None:
    assert budget_mb(text) == mb
    if mb is not None:
        assert Size(1).parse(text) == mb
        with pytest.raises(ValueError, match="is not a size: MB as a number"):
            Size(1).parse(f"{text}?")


def test_a_budget_may_be_a_share_of_the_machine() -> None:
    memory_mb = binding.describe_machine().memory_bytes / 2**20
    assert budget_mb("50%") == int(memory_mb / 2)
    assert budget_mb("auto") == "auto"
    assert ModelOptions(ram_budget="1.5GB").ram_budget == "1.5GB"
    for wrong in ("lots", "0%", "120%", "1 PB", "-5", "", "nan", "1e3"):
        with pytest.raises(QsfArgumentError):
            ModelOptions(ram_budget=wrong)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's config.toml, not written yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "config" / "qsf").mkdir(parents=True)
    return tmp_path / "config" / "qsf" / "config.toml"


needs_tomllib = pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")


@needs_tomllib
def test_a_users_defaults_hold_unless_an_option_says_otherwise(
    process: Run, run: Run, config: Path, tiny_llama_8bit: Path
) -> None:
    config.write_text(
        'ram-budget = "0.1GB"\nmax-tokens = 3\ntemperature = 0\nkv-rotation = "off"\n'
        'stop = ["xyz"]\npin_threads = false\n',
        "utf-8",
    )
    assert read_defaults()["ram_budget"] == 102
    done = process("run", tiny_llama_8bit, "-p", "She", "-v")
    assert "generated 3 tokens" in done.stderr
    assert "budget                                       102.0" in done.stderr
    assert "generated 2 tokens" in run(tiny_llama_8bit, "-p", "She", "-n", 2).stderr


@needs_tomllib
def test_wrong_defaults_are_one_line_and_code_2(run: Run, config: Path) -> None:
    for text, said in (*refusals("numbers"), ("x" * 70000, "more than 65536 bytes")):
        config.write_text(text, "utf-8")
        done = run("m.qsf", "-p", "x")
        check_refused(done, 2, said)
        assert str(config) in done.stderr
    config.unlink()
    os.mkfifo(config)  # without a writer: nobody waits
    check_refused(run("m.qsf", "-p", "x"), 1, "m.qsf")


# ---- the options of the program without Python are those of ``qsf run`` ----
SOURCE = Path(__file__).parents[3] / "program" / "arguments.c"
ROW = re.compile(r"\{\"([\w-]+)\", (?:0|'(\w)'), (\w+), .+?, ([-\w.]+), ([-\w.]+), \"\w+\"\},")
NUMBERS = {"MOST_U32": 2**32 - 1, "QSF_MAX_DRAFT_ROWS": lib.QSF_MAX_DRAFT_ROWS}


def test_its_options_are_those_of_qsf_run() -> None:
    rows = {row[0]: row[1:] for row in ROW.findall(SOURCE.read_text("ascii"))}
    names = {"plan"} | {o.flag[2:] for o in described(RunOptions)}
    for option in (*described(ModelOptions, "run"), *described(GenerationOptions, "run")):
        is_lacking = option.name in ("kv_policy", "template_args", "lora")
        longer = [option.flag, *(name for name in option.also if name.startswith("--"))]
        short = "".join(name[1:] for name in option.also if name not in longer)
        for name in () if is_lacking else longer:
            letter, kind, *range_ = rows[name[2:]]
            assert letter == (short if name == option.flag else ""), name
            if kind in ("COUNT", "REAL", "WHOLE"):
                assert isinstance(option.kind, Whole | Number), name
                first = option.kind.least or 1e-9 * getattr(option.kind, "is_open", False)
                assert [float(NUMBERS.get(n, n)) for n in range_] == [first, option.kind.most]
        names |= {name[2:] for name in longer}
    assert rows.keys() <= names
