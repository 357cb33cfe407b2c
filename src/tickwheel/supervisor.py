"""Several worker processes under one parent, which replaces those that die.

The parent runs no jobs and imports none of the user's code, so nothing of that can take it down.
Its children hold the read end of a pipe that only the parent can write to: when the parent is
gone, however it went, they read the pipe's end and stop by themselves.
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

from tickwheel.clock import first_of
from tickwheel.span import span_text

log = logging.getLogger("tickwheel")

# The pause before a dead child is replaced: doubled each time, forgotten once one has lived.
FIRST_S, LONGEST_S, HEALTHY_S = 0.5, 30.0, 60.0
# What children may take to stop on top of their grace, before they are killed.
AFTER_GRACE_S = 10.0
# Exit codes for "the command line or the app can't be used": trying again is no use. A child says
# it by another number than the 2 that any job may end its process with.
USAGE, CHILD_USAGE = 2, 78

# From the pipe's number to the command that starts a child.
Command = Callable[[int], Sequence[str]]


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
        """Work until a signal comes or a child can't be used; gives the exit code.

        0: all stopped within their grace. 1: one had to be killed, or could not be started.
        2: a child said that it can't be used as it is. 128 + n: a second signal n killed all.
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
        log.info("stopping all processes; again to end them at once")
        self._stopping.set()

    def _give_up(self, code: int) -> None:
        if not self._stopping.is_set():
            self._code = code
            self._stopping.set()

    # --- One child

    async def _keep(self, number: int, pipe: int) -> None:
        """Start a child, and another one whenever it dies, until we stop."""
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
                log.error("process %d can't be used as it is: no use in trying again", number)
                self._give_up(USAGE)
                return
            if loop.time() - started >= HEALTHY_S:
                pause_s = FIRST_S
            log.warning(
                "process %d (pid %d) %s; starting it again in %s",
                number,
                child.pid,
                how_it_ended(child.returncode),
                span_text(int(pause_s * 1000)),
            )
            await first_of(self._stopping.wait(), timeout_s=pause_s)
            pause_s = min(pause_s * 2, LONGEST_S)

    async def _start(self, number: int, pipe: int) -> Process | None:
        try:
            return await _started(self._command, pipe)
        except OSError as error:
            log.error("process %d can't be started: %s", number, error)
            self._give_up(1)
            return None

    async def _ended(self, number: int, child: Process) -> None:
        """Wait for the child's end; once we stop, tell it so, and see to it that it ends."""
        ended = asyncio.ensure_future(child.wait())
        await first_of(asyncio.shield(ended), self._stopping.wait())
        if not ended.done():
            # SIGTERM for either signal: a child that is still starting ends by it without a word.
            _send(child, signal.SIGTERM)
            await first_of(asyncio.shield(ended), self._killing.wait(), timeout_s=self._patience_s)
        if not ended.done():
            log.warning("process %d (pid %d) is killed", number, child.pid)
            self._code = self._code or 1
            _send(child, signal.SIGKILL)
        await ended


class Child:
    """One child process for as long as the block lasts; then it is told to stop, and is gone."""

    def __init__(self, command: Command, *, patience_s: float) -> None:
        self._command = command
        self._patience_s = patience_s

    async def __aenter__(self) -> Self:
        self._stack = contextlib.ExitStack()
        pipe = self._stack.enter_context(_pipe())
        self._process = await _started(self._command, pipe)
        return self

    async def __aexit__(self, *_: object) -> None:
        with self._stack:
            _send(self._process, signal.SIGTERM)
            await first_of(self._process.wait(), timeout_s=self._patience_s)
            _send(self._process, signal.SIGKILL)
            await self._process.wait()

    async def ended(self) -> int:
        """Wait for its end; gives the exit code."""
        return await self._process.wait()


async def _started(command: Command, pipe: int) -> Process:
    return await asyncio.create_subprocess_exec(
        *command(pipe),
        stdin=DEVNULL,
        pass_fds=[pipe],
        # Ctrl-C goes to the whole group of the terminal; when to stop is for us to say.
        process_group=0,
    )


@contextlib.contextmanager
def on_signals(act: Callable[[signal.Signals], None]) -> Iterator[None]:
    """SIGTERM and SIGINT come here for as long as the block lasts."""
    loop = asyncio.get_running_loop()
    for wish in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(wish, act, wish)
    try:
        yield
    finally:
        for wish in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(wish)


@contextlib.contextmanager
def _pipe() -> Iterator[int]:
    """The end to read from; the other one closes with this process, however it ends."""
    # Closed in every other process: it is not passed on unless we say so.
    read, write = os.pipe()
    try:
        yield read
    finally:
        os.close(read)
        os.close(write)


def how_it_ended(code: int | None) -> str:
    """An exit code in words; negative is a signal, as Python has it."""
    if code is None or code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _send(child: Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended a moment ago
        child.send_signal(number)
