"""The qsf-inspect command, in this process and as a process of its own."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from make.expert_attacks import EXPERTS
from make.kind_models import MIXED, SETS, write_model
from make.qsf_files import tiny_header, write_tiny
from oracle.file.reader import Reader
from qsf.cli import inspect as cli
from qsf.errors import QsfFormatError, QsfIOError
from qsf.file import reader
from qsf.file.layout import Dtype
from qsf.shell import command, typer_app

ROOT = Path(__file__).parents[3]
META = {
    "source": {"name": "tiny\x1b[31m", "sha256": "00ff"},
    "converter": "qsf 1.0",
    "licence": "Apache-2.0",
}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.qsf"
    write_tiny(path, 3, sections={"META": json.dumps(META).encode(), "TOKN": b"{}"})
    return path


def run(*args: str | Path) -> str:
    result = CliRunner().invoke(cli.app, [str(a) for a in args])
    assert result.exit_code == 0, result.output
    return result.output


def run_process(*args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run main() in a process of its own, so that exit codes and stderr are the real ones."""
    code = "from qsf.shell.entry import inspect; inspect()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )


def test_report_names_everything(tiny: Path) -> None:
    out = run(tiny)
    for text in (
        *("llama", "UNIT", "TOKN", "embedding", "layer 1", "final unit", "tokenizer: no"),
        *("chat template: no", "qsf 1.0", "Apache-2.0", "bits per weight", "4bit"),
    ):
        assert text in out
    assert "ffn_gate" in out


def test_units_are_shown_with_the_type_of_their_matrices(tmp_path: Path) -> None:
    """Embedding and head are 8-bit here, whatever the header's type is."""
    path = tmp_path / "sym.qsf"
    write_tiny(path, 1, header=tiny_header(dtype=Dtype.Q2_SYM), dtype=Dtype.Q2_SYM)
    units = run(path).split("\nunit ")[1].split("\n\n")[0].splitlines()[1:]
    names = [line.split("  ")[0] for line in units]
    assert names == ["embedding", "layer 0", "layer 1", "final unit"]
    types = [next(t for t in ("8bit", "2bit-sym") if f" {t} " in line) for line in units]
    assert types == ["8bit", "2bit-sym", "2bit-sym", "8bit"]


def test_experts_are_shown_short_and_counted_whole(tmp_path: Path) -> None:
    path = tmp_path / "experts.qsf"
    path.write_bytes(EXPERTS)
    lines = run(path).split("\nexperts of ")[1].split("\n\n")[0].splitlines()[1:]
    assert [line.split()[:4] for line in lines] == [
        ["layer", "0", "4", "2"],
        ["layer", "1", "3", "3"],
    ]
    said = json.loads(run(path, "--json"))
    with Reader(path) as r:
        assert [u["crc32"] for u in said["units"]] == [u.crc32 for u in r.units]
        of_experts = (4 * 6 + 3 * 12) * 8 * 3 + 7 * 8  # gate, up, down; a bias
        others = (r.embedding, *r.layers, r.final)
        of_pass = sum(t.n_rows * t.n_cols for u in others for t in u.tensors)
        assert said["parameters"] == of_pass + of_experts
        for expert in r.experts:
            for t in expert.tensors:
                assert len(r.read_tensor(t, expert.idx)) == t.data_bytes


def test_kinds_of_layers_are_shown_once_with_their_layers(tmp_path: Path) -> None:
    path = tmp_path / "kinds.qsf"
    write_model(path, (MIXED[0], MIXED[1], MIXED[0], MIXED[0]))
    lines = run(path).split("\nlayers\n")[1].split("\n\n")[0].splitlines()
    assert lines[0].strip() == "layers 0, 2 .. 3"
    assert (
        "4 heads of 16, 2 for keys and values, window 5, RoPE set 0, FFN gated 80 silu" in lines[1]
    )
    assert lines[2].strip() == "qk_norm per_head"
    assert sum("RoPE set" in line and "pairs" in line for line in lines) == len(SETS)
    said = json.loads(run(path, "--json"))
    assert [kind["layers"] for kind in said["layer_kinds"]] == [[0, 2, 3], [1]]
    assert said["layer_kinds"][0]["qk_norm"] == "per_head"
    assert [s["frequencies"] for s in said["rope_sets"]] == [8, 8, 3]


def test_text_of_the_file_cannot_steer_the_terminal(tiny: Path) -> None:
    assert "\x1b" not in run(tiny)
    assert "tiny?[31m" in run(tiny)


def test_tensors_are_listed_on_request(tiny: Path) -> None:
    with Reader(tiny) as r:
        n_tensors = len(r.tensors)
    assert len(run(tiny, "--tensors").splitlines()) == len(run(tiny).splitlines()) + n_tensors + 2


