# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints of every family with the logits that transformers computes for them.

tests/golden/families.npz, which tools/make_golden_families.py writes, holds for each case the
configuration, the names and shapes of the tensors and the logits. The weights are made anew from
the names: they are a function of the name and the place alone.
"""

from __future__ import annotations

import functools
import json
import math
import re
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from make.tiny_checkpoints import safetensors_bytes

PATH = Path(__file__).resolve().parents[2] / "golden" / "families.npz"
N_TOKENS = 40
N_GUESSES = 4  # of a drafter, one after the other
DRAFTED = "gemma4-deep"  # that it guesses for: too deep to compare logits, and so that guesses pay
ENCODERS = ("bert", "xlm-roberta", "roberta", "nomic_bert", "modernbert", "embedding_gemma2",
            "embedding_gemma2_text")  # by model_type  # fmt: skip
QUERY = "w h a t i s a c a t"
DOCUMENTS = ("a n a n i m a l", "a", "i t r a i n s i n a p r i l a n d i n m a y", "z z z")
LOGIT_STEPS = 1 << 19  # between nought and the largest logit: 2e-6 of it, rounded to 1e-6
_ROUTER = re.compile(
    r"\.(mlp|mixer|block_sparse_moe|feed_forward)\.(gate|router|router\.layer)\.weight$|\.router\.proj\.weight$"
)
_EYE = re.compile(r"(model\.)?(visual|vision_tower|multi_modal_projector|mm_projector)")
_TABLES = ("embed", "wte", "word_embeddings")  # their rows are looked up, not summed


@dataclass(frozen=True, slots=True)
class Case:
    """One checkpoint. `logits` [40, vocabulary] are within 1e-6 of the largest of them.

    Of an encoder they are the hidden states, [40, hidden].
    """

    name: str
    config: dict[str, Any]  # config.json as transformers saves it
    shapes: dict[str, tuple[int, ...]]  # of the tensors under the names on disk
    tokens: list[int]
    logits: NDArray[np.float32]
    # Of a mixture: what was chosen in each routed layer, [routed layers, 40, chosen].
    experts: NDArray[np.uint8] | None = None
    weights: NDArray[np.float32] | None = None
    scores: NDArray[np.float32] | None = None  # of a cross-encoder: the logit of each pair
    # Of a drafter: [39, 4] behind all tokens but the first.
    guesses: NDArray[np.uint8] | None = None

    @property
    def is_encoder(self) -> bool:
        """Has it no head?"""
        name = self.config["architectures"][0]
        return name.endswith("Model") and not name.endswith("LMHeadModel")

    @property
    def has_blocks(self) -> bool:
        """Has it residual blocks, which the converter's original does not compute?"""
        return any(".attn_res." in name for name in self.shapes)

    @property
    def has_delta_rule(self) -> bool:
        """Has it the delta rule, of whose output transformers itself is further from the same?"""
        return any("linear_attn" in name or "attention.A_log" in name for name in self.shapes)

    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """The weights, all of which f16 holds exactly."""
        return {name: weights_of(name, shape) for name, shape in self.shapes.items()}

    def write(self, folder: Path) -> Path:
        """Write config.json and model.safetensors in f16 to `folder` and return it."""
        return write_checkpoint(folder, self.config, self.tensors())

    def text_part(self) -> Case:
        """Return the text's part of a model that sees, as a model: files of llama.cpp hold that."""
        from qsf_converter.sources.architectures import FAMILIES  # which the generator lacks

        text = self.config.get("text_config")
        if text is None:
            return self
        family = next(f for f in FAMILIES.values() if f.model_type == text["model_type"])
        shapes = {
            name.replace("model.language_model.", "model.").removeprefix("language_model."): shape
            for name, shape in self.shapes.items()
            if not _EYE.match(name)
        }
        return replace(self, config={**text, "architectures": [family.name]}, shapes=shapes)


def cases() -> dict[str, Case]:
    """The cases of all families but cross-encoders and drafters, by name."""
    return {
        name: case
        for name, case in _stored().items()
        if case.scores is None and case.guesses is None and name != DRAFTED
    }


