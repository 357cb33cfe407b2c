"""`tickwheel jobs add`, ids by their start, `--since`, and actions on all jobs that match."""

from __future__ import annotations

import asyncio
import io
import re
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from command_line import Cli, Said, cli, ids, one_error

from tickwheel import App
from tickwheel.cli import bulk, prefix
from tickwheel.job import Job
from tickwheel.operate import bulk as operate_bulk

__all__ = ["cli", "ids"]

APP = """
from dataclasses import dataclass
from datetime import datetime
from tickwheel import App

app = App("sqlite:///jobs.db")
other = App("memory://")

@dataclass
class Parcel:
    id: int

@app.task(queue="orders", retries=2, timeout=30)
async def cancel_order(order_id: int, at: datetime | None = None) -> None: ...

@app.task
def send(parcel: Parcel, **more: str) -> None: ...

@app.cron("0 2 * * *", tz="Asia/Taipei")
@app.task(name="reports.daily", pool="process", timeout=None)
def daily(tick: datetime) -> None: ...
"""


@pytest.fixture
def shop(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """An app in the current folder, in the settings."""
    (tmp_path / "its_shop.py").write_text(APP)
    monkeypatch.setenv("TICKWHEEL_APP", "its_shop:app")
    monkeypatch.delenv("TICKWHEEL_STORE")


def job(cli: Cli, id: str) -> dict[str, object]:
    found: dict[str, object] = cli("jobs", "show", id, "-o", "json").json
    return found


# --- Add


@pytest.mark.usefixtures("shop")
def test_a_job_is_added_and_its_id_printed(cli: Cli) -> None:
    said = cli("jobs", "add", "cancel_order", '{"order_id": 42}', "--delay", "10m")
    assert (said.code, said.err) == (0, "")
    shown = job(cli, said.out.strip())
    assert (shown["task"], shown["queue"], shown["arguments"]) == (
        "cancel_order",
        "orders",
        {"order_id": 42},
    )
    assert re.search(r"order_id=42 +orders +in 9m \d+s", cli("jobs").out)


@pytest.mark.usefixtures("shop")
def test_a_job_is_added_with_all_that_may_be_chosen(cli: Cli) -> None:
    options = ("--at", "2030-01-01T12:00Z", "--queue", "q", "--priority", "urgent", "--id", "one")
    argument = '{"order_id": 1, "at": "2029-01-01T00:00:00Z"}'
    said = cli("jobs", "add", "cancel_order", argument, *options, "-o", "json")
    assert said == Said(0, said.out, "")
    assert said.json == {"id": "one", "added": True, "answer": "added"}
    shown = job(cli, "one")
    assert (shown["due"], shown["queue"], shown["priority"]) == (
        "2030-01-01T12:00:00.000Z",
        "q",
        "urgent",
    )


@pytest.mark.usefixtures("shop")
def test_a_taken_id_adds_nothing_and_is_a_conflict(cli: Cli) -> None:
    add = ("jobs", "add", "cancel_order", "--id", "one")
    assert cli(*add, '{"order_id": 1}').code == 0
    said = cli(*add, '{"order_id": 2}')
    assert (said.code, said.out) == (4, "one\n")
    assert said.err == "nothing was added: a job with this id exists\n"
    assert cli(*add, '{"order_id": 2}', "-o", "json").json == {
        "id": "one",
        "added": False,
        "answer": "kept",
    }
    assert job(cli, "one")["arguments"] == {"order_id": 1}


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("cancel_order",), 2, "cancel_order(): missing a required argument: 'order_id'"),
        (("cancel_order", '{"order_id": "x"}'), 2, "Expected `int`, got `str` - at `order_id`"),
        (("cancel_order", '{"order_id": 1, "b": 2}'), 2, "unexpected keyword argument 'b'"),
        (("send", '{"parcel": {"id": "x"}}'), 2, "Expected `int`, got `str` - at `parcel.id`"),
        (("cancel_order", "order_id=1"), 2, "the arguments are not JSON"),
        (("cancel_order", "[1]"), 2, "must be a JSON object, by name, not [1]"),
        (("cancel_ordr", "{}"), 3, "no task is named 'cancel_ordr'"),
        (("cancel_order", '{"order_id": 1}', "--delay", "soon"), 2, "'soon' is not a duration"),
        (("cancel_order", '{"order_id": 1}', "--at", "1969-01-01"), 2, "is out of range: from the"),
        (("cancel_order", '{"order_id": 1}', "--at", "9999-12-31"), 2, "is out of range: from the"),
        (("cancel_order", '{"order_id": 1}', "--at", "soon"), 2, "--at 'soon' is not an ISO time"),
        (("cancel_order", '{"order_id": 1}', "--queue", "a b"), 2, "a queue name may contain"),
        (
            ("cancel_order", '{"order_id": 1}', "--store", "sqlite:///x"),
            2,
            "No such option: --store",
        ),
        (("cancel_order", "{}", "--app", "its_shop:other"), 3, "no task is named"),
    ],
)
def test_a_job_that_can_not_be_added_gets_one_line(
    cli: Cli, tmp_path: Path, argv: tuple[str, ...], code: int, words: str
) -> None:
    said = cli("jobs", "add", *argv)
    assert said.code == code
    assert words in one_error(said)
    assert not (tmp_path / "jobs.db").exists()