def test_json_says_what_the_reader_says(tiny: Path) -> None:
    said = json.loads(run(tiny, "--json"))
    with Reader(tiny) as r:
        assert said["file_bytes"] == tiny.stat().st_size
        assert said["header"]["n_vocab"] == r.header.n_vocab
        assert said["parameters"] == sum(t.n_rows * t.n_cols for t in r.tensors)
        assert [t["data_off"] for t in said["tensors"]] == [t.data_off for t in r.tensors]
        assert [u["crc32"] for u in said["units"]] == [u.crc32 for u in r.units]
    assert said["meta"] == META
    assert not said["has_tokenizer"]  # TOKN alone is none: the engine encodes
    assert not said["has_chat_template"]
    assert said["end_tokens"] == [{"id": said["header"]["eos_id"], "text": ""}]


@pytest.mark.parametrize("meta", [b"[1]", b"\xff\xfe", b"{", b"[" * 100_000])
def test_unreadable_meta_is_said_and_harms_nothing(tmp_path: Path, meta: bytes) -> None:
    path = tmp_path / "m.qsf"
    write_tiny(path, sections={"META": meta})
    assert "provenance: not readable" in run(path)
    assert json.loads(run(path, "--json"))["meta"] is None


def test_verify_says_ok(tiny: Path) -> None:
    size = tiny.stat().st_size
    assert run(tiny, "--verify").startswith(f"ok: {size} bytes verified in ")


def test_damage_is_one_line_and_exit_code_1(tiny: Path) -> None:
    data = bytearray(tiny.read_bytes())
    data[4096 + 70] ^= 1  # in the embedding, which opening does not read
    tiny.write_bytes(data)
    assert run_process(tiny).returncode == 0
    done = run_process(tiny, "--verify")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"qsf-inspect: error: {tiny}: unit 0")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["missing.qsf"], 1, "No such file"),
        (["."], 1, "is a folder, not a .qsf file"),
        ([], 2, "MODEL is missing, as in: qsf inspect model.qsf"),
        (["--nonsense", "x"], 2, "No such option"),
        (["a", "b"], 2, "unexpected extra argument"),
    ],
)
def test_wrong_use_is_said_without_traceback(args: list[str], code: int, text: str) -> None:
    done = run_process(*args)
    assert done.returncode == code
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_help_shows_examples_and_loads_no_reader() -> None:
    done = run_process("--help")
    assert done.returncode == 0
    assert "  qsf inspect model.qsf --verify\n" in done.stdout
    code = (
        "import sys, qsf.cli.inspect;"
        "sys.exit(any(m in sys.modules for m in ('numpy', 'qsf.format', 'lz4', 'zstandard')))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=env).returncode == 0


def test_version() -> None:
    assert run("--version").startswith("qsf-inspect ")


def test_interrupt_is_130(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Reader, progress: object = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(reader.Reader, "verify", interrupt)
    assert CliRunner().invoke(cli.app, [str(tiny), "--verify"]).exit_code == 130


@pytest.mark.parametrize("error", [QsfFormatError, QsfIOError])
def test_main_prints_one_line_for_any_qsf_error(
    error: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise error("what happened")

    assert typer_app.run(fail, [], program=cli.PROGRAM) == 1
    assert capsys.readouterr().err == "qsf-inspect: error: what happened\n"


def test_the_version_is_the_one_of_the_package() -> None:
    done = run_process("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("qsf-inspect ")


def test_a_model_that_is_not_converted_is_said(tiny_llama_dir: Path) -> None:
    done = run_process(tiny_llama_dir)
    assert done.returncode == 1
    assert f"convert it: {command.runnable()} convert {tiny_llama_dir} model.qsf" in done.stderr


def test_damage_says_what_to_do(tiny: Path) -> None:
    data = bytearray(tiny.read_bytes())
    data[16] ^= 1
    tiny.write_bytes(data)
    done = run_process(tiny)
    assert done.returncode == 1
    assert "checksum" in done.stderr
    assert "copy it again, or convert the model again" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(tiny: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", "from qsf.shell.entry import inspect; inspect()", str(tiny)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        )
    assert done.returncode == 1
    assert done.stderr == "qsf-inspect: error: output: No space left on device\n"


@pytest.mark.parametrize(
    ("data", "text"), [(b"", "is an empty file: download"), (b"GGUF", "convert {} model.qsf makes")]
)
def test_a_gguf_file_is_said(
    data: bytes, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    assert cli.run([str(path)]) == 1
    assert text.format(path) in capsys.readouterr().err
