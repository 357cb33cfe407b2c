"""Several apps and several deploys on one store: nobody fails a job that is another's."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections import Counter
from importlib.machinery import ModuleSpec
from typing import Any

import msgspec
import pytest
from world import Node, World, virtual

from tickwheel import App, BadConfig, State
from tickwheel.engine.scheduler import RECONCILE_MS
from tickwheel.job import ENDED_WITH_WORKER, Job, Outcome, Run, losses
from tickwheel.schedule import Rule, Schedule
from tickwheel.testing import FaultyStore

MINUTE = 60
RECONCILED_S = 3 * RECONCILE_MS / 1000


def app_of(world: World, name: str, *tasks: str) -> tuple[App, list[tuple[str, int]]]:
    """An app with these tasks, and what ran in it: the id, and how late."""
    app = App(world.store, name=name, clock=world.clock)
    ran: list[tuple[str, int]] = []
    for task in tasks:
        app.task(name=task)(_noting(world, ran))
    return app, ran


def _noting(world: World, ran: list[tuple[str, int]]) -> Any:
    async def work(id: str, due_ms: int) -> None:
        ran.append((id, world.now_ms - due_ms))

    return work


async def enqueue(world: World, app: App, task: str, id: str, delay_ms: int = 0) -> None:
    due_ms = world.now_ms + delay_ms
    payload = msgspec.json.encode({"id": id, "due_ms": due_ms}).decode()
    fields = {"id": id, "task": task, "payload": payload}
    job = msgspec.convert(fields | {"due_ms": due_ms, "created_ms": world.now_ms}, Job)
    await world.store.add([job])


class Counting(FaultyStore):
    """Counts the calls of one node."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return super().__getattr__(name)


# --- Jobs of tasks that a worker doesn't know


def test_a_worker_puts_back_what_it_does_not_know_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(world: World) -> None:
        app, _ = app_of(world, "known", "known")
        for n in range(50):
            await enqueue(world, app, "unheard_of", f"job-{n}")
        await world.node(app=app)
        await asyncio.sleep(10 * MINUTE)
        for n in range(50):
            job = await world.stored(f"job-{n}")
            assert (job.state, job.parked) == (State.WAITING, True)
            assert (job.failures, job.takeovers, job.attempt) == (0, 0, 1)
        told = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
        [warning] = [each for each in told if "unheard_of" in each]
        assert "no task is named 'unheard_of' here; the tasks are: known" in warning

    virtual(story)


def test_a_worker_that_starts_later_runs_what_was_put_back() -> None:
    async def story(world: World) -> None:
        ignorant, _ = app_of(world, "one", "one")
        knowing, ran = app_of(world, "two", "two")
        await enqueue(world, knowing, "two", "job")
        await world.node(app=ignorant)
        await asyncio.sleep(MINUTE)
        await world.node(app=knowing)
        await asyncio.sleep(0.1)
        assert [id for id, _ in ran] == ["job"]

    virtual(story)


def test_a_job_that_the_wrong_worker_claimed_first_still_starts_on_time() -> None:
    async def story(world: World) -> None:
        ignorant, _ = app_of(world, "one", "one")
        knowing, ran = app_of(world, "two", "two")
        await world.node(app=ignorant)
        await world.node(app=knowing)
        await asyncio.sleep(1)
        for n in range(200):
            await enqueue(world, knowing, "two", f"job-{n}", delay_ms=5_000 + 10 * n)
        await asyncio.sleep(10)
        assert len(ran) == 200
        assert all(0 <= late <= 1 for _, late in ran)

    virtual(story)


def test_two_apps_share_a_queue_and_no_job_fails() -> None:
    async def story(world: World) -> None:
        apps = [app_of(world, name, name) for name in ("one", "two")]
        for app, _ in apps:
            for _ in range(3):
                await world.node(app=app, concurrency=10)
        for n in range(2_000):
            app, _ = apps[n % 2]
            await enqueue(world, app, app.name, f"job-{n}")
        await asyncio.sleep(MINUTE)
        for _, ran in apps:
            assert len({id for id, _ in ran}) == len(ran) == 1_000
        for n in range(2_000):
            job = await world.stored(f"job-{n}")
            assert (job.state, job.failures, job.takeovers) == (State.DONE, 0, 0)
            assert sum(run.outcome is Outcome.PARK for run in job.history) <= 1

    virtual(story)


def test_nobody_spins_on_jobs_that_nobody_knows() -> None:
    async def story(world: World) -> None:
        app, _ = app_of(world, "one", "one")
        line = Counting(world.store)
        await world.node(app=app, line=line)
        for n in range(1_000):
            await enqueue(world, app, "unheard_of", f"job-{n}")
        await asyncio.sleep(5)
        line.calls.clear()
        await asyncio.sleep(MINUTE)
        assert line.calls["claim"] <= 2 * MINUTE / 5
        assert line.calls["settle"] == 0

    virtual(story)


