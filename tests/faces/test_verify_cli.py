"""`tickwheel verify`, on a real file with a real worker."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
import pytest
from command_line import Cli, cli, one_error

from tickwheel import App
from tickwheel.job import Job, done
from tickwheel.store import Store, open_store

__all__ = ["cli"]

S = 1_000


async def ran(store: Store, id: str, *, due_ms: int, started_ms: int) -> None:
    await store.add(
        [Job(id=id, task="pack", payload="{}", due_ms=due_ms, created_ms=due_ms - S, retries=0)]
    )
    [held] = await store.claim(
        ["default"], worker="ann", limit=1, now_ms=due_ms, lease_ms=3_600 * S
    )
    settled = done(held, started_ms=started_ms, ended_ms=max(due_ms, started_ms))
    assert await store.settle([settled], now_ms=due_ms) == [True]


def planted(folder: Path, *, late: int = 1) -> None:
    """A store with one flaw of each kind, and perhaps more late runs."""

    async def plant() -> None:
        store = open_store(f"sqlite:///{folder}/jobs.db")
        await store.open()
        ago = await store.time_ns() // 1_000_000 - 600 * S
        await ran(store, "well", due_ms=ago, started_ms=ago + 3)
        for n in range(late):
            await ran(store, f"late-{n}", due_ms=ago, started_ms=ago + 2 * S + n)
        await ran(store, "early", due_ms=ago, started_ms=ago - 7)
        twice = Job(id="twice", task="pack", payload="{}", due_ms=ago, created_ms=ago - S)
        await store.add([twice])
        [first] = await store.claim(["default"], worker="ann", limit=1, now_ms=ago, lease_ms=S)
        first = msgspec.structs.replace(first, started_ms=ago + 1)
        await store.extend([first], now_ms=ago + 1, lease_ms=S)
        then = ago + 9 * S
        [second] = await store.claim(["default"], worker="bob", limit=1, now_ms=then, lease_ms=S)
        settled = done(second, started_ms=then, ended_ms=then)
        assert await store.settle([settled], now_ms=then) == [True]
        missed = Job(id="missed", task="pack", payload="{}", due_ms=ago, created_ms=ago - S)
        await store.add([missed])
        await store.close()

    asyncio.run(plant())


def test_a_store_that_did_all_well_exits_with_0(cli: Cli, tmp_path: Path) -> None:
    app = App(f"sqlite:///{tmp_path}/jobs.db")

    @app.task
    async def pack() -> None: ...

    async def live() -> None:
        async with app:
            jobs = [await pack.using(delay=0.05).enqueue() for _ in range(5)]
            async with app.worker(guarded=False):
                for job in jobs:
                    await job.result(timeout=20)

    asyncio.run(live())
    said = cli("verify", "--late-after", "30s")
    assert (said.code, said.err) == (0, "")
    assert "5 jobs, 5 runs" in said.out and "missed   0" in said.out


def test_each_flaw_is_shown_with_its_reason_and_exits_with_1(cli: Cli, tmp_path: Path) -> None:
    planted(tmp_path)
    said = cli("verify")
    assert (said.code, said.err) == (1, "")
    assert "late     1 by more than 1s, at most by 2s" in said.out
    for words in (
        "started 2s late",
        "started 7ms early",
        "Worker ann had it and died, froze or lost the store",
        "It is waiting and has been due for",
        "Nothing in its history says why.",
    ):
        assert words in said.out


def test_programs_get_the_same_with_explanations(cli: Cli, tmp_path: Path) -> None:
    planted(tmp_path)
    document = cli("verify", "-o", "json").json
    assert document["counts"] == {"missed": 1, "late": 1, "early": 1, "doubled": 1}
    assert document["well"] is False and document["late_after_ms"] == S
    assert document["checked"]["jobs"] == 5
    [missed] = document["flaws"]["missed"]
    assert missed["id"] == "missed" and missed["explanation"]["state"] == "waiting"
    assert missed["explanation"]["reasons"][0]["code"] == "no_worker"
    [double] = document["flaws"]["doubled"]
    assert (double["attempt"], double["worker"]) == (2, "bob")


def test_output_is_bounded_and_all_are_counted(cli: Cli, tmp_path: Path) -> None:
    planted(tmp_path, late=30)
    said = cli("verify")
    assert "late, the worst 20 of 30" in said.out
    assert "late-29" in said.out and "late-9\n" not in said.out


def test_what_is_late_is_for_the_user_or_the_objective_to_say(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(tmp_path)
    assert cli("verify", "-o", "json", "--late-after", "3s").json["counts"]["late"] == 0
    monkeypatch.setenv("TICKWHEEL_OBJECTIVE", "99% within 2ms")
    document = cli("verify", "-o", "json").json
    assert (document["late_after_ms"], document["counts"]["late"]) == (2, 2)


def test_a_time_and_a_queue_narrow_it(cli: Cli, tmp_path: Path) -> None:
    planted(tmp_path)
    for narrow in (["--since", "1m"], ["--until", "11m"], ["--queue", "x"], ["--task", "x"]):
        said = cli("verify", *narrow)
        assert (said.code, "0 jobs, 0 runs" in said.out) == (0, True), narrow


def test_a_span_without_time_is_refused(cli: Cli, tmp_path: Path) -> None:
    planted(tmp_path)
    for bad in (["--since", "1m", "--until", "2m"], ["--since", "2100-01-01T00:00"]):
        said = cli("verify", *bad)
        assert said.code == 2 and "no time to verify" in one_error(said)
    assert cli("verify", "--late-after", "soon").code == 2


def test_what_may_be_pruned_is_told(cli: Cli, tmp_path: Path) -> None:
    planted(tmp_path)
    assert "may be pruned" not in cli("verify").out
    assert "may be pruned" in cli("verify", "--since", "30d").out


def test_it_fits_into_80_columns(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)
    lines = cli("verify").out.splitlines()
    assert len(lines) > 20 and max(map(len, lines)) <= 80
