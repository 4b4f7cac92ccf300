"""Connects to Ray: starts or finds a cluster, and refuses one that strangers may enter.

Whoever reaches a Ray cluster can run code on all its machines; only its token keeps others out.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import threading
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from qsf.errors import QsfArgumentError, QsfIOError, QsfUnsupportedError
from qsf.serve.http.gate import read_keys

_LEAST_VERSION = (2, 60)
# Rows of a prompt travel inside a call, not through the object store, which takes 8 times as long
STAGE_ENVIRONMENT = {
    "RAY_max_direct_call_object_size": str(4 << 20),
    "RAY_task_rpc_inlined_bytes_limit": str(64 << 20),
}
_ENVIRONMENT = STAGE_ENVIRONMENT | {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
}
_PORT_SECONDS = 5.0
_ANSWER_SECONDS = 60.0  # of a machine that starts a process first
_STORE_BYTES = 128 << 20  # of a cluster that is started here: prompts and answers are small


def import_ray(module: str = "ray") -> Any:
    """Return Ray, or a module of it. Raises QsfUnsupportedError if it is missing or too old."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        ray = import_module("ray")
        found = import_module(module)
    except ImportError as error:
        raise QsfUnsupportedError(
            f"several machines need Ray: pip install 'qsf[ray]' ({error})"
        ) from error
    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    version = tuple(map(int, re.findall(r"\d+", ray.__version__)[:2]))
    if version < _LEAST_VERSION:
        raise QsfUnsupportedError(f"Ray {ray.__version__} is too old: 2.60 or newer is needed")
    return found


def connect(address: str) -> None:
    """Connect this process to Ray, unless it is connected already.

    Args:
        address: "local" starts Ray on this machine, until this process ends; "auto" finds the one
            that runs here; else HOST:PORT of a cluster's head.

    Raises:
        QsfIOError: there is no Ray at the address.
        QsfArgumentError: strangers may enter the cluster.
    """
    ray = import_ray()
    if not ray.is_initialized():
        more: dict[str, Any] = {}
        if address == "local":  # Ray's own token would lie in a file that all users may read
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
            import_ray("ray._raylet").AuthenticationTokenLoader.instance().reset_cache()
            more = {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
        # Prints what happens to other processes on standard output, where the answers go
        import_ray("ray._private.worker").print_to_stdstream = lambda *_, **_more: None
        _check_port(address)
        is_main = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
        handlers = {number: signal.getsignal(number) for number in numbers}
        try:
            with _without_chatter():
                ray.init(address=address, log_to_driver=False, logging_level="ERROR", **more)
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise QsfIOError(
                f"no Ray answers at {address}: {reason:.200}; `ray start --head` starts one, and "
                "`local` one for this command alone"
            ) from error
        for number, handler in handlers.items():  # Ray's would end the process without a word
            signal.signal(number, handler)
    check_access([node["NodeManagerAddress"] for node in live_nodes()], _is_authenticated)


def _check_port(address: str) -> None:
    """Raise QsfIOError if nothing listens at HOST:PORT; Ray would wait for minutes, silently."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PORT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise QsfIOError(
            f"no Ray answers at {address}: {error}; `ray start --head` starts one"
        ) from error


@contextlib.contextmanager
def _without_chatter() -> Iterator[None]:
    """Keep what Ray's library writes off standard error; its errors come as exceptions."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def live_nodes() -> list[dict[str, Any]]:
    """Return Ray's records of the machines that are there."""
    return [node for node in import_ray().nodes() if node["Alive"]]


def _is_authenticated() -> bool:
    """Return whether every machine of the cluster asks for a token."""
    ray = import_ray()
    strategies = import_ray("ray.util.scheduling_strategies")
    has_token = ray.remote(num_cpus=0)(has_token_mode)
    refs = [
        has_token.options(
            scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node["NodeID"], False)
        ).remote()
        for node in live_nodes()
    ]
    try:
        return has_token_mode() and all(ray.get(refs, timeout=_ANSWER_SECONDS))
    except import_ray("ray.exceptions").RayError as error:
        reason = str(error).strip().splitlines()[-1]
        raise QsfIOError(
            f"a machine of the cluster does not answer, or lacks qsf[ray]: {reason:.200}"
        ) from error


def has_token_mode() -> bool:
    """Return whether this process takes and gives tokens."""
    raylet = import_ray("ray._raylet")
    return bool(raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN)


def check_access(addresses: Iterable[str], is_authenticated: Any) -> None:
    """Raise QsfArgumentError if others may enter a cluster whose machines have these addresses.

    ``is_authenticated()`` tells whether it asks for a token; it is not asked if all machines are
    this one.
    """
    elsewhere = [address for address in addresses if not _is_here(address)]
    if elsewhere and not is_authenticated():
        raise QsfArgumentError(
            f"the Ray cluster has another machine, {elsewhere[0]}, and no token: whoever reaches "
            "it can run code on all of them. Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH on "
            "each machine before `ray start` (docs/machines.md)"
        )
    if has_token_mode() and not os.environ.get("RAY_AUTH_TOKEN"):
        usual = Path("~/.ray/auth_token").expanduser()
        read_keys(Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or usual))


def _is_here(address: str) -> bool:
    """Return whether an address is one of this machine: only these can be bound to."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
