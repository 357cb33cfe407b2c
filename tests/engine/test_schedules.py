"""Schedules in virtual time: months in a second, nodes that die, clocks that change."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from world import World, virtual

from tickwheel import App, BadConfig
from tickwheel.checks import NOTE
from tickwheel.clock import Clock
from tickwheel.errors import (
    BadArguments,
    BadSchedule,
    BadTime,
    StoreRefused,
    StoreUnavailable,
    UnknownSchedule,
    UsageError,
)
from tickwheel.job import Job
from tickwheel.schedule import MOVING_MS, Rule, Schedule, correction, next_tick, plan
from tickwheel.schedules import MisfireName, OverlapName
from tickwheel.store import Store, WorkerInfo
from tickwheel.testing import FaultyStore

MINUTE, HOUR, DAY = 60, 3_600, 86_400
# The virtual clock starts at 2027-01-15 08:00:00 UTC.
START = datetime(2027, 1, 15, 8, tzinfo=UTC)


@pytest.mark.slow
# Days of virtual time: long on a busy machine.
@pytest.mark.slow
@pytest.mark.timeout(300)
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
# Days of virtual time: long on a busy machine.
@pytest.mark.slow
@pytest.mark.timeout(300)
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
def test_ticks_that_nobody_fired_follow_the_misfire_policy(
    misfire: MisfireName, expected: int
) -> None:
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
    overlap: OverlapName,
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


@pytest.mark.parametrize(
    ("every", "takes", "overlap"),
    [("2s", 1.2, "cancel"), ("2s", 1.2, "skip"), ("1s", 0.01, "skip"), ("1s", 0.01, "cancel")],
)
def test_a_job_that_ends_before_the_next_tick_does_not_overlap_it(
    every: str, takes: float, overlap: OverlapName
) -> None:
    async def story(world: World) -> None:
        starts: list[int] = []
        ended = 0

        @world.app.every(every, overlap=overlap)
        async def work() -> None:
            nonlocal ended
            starts.append(world.now_ms)
            await asyncio.sleep(takes)
            ended += 1

        await world.node()
        every_ms = int(every[:-1]) * 1000
        await asyncio.sleep(12 * every_ms / 1000 + 0.5)
        assert [b - a for a, b in pairwise(starts)] == [every_ms] * 11
        assert ended in (11, 12)
        assert max(at % every_ms for at in starts) <= 2
        [queue] = await world.app.queues()
        assert queue.cancelled == 0

    virtual(story)


@pytest.mark.parametrize("overlap", ["skip", "cancel"])
@pytest.mark.parametrize("down_s", [30, 300])
@pytest.mark.parametrize("misfire", ["one", "all"])
def test_ticks_that_are_due_together_after_a_downtime_do_not_overlap_each_other(
    overlap: OverlapName, down_s: int, misfire: MisfireName
) -> None:
    async def story(world: World) -> None:
        ran: list[datetime] = []

        @world.app.every("5s", overlap=overlap, misfire=misfire)
        async def work(tick: datetime) -> None:
            ran.append(tick)
            await asyncio.sleep(2)

        node = await world.node()
        await asyncio.sleep(9)
        await node.stop()
        ran.clear()
        await asyncio.sleep(down_s)
        back_ms = world.now_ms
        await world.node()
        await asyncio.sleep(0.5)
        assert [int(tick.timestamp()) * 1000 for tick in ran] == [back_ms // 5000 * 5000]
        [queue] = await world.app.queues()
        assert queue.cancelled == 0

    virtual(story)


# --- Clocks that were wrong


class Ahead:
    """A clock that is wrong until it is set right."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.by_s = 0

    def now_ns(self) -> int:
        return self.clock.now_ns() + self.by_s * 10**9

    def monotonic_ns(self) -> int:
        return self.clock.monotonic_ns()


