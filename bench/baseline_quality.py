"""Compare what quantisation costs in llama.cpp and here: one model, one text, one measure.

From a HuggingFace LLaMA directory a GGUF of F32 is made and quantised by llama.cpp's own
quantiser, once for each `--types`; with `--calibration TEXT` once more with an importance matrix,
the mean squares of what every matrix reads there. Each file is run by llama.cpp, and the .qsf files
given by `--qsf` by QSF, on the same tokens: the text is cut into windows of `--ctx` tokens that do
not overlap and begin with the BOS token; every token but that is scored, and a last window that is
not full is left out. Both engines keep K and V as f16; llama.cpp's flash attention is off.

All are compared with the original in f32, computed by numpy:
  perplexity  e to the mean of -log q(next token), and how many percent above the original's
  KL          mean and 99th percentile of sum over the vocabulary of p (log p - log q), in nats
  top-1       percent of tokens where both think the same next token the likeliest
Bits per weight are those of all tensors, embeddings and norms included. The row F32 shows how
far the two programs differ when nothing is quantised: KL of 1e-4 or more there is an error.

bench/llama_quantiser.py says what the interpreter given by `--baseline-python` needs.

Usage: python bench/baseline_quality.py MODEL_DIR TEXT [--types Q4_K_M ...] [--qsf A.qsf ...]
           [--calibration TEXT] [--ctx 256] [--bytes N] [--baseline-python P] [--json OUT]
"""

# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qsf.file.layout import Dtype, TensorType
from qsf.file.reader import Reader
from qsf.model import Model
from qsf.text.tokenizer import Tokenizer
from qsf_converter.calibrate.texts import cut_samples, read_texts
from qsf_converter.original.layers import Original
from qsf_converter.rounding.plan import Policy, make_plan
from qsf_converter.sources.source import Source, open_source

TYPES = (
    *("Q8_0", "Q5_K_M", "Q4_K_M", "Q4_K_S", "IQ4_XS", "Q4_0"),
    *("Q3_K_M", "Q3_K_S", "IQ3_S", "Q2_K", "Q2_K_S", "IQ2_M"),
)
NEEDS_IMATRIX = ("Q2_K_S", "IQ1", "IQ2", "IQ3_X")  # llama.cpp refuses them without
WORKER = Path(__file__).with_name("llama_quantiser.py")
SANE_KL = 1e-4

# llama.cpp's names, for the importance matrix.
GGUF_NAMES = {
    TensorType.Q: "attn_q",
    TensorType.K: "attn_k",
    TensorType.V: "attn_v",
    TensorType.ATTN_OUT: "attn_output",
    TensorType.FFN_GATE: "ffn_gate",
    TensorType.FFN_UP: "ffn_up",
    TensorType.FFN_DOWN: "ffn_down",
}

Logits = npt.NDArray[np.float32]  # [n_windows, n_tokens - 1, n_vocab]
Tokens = npt.NDArray[np.int32]  # [n_windows, n_tokens]


@dataclass(frozen=True, slots=True)
class Row:
    """What is known of one file; the first is the original."""

    name: str
    engine: str
    tensor_bytes: int
    bits_per_weight: float
    types: dict[str, int]  # weights by type
    perplexity: float
    kl_mean: float
    kl_p99: float
    top1_agreement: float  # 0 .. 1


# ---- the measure ----


