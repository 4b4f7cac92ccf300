"""``qsf ps`` and ``qsf stop``: the servers of this user on this machine."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from qsf.cli.announced import Running, running_servers
from qsf.errors import QsfArgumentError, QsfError, one_line
from qsf.shell import command, typer_app
from qsf.system.process import ask_to_end

_POLL_SECONDS = 0.05

list_app, stop_app = typer_app.create_app(), typer_app.create_app()
list_main = typer_app.runner(list_app, "qsf ps")
stop_main = typer_app.runner(stop_app, "qsf stop")


@list_app.command()
def list_command(
    is_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the servers that run: model, address, memory budget, process."""
    servers = running_servers()
    if is_json:
        command.show_json([asdict(server) for server in servers])
        return
    if not servers:
        command.show_lines("no server runs: qsf serve MODEL starts one")
        return
    width = max(len(server.name) for server in servers)
    for server in servers:
        budget = f"{server.budget_mb} MB" if server.budget_mb else "no limit"
        minutes = max(int(time.time()) - server.started, 0) // 60
        command.show_lines(
            f"{one_line(server.name):<{width}}  {one_line(server.url)}  "
            f"{budget}  process {server.pid}  since {minutes} min"
        )


@stop_app.command()
def stop_command(
    server: Annotated[
        str | None,
        typer.Argument(
            help="Its model's name, address or process; may be left out where one runs.",
            metavar="SERVER",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Stop a server as Ctrl-C does: answers that run are finished, conversations are kept."""
    chosen = _choose(running_servers(), server)
    ask_to_end(chosen.pid)
    while chosen.is_there:
        time.sleep(_POLL_SECONDS)
    command.show_lines(f"stopped {one_line(chosen.name)} at {one_line(chosen.url)}")


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
