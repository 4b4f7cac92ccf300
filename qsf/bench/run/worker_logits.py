"""Logits of llama.cpp, sample by sample: the process that `quality.BaselineLogits` talks to.

Run by its path, with a Python that has llama-cpp-python and need not have QSF, so nothing of QSF
is imported. Arguments: a GGUF file, tokens of the longest window, threads.

The first line on stdout is JSON: ``{"n_vocab": n}``, or ``{"failure": text}`` or
``{"missing": text}`` (no llama-cpp-python) and the end. Then each line on stdin is a window,
``{"tokens": [...], "blocks": [[first, end], ...]}``, and is answered by the logits of these rows
as float32 [end - first, n_vocab], block by block, rows ascending. The end of stdin ends it.

The KV cache is f16, as in all evaluations, and flash attention is off: it would
round the values of V once more.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

BATCH_TOKENS = 256
N_LOG_LINES = 12


class LlamaError(Exception):
    """llama.cpp could not do what it was asked for."""


class Logits:
    """A model that is open, with one context."""

    def __init__(self, api: Any, path: str, ctx_tokens: int, n_threads: int) -> None:
        """Open the file. Raises LlamaError."""
        self._api = api
        self._last: deque[str] = deque(maxlen=N_LOG_LINES)

        @api.llama_log_callback  # type: ignore[untyped-decorator]
        def keep(_level: int, text: bytes, _user: object) -> None:
            self._last.append(text.decode("utf-8", "replace"))

        self._keep = keep  # as long as llama.cpp may call it
        api.llama_log_set(keep, None)
        api.llama_backend_init()
        model_params = api.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self._model = api.llama_model_load_from_file(os.fsencode(path), model_params)
        if not self._model:
            raise LlamaError(f"{path} cannot be opened: {self._log()}")
        params = api.llama_context_default_params()
        params.n_ctx = ctx_tokens
        params.n_batch = params.n_ubatch = min(BATCH_TOKENS, ctx_tokens)
        params.n_threads = params.n_threads_batch = n_threads
        if hasattr(params, "flash_attn_type"):
            params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        else:
            params.flash_attn = False
        self._context = api.llama_init_from_model(self._model, params)
        if not self._context:
            raise LlamaError(f"{path}: no context of {ctx_tokens} tokens: {self._log()}")
        self._batch = api.llama_batch_init(BATCH_TOKENS, 0, 1)
        self.n_vocab = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model)))

    def _log(self) -> str:
        return "".join(self._last).strip()

    def write(self, tokens: list[int], blocks: list[list[int]], out: BinaryIO) -> None:
        """Write the rows of a window. Raises LlamaError."""
        api = self._api
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        n_done = 0
        for first, end in blocks:
            while n_done < end:
                n_tokens = min(BATCH_TOKENS, end - n_done)
                n_rows = self._decode(tokens, n_done, n_done + n_tokens, first)
                n_done += n_tokens
                if n_rows:
                    logits = api.llama_get_logits(self._context)
                    n_values = n_rows * self.n_vocab
                    values = ctypes.POINTER(ctypes.c_float * n_values)
                    out.write(ctypes.cast(logits, values).contents)
            out.flush()

    def _decode(self, tokens: list[int], begin: int, end: int, first_row: int) -> int:
        """Evaluate tokens begin .. end - 1; returns how many of them have logits."""
        batch = self._batch
        batch.n_tokens = end - begin
        for i, at in enumerate(range(begin, end)):
            batch.token[i], batch.pos[i] = tokens[at], at
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = at >= first_row
        status = self._api.llama_decode(self._context, batch)
        if status:
            raise LlamaError(f"llama_decode failed with {status}: {self._log()}")
        return max(0, end - max(begin, first_row))


def leave_own_folder() -> None:
    """Let nothing be imported from here: there are a `trace` and a `results` in qsf.bench."""
    own = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if not path or Path(path).resolve() != own]


def say(out: BinaryIO, **known: object) -> None:
    """Write the first line."""
    out.write(json.dumps(known).encode() + b"\n")
    out.flush()


def main(arguments: list[str]) -> int:
    """Answer windows until stdin ends."""
    # What libraries print on stdout must not come between the numbers.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    leave_own_folder()
    try:
        import llama_cpp as api
    except (ImportError, OSError, RuntimeError) as error:  # its library may not load
        say(out, missing=str(error))
        return 1
    path, ctx_tokens, n_threads = arguments
    try:
        model = Logits(api, path, int(ctx_tokens), int(n_threads))
    except LlamaError as error:
        say(out, failure=str(error))
        return 1
    say(out, n_vocab=model.n_vocab)
    for line in sys.stdin:
        window = json.loads(line)
        try:
            model.write(window["tokens"], window["blocks"], out)
        except LlamaError as error:
            sys.stderr.write(f"{error}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
