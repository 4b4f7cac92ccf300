"""Compare what quantisation costs in llama.cpp and here: one model, one text, one measure.

From a HuggingFace LLaMA directory a GGUF of F32 is made and quantised by llama.cpp's own
quantiser, once for each `--types`; with `--calibration TEXT` once more with an importance matrix,
the mean squares of what every matrix reads there. Each file is run by llama.cpp, and the .qsf files
given by `--qsf` by QSF, on the same tokens: the text is cut into windows of `--ctx` tokens that do
not overlap and begin with the BOS token; every token but that is scored, and a last window that is
not full is left out. Both engines keep K and V as f16; llama.cpp's flash attention is off.

All are compared with the original in f32, computed by numpy. The measure is that of `qsf eval`
(qsf/evaluate/evaluation.py), and bits per weight are those of `python -m qsf.bench`. The row F32
shows how far the two programs differ when nothing is quantised: a mean KL of 1e-4 or more there is
an error.

bench/llama_quantiser.py says what the interpreter given by `--baseline-python` needs.

Usage: python bench/baseline_quality.py MODEL_DIR TEXT [--types Q4_K_M ...] [--qsf A.qsf ...]
           [--calibration TEXT] [--ctx 256] [--bytes N] [--baseline-python P] [--json OUT]
"""

# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qsf.evaluate.evaluation import Evaluation, LogitSource, evaluate
from qsf.evaluate.windows import Window, cut_windows
from qsf.file.layout import Dtype, TensorType, layer_unit
from qsf.model import Model
from qsf_bench.models.facts import read_facts
from qsf_converter.calibrate.texts import cut_samples, read_texts
from qsf_converter.original.layers import Original
from qsf_converter.original.logits import OriginalLogits
from qsf_converter.rounding.plan import Policy, make_plan
from qsf_converter.sources.source import Source, open_source
from qsf_converter.text.tokenizer import open_tokenizer

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

Tokens = npt.NDArray[np.int64]  # [n_windows, n_tokens]


class StoredLogits:
    """Logits that were computed before, as `qsf.evaluate.evaluation.LogitSource`.

    ``rows`` are [n_windows, n_tokens - 1, n_vocab].
    """

    tokenizer = None

    def __init__(self, rows: npt.NDArray[np.float32]) -> None:
        """Hold the array, which may be mapped from a file."""
        self._rows = rows
        self.max_tokens, self.n_vocab = rows.shape[1] + 1, rows.shape[2]

    def logits(
        self, windows: Sequence[Window], max_rows: int, advance: Callable[[float], None]
    ) -> Iterator[npt.NDArray[np.float32]]:
        """See ``LogitSource``."""
        for window, rows in zip(windows, self._rows, strict=True):
            for first, end in window.blocks(max_rows):
                yield rows[first:end]
            advance(len(rows))


def store(source: LogitSource, tokens: Tokens, out: Path) -> StoredLogits:
    """Compute the logits of all windows once, into a file."""
    n_windows, n_tokens = tokens.shape
    shape = (n_windows, n_tokens - 1, source.n_vocab)
    rows = np.lib.format.open_memmap(out, "w+", np.float32, shape)
    windows = [Window(window, 0) for window in tokens]
    for to, block in zip(rows, source.logits(windows, n_tokens, lambda _n: None), strict=True):
        to[:] = block
    return StoredLogits(rows)


def text_windows(source: Source, text: Path, args: argparse.Namespace) -> Tokens:
    """Return the full windows of the text: BOS and the next ``--ctx`` - 1 tokens."""
    bos_id = source.facts.header.bos_id
    if source.tokenizer is None or bos_id is None:
        raise SystemExit(f"{args.model_dir}: a tokenizer.json and a BOS token are needed")
    tokenizer = open_tokenizer(source.tokenizer, bos_id=bos_id)
    part = text.read_bytes()[: args.bytes].decode("utf-8", "ignore")
    ids = tokenizer.encode(part, add_prefix=False, parse_special=False)
    windows = cut_windows(ids, "windows", args.ctx - 1)[: args.windows]
    if len(windows[0].tokens) < args.ctx - 1:
        raise SystemExit(f"the text has {len(ids)} tokens; a window needs {args.ctx - 1}")
    return np.stack([np.concatenate([[bos_id], window.tokens]) for window in windows])


