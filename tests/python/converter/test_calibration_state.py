# SPDX-License-Identifier: Apache-2.0
"""What a calibration keeps: interrupted anywhere and damaged anyhow, the file stays the same."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from make import calibrated_models
from qsf.errors import QsfConversionError, QsfIOError
from qsf.file.layout import Dtype
from qsf_converter.calibrate.sensitivity import LayerImportance, Sensitivity
from qsf_converter.calibrate.state import CalibrationState, folder_of
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
    assert phases == ["measuring the arithmetic"]  # of the whole file: it is not saved
    assert done == sorted(done)
    assert done[-1][0] == done[-1][1]
    assert nothing_but(out)


def test_interrupted_again_and_again(model: Path, wanted: bytes, tmp_path: Path) -> None:
    out = tmp_path / "out.qsf"
    for n_layers in range(1, N_LAYERS + 1):
        interrupted(model, out, n_layers)
    assert run(model, out) == wanted


def test_interrupted_within_layers(model: Path, wanted: bytes, tmp_path: Path) -> None:
    """At every call of progress, each of which comes a step later than the one before."""
    out = tmp_path / "out.qsf"
    n_calls = 0
    while not out.exists():
        n_calls += 3
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
    elif damage == "header":
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
    "options",
    [
        {"quant_type": "4bit"},
        {"embed_type": "4bit"},
        {"calibration_tokens": 640},
        pytest.param({"quant_type": "mixed"}, marks=pytest.mark.slow),
    ],
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
    rounded = layers_rounded(monkeypatch)
    found = run(model, out, **options)
    assert rounded == list(range(N_LAYERS))
    assert found == run(model, tmp_path / "plain.qsf", **options)


def test_another_text_or_model_is_another_calibration(
    model: Path, half_done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model.parent, copy)
    calibrated_models.write_text(copy / "text.txt", seed=6)
    out = copy / "out.qsf"
    shutil.copytree(half_done, folder_of(out))
    rounded = layers_rounded(monkeypatch)
    run(copy / "m", out)
    assert rounded == list(range(N_LAYERS))


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


def test_what_cannot_be_converted_leaves_no_state(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.qsf"
    with pytest.raises(QsfConversionError, match="too small"):
        run(model, out, quant_type="mixed", target_size=1000 / 2**20)
    assert list(tmp_path.iterdir()) == []
