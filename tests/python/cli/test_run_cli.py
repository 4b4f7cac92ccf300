"""``qsf run`` as a user types it, and what it says of memory and time."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

import qsf
from make.calibrated_models import rewrite
from make.commands import COMMAND, PROMPT, Run, Start, check_refused
from make.golden import MODELS
from make.qsf_files import tiny_header, write_tiny
from make.tiny_checkpoints import make_llama
from qsf.cli import evaluate as eval_cli
from qsf.cli.run import report
from qsf.errors import MAX_LINE
from qsf.evaluate.evaluation import ShortenedLogits, cut_windows
from qsf.kv import KvPolicy
from qsf.native.binding import MemoryEvent, MemoryPlan, SessionStats, UnitTime, phase_names
from qsf.native.opening import does_not_fit
from qsf.session import Session
from qsf.shell.command import StoppedError
from qsf_converter import convert
from qsf_converter.text.tables import text_section

KNOWN = ", there was a little girl named Lily."

ENDLESS = ("-n", 100000, "--max-seq-len", 1 << 17, "--temperature", 1)

posix = pytest.mark.skipif(os.name != "posix", reason="signals, pipes, descriptors")


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that never ends: more text than fits into a pipe that nobody reads."""
    path = tmp_path_factory.mktemp("endless") / "endless.qsf"
    letters = {chr(ord("a") + i): i for i in range(20)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    header = tiny_header(max_tokens=1 << 17, bos_id=None, eos_id=None)
    tables, _ = text_section(backend.to_str().encode(), bos_id=None, add_bos=None)
    sections = {"TEXT": tables or b""}
    write_tiny(path, header=header, is_dull=True, sections=sections)
    return path


# ---- generating ----
def test_the_text_goes_to_stdout_and_the_statistics_to_stderr(
    run: Run, process: Run, tiny_llama_8bit: Path
) -> None:
    done = process(tiny_llama_8bit, "--prompt", PROMPT, "--temperature", 0, "--max-tokens", 20)
    assert done.returncode == 0
    assert done.stdout.startswith(KNOWN)
    assert done.stdout.endswith("\n")
    for said in ("prompt 5 tokens", "generated 20 tokens", "tok/s", "first token", "peak RSS"):
        assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    none, one = (run(tiny_llama_8bit, "-p", PROMPT, "-n", n).stderr for n in (0, 1))
    assert "generated 0 tokens | peak RSS" in none  # few tokens claim no speed
    assert "generated 1 token | first token" in one
    done = run(tiny_llama_8bit, "-p", PROMPT, "-n", 3, "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    done = run(tiny_llama_8bit, "-p", PROMPT, "-n", 3, "--verbose", "--seed", 42)
    for said in ("llama", "8bit", "kernels", "scalar", "i/o", "KV cache", "budget", "seed 42"):
        assert said in done.stderr


def test_options_reach_the_text(run: Run, tiny_llama_8bit: Path) -> None:
    texts = [run(tiny_llama_8bit, PROMPT, "--seed", seed, "-n", 30).stdout for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]
    stops = ("--temperature", 0, "--stop", "nobody", "--stop", " Lily")
    done = run(tiny_llama_8bit, "-p", PROMPT, *stops)
    assert done.stdout == ", there was a little girl named\n"
    for words in ((PROMPT, *stops), (*stops, PROMPT)):  # the prompt may follow the model
        assert run(tiny_llama_8bit, *words).stdout == done.stdout
    ours = ("--max-seq-len", 20, "--threads", 1, "--temperature", 0, "--repetition-penalty", 1.1)
    theirs = ("-c", 20, "-t", 1, "--temp", 0, "--repeat-penalty", 1.1)
    answers = [run(tiny_llama_8bit, "-p", PROMPT, *o, "-n", -1) for o in (ours, theirs)]
    assert answers[0].stdout == answers[1].stdout
    assert "the context of 20 tokens is full" in answers[1].stderr
    special = "<|begin_of_text|>" + PROMPT
    assert "prompt 5 tokens" in run(tiny_llama_8bit, "-p", special, "-n", 1).stderr
    assert "prompt 5 tokens" not in run(tiny_llama_8bit, special, "-n", 1, "--no-special").stderr


def test_the_prompt_may_come_from_stdin_or_a_file(
    qsf: Run, run: Run, tiny_llama_8bit: Path, tmp_path: Path
) -> None:
    options = ("--temperature", 0, "-n", 12)
    file = tmp_path / "prompt.txt"
    for words, stdin, data in (
        ((), PROMPT + "\n", b""),
        (("--prompt-file", "-"), PROMPT, b""),
        (("--prompt-file", file), "", f"{PROMPT}\n".encode()),
        (("-f", file), "", f"{PROMPT}\r\n".encode("utf-8-sig")),  # as Windows programs write it
        (("-f", file), "", f"{PROMPT}\r\n".encode("utf-16")),
    ):
        file.write_bytes(data)
        done = run(tiny_llama_8bit, *options, *words, stdin=stdin)
        assert done.stdout.startswith(KNOWN), done.stderr
    lines = tmp_path / "p.jsonl"
    for encoding in ("utf-8-sig", "utf-16", "utf-32"):
        lines.write_text('{"prompt": "hi"}\r\n"\U0001f600\u2028the"', encoding)
        done = run(tiny_llama_8bit, "--prompts", lines, "-n", 2)
        assert (done.returncode, done.stdout.count("\n")) == (0, 2), done.stdout
        assert not qsf("embed", tiny_llama_8bit, lines).returncode
    lines.write_bytes("hi".encode("utf-16") + b"x")
    assert "a line is not UTF-16" in run(tiny_llama_8bit, "--prompts", lines, "-n", 2).stderr


@posix
def test_a_prompt_that_is_not_utf8_is_refused(tiny_llama_8bit: Path, tmp_path: Path) -> None:
    command = [os.fsencode(part) for part in (*COMMAND, str(tiny_llama_8bit))]
    for words, stdin, said in (
        ([b"-p", b"caf\xe9"], b"", b"error: the prompt is not UTF-8\n"),
        ([], b"caf\xe9", b"error: standard input is not UTF-8: byte 0xe9 at position 3 of 4: "),
        ([b"-i"], b"caf\xe9\n", b"(the line is not UTF-8: left out)\n"),
    ):
        done = subprocess.run([*command, b"-n", b"2", *words], input=stdin, capture_output=True,
                              cwd=tmp_path, check=False)  # fmt: skip
        assert said in done.stderr
        assert (done.returncode, done.stdout) == (0 if words == [b"-i"] else 1, b"")


def test_prompts_that_are_too_long_or_absent_are_one_line(run: Run, tiny_llama_8bit: Path) -> None:
    for n, value in ((60, 319), (300, 304)):
        done = run(tiny_llama_8bit, "-p", "word " * n, "--max-seq-len", 32)
        assert done.returncode == 1
        assert f"--max-seq-len {value}" in done.stderr, done.stderr
    check_refused(run(tiny_llama_8bit, stdin="a red ball " * 100000), 1, "too long")
    check_refused(run(tiny_llama_8bit, stdin="a red ball " * 200), 1, "the context holds 512")
    long = run(tiny_llama_8bit, "--prompt-file", "/dev/zero")
    check_refused(long, 1, "the prompt is too long: more than 262144 bytes")
    check_refused(run(tiny_llama_8bit, stdin=""), 1, "the prompt is empty")
    check_refused(run(tiny_llama_8bit, "--prompt-file", "absent.txt"), 1, "absent.txt")


def test_a_terminal_that_lacks_characters_is_no_error(
    tiny_llama_8bit: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [*COMMAND, str(tiny_llama_8bit), "-p", "caf\u00e9 \U0001f600", "-n", "40", "--temp", "5"],
        capture_output=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_an_answer_ends_where_the_model_ends_it(run: Run, tiny_chat_8bit: Path) -> None:
    words = (tiny_chat_8bit, "Hi", "--temperature", 2, "--top-k", 0, "--top-p", 1, "--seed", 1)
    answer = json.loads(run(*words, "--json").stdout)
    assert answer["stop_reason"] in ("end", "context")
    assert answer["generated_tokens"] > 256
    raw = json.loads(run(*words, "--json", "--raw").stdout)
    assert (raw["stop_reason"], raw["generated_tokens"]) == ("length", 256)


# ---- the plan ----
def test_a_plan_says_what_would_fit_and_it_does(process: Run, tiny_llama_8bit: Path) -> None:
    done = process(tiny_llama_8bit, "--plan")
    assert (done.returncode, done.stderr) == (0, "")
    for said in ("weights, 8 of 8 units", "KV cache, 512 tokens", "total", "budget"):
        assert said in done.stdout
    done = process(tiny_llama_8bit, "--plan", "--ram-budget", 5)
    assert done.returncode == 1
    assert "total" in done.stdout
    assert "does not fit in 5.0 MB" in done.stderr
    enough = int(done.stderr.split("--ram-budget ")[1].split()[0])
    # One more for what differs from one process to the next.
    assert process(tiny_llama_8bit, "--plan", "--ram-budget", enough + 1).returncode == 0


# ---- files that are no models ----
def test_files_that_are_not_models_are_one_line(
    run: Run, tmp_path: Path, tiny_llama_8bit: Path
) -> None:
    def refused(path: Path, said: str) -> str:
        done = run(path, "--prompt-file", "absent.txt")  # the file is looked at first
        check_refused(done, 1, said)
        assert done.stderr.rstrip("\n").isprintable()
        return done.stderr

    refused(tmp_path / "absent.qsf", "absent.qsf")
    refused(tmp_path, "a folder without config.json")
    folder = tmp_path.joinpath(*["\x1b[31m" + "long" * 60] * 8)
    folder.mkdir(parents=True)
    assert len(refused(folder, "a folder without config.json")) < MAX_LINE + 100
    other = tmp_path / "other.qsf"
    data = tiny_llama_8bit.read_bytes()
    for wrong in (b"PK\x03\x04" * 100, b"", data[:3], data[:5000], data[:-1]):
        other.write_bytes(wrong)
        refused(other, "other.qsf")
    other.write_bytes(data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
    assert "copy it again, or convert the model again" in run(other, "-p", "x").stderr
    write_tiny(other)
    refused(other, "tokenizer")


# ---- help ----
def test_the_short_help_is_a_part_of_the_long_one(run: Run) -> None:
    short, long = run("--help").stdout, run("--help-all").stdout
    names = re.findall(r"^  (?:-\w(?: [A-Z]+)?, )?(--[a-z-]+)", short, re.MULTILINE)
    assert len(set(names) - {"--help", "--help-all"}) == 10
    for name in names:
        words = short[short.index(name) :].split()[:4]
        assert " ".join(words[-2:]) in " ".join(long.split())
    shown = run("--interactive", "--help").stdout
    assert shown.startswith("Usage: qsf chat ")
    assert "--session" in shown
    assert "--prompts" not in shown


def test_the_examples_of_the_help_work(qsf: Run, tiny_chat_8bit: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_chat_8bit, tmp_path / "model.qsf")
    (tmp_path / "asked.jsonl").write_text('"She"\n', "utf-8")
    lines = qsf("run", "--help-all").stdout.split("examples:")[1].split("MODEL is")[0].splitlines()
    examples = [shlex.split(line.split("|")[-1].split(">")[0]) for line in lines if line.strip()]
    assert len(examples) == 10
    for words in examples:
        assert words[0] == "qsf"
        assert words[1] in ("run", "chat")
        # This process is larger than theirs.
        larger = ["1000" if word == "100" else word for word in words[1:]]
        done = qsf(*larger, stdin=PROMPT)
        assert done.returncode == 0, (words, done.stderr)
        assert done.stdout


# ---- streams that are closed or full, signals: processes of their own ----
@posix
@pytest.mark.parametrize("redirection", ["<&-", ">&-", "2>&-"])
def test_closed_streams_are_no_traceback(
    redirection: str, tiny_llama_8bit: Path, tmp_path: Path
) -> None:
    script = f"{shlex.join([*COMMAND, str(tiny_llama_8bit), '-p', PROMPT, '-n2'])} {redirection}"
    done = subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(tiny_llama_8bit: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, str(tiny_llama_8bit), "-p", PROMPT, "-n", "2"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "qsf-run: error: output: No space left on device\n"


@pytest.fixture
def generating(endless: Path, start: Start) -> Callable[..., subprocess.Popen[bytes]]:
    """Start ``qsf run`` with a model that never ends; it has begun its text."""

    def call(*mode: str) -> subprocess.Popen[bytes]:
        process = start(endless, *mode, *ENDLESS)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"abc\n" if "-p" not in mode else b"")
        assert process.stdout.read(20)
        return process

    return call


Generating = Callable[..., "subprocess.Popen[bytes]"]


@posix
@pytest.mark.parametrize("mode", [["-p", "abc"], ["--interactive"]])
def test_terminating_ends_cleanly_with_143(generating: Generating, mode: list[str]) -> None:
    process = generating(*mode)
    process.send_signal(signal.SIGTERM)
    shown, said = process.communicate(timeout=60)
    assert process.returncode == 143, said
    assert shown.endswith(b"\n")
    assert b"Traceback" not in said


def test_a_signal_while_the_session_is_taken_is_no_error(
    run: Run, tiny_llama_8bit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(_session: Session, _run: object) -> None:
        raise StoppedError(signal.SIGTERM)

    monkeypatch.setattr(Session, "_hold", stopped)
    done = run(tiny_llama_8bit, "-p", "abc", "-n", 2)
    assert done.returncode == 143
    assert "error" not in done.stderr


@posix
@pytest.mark.parametrize("quiet", [(), ("-q",)])
def test_ctrl_c_ends_with_130_and_says_so(generating: Generating, quiet: tuple[str, ...]) -> None:
    process = generating("-p", "abc", *quiet)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    if quiet:
        assert said.strip() == b""
        return
    figures, last = said.decode().strip().splitlines()
    assert re.match(r"prompt \d+ tokens.* \| generated \d+ tokens?", figures)
    assert last == "qsf-run: interrupted"


@posix
def test_a_reader_that_leaves_is_no_error(generating: Generating) -> None:
    process = generating("-p", "abc")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert process.stderr.read() == b""


# ---- chat ----
def test_a_conversation_is_remembered_until_reset(
    run: Run, tiny_llama_8bit: Path, tiny_chat_8bit: Path
) -> None:
    greedy = ("--interactive", "--temperature", 0, "--verbose")
    lines = f"{PROMPT}\n\nAnd then\n/reset\n{PROMPT}\n/exit\nnot reached\n"
    done = run(tiny_llama_8bit, *greedy, "-n", 10, stdin=lines)
    assert done.returncode == 0
    answers = done.stdout.splitlines()
    assert answers[0] == answers[-1]
    assert answers[0].startswith(", there was a little girl")
    assert "has no chat template" in done.stderr
    assert "the conversation is forgotten" in done.stderr
    assert done.stderr.count("stopped by") == 3
    done = run(tiny_chat_8bit, "--interactive", "-n", 5, "--verbose", stdin="Hi\nYou\n")
    assert done.returncode == 0
    assert "no chat template" not in done.stderr
    assert "temperature 0.25" in done.stderr
    # A turn: <user>Hi and its end, then <assistant>; more than the two tokens of a plain one.
    first, second = (line for line in done.stderr.splitlines() if line.startswith("prompt "))
    assert int(first.split()[1]) > 5
    assert int(second.split()[1]) > 5


def test_a_conversation_goes_on_when_a_line_or_the_context_is_too_long(
    run: Run, tiny_llama_8bit: Path, tiny_chat_8bit: Path
) -> None:
    lines = f"{PROMPT}\n{PROMPT}\n/reset\n{PROMPT}\n"
    done = run(tiny_llama_8bit, "-i", "--max-seq-len", 12, "--temperature", 0, stdin=lines)
    assert done.returncode == 0
    assert "(cut: the context is full; the next message forgets the oldest turns)" in done.stderr
    assert "(the context was full: the oldest turn is forgotten" in done.stderr
    answers = done.stdout.splitlines()
    assert len(answers) == 3
    assert answers[0] == answers[1] == answers[2]
    lines = f"{'a' * 3_000_000}\n{'a red ball ' * 4000}\nHello\n"
    done = run(tiny_chat_8bit, "-i", "-n", 3, "--seed", 1, "--max-seq-len", 128, stdin=lines)
    assert done.returncode == 0
    assert "(more than 65536 bytes are too many for the context: left out)" in done.stderr
    assert "(the text is too long: it has about" in done.stderr
    assert done.stdout.strip()


@posix
def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(generating: Generating) -> None:
    process = generating("--interactive")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(b"/reset\n/exit\n", timeout=60)
    assert process.returncode == 0, said
    assert b"(stopped)" in said
    assert b"(the conversation is forgotten)" in said
    assert b"Traceback" not in said


# ---- answers, chats and measurements that outgrow their memory ----
GREEDY = ("--temperature", 0)


def test_an_answer_goes_on_behind_the_context(run: Run, tiny_llama_8bit: Path) -> None:
    asked = ("-p", PROMPT, "--raw", *GREEDY, "-n", 200, "--max-seq-len", 64, "--json")
    done = run(tiny_llama_8bit, *asked[:-1])
    assert "--kv-policy goes on" in done.stderr
    done = run(tiny_llama_8bit, *asked[:-1], "--kv-policy", "recompute:8")
    assert "its middle forgotten" in done.stderr
    assert "is full;" not in done.stderr
    done = run(tiny_llama_8bit, "-p", PROMPT, "--kv-policy", "window:500")
    check_refused(done, 1, "the context has only 512")
    cut = json.loads(run(tiny_llama_8bit, *asked).stdout)
    assert cut["stop_reason"] == "context"
    for policy in ("recompute:8", "window:32:8"):
        done = json.loads(run(tiny_llama_8bit, *asked, "--kv-policy", policy).stdout)
        assert done["generated_tokens"] > cut["generated_tokens"]
        assert len(done["ids"]) >= done["generated_tokens"] - 1
        if policy.startswith("recompute"):
            assert done["text"].startswith(cut["text"])


def test_chats_forget_and_say_so(run: Run, tiny_llama_8bit: Path, tiny_chat_8bit: Path) -> None:
    lines = "".join(f"Tom saw ball {i}.\n" for i in range(9))
    asked = ("--interactive", "--max-seq-len", 96, *GREEDY, "-n", 8)
    done = run(tiny_llama_8bit, *asked, "--kv-policy", "recompute:4", stdin=lines)
    assert done.returncode == 0, done.stderr
    assert "turns are forgotten" in done.stderr
    assert "turn is forgotten" in run(tiny_llama_8bit, *asked, stdin=lines).stderr
    told = ("-p", "Hi", "-n", 1, "--kv-policy", "window:64:40", "--system")
    long = "Be kind and brief. " * 12
    assert "keeps only the first 40" in run(tiny_chat_8bit, *told, long).stderr
    assert "keeps only" not in run(tiny_chat_8bit, *told, "Be kind.").stderr


# ---- measuring ----
def test_eval_compares_with_the_same_file(tiny_llama_8bit: Path, tmp_path: Path) -> None:
    text, figures = tmp_path / "text.txt", tmp_path / "figures.json"
    text.write_text("Tom saw a red ball. Lily had a little dog and a big hat. " * 20, "utf-8")
    for policy, first_worse in (("window:32:4", 36), ("recompute:4", 64)):
        asked = [tiny_llama_8bit, "--text", text, "--ctx", 128, "--kv-policy", policy]
        asked += ["--ram-budget", 0, "--threads", 1, "--quiet", "--json", figures]
        assert eval_cli.run([*map(str, asked)]) == 0
        found: dict[str, Any] = json.loads(figures.read_text("utf-8"))
        assert found["kv_policy"] == policy
        assert found["against"] == str(tiny_llama_8bit)
        for place in found["places"]:
            is_whole = place["position"] + 8 <= first_worse
            assert (place["kl_mean"] == 0) == is_whole, place


def test_shortened_logits_are_those_of_what_is_left(tiny_llama_8bit: Path) -> None:
    policy, tokens = KvPolicy("recompute:4", 0, 4), np.arange(100, 180)
    with qsf.Model(tiny_llama_8bit, ram_budget=None, max_seq_len=32) as model:
        source = ShortenedLogits(model, policy, 80)
        blocks = source.logits(cut_windows(tokens, "windows", 80), 30, lambda _: None)
        have = np.concatenate([block.copy() for block in blocks])
        held: list[int] = []
        for i, token in enumerate(tokens[:-1].tolist()):
            held.append(token)
            if len(held) > 32:
                held = held[:4] + held[-14:]
            assert np.array_equal(have[i], model.logits(held, first_row=len(held) - 1)[0])


# ---- keys and values in a file ----
def test_the_plan_and_the_end_say_what_a_file_costs(
    run: Run, tiny_llama_8bit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    asked = ("--ram-budget", 0, "--max-seq-len", 512, "--kv-policy", "disk:32")
    plan = run(tiny_llama_8bit, "--plan", *asked)
    assert "KV cache, 32 of 512 tokens, 8bit, disk:32" in plan.stdout
    assert "and keys and values, at most" in plan.stdout
    prompt = ("-p", "Tom saw a red ball. " * 55, "--raw", *GREEDY, "-n", 40, "--verbose")
    done = run(tiny_llama_8bit, *asked, *prompt)
    if "lies in memory" in done.stderr:
        pytest.skip(done.stderr)
    whole = run(tiny_llama_8bit, *asked[:4], *prompt)
    assert done.stdout == whole.stdout
    assert "MB written to a file and" in done.stderr
    assert "written to a file" not in whole.stderr


# ---- layers skipped by importance; which, and what is refused: api/test_skip.py ----


# Of ten layers; the ends matter least, so that only the rule keeps them. Then 6, 3, 7, 2, 5, 4.
IMPORTANCES = (0.0, 0.01, 0.5, 0.2, 0.9, 0.8, 0.1, 0.4, 0.0, 0.0)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaMA with a tokenizer, ten layers of 0.6 MB and importances; ``plain`` is beside."""
    folder = tmp_path_factory.mktemp("skip")
    make_llama(
        folder / "llama", seed=7, tokenizer_from=MODELS["tiny-llama"], n_layers=10, dim=192,
        n_heads=3, n_kv_heads=3, head_dim=64, ffn_dim=832, n_vocab=2048, max_tokens=256,
    )  # fmt: skip
    convert(folder / "llama", folder / "plain.qsf", quant_type="8bit")
    return rewrite(folder / "plain.qsf", folder / "m.qsf", importances=IMPORTANCES)


def test_less_quality_than_can_be_had(run: Run, measured: Path) -> None:
    """Said unasked, but not to whom wants to hear nothing."""
    said = "layers skipped: 6 of 10, 2-7 (8 were asked for, but the first two and the last two"
    for options in ((), ("--verbose",)):
        done = run(measured, "-p", PROMPT, "-n", 2, "--quality", 0.2, *options)
        assert (done.returncode, done.stderr.count(said)) == (0, 1)
    done = run(measured, "-p", PROMPT, "-n", 2, "--quality", 0.2, "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    plan = run(measured, "--plan", "--quality", 0.2)
    assert (plan.returncode, plan.stdout.count(said)) == (0, 1)
    said = "(all are 1); qsf convert --calibration makes a file that has them"
    check_refused(run(measured.with_name("plain.qsf"), "-p", "x", "--quality", "0.5"), 1, said)


# ---- the lines that ``qsf-run`` prints about memory and time ----
MB = 2**20
MS = 1_000_000


def unit(
    name: str,
    *,
    read_mb: int = 0,
    wait_ms: float = 0,
    compute_ms: float = 1,
    is_skipped: bool = False,
) -> UnitTime:
    """Return what ten passes took, given what one takes."""
    return UnitTime(
        name=name,
        is_resident=read_mb == 0 and not is_skipped,
        is_skipped=is_skipped,
        n_passes=0 if is_skipped else 10,
        read_bytes=10 * read_mb * MB,
        read_ns=10 * 2 * MS if read_mb else 0,
        wait_ns=int(10 * wait_ms * MS),
        compute_ns=int(10 * compute_ms * MS),
    )


def stats(phase_ns: tuple[int, ...] = (), **changes: Any) -> SessionStats:
    values: dict[str, Any] = {field.name: 0 for field in fields(SessionStats)}
    values |= {"n_drafted": (0,) * 4, "n_accepted": (0,) * 4}
    return SessionStats(**{**values, **changes, "phase_ns": phase_ns})


def plan(**changes: Any) -> MemoryPlan:
    values: dict[str, Any] = {field.name: 0 for field in fields(MemoryPlan)}
    values |= {"kv_k_bits": 4, "kv_v_bits": 4, "is_enough": False, "kv_is_rotated": False}
    values |= {"skipped_layers": (), "kv_policy": "none"}
    return MemoryPlan(**{**values, **changes})


def test_experts_are_in_the_memory_map() -> None:
    some = plan(n_experts=64, expert_slots=10, expert_transit_slots=4, experts_a_token=16,
                experts_bytes=14 * MB, expert_token_bytes=16 * MB, expert_slot_bytes=MB,
                engine_bytes=20 * MB, budget_bytes=22 * MB)  # fmt: skip
    lines = report.plan_lines(some)
    assert any("10 of 64 experts, 4 in transit" in line and "14.0" in line for line in lines)
    assert any("at most 16 experts that are not in memory" in line for line in lines)
    assert any("in memory: 16 to 68 %, with twice the memory 50 to 93 %" in x for x in lines)
    streamed = replace(some, streamed_bytes=16 * MB, budget_bytes=0)
    assert any("with twice the memory 22 to 79 %" in x for x in report.plan_lines(streamed))
    every = report.plan_lines(replace(some, expert_slots=64))
    assert not any("not in memory" in line for line in every)
    assert not any("expert" in line for line in report.plan_lines(plan()))


def test_alike_neighbours_are_one_line_and_skipped_layers_have_their_own() -> None:
    units = [unit("embedding"), *(unit(f"layer {i}") for i in range(3))]
    units += [unit(f"layer {i}", is_skipped=True, compute_ms=0) for i in range(3, 6)]
    units += [unit(f"layer {i}", read_mb=7, wait_ms=3) for i in range(6, 8)]
    units += [unit("layer 8", is_skipped=True, compute_ms=0)]
    # Streamed, and not used yet.
    units += [replace(unit("layer 9", compute_ms=0), is_resident=False, n_passes=0)]
    units += [unit("layer 10", read_mb=7, wait_ms=30), unit("layer 11", read_mb=9, wait_ms=30)]
    units += [unit("final", read_mb=9, wait_ms=30)]
    lines = [" ".join(line.split()) for line in report.table_lines(units)[1:]]
    assert lines == [
        "embedding memory - - - 1.00",
        "layers 0-2 memory - - - 1.00",
        "layers 3-5 skipped - - - -",
        "layers 6-7 streamed 7.0 2.00 3.00 1.00",
        "layer 8 skipped - - - -",
        "layer 9 streamed - - - -",
        "layer 10 streamed 7.0 2.00 30.00 1.00",
        "layer 11 streamed 9.0 2.00 30.00 1.00",
        "final streamed 9.0 2.00 30.00 1.00",
    ]


def test_the_plan_says_which_layers_are_skipped() -> None:
    def said(**changes: Any) -> str:
        return report.plan_lines(plan(n_layers=22, **changes))[-1]

    some = {"n_layers_skipped": 6, "skipped_layers": (3, 5, 6, 7, 8, 11)}
    assert said(n_skips_asked=6, **some) == "layers skipped: 6 of 22, 3, 5-8, 11"
    assert said(n_skips_asked=9, **some).endswith(
        "11 (9 were asked for, but the first two and the last two always run)"
    )
    assert "skipped" not in said()


def test_the_total_says_what_was_hidden_behind_what() -> None:
    units = [unit("layer 0", read_mb=100, compute_ms=40)]  # 0.4 s of computing, 1.05 GB
    slow_disk = stats(read_ns=2000 * MS, wait_ns=1700 * MS, checksum_ns=250 * MS, step_tokens=9)
    line = report.total_line(slow_disk, units)
    assert "reading 2.00 s (1.05 GB, 0.52 GB/s)" in line
    assert "waiting for it 1.70 s, computing 0.40 s, checksums 0.25 s of the readers" in line
    assert line.endswith("9 tokens; 75 % of computing was hidden behind reading")
    slow_cpu = stats(read_ns=200 * MS, wait_ns=50 * MS, step_tokens=1)
    line = report.total_line(slow_cpu, units)
    assert line.endswith("1 token; 75 % of reading was hidden behind computing")
    line = report.total_line(stats(read_ns=MS, wait_ns=2 * MS), units)
    assert line.endswith("; 0 % of reading was hidden behind computing")
    idle = report.total_line(stats(), [unit("layer 0")])
    assert "nothing to read" in idle


def test_the_phases_of_a_token_are_one_line() -> None:
    phases = dict.fromkeys(phase_names(), 0)
    phases |= {"qkv": 120 * MS, "wait": 790 * MS, "down": 86 * MS, "other": 4 * MS}
    spent = tuple(phases.values())
    lines = report.phase_lines(stats(spent, prompt_tokens=2, step_tokens=3))
    assert lines == ["time per token: 200 ms: wait 79 %, qkv 12 %, down 9 %"]
    (line,) = report.phase_lines(stats(spent, step_tokens=4, sample_ns=MS, n_samples=4))
    assert line == "time per token: 250 ms: wait 79 %, qkv 12 %, down 9 %; choosing 0.250 ms"
    assert report.phase_lines(stats((0,) * len(phases))) == []


def test_drafts_are_one_line_where_there_were_any() -> None:
    assert report.draft_lines(stats(step_tokens=4, n_step_passes=4, n_step_rows=4)) == []
    done = stats(
        step_tokens=30,
        n_step_passes=20,
        n_step_rows=50,
        n_drafted=(20, 10, 0, 0),
        n_accepted=(9, 1, 0, 0),
    )
    assert report.draft_lines(done) == [
        "drafts: 1.50 tokens and 2.50 rows a pass; right were 9 of 20 from the text, 1 of 10 from "
        "what followed before"
    ]


def test_the_map_says_what_limits_it() -> None:
    def values(**changes: Any) -> dict[str, str]:
        facts = {"process_bytes": MB, "engine_bytes": 5 * MB, **changes}
        lines = report.plan_lines(plan(**facts))
        return {line[2:42].strip(): line[42:].strip() for line in lines[1:]}

    roomy = values(budget_bytes=200 * MB, ceiling_bytes=200 * MB)
    assert roomy["budget"] == "200.0"
    assert roomy["total"] == "6.0"
    assert not any(name.startswith("ceiling") for name in roomy)
    short = values(budget_bytes=200 * MB, ceiling_bytes=90 * MB)
    assert short["ceiling: what the machine gives"] == "90.0"
    unlimited = values(ceiling_bytes=90 * MB)
    assert unlimited["budget"] == "none"
    assert unlimited["ceiling: what the machine gives"] == "90.0"
    with_text = values(process_bytes=30 * MB, text_bytes=6 * MB)
    assert with_text["process before opening"] == "24.0"
    assert with_text["text: the tokenizer"] == "6.0"
    fetched = values(embedding_bytes=3 * MB, embedding_rows=64)
    assert fetched["embedding, a band and 64 rows"] == "3.0"
    streaming = values(stream_bytes=8 * MB, ring_bytes=6 * MB, io_depth=4, streamed_bytes=70 * MB)
    assert streaming["ring for the others, filled by 4 reads"] == "6.0"
    assert streaming["decode buffer"] == "2.0"
    assert streaming["read from the file per token"] == "70.0"


def test_a_refusal_says_what_is_short_and_what_would_help() -> None:
    small = plan(budget_bytes=50 * MB, min_budget_bytes=60 * MB + 1, process_bytes=30 * MB)
    text = does_not_fit(small)
    assert "does not fit in 50.0 MB, of which Python and the tokenizer take 30.0" in text
    assert text.endswith(": set ram_budget=61")
    assert does_not_fit(small, is_command=True).endswith(": set --ram-budget 61")

    both = plan(budget_bytes=50 * MB, min_budget_bytes=60 * MB, ceiling_bytes=40 * MB)
    assert "60, if the machine or its control group had them" in does_not_fit(both)
    assert "40.0 MB" in does_not_fit(both)

    for budget_bytes in (0, 70 * MB):
        text = does_not_fit(
            plan(budget_bytes=budget_bytes, min_budget_bytes=60 * MB, ceiling_bytes=40 * MB)
        )
        assert "needs 60 MB" in text
        assert "control group leaves this process 40.0" in text
        assert "set " not in text

    asked = plan(budget_bytes=50 * MB, min_budget_bytes=60 * MB, kv_bytes=9 * MB, io_depth=8,
                 stream_bytes=16 * MB, ring_bytes=16 * MB)  # fmt: skip
    text = does_not_fit(asked, is_command=True)
    assert "--max-seq-len with a shorter context (it takes 9.0)" in text
    assert "--kv-type with fewer bits" in text
    assert "--io-depth with fewer reads (they take 16.0)" in text
    assert "max_seq_len with" in does_not_fit(asked)


def test_memory_events_are_said() -> None:
    class Model:
        session_stats = stats(n_embedding_rows=8, n_embedding_hits=6)
        timeline = (unit("layer 0"),)
        memory_events = (
            MemoryEvent(12, 224 * MB, 5 * MB, is_given_back=True, n_units_resident=3),
            MemoryEvent(99, 100 * MB, 700 * MB, is_given_back=False, n_units_resident=1),
        )

    lines = report.timeline_lines(Model())  # type: ignore[arg-type]
    assert lines[-1] == (
        "memory: at 12 s: gave back 224.0 MB, 5.0 MB were available, 3 units in memory since; "
        "at 99 s: took again 100.0 MB, 700.0 MB were available, 1 unit in memory since"
    )
    assert lines[-2] == "embedding rows: 8 asked for, 6 found in the cache (75 %)"