# --- The start of an id


def filled(tmp_path: Path, runner: asyncio.Runner, *names: str) -> None:
    async def fill() -> None:
        app = App(f"sqlite:///{tmp_path}/jobs.db")
        async with app:
            store = (await app.client()).store
            await store.add(
                [
                    Job(id=name, task="t", payload="{}", due_ms=4_000_000_000_000, created_ms=0)
                    for name in names
                ]
            )

    runner.run(fill())


def test_the_start_of_an_id_is_enough(cli: Cli, tmp_path: Path, runner: asyncio.Runner) -> None:
    filled(tmp_path, runner, "order-1", "order-2", "parcel-1", "order-1-again")
    assert job(cli, "parc")["id"] == "parcel-1"
    assert cli("explain", "parce", "-o", "json").json["id"] == "parcel-1"
    # An id that is whole comes first, although others start with it.
    assert job(cli, "order-1")["id"] == "order-1"
    said = cli("jobs", "cancel", "parcel", "order-2", "-o", "json")
    assert [each["id"] for each in said.json["jobs"]] == ["parcel-1", "order-2"]
    assert cli("jobs", "rerun", "parcel").out.split()[2] == "parcel-1"
    # Twice the same job is one.
    assert len(cli("jobs", "cancel", "parce", "parcel-1", "-o", "json").json["jobs"]) == 1


def test_the_start_of_several_ids_is_refused_and_nothing_is_done(
    cli: Cli, tmp_path: Path, runner: asyncio.Runner
) -> None:
    filled(tmp_path, runner, *(f"order-{n}" for n in range(5)), "parcel-1")
    said = cli("jobs", "cancel", "parcel-1", "order")
    assert said.code == 2
    assert one_error(said) == (
        "error: 'order' is the start of 5 ids: order-0, order-1, order-2, …; give more of it"
    )
    assert job(cli, "parcel-1")["state"] == "waiting"


def test_three_characters_are_too_few(cli: Cli, tmp_path: Path, runner: asyncio.Runner) -> None:
    filled(tmp_path, runner, "order-1")
    assert cli("jobs", "show", "ord").code == 3
    assert cli("jobs", "show", "orde").code == 0
    assert cli("jobs", "cancel", "nobody").code == 3


def test_a_store_with_many_jobs_is_not_searched(
    cli: Cli, tmp_path: Path, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path, runner, *(f"order-{n}" for n in range(5)))
    monkeypatch.setattr(prefix, "SEARCH_MOST", 4)
    said = cli("jobs", "cancel", "order")
    assert said.code == 3
    assert said.err == "note: the store has 5 jobs, too many to search for ids by their start\n"
    assert job(cli, "order-1")["state"] == "waiting"


def test_an_unknown_id_that_is_whole_is_not_searched_for(
    cli: Cli, ids: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix, "SEARCH_MOST", 0)
    # Ids that were made at the same time may differ in the last character only.
    near = (ids["waiting"][:-1] + last for last in "0123456789abcdef")
    unknown = next(id for id in near if id not in ids.values())
    assert cli("jobs", "show", unknown).err.startswith("error: no job has")


# --- Since


