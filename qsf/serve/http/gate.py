"""Access rules: API keys, host names, origins of web pages; and the page at ``/``."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qsf.errors import QsfArgumentError, QsfIOError
from qsf.serve.http.problems import Problem

if TYPE_CHECKING:
    from qsf.serve.http.exchange import Head

_LOOPBACK = ("localhost", "127.0.0.1", "[::1]", "::1")
_MAX_KEYS = 1000
_MAX_KEY_CHARS = 512


def read_keys(path: Path) -> tuple[bytes, ...]:
    """Return the digests of the keys in a file, one key on each line; ``#`` begins a comment.

    Raises:
        QsfArgumentError: other users can read the file, or it has no key.
        QsfIOError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(path.stat().st_mode)
            lines = file.read(_MAX_KEYS * _MAX_KEY_CHARS).decode("utf-8", "replace").splitlines()
    except OSError as error:
        raise QsfIOError(f"{path}: {error.strerror or error}") from error
    if mode & 0o027:  # systemd gives credentials to a service by its group
        raise QsfArgumentError(
            f"{path} has the mode {mode:04o}: others may use it. chmod 600 {path} keeps them out"
        )
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys or len(keys) > _MAX_KEYS or max(map(len, keys)) > _MAX_KEY_CHARS:
        raise QsfArgumentError(
            f"{path} must have 1 to {_MAX_KEYS} keys of up to {_MAX_KEY_CHARS} characters, one on "
            f"each line, and has {len(keys)}"
        )
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``, which may be the path of a socket."""
    if host.startswith("/") or host in _LOOPBACK:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


_ANY = "*"
_WANTED_HEADERS = "access-control-request-headers"
_HEADERS = ("authorization", "content-type", "x-api-key", "x-request-id")
_SHOWN = ("x-request-id", "x-qsf-ignored", "x-qsf-max-tokens", "x-qsf-unenforced")
# The official client libraries
_OF_CLIENTS = re.compile(r"(x-stainless|anthropic|openai)-[a-z0-9-]{1,48}")


@dataclass(frozen=True, slots=True)
class Gate:
    """The access rules.

    Attributes:
        keys: digests of the keys; empty: no key is needed.
        hosts: names that requests may give as the host, in addition to this machine's; empty for a
            server with keys that other machines reach: any name.
        origins: origins of web pages that may use the server; "*" means all.
        has_any_host: host names are not checked.
    """

    keys: Sequence[bytes] = ()
    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    has_any_host: bool = False

    def check_page(self, head: Head) -> None:
        """Raise Problem for a request that a foreign web page may have made."""
        name = head.get("host")
        is_named = "host" in head.headers  # only HTTP/1.0, which no browser speaks, leaves it out
        if is_named and not self.has_any_host and _bare(name) not in (*_LOOPBACK, *self.hosts):
            raise Problem(
                403,
                "forbidden_host",
                f"the host {name[:100]!r} is not one of this server: --allowed-host names more",
            )
        origin = head.get("origin")
        if origin and not self.is_own(head) and not self._may_read(origin):
            raise Problem(
                403,
                "forbidden_origin",
                f"pages of {origin[:100]!r} may not use this server: --cors-origin names others",
            )

    @staticmethod
    def is_own(head: Head) -> bool:
        """Return whether the request comes from this server's own page."""
        origin = head.get("origin").partition("://")[2]
        return bool(origin) and origin == head.get("host")

    def cors_headers(self, head: Head) -> dict[str, str]:
        """Return the headers that let a page of another origin read the answer."""
        origin = head.get("origin")
        if not origin or not self._may_read(origin):
            return {"vary": "origin"} if self.origins else {}
        wanted = [name.strip().lower() for name in head.get(_WANTED_HEADERS).split(",")]
        allowed = dict.fromkeys([*_HEADERS, *filter(_OF_CLIENTS.fullmatch, wanted[:64])])
        return {
            "vary": "origin",
            "access-control-allow-origin": origin,
            "access-control-allow-methods": "GET, POST, OPTIONS",
            "access-control-allow-headers": ", ".join(allowed),
            "access-control-expose-headers": ", ".join(_SHOWN),
            "access-control-max-age": "600",
        }

    def _may_read(self, origin: str) -> bool:
        return origin in self.origins or _ANY in self.origins

    def owner_of(self, head: Head) -> str:
        """Return a digest of the key that came with the request. Raises Problem without a good one.

        All keys are compared, so that the time says nothing.
        """
        if not self.keys:
            return ""
        kind, _, given = head.get("authorization").partition(" ")
        key = given.strip() if kind.lower() == "bearer" else head.get("x-api-key")
        digest = hashlib.sha256(key.encode("latin-1", "replace")).digest()
        is_good = False
        for key_digest in self.keys:
            is_good |= hmac.compare_digest(key_digest, digest)
        if not is_good:
            raise Problem(401, "invalid_api_key", "an API key is needed: Authorization: Bearer KEY")
        return hashlib.sha256(b"owner" + digest).hexdigest()[:16]


def _bare(host: str) -> str:
    host = host.lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def read_page() -> bytes:
    return Path(__file__).with_name("page.html").read_bytes()


def page_headers(page: bytes) -> dict[str, str]:
    """Return the headers of the page, which allow its own script and style by their digests."""
    policy = ["default-src 'none'", "connect-src 'self'", "base-uri 'none'", "form-action 'none'"]
    policy += ["frame-ancestors 'none'", "img-src data:"]
    for tag in ("script", "style"):
        bodies = re.findall(rb"<%b>(.*?)</%b>" % (tag.encode(), tag.encode()), page, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(body).digest()).decode() for body in bodies]
        allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
        policy.append(f"{tag}-src {allowed}")
    return {"content-security-policy": "; ".join(policy), "referrer-policy": "no-referrer"}
