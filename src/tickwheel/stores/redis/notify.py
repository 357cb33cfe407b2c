"""Wakes waits by SUBSCRIBE: a connection for work, and one while somebody waits for results.

Messages are lost while the connection is down, so waits also look for themselves every POLL_S.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import msgspec

from tickwheel.errors import StoreError, StoreUnavailable
from tickwheel.store import Tell
from tickwheel.stores.redis.connections import Connection, errors
from tickwheel.stores.redis.url import RedisOptions
from tickwheel.stores.redis.wire import Wire, translated
from tickwheel.stores.waiting import Waiters, Watches

# How often a wait looks without a notification.
POLL_S = 1.0
# After this long without a message the connection is checked with PING, and has as long to answer.
SILENT_S = 5.0
# The pause before reconnecting, and how long a wait waits for the connection before it looks.
RECONNECT_S = 0.25
CONNECT_S = 1.0
# The note that somebody watches for ends lasts this long, and is renewed this long before.
NOTED_S, NOTE_S = 30.0, 10.0
# The connection for ends is closed after this long without a watch.
IDLE_S = 30.0

_ids = msgspec.msgpack.Decoder(list[str]).decode


class Subscriber(Waiters):
    """Keeps one connection subscribed to the store's channel. A topic is `q` and the name of a
    queue, `t` and a task's name as JSON, or `a` and a worker's."""

    def __init__(self, wire: Wire, options: RedisOptions, channel: str = "wake") -> None:
        super().__init__()
        self._wire = wire
        self._options = options
        self._channel = f"{options.root}{channel}"
        self._up = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._refused: StoreError | None = None

    async def listen(self) -> None:
        """Returns when the connection is up, or soon anyway. Raises if it is forbidden."""
        if self._task is None:
            self._task = asyncio.create_task(self._keep_up())
        if not self._up.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CONNECT_S):
                    await self._up.wait()
        if self._refused is not None:
            raise self._refused

    def patience_s(self, silent: int) -> float:
        return POLL_S

    async def close(self) -> None:
        task, self._task = self._task, None
        self.notify()
        # Repeated, because the driver may lose a cancellation: see Wire.
        while task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=RECONNECT_S)

    async def _keep_up(self) -> None:
        while True:
            try:
                async with self._connected() as connection:
                    self._refused = None
                    self._up.set()
                    # Messages from before were lost, so every wait looks again.
                    self.notify()
                    await self._listen(connection)
            except StoreUnavailable:
                pass
            except StoreError as error:
                self._refused = error
                self._up.set()
            except (errors.RedisError, OSError, TimeoutError) as error:
                failure = translated(error, self._options)
                if not isinstance(failure, StoreUnavailable):
                    self._refused = failure
                    self._up.set()
            if self._refused is None:
                self._up.clear()
            await asyncio.sleep(RECONNECT_S)

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
        """Pass on messages until the connection is lost, which raises."""
        while True:
            heard = await connection.read_response(timeout=SILENT_S)
            if heard is None:
                await connection.send_command("PING")
                heard = await connection.read_response(timeout=SILENT_S)
            if heard is None:
                raise errors.ConnectionError("the subscribed connection is dead")
            if heard[0] == b"message":
                self._heard(heard[2])

    def _heard(self, message: bytes) -> None:
        self.notify(*_topics(message.decode(errors="replace")))


class EndSubscriber(Subscriber):
    """Subscribed to the channel of jobs that ended, while somebody watches, and a little longer.
    Steps publish to it only while the key `watched` exists."""

    def __init__(self, wire: Wire, options: RedisOptions) -> None:
        super().__init__(wire, options, "ends")
        self._watches = Watches()
        self._noted_until = 0.0
        self._idle: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None

    async def watch(self, ids: Collection[str], tell: Tell, *, now_ms: int, until_ms: int) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + (until_ms - now_ms) / 1000
        try:
            with self._watches.watching(ids, tell) as watch:
                await self.listen()
                await self._note(loop.time())
                # Whatever ended before this was not published.
                watch.tell()
                while loop.time() < end and not await watch.until(min(end, loop.time() + NOTE_S)):
                    await self._note(loop.time())
        finally:
            if not self._watches.anyone and self._idle is None:
                self._idle = loop.call_later(IDLE_S, self._rest)

    async def _note(self, now: float) -> None:
        """Note that somebody watches, before the last note expires."""
        if now + NOTE_S > self._noted_until:
            await self._wire.step("watch", int(NOTED_S * 1000))
            self._noted_until = now + NOTED_S

    def notify(self, *_: str) -> None:
        """Messages may have been lost, and so may the note."""
        self._noted_until = 0
        self._watches.hear(None)

    def _heard(self, message: bytes) -> None:
        self._watches.hear(_ids(message) if message else None)

    def _rest(self) -> None:
        self._idle = None
        if not self._watches.anyone:
            self._up.clear()
            self._closing = asyncio.create_task(super().close())

    async def close(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._watches.close()
        await super().close()
        if self._closing is not None:
            await self._closing


def _topics(message: str) -> list[str]:
    """A job that was parked is for those who wait for its queue and know its task."""
    if message[:1] != "p":
        return [message]
    queue, _, task = message[1:].rpartition("\n")
    return [f"q{queue}", f"t{task}"]