def test_jobs_since_a_time(
    cli: Cli, tmp_path: Path, ids: dict[str, str], runner: asyncio.Runner
) -> None:
    # Added long ago, and not ended.
    filled(tmp_path, runner, "old")

    def found(*options: str) -> set[str]:
        said = cli("jobs", *options, "-o", "json")
        assert said.err == ""
        return {job["id"] for job in said.json["jobs"]}

    assert found("--since", "1h") == set(ids.values())
    assert found("--since", "1h", "--state", "waiting") == {ids["waiting"]}
    assert found("--since", "2999-01-01") == set()
    assert cli("jobs", "--since", "2999-01-01").err == "no matching jobs\n"
    assert cli("dead", "--since", "1h", "-o", "json").json["jobs"][0]["id"] == ids["dead"]
    # Cancelled now, it ended since.
    cli("jobs", "cancel", "old")
    assert "old" in found("--since", "1h")


def test_jobs_since_a_time_page_by_page(
    cli: Cli, tmp_path: Path, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fill() -> None:
        app = App(f"sqlite:///{tmp_path}/jobs.db")
        async with app:
            store = (await app.client()).store
            # Every third one is new.
            await store.add(
                [
                    Job(
                        id=f"{n:02}",
                        task="t",
                        payload="{}",
                        due_ms=n,
                        created_ms=4 * 10**12 * (n % 3 == 0),
                    )
                    for n in range(40)
                ]
            )

    runner.run(fill())
    monkeypatch.setattr(operate_bulk, "BATCH", 7)
    seen: list[str] = []
    more: tuple[str, ...] = ()
    for _ in range(50):
        page = cli("jobs", "--since", "2050-01-01", "--limit", "2", *more, "-o", "json").json
        assert len(page["jobs"]) <= 2
        seen += [job["id"] for job in page["jobs"]]
        if page["cursor"] is None:
            break
        more = ("--cursor", page["cursor"])
    assert seen == [f"{n:02}" for n in range(0, 40, 3)]


# --- By meta


def with_meta(folder: Path, runner: asyncio.Runner) -> None:
    async def fill() -> None:
        async with App(f"sqlite:///{folder}/jobs.db") as app:
            await (await app.client()).store.add(
                [
                    Job(
                        id=f"order-{n}",
                        task="t" if n else "u",
                        payload="{}",
                        due_ms=4 * 10**12,
                        created_ms=0,
                        meta={"customer": "a=b" if n == 3 else str(n % 2)},
                    )
                    for n in range(4)
                ]
            )

    runner.run(fill())


def test_jobs_by_meta(cli: Cli, tmp_path: Path, runner: asyncio.Runner) -> None:
    with_meta(tmp_path, runner)

    def found(*options: str) -> set[str]:
        return {job["id"] for job in cli("jobs", *options, "-o", "json").json["jobs"]}

    assert found("--meta", "customer=0") == {"order-0", "order-2"}
    assert found("--meta", "customer=0", "--task", "t", "--state", "waiting") == {"order-2"}
    assert found("--meta", "customer=a=b") == {"order-3"}
    assert found("--meta", "customer=") == set()
    assert cli("jobs", "--meta", "other=0").err == "no matching jobs\n"
    assert cli("dead", "--meta", "customer=0").err == "no matching dead jobs\n"


def test_jobs_by_meta_page_by_page(cli: Cli, tmp_path: Path, runner: asyncio.Runner) -> None:
    with_meta(tmp_path, runner)
    first = cli("jobs", "--meta", "customer=0", "--limit", "1", "-o", "json").json
    more = ("--cursor", first["cursor"], "-o", "json")
    rest = cli("jobs", "--meta", "customer=0", *more).json
    assert {job["id"] for job in first["jobs"] + rest["jobs"]} == {"order-0", "order-2"}
    assert rest["cursor"] is None


def test_jobs_are_cancelled_by_meta(cli: Cli, tmp_path: Path, runner: asyncio.Runner) -> None:
    with_meta(tmp_path, runner)
    assert cli("jobs", "cancel", "--meta", "customer=0", "-y").out == "cancelled: 2 jobs\n"
    assert job(cli, "order-1")["state"] == "waiting"
    said = cli("jobs", "cancel", "order-1", "--meta", "customer=1")
    assert "not both" in one_error(said)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--meta", "a=1", "--meta", "b=2"), "give it once: jobs are found by one NAME=VALUE"),
        (("--meta", "customer"), "'customer' must be NAME=VALUE, as customer=42"),
        (("--meta", "=42"), "a name must be a str of 1 to 64 characters"),
        (("--meta", "customer=" + "x" * 257), "257 characters"),
    ],
)
def test_meta_that_is_not_one_pair_is_refused(cli: Cli, given: tuple[str, ...], words: str) -> None:
    said = cli("jobs", *given)
    assert said.code == 2
    assert words in said.err


