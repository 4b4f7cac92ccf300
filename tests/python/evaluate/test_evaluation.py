"""Perplexity and KL divergence: against numpy, by hand, and of a model with itself."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from make.refusals import refusals
from qsf.errors import QsfArgumentError, QsfNumericError
from qsf.evaluate import evaluation
from qsf.evaluate.evaluation import PROTOCOLS, Evaluation, Window, cut_windows, evaluate
from qsf.model import Model
from qsf.text.tokenizer import Tokenizer
from qsf_converter.original.logits import open_original
from qsf_converter.text.tables import open_tokenizer

TEXT = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big red ball near the tree. The ball belonged to a boy called Tom, who was "
    "sad because he could not reach it. Lily wanted to help. She climbed up and gave it to him."
)
CTX = 24
OPENING: dict[str, Any] = {"ram_budget": None, "kv_type": "f32", "threads": 1}


@pytest.fixture(scope="module")
def f16(tiny_llama_f16: Path) -> Iterator[Model]:
    with Model(tiny_llama_f16, exact=True, **OPENING) as model:
        yield model


@pytest.fixture(scope="module")
def q4(tiny_llama_4bit: Path) -> Iterator[Model]:
    with Model(tiny_llama_4bit, exact=True, **OPENING) as model:
        yield model


class Table:
    """A source of logits that are known: row i of a window has those of its token."""

    def __init__(self, rows: Any, tokenizer: Tokenizer | None = None) -> None:
        self.rows = np.asarray(rows, np.float32)
        self.n_vocab = self.rows.shape[1]
        self.max_tokens = 64
        self.tokenizer = tokenizer

    def logits(
        self, windows: Sequence[Window], max_rows: int, advance: Callable[[float], None]
    ) -> Iterator[NDArray[np.float32]]:
        for window in windows:
            for first, end in window.blocks(max_rows):
                yield self.rows[window.tokens[first:end]]
            advance(len(window.tokens) - 1)


def scored_positions(n_tokens: int, *arguments: Any, **options: Any) -> list[list[int]]:
    """The places in the text that are scored, window by window."""
    windows = cut_windows(list(range(n_tokens)), *arguments, **options)
    return [window.scored.tolist() for window in windows]


# ---- which tokens ----
def test_llama_cpp_scores_the_second_half_behind_bos() -> None:
    # llama-perplexity: of n_ctx tokens those from n_ctx / 2 + 1 on, n_ctx - n_ctx / 2 - 1.
    assert scored_positions(21, "llama.cpp", 8) == [[5, 6, 7], [13, 14, 15]]
    assert scored_positions(10, "llama.cpp", 5) == [[3, 4], [8, 9]]
    windows = cut_windows(list(range(10, 31)), "llama.cpp", 8, bos_id=1)
    assert [window.tokens.tolist() for window in windows] == [
        [1, 11, 12, 13, 14, 15, 16, 17],
        [1, 19, 20, 21, 22, 23, 24, 25],
    ]
    assert windows[0].n_rows == 3
    mine = np.arange(10, 31)
    cut_windows(mine, "llama.cpp", 8, bos_id=1)
    assert mine.tolist() == list(range(10, 31))  # the caller's tokens stay as they are
    kept = cut_windows(list(range(10, 31)), "llama.cpp", 8)
    assert [int(window.tokens[0]) for window in kept] == [10, 18]
    with pytest.raises(QsfArgumentError, match=r"7 tokens, less than one window of 8"):
        cut_windows(list(range(7)), "llama.cpp", 8)


def test_sliding_scores_what_the_window_before_did_not_reach() -> None:
    options: dict[str, Any] = {"stride_tokens": 2}
    assert scored_positions(10, "sliding", 4, **options) == [[1, 2, 3], [4, 5], [6, 7], [8, 9]]
    windows = cut_windows(list(range(10)), "sliding", 4, **options)
    assert windows[1].tokens.tolist() == [2, 3, 4, 5]
    assert scored_positions(9, "sliding", 4, stride_tokens=3) == [[1, 2, 3], [4, 5, 6], [7, 8]]
    assert scored_positions(9, "sliding", 4) == scored_positions(9, "sliding", 4, **options)
    for n_tokens in range(2, 20):
        for stride in range(1, 5):
            found = scored_positions(n_tokens, "sliding", 5, stride_tokens=stride)
            expected = list(range(1, n_tokens))
            assert [i for window in found for i in window] == expected, (n_tokens, stride)


def test_windows_lie_side_by_side_and_a_rest_is_left_out() -> None:
    assert scored_positions(3, "windows", 4) == [[1, 2]]  # a text of less than one window
    for n_tokens, rest in ((8, []), (9, []), (10, [[9]])):
        found = scored_positions(n_tokens, "windows", 4)
        assert found == [[1, 2, 3], [5, 6, 7]]
        # Sliding by whole windows is the same, and scores the rest.
        assert scored_positions(n_tokens, "sliding", 4, stride_tokens=4) == found + rest


def test_what_cannot_be_honoured_is_refused() -> None:
    for n_tokens, protocol, ctx_tokens, stride, said in (
        *refusals("protocols"),
        *(
            (n, protocol, 128, None, "tokens?: at least 2")
            for n in (0, 1)
            for protocol in PROTOCOLS
        ),
    ):
        with pytest.raises(QsfArgumentError, match=said):
            cut_windows([5] * n_tokens, protocol, ctx_tokens, stride_tokens=stride)


def test_repeated_windows_end_with_what_they_had() -> None:
    windows = cut_windows(list(range(9 * 192)), "repeated", 192)
    assert [w.depth for w in windows] == [0, 9, 18, 27, 36, 45, 54, 64, 0]
    for i, window in enumerate(windows):
        start = 192 * i + (window.depth or 0)
        assert window.tokens[:128].tolist() == list(range(192 * i, 192 * i + 128))
        assert window.tokens[128:].tolist() == list(range(start, start + 64))
        assert window.scored.tolist() == list(range(start + 16, start + 64))


# ---- figures known by hand ----
def test_places_are_sixteenths_of_a_window() -> None:
    rows = np.zeros((64, 64))
    rows[np.arange(63), np.arange(1, 64)] = 9  # knows what follows
    other = rows.copy()
    other[40:] = 0
    found = evaluate(Table(rows), range(64), ctx_tokens=64, against=Table(other))
    assert [place.position for place in found.places] == list(range(0, 64, 4))
    assert [place.tokens for place in found.places] == [4] * 15 + [3]
    for place in found.places:
        is_same = place.position < 40
        assert place.kl_mean == 0 if is_same else place.kl_mean > 1
        assert place.against_perplexity == pytest.approx(place.perplexity if is_same else 64)
    assert evaluate(Table(rows), range(64), ctx_tokens=64).places == ()
    model, reference_model = Table(rows), Table(other)
    model.max_tokens = reference_model.max_tokens = 128
    ids = [*range(64)] * 4
    again = evaluate(model, ids, ctx_tokens=128, protocol="repeated", against=reference_model)
    assert [(place.position, place.tokens) for place in again.places] == [(0, 96)]


def test_divergence_by_hand() -> None:
    """KL(reference || model), not the other way round, and standard errors, of two rows."""
    p, q = (0.5, 0.3, 0.2), (0.2, 0.3, 0.5)
    model = Table(np.log([p, p, p]))
    other = Table(np.log([q, p, (0.7, 0.2, 0.1)]) + 3)  # unnormalised
    found = evaluate(model, [0, 1, 2, 0], ctx_tokens=4, against=other)
    kl = [
        0.2 * math.log(0.2 / 0.5) + 0.5 * math.log(0.5 / 0.2),
        0.0,
        0.7 * math.log(0.7 / 0.5) + 0.2 * math.log(0.2 / 0.3) + 0.1 * math.log(0.1 / 0.2),
    ]
    assert found.kl_mean == pytest.approx(np.mean(kl), abs=1e-7)
    assert found.kl_median == pytest.approx(np.median(kl), abs=1e-7)
    assert found.kl_max == pytest.approx(max(kl), abs=1e-7)
    assert found.kl_p99 == pytest.approx(np.quantile(kl, 0.99), abs=1e-7)
    assert found.kl_mean_error == pytest.approx(np.std(kl, ddof=1) / math.sqrt(3), abs=1e-7)
    assert found.top1_agreement == pytest.approx(2 / 3)
    nll, other_nll = -np.log([0.3, 0.2, 0.5]), -np.log([0.3, 0.2, 0.7])
    assert found.perplexity == pytest.approx(math.exp(nll.mean()), rel=1e-6)
    assert found.perplexity_error == pytest.approx(
        math.exp(nll.mean()) * nll.std(ddof=1) / math.sqrt(3), rel=1e-6
    )
    assert found.against_perplexity == pytest.approx(math.exp(other_nll.mean()), rel=1e-6)
    ratio = math.exp((nll - other_nll).mean())
    assert found.perplexity_change_percent == pytest.approx(100 * (ratio - 1), rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_are_named(bad: float) -> None:
    rows = np.zeros((4, 4))
    rows[2, 1] = bad
    good, tokens = Table(np.zeros((4, 4))), [0, 1, 0, 1, 0, 2, 3, 3]
    place = "computes NaN or infinity in window 1, positions 0 to 2"
    with pytest.raises(QsfNumericError, match=f"the model {place}"):
        evaluate(Table(rows), tokens, ctx_tokens=4)
    with pytest.raises(QsfNumericError, match=f"compared with {place}"):
        evaluate(good, tokens, ctx_tokens=4, against=Table(rows))


def test_json_has_the_keys_that_are_promised() -> None:
    found = evaluate(Table(np.zeros((4, 4))), [0, 1, 2, 3], ctx_tokens=4).as_json()
    assert {
        *("perplexity", "bits_per_byte", "kl_mean", "kl_p99", "top1_agreement", "tokens"),
        "protocol",
    } <= set(found)
    assert json.loads(json.dumps(found, allow_nan=False))["kl_mean"] is None
    assert found["perplexity"] == pytest.approx(4, rel=1e-12)  # that of the vocabulary
    assert (found["tokens"], found["top1_agreement"], found["bits_per_byte"]) == (3, None, None)
    huge = evaluate(Table([[0, -1e30], [0, 0]]), [0, 1], ctx_tokens=2)
    assert math.isinf(huge.perplexity)
    assert huge.as_json()["perplexity"] is None


# ---- real models ----
def test_a_model_and_itself(q4: Model, tiny_llama_4bit: Path) -> None:
    with Model(tiny_llama_4bit, exact=True, **OPENING) as same:
        found = evaluate(q4, TEXT, ctx_tokens=CTX, against=same)
    assert (found.kl_mean, found.kl_max, found.top1_agreement) == (0, 0, 1)
    assert found.perplexity_change_percent == 0
    assert found.perplexity == found.against_perplexity
    found = evaluate(q4, TEXT, ctx_tokens=256)  # one window: all but BOS is scored
    assert found.scored_bytes == len(TEXT.encode())
    bits = math.log2(found.perplexity) * found.tokens
    assert found.bits_per_byte == pytest.approx(bits / len(TEXT.encode()), rel=1e-12)
    ids = q4.tokenize(TEXT)
    halves = evaluate(q4, ids, ctx_tokens=20, protocol="llama.cpp")
    scored = [ids[start + i] for start in range(0, len(ids) - 19, 20) for i in range(11, 20)]
    assert halves.scored_bytes == len(q4.detokenize(scored).encode())


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2"])
def test_an_f16_file_is_its_original(
    name: str, converted: Callable[[str, str], Path], tiny_llama_dir: Path, tiny_gpt2_dir: Path
) -> None:
    """Whatever memory the original has: all in one batch with weights kept, window by window."""
    folder = {"tiny-llama": tiny_llama_dir, "tiny-gpt2": tiny_gpt2_dir}[name]
    found: list[Evaluation] = []
    with Model(converted(name, "f16"), exact=True, **OPENING) as model:
        for memory_bytes in (256 << 20, 1):
            seen: list[float] = []

            def see(done: float, total: float, seen: list[float] = seen) -> None:
                seen.append(done / total)

            with open_original(folder, memory_bytes=memory_bytes) as original:
                found.append(
                    evaluate(
                        model,
                        TEXT,
                        ctx_tokens=CTX,
                        protocol="sliding",  # the last window is shorter
                        max_tokens=55,
                        against=original,
                        progress=see,
                    )
                )
            assert seen == sorted(seen)
            assert seen[-1] == pytest.approx(1)
    assert 0 < (found[0].kl_max or 0) < 1e-4
    assert found[0].kl_mean == pytest.approx(found[1].kl_mean, rel=1e-6)
    assert abs(found[0].perplexity_change_percent or 1) < 0.01


def test_blocks_change_nothing(q4: Model, f16: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = evaluate(q4, TEXT, ctx_tokens=40, protocol="llama.cpp", against=f16)
    monkeypatch.setattr(evaluation, "_BLOCK_ROWS", 7)
    monkeypatch.setattr(evaluation, "_COMPARED_BYTES", 3 * 8 * 2048)
    parts = evaluate(q4, TEXT, ctx_tokens=40, protocol="llama.cpp", against=f16)
    assert parts.perplexity == pytest.approx(whole.perplexity, rel=1e-12)
    assert parts.kl_mean == pytest.approx(whole.kl_mean, rel=1e-9)
    assert parts.kl_p99 == pytest.approx(whole.kl_p99, rel=1e-9)
    assert parts.tokens == whole.tokens == whole.windows * 19


class LongTokens:
    """A tokenizer of which each token has 16 characters, and says how many."""

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        assert not parse_special
        return [len(text[i : i + 16]) for i in range(0, len(text), 16)]


# Prints how much more memory the process has had for the ids of a text.
ENCODE = """
import sys
import numpy as np
from qsf.evaluate.evaluation import encode_text
from qsf.text.tokenizer import Tokenizer

