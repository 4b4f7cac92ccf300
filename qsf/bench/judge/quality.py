"""Perplexity and KL divergence of QSF's and llama.cpp's files on a text.

Both kinds of files are sources of logits for the one evaluator, with the same tokens. QSF's files
are run in this process, llama.cpp's in a process of their own (`worker_logits`). Both keep K and V
as f16, so that the weights alone are judged.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np

from qsf.bench.judge.results import Quality
from qsf.bench.models.facts import FileFacts, read_facts
from qsf.bench.run.launch import last_lines
from qsf.bench.run.tasks import QSF
from qsf.errors import QsfArgumentError, QsfError, QsfFormatError, QsfIOError, QsfUnsupportedError
from qsf.evaluate.evaluation import Logits, LogitSource, ModelLogits, encode_text, evaluate
from qsf.evaluate.windows import Window
from qsf.file.layout import MAGIC as _MAGIC
from qsf.model import Model

if TYPE_CHECKING:
    from typing_extensions import Self

    from qsf.text.tokenizer import Tokenizer

Progress = Callable[[str, float, float], None]

WORKER: Final = Path(__file__).parents[1] / "run" / "worker_logits.py"
MOST_CTX_TOKENS: Final = 512  # of a sample unless another length is given
DEFAULT_TEXT_TOKENS: Final = 4096

_N_ERROR_BYTES: Final = 2000
_PATIENCE_SECONDS: Final = 5.0


class BaselineLogits:
    """A GGUF file, as llama.cpp computes it, as ``qsf.evaluate.evaluation.LogitSource``.

    Owns a process, from entering the context to leaving it.

    Args:
        path: the file.
        python: the interpreter that has llama-cpp-python.
        ctx_tokens: tokens of the longest window.
        n_threads: of llama.cpp.
        tokenizer: what makes tokens of text, if anything does; llama.cpp's own is not used.
    """

    def __init__(
        self,
        path: Path,
        python: str,
        *,
        ctx_tokens: int,
        n_threads: int,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Start nothing yet; see the class."""
        self._path = path
        self._command = [python, str(WORKER), str(path), str(ctx_tokens), str(n_threads)]
        self._ctx_tokens = ctx_tokens
        self._tokenizer = tokenizer
        self._n_vocab = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None

    def __enter__(self) -> Self:
        """Start the process and open the file in it.

        Raises QsfUnsupportedError when the interpreter has no llama-cpp-python, QsfIOError when it
        cannot be run, QsfFormatError when llama.cpp does not open the file.
        """
        self._errors = tempfile.TemporaryFile()
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe, stderr=self._errors
            )
            self._n_vocab = self._read_first_line()
        except OSError as error:
            self.close()
            raise QsfIOError(f"{self._command[0]} cannot be run: {error.strerror}") from error
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        """End the process."""
        self.close()

    def close(self) -> None:
        """End the process; a second call does nothing."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # it holds nothing that must be put away
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        errors, self._errors = self._errors, None
        if errors is not None:
            errors.close()

    @property
    def n_vocab(self) -> int:
        """Tokens in the vocabulary."""
        return self._n_vocab

    @property
    def max_tokens(self) -> int:
        """The context that the file was opened with."""
        return self._ctx_tokens

    @property
    def tokenizer(self) -> Tokenizer | None:
        """What was given."""
        return self._tokenizer

    def logits(
        self, windows: Sequence[Window], max_rows: int, advance: Callable[[float], None]
    ) -> Iterator[Logits]:
        """See ``LogitSource``; one array is filled again and again."""
        n_rows = min(max_rows, max((window.n_rows for window in windows), default=0))
        out = np.empty((n_rows, self.n_vocab), np.float32)
        for window in windows:
            blocks = list(window.blocks(max_rows))
            self._ask({"tokens": window.tokens.tolist(), "blocks": blocks})
            n_done = 0
            for first, end in blocks:
                rows = out[: end - first]
                self._fill(rows.data.cast("B"))
                advance(end - n_done)
                n_done = end
                yield rows

    # ---- the process ----

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise QsfArgumentError(f"{self._path}: the process of llama.cpp is not running")
        return self._process

    def _read_first_line(self) -> int:
        pipe = self._running().stdout
        line = b"" if pipe is None else pipe.readline()
        try:
            said: dict[str, Any] = json.loads(line)
        except ValueError:
            raise self._died() from None
        if "missing" in said:
            raise QsfUnsupportedError(
                f"{self._command[0]} has no llama-cpp-python that works ({said['missing']}): "
                "`make baseline` builds it"
            )
        if "failure" in said:
            raise QsfFormatError(f"llama.cpp: {said['failure']}")
        return int(said["n_vocab"])

    def _ask(self, request: dict[str, Any]) -> None:
        pipe = self._running().stdin
        try:
            if pipe is not None:
                pipe.write(json.dumps(request).encode() + b"\n")
                pipe.flush()
        except OSError:
            raise self._died() from None

    def _fill(self, view: memoryview) -> None:
        pipe: Any = self._running().stdout
        while view:
            n_bytes = pipe.readinto(view)
            if not n_bytes:
                raise self._died()
            view = view[n_bytes:]

    def _died(self) -> QsfError:
        """Return what to say when the process has ended before its work, or speaks nonsense."""
        process = self._running()
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()  # one that still lives sees that there is no more to do
        try:
            code = process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        text = ""
        if self._errors is not None:
            n_bytes = self._errors.seek(0, os.SEEK_END)
            self._errors.seek(max(0, n_bytes - _N_ERROR_BYTES))
            text = self._errors.read().decode("utf-8", "replace")
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        lines = last_lines(text) or " and wrote nothing"
        return QsfError(f"{self._path}: the process of llama.cpp {how}{lines}")


# ---- measuring ----


def check(files: Sequence[Path], text: Path, against: Path | None) -> None:
    """Refuse what can be refused before anything is computed. Raises as `measure`."""
    facts = [read_facts(path) for path in files]
    _read_text(text)
    _check_vocabulary([(one.path, one.n_vocab) for one in facts])
    if against is not None and not against.exists():
        raise QsfIOError(f"{against}: no such file or directory")
    if against is None or _is_qsf(against):
        _first_tokenizer([(one.path, _tokenizer_of(one)) for one in facts])


def measure(
    files: Sequence[Path],
    text: Path,
    *,
    against: Path | None,
    llama_python: str,
    n_threads: int,
    ctx_tokens: int | None = None,
    text_tokens: int | None = DEFAULT_TEXT_TOKENS,
    progress: Progress | None = None,
) -> dict[Path, Quality]:
    """Return how well each file predicts a text, and its divergence from ``against``.

    Args:
        files: .qsf and GGUF files of one vocabulary.
        text: UTF-8.
        against: a HuggingFace model directory, which is computed in full precision, or a .qsf
            file; None: perplexity alone.
        llama_python: the interpreter that has llama-cpp-python.
        n_threads: of both engines.
        ctx_tokens: of a sample; None: the most that all files take, up to 512.
        text_tokens: only so many from the beginning of the text; None: all.
        progress: called with the file's name, tokens evaluated and to be evaluated.

    The tokens are those of the first .qsf file's tokenizer, else of ``against``'s.

    Raises QsfArgumentError when vocabularies or tokenizers differ, there is no tokenizer, or the
    text is too short; QsfError when a file does not open or llama.cpp's process died.
    """
    facts = [read_facts(path) for path in files]
    if not facts:
        return {}
    words = _read_text(text)
    with contextlib.ExitStack() as stack:
        reference = None
        if against is not None:
            reference = stack.enter_context(_opened_reference(against, ctx_tokens, n_threads))
        sizes = [(one.path, one.n_vocab, one.max_tokens) for one in facts]
        tokenizers = [(one.path, _tokenizer_of(one)) for one in facts]
        if reference is not None and against is not None:
            sizes.append((against, reference.n_vocab, reference.max_tokens))
            tokenizers.append((against, reference.tokenizer))
        _check_vocabulary([(path, n_vocab) for path, n_vocab, _ in sizes])
        ctx_tokens = _checked_ctx(ctx_tokens, min(n_tokens for *_, n_tokens in sizes))
        tokenizer = _first_tokenizer(tokenizers)
        tokens = encode_text(tokenizer, words, text_tokens)
        _check_tokenizers(tokenizers, tokens, lambda other: encode_text(other, words, text_tokens))
        qualities = {}
        for one in facts:
            with _opened(one, llama_python, ctx_tokens, n_threads, tokenizer) as source:
                found = evaluate(
                    source,
                    tokens,
                    ctx_tokens=ctx_tokens,
                    against=reference,
                    progress=progress and _named(progress, one.path.name),
                )
            qualities[one.path] = Quality(
                found.perplexity, found.kl_mean, found.top1_agreement, found.tokens
            )
        return qualities


def _checked_ctx(ctx_tokens: int | None, most_tokens: int) -> int:
    if ctx_tokens is not None and ctx_tokens > most_tokens:
        raise QsfArgumentError(
            f"samples of {ctx_tokens} tokens are longer than {most_tokens}, the context that all "
            "of these models have"
        )
    return ctx_tokens or min(MOST_CTX_TOKENS, most_tokens)


def _named(progress: Progress, name: str) -> Callable[[float, float], None]:
    return lambda n_done, n_all: progress(name, n_done, n_all)


def _read_text(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8")  # no line end is changed
    except OSError as error:
        raise QsfIOError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise QsfArgumentError(f"{path} is not UTF-8: {error}") from error
    if not text:
        raise QsfArgumentError(f"{path} is empty: there is no text to predict")
    return text


# ---- models ----


@contextlib.contextmanager
def _opened(
    facts: FileFacts, llama_python: str, ctx_tokens: int, n_threads: int, tokenizer: Tokenizer
) -> Iterator[LogitSource]:
    if facts.engine == QSF:
        with _open_model(facts.path, n_threads, ctx_tokens) as model:
            yield ModelLogits(model)
        return
    with BaselineLogits(
        facts.path, llama_python, ctx_tokens=ctx_tokens, n_threads=n_threads, tokenizer=tokenizer
    ) as source:
        yield source


@contextlib.contextmanager
def _opened_reference(
    against: Path, ctx_tokens: int | None, n_threads: int
) -> Iterator[LogitSource]:
    if not against.exists():
        raise QsfIOError(f"{against}: no such file or directory")
    if _is_qsf(against):
        longest_tokens = min(read_facts(against).max_tokens, ctx_tokens or MOST_CTX_TOKENS)
        with _open_model(against, n_threads, longest_tokens) as model:
            yield ModelLogits(model)
        return
    from qsf_converter.original.logits import open_original  # the converter only where it is needed

    with open_original(against) as original:
        yield original


def _is_qsf(path: Path) -> bool:
    if path.is_dir():
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC or path.suffix == ".qsf"


def _open_model(path: Path, n_threads: int, ctx_tokens: int) -> Model:
    return Model(path, ram_budget="auto", threads=n_threads, max_seq_len=ctx_tokens, kv_type="f16")


# ---- what must be the same ----


def _check_vocabulary(sizes: Sequence[tuple[Path, int]]) -> None:
    (first_path, first_size), *others = sizes
    for path, size in others:
        if size != first_size:
            raise QsfArgumentError(
                f"the vocabularies differ: {first_path.name} has {first_size} tokens, "
                f"{path.name} {size}"
            )


def _tokenizer_of(facts: FileFacts) -> Tokenizer | None:
    from qsf.text.parts import read_text_parts

    return read_text_parts(facts.path).tokenizer if facts.engine == QSF else None


def _first_tokenizer(tokenizers: Sequence[tuple[Path, Tokenizer | None]]) -> Tokenizer:
    for _, tokenizer in tokenizers:
        if tokenizer is not None:
            return tokenizer
    names = ", ".join(path.name for path, _ in tokenizers)
    raise QsfArgumentError(
        f"none of {names} has a tokenizer, so there are no tokens to predict: quality needs a .qsf "
        "file of a real model"
    )


def _check_tokenizers(
    tokenizers: Sequence[tuple[Path, Tokenizer | None]],
    tokens: list[int],
    encode: Callable[[Tokenizer], list[int]],
) -> None:
    """Refuse files that would be given tokens which are not theirs."""
    for path, tokenizer in tokenizers:
        own = tokens if tokenizer is None else encode(tokenizer)
        if own != tokens:
            raise QsfArgumentError(
                f"the tokenizers differ: the text has {len(tokens)} tokens by the first one, by "
                f"{path.name}'s {len(own)}, or others"
            )