def mean_squares(
    original: Original, tokens: npt.NDArray[np.int32]
) -> dict[str, npt.NDArray[np.float32]]:
    """Return the mean square of every input of every matrix, by llama.cpp's names."""
    sums: dict[str, npt.NDArray[np.float64]] = {}
    x = original.embed(tokens)
    for layer in range(original.header.n_layers):

        def observe(
            kinds: tuple[TensorType, ...], y: npt.NDArray[np.float32], layer: int = layer
        ) -> None:
            squares = np.square(y, dtype=np.float64).sum(axis=0)
            for kind in kinds:
                name = f"blk.{layer}.{GGUF_NAMES[kind]}.weight"
                sums[name] = sums.get(name, 0) + squares

        x = original.layer(original.weights(layer_unit(layer)), x, observe)
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


def baseline_files(
    args: argparse.Namespace, work: Path, squares: Path | None
) -> Iterator[tuple[str, Path]]:
    """Yield llama.cpp's files with their names, F32 first; each is gone when the next is made."""
    whole = work / "F32.gguf"
    ask_baseline(args.baseline_python, "gguf", args.model_dir, whole)
    yield "F32", whole
    for mixture in args.types:
        plain = [] if mixture.startswith(NEEDS_IMATRIX) else [(mixture, ())]
        better = [] if squares is None else [(f"{mixture} imatrix", ("--imatrix", squares))]
        for name, options in [*plain, *better]:
            path = work / "one.gguf"
            ask_baseline(args.baseline_python, "quantise", whole, path, mixture, *options)
            yield name, path


def measure(args: argparse.Namespace, work: Path) -> Iterator[tuple[str, Path, Evaluation]]:
    """Yield the name, the file and the figures of each."""
    if args.types:
        ask_baseline(args.baseline_python, "version")  # before what takes long
    squares = None
    with open_source(args.model_dir) as source:
        tokens = text_windows(source, args.text, args)
        plan = make_plan(
            source.family, source.facts, source.checkpoint, Policy(Dtype.F32, Dtype.F32)
        )
        original = Original(plan, source.checkpoint)
        reference = store(OriginalLogits(original, None), tokens, work / "original.npy")
        if args.calibration:
            squares, header = work / "squares.npz", source.facts.header
            calibration = cut_samples(
                source.tokenizer or b"",  # `text_windows` has refused none
                read_texts(args.calibration),
                n_tokens=args.ctx,
                max_samples=args.calibration_windows,
                bos_id=header.bos_id,
                eos_id=header.eos_id,
            )
            found: dict[str, Any] = {**mean_squares(original, calibration)}
            np.savez(squares, **found)

    def judged(model: Model | LogitSource) -> Evaluation:
        return evaluate(model, tokens.ravel().tolist(), ctx_tokens=args.ctx, against=reference)

    for path in args.qsf:
        with Model(path, ram_budget=None, kv_type="f16", max_seq_len=args.ctx) as model:
            yield path.name, path, judged(model)
    for name, path in baseline_files(args, work, squares) if args.types else ():
        np.save(work / "tokens.npy", tokens.astype(np.int32))
        out, how = work / "logits.npy", ("--threads", args.threads)
        ask_baseline(args.baseline_python, "logits", path, work / "tokens.npy", out, *how)
        figures = judged(StoredLogits(np.load(out, mmap_mode="r")))
        if name == "F32" and (figures.kl_mean or 0) >= SANE_KL:
            raise SystemExit(f"the F32 GGUF is not the original: KL {figures.kl_mean:.2e}")
        yield name, path, figures


HEAD = (
    "| file | engine | tensor bytes | bits per weight | perplexity | change | KL mean | KL 99 % "
    "| top-1 |\n|---|---|---|---|---|---|---|---|---|"
)


def line_of(row: dict[str, Any]) -> str:
    """Return the table's line."""
    return (
        f"| {row['name']} | {row['engine']} | {row['tensor_bytes']:,} "
        f"| {row['bits_per_weight']:.3f} | {row['perplexity']:.4f} "
        f"| {row['perplexity_change_percent']:+.3f} % | {row['kl_mean']:.3g} "
        f"| {row['kl_p99']:.3g} | {100 * row['top1_agreement']:.2f} % |"
    )


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
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, path, figures in measure(args, Path(folder)):
            facts = read_facts(path)
            size = {"tensor_bytes": facts.tensor_bytes, "bits_per_weight": facts.bits_per_weight}
            rows.append({"name": name, "engine": facts.engine} | size | figures.as_json())
            if len(rows) == 1:
                print(f"original: perplexity {figures.against_perplexity:.4f}\n\n{HEAD}")
            print(line_of(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2), "utf-8")


if __name__ == "__main__":
    main()
