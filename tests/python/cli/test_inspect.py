"""The command qsf-inspect."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from make.commands import Here
from make.kind_attacks import EXPERTS
from make.kind_models import MIXED, SETS, write_model
from make.qsf_files import write_tiny
from make.stored import Reader
from qsf.cli import inspect as cli
from qsf.file import reader
from qsf.file.layout import dtype_name
from qsf.shell import command

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


def test_the_report_is_for_people(tiny: Path) -> None:
    out = run(tiny)
    for text in (
        *("llama", "UNIT", "TOKN", "embedding", "layer 1", "final unit", "tokenizer: no"),
        *("chat template: no", "qsf 1.0", "Apache-2.0", "bits per weight", "4bit"),
    ):
        assert text in out
    assert "ffn_gate" in out
    assert "\x1b" not in run(tiny)
    assert "tiny?[31m" in run(tiny)
    with Reader(tiny) as r:
        n_tensors = len(r.tensors)
    assert len(run(tiny, "--tensors").splitlines()) == len(run(tiny).splitlines()) + n_tensors + 2


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


def test_json_says_what_the_reader_says(tiny: Path) -> None:
    said = json.loads(run(tiny, "--json"))
    with Reader(tiny) as r:
        assert said["file_bytes"] == tiny.stat().st_size
        assert said["header"]["n_vocab"] == r.header.n_vocab
        assert said["header"]["dtype"] == dtype_name(r.header.dtype)
        for key, wanted in (("units", r.units), ("tensors", r.tensors)):
            assert [one["dtype"] for one in said[key]] == [dtype_name(one.dtype) for one in wanted]
        down = next(t for t in said["tensors_by_type"] if t["type"] == "ffn_down")
        assert (down["dtype"], down["bytes"] > 0) == ("4bit", True)
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


def test_interrupt_is_130(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Reader, progress: object = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(reader.Reader, "verify", interrupt)
    assert CliRunner().invoke(cli.app, [str(tiny), "--verify"]).exit_code == 130


def test_files_are_verified_and_refused_by_one_line(
    here: Here, tiny: Path, tiny_llama_dir: Path
) -> None:
    def refused(*words: object) -> str:
        done = here(*words, command=cli.run)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.count("\n") == 1
        return done.stderr

    data = tiny.read_bytes()
    assert run(tiny, "--verify").startswith(f"ok: {len(data)} bytes verified in ")
    place = 4096 + 70  # in the embedding, which opening does not read
    tiny.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    assert here(tiny, command=cli.run).returncode == 0
    assert refused(tiny, "--verify").startswith(f"qsf-inspect: error: {tiny}: unit 0")
    tiny.write_bytes(data[:16] + bytes([data[16] ^ 1]) + data[17:])
    assert "copy it again, or convert the model again" in refused(tiny)
    assert "No such file" in refused("missing.qsf")
    assert "is a folder, not a .qsf file" in refused(".")
    converting = f"convert it: {command.runnable()} convert {tiny_llama_dir} model.qsf"
    assert converting in refused(tiny_llama_dir)
    assert "  qsf inspect model.qsf --verify\n" in here("--help", command=cli.run).stdout


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
