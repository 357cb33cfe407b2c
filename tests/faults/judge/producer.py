"""Enqueues what the load says: `python -m judge.producer NUMBER SEED SECONDS BEGAN WAYS`.

What fails is repeated until it is acknowledged, as a careful user would do it. A producer that was
killed goes on with what is due from then on.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import sqlite3
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import apsw
import psycopg

from judge.load import Order, Wish, orders
from judge.record import Broke, CancelAnswered, CancelTried, RolledBack, Stored
from judge.shop import Errand, app, app_on, call_of, recorder
from tickwheel import App, Call, StoreUnavailable

T = TypeVar("T")

# After the load's end somebody who was never answered gives up.
PATIENCE_S = 30.0
AGAIN = (
    StoreUnavailable,
    sqlite3.OperationalError,
    psycopg.OperationalError,
    psycopg.errors.ReadOnlySqlTransaction,
    apsw.BusyError,
    apsw.FullError,
    apsw.IOError,
)


class Producer:
    def __init__(self, number: int, seed: int, seconds: float, began: float, ways: str) -> None:
        self._plan = orders(seed, number, seconds, tuple(filter(None, ways.split(","))))
        self._began = began
        self._deadline = began + seconds + PATIENCE_S
        self._url = os.environ["TICKWHEEL_STORE"]
        self._outbox = os.environ["JUDGE_OUTBOX"]
        # The same store without the outbox, for transactions in the store itself.
        self._plain = app_on(self._url, None)

    async def run(self) -> None:
        # Before any connection of a user's to its file.
        await self._insist(app.client)
        async with asyncio.TaskGroup() as group:
            for order in self._plan:
                wait_s = self._began + order.at_s - time.time()
                if wait_s < -1:
                    continue
                await asyncio.sleep(max(wait_s, 0))
                group.create_task(self._place(order))

    async def _place(self, order: Order) -> None:
        try:
            ids = await self._insist(lambda: self._stored(order))
            for wish, id in zip(order.wishes, ids or (), strict=False):
                if wish.cancel_s is not None:
                    await asyncio.sleep(wish.cancel_s)
                    await self._insist(lambda id=id: self._cancelled(id))  # type: ignore[misc]
        except Exception as error:
            recorder.write(Broke(at=time.time(), what=f"{order.how}: {error!r}"))

    async def _insist(self, step: Callable[[], Awaitable[T]]) -> T | None:
        while time.time() < self._deadline:
            try:
                return await step()
            except AGAIN:
                await asyncio.sleep(random.uniform(0.05, 0.3))
        return None

    # --- Ways to enqueue

    async def _stored(self, order: Order) -> list[str]:
        """Enqueue, tell the record, and give the ids of what was stored."""
        if order.how in ("one", "twice"):
            [wish] = order.wishes
            call, errand = _call(app, wish)
            handles = [await call.enqueue(errand) for _ in range(1 + (order.how == "twice"))]
            for handle in handles:
                _tell_stored(wish, handle.id, handle.added)
            return [handles[0].id]
        calls = [_call(app, wish) for wish in order.wishes]
        if order.how == "many":
            jobs = [call.job(errand) for call, errand in calls]
            handles = await app.enqueue_many(jobs)
            for wish, handle in zip(order.wishes, handles, strict=True):
                _tell_stored(wish, handle.id, handle.added)
            return [handle.id for handle in handles]
        await asyncio.to_thread(self._commit, order)
        return [] if order.how == "rolled back" else [wish.id for wish in order.wishes]

    def _commit(self, order: Order) -> None:
        """In a transaction of the user's: in the store itself, or with the outbox in it."""
        in_outbox = order.how == "outbox"
        url = self._outbox if in_outbox else self._url
        with closing(_connected(url, driver="sqlite3" if in_outbox else "apsw")) as connection:
            for wish in order.wishes:
                if isinstance(connection, apsw.Connection | sqlite3.Connection):
                    connection.execute("begin immediate")
                place = app if in_outbox else self._plain
                call, errand = _call(place, wish, connection=connection)
                handle = call.enqueue_sync(errand)
                if order.how == "rolled back":
                    recorder.write(RolledBack(at=time.time(), id=wish.id, number=wish.number))
                    connection.execute("rollback")
                else:
                    connection.execute("commit")
                    added = handle.added and not in_outbox
                    _tell_stored(wish, handle.id, added, on_its_way=in_outbox)

    async def _cancelled(self, id: str) -> None:
        recorder.write(CancelTried(at=time.time(), id=id))
        answer = await app.job(id).cancel()
        recorder.write(CancelAnswered(at=time.time(), id=id, answer=answer.value))


def _call(app: App, wish: Wish, **options: object) -> tuple[Call[[Errand], str], Errand]:
    # To the millisecond, and not sooner than said.
    due = math.ceil((time.time() + wish.delay_s) * 1000) / 1000
    if wish.delay_s:
        options["at"] = datetime.fromtimestamp(due, UTC)
    if wish.named:
        options["id"] = wish.id
    errand = Errand(
        number=wish.number,
        not_before=due if wish.delay_s else time.time(),
        seconds=wish.seconds,
        fails=wish.fails,
        dies=wish.dies,
        gives_up=wish.gives_up,
        snoozes=wish.snoozes,
    )
    return call_of(app, wish, **options), errand


def _tell_stored(wish: Wish, id: str, added: bool, *, on_its_way: bool = False) -> None:
    recorder.write(
        Stored(at=time.time(), id=id, number=wish.number, added=added, on_its_way=on_its_way)
    )


def _connected(url: str, *, driver: str) -> Any:
    if url.startswith("postgresql"):
        # Without what is the store's own.
        return psycopg.connect(url.partition("?")[0], connect_timeout=2)
    file = Path(url.removeprefix("sqlite:///").partition("?")[0])
    if driver == "sqlite3":
        return sqlite3.connect(file, timeout=10, isolation_level=None)
    connection = apsw.Connection(str(file))
    connection.set_busy_timeout(10_000)
    return connection


if __name__ == "__main__":
    number, seed, seconds, began, ways = sys.argv[1:]
    producer = Producer(int(number), int(seed), float(seconds), float(began), ways)
    asyncio.run(producer.run())
