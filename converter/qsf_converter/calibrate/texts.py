"""Texts for calibration and evaluation: read from files, and cut into samples of tokens."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from qsf.errors import QsfConversionError, QsfIOError
from qsf.foreign_json import JsonError, read_json
from qsf.text.tokenizer import Tokenizer
from qsf_converter.request import AUTO, BUNDLED, Request
from qsf_converter.sources.metadata import read_bytes
from qsf_converter.sources.source import Source
from qsf_converter.text.tables import open_tokenizer

MIN_SAMPLE_TOKENS: Final = 64  # statistics of fewer tokens would depend on a few words

_END_LINE: Final = re.compile(r"^<\|endoftext\|>\r?\n?", re.MULTILINE)
_TEXT_KEYS: Final = ("text", "content", "prompt")
_BUNDLED: Final = Path(__file__).with_name("calibration_text.txt")
# Encoding takes about 200 times the memory of its text, so texts are encoded in pieces.
_PIECE_CHARS: Final = 16384
# Only some pieces are encoded of a text that is far longer than the samples need. Few vocabularies
# have more characters per token, in any language.
_CHARS_PER_TOKEN: Final = 16


_MEMORY_BYTES = 512 << 20  # covers 64 MB of text with characters outside the basic plane


def read_texts(path: Path) -> list[str]:
    """Return the texts of a file, in its order; texts of white space only are left out.

    ``.jsonl`` and ``.ndjson`` have one JSON value per line, ``.json`` an array of them: a string,
    or an object whose text is called "text", "content" or "prompt". Any other file is UTF-8 text:
    one text, or several separated by lines of ``<|endoftext|>``, as training texts are.

    Raises QsfIOError when the system refuses to read, QsfConversionError when the file is not
    what its name says (with the number of the line or value) or holds no text.
    """
    data = read_bytes(path)
    if data is None:
        raise QsfIOError(f"{path}: no such file")
    try:
        whole = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise QsfConversionError(
            f"{path}: line {line} is not UTF-8 (byte 0x{data[error.start]:02x} at offset "
            f"{error.start}); save the text as UTF-8"
        ) from error
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        # Not splitlines(): a JSON string may contain U+2028 and similar unescaped.
        lines = enumerate(whole.split("\n"), 1)
        texts = [
            _text_of(_parse(line, f"{path}: line {at}"), f"{path}: line {at}")
            for at, line in lines
            if line.strip()
        ]
    elif suffix == ".json":
        values = _parse(whole, str(path)) if whole.strip() else []
        if not isinstance(values, list):
            raise QsfConversionError(
                f"{path}: a JSON array of texts is expected, not {type(values).__name__}; "
                "one value per line is called .jsonl"
            )
        texts = [_text_of(value, f"{path}: value {at}") for at, value in enumerate(values, 1)]
    else:
        texts = _END_LINE.split(whole)
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise QsfConversionError(f"{path}: no text in its {len(data)} bytes")
    return texts


def bundled_text() -> str:
    """Return the default calibration text.

    CALIBRATION_TEXT_SOURCES.md names the sources and licences of its parts.
    """
    return _BUNDLED.read_text(encoding="utf-8")


def cut_samples(
    tokenizer_json: bytes,
    texts: Sequence[str],
    *,
    n_tokens: int,
    max_samples: int,
    bos_id: int | None = None,
    eos_id: int | None = None,
) -> NDArray[np.int32]:
    """Return token ids [n_samples, n_tokens] of the texts; the same for the same arguments.

    The texts are one sequence with ``eos_id`` between them, if the model has one. It is cut
    into samples without overlap, of which ``max_samples`` are taken, evenly spread, and every
    sample begins with ``bos_id``, if the model has one. A rest that does not fill a sample is left
    out; if the sequence is shorter than a sample, it is the only sample.

    Raises QsfConversionError when there are fewer than 64 tokens (or than a sample, if that is
    shorter), and when the texts are not Unicode; QsfFormatError and QsfUnsupportedError when the
    tokenizer cannot be used.
    """
    n_bos = 0 if bos_id is None else 1
    n_body = n_tokens - n_bos
    if n_body < 1 or max_samples < 1:
        raise QsfConversionError(
            f"{max_samples} samples of {n_tokens} tokens hold no text; ask for at least 1 of 2"
        )
    for at, text in enumerate(texts, 1):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise QsfConversionError(
                f"text {at} is not valid Unicode: character {error.start} is {text[error.start]!r}"
            ) from error
    tokenizer = open_tokenizer(tokenizer_json, bos_id=bos_id)
    wanted_chars = _CHARS_PER_TOKEN * max_samples * n_body
    ids = _sequence(tokenizer, _spread(texts, wanted_chars), eos_id)
    n_least = min(n_tokens, MIN_SAMPLE_TOKENS) - n_bos
    if len(ids) < n_least:
        raise QsfConversionError(
            f"the text has {len(ids)} tokens; at least {n_least} are needed, and "
            f"{max_samples * n_body} for {max_samples} samples of {n_tokens}"
        )
    n_body = min(n_body, len(ids))
    n_full = len(ids) // n_body
    n_samples = min(n_full, max_samples)
    chosen = np.arange(n_samples) * n_full // n_samples
    out = np.empty((n_samples, n_bos + n_body), np.int32)
    out[:, :n_bos] = bos_id if bos_id is not None else 0
    out[:, n_bos:] = ids[: n_full * n_body].reshape(n_full, n_body)[chosen]
    return out


# ---- of read_texts ----


def _parse(text: str, where: str) -> Any:
    try:
        return read_json(text, memory_bytes=_MEMORY_BYTES)
    except JsonError as error:
        raise QsfConversionError(f"{where}: {error}") from error


def _text_of(value: Any, where: str) -> str:
    if isinstance(value, dict):
        key = next((key for key in _TEXT_KEYS if isinstance(value.get(key), str)), None)
        if key is None:
            keys = ", ".join(f'"{name}"' for name in list(value)[:8]) or "none"
            raise QsfConversionError(
                f'{where}: no string called "text", "content" or "prompt"; its keys are {keys}'
            )
        value = value[key]
    if not isinstance(value, str):
        raise QsfConversionError(
            f"{where}: a string or an object is expected, not {type(value).__name__}"
        )
    return value


# ---- of cut_samples ----


def _pieces(text: str) -> Iterator[str]:
    """Cut a text after a line break, else before a space, where no token crosses the cut."""
    start = 0
    while len(text) - start > _PIECE_CHARS:
        end = start + _PIECE_CHARS
        cut = text.rfind("\n", start, end) + 1 or text.rfind(" ", start + 1, end)
        cut = cut if cut > start else end
        yield text[start:cut]
        start = cut
    yield text[start:]


def _spread(texts: Sequence[str], wanted_chars: int) -> list[list[str]]:
    """Return texts as lists of pieces: all of them, or about ``wanted_chars`` evenly spread.

    A text with gaps becomes several texts, because the part after a gap is not a continuation.
    """
    cut = [list(_pieces(text)) for text in texts if text]
    n_chars = sum(map(len, texts))
    wanted_chars = max(wanted_chars, 64 * _PIECE_CHARS)
    if n_chars <= wanted_chars:
        return cut
    spread: list[list[str]] = []
    credit = 0  # in characters times n_chars
    for pieces in cut:
        is_continued = False
        for piece in pieces:
            credit += len(piece) * wanted_chars
            is_taken = credit >= len(piece) * n_chars
            if is_taken:
                credit -= len(piece) * n_chars
                if is_continued:
                    spread[-1].append(piece)
                else:
                    spread.append([piece])
            is_continued = is_taken
    return spread


def _sequence(
    tokenizer: Tokenizer, texts: Sequence[Sequence[str]], eos_id: int | None
) -> NDArray[np.int32]:
    """Return the ids of all texts, with ``eos_id`` between them."""
    parts: list[NDArray[np.int32]] = []
    for pieces in texts:
        if parts and eos_id is not None:
            parts.append(np.array([eos_id], np.int32))
        for piece in pieces:
            # Text of unknown origin: names of special tokens are ordinary text.
            ids = tokenizer.encode(piece, add_prefix=False, parse_special=False)
            parts.append(np.array(ids, np.int32))
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


_SAMPLE_TOKENS: Final = 256
_MOST_HELD_OUT: Final = 16  # samples
_AUTO_TOKENS: Final = 4096  # with half of them SmolLM2-135M loses a tenth more


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """Token ids for fitting and token ids for measuring only, [n_samples, n_tokens] each."""

    fitted: NDArray[np.int32]
    held_out: NDArray[np.int32]
    name: str
    sha256: str

    @property
    def evaluation_name(self) -> str:
        return f"{self.name}, held out"

    def meta(self) -> dict[str, Any]:
        return {
            "text": self.name,
            "sha256": self.sha256,
            "samples": len(self.fitted),
            "sample_tokens": self.fitted.shape[1],
            "tokens": self.fitted.size,
            "held_out_tokens": self.held_out.size,
        }

    def fitted_samples(self, n_tokens: int) -> NDArray[np.int32]:
        """Return about ``n_tokens`` tokens in samples, evenly chosen from those for fitting."""
        length = min(self.fitted.shape[1], n_tokens)
        n = max(1, min(len(self.fitted), n_tokens // length))
        return self.fitted[:: len(self.fitted) // n][:n, :length]


def read_calibration_text(source: Source, request: Request) -> CalibrationText | None:
    """Return the samples to calibrate with, or None when the request has no calibration.

    Held-out samples are evenly spread over the text. Raises QsfConversionError when the model has
    no tokenizer or the text is too short.
    """
    name = BUNDLED if request.layer_type == AUTO else request.calibration
    if name is None:
        return None
    if source.tokenizer is None:
        raise QsfConversionError(f"calibration needs a tokenizer: {source.tokenizer_fault}")
    is_bundled = name == BUNDLED
    texts = [bundled_text()] if is_bundled else read_texts(Path(name))
    header = source.facts.header
    n_tokens = min(_SAMPLE_TOKENS, header.max_tokens)
    wanted = _AUTO_TOKENS if request.layer_type == AUTO else request.calibration_tokens
    n_fitted = max(1, wanted // n_tokens)
    n_held_out = max(1, min(_MOST_HELD_OUT, n_fitted // 8))
    samples = cut_samples(
        source.tokenizer,
        texts,
        n_tokens=n_tokens,
        max_samples=n_fitted + n_held_out,
        bos_id=header.bos_id,
        eos_id=header.eos_id,
    )
    if len(samples) < 2:
        raise QsfConversionError(
            f"{name}: {samples.size} tokens are too few to calibrate with: at least"
            f" two samples of {n_tokens} tokens are needed"
        )
    if int(samples.max()) >= header.n_vocab:
        raise QsfConversionError(
            f"the tokenizer produces token {int(samples.max())}, but the model has only "
            f"{header.n_vocab} tokens"
        )
    n_held_out = max(1, min(n_held_out, len(samples) // 4))
    step = len(samples) // n_held_out
    is_held_out = np.zeros(len(samples), bool)
    is_held_out[step - 1 :: step][:n_held_out] = True
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    name = BUNDLED if is_bundled else Path(name).name
    return CalibrationText(samples[~is_held_out], samples[is_held_out], name, digest)
