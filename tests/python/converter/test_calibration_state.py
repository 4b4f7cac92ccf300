# SPDX-License-Identifier: Apache-2.0
"""What a calibration keeps, interrupted anywhere and damaged anyhow; the texts that it reads."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from make import calibrated_models
from make.refusals import refusals
from make.stored import Reader
from qsf.errors import QsfConversionError, QsfIOError
from qsf.file.layout import Dtype
from qsf_converter.calibrate import texts
from qsf_converter.calibrate.sensitivity import LayerImportance, Sensitivity
from qsf_converter.calibrate.state import CalibrationState, folder_of
from qsf_converter.calibrate.texts import bundled_text, cut_samples, read_texts
from qsf_converter.convert import convert

N_LAYERS = 3


class Interruption(BaseException):
    """As a signal raises it: not an Exception."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("model")
    calibrated_models.write_text(folder / "text.txt")
    return calibrated_models.small_llama(folder / "m", tiny_llama_dir, n_layers=N_LAYERS)


def run(model: Path, out: Path, **options: Any) -> bytes:
    arguments: dict[str, Any] = {
        "quant_type": "3bit",
        "calibration": model.parent / "text.txt",
        "calibration_tokens": 512,
        **options,
    }
    convert(model, out, **arguments)
    return out.read_bytes()


@pytest.fixture(scope="module")
def wanted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a run that nothing disturbed."""
    return run(model, tmp_path_factory.mktemp("whole") / "out.qsf")


def stop_after(monkeypatch: pytest.MonkeyPatch, n_layers: int) -> None:
    """Interrupt a run as soon as so many layers are saved."""
    save = CalibrationState.save

    def saved(self: CalibrationState, *args: Any) -> None:
        save(self, *args)
        if self.n_layers == n_layers:
            raise Interruption

    monkeypatch.setattr(CalibrationState, "save", saved)


def interrupted(model: Path, out: Path, n_layers: int, **options: Any) -> Path:
    """A state with so many layers."""
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, n_layers)
        with pytest.raises(Interruption):
            run(model, out, **options)
    assert not out.exists()
    return folder_of(out)


def layers_rounded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Layers that are saved from now on."""
    found: list[int] = []
    save = CalibrationState.save

    def noted(self: CalibrationState, layer: int, *rest: Any) -> None:
        found.append(layer)
        save(self, layer, *rest)

    monkeypatch.setattr(CalibrationState, "save", noted)
    return found


def nothing_but(out: Path) -> bool:
    return sorted(path.name for path in out.parent.iterdir()) == [out.name]


@pytest.mark.parametrize("n_layers", range(1, N_LAYERS + 1))
def test_what_is_done_is_not_done_again(
    n_layers: int, model: Path, wanted: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.qsf"
    state = interrupted(model, out, n_layers)
    names = sorted(path.name for path in state.iterdir())
    assert names == [
        "key",
        *(f"layer-{n:04}.npz" for n in range(n_layers)),
        "sensitivity.json",
        f"streams-{n_layers - 1:04}.npz",
    ]
    rounded = layers_rounded(monkeypatch)
    done: list[tuple[int, int]] = []
    phases: list[str] = []

    def phase(name: str) -> Callable[[int, int], None]:
        phases.append(name)
        return lambda _done, _total: None

    found = run(model, out, progress=lambda *now: done.append(now), phase=phase)
    assert found == wanted
    assert rounded == list(range(n_layers, N_LAYERS))
    assert not phases  # which types layers get was not measured, and the arithmetic is not here
    assert done == sorted(done)
    assert done[-1][0] == done[-1][1]
    assert nothing_but(out)


def test_interrupted_within_layers(model: Path, wanted: bytes, tmp_path: Path) -> None:
    """At every call of progress, each of which comes a step later than the one before."""
    out = tmp_path / "out.qsf"
    n_calls = 0
    while not out.exists():
        n_calls += 7
        assert n_calls < 60
        left = n_calls

        def count(_done: int, _total: int) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Interruption

        with contextlib.suppress(Interruption):
            run(model, out, progress=count)
        assert out.exists() or folder_of(out).is_dir()
    assert out.read_bytes() == wanted
    assert nothing_but(out)


def test_interrupted_while_layers_are_measured(model: Path, wanted: bytes, tmp_path: Path) -> None:
    out = tmp_path / "out.qsf"

    def phase(_name: str) -> Callable[[int, int], None]:
        raise Interruption

    with pytest.raises(Interruption):
        run(model, out, phase=phase)
    assert list(tmp_path.iterdir()) == []
    assert run(model, out) == wanted


def flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 0x10
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "cut to nothing": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "garbage": lambda path: path.write_bytes(b"{" * 5000),
    "first byte": lambda path: flip(path, 0),
    "header": lambda path: flip(path, 0.01),
    "middle": lambda path: flip(path, 0.5),
    "last byte": lambda path: flip(path, 1),
    "missing": Path.unlink,
}


