"""Compare the logits that llama.cpp computes from GGUF files of the families with the golden ones.

The golden logits are those of transformers (tests/golden/families.npz); the files are written as
the tests write them. So this proves that our reading of the format is llama.cpp's. It needs
llama-cpp-python (`make baseline`). Ends with status 1 where logits differ that should not.

Usage: .venv/bin/python tools/compare_llama_cpp.py [NAME ...]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "python"))

from make import gguf_families  # noqa: E402
from make.golden_families import Case, cases  # noqa: E402

LARGEST: Final = 2e-3  # difference in parts of the largest logit: llama.cpp rounds to f16
_CONTEXT: Final = 64
_FIXED: Final = {  # what llama.cpp takes from the name or the size and not from the file
    "bitnet": "computes SiLU, as models before the one with 4T tokens",
    "exaone4": "has windows in the model of 64 layers only",
    "gemma2": "scales scores by the head's size",
    "gemma3": "scales scores by the head's size",
    "mixtral-window": "has no windows for it",
    "phi3-longrope-short": "chooses frequencies by the context, transformers by the text",
    "phi3-window": "has no windows for it",
    "qwen2-window": "has no windows for it",
    "smollm3": "leaves out the rotation of every fourth layer",
}
_NOT_SAID: Final = ("llama-llama3", "llama-yarn-more", "llama-yarn-factor")


def main() -> int:
    """Compare the cases named, or all; with --one, print the difference of one file."""
    if sys.argv[1:2] == ["--one"]:
        return print_difference(sys.argv[2], sys.argv[3])
    n_wrong = 0
    for name in sys.argv[1:] or cases():
        text, is_wrong = compare(cases()[name])
        n_wrong += is_wrong
        print(f"{name:<24} {text}", flush=True)
    return 1 if n_wrong else 0


def compare(case: Case) -> tuple[str, bool]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = gguf_families.write_case(case, Path(folder) / "m.gguf", is_without_text=True)
        except (AssertionError, KeyError):
            return "has no form in a GGUF file", False
        # A process of its own, because llama.cpp may end it.
        command = [sys.executable, __file__, "--one", str(path), case.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reasons = [line for line in done.stderr.splitlines() if "error" in line]
        return f"llama.cpp refuses it: {(reasons or ['?'])[0].split(': ', 1)[-1]}", False
    difference = float(done.stdout)
    verdict = f"differs by {difference:.1e} of the largest logit"
    if difference <= LARGEST:
        return verdict, False
    if case.name in _NOT_SAID:
        return f"{verdict}: files as the tests write them do not say its RoPE", False
    if case.name in _FIXED:
        return f"{verdict}: llama.cpp {_FIXED[case.name]}", False
    return f"{verdict}: WRONG", True


def print_difference(path: str, name: str) -> int:
    """Print the largest difference from the golden logits, in parts of the largest of them."""
    import llama_cpp

    case = cases()[name]
    model = llama_cpp.llama_model_load_from_file(path.encode(), _model_params(llama_cpp))
    if not model:
        return 3
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = _CONTEXT
    params.n_threads = params.n_threads_batch = 1
    params.flash_attn_type = 0
    params.type_k = params.type_v = 0  # f32
    context = llama_cpp.llama_init_from_model(model, params)
    n_tokens = len(case.tokens)
    batch = llama_cpp.llama_batch_init(n_tokens, 0, 1)
    batch.n_tokens = n_tokens
    for i, token in enumerate(case.tokens):
        batch.token[i], batch.pos[i] = token, i
        batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1
    if llama_cpp.llama_decode(context, batch) != 0:
        return 4
    n_vocab = case.logits.shape[-1]
    rows = [
        np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), shape=(n_vocab,)).copy()
        for i in range(n_tokens)
    ]
    difference = np.abs(np.stack(rows) - case.logits).max() / np.abs(case.logits).max()
    print(f"{difference:.6g}")
    return 0


def _model_params(llama_cpp: Any) -> Any:
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    params.use_mmap = False
    params.use_extra_bufts = False  # no weights in another precision
    return params


if __name__ == "__main__":
    sys.exit(main())
