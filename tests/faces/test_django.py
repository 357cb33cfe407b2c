"""`tickwheel.django`, in a real project, in processes of its own."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django_project import Project, postgres_database, sqlite_database, until

from postgres_server import PostgresServer, shared_server

pytestmark = pytest.mark.slow

# Where the jobs are, as the settings say it: in Django's database, beside it with an outbox there,
# and beside it without one.
PLACES = ("postgresql", "postgresql-outbox", "postgresql-beside", "sqlite-outbox", "sqlite-beside")


EMPTY_OUTBOX = """
async def main():
    async with app:
        if app.outbox:
            await app.outbox.empty((await app.client()).store)
        return sum([queue.waiting for queue in await app.queues()])
waiting = asyncio.run(main())
"""


def make(place: str, folder: Path, **more: Any) -> Project:
    kind, _, how = place.partition("-")
    if kind == "sqlite":
        database = sqlite_database(folder)
    else:
        database = postgres_database(shared_server(), f"django_{secrets.token_hex(4)}")
    settings: dict[str, Any] = {"store": "default"}
    if how:
        settings = {"store": f"sqlite:///{folder}/jobs.db"}
    if how == "outbox":
        settings["outbox"] = "default"
    project = Project(folder, database, settings | more.pop("settings", {}), **more)
    # As a first deploy does: the tables of Django, of the store and of the outbox.
    project.script(
        "import asyncio\n"
        "from django.core.management import call_command\n"
        "from tickwheel.django import app\n"
        "call_command('migrate', run_syncdb=True, verbosity=0)\n" + EMPTY_OUTBOX
    )
    return project


@pytest.mark.parametrize("place", ["postgresql", "sqlite-outbox"])
def test_a_worker_runs_tasks_of_all_installed_apps_in_every_pool(
    place: str, tmp_path: Path
) -> None:
    project = make(place, tmp_path)
    with project.worker("--threads", "2") as worker:
        said = project.script(
            "from shop.models import Order\n"
            "from shop.tasks import app, pay, report, ship\n"
            "from mail.tasks import send\n"
            "order = Order.objects.create(state='new')\n"
            "jobs = [task.enqueue_sync(order.id) for task in (pay, ship, report, send)]\n"
            "print([app.sync.result(job, timeout=60) for job in jobs])\n"
            "order.refresh_from_db()\n"
            "print(order.state)"
        )
    results, state = said.splitlines()
    assert results.startswith("['thread', 'async', ") and "'sent 1'" in results
    assert state in ("paid", "shipped")
    assert "tasks        pay, report, send, ship, slow" in worker.said
    assert "threads      2" in worker.said
    assert "project" in project.script("from tickwheel.django import app; print(app.name)")


IN_ATOMIC = """
from django.db import transaction
from shop.models import Order
from shop.tasks import app, pay

class Undo(Exception): ...

def place(undo):
    with transaction.atomic():
        order = Order.objects.create(state="new")
        later = pay.using(delay="1h")
        later.enqueue_sync(order.id)
        app.sync.enqueue_many([later.job(order.id), later.job(order.id)])
        if undo:
            raise Undo

try:
    place(undo=True)
except Undo:
    place(undo=False)
