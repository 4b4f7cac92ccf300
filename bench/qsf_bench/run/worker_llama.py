"""The measured process of llama.cpp: opens a file, runs tests on it and writes their times.

Run by its path, with a Python that has llama-cpp-python and perhaps not QSF, so nothing of QSF is
imported. TASK on the command line is the JSON of a `tasks.Task`. The `tasks.Answer` goes as JSON
into the file that ``QSF_BENCH_ANSWER`` names.

Everything is set as llama-bench sets it: batches of 2048 tokens and physical ones of 512, KV cache
of f16, flash attention "auto", weights mapped from the file. In a memory control group weights are
not repacked, because their copies would take the group's memory in addition to the mapped file.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
import random
import re
import sys
import time
from array import array
from collections import deque
from pathlib import Path
from typing import Any

ANSWER_VARIABLE = "QSF_BENCH_ANSWER"  # as in `tasks`
BATCH_TOKENS = 2048
UBATCH_TOKENS = 512
KV_TYPES = {"f16": "GGML_TYPE_F16", "8bit": "GGML_TYPE_Q8_0", "4bit": "GGML_TYPE_Q4_0"}
N_LOG_LINES = 12
IS_OVER_ALL = -1  # end of a range of positions: all


class LlamaError(Exception):
    """llama.cpp failed to do a task."""


def tokens_of(n_tokens: int, n_vocab: int, *, is_even: bool) -> array[int]:
    """Return the tokens of a test: the same for both engines.

    Consecutive tokens of the first half of the vocabulary, or random ones of the other half (see
    `random_qsf`).
    """
    chosen = random.Random(n_tokens)
    n_half = (n_vocab + 1) // 2
    if is_even:
        return array("I", (n_vocab - 1 - chosen.randrange(n_half) for _ in range(n_tokens)))
    first = chosen.randrange(n_half)
    return array("I", ((first + i) % n_half for i in range(n_tokens)))


class Log:
    """The sizes of buffers in llama.cpp's messages, and its last lines."""

    def __init__(self, api: Any) -> None:
        self.buffers: list[str] = []
        self._last: deque[str] = deque(maxlen=N_LOG_LINES)

        @api.llama_log_callback  # type: ignore[untyped-decorator]
        def keep(_level: int, text: bytes, _user: object) -> None:
            line = text.decode("utf-8", "replace")
            self._last.append(line)
            for kind, size in re.findall(r"(\S+) model buffer size = +([\d.]+) MiB", line):
                self.buffers.append(f"{kind}:{size}")

        self._keep = keep  # lives as long as llama.cpp may call it
        api.llama_log_set(keep, None)

    def text(self) -> str:
        """Return the last lines."""
        return "".join(self._last).strip()


