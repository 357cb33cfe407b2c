"""Jobs in one stream: each step of their lives is a compare-and-set, replanned when refused."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import TypeVar

import msgspec

from tickwheel import job as life
from tickwheel.concurrency import bounded_tasks
from tickwheel.errors import StoreUnavailable
from tickwheel.job import CancelOutcome, Job, Outcome, Settlement, State
from tickwheel.store import job_bytes
from tickwheel.stores.nats import steps
from tickwheel.stores.nats.answers import StoreFull
from tickwheel.stores.nats.claiming import ClaimBatch, ParkedBatch, counts, same_claim, taking
from tickwheel.stores.nats.fitting import Fit, Fitter, no_larger
from tickwheel.stores.nats.publishing import Portion, portioned
from tickwheel.stores.nats.room import Room
from tickwheel.stores.nats.steps import Check, Layout, ReadyMessage, Standing, Step
from tickwheel.stores.nats.stream import BATCH, BATCH_BYTES, Stream
from tickwheel.stores.nats.wire import Denied

P = TypeVar("P")
# How groups of messages are stored: see `Stream.put`.
Put = Callable[[Sequence[Sequence[Step]]], Awaitable[list[int | None]]]

# How often a step is tried that others keep getting in the way of.
TRIES = 40
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.0005, 0.1
# Batches in flight: one is prepared while the server works on another.
PARALLEL = 3
# How many extended leases are remembered; beyond this they are looked up.
REMEMBERED = 100_000
# How many of the last claims can be repeated.
CALLS = 4

_replace = msgspec.structs.replace


class Jobs:
    """The steps of one stream's jobs."""

    def __init__(
        self, stream: Stream, layout: Layout, room: Room, now_ms: Callable[[], int]
    ) -> None:
        self._stream = stream
        self._room = room
        self._layout = layout
        # The server's time: it decides what is due soon, not a caller's clock.
        self._now_ms = now_ms
        # Where held jobs are stored, if not where their claim stored them.
        self._leases: dict[str, Standing] = {}
        # The jobs that the last claims wrote, by call; a reply that said so may have been lost.
        self._calls: dict[int, dict[str, Job]] = {}
        self._fitter = Fitter(stream)
        # Who sees to jobs that were claimed as they were before somebody changed them.
        self.on_overtaken: Callable[..., Awaitable[None]] | None = None

    async def apply(
        self,
        plans: dict[str, P],
        write: Callable[[P], list[Step]],
        replan: Callable[[P, Standing | None], P | None],
        put: Put | None = None,
    ) -> dict[str, tuple[P, int]]:
        """Apply plans, by id. One that is refused is planned again from what is stored now; None
        drops it. A batch is refused as a whole, and the server doesn't say which check failed.

        Returns the plans that were applied, with the sequence of the last message of each.
        """
        applied: dict[str, tuple[P, int]] = {}
        todo = plans
        for tries in range(TRIES):
            refused: dict[str, P] = {}
            async with bounded_tasks(PARALLEL) as start:
                for portion in portioned(
                    todo, write, most=self._stream.batch, most_bytes=BATCH_BYTES
                ):
                    await start(self._put(portion, put or self._room.move, applied, refused))
            if not refused:
                return applied
            seen = await self.read(refused)
            replanned = {id: replan(plan, seen.get(id)) for id, plan in refused.items()}
            todo = {id: plan for id, plan in replanned.items() if plan is not None}
            if todo:
                await asyncio.sleep(min(FIRST_PAUSE_S * 2**tries, LONGEST_PAUSE_S))
        if self._room.low:
            raise StoreFull("the store is full, and no room is left to work on its jobs")
        raise StoreUnavailable("other processes kept changing these jobs; try again")

    async def read(self, ids: Iterable[str]) -> dict[str, Standing]:
        """Where jobs are stored. What is over and in their way is removed."""
        seen = await self._stream.read(ids)
        for each in [over for standing in seen.values() for over in standing.over]:
            # If we may not, a step by somebody who may does it.
            with contextlib.suppress(Denied):
                await self._stream.purge(each.subject, before_seq=each.seq + 1)
        return seen

    async def _put(
        self,
        portion: Portion[P],
        put: Put,
        applied: dict[str, tuple[P, int]],
        refused: dict[str, P],
    ) -> None:
        seqs = await put([group for _, _, group in portion])
        for (id, plan, _), seq in zip(portion, seqs, strict=True):
            if seq is None:
                refused[id] = plan
            else:
                applied[id] = (plan, seq)

    # --- Add

    async def add(self, jobs: Sequence[Job]) -> set[str]:
        """Add the jobs whose id is not taken; returns the ids of those that were added. If one is
        larger than the server accepts, none is added."""
        if not jobs:
            return set()
        new = dict(zip([job.id for job in jobs], self.new(jobs), strict=True))
        await self._room.admit(list(new.values()))
        applied = await self.apply(
            new,
            lambda step: [step],
            lambda step, seen: step if seen is None else None,
            self._room.add,
        )
        return set(applied)

    def new(self, jobs: Iterable[Job]) -> list[Step]:
        """The messages that add jobs. Raises UsageError if one is too large."""
        now_ms, safe_bytes = self._now_ms(), self._fitter.safe_bytes

        def step_of(job: Job) -> Step:
            check = self._layout.nowhere(job.id)
            return self._layout.step(job, check, now_ms=now_ms, new=True)

        return [
            step_of(job)
            if not job.history and job_bytes(job) <= safe_bytes
            else self._fitter.new(job, step_of)
            for job in map(life.added, jobs)
        ]

    # --- Claim

    async def claim(
        self,
        messages: Sequence[ReadyMessage],
        *,
        worker: str,
        now_ms: int,
        lease_ms: int,
        tasks: Collection[str],
        call: int | None,
        leave: Callable[[Sequence[ReadyMessage]], None],
    ) -> tuple[list[Job], dict[str, int]]:
        """Claim the jobs of these ready messages that nobody else claimed, and acknowledge them.
        If there are `tasks`, those of others are parked, where that can be done in the same step.

        `leave` is given those that may still count. `claimed_by` repeats one of the last few calls.
        Returns the jobs, and the sequences of their messages.
        """
        stream = self._stream
        claim = ClaimBatch(
            self._layout,
            self._fitter,
            taking(worker, now_ms, lease_ms, tasks if self._notes_fit() else ()),
            now_ms=now_ms,
            exact=stream.alone,
        )
        # A message is ours alone only while the connection that delivered it lasts.
        put = functools.partial(self._room.claim, connection=stream.connection)
        try:
            doubted = [each for each in messages if stream.doubts(each)]
            seen = await self.read([each.standing.job.id for each in doubted])
            todo = claim.begin(messages, doubted, seen)
            if call is not None:
                self._note(call, claim.jobs)
            seqs: dict[str, int] = {}
            for some in self._together(todo, claim.parked(todo)):
                applied = await self.apply(some, claim.write, claim.replan, put)
                seqs |= {id: seq for id, (_, seq) in applied.items()}
            if claim.overtaken and self.on_overtaken is not None:
                await self.on_overtaken(claim.overtaken, now_ms=now_ms)
            stream.ack([each for each in messages if each not in claim.left])
        except BaseException:
            claim.left = list(messages)
            raise
        finally:
            leave(claim.left)
        return claim.taken(seqs), seqs

    async def claim_parked(
        self,
        found: Sequence[Standing],
        *,
        worker: str,
        now_ms: int,
        lease_ms: int,
        call: int | None,
    ) -> tuple[list[Job], list[Standing]]:
        """Claim parked jobs, each if it is still where it was found; returns those that were
        claimed, and where the others were found."""
        batch = ParkedBatch(
            self._layout,
            self._fitter,
            found,
            taking(worker, now_ms, lease_ms),
            now_ms=now_ms,
        )
        if call is not None:
            self._note(call, batch.jobs)
        put = functools.partial(self._room.claim, connection=self._stream.connection)
        plans = {each.job.id: each for each in found}
        applied = await self.apply(plans, batch.write, batch.replan, put)
        held = batch.held({id: seq for id, (_, seq) in applied.items()})
        for standing in held:
            self._hold(standing)
        left = [each for each in found if each.job.id not in applied]
        return [standing.job for standing in held], left

    def _hold(self, standing: Standing) -> None:
        """Remember where a held job is stored."""
        if len(self._leases) > REMEMBERED:
            self._leases.clear()
        self._leases[standing.job.id] = standing

    def _note(self, call: int, jobs: dict[str, Job]) -> None:
        if call not in self._calls and len(self._calls) == CALLS:
            del self._calls[next(iter(self._calls))]
        self._calls.setdefault(call, {}).update(jobs)

    async def claimed_by(self, call: int, *, now_ms: int, lease_ms: int) -> list[Job]:
        """The jobs that this call claimed and that are still held, with a new lease."""
        tried = self._calls.get(call, {})
        seen = await self._stream.read(tried)
        mine = [
            standing.job
            for id, standing in seen.items()
            if standing.job.state is State.RUNNING and same_claim(standing.job, tried[id])
        ]
        held = await self.extend(mine, now_ms=now_ms, lease_ms=lease_ms)
        return list(held.values())

    async def put_back(self, messages: Sequence[ReadyMessage]) -> None:
        """Make messages that were delivered here ready again, for any handle."""

        def write(message: ReadyMessage) -> list[Step]:
            # Exactly as it was delivered: nobody has claimed, changed or deleted the job since.
            standing = message.standing
            check = Check(self._layout.anywhere(standing.job.id), standing.seq)
            headers = check.headers + steps.padding(self._layout.ready_subject(standing.job))
            return [Step(standing.subject, headers, msgspec.json.encode(standing.job))]

        # One that the server no longer accepts is delivered again by itself.
        messages = [each for each in messages if self._stream.over(write(each)[0]) <= 0]
        # If one is refused its whole batch is, so the others are written again. Only what was
        # written is acknowledged: any other message may be the last copy of its job.
        applied = await self.apply(
            {message.standing.job.id: message for message in messages},
            write,
            lambda message, seen: message if counts(message, seen) else None,
        )
        self._stream.ack([message for message in messages if message.standing.job.id in applied])

    async def push(self, standings: Iterable[Standing]) -> int:
        """Move jobs on whose schedules the server failed to fire; returns how many they were."""
        applied = await self.apply(
            {each.job.id: each for each in standings},
            lambda each: [self._layout.step_from(each, each.job, now_ms=self._now_ms())],
            lambda each, seen: None,
        )
        return len(applied)

    # --- Extend and settle: for the holder alone

    async def extend(self, jobs: Sequence[Job], *, now_ms: int, lease_ms: int) -> dict[str, Job]:
        """Extend the leases of the jobs that are still held; the others are left out."""
        holders = {job.id: job for job in jobs}

        def extended(standing: Standing) -> Fit | None:
            job = standing.job
            return self._fitter.fit(
                life.extended(job, holders[job.id], now_ms=now_ms, lease_ms=lease_ms),
                lambda job: self._layout.step_from(standing, job, now_ms=self._now_ms()),
            )

        fits: dict[str, Fit] = {}

        def write(standing: Standing) -> list[Step]:
            return [fits[standing.job.id][1]]

        def fitting(standing: Standing | None) -> Standing | None:
            """If it no longer fits, its lease runs out, and the next claim says why."""
            found = None if standing is None else extended(standing)
            if standing is None or found is None:
                return None
            fits[standing.job.id] = found
            return standing

        def look(job: Job, seen: Standing | None) -> Standing | None:
            return seen if _holds(job, seen, now_ms) else None

        held = await self._in_hand({job.id: job for job in jobs}, now_ms, look)
        plans = {id: plan for id, plan in held.items() if fitting(plan) is not None}
        applied = await self.apply(plans, write, lambda plan, seen: fitting(look(plan.job, seen)))
        for id, (_, seq) in applied.items():
            job, step = fits[id]
            self._hold(steps.standing_of(job, step.subject, seq))
        return {id: fits[id][0] for id in applied}

    async def settle(self, settlements: Sequence[Settlement], *, now_ms: int) -> dict[str, int]:
        """Write how attempts ended; returns the ids of those that were accepted, each with the
        sequence of its message, or 0 if it was accepted before."""
        by_id = {settlement.job.id: settlement for settlement in settlements}
        repeated: set[str] = set()
        apart = await self._note_lines(settlements)

        def write(standing: Standing) -> list[Step]:
            def step_of(job: Job) -> Step:
                return self._layout.step_from(standing, job, now_ms=self._now_ms())

            job = life.settled(standing.job, by_id[standing.job.id])
            if self._room.low:
                job = no_larger(job, standing.job)
            found = self._fitter.fit(job, step_of) or self._fitter.end(job, step_of, now_ms=now_ms)
            parked = found[0].parked and not apart
            return [self._layout.note(steps.line_of(job)), found[1]] if parked else [found[1]]

        def look(job: Job, seen: Standing | None) -> Standing | None:
            if seen is not None and seen.job.settled == job.fence:
                repeated.add(job.id)
                return None
            return seen if _holds(job, seen, now_ms) else None

        held = {id: settlement.job for id, settlement in by_id.items()}
        plans = await self._in_hand(held, now_ms, look)
        applied: dict[str, tuple[Standing, int]] = {}
        parked = {id for id, each in by_id.items() if each.outcome is Outcome.PARK}
        for some in self._together(plans, parked):
            applied |= await self.apply(some, write, lambda plan, seen: look(plan.job, seen))
        for id in by_id:
            self._leases.pop(id, None)
        return dict.fromkeys(repeated, 0) | {id: seq for id, (_, seq) in applied.items()}

    def _together(self, plans: dict[str, P], parked: Collection[str]) -> list[dict[str, P]]:
        """Plans that go together. If steps are sent singly, those that park are apart: they need a
        batch, which would slow down the others."""
        if not self._stream.singly or not parked:
            return [plans]
        some = {id: plan for id, plan in plans.items() if id in parked}
        others = {id: plan for id, plan in plans.items() if id not in parked}
        return [each for each in (others, some) if each]

    def _notes_fit(self) -> bool:
        """Whether a note can be stored with the job that is parked: a full server stores only part
        of a batch."""
        return not self._room.is_tight() and self._stream.batch > 1

    async def _note_lines(self, settlements: Sequence[Settlement]) -> bool:
        """Write the notes of jobs that are about to be parked, if that has to be done apart. A note
        is kept for a while, even without jobs."""
        if self._notes_fit():
            return False
        parked = [each.job for each in settlements if each.outcome is Outcome.PARK]
        for line in {steps.line_of(job) for job in parked}:
            await self._room.store(self._layout.note(line))
        return True

    async def _in_hand(
        self,
        jobs: dict[str, Job],
        now_ms: int,
        look: Callable[[Job, Standing | None], Standing | None],
    ) -> dict[str, Standing]:
        """Where held jobs are stored, as far as is known here; lost ones are left out.

        A lease that seems to have run out may have been extended through another handle, so it is
        looked up first, and so is a job that was parked, whose claim may have been stored in either
        place.
        """
        plans: dict[str, Standing] = {}
        elsewhere: list[str] = []
        for id, job in jobs.items():
            known = self._leases.get(id)
            same = known is not None and known.job.fence == job.fence
            plans[id] = known if known is not None and same else self._layout.lease(job)
            if not same and _was_parked(job):
                elsewhere.append(id)
        late = [id for id, plan in plans.items() if not life.held(plan.job, now_ms=now_ms)]
        over = list(dict.fromkeys(elsewhere + late))
        seen = await self.read(over)
        found = {id: look(jobs[id], seen.get(id)) for id in over}
        merged = {**plans, **found}
        return {id: plan for id, plan in merged.items() if plan is not None}

    # --- The operator's steps

    async def cancel(
        self, ids: Iterable[str], *, now_ms: int
    ) -> tuple[dict[str, CancelOutcome], list[Job]]:
        """Cancel; returns what that achieved, by id, and the jobs whose holders must be told."""
        answers: dict[str, CancelOutcome] = {}
        seen = await self.read(ids)

        def target(standing: Standing) -> tuple[CancelOutcome, Job]:
            """What a cancel achieves, and the job that it leaves. If there is only a ready message,
            the lease has run out by the server's clock."""
            job = standing.job
            held = life.held(job, now_ms=now_ms) and bool(standing.kind)
            return life.cancel(job, now_ms=now_ms, held_now=held)

        def replan(_: Standing | None, found: Standing | None) -> Standing | None:
            if found is None:
                return None
            outcome, after = target(found)
            if after is not found.job:
                return found
            # Nothing to write: it has ended, or has a cancel request already.
            answers[found.job.id] = outcome
            if outcome is CancelOutcome.REQUESTED:
                requested.append(after)
            return None

        requested: list[Job] = []
        plans = {id: plan for id in seen if (plan := replan(None, seen[id])) is not None}
        applied = await self.apply(
            plans,
            lambda standing: [self._cancelling(standing, target(standing)[1], now_ms)],
            replan,
        )
        for id, (standing, _) in applied.items():
            answers[id], after = target(standing)
            if answers[id] is CancelOutcome.REQUESTED:
                requested.append(after)
            elif not standing.kind:
                # It no longer counts; purged so that no queue counts it either. If we may not, the
                # next claim does it.
                with contextlib.suppress(Denied):
                    await self._stream.purge(standing.subject, before_seq=standing.seq + 1)
        return answers, requested

    def _cancelling(self, standing: Standing, target: Job, now_ms: int) -> Step:
        def step_of(job: Job) -> Step:
            return self._layout.step_from(standing, job, now_ms=now_ms)

        found = self._fitter.fit(target, step_of)
        if found is None:
            # There is no room for the request: its holder finds out when it settles.
            job = life.cancelled(standing.job, now_ms=now_ms)
            found = self._fitter.end(job, step_of, now_ms=now_ms)
        return found[1]

    async def rerun(self, ids: Iterable[str], *, now_ms: int) -> set[str]:
        """Put ended jobs back; returns the ids of those that had ended."""
        groups: dict[str, list[Step]] = {}

        def revived(standing: Standing | None) -> Standing | None:
            """The standing, if the job had ended and still fits."""
            if standing is None or not standing.job.state.ended:
                return None
            group = self._revive(standing, now_ms)
            if group is None:
                return None
            groups[standing.job.id] = group
            return standing

        seen = await self.read(ids)
        applied = await self.apply(
            {id: standing for id, standing in seen.items() if revived(standing) is not None},
            lambda standing: groups[standing.job.id],
            lambda _, found: revived(found),
        )
        return set(applied)

    def _revive(self, standing: Standing, now_ms: int) -> list[Step] | None:
        def group(job: Job) -> list[Step]:
            return self._layout.revive(standing, job, now_ms=self._now_ms())

        after = life.rerun(standing.job, now_ms=now_ms)
        first = self._fitter.fit(after, lambda job: group(job)[0])
        second = self._fitter.fit(after, lambda job: group(job)[1])
        return None if first is None or second is None else [first[1], second[1]]

    async def delete(self, ids: Iterable[str]) -> set[str]:
        """Delete ended jobs; returns the ids of those that had ended."""
        seen = await self._stream.read(ids)
        deleted = set()
        for id, standing in seen.items():
            if not standing.job.state.ended:
                continue
            # Only what was read: a job that was put back since is a later message. By literal
            # subjects, or the server's counts would be wrong. A ready message that a schedule wrote
            # at the last moment must not outlive the job: purge before and after it.
            ready = self._layout.ready_subject(standing.job)
            await self._clear([standing])
            # While the job is stored its id is taken: up to here no message is that of a new one.
            last: int = (await self._stream.info())["state"]["last_seq"]
            if await self._stream.purge(standing.subject, before_seq=standing.seq + 1):
                deleted.add(id)
                await self._stream.purge(ready, before_seq=last + 1)
        return deleted

    async def prune(self, state: State, *, before_ms: int, limit: int) -> int:
        """Delete up to `limit` jobs that ended in this state before a moment, the oldest first."""
        if not state.ended:
            return 0
        subject = self._layout.of_kind(steps.ENDED[state], None)
        pruned, at, more = 0, 1, True
        # The first that the server stored at that moment or later. Those before it are old, unless
        # their end was written by a clock that is ahead: these stay, and don't stop the others.
        end: int | None = None
        while pruned < limit and more:
            wanted = min(limit - pruned, BATCH)
            messages, more = await self._stream.page(subject, from_seq=at, limit=wanted)
            old: list[Standing] = []
            for message in messages:
                standing = steps.standing(*message)
                if standing.job.ended_ms is not None and standing.job.ended_ms < before_ms:
                    old.append(standing)
                    continue
                if end is None:
                    end = await self._stream.first_since(subject, before_ms)
                if standing.seq >= end:
                    more = False
                    break
            pruned += await self._forget(subject, old, all_before=end is None)
            at = messages[-1][1] + 1 if messages else at
        return pruned

    async def _forget(self, subject: str, old: Sequence[Standing], *, all_before: bool) -> int:
        """Purge ended jobs under a subject; with `all_before` everything up to the last of them,
        in one purge."""
        if not old:
            return 0
        await self._clear(old)
        if all_before:
            return await self._stream.purge(subject, before_seq=old[-1].seq + 1)
        purged = 0
        for each in old:
            purged += await self._stream.purge(each.subject, before_seq=each.seq + 1)
        return purged

    async def _clear(self, ended: Sequence[Standing]) -> None:
        """Remove what is left of ended jobs: a ready message or a ghost that outlives its job would
        run it again. Anything later belongs to a job that was put back."""
        ends = {steps.subject_part(each.job.id): each.seq for each in ended}
        everything = [self._layout.anywhere(each.job.id) for each in ended]
        for subject, seq, _ in await self._stream.last_of(everything):
            if seq < ends[subject.rpartition(".")[2]]:
                await self._stream.purge(subject, before_seq=seq + 1)

    # --- Reading

    async def get(self, ids: Iterable[str]) -> dict[str, Job]:
        return {id: standing.job for id, standing in (await self._stream.read(ids)).items()}

    async def still_ready(self, found: Iterable[Standing]) -> list[Standing]:
        """Those of these that are still as they were found: ready messages are only hints."""
        listed = list(found)
        ready = [each.job.id for each in listed if not each.kind]
        truth = await self._stream.read(ready) if ready else {}
        return [
            each
            for each in listed
            if each.kind or ((now := truth.get(each.job.id)) is not None and not now.kind)
        ]

    async def gathered(self, *subjects: str) -> list[Standing]:
        """Everything under some subjects, which must be few messages."""
        return [
            steps.standing(*message)
            for subject in subjects
            for message in await self._stream.all_of(subject)
        ]


def _was_parked(job: Job) -> bool:
    """Whether a held job was parked when it was claimed, or may have been: without its history,
    which is dropped if a job is too large, that is unknown."""
    return job.history[-1].outcome is Outcome.PARK if job.history else job.attempt > 1


def _holds(job: Job, seen: Standing | None, now_ms: int) -> bool:
    """Whether what is stored now is the same claim, and its lease still holds."""
    return seen is not None and bool(seen.kind) and life.holds(job, seen.job, now_ms=now_ms)
