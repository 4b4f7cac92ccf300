"""What eviction by attention (SnapKV, H2O) would gain over a window of equal memory: a simulation.

A checkpoint in numpy, f32, whole windows of a text at once, with a mask of what each token sees in
each layer and head. Scored are the tokens behind a prompt, against the model that sees all.
``text`` takes windows as they are; ``repeated`` lets 64 tokens from anywhere in the prompt come
again at its end: 16 in it, as a question, 48 behind it.

Usage: python bench/kv_eviction.py MODEL TEXT [--task text|repeated] [--windows N] [--ctx N]
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from qsf.file.layout import Dtype, TensorType, layer_unit
from qsf_converter.original.layers import Original, Weights, linear
from qsf_converter.rounding.plan import Policy, make_plan
from qsf_converter.sources.source import open_source

Array = NDArray[Any]
Seen = Array  # [layers or 1, KV heads or 1, tokens, tokens]: what a token, a row, sees
Rule = Callable[["Masked", Array, Array], Seen]  # of the tokens, and the attention of a prompt

PAGE_TOKENS = 32
OBSERVED_ROWS = 32  # the last of a prompt
CUE_TOKENS, PASSAGE_TOKENS = 16, 64
DEPTHS = 9


class Masked(Original):
    """A checkpoint whose attention sees what it is told to, and tells what it looked at."""

    layers: list[Weights]
    layer_idx = 0
    seen: Seen
    mass: Array  # [layers, KV heads, tokens, tokens] attention, summed over a group's heads

    def heads(self, w: Weights, y: Array) -> Array:
        """As the original's, for layers without windows, ALiBi, caps and sinks."""
        kind, n_tokens = w.kind, len(y)
        if kind.window_tokens or kind.alibi_slopes or kind.score_cap or TensorType.SINKS in w:
            raise SystemExit("a layer has a window, ALiBi, a cap or sinks: not simulated here")
        scale = np.float32(kind.score_scale or kind.head_dim**-0.5)
        q, k = (
            self._turned(w, matrix, norm, y)
            for matrix, norm in (
                (TensorType.Q, TensorType.Q_NORM),
                (TensorType.K, TensorType.K_NORM),
            )
        )
        v = linear(w, TensorType.V, y).reshape(n_tokens, -1, kind.head_dim).transpose(1, 0, 2)
        q = q.reshape(kind.n_kv_heads, -1, n_tokens, kind.head_dim)
        scores = q @ k[:, None].swapaxes(-1, -2) * scale
        seen = self.seen[min(self.layer_idx, len(self.seen) - 1)]
        scores[~np.broadcast_to(seen[:, None], scores.shape)] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        self.mass[self.layer_idx] = scores.sum(axis=1)
        out = (scores @ v[:, None]).reshape(kind.n_heads, n_tokens, kind.head_dim)
        return np.asarray(out.swapaxes(0, 1).reshape(n_tokens, -1))

    def predict(self, ids: Array, seen: Seen) -> Array:
        """Return the stream [tokens, dim] behind the last layer; sets ``mass``."""
        n, kinds = len(ids), self.layers[0].kind
        self.seen = seen & np.tri(n, dtype=bool)
        self.mass = np.empty((self.header.n_layers, kinds.n_kv_heads, n, n), np.float32)
        x = self.embed(ids[None])
        for i, weights in enumerate(self.layers):
            self.layer_idx = i
            x = self.layer(weights, x)
        return np.asarray(x[0])


@contextmanager
def opened(path: Path) -> Iterator[Masked]:
    """Open a checkpoint with all of its layers in memory."""
    with open_source(path) as source:
        policy = Policy(Dtype.F16, Dtype.F16)
        model = Masked(
            make_plan(source.family, source.facts, source.checkpoint, policy), source.checkpoint
        )
        model.layers = [model.weights(layer_unit(i)) for i in range(model.header.n_layers)]
        yield model


# ---- what is seen ----


def see_all(_model: Masked, ids: Array, _mass: Array) -> Seen:
    """Return that everything is seen."""
    return np.ones((1, 1, len(ids), len(ids)), bool)


def window(n_window: int, n_pinned: int) -> Rule:
    """Return the rule of ``--kv-policy window``: every token sees the first and the newest."""

    def rule(_model: Masked, ids: Array, _mass: Array) -> Seen:
        at = np.arange(len(ids))
        seen = (at[:, None] - at < n_window) | (at < n_pinned)
        return np.asarray(seen[None, None])

    return rule


