"""The page at ``/``: one HTML file that loads nothing else."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path


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
