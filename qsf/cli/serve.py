"""``qsf serve`` and ``qsf-serve``: answer HTTP requests with a model.

Exit codes: 0 (ended by a signal), 1 (it could not be done), 2 (wrong options).
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import sys
from array import array
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from qsf.cli.announced import announced
from qsf.cli.run.report import drafter_lines, plan_lines
from qsf.cli.serve_options import Request, ServeOptions, parse
from qsf.errors import QsfArgumentError, QsfError, QsfIOError, QsfMemoryError
from qsf.file.foreign_text import text_of
from qsf.file.open_file import is_qsf_file
from qsf.find.prepare import find_model
from qsf.options import call_with
from qsf.shell import command
from qsf.shell.arguments import UsageError
from qsf.system import signals
from qsf.text.arguments import as_tokens, count_common
from qsf.text.chat import KEPT_RENDER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from qsf.model import Model
    from qsf.native.binding import MemoryPlan
    from qsf.options import ModelOptions
    from qsf.serve.hosts import Host, Hosts
    from qsf.serve.scheduling.metrics import Metrics
    from qsf.serve.server import Server
    from qsf.text.constraints import Constraints


_FINGERPRINT_BYTES = 64 << 10
_SWITCH_SECONDS = (
    0.0005  # longest wait of the engine's thread for Python's lock; Python's default is 5 ms
)
_GRAMMAR_BYTES = 16 << 20  # of the budget: the library that checks grammars, and their states
_LEAST_CONTEXT = 2048  # tokens, for which sequences are given up


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
    except Exception as error:
        if request is None:
            return command.fail("qsf-serve", error, usage=QsfError)
        return command.fail("qsf-serve", error, Path(request.models[0]))


def _run(request: Request) -> int:
    paths = find_models(request)
    from qsf.text.render import one_process

    if request.serving.ray is not None:
        from qsf.ray.cluster import connect

        connect(request.serving.ray)  # needs ssl
    _leave_ssl_out()
    import asyncio

    with opened_server(request, paths) as server:
        if server is None:
            return 0
        sys.setswitchinterval(_SWITCH_SECONDS)
        with one_process():
            return asyncio.run(_serve(server, server.serving.model.info.plan, request.serving))


@contextlib.contextmanager
def opened_server(request: Request, paths: dict[str, Path]) -> Iterator[Server | None]:
    """Open the first model, and yield a server; with --plan, print the plans and yield None.

    Raises QsfError: one of them cannot be opened, or does not fit.
    """
    from qsf.model import Model
    from qsf.native.opening import does_not_fit
    from qsf.text.parts import require_tokenizer

    for path in paths.values():
        require_tokenizer(path)
    # Made before the model is opened, so that the memory plan counts it.
    from qsf.serve.server import Server  # noqa: F401

    path = next(iter(paths.values()))
    constraints, opening = _prepared(path, request)
    plans: dict[str, MemoryPlan] = {}  # of each alone
    has_grammars = not isinstance(constraints, str)
    for other in paths if request.is_plan or not request.serving.is_for_one(paths) else ():
        how = _opening(paths[other], request, has_grammars)
        parts, how = request.serving.planned(paths[other], how)
        plans[other] = call_with(Model.plan, paths[other], how)
        if request.is_plan:
            print(*parts, *plan_lines(plans[other]), sep="\n", flush=True)
        if not plans[other].is_enough:
            text = does_not_fit(plans[other], is_command=True)
            raise QsfMemoryError(f"{other}: {text}" if len(paths) > 1 else text)
    if request.is_plan:
        yield None
        return

    def note(text: str) -> None:
        if not request.is_quiet:
            command.say_line(text)

    with request.serving.staged(path, opening, note) or Model.opened(path, opening) as model:
        server = make_server(
            model,
            path,
            request.serving,
            constraints,
            is_quiet=request.is_quiet,
            paths=paths,
            words=request.models,
            load=partial(_load, paths, plans, request),
            check=partial(_check, plans, request, has_grammars),
        )
        del constraints  # which leave memory with their model
        yield server


def _load(
    paths: Mapping[str, Path],
    plans: Mapping[str, MemoryPlan],
    request: Request,
    name: str,
    budget_mb: int | None,
    is_alone: bool,
    lora: Sequence[str],
) -> tuple[Model, Constraints | str]:
    """Open one of the models; next to other models only with the plan it would have alone.

    Raises QsfMemoryError if its context would be shorter, or more weights would be streamed.
    """
    from qsf.model import Model

    options = replace(request.opening, lora=lora)
    if not is_alone:
        options = replace(options, max_seq_len=plans[name].ctx_tokens)
    if budget_mb is not None:
        options = replace(options, ram_budget=budget_mb)
    constraints, opening = _prepared(paths[name], replace(request, opening=options))
    if not is_alone:
        plan = call_with(Model.plan, paths[name], opening)
        alone = plans[name]
        is_same = plan.max_sessions >= alone.max_sessions
        if not is_same or not plan.is_enough or plan.streamed_bytes > alone.streamed_bytes:
            raise QsfMemoryError(f"{name} has no room beside other models", plan)
    return Model.opened(paths[name], opening), constraints


def _check(
    plans: dict[str, MemoryPlan],
    request: Request,
    has_grammars: bool,
    hosts: Hosts,
    name: str,
    path: Path,
) -> None:
    """Plan another model as if it were alone. Raises QsfError if it cannot be served."""
    from qsf.model import Model
    from qsf.text.parts import require_tokenizer

    require_tokenizer(path)
    taken_bytes, options = hosts.taken_bytes, request.opening
    if hosts.budget_bytes:
        options = replace(options, ram_budget=(hosts.budget_bytes + taken_bytes) >> 20)
    opening = _opening(path, replace(request, opening=options), has_grammars)
    plan = call_with(Model.plan, path, opening)
    if not plan.is_enough:
        needed_mb = -(-(plan.min_budget_bytes - taken_bytes) // (1 << 20))
        raise QsfMemoryError(
            f"{name} is on the disk now, but needs {needed_mb} MB, and the server has "
            f"{hosts.budget_bytes >> 20}: --ram-budget {needed_mb}",
            plan,
        )
    plans[name] = plan


def _prepared(path: Path, request: Request) -> tuple[Constraints | str, ModelOptions]:
    from qsf.model import Model
    from qsf.native.opening import text_budget_bytes

    budget_bytes = text_budget_bytes(request.opening)
    if budget_bytes is not None and request.serving.constraints is None:
        without = _opening(path, request, has_grammars=False)
        spare_bytes = budget_bytes - call_with(Model.plan, path, without).min_budget_bytes
        budget_bytes = min(budget_bytes, 3 * max(0, spare_bytes - _GRAMMAR_BYTES))
    constraints = read_constraints(path, request.serving, budget_bytes)
    return constraints, _opening(path, request, not isinstance(constraints, str))


def _opening(path: Path, request: Request, has_grammars: bool) -> ModelOptions:
    """Return the options for opening a model.

    If it has recurrent states, as many sequences are served as have room next to a context.
    """
    from qsf.file.reader import Reader
    from qsf.model import Model

    reserved = reserve_mb(request.serving, has_grammars=has_grammars)
    wanted, *fewer = (
        replace(request.opening, **sessions, reserve_mb=reserved)
        for sessions in request.serving.sessions()
    )
    with Reader(path) as reader:
        dim, most_tokens = reader.header.dim, reader.header.max_tokens
        if not any(kind.state_bytes(dim) for kind in reader.layer_kinds):
            return wanted
    least_tokens = min(_LEAST_CONTEXT, most_tokens, request.opening.max_seq_len or most_tokens)
    for opening in (wanted, *fewer):
        plan = call_with(Model.plan, path, opening)
        if plan.is_enough and plan.ctx_tokens >= least_tokens:
            break
    return opening


def reserve_mb(options: ServeOptions, *, has_grammars: bool) -> int:
    """Return how much of the budget the server needs on top of its imports.

    The values of a body take up to 8 times its size. One body is parsed at a time, and two large
    ones may be in memory; each connection takes up to 16 KB plus a small body. The process that
    renders a chat template is on top of all that.
    """
    return (
        (KEPT_RENDER_BYTES >> 20)
        + 8 * (1 + has_grammars)
        + 10 * options.max_body_mb
        + -(-options.connections // 32)
    )


def _leave_ssl_out() -> None:
    """Import asyncio without ssl, which takes 4 MB that a server without TLS does not need."""
    if "ssl" not in sys.modules and "asyncio" not in sys.modules:
        sys.modules["ssl"] = None  # type: ignore[assignment]


def find_models(request: Request) -> dict[str, Path]:
    paths: dict[str, Path] = {}
    for word in request.models:
        is_source = (Path(word) / "config.json").exists()  # a model that is to be converted
        files = [] if is_source else sorted(Path(word).glob("*.qsf"))
        if is_qsf_file(word):
            files = [Path(word)]
        given_name = word  # a name on the hub is the model's name
        if Path(word).exists():
            given_name = "" if files else Path(word).name.removesuffix(".gguf")
        files = files or [find_model(word, is_quiet=request.is_quiet, is_yes=request.is_yes)]
        for path in files:
            name = given_name or path.stem
            if name in paths:
                raise UsageError(f"two models are called {name}: {paths[name]} and {path}")
            paths[name] = path
    options = request.serving
    if options.is_for_one(paths):
        return {options.alias or name: path for name, path in paths.items()}
    draft = request.opening.draft
    given = {
        "--alias": options.alias,
        "--prefix": options.prefix,
        "--draft FILE": draft not in ("auto", "off"),
        "--lora": request.opening.adapters,
        "--lora-dir": options.lora_dir,
    }
    for flag, value in given.items():
        if value:
            others = f"{len(paths)} are to be served"
            if options.allow_pull:
                others = "--allow-pull lets clients get more"
            raise UsageError(f"{flag} is for one model, and {others}")
    return paths


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
    paths: dict[str, Path] | None = None,
    words: Sequence[str] = (),
    load: Callable[[str, int | None, bool, Sequence[str]], tuple[Model, Constraints | str]],
    check: Callable[[Hosts, str, Path], None] = lambda *_: None,
) -> Server:
    """Return a server for an open model; the caller starts it.

    ``paths`` are the files of all models by name, this one first, ``words`` what the command line
    calls them, and ``load`` opens one of them inside so many MB, alone or next to others, with
    these adapters.
    ``check`` is called before others are added.
    """
    from qsf.serve.hosts import Hosts
    from qsf.serve.http.connection import Limits
    from qsf.serve.http.gate import Gate, is_loopback, read_keys
    from qsf.serve.scheduling.metrics import Metrics
    from qsf.serve.server import Server, log_json, log_line

    paths = paths or {options.alias or path.stem: path}
    keys = () if options.api_key_file is None else read_keys(Path(options.api_key_file))
    allowed = _texts(options.allowed_host)
    gate = Gate(
        keys=keys,
        hosts=tuple(host.lower() for host in allowed),
        origins=_texts(options.cors_origin),
        has_any_host=not is_loopback(options.host) and not allowed,
    )
    metrics = Metrics()
    limits = Limits(max_body_bytes=options.max_body_mb << 20, max_connections=options.connections)

    def load_host(name: str, budget_mb: int | None, is_alone: bool) -> Host:
        lora = [each.text for each in hosts.adapters]
        opened, files = load(name, budget_mb, is_alone, lora)
        return _make_host(opened, name, paths, options, files, metrics)

    host = _make_host(model, next(iter(paths)), paths, options, constraints, metrics)
    keep_seconds = math.inf if options.keep_alive is None else options.keep_alive
    aliases = {path.stem: name for name, path in paths.items()}
    aliases |= {other.removesuffix(".gguf"): name for other, name in aliases.items()}
    if len(paths) == 1:  # else the words are the names
        aliases |= dict.fromkeys([*words, *(Path(word).name for word in words)], next(iter(paths)))
    adapters = [each.name for each in model.adapters if each.name]
    for name in adapters:
        if name in paths or name in aliases:
            raise UsageError(f"--lora {name}=FILE: the model is called {name}, too")
    hosts = Hosts(
        paths,
        host,
        load_host,
        adapter_folder=None if options.lora_dir is None else Path(options.lora_dir),
        wait_seconds=options.queue_seconds,
        keep_seconds=keep_seconds,
        aliases={other: name for other, name in aliases.items() if other not in paths},
        takes_any_name=options.any_model,
    )
    if options.allow_pull:
        from qsf.cli.serve_pull import Pulls, served_name

        hosts.fetch, hosts.spelled = Pulls(paths, partial(check, hosts)).lines, served_name
    logs = {"text": log_line, "json": log_json, "off": None}
    return Server(hosts, metrics, gate, limits, None if is_quiet else logs[options.log])


def _make_host(
    model: Model,
    name: str,
    paths: Mapping[str, Path],
    options: ServeOptions,
    constraints: Constraints | str,
    metrics: Metrics,
) -> Host:
    from qsf.serve.hosts import Host
    from qsf.serve.scheduling.engine import ModelEngine
    from qsf.serve.scheduling.scheduler import Scheduler
    from qsf.serve.scheduling.slot_files import SlotFiles
    from qsf.serve.serving import Serving

    more = (model.create_session() for _ in range(1, model.info.plan.max_sessions))
    n_parallel = options.parallel_of(model.info.plan.kv_contexts)
    engine = ModelEngine(model._opened, [model.session, *more], n_parallel)
    serving = Serving(
        model=model,
        name=name,
        fingerprint=_fingerprint(model, paths[name]),
        most_choices=n_parallel,
        constraints=constraints,
        max_seconds=options.max_seconds,
        is_strict=options.strict,
    )
    kept = None
    if options.session_dir is not None:
        folder = Path(options.session_dir)
        kept = SlotFiles(
            folder if options.is_for_one(paths) else folder / _folder_name(name),
            engine,
            options.session_dir_limit << 20,
            lambda text: command.say_error("qsf-serve", text),
        )
    prefix = None if options.prefix is None else read_prefix(Path(options.prefix), model)
    scheduler = Scheduler(
        engine,
        metrics,
        files=kept,
        max_waiting=options.queue,
        max_waiting_tokens=16 * engine.ctx_tokens,
        queue_seconds=options.queue_seconds,
        pass_seconds=options.latency_ms / 1000,
    )
    return Host(serving, scheduler, kept, prefix)


def _folder_name(name: str) -> str:
    """Return the name of a folder for a model's sequences, which no other model has."""
    plain = re.sub(r"[^\w.-]", "-", name)
    if plain == name and name.strip("."):
        return plain
    return f"{plain}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"


