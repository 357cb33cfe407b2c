"""How a worker's process ends: gracefully when it is asked once, at once when it is asked twice.

Python waits for every thread before it exits, and a thread can't be ended. So a thread of our own
has the last word: whatever hangs, the process is gone when its time is up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn

from tickwheel.cli.output import FAILURE

log = logging.getLogger("tickwheel")

# What a graceful stop may take on top of its grace: interrupting tasks, writing outcomes.
AFTER_GRACE_S = 15.0
# What the way out may take once all work is over: exit handlers of the user's, for example.
WAY_OUT_S = 10.0
# How long threads and tasks that are about to end are waited for.
LAST_LOOK_S = 1.0
FLUSH_S = 1.0


@dataclass(frozen=True, slots=True)
class _Order:
    """End the process after so many seconds, unless it is gone or another order came."""

    after_s: float
    code: int
    words: str


class Ending:
    """Listens for signals, and for the end of the parent process where there is one."""

    def __init__(self, *, grace_s: float, parent: int | None = None) -> None:
        self._grace_s = grace_s
        # The end of a pipe that the parent process holds open for as long as it lives.
        self._parent = parent
        self._asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._once = False
        # Safe in signal handlers, unlike most of Python's queues and locks.
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()

    def listen(self) -> None:
        """From now on signals come here. To be called in the main thread."""
        threading.Thread(target=self._attend, name="tickwheel-ending", daemon=True).start()
        # Not the event loop's own handlers: those wait for a task that blocks it.
        signal.signal(signal.SIGTERM, self._signalled)
        signal.signal(signal.SIGINT, self._signalled)
        if self._parent is not None:
            threading.Thread(
                target=self._watch_parent,
                args=(self._parent,),
                name="tickwheel-parent",
                daemon=True,
            ).start()

    async def asked(self) -> None:
        """Return when the process is to stop."""
        await self._asked.wait()

    async def unless_asked(self, work: Coroutine[Any, Any, object]) -> bool:
        """Do the work, or drop it as soon as the process is to stop: then False."""
        doing = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._asked.wait())
        await asyncio.wait([doing, stop], return_when=asyncio.FIRST_COMPLETED)
        finished = doing.done()
        for task in (doing, stop):
            task.cancel()
        await asyncio.gather(doing, stop, return_exceptions=True)
        if finished:
            await doing
        return finished

    def leave(self, code: int) -> None:
        """All work is over: whatever is still in the way of the exit gets a few seconds."""
        self._orders.put(_Order(WAY_OUT_S, code, "the exit was held up; ended"))

    # --- In a signal handler, or in a thread

    def _signalled(self, number: int, _: object) -> None:
        if not self._once:
            self._ask()
        elif self._parent is None:
            words = "ended at once: jobs in hand run again once their leases have run out"
            self._orders.put(_Order(0, 128 + number, words))
        # A child ends at once only when its parent kills it: service managers signal every process
        # of a group, so a second signal is no second wish here.

    def _ask(self) -> None:
        self._once = True
        words = "it did not stop in time; ended"
        self._orders.put(_Order(self._grace_s + AFTER_GRACE_S, FAILURE, words))
        with contextlib.suppress(RuntimeError):  # the loop may be closed already
            self._loop.call_soon_threadsafe(self._asked.set)

    def _watch_parent(self, pipe: int) -> None:
        with contextlib.suppress(OSError):
            while os.read(pipe, 1):
                pass
        if not self._once:
            log.warning("the parent process is gone")
            self._ask()

    def _attend(self) -> None:
        """Wait for orders; carry out the newest when its time has come."""
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
    # Whoever holds a stream's lock may never let go of it: so in a thread, and not for long.
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
    """End what tasks have left running in this process; False where something can't be ended."""
    threads = await _threads_left()
    if threads:
        names = ", ".join(sorted(thread.name for thread in threads))
        log.warning(
            "left behind, for a thread can't be ended: %s; "
            "their jobs run again once their leases have run out",
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
        log.warning("left behind, for they ignore their end: %s", names)
    return not stubborn


async def _threads_left() -> list[threading.Thread]:
    """Threads that Python would wait for, after a moment for those that are about to end."""
    until = asyncio.get_running_loop().time() + LAST_LOOK_S
    while True:
        threads = [
            thread
            for thread in threading.enumerate()
            if not thread.daemon and thread is not threading.main_thread()
        ]
        if not threads or asyncio.get_running_loop().time() > until:
            return threads
        await asyncio.sleep(0.01)
