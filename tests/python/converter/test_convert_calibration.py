# SPDX-License-Identifier: Apache-2.0
"""Calibration and size targets as people type them: processes, exit codes, what they print."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from make import calibrated_models
from make.commands import Here
from qsf.cli import inspect as inspect_cli
from qsf.file.reader import Reader
from qsf_converter import cli
from qsf_converter.calibrate.texts import bundled_text, read_calibration_text
from qsf_converter.convert import convert
from qsf_converter.request import Request
from qsf_converter.sources.source import open_source

ELSEWHERE = Path(tempfile.gettempdir())
CONVERT = [sys.executable, "-m", "qsf_converter.cli"]
RUN = [sys.executable, "-m", "qsf.cli.run.main"]
MB = 2**20


def run(*arguments: object, command: list[str] = CONVERT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True,
        encoding="utf-8",
        check=False,
        cwd=ELSEWHERE,
    )


def command_that_is_sent(signal_name: str, n_layers: int) -> list[str]:
    """The command in a process that gets a signal once so many layers are saved."""
    code = f"""
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from qsf_converter.calibrate.state import CalibrationState
save = CalibrationState.save
def saved(self, *args):
    save(self, *args)
    if self.n_layers == {n_layers}:
        os.kill(os.getpid(), signal.{signal_name})
CalibrationState.save = saved
from qsf_converter.cli import main
main()
"""
    return [sys.executable, "-c", code]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("model")
    calibrated_models.write_text(folder / "text.txt")
    return calibrated_models.small_llama(folder / "m", tiny_llama_dir)


def asked(model: Path) -> tuple[object, ...]:
    return ("--calibration", model.parent / "text.txt", "--calibration-tokens", 512)


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text as training sets have it."""
    path = tmp_path_factory.mktemp("text") / "stories.jsonl"
    parts = [part for part in bundled_text()[:200_000].split("\n\n") if part.strip()]
    path.write_text("".join(json.dumps({"text": part}) + "\n" for part in parts), "utf-8")
    return path


