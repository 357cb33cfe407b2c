"""`tickwheel top`: queues, workers, punctuality and the wheel's coming slots, live."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import click

from tickwheel.cli.load_app import app_of, ask, store_name
from tickwheel.cli.options import Verb, Where, common
from tickwheel.cli.output import OK, emit_json
from tickwheel.duration import duration_ms
from tickwheel.errors import BadTime, StoreUnavailable
from tickwheel.job import Job, State

if TYPE_CHECKING:
    from rich.console import Console

    from tickwheel.cli.top_frame import Frame, Sample, Waiting
    from tickwheel.client import Client
    from tickwheel.store import QueueInfo

SHORTEST_MS = 100
# The most that one sample asks of the store: queues examined, and jobs in all.
QUEUES_READ = 10
WAITING_READ = 5_000
DONE_READ = 200
DEAD_READ = 10
# A store may return short pages, but we don't ask forever.
PAGE, PAGES = 1_000, 10
# Waiting jobs are many and change little, so they are read again only after this long.
WAITING_EVERY_MS = 5_000


@click.command("top", cls=Verb)
@click.option("--every", metavar="DURATION", default="1s", help="How often to refresh.")
@click.option("--once", is_flag=True, help="Print one frame, measured over --every, and exit.")
@common
def top(every: str, once: bool, where: Where, as_json: bool) -> int:
    """Watch queues, workers, punctuality and upcoming jobs, live.

    q or Ctrl-C quits. Prints one frame if the output is JSON or not a terminal.
    """
    every_ms = duration_ms(every)
    if every_ms < SHORTEST_MS:
        raise BadTime(f"--every {every!r}: must be at least {SHORTEST_MS}ms")
    title = store_name(app_of(where))
    if as_json or once or not sys.stdout.isatty():
        _print(ask(where, lambda client: _one_frame(client, every_ms)), title, as_json)
        return OK
    # Either signal restores the terminal.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        ask(where, lambda client: _watch(client, every_ms, title))
    except KeyboardInterrupt:
        pass
    return OK


def _print(frame: Frame, title: str, as_json: bool) -> None:
    from tickwheel.cli.top_frame import frame_document

    if as_json:
        emit_json(frame_document(frame))
        return
    from tickwheel.cli.top_view import view

    console = _console()
    with console.capture() as printed:
        console.print(view(frame, title, width=console.width, height=None))
    lines = (line.rstrip() for line in printed.get().splitlines())
    click.echo("\n".join(lines), color=True)


def _console() -> Console:
    from rich.console import Console

    return Console(
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        highlight=False,
        markup=False,
        emoji=False,
    )


# --- The loop


async def _one_frame(client: Client, every_ms: int) -> Frame:
    import asyncio

    from tickwheel.cli.top_frame import frame

    sampler = Sampler(client)
    before = await sampler.take()
    await asyncio.sleep(every_ms / 1000)
    return frame(await sampler.take(), before)


async def _watch(client: Client, every_ms: int, title: str) -> None:
    """Draw frame after frame; while the store is unreachable, the last frame and the reason."""
    import asyncio

    from rich.live import Live

    from tickwheel.cli.top_frame import frame
    from tickwheel.cli.top_view import view

    sampler = Sampler(client)
    before, sample = None, await sampler.take()
    away: str | None = None
    quit = asyncio.Event()
    with (
        Live(console=_console(), screen=True, auto_refresh=False) as live,
        quit_by_key(quit.set),
    ):
        while not quit.is_set():
            drawn = frame(sample, before, away=away)
            size = live.console.size
            live.update(view(drawn, title, width=size.width, height=size.height), refresh=True)
            with suppress(TimeoutError):
                await asyncio.wait_for(quit.wait(), every_ms / 1000)
            try:
                before, sample, away = sample, await sampler.take(), None
            except StoreUnavailable as error:
                away = str(error)


@contextmanager
def quit_by_key(quit: Callable[[], None]) -> Iterator[None]:
    """Call `quit` when q is typed. Keys are then read at once and not shown."""
    import asyncio

    if not _has_keys():
        yield
        return
    import termios
    import tty

    fd, loop = sys.stdin.fileno(), asyncio.get_running_loop()

    def read() -> None:
        typed = os.read(fd, 1024)
        if not typed:
            loop.remove_reader(fd)  # the terminal is gone
        if b"q" in typed.lower():
            quit()

    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    loop.add_reader(fd, read)
    try:
        yield
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _has_keys() -> bool:
    """Whether we may read keys: not on Windows, and not in the background, where a process that
    changes its terminal is stopped."""
    if importlib.util.find_spec("termios") is None or not sys.stdin.isatty():
        return False
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:
        return True  # no job control


# --- Asking the store


class Sampler:
    """Takes samples. Each makes a bounded number of calls, and few if little has changed."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._waiting: Waiting | None = None
        # By queue and state: the count, and the last jobs.
        self._ended: dict[tuple[str, State], tuple[int, list[Job]]] = {}

    async def take(self) -> Sample:
        """Read the store's current state. Raises StoreUnavailable."""
        from tickwheel.cli.top_frame import Sample
        from tickwheel.unserved import unserved_tasks

        await self._client.ready()
        queues = await self._client.queues()
        workers = await self._client.workers()
        parked = await self._client.parked() if any(each.waiting for each in queues) else []
        now_ms = self._client.clock.now_ms()
        if self._waiting is None or now_ms - self._waiting.at_ms >= WAITING_EVERY_MS:
            self._waiting = await self._find_waiting(queues, now_ms)
        await self._find_ended(queues)
        return Sample(
            now_ms=now_ms,
            queues=queues,
            workers=workers,
            waiting=self._waiting,
            ended=[job for _, jobs in self._ended.values() for job in jobs],
            unknown=unserved_tasks(parked, workers),
        )

    async def _find_waiting(self, queues: list[QueueInfo], now_ms: int) -> Waiting:
        """Some waiting jobs of each queue, so that a large queue does not hide the others."""
        from tickwheel.cli.top_frame import Waiting

        busy = sorted((each for each in queues if each.waiting), key=lambda each: each.waiting)
        read = busy[:QUEUES_READ]
        found: list[Job] = []
        more = len(busy) > len(read)
        for i, queue in enumerate(read):
            # What a small queue leaves of its share goes to the larger ones after it.
            share = (WAITING_READ - len(found)) // (len(read) - i)
            jobs, cut = await self._find(State.WAITING, queue.name, share)
            found += jobs
            more = more or cut
        return Waiting(now_ms, found, more)

    async def _find_ended(self, queues: list[QueueInfo]) -> None:
        """The last ended jobs of queues where jobs have ended since the last sample."""
        counts = {
            (queue.name, state): count
            for queue in queues
            for state in (State.DONE, State.DEAD)
            if (count := getattr(queue, state))
        }
        self._ended = {key: kept for key, kept in self._ended.items() if key in counts}
        share = max(DONE_READ // max(len(queues), 1), 1)
        moved = [key for key in counts if self._ended.get(key, (0,))[0] != counts[key]]
        for name, state in moved[: 2 * QUEUES_READ]:
            limit = share if state is State.DONE else DEAD_READ
            jobs, _ = await self._find(state, name, limit)
            self._ended[name, state] = counts[name, state], jobs

    async def _find(self, state: State, queue: str, limit: int) -> tuple[list[Job], bool]:
        """Up to `limit` jobs, in the store's own order, and whether there may be more."""
        from tickwheel.store import Query

        found: list[Job] = []
        cursor: str | None = None
        for _ in range(PAGES):
            page = await self._client.find(
                Query(state=state, queue=queue), cursor=cursor, limit=min(limit - len(found), PAGE)
            )
            found += page.jobs
            cursor = page.cursor
            if cursor is None or len(found) >= limit:
                break
        return found, cursor is not None
