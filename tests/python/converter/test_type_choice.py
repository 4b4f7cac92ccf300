# SPDX-License-Identifier: Apache-2.0
"""What is asked for becomes types and a text: sizes are kept, and nonsense is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from make import calibrated_models
from qsf.errors import QsfArgumentError, QsfConversionError, QsfIOError
from qsf.file.layout import Dtype, Role, TensorType
from qsf.file.reader import Reader
from qsf_converter import meta
from qsf_converter.calibrate.texts import (
    CalibrationText,
    cut_samples,
    read_calibration_text,
    read_texts,
)
from qsf_converter.calibrate.type_choice import mixed_policy
from qsf_converter.convert import convert
from qsf_converter.request import Request

MB = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("model")
    calibrated_models.write_text(folder / "text.txt")
    return calibrated_models.small_llama(folder / "m", tiny_llama_dir, n_layers=2)


def text_of(model: Path, path: Path | str, n_tokens: int = 512) -> CalibrationText:
    with calibrated_models.planned(model) as (source, _):
        found = read_calibration_text(
            source, Request("4bit", calibration=str(path), calibration_tokens=n_tokens)
        )
    assert found is not None
    return found


def types_of(file: Path) -> dict[str, Dtype]:
    """Of the matrices, by their names."""
    found = {}
    with Reader(file) as reader:
        for t in reader.tensors:
            if t.dtype != Dtype.F32:
                unit = reader.units[t.unit_idx].id
                layer = f"{unit.layer}." if unit.role == Role.LAYER else ""
                found[layer + TensorType(t.type).name] = Dtype(t.dtype)
    return found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Request("5bit"), "5bit is unknown"),
        (Request("Q4_K_M"), "Q4_K_M is llama.cpp's; use quant type 4bit"),
        (Request("4bit", "Q6_K"), "Q6_K is llama.cpp's; use embed type 8bit"),
        (Request("4bit", "mixed"), "embed type mixed"),
        (Request("4bit", target_bytes=MB), "quant type mixed, not 4bit"),
        (Request("2bit", target_bpw=4), "quant type mixed, not 2bit"),
        (Request("mixed", target_bytes=MB, target_bpw=4), "given twice"),
        (Request("mixed", target_bytes=0), "not above zero"),
        (Request("mixed", target_bytes=-5), "not above zero"),
        (Request("mixed", target_bpw=0), "0 bits a weight is not above 0 and at most 32"),
        (Request("mixed", target_bpw=-1), "-1 bits a weight"),
        (Request("mixed", target_bpw=33), "33 bits a weight"),
        (Request("mixed", target_bpw=float("nan")), "nan bits a weight"),
        (Request("mixed", target_bpw=float("inf")), "inf bits a weight"),
        (
            Request("4bit", calibration="t", calibration_tokens=511),
            "511 calibration tokens are too",
        ),
        (Request("4bit", calibration="t", calibration_tokens=0), "0 calibration tokens"),
        (Request("4bit", calibration="t", calibration_tokens=-7), "-7 calibration tokens"),
    ],
)
def test_what_does_not_go_together_is_refused(options: Request, message: str) -> None:
    with pytest.raises(QsfArgumentError, match=re.escape(message)):
        options.check()


@pytest.mark.parametrize(
    "options",
    [
        Request("4bit", "f16"),
        Request("mixed"),
        Request("mixed", "4bit", "bundled", 512),
        Request("mixed", target_bytes=1),
        Request("mixed", target_bpw=32),
    ],
)
def test_what_goes_together_is_not(options: Request) -> None:
    options.check()


@pytest.mark.parametrize("embed_type", [None, "8bit"])
def test_mixed_alone_is_the_table(embed_type: str | None, model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "out.qsf", quant_type="mixed", embed_type=embed_type)
    found = types_of(tmp_path / "out.qsf")
    with calibrated_models.planned(model) as (_, plan):
        wanted = dict(mixed_policy(plan.targets).by_name)
    if embed_type is not None:
        wanted.update(EMBEDDING=Dtype.Q8, HEAD=Dtype.Q8)
    assert found == wanted
    with Reader(tmp_path / "out.qsf") as reader:
        assert reader.header.dtype == Dtype.MIXED
        assert {unit.dtype for unit in reader.layers} == {Dtype.MIXED}


def test_mixed_with_a_text_is_no_larger_than_the_table(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "table.qsf", quant_type="mixed")
    report = convert(
        model,
        tmp_path / "out.qsf",
        quant_type="mixed",
        calibration=model.parent / "text.txt",
        calibration_tokens=512,
    )
    # The text's own facts come in addition, and are no weights.
    quality = report.quality.meta()
    n_bytes = len(json.dumps({k: v for k, v in quality.items() if k != "tensors"}))
    most = (tmp_path / "table.qsf").stat().st_size + n_bytes + 8192
    assert (tmp_path / "out.qsf").stat().st_size <= most
    assert types_of(tmp_path / "out.qsf") != types_of(tmp_path / "table.qsf")


def bounds(model: Path, tmp_path: Path, **options: Any) -> int:
    """The smallest size in bytes that is said to be possible."""
    with pytest.raises(QsfConversionError) as caught:
        convert(model, tmp_path / "none.qsf", quant_type="mixed", target_size=10 / MB, **options)
    said = re.fullmatch(
        r"a file of 0\.00 MB is too small for this model: the smallest has ([\d.]+) MB .*",
        str(caught.value),
    )
    assert said is not None, caught.value
    assert list(tmp_path.iterdir()) == []
    return int(float(said[1]) * MB)


@pytest.mark.parametrize("embed_type", [None, "4bit", "f16"])
def test_a_size_is_kept(embed_type: str | None, model: Path, tmp_path: Path) -> None:
    least = bounds(model, tmp_path, embed_type=embed_type)
    sizes = []
    for more in (0, 5000, 20000, 50000, 90000, 1 << 30):
        out = tmp_path / "out.qsf"
        convert(
            model, out, quant_type="mixed", embed_type=embed_type, target_size=(least + more) / MB,
            force=True,
        )  # fmt: skip
        sizes.append(out.stat().st_size)
        assert sizes[-1] <= least + more
        found = types_of(out)
        if embed_type is not None:
            wanted = Dtype.F16 if embed_type == "f16" else Dtype.Q4
            assert {found["EMBEDDING"], found["HEAD"]} == {wanted}
    assert sizes == sorted(sizes)
    assert len(set(sizes)) >= 4
    # What is left over is less than what some tensor would take, and the report's upper bound.
    assert least + 20000 - sizes[2] < 16000
    assert set(found.values()) <= {Dtype.Q8, Dtype.F16, Dtype.Q4}


def test_bits_a_weight_are_those_of_the_file(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.qsf"
    with calibrated_models.planned(model) as (_, plan):
        n_weights = sum(t.n_rows * t.n_cols for t in plan.targets)
    for bpw in (31.5, 32.0):
        report = convert(model, out, quant_type="mixed", target_bpw=bpw, force=True)
        assert report.n_weights == n_weights
        assert out.stat().st_size * 8 / n_weights <= bpw
    with pytest.raises(QsfConversionError, match="bits a weight"):
        convert(model, out, quant_type="mixed", target_bpw=2, force=True)


def test_what_meta_will_say_of_the_text_is_in_the_size(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The name stands in META twice, and every one of its characters takes six there.
    text = calibrated_models.write_text(tmp_path / ("\x01" * 250 + ".txt"))
    out = tmp_path / "out.qsf"
    foreseen: list[int] = []
    section_bytes = meta.section_bytes

    def noted(*arguments: Any) -> dict[str, int]:
        sizes: dict[str, int] = section_bytes(*arguments)
        foreseen.append(sizes["META"] - meta._COMPRESSION_BYTES)
        return sizes

    monkeypatch.setattr(meta, "section_bytes", noted)
    most = 1 << 20
    convert(
        model, out, quant_type="mixed", target_size=most / MB, calibration=text,
        calibration_tokens=512, embed_type="8bit",
    )  # fmt: skip
    assert out.stat().st_size <= most
    with Reader(out) as reader:
        assert len(reader.read_section("META")) <= foreseen[0]


def test_an_impossible_size_is_refused_before_the_work(model: Path, tmp_path: Path) -> None:
    least = bounds(model, tmp_path)

    def phase(name: str) -> Callable[[int, int], None]:
        pytest.fail(f"began with {name}")

    text = model.parent / "text.txt"
    with pytest.raises(QsfConversionError, match=r"the smallest has [\d.]+ MB"):
        convert(
            model, tmp_path / "out.qsf", quant_type="mixed", calibration=text,
            target_size=(least // 2) / MB, phase=phase,
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == []


# ---- the text ----


def rows_of(tokens: NDArray[np.int32]) -> set[bytes]:
    return {row.tobytes() for row in tokens}


@pytest.mark.parametrize("n_tokens", [512, 1000, 1500])
def test_held_out_samples_are_others_than_the_fitted(n_tokens: int, model: Path) -> None:
    path = model.parent / "text.txt"
    found = text_of(model, path, n_tokens)
    assert found.fitted.shape[1] == found.held_out.shape[1] == 64
    assert len(found.held_out) == max(1, n_tokens // 64 // 8)
    assert len(found.fitted) == n_tokens // 64
    n = len(found.fitted) + len(found.held_out)
    assert len(rows_of(found.fitted) | rows_of(found.held_out)) == n
    with calibrated_models.planned(model) as (source, _):
        assert source.tokenizer is not None
        header = source.facts.header
        whole = cut_samples(
            source.tokenizer, read_texts(path), n_tokens=64, max_samples=n,
            bos_id=header.bos_id, eos_id=header.eos_id,
        )  # fmt: skip
    assert rows_of(whole) == rows_of(found.fitted) | rows_of(found.held_out)
    again = text_of(model, path, n_tokens)
    np.testing.assert_array_equal(again.fitted, found.fitted)
    np.testing.assert_array_equal(again.held_out, found.held_out)
    assert again.sha256 == found.sha256
    # Spread over the text, not its end.
    order = [row.tobytes() for row in whole]
    at = [order.index(row.tobytes()) for row in found.held_out]
    assert max(np.diff([-1, *at, n])) <= n // len(at) + 1 + n % len(at)


def test_a_short_text_is_taken_whole(model: Path, tmp_path: Path) -> None:
    found = text_of(model, calibrated_models.write_text(tmp_path / "t.txt", 180), 65536)
    assert (len(found.fitted), len(found.held_out)) == (len(found.fitted), 1)
    assert 1 <= len(found.fitted) <= 6


def test_without_a_text_there_are_no_samples(model: Path) -> None:
    with calibrated_models.planned(model) as (source, _):
        assert read_calibration_text(source, Request("4bit")) is None


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("gone.txt", None, QsfIOError, "gone.txt: no such file"),
        ("empty.txt", b"", QsfConversionError, "empty.txt: no text in its 0 bytes"),
        ("spaces.txt", b" \n\n", QsfConversionError, "spaces.txt: no text in its 3 bytes"),
        ("binary.txt", b"\x00\xff\xfe\x81" * 90, QsfConversionError, "line 1 is not UTF-8"),
        ("short.txt", b"Once upon a time", QsfConversionError, "at least 63 are needed"),
        ("sample.txt", b"the cat " * 45, QsfConversionError, "at least two samples of 64"),
        ("bad.jsonl", b'{"text": "a"}\n{', QsfConversionError, "bad.jsonl: line 2: not JSON"),
        ("keys.jsonl", b'{"words": "a"}', QsfConversionError, 'no string called "text"'),
    ],
)
def test_a_text_that_is_none_is_one_line(
    name: str,
    content: bytes | None,
    error: type[Exception],
    message: str,
    model: Path,
    tmp_path: Path,
) -> None:
    (tmp_path / "out").mkdir()
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error) as caught:
        convert(model, tmp_path / "out" / "o.qsf", calibration=path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_folder_is_no_text(model: Path, tmp_path: Path) -> None:
    with pytest.raises(QsfIOError, match="Is a directory"):
        convert(model, tmp_path / "o.qsf", calibration=tmp_path)


def test_a_model_without_a_tokenizer_cannot_be_calibrated(
    tiny_llama_dir: Path, tmp_path: Path
) -> None:
    folder = calibrated_models.small_llama(tmp_path / "m", tiny_llama_dir)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(QsfConversionError, match=r"there is no tokenizer\.json"):
        convert(folder, tmp_path / "o.qsf", calibration="bundled")


def test_a_tokenizer_of_another_model_is_noticed(tiny_llama_dir: Path, tmp_path: Path) -> None:
    folder = calibrated_models.small_llama(tmp_path / "m", tiny_llama_dir, n_vocab=150)
    with pytest.raises(
        QsfConversionError,
        match=r"makes the token \d+, and the model has 150 tokens",
    ):
        convert(folder, tmp_path / "o.qsf", calibration="bundled", calibration_tokens=512)
