"""`tickwheel queues`, `jobs` and `dead`: as tables, as JSON, and what they do."""

from __future__ import annotations

import asyncio
import io
import re
from pathlib import Path

import msgspec
import pytest
from command_line import Cli, Said, cli, ids, one_error

from tickwheel import App
from tickwheel.checks import LATEST_MS
from tickwheel.job import Job
from tickwheel.store import open_store

__all__ = ["cli", "ids"]

UTC_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


# --- Queues


def test_queues_in_a_table(cli: Cli, ids: dict[str, str]) -> None:
    said = cli("queues")
    assert (said.code, said.err) == (0, "")
    assert [line.split() for line in said.out.splitlines()] == [
        ["QUEUE", "WAITING", "RUNNING", "DONE", "DEAD", "CANCELLED", "PAUSED"],
        ["default", "1", "0", "1", "0", "1"],
        ["mail", "0", "0", "0", "1", "0"],
    ]
    assert cli("queues", "list") == said


def test_queues_as_json(cli: Cli, ids: dict[str, str]) -> None:
    said = cli("queues", "-o", "json")
    assert said.err == ""
    assert said.json["queues"][1] == {
        "name": "mail",
        "paused": False,
        "waiting": 0,
        "running": 0,
        "done": 0,
        "dead": 1,
        "cancelled": 0,
        "unserved_tasks": [],
    }


def test_a_task_that_no_running_worker_knows_is_named(
    cli: Cli, tmp_path: Path, runner: asyncio.Runner
) -> None:
    async def story() -> None:
        async with App(f"sqlite:///{tmp_path}/jobs.db") as app:

            @app.task
            async def known() -> None: ...

            job = msgspec.structs.replace(known.job(), id="j", task="mail")
            await (await app.client()).store.add([job])
            async with app.worker(guarded=False):
                while not (await (await app.client()).parked()):
                    await asyncio.sleep(0.01)
                said = await asyncio.to_thread(cli, "queues")
                assert "no running worker of queue default knows task mail" in said.err
                [queue] = (await asyncio.to_thread(cli, "queues", "-o", "json")).json["queues"]
                assert [each["task"] for each in queue["unserved_tasks"]] == ["mail"]
                [worker] = (await asyncio.to_thread(cli, "workers", "-o", "json")).json["workers"]
                assert worker["tasks"] == ["known"]
                said = await asyncio.to_thread(cli, "explain", "j")
                assert "no running worker knows its task" in said.out
                said = await asyncio.to_thread(cli, "doctor")
                assert said.code == 1 and "knows task mail" in said.out

    runner.run(asyncio.wait_for(story(), 60))


def test_pause_and_resume(cli: Cli, ids: dict[str, str]) -> None:
    assert cli("queues", "pause", "mail") == Said(0, "mail: paused\n", "")
    assert cli("queues").out.splitlines()[2].endswith("paused")
    assert cli("queues", "resume", "mail", "-o", "json").json == {"name": "mail", "paused": False}
    assert "mail was not paused" in cli("queues", "resume", "mail").err
    assert "check the name" in cli("queues", "pause", "mial").err


# --- Jobs


def test_jobs_in_a_table(cli: Cli, ids: dict[str, str]) -> None:
    said = cli("jobs")
    assert (said.code, said.err) == (0, "")
    head, *rows = said.out.splitlines()
    assert head.split() == ["ID", "STATE", "TASK", "ARGUMENTS", "QUEUE", "WHEN"]
    assert {row.split()[0]: row.split()[1] for row in rows} == {
        id: state for state, id in ids.items()
    }
    assert re.search(r"waiting +pack +order=2 +default +in 29m \d+s$", rows[0])
    assert any('order=1, note="grüße"' in row for row in rows)
    assert cli("jobs", "list") == said


def test_jobs_are_narrowed(cli: Cli, ids: dict[str, str]) -> None:
    def found(*options: str) -> list[str]:
        return [job["id"] for job in cli("jobs", *options, "-o", "json").json["jobs"]]

    assert found("--state", "waiting") == [ids["waiting"]]
    assert found("--queue", "mail") == [ids["dead"]]
    assert found("--task", "send") == [ids["dead"]]
    assert found("--task", "send", "--state", "done") == []


def test_jobs_page_by_page(cli: Cli, ids: dict[str, str]) -> None:
    seen: list[str] = []
    page = cli("jobs", "--limit", "3", "-o", "json").json
    while True:
        seen += [job["id"] for job in page["jobs"]]
        if page["cursor"] is None:
            break
        page = cli("jobs", "--limit", "3", "--cursor", page["cursor"], "-o", "json").json
    assert sorted(seen) == sorted(ids.values())


