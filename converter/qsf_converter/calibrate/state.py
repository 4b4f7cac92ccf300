"""The finished layers of a calibration, in a folder beside the output file.

After each layer its tensors and both residual streams are saved. A later call with the same
model, text and options continues from there and makes the same file, bit for bit. Each saved file
appears complete or not at all, and begins with the SHA-256 of the rest: a damaged file is ignored,
and the calibration continues from the last layer before it.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from qsf.errors import QsfIOError
from qsf.file.layout import Dtype
from qsf.foreign_json import read_json
from qsf_converter.calibrate.changes import Changes, pack, unpack
from qsf_converter.calibrate.sensitivity import LayerImportance, Sensitivity
from qsf_converter.calibrate.texts import CalibrationText
from qsf_converter.request import Request
from qsf_converter.rounding.outliers import Entries
from qsf_converter.rounding.pieces import Piece, RoundedPiece, RoundedTensor
from qsf_converter.rounding.plan import Target
from qsf_converter.rounding.quantisers import ErrorSums
from qsf_converter.sources.checkpoint import Float32Array
from qsf_converter.sources.source import Source

_KEY: Final = "key"
_OUR_NAMES: Final = re.compile(
    r"key|sensitivity\.(json|partial)|(layer|streams)-\d{4,}\.(npz|partial)"
)
_DIGEST_BYTES: Final = hashlib.sha256().digest_size
# Increased when the same model, text and options would give another file.
_STATE_VERSION: Final = 5


def folder_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.calibration")


def state_key(source: Source, request: Request, text: CalibrationText) -> str:
    """Return the text that identifies a calibration: equal keys make equal files.

    It contains the options that change the stored values, so neither threads nor compression.
    """
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in source.files]
    facts = {
        "version": _STATE_VERSION,
        "files": sorted(files),
        "tensors": [[t.name, t.shape, t.dtype] for t in source.checkpoint.tensors.values()],
        "quant_type": request.layer_type,
        "embed_type": request.embed_type,
        "options": request.meta_options(),
        "adapters": [adapter.meta() for adapter in source.adapters],
        "fitted": hashlib.sha256(text.fitted.tobytes()).hexdigest(),
        "held_out": hashlib.sha256(text.held_out.tobytes()).hexdigest(),
    }
    return json.dumps(facts)


class CalibrationState:
    def __init__(self, folder: Path, key: str) -> None:
        """Look for saved layers of the calibration that ``key`` identifies.

        A folder with another key belongs to another calibration and is removed. Raises QsfIOError,
        also when the folder holds anything but a calibration's state.
        """
        self._folder = folder
        self._key = key
        try:
            self._check_ours()
            if folder.is_dir() and self._read_key() != key:
                shutil.rmtree(folder)
        except OSError as error:
            raise QsfIOError(f"{folder}: {error.strerror or error}") from error
        self.n_layers = self._count()

    def _check_ours(self) -> None:
        """Refuse a folder that holds other files; a state with another key would be removed."""
        obstacle = ""
        if self._folder.is_symlink() or self._folder.is_file():
            obstacle = "it is no folder"
        elif self._folder.is_dir():
            names = [path.name for path in self._folder.iterdir()]
            others = [name for name in names if not _OUR_NAMES.fullmatch(name)]
            obstacle = f"it holds {min(others)}" if others else ""
        if obstacle:
            raise QsfIOError(
                f"{self._folder}: the calibration's state would lie there, but {obstacle}; move it,"
                " or choose another name for the output"
            )

    def _read_key(self) -> str | None:
        try:
            return (self._folder / _KEY).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None

    def _count(self) -> int:
        """The consecutive saved layers from the first one on, up to the last one with streams."""
        n_done = n = 0
        while self._is_whole(self._layer(n)):
            n_with_streams = n + 1 if self._is_whole(self._streams(n)) else n_done
            n_done, n = n_with_streams, n + 1
        return n_done

    def _is_whole(self, path: Path) -> bool:
        try:
            with path.open("rb") as file:
                wanted = file.read(_DIGEST_BYTES)
                return _digest_of_rest(file) == wanted
        except OSError:
            return False

    def _layer(self, layer: int) -> Path:
        return self._folder / f"layer-{layer:04}.npz"

    def _streams(self, layer: int) -> Path:
        return self._folder / f"streams-{layer:04}.npz"

    def _load(self, path: Path) -> dict[str, Any]:
        try:
            with path.open("rb") as file:
                file.seek(_DIGEST_BYTES)
                with np.load(file, allow_pickle=False) as arrays:
                    return dict(arrays)
        except OSError as error:
            raise QsfIOError(f"{path}: {error.strerror or error}") from error

    def streams(self) -> tuple[Float32Array, Float32Array]:
        arrays = self._load(self._streams(self.n_layers - 1))
        return arrays["exact"], arrays["rounded"]

    def tensors(self, layer: int, targets: Sequence[Target]) -> Iterator[RoundedTensor]:
        arrays = self._load(self._layer(layer))
        facts = read_json(arrays["facts"].tobytes(), has_nan=True)
        for i, target in enumerate(targets):
            outliers = None
            if f"rows{i}" in arrays:
                outliers = Entries(arrays[f"rows{i}"], arrays[f"cols{i}"], arrays[f"values{i}"])
            piece = RoundedPiece(
                Piece.whole(target),
                arrays[f"data{i}"].tobytes(),
                ErrorSums(**facts[i]["errors"]),
                outliers,
                facts[i]["output_error"],
            )
            yield RoundedTensor(target, (piece,), facts[i]["action"])

    def changes(self, layer: int) -> Changes:
        return unpack(self._load(self._layer(layer))["changes"].tobytes())

    def save(
        self,
        layer: int,
        tensors: Sequence[RoundedTensor],
        streams: tuple[Float32Array, Float32Array],
        changes: Changes,
    ) -> None:
        """Save a layer, of tensors of one piece each, and the streams after it.

        Raises QsfIOError, also when the disk is full.
        """
        facts = []
        arrays: dict[str, Any] = {}
        for i, tensor in enumerate(tensors):
            (piece,) = tensor.pieces
            facts.append(
                {
                    "errors": dataclasses.asdict(piece.errors),
                    "action": tensor.action,
                    "output_error": piece.output_error,
                }
            )
            arrays[f"data{i}"] = np.frombuffer(piece.data, np.uint8)
            if piece.outliers is not None:
                arrays[f"rows{i}"] = piece.outliers.rows
                arrays[f"cols{i}"] = piece.outliers.cols
                arrays[f"values{i}"] = piece.outliers.values
        arrays["changes"] = np.frombuffer(pack(changes), np.uint8)
        arrays["facts"] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
        self._put(
            self._streams(layer), lambda file: np.savez(file, exact=streams[0], rounded=streams[1])
        )
        self._put(self._layer(layer), lambda file: np.savez(file, **arrays))
        with contextlib.suppress(OSError):
            self._streams(layer - 1).unlink()
        self.n_layers = layer + 1

    def _put(self, path: Path, write: Callable[[IO[bytes]], object]) -> None:
        """Write a file with ``write``, preceded by the digest of its content."""
        partial = path.with_suffix(".partial")
        try:
            if not self._folder.is_dir():
                self._folder.mkdir()
            if self._read_key() != self._key:
                (self._folder / _KEY).write_text(self._key, encoding="utf-8")
            with partial.open("w+b") as file:
                file.write(bytes(_DIGEST_BYTES))
                write(file)
                file.seek(_DIGEST_BYTES)
                digest = _digest_of_rest(file)
                file.seek(0)
                file.write(digest)
            partial.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise QsfIOError(f"{path}: {error.strerror or error}") from error

    def sensitivity(self, measure: Callable[[], Sensitivity]) -> Sensitivity:
        """Return the saved measurement, or measure now and save it. Raises QsfIOError."""
        path = self._folder / "sensitivity.json"
        if self._is_whole(path):
            return _sensitivity_of(read_json(path.read_bytes()[_DIGEST_BYTES:], has_nan=True))
        text = json.dumps(dataclasses.asdict(measure()))
        self._put(path, lambda file: file.write(text.encode()))
        # Read back, so that later calls get the same numbers.
        return _sensitivity_of(read_json(text, has_nan=True))

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _digest_of_rest(file: IO[bytes]) -> bytes:
    digest = hashlib.sha256()
    while part := file.read(1 << 20):
        digest.update(part)
    return digest.digest()


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
