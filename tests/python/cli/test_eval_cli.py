"""``qsf-eval`` as a user types it."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from make.qsf_files import write_tiny
from qsf.cli import evaluate as cli

TEXT = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside. One day, "
    "she saw a big red ball. The ball belonged to a boy called Tom, who was very sad that day. "
)
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Call:
    """Run the command in this process: exit code, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.run([*map(str, arguments), "--ram-budget", "0", "--threads", "1"])
        return (code, *capfd.readouterr())

    return run


@pytest.fixture
def story(tmp_path: Path) -> Path:
    path = tmp_path / "story.txt"
    path.write_text(TEXT, "utf-8")
    return path


def numbers(line: str) -> list[float]:
    return [float(word) for word in re.findall(r"[-+]?\d+\.\d+", line)]


# ---- figures ----
def test_the_table_says_what_was_measured(call: Call, tiny_llama_4bit: Path, story: Path) -> None:
    code, out, err = call(tiny_llama_4bit, "--text", story, "--ctx", 32)
    assert code == 0, err
    lines = {line[:18].strip(): line[18:].strip() for line in out.splitlines()}
    assert list(lines) == [
        *("model", "text", "protocol", "tokens scored", "perplexity", "bits per byte"),
        *("as qsf run does it", "difference", "time"),
    ]
    assert lines["model"].endswith("KV cache f16, integer activations")
    assert f"{len(TEXT)} bytes" in lines["text"]
    assert lines["protocol"] == "windows: windows of 32 tokens, all but the first of each"
    left = int(lines["text"].split(", ")[-1].split()[0]) - 32
    assert left > 0
    assert lines["tokens scored"].startswith(f"31 in 1 window; the last {left} fill no window")
    assert 1 < numbers(lines["perplexity"])[0] < 100
    assert "100%" in err


def test_the_cache_of_qsf_run_is_judged_too(
    call: Call, tiny_llama_4bit: Path, story: Path, tmp_path: Path
) -> None:
    def figures(*options: object) -> dict[str, Any]:
        path = tmp_path / f"{len(options)}.json"
        assert call(tiny_llama_4bit, "--text", story, *options, "--json", path)[0] == 0
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return found

    both, run_alone = figures(), figures("--kv-type", "8bit")
    assert (both["kv_type"], run_alone["kv_type"], both["arithmetic"]) == ("f16", "8bit", "integer")
    assert both["run_cache"]["kv_type"] == "8bit"
    assert both["run_cache"]["perplexity"] == run_alone["perplexity"]
    change = 100 * (run_alone["perplexity"] / both["perplexity"] - 1)
    assert change != 0
    assert both["run_cache"]["change_percent"] == pytest.approx(change, rel=1e-6)
    assert both["run_cache"]["change_error"] > 0
    assert run_alone["run_cache"] is None
    assert figures("--exact", "--ctx", 32)["run_cache"] is None


def test_against_the_original_and_against_a_file(
    call: Call,
    tmp_path: Path,
    tiny_llama_4bit: Path,
    tiny_llama_f16: Path,
    tiny_llama_dir: Path,
    story: Path,
) -> None:
    options = ("--text", story, "--exact", "--quiet", "--json")
    found = []
    for against in (tiny_llama_dir, tiny_llama_f16):
        path = tmp_path / "figures.json"
        code, out, err = call(tiny_llama_4bit, *options, path, "--against", against)
        assert (code, err) == (0, "")
        found.append(json.loads(path.read_text("utf-8")))
        lines = {line[:18].strip(): line[18:] for line in out.splitlines()}
        assert ("full precision" in lines["against"]) == (against == tiny_llama_dir)
        assert numbers(lines["KL mean"])[0] == pytest.approx(found[-1]["kl_mean"], rel=1e-3)
        top = found[-1]["top1_agreement"]
        assert numbers(lines["same top token"])[0] == pytest.approx(100 * top, abs=0.01)
        change = found[-1]["perplexity"] / found[-1]["against_perplexity"] - 1
        assert numbers(lines["difference"])[0] == pytest.approx(100 * change, abs=1e-3)
        assert found[-1]["against"] == str(against)
    assert found[0]["kl_mean"] > 1e-4
    assert found[0]["kl_mean"] == pytest.approx(found[1]["kl_mean"], rel=1e-3)
    assert (found[0]["kv_type"], found[0]["arithmetic"]) == ("f32", "f32")


# ---- errors ----
def test_files_that_are_none(
    call: Call, tmp_path: Path, tiny_llama_4bit: Path, tiny_llama_dir: Path, story: Path
) -> None:
    mute, empty, wrong = (tmp_path / name for name in ("mute.qsf", "empty.txt", "wrong.txt"))
    write_tiny(mute, 1)
    empty.write_bytes(b"")
    wrong.write_bytes(b"Once \xff upon")
    os.mkfifo(tmp_path / "pipe")  # nobody waits for a writer
    good = tiny_llama_4bit
    for model, text, options, said in (
        (tiny_llama_dir, story, (), "is a HuggingFace model: convert it: "),
        (mute, story, (), "mute.qsf has no tokenizer"),
        (story, story, (), "story.txt"),
        (tmp_path / "none.qsf", story, (), "none.qsf"),
        (good, empty, (), "is empty: there is no text"),
        (good, wrong, (), "not UTF-8: byte 0xff at position 5 of 11"),
        (good, tmp_path / "none.txt", (), "No such file"),
        (good, story, ("--against", mute), "the vocabularies differ: 2048 tokens here, 20"),
        (good, story, ("--against", story), "story.txt"),
        (good, story, ("--against", "nowhere"), "nowhere: no such file"),
        (good, story, ("--against", tmp_path / "pipe"), "pipe: not a regular file"),
        (good, story, ("--json", "no/such/folder.json"), "no file can be written there"),
    ):
        code, out, err = call(model, "--text", text, "--ctx", 16, *options)
        assert (out, err.count("\n")) == ("", 1), err
        assert code in (1, 2)
        assert said in err


def test_a_budget_that_is_too_small_says_what_would_do(
    capfd: pytest.CaptureFixture[str], tiny_llama_4bit: Path, story: Path
) -> None:
    code = cli.run([str(tiny_llama_4bit), "--text", str(story), "--ram-budget", "10"])
    _, err = capfd.readouterr()
    assert code == 1
    said = r"of --ram-budget 10, .* take \d+ MB .*, which leaves 1, and \d+ are needed"
    assert re.search(said, err), err


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc: peak unknown")
def test_the_whole_process_stays_in_its_budget(tiny_llama_f16: Path, tmp_path: Path) -> None:
    """With a text whose encoding takes what the models leave."""
    (tmp_path / "text.txt").write_text(TEXT * 500, "utf-8")  # 91 KB
    code = (
        "import sys; from pathlib import Path; from qsf.cli import evaluate as cli\n"
        "code = cli.run(sys.argv[1:])\n"
        "status = Path('/proc/self/status').read_text()\n"
        "print(code, int(status.split('VmHWM:')[1].split()[0]) // 1024, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, tiny_llama_f16, "--text", tmp_path / "text.txt", "-q"]
    command += ["--against", tiny_llama_f16, "--ram-budget", "160", "--max-tokens", "3000"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    code_text, peak_mb = done.stderr.split()[-2:]
    assert code_text == "0", done.stderr
    assert int(peak_mb) <= 160