def behind_prompt(kept: Array, n_tokens: int) -> Seen:
    """Let tokens behind a prompt see of it what is kept, [layers or 1, KV heads or 1, prompt]."""
    n_prompt = kept.shape[-1]
    seen = np.ones((*kept.shape[:2], n_tokens, n_tokens), bool)
    seen[..., n_prompt:, :n_prompt] = kept[:, :, None]
    return seen


def newest(n_prompt: int, n_kept: int, n_pinned: int) -> Rule:
    """Return the rule that forgets the middle of a prompt when it has been read."""

    def rule(_model: Masked, ids: Array, _mass: Array) -> Seen:
        at = np.arange(n_prompt)
        kept = (at < n_pinned) | (at >= n_prompt - n_kept + n_pinned)
        return behind_prompt(kept[None, None], len(ids))

    return rule


def best_pages(mass: Array, n_kept: int) -> Array:
    """Return which pages [..., pages] have the most of the mass."""
    order = np.argsort(-mass, axis=-1, kind="stable")
    return np.asarray(np.argsort(order, axis=-1) < n_kept)


def snapkv(n_prompt: int, n_kept: int, page_tokens: int, shared: tuple[int, ...]) -> Rule:
    """Return the rule that keeps of a prompt what its last rows look at, by pages.

    The first page and the last 32 positions stay. ``shared`` are the axes (layers, KV heads) over
    which there is one choice.
    """

    def rule(_model: Masked, ids: Array, mass: Array) -> Seen:
        observed = mass[..., n_prompt - OBSERVED_ROWS : n_prompt, :n_prompt].sum(axis=-2)
        observed = observed.mean(axis=shared, keepdims=True) if shared else observed
        pages = observed.reshape(*observed.shape[:2], -1, page_tokens).sum(axis=-1)
        pages[..., : max(1, 4 // page_tokens)] = pages[..., -(OBSERVED_ROWS // page_tokens) :] = (
            np.inf
        )
        kept = best_pages(pages, n_kept // page_tokens)
        return behind_prompt(np.repeat(kept, page_tokens, axis=-1), len(ids))

    return rule


def h2o(n_kept: int, page_tokens: int, shared: tuple[int, ...]) -> Rule:
    """Return the rule that keeps half of the pages for being new, half for the sum of attention."""

    def rule(model: Masked, ids: Array, mass: Array) -> Seen:
        n = len(ids)
        n_pages, n_held = -(-n // page_tokens), n_kept // page_tokens
        total = np.zeros((*mass.shape[:2], n_pages), np.float32)
        held = np.ones((*(1 if i in shared else mass.shape[i] for i in (0, 1)), n_pages), bool)
        seen = np.ones((*held.shape[:2], n, n), bool)
        for end in range(PAGE_TOKENS, n, PAGE_TOKENS):
            model.predict(ids[:end], seen[..., :end, :end])
            rows = model.mass[..., end - PAGE_TOKENS :, :].sum(axis=-2)
            total[..., : end // page_tokens] += rows.reshape(*rows.shape[:2], -1, page_tokens).sum(
                -1
            )
            if end <= n_kept:
                continue
            n_old = end // page_tokens - n_held // 2
            of_all = total.mean(axis=shared, keepdims=True) if shared else total
            old = np.where(held[..., :n_old], of_all[..., :n_old], -1)
            held[..., :n_old] &= best_pages(old, n_held - n_held // 2)
            seen[..., end:, :] &= np.repeat(held, page_tokens, axis=-1)[:, :, None, :n]
        return seen

    return rule


def rules(n_prompt: int, n_kept: int, n_answer: int) -> dict[str, Rule]:
    """Return what is compared: all keep as many positions, when the answer begins or on average."""
    n_end = n_kept + n_answer
    n_mean = n_kept + n_answer // 2 // PAGE_TOKENS * PAGE_TOKENS
    half_page = PAGE_TOKENS // 2
    return {
        "all": see_all,
        f"window:{n_end - 32}:32, prompt too": window(n_end - 32, 32),
        f"first 32, newest {n_kept - 32} of the prompt": newest(n_prompt, n_kept, 32),
        f"newest {n_kept} of the prompt": newest(n_prompt, n_kept, 0),
        "snapkv, pages of 32, one choice": snapkv(n_prompt, n_kept, 32, (0, 1)),
        "snapkv, pages of 32, each layer": snapkv(n_prompt, n_kept, 32, (1,)),
        "snapkv, pages of 32, each head": snapkv(n_prompt, n_kept, 32, ()),
        "snapkv, pages of 8, each head": snapkv(n_prompt, n_kept, 8, ()),
        f"window:{n_mean + half_page}:0": window(n_mean + half_page, 0),
        f"h2o:{n_mean}, pages of 32, one choice": h2o(n_mean, 32, (0, 1)),
    }


# ---- figures ----


@dataclass
class Scores:
    """Of one rule, by window."""

    nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)  # the likeliest token was right

    def line(self, name: str, against: Scores) -> str:
        """Return a row of the table."""
        change = np.array(self.nll) - against.nll
        error = change.std() / math.sqrt(len(change))
        thirds = np.arange(len(change)) % DEPTHS * 3 // DEPTHS
        hits = "".join(f"{np.array(self.hits)[thirds == i].mean():6.1%}" for i in range(3))
        return (
            f"{name:40}{math.exp(np.mean(self.nll)):10.2f}{change.mean():+9.2%} +-{error:6.2%}"
            f"{np.mean(self.kl):10.4f}   {hits}"
        )


def score(
    model: Masked, ids: Array, n_prompt: int, compared: dict[str, Rule], scores: dict[str, Scores]
) -> None:
    """Add the figures of one window."""
    model.predict(ids, see_all(model, ids, ids))
    mass = model.mass
    whole: Array = np.empty(0)
    targets = ids[n_prompt:, None]
    for name, rule in compared.items():
        seen = rule(model, ids, mass)
        rows = model.logits(model.predict(ids, seen)[n_prompt - 1 : -1]).astype(np.float64)
        rows -= rows.max(axis=-1, keepdims=True)
        rows -= np.log(np.exp(rows).sum(axis=-1, keepdims=True))
        whole = rows if name == "all" else whole
        kept = scores.setdefault(name, Scores())
        kept.nll.append(-float(np.take_along_axis(rows, targets, -1).mean()))
        kept.kl.append(float((np.exp(whole) * (whole - rows)).sum(axis=-1).mean()))
        kept.hits.append(float((rows.argmax(axis=-1) == targets[:, 0]).mean()))


def cut(ids: Array, i: int, ctx_tokens: int, n_prompt: int, task: str) -> Array:
    """Return window i of a text; with ``repeated`` its passage comes again."""
    tokens = ids[i * ctx_tokens : (i + 1) * ctx_tokens].copy()
    if task == "text":
        return np.asarray(tokens)
    begin = n_prompt - CUE_TOKENS
    at = (n_prompt - 2 * PASSAGE_TOKENS) * (i % DEPTHS) // (DEPTHS - 1)
    tokens[begin : begin + PASSAGE_TOKENS] = tokens[at : at + PASSAGE_TOKENS].copy()
    return np.asarray(tokens[: begin + PASSAGE_TOKENS])


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--task", choices=("text", "repeated"), default="text")
    parser.add_argument("--windows", type=int, default=27)
    parser.add_argument("--ctx", type=int, default=256)
    asked = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(asked.model / "tokenizer.json"))
    text = asked.text.read_text("utf-8")[: 16 * asked.windows * asked.ctx]
    ids = np.array(tokenizer.encode(text).ids)
    n_prompt = asked.ctx * 3 // 4 // PAGE_TOKENS * PAGE_TOKENS
    n_kept = n_prompt // 2 // PAGE_TOKENS * PAGE_TOKENS
    scores: dict[str, Scores] = {}
    with opened(asked.model) as model:
        for i in range(asked.windows):
            tokens = cut(ids, i, asked.ctx, n_prompt, asked.task)
            compared = rules(n_prompt, n_kept, len(tokens) - n_prompt)
            score(model, tokens, n_prompt, compared, scores)
    print(f"prompt {n_prompt}, kept {n_kept}; hits by thirds of the depth of what is asked for")
    print(f"{'what is kept':40}{'perplexity':>10}{'change':>9}{'':9}{'KL':>10}")
    for name, kept in scores.items():
        print(kept.line(name, scores["all"]))


if __name__ == "__main__":
    main()