@pytest.mark.parametrize("overlap", ["allow", "skip", "cancel"])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_clock_that_was_a_day_ahead_for_a_moment_silences_no_schedule(
    overlap: OverlapName, restarted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(world: World) -> None:
        ran: Counter[datetime] = Counter()

        @world.app.every("10s", overlap=overlap)
        async def often(tick: datetime) -> None:
            ran[tick] += 1

        @world.app.cron("0 * * * *", name="hourly", end=START + timedelta(hours=5))
        async def hourly(tick: datetime) -> None: ...

        wrong = Ahead(world.clock)
        world.store._clock = wrong
        wrong.by_s = DAY
        node = await world.node(clock=wrong)
        await asyncio.sleep(4)
        wrong.by_s = 0
        if restarted:
            await node.stop()
            await world.node()
        await asyncio.sleep(6)
        ran.clear()
        found = {each.name: each for each in await world.app.schedules.list()}
        assert found["hourly"].next == START + timedelta(hours=1)
        await asyncio.sleep(MINUTE)
        assert len(ran) in (6, 7) and set(ran.values()) == {1}
        assert max(ran) < START + timedelta(seconds=90)
        assert "a clock was wrong" in caplog.text

    virtual(story)


# Days of virtual time: long on a busy machine.
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_tick_that_was_fired_a_day_too_early_runs_once_at_its_time() -> None:
    async def story(world: World) -> None:
        ran: list[tuple[datetime, datetime]] = []

        @world.app.cron("0 9 * * *", overlap="skip")
        async def daily(tick: datetime) -> None:
            ran.append((tick, datetime.fromtimestamp(world.now_ms / 1000, UTC)))

        await world.app.schedules.put("daily", "daily", cron="0 9 * * *", overlap="skip")
        [schedule] = await world.store.schedules()
        two = plan(schedule, world.now_ms + (HOUR + DAY) * 1000, 1000)
        assert two is not None and two.next_ms is not None
        assert await world.store.fire(schedule, two.jobs, next_ms=two.next_ms)
        await world.node()
        await asyncio.sleep(3 * DAY)
        assert [(tick.day, at.day, at.hour) for tick, at in ran] == [
            (15, 15, 9),
            (16, 16, 9),
            (17, 17, 9),
        ]

    virtual(story)


MINUTELY = Rule(every_ms=60_000, task="work")


@pytest.mark.parametrize(
    ("rule", "next_ms", "corrected"),
    [
        (MINUTELY, 1_000_080_000, False),
        (MINUTELY, 1_000_140_000, False),  # another node's clock may be a little ahead
        (MINUTELY, 1_000_200_000, True),
        (MINUTELY, None, True),
        (msgspec.structs.replace(MINUTELY, start_ms=2_000_000_000), 2_000_000_000, False),
        (msgspec.structs.replace(MINUTELY, start_ms=2_000_000_000), 2_000_060_000, True),
        (msgspec.structs.replace(MINUTELY, end_ms=900_000_000), None, False),
        (msgspec.structs.replace(MINUTELY, end_ms=1_000_100_000), 1_000_080_000, False),
        (msgspec.structs.replace(MINUTELY, end_ms=1_000_100_000), 1_100_040_000, True),
        (msgspec.structs.replace(MINUTELY, end_ms=2_000_000_000), None, True),
        (msgspec.structs.replace(MINUTELY, spread_ms=3_600_000), 1_000_080_000, False),
        (
            Rule(cron="0 2 29 2 *", task="work"),
            next_tick(Rule(cron="0 2 29 2 *", task="work"), 0),
            0,
        ),
        (MINUTELY, MOVING_MS, False),
    ],
)
def test_only_a_tick_that_the_rule_could_not_have_given_is_corrected(
    rule: Rule, next_ms: int | None, corrected: bool
) -> None:
    now_ms = 1_000_020_000 + 5
    schedule = Schedule(name="s", rule=rule.encode(), next_ms=next_ms)
    found = correction(schedule, rule, now_ms, 1_000)
    assert (found is not None) == corrected
    if found is not None:
        assert (found.jobs, found.next_ms) == ([], next_tick(rule, now_ms))
    paused = msgspec.structs.replace(schedule, paused=True)
    assert correction(paused, rule, now_ms, 1_000) is None


# --- What can't be read, and what is no schedule


BROKEN = [
    "",
    "nonsense",
    "{}",
    '{"task": "work"}',
    '{"task": "work", "every_ms": 0}',
    '{"task": "work", "every_ms": 1000, "overlap": "sometimes"}',
    '{"task": "work", "every_ms": 1000, "spread_ms": -1}',
    '{"task": "work", "cron": "0 0 * * *", "tz": "Mars/Olympus"}',
    '{"task": "work", "every_ms": 1000, "tick_parameter": "tick", "payload": "[]"}',
    '{"task": "work", "every_ms": 1000, "start_ms": 1e300}',
    '{"task": "work", "every_ms": 1000, "priority": "high"}',
    '{"task": "work", "every_ms": 1000, "priority": 77}',
    '{"task": "work", "every_ms": 1000, "start_ms": 1000000000000000000000000000000}',
    '{"task": "work", "every_ms": 1000, "spread_ms": 1000000000000000000000000000000}',
    '{"task": "", "every_ms": 1000}',
    '{"task": "work", "every_ms": 1000, "queue": "\\u0000"}',
    '{"task": "work", "every_ms": 1000, "queue": "' + "q" * 70_000 + '"}',
]


@pytest.mark.parametrize("text", BROKEN)
def test_a_schedule_that_can_not_be_read_stops_nothing_and_is_left_alone(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(world: World) -> None:
        ran = 0

        @world.app.every("10s")
        async def work() -> None:
            nonlocal ran
            ran += 1

        broken = Schedule(name="broken", rule=text, next_ms=world.now_ms - 5_000)
        stored = await world.store.put_schedule(broken)
        line = Counting(world.store)
        await world.node(line=line)
        await asyncio.sleep(95)
        assert ran in (9, 10)
        assert stored in await world.store.schedules()
        told = [each for each in caplog.records if "schedule broken" in each.message]
        assert len(told) == 1, "it is said once"
        assert line.calls["schedules"] < 60, "it is no reason to look again and again"
        assert {each.name for each in await world.app.schedules.list()} == {"broken", "work"}
        await world.app.schedules.pause("broken")
        assert await world.app.schedules.delete("broken")

    virtual(story)


class Picky(FaultyStore):
    """Refuses what one schedule fires, for good."""

    async def fire(self, schedule: Schedule, jobs: Any, *, next_ms: int | None) -> bool:
        if schedule.name == "refused":
            raise StoreRefused("a value is too large")
        return await self._store.fire(schedule, jobs, next_ms=next_ms)


def test_a_schedule_whose_jobs_the_store_refuses_stops_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(world: World) -> None:
        ran = 0

        @world.app.every("10s")
        async def work() -> None:
            nonlocal ran
            ran += 1

        await world.app.schedules.put("refused", "work", every="10s")
        await world.node(line=Picky(world.store))
        await asyncio.sleep(95)
        assert ran in (9, 10)
        told = [each for each in caplog.records if "schedule refused" in each.message]
        assert len(told) == 1

    virtual(story)


class Counting(FaultyStore):
    """Counts the calls."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return super().__getattr__(name)


def test_a_schedule_that_can_not_be_read_is_neither_run_nor_resumed_but_may_be_replaced() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def work() -> None: ...

        schedules = world.app.schedules
        await world.store.put_schedule(Schedule(name="broken", rule="?", next_ms=1))
        [info] = await schedules.list()
        assert (info.rule, info.next) == (None, None)
        assert info.problem is not None and "can't read it" in info.problem
        assert info.following(3, after=START) == []
        for step in (schedules.run, schedules.resume):
            with pytest.raises(BadSchedule, match=r"'broken'.*put it again or delete it"):
                await step("broken")
        info = await schedules.put("broken", "work", every="1h")
        assert info.problem is None

    virtual(story)


def test_the_note_of_a_move_is_not_a_schedule() -> None:
    async def story(world: World) -> None:
        @world.app.every("10s")
        async def work() -> None: ...

        note = await world.store.put_schedule(
            Schedule(name=NOTE, rule='{"ids":["a"],"paused":[]}', next_ms=None, paused=True)
        )
        await world.node()
        await asyncio.sleep(15)
        schedules = world.app.schedules
        assert [each.name for each in await schedules.list()] == ["work"]
        for step in (schedules.delete, schedules.pause, schedules.resume, schedules.run):
            with pytest.raises(UsageError, match="Run the same command again"):
                await step(NOTE)
        with pytest.raises(BadConfig, match="give the schedule another"):
            await schedules.put(NOTE, "work", every="1h")
        with pytest.raises(BadConfig, match="give the schedule another"):
            world.app.every("1h", name=NOTE)(work)
        assert note in await world.store.schedules()

    virtual(story)


# --- Two versions of the code


def app_with(world: World, *names: str, every: str = "10s") -> tuple[App, dict[str, set[datetime]]]:
    """A version of the code: one task, and schedules for it. Notes the ticks that ran."""
    app = App(world.store, clock=world.clock)
    ran: dict[str, set[datetime]] = {name: set() for name in ("kept", "added", "removed", "s")}

    @app.task(name="work")
    async def work(of: str, tick: datetime) -> None:
        ran[of].add(tick)

    for name in names:
        app.every(every, name=name, arguments={"of": name})(work)
    return app, ran


@pytest.mark.parametrize("seed", range(12))
def test_a_rolling_deploy_loses_no_tick_of_what_it_adds_and_ends_what_it_removes(seed: int) -> None:
    async def story(world: World) -> None:
        order = random.Random(seed)
        old, old_ran = app_with(world, "kept", "removed")
        new, new_ran = app_with(world, "kept", "added")
        nodes = [(await world.node(app=old), old) for _ in range(3)]
        await asyncio.sleep(30)
        replaced: list[int] = []
        added_ms = 0
        while len(replaced) < 3:
            # One is replaced; then any of the others crash or are restarted as they are.
            place = order.choice([each for each in range(3) if each not in replaced])
            replaced.append(place)
            again = [place, *(order.randrange(3) for _ in range(order.randrange(4)))]
            for each in again:
                node, app = nodes[each]
                if order.random() < 0.3:
                    node.crash()
                else:
                    await node.stop()
                if order.random() < 0.5:
                    await asyncio.sleep(order.uniform(0, 4))
                app = new if each in replaced else app
                nodes[each] = (await world.node(app=app), app)
                await asyncio.sleep(1)
                added_ms = added_ms or world.now_ms
                await asyncio.sleep(order.uniform(0, 40))
        await asyncio.sleep(150)
        found = {each.name for each in await world.store.schedules()}
        assert found == {"kept", "added"}
        first, last = added_ms // 10_000 + 1, world.now_ms // 10_000
        ran = {int(tick.timestamp()) // 10 for tick in old_ran["added"] | new_ran["added"]}
        assert ran - {first - 1} == set(range(first, last + 1))
        removed = len(old_ran["removed"] | new_ran["removed"])
        assert removed > 3
        await asyncio.sleep(60)
        assert len(old_ran["removed"] | new_ran["removed"]) == removed

    virtual(story)


def test_two_versions_side_by_side_never_undo_each_other() -> None:
    async def story(world: World) -> None:
        old, _ = app_with(world, "old")
        new, _ = app_with(world, "new")
        await world.node(app=old)
        await world.node(app=new)
        await asyncio.sleep(2)
        before = [(each.name, each.rule) for each in await world.store.schedules()]
        assert [name for name, _ in before] == ["new", "old"]
        for _ in range(5):
            node = await world.node(app=old)
            await asyncio.sleep(100)
            await node.stop()
            await asyncio.sleep(100)
            assert [(each.name, each.rule) for each in await world.store.schedules()] == before

    virtual(story)


def test_a_rule_that_an_old_worker_put_back_is_the_new_ones_once_the_old_is_gone() -> None:
    async def story(world: World) -> None:
        old, _ = app_with(world, "s", every="10s")
        new, _ = app_with(world, "s", every="20s")

        async def every_ms() -> int | None:
            [found] = await world.store.schedules()
            return Rule.decode(found.rule).every_ms

        await world.node(app=new)
        await asyncio.sleep(1)
        late = await world.node(app=old)
        await asyncio.sleep(130)
        assert await every_ms() == 10_000
        await late.stop()
        await asyncio.sleep(70)
        assert await every_ms() == 20_000

    virtual(story)


def test_a_worker_is_known_before_its_schedules_are_there() -> None:
    """Or an older worker that starts at the same time would take them for removed ones."""

    async def story(world: World) -> None:
        app, _ = app_with(world, "s")
        known: list[str] = []

        class Watching(FaultyStore):
            async def put_schedule(self, schedule: Schedule) -> Schedule:
                workers = await world.store.workers(now_ms=world.now_ms)
                known.extend(name for each in workers for name in each.schedules)
                return await world.store.put_schedule(schedule)

        await world.node(app=app, line=Watching(world.store))
        await asyncio.sleep(1)
        assert known == ["s"]

    virtual(story)


def test_a_worker_that_starts_while_its_schedule_is_deleted_keeps_it() -> None:
    async def story(world: World) -> None:
        bare, bare_ran = app_with(world)
        full, ran = app_with(world, "s")
        rule = full.declared["s"].encode()
        await world.store.put_schedule(Schedule(name="s", rule=rule, next_ms=world.now_ms + 10_000))

        class Meddling(FaultyStore):
            """Another worker starts between the look and the deletion."""

            async def delete_schedule(self, name: str) -> bool:
                await world.node(app=full)
                await asyncio.sleep(0.5)
                return await world.store.delete_schedule(name)

        await world.node(app=bare, line=Meddling(world.store))
        await asyncio.sleep(25)
        assert [each.name for each in await world.store.schedules()] == ["s"]
        assert len(ran["s"] | bare_ran["s"]) == 2

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


class Meddling(FaultyStore):
    """Something else happens each time after the schedules were read, `times` times."""

    def __init__(self, world: World, meddle: Callable[[], Awaitable[object]], times: int = 1):
        super().__init__(world.store)
        self._meddle, self._times = meddle, times

    async def schedules(self) -> list[Schedule]:
        found: list[Schedule] = await self._store.schedules()
        if found and self._times:
            self._times -= 1
            await self._meddle()
        return found


def meddled(world: World, meddle: Callable[[], Awaitable[object]], times: int = 1) -> App:
    app = App(Meddling(world, meddle, times), clock=world.clock)  # type: ignore[arg-type]
    app.task(name="work")(lambda: None)
    return app


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_a_pause_undoes_no_change_and_no_delete_at_the_same_time(verb: str) -> None:
    async def story(world: World) -> None:
        world.app.task(name="work")(lambda: None)
        ours = world.app.schedules
        await ours.put("s", "work", every="1h")
        if verb == "resume":
            await ours.pause("s")

        def change() -> Awaitable[object]:
            return ours.put("s", "work", every="2h")

        await getattr(meddled(world, change).schedules, verb)("s")
        [found] = await ours.list()
        assert found.rule is not None and found.rule.every_ms == 2 * HOUR * 1000
        assert found.paused == (verb == "pause")
        with pytest.raises(UnknownSchedule, match="no schedule is named 's'"):
            await getattr(meddled(world, lambda: ours.delete("s")).schedules, verb)("s")
        assert await ours.list() == []

    virtual(story)


def test_a_put_keeps_the_last_job_of_a_tick_at_the_same_time_and_adds_what_is_deleted() -> None:
    async def story(world: World) -> None:
        world.app.task(name="work")(lambda: None)
        await world.app.schedules.put("s", "work", every="1h")

        async def fire() -> None:
            [found] = await world.store.schedules()
            now_ms = world.now_ms
            job = Job(id="tick", task="work", payload="{}", due_ms=now_ms, created_ms=now_ms)
            assert await world.store.fire(found, [job], next_ms=found.next_ms)

        await meddled(world, fire).schedules.put("s", "work", every="2h")
        [found] = await world.app.schedules.list()
        assert found.last_id == "tick"
        app = meddled(world, lambda: world.app.schedules.delete("s"))
        await app.schedules.put("s", "work", every="3h")
        [found] = await world.app.schedules.list()
        assert found.rule is not None and found.rule.every_ms == 3 * HOUR * 1000

    virtual(story)


def test_a_schedule_that_others_change_all_the_time_is_given_up() -> None:
    async def story(world: World) -> None:
        world.app.task(name="work")(lambda: None)
        ours = world.app.schedules
        await ours.put("s", "work", every="1h")
        app = meddled(world, lambda: ours.put("s", "work", every="1h"), times=10_000)
        for change in (app.schedules.pause("s"), app.schedules.put("s", "work", every="2h")):
            with pytest.raises(StoreUnavailable, match="kept changing the schedule 's'"):
                await change

    virtual(story)


def test_a_schedule_that_is_paused_while_the_code_changes_it_stays_paused() -> None:
    async def story(world: World) -> None:
        app, _ = app_with(world, "s", every="10s")
        node = await world.node(app=app)
        await asyncio.sleep(1)
        await node.stop()
        new, _ = app_with(world, "s", every="20s")
        line = Meddling(world, lambda: world.app.schedules.pause("s"))
        await world.node(app=new, line=line)
        await asyncio.sleep(1)
        [found] = await world.store.schedules()
        assert found.paused and Rule.decode(found.rule).every_ms == 20_000

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
        changed = found["changed"].rule
        assert changed is not None and changed.every_ms == 7_200_000
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
        ({"every": "1h", "misfire_limit": True}, BadSchedule, "from 1 to 10,000"),
        ({"every": "1h", "tz": "Europe/Pariss"}, BadSchedule, "did you mean 'Europe/Paris'"),
        ({"every": "1h", "start": START.replace(year=1960)}, BadSchedule, "start=1960.*1970 to"),
        ({"every": "1h", "end": datetime.max.replace(tzinfo=UTC)}, BadSchedule, "leave it out"),
        ({"every": "1h", "end": START - timedelta(days=1)}, BadSchedule, "give a later end="),
        ({"cron": "0 2 * * *", "end": START + timedelta(hours=1)}, BadSchedule, "no tick from now"),
        (
            {"every": "1h", "start": START.replace(tzinfo=None)},
            BadTime,
            "start=2027.* has no time zone",
        ),
        ({"every": "1h", "end": "soon"}, BadTime, "end='soon' is not a datetime"),
        ({"every": "1h", "overlap": "no"}, BadSchedule, "one of allow, skip, cancel"),
        ({"every": "1h", "arguments": {"nope": 1}}, BadArguments, "nope"),
    ],
)
def test_a_wrong_schedule_is_refused_where_it_is_written(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def work() -> None: ...

        with pytest.raises(error, match=words):
            await world.app.schedules.put("s", "work", **options)
        assert await world.app.schedules.list() == []
        with pytest.raises(UsageError, match="the schedules are: none"):
            await world.app.schedules.pause("s")

    virtual(story)


@pytest.mark.parametrize(
    "options",
    [
        {"misfire_limit": True},
        {"tz": "Europe/Pariss"},
        {"start": START.replace(year=1960)},
        {"end": datetime.max.replace(tzinfo=UTC)},
    ],
    ids=str,
)
def test_a_decorator_refuses_what_could_not_be_read(options: dict[str, Any]) -> None:
    app = App("memory://")
    decorators = (app.every("1h", **options), app.cron("0 2 * * *", **options))
    for n, decorator in enumerate(decorators):
        with pytest.raises(BadSchedule):
            decorator(app.task(name=f"task-{n}")(lambda: None))
    assert app.declared == {}


def test_code_whose_schedule_has_ended_still_starts(caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: World) -> None:
        app, _ = app_with(world, "lasting")
        work = app.task(name="ended")(lambda: None)
        app.every("1h", name="over", end=START - timedelta(days=1))(work)
        await world.node(app=app)
        await asyncio.sleep(1)
        found = {each.name: each.next is None for each in await world.app.schedules.list()}
        assert found == {"lasting": False, "over": True}
        assert "schedule over has no more ticks: its end= has passed" in caplog.text
        assert "schedule lasting has no more" not in caplog.text

    virtual(story)


def test_only_a_parameter_for_one_value_receives_the_tick() -> None:
    async def story(world: World) -> None:
        ran: list[Any] = []

        @world.app.every("10s", name="many")
        @world.app.task(name="many")
        async def many(**tick: str) -> None:
            ran.append(tick)

        @world.app.every("10s", name="more")
        @world.app.task(name="more")
        async def more(*tick: str) -> None:
            ran.append(tick)

        await world.node()
        await asyncio.sleep(15)
        assert {str(each) for each in ran} == {"{}", "()"}

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


def test_a_worker_of_a_release_that_tells_no_schedules_is_understood() -> None:
    old = (
        b'{"name":"w","host":"h","pid":1,"version":"0","queues":["q"],"concurrency":1,'
        b'"started_ms":1,"seen_ms":1,"gone_after_ms":1}'
    )
    assert msgspec.json.decode(old, type=WorkerInfo).schedules == ()


@pytest.mark.parametrize("overlap", ["allow", "skip"])
def test_a_thousand_schedules_that_are_due_together_do_not_wait_for_each_other(
    overlap: OverlapName,
) -> None:
    async def story(world: World) -> None:
        late: list[int] = []

        @world.app.task
        async def work(tick: datetime) -> None:
            late.append(world.now_ms - int(tick.timestamp()) * 1000)

        class Slow(FaultyStore):
            async def fire(self, *args: Any, **options: Any) -> bool:
                await asyncio.sleep(0.02)
                return await world.store.fire(*args, **options)

        for n in range(1000):
            await world.app.schedules.put(f"s{n}", "work", every="1m", overlap=overlap)
        await world.node(line=Slow(world.store), concurrency=1000)
        await asyncio.sleep(MINUTE + 5)
        assert len(late) == 1000
        assert max(late) <= (1 if overlap == "allow" else 100)

    virtual(story)
