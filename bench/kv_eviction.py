"""What eviction by attention (H2O, SnapKV) would gain over a window of equal size: a simulation.

A LLaMA checkpoint in numpy, f32, token by token, with a mask of kept positions for each layer and
KV head, which a policy changes after each token. Windows of 256 tokens of a text; scored is the
second half, against the model that keeps all.

Usage: python bench/kv_eviction.py MODEL_FOLDER TEXT [--windows N]
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
# (keep, mass, i): after token i; keep and mass are [windows, layers, KV heads, positions].
Policy = Callable[[Array, Array, int], None]

CTX_TOKENS = 256
BUDGET_TOKENS = 100
PROMPT_TOKENS = CTX_TOKENS // 2
OBSERVED_ROWS = 32


class Llama:
    """The weights of a checkpoint, f32."""

    def __init__(self, folder: Path) -> None:
        """Read the folder."""
        from safetensors.numpy import load_file

        self.config = json.loads((folder / "config.json").read_text("utf-8"))
        tensors = load_file(folder / "model.safetensors")
        self.tensors = {name: t.astype(np.float32) for name, t in tensors.items()}
        self.n_layers = self.config["num_hidden_layers"]
        self.n_heads = self.config["num_attention_heads"]
        self.n_kv_heads = self.config["num_key_value_heads"]
        self.head_dim = self.config["hidden_size"] // self.n_heads
        theta = self.config.get("rope_theta", 10000.0)
        pairs = np.arange(0, self.head_dim, 2) / self.head_dim
        self.frequencies = (theta**-pairs).astype(np.float32)

    def matrix(self, layer: int, name: str) -> Array:
        """Return a matrix [outputs, inputs] of a layer."""
        return self.tensors[f"model.layers.{layer}.{name}.weight"]

    def norm(self, x: Array, name: str) -> Array:
        """Return x [.., dim], normalised."""
        scale = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.config["rms_norm_eps"])
        return np.asarray(x * scale * self.tensors[name])

    def rotate(self, x: Array, position: int) -> Array:
        """Return x [.., head_dim] with RoPE."""
        cos, sin = np.cos(position * self.frequencies), np.sin(position * self.frequencies)
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def predict(model: Llama, ids: Array, policy: Policy) -> Array:
    """Return the log-probabilities [windows, positions, vocabulary] after each token of ids."""
    n, n_tokens = ids.shape
    shape = (n, model.n_layers, model.n_kv_heads, n_tokens)
    keep, mass = np.zeros(shape, bool), np.zeros(shape, np.float32)
    keys = np.zeros((*shape, model.head_dim), np.float32)
    values = np.zeros_like(keys)
    table = model.tensors["model.embed_tokens.weight"]
    head = model.tensors.get("lm_head.weight", table)
    out = np.empty((n, n_tokens, len(table)), np.float32)
    for i in range(n_tokens):
        x = table[ids[:, i]]
        keep[..., i] = True
        for layer in range(model.n_layers):
            at = f"model.layers.{layer}"
            y = model.norm(x, f"{at}.input_layernorm.weight")
            q, k, v = (
                (y @ model.matrix(layer, f"self_attn.{name}_proj").T).reshape(
                    n, model.n_kv_heads, -1, model.head_dim
                )
                for name in "qkv"
            )
            keys[:, layer, :, i] = model.rotate(k[:, :, 0], i)
            values[:, layer, :, i] = v[:, :, 0]
            seen = slice(0, i + 1)
            scores = np.einsum("nkgd,nktd->nkgt", model.rotate(q, i), keys[:, layer, :, seen])
            scores *= model.head_dim**-0.5
            scores[~np.broadcast_to(keep[:, layer, :, None, seen], scores.shape)] = -np.inf
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            mass[:, layer, :, seen] += weights.sum(axis=2)
            attended = np.einsum("nkgt,nktd->nkgd", weights, values[:, layer, :, seen])
            x = x + attended.reshape(n, -1) @ model.matrix(layer, "self_attn.o_proj").T
            y = model.norm(x, f"{at}.post_attention_layernorm.weight")
            gate = y @ model.matrix(layer, "mlp.gate_proj").T
            up = y @ model.matrix(layer, "mlp.up_proj").T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ model.matrix(layer, "mlp.down_proj").T
        logits = model.norm(x, "model.norm.weight") @ head.T
        logits -= logits.max(axis=-1, keepdims=True)
        out[:, i] = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        policy(keep, mass, i)
    return out


# ---- policies ----


def keep_all(keep: Array, mass: Array, i: int) -> None:
    """Change nothing."""


def window(n_pinned: int) -> Policy:
    """Keep the first n_pinned and the newest of the budget."""

    def change(keep: Array, mass: Array, i: int) -> None:
        del mass
        keep[..., n_pinned : max(n_pinned, i + 1 - (BUDGET_TOKENS - n_pinned))] = False

    return change


def shared_mass(mass: Array) -> Array:
    """One choice for all layers and heads, which is what gives blocks of the pool back."""
    return np.broadcast_to(mass.mean(axis=(1, 2), keepdims=True), mass.shape)


def keep_best(keep: Array, mass: Array, end: int, n_kept: int, page_tokens: int) -> None:
    """Of the positions below ``end`` keep only those pages that have the most mass."""
    n_pages = -(-end // page_tokens)
    padded = np.zeros((*mass.shape[:-1], n_pages * page_tokens), np.float32)
    padded[..., :end] = np.where(keep[..., :end], mass[..., :end], -1)
    by_page = padded.reshape(*mass.shape[:-1], n_pages, page_tokens).mean(axis=-1)
    order = np.argsort(-by_page, axis=-1, kind="stable")
    rank = np.argsort(order, axis=-1)
    is_best = np.repeat(rank < n_kept // page_tokens, page_tokens, axis=-1)[..., :end]
    keep[..., :end] &= is_best


def h2o(page_tokens: int, *, is_shared: bool) -> Policy:
    """Half of the budget newest, half those with the largest sums of attention."""

    def change(keep: Array, mass: Array, i: int) -> None:
        half = BUDGET_TOKENS // 2
        if i + 1 > BUDGET_TOKENS:
            chosen_by = shared_mass(mass) if is_shared else mass
            keep_best(keep, chosen_by, i + 1 - half, half, page_tokens)

    return change


def snapkv(page_tokens: int, *, is_shared: bool) -> Policy:
    """After the prompt: its last rows, and what they attend to; half of the prompt stays."""
    state: dict[str, Array] = {}

    def change(keep: Array, mass: Array, i: int) -> None:
        if i == PROMPT_TOKENS - 1 - OBSERVED_ROWS:
            state["before"] = mass.copy()
        if i == PROMPT_TOKENS - 1:
            observed = mass - state["before"]
            chosen_by = shared_mass(observed) if is_shared else observed
            end = PROMPT_TOKENS - OBSERVED_ROWS
            keep_best(keep, chosen_by, end, PROMPT_TOKENS // 2 - OBSERVED_ROWS, page_tokens)

    return change


def newest_half(keep: Array, mass: Array, i: int) -> None:
    """As snapkv, but the first four and the newest of the prompt stay."""
    del mass
    if i == PROMPT_TOKENS - 1:
        keep[..., 4 : PROMPT_TOKENS // 2 + 4] = False


POLICIES: dict[str, Policy] = {
    "window, 4 + 96": window(4),
    "window, 100": window(0),
    "h2o, tokens, each head": h2o(1, is_shared=False),
    "h2o, tokens, one choice": h2o(1, is_shared=True),
    "h2o, pages of 10, one choice": h2o(10, is_shared=True),
    "half of the prompt: first 4, newest 60": newest_half,
    "snapkv, tokens, each head": snapkv(1, is_shared=False),
    "snapkv, pages of 8, one choice": snapkv(8, is_shared=True),
}


def main() -> None:
    """Print a table."""
    from tokenizers import Tokenizer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--windows", type=int, default=64)
    asked = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(asked.model / "tokenizer.json"))
    n_chars = 16 * asked.windows * CTX_TOKENS
    ids = np.array(tokenizer.encode(asked.text.read_text("utf-8")[:n_chars]).ids)
    ids = ids[: asked.windows * CTX_TOKENS].reshape(-1, CTX_TOKENS)
    model = Llama(asked.model)
    scored = slice(PROMPT_TOKENS, CTX_TOKENS - 1)
    targets = ids[:, PROMPT_TOKENS + 1 :, None]
    whole = predict(model, ids, keep_all)[:, scored].astype(np.float64)
    nll = -np.take_along_axis(whole, targets, -1)
    print(f"{'policy':40}{'perplexity':>12}{'change':>10}{'':10}{'KL':>10}")
    print(f"{'all':40}{np.exp(nll.mean()):12.3f}")
    for name, policy in POLICIES.items():
        rows = predict(model, ids, policy)[:, scored].astype(np.float64)
        changes = -np.take_along_axis(rows, targets, -1) - nll
        change, error = changes.mean(), changes.std() / np.sqrt(changes.size)
        kl = (np.exp(whole) * (whole - rows)).sum(axis=-1).mean()
        print(
            f"{name:40}{np.exp(nll.mean() + change):12.3f}{change:10.2%} +-{error:7.2%}{kl:10.4f}"
        )


if __name__ == "__main__":
    main()
