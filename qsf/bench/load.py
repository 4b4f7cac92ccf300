"""``python -m qsf.bench serve URL``: many requests at a time to a server that runs already.

The server may be qsf serve or another that has OpenAI's /v1/completions with streams, such as
llama-server: started with the same model shape and threads, the figures of both can be compared.
Prompts are made of random words by a seed, so both get the same and no cache has their beginnings.

With --seconds it is a soak: random load for so long, with clients that leave and requests that are
wrong. What the server's /metrics say of its memory, its open files and the ends of its requests is
shown for each tenth of the time.

Exit codes: 0 done, 1 a request failed, 2 wrong options.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from qsf.options import Kind, Number, Whole
from qsf.shell.arguments import parser_of

_WORDS = ("time", "day", "way", "man", "world", "life", "hand", "part", "child", "eye", "place")
_CONNECT_SECONDS = 30.0
_FAULTS = ("half", "unread", "value")
_N_SAMPLES = 10  # of a soak
_END_SECONDS = 30.0  # in which a server ends the requests that clients have left


@dataclass(slots=True)
class Answer:
    """What came of one request; times in seconds since it was sent."""

    status: str = ""  # "done", "left" (by us, or sent wrong), or what went wrong
    n_tokens: int = 0
    first_seconds: float = 0.0
    pauses: list[float] = field(default_factory=list)  # between two events of the stream
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """What is sent, and what the client does wrong.

    Attributes:
        after: seconds since the request before, in an open loop.
        leaves_after: pieces of the answer after which the client goes; None: it stays.
        fault: "half": the request is never finished; "unread": the client goes at once; "value": a
            field is wrong, which the server must say; "": none.
    """

    body: dict[str, Any]
    after: float = 0.0
    leaves_after: int | None = None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """What the server's /metrics said ``seconds`` after the start."""

    seconds: float
    memory_bytes: int
    n_files: int
    n_requests: int  # sequences that it has taken
    n_ends: int  # and those that have ended


@dataclass(frozen=True, slots=True)
class Figures:
    """One row of the report: ``streams`` at a time, or ``rate`` a second."""

    streams: int | None
    rate: float | None
    n_done: int
    n_left: int
    n_failed: int
    failures: dict[str, int]
    tokens_per_second: float
    first_p50: float
    first_p95: float
    pause_p50: float
    pause_p99: float
    pause_most: float
    samples: tuple[Sample, ...] = ()


def prompt_of(rng: random.Random, n_words: int) -> str:
    """Return words, mostly a token each."""
    return " ".join(rng.choice(_WORDS) for _ in range(n_words))