def test_the_next_page_is_a_message_that_can_be_pasted(cli: Cli, ids: dict[str, str]) -> None:
    said = cli("jobs", "--limit", "3")
    assert len(said.out.splitlines()) == 4
    assert re.match(r"there may be more; for the next page add --cursor '.+'$", said.err)
    assert cli("jobs", "--cursor", "nonsense").code == 2


def test_no_jobs_say_so(cli: Cli, tmp_path: Path, runner: asyncio.Runner) -> None:
    runner.run(App(f"sqlite:///{tmp_path}/jobs.db").queues())
    assert cli("jobs") == Said(0, "", "no jobs\n")
    assert cli("jobs", "--queue", "mail") == Said(0, "", "no matching jobs\n")
    assert cli("dead") == Said(0, "", "no dead jobs\n")
    assert cli("dead", "rerun", "--all", "--yes") == Said(0, "", "no dead jobs\n")
    assert cli("queues") == Said(0, "", "no queues: no job has been added yet\n")
    assert cli("jobs", "-o", "json").json == {"jobs": [], "cursor": None}
    assert cli("queues", "-o", "json").json == {"queues": []}


def test_one_job(cli: Cli, ids: dict[str, str]) -> None:
    said = cli("jobs", "show", ids["done"])
    assert (said.code, said.err) == (0, "")
    for line in (
        r"id +order-1",
        r"state +done",
        r"priority +normal",
        r"due +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}Z  (\d+s ago|now)",
        r"attempts +1 \(0 failed, 0 taken over\)",
        r' +"note": "grüße"',
        r' +"order": 1',
        r"#  OUTCOME +STARTED +LATE +TOOK +WORKER",
        r"1  done +\d{4}-.*Z +\d+ms +\d+ms +\S+",
    ):
        assert re.search(f"^{line}$", said.out, re.MULTILINE), line


def test_one_dead_job(cli: Cli, ids: dict[str, str]) -> None:
    said = cli("jobs", "show", ids["dead"])
    assert re.search(r"^error +ValueError: no mailbox for ann@example.org$", said.out, re.MULTILINE)


def test_one_job_as_json(cli: Cli, ids: dict[str, str]) -> None:
    said = cli("jobs", "show", ids["done"], "-o", "json")
    assert said.err == ""
    job = said.json
    [run] = job["history"]
    for moment in (job["due"], job["created"], job["ended"], run["due"], run["started"]):
        assert UTC_TIME.fullmatch(moment)
    assert run["lateness_ms"] >= 0
    assert run["outcome"] == "done"
    assert {name: job[name] for name in ("id", "task", "queue", "priority", "state")} == {
        "id": "order-1",
        "task": "pack",
        "queue": "default",
        "priority": "normal",
        "state": "done",
    }
    assert job["arguments"] == {"order": 1, "note": "grüße"}
    assert job["result"] == {"order": 1}
    assert (job["attempts"], job["failures"], job["takeovers"]) == (1, 0, 0)
    assert (job["error"], job["lease_until"], job["cancel_requested"]) == (None, None, False)
    assert cli("jobs", "-o", "json", "--state", "done").json["jobs"] == [job]


@pytest.mark.parametrize("due_ms", [LATEST_MS + 1, 10**18])
@pytest.mark.parametrize(
    "argv",
    [
        ("jobs",),
        ("jobs", "-o", "json"),
        ("jobs", "show", "far"),
        ("jobs", "show", "far", "-o", "json"),
        ("explain", "far"),
        ("explain", "far", "-o", "json"),
        ("queues",),
        ("doctor",),
        ("top", "--once", "--every", "100ms"),
        ("top", "--once", "--every", "100ms", "-o", "json"),
    ],
)
def test_a_job_due_after_the_last_calendar_day_is_shown(
    cli: Cli, tmp_path: Path, runner: asyncio.Runner, argv: tuple[str, ...], due_ms: int
) -> None:
    """Another program may have stored it, in its own SQL."""
    runner.run(
        _stored(tmp_path, Job(id="far", task="t", payload="{}", due_ms=due_ms, created_ms=0))
    )
    said = cli(*argv)
    assert (said.code, said.err) in ((0, ""), (1, "")), said
    if "show" in argv or "explain" in argv:
        assert "9999-12-31" in said.out


@pytest.mark.parametrize("deep", [900, 990, 5_000])
@pytest.mark.parametrize("more", [(), ("-o", "json")])
def test_a_job_whose_arguments_are_nested_deeply_is_shown(
    cli: Cli, tmp_path: Path, runner: asyncio.Runner, deep: int, more: tuple[str, ...]
) -> None:
    payload = '{"x":' + "[" * deep + "]" * deep + "}"
    runner.run(_stored(tmp_path, Job(id="deep", task="t", payload=payload, due_ms=0, created_ms=0)))
    said = cli("jobs", "show", "deep", *more)
    assert (said.code, said.err) == (0, ""), said.err[-500:]