"""


@pytest.mark.parametrize("place", PLACES)
def test_in_a_transaction_a_job_is_added_if_and_only_if_it_is_committed(
    place: str, tmp_path: Path
) -> None:
    project = make(place, tmp_path)
    project.script(IN_ATOMIC)
    found = project.script(
        "import asyncio\n"
        "from shop.models import Order\n"
        "from tickwheel.django import app\n"
        f"{EMPTY_OUTBOX}\n"
        "print(waiting, Order.objects.count())"
    )
    assert found == "3 1"


@pytest.mark.parametrize("place", ["postgresql", "postgresql-outbox", "sqlite-outbox"])
def test_a_job_in_the_same_database_is_part_of_the_transaction(place: str, tmp_path: Path) -> None:
    """Not only enqueued after it: a crash in between loses nothing."""
    project = make(place, tmp_path)
    said = project.script(
        "from django.db import connection, transaction\n"
        "from shop.tasks import pay\n"
        "with transaction.atomic():\n"
        "    job = pay.enqueue_sync(1)\n"
        "    print(len(connection.run_on_commit), job.added)\n"
    )
    assert said == "0 True"


def test_beside_the_database_a_job_is_enqueued_on_commit(tmp_path: Path) -> None:
    project = make("postgresql-beside", tmp_path)
    said = project.script(
        "from django.db import connection, transaction\n"
        "from shop.tasks import app, pay\n"
        "with transaction.atomic():\n"
        "    job = pay.using(delay='1h').enqueue_sync(1)\n"
        "    print(len(connection.run_on_commit), len(app.sync.queues()))\n"
        "print(app.sync.info(job).state)\n"
    )
    assert said == "1 0\nwaiting"


@pytest.mark.parametrize("task", ["pay", "ship", "report"])
def test_connections_are_closed_after_each_run(tmp_path: Path, task: str) -> None:
    project = make("postgresql-beside", tmp_path)
    [database] = project.script(
        "from django.db import connection; print(connection.settings_dict['NAME'])"
    ).split()

    def connections() -> int:
        [[count]] = shared_server().execute(
            f"select count(*) from pg_stat_activity where datname = '{database}'"
        )
        assert isinstance(count, int)
        return count

    with project.worker():
        said = project.script(
            "from shop.models import Order\n"
            f"from shop.tasks import app, {task}\n"
            "order = Order.objects.create(state='new')\n"
            f"jobs = [{task}.enqueue_sync(order.id) for _ in range(10)]\n"
            "for job in jobs: app.sync.result(job, timeout=60)\n"
            "print('done')"
        )
        assert said == "done"
        until(lambda: connections() == 0, "connections to close", seconds=20)


@pytest.fixture
def small_server() -> Iterator[PostgresServer]:
    server = PostgresServer(fast=True, settings={"max_connections": "100"})
    try:
        server.create()
        server.start()
        yield server
    finally:
        server.remove()


def test_a_stock_worker_takes_no_more_connections_than_a_database_has(
    small_server: PostgresServer, tmp_path: Path
) -> None:
    database = postgres_database(small_server, "shop")
    project = Project(tmp_path, database, {"store": "default"})
    project.manage("migrate", "--run-syncdb", "-v0")
    project.script(
        "from shop.tasks import app, slow\napp.sync.enqueue_many([slow.job(n) for n in range(300)])"
    )
    with project.worker() as worker:
        url = f"postgresql://postgres@127.0.0.1:{small_server.port}/shop"
        with psycopg.connect(url, autocommit=True) as db:

            def ended() -> bool:
                [[left]] = db.execute(
                    "select count(*) from tickwheel.job where state in ('waiting', 'running')"
                ).fetchall()
                return bool(left == 0)

            until(ended, "all jobs", seconds=90)
            states = db.execute("select state, count(*) from tickwheel.job group by 1").fetchall()
            [[orders]] = db.execute("select count(*) from shop_order").fetchall()
    assert (states, orders) == ([("done", 300)], 300), worker.said


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stroe": "memory://"}, "TICKWHEEL has no setting 'stroe'; did you mean store?"),
        ({"store": "defualt"}, "neither a URL nor one of DATABASES; did you mean default?"),
        ({"store": "default"}, "two SQLite libraries in one process can't share a file"),
        ({"store": "memory://", "lease": "soon"}, "'soon' is not a duration"),
    ],
)
def test_what_is_wrong_in_the_settings_is_told_in_one_line(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    project = Project(tmp_path, sqlite_database(tmp_path), settings)
    said = project.fails("tickwheel_worker")
    assert said.startswith("CommandError: ") and words in said


def test_several_worker_processes_and_the_command_line_know_the_project(tmp_path: Path) -> None:
    settings = {"processes": 2, "concurrency": 3, "http": ":0", "objective": "99% within 1s"}
    project = make("sqlite-beside", tmp_path, settings=settings)
    with project.worker() as worker:
        assert "paid" in project.script(
            "from shop.models import Order\n"
            "from shop.tasks import app, pay\n"
            "order = Order.objects.create(state='new')\n"
            "app.sync.result(pay.enqueue_sync(order.id), timeout=60)\n"
            "order.refresh_from_db()\n"
            "print(order.state)"
        )
    assert "concurrency  3 each" in worker.said
    assert "metrics at http://127.0.0.1:" in worker.said
    listed = project._run("-m", "tickwheel", "jobs", "--app", "tickwheel.django:app")
    assert "pay" in listed


def test_in_the_sandbox_a_job_of_a_django_test_joins_no_transaction(tmp_path: Path) -> None:
    project = make("postgresql", tmp_path)
    (tmp_path / "shop" / "tests.py").write_text(
        "from django.db import transaction\n"
        "from django.test import TestCase\n"
        "from shop.models import Order\n"
        "from shop.tasks import app, pay\n"
        "from tickwheel.testing import sandbox\n"
        "class Tests(TestCase):\n"
        "    def test_pays(self):\n"
        "        with sandbox(app) as box:\n"
        "            with transaction.atomic():\n"
        "                order = Order.objects.create(state='new')\n"
        "                pay.enqueue_sync(order.id)\n"
        "            box.drain()\n"
        "            order.refresh_from_db()\n"
        "            self.assertEqual(order.state, 'paid')\n"
    )
    project.manage("test", "shop", "--noinput")


# --- django.tasks


DJANGO_TASKS = """
from django_tasks import task

