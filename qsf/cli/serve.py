"""``qsf serve`` and ``qsf-serve``: answer HTTP requests with a model.

Exit codes: 0 (ended by a signal), 1 (it could not be done), 2 (wrong options).
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from qsf.cli.announced import announced
from qsf.cli.serve_options import Request, ServeOptions, parse
from qsf.errors import QsfArgumentError, QsfError, QsfFormatError, QsfIOError, QsfMemoryError
from qsf.file.opened import is_qsf_file
from qsf.shell import command
from qsf.shell.arguments import UsageError
from qsf.shell.command import EXIT_FAILED, EXIT_USAGE
from qsf.system import signals
from qsf.taking import call_with
from qsf.text.chat import RENDER_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qsf.model import Model
    from qsf.native.binding import MemoryPlan
    from qsf.serve.server import Server
    from qsf.text.constraints import Constraints

_FINGERPRINT_BYTES = 64 << 10
_SWITCH_SECONDS = 0.0005  # how long the engine's thread waits for Python's lock, 5 ms by default


def main(arguments: list[str] | None = None) -> int:
    """Run ``qsf-serve`` and return its exit code."""
    command.prepare_streams()
    words = sys.argv[1:] if arguments is None else arguments
    request: Request | None = None
    try:
        if "--version" in words:
            print(command.version_line("qsf-serve"), flush=True)
            return 0
        request = parse(words)
        return _run(request)
    except UsageError as error:
        return _fail(f"{error} (see {command.typed('qsf-serve')} --help)", EXIT_USAGE)
    except QsfError as error:
        if request is None:
            return _fail(command.explain(error), EXIT_USAGE)
        read = Path(request.model) if isinstance(error, QsfFormatError) else None
        return _fail(command.explain(error, read))
    except BrokenPipeError:  # the reader of --help or --plan has had enough
        command.drop_output()
        return 0
    except OSError as error:
        command.drop_output()
        return _fail(command.explain_system(error))
    except Exception as error:
        return _fail(command.explain_unexpected(error))


def _fail(text: str, exit_code: int = EXIT_FAILED) -> int:
    command.say_error("qsf-serve", text)
    return exit_code


def _run(request: Request) -> int:
    path = _find(request)
    if isinstance(path, int):
        return path
    from qsf.model import Model
    from qsf.native.opening import does_not_fit, text_budget_bytes
    from qsf.text.parts import require_tokenizer

    require_tokenizer(path)
    # Before the model is opened: what is there then, the plan of memory counts.
    _leave_ssl_out()
    try:
        import h11  # noqa: F401
    except ImportError:
        return _fail("serving needs the Python package h11: pip install h11")
    import asyncio

    from qsf.serve.server import Server  # noqa: F401

    constraints = read_constraints(path, request.serving, text_budget_bytes(request.opening))
    opening = replace(
        request.opening,
        **request.serving.sessions(),
        reserve_mb=reserve_mb(request.serving, has_grammars=not isinstance(constraints, str)),
    )
    if request.is_plan:
        return _print_plan(call_with(Model.plan, path, opening))
    try:
        model = Model.opened(path, opening)
    except QsfMemoryError as error:
        if error.plan is None:
            raise
        raise QsfMemoryError(does_not_fit(error.plan, is_command=True)) from None
    with model:
        sys.setswitchinterval(_SWITCH_SECONDS)
        return asyncio.run(_serve(model, path, request, constraints))


def reserve_mb(options: ServeOptions, *, has_grammars: bool) -> int:
    """Return how much of the budget the server itself may take, beside what is imported.

    The values of a body take up to 8 times its size, one body at a time, and two large ones may be
    in memory; a connection takes up to 16 KB, and a small body as much. The process that renders a
    chat template runs beside all that.
    """
    return (
        (RENDER_BYTES >> 20)
        + 8 * (1 + has_grammars)
        + 10 * options.max_body_mb
        + -(-options.connections // 32)
    )


def _leave_ssl_out() -> None:
    """Let asyncio be imported without ssl: 4 MB that a server without TLS does not need."""
    if "ssl" not in sys.modules and "asyncio" not in sys.modules:
        sys.modules["ssl"] = None  # type: ignore[assignment]


def _find(request: Request) -> Path | int:
    path = Path(request.model)
    if is_qsf_file(path):
        return path
    from qsf.find.prepare import ChildFailedError, find_model

    try:
        return find_model(request.model, is_quiet=request.is_quiet, is_yes=request.is_yes)
    except ChildFailedError as failed:
        return failed.exit_code


def _print_plan(plan: MemoryPlan) -> int:
    from qsf.cli.run.report import plan_lines
    from qsf.native.opening import does_not_fit

    for line in plan_lines(plan):
        print(line)
    sys.stdout.flush()
    return 0 if plan.is_enough else _fail(does_not_fit(plan, is_command=True))


def read_constraints(
    path: Path, options: ServeOptions, budget_bytes: int | None = None
) -> Constraints | str:
    """Return the maker of constraints, or the reason why constraints are off."""
    if options.constraints is False:
        return "the server was started with --constraints off"
    from qsf.text.constraints import Constraints

    is_required = options.constraints is True
    try:
        return Constraints(path, None if is_required or budget_bytes is None else budget_bytes // 3)
    except QsfArgumentError as error:
        if is_required:
            raise
        return str(error)


def make_server(
    model: Model,
    path: Path,
    options: ServeOptions,
    constraints: Constraints | str = "",
    *,
    is_quiet: bool = False,
) -> Server:
    """Return a server for an open model, which is not started."""
    from qsf.cli.serve_prefix import read_prefix
    from qsf.serve.http.gate import Gate, is_loopback, read_keys
    from qsf.serve.scheduling.engine import ModelEngine
    from qsf.serve.scheduling.metrics import Metrics
    from qsf.serve.scheduling.scheduler import Limits, Scheduler
    from qsf.serve.scheduling.slot_files import SlotFiles
    from qsf.serve.server import Bounds, Server, log_line
    from qsf.serve.serving import Serving

    more = (model.create_session() for _ in range(1, model.info.plan.max_sessions))
    engine = ModelEngine(model._opened, [model.session, *more], options.parallel)
    keys = () if options.api_key_file is None else read_keys(Path(options.api_key_file))
    hosts = _texts(options.allowed_host)
    gate = Gate(
        keys=keys,
        hosts=tuple(host.lower() for host in hosts),
        origins=_texts(options.cors_origin),
        has_any_host=not is_loopback(options.host) and not hosts,
    )
    limits = Limits(
        max_waiting=options.queue,
        max_waiting_tokens=16 * engine.ctx_tokens,
        queue_seconds=options.queue_seconds,
        pass_seconds=options.latency_ms / 1000,
    )
    metrics = Metrics()
    serving = Serving(
        model=model,
        name=options.alias or path.stem,
        fingerprint=_fingerprint(model, path),
        most_choices=options.parallel,
        constraints=constraints,
        max_seconds=options.max_seconds,
        is_strict=options.strict,
        is_strict_model=options.strict_model,
    )
    bounds = Bounds(max_body_bytes=options.max_body_mb << 20, max_connections=options.connections)
    log = None if is_quiet else log_line
    kept = None
    if options.session_dir is not None:
        kept = SlotFiles(
            Path(options.session_dir),
            engine,
            options.session_dir_limit << 20,
            lambda text: command.say_error("qsf-serve", text),
        )
    prefix = None if options.prefix is None else read_prefix(Path(options.prefix), model)
    scheduler = Scheduler(engine, limits, metrics, files=kept)
    return Server(serving, scheduler, metrics, gate, bounds, log, kept, prefix)


def _texts(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _fingerprint(model: Model, path: Path) -> str:
    """Return a digest of what the bits of answers depend on: the file, and how it is computed."""
    info = model.info
    plan = info.plan
    with path.open("rb") as file:
        start = file.read(_FINGERPRINT_BYTES)  # its directory has the checksum of the rest
    how = (info.file_bytes, plan.kv_k_bits, plan.kv_v_bits, plan.kv_is_rotated, plan.skipped_layers)
    return "qsf-" + hashlib.blake2b(start + repr(how).encode(), digest_size=6).hexdigest()


async def _serve(model: Model, path: Path, request: Request, constraints: Constraints | str) -> int:
    import asyncio

    options = request.serving
    server = make_server(model, path, options, constraints, is_quiet=request.is_quiet)
    stopped = asyncio.Event()

    def on_signal(number: int) -> None:
        # The system and the shell both say that the terminal is gone: that is no impatience.
        if stopped.is_set() and number != signals.HANGUP:
            command.leave_at_once(number)
        stopped.set()

    signals.handle_stopping(asyncio.get_running_loop(), on_signal)
    try:
        where = await server.start(options.host, options.port)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise QsfIOError(f"--host {options.host} --port {options.port}: {reason}") from None
    name = server.serving.name
    with announced(name, where, model.info.plan.budget_bytes):
        command.say_line(f"qsf-serve: {name} at {where}")
        await stopped.wait()
        await server.stop(options.grace)
    return 0
