"""``python -m qsf.bench serve URL``: many requests at a time to a server that runs already.

The server may be qsf serve or another that has OpenAI's /v1/completions with streams, such as
llama-server: started with the same model shape and threads, the figures of both can be compared.
Prompts are made of random words by a seed, so both get the same and no cache has their beginnings.

Exit codes: 0 done, 1 a request failed, 2 wrong options.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

_WORDS = ("time", "day", "way", "man", "world", "life", "hand", "part", "child", "eye", "place")
_CONNECT_SECONDS = 30.0


@dataclass(slots=True)
class Answer:
    """What came of one request; times in seconds since it was sent."""

    status: str = ""  # "done", "left" (by us), or what went wrong
    n_tokens: int = 0
    first_seconds: float = 0.0
    pauses: list[float] = field(default_factory=list)  # between two events of the stream
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Figures:
    """One row of the report: ``streams`` at a time, or ``rate`` a second."""

    streams: int | None
    rate: float | None
    n_done: int
    n_left: int
    n_failed: int
    failures: tuple[str, ...]
    tokens_per_second: float
    first_p50: float
    first_p95: float
    pause_p50: float
    pause_p99: float
    pause_most: float


def prompt_of(rng: random.Random, n_words: int) -> str:
    """Return words, mostly a token each."""
    return " ".join(rng.choice(_WORDS) for _ in range(n_words))


async def ask(url: str, body: dict[str, Any], leaves_after: int | None) -> Answer:
    """Send one request and read its stream, to the end or until we leave."""
    place = urlsplit(url)
    answer = Answer()
    started = last = time.perf_counter()
    connection = asyncio.open_connection(place.hostname, place.port or 80)
    try:
        reader, writer = await asyncio.wait_for(connection, _CONNECT_SECONDS)
    except (OSError, asyncio.TimeoutError) as error:
        return Answer(status=f"no connection: {error}")
    try:
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        status = (await reader.readline()).split()[1:2]
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
            if leaves_after is not None and len(answer.pauses) >= leaves_after:
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


async def load(options: argparse.Namespace, streams: int | None) -> Figures:
    """Send all requests: ``streams`` at a time (closed loop), or by the rate (open loop)."""
    rng = random.Random(f"{options.seed} {streams}")
    plan = []
    for i in range(options.requests):
        prompt = f"{i} {prompt_of(rng, rng.choice(options.prompt_tokens))}"
        leaves = rng.randrange(1, 20) if rng.random() < options.disconnects else None
        body = {"prompt": prompt, "max_tokens": options.max_tokens, "stream": True, "seed": i}
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        plan.append((body, leaves, rng.expovariate(options.rate) if options.rate else 0.0))
    gate = asyncio.Semaphore(streams or len(plan))

    async def one(body: dict[str, Any], leaves: int | None, after: float) -> Answer:
        await asyncio.sleep(after)
        async with gate:
            return await ask(options.url, body, leaves)

    started = time.perf_counter()
    times, at = [], 0.0
    for _, _, gap in plan:
        at += gap
        times.append(at)
    answers = await asyncio.gather(
        *(one(body, leaves, at) for (body, leaves, _), at in zip(plan, times, strict=True))
    )
    return figures(answers, time.perf_counter() - started, streams, options.rate)


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
        failures=tuple(sorted({a.status for a in answers} - {"done", "left"})),
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


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise ValueError(text)
    return numbers


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the command line, parsed. Exits where it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m qsf.bench serve", description=(__doc__ or "").split("\n\n")[1]
    )
    add = parser.add_argument
    add("url", metavar="URL", help="of a server, such as http://127.0.0.1:8080")
    add(
        "--streams",
        type=_numbers,
        default=[1, 4, 8],
        metavar="N,...",
        help="closed loop: so many requests at a time, a row each (default: 1,4,8)",
    )
    add("--rate", type=float, metavar="R", help="open loop instead: R requests a second")
    add("--requests", type=int, default=16, metavar="N", help="of each row (default: 16)")
    add(
        "--prompt-tokens",
        type=_numbers,
        default=[16, 64, 256],
        metavar="N,...",
        help="words of a prompt: one of these, by the seed (default: 16,64,256)",
    )
    add("--max-tokens", type=int, default=64, metavar="N", help="of an answer (default: 64)")
    add(
        "--disconnects",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of the requests, 0 to 1: clients that leave in the middle (default: 0)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of prompts and times (default: 0)")
    add("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)  # fmt: skip
    if urlsplit(options.url).scheme != "http" or not urlsplit(options.url).hostname:
        parser.error(f"URL must begin with http://, not be {options.url!r}")
    if options.requests < 1 or options.max_tokens < 1 or not 0 <= options.disconnects <= 1:
        parser.error("--requests and --max-tokens are at least 1, --disconnects is from 0 to 1")
    if options.rate is not None and options.rate <= 0:
        parser.error(f"--rate must be above 0, not {options.rate:g}")
    return options


def run(arguments: Sequence[str]) -> tuple[str, int]:
    """Measure; return the report and the exit code."""
    options = parse(arguments)
    rows = [None] if options.rate is not None else options.streams
    found = [asyncio.run(load(options, streams)) for streams in rows]
    code = int(any(row.n_failed for row in found))
    if options.json:
        return json.dumps([asdict(row) for row in found], indent=1), code
    lines = ["           tokens   first token, s       pause, ms              requests"]
    lines.append("streams  a second     p50     p95     p50    p99   most   done left failed")
    for row in found:
        name = f"{row.rate:g}/s" if row.streams is None else str(row.streams)
        pauses = (1e3 * s for s in (row.pause_p50, row.pause_p99, row.pause_most))
        lines.append(
            f"{name:>7}  {row.tokens_per_second:8.1f} {row.first_p50:7.3f} {row.first_p95:7.3f}  "
            + "".join(f"{ms:6.0f} " for ms in pauses)
            + f" {row.n_done:5} {row.n_left:4} {row.n_failed:6}  {', '.join(row.failures)}"
        )
    return "\n".join(line.rstrip() for line in lines), code
