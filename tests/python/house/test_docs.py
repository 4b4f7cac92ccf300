"""The commands that the documents show exist: of make, programs, options; the examples run."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from qsf.shell import entry

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/*.md")])
PROGRAMS = ("qsf-convert", "qsf-run", "qsf-inspect", "qsf-eval", "qsf-serve", "qsf.bench",
            "qsf-plan", "qsf-list", "qsf-completion")  # fmt: skip
# A verb of `qsf` is the program with a dash.
VERBS = {"chat": "qsf-run", "bench": "qsf.bench", "rm": "qsf-list"}


@cache
def commands() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(document, words) of the `make ...` and `qsf-...` lines of all code blocks."""
    found = []
    for path in DOCUMENTS:
        text = path.read_text("utf-8")
        blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        indented = re.findall(r"^    (\S.*)$", text, re.MULTILINE)
        for line in [*"\n".join(blocks).replace("\\\n", " ").splitlines(), *indented]:
            words = re.sub(r"^\S*python -m qsf", "qsf", line.split("#")[0]).split()
            if len(words) > 1 and Path(words[0]).name == "qsf":
                assert words[1] in entry.VERBS, f"{path.name}: {line}"
                words[:2] = [VERBS.get(words[1], f"qsf-{words[1]}")]
            if words and (words[0] == "make" or Path(words[0]).name in PROGRAMS):
                found.append((path.name, (Path(words[0]).name, *words[1:])))
    return tuple(found)


@cache
def options_of(program: str) -> frozenset[str]:
    """The options in the help of a program."""
    shown = io.StringIO()
    words = ["--help-all" if program == "qsf-run" else "--help"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(shown):
        for name, value in {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", [program, *words])
        patch.setattr(entry, "_leave_on_signals", lambda: None)
        with contextlib.suppress(SystemExit):
            entry.start(program[4:])
    return frozenset(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", shown.getvalue()))


def test_verbs_of_make_and_options_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    known = {"make": frozenset(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))}
    known |= {program: options_of(program) for program in PROGRAMS}
    assert all("--help" in known[program] for program in PROGRAMS)
    n_commands = 0
    for name, (program, *words) in commands():
        of_make = {w for w in words if "=" not in w}
        options = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        named = of_make if program == "make" else options
        assert named <= known[program], f"{name}: {program} {' '.join(words)}"
        n_commands += name == "README.md"
    assert n_commands > 5
    use = (ROOT / "docs" / "use.md").read_text("utf-8")
    of_guide = set(re.findall(r"`(--[a-z][a-z-]*)", use))
    assert of_guide
    assert of_guide <= frozenset[str]().union(*known.values())


@pytest.mark.parametrize("document", ["README.md", "docs/python.md"])
def test_the_examples_in_python_work(
    document: str,
    tiny_llama_8bit: Path,
    tiny_llama_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "model.qsf").symlink_to(tiny_llama_8bit)
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "hf-model").symlink_to(tiny_llama_dir)
    monkeypatch.chdir(tmp_path)
    text = (ROOT / document).read_text("utf-8")
    examples = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        code = re.sub(r"ram_budget=\d{3}", "ram_budget=2000", example)  # this process is large
        exec(compile(code, document, "exec"), {"__name__": "__main__"})
        assert capsys.readouterr().out, code


def test_documents_are_written_as_they_are_checked() -> None:
    tool = ROOT / "tools" / "make_family_table.py"
    assert subprocess.run([sys.executable, tool, "--check"], check=False).returncode == 0
    # At most 119 columns; rows of tables and pictures cannot be broken.
    for path in ROOT.glob("**/*.md"):
        if path.relative_to(ROOT).parts[0] in (".venv", "build") or ".git" in path.parts:
            continue
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            assert len(line) < 120 or line.startswith(("|", "![")), f"{path}:{number}"


# ---- the examples for other programs run: a plain one, and a plugin of the command llm ----
def said(*command: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_plain_example_answers(tiny_chat_8bit: Path, tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("The old man lived in a small house by the sea.", "utf-8")
    command = [str(ROOT / "examples" / "answer.py"), str(tiny_chat_8bit), str(text), "Where?"]
    assert len(said(*command)) > 20
    done = subprocess.run([sys.executable, command[0]], capture_output=True, check=False)
    assert done.returncode == 2


@pytest.mark.slow
def test_the_plugin_of_llm_chats(tiny_chat_8bit: Path, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    pip = ["-m", "pip", "install", "-q", "--target", str(packages)]
    said(*pip, "llm>=0.20")
    plugin = shutil.copytree(ROOT / "examples" / "llm-qsf", tmp_path / "llm-qsf")
    said(*pip, "--no-deps", str(plugin))  # of a copy: setuptools builds beside the source
    where = {
        "PYTHONPATH": str(packages),
        "LLM_USER_PATH": str(tmp_path / "llm"),
        "QSF_MODELS": str(tiny_chat_8bit.parent),
    }
    model = ["-m", f"qsf/{tiny_chat_8bit.stem}", "-o", "max_tokens", "12", "-o", "temperature", "0"]
    assert f"qsf/{tiny_chat_8bit.stem}" in said("-m", "llm", "models", **where)
    first = said("-m", "llm", *model, "Who are you?", **where)
    import qsf

    with qsf.Model(tiny_chat_8bit, ram_budget=None) as opened:
        history = [{"role": "user", "content": "Who are you?"}]
        expected = "".join(opened.chat(history, max_tokens=12, temperature=0))
        history += [{"role": "assistant", "content": expected}, *history]
        again = "".join(opened.chat(history, max_tokens=12, temperature=0))
    assert first == f"{expected}\n"
    assert said("-m", "llm", "-c", *model[2:], "Who are you?", **where) == f"{again}\n"
