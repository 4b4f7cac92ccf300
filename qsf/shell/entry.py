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
    from typing import NoReturn


def _leave(number: int, _frame: object) -> None:
    os._exit(128 + number)


def _leave_on_signals() -> None:
    for number in (_signal.SIGINT, _signal.SIGTERM):
        if _signal.getsignal(number) != _signal.SIG_IGN:  # nohup and shells request that
            _signal.signal(number, _leave)
    if hasattr(_signal, "pthread_sigmask"):  # our scripts start with it blocked; not on Windows
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, {_signal.SIGINT})


def start(module: str, function: str = "main") -> NoReturn:
    """Run a function of ``module``, a command, and exit with its return value."""
    _leave_on_signals()
    from importlib import import_module

    sys.exit(getattr(import_module(module), function)())


def _one_blas_thread() -> None:
    """Let matrix products run on one thread each, unless the user decides otherwise.

    The converter and qsf-eval work on several windows of text at once. BLAS threads on top of these
    wait in busy loops: ten times slower on a busy machine. With one thread, sums also have the same
    order on every machine. numpy reads this setting when it is imported.
    """
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")


def run() -> NoReturn:
    """Start ``qsf-run``."""
    start("qsf.cli.run.main")


def convert() -> NoReturn:
    """Start ``qsf-convert``."""
    _one_blas_thread()
    start("qsf_converter.cli")


def inspect() -> NoReturn:
    """Start ``qsf-inspect``."""
    start("qsf.cli.inspect")


def evaluate() -> NoReturn:
    """Start ``qsf-eval``."""
    _one_blas_thread()
    start("qsf.cli.evaluate")


def bench() -> NoReturn:
    """Start ``python -m qsf.bench``."""
    _one_blas_thread()
    start("qsf_bench.cli")


def serve() -> NoReturn:
    """Start ``qsf-serve``."""
    start("qsf.cli.serve")


def chat() -> NoReturn:
    """Start ``qsf-run`` with ``--interactive``."""
    sys.argv[1:1] = ["--interactive"]
    run()


def plan() -> NoReturn:
    """Start ``qsf plan``."""
    start("qsf.cli.plan")


def show_models() -> NoReturn:
    """Start ``qsf list``."""
    start("qsf.cli.models")


def remove_models() -> NoReturn:
    """Start ``qsf rm``."""
    start("qsf.cli.models", "remove_main")


def pull() -> NoReturn:
    """Start ``qsf pull``."""
    start("qsf.cli.models", "pull_main")


def show() -> NoReturn:
    """Start ``qsf show``."""
    start("qsf.cli.models", "show_main")


def sessions() -> NoReturn:
    """Start ``qsf sessions``."""
    start("qsf.cli.sessions")


def embed() -> NoReturn:
    """Start ``qsf embed``."""
    start("qsf.cli.embed")


def show_servers() -> NoReturn:
    """Start ``qsf ps``."""
    start("qsf.cli.servers", "list_main")


def stop() -> NoReturn:
    """Start ``qsf stop``."""
    start("qsf.cli.servers", "stop_main")


def complete() -> NoReturn:
    """Start ``qsf completion``."""
    start("qsf.shell.completion")


# ---- one command ----

VERBS = {
    "run": (run, "generate text from a model"),
    "chat": (chat, "talk to a model"),
    "serve": (serve, "answer HTTP requests with a model, many at a time"),
    "ps": (show_servers, "list the servers that run"),
    "stop": (stop, "stop one of them"),
    "convert": (convert, "make a .qsf file from a HuggingFace folder or a GGUF file"),
    "inspect": (inspect, "say what is in a .qsf file, and check it"),
    "eval": (evaluate, "measure how well a model predicts a text"),
    "bench": (bench, "measure how fast a model is, beside llama.cpp"),
    "embed": (embed, "make a vector of each line of a file"),
    "plan": (plan, "say how fast a model would be in which budget"),
    "pull": (pull, "download a model and convert it, for `run` and `chat` to begin at once"),
    "show": (show, "say what is in a model that was converted, by its name"),
    "list": (show_models, "list the models that `run` and `chat` have converted"),
    "rm": (remove_models, "remove some of them"),
    "sessions": (sessions, "list, show and remove conversations that were kept"),
    "completion": (complete, "print what lets a shell complete these commands"),
}
"""What starts each command, and what it does."""

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
        VERBS[name][0]()
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
    run()


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
        f"usage: qsf COMMAND ...     or qsf MODEL [options], which is qsf run\n\n{rows}\n"
        "qsf COMMAND --help says more; --version prints the version.\n"
    )


def _may_be_model(name: str) -> bool:
    return "/" in name or "." in name or ":" in name or os.path.lexists(name)


def _guess(name: str) -> str:
    from difflib import get_close_matches

    likely = get_close_matches(name, VERBS, 1)
    return f": did you mean {likely[0]}?" if likely else ", nor a model of that name here"
