"""`tickwheel verify` on every store: what was planted is found, and nothing else."""

from __future__ import annotations

import msgspec

from stores import Harness
from tickwheel.client import Client
from tickwheel.clock import SystemClock
from tickwheel.job import Job, State, done as done_by
from tickwheel.operate.flaws import FlawKind, Span
from tickwheel.operate.verify import Verified, verify_store
from tickwheel.schedule import Rule, Schedule, tick_id

S, DAY = 1_000, 86_400_000


async def verified(
    h: Harness,
    *,
    since_ms: int = DAY,
    until_ms: int | None = None,
    queue: str | None = None,
    task: str | None = None,
) -> Verified:
    until_ms = until_ms or h.now + 1
    span = Span(since_ms=h.now - since_ms, until_ms=until_ms, now_ms=h.now + 1, late_after_ms=500)
    return await verify_store(
        Client(h.store, SystemClock()), span, kept_ms=0, queue=queue, task=task
    )


def found(verified: Verified) -> dict[str, list[str]]:
    return {
        str(kind): sorted(flaw.id for flaw in flaws)
        for kind, flaws in verified.flaws.items()
        if flaws
    }


async def ran(h: Harness, job: Job, *, late_ms: int) -> None:
    """Run a job that starts so long after it was due, by what its worker says."""
    await h.add(job)
    [held] = await h.claim(queues=[job.queue])
    started_ms = job.due_ms + late_ms
    settlement = done_by(held, started_ms=started_ms, ended_ms=max(started_ms, h.now))
    assert await h.settle(settlement)


async def test_each_kind_is_found_and_nothing_else(h: Harness) -> None:
    await ran(h, _as_of_then(h.job("well", delay_ms=-10 * S)), late_ms=20)
    await ran(h, _as_of_then(h.job("late", delay_ms=-10 * S)), late_ms=2 * S)
    await ran(h, _as_of_then(h.job("early", delay_ms=-10 * S)), late_ms=-1)
    await h.add(_as_of_then(h.job("twice", delay_ms=-10 * S)))
    [first] = await h.claim()
    assert await h.extend(msgspec.structs.replace(first, started_ms=first.due_ms + 5))
    await h.lose_leases()
    [second] = await h.claim(worker="bob")
    assert second.attempt == 2
    assert await h.settle(done_by(second, started_ms=h.now, ended_ms=h.now))
    await h.add(_as_of_then(h.job("missed", delay_ms=-10 * S)), h.job("to come", delay_ms=DAY))
    result = await verified(h)
    assert found(result) == {
        "missed": ["missed"],
        "late": ["late"],
        "early": ["early"],
        "doubled": ["twice"],
    }
    [double] = result.flaws[FlawKind.DOUBLED]
    assert "Worker ann" in double.why and double.worker == "bob"
    assert (result.jobs, result.runs) == (5, 5)


async def test_a_tick_without_a_job_is_found(h: Harness) -> None:
    rule = Rule(every_ms=60 * S, task="task")
    last = h.now // (60 * S) * 60 * S - 60 * S
    ticks = [last - n * 60 * S for n in range(5)]
    stored = await h.store.put_schedule(
        Schedule(name="each minute", rule=rule.encode(), next_ms=last + 120 * S)
    )
    assert stored.fence
    for tick_ms in ticks:
        if tick_ms != ticks[2]:
            await ran(h, _tick(h, tick_ms), late_ms=1)
    result = await verified(h, until_ms=last + 1)
    assert found(result) == {"missed": [tick_id("each minute", ticks[2])]}
    assert (result.ticks, result.schedules) == (5, 1)
    assert (await verified(h, task="other")).schedules == 0


async def test_a_queue_and_a_time_narrow_it(h: Harness) -> None:
    await ran(h, _as_of_then(h.job("mail", queue="mail", delay_ms=-10 * S)), late_ms=2 * S)
    await h.add(_as_of_then(h.job("old", delay_ms=-3600 * S)))
    assert found(await verified(h)) == {"late": ["mail"], "missed": ["old"]}
    assert found(await verified(h, queue="mail")) == {"late": ["mail"]}
    assert found(await verified(h, since_ms=60 * S)) == {"late": ["mail"]}


async def test_more_than_a_page_is_read(h: Harness) -> None:
    jobs = [_as_of_then(job) for job in h.jobs(1_050, delay_ms=-10 * S)]
    await h.add(*jobs)
    result = await verified(h)
    assert (result.jobs, result.counts[FlawKind.MISSED]) == (1_050, 1_050)
    assert all(job.state is State.WAITING for job in jobs)


def _as_of_then(job: Job) -> Job:
    """Added when it was due: a due time in the past means now."""
    return msgspec.structs.replace(job, created_ms=job.due_ms)


def _tick(h: Harness, tick_ms: int) -> Job:
    job = h.job(tick_id("each minute", tick_ms))
    return msgspec.structs.replace(job, due_ms=tick_ms, created_ms=tick_ms)
