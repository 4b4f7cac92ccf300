"""The measured process of llama.cpp: opens a file, runs a task's tests, writes their speeds.

Run as ``worker_llama.py TASK ANSWER``; without arguments it prints which llama.cpp there is. One of
two packages is used: llama-cpp-python if it is installed, because `make baseline` builds it for
this processor, else xllamacpp, a wheel of llama.cpp's server. Settings are those of llama-bench:
batches of 2048 tokens and physical ones of 512, KV cache of f16, flash attention "auto", weights
mapped from the file. In a memory control group weights are not repacked: the copies would take the
group's memory in addition to the mapped file.
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
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BATCH_TOKENS = 2048
UBATCH_TOKENS = 512
KV_TYPES = {"f16": "F16", "8bit": "Q8_0", "4bit": "Q4_0"}
_ALL = -1  # the end of a range of positions


def tokens_of(n_tokens: int, n_vocab: int) -> array[int]:
    """Return the tokens of a test: consecutive ones, the same for both engines.

    They are of the first half of the vocabulary, where neighbours choose similar experts in random
    mixtures (see `random_qsf`).
    """
    n_half = (n_vocab + 1) // 2
    first = random.Random(n_tokens).randrange(n_half)
    return array("I", ((first + i) % n_half for i in range(n_tokens)))


def isa_words(system_info: str) -> str:
    """Return the instruction sets marked 1 in llama.cpp's "CPU : AVX2 = 1 | FMA = 0 | ..."."""
    names = re.findall(r"\b([A-Z][A-Z0-9_]*) = 1\b", system_info)
    sets = ("AVX", "AMX", "NEON", "DOTPROD", "MATMUL_INT8", "SVE", "SME", "RVV", "VSX")
    return " ".join(name for name in names if name.startswith(sets))


class Wheel:
    """A model in xllamacpp's server, which does not show its vocabulary: tokens are small ids."""

    package = "xllamacpp"

    def __init__(self, task: dict[str, Any], n_ctx_tokens: int) -> None:
        import xllamacpp as api

        params = api.CommonParams()
        params.model.path = task["path"]
        params.n_gpu_layers, params.n_parallel, params.warmup = 0, 1, False
        params.verbosity = -1
        params.n_ctx = n_ctx_tokens
        params.n_batch, params.n_ubatch = BATCH_TOKENS, UBATCH_TOKENS
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = task["n_threads"]
        kv_type = KV_TYPES[task["kv_type"] or "f16"]
        params.cache_type_k = params.cache_type_v = getattr(api.ggml_type, f"GGML_TYPE_{kv_type}")
        params.no_extra_bufts = task["cap_mb"] is not None
        self._server = api.Server(params)

    @staticmethod
    def system_info() -> str:
        """Return llama.cpp's line of instruction sets."""
        import xllamacpp as api

        return str(api.get_system_info())

    def run(self, test: dict[str, Any]) -> float:
        """Return the seconds of one test, by llama.cpp's own clock."""
        n_tokens, depth = test["n_tokens"], test["depth"]
        before = [*tokens_of(depth, 2048), 7]
        self._complete(before, 1)
        if test["kind"] == "pp":
            timings = self._complete([*before, *tokens_of(n_tokens, 2048)], 1)
            return float(timings["prompt_ms"]) / 1e3
        timings = self._complete(before, n_tokens + 1)  # the prompt's pass gives the first one
        ms_per_token = float(timings["predicted_ms"]) / int(timings["predicted_n"])
        return int(n_tokens) * ms_per_token / 1e3

    def _complete(self, prompt: list[int], n_predict: int) -> dict[str, Any]:
        request = {"prompt": prompt, "n_predict": n_predict, "ignore_eos": True}
        answer = self._server.handle_completions(
            {**request, "temperature": 0, "cache_prompt": True}
        )
        if not isinstance(answer, dict) or "timings" not in answer:
            raise RuntimeError(f"llama.cpp answered {str(answer)[:200]}")
        return dict(answer["timings"])


