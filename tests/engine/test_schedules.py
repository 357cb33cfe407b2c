"""Schedules in virtual time: months in a second, nodes that die, clocks that change."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from world import World, virtual

from tickwheel import BadConfig
from tickwheel.errors import BadArguments, BadSchedule, UsageError
from tickwheel.schedule import Rule, Schedule, next_tick, plan

MINUTE, HOUR, DAY = 60, 3_600, 86_400
# The virtual clock starts at 2027-01-15 08:00:00 UTC.
START = datetime(2027, 1, 15, 8, tzinfo=UTC)


@pytest.mark.slow
def test_every_tick_runs_once_and_on_time() -> None:
    async def story(world: World) -> None:
        ran: list[tuple[datetime, int]] = []

        @world.app.cron("0 2 * * *", tz="Asia/Taipei")
        async def report(tick: datetime) -> None:
            ran.append((tick, world.now_ms))

        await world.node()
        await asyncio.sleep(4 * DAY)
        assert len(ran) == 4
        for tick, at_ms in ran:
            assert tick.astimezone(UTC).hour == 18
            assert 0 <= at_ms - tick.timestamp() * 1000 <= 1
        assert len({tick for tick, _ in ran}) == 4

    virtual(story)


@pytest.mark.parametrize("seconds", [0.2, 1, 7, 90])
def test_an_interval_ticks_at_its_multiples(seconds: float) -> None:
    async def story(world: World) -> None:
        ran: list[int] = []

        @world.app.every(seconds)
        async def beat() -> None:
            ran.append(world.now_ms)

        await world.node()
        await asyncio.sleep(seconds * 20 + 2)
        late = [at % int(seconds * 1000) for at in ran[1:]]
        assert len(ran) >= 20
        assert max(late) <= 1

    virtual(story)


@pytest.mark.slow
def test_three_nodes_that_die_fire_each_tick_once_through_a_change_of_the_clock() -> None:
    async def story(world: World) -> None:
        ran: Counter[str] = Counter()

        @world.app.cron("30 2 * * *", tz="Europe/Paris", name="fixed")
        @world.app.cron("*/15 * * * *", tz="Europe/Paris", name="wild")
        async def note(tick: datetime) -> None:
            ran[tick.isoformat()] += 1

        nodes = [await world.node(lease_ms=5_000) for _ in range(3)]
        # Through 28 March 2027, when Paris has no 02:30, with a node dying every hour.
        for hour in range(24):
            await asyncio.sleep(HOUR)
            nodes[hour % 3].crash()
            nodes[hour % 3] = await world.node(lease_ms=5_000)
        await asyncio.sleep(10)
        assert set(ran.values()) <= {1, 2}
        quarters = [tick for tick in ran if tick[14:16] in ("00", "15", "30", "45")]
        assert len(quarters) == 24 * 4
        # The skipped 02:30 runs right after the gap, at 03:00 there, which is 01:00 UTC.
        assert ran["2027-03-28T01:00:00+00:00"] == 2
        [schedule] = [s for s in await world.store.schedules() if s.name == "fixed"]
        assert schedule.last_id == "fixed@2027-03-28T01:00:00Z"

    virtual(story, start=datetime(2027, 3, 27, 12, 0, 1, tzinfo=UTC))


@pytest.mark.parametrize(("misfire", "expected"), [("skip", 0), ("one", 1), ("all", 5)])
def test_ticks_that_nobody_fired_follow_the_misfire_policy(misfire: str, expected: int) -> None:
    async def story(world: World) -> None:
        ran: list[datetime] = []

        @world.app.every("1h", misfire=misfire, misfire_limit=5)
        async def hourly(tick: datetime) -> None:
            ran.append(tick)

        node = await world.node()
        await asyncio.sleep(90 * MINUTE)
        assert len(ran) == 1
        await node.stop()
        await asyncio.sleep(10 * HOUR)
        await world.node()
        await asyncio.sleep(10)
        made_up = ran[1:]
        assert len(made_up) == expected
        # The latest of them, in their order.
        hours = [(tick - START) // timedelta(hours=1) for tick in made_up]
        assert hours == list(range(12 - expected, 12))
        # And then on as ever.
        await asyncio.sleep(HOUR)
        assert len(ran) == 1 + expected + 1

    virtual(story)


@pytest.mark.parametrize("overlap", ["allow", "skip", "cancel"])
def test_a_tick_that_finds_its_predecessor_at_work_follows_the_overlap_policy(
    overlap: str,
) -> None:
    async def story(world: World) -> None:
        starts: list[int] = []
        ends: list[int] = []

        @world.app.every("10s", overlap=overlap)
        async def slow() -> None:
            starts.append(world.now_ms)
            await asyncio.sleep(25)
            ends.append(world.now_ms)

        await world.node()
        await asyncio.sleep(61)
        if overlap == "allow":
            assert len(starts) in (6, 7)
            assert len(ends) >= 3
        elif overlap == "skip":
            assert [(b - a) // 1000 for a, b in pairwise(starts)] == [30]
        else:
            assert len(starts) in (6, 7)
            assert ends == []
            [queue] = await world.app.queues()
            assert queue.cancelled >= 5

    virtual(story)


def test_schedules_are_made_changed_paused_run_and_deleted_while_nodes_work() -> None:
    async def story(world: World) -> None:
        ran: list[str] = []

        @world.app.task
        async def note(word: str) -> None:
            ran.append(word)

        await world.node()
        schedules = world.app.schedules
        await schedules.put("s", "note", every="10s", arguments={"word": "a"})
        await asyncio.sleep(21)
        assert ran == ["a"] * len(ran) and len(ran) in (2, 3)
        await schedules.put("s", "note", every="1h", arguments={"word": "b"})
        ran.clear()
        await asyncio.sleep(HOUR)
        assert ran == ["b"]
        await schedules.pause("s")
        await asyncio.sleep(5 * HOUR)
        assert ran == ["b"]
        await schedules.resume("s")
        await asyncio.sleep(1)
        assert ran == ["b"], "what a pause held back is not made up for"
        id = await schedules.run("s")
        await world.app.job(id).result(timeout=5)
        assert ran == ["b", "b"]
        [info] = await schedules.list()
        assert (info.name, info.task, info.paused) == ("s", "note", False)
        assert info.next is not None and info.following(2, after=info.next)[0] > info.next
        assert await schedules.delete("s") is True
        await asyncio.sleep(3 * HOUR)
        assert ran == ["b", "b"]

    virtual(story)


def test_the_code_changes_its_own_schedules_at_the_start_and_no_others() -> None:
    async def story(world: World) -> None:
        @world.app.every("1h", name="kept")
        @world.app.every("2h", name="changed")
        async def work() -> None: ...

        await world.app.schedules.put("made", "work", every="3h")
        gone = Rule(every_ms=1_000, task="work", from_code=True).encode()
        others = Rule(every_ms=3_600_000, task="elsewhere", from_code=True).encode()
        old = Rule(every_ms=60_000, task="work", from_code=True).encode()
        for name, rule in (("gone", gone), ("others", others), ("changed", old)):
            await world.store.put_schedule(
                Schedule(name=name, rule=rule, next_ms=world.now_ms + DAY * 1000, paused=True)
            )
        await world.node()
        await asyncio.sleep(1)
        found = {each.name: each for each in await world.app.schedules.list()}
        assert set(found) == {"kept", "changed", "made", "others"}
        assert found["changed"].rule.every_ms == 7_200_000
        assert found["changed"].paused, "what an operator paused stays paused"
        assert found["kept"].explained

    virtual(story)


def test_spread_jobs_are_due_within_their_spread_each_at_its_own_moment() -> None:
    rule = Rule(every_ms=60_000, task="work", spread_ms=30_000)
    late = []
    for tick_ms in range(60_000, 200 * 60_000, 60_000):
        due = plan(Schedule(name="s", rule=rule.encode(), next_ms=tick_ms), tick_ms, 0)
        assert due is not None
        late.append(due.jobs[0].due_ms - tick_ms)
    assert min(late) >= 0 and max(late) <= 30_000
    assert len(set(late)) > 150


def test_a_rule_ticks_only_between_its_start_and_its_end() -> None:
    rule = Rule(every_ms=1_000, task="work", start_ms=10_000, end_ms=12_000)
    ticks = []
    tick = next_tick(rule, 0)
    while tick is not None:
        ticks.append(tick)
        tick = next_tick(rule, tick)
    assert ticks == [10_000, 11_000, 12_000]


def test_a_month_of_downtime_of_a_schedule_by_the_second_is_planned_at_once() -> None:
    rule = Rule(cron="* * * * * *", task="work", misfire="all", misfire_limit=3)  # type: ignore[arg-type]
    month_ms = 30 * DAY * 1000
    due = plan(Schedule(name="s", rule=rule.encode(), next_ms=1_000), month_ms, 0)
    assert due is not None
    on_time = [job.due_ms for job in due.jobs if job.due_ms > month_ms - 60_000]
    assert len(due.jobs) - len(on_time) == 3
    assert due.next_ms == month_ms + 1_000


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"cron": "61 * * * *"}, BadSchedule, "61"),
        ({"cron": "* * * * *", "tz": "Mars/Olympus"}, BadSchedule, "Mars/Olympus"),
        ({"cron": "* * * * *", "every": "1h"}, BadSchedule, "either"),
        ({}, BadSchedule, "either"),
        ({"cron": "0 0 30 2 *"}, BadSchedule, "never ticks"),
        ({"every": "1h", "misfire": "maybe"}, BadSchedule, "one of skip, one, all"),
        ({"every": "1h", "misfire_limit": 0}, BadSchedule, "from 1 to 10,000"),
        ({"every": "1h", "overlap": "no"}, BadSchedule, "one of allow, skip, cancel"),
        ({"every": "1h", "arguments": {"nope": 1}}, BadArguments, "nope"),
    ],
)
def test_a_wrong_schedule_is_refused_where_it_is_written(
    options: dict[str, object], error: type[Exception], words: str
) -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def work() -> None: ...

        with pytest.raises(error, match=words):
            await world.app.schedules.put("s", "work", **options)
        assert await world.app.schedules.list() == []
        with pytest.raises(UsageError, match="there are: none"):
            await world.app.schedules.pause("s")

    virtual(story)


def test_two_schedules_of_one_name_are_refused() -> None:
    async def story(world: World) -> None:
        @world.app.every("1h")
        async def work() -> None: ...

        with pytest.raises(BadConfig, match="two schedules are named 'work'"):
            world.app.every("2h")(work)

    virtual(story)


def test_a_paused_schedule_has_no_plan_and_an_ended_one_neither() -> None:
    rule = Rule(every_ms=1_000, task="work").encode()
    assert plan(Schedule(name="s", rule=rule, next_ms=1, paused=True), 10_000, 0) is None
    assert plan(Schedule(name="s", rule=rule, next_ms=None), 10_000, 0) is None