def log_probs(logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Return the logarithms of the softmax of each row."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def score(original: Logits, found: Logits, tokens: Tokens) -> dict[str, float]:
    """Compare logits with the original's: both [n_windows, n_tokens - 1, n_vocab].

    A window at a time, so that memory holds the f64 of one.
    """
    nll_sum, kls, n_same = 0.0, [], 0
    for p_logits, q_logits, window in zip(original, found, tokens, strict=True):
        log_p, log_q = log_probs(p_logits), log_probs(q_logits)
        nll_sum -= float(log_q[np.arange(len(log_q)), window[1:]].sum())
        kls.append((np.exp(log_p) * (log_p - log_q)).sum(axis=1))
        n_same += int((log_p.argmax(axis=1) == log_q.argmax(axis=1)).sum())
    kl = np.concatenate(kls)
    return {
        "perplexity": math.exp(nll_sum / len(kl)),
        "kl_mean": float(kl.mean()),
        "kl_p99": float(np.quantile(kl, 0.99)),
        "top1_agreement": n_same / len(kl),
    }


def cut_windows(ids: list[int], bos_id: int, n_tokens: int) -> Tokens:
    """Return full windows of BOS and the next ``n_tokens - 1`` ids."""
    n_windows = len(ids) // (n_tokens - 1)
    if n_windows == 0:
        raise SystemExit(f"the text has {len(ids)} tokens; a window needs {n_tokens - 1}")
    body = np.array(ids[: n_windows * (n_tokens - 1)], np.int32).reshape(n_windows, -1)
    return np.concatenate([np.full((n_windows, 1), bos_id, np.int32), body], axis=1)


# ---- the original ----


def open_original(source: Source) -> Original:
    """Return the model as numpy computes it."""
    policy = Policy(Dtype.F32, Dtype.F32)
    plan = make_plan(source.family, source.facts, source.checkpoint, policy)
    return Original(plan, source.checkpoint)


def count_weights(original: Original) -> int:
    """Return how many weights the model has."""
    units = range(original.header.n_layers + 2)
    return sum(t.n_rows * t.n_cols for unit in units for t in original.targets(unit))


def streams(original: Original, tokens: Tokens, observe: Any = None) -> npt.NDArray[np.float32]:
    """Return the residual streams behind the last layer, one layer at a time."""
    x = original.embed(tokens)
    for layer in range(original.header.n_layers):
        told = None if observe is None else lambda kinds, y, at=layer: observe(at, kinds, y)
        x = original.layer(original.weights(layer + 1), x, told)
    return x


def write_logits(original: Original, tokens: Tokens, out: Path) -> Logits:
    """Write the logits after each token but a window's last; return them, mapped."""
    shape = (*tokens[:, 1:].shape, original.header.n_vocab)
    logits = np.lib.format.open_memmap(out, "w+", np.float32, shape)
    for i, x in enumerate(streams(original, tokens)):
        logits[i] = original.logits(x[:-1])
    return logits


def mean_squares(original: Original, tokens: Tokens) -> dict[str, npt.NDArray[np.float32]]:
    """Return the mean square of every input of every matrix, by llama.cpp's names."""
    sums: dict[str, npt.NDArray[np.float64]] = {}

    def observe(layer: int, kinds: tuple[TensorType, ...], y: npt.NDArray[np.float32]) -> None:
        squares = np.square(y, dtype=np.float64).sum(axis=0)
        for kind in kinds:
            name = f"blk.{layer}.{GGUF_NAMES[kind]}.weight"
            sums[name] = sums.get(name, 0) + squares

    streams(original, tokens, observe)
    return {name: (total / tokens.size).astype(np.float32) for name, total in sums.items()}


# ---- both engines ----


def ask_baseline(python: str, *words: object) -> dict[str, Any]:
    """Run llama_quantiser.py; return what it says."""
    command = [python, str(WORKER), *map(str, words)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise SystemExit(f"--baseline-python {python}: {error.strerror}") from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise SystemExit(
            f"{python} {WORKER.name} {words[0]}: {last[0]}\n--baseline-python must name a Python "
            f"with llama-cpp-python and gguf: see the first lines of bench/{WORKER.name}"
        )
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def qsf_logits(path: Path, tokens: Tokens) -> tuple[Logits, dict[str, Any]]:
    """Run a .qsf file on the windows; return logits and facts."""
    with Reader(path) as reader:
        types: dict[str, int] = {}
        for tensor in reader.tensors:
            name = Dtype(tensor.dtype).name
            types[name] = types.get(name, 0) + tensor.n_rows * tensor.n_cols
        n_bytes = sum(tensor.data_bytes for tensor in reader.tensors)
    with Model(path, ram_budget=None, kv_type="f16", max_seq_len=tokens.shape[1]) as model:
        found = [model.logits(window.tolist())[:-1] for window in tokens]
    return np.stack(found), {"engine": "QSF", "tensor_bytes": n_bytes, "types": types}


def baseline_rows(
    args: argparse.Namespace, work: Path, original: Logits, tokens: Tokens, squares: Path | None
) -> Iterator[Row]:
    """Yield the rows of llama.cpp, F32 first."""
    whole = work / "F32.gguf"
    ask_baseline(args.baseline_python, "gguf", args.model_dir, whole)
    np.save(work / "tokens.npy", tokens)
    jobs: list[tuple[str, str | None, bool]] = [("F32", None, False)]
    for mixture in args.types:
        if not mixture.startswith(NEEDS_IMATRIX):
            jobs.append((mixture, mixture, False))
        if squares is not None:
            jobs.append((f"{mixture} imatrix", mixture, True))
    for name, mixture, has_squares in jobs:
        path = whole
        if mixture is not None:
            path = work / "one.gguf"
            options = ("--imatrix", squares) if has_squares else ()
            ask_baseline(args.baseline_python, "quantise", whole, path, mixture, *options)
        out = work / "logits.npy"
        how = ("--threads", args.threads)
        facts = ask_baseline(args.baseline_python, "logits", path, work / "tokens.npy", out, *how)
        row = make_row(name, facts, score(original, np.load(out, mmap_mode="r"), tokens))
        if mixture is None and row.kl_mean >= SANE_KL:
            raise SystemExit(f"the F32 GGUF is not the original: KL {row.kl_mean:.2e}")
        yield row


def make_row(name: str, facts: dict[str, Any], scores: dict[str, float]) -> Row:
    """Put together what was found of a file."""
    bits = 8 * facts["tensor_bytes"] / facts["n_weights"]
    return Row(name, facts["engine"], facts["tensor_bytes"], bits, facts["types"], **scores)


# ---- the table ----

HEAD = (
    "| file | engine | tensor bytes | bits per weight | perplexity | change | KL mean | KL 99 % "
    "| top-1 | weights by type |\n|---|---|---|---|---|---|---|---|---|---|"
)


def line_of(row: Row, base: float) -> str:
    """Return the table's line; ``base``: perplexity of the original."""
    total = sum(row.types.values())
    shares = sorted(row.types.items(), key=lambda item: -item[1])
    types = ", ".join(f"{name} {100 * n / total:.1f} %" for name, n in shares if n > total // 1000)
    change = 100 * (row.perplexity / base - 1)
    return (
        f"| {row.name} | {row.engine} | {row.tensor_bytes:,} | {row.bits_per_weight:.3f} "
        f"| {row.perplexity:.4f} | {change:+.3f} % | {row.kl_mean:.3g} | {row.kl_p99:.3g} "
        f"| {100 * row.top1_agreement:.2f} % | {types} |"
    )


def measure(args: argparse.Namespace, work: Path) -> Iterator[Row]:
    """Yield all rows, the original first."""
    if args.types:
        ask_baseline(args.baseline_python, "version")  # before what takes long
    with open_source(args.model_dir) as source:
        header = source.facts.header
        if source.tokenizer is None or header.bos_id is None:
            raise SystemExit(f"{args.model_dir}: a tokenizer.json and a BOS token are needed")
        text = args.text.read_bytes()[: args.bytes].decode("utf-8", "ignore")
        tokenizer = Tokenizer(source.tokenizer, bos_id=header.bos_id)
        ids = tokenizer.encode(text, add_prefix=False, parse_special=False)
        tokens = cut_windows(ids, header.bos_id, args.ctx)[: args.windows]
        original = open_original(source)
        logits = write_logits(original, tokens, work / "original.npy")
        squares = None
        if args.calibration:
            squares = work / "squares.npz"
            calibration = cut_samples(
                source.tokenizer,
                read_texts(args.calibration),
                n_tokens=args.ctx,
                max_samples=args.calibration_windows,
                bos_id=header.bos_id,
                eos_id=header.eos_id,
            )
            found: dict[str, Any] = {**mean_squares(original, calibration)}
            np.savez(squares, **found)
        n_weights = count_weights(original)
    plain = {"engine": "numpy", "tensor_bytes": 4 * n_weights, "n_weights": n_weights}
    yield make_row("original", plain | {"types": {"F32": n_weights}}, score(logits, logits, tokens))
    for path in args.qsf:
        of_file, facts = qsf_logits(path, tokens)
        facts["n_weights"] = n_weights
        yield make_row(path.name, facts, score(logits, of_file, tokens))
    if args.types:
        yield from baseline_rows(args, work, logits, tokens, squares)


def main() -> None:
    """Print the table of what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model_dir", type=Path, metavar="MODEL_DIR")
    parser.add_argument("text", type=Path, metavar="TEXT")
    parser.add_argument("--types", nargs="*", default=TYPES, help="of llama.cpp; none: only QSF")
    parser.add_argument("--qsf", nargs="*", type=Path, default=[], metavar="FILE")
    parser.add_argument("--calibration", type=Path, help="text of the importance matrix")
    parser.add_argument("--calibration-windows", type=int, default=128, help="at most")
    parser.add_argument("--ctx", type=int, default=256, help="tokens of a window, BOS included")
    parser.add_argument("--bytes", type=int, help="of TEXT, from its beginning")
    parser.add_argument("--windows", type=int, help="score at most so many")
    parser.add_argument("--baseline-python", default=sys.executable)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write every number there")
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for row in measure(args, Path(folder)):
            if not rows:
                print(HEAD)
            rows.append(row)
            print(line_of(row, rows[0].perplexity), flush=True)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2), "utf-8")


if __name__ == "__main__":
    main()
