"""Tokens of ready jobs: pulled by priority, waited for, and put back where too many came."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

from msgspec.structs import replace

from tickwheel.batch import BATCH_BYTES, portions
from tickwheel.errors import StoreError
from tickwheel.store import job_bytes
from tickwheel.stores.nats import steps
from tickwheel.stores.nats.jobs import Jobs
from tickwheel.stores.nats.steps import Layout
from tickwheel.stores.nats.stream import Stream, Token, consumer_name
from tickwheel.stores.nats.wire import Message, Wire

# Tokens that came in excess and are not claimed within this go back, for others to take.
SPARE_S = 1.0
# A consumer learns of a token a moment after its stream stored it: a claim that finds nothing where
# there was news looks again after these pauses. News counts for as long as FRESH_S.
AGAIN_S = (0.001, 0.004, 0.016, 0.064)
FRESH_S = 0.1
# Only for the first claim in a queue is it worth to pause for this long.
LONG_S = 0.05

# A queue and a priority: what one consumer of the server's hands out.
Source = tuple[str, str]
RANKS = steps.PRIORITIES


class Ready:
    """What is ready in one stream, as one handle sees it."""

    def __init__(self, wire: Wire, stream: Stream, layout: Layout, jobs: Jobs) -> None:
        self._wire = wire
        self._stream = stream
        self._layout = layout
        self._jobs = jobs
        self._pulling = asyncio.Lock()
        # Sources that had all that was asked of them at the last pull: there may be more.
        self._plenty: set[Source] = set()
        # Of these, those that would have given more tokens but for their bytes, in the last claim.
        self._cut: set[Source] = set()
        self._spare: list[Token] = []
        self._returning: asyncio.Task[None] | None = None
        # How often a queue had news, and how much of that the last claim had seen.
        self._news: defaultdict[str, int] = defaultdict(int)
        self._seen: dict[str, int] = {}
        # When a source last had news.
        self._heard: dict[Source, float] = {}
        self._followed: set[str] = set()
        self._changed = asyncio.Event()

    async def close(self) -> None:
        if self._returning is not None:
            self._returning.cancel()
            await asyncio.gather(self._returning, return_exceptions=True)
            self._returning = None
        await self._return_spare()

    # --- Pull

    async def take(
        self, queues: Sequence[str], limit: int, most_bytes: int = BATCH_BYTES
    ) -> list[Token]:
        """Up to `limit` tokens of these queues, by priority and then as they became ready; of about
        `most_bytes`, but at least one."""
        if limit < 1 or not queues:
            return []
        async with self._pulling:
            new = [queue for queue in queues if queue not in self._followed]
            noted = {queue: self._follow(queue) for queue in queues}
            tokens = [each for each in self._spare if each.standing.job.queue in noted]
            self._spare = [each for each in self._spare if each.standing.job.queue not in noted]
            try:
                await self._gather(new, list(noted), limit, most_bytes, tokens)
            except BaseException:
                self.keep(tokens)
                raise
            tokens.sort(key=_order)
            first = tokens
            if self._cut:
                first = [each for each in tokens if not self._overtakes(each.standing.job.priority)]
            taken = next(portions(first, token_bytes, most=limit, most_bytes=most_bytes), [])
            self.keep(tokens[len(taken) :])
            for queue, news in noted.items():
                if len(taken) == len(tokens) < limit and not self._cut:
                    self._seen[queue] = news
                else:
                    self._seen.pop(queue, None)
            return taken

    async def _gather(
        self, new: list[str], queues: list[str], limit: int, most_bytes: int, tokens: list[Token]
    ) -> None:
        await self._pull_all(queues, limit, most_bytes, tokens)
        for pause_s in AGAIN_S:
            patient = not tokens and pause_s < LONG_S
            late = self._late(new, queues if patient else [], tokens)
            if not late:
                return
            await asyncio.sleep(pause_s)
            await self._pull(dict.fromkeys(late, most_bytes // len(late)), limit, tokens)

    def _late(
        self, new: list[str], followed: list[str], tokens: Sequence[Token] = ()
    ) -> list[Source]:
        """Sources whose consumer may not know yet what its stream has: it learns a moment later
        than we do. Of queues that are new to us we can't have heard; some may have answered."""
        now = asyncio.get_running_loop().time()
        answered = {each.standing.job.queue for each in tokens}
        unheard = [(queue, rank) for queue in new if queue not in answered for rank in RANKS]
        sources = [(queue, rank) for queue in followed if queue not in new for rank in RANKS]
        return unheard + [
            each for each in sources if now - self._heard.get(each, -FRESH_S) < FRESH_S
        ]

    async def _pull_all(
        self, queues: list[str], limit: int, most_bytes: int, tokens: list[Token]
    ) -> None:
        """Ask every source, in as few rounds as that takes without too many tokens coming.

        Sources that had little the last time are all asked at once. Those that had plenty are
        asked by priority, each for no more than is still wanted. Those that are asked at once share
        the bytes; one that had little is not expected to need many.
        """
        ranks = [[(queue, priority) for queue in queues] for priority in RANKS]
        rich = [[each for each in rank if each in self._plenty] for rank in ranks]
        rich = [rank for rank in rich if rank]
        poor = [each for rank in ranks for each in rank if each not in self._plenty]
        best = rich[0] if rich else []
        shares = dict.fromkeys(poor, most_bytes // (len(poor) + len(best)) if poor else 0)
        shares |= dict.fromkeys(best, most_bytes // len(best) if best else 0)
        self._cut.clear()
        await self._pull(shares, limit, tokens)
        for rank in rich[1:]:
            # Of the priority asked for, or above: what came from below it can wait.
            least = int(rank[0][1])
            have = [each for each in tokens if each.standing.job.priority >= least]
            left = most_bytes - sum(map(token_bytes, have))
            if len(have) < limit and left > 0 and not self._overtakes(least):
                shares = dict.fromkeys(rank, left // len(rank))
                await self._pull(shares, limit - len(have), tokens)

    async def _pull(self, shares: dict[Source, int], count: int, tokens: list[Token]) -> None:
        """Ask these sources, each for so many tokens, and for its share of bytes."""
        sources = list(shares)
        pulls = [
            asyncio.create_task(self._stream.pull(queue, priority, count, most_bytes))
            for (queue, priority), most_bytes in shares.items()
        ]
        try:
            await asyncio.wait(pulls)
        finally:
            # Also where we are cancelled: what was delivered is in our hand. Nothing may be awaited
            # here, where another cancel could drop it; a pull under way keeps what it has itself.
            for source, pull in zip(sources, pulls, strict=True):
                ended = not pull.cancel() and pull.exception() is None
                found, more = pull.result() if ended else ([], False)
                tokens += found
                (self._plenty.add if more else self._plenty.discard)(source)
                (self._cut.add if more and len(found) < count else self._cut.discard)(source)
        for pull in pulls:
            pull.result()

    def _overtakes(self, priority: int) -> bool:
        """Whether something of a higher priority was left for its bytes."""
        return any(int(cut) > priority for _, cut in self._cut)

    # --- Spare tokens: delivered here, not wanted yet

    def keep(self, tokens: Sequence[Token]) -> None:
        """Hold tokens for the next claim. By then they may be out of date."""
        self._spare += [replace(token, again=True) for token in tokens]
        if self._spare and self._returning is None:
            self._returning = asyncio.create_task(self._return_later(), name="tickwheel-spare")

    async def _return_later(self) -> None:
        try:
            # More may be kept while some go back.
            while self._spare:
                await asyncio.sleep(SPARE_S)
                async with self._pulling:
                    await self._return_spare()
        finally:
            self._returning = None

    async def _return_spare(self) -> None:
        tokens, self._spare = self._spare, []
        if tokens:
            try:
                await self._jobs.put_back(tokens)
            except StoreError:
                # The server hands them out again by itself, later.
                return

    # --- Wait

    async def wait(self, queues: Sequence[str], seconds: float) -> None:
        """Return when a claim may find something in these queues, at the latest after so long."""
        start = {queue: self._follow(queue) for queue in queues}
        unknown = [queue for queue in queues if queue not in self._seen]
        # What a claim left for its bytes is in our hand.
        if any(each.standing.job.queue in unknown for each in self._spare):
            return
        if unknown and await self._any(unknown):
            return
        if self._late([], list(start)):
            # A claim may have come too early for it: another one soon, whatever we hear.
            seconds = min(seconds, FRESH_S)
        seen = {queue: self._seen.get(queue, news) for queue, news in start.items()}
        try:
            async with asyncio.timeout(max(seconds, 0)):
                while all(self._news[queue] <= news for queue, news in seen.items()):
                    await self._changed.wait()
        except TimeoutError:
            return

    async def _any(self, queues: Sequence[str]) -> bool:
        """Whether any of these queues has a token that it would hand out."""
        names = [consumer_name(queue, f"r{priority}") for queue in queues for priority in RANKS]
        found = await asyncio.gather(*(self._stream.consumer(name) for name in names))
        return any(each["num_pending"] and not each.get("paused") for each in found if each)

    def told(self) -> None:
        """The connection came back: whatever happened meanwhile, nobody told us."""
        for queue in self._followed:
            self._news[queue] += 1
        self._wake()

    def _follow(self, queue: str) -> int:
        """Hear of what becomes ready in this queue; gives how often that was so far."""
        if queue not in self._followed:
            self._followed.add(queue)
            subject = f"{self._layout.news}.r.{steps.token(queue)}.>"
            self._wire.subscribe(subject, lambda message: self._hear(queue, message))
        return self._news[queue]

    def _hear(self, queue: str, message: Message) -> None:
        priority = message.subject.rsplit(".", 2)[1]
        self._heard[queue, priority] = asyncio.get_running_loop().time()
        self._news[queue] += 1
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def returned(self, message: Message) -> None:
        """Something was delivered that nobody waits for any more: it is spare."""
        self.keep([self._stream.token_of(message)])


def token_bytes(token: Token) -> int:
    return job_bytes(token.standing.job)


def _order(token: Token) -> tuple[int, int]:
    return -token.standing.job.priority, token.standing.seq