async def ask(url: str, request: Request) -> Answer:
    """Send one request and read its stream, to the end or until we leave."""
    place = urlsplit(url)
    answer = Answer()
    started = last = time.perf_counter()
    try:
        reader, writer = await _connect(url)
    except (OSError, asyncio.TimeoutError) as error:
        return Answer(status=f"no connection: {error}")
    try:
        data = json.dumps(request.body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write((head.encode() + data)[: len(head) if request.fault == "half" else None])
        if request.fault in ("half", "unread"):
            await writer.drain()
            return Answer("left")
        status = (await reader.readline()).split()[1:2]
        if request.fault and status == [b"400"]:
            return Answer("left")
        if status != [b"200"]:
            return Answer(status=f"status {status[0].decode() if status else 'none'}")
        answer.status = "cut off"
        async for line in reader:
            if not line.startswith(b"data: "):
                continue
            now = time.perf_counter()
            if line[6:].strip() == b"[DONE]":
                answer.status = "done"
                break
            event = json.loads(line[6:])
            if "error" in event:
                answer.status = str(event["error"].get("code"))
                break
            answer.n_tokens = (event.get("usage") or {}).get("completion_tokens", answer.n_tokens)
            if not event["choices"] or not event["choices"][0]["text"]:
                continue
            if answer.first_seconds:
                answer.pauses.append(now - last)
            answer.first_seconds = answer.first_seconds or now - started
            last = now
            if request.leaves_after is not None and len(answer.pauses) >= request.leaves_after:
                answer.status, answer.n_tokens = "left", len(answer.pauses) + 1
                break
    except (OSError, ValueError, LookupError) as error:
        answer.status = f"failed: {error!r}"
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    answer.seconds = time.perf_counter() - started
    return answer


async def _connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    place = urlsplit(url)
    connection = asyncio.open_connection(place.hostname, place.port or 80)
    return await asyncio.wait_for(connection, _CONNECT_SECONDS)


def requests(options: argparse.Namespace, streams: int | None) -> Iterator[Request]:
    """Yield requests without end, by the seed."""
    rng = random.Random(f"{options.seed} {streams}")
    for i in itertools.count():
        prompt = f"{i} {prompt_of(rng, rng.choice(options.prompt_tokens))}"
        leaves = rng.randrange(1, 20) if rng.random() < options.disconnects else None
        body = {"prompt": prompt, "max_tokens": options.max_tokens, "stream": True, "seed": i}
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        after = rng.expovariate(options.rate) if options.rate else 0.0
        fault = rng.choice(_FAULTS) if options.faults and rng.random() < options.faults else ""
        if fault == "value":
            body["temperature"] = -1
        yield Request(body, after, leaves, fault)


async def load(options: argparse.Namespace, streams: int | None) -> Figures:
    """Send all requests: ``streams`` at a time (closed loop), or by the rate (open loop)."""
    gate = asyncio.Semaphore(streams or 1)
    started = time.perf_counter()
    answers: list[Answer] = []
    under_way: set[asyncio.Task[None]] = set()

    async def one(request: Request) -> None:
        answers.append(await ask(options.url, request))
        if streams:
            gate.release()

    samples: list[Sample] = []
    watching = asyncio.ensure_future(_watch(options, samples))
    n_requests = options.requests if options.seconds is None else None
    for request in itertools.islice(requests(options, streams), n_requests):
        if streams:
            await gate.acquire()
        else:
            await asyncio.sleep(request.after)
        if options.seconds is not None and time.perf_counter() - started >= options.seconds:
            break
        task = asyncio.ensure_future(one(request))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    await asyncio.gather(*under_way)
    seconds = time.perf_counter() - started
    await watching
    return replace(figures(answers, seconds, streams, options.rate), samples=tuple(samples))


async def _watch(options: argparse.Namespace, samples: list[Sample]) -> None:
    """Look at the server's /metrics after each tenth of the time, and when all have ended."""
    started = time.perf_counter()
    for i in range(1, _N_SAMPLES + 1) if options.seconds is not None else ():
        await asyncio.sleep(
            max(0.0, started + i * options.seconds / _N_SAMPLES - time.perf_counter())
        )
        ends_at = time.perf_counter() + _END_SECONDS
        while (sample := await _sample(options.url, time.perf_counter() - started)) is not None:
            is_last = i == _N_SAMPLES and sample.n_ends < sample.n_requests
            if not is_last or time.perf_counter() > ends_at:
                samples.append(sample)
                break
            await asyncio.sleep(1.0)


async def _sample(url: str, seconds: float) -> Sample | None:
    """Return what /metrics says now; None: it does not answer, or with other names."""
    try:
        reader, writer = await _connect(url)
        host = urlsplit(url).netloc
        writer.write(f"GET /metrics HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        text = (await reader.read()).decode()
        writer.close()
    except (OSError, asyncio.TimeoutError, UnicodeDecodeError):
        return None
    values = re.findall(r"^([\w:]+)(?:{.*})? ([\d.e+]+)\r?$", text, re.MULTILINE)
    sums: Counter[str] = Counter()
    for name, value in values:
        sums[name] += int(float(value))
    if "process_open_fds" not in sums:
        return None
    names = ("process_resident_memory_bytes", "process_open_fds")
    counts = ("qsf:requests_total", "qsf:request_success_total")
    return Sample(seconds, *(sums[name] for name in (*names, *counts)))


def figures(
    answers: Sequence[Answer], seconds: float, streams: int | None, rate: float | None
) -> Figures:
    """Return what the answers of one row come to."""
    firsts = [a.first_seconds for a in answers if a.first_seconds]
    pauses = [pause for a in answers for pause in a.pauses]
    counts = [sum(a.status == name for a in answers) for name in ("done", "left")]
    return Figures(
        streams=streams,
        rate=rate,
        n_done=counts[0],
        n_left=counts[1],
        n_failed=len(answers) - sum(counts),
        failures=dict(Counter(a.status for a in answers if a.status not in ("done", "left"))),
        tokens_per_second=sum(a.n_tokens for a in answers) / seconds,
        first_p50=share(firsts, 50),
        first_p95=share(firsts, 95),
        pause_p50=share(pauses, 50),
        pause_p99=share(pauses, 99),
        pause_most=max(pauses, default=0.0),
    )


def share(values: Sequence[float], percent: int) -> float:
    """Return the value that ``percent`` of all are not above; 0 of none."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


class _Numbers(Whole):
    """Several whole numbers."""

    def parse(self, text: str) -> Any:
        """Return their list."""
        return [Whole.parse(self, part) for part in text.split(",")]


_SHARE = Number(0, 1)
_ABOVE_0 = Number(0, 1e9, is_open=True)
_OPTIONS: tuple[tuple[str, Kind, Any, str], ...] = (
    ("streams", _Numbers(1), [1, 4, 8], "closed loop: so many requests at a time, a row each"),
    ("rate", _ABOVE_0, None, "open loop instead: so many requests a second"),
    ("requests", Whole(1), 16, "of each row"),
    ("prompt-tokens", _Numbers(1), [16, 64, 256], "words of a prompt: one of these, by the seed"),
    ("max-tokens", Whole(1), 64, "of an answer"),
    ("disconnects", _SHARE, 0.0, "share of the requests whose clients leave in the middle"),
    (
        "faults", _SHARE, 0.0,
        "share of the requests that are wrong: half of one, a wrong value, an answer that nobody "
        "waits for",
    ),
    (
        "seconds", _ABOVE_0, None,
        "a soak: requests for so long instead of --requests; shows what the server's memory, open "
        "files and requests do meanwhile",
    ),
    ("seed", Whole(0), 0, "of prompts and times"),
)  # fmt: skip


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the command line, parsed. Exits where it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m qsf.bench serve", description=(__doc__ or "").split("\n\n")[1]
    )
    parser.add_argument("url", metavar="URL", help="of a server, such as http://127.0.0.1:8080")
    for name, kind, default, text in _OPTIONS:
        is_list = isinstance(default, list)
        shown = ",".join(map(str, default)) if is_list else default
        parser.add_argument(
            f"--{name}",
            type=parser_of(kind),
            default=default,
            metavar="N,..." if is_list else kind.metavar,
            help=text if default is None else f"{text} (default: {shown})",
        )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    if urlsplit(options.url).scheme != "http" or not urlsplit(options.url).hostname:
        parser.error(f"URL must begin with http://, not be {options.url!r}")
    return options


def run(arguments: Sequence[str]) -> tuple[str, int]:
    """Measure; return the report and the exit code."""
    options = parse(arguments)
    rows = [None] if options.rate is not None else options.streams
    measured = [asyncio.run(load(options, streams)) for streams in rows]
    code = int(any(row.n_failed for row in measured))
    if options.json:
        return json.dumps([asdict(row) for row in measured], indent=1), code
    lines = ["           tokens   first token, s       pause, ms              requests"]
    lines.append("streams  a second     p50     p95     p50    p99   most   done left failed")
    for row in measured:
        name = f"{row.rate:g}/s" if row.streams is None else str(row.streams)
        pauses = (1e3 * s for s in (row.pause_p50, row.pause_p99, row.pause_most))
        lines.append(
            f"{name:>7}  {row.tokens_per_second:8.1f} {row.first_p50:7.3f} {row.first_p95:7.3f}  "
            + "".join(f"{ms:6.0f} " for ms in pauses)
            + f" {row.n_done:5} {row.n_left:4} {row.n_failed:6}  "
            + ", ".join(f"{name} ({n})" for name, n in row.failures.items())
        )
        lines += _sample_lines(row.samples)
    return "\n".join(line.rstrip() for line in lines), code


def _sample_lines(samples: Sequence[Sample]) -> list[str]:
    if not samples:
        return []
    lines = ["", "seconds  memory, MB  open files  sequences   ended"]
    return lines + [
        f"{s.seconds:7.0f}  {s.memory_bytes / 2**20:10.1f} {s.n_files:11} {s.n_requests:10} "
        f"{s.n_ends:7}"
        for s in samples
    ]
