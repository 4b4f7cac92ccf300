"""Perplexity and KL of files of both engines on a text, by the same code and the same tokens.

QSF's files are evaluated in this process, llama.cpp's in one of their own (`worker_llama_logits`)
that is asked for logits. Both keep K and V as f16, so that the weights alone are judged.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np

from qsf.bench.file_facts import FileFacts, read_facts
from qsf.bench.results import Quality
from qsf.errors import QsfArgumentError, QsfError, QsfFormatError, QsfIOError, QsfUnsupportedError
from qsf.evaluate.evaluation import Logits, LogitSource, ModelLogits, encode_text, evaluate
from qsf.evaluate.windows import Window
from qsf.file.layout import MAGIC as _MAGIC
from qsf.model import Model

if TYPE_CHECKING:
    from typing_extensions import Self

    from qsf.text.tokenizer import Tokenizer

Progress = Callable[[str, float, float], None]

WORKER: Final = Path(__file__).with_name("worker_llama_logits.py")
MOST_CTX_TOKENS: Final = 512  # of a window unless another length is asked for
DEFAULT_TEXT_TOKENS: Final = 4096

_N_ERROR_BYTES: Final = 2000
_N_ERROR_LINES: Final = 6
_PATIENCE_SECONDS: Final = 5.0
_ROOM_FACTOR: Final = 2  # free bytes for each that reference logits take


class PeerLogits:
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
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
            )
            self._n_vocab = self._hello()
        except OSError as error:
            self.close()
            raise QsfIOError(f"{self._command[0]} cannot be run: {error.strerror}") from error
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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

    def _hello(self) -> int:
        pipe = self._running().stdout
        line = b"" if pipe is None else pipe.readline()
        try:
            said: dict[str, Any] = json.loads(line)
        except ValueError:
            raise self._died() from None
        if "missing" in said:
            raise QsfUnsupportedError(
                f"{self._command[0]} has no llama-cpp-python that works ({said['missing']}): "
                "python -m qsf.bench.peer prints the line that installs it"
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
        lines = [line for line in text.splitlines() if line.strip()][-_N_ERROR_LINES:]
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        said = "\n  ".join(["; its last lines:", *lines]) if lines else " and said nothing"
        return QsfError(f"{self._path}: the process of llama.cpp {how}{said}")


class RememberedLogits:
    """A source whose logits are kept in a file without a name, so that they are computed once.

    Every call of ``logits`` must be about the same windows. Where ``folder`` has not the room, they
    are computed again each time.
    """

    def __init__(self, source: LogitSource, folder: Path) -> None:
        """Compute nothing yet."""
        self._source = source
        self._folder = folder
        self._kept: IO[bytes] | None = None

    def close(self) -> None:
        """Forget them."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()

    @property
    def n_vocab(self) -> int:
        """Of the source."""
        return self._source.n_vocab

    @property
    def max_tokens(self) -> int:
        """Of the source."""
        return self._source.max_tokens

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Of the source."""
        return self._source.tokenizer

    def logits(
        self, windows: Sequence[Window], max_rows: int, advance: Callable[[float], None]
    ) -> Iterator[Logits]:
        """See ``LogitSource``."""
        if self._kept is not None:
            yield from self._again(self._kept, windows, max_rows, advance)
            return
        n_bytes = 4 * self.n_vocab * sum(window.n_rows for window in windows)
        if shutil.disk_usage(self._folder).free < _ROOM_FACTOR * n_bytes:
            yield from self._source.logits(windows, max_rows, advance)
            return
        with contextlib.ExitStack() as stack:
            kept = stack.enter_context(tempfile.TemporaryFile(dir=self._folder))
            try:
                for rows in self._source.logits(windows, max_rows, advance):
                    kept.write(np.ascontiguousarray(rows).data)
                    yield rows
                kept.flush()
            except OSError as error:
                raise QsfIOError(
                    f"{self._folder}: {error.strerror}; {n_bytes / 1e6:.0f} MB are needed"
                ) from error
            stack.pop_all()
            self._kept = kept

    def _again(
        self,
        kept: IO[bytes],
        windows: Sequence[Window],
        max_rows: int,
        advance: Callable[[float], None],
    ) -> Iterator[Logits]:
        kept.seek(0)
        for window in windows:
            for first, end in window.blocks(max_rows):
                data = kept.read(4 * self.n_vocab * (end - first))
                yield np.frombuffer(data, np.float32).reshape(end - first, self.n_vocab)
            advance(len(window.tokens) - 1)


# ---- measuring ----


def check(files: Sequence[Path], text: Path, against: Path | None) -> None:
    """Refuse what can be refused before anything is computed. Raises as `measure`."""
    facts = [read_facts(path) for path in files]
    _read_text(text)
    _check_vocabulary(facts, None, None)
    if against is not None and not against.exists():
        raise QsfIOError(f"{against}: no such file or directory")
    if against is None or _is_qsf(against):
        _find_tokenizer(facts, None)


def measure(
    files: Sequence[Path],
    text: Path,
    *,
    against: Path | None,
    peer_python: str,
    n_threads: int,
    ctx_tokens: int | None = None,
    text_tokens: int | None = DEFAULT_TEXT_TOKENS,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> dict[Path, Quality]:
    """Return how well each file predicts a text, and how far it is from ``against``.

    Args:
        files: .qsf and GGUF files of one vocabulary.
        text: UTF-8.
        against: a HuggingFace model directory, which is computed in full precision, or a .qsf
            file; None: perplexity alone.
        peer_python: the interpreter that has llama-cpp-python.
        n_threads: of both engines.
        ctx_tokens: of a window; None: the most that all files take, up to 512.
        text_tokens: only so many from the beginning of the text; None: all.
        folder: for the logits of ``against`` while there is more than one file; None: where the
            system has temporary files.
        progress: called with the file's name, tokens evaluated and to be evaluated.

    The tokens are those of the first .qsf file's tokenizer, or else of ``against``'s.

    Raises:
        QsfArgumentError: vocabularies or tokenizers differ, there is no tokenizer, or the text is
            too short.
        QsfError: a file does not open, or llama.cpp's process died; see `PeerLogits`.
    """
    facts = [read_facts(path) for path in files]
    if not facts:
        return {}
    words = _read_text(text)
    with contextlib.ExitStack() as stack:
        reference = None
        if against is not None:
            reference = stack.enter_context(_opened_reference(against, ctx_tokens, n_threads))
        most_tokens = [one.max_tokens for one in facts]
        if reference is not None:
            most_tokens.append(reference.max_tokens)
        _check_vocabulary(facts, against, reference)
        ctx_tokens = ctx_tokens or min(MOST_CTX_TOKENS, *most_tokens)
        if ctx_tokens > min(most_tokens):
            raise QsfArgumentError(
                f"windows of {ctx_tokens} tokens are longer than {min(most_tokens)}, the context "
                "that all of these models have"
            )
        tokenizer = _find_tokenizer(facts, reference)
        tokens = encode_text(tokenizer, words, text_tokens)
        _check_tokenizers(facts, against, reference, tokens, words, text_tokens)
        if reference is not None and len(facts) > 1:
            kept = RememberedLogits(reference, folder or Path(tempfile.gettempdir()))
            reference = stack.enter_context(contextlib.closing(kept))
        found = {}
        for one in facts:
            with _opened(one, peer_python, ctx_tokens, n_threads, tokenizer) as source:
                evaluation = evaluate(
                    source,
                    tokens,
                    ctx_tokens=ctx_tokens,
                    against=reference,
                    progress=_named(progress, one.path.name),
                )
            found[one.path] = Quality(
                evaluation.perplexity,
                evaluation.kl_mean,
                evaluation.top1_agreement,
                evaluation.tokens,
            )
        return found


def _named(progress: Progress | None, name: str) -> Callable[[float, float], None] | None:
    if progress is None:
        return None
    told = progress
    return lambda n_done, n_all: told(name, n_done, n_all)


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
    facts: FileFacts, peer_python: str, ctx_tokens: int, n_threads: int, tokenizer: Tokenizer
) -> Iterator[LogitSource]:
    if facts.engine == "qsf":
        with _open_model(facts.path, n_threads, ctx_tokens) as model:
            yield ModelLogits(model)
        return
    with PeerLogits(
        facts.path,
        peer_python,
        ctx_tokens=ctx_tokens,
        n_threads=n_threads,
        tokenizer=tokenizer,
    ) as peer:
        yield peer


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
    from qsf_converter.original.logits import open_original

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


def _check_vocabulary(
    facts: Sequence[FileFacts], against: Path | None, reference: LogitSource | None
) -> None:
    sizes = [(one.path, one.n_vocab) for one in facts]
    if reference is not None and against is not None:
        sizes.append((against, reference.n_vocab))
    first_path, first_size = sizes[0]
    for path, size in sizes[1:]:
        if size != first_size:
            raise QsfArgumentError(
                f"the vocabularies differ: {first_path.name} has {first_size} tokens, "
                f"{path.name} {size}"
            )


def _tokenizer_of(facts: FileFacts) -> Tokenizer | None:
    from qsf.text.parts import read_text_parts

    return read_text_parts(facts.path).tokenizer if facts.engine == "qsf" else None


def _find_tokenizer(facts: Sequence[FileFacts], reference: LogitSource | None) -> Tokenizer:
    for one in facts:
        tokenizer = _tokenizer_of(one)
        if tokenizer is not None:
            return tokenizer
    if reference is not None and reference.tokenizer is not None:
        return reference.tokenizer
    names = ", ".join(one.path.name for one in facts)
    raise QsfArgumentError(
        f"none of {names} has a tokenizer, so there are no tokens to predict: quality needs a .qsf "
        "file of a real model"
    )


def _check_tokenizers(
    facts: Sequence[FileFacts],
    against: Path | None,
    reference: LogitSource | None,
    tokens: list[int],
    words: str,
    text_tokens: int | None,
) -> None:
    """Refuse files that would be given tokens which are not theirs."""
    others = [(one.path, _tokenizer_of(one)) for one in facts]
    if reference is not None and against is not None:
        others.append((against, reference.tokenizer))
    for path, tokenizer in others:
        if tokenizer is None:
            continue
        its = encode_text(tokenizer, words, text_tokens)
        if its != tokens:
            raise QsfArgumentError(
                f"the tokenizers differ: the text has {len(tokens)} tokens by the first one, by "
                f"{path.name}'s {len(its)}, or others"
            )
