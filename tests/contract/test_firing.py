"""Schedules: one tick, one job, however many nodes fire it."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from stores import ODD_NAMES, Harness
from tickwheel.job import CancelOutcome, State
from tickwheel.schedule import Schedule

HOUR = 3_600_000
TICK = 1_800_000_000_000


def schedule(name: str = "nightly", *, rule: str = '{"cron": "0 2 * * *"}') -> Schedule:
    return Schedule(name=name, rule=rule, next_ms=TICK)


async def only(h: Harness) -> Schedule:
    [found] = await h.store.schedules()
    return found


# --- Put, look, delete


async def test_a_schedule_is_added(h: Harness) -> None:
    assert await h.store.schedules() == []
    stored = await h.store.put_schedule(schedule())
    assert await h.store.schedules() == [stored]
    assert (stored.name, stored.rule) == ("nightly", '{"cron": "0 2 * * *"}')
    assert (stored.next_ms, stored.paused) == (TICK, False)


async def test_a_schedule_without_a_next_tick_is_kept(h: Harness) -> None:
    await h.store.put_schedule(Schedule(name="ended", rule="{}", next_ms=None, paused=True))
    found = await only(h)
    assert (found.next_ms, found.paused) == (None, True)


async def test_a_schedule_replaces_the_one_of_its_name(h: Harness) -> None:
    first = await h.store.put_schedule(schedule())
    new = Schedule(name="nightly", rule='{"every": 60}', next_ms=TICK + HOUR, paused=True)
    second = await h.store.put_schedule(new)
    found = await only(h)
    assert found == second
    assert (found.rule, found.next_ms, found.paused) == ('{"every": 60}', TICK + HOUR, True)
    assert second.fence != first.fence


async def test_repeating_a_put_leaves_one_schedule(h: Harness) -> None:
    await h.store.put_schedule(schedule())
    stored = await h.store.put_schedule(schedule())
    assert await h.store.schedules() == [stored]


async def test_the_fence_that_a_put_is_given_does_not_matter(h: Harness) -> None:
    stored = await h.store.put_schedule(schedule())
    stale = msgspec.structs.replace(stored, fence=stored.fence + 1000, rule='"new"')
    again = await h.store.put_schedule(stale)
    assert (await only(h)).rule == '"new"'
    assert await h.store.fire(again, [h.job()], next_ms=None)


async def test_schedules_come_by_name(h: Harness) -> None:
    names = ["b", "a", "B", "ä", "a b", "10", "9"]
    for name in names:
        await h.store.put_schedule(schedule(name))
    assert [found.name for found in await h.store.schedules()] == sorted(names)


async def test_odd_names_are_schedules_of_their_own(h: Harness) -> None:
    for name in ODD_NAMES:
        await h.store.put_schedule(schedule(name, rule=f"rule of {name}"))
    found = await h.store.schedules()
    rules = [(each.name, each.rule) for each in found]
    assert rules == [(name, f"rule of {name}") for name in sorted(ODD_NAMES)]
    for each in found:
        assert await h.store.fire(each, [h.job(f"of {each.name}")], next_ms=None)
        assert await h.store.delete_schedule(each.name)


async def test_a_schedule_is_deleted_once(h: Harness) -> None:
    await h.store.put_schedule(schedule())
    await h.store.put_schedule(schedule("other"))
    assert await h.store.delete_schedule("nightly")
    assert not await h.store.delete_schedule("nightly")
    assert (await only(h)).name == "other"


async def test_an_unknown_schedule_cannot_be_deleted(h: Harness) -> None:
    assert not await h.store.delete_schedule("no such")


# --- Replace


def paused(read: Schedule) -> Schedule:
    return msgspec.structs.replace(read, paused=True, rule='"new"', next_ms=None, last_id="last")


async def test_a_schedule_is_replaced_by_whoever_read_it_last(h: Harness) -> None:
    await h.store.put_schedule(schedule())
    read = await only(h)
    assert await h.store.replace_schedule(paused(read))
    found = await only(h)
    assert (found.paused, found.rule, found.next_ms, found.last_id) == (True, '"new"', None, "last")
    assert found.fence != read.fence
    assert not await h.store.replace_schedule(read)
    assert await only(h) == found
    assert not await h.store.fire(read, [h.job()], next_ms=TICK + HOUR)
    assert await h.store.replace_schedule(found)
    assert await h.store.fire(await only(h), [h.job()], next_ms=TICK + HOUR)


async def test_a_schedule_that_was_put_since_is_not_replaced(h: Harness) -> None:
    stored = await h.store.put_schedule(schedule())
    again = await h.store.put_schedule(schedule())
    assert not await h.store.replace_schedule(paused(stored))
    assert await h.store.schedules() == [again]


async def test_a_schedule_that_was_fired_since_is_not_replaced(h: Harness) -> None:
    stored = await h.store.put_schedule(schedule())
    assert await h.store.fire(stored, [h.job("tick")], next_ms=TICK + HOUR)
    assert not await h.store.replace_schedule(paused(stored))
    found = await only(h)
    assert (found.next_ms, found.last_id, found.paused) == (TICK + HOUR, "tick", False)


async def test_a_schedule_that_was_deleted_since_does_not_return(h: Harness) -> None:
    stored = await h.store.put_schedule(schedule())
    assert await h.store.delete_schedule("nightly")
    assert not await h.store.replace_schedule(paused(stored))
    assert not await h.store.replace_schedule(schedule())
    assert await h.store.schedules() == []
    again = await h.store.put_schedule(schedule())
    assert not await h.store.replace_schedule(paused(stored))
    assert await h.store.schedules() == [again]


async def test_of_many_who_replace_a_schedule_at_the_same_time_one_does(h: Harness) -> None:
    stored = await h.store.put_schedule(schedule())
    rules = [f'"{n}"' for n in range(20)]
    replaced = await asyncio.gather(
        *(h.store.replace_schedule(msgspec.structs.replace(stored, rule=rule)) for rule in rules)
    )
    assert sorted(replaced) == [False] * 19 + [True]
    assert (await only(h)).rule == rules[replaced.index(True)]


# --- Fire


async def test_fire_adds_the_jobs_and_moves_the_schedule_on(h: Harness) -> None:
    stored = await h.store.put_schedule(schedule())
    assert await h.store.fire(stored, [h.job("tick")], next_ms=TICK + HOUR)
    found = await only(h)
    assert (found.next_ms, found.rule, found.paused) == (TICK + HOUR, stored.rule, False)
    assert await h.counts() == {"waiting": 1}
    assert await h.claim_ids() == ["tick"]


async def test_fire_takes_the_schedule_as_it_was_read(h: Harness) -> None:
    await h.store.put_schedule(schedule())
    assert await h.store.fire(await only(h), [h.job("1")], next_ms=TICK + HOUR)
    assert await h.store.fire(await only(h), [h.job("2")], next_ms=TICK + 2 * HOUR)
    assert await h.counts() == {"waiting": 2}


async def test_the_last_tick_leaves_the_schedule_without_a_next(h: Harness) -> None:
    stored = await h.store.put_schedule(schedule())
    assert await h.store.fire(stored, [h.job()], next_ms=None)
    assert (await only(h)).next_ms is None


async def test_a_tick_without_jobs_moves_the_schedule_on(h: Harness) -> None:
    stored = await h.store.put_schedule(schedule())
    assert await h.store.fire(stored, [], next_ms=TICK + HOUR)
    assert (await only(h)).next_ms == TICK + HOUR
    assert await h.queues() == []


async def test_repeating_a_fire_changes_nothing_more(h: Harness) -> None:
    stored = await h.store.put_schedule(schedule())
    jobs = [h.job("tick")]
    assert await h.store.fire(stored, jobs, next_ms=TICK + HOUR)
    before = await only(h)
    assert not await h.store.fire(stored, jobs, next_ms=TICK + HOUR)
    assert await only(h) == before
    assert await h.counts() == {"waiting": 1}


async def test_a_schedule_that_was_fired_since_is_not_fired(h: Harness) -> None:
    stored = await h.store.put_schedule(schedule())
    await h.store.fire(stored, [h.job("first")], next_ms=TICK + HOUR)
    assert not await h.store.fire(stored, [h.job("second")], next_ms=TICK + 2 * HOUR)
    assert await h.store.get(["second"]) == [None]
    assert (await only(h)).next_ms == TICK + HOUR


async def test_a_schedule_that_was_fired_to_the_same_tick_is_not_fired(h: Harness) -> None:
    """The next tick may be the same as before; only the fence tells."""
    stored = await h.store.put_schedule(schedule())
    assert await h.store.fire(stored, [h.job("first")], next_ms=stored.next_ms)
    assert not await h.store.fire(stored, [h.job("second")], next_ms=stored.next_ms)
    assert await h.counts() == {"waiting": 1}


async def test_a_schedule_that_was_changed_since_is_not_fired(h: Harness) -> None:
    stored = await h.store.put_schedule(schedule())
    changed = await h.store.put_schedule(schedule(rule='{"every": 5}'))
    assert not await h.store.fire(stored, [h.job()], next_ms=TICK + HOUR)
    assert await h.store.schedules() == [changed]
    assert await h.queues() == []


async def test_a_schedule_that_was_put_again_unchanged_is_not_fired(h: Harness) -> None:
    stored = await h.store.put_schedule(schedule())
    await h.store.put_schedule(schedule())
    assert not await h.store.fire(stored, [h.job()], next_ms=TICK + HOUR)
    assert await h.queues() == []


async def test_a_schedule_that_was_deleted_since_is_not_fired(h: Harness) -> None:
    stored = await h.store.put_schedule(schedule())
    await h.store.delete_schedule("nightly")
    assert not await h.store.fire(stored, [h.job()], next_ms=TICK + HOUR)
    assert await h.store.schedules() == []
    assert await h.queues() == []


async def test_a_schedule_that_was_deleted_and_put_again_is_not_fired(h: Harness) -> None:
    stored = await h.store.put_schedule(schedule())
    await h.store.delete_schedule("nightly")
    again = await h.store.put_schedule(schedule())
    assert not await h.store.fire(stored, [h.job()], next_ms=TICK + HOUR)
    assert await h.store.schedules() == [again]
    assert await h.queues() == []


async def test_a_schedule_fired_before_a_delete_cannot_be_fired_after_it(h: Harness) -> None:
    """Fences start over in a careless store, so try more than the first."""
    stored = await h.store.put_schedule(schedule())
    for n in range(3):
        assert await h.store.fire(await only(h), [h.job(f"{n}")], next_ms=TICK + HOUR)
    read = await only(h)
    await h.store.delete_schedule("nightly")
    await h.store.put_schedule(schedule())
    for n in range(3):
        assert not await h.store.fire(read, [h.job("late")], next_ms=None)
        assert not await h.store.fire(stored, [h.job("late")], next_ms=None)
        assert await h.store.fire(await only(h), [h.job(f"again {n}")], next_ms=TICK + HOUR)
    assert await h.store.get(["late"]) == [None]


async def test_a_schedule_that_was_never_put_is_not_fired(h: Harness) -> None:
    assert not await h.store.fire(schedule(), [h.job()], next_ms=TICK + HOUR)
    assert await h.store.schedules() == []
    assert await h.queues() == []


async def test_one_schedule_does_not_move_the_fence_of_another(h: Harness) -> None:
    a = await h.store.put_schedule(schedule("a"))
    b = await h.store.put_schedule(schedule("b"))
    assert await h.store.fire(a, [h.job("of a")], next_ms=TICK + HOUR)
    assert await h.store.fire(b, [h.job("of b")], next_ms=TICK + HOUR)
    assert await h.counts() == {"waiting": 2}


async def test_the_fence_of_one_schedule_does_not_fire_another(h: Harness) -> None:
    a = await h.store.put_schedule(schedule("a"))
    b = await h.store.put_schedule(schedule("b"))
    crossed = msgspec.structs.replace(a, fence=b.fence)
    assert not await h.store.fire(crossed, [h.job()], next_ms=TICK + HOUR)


async def test_jobs_whose_id_is_taken_are_left_out_of_a_tick(h: Harness) -> None:
    await h.add(h.job("taken", payload='"before"'))
    stored = await h.store.put_schedule(schedule())
    jobs = [h.job("taken", payload='"tick"'), h.job("new")]
    assert await h.store.fire(stored, jobs, next_ms=TICK + HOUR)
    assert (await h.get("taken")).payload == '"before"'
    assert await h.counts() == {"waiting": 2}
    assert (await only(h)).next_ms == TICK + HOUR


async def test_a_tick_whose_only_job_is_taken_moves_on(h: Harness) -> None:
    await h.ended(State.DONE, "tick")
    stored = await h.store.put_schedule(schedule())
    assert await h.store.fire(stored, [h.job("tick")], next_ms=TICK + HOUR)
    assert (await only(h)).next_ms == TICK + HOUR
    assert await h.counts() == {"done": 1}


async def test_a_job_named_twice_in_a_tick_is_added_once(h: Harness) -> None:
    stored = await h.store.put_schedule(schedule())
    jobs = [h.job(payload="1"), h.job(payload="2")]
    assert await h.store.fire(stored, jobs, next_ms=None)
    assert (await h.get()).payload == "1"
    assert await h.counts() == {"waiting": 1}


async def test_a_tick_may_add_many_jobs_to_several_queues(h: Harness) -> None:
    stored = await h.store.put_schedule(schedule())
    jobs = [h.job(f"{n}", queue="ab"[n % 2]) for n in range(100)]
    assert await h.store.fire(stored, jobs, next_ms=None)
    assert await h.counts("a") == await h.counts("b") == {"waiting": 50}


async def test_a_fired_job_is_a_job_like_any_other(h: Harness) -> None:
    stored = await h.store.put_schedule(schedule())
    await h.store.fire(stored, [h.job("a", delay_ms=HOUR), h.job("b")], next_ms=None)
    assert await h.store.cancel(["a"], now_ms=h.now) == [CancelOutcome.CANCELLED]
    assert await h.settle(h.done(await h.claim_one()))
    assert await h.counts() == {"cancelled": 1, "done": 1}


@pytest.mark.parametrize("rule", ["", "not JSON", '{"payload": "注文 \\u0000"}', "x" * 100_000])
async def test_a_rule_is_opaque(h: Harness, rule: str) -> None:
    await h.store.put_schedule(schedule(rule=rule))
    assert (await only(h)).rule == rule


async def test_schedules_that_are_fired_at_the_same_time_are_decided_each_on_its_own(
    h: Harness,
) -> None:
    stored = [await h.store.put_schedule(schedule(f"s{n}")) for n in range(60)]
    stale = {each.name for each in stored[::3]}
    for each in stored[::3]:
        await h.store.put_schedule(each)
    taken = h.job("s1@tick")
    await h.add(taken)
    fired = await asyncio.gather(
        *(h.store.fire(each, [h.job(f"{each.name}@tick")], next_ms=TICK + HOUR) for each in stored)
    )
    assert fired == [each.name not in stale for each in stored]
    found = {each.name: each for each in await h.store.schedules()}
    for each in stored:
        moved = each.name not in stale
        assert found[each.name].next_ms == (TICK + HOUR if moved else TICK)
        assert found[each.name].last_id == (f"{each.name}@tick" if moved else None)
    assert await h.counts() == {"waiting": 40}


async def test_of_many_who_fire_the_same_tick_at_the_same_time_one_does(h: Harness) -> None:
    stored = await h.store.put_schedule(schedule())
    fired = await asyncio.gather(
        *(h.store.fire(stored, [h.job(f"{n}")], next_ms=TICK + HOUR) for n in range(20))
    )
    assert sorted(fired) == [False] * 19 + [True]
    assert await h.counts() == {"waiting": 1}
