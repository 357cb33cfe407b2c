"""How requests are sent: in threads beside an event loop, or in the caller's own."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from tickwheel.clock import sleep_blocking
from tickwheel.http_client.answers import ApiAnswer
from tickwheel.http_client.requests import ApiRequest
from tickwheel.http_client.wire import KeptConnections


class ThreadLink:
    """For an event loop: requests are sent in threads, one for each connection."""

    def __init__(self, connections: KeptConnections, most: int) -> None:
        self._connections = connections
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="tickwheel-http-client")

    async def send(self, request: ApiRequest, until_ns: int) -> ApiAnswer:
        self._connections.check_open()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._connections.send, request, until_ns)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        self._connections.close()
        await asyncio.to_thread(self._threads.shutdown)


class BlockingLink:
    """For callers without an event loop: whatever waits, blocks. So no coroutine is suspended."""

    def __init__(self, connections: KeptConnections, most: int) -> None:
        self._connections = connections

    async def send(self, request: ApiRequest, until_ns: int) -> ApiAnswer:
        return self._connections.send(request, until_ns)

    async def sleep(self, seconds: float) -> None:
        sleep_blocking(seconds)

    async def close(self) -> None:
        self._connections.close()
