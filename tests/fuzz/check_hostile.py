"""Gives commands JSON that takes many times its bytes, and compares VmHWM with the budget.

Each command runs in a memory control group whose limit is its budget, where this user can make
one, and its VmHWM is compared with the budget everywhere. Prints one line for each case; the exit
code is 1 where a process took more, was killed, or did not refuse its input by one line. Then RUNS
(200) random documents follow, a reader after the other, which commands may also take. While qsf
serve reads what takes other servers long, its /health must answer within 100 ms.

Usage: python tests/fuzz/check_hostile.py [RUNS [SEED]]
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import http.client
import json
import random
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "python"))

from make.attacks import entry_at, grow  # noqa: E402
from make.qsf_files import repair  # noqa: E402
from qsf.file.reader import Reader  # noqa: E402
from qsf_bench.memory_group import CapError, memory_group  # noqa: E402

BIN = Path(sys.executable).parent
MB = 1 << 20
PROMPT = b'{"id":"a","prompt":"Hi"}'
NOTE = (
    b'{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Ho"}],'
    b'"model":"","kv_type":"","owner":""}'
)
BODY = (
    b'{"messages":[{"role":"user","content":[{"type":"text","text":"Hi"}]}],"max_tokens":2,'
    b'"stop":["a"],"chat_template_kwargs":{"a":1},"logit_bias":{"5":1},"tools":[{"type":"function",'
    b'"function":{"name":"f","description":"x","parameters":{"type":"object","properties":{}}}}]}'
)
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
CONVERT_MB = 200  # the converter has no budget: what imports and these cases may take


def dense(n_bytes: int, begin: bytes = b"[", end: bytes = b"]") -> bytes:
    """Return JSON of so many bytes that takes 25 times as many."""
    return begin + b"{}," * ((n_bytes - len(begin) - len(end)) // 3 - 1) + b"{}" + end


def peak_mb(pid: int) -> float:
    """Return VmHWM of a process; 0 where it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text("ascii")
    except OSError:
        return 0.0
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return 0.0 if found is None else int(found[1]) / 1024