@pytest.mark.parametrize("seed", range(4))
def test_in_a_rolling_deploy_tasks_come_and_go_and_no_job_dies(seed: int) -> None:
    """Ten minutes, four nodes, a new version each minute or so; each version drops a task and has a
    new one, which is enqueued as soon as the first node has it."""

    async def story(world: World) -> None:
        dice = random.Random(seed)
        ran: list[list[tuple[str, int]]] = []
        enqueued: list[str] = []

        async def node_of(version: int) -> Node:
            # Each knows the tasks of its own version and of the one before.
            names = [f"task-{each}" for each in (version - 1, version)]
            app, noted = app_of(world, "shop", *names)
            ran.append(noted)
            return await world.node(app=app, lease_ms=5_000)

        async def produce(version: int) -> None:
            app, _ = app_of(world, "web")
            for _ in range(50):
                id = f"{version}-{len(enqueued)}"
                delay_ms = dice.choice([0, 0, 500, 3_000])
                await enqueue(world, app, f"task-{version}", id, delay_ms)
                enqueued.append(id)
                await asyncio.sleep(dice.uniform(0, 0.5))

        nodes = [await node_of(0) for _ in range(4)]
        for version in range(1, 10):
            producing = None
            for place in range(4):
                old, nodes[place] = nodes[place], await node_of(version)
                if dice.random() < 0.5:
                    await old.stop()
                else:
                    old.crash()
                producing = producing or asyncio.create_task(produce(version))
                await asyncio.sleep(dice.uniform(1, 12))
            assert producing is not None
            await producing
        await asyncio.sleep(30)
        assert {id for noted in ran for id, _ in noted} >= set(enqueued)
        for id in enqueued:
            job = await world.stored(id)
            assert (job.state, job.failures) == (State.DONE, 0), id

    virtual(story)


def test_a_parameter_that_only_the_new_version_has_makes_no_job_dead() -> None:
    async def story(world: World) -> None:
        old, new = (App(world.store, name="shop", clock=world.clock) for _ in range(2))

        @old.task(name="mail")
        async def mail_before(to: str) -> None: ...

        @new.task(name="mail")
        async def mail(to: str, cc: str = "") -> None: ...

        old_node = await world.node(app=old)
        await world.node(app=new)
        handles = [await mail.enqueue("ann", cc="bob") for _ in range(50)]
        await asyncio.sleep(10)
        await old_node.stop()
        await asyncio.sleep(2 * MINUTE)
        for handle in handles:
            assert (await world.stored(handle.id)).state is State.DONE

    virtual(story)


def test_a_job_that_ends_its_workers_is_not_blamed_for_those_that_parked_it() -> None:
    ended = [
        Run(attempt=n, worker="w", outcome=outcome, due_ms=0, ended_ms=0, error=error)
        for n, (outcome, error) in enumerate(
            [(Outcome.RELEASE, ENDED_WITH_WORKER), (Outcome.PARK, ENDED_WITH_WORKER)] * 2
        )
    ]
    assert losses(tuple(ended)) == 2


def test_a_worker_tells_its_app_and_the_tasks_that_it_knows() -> None:
    async def story(world: World) -> None:
        app, _ = app_of(world, "shop", "pack", "mail")
        await world.node(app=app)
        await asyncio.sleep(1)
        [info] = await world.app.workers()
        assert (info.app, info.tasks) == ("shop", ("mail", "pack"))
        assert info.knows("mail") and not info.knows("bill")

    virtual(story)


def test_an_app_is_named_after_the_module_that_makes_it() -> None:
    assert App("memory://").name == "test_sharing"
    assert App("memory://", name="shop").name == "shop"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ({"__name__": "__main__", "__file__": "/srv/shop.py"}, "shop"),
        ({"__name__": "__main__", "__spec__": ModuleSpec("proj.shop", None)}, "proj.shop"),
        ({"__name__": "__main__", "__spec__": ModuleSpec("shop.__main__", None)}, "shop"),
        ({"__name__": "__main__", "__file__": "/srv/my shop (1).py"}, "my_shop__1_"),
        ({"__name__": "größe"}, "gr__e"),
        ({"__name__": "<run_path>"}, "_run_path_"),
        ({"__name__": "__main__"}, "app"),
    ],
)
def test_any_module_gives_its_app_a_name(module: dict[str, Any], name: str) -> None:
    script = module | {"App": App}
    exec("app = App('memory://')", script)
    assert script["app"].name == name


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(BadConfig, match="app name"):
        App("memory://", name="")


# --- Schedules of several apps


def with_schedules(world: World, app: str, *names: str) -> App:
    """An app that declares these schedules, each with a task of its own."""
    made = App(world.store, name=app, clock=world.clock)
    for name in names:

        async def work() -> None: ...

        made.every("10s", name=name)(made.task(name=name)(work))
    return made