@pytest.fixture(scope="module")
def half_done(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return interrupted(model, tmp_path_factory.mktemp("half") / "out.qsf", 2)


@pytest.mark.parametrize("damage", list(DAMAGES))
@pytest.mark.parametrize(
    "name", ["key", "layer-0000.npz", "layer-0001.npz", "streams-0001.npz", "sensitivity.json"]
)
def test_what_is_damaged_is_not_believed(
    damage: str, name: str, model: Path, half_done: Path, wanted: bytes, tmp_path: Path
) -> None:
    out = tmp_path / "out.qsf"
    state = folder_of(out)
    shutil.copytree(half_done, state)
    DAMAGES[damage](state / name)
    # Each conversion takes a while: first what of the state is believed, for all of them.
    key = (half_done / "key").read_text("utf-8")
    found = CalibrationState(state, key)
    assert found.n_layers == (2 if name == "sensitivity.json" else 0)
    if name == "sensitivity.json":
        measured = Sensitivity({}, {}, {}, (LayerImportance(0, 0.5, 0.25),), 7)
        assert found.sensitivity(lambda: measured) == measured
        # And now it is kept.
        assert found.sensitivity(lambda: pytest.fail("measured again")) == measured
    elif (damage, name) == ("header", "streams-0001.npz"):
        assert run(model, out) == wanted


def test_a_digit_in_what_was_measured_is_not_believed(half_done: Path, tmp_path: Path) -> None:
    """It is still JSON, and would give another file."""
    state = tmp_path / "state"
    shutil.copytree(half_done, state)
    path = state / "sensitivity.json"
    text = path.read_bytes()
    at = text.index(b'"kl_skipped": ') + 14
    path.write_bytes(text[:at] + b"9" + text[at + 1 :])
    measured = Sensitivity({}, {}, {}, (), 7)
    found = CalibrationState(state, (half_done / "key").read_text("utf-8"))
    assert found.sensitivity(lambda: measured) == measured


def test_every_type_of_what_was_measured_comes_back(tmp_path: Path) -> None:
    measured = Sensitivity(
        kl={"0.Q": {Dtype.Q2: 0.1, Dtype.Q8: 1e-9}},
        output_error={"0.Q": {Dtype.Q2: 0.3, Dtype.Q8: 1 / 3}},
        measured={"0.Q": (Dtype.Q2,)},
        layers=(LayerImportance(0, 0.5, 0.25), LayerImportance(1, 0.75, 1 / 7)),
        n_tokens=77,
    )
    state = CalibrationState(tmp_path / "state", "key")
    assert state.sensitivity(lambda: measured) == measured
    again = CalibrationState(tmp_path / "state", "key")
    assert again.sensitivity(lambda: pytest.fail("measured again")) == measured
    other = CalibrationState(tmp_path / "state", "another key")
    assert not (tmp_path / "state").exists()
    nothing = Sensitivity({}, {}, {}, (), 0)
    assert other.sensitivity(lambda: nothing) == nothing


@pytest.mark.parametrize(
    "options", [{"quant_type": "4bit"}, {"calibration_tokens": 640}, {"calibration": "other"}]
)
def test_other_options_are_another_calibration(
    options: dict[str, Any],
    model: Path,
    half_done: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out.qsf"
    shutil.copytree(half_done, folder_of(out))
    if "calibration" in options:
        other = calibrated_models.write_text(tmp_path / "text.txt", seed=6)
        options = {"calibration": other}
    rounded = layers_rounded(monkeypatch)
    found = run(model, out, **options)
    assert rounded == list(range(N_LAYERS))
    assert found == run(model, tmp_path / "plain.qsf", **options)


def test_threads_and_compression_are_not(
    model: Path, half_done: Path, wanted: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.qsf"
    shutil.copytree(half_done, folder_of(out))
    rounded = layers_rounded(monkeypatch)
    assert run(model, out, threads=1) == wanted
    assert rounded == [2]


def test_a_folder_of_somebody_else_is_left_alone(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.qsf"
    state = folder_of(out)
    state.mkdir()
    (state / "thesis.txt").write_text("mine")
    (state / "key").write_text("mine")
    with pytest.raises(QsfIOError, match=r"out\.qsf\.calibration: .* it holds thesis.txt; move it"):
        run(model, out)
    assert sorted(path.name for path in state.iterdir()) == ["key", "thesis.txt"]
    assert not out.exists()


@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_where_the_state_would_lie(is_link: bool, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.qsf"
    if is_link:
        (tmp_path / "elsewhere").mkdir()
        folder_of(out).symlink_to(tmp_path / "elsewhere")
    else:
        folder_of(out).write_text("mine")
    with pytest.raises(QsfIOError, match=r"out\.qsf\.calibration: .* it is no folder; move it"):
        run(model, out)
    assert folder_of(out).is_symlink() is is_link
    assert not out.exists()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_state_that_cannot_be_written(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.qsf"
    folder_of(out).mkdir(mode=0o555)
    with pytest.raises(QsfIOError, match=r"out\.qsf\.calibration/.*denied"):
        run(model, out)


@pytest.mark.parametrize("kind", ["streams", "layer"])
def test_a_full_disk_ends_the_run_and_the_next_goes_on(
    kind: str, model: Path, wanted: bytes, tmp_path: Path
) -> None:
    out = tmp_path / "out.qsf"
    savez = np.savez
    n_saved = {"streams": 0, "layer": 0}

    def full(file: Any, **arrays: Any) -> None:
        what = "streams" if "exact" in arrays else "layer"
        n_saved[what] += 1
        if what == kind and n_saved[what] == 2:
            file.write(b"a part")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        savez(file, **arrays)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "savez", full)
        with pytest.raises(QsfIOError, match=rf"{kind}-0001.npz: No space left"):
            run(model, out)
    assert not [path for path in folder_of(out).iterdir() if path.suffix == ".partial"]
    with pytest.MonkeyPatch.context() as patch:
        rounded = layers_rounded(patch)
        assert run(model, out) == wanted
    assert rounded == [1, 2]
    assert nothing_but(out)


# The command in a process that gets a signal once two layers are saved.
SIGNALLED = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from qsf_converter.calibrate.state import CalibrationState
save = CalibrationState.save
def saved(self, *args):
    save(self, *args)
    if self.n_layers == 2:
        os.kill(os.getpid(), signal.SIGINT)
CalibrationState.save = saved
from qsf_converter.cli import main
main()
"""


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_signal_keeps_what_is_done(model: Path, wanted: bytes, tmp_path: Path) -> None:
    out, state = tmp_path / "o.qsf", tmp_path / "o.qsf.calibration"
    options = ["--calibration", model.parent / "text.txt", "--calibration-tokens", "512", "-q"]
    command = [
        sys.executable,
        "-c",
        SIGNALLED,
        *map(str, (model, out, "--quant-type", "3bit", *options)),
    ]
    for code, said, left in (
        (130, f"qsf-convert: error: interrupted; the same command continues from there ({state})\n",
         state),
        (0, "", out),  # where the first layer is saved again, the signal comes again
    ):  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
        assert (done.returncode, done.stdout, done.stderr) == (code, "", said)
        assert list(tmp_path.iterdir()) == [left]
    (tmp_path / "w.qsf").write_bytes(wanted)  # which has not measured the arithmetic
    with Reader(out) as found, Reader(tmp_path / "w.qsf") as expected:
        for i in range(len(expected.units)):
            assert found.read_unit(i) == expected.read_unit(i)


# ---- texts ----
BOS, EOS = 0, 1


@pytest.fixture(scope="module")
def tokenizer_json(tiny_llama_dir: Path) -> bytes:
    return (tiny_llama_dir / "tokenizer.json").read_bytes()


def ids_of(tokenizer_json: bytes, text: str) -> list[int]:
    library = tokenizers.Tokenizer.from_buffer(tokenizer_json)
    library.encode_special_tokens = True
    return list(library.encode(text, add_special_tokens=False).ids)


def text_file(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# ---- files ----
@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "One.\n\n\nTwo.\n", ["One.\n\n\nTwo.\n"]),
        ("a.txt", b"\xef\xbb\xbfmark", ["mark"]),
        ("a", "One\n<|endoftext|>\nTwo <|endoftext|>\r\n<|endoftext|>\r\n  \n", ["One\n",
            "Two <|endoftext|>\r\n"]),
        ("a.jsonl", '"x"\n\n{"text": "y", "prompt": "no"}\r\n{"content": "z"}', ["x", "y", "z"]),
        ("a.jsonl", '{"text": null, "prompt": "p"}\n{"text": " "}\n"\u2028"\n"a\u2028b"\n',
            ["p", "a\u2028b"]),
        ("a.JSON", '["x", {"text": "y"}]', ["x", "y"]),
    ],
)  # fmt: skip
def test_files(tmp_path: Path, name: str, content: str | bytes, expected: list[str]) -> None:
    assert read_texts(text_file(tmp_path, name, content)) == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *refusals("texts"),
        ("a.txt", b"ok\nno \xff\n", "line 2 is not UTF-8 (byte 0xff at offset 6)"),
        ("a.jsonl", "[" * 100_000, "line 1: nested 100000 deep"),
    ],
)  # fmt: skip
def test_refused_files(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    path = text_file(tmp_path, name, content)
    with pytest.raises(QsfConversionError) as caught:
        read_texts(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_the_system_refuses(tmp_path: Path) -> None:
    with pytest.raises(QsfIOError, match="no such file"):
        read_texts(tmp_path / "absent.txt")
    with pytest.raises(QsfIOError):
        read_texts(tmp_path)


# ---- samples ----
def test_samples_hold_the_texts_in_order(tokenizer_json: bytes) -> None:
    both = ["A cat sat on a mat, and it was happy. " * 30, "Dogs <|end_of_text|> bark. " * 30]
    expected = [*ids_of(tokenizer_json, both[0]), EOS, *ids_of(tokenizer_json, both[1])]
    found = cut_samples(tokenizer_json, both, n_tokens=65, max_samples=1000, bos_id=BOS, eos_id=EOS)
    assert found.dtype == np.int32
    assert found.shape == (len(expected) // 64, 65)
    assert (found[:, 0] == BOS).all()
    assert found[:, 1:].ravel().tolist() == expected[: found[:, 1:].size]
    assert expected.count(EOS) == 1  # what only reads like the token is text
    bare = cut_samples(tokenizer_json, both, n_tokens=64, max_samples=1000)  # no BOS, no EOS
    expected.remove(EOS)
    assert bare.ravel().tolist() == expected[: len(expected) // 64 * 64]


def test_samples_are_spread_evenly(tokenizer_json: bytes) -> None:
    text = " ".join(str(i) for i in range(3000))
    every = cut_samples(tokenizer_json, [text], n_tokens=64, max_samples=10_000, bos_id=BOS)
    some = cut_samples(tokenizer_json, [text], n_tokens=64, max_samples=7, bos_id=BOS)
    at = [i * len(every) // 7 for i in range(7)]
    assert len(every) > 70
    assert (some == every[at]).all()
    again = cut_samples(tokenizer_json, [text], n_tokens=64, max_samples=7, bos_id=BOS)
    assert (some == again).all()


def test_a_short_text_makes_one_shorter_sample(tokenizer_json: bytes) -> None:
    text = "A cat sat on a mat, and it was happy. " * 6
    ids = ids_of(tokenizer_json, text)
    assert 64 <= len(ids) < 200
    found = cut_samples(tokenizer_json, [text], n_tokens=512, max_samples=8, bos_id=BOS)
    assert found.tolist() == [[BOS, *ids]]


def test_too_little_text(tokenizer_json: bytes) -> None:
    ids = ids_of(tokenizer_json, "A cat sat.")
    message = f"the text has {len(ids)} tokens; at least 63 are needed, and 4088 for 8 samples of"
    with pytest.raises(QsfConversionError, match=message):
        cut_samples(tokenizer_json, ["A cat sat."], n_tokens=512, max_samples=8, bos_id=BOS)
    with pytest.raises(QsfConversionError, match="the text has 0 tokens"):
        cut_samples(tokenizer_json, [], n_tokens=512, max_samples=8)
    with pytest.raises(QsfConversionError, match="hold no text"):
        cut_samples(tokenizer_json, ["a"], n_tokens=1, max_samples=8, bos_id=BOS)
    assert cut_samples(tokenizer_json, ["A cat sat."], n_tokens=3, max_samples=1).shape == (1, 3)
    with pytest.raises(QsfConversionError, match="text 2 is not valid Unicode"):
        cut_samples(tokenizer_json, ["fine", "\ud800"], n_tokens=8, max_samples=1)


def test_long_texts_are_encoded_in_pieces_without_loss(
    tokenizer_json: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f"Line {i} of a long text.\n" for i in range(400)) + "word " * 400 + "x" * 900
    whole = cut_samples(tokenizer_json, [text], n_tokens=64, max_samples=10_000)
    monkeypatch.setattr(texts, "_PIECE_CHARS", 500)
    pieces = list(texts._pieces(text))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 500
    assert len(pieces) > 20
    cut = cut_samples(tokenizer_json, [text.rstrip("x")], n_tokens=64, max_samples=10_000)
    assert (cut == whole[: len(cut)]).all()  # no piece ends within a token


def test_of_far_too_much_text_a_part_is_taken_everywhere(
    tokenizer_json: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "_PIECE_CHARS", 50)
    many = [f"<{i:05}> " * (i % 17) for i in range(4000)]
    taken = texts._spread(many, 0)
    chars = "".join(piece for text in taken for piece in text)
    assert 0.9 * 64 * 50 < len(chars) <= 64 * 50
    numbers = [int(word.strip("<>")) for word in chars.split() if len(word) == 7]
    assert max(np.diff([0, *numbers, 4000])) < 300
    assert numbers == sorted(numbers)


# ---- the bundled text ----
def test_bundled_text(tokenizer_json: bytes) -> None:
    text = bundled_text()
    assert 120_000 <= len(text.encode()) <= 200_000
    assert "\r" not in text
    assert "\ufffd" not in text
    assert "Gutenberg" not in text
    found = cut_samples(tokenizer_json, [text], n_tokens=256, max_samples=128, bos_id=BOS)
    assert found.shape == (128, 256)


def test_every_part_of_the_bundled_text_has_a_source(project_root: Path) -> None:
    sources = (
        project_root / "converter/qsf_converter/calibrate/CALIBRATION_TEXT_SOURCES.md"
    ).read_text("utf-8")
    assert json.dumps(len(bundled_text().encode())) in sources.replace(",", "")