# --- All that match


def test_jobs_are_cancelled_by_filter(cli: Cli, ids: dict[str, str]) -> None:
    assert cli("jobs", "cancel", "--queue", "mail", "-y") == Said(0, "", "no matching jobs\n")
    assert cli("jobs", "cancel", "--task", "pack", "-y") == Said(0, "cancelled: 1 job\n", "")
    assert job(cli, ids["waiting"])["state"] == "cancelled"
    assert job(cli, ids["done"])["state"] == "done"


def test_jobs_are_rerun_and_deleted_by_filter(cli: Cli, ids: dict[str, str]) -> None:
    said = cli("jobs", "rerun", "--state", "dead", "--since", "1h", "--yes", "-o", "json")
    assert said.json == {"jobs": [{"id": ids["dead"], "outcome": "rerun"}]}
    assert job(cli, ids["dead"])["state"] == "waiting"
    assert cli("jobs", "delete", "--state", "done", "--yes").out == "deleted: 1 job\n"
    assert cli("jobs", "show", ids["done"]).code == 3
    assert job(cli, ids["cancelled"])["state"] == "cancelled"


def test_a_filter_that_matches_very_many_takes_them_in_turns(
    cli: Cli, tmp_path: Path, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path, runner, *(f"order-{n}" for n in range(10)))
    monkeypatch.setattr(operate_bulk, "BATCH", 3)
    monkeypatch.setattr(bulk, "ACT_MOST", 6)
    cancel = ("jobs", "cancel", "--state", "waiting", "--yes")
    again = "more than 6 match; run the command again for the rest\n"
    assert cli(*cancel) == Said(0, "cancelled: 6 jobs\n", again)
    assert cli(*cancel) == Said(0, "cancelled: 4 jobs\n", "")


def test_jobs_are_deleted_by_id(cli: Cli, ids: dict[str, str]) -> None:
    said = cli("jobs", "delete", ids["done"], ids["waiting"])
    assert said.code == 4
    assert "not ended: it is waiting" in said.out and " deleted\n" in said.out
    assert cli("jobs", "show", ids["done"]).code == 3


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("answer", "code", "state"), [("y\n", 0, "cancelled"), ("n\n", 1, "waiting")]
)
def test_a_filter_counts_and_asks(
    cli: Cli,
    tmp_path: Path,
    runner: asyncio.Runner,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    code: int,
    state: str,
) -> None:
    filled(tmp_path, runner, *(f"order-{n}" for n in range(1200)))
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    said = cli("jobs", "cancel", "--task", "t")
    assert said.code == code
    assert said.err.startswith("cancel 1,200 jobs? [y/N] ")
    assert said.out == ("cancelled: 1,200 jobs\n" if code == 0 else "")
    assert ("nothing was changed" in said.err) == (code == 1)
    assert job(cli, "order-7")["state"] == state


class Hesitating(Terminal):
    """Somebody else cancels a job while the question is on the screen."""

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        async def meanwhile() -> None:
            async with App("sqlite:///jobs.db") as app:
                await app.cancel("order-1")
                await (await app.client()).store.add(
                    [Job(id="late", task="t", payload="{}", due_ms=4 * 10**12, created_ms=0)]
                )

        asyncio.run(meanwhile())
        return "y\n"


def test_only_the_jobs_that_were_counted_are_touched(
    cli: Cli, tmp_path: Path, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path, runner, "order-1", "order-2")
    monkeypatch.setattr("sys.stdin", Hesitating())
    said = cli("jobs", "cancel", "--task", "t")
    assert (said.code, said.out) == (0, "cancelled: 1 job\n")
    assert said.err.endswith("left alone, because changed in the meantime: 1 job\n")
    assert job(cli, "late")["state"] == "waiting"


