"""What llama.cpp says to the same prompts: a process that reads a request and writes the answers.

Usage: python ask_llama.py MODEL.gguf < {"texts": [...], "chats": [...], "n_predict": N}
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
import sys
import urllib.request
from typing import Any


def main() -> None:
    """Answer the request on standard input; the last line of standard output is JSON."""
    import xllamacpp

    request = json.load(sys.stdin)
    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.n_ctx, params.n_parallel, params.verbosity = 2048, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count() or 1
    params.cpuparams.poll = params.cpuparams_batch.poll = 0  # idle threads sleep
    server = xllamacpp.Server(params)

    def post(path: str, **fields: Any) -> Any:
        url, body = server.listening_address + path, json.dumps(fields).encode()
        with urllib.request.urlopen(
            urllib.request.Request(url, body, {"content-type": "application/json"})
        ) as answer:
            return json.load(answer)

    def ids(text: str) -> Any:
        return post("/tokenize", content=text, add_special=False, parse_special=True)["tokens"]

    chats = []
    for question in request["chats"]:
        turns = [{"role": "user", "content": question}]
        prompt = ids(post("/apply-template", messages=turns)["prompt"])
        said = post(
            "/completion", prompt=prompt, n_predict=request["n_predict"], temperature=0,
            cache_prompt=False,
        )  # fmt: skip
        chats.append({"prompt": prompt, "text": said["content"]})
    print(json.dumps({"texts": [ids(text) for text in request["texts"]], "chats": chats}))
    sys.stdout.flush()
    os._exit(0)  # its server may hang in its destructor


if __name__ == "__main__":
    main()
