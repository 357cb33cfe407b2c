"""An answer that is sent in parts, for as long as its client reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Protocol, runtime_checkable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tickwheel.concurrency import cancel_all, first_of

# How long a client may leave a part unread.
SEND_S = 60.0


@runtime_checkable
class Parts(Protocol):
    """What is sent, until it ends or is closed."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def aclose(self) -> None: ...


class StreamedResponse(Response):
    """Sends each part as it comes. Closes them whatever happens: also if the client goes away, or
    does not read."""

    def __init__(self, parts: Parts, status: int, headers: Mapping[str, str]) -> None:
        self.parts = parts
        self.status_code = status
        self.background = None
        self.body = b""
        # It has no length: `Response` would say 0.
        self.raw_headers = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in headers.items()
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        try:
            await send({**start, "headers": self.raw_headers})
            if scope["method"] == "HEAD" or await self._sent(receive, send):
                await send({"type": "http.response.body", "body": b""})
        finally:
            await self.parts.aclose()

    async def _sent(self, receive: Receive, send: Send) -> bool:
        """Send all parts; False if the client does not take them."""
        sending = asyncio.ensure_future(self._send(send))
        try:
            await first_of(asyncio.shield(sending), _gone(receive))
            if sending.done():
                sending.result()
            return sending.done()
        except (OSError, TimeoutError):
            return False
        finally:
            await cancel_all(sending)

    async def _send(self, send: Send) -> None:
        async for part in self.parts:
            async with asyncio.timeout(SEND_S):
                await send({"type": "http.response.body", "body": part, "more_body": True})


async def _gone(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
