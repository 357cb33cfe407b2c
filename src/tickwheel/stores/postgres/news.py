"""News for those who wait: from this handle at once, from others by LISTEN, or by looking.

Behind a transaction pooler LISTEN is taken without a word and never answers. So a listener is
believed only after it has heard us call ourselves, and is asked again from time to time; until
then, and while its line is broken, whoever waits looks for itself, more often.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable

import psycopg

from tickwheel.errors import StoreError
from tickwheel.stores.postgres.pool import Connection, Pool

# The pauses between two looks double from the first to the longest. A commit that came between a
# look and the one before it, and found no reason to notify, is seen by the first.
FIRST_S = 0.05
HEARING_S, DEAF_S = 2.0, 0.5
# A call to ourselves takes a millisecond. One that is not heard in this time never will be.
ECHO_S = 3.0
CHECK_S = 30.0
# Pauses between two tries to listen.
RETRY_S, RETRY_LONGEST_S = 0.2, 30.0


class News:
    """Wakes waiters of one handle, by topic: `q` and a queue's name, `a` and a worker's."""

    def __init__(self, pool: Pool, channel: str) -> None:
        self._pool = pool
        self._channel = channel
        self._waiters: dict[asyncio.Future[None], frozenset[str]] = {}
        self._told = 0
        self._listening: asyncio.Task[None] | None = None
        self._echo: tuple[str, asyncio.Event] | None = None
        # Whether notifications arrive; None until it is known.
        self.hearing: bool | None = None

    async def close(self) -> None:
        listening, self._listening = self._listening, None
        if listening is not None:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
        # Whoever still waits finds the store closed when it looks again.
        self.tell()

    # --- Telling and waiting

    def tell(self, topic: str | None = None) -> None:
        """Wake those who wait for this topic; all of them without one."""
        self._told += 1
        for waiter, topics in self._waiters.items():
            if (topic is None or topic in topics) and not waiter.done():
                waiter.set_result(None)

    async def watch(
        self, topics: frozenset[str], look: Callable[[], Awaitable[float]], *, until: float
    ) -> None:
        """Look, and look again when there is news, until the moment comes that the last look gave
        (of the event loop's clock), or `until`."""
        self._listen()
        loop = asyncio.get_running_loop()
        pause_s = FIRST_S
        while True:
            told = self._told
            end = min(await look(), until)
            if end <= loop.time():
                return
            # News that came while we looked may be of what we did not see.
            if told == self._told and not await self._news(topics, min(end, loop.time() + pause_s)):
                pause_s = min(pause_s * 2, HEARING_S if self.hearing else DEAF_S)

    async def _news(self, topics: frozenset[str], until: float) -> bool:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = topics
        try:
            async with asyncio.timeout_at(until):
                await waiter
        except TimeoutError:
            return False
        finally:
            del self._waiters[waiter]
        return True

    # --- Listening

    def _listen(self) -> None:
        """Begin with the first that waits: a handle that only adds jobs needs no listener."""
        if self._listening is None:
            self._listening = asyncio.create_task(self._keep_listening())

    async def _keep_listening(self) -> None:
        pause_s = RETRY_S
        while True:
            with contextlib.suppress(psycopg.Error, StoreError, TimeoutError, OSError):
                heard = await self._listen_once()
                pause_s = RETRY_S if heard else pause_s
            self.hearing = False
            self.tell()
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, RETRY_LONGEST_S)

    async def _listen_once(self) -> bool:
        """Listen until the line is lost; whether it was ever any good."""
        connection = await self._pool.connect()
        try:
            await connection.execute(f'listen "{self._channel}"')
            # Whatever happened before this moment was not heard.
            self.tell()
            reading = asyncio.create_task(self._read(connection))
            try:
                return await self._check(reading)
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
        finally:
            connection.pgconn.finish()

    async def _read(self, connection: Connection) -> None:
        async for note in connection.notifies():
            if note.payload.startswith("e"):
                if self._echo is not None and note.payload == self._echo[0]:
                    self._echo[1].set()
            # A name that was too long to be sent is everybody's.
            elif len(note.payload) == 1:
                self.tell()
            else:
                self.tell(note.payload)

    async def _check(self, reading: asyncio.Task[None]) -> bool:
        """Call ourselves now and then, until no echo comes; whether one ever came."""
        heard = False
        while True:
            call, echo = "e" + secrets.token_hex(8), asyncio.Event()
            self._echo = call, echo
            await self._pool.run(_notify, self._channel, call)
            if not await _first(echo.wait(), reading, timeout_s=ECHO_S) or reading.done():
                return heard
            if not heard:
                heard = self.hearing = True
            if await _first(reading, timeout_s=CHECK_S):
                return heard


async def _notify(connection: Connection, channel: str, payload: str) -> None:
    await connection.execute("select pg_notify(%s, %s)", (channel, payload))


async def _first(*waits: Awaitable[object], timeout_s: float) -> bool:
    """Whether any of these came in time. Tasks that were given go on."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for wait, task in zip(waits, tasks, strict=True):
        if task is not wait:
            task.cancel()
    return bool(done)
