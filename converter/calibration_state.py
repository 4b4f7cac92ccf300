"""What a calibration has done so far, in a folder beside the file that it makes.

After each layer its tensors and both residual streams are saved; a later call with the same
model, text and options goes on from there and makes the same file, bit for bit. Each file
appears complete or not at all; one that cannot be read ends what can be continued.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from qsf.converter.checkpoint import Float32Array
from qsf.converter.outliers import Entries
from qsf.converter.pieces import Piece
from qsf.converter.plan import Target
from qsf.converter.quantisers import ErrorSums
from qsf.converter.sensitivity import LayerImportance, Sensitivity
from qsf.errors import QsfIOError
from qsf.format import Dtype

_KEY: Final = "key"
_BAD: Final = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)


def folder_of(out: Path) -> Path:
    """Return where the state of the file ``out`` lies."""
    return out.with_name(f"{out.name}.calibration")


class CalibrationState:
    """The saved layers of one calibration."""

    def __init__(self, folder: Path, key: str) -> None:
        """Open the folder, or begin an empty one. ``key`` says what the state is of.

        A folder with another key is of another calibration and is emptied. Raises QsfIOError.
        """
        self._folder = folder
        try:
            if self._read_key() != key:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                (folder / _KEY).write_text(key, encoding="utf-8")
        except OSError as error:
            raise QsfIOError(f"{folder}: {error.strerror or error}") from error
        self.n_layers = self._count()

    def _read_key(self) -> str | None:
        try:
            return (self._folder / _KEY).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None

    def _count(self) -> int:
        """The last layer with streams and all layers up to it; 0 if there is none."""
        n = 0
        while self._layer(n + 1).exists():
            n += 1
        while n > 0 and not self._is_whole(n):
            n -= 1
        return n

    def _is_whole(self, n: int) -> bool:
        try:
            self.streams(n)
            for unit_idx in range(1, n + 1):
                with zipfile.ZipFile(self._layer(unit_idx)) as file:
                    if file.testzip() is not None:
                        return False
        except _BAD:
            return False
        return True

    def _layer(self, unit_idx: int) -> Path:
        return self._folder / f"layer-{unit_idx:04}.npz"

    def _streams(self, unit_idx: int) -> Path:
        return self._folder / f"streams-{unit_idx:04}.npz"

    def streams(self, unit_idx: int | None = None) -> tuple[Float32Array, Float32Array]:
        """Return the residual streams behind the last layer that is done."""
        with np.load(self._streams(unit_idx or self.n_layers), allow_pickle=False) as arrays:
            return arrays["exact"], arrays["rounded"]

    def pieces(self, unit_idx: int, targets: Sequence[Target]) -> Iterator[tuple[Piece, bytes]]:
        """Yield the tensors of a layer as they were saved."""
        with np.load(self._layer(unit_idx), allow_pickle=False) as arrays:
            facts = json.loads(arrays["facts"].tobytes())
            for i, target in enumerate(targets):
                piece = Piece(target, 0, target.n_rows)
                piece.errors = ErrorSums(**facts[i]["errors"])
                piece.action = facts[i]["action"]
                piece.output_error = facts[i]["output_error"]
                if f"rows{i}" in arrays:
                    piece.entries = Entries(
                        arrays[f"rows{i}"], arrays[f"cols{i}"], arrays[f"values{i}"]
                    )
                yield piece, arrays[f"data{i}"].tobytes()

    def save(
        self,
        unit_idx: int,
        written: Sequence[tuple[Piece, bytes]],
        streams: tuple[Float32Array, Float32Array],
    ) -> None:
        """Save a layer and the streams behind it. Raises QsfIOError, also when the disk is full."""
        facts = [
            {
                "errors": dataclasses.asdict(piece.errors),
                "action": piece.action,
                "output_error": piece.output_error,
            }
            for piece, _ in written
        ]
        arrays: dict[str, Any] = {
            f"data{i}": np.frombuffer(data, np.uint8) for i, (_, data) in enumerate(written)
        }
        for i, (piece, _) in enumerate(written):
            if piece.entries is not None:
                arrays[f"rows{i}"] = piece.entries.rows
                arrays[f"cols{i}"] = piece.entries.cols
                arrays[f"values{i}"] = piece.entries.values
        arrays["facts"] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
        self._put(self._streams(unit_idx), {"exact": streams[0], "rounded": streams[1]})
        self._put(self._layer(unit_idx), arrays)
        with contextlib.suppress(OSError):
            self._streams(unit_idx - 1).unlink()
        self.n_layers = unit_idx

    def _put(self, path: Path, arrays: dict[str, Any]) -> None:
        partial = path.with_suffix(".partial")
        try:
            with partial.open("wb") as file:
                np.savez(file, **arrays)
            partial.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise QsfIOError(f"{path}: {error.strerror or error}") from error

    def sensitivity(self, measure: Callable[[], Sensitivity]) -> Sensitivity:
        """Return what was measured before, or measure it now and keep it. Raises QsfIOError."""
        path = self._folder / "sensitivity.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return _sensitivity_of(json.loads(path.read_text(encoding="utf-8")))
        found = measure()
        partial = path.with_suffix(".partial")
        try:
            partial.write_text(json.dumps(dataclasses.asdict(found)), encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            raise QsfIOError(f"{path}: {error.strerror or error}") from error
        return found

    def remove(self) -> None:
        """Delete the folder: the file is made."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _sensitivity_of(fields: dict[str, Any]) -> Sensitivity:
    """Undo ``dataclasses.asdict`` and JSON, which writes the types' numbers as text."""

    def by_type(table: dict[str, dict[str, float]]) -> dict[str, dict[Dtype, float]]:
        return {
            name: {Dtype(int(dtype)): value for dtype, value in row.items()}
            for name, row in table.items()
        }

    return Sensitivity(
        kl=by_type(fields["kl"]),
        output_error=by_type(fields["output_error"]),
        measured={
            name: tuple(Dtype(dtype) for dtype in types)
            for name, types in fields["measured"].items()
        },
        layers=tuple(LayerImportance(**layer) for layer in fields["layers"]),
        n_tokens=fields["n_tokens"],
    )