@pytest.fixture(scope="module")
def converted_2bit(
    tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path, jsonl: Path
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The bundled model, and what was said while it was converted."""
    out = tmp_path_factory.mktemp("out") / "tiny.qsf"
    options = ("--quant-type", "2bit", "--calibration", jsonl, "--calibration-tokens", 2048)
    return out, run(tiny_llama_dir, out, *options, "--threads", 1, "--verbose")


def test_a_calibrated_conversion_says_what_it_does(
    converted_2bit: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    out, done = converted_2bit
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("measuring how much each layer matters ...\n")
    assert re.search(r"100%,.* of (?!2048 )\d+ tokens", done.stderr)
    assert re.search(r"100%,.* 2048 of 2048 tokens", done.stderr)
    assert "warning" not in done.stderr
    assert "feedback" in done.stdout
    assert "of stories.jsonl, held out" in done.stdout
    assert [path.name for path in out.parent.iterdir()] == ["tiny.qsf"]
    with Reader(out) as reader:
        reader.verify()


def test_the_bundled_model_is_nearer_at_2_bits(
    converted_2bit: tuple[Path, subprocess.CompletedProcess[str]],
    tiny_llama_dir: Path,
    jsonl: Path,
    tmp_path: Path,
    here: Here,
) -> None:
    out, _ = converted_2bit
    with open_source(tiny_llama_dir) as source:
        request = Request("2bit", calibration=str(jsonl), calibration_tokens=2048)
        text = read_calibration_text(source, request)
    assert text is not None
    plain = tmp_path / "plain.qsf"
    assert here(tiny_llama_dir, plain, "--quant-type", "2bit", "-q").returncode == 0
    calibrated, lost = (
        calibrated_models.mean_kl(tiny_llama_dir, file, text.held_out) for file in (out, plain)
    )
    assert calibrated < 0.9 * lost
    with Reader(out) as reader:
        said = json.loads(reader.read_section("META"))["quality"]["evaluation"]
    assert said["kl_mean"] == pytest.approx(calibrated, rel=1e-3)


def test_inspect_prints_what_was_measured(
    converted_2bit: tuple[Path, subprocess.CompletedProcess[str]], here: Here
) -> None:
    out, _ = converted_2bit
    done = here(out, "--quality", command=inspect_cli.run)
    assert done.returncode == 0, done.stderr
    with Reader(out) as reader:
        quality = json.loads(reader.read_section("META"))["quality"]
        entries = reader.layers
    assert "KL mean" in done.stdout
    assert f"{quality['evaluation']['kl_mean']:.4g}" in done.stdout
    assert re.search(r"2\.FFN_DOWN .* feedback", done.stdout)
    assert re.search(r"text +stories\.jsonl", done.stdout)
    assert len(quality["layers"]) == len(entries) == 6
    for layer, entry in zip(quality["layers"], entries, strict=True):
        assert entry.importance == pytest.approx(layer["importance"], rel=1e-3)
        assert re.search(rf"^ +{layer['layer']} +{layer['importance']:.4g} ", done.stdout, re.M)
    said = json.loads(here(out, "--quality", "--json", command=inspect_cli.run).stdout)["quality"]
    assert said == quality


def test_the_least_important_layers_can_be_skipped(
    converted_2bit: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    out, _ = converted_2bit
    options = ("-p", "Once upon a time", "-n", 8, "--temperature", 0)
    done = run(out, *options, "--quality", 0.5, command=RUN)
    assert done.returncode == 0, done.stderr
    assert "layers skipped: 2 of 6, 2-3" in done.stderr
    assert done.stdout.strip()
    # One is the less important of the two that may be skipped.
    with Reader(out) as reader:
        importance = {n: reader.layers[n].importance for n in (2, 3)}
    least = min(importance, key=lambda layer: importance[layer])
    done = run(out, "--quality", 0.8, "--plan", command=RUN)
    assert f"layers skipped: 1 of 6, {least}\n" in done.stdout


def test_the_file_is_the_same_with_two_threads(model: Path, tmp_path: Path) -> None:
    files = []
    for n_threads in (1, 2):
        out = tmp_path / f"{n_threads}.qsf"
        text = model.parent / "text.txt"
        convert(model, out, calibration=text, calibration_tokens=512, threads=n_threads)
        files.append(out.read_bytes())
    assert files[0] == files[1]


def test_the_bundled_text_and_a_page(model: Path, tmp_path: Path, here: Here) -> None:
    out, page = tmp_path / "o.qsf", tmp_path / "o.html"
    done = here(
        model, out, "--calibration", "bundled", "--calibration-tokens", 512,
        "--quant-type", "3bit", "--report", page, "--verbose",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "of bundled, held out" in done.stdout
    assert "bundled, held out" in page.read_text("utf-8")


@pytest.mark.parametrize("with_text", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_size_in_mb_is_the_largest(
    with_text: bool, model: Path, tmp_path: Path, here: Here
) -> None:
    out = tmp_path / "o.qsf"
    extra = asked(model) if with_text else ()
    done = here(model, out, "--target-size", 0.01, *extra)
    assert (done.returncode, done.stdout) == (1, "")
    said = re.search(r"the smallest has ([\d.]+) MB", done.stderr)
    assert said is not None, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
    size = float(said[1]) + 0.02
    done = here(model, out, "--target-size", size, *extra)
    assert done.returncode == 0, done.stderr
    assert out.stat().st_size <= size * MB
    assert ("measuring how much each tensor matters ..." in done.stderr) is with_text
    with Reader(out) as reader:
        meta = json.loads(reader.read_section("META"))
    assert meta["converter"]["options"]["quant_type"] == "mixed"


def test_bits_a_weight(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = [str(model), str(tmp_path / "o.qsf"), "--target-bpw"]
    assert cli.run([*wanted, "8", "--quant-type", "mixed"]) == 1  # the tokenizer alone has more
    bits = re.search(r"\(([\d.]+) bits a weight", capsys.readouterr().err)
    assert bits is not None
    most = float(bits[1]) + 0.5
    assert cli.run([*wanted, str(most)]) == 0
    stated = float(capsys.readouterr().out.split(" bits a weight")[0].split()[-1])
    assert stated <= most + 0.005


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (("--target-size", 1, "--quant-type", "4bit"), "quant type mixed, not 4bit", 2),
        (("--target-size", 1, "--target-bpw", 4), "given twice", 2),
        (("--target-size", 0), "target size is not above zero", 2),
        (("--target-size", "1XB"), "'1XB' is not a size: MB as a number (300)", 2),
        (("--target-size", -1), "--target-size", 2),
        (("--target-size", "nan"), "--target-size", 2),
        (("--target-size", "inf"), "'inf' is not a size: MB as a number (300)", 2),
        (("--target-bpw", 0), "--target-bpw", 2),
        (("--target-bpw", 40), "--target-bpw", 2),
        (("--target-bpw", "nan"), "--target-bpw", 2),
        (("--calibration-tokens", 4096), "--calibration-tokens is only for --calibration", 2),
        (("--calibration", "bundled", "--calibration-tokens", 0), "--calibration-tokens", 2),
        (("--calibration", "bundled", "--calibration-tokens", -3), "--calibration-tokens", 2),
        (("--calibration", "gone.txt"), "gone.txt: no such file", 1),
        (("--embed-type", "mixed"), "embed type mixed", 2),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: tuple[object, ...],
    message: str,
    code: int,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run([str(model), str(tmp_path / "o.qsf"), *map(str, arguments)]) == code
    out, said = capsys.readouterr()
    assert out == ""
    assert len(said.splitlines()) == 1, said
    assert said.startswith("qsf-convert: error: ")
    assert message in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(
    ("name", "code", "word"),
    [
        ("SIGINT", 130, "interrupted"),
        pytest.param("SIGTERM", 143, "terminated", marks=pytest.mark.slow),
    ],
)
def test_a_signal_keeps_what_is_done(
    name: str, code: int, word: str, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "o.qsf"
    done = run(model, out, *asked(model), "-q", command=command_that_is_sent(name, 2))
    assert (done.returncode, done.stdout) == (code, "")
    state = tmp_path / "o.qsf.calibration"
    assert done.stderr == (
        f"qsf-convert: error: {word}; the same command continues from there ({state})\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["o.qsf.calibration"]
    # Where the first layer is saved again, or the last was not, the signal comes again.
    done = run(model, out, *asked(model), "-q", command=command_that_is_sent(name, 2))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["o.qsf"]
    assert run(model, tmp_path / "whole.qsf", *asked(model), "-q").returncode == 0
    assert out.read_bytes() == (tmp_path / "whole.qsf").read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_embeddings_and_keys_that_layers_share(tmp_path: Path, tiny_llama_dir: Path) -> None:
    """Gemma 4 E2B: nearer with a text, by size too; the same with two threads, after a stop."""
    model = calibrated_models.own_embeddings(tmp_path / "m", tiny_llama_dir)
    text, other = tmp_path / "text.txt", tmp_path / "other.txt"
    text.write_text(bundled_text()[:40_000], "utf-8")
    other.write_text(bundled_text()[-8_000:], "utf-8")
    asked = ("--calibration", text, "--calibration-tokens", 2048, "-q")

    def made(name: str, *options: object) -> Path:
        out = tmp_path / name
        done = run(model, out, *options)
        assert done.returncode == 0, done.stderr
        return out

    def kl(file: Path, against: Path) -> float:
        figures = tmp_path / "figures.json"
        options = ("--text", other, "--exact", "-q", "--against", against, "--json", figures)
        done = run(file, *options, command=[sys.executable, "-m", "qsf.cli.evaluate"])
        assert done.returncode == 0, done.stderr
        return float(json.loads(figures.read_text("utf-8"))["kl_mean"])

    two_bits = ("--quant-type", "2bit")
    f16 = made("f16.qsf", "--quant-type", "f16", "--embed-type", "f16", "-q")
    plain, nearer = made("plain.qsf", *two_bits, "-q"), made("nearer.qsf", *two_bits, *asked)
    assert 0 <= kl(f16, model) < 1e-9
    assert kl(plain, plain) == 0
    lost = kl(plain, model)
    assert lost == pytest.approx(kl(plain, f16), rel=1e-4)
    assert kl(nearer, model) < 0.95 * lost
    sized = [made("a.qsf", "--target-size", 0.8, "-q"), made("b.qsf", "--target-size", 0.8, *asked)]
    assert kl(sized[1], model) < 0.8 * kl(sized[0], model)
    assert max(file.stat().st_size for file in sized) <= 0.8 * MB

    stopped = command_that_is_sent("SIGINT", 4)
    out = tmp_path / "again.qsf"
    done = run(model, out, *two_bits, *asked, "--threads", 1, command=stopped)
    assert done.returncode == 130
    assert made("again.qsf", *two_bits, *asked, "--threads", 2).read_bytes() == nearer.read_bytes()


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_signal_before_anything_is_kept_says_so(model: Path, tmp_path: Path) -> None:
    code = command_that_is_sent("SIGINT", 99)
    code[-1] = code[-1].replace(
        "from qsf_converter.cli import main",
        "from qsf_converter.calibrate import type_choice\n"
        "type_choice.measure_layers = lambda *a, **k: os.kill(os.getpid(), signal.SIGINT)\n"
        "from qsf_converter.cli import main",
    )
    done = run(model, tmp_path / "o.qsf", *asked(model), "-q", command=code)
    assert done.returncode == 130
    assert done.stderr == "qsf-convert: error: interrupted; nothing was written\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_power_cut_after_each_layer(model: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole.qsf", tmp_path / "o.qsf"
    assert run(model, whole, *asked(model), "-q").returncode == 0
    for n_layers in (1, 2, 3):
        done = run(
            model, out, *asked(model), "-q", command=command_that_is_sent("SIGKILL", n_layers)
        )
        assert done.returncode == -9
        assert not out.exists()
    done = run(model, out, *asked(model), "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert out.read_bytes() == whole.read_bytes()
    assert not (tmp_path / "o.qsf.calibration").exists()
