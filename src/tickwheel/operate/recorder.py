"""Record the history of a store, every ten seconds, as one of several servers that do."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable

from tickwheel.client import Client
from tickwheel.errors import StoreError
from tickwheel.operate.history import (
    COARSE,
    EMPTY,
    FINE,
    GAP_MS,
    HOUR_S,
    KIND,
    Point,
    Stretch,
    Tasks,
    Tier,
    added_tasks,
    decoded,
    encoded,
    expired,
    grown,
    remember,
    rolled_up,
    sampled,
    sources,
)
from tickwheel.store import WorkerCounts

log = logging.getLogger("tickwheel")

# How long a sample may take.
PATIENCE_S = 5.0
# Several servers look at different moments, so that mostly only the first one writes.
SPREAD_S = 3.0
# How many stretches there are in the longest gap.
GAP_SPANS = -(-GAP_MS // (FINE.span_s * 1000))
# How often records that are of no more use are looked for, and how many are read at once.
PRUNE_S = HOUR_S
PRUNE_PAGE, PRUNE_PAGES = 25, 40


class Recorder:
    """Records the history of a store. Belongs to one event loop.

    Whichever server comes first writes the point of a slot. All that the next one needs is in the
    same record, so nothing is counted twice or left out if another server, or the next process,
    writes it.
    """

    def __init__(
        self,
        client: Callable[[], Awaitable[Client]],
        *,
        tell: Callable[[], object] = lambda: None,
    ) -> None:
        """`tell` is called with each sample."""
        self._client = client
        self._tell = tell
        self._offset_s = random.uniform(0, SPREAD_S)
        self._remembered: dict[str, WorkerCounts] = {}
        # When the stretch begins that was last seen; None: not known yet.
        self._start_s: int | None = None
        self._pruned_s: int | None = None

    async def run(self) -> None:
        """Record until cancelled. A store that is away is tried again, with the next slot."""
        while True:
            self._tell()
            wait_s = float(FINE.step_s)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    client = await self._client()
                    await self.sample(client)
                wait_s = self._wait_s(client.clock.now_ms())
            except (StoreError, TimeoutError, OSError) as error:
                log.debug("no history for this moment: %r", error)
            except Exception:
                log.exception("the history of this moment could not be recorded")
            await asyncio.sleep(wait_s)

    def _wait_s(self, now_ms: int) -> float:
        """How long until the next slot."""
        now_s = now_ms / 1000
        return FINE.slot_s(int(now_s)) + FINE.step_s + self._offset_s - now_s

    async def sample(self, client: Client) -> None:
        """Write the point of the current slot, unless another server has."""
        now_ms = client.clock.now_ms()
        now_s = now_ms // 1000
        if self._pruned_s is None or now_s - self._pruned_s >= PRUNE_S:
            await self._prune(client, now_s)
        start_s = FINE.start_s(now_s)
        current, last = await self._stretches(client, start_s)
        workers = await client.workers()
        point, tasks = sampled(
            current if current.points else last,
            self._remembered,
            workers,
            await client.queues(),
            now_ms,
        )
        self._remembered = remember(self._remembered, sources(workers))
        if current.last_s < point.at_s:
            if not current.points and last.points:
                # First: once the current one is there, nobody does it.
                await self._roll_up(client, last)
            stretch = grown(current, point, tasks, self._remembered, now_ms)
            await client.put_records(KIND, {FINE.record(now_s): encoded(stretch)})
        self._start_s = start_s

    async def _stretches(self, client: Client, start_s: int) -> tuple[Stretch, Stretch]:
        """The current one, and, if that is new, the last one before it."""
        [text] = await client.get_records(KIND, [FINE.record(start_s)])
        current = decoded(text)
        if current.points:
            return current, EMPTY
        # Those that are not too old to go on from, and one that may have to be rolled up.
        starts = {start_s - FINE.span_s * n for n in range(1, GAP_SPANS + 1)}
        starts |= {self._start_s} - {None, start_s}  # type: ignore[arg-type]
        names = [FINE.record(each) for each in sorted(starts, reverse=True)]
        before = map(decoded, await client.get_records(KIND, names))
        return current, next((each for each in before if each.points), EMPTY)

    async def _roll_up(self, client: Client, fine: Stretch) -> None:
        names = [tier.record(fine.last_s) for tier in COARSE]
        texts = await client.get_records(KIND, names)
        coarse = rolled_up(fine, [decoded(text) for text in texts])
        records = {name: encoded(each) for name, each in zip(names, coarse, strict=True)}
        await client.put_records(KIND, records)

    async def _prune(self, client: Client, now_s: int) -> None:
        """Delete records that are of no more use; also find the last stretch, the first time."""
        after, names = "", list[str]()
        for _ in range(PRUNE_PAGES):
            page = await client.records(KIND, after=after, limit=PRUNE_PAGE)
            names += [name for name, _ in page]
            if len(page) < PRUNE_PAGE:
                break
            after = page[-1][0]
        if self._start_s is None:
            self._start_s = _last_start(names, FINE.start_s(now_s))
        # The last one may still have to be rolled up.
        last = None if self._start_s is None else FINE.record(self._start_s)
        old = [name for name in names if expired(name, now_s) and name != last]
        if old:
            await client.delete_records(KIND, old)
        self._pruned_s = now_s


def _last_start(names: Iterable[str], before_s: int) -> int | None:
    """When the last stretch of the finest tier begins that begins before this time."""
    tiers = (name.partition(".") for name in names)
    starts = [int(start) for tier, _, start in tiers if tier == FINE.name and start.isdecimal()]
    return max((each for each in starts if each < before_s), default=None)


# --- Reading


async def points_of(client: Client, tier: Tier) -> list[Point]:
    """The points of a tier that are not too old."""
    now_s = client.clock.now_ms() // 1000
    stretches = await _read(client, tier, now_s)
    found = (point for stretch in stretches for point in stretch.points)
    return [each for each in found if now_s - tier.keep_s < each.at_s <= now_s]


async def last_hour(client: Client) -> tuple[list[Point], Tasks]:
    """The points of the last hour, and what ended by task in about this time."""
    now_s = client.clock.now_ms() // 1000
    stretches = await _read(client, FINE, now_s)
    points = [
        point
        for stretch in stretches
        for point in stretch.points
        if now_s - HOUR_S < point.at_s <= now_s
    ]
    recent = [each for each in stretches if FINE.start_s(each.last_s) > now_s - HOUR_S]
    return points, added_tasks(each.tasks for each in recent)


async def _read(client: Client, tier: Tier, now_s: int) -> list[Stretch]:
    texts = await client.get_records(KIND, tier.records(now_s))
    return [decoded(text) for text in texts if text is not None]
