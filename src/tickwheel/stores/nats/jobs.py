"""Jobs in one stream: every step of their lives as a compare-and-set, thought over when refused."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from tickwheel import job as life
from tickwheel.batch import few_at_a_time
from tickwheel.errors import StoreUnavailable
from tickwheel.job import Cancelled, Job, Settlement, State
from tickwheel.schedule import Schedule
from tickwheel.store import job_bytes
from tickwheel.stores.nats import steps
from tickwheel.stores.nats.steps import Check, Layout, Standing, Step
from tickwheel.stores.nats.stream import BATCH, BATCH_BYTES, Stream, Token
from tickwheel.stores.nats.wire import Denied

P = TypeVar("P")
# Plans by id, each with its messages, that go into one batch.
Chunk = list[tuple[str, P, list[Step]]]

# A step that others keep getting in the way of is given up after so many tries.
TRIES = 40
# A schedule that fires is gone within so many tries, or its token is left for later.
PATIENCE = 8
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.0005, 0.1
# Batches on their way at the same time: one is made while the server works on another.
PARALLEL = 3
# Leases of jobs in hand that moved since they were claimed; beyond this they are looked up again.
REMEMBERED = 100_000

_replace = msgspec.structs.replace


class Jobs:
    """The steps of one stream's jobs."""

    def __init__(self, stream: Stream, layout: Layout, now_ms: Callable[[], int]) -> None:
        self._stream = stream
        self._layout = layout
        # The server's time: it decides what is due soon, whatever a caller's clock says.
        self._now_ms = now_ms
        # Where jobs in hand stand, if not where their claim left them.
        self._leases: dict[str, Standing] = {}

    async def _move(
        self,
        plans: dict[str, P],
        write: Callable[[P], list[Step]],
        again: Callable[[P, Standing | None], P | None],
    ) -> dict[str, tuple[P, int]]:
        """Carry out plans, by id. Each that is refused is thought over with what stands now, and
        None drops it. A batch is refused whole, without a word about which check failed.

        Gives the plans that were carried out, with the sequence of the last message of each.
        """
        carried: dict[str, tuple[P, int]] = {}
        todo = plans
        for tries in range(TRIES):
            refused: dict[str, P] = {}
            async with few_at_a_time(PARALLEL) as start:
                for chunk in _chunked(todo, write):
                    await start(self._carry(chunk, carried, refused))
            if not refused:
                return carried
            seen = await self._stream.read(refused)
            thought = {id: again(plan, seen.get(id)) for id, plan in refused.items()}
            todo = {id: plan for id, plan in thought.items() if plan is not None}
            if todo:
                await asyncio.sleep(min(FIRST_PAUSE_S * 2**tries, LONGEST_PAUSE_S))
        raise StoreUnavailable("others kept changing the same jobs")

    async def _carry(
        self, chunk: Chunk[P], carried: dict[str, tuple[P, int]], refused: dict[str, P]
    ) -> None:
        seqs = await self._stream.put([group for _, _, group in chunk])
        for (id, plan, _), seq in zip(chunk, seqs, strict=True):
            if seq is None:
                refused[id] = plan
            else:
                carried[id] = (plan, seq)

    # --- Add

    async def add(self, jobs: Sequence[Job]) -> set[str]:
        """Add the jobs whose id is not taken; gives the ids of those that were added. Where one is
        more than the server takes, none is added."""
        # As JSON a text can be up to six times as long; only what may be too large is tried.
        surely = self._stream.largest // 8
        for job in jobs:
            if job_bytes(job) > surely:
                self._stream.refuse_large([self._new(job)])
        carried = await self._move(
            {job.id: job for job in jobs},
            lambda job: [self._new(job)],
            lambda job, seen: job if seen is None else None,
        )
        return set(carried)

    def _new(self, job: Job) -> Step:
        check = self._layout.nowhere(job.id)
        return self._layout.step(life.added(job), check, now_ms=self._now_ms())

    # --- Claim

    async def claim(
        self,
        tokens: Sequence[Token],
        *,
        worker: str,
        now_ms: int,
        lease_ms: int,
        leave: Callable[[Sequence[Token]], None],
    ) -> list[Job]:
        """Take the jobs of these tokens that nobody else took; spends the tokens.

        Those about which nothing is known yet are left: they may count later.
        """

        def taken(token: Token) -> Job:
            job = token.standing.job
            if job.state is State.RUNNING and job.asked:
                return life.cancelled(job, now_ms=now_ms)
            return life.claimed(job, worker=worker, fence=0, now_ms=now_ms, lease_ms=lease_ms)

        layout = self._layout
        jobs: dict[str, Job] = {}

        def write(token: Token) -> list[Step]:
            id = token.standing.job.id
            return [layout.step(jobs[id], layout.only_a_token(id), now_ms=now_ms)]

        left: list[Token] = []
        tries: Counter[str] = Counter()

        def again(token: Token, seen: Standing | None) -> Token | None:
            counts = _still_counts(token, seen)
            tries[token.standing.job.id] += 1
            if counts is not None and tries[token.standing.job.id] > PATIENCE:
                left.append(token)
                return None
            return counts

        try:
            plans = {token.standing.job.id: token for token in await self._current(tokens)}
            jobs |= {id: taken(token) for id, token in plans.items()}
            carried = await self._move(plans, write, again)
            self._stream.ack([each for each in tokens if each not in left] if left else tokens)
        except BaseException:
            left = list(tokens)
            raise
        finally:
            leave(left)
        return [
            _replace(job, fence=carried[id][1])
            for id, job in jobs.items()
            if id in carried and job.state is State.RUNNING
        ]

    async def _current(self, tokens: Sequence[Token]) -> Sequence[Token]:
        """The tokens that are up to date. One that is delivered again was once in another hand: the
        job may have been claimed and lost since, and then a later token tells of it."""
        again = [token.standing.job.id for token in tokens if token.again]
        if not again:
            return tokens
        seen = await self._stream.read(again)
        return [
            token
            for token in tokens
            if not token.again or _still_counts(token, seen.get(token.standing.job.id)) is not None
        ]

    async def put_back(self, tokens: Sequence[Token]) -> None:
        """Make tokens that were delivered here ready again, for whoever asks next."""

        def write(token: Token) -> list[Step]:
            # Exactly as it was delivered: nobody claimed, changed or forgot the job since.
            standing = token.standing
            check = Check(self._layout.anywhere(standing.job.id), standing.seq)
            return [Step(standing.subject, check.headers, msgspec.json.encode(standing.job))]

        # One that is refused takes its whole batch with it, so the others are written again. Only
        # what was written is spent: any other token may be the last copy of its job.
        carried = await self._move(
            {token.standing.job.id: token for token in tokens}, write, _still_counts
        )
        self._stream.ack([token for token in tokens if token.standing.job.id in carried])

    # --- Extend and settle: for the holder alone

    async def extend(self, jobs: Sequence[Job], *, now_ms: int, lease_ms: int) -> dict[str, Job]:
        """Move the leases of the jobs that are still ours; the others are left out."""

        started = {job.id: job.started_ms for job in jobs}

        def extended(job: Job) -> Job:
            return _replace(job, lease_until_ms=now_ms + lease_ms, started_ms=started[job.id])

        def write(standing: Standing) -> list[Step]:
            step = self._layout.step_from(standing, extended(standing.job), now_ms=self._now_ms())
            return [step]

        def look(job: Job, seen: Standing | None) -> Standing | None:
            return seen if _holds(job, seen, now_ms) else None

        plans = await self._in_hand({job.id: job for job in jobs}, now_ms, look)
        carried = await self._move(plans, write, lambda plan, seen: look(plan.job, seen))
        if len(self._leases) > REMEMBERED:
            self._leases.clear()
        for id, (standing, seq) in carried.items():
            job = extended(standing.job)
            [step] = write(standing)
            self._leases[id] = Standing(job, step.subject, seq, step.subject.rsplit(".", 3)[1])
        return {id: self._leases[id].job for id in carried}

    async def settle(self, settlements: Sequence[Settlement], *, now_ms: int) -> set[str]:
        """Write how attempts ended; gives the ids of those that were taken, now or before."""
        by_id = {settlement.job.id: settlement for settlement in settlements}
        repeated: set[str] = set()

        def write(standing: Standing) -> list[Step]:
            job = life.settled(standing.job, by_id[standing.job.id])
            step = self._layout.step_from(standing, job, now_ms=self._now_ms())
            if job.result is not None and not self._stream.fits(step):
                # The work is done; that its result can't be kept must not make it run again.
                lost = f"its result of {len(job.result):,} bytes is more than the server takes"
                job = _replace(job, result=None, error=lost)
                step = self._layout.step_from(standing, job, now_ms=self._now_ms())
            return [step]

        def look(job: Job, seen: Standing | None) -> Standing | None:
            if seen is not None and seen.job.settled == job.fence:
                repeated.add(job.id)
                return None
            return seen if _holds(job, seen, now_ms) else None

        held = {id: settlement.job for id, settlement in by_id.items()}
        plans = await self._in_hand(held, now_ms, look)
        carried = await self._move(plans, write, lambda plan, seen: look(plan.job, seen))
        for id in by_id:
            self._leases.pop(id, None)
        return repeated | set(carried)

    async def _in_hand(
        self,
        jobs: dict[str, Job],
        now_ms: int,
        look: Callable[[Job, Standing | None], Standing | None],
    ) -> dict[str, Standing]:
        """Where jobs in hand stand, as far as that is known here; those that we lost are left out.

        A lease that seems to be over may have been extended through another handle, so it is
        looked up before it is given up.
        """
        plans: dict[str, Standing] = {}
        for id, job in jobs.items():
            known = self._leases.get(id)
            same = known is not None and known.job.fence == job.fence
            plans[id] = known if known is not None and same else self._layout.lease(job)
        over = [id for id, plan in plans.items() if not life.held(plan.job, now_ms=now_ms)]
        seen = await self._stream.read(over) if over else {}
        found = {id: look(jobs[id], seen.get(id)) for id in over}
        merged = {**plans, **found}
        return {id: plan for id, plan in merged.items() if plan is not None}

    # --- The operator's steps

    async def cancel(
        self, ids: Iterable[str], *, now_ms: int
    ) -> tuple[dict[str, Cancelled], list[Job]]:
        """Cancel; says of each id what that achieved, and which jobs' holders are to be told."""
        answers: dict[str, Cancelled] = {}
        seen = await self._stream.read(ids)

        def wish(standing: Standing) -> Job:
            """The job as a cancel leaves it."""
            if life.held(standing.job, now_ms=now_ms) and standing.kind:
                return _replace(standing.job, asked=True)
            return life.cancelled(standing.job, now_ms=now_ms)

        def thought(_: Standing | None, found: Standing | None) -> Standing | None:
            if found is None:
                return None
            if found.job.state.ended:
                answers[found.job.id] = Cancelled.TOO_LATE
                return None
            if found.job.asked and wish(found).state is State.RUNNING:
                answers[found.job.id] = Cancelled.ASKED
                asked.append(found.job)
                return None
            return found

        asked: list[Job] = []
        plans = {id: plan for id in seen if (plan := thought(None, seen[id])) is not None}
        carried = await self._move(
            plans,
            lambda standing: [self._layout.step_from(standing, wish(standing), now_ms=now_ms)],
            thought,
        )
        for id, (standing, _) in carried.items():
            after = wish(standing)
            answers[id] = Cancelled.ASKED if after.state is State.RUNNING else Cancelled.CANCELLED
            if after.state is State.RUNNING:
                asked.append(after)
            elif not standing.kind:
                # Spent by the truth above; taken away so that no queue counts it. Where we may not,
                # the next claim does it.
                with contextlib.suppress(Denied):
                    await self._stream.purge(standing.subject, before_seq=standing.seq + 1)
        return answers, asked

    async def rerun(self, ids: Iterable[str], *, now_ms: int) -> set[str]:
        """Put ended jobs back; gives the ids of those that had ended."""
        seen = await self._stream.read(ids)
        carried = await self._move(
            {id: standing for id, standing in seen.items() if standing.job.state.ended},
            lambda standing: self._layout.revive(
                standing, life.rerun(standing.job, now_ms=now_ms), now_ms=self._now_ms()
            ),
            lambda _, found: found if found is not None and found.job.state.ended else None,
        )
        return set(carried)

    async def delete(self, ids: Iterable[str]) -> set[str]:
        """Forget ended jobs; gives the ids of those that had ended."""
        seen = await self._stream.read(ids)
        deleted = set()
        for id, standing in seen.items():
            if not standing.job.state.ended:
                continue
            # Only what we saw: a job that was put back meanwhile is a later message. By literal
            # subjects, or the server's counts would not follow. A token that a schedule wrote at
            # the last moment must not outlive the job: it goes before it, and once more after it.
            token = self._layout.token_of(standing.job)
            await self._stream.purge(token, before_seq=standing.seq + 1)
            # While the job stands, its id is taken: up to here no token can be that of a new one.
            last: int = (await self._stream.info())["state"]["last_seq"]
            if await self._stream.purge(standing.subject, before_seq=standing.seq + 1):
                deleted.add(id)
                await self._stream.purge(token, before_seq=last + 1)
        return deleted

    async def prune(self, state: State, *, before_ms: int, limit: int) -> int:
        """Forget up to `limit` jobs that ended in this state before a moment, the oldest first."""
        if not state.ended:
            return 0
        subject = self._layout.of_kind(steps.ENDED[state], None)
        pruned = 0
        while pruned < limit:
            wanted = min(limit - pruned, BATCH)
            messages, more = await self._stream.page(subject, from_seq=1, limit=wanted)
            old: list[Standing] = []
            for message in messages:
                standing = steps.standing(*message)
                if standing.job.ended_ms is None or standing.job.ended_ms >= before_ms:
                    break
                old.append(standing)
            if not old:
                break
            await self._spend_tokens(old)
            pruned += await self._stream.purge(subject, before_seq=old[-1].seq + 1)
            if len(old) < len(messages) or not more:
                break
        return pruned

    async def _spend_tokens(self, ended: Sequence[Standing]) -> None:
        """A token that outlived its job would run it again once nothing else stands for it. A later
        one is that of a job that was put back."""
        by_token = {self._layout.token_of(each.job): each.seq for each in ended}
        for subject, seq, _ in await self._stream.last_of(list(by_token)):
            if seq < by_token[subject]:
                await self._stream.purge(subject, before_seq=seq + 1)

    # --- Schedules

    def _schedule(self, name: str) -> str:
        return f"{self._layout.prefix}.k.{steps.token(name)}"

    async def put_schedule(self, schedule: Schedule) -> Schedule:
        body = msgspec.json.encode(_replace(schedule, fence=0))
        seq = await self._stream.store([Step(self._schedule(schedule.name), "", body)])
        assert seq is not None
        return _replace(schedule, fence=seq)

    async def delete_schedule(self, name: str) -> bool:
        return bool(await self._stream.purge(self._schedule(name)))

    async def schedules(self) -> list[Schedule]:
        found = await self._stream.all_of(f"{self._layout.prefix}.k.*")
        return [_replace(_as_schedule(body), fence=seq) for _, seq, body in found]

    async def fire(self, schedule: Schedule, jobs: Sequence[Job], *, next_ms: int | None) -> bool:
        if schedule.fence == 0:
            return False  # it was never read from here
        subject = self._schedule(schedule.name)
        last_id = jobs[-1].id if jobs else schedule.last_id
        after = _replace(schedule, fence=0, next_ms=next_ms, last_id=last_id)
        check = Check(subject, schedule.fence)
        move = Step(subject, check.headers, msgspec.json.encode(after))
        new: dict[str, Job] = {}
        for job in jobs:
            new.setdefault(job.id, job)
        for _ in range(TRIES):
            adds = [self._new(job) for job in new.values()]
            if len(adds) >= BATCH or sum(len(each.body) for each in adds) > BATCH_BYTES:
                # More than one step can hold: the first go ahead of it, if the tick is still open.
                if not await self._unmoved(subject, schedule.fence):
                    return False
                half = list(new.values())[: len(new) // 2]
                await self.add(half)
                new = {id: job for id, job in new.items() if job not in half}
                continue
            if await self._stream.store([move, *adds]) is not None:
                return True
            if not await self._unmoved(subject, schedule.fence):
                return False
            taken = await self._stream.read(new)
            new = {id: job for id, job in new.items() if id not in taken}
        raise StoreUnavailable("others kept changing the same jobs")

    async def _unmoved(self, subject: str, seq: int) -> bool:
        return any(found == seq for _, found, _ in await self._stream.last_of([subject]))

    # --- Looking

    async def get(self, ids: Iterable[str]) -> dict[str, Job]:
        return {id: standing.job for id, standing in (await self._stream.read(ids)).items()}

    async def true_tokens(self, found: Iterable[Standing]) -> list[Standing]:
        """Of these, the ones that still stand where they were seen: tokens are only hints."""
        listed = list(found)
        tokens = [each.job.id for each in listed if not each.kind]
        truth = await self._stream.read(tokens) if tokens else {}
        return [
            each
            for each in listed
            if each.kind or ((now := truth.get(each.job.id)) is not None and not now.kind)
        ]

    async def gathered(self, *subjects: str) -> list[Standing]:
        """Everything under some subjects: for few."""
        return [
            steps.standing(*message)
            for subject in subjects
            for message in await self._stream.all_of(subject)
        ]


_as_schedule = msgspec.json.Decoder(Schedule).decode


def _still_counts(token: Token, seen: Standing | None) -> Token | None:
    """A token, if what stands now for its job says that it counts."""
    if seen is None:
        return None
    if not seen.kind:
        return token if seen.seq == token.standing.seq else None
    # The server writes the token first and drops the schedule it came from a moment later.
    going = seen.subject == token.scheduler and seen.seq < token.standing.seq
    return token if going else None


def _holds(job: Job, seen: Standing | None, now_ms: int) -> bool:
    """Whether what stands now is the same claim, with its lease still running."""
    return (
        seen is not None
        and bool(seen.kind)
        and seen.job.fence == job.fence
        and life.held(seen.job, now_ms=now_ms)
    )


def _chunked(plans: dict[str, P], write: Callable[[P], list[Step]]) -> Iterator[Chunk[P]]:
    """Plans in batches that the server takes."""
    chunk: Chunk[P] = []
    count = size = 0
    for id, plan in plans.items():
        group = write(plan)
        weight = sum([len(step.body) for step in group])
        if chunk and (count + len(group) > BATCH or size + weight > BATCH_BYTES):
            yield chunk
            chunk, count, size = [], 0, 0
        chunk.append((id, plan, group))
        count += len(group)
        size += weight
    if chunk:
        yield chunk
