# SPDX-License-Identifier: Apache-2.0
"""llama.cpp for tests of qsf.bench: the real one where there is one, and a stand-in."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest


def baseline_python() -> str:
    """Return an interpreter that has llama-cpp-python; skip the test where there is none."""
    named = os.environ.get("QSF_BASELINE_PYTHON")
    if named:
        return named
    if importlib.util.find_spec("llama_cpp") is not None:
        return sys.executable
    pytest.skip("no llama-cpp-python: QSF_BASELINE_PYTHON names an interpreter that has it")


# As much of llama-cpp-python's low-level API as worker_logits uses. Logits say what they
# are of: row [token, position, tokens evaluated since memory was cleared, 0, ...].
STAND_IN = """
import ctypes

__version__ = "0"
LLAMA_FLASH_ATTN_TYPE_DISABLED = 7
N_VOCAB = 11
state = {}

class Params:
    flash_attn_type = -1

def llama_log_callback(function):
    return function

def llama_log_set(function, _user):
    state["log"] = function
    print("noise on stdout")

def llama_backend_init():
    pass

llama_model_default_params = llama_context_default_params = Params

def llama_model_load_from_file(path, params):
    if b"broken" in path:
        state["log"](2, b"bad magic\\n", None)
        return None
    return "model"

def llama_init_from_model(model, params):
    assert params.flash_attn_type == LLAMA_FLASH_ATTN_TYPE_DISABLED
    assert params.n_batch <= params.n_ctx
    state["n_ctx"] = params.n_ctx
    return "context"

def llama_model_get_vocab(model):
    return "vocab"

def llama_vocab_n_tokens(vocab):
    return N_VOCAB

def llama_get_memory(context):
    return "memory"

def llama_memory_clear(memory, data):
    state["n_done"] = 0

class Batch:
    def __init__(self, n):
        self.token, self.pos, self.n_seq_id, self.logits = ([None] * n for _ in range(4))
        self.seq_id = [[None] for _ in range(n)]
        self.n_tokens = 0

def llama_batch_init(n, embd, n_seq):
    return Batch(n)

def llama_decode(context, batch):
    rows = []
    for i in range(batch.n_tokens):
        assert batch.pos[i] == state["n_done"] < state["n_ctx"]
        assert (batch.n_seq_id[i], batch.seq_id[i]) == (1, [0])
        state["n_done"] += 1
        if batch.token[i] == 10:
            import os, sys
            sys.stderr.write("out of luck\\n")
            sys.stderr.flush()
            os._exit(9)
        if batch.token[i] == 9:
            return -3
        if batch.logits[i]:
            rows += [batch.token[i], batch.pos[i], state["n_done"]] + [0] * (N_VOCAB - 3)
    state["rows"] = (ctypes.c_float * max(1, len(rows)))(*rows)
    return 0

def llama_get_logits(context):
    return ctypes.cast(state["rows"], ctypes.POINTER(ctypes.c_float))
"""


def stand_in_for_llama(folder: Path, patch: pytest.MonkeyPatch) -> str:
    """Let this interpreter's children import the stand-in; return the interpreter."""
    (folder / "llama_cpp.py").write_text(STAND_IN, "utf-8")
    patch.setenv("PYTHONPATH", str(folder))
    return sys.executable
