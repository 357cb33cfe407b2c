"""A shop that cancels orders that are not paid in time: tasks, and its own database.

Any number of workers can run its jobs, on the same folder as the programs that enqueue them:

    SHOP_FOLDER=… tickwheel worker tickwheel.examples.shop:app

A job may run twice: a worker can die after the work but before it has reported it. So each task
below is safe to repeat: it checks the current state, and changes it in one transaction.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from tickwheel import App, CancelOutcome, JobHandle, RetryPolicy

FOLDER = Path(os.environ.get("SHOP_FOLDER", "."))

app = App(f"sqlite:///{FOLDER}/jobs.db")


# --- Tasks


@app.task
def cancel_order(order_id: int) -> bool:
    """Cancel the order unless it is paid, and put its piece back into stock.

    An order that has not been written by its deadline is cancelled too: see `place_order`.
    """
    with database() as db:
        unpaid = db.execute(
            "UPDATE orders SET state = 'cancelled' WHERE id = ? AND state = 'open'", (order_id,)
        ).rowcount
        if unpaid:
            db.execute("UPDATE stock SET pieces = pieces + 1")
        db.execute("INSERT OR IGNORE INTO orders VALUES (?, 'cancelled')", (order_id,))
    return bool(unpaid)


@app.task(queue="warehouse", retries=RetryPolicy(retries=2, first="500ms"), timeout="10s")
async def ship(order_id: int) -> None:
    """Ask the warehouse for a parcel; retried twice without an answer, then the job is dead."""
    await ask_warehouse(order_id)


@app.every("5s")
def report_stock(tick: datetime) -> None:
    """Record what is in stock; each tick has one report."""
    with database() as db:
        db.execute("INSERT OR IGNORE INTO reports SELECT ?, pieces FROM stock", (tick.isoformat(),))


# --- What customers do


async def place_order(order_id: int, *, pay_within: float) -> JobHandle[bool]:
    """Take a piece from stock for an order that must be paid within `pay_within` seconds.

    First the deadline, then the order: an order without a deadline would keep its piece forever. If
    we die in between, or take longer than `pay_within`, the order is cancelled without a piece.
    """
    call = cancel_order.using(delay=pay_within, id=f"cancel-{order_id}")
    deadline = await call.enqueue(order_id)
    await asyncio.to_thread(_write_order, order_id)
    return deadline


def _write_order(order_id: int) -> None:
    with database() as db:
        order = db.execute("INSERT OR IGNORE INTO orders VALUES (?, 'open')", (order_id,))
        if order.rowcount:
            db.execute("UPDATE stock SET pieces = pieces - 1")


async def pay_order(order_id: int) -> CancelOutcome | None:
    """Pay, ship the order, and return what happened to its deadline; None: paid too late.

    The shop's database decides which comes first, payment or deadline, so it does not matter here
    whether the job could still be cancelled. The ids make the whole call safe to repeat.
    """
    if not await asyncio.to_thread(_write_payment, order_id):
        return None
    await ship.using(id=f"ship-{order_id}").enqueue(order_id)
    return await app.job(f"cancel-{order_id}").cancel()


def _write_payment(order_id: int) -> bool:
    with database() as db:
        paid = db.execute(
            "UPDATE orders SET state = 'paid' WHERE id = ? AND state != 'cancelled'", (order_id,)
        )
        return bool(paid.rowcount)


# --- The warehouse: another company's service, which can be unreachable


class WarehouseAway(Exception):
    """It did not answer."""


AWAY = FOLDER / "warehouse-is-away"


async def ask_warehouse(order_id: int) -> None:
    if await asyncio.to_thread(AWAY.exists):
        raise WarehouseAway("no answer")
    await asyncio.to_thread(_pack, order_id)
    await asyncio.sleep(1)  # The parcel is packed; the answer is slow.


def _pack(order_id: int) -> None:
    """One order, one parcel, however often it is requested."""
    with database() as db:
        db.execute(
            "INSERT INTO parcels VALUES (?, 1) ON CONFLICT DO UPDATE SET requests = requests + 1",
            (order_id,),
        )


# --- The shop's own database


def open_shop(pieces: int) -> None:
    with database() as db:
        db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, state TEXT NOT NULL)")
        db.execute("CREATE TABLE stock (pieces INTEGER NOT NULL CHECK (pieces >= 0))")
        db.execute("CREATE TABLE parcels (order_id INTEGER PRIMARY KEY, requests INTEGER NOT NULL)")
        db.execute("CREATE TABLE reports (tick TEXT PRIMARY KEY, pieces INTEGER NOT NULL)")
        db.execute("INSERT INTO stock VALUES (?)", (pieces,))


@contextmanager
def database() -> Iterator[sqlite3.Connection]:
    """One transaction: everything happens, or after an error nothing."""
    db = sqlite3.connect(FOLDER / "shop.db", timeout=10)
    try:
        with db:
            yield db
    finally:
        db.close()
