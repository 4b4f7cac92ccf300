"""``qsf-run`` as a user types it."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import tokenizers

from make.commands import COMMAND, PROMPT, Here, Run, Start, check_refused
from make.qsf_files import tiny_header, write_tiny
from qsf.cli.run import main as cli
from qsf.cli.run import options as run_options
from qsf.errors import MAX_LINE
from qsf.session import Session
from qsf.shell.arguments import UsageError
from qsf.shell.command import StoppedError
from qsf_converter.text.tables import text_section

KNOWN = ", there was a little girl named Lily."

ENDLESS = ("-n", 100000, "--max-seq-len", 1 << 17, "--temperature", 1)


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
    run: Run, tiny_llama_8bit: Path
) -> None:
    done = run(tiny_llama_8bit, "--prompt", PROMPT, "--temperature", 0, "--max-tokens", 20)
    assert done.returncode == 0
    assert done.stdout.startswith(KNOWN)
    assert done.stdout.endswith("\n")
    for said in ("prompt 5 tokens", "generated 20 tokens", "tok/s", "first token", "peak RSS"):
        assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_quiet_says_nothing(run: Run, tiny_llama_8bit: Path) -> None:
    done = run(tiny_llama_8bit, "-p", PROMPT, "-n", 3, "--quiet")
    assert (done.returncode, done.stderr) == (0, "")


def test_verbose_shows_the_memory_map_and_the_kernels(run: Run, tiny_llama_8bit: Path) -> None:
    done = run(tiny_llama_8bit, "-p", PROMPT, "-n", 3, "--verbose", "--seed", 42)
    for said in ("llama", "8bit", "kernels", "scalar", "i/o", "KV cache", "budget", "seed 42"):
        assert said in done.stderr


def test_the_same_seed_gives_the_same_text(run: Run, tiny_llama_8bit: Path) -> None:
    texts = [run(tiny_llama_8bit, "-p", PROMPT, "--seed", 3, "-n", 30).stdout for _ in range(2)]
    assert texts[0] == texts[1]
    assert run(tiny_llama_8bit, "-p", PROMPT, "--seed", 4, "-n", 30).stdout != texts[0]


def test_every_stop_string_stops(run: Run, tiny_llama_8bit: Path) -> None:
    done = run(
        tiny_llama_8bit, "-p", PROMPT, "--temperature", 0, "--stop", "nobody", "--stop", " Lily"
    )
    assert done.stdout == ", there was a little girl named\n"


def test_the_prompt_may_come_from_stdin_or_a_file(
    run: Run, tiny_llama_8bit: Path, tmp_path: Path
) -> None:
    options = ("--temperature", 0, "-n", 12)
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n", "utf-8")
    for done in (
        run(tiny_llama_8bit, *options, stdin=PROMPT + "\n"),
        run(tiny_llama_8bit, *options, "--prompt-file", "-", stdin=PROMPT),
        run(tiny_llama_8bit, *options, "--prompt-file", file),
    ):
        assert done.stdout.startswith(KNOWN), done.stderr


def test_special_tokens_can_be_kept_ordinary(run: Run, tiny_llama_8bit: Path) -> None:
    prompt = "<|begin_of_text|>" + PROMPT
    read = run(tiny_llama_8bit, "-p", prompt, "-n", 1)
    kept = run(tiny_llama_8bit, "-p", prompt, "-n", 1, "--no-special")
    assert "prompt 5 tokens" in read.stderr
    assert "prompt 5 tokens" not in kept.stderr


@pytest.mark.skipif(os.name != "posix", reason="arguments are bytes")
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


def test_files_of_windows_programs_are_read_as_meant(
    run: Run, tiny_llama_8bit: Path, tmp_path: Path
) -> None:
    pytest.importorskip("llguidance")
    for encoding in ("utf-8-sig", "utf-16"):
        (tmp_path / "p.txt").write_bytes(f"{PROMPT}\r\n".encode(encoding))
        done = run(tiny_llama_8bit, "-f", tmp_path / "p.txt", "-n", 9, "--temp", 0)
        assert done.stdout.startswith(KNOWN), done.stderr
    (tmp_path / "s.json").write_text('{"enum": ["x"]}', "utf-8-sig")
    done = run(tiny_llama_8bit, "-p", PROMPT, "--json-schema", tmp_path / "s.json", "-n", 8)
    assert done.stdout == '"x"\n'
    (tmp_path / "p.jsonl").write_text('{"prompt": "hi"}\r\n"the"\r\n', "utf-8-sig")
    done = run(tiny_llama_8bit, "--prompts", tmp_path / "p.jsonl", "-n", 2)
    assert done.returncode == 0, done.stdout


def test_a_prompt_that_is_too_long_names_the_option_and_a_value(
    run: Run, tiny_llama_8bit: Path
) -> None:
    for n, value in ((60, 319), (300, 304)):
        done = run(tiny_llama_8bit, "-p", "word " * n, "--max-seq-len", 32)
        assert done.returncode == 1
        assert f"--max-seq-len {value}" in done.stderr, done.stderr


def test_a_full_context_is_said(run: Run, tiny_llama_8bit: Path) -> None:
    done = run(tiny_llama_8bit, "-p", PROMPT, "--max-seq-len", 16)
    assert done.returncode == 0
    assert "the context of 16 tokens is full" in done.stderr


def test_a_terminal_that_lacks_characters_is_no_error(
    tiny_llama_8bit: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [
            *COMMAND,
            str(tiny_llama_8bit),
            "-p",
            "caf\u00e9 \U0001f600",
            "-n",
            "40",
            "--temperature",
            "5",
        ],
        capture_output=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr


# ---- the plan ----


def test_the_plan_is_printed_without_running(run: Run, tiny_llama_8bit: Path) -> None:
    done = run(tiny_llama_8bit, "--plan")
    assert (done.returncode, done.stderr) == (0, "")
    for said in ("weights, 8 of 8 units", "KV cache, 512 tokens", "total", "budget"):
        assert said in done.stdout


def test_a_plan_that_does_not_fit_says_what_would_and_it_does(
    run: Run, tiny_llama_8bit: Path
) -> None:
    done = run(tiny_llama_8bit, "--plan", "--ram-budget", 5)
    assert done.returncode == 1
    assert "total" in done.stdout
    assert "does not fit in 5.0 MB" in done.stderr
    enough = int(done.stderr.split("--ram-budget ")[1].split()[0])
    # One more for what differs from one process to the next.
    assert run(tiny_llama_8bit, "--plan", "--ram-budget", enough + 1).returncode == 0
    check_refused(run(tiny_llama_8bit, "-p", PROMPT, "--ram-budget", 5), 1, "--ram-budget")


# ---- what a user gets wrong ----


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "MODEL"),
        (["m.qsf", "--promt", "x"], "--promt"),
        (["m.qsf", "--pro", "x"], "--pro"),
        (["m.qsf", "more", "-p", "x"], "more"),
        (["m.qsf", "-p", "x", "--ram-budget", "-5"], "--ram-budget"),
        (["m.qsf", "-p", "x", "--ram-budget", "lots"], "'lots' is not a size"),
        (["m.qsf", "-p", "x", "--threads", "0"], "--threads"),
        (["m.qsf", "-p", "x", "--temperature", "hot"], "--temperature"),
        (["m.qsf", "-p", "x", "--prompt-file", "y"], "exclude each other"),
        (["m.qsf", "-p", "x", "--interactive"], "--interactive"),
        (["m.qsf", "-p", "x", "--quality", "-0.1"], "--quality: '-0.1' is not a number from 0"),
        (["m.qsf", "-p", "x", "--quality", "1.5"], "--quality: '1.5' is not a number from 0 to 1"),
        (["m.qsf", "-p", "x", "--quality", "nan"], "--quality: 'nan' is not a number from 0 to 1"),
        (["m.qsf", "-p", "x", "--quality", "abc"], "--quality: 'abc' is not a number from 0 to 1"),
        (["m.qsf", "-p", "x", "--kv-type", "k4"], "--kv-type: 'k4' is not a type of KV cache: f32"),
        (["m.qsf", "-p", "x", "--kv-rotation", "no"], "--kv-rotation: invalid choice: 'no'"),
        (["m.qsf", "-p", "x", "--io", "fast"], "--io: invalid choice: 'fast'"),
        (["m.qsf", "-p", "x", "--io-depth", "0"], "--io-depth: '0' is not a whole number"),
        (["m.qsf", "-p", "x", "--io-depth", "33"], "--io-depth: 33 is too much: at most 32"),
        (["m.qsf", "-p", "x", "--ram-budget", "Auto"], "'Auto' is not a size"),
    ],
)
def test_wrong_options_are_one_line_and_code_2(here: Here, arguments: list[str], said: str) -> None:
    check_refused(here(*arguments, command=cli.main), 2, said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--temperature", "-1"], "--temperature: '-1' is not a number from 0 to 100"),
        (["--temperature", "nan"], "'nan' is not a number"),
        (["--top-p", "0"], "--top-p: '0' is not a number above 0 and at most 1"),
        (["--top-k", "1e3"], "--top-k: '1e3' is not a whole number"),
        (["--min-p", "1.5"], "--min-p"),
        (["--repetition-penalty", "0"], "--repetition-penalty"),
        (["--seed", str(2**64)], "--seed"),
        (["--stop", ""], "--stop: the text is empty"),
        (["--threads", "1000"], "--threads: 1000 is too much: at most 256"),
        (["--ram-budget", "200XB"], "'200XB' is not a size: MB as a number (300), a size (300MB"),
        (["--ram-budget", "101%"], "--ram-budget: 101% is not from 1% to 100%"),
        (["--ram-budget", "0.5MB"], "--ram-budget: 0.5MB is less than 1 MB"),
        (["--ram-budget", "99999999999"], "--ram-budget: 99999999999 is too much"),
        (["--max-tokens", "9" * 5000], "--max-tokens"),
        (["--max-seq-len", "99999999999"], "--max-seq-len"),
        (["--temprature", "1"], "there is no --temprature: did you mean --temperature?"),
        (["--frob"], "there is no --frob (see"),
        (["--max-token=4"], "did you mean --max-tokens?"),
        (["--xyzzy"], "there is no --xyzzy (see"),
        (["a", "time"], "Texts with spaces need quotes"),
        (["a second prompt"], "Texts with spaces need quotes"),
        (["a", "--xyzzy"], "there is no --xyzzy (see"),
        (["--num-ctx", "9"], "--max-seq-len is its name here"),
    ],
)
def test_values_out_of_range_are_one_line(
    here: Here, tiny_llama_8bit: Path, arguments: list[str], said: str
) -> None:
    check_refused(here(tiny_llama_8bit, "-p", PROMPT, *arguments, command=cli.main), 2, said)


@pytest.mark.parametrize("options", [[], ["--temperature", "0"]])
def test_the_prompt_may_follow_the_model(
    here: Here, tiny_llama_8bit: Path, options: list[str]
) -> None:
    common = ("--max-tokens", "5", "--seed", "1", "-q", "--ram-budget", "auto", *options)
    named = here(tiny_llama_8bit, "-p", PROMPT, *common, command=cli.main)
    for arguments in ((PROMPT, *common), (*common, PROMPT)):
        done = here(tiny_llama_8bit, *arguments, command=cli.main)
        assert (done.returncode, done.stdout) == (0, named.stdout), done.stderr


def test_files_that_are_not_models_are_one_line(
    run: Run, here: Here, tmp_path: Path, tiny_llama_8bit: Path
) -> None:
    def refused(path: Path, said: str) -> str:
        done = here(path, "-p", "x", command=cli.main)
        check_refused(done, 1, said)
        assert done.stderr.rstrip("\n").isprintable()
        return done.stderr

    refused(tmp_path / "absent.qsf", "absent.qsf")
    refused(tmp_path, "a folder without config.json")
    folder = tmp_path.joinpath(*["\x1b[31m" + "long" * 60] * 8)
    folder.mkdir(parents=True)
    assert len(refused(folder, "a folder without config.json")) < MAX_LINE + 100
    other = tmp_path / "other.qsf"
    other.write_bytes(b"PK\x03\x04" * 100)
    refused(other, "other.qsf")
    data = tiny_llama_8bit.read_bytes()
    for n_bytes in (0, 3, 100, 5000, len(data) - 1):
        other.write_bytes(data[:n_bytes])
        refused(other, "other.qsf")
    write_tiny(other)
    check_refused(run(other, "-p", "x"), 1, "tokenizer")


def test_prompts_that_are_not_there_are_one_line(run: Run, tiny_llama_8bit: Path) -> None:
    check_refused(run(tiny_llama_8bit, stdin=""), 1, "the prompt is empty")
    check_refused(run(tiny_llama_8bit, "--prompt-file", "absent.txt"), 1, "absent.txt")


def test_a_prompt_that_is_too_long_is_one_line(run: Run, tiny_llama_8bit: Path) -> None:
    check_refused(run(tiny_llama_8bit, stdin="a red ball " * 100000), 1, "too long")
    check_refused(run(tiny_llama_8bit, stdin="a red ball " * 200), 1, "the context holds 512")
    long = run(tiny_llama_8bit, "--prompt-file", "/dev/zero")
    check_refused(long, 1, "the prompt is too long: more than 262144 bytes")


def test_a_line_that_is_too_long_does_not_end_the_conversation(
    run: Run, tiny_chat_8bit: Path
) -> None:
    lines = f"{'a' * 3_000_000}\n{'a red ball ' * 4000}\nHello\n"
    done = run(tiny_chat_8bit, "-i", "-n", 3, "--seed", 1, "--max-seq-len", 128, stdin=lines)
    assert done.returncode == 0
    assert "(more than 65536 bytes are too many for the context: left out)" in done.stderr
    assert "(the text is too long: the first" in done.stderr
    assert done.stdout.strip()


def test_the_kv_cache_is_chosen_and_shown(run: Run, tiny_llama_8bit: Path) -> None:
    kept = "--verbose", "-n", 3, "-p", PROMPT
    default = run(tiny_llama_8bit, *kept).stderr
    assert "KV cache  8bit, rotated" in default
    assert "KV cache, 512 tokens, 8bit" in default
    chosen = run(tiny_llama_8bit, *kept, "--kv-type", "4bit", "--kv-rotation", "off").stderr
    assert "KV cache  4bit\n" in chosen
    check_refused(
        run(tiny_llama_8bit, "-p", "x", "--exact", "--kv-type", "f16"), 1, "needs 32 bits"
    )


def test_help_has_every_option_and_examples(run: Run) -> None:
    done = run("--help-all")
    assert done.returncode == 0
    options = "prompt max-tokens temperature top-p top-k ram-budget threads quality interactive"
    options += " verbose min-p repetition-penalty seed stop max-seq-len exact plan quiet"
    options += " kv-type kv-rotation io io-depth json stream session system raw model yes"
    for option in options.split():
        assert f"--{option}" in done.stdout
    assert "examples:" in done.stdout


def test_the_short_help_has_ten_options_of_the_same_descriptions(run: Run) -> None:
    short, long = run("--help").stdout, run("--help-all").stdout
    names = re.findall(r"^  (?:-\w(?: [A-Z]+)?, )?(--[a-z-]+)", short, re.MULTILINE)
    assert len(set(names) - {"--help", "--help-all"}) == 10
    for name in names:
        start = short.index(name)
        words = short[start:].split()[:4]
        assert " ".join(words[-2:]) in " ".join(long.split())


def test_the_examples_of_the_help_work(run: Run, tiny_chat_8bit: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_chat_8bit, tmp_path / "model.qsf")
    (tmp_path / "asked.jsonl").write_text('"She"\n', "utf-8")
    lines = run("--help-all").stdout.split("examples:")[1].split("MODEL is")[0].splitlines()
    examples = [shlex.split(line.split("|")[-1].split(">")[0]) for line in lines if line.strip()]
    assert len(examples) == 10
    for words in examples:
        assert words[0] == "qsf"
        assert words[1] in ("run", "chat")
        done = run(*words[2:], *["--interactive"] * (words[1] == "chat"), stdin=PROMPT)
        assert done.returncode == 0, (words, done.stderr)
        assert done.stdout


def test_a_damaged_file_says_what_to_do(run: Run, tmp_path: Path, tiny_llama_8bit: Path) -> None:
    data = bytearray(tiny_llama_8bit.read_bytes())
    data[5000] ^= 1
    (tmp_path / "damaged.qsf").write_bytes(data)
    check_refused(run("damaged.qsf", "-p", "x"), 1, "copy it again, or convert the model again")


def test_the_statistics_of_few_tokens_claim_no_speed(run: Run, tiny_llama_8bit: Path) -> None:
    none = run(tiny_llama_8bit, "-p", PROMPT, "-n", 0).stderr
    assert "generated 0 tokens | peak RSS" in none
    one = run(tiny_llama_8bit, "-p", PROMPT, "-n", 1).stderr
    assert "generated 1 token | first token" in one


@pytest.mark.skipif(os.name != "posix", reason="descriptors")
@pytest.mark.parametrize("redirection", ["<&-", ">&-", "2>&-"])
def test_closed_streams_are_no_traceback(
    redirection: str, tiny_llama_8bit: Path, tmp_path: Path
) -> None:
    words = [*COMMAND, str(tiny_llama_8bit), "-p", PROMPT, "-n", "2"]
    script = f"{shlex.join(words)} {redirection}"
    done = subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(tiny_llama_8bit: Path, tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, str(tiny_llama_8bit), "-p", PROMPT, "-n", "2"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "qsf-run: error: output: No space left on device\n"


# ---- being interrupted ----


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_terminating_ends_cleanly_with_143(endless: Path, start: Start) -> None:
    for mode in (["-p", "abc"], ["--interactive"]):
        process = start(endless, *mode, *ENDLESS)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"abc\n")
        process.stdin.flush()
        assert process.stdout.read(20)
        process.send_signal(signal.SIGTERM)
        shown, said = process.communicate(timeout=60)
        assert process.returncode == 143, said
        assert shown.endswith(b"\n")
        assert b"Traceback" not in said


def test_a_signal_while_the_session_is_taken_is_no_error(
    tiny_llama_8bit: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def stopped(_session: Session, _run: object) -> None:
        raise StoppedError(signal.SIGTERM)

    monkeypatch.setattr(Session, "_hold", stopped)
    code = cli.main([str(tiny_llama_8bit), "-p", "abc", "-n", "2", "--ram-budget", "0"])
    assert code == 143
    assert "error" not in capfd.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("quiet", [(), ("-q",)])
def test_ctrl_c_ends_with_130_and_says_so(
    endless: Path, start: Start, quiet: tuple[str, ...]
) -> None:
    process = start(endless, "-p", "abc", *ENDLESS, *quiet)
    assert process.stdout is not None
    assert process.stdout.read(20)  # it is generating
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    if quiet:
        assert said.strip() == b""
        return
    figures, last = said.decode().strip().splitlines()
    assert re.match(r"prompt \d+ tokens.* \| generated \d+ tokens", figures)
    assert last == "qsf-run: interrupted"


@pytest.mark.skipif(os.name != "posix", reason="pipes")
def test_a_reader_that_leaves_is_no_error(endless: Path, start: Start) -> None:
    process = start(endless, "-p", "abc", *ENDLESS)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(5)
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert process.stderr.read() == b""


# ---- chat ----


def test_a_conversation_is_remembered_until_reset(run: Run, tiny_llama_8bit: Path) -> None:
    lines = f"{PROMPT}\n\nAnd then\n/reset\n{PROMPT}\n/exit\nnot reached\n"
    done = run(
        tiny_llama_8bit, "--interactive", "--temperature", 0, "-n", 10, "--verbose", stdin=lines
    )
    assert done.returncode == 0
    answers = done.stdout.splitlines()
    assert answers[0] == answers[-1]
    assert answers[0].startswith(", there was a little girl")
    assert "has no chat template" in done.stderr
    assert "the conversation is forgotten" in done.stderr
    assert done.stderr.count("stopped by") == 3


def test_a_conversation_uses_the_files_template(run: Run, tiny_chat_8bit: Path) -> None:
    done = run(tiny_chat_8bit, "--interactive", "-n", 5, "--verbose", stdin="Hi\nYou\n")
    assert done.returncode == 0
    assert "no chat template" not in done.stderr
    assert "temperature 0.25" in done.stderr
    # A turn: <user>Hi and its end, then <assistant>; more than the two tokens of a plain one.
    first, second = (line for line in done.stderr.splitlines() if line.startswith("prompt "))
    assert int(first.split()[1]) > 5
    assert int(second.split()[1]) > 5


def test_a_conversation_that_fills_the_context_says_so(run: Run, tiny_llama_8bit: Path) -> None:
    lines = f"{PROMPT}\n{PROMPT}\n/reset\n{PROMPT}\n"
    done = run(
        tiny_llama_8bit, "--interactive", "--max-seq-len", 12, "--temperature", 0, stdin=lines
    )
    assert done.returncode == 0
    assert "(cut: the context is full; the next message forgets the oldest turns)" in done.stderr
    assert "(the context was full: the oldest turn is forgotten" in done.stderr
    answers = done.stdout.splitlines()
    assert len(answers) == 3
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(endless: Path, start: Start) -> None:
    process = start(endless, "--interactive", *ENDLESS)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"abc\n")
    process.stdin.flush()
    assert process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(b"/reset\n/exit\n", timeout=60)
    assert process.returncode == 0, said
    assert b"(stopped)" in said
    assert b"(the conversation is forgotten)" in said
    assert b"Traceback" not in said


def test_the_parser_does_not_guess_abbreviations() -> None:
    with pytest.raises(UsageError):
        run_options.parse(["m.qsf", "--temper", "1"])


def test_an_answer_ends_where_the_model_ends_it(run: Run, tiny_chat_8bit: Path) -> None:
    words = (tiny_chat_8bit, "Hi", "--temperature", 2, "--top-k", 0, "--top-p", 1, "--seed", 1)
    answer = json.loads(run(*words, "--json").stdout)
    assert answer["stop_reason"] in ("end", "context")
    assert answer["generated_tokens"] > 256
    raw = json.loads(run(*words, "--json", "--raw").stdout)
    assert (raw["stop_reason"], raw["generated_tokens"]) == ("length", 256)


def test_chat_has_its_own_help(run: Run) -> None:
    shown = run("--interactive", "--help").stdout
    assert shown.startswith("Usage: qsf chat ")
    assert "--session" in shown
    assert "--prompts" not in shown
