"""Room for the steps of jobs in a full store.

A step stores a message and then removes the one before it, so without any room nothing works:
running jobs can't be settled, and run again. A server says that it is full only at its limit, and
may not say whether it is its own limit or the account's. So room is kept in the stream itself:

- a job is added with some padding, about what its claim and its end will add to it;
- the stream contains empty blocks. While they are in place there is room, and jobs are added. If
  one can't be stored, the store is full: adds are refused, and blocks are removed to make room for
  steps.

A full server doesn't just refuse: it stores part of a batch and doesn't answer, and a schedule that
fires when there is no room is never fired again. So a store that was full is `suspect` until
somebody has checked for such schedules.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from tickwheel.stores.nats.answers import StoreFull
from tickwheel.stores.nats.steps import Layout, Step
from tickwheel.stores.nats.stream import Stream
from tickwheel.stores.nats.wire import Denied, NoAnswer

log = logging.getLogger("tickwheel")

BLOCK_BYTES = 64 * 1024
# The blocks take up this part of the stream, or the size of two of the largest jobs.
PART = 16
MOST_BYTES = 4 * 1024 * 1024
# How soon a full store is tried again; and after how many added bytes the blocks are checked, or
# half the size of all blocks if that is more.
AGAIN_S = 1.0
UNSEEN_BYTES = 256 * 1024
# For this long after the store was full, steps are sent one by one.
TIGHT_S = 30.0
# And claims take this much at a time: a claimed job is stored twice until its ready message is
# acknowledged.
FEW_BYTES = BLOCK_BYTES // 2
# From this share of the account's limit on, adds are refused.
NEARLY = 0.9
# How long an account without limits is taken to have none.
LIMITS_S = 10.0
# A larger stream without blocks was full, or is older than blocks.
SMALL_BYTES = 1024 * 1024


class Room:
    """What one handle knows of the room in one stream."""

    def __init__(self, stream: Stream, layout: Layout, notify_full: Callable[[], None]) -> None:
        self._stream = stream
        self._subject = f"{layout.prefix}.z"
        self._notify_full = notify_full
        self._kept_bytes = 0
        self._unseen_bytes = UNSEEN_BYTES
        self._largest_bytes = 0
        self._full = False
        self._checking = asyncio.Lock()
        # Until when the account is taken to be unlimited.
        self._unlimited_until_s = 0.0
        self._again_s = 0.0
        self._tight_until_s = 0.0
        self._low = False
        # Whether this user is forbidden to store blocks.
        self._denied = False
        # Whether the server may have failed to fire schedules.
        self.suspect = False

    # --- Adds

    async def admit(self, steps: Sequence[Step]) -> None:
        """Check that there is room for more jobs. Raises StoreFull."""
        if self._full and _now_s() < self._again_s:
            raise StoreFull("the store is full: adds work again once there is room")
        sizes = [len(each.body) + len(each.headers) for each in steps]
        self._largest_bytes = max(self._largest_bytes, max(sizes))
        self._unseen_bytes += sum(sizes)
        if self._lacking() or (self._unseen() and not self._checking.locked()):
            async with self._checking:
                # Somebody else may have seen to it meanwhile.
                if self._lacking() or self._unseen():
                    await self._keep()

    def _lacking(self) -> bool:
        """Whether nothing may be added before the blocks are in place."""
        return self._full or 2 * self._largest_bytes > self._kept_bytes

    def _unseen(self) -> bool:
        """Whether so much was added that the blocks should be checked."""
        return self._unseen_bytes >= max(UNSEEN_BYTES, self._kept_bytes // 2)

    async def add(self, groups: Sequence[Sequence[Step]]) -> list[int | None]:
        """Store new jobs, as `Stream.put` does."""
        try:
            if self.is_tight() and all(len(group) == 1 for group in groups):
                seqs = await self._stream.put_each([group[0] for group in groups])
                return [_or_raise(seq) for seq in seqs]
            return await self._stream.put(groups)
        except StoreFull:
            await self._filled()
            raise
        except NoAnswer:
            self._tighten()
            raise

    async def _keep(self) -> None:
        """Store the blocks that the stream should have."""
        size = min(BLOCK_BYTES, self._stream.largest // 2)
        there, total = await self._blocks()
        if await self._nearly_full():
            await self._filled()
            raise StoreFull(f"this NATS account uses more than {NEARLY:.0%} of its max_file")
        wanted = max(2 * self._largest_bytes, _part(total))
        count = max(-(-wanted // size), 1)
        # A store that was full needs room for more than the next job.
        margin = range(count, 2 * count) if self._full else range(0)
        new: list[int] = []
        try:
            for number in {*range(count), *margin} - there:
                await self._stream.store([Step(f"{self._subject}.{number}", "", bytes(size))])
                new.append(number)
            await self._release(margin)
        except StoreFull:
            # The steps of stored jobs need it more.
            await self._release(new)
            await self._filled()
            raise
        except Denied as error:
            if not self._denied:
                log.warning("can't reserve room for when the store is full: %s", error)
            self._denied = True
        if self._full:
            log.warning("NATS: there is room again; jobs can be added")
        self._full = self._low = False
        self._unseen_bytes, self._kept_bytes = 0, count * size

    async def _filled(self) -> None:
        """There is no room for more jobs: give half of the blocks to those that are stored."""
        if not self._full:
            log.warning("NATS: the store is full; no jobs can be added until there is room")
        self.found_full()
        self._notify_full()
        there, _ = await self._blocks()
        await self._release(sorted(there)[: (len(there) + 1) // 2])

    def found_full(self) -> None:
        """Somebody found the store full."""
        self._full = self.suspect = True
        self._again_s = _now_s() + AGAIN_S
        self._tighten()

    # --- Steps

    async def move(
        self, groups: Sequence[Sequence[Step]], *, connection: int | None = None
    ) -> list[int | None]:
        """Store steps of stored jobs, as `Stream.put` does, in the room of the blocks if there is
        no other. Without any room they are refused."""
        if any(len(group) > 1 for group in groups) or not (self.is_tight() or self._stream.singly):
            try:
                return await self._stream.put(groups, connection=connection)
            except StoreFull:
                if not await self._give():
                    raise
                return [None] * len(groups)
            except NoAnswer:
                self._tighten()
                raise
        seqs = await self._stream.put_each([group[0] for group in groups], connection=connection)
        while full := [n for n, seq in enumerate(seqs) if isinstance(seq, StoreFull)]:
            if not await self._give():
                break
            again = await self._stream.put_each([groups[n][0] for n in full], connection=connection)
            for n, seq in zip(full, again, strict=True):
                seqs[n] = seq
        return [None if isinstance(seq, StoreFull) else seq for seq in seqs]

    async def claim(self, groups: Sequence[Sequence[Step]], *, connection: int) -> list[int | None]:
        """The same for claims. They leave half of the blocks to running jobs."""
        if not self.is_tight():
            return await self.move(groups, connection=connection)
        if any(len(group) > 1 for group in groups):
            # A full server may store only part of them: the next claim doesn't ask for that.
            return [None] * len(groups)
        seqs = await self._stream.put_each([group[0] for group in groups], connection=connection)
        if any(isinstance(seq, StoreFull) for seq in seqs):
            there, total = await self._blocks()
            if len(there) * BLOCK_BYTES > _part(total) // 2:
                await self._give()
        return [None if isinstance(seq, StoreFull) else seq for seq in seqs]

    async def store(self, *steps: Step) -> int | None:
        """Store messages that are not jobs, all or none, in the same way. Raises StoreFull."""
        try:
            return await self._stream.store(steps)
        except StoreFull:
            if not await self._give():
                raise
            return await self._stream.store(steps)

    async def _give(self) -> bool:
        """Remove a few blocks to make room; False if none are left."""
        if not self._full:
            log.warning("NATS: the store is full; no jobs can be added until there is room")
        self.found_full()
        self._notify_full()
        there, total = await self._blocks()
        few = max(len(there) // 8, 1)
        given = await self._release(sorted(there)[:few])
        self._low = (len(there) - given) * BLOCK_BYTES <= _part(total) // 2
        return given > 0

    async def check(self) -> None:
        """At open: if blocks are missing, somebody found the store full."""
        # Blocks are removed in the order of their numbers.
        there, total = await self._blocks()
        if there != set(range(len(there))) or (not there and total > SMALL_BYTES):
            self.suspect = True
            self._tighten()

    def is_tight(self) -> bool:
        """Whether the store was full a moment ago."""
        return _now_s() < self._tight_until_s

    # --- Blocks

    async def _blocks(self) -> tuple[set[int], int]:
        """The numbers of the blocks that are in place, and how many bytes the stream has."""
        info = await self._stream.info(subjects=f"{self._subject}.*")
        there = info["state"].get("subjects") or {}
        return {int(each.rpartition(".")[2]) for each in there}, info["state"]["bytes"]

    async def _nearly_full(self) -> bool:
        if _now_s() < self._unlimited_until_s:
            return False
        try:
            account = await self._stream.api("INFO")
        except Denied:
            return False
        used = [
            (usage.get("storage", 0), usage.get("limits", {}).get("max_storage", -1))
            for usage in (account.get("tiers") or {"": account}).values()
        ]
        if all(most <= 0 for _, most in used):
            self._unlimited_until_s = _now_s() + LIMITS_S
        return any(0 < most * NEARLY < storage for storage, most in used)

    async def _release(self, numbers: Sequence[int]) -> int:
        try:
            for number in numbers:
                await self._stream.purge(f"{self._subject}.{number}")
        except Denied:
            return 0  # workers may
        return len(numbers)

    @property
    def low(self) -> bool:
        """Whether so few blocks are left that steps should not make jobs larger."""
        return self._low and self.is_tight()

    def _tighten(self) -> None:
        self._tight_until_s = _now_s() + TIGHT_S


def _part(total: int) -> int:
    return min(total // PART, MOST_BYTES)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _or_raise(seq: int | StoreFull | None) -> int | None:
    if isinstance(seq, StoreFull):
        raise seq
    return seq