@task(priority=60, queue_name="fast")
def add(a: int, b: int) -> int:
    return a + b

@task()
async def shout(words: str) -> str:
    return words.upper()

@task(takes_context=True)
def fail(context) -> None:
    raise ValueError(f"attempt {context.attempt}")
"""


@pytest.mark.parametrize("place", ["postgresql", "sqlite-beside"])
def test_tasks_of_djangos_own_run(place: str, tmp_path: Path) -> None:
    project = make(
        place,
        tmp_path,
        apps='"django_tasks"',
        options='"QUEUES": ["default", "fast"], "OPTIONS": {"retries": 0}',
    )
    (tmp_path / "mail" / "tasks.py").write_text(DJANGO_TASKS)
    with project.worker("--queues", "default,fast") as worker:
        said = project.script(
            "import time\n"
            "from concurrent.futures import ThreadPoolExecutor\n"
            "from datetime import timedelta\n"
            "from django.utils import timezone\n"
            "from django.db import transaction\n"
            "from django_tasks.exceptions import TaskResultDoesNotExist\n"
            "from mail.tasks import add, shout, fail\n"
            "def ended(result):\n"
            "    for _ in range(600):\n"
            "        result.refresh()\n"
            "        if result.is_finished: return result\n"
            "        time.sleep(0.1)\n"
            "    raise AssertionError(result)\n"
            "with transaction.atomic():\n"
            "    result = add.enqueue(1, b=2)\n"
            "print(result.status, ended(result).return_value, result.attempts)\n"
            "print(ended(shout.enqueue('a')).return_value)\n"
            "print(add.get_result(result.id).return_value)\n"
            "failed = ended(fail.enqueue())\n"
            "[error] = failed.errors\n"
            "print(failed.status, error.exception_class.__name__, 'attempt 1' in error.traceback)\n"
            "with ThreadPoolExecutor(1) as pool: other = pool.submit(add.enqueue, 2, 2).result()\n"
            "print(ended(other).return_value)\n"
            "later = add.using(run_after=timezone.now() + timedelta(hours=1)).enqueue(1, 1)\n"
            "later.refresh(); print(later.status, later.started_at)\n"
            "try: add.get_result('unknown')\n"
            "except TaskResultDoesNotExist: print('unknown')\n"
        )
    assert said.splitlines() == [
        "READY 3 1",
        "A",
        "3",
        "FAILED ValueError True",
        "4",
        "READY None",
        "unknown",
    ], worker.said
    listed = project._run("-m", "tickwheel", "jobs", "--app", "tickwheel.django:app", "-o", "json")
    assert '"mail.tasks.add"' in listed