def kb(name):
    return int(open("/proc/self/status").read().split(name + ":")[1].split()[0])

tokenizer, text = Tokenizer(sys.argv[1]), eval(sys.argv[2])
encode_text(tokenizer, "Hi", None)
before_kb = kb("VmRSS")
np.asarray(encode_text(tokenizer, text, eval(sys.argv[3])), np.int64)
print(max(0, kb("VmHWM") - before_kb) << 10)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize(
    ("form", "max_tokens"), [("chr(0x2ebe0) * 500_000", None), ("'x y' * 500_000", 90_000)]
)
def test_encoding_takes_what_is_counted(
    tiny_llama_4bit: Path, form: str, max_tokens: int | None
) -> None:
    words = [sys.executable, "-c", ENCODE, str(tiny_llama_4bit), form, str(max_tokens)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    text = eval(form)
    most = evaluation.working_bytes(1, 0, text, max_tokens) - evaluation.working_bytes(1, 0, "", 0)
    assert len(text) < int(done.stdout) <= most


def test_the_beginning_of_a_text(q4: Model) -> None:
    text = TEXT * 40
    ids = q4.tokenizer.encode(text, parse_special=False)
    for n_tokens in (2, 77, 500):
        assert evaluation.encode_text(q4.tokenizer, text, n_tokens) == ids[:n_tokens]
    long_words: Any = LongTokens()
    assert evaluation.encode_text(long_words, "x" * 16 * 1000, 100) == [16] * 100
    assert evaluation.encode_text(long_words, "x" * 100, 100) == [16] * 6 + [4]
    found = evaluate(q4, text, ctx_tokens=16, max_tokens=40)
    assert (found.text_tokens, found.windows) == (40, 2)
    assert found.perplexity == evaluate(q4, ids[:40], ctx_tokens=16).perplexity
    with pytest.raises(QsfArgumentError, match="at least 2 tokens are needed, not 1"):
        evaluate(q4, text, max_tokens=1)


# ---- what cannot be measured ----
def test_models_that_cannot_be_compared_are_refused(q4: Model, tiny_llama_dir: Path) -> None:
    with pytest.raises(QsfArgumentError, match="2048 tokens here, 4 in what"):
        evaluate(q4, TEXT, against=Table(np.zeros((4, 4))))
    data = json.loads((tiny_llama_dir / "tokenizer.json").read_text("utf-8"))
    data["model"]["merges"] = data["model"]["merges"][:1000]
    other = Table(np.zeros((2048, 2048)), open_tokenizer(json.dumps(data).encode(), bos_id=0))
    with pytest.raises(QsfArgumentError, match=r"the tokenizers differ .* first that differs is"):
        evaluate(q4, TEXT, ctx_tokens=CTX, against=other)


def test_what_cannot_be_measured_is_named(q4: Model) -> None:
    wrong: tuple[tuple[Any, dict[str, Any], str], ...] = (
        ("", {}, "the text is empty"),
        ([3, 2048], {}, "2048 is outside the vocabulary, which has 2048"),
        ([3, -1], {}, "-1 is outside"),
        (TEXT, {"ctx_tokens": 513}, "513 tokens is longer than the model's, which is 512"),
    )
    for text, options, said in wrong:
        with pytest.raises(QsfArgumentError, match=said):
            evaluate(q4, text, **options)
    table, short = Table(np.zeros((4, 4))), Table(np.zeros((4, 4)))
    short.max_tokens = 3
    with pytest.raises(QsfArgumentError, match="has no tokenizer: give tokens"):
        evaluate(table, "text")
    with pytest.raises(QsfArgumentError, match="compared with takes, which is 3"):
        evaluate(table, [1, 2, 3, 0], ctx_tokens=4, against=short)


# ---- what Model gives for it ----
def test_logits_block_by_block(q4: Model) -> None:
    ids = q4.tokenize(TEXT)
    whole = q4.logits(ids)
    out = np.empty((10, 2048), np.float32)
    n_before = q4.session_stats.prompt_tokens
    for first in range(0, len(ids), 10):
        rows = q4.logits(ids[: first + 10], first_row=first, out=out)
        assert rows.base is out
        np.testing.assert_array_equal(rows, whole[first : first + 10])
    # Each token is evaluated once: what a block before it has evaluated is held.
    assert q4.session_stats.prompt_tokens - n_before == len(ids)
    np.testing.assert_array_equal(q4.logits(ids, first_row=len(ids) - 1), whole[-1:])


def test_logits_refuse_rows_that_there_are_not(q4: Model) -> None:
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"first_row": 3}, "first_row is 3, but there are 3 tokens"),
        ({"first_row": -1}, "first_row must be a whole number"),
        ({"out": np.empty((2, 2048), np.float32)}, r"\[2, 2048\]: at least 3 rows of 2048"),
        ({"out": np.empty((3, 2000), np.float32)}, "at least 3 rows of 2048"),
        ({"out": np.empty((3, 2048))}, "float32"),
        ({"out": np.empty((2048, 3), np.float32).T}, "C-contiguous"),
    )
    for options, said in wrong:
        with pytest.raises(QsfArgumentError, match=said):
            q4.logits([1, 2, 3], **options)
