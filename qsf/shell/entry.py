"""Where the commands start: ``qsf`` and the names with a dash.

Signals are handled before any slow import, here and in `qsf/__init__.py`: a
Ctrl-C during the imports that follow ends a command without a traceback, and nothing has been
written by then. Python's own start comes first (site, .pth files, `re` in the scripts that pip
writes). The scripts of `make demo` start with SIGINT blocked, so that a Ctrl-C there waits until
here; those that pip alone installs are not, and show the KeyboardInterrupt of their first 12 ms.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # built in; `signal` imports enum, which is slow
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn


def _leave(number: int, _frame: object) -> None:
    os._exit(128 + number)


def _leave_on_signals() -> None:
    for number in (_signal.SIGINT, _signal.SIGTERM):
        if _signal.getsignal(number) != _signal.SIG_IGN:  # nohup and shells request that
            _signal.signal(number, _leave)
    if hasattr(_signal, "pthread_sigmask"):  # our scripts start with it blocked; not on Windows
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, {_signal.SIGINT})


def _one_blas_thread() -> None:
    """Let matrix products run on one thread each, unless the user decides otherwise.

    The converter and qsf eval work on several windows of text at once. BLAS threads on top of these
    wait in busy loops: ten times slower on a busy machine. With one thread, sums also have the same
    order on every machine. numpy reads this setting when it is imported.
    """
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")


def _collect_seldom() -> None:
    """Look for garbage in cycles a thousand times less often.

    A vocabulary is millions of strings and tuples, which are no garbage: the usual interval takes a
    third of the time in which a tokenizer is read.
    """
    import gc

    gc.set_threshold(1_000_000)


# ---- one command ----

VERBS = {
    "run": ("qsf.cli.run.main:main", "generate text from a model"),
    "chat": ("qsf.cli.run.main:main", "talk to a model"),
    "serve": ("qsf.cli.serve:main", "answer HTTP requests with a model, many at a time"),
    "ps": ("qsf.cli.servers:list_main", "list the servers that run"),
    "stop": ("qsf.cli.servers:stop_main", "stop one of them"),
    "convert": (
        "qsf_converter.cli:main", "make a .qsf file from a HuggingFace folder or a GGUF file"
    ),
    "inspect": ("qsf.cli.inspect:run", "say what is in a .qsf file, and check it"),
    "eval": ("qsf.cli.evaluate:run", "measure how well a model predicts a text"),
    "bench": ("qsf_bench.cli:main", "measure how fast a model is, beside llama.cpp"),
    "embed": ("qsf.cli.embed:main", "make a vector of each line of a file"),
    "plan": ("qsf.cli.plan:main", "say how fast a model would be in which budget"),
    "pull": (
        "qsf.cli.models:pull_main",
        "download a model and convert it, for `run` and `chat` to begin at once",
    ),
    "show": (
        "qsf.cli.models:show_main", "say what is in a model that was converted, by its name"
    ),
    "list": ("qsf.cli.models:list_main", "list the models that `run` and `chat` have converted"),
    "rm": ("qsf.cli.models:remove_main", "remove some of them"),
    "sessions": ("qsf.cli.sessions:main", "list, show and remove conversations that were kept"),
    "completion": ("qsf.shell.completion:main", "print what lets a shell complete these commands"),
}  # fmt: skip
"""What each command runs, as scripts of pyproject.toml say it, and what it does."""


def start(verb: str) -> NoReturn:
    """Run the command on the words of the command line, and exit with its return value."""
    if verb in ("convert", "eval", "bench"):
        _one_blas_thread()
    if verb == "chat":
        sys.argv[1:1] = ["--interactive"]
    _leave_on_signals()
    if verb == "convert":
        _collect_seldom()
    from importlib import import_module

    module, _, function = VERBS[verb][0].partition(":")
    sys.exit(getattr(import_module(module), function)())


def _starter(verb: str) -> Callable[[], NoReturn]:
    return lambda: start(verb)


run, convert, inspect, evaluate, bench, serve = map(
    _starter, ("run", "convert", "inspect", "eval", "bench", "serve")
)


_FIRST_STEPS = """QSF runs language models in much less memory than they have weights.

  qsf chat path/to/model           talk to a model: a .qsf file, a HuggingFace folder, a GGUF
                                   file, or a name such as qwen3:4b
  qsf run MODEL -p "Who are you?"  one answer
  qsf convert FOLDER model.qsf     convert a model yourself, and choose how small it becomes
  qsf list --available             models to begin with, and what they take

qsf --help names all commands, and qsf COMMAND --help says more about one.
"""


def front() -> NoReturn:
    """Start ``qsf``: the command named first, or ``run`` if a model is named first."""
    words = sys.argv[1:]
    name = words[0] if words else ""
    if name in VERBS:
        sys.argv[:2] = [f"qsf {name}"]  # the beginning of errors: see command.typed
        start(name)
    if name in ("", "-h", "--help", "help"):
        _print(_help() if name else _FIRST_STEPS)
    if name in ("--version", "version"):
        from qsf.shell.command import version_line

        _print(version_line("qsf") + "\n")
    if not name.startswith("-") and not _may_be_model(name):
        from qsf.shell.command import say_error

        say_error("qsf", f"there is no command {name!r}{_guess(name)} (see qsf --help)")
        sys.exit(2)
    sys.argv[0] = "qsf run"
    start("run")


def _print(text: str) -> NoReturn:
    _leave_on_signals()
    from qsf.shell.command import prepare_streams

    try:
        prepare_streams()
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError:
        os._exit(1)
    sys.exit(0)


def _help() -> str:
    rows = "".join(f"  {name:11} {summary}\n" for name, (_, summary) in VERBS.items())
    return (
        f"Usage: qsf COMMAND ...     or qsf MODEL [OPTIONS], which is qsf run\n\n{rows}\n"
        "qsf COMMAND --help says more; --version prints the version.\n"
    )


def _may_be_model(name: str) -> bool:
    return "/" in name or "." in name or ":" in name or os.path.lexists(name)


def _guess(name: str) -> str:
    from difflib import get_close_matches

    likely = get_close_matches(name, VERBS, 1)
    return f": did you mean {likely[0]}?" if likely else ", nor a model of that name here"
