"""An engine without a model: the next token is a digest of the tokens before it."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qsf.errors import (
    QsfArgumentError,
    QsfCancelledError,
    QsfError,
    QsfIOError,
    QsfMemoryError,
)
from qsf.file.session_file import SessionFile, SessionHead, write_session
from qsf.passes import Chosen, PassItem
from qsf.serve.scheduling.engine import ModelEngine
from qsf.serve.scheduling.job import Choosing, Event, Job
from qsf.text.arguments import count_common
from qsf.text.sampling import SamplingParams, StopMatcher
from qsf.text.tokenizer import IncrementalDecoder

N_VOCAB = 50
END = 0


def next_token(tokens: Sequence[int], seed: int) -> int:
    return zlib.crc32(array("I", tokens).tobytes() + seed.to_bytes(8, "little")) % N_VOCAB


class FakeEngine(ModelEngine):
    """Checks what it is asked for; ``failures`` are raised by the next passes, one each."""

    is_windowed = False  # then a slot can be cut within its last chunk

    def __init__(
        self,
        n_slots: int = 3,
        ctx_tokens: int = 64,
        chunk_tokens: int = 16,
        n_kept: int = 0,
        most_drafts: int = 0,  # what jobs of seed 1 choose next
        n_contexts: int | None = None,
    ) -> None:
        self.n_pool = (n_contexts or n_slots) * ctx_tokens
        self.is_disk_full = False
        self.n_loaded = 0
        self.n_running, self.ctx_tokens, self.chunk_tokens = n_slots, ctx_tokens, chunk_tokens
        n_slots += n_kept
        self.sessions: Any = range(n_slots)
        self.n_full = 0
        self.logits_rows, self.score_rows = n_slots + 1, 5
        self.held = [array("I") for _ in range(n_slots)]
        self.has_logits = [False] * n_slots
        self.cancelled: set[int] = set()
        self.failures: list[QsfError] = []
        self.passes: list[list[PassItem]] = []
        self.most_drafts = most_drafts
        self.n_drafts = self.n_accepted = 0
        self.ahead: list[list[int]] = [[] for _ in range(n_slots)]
        self.n_copied = 0
        self.again = [0] * n_slots
        self.before_pass: Callable[[], None] = lambda: None

    def evaluate(self, items: Sequence[PassItem]) -> list[QsfError | None]:
        self.before_pass()
        assert 0 < sum(len(item.tokens) for item in items) <= self.chunk_tokens
        assert len({item.session for item in items}) == len(items)
        assert all(item.tokens for item in items)
        self.passes.append(list(items))
        if self.failures:
            raise self.failures.pop(0)
        n_held = sum(len(tokens) for tokens in self.held)
        n_new = sum(len(item.tokens) for item in items)
        if n_held + n_new > self.n_pool:
            self.n_full += 1
            raise QsfMemoryError("the pool is full")
        self.n_drafts = 0
        is_ahead = all(
            item.wants == "ahead"
            and len(item.tokens) == 1
            and self.is_ahead(item.session, item.tokens[0])
            for item in items
        )
        if not is_ahead:
            self.ahead = [[] for _ in self.ahead]
        return [self._evaluate(item, is_ahead) for item in items]

    def is_ahead(self, slot: int, token: int) -> bool:
        return self.ahead[slot][:1] == [token]

    def _evaluate(self, item: PassItem, is_ahead: bool) -> QsfError | None:
        self.has_logits[item.session] = False
        if item.session in self.cancelled:
            self.cancelled.discard(item.session)
            return QsfCancelledError("cancelled")
        self.held[item.session].extend(item.tokens)
        assert len(self.held[item.session]) <= self.ctx_tokens
        self.has_logits[item.session] = item.wants != "none"
        if is_ahead:
            self.ahead[item.session].pop(0)
            self.n_accepted += 1
        elif item.wants != "none":
            self._guess(self.held[item.session][:], self.ahead[item.session])
        return None

    def _guess(self, tokens: array[int], ahead: list[int]) -> None:
        while len(ahead) < self.most_drafts and len(tokens) < self.ctx_tokens:
            ahead.append(next_token(tokens, 1))
            tokens.append(ahead[-1])
            self.n_drafts += 1

    def choose(self, jobs: Sequence[tuple[int, Job]]) -> list[Chosen | QsfError]:
        return [self._choose(slot, job) for slot, job in jobs]

    def _choose(self, slot: int, job: Job) -> Chosen:
        assert self.has_logits[slot]
        assert self.held[slot] == job.tokens
        return Chosen(next_token(job.tokens, job.choosing.seed), -1.0)

    def scores(self, slot: int, tokens: Sequence[int], n_top: int) -> list[Chosen]:
        return [Chosen(token, -float(token)) for token in tokens]

    def label_scores(self, slot: int, labels: Sequence[int]) -> list[float]:
        assert self.has_logits[slot]
        return [-float(label) for label in labels]

    def n_held(self, slot: int) -> int:
        return len(self.held[slot])

    def count_common(self, slot: int, tokens: array[int]) -> int:
        return count_common(self.held[slot], tokens)

    def tokens(self, slot: int) -> array[int]:
        return self.held[slot][:]

    def n_again(self, slot: int) -> int:
        return self.again[slot]

    def keep(self, slot: int, n_tokens: int) -> None:
        assert n_tokens <= len(self.held[slot])
        self.ahead[slot] = []
        del self.held[slot][0 if self._is_lost(slot, n_tokens) else n_tokens :]
        self.has_logits[slot] = False

    def set_adapters(self, slot: int, scales: object) -> None:
        if scales is not None:
            raise QsfArgumentError("no adapters")

    def copy(self, slot: int, source: int, n_tokens: int) -> None:
        assert slot != source
        assert n_tokens <= len(self.held[source])
        if self._is_lost(source, n_tokens):
            raise QsfError("the window has gone on")
        self.ahead[slot] = []
        self.held[slot] = self.held[source][:n_tokens]
        self.has_logits[slot] = False
        self.n_copied += n_tokens

    def _is_lost(self, slot: int, n_tokens: int) -> bool:
        return self.is_windowed and n_tokens + self.chunk_tokens < len(self.held[slot])

    def state_key(self) -> bytes:
        return bytes(32)

    def state_bytes(self, slot: int) -> int:
        return 4 * len(self.held[slot])

    def save(self, slot: int, path: Path, owner: str) -> None:
        if self.is_disk_full:
            raise QsfIOError("no space left")
        tokens = self.held[slot]
        head = SessionHead(
            key=bytes(32), tokens=tokens, has_logits=False, state_bytes=4 * len(tokens), owner=owner
        )

        def read_block(offset: int, block: memoryview) -> int:
            block[:] = tokens.tobytes()[offset : offset + len(block)]
            return zlib.crc32(block)

        write_session(path, head, read_block, is_synced=False)

    def load(self, slot: int, path: Path) -> tuple[int, str]:
        self.keep(slot, 0)
        with SessionFile(path) as file:
            file.check_blocks()
            n_held = sum(len(tokens) for tokens in self.held)
            if n_held + len(file.head.tokens) > self.n_pool:
                raise QsfMemoryError("the pool is full")
            self.held[slot] = file.head.tokens[:]
            self.n_loaded += 1
            return len(file.head.tokens), file.head.owner

    def cancel(self, slot: int) -> None:
        self.cancelled.add(slot)


class Letters(IncrementalDecoder):
    """Each token is a letter."""

    def __init__(self) -> None:
        pass

    def push(self, token_id: int) -> str:
        return chr(0x40 + token_id)

    def flush(self) -> str:
        return ""


def alone(prompt: Sequence[int], seed: int, max_tokens: int) -> str:
    """The text that a job alone would get."""
    tokens, text = list(prompt), ""
    for _ in range(max_tokens):
        token = next_token(tokens, seed)
        if token == END:
            break
        tokens.append(token)
        text += chr(0x40 + token)
    return text


class Told:
    """A job, and all that it was told."""

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        seed: int = 1,
        max_tokens: int = 8,
        owner: str = "",
        stops: Sequence[str] = (),
        max_seconds: float | None = None,
        is_endless: bool = False,
    ) -> None:
        self.events: list[Event] = []
        self.job = Job(
            prompt=array("I", prompt),
            choosing=Choosing(params=SamplingParams(), seed=seed),
            max_tokens=max_tokens,
            decoder=Letters(),
            matcher=StopMatcher(stops),
            end_ids=frozenset() if is_endless else frozenset({END}),
            sink=lambda _job, event: self.events.append(event),
            owner=owner,
            salt=owner,
            max_seconds=max_seconds,
        )

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def n_ends(self) -> int:
        return sum(event.is_last for event in self.events)

    @property
    def end(self) -> str:
        """Why it has ended: a reason, or the code of a problem; "" while it goes on."""
        last = self.events[-1] if self.events else None
        if last is None or not last.is_last:
            return ""
        return last.reason or (last.problem.code if last.problem is not None else "")
