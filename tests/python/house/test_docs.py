"""The commands that the documents show exist: verbs of make, programs, their options."""

from __future__ import annotations

import re
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
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from qsf.shell.entry import start; start({program[4:]!r})",
            "--help-all" if program == "qsf-run" else "--help",
        ],
        capture_output=True,
        text=True,
        check=True,
        env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
    )
    return frozenset(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", done.stdout))


def test_there_are_commands_to_check() -> None:
    programs = {words[0] for name, words in commands() if name == "README.md"}
    assert programs >= {"make", "qsf-convert", "qsf-run"}


def test_verbs_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    verbs = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    for name, words in commands():
        if words[0] == "make":
            missing = [w for w in words[1:] if "=" not in w and w not in verbs]
            assert missing == [], f"{name}: {' '.join(words)}"


@pytest.mark.parametrize("program", PROGRAMS)
def test_options_exist(program: str) -> None:
    known = options_of(program)
    assert "--help" in known
    for name, words in commands():
        if words[0] == program:
            options = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
            assert options <= known, f"{name}: {' '.join(words)}"


def test_options_named_in_the_user_guide_exist() -> None:
    known = frozenset[str]().union(*map(options_of, PROGRAMS))
    named = re.findall(r"`(--[a-z][a-z-]*)", (ROOT / "docs" / "use.md").read_text("utf-8"))
    assert named
    assert set(named) <= known


def python_examples() -> list[tuple[str, str]]:
    return [
        (f"{path.name} {i}", code)
        for path in (ROOT / "README.md", ROOT / "docs" / "python.md")
        for i, code in enumerate(
            re.findall(r"^```python\n(.*?)^```", path.read_text("utf-8"), re.MULTILINE | re.DOTALL)
        )
    ]


@pytest.mark.parametrize(("where", "code"), python_examples())
def test_the_examples_in_python_work(
    where: str, code: str, tiny_llama_8bit: Path, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "model.qsf").symlink_to(tiny_llama_8bit)
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "hf-model").symlink_to(tiny_llama_dir)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), where
    assert done.stdout


def test_the_table_of_families_is_that_of_the_converter() -> None:
    tool = ROOT / "tools" / "make_family_table.py"
    assert subprocess.run([sys.executable, tool, "--check"], check=False).returncode == 0


def test_lines_of_documents_can_be_reviewed() -> None:
    """At most 119 columns; rows of tables and pictures cannot be broken."""
    for path in ROOT.glob("**/*.md"):
        if path.relative_to(ROOT).parts[0] in (".venv", "build") or ".git" in path.parts:
            continue
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            assert len(line) < 120 or line.startswith(("|", "![")), f"{path}:{number}"
