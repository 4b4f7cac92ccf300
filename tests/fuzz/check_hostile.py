"""Gives commands JSON that takes many times its bytes, and compares VmHWM with the budget.

Prints one line for each case; the exit code is 1 where a process took more than its budget, or did
not refuse its input by one line. With RUNS, so many random documents follow, which commands may
also take, but not more memory.

Usage: python tests/fuzz/check_hostile.py [RUNS [SEED]]
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

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
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "python"))

from make.attacks import entry_at, grow  # noqa: E402
from make.qsf_files import repair  # noqa: E402

BIN = Path(sys.executable).parent
MB = 1 << 20
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


def run(name: str, budget_mb: int, words: Sequence[object], *, may_succeed: bool = False) -> bool:
    """Run a command that is to refuse its input; return whether it did, within the budget."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [str(BIN / str(words[0])), *map(str, words[1:])],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
        )  # fmt: skip
        time.sleep(0.05)  # until then it may be a copy of this process
        peak = 0.0
        while process.poll() is None:
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
    kept = folder / "kept.qsfs"
    subprocess.run(
        [BIN / "qsf-run", model, "-p", "Hi", "-n", "2", "-q", "--session", kept],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    data = kept.read_bytes()
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
    ask = ["qsf-run", model, "-n", 2, "-q", "--ram-budget", 60]
    for number in range(n_runs):
        n_bytes = int(10 ** rng.uniform(1, 7))
        path = folder / "random.json"
        kind = rng.choice(("prompts", "answers", "conversation", "config", "weights", "tokens"))
        path.write_bytes(random_json(rng, n_bytes, b'{"messages":[', b"]}"))
        words: list[object] = [*ask, "-p", "Hi", "--session", path]
        limit_mb = 60
        if kind in ("prompts", "answers"):
            path.write_bytes(random_json(rng, n_bytes, b'{"index":0,"of":"x","a":[', b"]}\n"))
            one = folder / "one.jsonl"
            files = [path] if kind == "prompts" else [one, "--answers", path]
            words = [*ask, "--prompts", *files]
        elif kind in ("config", "weights", "tokens"):
            copy = Path(shutil.copytree(source, folder / "random", dirs_exist_ok=True))
            name = {"config": "config.json", "tokens": "tokenizer.json"}.get(kind)
            data = random_json(rng, n_bytes, b'{"a":[', b"]}")
            head = b"" if name else struct.pack("<Q", len(data))
            (copy / (name or "model.safetensors")).write_bytes(head + data)
            words, limit_mb = ["qsf-convert", copy, folder / "out.qsf", "-q", "--force"], CONVERT_MB
        yield run(f"{number} {kind}, {n_bytes} bytes", limit_mb, words, may_succeed=True)
        shutil.rmtree(folder / "random", ignore_errors=True)


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


def serve_cases(model: Path) -> Iterator[bool]:
    """Yield whether qsf serve refused each body within its budget, and lived on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [BIN / "qsf-serve", model, "--port", str(port), "--ram-budget", "70"]
    server = subprocess.Popen([*words, "--constraints", "off"], stderr=subprocess.DEVNULL)
    inner = dense(MB // 3, b'{"a":[', b"]}").decode()
    function = {"name": "f", "arguments": inner}
    called = {"role": "assistant", "content": None,
              "tool_calls": [{"id": "a", "type": "function", "function": function}]}  # fmt: skip
    user = {"role": "user", "content": "Hi"}
    long = {"role": "user", "content": "x" * 900_000 + "\U0001f600"}
    begin = b'{"messages":[],"chat_template_kwargs":{"a":['
    try:
        for _ in range(300):
            time.sleep(0.1)
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
        for name, body in (
            ("chat_template_kwargs", dense(MB - 9, begin, b"]}}")),
            ("a long text", json.dumps({"messages": [long]}, ensure_ascii=False).encode()),
            ("arguments of a call", json.dumps({"messages": [user, called]}).encode()),
        ):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            kind = {"content-type": "application/json"}
            connection.request("POST", "/v1/chat/completions", body, kind)
            status = connection.getresponse().status
            peak = peak_mb(server.pid)
            is_fine = status == 400 and 0 < peak <= 70
            print(f"serve, {name:19} {peak:6.1f} of 70 MB {'' if is_fine else 'WRONG'} {status}")
            yield is_fine
    finally:
        server.terminate()
        server.wait()


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
        n_runs, seed = (*map(int, sys.argv[1:]), 0, 0)[:2]
        results += random_cases(folder, model, source, n_runs, seed)
    print(f"{len(results)} cases, {results.count(False)} of them broke a promise")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
