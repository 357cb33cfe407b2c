"""End a worker's process: gracefully at the first signal, immediately at the second.

Python waits for every thread before it exits, and a thread can't be killed. So a thread of our own
enforces the deadline: whatever hangs, the process ends when its time is up.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import contextlib
import logging
import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn

from tickwheel.cli.output import FAILURE

log = logging.getLogger("tickwheel")

# How long a graceful stop may take after its grace: interrupting tasks, writing outcomes.
AFTER_GRACE_S = 15.0
# How long the exit may take once all work is over: the user's exit handlers, for example.
WAY_OUT_S = 10.0
# How long to wait for threads and tasks that are about to end.
LAST_LOOK_S = 1.0
FLUSH_S = 1.0
# What a thread of an executor runs; while it runs a call, that call is on top.
EXECUTOR_LOOP = concurrent.futures.thread._worker.__code__


@dataclass(frozen=True, slots=True)
class _Order:
    """End the process after `after_s`, unless it has ended or a newer order replaces this one."""

    after_s: float
    code: int
    words: str


class Shutdown:
    """Listens for signals, and for the end of the parent process if there is one."""

    def __init__(self, *, grace_s: float, parent: int | None = None) -> None:
        self._grace_s = grace_s
        # The read end of a pipe that the parent process holds open while it is alive.
        self._parent = parent
        self._stop_requested = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._once = False
        # Safe in signal handlers, unlike most of Python's queues and locks.
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()

    def listen(self) -> None:
        """Start handling signals. Must be called in the main thread."""
        threading.Thread(target=self._attend, name="tickwheel-ending", daemon=True).start()
        # Not the event loop's own handlers: a task that blocks the loop would delay them.
        signal.signal(signal.SIGTERM, self._signalled)
        signal.signal(signal.SIGINT, self._signalled)
        if self._parent is not None:
            threading.Thread(
                target=self._watch_parent,
                args=(self._parent,),
                name="tickwheel-parent",
                daemon=True,
            ).start()

    async def requested(self) -> None:
        """Return when the process should stop."""
        await self._stop_requested.wait()

    async def unless_stopped(self, work: Coroutine[Any, Any, object]) -> bool:
        """Do the work, or cancel it as soon as the process should stop: then False."""
        doing = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop_requested.wait())
        await asyncio.wait([doing, stop], return_when=asyncio.FIRST_COMPLETED)
        finished = doing.done()
        for task in (doing, stop):
            task.cancel()
        await asyncio.gather(doing, stop, return_exceptions=True)
        if finished:
            await doing
        return finished

    @contextlib.asynccontextmanager
    async def starting(self) -> AsyncIterator[Callable[[], object]]:
        """Cancel the block as soon as the process should stop, until the block says that it has
        started by calling what this yields."""
        task = asyncio.current_task()
        assert task is not None

        async def cancel() -> None:
            await self._stop_requested.wait()
            task.cancel()

        waiting = asyncio.create_task(cancel())
        try:
            yield waiting.cancel
        except asyncio.CancelledError:
            if waiting.cancelled() or not waiting.done():
                raise  # by somebody else
            task.uncancel()
        finally:
            waiting.cancel()

    def leave(self, code: int) -> None:
        """All work is over: whatever still delays the exit gets a few seconds."""
        self._orders.put(_Order(WAY_OUT_S, code, "the exit took too long; killed"))

    # --- In a signal handler, or in a thread

    def _signalled(self, number: int, _: object) -> None:
        if not self._once:
            self._ask()
        elif self._parent is None:
            words = "killed by a second signal: running jobs run again once their leases run out"
            self._orders.put(_Order(0, 128 + number, words))
        # A child is killed only by its parent: service managers signal every process of a group, so
        # a second signal here does not mean that the user insists.

    def _ask(self) -> None:
        self._once = True
        words = "did not stop in time; killed"
        self._orders.put(_Order(self._grace_s + AFTER_GRACE_S, FAILURE, words))
        with contextlib.suppress(RuntimeError):  # the loop may be closed already
            self._loop.call_soon_threadsafe(self._stop_requested.set)

    def _watch_parent(self, pipe: int) -> None:
        with contextlib.suppress(OSError):
            while os.read(pipe, 1):
                pass
        if not self._once:
            log.warning("the parent process has ended; stopping")
            self._ask()

    def _attend(self) -> None:
        """Wait for orders; carry out the newest when its time is up."""
        order = self._orders.get()
        while True:
            try:
                order = self._orders.get(timeout=order.after_s)
            except queue.Empty:
                end_now(order.code, order.words)


def end_now(code: int, words: str) -> NoReturn:
    """End the process without waiting for anything but a short flush of logs and streams."""
    for child in multiprocessing.active_children():
        child.kill()
    # Another thread may hold a stream's lock forever: so flush in a thread, for a limited time.
    flush = threading.Thread(target=_flush, args=(words,), daemon=True)
    flush.start()
    flush.join(FLUSH_S)
    os._exit(code)


def _flush(words: str) -> None:
    log.info(words)
    for step in (logging.shutdown, sys.stdout.flush, sys.stderr.flush):
        with contextlib.suppress(Exception):
            step()


async def end_leftovers() -> bool:
    """End what tasks left running in this process; False if something can't be ended."""
    threads = await _threads_left()
    if threads:
        names = ", ".join(sorted(thread.name for thread in threads))
        log.warning(
            "threads still running, and threads can't be killed: %s; "
            "jobs in them run again once their leases run out",
            names,
        )
        return False
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if not tasks:
        return True
    _, stubborn = await asyncio.wait(tasks, timeout=LAST_LOOK_S)
    if stubborn:
        names = ", ".join(sorted(task.get_name() for task in stubborn))
        log.warning("these tasks ignored cancellation: %s", names)
    return not stubborn


def _idle(thread: threading.Thread) -> bool:
    """Whether it is a thread of an executor that waits for work: Python ends those itself."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code is EXECUTOR_LOOP


async def _threads_left() -> list[threading.Thread]:
    """Threads that Python would wait for, except those that end within a moment."""
    until = asyncio.get_running_loop().time() + LAST_LOOK_S
    while True:
        threads = [
            thread
            for thread in threading.enumerate()
            if not thread.daemon and thread is not threading.main_thread() and not _idle(thread)
        ]
        if not threads or asyncio.get_running_loop().time() > until:
            return threads
        await asyncio.sleep(0.01)
