"""What a NATS server says about itself on its HTTP monitoring port."""

from __future__ import annotations

import asyncio
import http.client
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import msgspec

# How long a server may take to answer.
ANSWER_S = 2.0
# No page that is asked for is larger.
MOST_BYTES = 1 << 20
LOOPBACK = ("127.0.0.1", "::1", "localhost")

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


async def monitored(address: str, page: str) -> Any:
    """A page (`varz`, `jsz`, `healthz`), decoded; None where no good answer comes in time."""
    return await asyncio.to_thread(_fetch, address, page)


def _fetch(address: str, page: str) -> Any:
    try:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https"):
            return None
        # A proxy that is set for the outside world can't reach this machine.
        get = _direct.open if parts.hostname in LOOPBACK else urllib.request.urlopen
        with get(f"{address.rstrip('/')}/{page}", timeout=ANSWER_S) as answer:
            return msgspec.json.decode(answer.read(MOST_BYTES))
    except (OSError, ValueError, http.client.HTTPException):
        return None