class Built:
    """A model in llama-cpp-python's low-level interface."""

    package = "llama_cpp"

    def __init__(self, task: dict[str, Any], n_ctx_tokens: int) -> None:
        import llama_cpp as api

        self._api = api
        self._quiet = api.llama_log_callback(lambda _level, _text, _user: None)
        api.llama_log_set(self._quiet, None)
        api.llama_backend_init()
        params = api.llama_model_default_params()
        params.n_gpu_layers = 0
        if task["cap_mb"] is not None:
            params.use_extra_bufts = False
        model = api.llama_model_load_from_file(os.fsencode(task["path"]), params)
        if not model:
            raise RuntimeError(f"llama.cpp cannot open {task['path']}")
        self._n_vocab = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(model)))
        params = api.llama_context_default_params()
        params.n_ctx = n_ctx_tokens
        params.n_batch, params.n_ubatch = BATCH_TOKENS, UBATCH_TOKENS
        params.n_threads = params.n_threads_batch = task["n_threads"]
        kv_type = KV_TYPES[task["kv_type"] or "f16"]
        params.type_k = params.type_v = getattr(api, f"GGML_TYPE_{kv_type}")
        self._context = api.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp has no memory for {n_ctx_tokens} tokens")
        self._sampler = api.llama_sampler_init_greedy()

    @staticmethod
    def system_info() -> str:
        """Return llama.cpp's line of instruction sets."""
        import llama_cpp as api

        return str(api.llama_print_system_info().decode("utf-8", "replace"))

    def run(self, test: dict[str, Any]) -> float:
        """Warm up and time one test; returns its seconds."""
        api, depth = self._api, test["depth"]
        tokens = tokens_of(test["n_tokens"], self._n_vocab)
        memory = api.llama_get_memory(self._context)
        api.llama_memory_seq_rm(memory, 0, 0, _ALL)
        self._evaluate(tokens_of(depth, self._n_vocab))
        self._evaluate(tokens[:1])
        api.llama_memory_seq_rm(memory, 0, depth, _ALL)
        began_ns = time.perf_counter_ns()
        if test["kind"] == "pp":
            self._evaluate(tokens)
        else:
            for i in range(len(tokens)):
                self._evaluate(tokens[i : i + 1])
                api.llama_sampler_sample(self._sampler, self._context, -1)
        return (time.perf_counter_ns() - began_ns) / 1e9

    def _evaluate(self, tokens: array[int]) -> None:
        api = self._api
        for first in range(0, len(tokens), BATCH_TOKENS):
            some = tokens[first : first + BATCH_TOKENS]
            ids = (api.llama_token * len(some))(*some)
            status = api.llama_decode(self._context, api.llama_batch_get_one(ids, len(some)))
            if status:
                raise RuntimeError(f"llama_decode failed with {status}")
        api.llama_synchronize(self._context)


def engine() -> type[Wheel] | type[Built] | None:
    """Return the installed llama.cpp; None: there is none."""
    return next((each for each in (Built, Wheel) if find_spec(each.package)), None)


def version_of(kind: type[Wheel] | type[Built]) -> str:
    """Return package, version and instruction sets."""
    name = kind.package.replace("_cpp", "-cpp-python")
    return f"{name} {metadata.version(name)}, {isa_words(kind.system_info())}"


def peak_bytes() -> int:
    """Return the peak memory of this process."""
    text = Path("/proc/self/status").read_text("ascii")
    return int(text.split("VmHWM:")[1].split()[0]) << 10


def main(arguments: list[str]) -> int:
    """Run the task; without one print the version."""
    kind = engine()
    if kind is None:
        return 1
    version = version_of(kind)
    if not arguments:
        print(f"\n{version}")
        return 0
    task = json.loads(arguments[0])
    n_ctx_tokens = max(test["depth"] + test["n_tokens"] for test in task["tests"]) + 8
    model = kind(task, n_ctx_tokens)
    speeds = [test["n_tokens"] / model.run(test) for test in task["tests"]]
    answer = {"version": version, "tok_per_s": speeds, "peak_bytes": peak_bytes()}
    Path(arguments[1]).write_text(json.dumps(answer), "utf-8")
    os._exit(0)  # llama.cpp's threads may outlive an orderly end


if __name__ == "__main__":
    del sys.path[0]  # this folder: nothing may be imported from it
    sys.exit(main(sys.argv[1:]))