async def schedules(world: World) -> set[str]:
    return {each.name for each in await world.store.schedules()}


def test_a_schedule_whose_function_was_deleted_is_deleted_too() -> None:
    async def story(world: World) -> None:
        node = await world.node(app=with_schedules(world, "shop", "kept", "gone"))
        await asyncio.sleep(30)
        await node.stop()
        await world.node(app=with_schedules(world, "shop", "kept"))
        await asyncio.sleep(RECONCILED_S)
        assert await schedules(world) == {"kept"}

    virtual(story)


def test_one_app_leaves_the_schedules_of_another_alone() -> None:
    async def story(world: World) -> None:
        node = await world.node(app=with_schedules(world, "shop", "ours"))
        await asyncio.sleep(5)
        await node.stop()
        await world.node(app=with_schedules(world, "blog", "theirs"))
        await asyncio.sleep(10 * RECONCILED_S)
        assert await schedules(world) == {"ours", "theirs"}

    virtual(story)


def test_an_app_that_is_replaced_within_a_minute_keeps_its_schedules_among_namesakes() -> None:
    async def story(world: World) -> None:
        node = await world.node(app=with_schedules(world, "app", "ours"))
        await asyncio.sleep(5)
        await node.stop()
        await world.node(app=with_schedules(world, "app", "theirs"))
        await asyncio.sleep(30)
        await world.node(app=with_schedules(world, "app", "ours"))
        await asyncio.sleep(10 * RECONCILED_S)
        assert await schedules(world) == {"ours", "theirs"}

    virtual(story)


def test_two_apps_that_declare_one_name_are_told_and_the_first_keeps_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(world: World) -> None:
        await world.node(app=with_schedules(world, "shop", "nightly"))
        await asyncio.sleep(5)
        await world.node(app=with_schedules(world, "blog", "nightly"))
        await asyncio.sleep(RECONCILED_S)
        [stored] = await world.store.schedules()
        assert Rule.decode(stored.rule).app == "shop"
        assert "schedule nightly is also declared by the app shop" in caplog.text

    virtual(story)


async def owner(world: World) -> str | None:
    [stored] = await world.store.schedules()
    return Rule.decode(stored.rule).app


def test_an_app_keeps_its_schedule_while_it_is_restarted(caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: World) -> None:
        node = await world.node(app=with_schedules(world, "shop", "nightly"))
        await asyncio.sleep(5)
        await node.stop()
        await world.node(app=with_schedules(world, "blog", "nightly"))
        await asyncio.sleep(RECONCILE_MS / 1000 - 5)
        assert await owner(world) == "shop"
        assert "schedule nightly is also declared by the app shop, which keeps it" in caplog.text
        await world.node(app=with_schedules(world, "shop", "nightly"))
        await asyncio.sleep(10 * RECONCILED_S)
        assert await owner(world) == "shop"

    virtual(story)


def test_an_app_that_is_renamed_gets_its_schedules_and_loses_no_tick() -> None:
    async def story(world: World) -> None:
        node = await world.node(app=with_schedules(world, "shop", "nightly"))
        await asyncio.sleep(5)
        await node.stop()
        await world.node(app=with_schedules(world, "store", "nightly"))
        await asyncio.sleep(RECONCILED_S)
        assert await owner(world) == "store"
        ticks = sorted(job.due_ms for job in world.store._jobs.values())
        assert len(ticks) > 10
        assert {late - early for early, late in itertools.pairwise(ticks)} == {10_000}

    virtual(story)


def test_a_schedule_moves_to_another_app_though_the_first_goes_on() -> None:
    async def story(world: World) -> None:
        node = await world.node(app=with_schedules(world, "shop", "nightly"))
        await asyncio.sleep(5)
        await world.node(app=with_schedules(world, "blog", "nightly"))
        await node.stop()
        await world.node(app=with_schedules(world, "shop"))
        await asyncio.sleep(RECONCILED_S)
        assert await owner(world) == "blog"

    virtual(story)


def test_a_schedule_gets_its_owner_and_loses_no_tick_by_that() -> None:
    async def story(world: World) -> None:
        app = with_schedules(world, "shop", "nightly")
        before = msgspec.structs.replace(app.declared["nightly"], app=None)
        missed_ms = world.now_ms // 10_000 * 10_000 - 10_000
        await world.store.put_schedule(
            Schedule(name="nightly", rule=before.encode(), next_ms=missed_ms)
        )
        await world.node(app=app)
        await asyncio.sleep(1)
        [stored] = await world.store.schedules()
        assert Rule.decode(stored.rule).app == "shop"
        done = [job for job in world.store._jobs.values() if job.due_ms == missed_ms]
        assert len(done) == 1

    virtual(story)