def _texts(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _fingerprint(model: Model, path: Path) -> str:
    """Return a digest of all that decides the bits of answers: the file, and how it computes."""
    info = model.info
    plan = info.plan
    with path.open("rb") as file:
        start = file.read(_FINGERPRINT_BYTES)  # the directory in them has the checksums of the rest
    how = (info.file_bytes, plan.kv_k_bits, plan.kv_v_bits, plan.kv_is_rotated, plan.skipped_layers)
    return "qsf-" + hashlib.blake2b(start + repr(how).encode(), digest_size=6).hexdigest()


async def _serve(server: Server, plan: MemoryPlan, options: ServeOptions) -> int:
    import asyncio

    stopped = asyncio.Event()

    def on_signal(number: int) -> None:
        # Both the system and the shell report a lost terminal: two SIGHUP do not mean impatience.
        if stopped.is_set() and number != signals.HANGUP:
            command.leave_at_once(number)
        if not stopped.is_set():
            how = command.StoppedError(number).text
            command.say_line(f"{command.typed('qsf-serve')}: {how}: answers that run may end first")
        stopped.set()

    signals.handle_stopping(asyncio.get_running_loop(), on_signal)
    try:
        where = await server.start(options.host, options.port)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise QsfIOError(f"--host {options.host} --port {options.port}: {reason}") from None
    names = ", ".join(server.hosts.paths)
    n_parallel = options.parallel_of(plan.kv_contexts)
    requests = "1 request" if n_parallel == 1 else f"{n_parallel} requests"
    with announced(names, where, plan.memory_text):
        name = command.typed("qsf-serve")
        command.say_line(f"{name}: {names} at {where}")
        for line in (f"{plan.text}, {requests} at a time", *drafter_lines(plan)):
            command.say_line(f"{name}: {line}")
        await stopped.wait()
        await server.stop(options.grace)
    command.say_line(f"{name}: stopped")
    return 0


def read_prefix(path: Path, model: Model) -> array[int]:
    """Return the tokens of a text, or of messages rendered by the chat template.

    A file called FILE.json has messages. Raises QsfIOError, QsfArgumentError: the file cannot be
    read, has another form, or does not fit in the context.
    """
    ctx_tokens = model.info.plan.ctx_tokens
    try:
        if path.suffix == ".json":
            tokens = _message_tokens(path, model)
        else:
            text = text_of(path.read_bytes(), f"--prefix {path}")
            tokens = as_tokens(model.tokenizer.encode(text, max_tokens=ctx_tokens))
    except OSError as error:
        raise QsfIOError(f"--prefix {path}: {error.strerror}") from error
    if not 0 < len(tokens) < ctx_tokens:
        raise QsfArgumentError(
            f"--prefix {path} has {len(tokens)} tokens; it must have 1 to {ctx_tokens - 1}, so "
            f"that an answer fits a context of {ctx_tokens} too"
        )
    return tokens


def _message_tokens(path: Path, model: Model) -> array[int]:
    """Return the common beginning of two different conversations that start with the messages."""
    from qsf.cli.run.conversation import read_messages

    messages = read_messages(path, model.input_bytes)
    role = "assistant" if messages and messages[-1]["role"] == "user" else "user"
    a, b = (
        model.chat_template.encode(
            [*messages, {"role": role, "content": content}],
            model.tokenizer,
            add_generation_prompt=False,
            max_tokens=model.info.plan.ctx_tokens,
        )
        for content in ("Yes", "7")
    )
    return as_tokens(a)[: count_common(as_tokens(a), as_tokens(b))]
