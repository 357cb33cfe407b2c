"""Wakes waits by LISTEN, or lets them look more often where that doesn't work.

A transaction pooler accepts LISTEN and then never passes on a notification. So a connection is
trusted only after it has received a notification that we sent ourselves, and is tested again from
time to time. Until then, and while the connection is broken, waits look more often.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import Awaitable, Collection

import msgspec
import psycopg

from tickwheel.errors import StoreError
from tickwheel.store import Tell
from tickwheel.stores.postgres.pool import Connection, Pool
from tickwheel.stores.waiting import Waiters, Watches

# The pause between two looks doubles, up to the longest. The first is short, because a job that was
# committed during the first look may have caused no notification: see job_added in schema.sql.
FIRST_S = 0.05
HEARING_S, DEAF_S = 2.0, 0.5
# A notification to ourselves takes a millisecond. If it takes longer than this, it is lost.
ECHO_S = 3.0
CHECK_S = 30.0
# The pause before LISTEN is tried again doubles, too.
RETRY_S, RETRY_LONGEST_S = 0.2, 30.0
# For how long it is noted that somebody watches for ends; it is renewed when half of it is over.
WATCHED_S = 30.0
# The connection for ends is closed after this long without a watch.
IDLE_S = 30.0


class Listener(Waiters):
    """Listens on one channel. A topic is `q` and the name of a queue, `t` and the name of
    a task of which jobs are parked, or `a` and a worker's."""

    def __init__(self, pool: Pool, channel: str) -> None:
        super().__init__()
        self._pool = pool
        self._channel = channel
        self._listening: asyncio.Task[None] | None = None
        self._echo: tuple[str, asyncio.Event] | None = None
        # Whether notifications arrive; None if that is not known yet.
        self.hearing: bool | None = None

    async def close(self) -> None:
        listening, self._listening = self._listening, None
        if listening is not None:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
        # A wait that goes on finds the store closed when it looks again.
        self.notify()

    async def listen(self) -> None:
        # Only for a wait: a handle that only adds jobs needs no listener.
        if self._listening is None:
            self._listening = asyncio.create_task(self._keep_listening())

    def patience_s(self, silent: int) -> float:
        longest_s = HEARING_S if self.hearing else DEAF_S
        # Bounded before it is doubled: a wait may go on forever.
        return min(FIRST_S * (1 << min(silent, 10)), longest_s)

    # --- Listening

    async def _keep_listening(self) -> None:
        pause_s = RETRY_S
        while True:
            with contextlib.suppress(psycopg.Error, StoreError, TimeoutError, OSError):
                heard = await self._listen_once()
                pause_s = RETRY_S if heard else pause_s
            self.hearing = False
            self.notify()
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, RETRY_LONGEST_S)

    async def _listen_once(self) -> bool:
        """Listen until the connection is lost; whether any notification arrived."""
        connection = await self._pool.connect()
        try:
            await connection.execute(f'listen "{self._channel}"')
            # Earlier notifications were missed, so every wait looks again.
            self.notify()
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
            # A name that was too long to send: wake all waits.
            elif len(note.payload) == 1:
                self.notify()
            else:
                self._heard(note.payload)

    def _heard(self, payload: str) -> None:
        self.notify(payload)

    async def _check(self, reading: asyncio.Task[None]) -> bool:
        """Notify ourselves now and then until that doesn't arrive; whether it ever did."""
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


class EndListener(Listener):
    """Listens for jobs that ended while somebody watches, and a little longer. The server notifies
    only as long as `watch` in schema.sql was told to."""

    def __init__(self, pool: Pool, schema: str) -> None:
        # The name of a channel has at most 63 characters.
        super().__init__(pool, f"{schema[:57]}:ends")
        self._schema = schema
        self._watches = Watches()
        self._noted_until = 0.0
        self._idle: asyncio.TimerHandle | None = None

    async def watch(self, ids: Collection[str], tell: Tell, *, now_ms: int, until_ms: int) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + (until_ms - now_ms) / 1000
        try:
            with self._watches.watching(ids, tell) as watch:
                await self.listen()
                # What is being settled when the first one begins to watch causes no notification.
                pause_s = FIRST_S if await self._note(loop.time()) else math.inf
                watch.tell()
                while loop.time() < end:
                    pause_s = pause_s if self.hearing else min(pause_s, DEAF_S)
                    if await watch.until(min(end, loop.time() + pause_s)):
                        return
                    watch.tell()
                    pause_s = math.inf
        finally:
            if not self._watches.anyone and self._idle is None:
                self._idle = loop.call_later(IDLE_S, self._rest)

    async def _note(self, now: float) -> bool:
        """Note that somebody watches; returns whether nobody did before."""
        if now + WATCHED_S / 2 < self._noted_until:
            return False
        new = await self._pool.run(_watch, self._schema)
        self._noted_until = now + WATCHED_S
        return new

    def notify(self, *_: str) -> None:
        """Notifications may have been missed, and the note lost with the server."""
        self._noted_until = 0
        self._watches.hear(None)

    def _heard(self, payload: str) -> None:
        self._watches.hear(_ids(payload))

    def _rest(self) -> None:
        self._idle = None
        if not self._watches.anyone and self._listening is not None:
            self._listening.cancel()
            self._listening = self.hearing = None

    async def close(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._watches.close()
        await super().close()


_ids = msgspec.json.Decoder(list[str]).decode


async def _watch(connection: Connection, schema: str) -> bool:
    cursor = await connection.execute(f"select {schema}.watch(%s)", (int(WATCHED_S * 1000),))
    return await cursor.fetchone() != (False,)


async def _notify(connection: Connection, channel: str, payload: str) -> None:
    await connection.execute("select pg_notify(%s, %s)", (channel, payload))


async def _first(*waits: Awaitable[object], timeout_s: float) -> bool:
    """Whether any of these ended in time. Tasks among them are not cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for wait, task in zip(waits, tasks, strict=True):
        if task is not wait:
            task.cancel()
    return bool(done)
