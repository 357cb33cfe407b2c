"""Run several worker processes under one parent, which replaces those that die.

The parent runs no jobs and imports none of the user's code, so user code can't crash it. Its
children hold the read end of a pipe that only the parent can write to: when the parent ends, for
whatever reason, they read end-of-file and stop by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Iterator, Sequence
from typing import Self

from tickwheel.concurrency import first_of
from tickwheel.duration import duration_text

log = logging.getLogger("tickwheel")

# The pause before a dead child is replaced: doubled each time, reset once a child has run for a
# while.
FIRST_S, LONGEST_S, HEALTHY_S = 0.5, 30.0, 60.0
# How long after their grace children may take to stop before they are killed.
AFTER_GRACE_S = 10.0
# Exit codes for "the command line or the app can't be used", where a restart would not help. A
# child uses a code of its own, because any job may end its process with 2.
USAGE, CHILD_USAGE = 2, 78

# Maps the pipe's number, and that of the child, from 1 on, to the command that starts the child.
Command = Callable[[int, int], Sequence[str]]


class Supervisor:
    """Keeps `processes` children alive until SIGTERM or SIGINT."""

    def __init__(self, command: Command, *, processes: int, grace_s: float) -> None:
        self._command = command
        self._processes = processes
        self._patience_s = grace_s + AFTER_GRACE_S
        self._stopping = asyncio.Event()
        self._killing = asyncio.Event()
        self._code = 0

    async def run(self) -> int:
        """Work until a signal arrives or a child can't be used; returns the exit code.

        0: all stopped within their grace. 1: one had to be killed, or could not be started.
        2: a child has an invalid app or setting. 128 + n: a second signal, n, killed all.
        """
        with on_signals(self._signalled), _pipe() as pipe:
            async with asyncio.TaskGroup() as group:
                for number in range(1, self._processes + 1):
                    group.create_task(self._keep(number, pipe))
        log.info("all processes have ended")
        return self._code

    def _signalled(self, number: signal.Signals) -> None:
        if self._stopping.is_set():
            self._code = 128 + number
            self._killing.set()
            return
        log.info("stopping all processes; signal again to kill them")
        self._stopping.set()

    def _give_up(self, code: int) -> None:
        if not self._stopping.is_set():
            self._code = code
            self._stopping.set()

    # --- One child

    async def _keep(self, number: int, pipe: int) -> None:
        """Start a child, and replace it whenever it dies, until we stop."""
        loop = asyncio.get_running_loop()
        pause_s = FIRST_S
        while not self._stopping.is_set():
            started = loop.time()
            child = await self._start(number, pipe)
            if child is None:
                return
            await self._ended(number, child)
            if self._stopping.is_set():
                return
            if child.returncode == CHILD_USAGE:
                log.error("process %d: the app or a setting is invalid; not restarting it", number)
                self._give_up(USAGE)
                return
            if loop.time() - started >= HEALTHY_S:
                pause_s = FIRST_S
            log.warning(
                "process %d (pid %d) %s; restarting it in %s",
                number,
                child.pid,
                how_it_ended(child.returncode),
                duration_text(int(pause_s * 1000)),
            )
            await first_of(self._stopping.wait(), timeout_s=pause_s)
            pause_s = min(pause_s * 2, LONGEST_S)

    async def _start(self, number: int, pipe: int) -> Process | None:
        try:
            return await _started(self._command, pipe, number)
        except OSError as error:
            log.error("could not start process %d: %s", number, error)
            self._give_up(1)
            return None

    async def _ended(self, number: int, child: Process) -> None:
        """Wait until the child ends; once we stop, tell it to stop and make sure that it does."""
        ended = asyncio.ensure_future(child.wait())
        await first_of(asyncio.shield(ended), self._stopping.wait())
        if not ended.done():
            # SIGTERM for either signal: it ends a child that is still starting without a traceback.
            _send(child, signal.SIGTERM)
            await first_of(asyncio.shield(ended), self._killing.wait(), timeout_s=self._patience_s)
        if not ended.done():
            why = "a second signal" if self._killing.is_set() else "it did not stop in time"
            log.warning("killing process %d (pid %d): %s", number, child.pid, why)
            self._code = self._code or 1
            _send(child, signal.SIGKILL)
        await ended


class WorkerProcess:
    """One worker process for the duration of a block; at its end the process is stopped."""

    def __init__(self, command: Command, *, patience_s: float) -> None:
        self._command = command
        self._patience_s = patience_s

    async def __aenter__(self) -> Self:
        self._stack = contextlib.ExitStack()
        pipe = self._stack.enter_context(_pipe())
        self._process = await _started(self._command, pipe, 1)
        return self

    async def __aexit__(self, *_: object) -> None:
        with self._stack:
            _send(self._process, signal.SIGTERM)
            await first_of(self._process.wait(), timeout_s=self._patience_s)
            _send(self._process, signal.SIGKILL)
            await self._process.wait()

    async def ended(self) -> int:
        """Wait until it ends; returns the exit code."""
        return await self._process.wait()


async def _started(command: Command, pipe: int, number: int) -> Process:
    return await asyncio.create_subprocess_exec(
        *command(pipe, number),
        stdin=DEVNULL,
        pass_fds=[pipe],
        # Ctrl-C goes to the whole process group of the terminal; we decide when a child stops.
        process_group=0,
    )


@contextlib.contextmanager
def on_signals(act: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Handle SIGTERM and SIGINT for the duration of the block."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, act, number)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _pipe() -> Iterator[int]:
    """The read end; the write end closes with this process, however it ends."""
    # Closed in every other process: it is not inherited unless we ask for that.
    read, write = os.pipe()
    try:
        yield read
    finally:
        os.close(read)
        os.close(write)


def how_it_ended(code: int | None) -> str:
    """An exit code in words; a negative one is a signal, as in Python."""
    if code is None or code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _send(child: Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended a moment ago
        child.send_signal(number)
