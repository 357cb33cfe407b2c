"""Meta, expiry and progress: they stay with a job through every step, and meta finds it."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from stores import ODD_NAMES, Harness, unfenced
from tickwheel.errors import BadArguments
from tickwheel.job import Job, Outcome, Progress, State
from tickwheel.schedule import Schedule
from tickwheel.store import Query
from tickwheel.stores.nats.store import NatsStore

META = {"customer": "42", "größe": 'a "b" \\ {c}\n', "empty": ""}
EXPIRES_MS = 4_000_000_000_000
HALF = Progress(0.5, 'half of "it" \\ {ü}\n')
OUTCOMES = [outcome for outcome in Outcome if outcome not in (Outcome.LOST, Outcome.OTHER)]


def tagged(h: Harness) -> Job:
    return h.job(meta=META, expires_ms=EXPIRES_MS)


def carries(job: Job | None) -> bool:
    """Whether meta and expiry are as they were added."""
    return job is not None and job.meta == META and job.expires_ms == EXPIRES_MS


async def told(h: Harness, job: Job, progress: Progress | None = HALF) -> Job:
    """The job after its holder told this progress."""
    started = job.started_ms or h.now
    extended = await h.extend(msgspec.structs.replace(job, started_ms=started, progress=progress))
    assert extended is not None
    return extended


# --- Meta and expiry


async def test_they_are_there_after_add(h: Harness) -> None:
    await h.add(tagged(h), h.job("plain"))
    assert carries(await h.get())
    plain = await h.get("plain")
    assert (plain.meta, plain.expires_ms, plain.progress) == (None, None, None)


async def test_they_are_there_if_only_one_of_them_is(h: Harness) -> None:
    await h.add(h.job("meta", meta=META), h.job("expires", expires_ms=EXPIRES_MS))
    assert ((await h.get("meta")).meta, (await h.get("meta")).expires_ms) == (META, None)
    assert ((await h.get("expires")).meta, (await h.get("expires")).expires_ms) == (
        None,
        EXPIRES_MS,
    )


async def test_they_are_there_in_the_job_of_a_tick(h: Harness) -> None:
    schedule = await h.store.put_schedule(Schedule(name="s", rule="{}", next_ms=h.now))
    assert await h.store.fire(schedule, [tagged(h)], next_ms=h.now + 1)
    assert carries(await h.get())
    assert await found(h, "customer", "42") == ["job"]


async def test_they_are_there_after_claim_and_extend(h: Harness) -> None:
    [held] = await h.claimed(tagged(h))
    assert carries(held)
    assert carries(await h.extend(held))
    assert carries(await h.get())


@pytest.mark.parametrize("outcome", OUTCOMES)
async def test_they_are_there_after_settle(h: Harness, outcome: Outcome) -> None:
    [held] = await h.claimed(tagged(h))
    assert await h.settle(h.settlement(outcome, held))
    assert carries(await h.get())


async def test_they_are_there_after_cancel_and_rerun(h: Harness) -> None:
    await h.add(tagged(h))
    await h.store.cancel(["job"], now_ms=h.now)
    assert carries(await h.get())
    await h.store.rerun(["job"], now_ms=h.now)
    # Whoever reruns it wants it to run: it no longer expires.
    for job in (await h.get(), await h.claim_one()):
        assert (job.meta, job.expires_ms) == (META, None)


async def test_they_are_there_after_a_takeover_and_a_cancel_of_a_held_job(h: Harness) -> None:
    await h.claimed(tagged(h))
    await h.lose_leases()
    held = await h.claim_one(worker="bob")
    assert carries(held)
    await h.store.cancel(["job"], now_ms=h.now)
    assert carries(await h.extend(held))
    assert await h.settle(h.retry(held))
    job = await h.get()
    assert (carries(job), job.state) == (True, State.CANCELLED)


async def test_a_job_that_comes_from_another_store_keeps_them(h: Harness) -> None:
    moved = msgspec.structs.replace(
        tagged(h), attempt=3, failures=1, worker="ann", progress=HALF, state=State.CANCELLED
    )
    await h.add(moved, h.job("plain"))
    job = await h.get()
    assert (carries(job), job.progress, job.attempt) == (True, HALF, 3)


# --- Progress


async def test_extend_stores_progress(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    assert held.progress is None
    held = await told(h, held)
    assert held.progress == HALF
    assert unfenced(await h.get()) == unfenced(held)
    held = await told(h, held, Progress(1.0))
    assert (await h.get()).progress == Progress(1.0)
    await told(h, held, None)
    assert (await h.get()).progress is None


async def test_odd_words_of_one_job_are_no_trouble_for_others(h: Harness) -> None:
    """Not every server can store this character."""
    [odd, plain] = await h.claimed(h.job("odd"), h.job("plain"))
    odd = msgspec.structs.replace(odd, progress=Progress(0.5, "a\0b"))
    extended = await h.store.extend([odd, plain], now_ms=h.now, lease_ms=h.lease_ms)
    assert None not in extended
    assert ((await h.get("odd")).progress or Progress(0)).part == 0.5
    held = extended[0] or odd
    assert await h.settle(h.done(held))
    assert ((await h.get("odd")).progress or Progress(0)).part == 0.5


async def test_progress_does_not_need_a_start(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    extended = await h.extend(msgspec.structs.replace(held, progress=HALF))
    assert extended is not None
    job = await h.get()
    assert (job.progress, job.started_ms) == (HALF, None)


async def test_find_shows_progress(h: Harness) -> None:
    [held, _] = await h.claimed(h.job(meta=META), h.job("other"))
    await told(h, held)
    for query in (Query(), Query(state=State.RUNNING), Query(meta=("customer", "42"))):
        jobs = {job.id: job for job in (await h.store.find(query)).jobs}
        assert jobs["job"].progress == HALF
        assert "other" not in jobs or jobs["other"].progress is None


@pytest.mark.parametrize("outcome", OUTCOMES)
async def test_progress_stays_when_a_run_ends(h: Harness, outcome: Outcome) -> None:
    [held] = await h.claimed(h.job())
    assert await h.settle(h.settlement(outcome, await told(h, held)))
    assert (await h.get()).progress == HALF


async def test_the_next_run_begins_without_progress(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    assert await h.settle(h.retry(await told(h, held)))
    assert (await h.claim_one()).progress is None
    assert (await h.get()).progress is None


async def test_a_rerun_keeps_progress_until_it_is_claimed(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    assert await h.settle(h.done(await told(h, held)))
    await h.store.rerun(["job"], now_ms=h.now)
    assert (await h.get()).progress == HALF
    assert (await h.claim_one()).progress is None


async def test_a_takeover_begins_without_progress(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await told(h, held)
    await h.lose_leases()
    taken = await h.claim_one(worker="bob")
    assert taken.progress is None
    assert (await h.get()).progress is None
    assert (await told(h, taken, Progress(0.1))).progress == Progress(0.1)
    assert (await h.get()).progress == Progress(0.1)


async def test_a_lost_job_that_is_cancelled_keeps_progress(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await told(h, held)
    await h.lose_leases()
    await h.store.cancel(["job"], now_ms=h.now)
    job = await h.get()
    assert (job.state, job.progress) == (State.CANCELLED, HALF)
    await h.store.rerun(["job"], now_ms=h.now)
    assert (await h.get()).progress == HALF
    assert (await h.claim_one()).progress is None
    assert (await h.get()).progress is None


async def test_a_job_that_was_asked_to_stop_keeps_progress(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    held = await told(h, held)
    await h.store.cancel(["job"], now_ms=h.now)
    job = await h.get()
    assert (job.progress, job.started_ms) == (HALF, held.started_ms)
    assert await h.settle(h.retry(held))
    assert (await h.get()).progress == HALF


async def test_a_repeated_claim_keeps_progress(h: Harness) -> None:
    await h.add(h.job())
    [held] = await h.claim(call=7)
    await told(h, held)
    [again] = await h.claim(call=7, again=True)
    assert again.progress == HALF
    assert (await h.get()).progress == HALF


async def test_an_id_that_is_used_anew_has_no_progress(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await told(h, held)
    await h.lose_leases()
    await h.store.cancel(["job"], now_ms=h.now)
    assert await h.store.delete(["job"]) == [True]
    [held] = await h.claimed(h.job())
    assert (await h.get()).progress is None


# --- Expiry


async def test_a_job_that_expires_is_cancelled_and_counted_so(h: Harness) -> None:
    [held] = await h.claimed(tagged(h))
    settlement = h.settlement(Outcome.EXPIRE, held)
    assert await h.settle(settlement)
    assert await h.settle(settlement)
    job = await h.get()
    assert (job.state, job.error, job.failures) == (State.CANCELLED, "expired", 0)
    assert job.ended_ms is not None
    assert [run.outcome for run in job.history] == [Outcome.EXPIRE]
    assert await h.counts() == {"cancelled": 1}
    assert await h.claim() == []
    assert [each.id for each in (await h.store.find(Query(state=State.CANCELLED))).jobs] == ["job"]


async def test_an_expired_job_can_be_run_again_deleted_and_pruned(h: Harness) -> None:
    for id in ("again", "deleted", "pruned"):
        [held] = await h.claimed(h.job(id))
        assert await h.settle(h.settlement(Outcome.EXPIRE, held))
    assert await h.store.rerun(["again"], now_ms=h.now) == [True]
    again = await h.claim_one()
    assert (again.id, again.error) == ("again", None)
    assert await h.store.delete(["deleted"]) == [True]
    await h.pass_time(h.step_ms)
    assert await h.store.prune([State.CANCELLED], before_ms=h.now, limit=10) == 1
    assert await h.counts() == {"running": 1}


async def test_a_job_that_was_asked_to_stop_can_expire(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await h.store.cancel(["job"], now_ms=h.now)
    assert await h.settle(h.settlement(Outcome.EXPIRE, held))
    job = await h.get()
    assert (job.state, job.error) == (State.CANCELLED, "expired")
    assert await h.store.asked("ann", now_ms=h.now, until_ms=h.now) == {}


async def test_only_the_holder_can_let_a_job_expire(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await h.lose_leases()
    assert not await h.settle(h.settlement(Outcome.EXPIRE, held))


# --- Find by meta


async def found(h: Harness, name: str, value: str, limit: int = 100, **query: str) -> list[str]:
    wanted = msgspec.convert({**query, "meta": (name, value)}, Query)
    ids: list[str] = []
    cursor: str | None = None
    for _ in range(1000):
        page = await h.store.find(wanted, cursor=cursor, limit=limit)
        assert len(page.jobs) <= limit
        assert all(wanted.has_meta(job) for job in page.jobs)
        ids += [job.id for job in page.jobs]
        cursor = page.cursor
        if cursor is None:
            return ids
    raise AssertionError("the pages have no end")


async def with_meta_in_each_state(h: Harness, queue: str, task: str, customer: str) -> list[Job]:
    meta = {"customer": customer, "batch": "7"}
    ids = {state: f"{state} {queue} {task} {customer}" for state in (*State, "parked")}
    for state in (State.DONE, State.DEAD, "parked", State.RUNNING):
        await h.add(h.job(ids[state], queue=queue, task=task, meta=meta))
        [held] = await h.claim(1, queues=[queue])
        outcome = {State.RUNNING: None, "parked": Outcome.PARK}.get(state, Outcome(state))
        if outcome is not None:
            assert await h.settle(h.settlement(outcome, held))
    await h.add(h.job(ids[State.CANCELLED], queue=queue, task=task, meta=meta))
    await h.store.cancel([ids[State.CANCELLED]], now_ms=h.now)
    # Not due, so that the next claim doesn't take it.
    await h.add(h.job(ids[State.WAITING], queue=queue, task=task, meta=meta, delay_ms=3_600_000))
    return [job for job in await h.store.get(list(ids.values())) if job]


async def everything(h: Harness) -> list[Job]:
    jobs: list[Job] = []
    for queue, task, customer in itertools.product("ab", "xy", ["42", "43"]):
        jobs += await with_meta_in_each_state(h, queue, task, customer)
    assert len(jobs) == 48
    await h.add(h.job("plain", queue="a", task="x", delay_ms=3_600_000))
    return jobs


@pytest.mark.parametrize("limit", [1, 7, 24, 100])
async def test_meta_finds_every_job_once(h: Harness, limit: int) -> None:
    jobs = await everything(h)
    expected = sorted(job.id for job in jobs if job.meta and job.meta["customer"] == "42")
    assert sorted(await found(h, "customer", "42", limit)) == expected
    assert len(await found(h, "batch", "7", limit)) == 48
    assert await found(h, "customer", "44", limit) == []
    assert await found(h, "42", "customer", limit) == []


async def test_meta_goes_with_every_other_filter(h: Harness) -> None:
    jobs = await everything(h)
    for state, queue, task in itertools.product((None, *State), (None, "b"), (None, "y")):
        given = {"state": state, "queue": queue, "task": task}
        query = {name: value for name, value in given.items() if value is not None}
        expected = sorted(
            job.id
            for job in jobs
            if job.meta == {"customer": "43", "batch": "7"}
            and all(getattr(job, name) == value for name, value in query.items())
        )
        for limit in (2, 100):
            assert sorted(await found(h, "customer", "43", limit, **query)) == expected


async def test_meta_tells_odd_names_and_values_apart(h: Harness) -> None:
    names = [name for name in ODD_NAMES if name.isprintable()]
    await h.add(
        *(h.job(f"n {i}", meta={name: "same"}) for i, name in enumerate(names)),
        *(h.job(f"v {i}", meta={"same": value}) for i, value in enumerate(ODD_NAMES)),
    )
    for i, name in enumerate(names):
        assert await found(h, name, "same") == [f"n {i}"]
    for i, value in enumerate(ODD_NAMES):
        assert await found(h, "same", value) == [f"v {i}"]


async def test_meta_finds_no_job_that_is_gone(h: Harness) -> None:
    for id in ("deleted", "pruned", "kept"):
        [held] = await h.claimed(h.job(id, meta=META))
        assert await h.settle(h.settlement(Outcome.DEAD if id == "deleted" else Outcome.DONE, held))
        if id != "kept":
            await h.pass_time(h.step_ms)
    before_ms = (await h.get("kept")).ended_ms or 0
    assert await h.store.delete(["deleted"]) == [True]
    assert await h.store.prune([State.DONE], before_ms=before_ms, limit=10) == 1
    for name, value in META.items():
        assert await found(h, name, value) == ["kept"]
    # Their ids may be used again, with and without.
    await h.add(h.job("deleted"), h.job("pruned", meta={"customer": "43"}))
    assert await found(h, "customer", "42") == ["kept"]
    assert await found(h, "customer", "43") == ["pruned"]


async def test_the_next_job_does_not_inherit_the_meta_of_one_that_is_gone(h: Harness) -> None:
    """A store may use the number of the last job again."""
    await h.add(h.job("gone", meta=META))
    await h.store.cancel(["gone"], now_ms=h.now)
    assert await h.store.delete(["gone"]) == [True]
    await h.add(h.job("plain"))
    assert await found(h, "customer", "42") == []
    await h.add(h.job("tagged", meta=META))
    assert await found(h, "customer", "42") == ["tagged"]


async def test_a_job_that_was_not_added_leaves_no_meta(h: Harness) -> None:
    await h.add(h.job(meta={"customer": "42"}))
    assert await h.store.add([h.job(meta={"customer": "43"}), h.job("new", meta=META)]) == [
        False,
        True,
    ]
    assert await found(h, "customer", "43") == []
    assert sorted(await found(h, "customer", "42")) == ["job", "new"]


async def test_meta_is_found_among_many(h: Harness) -> None:
    """Pages may come up empty on the way, as long as they say where to go on."""
    many = [h.job(f"{n:04}", meta={"batch": "7"}, delay_ms=3_600_000 + n) for n in range(2100)]
    rare = [h.job(f"{n}500 rare", meta=META, queue="rare", delay_ms=3_600_000) for n in range(2)]
    for start in range(0, 2100, 700):
        await h.add(*many[start : start + 700])
    await h.add(*rare)
    assert sorted(await found(h, "customer", "42", 1)) == ["0500 rare", "1500 rare"]
    assert len(await found(h, "batch", "7", 1000)) == 2100
    assert await found(h, "batch", "7", 1000, queue="rare") == []
    if isinstance(h.store, NatsStore):
        # It scans, but not all jobs for one page.
        page = await h.store.find(Query(meta=("no such", "")))
        assert (page.jobs, page.cursor is None) == ([], False)


async def test_pages_by_meta_go_on_although_jobs_come_and_go(h: Harness) -> None:
    jobs = [h.job(f"{n:02}", meta=META, delay_ms=3_600_000) for n in range(20)]
    await h.add(*jobs)
    query = Query(meta=("customer", "42"))
    page = await h.store.find(query, limit=5)
    seen = [job.id for job in page.jobs]
    await h.store.cancel(seen, now_ms=h.now)
    await h.store.delete(seen)
    while page.cursor is not None:
        page = await h.store.find(query, cursor=page.cursor, limit=5)
        seen += [job.id for job in page.jobs]
    assert sorted(seen) == [job.id for job in jobs]


@pytest.mark.parametrize(
    "cursor",
    ["", "x", "[]", '["meta"]', '["meta","x"]', '["meta",1,2]', '["meta",1e400]', '["id",1]',
     '["meta",99999999999999999999]', '["id","a","b"]', '["waiting","default",1,2,3]',
     "[" * 100_000, '["id","' + "x" * 5000],
    ids=lambda cursor: ascii(cursor[:40]),
)  # fmt: skip
async def test_a_cursor_that_no_page_by_meta_gave_is_refused(h: Harness, cursor: str) -> None:
    await h.add(h.job(meta=META))
    with pytest.raises(BadArguments, match="is not a cursor of this query"):
        await h.store.find(Query(meta=("customer", "42")), cursor=cursor)