class Model:
    """An open model, with one context at a time."""

    def __init__(self, api: Any, task: dict[str, Any]) -> None:
        """Open the file of the task. Raises LlamaError."""
        self._api, self._task = api, task
        self.log = Log(api)
        self._context: Any = None
        api.llama_backend_init()
        params = api.llama_model_default_params()
        params.n_gpu_layers = 0
        if hasattr(params, "load_mode"):
            params.load_mode = api.LLAMA_LOAD_MODE_MMAP
        else:
            params.use_mmap = True
        if task["cap_mb"] is not None:
            params.use_extra_bufts = False
        self._model = api.llama_model_load_from_file(os.fsencode(task["path"]), params)
        if not self._model:
            raise LlamaError(f"{task['path']} cannot be opened: {self.log.text()}")
        self._vocab = api.llama_model_get_vocab(self._model)
        self._sampler = api.llama_sampler_init_greedy()
        self.n_vocab = int(api.llama_vocab_n_tokens(self._vocab))

    def open_context(self, n_tokens: int) -> None:
        """Open an empty context of n_tokens. Raises LlamaError."""
        api = self._api
        if self._context is not None:
            api.llama_free(self._context)
        params = api.llama_context_default_params()
        params.n_ctx = n_tokens
        params.n_batch, params.n_ubatch = BATCH_TOKENS, UBATCH_TOKENS
        params.n_threads = params.n_threads_batch = self._task["n_threads"]
        kv_type = self._task["kv_type"] or "f16"
        if kv_type not in KV_TYPES:
            types = ", ".join(KV_TYPES)
            raise LlamaError(f"a KV cache of {kv_type} has no counterpart in llama.cpp: {types}")
        params.type_k = params.type_v = getattr(api, KV_TYPES[kv_type])
        is_quantised = kv_type != "f16"  # quantised values need flash attention
        if not hasattr(params, "flash_attn_type"):
            params.flash_attn = is_quantised
        elif is_quantised:
            params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        else:
            params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_AUTO
        self._context = api.llama_init_from_model(self._model, params)
        if not self._context:
            raise LlamaError(f"no context of {n_tokens} tokens: {self.log.text()}")

    def run(self, test: dict[str, Any]) -> dict[str, Any]:
        """Warm up and time one test; returns a `tasks.TestRun`."""
        depth, n_tokens = test["depth"], test["n_tokens"]
        is_prompt = test["kind"] == "pp"
        self.open_context(test["ctx_tokens"])
        tokens = tokens_of(n_tokens, self.n_vocab, is_even=test["is_even"])
        self._evaluate(tokens_of(depth, self.n_vocab, is_even=test["is_even"]))
        self._evaluate(tokens if is_prompt and not self._task["is_slow"] else tokens[:1])
        if is_prompt:
            memory = self._api.llama_get_memory(self._context)
            if not self._api.llama_memory_seq_rm(memory, 0, depth, IS_OVER_ALL):
                raise LlamaError(f"llama.cpp cannot forget the tokens from {depth} on")
        n_disk_bytes = disk_bytes()
        began_ns = time.perf_counter_ns()
        n_passes = self._evaluate(tokens) if is_prompt else self._step(tokens)
        wall_ns = time.perf_counter_ns() - began_ns
        run = {"name": test["name"], "depth": depth, "n_tokens": n_tokens}
        run |= {"wall_ns": wall_ns, "n_passes": n_passes}
        if n_disk_bytes is not None:
            run["disk_bytes"] = (disk_bytes() or 0) - n_disk_bytes
        return run

    def _evaluate(self, tokens: array[int]) -> int:
        """Evaluate the tokens after earlier ones; return the number of passes."""
        n_passes = 0
        for first in range(0, len(tokens), BATCH_TOKENS):
            some = tokens[first : first + BATCH_TOKENS]
            self._decode(some)
            n_passes += -(-len(some) // UBATCH_TOKENS)
        self._api.llama_synchronize(self._context)
        return n_passes

    def _step(self, tokens: array[int]) -> int:
        """Evaluate the tokens one at a time, choose a token after each, and drop it."""
        for i in range(len(tokens)):
            self._decode(tokens[i : i + 1])
            self._api.llama_sampler_sample(self._sampler, self._context, -1)  # waits for logits
        return len(tokens)

    def _decode(self, tokens: array[int]) -> None:
        ids = (self._api.llama_token * len(tokens))(*tokens)
        status = self._api.llama_decode(
            self._context, self._api.llama_batch_get_one(ids, len(tokens))
        )
        if status:
            raise LlamaError(f"llama_decode failed with {status}: {self.log.text()}")


def number_in(path: str, key: str) -> int | None:
    """Return the number after ``key`` in a file of /proc, or None."""
    try:
        lines = Path(path).read_text("ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(key)), None)


def disk_bytes() -> int | None:
    """Return the bytes that the kernel has read from disks for this process; None: not reported."""
    return number_in("/proc/self/io", "read_bytes:")


def peak_rss_bytes() -> int:
    """Return the peak memory of this process."""
    import resource  # not on Windows

    peak_kb = number_in("/proc/self/status", "VmHWM:")
    return 1024 * (peak_kb or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Run the tests in order; return a `tasks.Answer`, which includes any failure."""
    import llama_cpp as api

    answer: dict[str, Any] = {
        "version": f"llama.cpp {api.__version__}",
        "kernels": "",
        "kv_type": task["kv_type"] or "f16",
        "n_vocab": 0,
        "load_seconds": 0.0,
        "tests": [],
    }
    try:
        began_ns = time.perf_counter_ns()
        model = Model(api, task)
        answer["load_seconds"] = (time.perf_counter_ns() - began_ns) / 1e9
        answer["n_vocab"] = model.n_vocab
        answer["kernels"] = " ".join(model.log.buffers)
        for test in task["tests"]:
            answer["tests"].append(model.run(test))
    except LlamaError as error:
        answer["failure"] = str(error)
    return answer | {"peak_rss_bytes": peak_rss_bytes()}


def main(arguments: list[str]) -> int:
    """Run the task of the command line; return 1 if it is incomplete."""
    answer = measure(json.loads(arguments[0]))
    Path(os.environ[ANSWER_VARIABLE]).write_text(json.dumps(answer), "utf-8")
    return 1 if answer.get("failure") else 0


if __name__ == "__main__":
    del sys.path[0]  # this folder: nothing may be imported from it
    sys.exit(main(sys.argv[1:]))
