"""An app with a lifespan of each kind: its child processes import it, so it is in a module."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from tickwheel import INJECTED, App, current_job

# Where each process notes what happens in it, and what else a lifespan is to do.
RECORD, MISCHIEF = "AROUND_RECORD", "AROUND_MISCHIEF"


class Pool:
    """What the async lifespan opens."""


class File:
    """What each child process opens."""


app = App("memory://")


def note(what: str) -> None:
    with Path(os.environ[RECORD]).open("a") as record:
        record.write(f"{what} {os.getpid()}\n")


@app.lifespan
async def pool() -> AsyncIterator[Pool]:
    note("pool opened")
    yield Pool()
    note("pool closed")


@app.lifespan
def file() -> Iterator[File]:
    mischief = os.environ.get(MISCHIEF)
    if mischief == "fail":
        raise OSError("no such file")
    note("file opened")
    yield File()
    if mischief == "hang":
        note("file hangs")
        time.sleep(60)
    note("file closed")
    if mischief == "fail at close":
        raise OSError("the disk is full")


def kind_of_state() -> str | None:
    job = current_job()
    return None if job is None else type(job.state).__name__


@app.task
async def on_loop(n: int, pool: Pool = INJECTED) -> list[str | int | None]:
    return [n, type(pool).__name__, kind_of_state()]


@app.task
def in_thread(pool: Pool, n: int) -> list[str | int | None]:
    return [n, type(pool).__name__, kind_of_state()]


@app.task(pool="process", retries=0)
def in_child(n: int, *, file: File = INJECTED) -> list[str | int | None]:
    note("ran")
    return [n, type(file).__name__]


@app.task(pool="process", retries=0, timeout="300ms")
def too_slow(file: File = INJECTED) -> None:
    note("slow")
    time.sleep(60)
