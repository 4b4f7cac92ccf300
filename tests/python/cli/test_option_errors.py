"""What a user types wrong: one line, exit code 2, the option with its range and its unit."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from make.commands import Here, Run, check_refused
from qsf.cli import evaluate, inspect
from qsf.cli.run import main as run_cli
from qsf.cli.run.options import read_defaults
from qsf.cli.serve_options import Size
from qsf.errors import QsfArgumentError
from qsf.native import binding
from qsf.native.opening import budget_mb
from qsf.options import ModelOptions

# By command: the words behind it (M: a model, F: a folder, T: a text), and a part of the line.
WRONG: dict[str, list[tuple[str, str]]] = {
    "run": [
        ("", "MODEL"),
        ("M -p x --temperature -1", "--temperature: '-1' is not a number from 0 to 100"),
        ("M -p x --temperature nan", "'nan' is not a number"),
        ("M -p x --temperature hot", "--temperature"),
        ("M -p x --top-p 0", "--top-p: '0' is not a number above 0 and at most 1"),
        ("M -p x --top-k 1e3", "--top-k: '1e3' is not a whole number"),
        ("M -p x --min-p 1.5", "--min-p"),
        ("M -p x --repetition-penalty 0", "--repetition-penalty"),
        (f"M -p x --seed {2**64}", "--seed"),
        ("M -p x --draft F", "or a .qsf file (`qsf convert FOLDER"),
        ("M -p x --stop=", "--stop: the text is empty"),
        ("M -p x --threads 0", "--threads"),
        ("M -p x --threads 1000", "--threads: 1000 is too much: at most 256"),
        ("M -p x --ram-budget -5", "--ram-budget"),
        ("M -p x --ram-budget 200XB", "'200XB' is not a size: MB as a number (300), a size (300MB"),
        ("M -p x --ram-budget 101%", "--ram-budget: 101% is not from 1% to 100%"),
        ("M -p x --ram-budget 0.5MB", "--ram-budget: 0.5MB is less than 1 MB"),
        ("M -p x --ram-budget 99999999999", "--ram-budget: 99999999999 is too much"),
        ("M -p x --ram-budget Auto", "'Auto' is not a size"),
        (f"M -p x --max-tokens {'9' * 5000}", "--max-tokens"),
        ("M -p x --max-seq-len 99999999999", "--max-seq-len"),
        ("M -p x --quality -0.1", "--quality: '-0.1' is not a number from 0"),
        ("M -p x --quality nan", "--quality: 'nan' is not a number from 0 to 1"),
        ("M -p x --kv-type k4", "--kv-type: 'k4' is not a type of KV cache: f32"),
        ("M -p x --kv-rotation no", "--kv-rotation: invalid choice: 'no'"),
        ("M -p x --kv-policy h2o:64", "none, disk[:W], recompute[:P] or window:W[:P]"),
        ("M -p x --kv-policy window:4", "a window has at least 32"),
        ("M -p x --io fast", "--io: invalid choice: 'fast'"),
        ("M -p x --io-depth 33", "--io-depth: 33 is too much: at most 32"),
        ("M -p x --prompt-file y", "exclude each other"),
        ("M -p x --interactive", "--interactive"),
        ("M -p x --template-arg word", "--template-args: 'word' is not NAME=VALUE"),
        ("M -p x --template-arg {1", "'{1' is not a JSON object"),
        ("M -p x --template-arg messages=1", "is not NAME=VALUE"),
        ("M -p x --template-arg a=1 --raw", "leave --template-args out"),
        ("M -p x --parallel 2", "--parallel is for --prompts"),
        ("M -p x --answers a.jsonl", "--answers is for --prompts"),
        ("M -p x --prompts p.jsonl", "leave --prompt out"),
        ("M --prompts p.jsonl --parallel 0", "--parallel"),
        ("M --prompts p.jsonl --system x", "leave --system out"),
        ("M -p x --grammar b --regex a", "--grammar and --regex exclude each other"),
        ("M --interactive --regex a", "--regex is for --prompt and --prompts"),
        ("M --raw --system y", "--raw has no turns"),
        ("M --raw --history y", "--raw has no turns"),
        ("M --raw --interactive", "--raw has no turns"),
        ("M -p x --stream", "--stream is for --json"),
        ("M --json -i", "--interactive"),
        # habits and slips of the finger
        ("M -p x --temper 1", "there is no --temper: did you mean --temp"),
        ("M -p x --temprature 1", "there is no --temprature: did you mean --temperature?"),
        ("M -p x --max-token=4", "did you mean --max-tokens?"),
        ("M -p x --frob", "there is no --frob (see"),
        ("M -p x a second prompt", "Texts with spaces need quotes"),
        ("M -p x a --xyzzy", "there is no --xyzzy (see"),
        ("M -p x --num-ctx 9", "--max-seq-len is its name here"),
        ("M -ngl 99", "QSF computes on the processor"),
        ("M -sys x", "--system is its name here"),
    ],
    "serve": [
        ("", "MODEL is missing"),
        ("m.qsf --host 0.0.0.0", "lets other machines in"),
        ("m.qsf --parallel 0", "at least 1"),
        ("m.qsf --paralel 2", "did you mean --parallel?"),
        ("m.qsf --no-auth --api-key-file k", "exclude each other"),
        ("m.qsf --parallel 2 --kv-contexts 3", "--kv-contexts 3 is more than --parallel 2"),
        ("m.qsf --keep-alive soon", 'seconds, or a text such as "5m"'),
        ("m.qsf --kv-policy disk:64", "--kv-policy disk is for qsf run"),
    ],
    "eval": [
        ("M --text nowhere.txt --stride 8", "a stride of 8 is for protocol sliding only"),
        ("M --text T --protocol sliding --stride 600", "from 1 to the context's 512 tokens"),
        ("M --text T --protocol gptq", "no protocol 'gptq': windows, llama.cpp, sliding"),
        ("M --text T --protocol llama.cpp", "less than one window of 512"),
        ("M --text T --ctx 513", "--ctx 513 is longer than the model's context of 512"),
        ("M --text T --ctx 1", "--ctx"),
        ("M --text T --kv-type 5bit", "'5bit' is not a type"),
        ("M --text T --kv-type f16 --exact", "--kv-type f16 cannot be had with exact"),
        ("M --text T --max-tokens 1", "--max-tokens"),
        ("M --text T --ram-budget x", "'x' is not a size: MB as a number (300)"),
    ],
    "inspect": [
        ("", "MODEL is missing, as in: qsf inspect model.qsf"),
        ("--nonsense x", "No such option"),
        ("a b", "unexpected extra argument"),
    ],
    "convert": [
        ("", "MODEL"),
        ("F", "OUT"),
        ("F out.qsf --quant 4bit", "--quant"),
        ("F out.qsf --threads 0", "--threads"),
        ("F out.qsf --quant-type 5bit", "5bit is unknown; available: 2bit, 2bit-sym"),
        ("F out.qsf --embed-type mixed", "mixed is unknown; available: 2bit"),
        ("F out.qsf --calibration-tokens 900", "is only for --calibration"),
        ("F out.qsf --compress gzip", "gzip is unknown; available: none, lz4, lz4h"),
        ("F out.qsf --quant-type 4bit --target-size 3", "chooses the types"),
    ],
    "chta": [("", "there is no command 'chta': did you mean chat?")],
    "quantize": [("", "there is no command 'quantize', nor a model of that name here")],
}  # fmt: skip


@pytest.mark.parametrize("command", WRONG)
def test_wrong_options_are_one_line_and_code_2(
    qsf: Run, command: str, tiny_llama_8bit: Path, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "story.txt").write_text("Once upon a time there was a girl.", "utf-8")
    places = {"M": tiny_llama_8bit, "F": tiny_llama_dir, "T": "story.txt"}
    for line, said in WRONG[command]:
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
    for text, said in (
        ("temprature = 1", "there is no option temprature: did you mean temperature?"),
        ("temperature = 1000", "temperature: '1000' is not a number from 0 to 100"),
        ('ram-budget = "lots"', "ram-budget: 'lots' is not a size"),
        ("kv-rotation = [1]", "kv-rotation: [1] is not one of auto, on, off"),
        ("exact = 1", "exact: exact must be True or False, not 1"),
        ("threads = true", "threads: threads must be a whole number"),
        ("= 3", "Invalid"),
        ("x" * 70000, "more than 65536 bytes"),
    ):
        config.write_text(text, "utf-8")
        done = run("m.qsf", "-p", "x")
        check_refused(done, 2, said)
        assert str(config) in done.stderr
    config.unlink()
    os.mkfifo(config)  # without a writer: nobody waits
    check_refused(run("m.qsf", "-p", "x"), 1, "m.qsf")
