"""The calibration text: samples for fitting, and held-out samples for measuring."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from qsf.errors import QsfConversionError
from qsf_converter.calibrate.texts import bundled_text, cut_samples, read_texts
from qsf_converter.request import BUNDLED, Request
from qsf_converter.sources.source import Source

_SAMPLE_TOKENS: Final = 256
_MOST_HELD_OUT: Final = 16  # samples


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """Token ids for fitting and token ids for measuring only, [n_samples, n_tokens] each."""

    fitted: NDArray[np.int32]
    held_out: NDArray[np.int32]
    name: str
    sha256: str

    @property
    def evaluation_name(self) -> str:
        """The held-out samples' name in the report."""
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
    if request.calibration is None:
        return None
    if source.tokenizer is None:
        raise QsfConversionError(f"calibration needs a tokenizer: {source.tokenizer_fault}")
    is_bundled = request.calibration == BUNDLED
    texts = [bundled_text()] if is_bundled else read_texts(Path(request.calibration))
    header = source.facts.header
    n_tokens = min(_SAMPLE_TOKENS, header.max_tokens)
    n_fitted = max(1, request.calibration_tokens // n_tokens)
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
            f"{request.calibration}: {samples.size} tokens are too few to calibrate with: at least"
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
    name = BUNDLED if is_bundled else Path(request.calibration).name
    return CalibrationText(samples[~is_held_out], samples[is_held_out], name, digest)
