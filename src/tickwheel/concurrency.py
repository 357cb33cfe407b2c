"""Waiting for several things at once, and doing several at once, but not too many."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any


async def first_of(*waits: Awaitable[object], timeout_s: float | None = None) -> None:
    """Wait for the first of these, and cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def cancel_all(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel these tasks and wait for their end, whatever it is."""
    ending = [task for task in tasks if task is not None]
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


@asynccontextmanager
async def bounded_tasks(
    most: int,
) -> AsyncIterator[Callable[[Coroutine[Any, Any, None]], Awaitable[None]]]:
    """Yields a function that starts work, and waits while too much is under way. At the end of the
    block all work is done; if some of it failed, the rest is cancelled."""
    running: set[asyncio.Task[None]] = set()

    async def start(work: Coroutine[Any, Any, None]) -> None:
        running.add(asyncio.create_task(work))
        await asyncio.sleep(0)  # it begins before the next is created
        if len(running) == most:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                running.remove(task)
                task.result()

    try:
        yield start
        for task in running:
            await task
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@contextmanager
def single_error() -> Iterator[None]:
    """Raise a single error as it is: the block should not have to know about a task group."""
    try:
        yield
    except BaseExceptionGroup as errors:
        if len(errors.exceptions) == 1:
            raise errors.exceptions[0] from errors.exceptions[0].__cause__
        raise


def in_this_context(
    loop: asyncio.AbstractEventLoop,
) -> Callable[..., asyncio.Task[Any]]:
    """Creates tasks that begin in a copy of the context of now, whoever creates them later."""
    context = contextvars.copy_context()

    def create(work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        return loop.create_task(work, name=name, context=context.copy())

    return create
