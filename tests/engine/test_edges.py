"""A worker at its edges: killers, late answers, set clocks, and every way that a run can end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from world import Node, World, virtual

from tickwheel import (
    App,
    Cancelled,
    GiveUp,
    JobFailed,
    JobHandle,
    Outcome,
    Retry,
    Snooze,
    State,
    current_job,
)
from tickwheel.hand import Stop
from tickwheel.stores.memory import MemoryStore
from tickwheel.testing import FaultyStore

# --- A job that kills its workers


class Fleet:
    """Workers that are replaced as soon as they die, as a supervisor does."""

    def __init__(self, world: World, size: int, **options: Any) -> None:
        self._world, self._options = world, options
        self._size = size
        self.deaths = 0
        self._nodes: dict[str, Node] = {}

    async def start(self) -> None:
        for _ in range(self._size):
            await self._one()

    async def _one(self) -> None:
        node = await self._world.node(**self._options)
        self._nodes[node.name] = node

    def kill_this_one(self) -> None:
        """Called by a task: its own worker dies on the spot, and another one is started."""
        context = current_job()
        assert context is not None and context.job.worker is not None
        self._nodes.pop(context.job.worker).crash()
        self.deaths += 1
        self._restart = asyncio.get_running_loop().create_task(self._one())


@pytest.mark.parametrize("workers", [1, 2])
def test_one_job_that_kills_its_workers_dies_alone(workers: int) -> None:
    async def story(world: World) -> None:
        fleet = Fleet(world, workers, lease_ms=3_000)

        @world.app.task
        async def innocent(n: int) -> int:
            await asyncio.sleep(0.01)
            return n

        @world.app.task
        async def killer() -> None:
            fleet.kill_this_one()
            await asyncio.sleep(3600)

        jobs = [await innocent.enqueue(n) for n in range(50)]
        bad = await killer.enqueue()
        jobs += [await innocent.enqueue(n) for n in range(50, 99)]
        await fleet.start()
        with pytest.raises(JobFailed, match="died or froze 5 times"):
            await bad.result(timeout=600)
        assert [await job.result(timeout=600) for job in jobs] == list(range(99))
        assert fleet.deaths == 5
        assert {(await job.info()).failures for job in jobs} == {0}

    virtual(story)


def test_a_killer_that_strikes_late_is_found_among_jobs_that_run_long() -> None:
    async def story(world: World) -> None:
        fleet = Fleet(world, 1, lease_ms=3_000)

        @world.app.task
        async def innocent(n: int) -> int:
            await asyncio.sleep(20)
            return n

        @world.app.task
        async def killer() -> None:
            await asyncio.sleep(8)
            fleet.kill_this_one()
            await asyncio.sleep(3600)

        jobs = [await innocent.enqueue(n) for n in range(9)]
        bad = await killer.enqueue()
        await fleet.start()
        with pytest.raises(JobFailed, match="died or froze 5 times"):
            await bad.result(timeout=3600)
        assert [await job.result(timeout=3600) for job in jobs] == list(range(9))

    virtual(story)


def test_many_killers_take_no_innocent_job_along() -> None:
    async def story(world: World) -> None:
        fleet = Fleet(world, 2, lease_ms=3_000)

        @world.app.task
        async def innocent(n: int) -> int:
            await asyncio.sleep(0.5)
            return n

        @world.app.task
        async def killer() -> None:
            fleet.kill_this_one()
            await asyncio.sleep(3600)

        jobs: list[JobHandle[int]] = []
        bad = []
        for n in range(60):
            jobs.append(await innocent.using(delay=n).enqueue(n))
            if n % 10 == 0:
                bad.append(await killer.using(delay=n).enqueue())
        await fleet.start()
        assert [await job.result(timeout=3600) for job in jobs] == list(range(60))
        for job in bad:
            with pytest.raises(JobFailed, match="died or froze 5 times"):
                await job.result(timeout=3600)

    virtual(story)


def test_a_run_that_ends_clears_the_suspicion() -> None:
    """A job that snoozes for months sees many workers die, one deploy at a time."""

    async def story(world: World) -> None:
        runs = []

        @world.app.task
        async def month_after_month() -> None:
            runs.append(world.now_ms)
            await asyncio.sleep(30)
            raise Snooze("30d")

        job = await month_after_month.enqueue()
        for _ in range(12):
            dies = await world.node(lease_ms=2_000)
            await asyncio.sleep(10)
            dies.crash()
            stays = await world.node(lease_ms=2_000)
            await asyncio.sleep(60)
            await stays.stop()
            await asyncio.sleep(30 * 86_400)
        info = await job.info()
        assert (info.state, info.takeovers) == (State.WAITING, 12)
        assert len(runs) == 24

    virtual(story)


def test_ordinary_jobs_go_on_while_a_long_one_is_suspected() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def long() -> None:
            await asyncio.sleep(7_200)

        @world.app.task
        async def quick() -> str:
            return "done"

        job = await long.using(timeout="3h").enqueue()
        for _ in range(2):
            node = await world.node(lease_ms=2_000)
            await asyncio.sleep(5)
            node.crash()
            await asyncio.sleep(5)
        await world.node(lease_ms=2_000)
        await asyncio.sleep(5)
        assert (await job.info()).state is State.RUNNING
        other = await quick.enqueue()
        assert await other.result(timeout=10) == "done", "it waited for the suspect"
        await asyncio.sleep(60)
        for _ in range(10):
            other = await quick.enqueue()
            assert await other.result(timeout=0.1) == "done"

    virtual(story)


# --- Leases


class Locked(FaultyStore):
    """A store whose calls all wait while somebody has it locked, and then go ahead as they are."""

    free: asyncio.Event | None = None

    def __getattr__(self, name: str) -> Any:
        step = super().__getattr__(name)
        if name in ("open", "close"):
            return step

        async def waiting(*args: Any, **kwargs: Any) -> Any:
            if self.free is not None:
                await self.free.wait()
            return await step(*args, **kwargs)

        return waiting


@pytest.mark.parametrize("pool", ["async", "thread"])
@pytest.mark.parametrize("locked_s", [12, 14, 16, 18, 25])
def test_a_worker_never_runs_a_job_beside_itself(locked_s: int, pool: str) -> None:
    async def story(world: World) -> None:
        inside: Counter[str] = Counter()
        most: Counter[str] = Counter()
        ended = threading.Event()

        def enter(id: str) -> None:
            inside[id] += 1
            most[id] = max(most[id], inside[id])

        @world.app.task
        async def slow() -> None:
            context = current_job()
            assert context is not None
            enter(context.job.id)
            try:
                await asyncio.sleep(40)
            finally:
                inside[context.job.id] -= 1

        @world.app.task
        def slow_thread() -> None:
            context = current_job()
            assert context is not None
            enter(context.job.id)
            ended.wait(0.3)
            inside[context.job.id] -= 1

        line = Locked(world.store)
        await world.node(line=line)
        job = await (slow if pool == "async" else slow_thread).enqueue()
        await asyncio.sleep(4)
        line.free = asyncio.Event()
        await asyncio.sleep(locked_s)
        line.free.set()
        line.free = None
        await job.result(timeout=600)
        assert set(most.values()) == {1}, "a second run started beside the first"

    virtual(story)


def test_a_job_is_not_started_while_a_lost_run_of_it_winds_up_here() -> None:
    async def story(world: World) -> None:
        inside = most = runs = 0

        @world.app.task
        async def stubborn() -> None:
            nonlocal inside, most, runs
            inside, runs = inside + 1, runs + 1
            most = max(most, inside)
            try:
                await asyncio.sleep(8)
            except asyncio.CancelledError:
                await asyncio.sleep(4)
                raise
            finally:
                inside -= 1

        node = await world.node(lease_ms=3_000)
        job = await stubborn.enqueue()
        await asyncio.sleep(1)
        node.line.away = True
        await asyncio.sleep(4)
        node.line.away = False
        await job.result(timeout=120)
        assert (most, runs) == (1, 2)

    virtual(story)


def test_what_a_worker_holds_is_handed_back_before_a_trial() -> None:
    """Were its worker killed now, what merely waits there would be lost with the suspect."""

    async def story(world: World) -> None:
        @world.app.task
        async def work(seconds: float) -> None:
            await asyncio.sleep(seconds)

        suspect = await work.enqueue(5)
        for _ in range(2):
            node = await world.node(lease_ms=2_000)
            await asyncio.sleep(1)
            node.crash()
            await asyncio.sleep(3)
        await work.using(delay=0.9).enqueue(0)
        other = await work.using(delay=0.9).enqueue(0)
        await world.node(lease_ms=2_000)
        await asyncio.sleep(0.5)
        assert (await suspect.info()).state is State.RUNNING
        assert (await other.info()).state is State.WAITING
        await suspect.result(timeout=30)
        await other.result(timeout=30)

    virtual(story)


# --- Every way that a run can end


class Panic(BaseException):
    """As extension modules raise them: not an Exception."""


@dataclass
class Unreadable:
    """Raises whatever it is asked."""

    def __post_init__(self) -> None:
        raise Panic("no")


class Hostile:
    def __getattribute__(self, name: str) -> Any:
        raise ZeroDivisionError("hands off")


def hostile_result() -> Any:
    return Hostile()


RAISED: dict[str, Callable[[], BaseException]] = {
    "a panic": lambda: Panic("boom"),
    "GeneratorExit": GeneratorExit,
    "SystemExit": lambda: SystemExit(3),
    "CancelledError": asyncio.CancelledError,
    "StopIteration": StopIteration,
}


@pytest.mark.parametrize("pool", ["async", "thread"])
@pytest.mark.parametrize("what", RAISED)
def test_whatever_a_task_raises_its_slot_is_free_and_the_job_settled(what: str, pool: str) -> None:
    async def story(world: World) -> None:
        @world.app.task(retries=0)
        async def odd() -> None:
            raise RAISED[what]()

        @world.app.task(retries=0)
        def odd_thread() -> None:
            raise RAISED[what]()

        node = await world.node(concurrency=1)
        job = await (odd if pool == "async" else odd_thread).enqueue()
        with pytest.raises(JobFailed):
            await job.result(timeout=10)
        assert (await job.info()).attempts == 1
        assert node.worker.running == 0

    virtual(story)


def test_a_result_that_raises_while_it_is_encoded_leaves_the_job_done() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def odd() -> Any:
            return hostile_result()

        node = await world.node(concurrency=1)
        job = await odd.enqueue()
        await asyncio.sleep(1)
        info = await job.info()
        assert info.state is State.DONE
        assert info.error is not None and "not kept" in info.error
        assert node.worker.running == 0

    virtual(story)


def test_an_argument_that_raises_while_it_is_read_fails_its_job_alone() -> None:
    async def story(world: World) -> None:
        @world.app.task(retries=0)
        async def odd(value: Unreadable) -> None: ...

        @world.app.task
        async def fine() -> str:
            return "done"

        node = await world.node(concurrency=1)
        [job] = await world.app.enqueue_many([_with_payload(fine.job(), "odd", '{"value":{}}')])
        with pytest.raises(JobFailed, match="Panic"):
            await job.result(timeout=10)
        assert node.worker.running == 0
        assert await (await fine.enqueue()).result(timeout=10) == "done"

    virtual(story)


def _with_payload(job: Any, task: str, payload: str) -> Any:
    return msgspec.structs.replace(job, task=task, payload=payload)


@pytest.mark.parametrize("how", ["value", "error", "retry"])
def test_what_we_stopped_is_released_whatever_it_made_of_that(how: str) -> None:
    async def story(world: World) -> None:
        @world.app.task(retries=0)
        async def stubborn() -> None:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if how == "error":
                    raise RuntimeError("interrupted") from None
                if how == "retry":
                    raise Retry("1m") from None
                raise ValueError from None

        node = await world.node(grace_ms=1_000)
        job = await stubborn.enqueue()
        await asyncio.sleep(1)
        await node.stop()
        info = await job.info()
        # A task may still choose its outcome; with no retries left that is dead.
        assert info.state is (State.DEAD if how == "retry" else State.WAITING)
        assert info.failures == (how == "retry")

    virtual(story)


@pytest.mark.parametrize("pool", ["async", "thread"])
def test_jobs_in_hand_when_their_loop_ends_are_released_not_failed(pool: str) -> None:
    """A bare worker task at the end of `asyncio.run`: everything on the loop is cancelled."""
    store = MemoryStore()
    app = App(store)
    begun = threading.Event()

    @app.task(retries=0)
    async def slow() -> None:
        begun.set()
        await asyncio.sleep(3600)

    @app.task(retries=0)
    def slow_thread() -> None:
        begun.set()
        context = current_job()
        assert context is not None
        deadline = time.monotonic() + 20
        while not context.stopping and time.monotonic() < deadline:
            time.sleep(0.01)
        raise RuntimeError("stopped")

    async def main() -> str:
        async def work() -> None:
            async with app.worker(guarded=False):
                await asyncio.sleep(3600)

        keep = asyncio.create_task(work())
        job = await (slow if pool == "async" else slow_thread).enqueue()
        while not begun.is_set():
            await asyncio.sleep(0.01)
        assert not keep.done()
        return job.id

    id = asyncio.run(main())

    async def look() -> Any:
        return (await store.get([id]))[0]

    job = asyncio.run(look())
    assert job.failures == 0
    assert job.state in (State.WAITING, State.RUNNING), job
    if pool == "async":
        assert (job.state, job.history[-1].outcome) == (State.WAITING, Outcome.RELEASE)


def test_an_interrupt_that_hits_a_task_ends_the_program_and_releases_the_job() -> None:
    store = MemoryStore()
    app = App(store)

    @app.task(retries=0)
    async def interrupted() -> None:
        raise KeyboardInterrupt

    ids = []

    async def main() -> None:
        async with app.worker(guarded=False):
            ids.append((await interrupted.enqueue()).id)
            await asyncio.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())

    async def look() -> Any:
        return (await store.get(ids))[0]

    job = asyncio.run(look())
    assert (job.state, job.failures) == (State.WAITING, 0)


def test_a_job_stopped_in_the_very_turn_of_its_start_is_settled_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def slow() -> None:
            await asyncio.sleep(0.5)

        node = await world.node()
        runs = node.worker._runs
        start = runs.start
        stopped: list[Any] = []

        def start_and_stop(held: Any) -> None:
            start(held)
            if not stopped:
                stopped.append(held)
                runs.stop(held, Stop.RELEASE)

        runs.start = start_and_stop  # type: ignore[method-assign]
        job = await slow.enqueue()
        await job.result(timeout=2)
        assert (await job.info()).attempts == 2
        assert "ignores its cancellation" not in caplog.text

    with caplog.at_level(logging.WARNING, "tickwheel"):
        virtual(story)


# --- Threads


async def _until(happened: Callable[[], bool], within_s: float = 20) -> None:
    async with asyncio.timeout(within_s):
        while not happened():
            await asyncio.sleep(0.01)


@pytest.fixture
def hung() -> Any:
    """Threads that hang until the test is over."""
    free = threading.Event()
    yield free
    free.set()


async def test_a_job_that_finds_no_free_thread_is_not_failed_for_it(hung: threading.Event) -> None:
    app = App(MemoryStore())

    @app.task(timeout=0.2, retries=0)
    def hang() -> None:
        hung.wait(60)

    @app.task(timeout=0.2, retries=0)
    def fine() -> str:
        return "done"

    async with app, app.worker(concurrency=2, guarded=False, grace=0):
        # Twice as many threads as slots: all of them hang.
        for _ in range(2):
            for job in [await hang.enqueue() for _ in range(2)]:
                with pytest.raises(JobFailed, match="timeout"):
                    await job.result(timeout=20)
        waiting = await fine.enqueue()
        await asyncio.sleep(1.5)
        assert (await waiting.info()).failures == 0
        hung.set()
        assert await waiting.result(timeout=20) == "done"


async def test_a_cancelled_thread_job_still_times_out(hung: threading.Event) -> None:
    app = App(MemoryStore())

    @app.task(timeout=0.5, retries=0)
    def hang() -> None:
        hung.wait(60)

    async with app, app.worker(concurrency=1, guarded=False, grace=0) as worker:
        job = await hang.enqueue()
        await _until(lambda: worker.running == 1)
        assert await job.cancel() is Cancelled.ASKED
        await _until(lambda: worker.running == 0)
        async with asyncio.timeout(10):
            while not (await job.info()).state.ended:
                await asyncio.sleep(0.01)


# --- The clock


@pytest.mark.parametrize("step_s", [-7_200, -2, -0.2, 0.2, 2, 7_200])
def test_no_job_starts_early_by_a_clock_that_was_set(step_s: float) -> None:
    async def story(world: World) -> None:
        started: dict[int, int] = {}

        @world.app.task
        async def note(due_ms: int) -> None:
            started[due_ms] = world.now_ms

        await world.node()
        due = [world.now_ms + 5_000, world.now_ms + 5_500, world.now_ms + 20_000]
        jobs = [await note.using(delay=(ms - world.now_ms) / 1000).enqueue(ms) for ms in due]
        # The first two are in a wheel when the clock is set.
        await asyncio.sleep(4.7)
        world.set_clock(step_s)
        await asyncio.sleep(30 + max(-step_s, 0))
        assert sorted(started) == due
        assert [ms for ms in due if started[ms] < ms] == [], "early"
        if step_s < 0:
            assert [ms for ms in due if started[ms] > ms + 5] == [], "late"
        assert {(await job.info()).attempts for job in jobs} == {1}, "a lease was given up"

    virtual(story)


def test_a_job_that_waits_for_a_slot_is_not_early_when_the_clock_is_set_back() -> None:
    async def story(world: World) -> None:
        started = []

        @world.app.task
        async def work(seconds: float) -> None:
            started.append(world.now_ms)
            await asyncio.sleep(seconds)

        await world.node(concurrency=1)
        await work.enqueue(1.5)
        waits = await work.using(delay=1).enqueue(0)
        await asyncio.sleep(1.2)
        world.set_clock(-60)
        due_ms = (await waits.info()).due.timestamp() * 1000
        await asyncio.sleep(90)
        assert len(started) == 2
        assert due_ms <= started[1] <= due_ms + 2_000

    virtual(story)


@pytest.mark.parametrize("step_s", [-3_600, 3_600, 5])
def test_no_lease_is_lost_when_the_clock_is_set(step_s: float) -> None:
    async def story(world: World) -> None:
        @world.app.task(timeout="2m")
        async def slow() -> None:
            await asyncio.sleep(60)

        for _ in range(3):
            await world.node(lease_ms=4_000)
        jobs = [await slow.enqueue() for _ in range(20)]
        await asyncio.sleep(5)
        world.set_clock(step_s)
        await asyncio.sleep(70)
        infos = [await job.info() for job in jobs]
        assert {info.state for info in infos} == {State.DONE}
        assert {(info.attempts, info.takeovers) for info in infos} == {(1, 0)}

    virtual(story)


def test_a_lease_still_ends_after_the_clock_was_set_back() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def slow() -> None:
            await asyncio.sleep(10)

        dies = await world.node(lease_ms=4_000)
        job = await slow.enqueue()
        await asyncio.sleep(1)
        dies.crash()
        world.set_clock(-3_600)
        other = await world.node(lease_ms=4_000)
        await asyncio.sleep(6)
        info = await job.info()
        assert (info.takeovers, info.worker) == (1, other.name)

    virtual(story)


# --- A choice of the task's


def test_giving_up_is_a_choice_also_when_asked_to_stop() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def picky() -> None:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                raise GiveUp("no more") from None

        await world.node()
        job = await picky.enqueue()
        await asyncio.sleep(1)
        await job.cancel()
        with pytest.raises(JobFailed, match="no more"):
            await job.result(timeout=10)

    virtual(story)


# --- Jobs that end their worker in other ways, and innocent ones by the dozen


async def interrupt() -> None:
    raise KeyboardInterrupt


async def cancel_all() -> None:
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(3600)


async def exit_in_a_subtask() -> None:
    async def leave() -> None:
        raise SystemExit(1)

    await asyncio.gather(leave())


ENDINGS: dict[str, Callable[[], Any]] = {
    "an interrupt": interrupt,
    "cancelling all": cancel_all,
    "an exit in a subtask": exit_in_a_subtask,
}


@pytest.mark.parametrize("how", ENDINGS)
def test_a_job_that_ends_its_worker_from_within_is_found_out_too(how: str) -> None:
    """Not killed, but cancelled with its event loop: each time another worker is started."""
    store = MemoryStore()
    app = App(store)

    @app.task
    async def ends() -> None:
        await ENDINGS[how]()

    @app.task
    async def innocent(n: int) -> int:
        await asyncio.sleep(0.02)
        return n

    async def main(ids: list[str]) -> bool:
        async with app.worker(guarded=False):
            for _ in range(500):
                jobs = await store.get(ids)
                if all(job is not None and job.state.ended for job in jobs):
                    return True
                await asyncio.sleep(0.01)
        return False

    async def enqueue() -> list[str]:
        bad = await ends.enqueue()
        return [bad.id, *[(await innocent.enqueue(n)).id for n in range(10)]]

    ids = asyncio.run(enqueue())
    for _ in range(12):
        with contextlib.suppress(KeyboardInterrupt, SystemExit, asyncio.CancelledError):
            if asyncio.run(main(ids)):
                break

    async def look() -> list[Any]:
        return list(await store.get(ids))

    bad, *others = asyncio.run(look())
    assert (bad.state, bad.failures) == (State.DEAD, 0), bad
    assert {(job.state, job.failures) for job in others} == {(State.DONE, 0)}


def test_jobs_that_were_lost_twice_by_no_fault_of_theirs_run_side_by_side() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def slow(n: int) -> int:
            await asyncio.sleep(15)
            return n

        jobs = [await slow.enqueue(n) for n in range(50)]
        for _ in range(2):
            node = await world.node(lease_ms=2_000)
            await asyncio.sleep(5)
            node.crash()
            await asyncio.sleep(3)
        start = world.now_ms
        await world.node(lease_ms=2_000)
        assert [await job.result(timeout=600) for job in jobs] == list(range(50))
        assert world.now_ms - start < 90_000

    virtual(story)


def test_many_killers_all_end_dead() -> None:
    async def story(world: World) -> None:
        fleet = Fleet(world, 1, lease_ms=1_000)

        @world.app.task
        async def innocent(n: int) -> int:
            await asyncio.sleep(0.1)
            return n

        @world.app.task
        async def killer() -> None:
            fleet.kill_this_one()
            await asyncio.sleep(3600)

        bad = [await killer.enqueue() for _ in range(25)]
        jobs = [await innocent.enqueue(n) for n in range(25)]
        await fleet.start()
        for job in bad:
            with pytest.raises(JobFailed, match="died or froze 5 times"):
                await job.result(timeout=3600)
        assert [await job.result(timeout=3600) for job in jobs] == list(range(25))
        assert fleet.deaths <= 2 + 25 * 3

    virtual(story)


async def test_a_thread_that_outlasts_its_worker_has_the_time_of_a_lease(
    hung: threading.Event,
) -> None:
    """Its job is handed back, but not for at once: the thread still works on it."""
    store = MemoryStore()
    app = App(store)

    @app.task(retries=0)
    def hang() -> None:
        hung.wait(60)

    async with app:
        async with app.worker(guarded=False, grace=0.1, lease="5s") as worker:
            job = await hang.enqueue()
            await _until(lambda: worker.running == 1)
            await asyncio.sleep(0.05)
        info = await job.info()
    assert (info.state, info.failures) == (State.WAITING, 0)
    assert info.history[-1].outcome is Outcome.RELEASE
    left_s = info.due.timestamp() - info.history[-1].ended_ms / 1000
    assert 4.9 <= left_s <= 5.1
