"""Ready messages of one stream, as one handle gets them: pulled by priority, put back if too many.

A claim pulls from all sources of its queues at once, where it can. A source that does not answer
holds up no claim; what it delivers later is spare: the next claim gets it, or it is put back.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from tickwheel.batch import BATCH_BYTES, portions
from tickwheel.concurrency import cancel_all
from tickwheel.errors import StoreError, StoreUnavailable
from tickwheel.store import job_bytes
from tickwheel.stores.nats.heal import Healer
from tickwheel.stores.nats.jobs import Jobs
from tickwheel.stores.nats.notify import Waiter
from tickwheel.stores.nats.parked import Parked
from tickwheel.stores.nats.sources import (
    PATIENCE_S,
    Presence,
    Pull,
    Source,
    Sources,
    Supply,
    by_supply,
    cut_above,
    shares_of,
    unsettled,
)
from tickwheel.stores.nats.steps import Layout, ReadyMessage, Standing
from tickwheel.stores.nats.stream import Stream
from tickwheel.stores.nats.wire import Gone, Message, Wire

# Spare messages that are not claimed within this time are put back, for other handles.
SPARE_S = 1.0
# A consumer learns of a message a moment after its stream stored it: a claim that finds nothing
# pulls again after these pauses. Only the first claim in a queue takes the long ones.
AGAIN_S = (0.001, 0.004, 0.016, 0.064)
LONG_S = 0.05
# Below the lowest priority.
ALL = -1
# How often the consumers are checked after a claim that found nothing, and after one that found
# something.
CHECK_S, CHECK_BUSY_S = 1.0, 5.0
# Many handles see the same problem at the same moment. The first one to act spares the others the
# work.
SPREAD_S = 0.3


@dataclass(slots=True)
class _Claim:
    """The claim in progress: what it wants, and what it has got so far."""

    queues: list[str]
    # Those that this handle has never claimed from.
    new: list[str]
    sources: list[Source]
    limit: int
    most_bytes: int
    messages: list[ReadyMessage]
    # Only jobs of a higher priority than this are wanted.
    above: int = ALL
    # Whether a source answered: then the store is there, even if others are silent.
    answered: bool = False
    failures: list[BaseException] = field(default_factory=list)


class Delivery:
    """Delivers ready messages of one stream to one handle."""

    def __init__(
        self, wire: Wire, stream: Stream, layout: Layout, jobs: Jobs, parked: Parked
    ) -> None:
        self._stream = stream
        self._jobs = jobs
        self._healer = Healer(stream)
        self._sources = Sources()
        self._parked = parked
        self._waiter = Waiter(wire, stream, layout, self._sources, parked)
        # One claim at a time.
        self._turn = asyncio.Lock()
        self._claim: _Claim | None = None
        # Delivered here, and not claimed yet.
        self._spare: list[ReadyMessage] = []
        self._returning: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None
        self._checked = -CHECK_BUSY_S
        # Queues whose last claim took everything that was there.
        self._emptied: set[str] = set()
        # Queues whose last wait had no notification: their consumers know what there is.
        self._sure: set[str] = set()

    async def close(self) -> None:
        # What a pull has got by now becomes spare as it is cancelled.
        await cancel_all(*(source.pull for source in self._sources), self._checking)
        await self._parked.close()
        await cancel_all(self._returning)
        self._returning = None
        await self._return_spare()

    # --- Take

    async def take(
        self, queues: Sequence[str], limit: int, most_bytes: int = BATCH_BYTES, above: int = ALL
    ) -> list[ReadyMessage]:
        """Up to `limit` ready messages of these queues with a priority above this one, by priority
        and then in the order in which they became ready; of about `most_bytes`, but at least one.
        """
        if limit < 1 or not queues:
            return []
        async with self._turn:
            unique = list(dict.fromkeys(queues))
            self._claim = claim = self._begin(unique, limit, most_bytes, above)
            try:
                await self._gather(claim)
            except BaseException:
                self.keep(claim.messages)
                raise
            finally:
                self._claim = None
            return self._finish(claim)

    def _begin(self, queues: list[str], limit: int, most_bytes: int, above: int) -> _Claim:
        # A queue is new to the first claim that wants all that it has.
        new = [queue for queue in queues if above == ALL and self._waiter.follow(queue)]
        spare = self._spare
        mine = [each for each in spare if _queue_of(each) in queues and _rank_of(each) > above]
        self._spare = [each for each in spare if each not in mine] if mine else spare
        sources = [each for each in self._sources.of(queues) if each.rank > above]
        return _Claim(queues, new, sources, limit, most_bytes, mine, above)

    async def _gather(self, claim: _Claim) -> None:
        await self._pull_by_priority(claim)
        if not claim.answered and not claim.messages and claim.above == ALL:
            # Nobody has used these queues yet, or the stream is gone: then this says so.
            await self._stream.info()
        unsure = [queue for queue in claim.queues if queue not in self._sure]
        if claim.above == ALL:
            self._sure.difference_update(claim.queues)
        for pause_s in AGAIN_S:
            patient = not claim.messages and pause_s < LONG_S
            late = unsettled(
                claim.sources,
                new=claim.new,
                unsure=unsure if patient else (),
                served=set(map(_queue_of, claim.messages)),
            )
            if not late:
                return
            await asyncio.sleep(pause_s)
            await self._pull(shares_of((), late, claim.most_bytes), claim.limit, claim)

    def _finish(self, claim: _Claim) -> list[ReadyMessage]:
        """The messages that the claim gets; the others are spare."""
        messages = sorted(claim.messages, key=_order)
        cut = any(source.supply is Supply.CUT for source in claim.sources)
        first = messages
        if claim.above != ALL:
            # A source that was asked before may have answered only now.
            first = [each for each in first if _rank_of(each) > claim.above]
        if cut:
            first = [each for each in first if not cut_above(claim.sources, _rank_of(each))]
        parts = portions(first, message_bytes, most=claim.limit, most_bytes=claim.most_bytes)
        taken = next(parts, [])
        self.keep(messages[len(taken) :])
        if claim.above != ALL:
            return taken
        emptied = len(taken) == len(messages) < claim.limit and not cut
        (self._emptied.update if emptied else self._emptied.difference_update)(claim.queues)
        self._check_consumers(claim, CHECK_BUSY_S if taken else CHECK_S)
        return taken

    # --- Pull

    async def _pull_by_priority(self, claim: _Claim) -> None:
        """Ask every source, in as few rounds as possible without getting too many messages."""
        for source in claim.sources:
            source.begin_claim()
        little, plenty = by_supply(claim.sources)
        best = plenty[0] if plenty else []
        await self._pull(shares_of(little, best, claim.most_bytes), claim.limit, claim)
        for sources in plenty[1:]:
            rank = sources[0].rank
            # What came from a lower priority can wait.
            have = [each for each in claim.messages if _rank_of(each) >= rank]
            left_bytes = claim.most_bytes - sum(map(message_bytes, have))
            if len(have) < claim.limit and left_bytes > 0 and not cut_above(claim.sources, rank):
                shares = shares_of((), sources, left_bytes)
                await self._pull(shares, claim.limit - len(have), claim)

    async def _pull(self, shares: dict[Source, int], count: int, claim: _Claim) -> None:
        """Ask these sources, each for up to `count` messages and its share of bytes."""
        pulls = {
            source: source.pull or self._ask(source, count, most_bytes)
            for source, most_bytes in shares.items()
        }
        awaited = [pull for source, pull in pulls.items() if not source.silent]
        if awaited:
            await asyncio.wait(awaited, timeout=PATIENCE_S)
        while not claim.answered and (left := _in_flight(pulls)):
            await asyncio.wait(left.values(), return_when=asyncio.FIRST_COMPLETED)
        for source in _in_flight(pulls):
            source.kept_waiting()
        for failure in claim.failures:
            if not claim.answered or not isinstance(failure, StoreUnavailable):
                raise failure

    def _ask(self, source: Source, count: int, most_bytes: int) -> Pull:
        pull = asyncio.create_task(
            self._stream.pull(source.queue, source.priority, count, most_bytes)
        )
        source.pull = pull
        pull.add_done_callback(lambda _: self._answered(source, count, pull))
        return pull

    def _answered(self, source: Source, count: int, pull: Pull) -> None:
        """Keep what was delivered, even if nobody waits for it any more."""
        source.pull = None
        if pull.cancelled():
            return  # the wire hands in what had come: see `stray`
        found: list[ReadyMessage] = []
        failure = pull.exception()
        if failure is None:
            found, more = pull.result()
            now = asyncio.get_running_loop().time()
            source.answered(len(found), wanted=count, more=more, now=now)
        elif isinstance(failure, Gone):
            source.gone()
        else:
            source.failed()
        # The claim in progress may be for other queues.
        claim = self._claim if self._claim and source.queue in self._claim.queues else None
        if claim is None:
            self._came_late(found)
        elif failure is None:
            claim.answered = True
            claim.messages += found
        elif not isinstance(failure, Gone):
            claim.failures.append(failure)

    # --- Consumers that are gone or stuck

    def _check_consumers(self, claim: _Claim, pause_s: float) -> None:
        """Check the consumers of these queues now and then, in the background."""
        now = asyncio.get_running_loop().time()
        lost = [each for each in claim.sources if each.presence is Presence.LOST]
        if self._checking is None and now - self._checked >= (CHECK_S if lost else pause_s):
            for source in lost:
                source.restoring()
            self._checked = now
            self._checking = asyncio.create_task(self._heal(claim.queues), name="tickwheel-heal")

    async def _heal(self, queues: list[str]) -> None:
        try:
            await asyncio.sleep(random.uniform(0, SPREAD_S))
            for queue in queues:
                now = asyncio.get_running_loop().time()
                sources = self._sources.of([queue])
                stuck = {each.priority for each in sources if each.is_stuck(now)}
                if await self._healer.heal(queue, stuck):
                    self._waiter.notify(queue)
        except StoreError:
            return  # the next claim says what is wrong
        finally:
            self._checking = None

    # --- Spare messages: delivered here, and not wanted yet

    @property
    def spare(self) -> list[Standing]:
        return [each.standing for each in self._spare]

    def keep(self, messages: Sequence[ReadyMessage]) -> None:
        """Hold messages for the next claim. By then they may be out of date."""
        self._spare += [replace(each, again=True) for each in messages]
        if self._spare and self._returning is None:
            self._returning = asyncio.create_task(self._return_later(), name="tickwheel-spare")

    async def _return_later(self) -> None:
        try:
            # More may be kept while some are put back.
            while self._spare:
                await asyncio.sleep(SPARE_S)
                async with self._turn:
                    await self._return_spare()
        finally:
            self._returning = None

    async def _return_spare(self) -> None:
        messages, self._spare = self._spare, []
        if messages:
            try:
                await self._jobs.put_back(messages)
            except StoreError:
                # The server delivers them again by itself, later.
                return

    def _came_late(self, messages: Sequence[ReadyMessage]) -> None:
        """Delivered when no claim waited for it any more: the next claim gets it."""
        self.keep(messages)
        for queue in set(map(_queue_of, messages)):
            self._emptied.discard(queue)
            self._waiter.notify(queue)

    def stray(self, message: Message) -> None:
        """A message was delivered that nobody waits for any more: it is spare."""
        self._came_late([self._stream.ready_message(message)])

    # --- Wait

    async def wait(
        self, queues: Sequence[str], seconds: float, tasks: Collection[str] = ()
    ) -> None:
        """Return when a claim may find something in these queues, or parked jobs of these tasks, or
        after so many seconds."""
        if self._left_behind(queues):
            return
        if not await self._waiter.wait(queues, seconds, tasks):
            self._sure.update(queues)

    def _left_behind(self, queues: Iterable[str]) -> bool:
        """Whether the last claim left something for its bytes: it is spare here."""
        spare = {_queue_of(each) for each in self._spare}
        return any(queue in spare and queue not in self._emptied for queue in queues)

    def reconnected(self) -> None:
        """The connection came back: nobody told us what happened meanwhile."""
        self._stream.forget_sources()
        self._parked.doubt()
        for source in self._sources:
            source.reconnected()
        self._waiter.notify_all()


def message_bytes(message: ReadyMessage) -> int:
    return job_bytes(message.standing.job)


def _queue_of(message: ReadyMessage) -> str:
    return message.standing.job.queue


def _rank_of(message: ReadyMessage) -> int:
    return message.standing.job.priority


def _order(message: ReadyMessage) -> tuple[int, int]:
    return -message.standing.job.priority, message.standing.seq


def _in_flight(pulls: dict[Source, Pull]) -> dict[Source, Pull]:
    return {source: pull for source, pull in pulls.items() if source.pull is pull}