def random_json(rng: random.Random, n_bytes: int, begin: bytes, end: bytes) -> bytes:
    """Return about so many bytes of JSON: a list of one or two kinds of values, or nearly JSON."""
    letters = '"\u20ac\U0001f600"'.encode()
    values = (
        b"{}", b"[]", b"0", b"1e5", b"-7", b"null", b'""', b'"a"', b'"\\u20ac"', b'{"a":0}',
        b"[[]]", b'{"a":{},"b":[]}', letters, b'"' + b"x" * 300 + b'"', b"[" * 70,
        b'"\\ud83d\\ude00"', b'{"":""}', b"\xff",
    )  # fmt: skip
    chosen = b",".join(rng.choices(values, k=rng.randint(1, 2)))
    body = (chosen + b",") * max(1, (n_bytes - len(begin) - len(end)) // (len(chosen) + 1))
    return begin + body[:-1] + end[: rng.choice((len(end), len(end), rng.randint(0, len(end))))]


def planted(rng: random.Random, good: bytes, inner: bytes) -> bytes:
    """Return a document with ``inner`` in place of one of its values."""
    document = node = json.loads(good)
    while True:
        key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if not isinstance(node[key], (dict, list)) or not node[key] or rng.random() < 0.3:
            break
        node = node[key]
    node[key] = "HERE"
    return json.dumps(document).encode().replace(b'"HERE"', inner, 1)


def mutant(rng: random.Random, good: bytes, n_bytes: int) -> bytes:
    """Return a document that no command has seen, or a good one with random values or damage."""
    kind = rng.randrange(4)
    if kind == 0:
        return random_json(rng, n_bytes, b'{"a":[', b"]}")
    if kind < 3:
        return planted(rng, good, random_json(rng, n_bytes, b"[", b"]"))
    damaged = bytearray(good)
    for _ in range(rng.randint(1, 4)):
        damaged[rng.randrange(len(good))] = rng.choice(b'{}[]",:\\e9-\0\xff')
    return bytes(damaged)


@contextlib.contextmanager
def started(
    words: Sequence[object], limit_mb: int, errors: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command in a memory control group of that limit, where one can be made."""
    command = [str(BIN / str(words[0])), *map(str, words[1:])]
    with memory_group(limit_mb * MB) if HAS_GROUPS else contextlib.nullcontext() as group:
        process = subprocess.Popen(
            group.enter_and_run(command) if group else command,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def run(name: str, budget_mb: int, words: Sequence[object], *, may_succeed: bool = False) -> bool:
    """Run a command that is to refuse its input; return whether it did, within the budget."""
    with tempfile.TemporaryFile() as errors, started(words, budget_mb, errors) as process:
        time.sleep(0.05)  # until then it may be a copy of this process
        peak = 0.0
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            peak = max(peak, peak_mb(process.pid))
            time.sleep(0.002)
        errors.seek(0)
        lines = errors.read().decode("utf-8", "replace").strip().splitlines() or [""]
    is_fine = peak <= budget_mb and process.returncode in (1, 2) and "error" in lines[-1]
    if may_succeed and process.returncode == 0:
        is_fine = peak <= budget_mb
    said = lines[-1][-100:]
    print(f"{name:26} {peak:6.1f} of {budget_mb} MB {'' if is_fine else 'WRONG'} {said}")
    return is_fine


def session_with(data: bytes, note: bytes, n_tokens: int) -> bytes:
    """Return a session file with another note and number of tokens, all checksums right."""
    header = bytearray(data[:128])
    n_old, _, _, state_bytes = struct.unpack_from("<IIIQ", header, 12)
    state = data[len(data) - state_bytes :]
    sums = [zlib.crc32(state[at : at + MB]) for at in range(0, len(state), MB)]
    rest = note + bytes(4 * (n_tokens or n_old)) + struct.pack(f"<{len(sums)}I", *sums)
    n_before = -(-(128 + len(rest)) // 4096) * 4096
    struct.pack_into("<I", header, 12, n_tokens or n_old)
    struct.pack_into("<I", header, 20, len(note))
    struct.pack_into("<I", header, 36, zlib.crc32(rest))
    struct.pack_into("<Q", header, 80, n_before + len(state))
    struct.pack_into("<I", header, 124, zlib.crc32(bytes(header[:124])))
    return bytes(header) + rest.ljust(n_before - 128, b"\0") + state


def kept_session(folder: Path, model: Path) -> bytes:
    """Return a good session file."""
    path = folder / "kept.qsfs"
    words = [str(BIN / "qsf-run"), str(model), "-p", "Hi", "-n", "2", "-q", "--session", str(path)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return path.read_bytes()


def run_cases(folder: Path, model: Path) -> Iterator[bool]:
    """Yield whether each reader of qsf run kept its budget."""

    def written(name: str, data: bytes) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    ask = ["-p", "Hi", "-n", 2, "-q", "--ram-budget"]
    line = written("line.jsonl", dense(16 * MB) + b"\n")
    one = written("one.jsonl", b'"Hi"\n')
    many = ["qsf-run", model, "-n", 2, "-q", "--ram-budget", 100, "--prompts"]
    yield run("--prompts, 16 MB", 100, [*many, line])
    yield run("--answers /dev/zero", 100, [*many, one, "--answers", "/dev/zero"])
    yield run("--answers, 12 MB", 100, [*many, one, "--answers", written("a", dense(12 * MB))])
    conversation = written("c.json", dense(4 * MB))
    yield run("conversation, 4 MB", 60, ["qsf-run", model, *ask, 60, "--session", conversation])
    data = kept_session(folder, model)
    end = b'],"model":"","kv_type":"","owner":""}'
    for name, note, n_tokens in (
        ("session, note of 4 MB", dense(4 * MB, b'{"messages":[', end), 0),
        ("session, 1 Mi tokens", b'{"messages":[' + end, MB),
    ):
        path = written("s.qsfs", session_with(data, note, n_tokens))
        yield run(name, 40, ["qsf-run", model, *ask, 40, "--session", path])
    chat = bytearray(model.read_bytes())
    grow(chat, b"CHAT", dense(MB, b'{"a":[', b"]}"))
    yield run("CHAT, 1 MiB", 33, ["qsf-run", written("chat.qsf", repair(chat)), *ask, 33])
    only_json = bytearray(model.read_bytes())
    grow(only_json, b"TOKN", dense(9 * MB, b'{"model":[', b"]}"))
    at = entry_at(only_json, b"TEXT")
    only_json[at : at + 4] = b"text"
    yield run("TOKN without TEXT", 200, ["qsf-run", written("t.qsf", repair(only_json)), *ask, 200])


def random_cases(folder: Path, model: Path, source: Path, n_runs: int, seed: int) -> Iterator[bool]:
    """Yield whether a random document kept the budget of the command that read it."""
    rng = random.Random(seed)
    kept = kept_session(folder, model)
    answers = folder / "answers.jsonl"
    (folder / "one.jsonl").write_bytes(PROMPT)
    many = ["qsf-run", model, "-n", 2, "-q", "--ram-budget", 60, "--prompts", folder / "one.jsonl"]
    subprocess.run([BIN / "qsf-run", *map(str, many[1:]), "--answers", answers], check=True)
    with Reader(model) as reader:
        sections = {tag: reader.read_section(tag) for tag in ("CHAT", "META")}
    weights = (source / "model.safetensors").read_bytes()
    names = json.loads(weights[8 : 8 + struct.unpack_from("<Q", weights)[0]])
    weight_map = {name: "shard.safetensors" for name in names if name != "__metadata__"}
    good = {
        "prompts": PROMPT, "answers": answers.read_bytes(), "note": NOTE, "body": BODY,
        "conversation": json.dumps(json.loads(NOTE)["messages"]).encode(), **sections,
        "TOKN": (source / "tokenizer.json").read_bytes(),
        **{path.name: path.read_bytes() for path in source.glob("*.json")},
        "model.safetensors": b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
    }  # fmt: skip
    with served(model) as (server, port):
        for number in range(n_runs):
            kind = list(good)[number % len(good)]
            data = mutant(rng, good[kind], int(10 ** rng.uniform(1, 7)))
            name = f"{number} {kind}, {len(data)} bytes"
            if kind == "body":
                yield ask(name, server, port, data)
            else:
                budget_mb, words = command_for(kind, data, folder, model, source, kept)
                yield run(name, budget_mb, words, may_succeed=True)


def command_for(
    kind: str, data: bytes, folder: Path, model: Path, source: Path, kept: bytes
) -> tuple[int, list[object]]:
    """Return the budget in MB and the words of a command that reads this document."""
    path = folder / "random"
    words: list[object] = ["qsf-run", model, "-n", 2, "-q", "--ram-budget", 60]
    if kind in ("prompts", "answers"):
        path.write_bytes(data + b"\n")
        files = [path] if kind == "prompts" else [folder / "one.jsonl", "--answers", path]
        return 60, [*words, "--prompts", *files]
    if kind in ("conversation", "note"):
        path = folder / ("random.json" if kind == "conversation" else "random.qsfs")
        path.write_bytes(data if kind == "conversation" else session_with(kept, data, 0))
        return 60, [*words, "-p", "Hi", "--session", path]
    if kind in ("CHAT", "META", "TOKN"):
        changed = bytearray(model.read_bytes())
        grow(changed, kind.encode(), data)
        path.write_bytes(repair(changed))
        show = ["qsf-inspect", path, "--quality"]  # without a budget: 64 MB, and Python
        return (60, ["qsf-run", path, *words[2:], "-p", "Hi"]) if kind != "META" else (120, show)
    copy = folder / "random.source"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(source, copy)
    if kind == "model.safetensors.index.json":
        (copy / "model.safetensors").rename(copy / "shard.safetensors")
    head = struct.pack("<Q", len(data)) if kind == "model.safetensors" else b""
    (copy / kind).write_bytes(head + data)
    return CONVERT_MB, ["qsf-convert", copy, folder / "out.qsf", "-q", "--force"]


def convert_cases(folder: Path, source: Path) -> Iterator[bool]:
    """Yield whether each reader of the converter kept its limit."""
    for name, data in (
        ("config.json", dense(60 * MB, b'{"a":[', b"]}")),
        ("model.safetensors", b""),
    ):
        copy = Path(shutil.copytree(source, folder / f"{name}.source"))
        header = dense(99 * MB, b'{"a":[', b"]}")
        (copy / name).write_bytes(data or struct.pack("<Q", len(header)) + header)
        yield run(name, CONVERT_MB, ["qsf-convert", copy, folder / "out.qsf", "-q"])


@contextlib.contextmanager
def served(
    model: Path, budget_mb: int = 70, constraints: str = "off"
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run qsf serve; yield its process and port when it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["qsf-serve", model, "--port", port, "--ram-budget", budget_mb]
    with started([*words, "--constraints", constraints], budget_mb, subprocess.DEVNULL) as server:
        for _ in range(300):
            time.sleep(0.1)
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
        yield server, port


def ask(name: str, server: Any, port: int, body: bytes, *statuses: int) -> bool:
    """Return whether qsf serve answered within its budget and by one of the statuses."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    kind = {"content-type": "application/json"}
    try:
        connection.request("POST", "/v1/chat/completions", body, kind)
        status = connection.getresponse().status
    except OSError:  # a body beyond the limit is not read to its end
        status = 413 if len(body) > MB else 0
    peak = peak_mb(server.pid)
    is_fine = status in (statuses or (200, 400, 413)) and 0 < peak <= 70
    print(f"{name:26} {peak:6.1f} of 70 MB {'' if is_fine else 'WRONG'} {status}")
    return is_fine


def serve_cases(model: Path) -> Iterator[bool]:
    """Yield whether qsf serve refused each body within its budget, and lived on."""
    inner = dense(MB // 3, b'{"a":[', b"]}").decode()
    function = {"name": "f", "arguments": inner}
    called = {"role": "assistant", "content": None,
              "tool_calls": [{"id": "a", "type": "function", "function": function}]}  # fmt: skip
    user = {"role": "user", "content": "Hi"}
    long = {"role": "user", "content": "x" * 900_000 + "\U0001f600"}
    begin = b'{"messages":[],"chat_template_kwargs":{"a":['
    with served(model) as (server, port):
        for name, body in (
            ("chat_template_kwargs", dense(MB - 9, begin, b"]}}")),
            ("a long text", json.dumps({"messages": [long]}, ensure_ascii=False).encode()),
            ("arguments of a call", json.dumps({"messages": [user, called]}).encode()),
        ):
            yield ask(f"body, {name}", server, port, body, 400)


def slow_bodies() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield name, path and body of requests that may take more time than their size says."""
    user = {"role": "user", "content": "Hi"}
    function = {"name": "f", "arguments": "{" + " " * 1200 + "@"}
    called = {"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}
    yield "cut arguments", "/v1/chat/completions", {"messages": [user, called]}
    chain = "".join(f"a{i}:a{i + 1}?\n" for i in range(4000))
    for name, grammar in (
        ("signs", "<" * 60_000), ("quotes", '"\\"' * 20_000), ("brackets", "(" * 30_000),
        ("a chain", f'a0\n{chain}a4000:"x"'),
    ):  # fmt: skip
        outputs = {"structured_outputs": {"grammar": "start: " + grammar}}
        yield f"grammar, {name}", "/v1/completions", {"prompt": "x", "max_tokens": 1, **outputs}
    links = {f"a{i}": {"properties": {"a": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(1200)}
    for name, schema in (
        ("a chain", {"$ref": "#/$defs/a0", "$defs": {**links, "a1200": {}}}),
        ("names of a part", {"allOf": [{"$ref": f"#/allOf/{'0' * i}1"} for i in range(300)]}),
    ):
        outputs = {"structured_outputs": {"json": schema}}
        yield f"schema, {name}", "/v1/completions", {"prompt": "x", "max_tokens": 1, **outputs}
    repeats = {"structured_outputs": {"regex": "(a?)" * 1600 + "a" * 1600}}
    yield "regex", "/v1/completions", {"prompt": "x", "max_tokens": 1, **repeats}
    yield "stops", "/v1/completions", {"prompt": "x", "max_tokens": 1, "stop": "a" * 900_000}


def slow_cases(model: Path) -> Iterator[bool]:
    """Yield whether qsf serve was there for others while it read each body.

    Other programs may have delayed an answer, so the best of three tries counts.
    """
    with served(model, 200, "on") as (server, port):
        for name, path, body in slow_bodies():
            tries = [delay_beside(port, path, body) for _ in range(3)]
            worst, status = min(tries)
            is_fine = status in (200, 400) and worst < 0.1 and server.poll() is None
            print(f"{name:26} {1000 * worst:6.1f} ms {'' if is_fine else 'WRONG'} {status}")
            yield is_fine


def delay_beside(port: int, path: str, body: dict[str, Any]) -> tuple[float, int]:
    """Return the longest time of /health in seconds while a request is answered, and its status."""
    sent = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    sent.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    statuses: list[int] = []
    sender = threading.Thread(target=lambda: statuses.append(sent.getresponse().status))
    sender.start()
    worst = 0.0
    while sender.is_alive():
        started = time.monotonic()
        health = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        health.request("GET", "/health")
        health.getresponse().read()
        worst = max(worst, time.monotonic() - started)
        time.sleep(0.01)
    return worst, statuses[0] if statuses else 0


def groups_can_be_made() -> bool:
    """Return whether this user can make a memory control group, and say so."""
    try:
        with memory_group(32 * MB) as group:
            print(f"in control groups of version {group.version} whose limit is the budget")
    except CapError as error:
        print(f"without control groups, VmHWM is compared alone: {error}")
        return False
    return True


HAS_GROUPS = groups_can_be_made()


def main() -> int:
    """Try all cases; the exit code is 1 where one broke its promise."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source = Path(shutil.copytree(ROOT / "examples" / "tiny-llama", folder / "source"))
        config = source / "tokenizer_config.json"
        facts = json.loads(config.read_text("utf-8")) if config.exists() else {}
        config.write_text(json.dumps({**facts, "chat_template": TEMPLATE}), "utf-8")
        model = folder / "model.qsf"
        subprocess.run([BIN / "qsf-convert", source, model, "-q"], check=True)
        results = [*run_cases(folder, model), *convert_cases(folder, source), *serve_cases(model)]
        results += slow_cases(model)
        n_runs, seed = (int(word) for word in (*sys.argv[1:], *("200", "0")[len(sys.argv) - 1 :]))
        results += random_cases(folder, model, source, n_runs, seed)
    print(f"{len(results)} cases, {results.count(False)} of them broke a promise")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