def drafted() -> tuple[Case, Case]:
    """The cases of a model and of its drafter, which reads its keys and values."""
    return _stored()[DRAFTED], _stored()["gemma4_assistant"]


def rerankers() -> dict[str, Case]:
    """The cases of cross-encoders."""
    return {name: case for name, case in _stored().items() if case.scores is not None}


def pairs_of(n_between: int) -> list[list[int]]:
    """The query with each document, as BERT's tokenizer of single letters makes them."""

    def ids(text: str) -> list[int]:
        return [5 + ord(letter) - ord("a") for letter in text.split()]

    middle = [3] * n_between
    return [[2, *ids(QUERY), *middle, *ids(text), 3] for text in DOCUMENTS]


@functools.cache
def _stored() -> dict[str, Case]:
    found = {}
    with np.load(PATH) as stored:
        table = json.loads(bytes(stored["cases"]))
        for name, (config, shapes, largest) in table.items():
            planes = stored[name]
            units = sum(planes[i].astype(np.int32) << (8 * i) for i in range(3)) - (1 << 23)
            found[name] = Case(
                name=name,
                config=config,
                shapes={tensor: tuple(shape) for tensor, shape in shapes.items()},
                tokens=tokens_of(planes.shape[2]),
                logits=(units * (largest / LOGIT_STEPS)).astype(np.float32),
                scores=stored.get(f"{name}/scores"),
                guesses=stored.get(f"{name}/guesses"),
                experts=stored.get(f"{name}/experts"),
                weights=stored.get(f"{name}/weights"),
            )
    return found


def tokens_of(n_vocab: int) -> list[int]:
    """The text that every case is asked about."""
    values = _uniform(zlib.crc32(b"tokens"), N_TOKENS)
    return [int(i) for i in ((values + 1) / 2 * n_vocab)]


def planes_of(logits: NDArray[np.float64], largest: float) -> NDArray[np.uint8]:
    """Round logits [tokens, vocabulary] and split the integers into bytes that compress."""
    units = np.rint(logits * (LOGIT_STEPS / largest)).astype(np.int64) + (1 << 23)
    return np.stack([(units >> (8 * i)).astype(np.uint8) for i in range(3)])


def weights_of(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Weights that keep activations near 1 and let every tensor change the logits."""
    values = _uniform(zlib.crc32(name.encode()), math.prod(shape)).reshape(shape)
    if name.endswith("bias"):
        values *= 0.4
    elif name.endswith("A_log"):  # states that remember one token, and a hundred
        values = 2 * values - 2
    elif not shape:  # Apertus: where the curve begins, and its slope there
        values = np.full(shape, -1e-6 if name.endswith("eps") else 0.4)
    elif len(shape) == 1:
        values = 1 + 0.5 * values
    elif any(part in name for part in _TABLES):
        values *= 1.2
    else:
        values *= math.sqrt(3 / shape[-1])
        if _ROUTER.search(name):
            values *= 4  # else all experts score nearly the same
    return values.astype(np.float16).astype(np.float32)


def write_checkpoint(
    folder: Path, config: dict[str, Any], tensors: dict[str, NDArray[np.float32]]
) -> Path:
    """Write a checkpoint of f16 weights and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors, "fp16"))
    return folder


def _uniform(seed: int, n: int) -> NDArray[np.float64]:
    """Numbers in [-1, 1) by splitmix64 of seed and place: the same wherever numpy runs."""
    with np.errstate(over="ignore"):
        x = (np.arange(n, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return np.asarray((x >> np.uint64(40)).astype(np.float64) / (1 << 23) - 1)


# ---- folders of encoders with a tokenizer ----
def with_tokenizer(folder: Path, n_between: int = 1) -> Path:
    """Write BERT's tokenizer with words of single letters; ``n_between`` ends of a text are
    between two.
    """
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *ascii_lowercase, *(f"##{letter}" for letter in ascii_lowercase)]
    ids = {word: i for i, word in enumerate(words)}
    made = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", f"[CLS] $A {'[SEP] ' * n_between}$B:1 [SEP]:1", special_tokens=ends
    )
    made.add_special_tokens(special)
    made.save(str(folder / "tokenizer.json"))
    return folder
