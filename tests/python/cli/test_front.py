"""The command ``qsf``: verbs, completion, the chat template, history, JSON."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from make.calibrated_models import small_llama
from make.commands import PROMPT, Run, check_refused
from qsf import Model
from qsf.cli import plan
from qsf.errors import QsfArgumentError
from qsf.shell import completion
from qsf.shell.entry import VERBS
from qsf_converter import convert

# ---- verbs ----
GROUPED = ("run", "chat", "serve", "completion")  # their options stand in groups


def test_a_newcomer_is_told_what_to_do_next(qsf: Run) -> None:
    done = qsf()
    assert (done.returncode, done.stderr) == (0, "")
    assert "qsf chat path/to/model" in done.stdout
    help_text = qsf("--help").stdout
    for verb in VERBS:
        assert f"  {verb} " in help_text
        shown = qsf(verb, "--help").stdout
        assert shown.startswith(f"Usage: qsf {verb} "), shown
        options = shown.partition("\n\nOptions:\n")[2] if verb not in GROUPED else shown
        assert "  -h, --help " in options or verb == "completion"
        assert not any(word in shown for word in ("[default", "[required", "<str>", "arguments:"))
    assert qsf("--version").stdout.startswith("qsf ")


def test_a_model_needs_no_verb(qsf: Run, tiny_llama_8bit: Path) -> None:
    options = ("-p", PROMPT, "-n", 4, "--temp", 0, "-q")
    texts = [
        qsf(*words, *options).stdout
        for words in ([tiny_llama_8bit], ["run", tiny_llama_8bit], ["-m", tiny_llama_8bit])
    ]
    assert texts[0].startswith(", there was a")
    assert texts[0] == texts[1] == texts[2]


@pytest.fixture(scope="module")
def options_of_verbs() -> dict[str, list[str]]:
    """What two commands say of their options, by a process each; of the others nothing."""
    return {
        verb: completion.options_of(verb) if verb in ("run", "convert") else [] for verb in VERBS
    }


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_verbs_and_options(
    shell: str,
    options_of_verbs: dict[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(completion, "options_of", options_of_verbs.__getitem__)
    monkeypatch.setattr(sys, "argv", ["qsf completion", shell])
    assert completion.main() == 0
    written = capsys.readouterr().out
    for word in (*VERBS, "ram-budget", "quant-type"):
        assert word in written
    monkeypatch.setattr(sys, "argv", ["qsf completion", "csh"])
    assert completion.main() == 2
    assert "one shell is needed: bash, zsh or fish" in capsys.readouterr().err
    if shell == "bash":
        script = f"{written}\nCOMP_WORDS=(qsf run --ram); COMP_CWORD=2; _qsf; echo $COMPREPLY"
        answer = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
        assert answer.stdout == "--ram-budget\n"
    elif shutil.which(shell):
        subprocess.run([shell, "-n"], input=written, text=True, check=True)


def test_a_plan_says_how_fast_a_model_can_be(
    qsf: Run, tiny_llama_8bit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At rates of memory that nobody has measured, which takes seconds."""
    monkeypatch.setattr(plan, "measure_memory", lambda *_: {"1": 10.0})
    done = qsf("plan", tiny_llama_8bit, "--threads", 1)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("tiny-llama-8bit.qsf: 3M weights, 8bit")
    assert [line[:12].strip() for line in lines[2:6]] == ["200 MB", "1 GB", "4 GB", "auto"]
    for line in lines[2:6]:
        assert line.endswith("  memory")
        assert float(line[38:53].replace(",", "")) > 0
    check = qsf("plan", "absent.qsf")
    assert check.returncode == 1
    assert "there is no such file or folder" in check.stderr


# ---- the chat template ----
def test_a_prompt_is_answered_by_the_template_unless_raw(run: Run, tiny_chat_8bit: Path) -> None:
    options = ("-p", "Hi", "-n", 4, "--temperature", 0)
    answered, raw = run(tiny_chat_8bit, *options), run(tiny_chat_8bit, *options, "--raw")
    by_pipe = run(tiny_chat_8bit, *options[2:], stdin="Hi\n")
    assert answered.stdout == by_pipe.stdout
    n_answered = int(answered.stderr.split("prompt ")[1].split()[0])
    n_raw = int(raw.stderr.split("prompt ")[1].split()[0])
    assert n_answered > n_raw + 3  # <user>, the end of the turn, <assistant>
    told = run(tiny_chat_8bit, *options, "--system", "Be a bird.").stderr
    assert int(told.split("prompt ")[1].split()[0]) > n_answered


def test_a_history_is_continued_and_written_back(
    run: Run, tiny_chat_8bit: Path, tmp_path: Path
) -> None:
    options = ("-n", 4, "--temperature", 0, "--history", "talk.json")
    first = run(tiny_chat_8bit, "-p", "Hi", "--system", "Brief.", *options)
    assert first.returncode == 0, first.stderr
    second = run(tiny_chat_8bit, "-p", "And you?", *options)
    messages = json.loads((tmp_path / "talk.json").read_text("utf-8"))
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[2]["content"] == first.stdout.removesuffix("\n")
    assert messages[4]["content"] == second.stdout.removesuffix("\n")
    for text in ("{", '{"role": "user"}', '[{"role": 1}]'):
        (tmp_path / "talk.json").write_text(text, "utf-8")
        check_refused(run(tiny_chat_8bit, "-p", "x", *options), 1, "is not a conversation")


