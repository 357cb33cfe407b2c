"""Parked jobs of one stream, as one handle knows them: which lines have jobs, and claims from them.

Of the handles that know the same tasks, one is told of each parked job, so that they don't compete
for it. In case that is lost, or that one is busy, each also reads the notes of all lines, at first
and then about once a second: one request if there are none.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from tickwheel.batch import portions
from tickwheel.clock import MS_NS
from tickwheel.concurrency import cancel_all
from tickwheel.errors import StoreError, StoreUnavailable
from tickwheel.job import Job
from tickwheel.store import job_bytes
from tickwheel.stores.nats import steps
from tickwheel.stores.nats.answers import nanoseconds
from tickwheel.stores.nats.consumers import consumer_name
from tickwheel.stores.nats.steps import Layout, Line, Standing
from tickwheel.stores.nats.stream import BATCH, Stream
from tickwheel.stores.nats.wire import Denied

# How often the notes are read; less often if they are many: this long for each.
LOOK_S, LOOK_EACH_S = 1.0, 0.002
# How long a claim waits for the answer whether a queue is paused.
PAUSE_S = 1.0
# A server that is not the leader may be behind: a line in which nothing is found is read again.
BEHIND_S = (0.01, 0.04)
# How many parts of lines are read at once, and how many parts of one line are told apart.
TOGETHER, PARTS = 8, 64
# The note of an empty line is removed when it is this old. By then every server that could be asked
# has the jobs that were stored with it.
NOTE_MS = 10_000
# How many lines, and how many refused claims, are remembered.
REMEMBERED, REFUSED = 100_000, 1_000
# How many jobs of a line are read to tell of one.
FEW = 5


class Part(NamedTuple):
    """Part of a line: from one sequence to another."""

    first: int
    last: int


ALL = Part(1, 2**63 - 1)


class Page(NamedTuple):
    """The first jobs of a part of a line, and whether it has more."""

    line: Line
    part: Part
    standings: list[Standing]
    more: bool


# Which jobs were parked, by line.
Arrivals = Mapping[Line, Part]
# Claims some parked jobs; returns those that it got, and where the others were found.
Claim = Callable[[Sequence[Standing]], Awaitable[tuple[list[Job], list[Standing]]]]


class Parked:
    """The lines of one stream."""

    def __init__(self, stream: Stream, layout: Layout, now_ms: Callable[[], int]) -> None:
        self._stream = stream
        self._layout = layout
        self._now_ms = now_ms
        # Where this handle may find parked jobs.
        self._lines: dict[Line, list[Part]] = {}
        # The sequences of the notes as they were last read; and those whose line was empty, with
        # the time.
        self._notes: dict[Line, int] = {}
        self._empty: dict[Line, tuple[int, float]] = {}
        # Queues that were paused at the last claim: their lines end no wait.
        self._paused: set[str] = set()
        # Where jobs were found whose claim was refused.
        self._refused: dict[str, int] = {}
        self._looked_s: float | None = None
        self._looking: asyncio.Task[None] | None = None
        # Called when a line has jobs that had none.
        self.on_arrival: Callable[[], None] = lambda: None

    async def close(self) -> None:
        await cancel_all(self._looking)

    # --- What is known

    def arrived(self, arrivals: Arrivals) -> None:
        """Jobs were parked, and this handle should claim them if it knows their tasks."""
        if not arrivals:
            return
        if len(self._lines) > REMEMBERED:
            self._lines.clear()
            self._looked_s = None
        for line, part in arrivals.items():
            self._expect(line, part)
        self.on_arrival()

    def _expect(self, line: Line, part: Part) -> None:
        parts = self._lines.setdefault(line, [])
        parts.append(part)
        if len(parts) > PARTS:
            parts[:] = [Part(min(each.first for each in parts), max(each.last for each in parts))]
        self._empty.pop(line, None)

    def has(self, queues: Collection[str], tasks: Collection[str]) -> bool:
        """Whether a claim with these tasks may find a parked job in these queues."""
        return any(line.queue not in self._paused for line in self._mine(queues, tasks))

    def ranks(self, queues: Collection[str], tasks: Collection[str]) -> list[int]:
        """The priorities of parked jobs that a claim may find, highest first."""
        return sorted({line.priority for line in self._mine(queues, tasks)}, reverse=True)

    def _mine(self, queues: Collection[str], tasks: Collection[str]) -> list[Line]:
        return [line for line in self._lines if line.queue in queues and line.task in tasks]

    # --- Looking

    async def refresh(self) -> None:
        """Look now if nobody has, and later in the background, now and then."""
        if self._looked_s is None:
            await self._look()
        elif self._looking is None and _now_s() - self._looked_s >= look_pause(len(self._notes)):
            self._looking = asyncio.create_task(self._look_again(), name="tickwheel-parked")

    def doubt(self) -> None:
        """The connection was lost: nobody told us what happened meanwhile."""
        self._looked_s = None

    async def _look_again(self) -> None:
        try:
            await self._look()
        except StoreError:
            return  # the next claim says what is wrong
        finally:
            self._looking = None

    async def _look(self) -> None:
        began_s, first = _now_s(), self._looked_s is None
        before = None if first else self._notes
        self._notes = await self.notes()
        self._looked_s = began_s
        # Lines whose note was not written again since they were empty.
        notes = self._notes
        self._empty = {line: at for line, at in self._empty.items() if notes.get(line) == at[0]}
        self.arrived({line: part for line in notes if (part := self._overlooked(line, before))})
        for queue in list(self._paused):
            priorities = {line.priority for line in self._notes if line.queue == queue}
            if await self._is_paused(queue, max(priorities, default=0)) is False:
                self._paused.discard(queue)
                self.on_arrival()
        for line, (seq, since_s) in list(self._empty.items()):
            if began_s - since_s > NOTE_MS / 1000:
                await self._tidy(line, seq)

    def _overlooked(self, line: Line, before: Mapping[Line, int] | None) -> Part | None:
        """The part of a line that somebody may have failed to claim, given the notes as they were
        at the last look: what was parked since is for the handle that was told."""
        if line in self._empty or any(part.first == 1 for part in self._lines.get(line, ())):
            return None
        if before is None:
            return ALL
        # The jobs of a batch come right after their notes.
        return Part(1, max(before.values()) + BATCH) if line in before else None

    async def notes(self) -> dict[Line, int]:
        """All lines that may have jobs, with the sequences of their notes."""
        found = await self._stream.all_of(self._layout.notes)
        return {steps.as_line(body): seq for _, seq, body in found}

    async def _tidy(self, line: Line, seq: int) -> None:
        """Remove the note of an empty line, unless it is new or was written again. The leader is
        asked for both: others may be behind."""
        subject = self._layout.note_subject(line)
        request = {"last_by_subj": subject}
        answer = await self._stream.api(f"STREAM.MSG.GET.{self._stream.name}", request)
        note = answer.get("message")
        if note is None or note["seq"] != seq:
            return
        old = nanoseconds(note["time"]) // MS_NS < self._now_ms() - NOTE_MS
        if old and await self._is_empty(line):
            # If we may not, a worker does it.
            with contextlib.suppress(Denied):
                await self._stream.purge(subject, before_seq=seq + 1)

    # --- Claiming

    async def claim(
        self,
        rank: int,
        queues: Collection[str],
        tasks: Collection[str],
        *,
        wanted: int,
        most_bytes: int,
        claim: Claim,
    ) -> list[Job]:
        """Claim up to `wanted` parked jobs of one priority, of about `most_bytes`."""
        claimed: list[Job] = []
        before = -1
        while before < len(claimed) < wanted and most_bytes > 0:
            before = len(claimed)
            notes = dict(self._notes)
            pages = await self._read(rank, queues, tasks, wanted - before, most_bytes)
            jobs = await self._claim_read(pages, wanted - before, most_bytes, claim)
            await self._note_empty(pages, notes)
            claimed += jobs
            most_bytes -= sum(map(job_bytes, jobs))
        return claimed

    async def _read(
        self,
        rank: int,
        queues: Collection[str],
        tasks: Collection[str],
        wanted: int,
        most_bytes: int,
    ) -> list[Page]:
        """Read parts of lines, a few at a time, until enough jobs are found: they are claimed in
        one batch, because every batch has its price, whatever its size."""
        lines = [line for line in self._mine(queues, tasks) if line.priority == rank]
        parts = [(line, part) for line in lines for part in self._lines[line]]
        read: list[Page] = []
        for some in portions(parts, most=TOGETHER):
            if wanted <= 0 or most_bytes <= 0:
                break
            count, share = -(-wanted // len(some)), most_bytes // len(some)
            pages, paused = await asyncio.gather(
                asyncio.gather(*(self._page(line, part, count, share) for line, part in some)),
                self._paused_of({line.queue for line, _ in some}, rank),
            )
            unpaused = [page for page in pages if page.line.queue not in paused]
            read += unpaused
            wanted -= sum(len(page.standings) for page in unpaused)
            most_bytes -= sum(_bytes_of(each) for page in unpaused for each in page.standings)
        return read

    async def _claim_read(
        self, pages: Sequence[Page], wanted: int, most_bytes: int, claim: Claim
    ) -> list[Job]:
        """Claim what was read, and remember what is left of it."""
        found = {each.seq: each for page in pages for each in page.standings}
        some = portions(list(found.values()), _bytes_of, most=wanted, most_bytes=most_bytes)
        tried = next(some, [])
        jobs, refused = await claim(tried) if tried else ([], [])
        self._note_refused(refused)
        asked = {each.seq for each in tried}
        for page in pages:
            rest = [each.seq for each in page.standings if each.seq not in asked]
            after = page.standings[-1].seq + 1 if page.standings and page.more else None
            self._replace(page.line, page.part, rest[0] if rest else after)
        return jobs

    async def _note_empty(self, pages: Sequence[Page], notes: Mapping[Line, int]) -> None:
        """Remember which lines have no jobs at all, given the notes as they were before."""
        for line, part, standings, more in pages:
            empty = part.first == 1 and not standings and not more
            if empty and line in notes and line not in self._lines and await self._is_empty(line):
                self._empty[line] = notes[line], _now_s()

    def _replace(self, line: Line, part: Part, first: int | None) -> None:
        """Expect only what a part has from this sequence on; nothing if there is none."""
        parts = self._lines.setdefault(line, [])
        if part in parts:
            parts.remove(part)
        if first is not None:
            parts.insert(0, Part(first, part.last))
        if not parts:
            del self._lines[line]

    async def _page(self, line: Line, part: Part, wanted: int, most_bytes: int) -> Page:
        """The first jobs of a part of a line."""
        subject, limit = self._layout.parked(line), min(wanted, BATCH)
        for pause_s in (0.0, *(() if self._stream.alone else BEHIND_S)):
            await asyncio.sleep(pause_s)
            messages, more = await self._stream.page(
                subject, from_seq=part.first, limit=limit, most_bytes=most_bytes
            )
            if messages:
                standings = [steps.standing(*each) for each in messages if each[1] <= part.last]
                more = more and len(standings) == len(messages)
                return Page(line, part, await self._without_ghosts(standings), more)
        return Page(line, part, [], False)

    async def _is_empty(self, line: Line) -> bool:
        """Whether a line has no jobs at all. Another server than the leader may be behind."""
        return not await self._stream.leader_last(self._layout.parked(line))

    async def _without_ghosts(self, found: list[Standing]) -> list[Standing]:
        """Those of these that are not over. One whose claim was refused and that is still there may
        be a ghost."""
        suspects = [each for each in found if self._refused.get(each.subject) == each.seq]
        if not suspects:
            return found
        now = await self._stream.read([each.job.id for each in suspects])
        ghosts: set[int] = set()
        for each in suspects:
            seen = now.get(each.job.id)
            if seen is not None and (seen.subject, seen.seq) != (each.subject, each.seq):
                await self._stream.purge(each.subject, before_seq=each.seq + 1)
                ghosts.add(each.seq)
                # Parts of a line that are read together may overlap.
                self._refused.pop(each.subject, None)
        return [each for each in found if each.seq not in ghosts]

    def _note_refused(self, refused: Sequence[Standing]) -> None:
        if len(self._refused) > REFUSED:
            self._refused.clear()
        self._refused |= {each.subject: each.seq for each in refused}

    async def _paused_of(self, queues: Iterable[str], rank: int) -> set[str]:
        """Those of these queues that are paused, or whose consumers don't answer. The next look
        asks the latter again, so that not every claim waits for them."""
        listed = list(queues)
        answers = await asyncio.gather(*(self._is_paused(queue, rank) for queue in listed))
        found = dict(zip(listed, answers, strict=True))
        for line in [line for line in self._lines if found.get(line.queue, False) is None]:
            del self._lines[line]
        paused = {queue for queue, answer in found.items() if answer}
        self._paused = (self._paused - set(listed)) | paused
        return {queue for queue, answer in found.items() if answer is not False}

    async def _is_paused(self, queue: str, rank: int) -> bool | None:
        """Whether the queue is paused; None if it doesn't answer. The consumer of a job's priority
        was there when the job was delivered; if somebody deleted it, the others know."""
        for priority in (str(rank), *(each for each in steps.PRIORITIES if each != str(rank))):
            try:
                async with asyncio.timeout(PAUSE_S):
                    found = await self._stream.consumer(consumer_name(queue, f"r{priority}"))
            except (TimeoutError, StoreUnavailable):
                return None
            if found is not None:
                return bool(found.get("paused"))
        return False

    # --- Telling

    async def first_of_each(self) -> list[Job]:
        """Of each line that has jobs, one that is due soon."""
        notes = await self.notes()
        jobs: list[Job] = []
        for some in portions(list(notes), most=TOGETHER):
            pages = await asyncio.gather(
                *(
                    self._stream.page(self._layout.parked(line), from_seq=1, limit=FEW)
                    for line in some
                )
            )
            for line, (messages, _) in zip(some, pages, strict=True):
                found = [steps.standing(*each) for each in messages]
                now = await self._stream.read([each.job.id for each in found])
                parked = [each.job for each in now.values() if each.kind == steps.PARKED]
                if parked:
                    jobs.append(min(parked, key=lambda job: job.due_ms))
                elif not messages:
                    await self._tidy(line, notes[line])
        return jobs


def arrivals_of(parked: Iterable[Job], seqs: Mapping[str, int]) -> Arrivals:
    """Which jobs were parked, by line, given the sequences of their messages; a job without one was
    not parked, and one with 0 was parked before."""
    arrivals: dict[Line, Part] = {}
    for job in parked:
        if (seq := seqs.get(job.id)) is not None:
            line, part = steps.line_of(job), Part(seq, seq) if seq else ALL
            known = arrivals.get(line, part)
            arrivals[line] = Part(min(known.first, part.first), max(known.last, part.last))
    return arrivals


def look_pause(notes: int) -> float:
    """How long to wait after so many notes were read."""
    return max(LOOK_S, LOOK_EACH_S * notes)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _bytes_of(standing: Standing) -> int:
    return job_bytes(standing.job)
