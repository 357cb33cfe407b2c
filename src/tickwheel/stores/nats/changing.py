"""Changes that others ask for: jobs are replaced and moved, by compare-and-set.

A ready message that is on its way to a worker has the job as it was. So a job that was ready, or
was about to be, stands under `t` for a moment after it was changed: longer than such a message is
taken at its word (`HOLD_MS`, and `doubts` in `stream`). Should one be claimed all the same, the
later version becomes what follows it: see `overtaken`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from tickwheel import changes, job as life
from tickwheel.changes import Put
from tickwheel.errors import UsageError
from tickwheel.job import Job, Move, State
from tickwheel.stores.nats import steps
from tickwheel.stores.nats.fitting import Fitter
from tickwheel.stores.nats.jobs import Jobs
from tickwheel.stores.nats.room import Room
from tickwheel.stores.nats.steps import HOLD_MS, Layout, ReadyMessage, Standing, Step
from tickwheel.stores.nats.stream import Stream
from tickwheel.stores.nats.wire import Denied

T = TypeVar("T")
# What becomes of a job, and what to answer; given whether a worker holds it.
Decide = Callable[[Job | None, str, bool], tuple[T, Job | None]]

_replace = msgspec.structs.replace


class _Plan(msgspec.Struct, frozen=True, gc=False):
    """A job to write, where it was read, and the messages that do it."""

    standing: Standing | None
    after: Job
    group: list[Step]


class Changing:
    """Changes of one stream's jobs."""

    def __init__(
        self, stream: Stream, layout: Layout, room: Room, jobs: Jobs, now_ms: Callable[[], int]
    ) -> None:
        self._stream = stream
        self._layout = layout
        self._room = room
        self._jobs = jobs
        self._now_ms = now_ms
        self._fitter = Fitter(stream)

    async def ask(
        self, asks: Sequence[Put | Move], *, now_ms: int
    ) -> tuple[dict[str, list[Any]], list[Job]]:
        """Put or move; returns the answers by id, and the jobs whose holders must be told."""
        asked = changes.by_id(asks)

        def decide(job: Job | None, id: str, held: bool) -> tuple[list[Any], Job | None]:
            return asked[id].of(job, now_ms=now_ms, held_now=held)

        return await self._change(list(asked), decide, now_ms)

    async def overtaken(self, messages: Iterable[ReadyMessage], *, now_ms: int) -> None:
        """Let the jobs of these ready messages follow earlier versions of them, which were claimed
        although they had been replaced."""
        later = {each.standing.job.id: each.standing.job for each in messages}

        def decide(job: Job | None, id: str, held: bool) -> tuple[None, Job | None]:
            new = later[id]
            if job is None or steps.version(job) >= steps.version(new):
                return None, job
            assert new.changes is not None
            if held:
                pending = _replace(new.changes, next=life.added(_replace(new, changes=None)))
                return None, _replace(job, changes=pending)
            waiting = life.lost(job) if job.state is State.RUNNING else job
            return None, life.renewed(waiting, new, new.changes)

        await self._change(list(later), decide, now_ms)

    async def _change(
        self, ids: Sequence[str], decide: Decide[T], now_ms: int
    ) -> tuple[dict[str, T], list[Job]]:
        answers: dict[str, T] = {}

        def plan(id: str, seen: Standing | None) -> _Plan | None:
            before = None if seen is None else seen.job
            # If there is only a ready message, the lease has run out by the server's clock.
            held = before is not None and life.held(before, now_ms=now_ms)
            held = held and seen is not None and bool(seen.kind)
            answers[id], after = decide(before, id, held)
            if after is None or after is before:
                return None
            return _Plan(seen, after, self._write(seen, after))

        seen = await self._jobs.read(ids)
        plans = {id: made for id in ids if (made := plan(id, seen.get(id))) is not None}
        for queue, priority in {place for each in plans.values() for place in _places(each.after)}:
            await self._stream.ensure_source(queue, str(priority))
        if plans:
            await self._room.admit([each.group[-1] for each in plans.values()])
        applied = await self._jobs.apply(
            plans, lambda each: each.group, lambda each, found: plan(each.after.id, found)
        )
        for done, _ in applied.values():
            await self._purge_ready(done)
        return answers, [each.after for each, _ in applied.values() if each.after.told]

    def _write(self, standing: Standing | None, after: Job) -> list[Step]:
        """The messages that store the job. Raises UsageError if it is too large."""
        now_ms, layout = self._now_ms(), self._layout
        if standing is None:
            return self._jobs.new([after])
        if standing.job.state.ended and standing.kind:

            def both(job: Job) -> list[Step]:
                return layout.revive(standing, job, now_ms=now_ms)

            return [
                self._fitted(after, lambda job: both(job)[0]),
                self._fitted(after, lambda job: both(job)[1]),
            ]
        hold_ms = HOLD_MS if self._may_be_ready(standing, now_ms) else 0

        def step_of(job: Job) -> Step:
            return layout.step_from(standing, job, now_ms=now_ms, hold_ms=hold_ms, changed=True)

        return [self._fitted(after, step_of)]

    def _may_be_ready(self, standing: Standing, now_ms: int) -> bool:
        """Whether a ready message of the job may be on its way to a worker, or about to be."""
        if not standing.kind:
            return True
        if standing.kind == steps.PARKED:
            return False
        at_ms = standing.job.lease_until_ms or self._layout.start_ms(standing.job)
        return at_ms - now_ms < HOLD_MS

    def _fitted(self, job: Job, step_of: Callable[[Job], Step]) -> Step:
        found = self._fitter.fit(job, step_of)
        if found is None:
            raise UsageError(
                f"job {job.id!r} would have {len(step_of(job).body):,} bytes, with what follows it "
                f"while it runs: this NATS server accepts messages of {self._stream.largest:,} "
                "(max_payload); raise that, or store less"
            )
        return found[1]

    async def _purge_ready(self, done: _Plan) -> None:
        """A ready message that no longer counts is not to be delivered any more. If we may not
        purge it, the next claim refuses it."""
        standing = done.standing
        if standing is not None and not standing.kind:
            with contextlib.suppress(Denied):
                await self._stream.purge(standing.subject, before_seq=standing.seq + 1)


def _places(job: Job) -> set[tuple[str, int]]:
    """The queues and priorities in which the job may become ready."""
    places = {(job.queue, job.priority)}
    if job.changes is not None and job.changes.next is not None:
        places.add((job.changes.next.queue, job.changes.next.priority))
    if job.changes is not None and job.changes.move is not None:
        there = life.moved(job, job.changes.move, None)
        places.add((there.queue, there.priority))
    return places
