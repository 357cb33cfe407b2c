"""News from a Redis server: who waits is woken by others' steps, and never has to poll for them.

One connection per handle listens to one channel. While it is down, and for news that were lost with
it, there is a look every POLL_S; so a wait ends by itself, only a little later.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from tickwheel.errors import StoreError, StoreUnavailable
from tickwheel.stores.redis.options import Options
from tickwheel.stores.redis.wire import Connection, Wire, translated, wrong

# How long a wait goes on without looking for itself.
POLL_S = 1.0
# A connection that was silent for so long is asked for a sign of life, and has as long to give it.
SILENT_S = 5.0
# How long to wait before connecting again; and how long the first wait gives the first connection.
AGAIN_S = 0.25
FIRST_S = 1.0


class News:
    """Keeps the listening connection up, and hands what it hears to those who wait for it."""

    def __init__(self, wire: Wire, options: Options) -> None:
        self._wire = wire
        self._options = options
        self._channel = f"{options.root}wake"
        self._ears: dict[bytes, set[asyncio.Event]] = {}
        self._up = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._refused: StoreError | None = None

    @contextmanager
    def ear(self, topics: Sequence[bytes]) -> Iterator[Ear]:
        """Hears of these topics from now on."""
        event = asyncio.Event()
        for topic in topics:
            self._ears.setdefault(topic, set()).add(event)
        try:
            yield Ear(event)
        finally:
            for topic in topics:
                ears = self._ears[topic]
                ears.discard(event)
                if not ears:
                    del self._ears[topic]

    async def listening(self) -> None:
        """Return when the connection is up, or soon all the same. Raises if it is forbidden."""
        if self._task is None:
            self._task = asyncio.create_task(self._keep_up())
        if not self._up.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_S):
                    await self._up.wait()
        if self._refused is not None:
            raise self._refused

    async def close(self) -> None:
        task, self._task = self._task, None
        self._tell_all()
        # Again and again, because the driver may lose a cancel: see Wire.
        while task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=AGAIN_S)

    async def _keep_up(self) -> None:
        while True:
            try:
                async with self._connected() as connection:
                    self._refused = None
                    self._up.set()
                    # Whatever was said while nobody listened is lost: let all look for themselves.
                    self._tell_all()
                    await self._listen(connection)
            except StoreUnavailable:
                pass
            except StoreError as error:
                self._refused = error
                self._up.set()
            except (wrong.RedisError, OSError, TimeoutError) as error:
                failure = translated(error, self._options)
                if not isinstance(failure, StoreUnavailable):
                    self._refused = failure
                    self._up.set()
            if self._refused is None:
                self._up.clear()
            await asyncio.sleep(AGAIN_S)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Connection]:
        connection = await self._wire.listener()
        try:
            async with asyncio.timeout(self._options.timeout_s):
                await connection.connect()  # type: ignore[no-untyped-call,unused-ignore]
                await connection.send_command("SUBSCRIBE", self._channel)
                await connection.read_response()
            yield connection
        finally:
            await connection.disconnect(nowait=True)

    async def _listen(self, connection: Connection) -> None:
        """Until the connection is lost, which raises."""
        while True:
            heard = await connection.read_response(timeout=SILENT_S)
            if heard is None:
                await connection.send_command("PING")
                heard = await connection.read_response(timeout=SILENT_S)
            if heard is None:
                raise wrong.ConnectionError("the connection for news is dead")
            if heard[0] == b"message":
                self._tell(heard[2])

    def _tell(self, topic: bytes) -> None:
        for event in self._ears.get(topic, ()):
            event.set()

    def _tell_all(self) -> None:
        for events in self._ears.values():
            for event in events:
                event.set()


class Ear:
    """What one waiter hears."""

    def __init__(self, event: asyncio.Event) -> None:
        self._event = event

    def forget(self) -> None:
        self._event.clear()

    async def hear(self, seconds: float) -> bool:
        """Whether there were news within this time, or a moment before."""
        if seconds <= 0:
            return self._event.is_set()
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return False
        return True
