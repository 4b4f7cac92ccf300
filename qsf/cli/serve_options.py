"""The options of ``qsf serve``."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from qsf.cli.machines import MachinesOptions
from qsf.errors import QsfArgumentError
from qsf.native.opening import read_adapters
from qsf.options import (
    Choice,
    Flag,
    Kind,
    ModelOptions,
    Number,
    Size,
    Switch,
    Texts,
    Whole,
    option_field,
)
from qsf.serve.http.body import Duration
from qsf.serve.http.gate import is_loopback
from qsf.shell.arguments import Group, Parser, Text, UsageError, model_parser, taken

_EPILOG = """\
examples:
  qsf serve model.qsf
  qsf serve model.qsf --ram-budget 1GB --parallel 8 --ctx-size 2048
  qsf serve model.qsf --port 9000 --alias my-model
  qsf serve model.qsf --host 0.0.0.0 --api-key-file keys.txt --allowed-host example.org
  qsf serve model.qsf --host /run/qsf/socket
  qsf serve chat.qsf coder.qsf --ram-budget 2GB

A request:
  curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Who are you?"}], "stream": true}'

http://127.0.0.1:8080/ is a page to chat with. docs/server.md has all requests and limits.

exit codes: 0 ended by a signal, 1 failed, 2 wrong options
"""


_MOST_SESSIONS = 256
_PARALLEL = 4


_NAME = Text("NAME", may_be_empty=False)


def _serve(default: Any, kind: Kind, help: str, default_help: str = "", **more: Any) -> Any:
    return option_field(
        default, kind, help, default_help, commands=("serve",), is_main=True, **more
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(MachinesOptions):
    """How to serve. Checked when made. Raises QsfArgumentError, which names the option."""

    host: str = _serve(
        "127.0.0.1",
        _NAME,
        "address to listen on; /PATH is a Unix socket. One that other machines reach needs "
        "--api-key-file",
    )
    port: int = _serve(8080, Whole(0, 65535), "port to listen on; 0: any that is free")
    parallel: int | None = _serve(
        None,
        Whole(1, _MOST_SESSIONS),
        "how many sequences are evaluated together; the budget holds a KV cache for each",
        "4; 2 or 1 where recurrent states of more have no room",
        also=("-np",),
    )
    queue: int = _serve(
        32, Whole(0, 100_000), "how many requests may wait; more are answered by 429"
    )
    queue_seconds: float = _serve(
        120.0, Number(1, 86400), "how long a request may wait, then it is answered by 503"
    )
    max_seconds: float | None = _serve(
        None, Number(1, 86400 * 7), "how long a request may take", "no limit"
    )
    latency_ms: int = _serve(
        100,
        Whole(1, 60_000),
        "how long a pass should last at most while answers are written; prompts are cut to fit",
    )
    grace: float = _serve(
        30.0, Number(0, 86400), "after SIGTERM, how many seconds requests that run may go on"
    )
    api_key_file: str | None = _serve(
        None, _NAME, "file with keys, one on each line, that other users may not read", "no key"
    )
    no_auth: bool = _serve(False, Flag(), "let other machines in without a key")
    allowed_host: str | Sequence[str] = _serve(
        (), Texts(), "name by which others may call this server; may be given several times", "none"
    )
    cors_origin: str | Sequence[str] = _serve(
        (),
        Texts(),
        "origin whose pages may use this server, * for all; may be given several times",
        "none",
    )
    alias: str | None = _serve(None, _NAME, "name of the model for clients", "the name of the file")
    log: str = _serve(
        "text", Choice("text", "json", "off"), "a line for each request: for people, for programs"
    )
    strict: bool = _serve(False, Flag(), "refuse fields that are not known, instead of naming them")
    any_model: bool = _serve(
        False, Flag(), "answer requests for a model that is not here by the one used last"
    )
    constraints: bool | None = _serve(
        None,
        Switch(),
        "let requests ask for JSON, schemas, regular expressions and grammars",
        "auto: where llguidance is installed, and its tables take a third of the budget at most",
    )
    max_body_mb: int = _serve(1, Whole(1, 64), "most MB of the body of a request")
    prefix: str | None = _serve(
        None,
        _NAME,
        "file with the beginning of prompts, a text or FILE.json with messages: evaluated at the "
        "start, never forgotten, shared by all",
        "none",
    )
    lora_dir: str | None = _serve(
        None,
        _NAME,
        "folder of adapters that clients may add and remove while the server runs "
        "(/v1/load_lora_adapter); each time the model is opened again",
        "clients change none",
    )
    kv_contexts: int | None = _serve(
        None,
        Whole(1, _MOST_SESSIONS),
        "contexts that have room in the KV pool together; where the requests that run need more, "
        "the youngest waits",
        "as many as --parallel",
    )
    session_dir: str | None = _serve(
        None,
        _NAME,
        "folder for what sequences hold when memory must give it up, and when the server stops",
        "nothing is kept",
    )
    session_dir_limit: int = _serve(
        2048, Size(1, 1 << 30), "most of the files in --session-dir that are of this model, in MB"
    )
    allow_pull: bool = _serve(
        False, Flag(), "let clients get models of the hub by name, by ollama's /api/pull"
    )
    keep_alive: float | None = _serve(
        None,
        Duration(),
        "how long a model stays in memory unused: seconds, 5m, 1h30m; a request loads it again",
        "for ever",
    )
    connections: int = _serve(
        64, Whole(1, 10_000), "most connections at a time, 16 of an address of another machine"
    )

    def __post_init__(self) -> None:
        MachinesOptions.__post_init__(self)
        if self.prefix is not None and self.parallel == _MOST_SESSIONS:
            raise QsfArgumentError(
                f"--prefix takes one of {_MOST_SESSIONS} sequences: --parallel may be at most "
                f"{_MOST_SESSIONS - 1} beside it",
                argument="parallel",
            )
        n_parallel = self.parallel or _PARALLEL
        if self.kv_contexts is not None and self.kv_contexts > n_parallel:
            raise QsfArgumentError(
                f"--kv-contexts {self.kv_contexts} is more than --parallel {n_parallel}",
                argument="kv_contexts",
            )

    def is_for_one(self, models: Collection[str]) -> bool:
        """Return whether one model is served as long as the server runs."""
        return len(models) == 1 and not self.allow_pull

    def sessions(self) -> list[dict[str, Any]]:
        """Return numbers of sessions, and of contexts in the KV pool, to open a model with.

        The first is what is wanted: half of the sessions keep finished conversations; one holds
        the prefix. The others are for a model whose states leave no room for so many.
        """
        n_prefix = int(self.prefix is not None)
        is_fixed = self.parallel is not None or self.kv_contexts is not None
        most = self.parallel or _PARALLEL
        return [
            {
                "sessions": min(n * n_each + n_prefix, _MOST_SESSIONS),
                "kv_contexts": (self.kv_contexts or n) + n_prefix,
            }
            for n in ((most,) if is_fixed else (most, most // 2, 1))
            for n_each in (2, 1)
        ]

    def parallel_of(self, kv_contexts: int) -> int:
        """Return how many sequences are evaluated together with so many contexts."""
        if self.parallel is None and self.kv_contexts is None:
            return kv_contexts - (self.prefix is not None)
        return self.parallel or _PARALLEL


@dataclass(frozen=True, slots=True)
class Request:
    """The command line, parsed."""

    models: tuple[str, ...]
    serving: ServeOptions
    opening: ModelOptions
    is_quiet: bool
    is_plan: bool
    is_yes: bool


def _parser() -> Parser:
    parser = model_parser(
        "qsf serve",
        "clients ask it by HTTP",
        "Answer HTTP requests with a model inside a memory budget, many at a time.\n"
        "The APIs are those of OpenAI, Anthropic and ollama. Several models, or a\n"
        "folder with .qsf files, share the budget.",
        _EPILOG,
        takes_several=True,
    )
    Group(parser, "serving", shows_all=True).add_options(ServeOptions, "serve")
    Group(parser, "several machines", shows_all=True).add_options(MachinesOptions, "machines")
    group = Group(parser, "memory and speed", shows_all=True)
    group.add_options(ModelOptions)
    group.add_plan()
    group = Group(parser, "output", shows_all=True)
    group.add("-q", "--quiet", action="store_true", help="no line for each request")
    group.add_asking()
    group.add("-h", "--help", action="help", help="show this help")
    return parser


def parse(arguments: list[str]) -> Request:
    """Return the command line, parsed. Raises UsageError, QsfArgumentError."""
    given = _parser().parse_args(arguments)
    if not given.model:
        raise UsageError("MODEL is missing: a .qsf file, a HuggingFace folder, a GGUF file")
    serving = taken(ServeOptions, given, "")
    is_open = not is_loopback(serving.host)
    if is_open and serving.api_key_file is None and not serving.no_auth:
        raise UsageError(
            f"--host {serving.host} lets other machines in: --api-key-file FILE asks them for a "
            "key, --no-auth does not"
        )
    if serving.no_auth and serving.api_key_file is not None:
        raise UsageError("--no-auth and --api-key-file exclude each other")
    if (serving.ray is None) != (serving.machines is None):
        raise UsageError("--ray and --machines are for each other: where, and how many")
    if serving.stage_timeout is not None and serving.machines is None:
        raise UsageError("--stage-timeout is for --machines")
    if serving.machines is not None and (len(given.model) > 1 or serving.allow_pull):
        raise UsageError("--machines is for one MODEL, without --allow-pull")
    if given.kv_policy.startswith("recompute"):
        raise UsageError("--kv-policy recompute is for qsf run and qsf chat: window:W is for both")
    if given.kv_policy.startswith("disk"):
        raise UsageError(
            "--kv-policy disk is for qsf run, qsf chat and qsf eval: all sessions of a server "
            "share one pool in memory; --kv-contexts says how much"
        )
    opening = taken(ModelOptions, given)
    if serving.machines is not None and any(each.name for each in read_adapters(opening)):
        raise UsageError("--lora NAME=FILE is for one machine: leave NAME= out, or --machines")
    if serving.machines is not None and serving.lora_dir is not None:
        raise UsageError("--lora-dir is for one machine: leave it out, or --machines")
    return Request(
        models=tuple(given.model),
        serving=serving,
        opening=opening,
        is_quiet=given.quiet,
        is_plan=given.plan,
        is_yes=given.yes,
    )
