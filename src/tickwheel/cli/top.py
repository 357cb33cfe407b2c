"""`tickwheel top`: queues, workers, punctuality and the wheel's coming slots, live."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

import click

from tickwheel.cli.loading import app_of, ask, store_name
from tickwheel.cli.options import Verb, Where, common
from tickwheel.cli.output import OK, emit_json
from tickwheel.errors import BadTime, StoreUnavailable
from tickwheel.job import Job, State
from tickwheel.span import span_ms

if TYPE_CHECKING:
    from rich.console import Console

    from tickwheel.cli.top_frame import Frame, Sample, Waiting
    from tickwheel.client import Client
    from tickwheel.store import QueueInfo

SHORTEST_MS = 100
# What one sample may ask of the store: so many queues are looked into, and so many jobs of all.
QUEUES_LOOKED = 10
WAITING_LOOKED = 5_000
DONE_LOOKED = 200
DEAD_LOOKED = 10
# A store may answer with short pages, but is not asked for ever.
PAGE, PAGES = 1_000, 10
# Waiting jobs are many and change little: they are looked at again after this long.
WAITING_EVERY_MS = 5_000


@click.command("top", cls=Verb)
@click.option("--every", metavar="SPAN", default="1s", help="How often to look.")
@click.option("--once", is_flag=True, help="Print one frame, measured over that span, and exit.")
@common
def top(every: str, once: bool, where: Where, as_json: bool) -> int:
    """Watch queues, workers, punctuality and what comes next. Ctrl-C ends it.

    Where the output is no terminal, or JSON, it prints one frame.
    """
    every_ms = span_ms(every)
    if every_ms < SHORTEST_MS:
        raise BadTime(f"--every {every!r}: the shortest is {SHORTEST_MS}ms")
    title = store_name(app_of(where))
    if as_json or once or not sys.stdout.isatty():
        _print(ask(where, lambda client: _one_frame(client, every_ms)), title, as_json)
        return OK
    # Ended by either signal, the terminal is as it was.
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
    import os

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
    """Draw frame after frame; while the store is away, the last one and why."""
    import asyncio

    from rich.live import Live

    from tickwheel.cli.top_frame import frame
    from tickwheel.cli.top_view import view

    sampler = Sampler(client)
    before, sample = None, await sampler.take()
    away: str | None = None
    with Live(console=_console(), screen=True, auto_refresh=False) as live:
        while True:
            drawn = frame(sample, before, away=away)
            size = live.console.size
            live.update(view(drawn, title, width=size.width, height=size.height), refresh=True)
            await asyncio.sleep(every_ms / 1000)
            try:
                before, sample, away = sample, await sampler.take(), None
            except StoreUnavailable as error:
                away = str(error)


# --- Asking the store


class Sampler:
    """Takes samples. Each asks a bounded number of questions, and few where little moved."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._waiting: Waiting | None = None
        # By queue and state: how many there were, and the last of them.
        self._ended: dict[tuple[str, State], tuple[int, list[Job]]] = {}

    async def take(self) -> Sample:
        """What the store says now. Raises StoreUnavailable."""
        from tickwheel.cli.top_frame import Sample

        await self._client.ready()
        queues = await self._client.queues()
        workers = await self._client.workers()
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
        )

    async def _find_waiting(self, queues: list[QueueInfo], now_ms: int) -> Waiting:
        """Some waiting jobs of each queue: no queue's many hide those of another."""
        from tickwheel.cli.top_frame import Waiting

        busy = sorted((each for each in queues if each.waiting), key=lambda each: each.waiting)
        looked = busy[:QUEUES_LOOKED]
        found: list[Job] = []
        more = len(busy) > len(looked)
        for i, queue in enumerate(looked):
            # What a small queue leaves of its share is for the larger ones after it.
            share = (WAITING_LOOKED - len(found)) // (len(looked) - i)
            jobs, cut = await self._find(State.WAITING, queue.name, share)
            found += jobs
            more = more or cut
        return Waiting(now_ms, found, more)

    async def _find_ended(self, queues: list[QueueInfo]) -> None:
        """The last ended jobs of the queues in which some have ended since."""
        counts = {
            (queue.name, state): count
            for queue in queues
            for state in (State.DONE, State.DEAD)
            if (count := getattr(queue, state))
        }
        self._ended = {key: kept for key, kept in self._ended.items() if key in counts}
        share = max(DONE_LOOKED // max(len(queues), 1), 1)
        moved = [key for key in counts if self._ended.get(key, (0,))[0] != counts[key]]
        for name, state in moved[: 2 * QUEUES_LOOKED]:
            limit = share if state is State.DONE else DEAD_LOOKED
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