async def _stored(folder: Path, job: Job) -> None:
    store = open_store(f"sqlite:///{folder}/jobs.db")
    await store.open()
    await store.add([job])
    await store.close()


def test_an_unknown_job(cli: Cli, ids: dict[str, str]) -> None:
    said = cli("jobs", "show", "nobody")
    assert said.code == 3
    assert "'nobody'" in one_error(said)


def test_cancel_says_what_it_achieved(cli: Cli, ids: dict[str, str]) -> None:
    said = cli("jobs", "cancel", ids["waiting"])
    assert said.code == 0
    assert f"{ids['waiting']}  cancelled: it will not run\n" in said.out
    said = cli("jobs", "cancel", ids["done"], "-o", "json")
    assert said.code == 4
    assert said.json == {"jobs": [{"id": "order-1", "outcome": "too_late"}]}
    said = cli("jobs", "cancel", ids["done"], "nobody", "nobody")
    assert said.code == 3
    assert len(said.out.splitlines()) == 3


def test_rerun(cli: Cli, ids: dict[str, str]) -> None:
    said = cli("jobs", "rerun", ids["done"], ids["dead"])
    assert said.code == 0
    assert said.out.count("rerun: it is due now") == 2
    said = cli("jobs", "rerun", ids["done"])
    assert said.code == 4
    assert "not ended: it is waiting" in said.out
    assert cli("jobs", "rerun", "nobody").code == 3
    assert cli("jobs", "rerun", ids["done"], "-o", "json").json["jobs"] == [
        {"id": ids["done"], "outcome": "not_ended"}
    ]


# --- Dead jobs


def test_dead_jobs(cli: Cli, ids: dict[str, str]) -> None:
    said = cli("dead")
    [_, row] = said.out.splitlines()
    assert row.startswith(ids["dead"])
    assert row.endswith("ValueError: no mailbox for ann@example.org (command_line.py:90)")
    assert cli("dead", "list", "-o", "json").json["jobs"][0]["state"] == "dead"
    assert cli("dead", "--queue", "default") == Said(0, "", "no matching dead jobs\n")


def test_dead_commands_leave_other_jobs_alone(cli: Cli, ids: dict[str, str]) -> None:
    for verb in ("rerun", "delete"):
        said = cli("dead", verb, ids["done"])
        assert said.code == 4
        assert "not dead: it is done" in said.out
        assert cli("dead", verb, "nobody").code == 3
    assert cli("jobs", "show", ids["done"]).code == 0


def test_dead_rerun_by_id(cli: Cli, ids: dict[str, str]) -> None:
    assert "rerun: it is due now" in cli("dead", "rerun", ids["dead"]).out
    assert cli("dead").err == "no dead jobs\n"


def test_dead_delete_by_id(cli: Cli, ids: dict[str, str]) -> None:
    said = cli("dead", "delete", ids["dead"], "-o", "json")
    assert said.json == {"jobs": [{"id": ids["dead"], "outcome": "deleted"}]}
    assert cli("jobs", "show", ids["dead"]).code == 3


def test_all_dead_jobs(cli: Cli, ids: dict[str, str]) -> None:
    assert cli("dead", "rerun", "--all", "--yes", "--task", "pack").err == "no matching dead jobs\n"
    assert cli("dead", "rerun", "--all", "--yes", "--since", "2099-01-01").out == ""
    assert cli("dead", "rerun", "--all", "--yes") == Said(0, "rerun: 1 dead job\n", "")
    assert cli("jobs", "show", ids["dead"], "-o", "json").json["state"] == "waiting"


@pytest.mark.parametrize(
    "argv, words",
    [
        ((), "which jobs?"),
        (("x", "--all"), "which jobs?"),
        (("x", "--yes"), "work with --all"),
        (("x", "--queue", "mail"), "work with --all"),
        (("--all",), "needs --yes when stdin is not a terminal"),
    ],
)
def test_dead_commands_refuse_to_guess(
    cli: Cli, ids: dict[str, str], argv: tuple[str, ...], words: str
) -> None:
    for verb in ("rerun", "delete"):
        said = cli("dead", verb, *argv)
        assert said.code == 2
        assert words in one_error(said)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("answer, code, left", [("y\n", 0, 0), ("n\n", 1, 1), ("", 1, 1)])
def test_all_asks_first(
    cli: Cli,
    ids: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    code: int,
    left: int,
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    said = cli("dead", "delete", "--all", "-o", "json")
    assert said.code == code
    assert said.err.startswith("delete 1 dead job? [y/N] ")
    assert said.out == "" or said.json["jobs"][0]["outcome"] == "deleted"
    assert len(cli("dead", "-o", "json").json["jobs"]) == left