def test_a_file_says_whether_it_has_a_template(
    run: Run, tiny_llama_8bit: Path, qsf: Run, tiny_chat_8bit: Path
) -> None:
    check_refused(run(tiny_llama_8bit, "-p", "x", "--system", "y"), 1, "--system needs a chat")
    check_refused(run(tiny_llama_8bit, "-p", "x", "--history", "y"), 1, "--session needs a chat")
    shown = qsf("inspect", tiny_chat_8bit).stdout
    assert "chat template: yes" in shown
    assert "an answer ends at: <|end_of_text|> (1)" in shown
    assert "chat template: no" in qsf("inspect", tiny_llama_8bit).stdout


@pytest.fixture(scope="session")
def told_file(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Path:
    """A small model whose template repeats what it is told as ``word``."""
    folder = tmp_path_factory.mktemp("told")
    source = small_llama(folder / "hf", tokenizer_from=tiny_llama_dir)
    place = source / "tokenizer_config.json"
    tokenizer = json.loads(place.read_text("utf-8"))
    tokenizer["chat_template"] = "{{ bos_token }}{{ word }}{{ messages[-1].content }}"
    place.write_text(json.dumps(tokenizer), "utf-8")
    convert(source, folder / "told.qsf")
    return folder / "told.qsf"


def test_a_template_is_told_keywords(run: Run, told_file: Path) -> None:
    def n_prompt(*options: object, stdin: str = "") -> int:
        done = run(told_file, "-n", 1, *options, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return int(done.stderr.split("prompt ")[-1].split()[0])

    n_bare = n_prompt("-p", "Hi")
    n_told = n_prompt("-p", "Hi", "--template-arg", "word=one two", "--template-arg", "other=1")
    assert n_told > n_bare
    assert n_told == n_prompt("-p", "Hi", "--template-args", '{"word": "one two"}')
    assert n_told == n_prompt("-i", "-v", stdin="/set template-args word=one two\nHi\n")
    with Model(told_file, ram_budget=None) as model:
        "".join(model.chat("Hi", max_tokens=1, template_args={"word": "one two"}))
        assert model.stats is not None
        assert model.stats.prompt_tokens == n_told
        with pytest.raises(QsfArgumentError, match="template_args are for the chat template"):
            model.generate("Hi", template_args={"word": "x"})


# ---- budgets ----
def test_a_streamed_model_says_what_more_memory_would_give(process: Run, wide_file: Path) -> None:
    asked = ("run", wide_file, "-p", "a", "-n", 1, "--ram-budget")
    done = process(*asked, "40")
    assert done.returncode == 0, done.stderr
    line = done.stderr.splitlines()[0]
    assert "MB are read from the file for each token, to stay in 40 MB" in line
    assert "--ram-budget auto would read nothing" in line
    # Another process would do for comparison if all were equally large; they differ by some MB.
    streamed_mb = float(line.removesuffix(line[line.index(" MB") :]))
    assert 10 < streamed_mb < wide_file.stat().st_size / 2**20
    assert "--ram-budget auto" not in process(*asked, "auto").stderr


@pytest.fixture(scope="session")
def wide_file(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Path:
    """A model of some 30 MB, which 40 MB cannot hold beside Python."""
    from make.tiny_checkpoints import make_llama

    folder = tmp_path_factory.mktemp("wide")
    checkpoint = make_llama(
        folder / "hf",
        dim=512,
        ffn_dim=2048,
        n_layers=6,
        n_vocab=2048,
        tokenizer_from=tiny_llama_dir,
    )
    convert(checkpoint, folder / "wide.qsf", quant_type="8bit")
    return folder / "wide.qsf"


# ---- JSON ----
def test_json_has_the_text_its_ids_and_why_it_ended(run: Run, tiny_llama_8bit: Path) -> None:
    options = ("-p", PROMPT, "-n", 6, "--temperature", 0, "--json")
    whole, streamed = run(tiny_llama_8bit, *options), run(tiny_llama_8bit, *options, "--stream")
    assert whole.stderr == ""
    record = json.loads(whole.stdout)
    lines = [json.loads(line) for line in streamed.stdout.splitlines()]
    assert "".join(line["piece"] for line in lines[:-1]) == lines[-1]["text"] == record["text"]
    assert record["stop_reason"] == "length"
    assert record["generated_tokens"] == len(record["ids"]) == 6
    with Model(tiny_llama_8bit, ram_budget=None) as model:
        assert model.detokenize(record["ids"]) == record["text"].lstrip()
    assert run(tiny_llama_8bit, *options[:2], "-n", 6).stderr.count("cut by --max-tokens") == 1


def test_chat_takes_at_most_4_mb_more_than_a_run(run: Run, tiny_chat_8bit: Path) -> None:
    """Measured on pipes and with the editor of lines that a terminal loads."""
    code = (
        "import sys, readline; from qsf.cli.run import main as cli; code = cli.main(sys.argv[1:])\n"
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]); sys.exit(code)"
    )
    if not os.path.exists("/proc/self/status"):  # noqa: PTH110
        pytest.skip("reads /proc")
    plain = code.replace(", readline", "")
    peaks = []
    for program, words, typed in (
        (plain, ["-p", "Hi"], ""),
        (code, ["--interactive"], "Hi\n/context\n/retry\n/undo\n"),
    ):
        command = [sys.executable, "-c", program, str(tiny_chat_8bit), "-n", "5", *words]
        done = subprocess.run(command, input=typed, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout.splitlines()[-1]) / 1024)
    assert peaks[1] - peaks[0] < 4
