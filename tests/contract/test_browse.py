"""get, find, queues, pause, beat and workers: looking and operating."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from stores import ODD_NAMES, Harness
from tickwheel.errors import BadArguments
from tickwheel.job import ENDED, Job, Outcome, State
from tickwheel.store import Query, QueueInfo, WorkerCounts, WorkerInfo
from tickwheel.stores.memory import MemoryStore
from tickwheel.stores.nats.store import NatsStore
from tickwheel.trust import unsealed

# --- Get


async def test_get_answers_in_the_order_of_the_question(h: Harness) -> None:
    await h.add(*(h.job(id) for id in "abc"))
    found = await h.store.get(["c", "no such", "a", "c"])
    assert [job and job.id for job in found] == ["c", None, "a", "c"]


async def test_getting_nothing_answers_nothing(h: Harness) -> None:
    assert await h.store.get([]) == []


async def test_a_thousand_jobs_are_got_at_once(h: Harness) -> None:
    jobs = h.jobs(1000)
    await h.add(*jobs)
    ids = [job.id for job in reversed(jobs)]
    assert [job and job.id for job in await h.store.get(ids)] == ids


# --- Find


async def pages(h: Harness, query: Query, *, limit: int) -> list[list[Job]]:
    """All pages of a still store."""
    found, cursor = [], None
    for _ in range(10_000):
        page = await h.store.find(query, cursor=cursor, limit=limit)
        found.append(page.jobs)
        cursor = page.cursor
        if cursor is None:
            return found
    raise AssertionError("the pages have no end")


async def found_by(h: Harness, limit: int = 100, **query: str) -> list[str]:
    wanted = msgspec.convert(query, Query)
    return [job.id for page in await pages(h, wanted, limit=limit) for job in page]


async def one_of_each(h: Harness, queue: str = "default", task: str = "task") -> set[str]:
    """A job in every state, in this queue and of this task, and a second one that waits."""
    names = {state: f"{state} {queue} {task}" for state in State}
    for state in (State.DONE, State.DEAD, State.RUNNING):
        await h.add(h.job(names[state], queue=queue, task=task))
        held = await h.claim_one(queues=[queue])
        if state is not State.RUNNING:
            await h.settle(h.settlement(Outcome(state.value), held))
    later = f"later {queue} {task}"
    await h.add(
        h.job(names[State.CANCELLED], queue=queue, task=task),
        h.job(names[State.WAITING], queue=queue, task=task),
        h.job(later, queue=queue, task=task, delay_ms=3_600_000),
    )
    await h.store.cancel([names[State.CANCELLED]], now_ms=h.now)
    return {*names.values(), later}


async def a_bit_of_everything(h: Harness) -> list[Job]:
    ids: set[str] = set()
    for queue in ("a", "b"):
        for task in ("x", "y"):
            # Only one job may be claimable at a time, so that each gets the state of its name.
            ids |= await one_of_each(h, queue, task)
            await h.store.cancel([f"waiting {queue} {task}"], now_ms=h.now)
            await h.store.rerun([f"waiting {queue} {task}"], now_ms=h.now + 3_600_000)
    jobs = [job for job in await h.store.get(sorted(ids)) if job]
    assert len(jobs) == len(ids) == 24
    return jobs


@pytest.mark.parametrize("limit", [1, 2, 5, 24, 100])
async def test_pages_show_every_job_exactly_once(h: Harness, limit: int) -> None:
    jobs = await a_bit_of_everything(h)
    assert sorted(await found_by(h, limit)) == sorted(job.id for job in jobs)


@pytest.mark.parametrize("limit", [1, 3, 100])
@pytest.mark.parametrize("state", State)
async def test_find_shows_every_job_of_a_state(h: Harness, state: State, limit: int) -> None:
    jobs = await a_bit_of_everything(h)
    expected = [job.id for job in jobs if job.state is state]
    assert sorted(await found_by(h, limit, state=state)) == sorted(expected)


@pytest.mark.parametrize("limit", [1, 5, 100])
async def test_find_shows_every_job_of_a_queue(h: Harness, limit: int) -> None:
    jobs = await a_bit_of_everything(h)
    expected = [job.id for job in jobs if job.queue == "b"]
    assert sorted(await found_by(h, limit, queue="b")) == sorted(expected)


@pytest.mark.parametrize("limit", [1, 5, 100])
async def test_find_shows_every_job_of_a_task(h: Harness, limit: int) -> None:
    jobs = await a_bit_of_everything(h)
    expected = [job.id for job in jobs if job.task == "y"]
    assert sorted(await found_by(h, limit, task="y")) == sorted(expected)


@pytest.mark.parametrize("state", State)
async def test_find_takes_state_queue_and_task_together(h: Harness, state: State) -> None:
    jobs = await a_bit_of_everything(h)
    for queue in ("a", "b"):
        for task in ("x", "y"):
            expected = [
                job.id for job in jobs if (job.state, job.queue, job.task) == (state, queue, task)
            ]
            found = await found_by(h, 1, state=state, queue=queue, task=task)
            assert sorted(found) == sorted(expected)


async def test_find_shows_each_job_as_get_does(h: Harness) -> None:
    jobs = await a_bit_of_everything(h)
    found = [job for page in await pages(h, Query(), limit=7) for job in page]
    assert {job.id: job for job in found} == {job.id: job for job in jobs}


async def test_a_page_holds_no_more_than_its_limit(h: Harness) -> None:
    await a_bit_of_everything(h)
    for query in (Query(), Query(state=State.DONE), Query(queue="a"), Query(task="x")):
        assert all(len(page) <= 3 for page in await pages(h, query, limit=3))


NO_CURSORS = [
    *("", "x", "[]", "1:a", "0:1", "after", "\0", "{}", "null", '"waiting"', "[1,2,3,4,5]"),
    '["waiting",{},[],null,1]',
    '["waiting","default","x",2,3]',
    '["waiting","default",1,2,99999999999999999999999999]',
    '["waiting","default",1,2,1.5]',
    '["waiting","default",1,2]',
    '["waiting","a\\u0000b",1,2,3]',
    '["nowhere","default",1,2,3]',
    '["w:3:default","nan","a"]',
    '["w:3:default","1","a","b"]',
    '["q:3:default","1","a"]',
    "0:0.99999999999999999999",
    "[" * 100_000,
    '["' + "x" * 100_000,
    "0" + "-0" * 100_000 + ":",
]


@pytest.mark.parametrize("cursor", NO_CURSORS, ids=lambda cursor: ascii(cursor[:40]))
async def test_a_cursor_that_no_page_gave_is_refused(h: Harness, cursor: str) -> None:
    await h.add(h.job("a"))
    with pytest.raises(
        BadArguments, match="is not a cursor of this query; use the one that the previous page"
    ) as refused:
        await h.store.find(Query(), cursor=cursor)
    assert len(str(refused.value)) < 1000


async def test_a_cursor_is_not_for_another_state_or_queue(h: Harness) -> None:
    await h.add(*(h.job(id, queue="one") for id in "abc"))
    page = await h.store.find(Query(state=State.WAITING, queue="one"), limit=1)
    for other in (
        Query(state=State.DONE, queue="one"),
        Query(state=State.WAITING, queue="two"),
        Query(state=State.RUNNING),
    ):
        if isinstance(unsealed(h.store), MemoryStore | NatsStore):
            # Their cursors don't tell the query.
            assert (await h.store.find(other, cursor=page.cursor)).jobs == []
            continue
        with pytest.raises(BadArguments, match="is not a cursor of this query"):
            await h.store.find(other, cursor=page.cursor)
    for same in (Query(), Query(queue="one"), Query(state=State.WAITING)):
        rest = await h.store.find(same, cursor=page.cursor)
        assert len(page.jobs) + len(rest.jobs) == 3


async def test_find_in_an_empty_store_finds_nothing(h: Harness) -> None:
    page = await h.store.find(Query())
    assert (page.jobs, page.cursor) == ([], None)


async def test_find_finds_nothing_of_unknown_queues_and_tasks(h: Harness) -> None:
    await h.add(h.job())
    assert await found_by(h, queue="no such") == []
    assert await found_by(h, task="no such") == []
    assert await found_by(h, state="done") == []


async def test_forgotten_jobs_are_not_found(h: Harness) -> None:
    for state in ENDED:
        await h.ended(state, state)
    await h.store.delete([State.DEAD])
    assert sorted(await found_by(h)) == ["cancelled", "done"]
    assert await found_by(h, state="dead") == []


async def test_a_job_is_found_where_it_stands_now(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await h.settle(h.settlement(Outcome.DEAD, held))
    assert await found_by(h, state="running") == []
    assert await found_by(h, state="dead") == ["job"]
    await h.store.rerun(["job"], now_ms=h.now)
    assert await found_by(h, state="dead") == []
    assert await found_by(h, state="waiting") == ["job"]


async def test_find_tells_odd_queue_and_task_names_apart(h: Harness) -> None:
    await h.add(*(h.job(f"of {name}", queue=name, task=name) for name in ODD_NAMES))
    for name in ODD_NAMES:
        assert await found_by(h, queue=name) == [f"of {name}"]
        assert await found_by(h, task=name) == [f"of {name}"]


@pytest.mark.parametrize("limit", [7, 100])
async def test_jobs_that_share_a_moment_are_paged_once_each(h: Harness, limit: int) -> None:
    """A cursor that remembers only a time would skip or repeat some of them."""
    waiting = h.jobs(150, delay_ms=3_600_000)
    await h.add(*waiting)
    cancelled = [job.id for job in waiting[::3]]
    await h.store.cancel(cancelled, now_ms=h.now)
    assert Counter(await found_by(h, limit)) == Counter(job.id for job in waiting)
    assert Counter(await found_by(h, limit, state="cancelled")) == Counter(cancelled)
    assert len(await found_by(h, limit, state="waiting")) == 100


async def test_a_rare_task_is_found_among_many(h: Harness) -> None:
    """Pages may come up empty on the way, as long as they say where to go on."""
    common = [h.job(f"{n}", task="common", delay_ms=3_600_000 + n) for n in range(2500)]
    rare = [h.job(f"rare {n}", task="rare", delay_ms=3_600_000 + n * 1000) for n in range(3)]
    await h.add(*common[:1000])
    await h.add(*rare, *common[1000:1900])
    await h.add(*common[1900:])
    assert sorted(await found_by(h, 2, task="rare")) == ["rare 0", "rare 1", "rare 2"]


async def test_paging_goes_on_although_jobs_come_and_go(h: Harness) -> None:
    jobs = h.jobs(20, delay_ms=3_600_000)
    await h.add(*jobs)
    page = await h.store.find(Query(state=State.WAITING), limit=5)
    assert page.cursor is not None
    seen = [job.id for job in page.jobs]
    # The job that the cursor may point at is gone when the next page is asked for.
    await h.store.cancel(seen, now_ms=h.now)
    await h.store.delete(seen)
    cursor: str | None = page.cursor
    while cursor is not None:
        page = await h.store.find(Query(state=State.WAITING), cursor=cursor, limit=5)
        seen += [job.id for job in page.jobs]
        cursor = page.cursor
    assert sorted(seen) == [job.id for job in jobs]


# --- Queues and pause


async def test_an_empty_store_has_no_queues(h: Harness) -> None:
    assert await h.queues() == []


async def test_queues_come_by_name(h: Harness) -> None:
    names = ["b", "a", "B", "ä", "a b", "10", "9"]
    await h.add(*(h.job(f"in {name}", queue=name) for name in names))
    await h.store.pause("aa", True)
    found = [info.name for info in await h.queues()]
    assert found == sorted([*names, "aa"])


async def test_counts_are_exact_after_every_step(h: Harness) -> None:
    async def count(**expected: int) -> None:
        assert await h.counts() == expected

    ids = [job.id for job in h.jobs(6)]
    await h.add(*h.jobs(6))
    await count(waiting=6)
    held = await h.claim(4)
    await count(waiting=2, running=4)
    assert all(await h.store.extend(held, now_ms=h.now, lease_ms=h.lease_ms))
    await count(waiting=2, running=4)
    await h.settle(h.done(held[0]))
    await count(waiting=2, running=3, done=1)
    await h.settle(h.settlement(Outcome.DEAD, held[1]))
    await count(waiting=2, running=2, done=1, dead=1)
    await h.settle(h.retry(held[2], delay_ms=3_600_000))
    await count(waiting=3, running=1, done=1, dead=1)
    await h.store.cancel([held[2].id], now_ms=h.now)
    await count(waiting=2, running=1, done=1, dead=1, cancelled=1)
    await h.store.cancel([held[3].id], now_ms=h.now)
    await count(waiting=2, running=1, done=1, dead=1, cancelled=1)
    await h.lose_leases()
    last = await h.claim(worker="bob")
    await count(running=2, done=1, dead=1, cancelled=2)
    await h.lose_leases()
    await h.claim(worker="cy")
    await count(running=2, done=1, dead=1, cancelled=2)
    assert not await h.settle(h.done(last[0]))
    await count(running=2, done=1, dead=1, cancelled=2)
    await h.store.rerun([held[1].id], now_ms=h.now)
    await count(waiting=1, running=2, done=1, cancelled=2)
    await h.store.delete([held[0].id])
    await count(waiting=1, running=2, cancelled=2)
    assert await h.store.add(h.jobs(6)) == [id == held[0].id for id in ids]
    await count(waiting=2, running=2, cancelled=2)
    await h.pass_time(h.step_ms)
    assert await h.store.prune([State.CANCELLED], before_ms=h.now, limit=10) == 2
    await count(waiting=2, running=2)


async def test_each_queue_counts_its_own_jobs(h: Harness) -> None:
    await h.add(h.job("1", queue="a"), h.job("2", queue="b"), h.job("3", queue="b"))
    await h.claim(1, queues=["b"])
    assert await h.queues() == [
        QueueInfo(name="a", waiting=1),
        QueueInfo(name="b", waiting=1, running=1),
    ]


async def test_a_queue_that_holds_no_job_any_more_is_gone(h: Harness) -> None:
    await h.ended(State.DONE)
    await h.add(h.job("other", queue="other"))
    await h.store.delete(["job"])
    assert [info.name for info in await h.queues()] == ["other"]


async def test_a_paused_queue_is_shown_as_paused(h: Harness) -> None:
    await h.add(h.job())
    await h.store.pause("default", True)
    assert await h.queues() == [QueueInfo(name="default", paused=True, waiting=1)]
    await h.store.pause("default", False)
    assert await h.queues() == [QueueInfo(name="default", waiting=1)]


async def test_a_queue_can_be_paused_before_it_has_jobs(h: Harness) -> None:
    await h.store.pause("default", True)
    assert await h.queues() == [QueueInfo(name="default", paused=True)]
    await h.add(h.job())
    assert await h.claim() == []
    await h.store.pause("default", False)
    await h.pass_time(h.step_ms)
    assert await h.claim_ids() == ["job"]


async def test_a_queue_that_goes_on_without_jobs_is_gone(h: Harness) -> None:
    await h.store.pause("default", True)
    await h.store.pause("default", False)
    assert await h.queues() == []


async def test_repeating_a_pause_changes_nothing_more(h: Harness) -> None:
    await h.add(h.job())
    await h.store.pause("default", True)
    await h.store.pause("default", True)
    await h.store.pause("default", False)
    await h.store.pause("default", False)
    await h.pass_time(h.step_ms)
    assert await h.claim_ids() == ["job"]


async def test_queues_with_odd_names_can_be_paused(h: Harness) -> None:
    for name in ODD_NAMES[::2]:
        await h.store.pause(name, True)
    assert {info.name for info in await h.queues() if info.paused} == set(ODD_NAMES[::2])


# --- Workers


def worker(h: Harness, name: str = "ann", *, gone_after_ms: int | None = None) -> WorkerInfo:
    return WorkerInfo(
        name=name,
        host="host",
        pid=42,
        version="1.2.3",
        queues=("default", "mail"),
        concurrency=10,
        started_ms=h.now,
        seen_ms=h.now,
        gone_after_ms=h.lease_ms if gone_after_ms is None else gone_after_ms,
        held=3,
        running=2,
        offset_ms=-1.5,
        schedules=("daily", "hourly"),
    )


async def test_a_worker_is_shown_as_it_described_itself(h: Harness) -> None:
    assert await h.store.workers(now_ms=h.now) == []
    ann = worker(h)
    await h.store.beat(ann)
    assert await h.store.workers(now_ms=h.now) == [ann]


async def test_a_worker_is_shown_as_it_was_last_seen(h: Harness) -> None:
    await h.store.beat(worker(h))
    await h.pass_time(h.step_ms)
    again = msgspec.structs.replace(worker(h), running=7)
    await h.store.beat(again)
    assert await h.store.workers(now_ms=h.now) == [again]


async def test_workers_come_by_name(h: Harness) -> None:
    names = ["b", "a", "B", "ä", "a b", "10", "9"]
    for name in names:
        await h.store.beat(worker(h, name))
    assert [each.name for each in await h.store.workers(now_ms=h.now)] == sorted(names)


async def test_a_worker_that_was_not_seen_for_long_is_gone(h: Harness) -> None:
    await h.store.beat(worker(h, "ann"))
    await h.pass_time(h.lease_ms // 2)
    await h.store.beat(worker(h, "bob"))
    await h.pass_time(h.lease_ms // 2 + h.step_ms)
    assert [each.name for each in await h.store.workers(now_ms=h.now)] == ["bob"]


async def test_a_worker_is_shown_with_its_counts(h: Harness) -> None:
    counts = WorkerCounts(
        source="a1-1", since_ms=h.now, started=7, done=5, late=(3, 0, 4), tasks={"send": (5, 1, 0)}
    )
    await h.store.beat(msgspec.structs.replace(worker(h), counts=counts))
    [found] = await h.store.workers(now_ms=h.now)
    assert found.counts == counts
    await h.store.beat(worker(h))
    assert [each.counts for each in await h.store.workers(now_ms=h.now)] == [None]


async def test_a_worker_that_beats_again_is_back(h: Harness) -> None:
    await h.store.beat(worker(h))
    await h.lose_leases()
    assert await h.store.workers(now_ms=h.now) == []
    await h.store.beat(worker(h))
    assert len(await h.store.workers(now_ms=h.now)) == 1


async def test_a_worker_can_be_struck_off(h: Harness) -> None:
    await h.store.beat(worker(h, "ann"))
    await h.store.beat(worker(h, "bob"))
    await h.store.beat(worker(h, "ann", gone_after_ms=0))
    assert [each.name for each in await h.store.workers(now_ms=h.now)] == ["bob"]
    await h.store.beat(worker(h, "ann", gone_after_ms=0))
    await h.store.beat(worker(h, "never seen", gone_after_ms=0))
    assert [each.name for each in await h.store.workers(now_ms=h.now)] == ["bob"]


async def test_odd_names_are_workers_of_their_own(h: Harness) -> None:
    for name in ODD_NAMES:
        await h.store.beat(worker(h, name))
    await h.add(*(h.job(f"{n}") for n in range(len(ODD_NAMES))))
    held = [await h.claim(1, worker=name) for name in ODD_NAMES]
    assert [job.worker for [job] in held] == list(ODD_NAMES)
    assert {each.name for each in await h.store.workers(now_ms=h.now)} == set(ODD_NAMES)


# --- Durability


async def test_durability_says_what_is_weak_and_how_to_mend_it(h: Harness) -> None:
    durability = await h.store.durability()
    assert durability.summary
    # What survives the loss of a machine survives the loss of its power, and that a crash.
    assert durability.process_crash >= durability.power_loss >= durability.machine_loss
    assert durability.fixes or (durability.process_crash and durability.power_loss)
