"""``qsf ps`` and ``qsf stop``: the servers of this user on this machine."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from qsf.cli.announced import Running, running_servers
from qsf.errors import QsfArgumentError, QsfError, one_line
from qsf.foreign_json import JsonError, read_json
from qsf.serve.serving import LATEST
from qsf.shell import command, typer_app
from qsf.shell.progress import duration_text
from qsf.system.process import ask_to_end

_POLL_SECONDS = 0.05
_ANSWER_SECONDS = 5.0
_MAX_ANSWER_BYTES = 1 << 20
_FOR_EVER_SECONDS = 1e9

list_app, stop_app = typer_app.create_app(), typer_app.create_app()
list_main = typer_app.runner(list_app, "qsf ps")
stop_main = typer_app.runner(stop_app, "qsf stop")


@list_app.command()
def list_command(
    is_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """List the servers that run, and when their models leave memory."""
    servers = running_servers()
    if is_json:
        command.show_json([{**asdict(each), "models": _in_memory(each)} for each in servers])
        return
    if not servers:
        command.show_lines("no server runs: qsf serve MODEL starts one")
        return
    width = max(len(server.name) for server in servers)
    for server in servers:
        minutes = max(int(time.time()) - server.started, 0) // 60
        command.show_lines(
            f"{one_line(server.name):<{width}}  {one_line(server.url)}  "
            f"{one_line(server.memory)}  process {server.pid}  since {minutes} min"
        )
        for name, seconds in _in_memory(server).items():
            leaves = "" if seconds is None else f", leaves in {duration_text(seconds)} unless used"
            command.show_lines(f"  {one_line(name)} is in memory{leaves}")


@stop_app.command()
def stop_command(
    server: Annotated[
        str | None,
        typer.Argument(
            help="its model's name, address or process; may be left out where one runs. With the "
            "name of one of its several models, only that model leaves memory",
            metavar="SERVER",
        ),
    ] = None,
) -> None:
    """Stop a server as Ctrl-C does: answers that run are finished, conversations are kept."""
    servers = running_servers()
    for each in servers:
        if server is not None and server != each.name and server in _in_memory(each):
            status, _ = _ask(
                each, "/api/generate", {"model": server, "keep_alive": 0, "stream": False}
            )
            if status != 200:
                raise QsfError(f"{server} stays in memory: the server's status is {status}")
            command.show_lines(f"{one_line(server)} leaves memory at {one_line(each.url)}")
            return
    chosen = _choose(servers, server)
    ask_to_end(chosen.pid)
    while chosen.is_there:
        time.sleep(_POLL_SECONDS)
    command.show_lines(f"stopped {one_line(chosen.name)} at {one_line(chosen.url)}")


def _ask(server: Running, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Return the status and the value of a server's answer; 0: there is none in time."""
    try:
        address = urlsplit(server.url)
        host, port = address.hostname or "localhost", address.port
    except ValueError:
        return 0, None
    link = http.client.HTTPConnection(host, port, timeout=_ANSWER_SECONDS)
    headers = {"host": "localhost", "content-type": "application/json"}
    try:
        if server.url.startswith("/"):
            link.sock = socket.socket(socket.AF_UNIX)
            link.sock.settimeout(_ANSWER_SECONDS)
            link.sock.connect(server.url)
        data = None if body is None else json.dumps(body)
        link.request("GET" if data is None else "POST", path, data, headers)
        answer = link.getresponse()
        text = answer.read(_MAX_ANSWER_BYTES)
        return answer.status, read_json(text, memory_bytes=8 * _MAX_ANSWER_BYTES)
    except (OSError, http.client.HTTPException, JsonError):
        return 0, None
    finally:
        link.close()


def _in_memory(server: Running) -> dict[str, float | None]:
    """Return the models in memory, with the seconds until each leaves; None: never.

    A server that asks for a key does not say.
    """
    status, facts = _ask(server, "/api/ps")
    models: dict[str, float | None] = {}
    # A program that is no server of ours may answer anything.
    with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError, OverflowError):
        for model in facts["models"] if status == 200 else ():
            stamp = datetime.fromisoformat(model["expires_at"].replace("Z", "+00:00"))
            seconds = max(0.0, stamp.timestamp() - time.time())
            name = model["name"].removesuffix(LATEST)
            models[name] = seconds if seconds < _FOR_EVER_SECONDS else None
    return models


def _choose(servers: Sequence[Running], server: str | None) -> Running:
    wanted = [
        each for each in servers if server is None or server in (each.name, each.url, str(each.pid))
    ]
    if len(wanted) == 1:
        return wanted[0]
    if not servers:
        raise QsfError("no server runs")
    names = ", ".join(f"{each.name} (process {each.pid})" for each in servers)
    if not wanted:
        raise QsfArgumentError(f"no server is {server}; these run: {names}")
    raise QsfArgumentError(f"{len(wanted)} servers run, so name one by its process: {names}")