def test_the_question_tells_states_apart(
    cli: Cli, ids: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def held(app: App) -> None:
        async with app:
            client = await app.client()
            await client.store.add(
                [Job(id="held", task="pack", payload="{}", due_ms=0, created_ms=0)]
            )
            now_ms = client.clock.now_ms()
            await client.store.claim(
                ["default"], worker="w", limit=1, now_ms=now_ms, lease_ms=600_000
            )

    asyncio.run(held(App("sqlite:///jobs.db")))
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    said = cli("jobs", "cancel", "--queue", "default")
    assert said.err.startswith("cancel 2 jobs (1 waiting, 1 running)? [y/N] ")


# --- Tasks


@pytest.mark.usefixtures("shop")
def test_the_tasks_of_an_app(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = cli("tasks")
    assert (said.code, said.err) == (0, "")
    assert [re.split(" {2,}", line) for line in said.out.splitlines()] == [
        ["TASK", "QUEUE", "POOL", "TIMEOUT", "RETRIES", "SCHEDULE"],
        ["cancel_order", "orders", "async", "30s", "2"],
        [
            "reports.daily",
            "default",
            "process",
            "none",
            "5",
            "At 02:00 every day (Asia/Taipei)",
        ],
        ["send", "default", "thread", "1h", "5"],
    ]
    monkeypatch.delenv("TICKWHEEL_APP")
    assert cli("tasks", "its_shop") == said
    assert cli("tasks", "its_shop:other").err == "no tasks\n"
    assert not (tmp_path / "jobs.db").exists()
    [first, second, _] = cli("tasks", "its_shop:app", "-o", "json").json["tasks"]
    assert first == {
        "name": "cancel_order",
        "parameters": ["order_id", "at"],
        "queue": "orders",
        "priority": "normal",
        "pool": "async",
        "timeout_ms": 30_000,
        "retries": 2,
        "schedules": [],
    }
    assert second["schedules"] == [
        {"name": "reports.daily", "explained": "At 02:00 every day (Asia/Taipei)"}
    ]


# --- Identity and moves


@pytest.mark.usefixtures("shop")
def test_a_job_replaces_the_one_that_has_its_id(cli: Cli) -> None:
    add = ("jobs", "add", "cancel_order", "--id", "one", "--delay", "1h")
    cli(*add, '{"order_id": 1}')
    said = cli(*add, '{"order_id": 2}', "--if-exists", "replace", "-o", "json")
    assert (said.code, said.json["answer"]) == (0, "replaced")
    assert job(cli, "one")["arguments"] == {"order_id": 2}
    kept = cli(*add, '{"order_id": 3}', "--if-exists", "renew")
    assert kept.code == 4 and "nothing was added" in kept.err
    assert "needs an id" in one_error(
        cli("jobs", "add", "cancel_order", '{"order_id": 1}', "--if-exists", "renew")
    )


@pytest.mark.usefixtures("shop")
def test_jobs_move_by_id_and_by_filter(cli: Cli) -> None:
    for n in ("1", "2"):
        order = '{"order_id": ' + n + "}"
        cli("jobs", "add", "cancel_order", order, "--id", n, "--delay", "1h")
    before = datetime.fromisoformat(str(job(cli, "1")["due"]))
    said = cli("jobs", "move", "1", "--to-queue", "slow", "--priority", "low")
    assert (said.code, "moved" in said.out) == (0, True)
    assert (job(cli, "1")["queue"], job(cli, "1")["priority"]) == ("slow", "low")
    said = cli("jobs", "move", "--queue", "slow", "--later", "2h", "--yes")
    assert said.out == "moved: 1 job\n"
    assert datetime.fromisoformat(str(job(cli, "1")["due"])) - before == timedelta(hours=2)
    assert cli("jobs", "move", "--queue", "slow", "--sooner", "30m", "--yes").code == 0
    assert datetime.fromisoformat(str(job(cli, "1")["due"])) - before == timedelta(minutes=90)
    assert job(cli, "2")["queue"] == "orders"
    cli("jobs", "cancel", "2")
    late = cli("jobs", "move", "2", "--delay", "1h", "-o", "json")
    assert (late.code, late.json["jobs"][0]["outcome"]) == (4, "too_late")
    assert cli("jobs", "move", "none", "--delay", "1h").code == 3


@pytest.mark.usefixtures("shop")
def test_a_move_that_says_too_little_or_too_much_is_refused(cli: Cli) -> None:
    assert "move them where?" in one_error(cli("jobs", "move", "1"))
    assert "use one of" in one_error(cli("jobs", "move", "1", "--delay", "1h", "--later", "1h"))
    assert "which jobs?" in one_error(cli("jobs", "move", "--delay", "1h"))
