"""The app that the fault tests run in real processes. Its tasks leave a record on disk."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

from tickwheel import App, JobContext, RetryPolicy, current_job, current_jobs
from tickwheel.job import Settlement
from tickwheel.store import open_store

RECORD = os.environ["RECORD"]


class DyingStore:
    """A store whose process dies by SIGKILL at its n-th settle, before or after the commit."""

    def __init__(self, url: str, when: str, nth: int) -> None:
        self._store = open_store(url)
        self._when, self._left = when, nth

    @property
    def ahead_ms(self) -> int:
        return self._store.ahead_ms

    def new_handle(self) -> DyingStore:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def settle(self, settlements: Sequence[Settlement], *, now_ms: int) -> list[bool]:
        self._left -= 1
        if not self._left and self._when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answers = await self._store.settle(settlements, now_ms=now_ms)
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)
        return answers


def store() -> Any:
    url = os.environ["TICKWHEEL_STORE"]
    when, _, nth = os.environ.get("DIE_AT_SETTLE", "").partition(":")
    return DyingStore(url, when, int(nth)) if when else url


app = App(store())


def record(event: str, context: JobContext | None = None) -> None:
    """One line per event, on disk before the task goes on."""
    context = context or current_job()
    id, attempt = (context.job.id, context.job.attempt) if context else ("?", 0)
    line = f"{event} {id} {attempt} {os.getpid()} {time.time():.6f}\n"
    file = os.open(RECORD, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.fsync(file)
    os.close(file)


@app.task
async def work(seconds: float) -> int:
    record("start")
    await asyncio.sleep(seconds)
    record("end")
    return os.getpid()


@app.batch(size=8, linger="100ms")
async def together(seconds: list[float]) -> list[int]:
    for context in current_jobs():
        record(f"start-of-{len(seconds)}", context)
    await asyncio.sleep(max(seconds))
    for context in current_jobs():
        record("end", context)
    return [os.getpid()] * len(seconds)


@app.batch(size=8, linger="100ms")
async def together_or_kill(seconds: list[float]) -> None:
    for context in current_jobs():
        record("start", context)
    if -1.0 in seconds:
        os.kill(os.getpid(), signal.SIGKILL)


@app.task
async def block(seconds: float) -> None:
    record("start")
    time.sleep(seconds)
    record("end")


@app.task(retries=RetryPolicy(retries=25, first="100ms", cap="100ms"))
async def fail(text: str) -> None:
    """Fails with as many words as an error may have."""
    record("fail")
    raise RuntimeError("loud " * 1_000)


@app.task
async def kill() -> None:
    record("kill")
    os.kill(os.getpid(), signal.SIGKILL)


@app.task
def kill_from_a_thread() -> None:
    record("kill")
    os.kill(os.getpid(), signal.SIGKILL)
