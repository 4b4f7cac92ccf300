"""The quality report: in META, on the terminal, and as a page of HTML."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import math
import os
import random
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from typer.testing import CliRunner

from make.qsf_files import write_tiny
from qsf.cli import inspect as inspect_cli
from qsf.cli import inspect as inspect_quality
from qsf.errors import QsfError, clean
from qsf.file.reader import Reader
from qsf.report import record as converter_report
from qsf.report.record import Evaluation, LayerReport, Quality, Report, TensorReport, read_meta
from qsf.report.text import full_lines, page, quality_lines, summary_lines, verdict
from qsf_converter import cli

OLD_KEYS = (
    "name", "source", "type", "n_rows", "n_cols", "bits_per_weight", "mse", "max_error", "cosine",
)  # fmt: skip
NEW_KEYS = ("relative_error", "outliers", "action", "output_error")


def inspect(*arguments: object) -> str:
    """What ``qsf-inspect`` prints."""
    result = CliRunner().invoke(inspect_cli.app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def file_of(folder: Path, quality: object) -> Path:
    """A tiny .qsf file whose META has this quality report."""
    path = folder / "made.qsf"
    meta = {"source": {"name": "small-llama"}, "quality": quality}
    write_tiny(path, 3, sections={"META": json.dumps(meta).encode()})
    return path


def page_of(path: Path) -> str:
    with Reader(path) as reader:
        return page(reader)


# ---- META ----
def test_what_is_written_is_read_again() -> None:
    quality = full_quality()
    meta = json.loads(json.dumps(quality.meta()))
    assert set(meta) == {"tensors", "layers", "evaluation", "calibration"}
    assert list(meta["tensors"][0]) == [*OLD_KEYS, *NEW_KEYS]
    assert list(meta["layers"][0]) == ["layer", "importance", "cosine", "kl_skipped"]
    again = Quality.from_meta(meta)
    assert again is not None
    assert again.n_unreadable == 0
    assert again.meta() == meta  # rounded once, rounded for good
    assert again.evaluation == quality.evaluation
    assert again.calibration == quality.calibration
    for one, other in zip(quality.tensors, again.tensors, strict=True):
        assert (other.name, other.action, other.n_weights) == (one.name, one.action, one.n_weights)
        assert other.cosine == pytest.approx(one.cosine, rel=1e-4)
        assert other.error == pytest.approx(one.error, rel=1e-4)


def test_numbers_are_rounded_and_finite() -> None:
    quality = Quality(full_quality().tensors, calibration={"a": math.nan, "b": 1 / 3, "n": 123456})
    assert quality.meta()["calibration"] == {"a": None, "b": 0.33333, "n": 123456}
    assert set(Quality(tensors=quality.tensors).meta()) == {"tensors"}  # what was measured


def test_files_from_before_still_print(tmp_path: Path) -> None:
    """Reports had nine keys for each tensor, and nothing else."""
    old = [{key: entry[key] for key in OLD_KEYS} for entry in full_quality(2).meta()["tensors"]]
    path = file_of(tmp_path, {"tensors": old})
    out = inspect(path, "--quality")
    assert "1.FFN_DOWN" in out
    assert "perplexity" not in out
    quality = Quality.from_meta({"tensors": old})
    assert quality is not None
    matrix = next(t for t in quality.tensors if t.type == "4bit")
    expected = math.sqrt(1 - matrix.cosine**2)
    assert matrix.error == pytest.approx(expected)
    assert matrix.action == "rounded"
    assert "importance" not in page_of(path).split("<table>")[1]


def test_a_conversion_reports_what_it_did_to_each_tensor(
    tiny_llama_4bit: Path, tiny_llama_dir: Path
) -> None:
    said = json.loads(inspect(tiny_llama_4bit, "--quality", "--json"))
    assert set(said) == {"path", "file_bytes", "bits_per_weight", "tensors_by_type", "quality"}
    weights = load_file(tiny_llama_dir / "model.safetensors")
    entries = {entry["name"]: entry for entry in said["quality"]["tensors"]}
    assert len(entries) == 56
    for name, entry in entries.items():
        source = weights[entry["source"]].astype(np.float64)
        assert source.size == entry["n_rows"] * entry["n_cols"]
        expected = math.sqrt(entry["mse"] / np.mean(source**2))
        assert entry["relative_error"] == pytest.approx(expected, rel=1e-3, abs=1e-12), name
        assert entry["action"] == ("exact" if entry["type"] == "f32" else "rounded"), name
        assert (entry["max_error"] == 0) == (entry["action"] == "exact")
        assert entry["output_error"] is None  # without calibration
        if entry["type"] == "4bit":
            spread = np.abs(source - source.mean()) > 3 * source.std()
            assert entry["outliers"] == pytest.approx(spread.mean(), abs=3e-3), name
        else:
            assert entry["outliers"] is None
    assert said["file_bytes"] == tiny_llama_4bit.stat().st_size
    types = {one["type"]: one for one in said["tensors_by_type"]}
    assert types["4bit"]["bits_per_weight"] == 4.5
    assert types["f32"]["cosine"] == pytest.approx(1)
    with Reader(tiny_llama_4bit) as reader:
        n_weights = sum(t.n_rows * t.n_cols for t in reader.tensors)
    assert sum(one["parameters"] for one in types.values()) == n_weights


# ---- on the terminal ----
def test_the_summary_is_two_lines() -> None:
    quality = full_quality()
    n_weights = quality.n_weights
    report = Report(quality, (), n_weights, 4 << 20, n_weights // 2, 1.0, None)
    assert list(summary_lines(report, "m.qsf")) == [
        f"m.qsf: {n_weights / 2**21:.1f} MB from 4.0 MB, 4.00 bits a weight "
        f"({n_weights / 1e6:.1f} M weights)",
        "perplexity 7.8312, original 7.6541 (+2.31 %), KL mean 0.02134",
    ]
    worst = min(quality.tensors, key=lambda t: t.cosine)
    lines = summary_lines(replace(report, quality=replace(quality, evaluation=None)), "m.qsf")
    assert list(lines)[1].startswith(f"least like its source: {worst.name}, {worst.type}, error ")
    compressed = list(summary_lines(replace(report, compression="layers: as they are"), "m.qsf"))
    assert compressed[1] == "layers: as they are"


def test_the_whole_report_says_all() -> None:
    quality = full_quality()
    lines = list(full_lines(quality))
    short = list(quality_lines(quality))
    assert lines[: len(short)] == short
    out = "\n".join(lines)
    for text in (
        *("perplexity 7.8312, original 7.6541 (+2.31 %)", "131072 tokens of tinystories-dev.txt"),
        *("context 512, strided", "KL mean 0.02134", "KL 99 % 0.2711"),
        *("same first choice 92.8 %", "least important layers: 5 (0.0223)", "25 exact"),
    ):
        assert text in out
    for one in quality.by_type():
        line = next(line for line in lines if line.startswith(f"{one.type} "))
        tensors = [t for t in quality.tensors if t.type == one.type]
        assert line.split()[1:3] == [str(len(tensors)), f"{sum(t.n_weights for t in tensors):,}"]
    worst = min(quality.tensors, key=lambda t: t.cosine)
    after = lines[lines.index("least like their source:") + 1]
    assert after.split()[0] == worst.name


def test_the_mean_cosine_of_a_type_is_by_weights() -> None:
    meta = full_quality(2).meta()["tensors"]
    small = {**meta[0], "type": "4bit", "n_rows": 1, "n_cols": 1, "cosine": 0.0}
    large = {**small, "n_cols": 3, "cosine": 1.0}
    quality = Quality.from_meta({"tensors": [small, large]})
    assert quality is not None
    assert quality.by_type()[0].cosine == pytest.approx(0.75)


def test_inspect_lists_every_tensor_and_layer(tmp_path: Path) -> None:
    quality = Quality.from_meta(full_quality().meta())  # rounded
    assert quality is not None
    out = inspect(file_of(tmp_path, quality.meta()), "--quality")
    words = {line.split()[0]: line for line in out.splitlines() if line}
    for tensor in quality.tensors:
        assert tensor.type in words[tensor.name]
        assert tensor.action in words[tensor.name]
    for layer in quality.layers:
        assert f"{layer.importance:.4g}" in words[str(layer.layer)]
    assert "sha256" in out
    assert "output err." in out


@pytest.mark.parametrize("meta", [b"{}", b"[", b'{"quality": {"tensors": []}}', None])
def test_a_file_without_report_says_so(
    tmp_path: Path, meta: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.qsf"
    write_tiny(path, 3, sections={} if meta is None else {"META": meta})
    for arguments in (["--quality"], ["--quality", "--json"], ["--report", str(tmp_path / "r")]):
        assert inspect_cli.run([str(path), *arguments]) == 1
        captured = capsys.readouterr()
        assert "holds no quality report; convert the model again" in captured.err
        assert len(captured.err.splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["m.qsf"]


# ---- META that means ill ----
_SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["\x1b[31m", "\u202e", "\ud800", "<b>", 10**400, -1, 0, 5e-324, 1e308, 1e30])
)  # fmt: skip
_KEYS = st.sampled_from(
    [*OLD_KEYS, *NEW_KEYS, "tensors", "layers", "evaluation", "calibration", "perplexity", "layer"]
)
_JSON = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS | st.text(), inner),
    max_leaves=12,
)


@st.composite
def damaged_reports(draw: st.DrawFn) -> Any:
    """A good report in which some values are replaced by others."""
    quality = full_quality(2, seed=draw(st.integers(0, 3))).meta()
    for _ in range(draw(st.integers(1, 6))):
        part = draw(st.sampled_from(["tensors", "layers", "evaluation", "calibration"]))
        entry = quality[part]
        if isinstance(entry, list) and entry:
            entry = entry[draw(st.integers(0, len(entry) - 1))]
        if isinstance(entry, dict) and entry:
            key = draw(st.sampled_from(sorted(entry)))
            entry[key] = draw(_SCALARS if draw(st.booleans()) else _JSON)
    if draw(st.booleans()):
        quality[draw(_KEYS)] = draw(_JSON)
    return quality


def assert_survives(path: Path, meta: bytes) -> None:
    """Every way to look at the file ends well, or with an error that says what is wrong."""
    with pytest.MonkeyPatch.context() as patch, Reader(path) as reader:
        patch.setattr(reader, "read_section", lambda _tag: meta)
        json.dumps(inspect_cli.describe(reader), indent=2, allow_nan=False)
        lines = [*inspect_cli.report_lines(reader, with_tensors=False)]
        try:
            said = inspect_quality.describe_quality(reader)
        except QsfError:
            assert Quality.from_meta((read_meta(reader) or {}).get("quality")) is None
            return
        json.dumps(said, indent=2, allow_nan=False)
        lines += inspect_quality.quality_lines(reader)
        html = page(reader)
    PageParser().read(html)
    html.encode()
    assert all(clean(line).isprintable() for line in lines)


@given(quality=damaged_reports() | _JSON)
def test_any_json_is_survived(tiny_file: Path, quality: Any) -> None:
    meta = json.dumps({"source": {"name": "\x1b"}, "quality": quality}).encode()
    assert_survives(tiny_file, meta)


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "m.qsf"
    write_tiny(path, 3, sections={"META": b"{}"})
    return path


def _many(n: int, **changes: object) -> bytes:
    entry = {**full_quality(2).meta()["tensors"][2], **changes}
    entries = [{**entry, "name": f"{idx}.Q{idx}"} for idx in range(n)]
    return json.dumps({"quality": {"tensors": entries}}).encode()


def test_extremes_are_survived(tiny_file: Path) -> None:
    quality = full_quality(2).meta()
    layers = [{"layer": i, "importance": value} for i, value in enumerate([-1e30, 5e-324, 0, 2])]
    evaluation = {"tokens": 0, "ctx_tokens": 0, "perplexity": 1e30, "perplexity_original": 5e-324}
    for meta in (
        b"[" * 5000,
        b'{"quality": ' + b"[" * 700 + b"]" * 700 + b"}",
        b'{"quality": NaN, "a": 1e999, "b": -Infinity}',
        b'{"quality": {"tensors": 5, "layers": {}}, "x": ' + b"9" * 5000 + b"}",
        b"\xff\xfe\x00",
        b'"text"',
        _many(3, mse=1e30, max_error=1e30, relative_error=1e30),
        _many(3, relative_error=5e-324, bits_per_weight=1e308),
        _many(3, relative_error=None, cosine=-1),
        _many(3, n_rows=2**47, n_cols=2**47, type="x" * 10_000),
        json.dumps({"quality": {**quality, "layers": layers}}).encode(),
        json.dumps({"quality": {**quality, "evaluation": evaluation}}).encode(),
    ):
        assert_survives(tiny_file, meta)


def test_what_a_file_can_make_us_print_is_bounded(
    tiny_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = _many(210)
    monkeypatch.setattr(converter_report, "_MAX_TENSORS", 200)
    assert_survives(tiny_file, meta)
    quality = Quality.from_meta(json.loads(meta)["quality"])
    assert quality is not None
    assert (len(quality.tensors), quality.n_unreadable) == (200, 10)
    with pytest.MonkeyPatch.context() as patch, Reader(tiny_file) as reader:
        patch.setattr(reader, "read_section", lambda _tag: meta)
        html = page(reader)
    assert html.count("title=") == 32  # as many kinds as the table has room for


# ---- the page ----
@pytest.fixture(scope="module")
def full_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("page")
    return page_of(file_of(folder, full_quality().meta()))


def test_the_page_begins_with_a_verdict(full_page: str) -> None:
    quality = full_quality()
    assert f"<strong>{verdict(quality)}</strong>" in full_page
    assert quality.evaluation is not None
    for increase, said in ((0.001, "as good as"), (0.02, "close to"), (0.05, "somewhat worse")):
        better = replace(
            quality.evaluation, perplexity=10 * (1 + increase), perplexity_original=10.0
        )
        assert f"This file is {said}" in verdict(replace(quality, evaluation=better))
    assert "were not compared" in verdict(replace(quality, evaluation=None))
    assert "were not compared" in verdict(Quality(tensors=()))


def test_the_page_is_for_phones_and_for_those_who_cannot_see_it(full_page: str) -> None:
    parser = PageParser()
    parser.check_needs_nothing(full_page)
    assert "prefers-color-scheme:dark" in full_page
    metas = [attrs for tag, attrs in parser.tags if tag == "meta"]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in metas
    assert ("html", {"lang": "en"}) in parser.tags
    regions = [attrs for _, attrs in parser.tags if attrs.get("role") == "region"]
    assert len(regions) == 2  # all that may be wider than the page scrolls by itself
    assert all(attrs["tabindex"] == "0" and attrs["aria-label"] for attrs in regions)


def test_the_page_has_the_whole_report_and_a_table_of_layers(full_page: str) -> None:
    quality = Quality.from_meta(full_quality().meta())  # rounded
    assert quality is not None
    parser = PageParser().read(full_page)
    assert "\n".join(full_lines(quality)).strip() in parser.texts
    assert "made.qsf" in parser.texts
    assert any("converted from small-llama" in text for text in parser.texts)
    cells = {
        str(attrs["title"]): str(attrs["style"]) for tag, attrs in parser.tags
        if tag == "td" and "title" in attrs
    }  # fmt: skip
    matrices = [t for t in quality.tensors if t.layer is not None and t.n_rows > 1]
    titles = {t.name: f"{t.name}: {t.bits_per_weight:.4g} bits, {t.action}" for t in matrices}
    assert list(cells) == list(titles.values())
    worst, best = (pick(matrices, key=lambda t: t.error) for pick in (max, min))
    assert cells[titles[worst.name]].endswith("/60%)")
    assert cells[titles[best.name]].endswith("/0%)")
    for layer in quality.layers:
        assert f"{layer.importance:.4g}" in parser.texts


def test_texts_of_a_file_stay_texts(tmp_path: Path) -> None:
    evil = "</title></style><script>alert(1)</script>\" onload='x' \x00\u202e&amp;"
    meta = full_quality(2).meta()
    for entry in meta["tensors"]:
        entry.update(source=evil, type=evil, action=evil)
    meta["tensors"][2]["name"] = f"0.{evil}"
    meta["evaluation"].update(text=evil, protocol=evil)
    meta["calibration"] = {evil: evil}
    path = file_of(tmp_path, meta).rename(tmp_path / "<i>&.qsf")
    html = page_of(path)
    parser = PageParser().read(html)
    assert "script" not in {tag for tag, _ in parser.tags}
    assert "i" not in {tag for tag, a in parser.tags if not a}
    assert not any("onload" in attrs for _, attrs in parser.tags)
    assert "\x00" not in html
    assert "\u202e" not in html
    shown = evil.replace("\x00", "?").replace("\u202e", "?")
    assert sum(shown in text for text in parser.texts) > 4
    assert "<i>&.qsf" in parser.texts


# ---- the file of the page ----
def test_both_commands_write_the_same_page(
    tmp_path: Path, tiny_gpt2_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, first, second = (tmp_path / name for name in ("m.qsf", "first.html", "second.html"))
    assert cli.run([str(tiny_gpt2_dir), str(out), "--report", str(first)]) == 0
    assert f"report: {first}" in capsys.readouterr().out.splitlines()
    assert inspect(out, "--report", second) == f"{second}: written\n"
    assert first.read_bytes() == second.read_bytes()
    PageParser().read(first.read_text("utf-8"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first.html", "m.qsf", "second.html"]


def test_what_would_fail_is_refused_before_the_work(
    tmp_path: Path, tiny_gpt2_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "there.html").write_text("mine")
    (tmp_path / "config.json").write_text("{}")
    own, same = "is a file of the model itself", "the report and the model are the same file"
    for source, name, message, code in (
        (tiny_gpt2_dir, "there.html", "there.html exists; --force replaces it", 2),
        (tiny_gpt2_dir, "gone/r.html", "gone: no such directory", 1),
        (tiny_gpt2_dir, ".", "is a directory", 1),
        (tiny_gpt2_dir, "m.qsf", same, 2),
        (tiny_gpt2_dir, "./folder/../m.qsf", same, 2),
        (tmp_path, "config.json", own, 2),
    ):
        force = ["--force"] * (message == own)
        arguments = [str(source), str(tmp_path / "m.qsf"), "--report", f"{tmp_path}/{name}", *force]
        assert cli.run(arguments) == code
        captured = capsys.readouterr()
        assert message in captured.err
        assert len(captured.err.splitlines()) == 1  # no progress: nothing was read
        assert not (tmp_path / "m.qsf").exists()
    assert (tmp_path / "there.html").read_text() == "mine"


def test_the_page_is_written_whole_or_not_at_all(
    tmp_path: Path,
    tiny_llama_4bit: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "r.html"
    arguments = [str(tiny_llama_4bit), "--report", str(out)]
    out.write_text("mine")
    assert inspect_cli.run(arguments) == 2
    assert out.read_text() == "mine"
    before = tiny_llama_4bit.read_bytes()
    assert inspect_cli.run([arguments[0], "--report", arguments[0], "--force"]) == 2
    assert "is a file of the model itself" in capsys.readouterr().err
    assert tiny_llama_4bit.read_bytes() == before

    def full_disk(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        assert inspect_cli.run([*arguments, "--force"]) == 1
    assert "r.html: No space left on device" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]
    assert inspect_cli.run([*arguments, "--force"]) == 0
    assert out.read_text("utf-8").startswith("<!doctype html>")
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]


def test_quality_goes_with_few_options(
    tiny_llama_4bit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for other in ("--tensors", "--verify"):
        assert inspect_cli.run([str(tiny_llama_4bit), "--quality", other]) == 2
        assert "--quality goes with" in capsys.readouterr().err


# ---- reads pages of HTML as strictly as no browser does ----
class PageParser(HTMLParser):
    """Reads a page strictly: what is opened is closed, in order; keeps what it met."""

    VOID = ("meta", "br", "link", "img", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []

    def read(self, text: str) -> PageParser:
        self.feed(text)
        self.close()
        assert self.open == []
        return self

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs), attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def check_needs_nothing(self, page: str) -> None:
        """Read a page that loads nothing, runs nothing and says so to the browser."""
        self.read(page)
        names = {tag for tag, _ in self.tags}
        loading = {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
        assert names.isdisjoint(loading)
        for word in ("http:", "https:", "//", "url(", "@import", "javascript:", "data:"):
            assert word not in page
        attributes = {name for _, attrs in self.tags for name in attrs}
        assert attributes.isdisjoint({"src", "href", "srcset", "action", "background"})
        assert not any(name.startswith("on") for name in attributes)
        policy = [attrs["content"] for _, attrs in self.tags if attrs.get("http-equiv")]
        assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]

    def handle_data(self, data: str) -> None:
        if data.strip() and "style" not in self.open:
            self.texts.append(data.strip())


# ---- quality reports as a calibrated conversion writes them, from a seed ----


# Kind, rows and columns in units of 256.
_MATRICES = (
    ("Q", 4, 4), ("K", 1, 4), ("V", 1, 4), ("ATTN_OUT", 4, 4), ("FFN_GATE", 11, 4),
    ("FFN_UP", 11, 4), ("FFN_DOWN", 4, 11),
)  # fmt: skip
_BITS = {"2bit": 2.5, "3bit": 3.5, "4bit": 4.5, "8bit": 8.25, "f32": 32.0}
_ERRORS = {"2bit": 0.33, "3bit": 0.17, "4bit": 0.082, "8bit": 0.0065, "f32": 0.0}
_ACTIONS = ("rounded", "feedback", "scaled+feedback", "rotated+feedback", "outlier table")


def tensor(
    name: str, dtype: str, n_rows: int, n_cols: int, rng: random.Random, action: str = "rounded"
) -> TensorReport:
    """A tensor of a type with about the error that is usual for it."""
    error = _ERRORS[dtype] * rng.uniform(0.7, 1.4)
    return TensorReport(
        name=name,
        source=f"model.{name.lower()}.weight",
        type=dtype,
        n_rows=n_rows,
        n_cols=n_cols,
        bits_per_weight=_BITS[dtype],
        mse=error * error * 4e-4,
        max_error=error * 0.2,
        cosine=math.sqrt(max(0.0, 1 - error * error)),
        relative_error=error,
        outliers=rng.uniform(0, 0.004),
        action="exact" if error == 0 else action,
        output_error=error * error * rng.uniform(0.2, 0.9) if n_rows > 1 else None,
    )


def full_quality(n_layers: int = 12, seed: int = 1) -> Quality:
    """A report with all that a calibrated mixed conversion measures."""
    rng = random.Random(seed)
    tensors = [tensor("EMBEDDING", "4bit", 32000, 1024, rng)]
    for layer in range(n_layers):
        is_edge = layer in (0, n_layers - 1)
        tensors.append(tensor(f"{layer}.ATTN_NORM", "f32", 1, 1024, rng))
        for kind, n_rows, n_cols in _MATRICES:
            types = ("4bit", "8bit") if is_edge or kind == "V" else ("2bit", "3bit", "3bit", "4bit")
            dtype, action = rng.choice(types), rng.choice(_ACTIONS)
            name = f"{layer}.{kind}"
            tensors.append(tensor(name, dtype, n_rows * 256, n_cols * 256, rng, action))
        tensors.append(tensor(f"{layer}.FFN_NORM", "f32", 1, 1024, rng))
    tensors += [tensor("FINAL_NORM", "f32", 1, 1024, rng), tensor("HEAD", "8bit", 32000, 1024, rng)]
    layers = []
    for layer in range(n_layers):
        edge = min(layer, n_layers - 1 - layer)
        kl = rng.uniform(0.02, 0.09) + 2.4 * math.exp(-1.6 * edge)
        layers.append(LayerReport(layer, kl, 1 - 0.4 * kl / (1 + kl), kl))
    return Quality(
        tensors=tuple(tensors),
        layers=tuple(layers),
        evaluation=Evaluation(
            text="tinystories-dev.txt",
            tokens=131072,
            ctx_tokens=512,
            protocol="strided",
            perplexity=7.8312,
            perplexity_original=7.6541,
            kl_mean=0.02134,
            kl_p99=0.2711,
            top1_agreement=0.9284,
        ),
        calibration={
            "text": "tinystories-train.txt", "sha256": "9f" * 32, "tokens": 65536, "windows": 128,
            "damping": 0.01,
        },
    )  # fmt: skip
