"""`tickwheel bench`: it measures in real processes, and no peer that fails ends the run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from command_line import Cli, cli, one_error

from tickwheel import App
from tickwheel.bench import measure, processes
from tickwheel.bench.catalogue import STORE_NAMES, Subject, chosen
from tickwheel.bench.figures import Reading
from tickwheel.bench.plan import Plan
from tickwheel.bench.run import Listener, Report, run
from tickwheel.bench.servers import STORES, check, family

__all__ = ["cli"]

pytestmark = pytest.mark.slow

# Everything once, as small as it can be.
TINY = Plan(
    rounds=1,
    enqueue_s=0.02,
    drain=200,
    fill_s=5,
    drain_s=30,
    processes=2,
    starts=3,
    calls=3,
    calls_s=5,
    waiting=(100,),
    peers_waiting=(100,),
    light=5,
    heavy=20,
    over_s=0.2,
    patience_s=30,
)


class Heard(Listener):
    """Remembers what a run said."""

    def __init__(self) -> None:
        self.planned = 0
        self.steps: list[tuple[str, str]] = []
        self.finished = 0
        self.notes: list[str] = []

    def plan(self, steps: int) -> None:
        self.planned = steps

    def step(self, subject: str, what: str) -> None:
        self.steps.append((subject, what))

    def done(self) -> None:
        self.finished += 1

    def note(self, words: str) -> None:
        self.notes.append(words)


def figures(document: Any, at: int = 0) -> dict[tuple[str, int | None], float]:
    found = document["subjects"][at]["figures"]
    return {(each["key"], each["waiting"]): each["median"] for each in found}


@pytest.mark.timeout(300)
def test_the_embedded_store_is_measured_shown_and_saved(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tickwheel.bench.plan.FULL", TINY)
    said = cli("bench", "--stores", "sqlite", "--peers", "none", "--save", "out")
    assert said.code == 0, said.err
    assert "measuring Tickwheel · sqlite" in said.err
    assert "Drain" in said.out and "Punctuality, 100 jobs waiting for later" in said.out

    document = json.loads((tmp_path / "out" / "benchmarks.json").read_text())
    found = figures(document)
    assert document["failures"] == []
    rates = [
        *(("enqueue_sync", None), ("enqueue_async", None), ("enqueue_at_once", None)),
        *(("enqueue_bulk", None), ("drain_one", None), ("drain_several", None)),
        *(("drain_batches", None), ("start_p50", None), ("result_p50", None)),
        *(("memory_idle", None), ("memory", 100), ("late_light_p99", 100)),
        *(("late_heavy_p50", 100), ("enqueue", 100), ("drain", 100), ("drain", 0)),
    ]
    assert {each for each in rates if not found.get(each, 0) > 0} == set()
    # Tickwheel starts no job early, and all of them in the end.
    assert (found["early", 100], found["missing", 100]) == (0, 0)

    page = (tmp_path / "out" / "benchmarks.md").read_text()
    assert "Nowhere in this run" in page and "SQLite 3." in page
    pictures = list((tmp_path / "out" / "benchmarks").glob("*.svg"))
    assert {"drain.svg", "growth.svg", "punctuality.svg"} <= {each.name for each in pictures}
    for picture in pictures:
        ElementTree.parse(picture)
        assert f"]({picture.relative_to(tmp_path / 'out')})" in page


@pytest.mark.timeout(300)
def test_as_json_it_prints_the_document(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(TINY, waiting=(), processes=1)
    monkeypatch.setattr("tickwheel.bench.plan.QUICK", small)
    said = cli("bench", "--quick", "--stores", "memory", "--peers", "none", "-o", "json")
    assert said.code == 0, said.err
    document = said.json
    assert [each["store"] for each in document["subjects"]] == ["memory"]
    assert figures(document)["drain_one", None] > 0
    assert document["machine"]["cores"] == str(os.cpu_count())
    assert document["subjects"][0]["missing"]["enqueue_sync"] == "its jobs belong to one event loop"


def measured(*peers: Subject, **changes: Any) -> tuple[Report, Heard]:
    """A run of Tickwheel on SQLite and these peers."""
    heard = Heard()
    plan = replace(TINY, waiting=(), peers_waiting=(), processes=1, **changes)
    subjects = [*peers, *chosen(["sqlite"], [])]
    return run(plan, subjects, Path("/nonexistent"), heard), heard


def peer(program: str, *commands: str) -> Subject:
    return Subject("Broken", "sqlite", program, commands=commands)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (peer("no_such_module"), "its program ended: ModuleNotFoundError: "),
        (peer("json"), "has no attribute 'add_async'"),
        (peer("with_tickwheel", "python -c raise(SystemExit('no'))"), "its workers ended: no"),
    ],
    ids=["its program", "its API", "its worker"],
)
def test_a_peer_that_fails_is_noted_and_the_others_are_measured(
    broken: Subject, reason: str
) -> None:
    report, heard = measured(broken)
    assert report.figures.spread("Tickwheel · sqlite", Reading("drain_one")) is not None
    assert report.figures.spread("Broken · sqlite", Reading("drain_one")) is None
    failures = [why for name, _, why in report.figures.failures if name == "Broken · sqlite"]
    assert any(reason in why for why in failures), failures
    assert {name for name, _, _ in report.figures.failures} == {"Broken · sqlite"}
    assert (
        heard.finished == heard.planned == len([1 for _, what in heard.steps if what[:3] != "pre"])
    )


@pytest.mark.timeout(120)
def test_a_worker_that_does_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "START_S", 2.0)
    monkeypatch.setattr(processes, "SLICE_S", 0.2)
    sleeps = peer("with_tickwheel", "python -c __import__('time').sleep(600)")
    report, _ = measured(sleeps, starts=1)
    failures = [why for name, _, why in report.figures.failures if name == "Broken · sqlite"]
    assert failures and all("ran nothing within 2 s" in why for why in failures), failures


@pytest.mark.timeout(120)
def test_a_peer_that_can_not_be_installed_is_left_out(tmp_path: Path) -> None:
    heard = Heard()
    absent = Subject("Absent", "sqlite", "json", packages=(f"absent @ file://{tmp_path}/absent",))
    report = run(TINY, [absent], tmp_path, heard)
    assert report.figures.values == {}
    [note] = [each for each in heard.notes if "left out" in each]
    assert note.startswith("Absent · sqlite is left out: pip: ERROR")


def test_a_store_that_is_not_installed_is_refused_with_what_to_install(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = cli("bench", "--stores", "redis", "--peers", "none")
    assert said.code == 2
    assert "pip install 'tickwheel[redis]'" in one_error(said)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--stores", "oracle"), "no store 'oracle'"),
        (("--peers", "cron"), "no peer 'cron'"),
        (("--quick", "--long"), "exclude each other"),
        (("--save", "/nonexistent/folder"), "can't write to /nonexistent/folder"),
    ],
)
def test_mistakes_are_refused_before_anything_is_measured(
    cli: Cli, words: tuple[str, ...], part: str
) -> None:
    said = cli("bench", *words)
    assert said.code == 2
    assert part in one_error(said)


def test_no_process_outlives_its_measurement(tmp_path: Path) -> None:
    [subject] = chosen(["sqlite"], [])
    url = f"sqlite:///{tmp_path}/jobs.db"
    with processes.deployed(subject, url, None, list) as deployment:
        deployment.start_workers(2)
        deployment.probe(60)
        pids = [*deployment.worker_pids, deployment._driver.pid]
        assert len(pids) >= 4
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.parametrize("store", STORE_NAMES)
def test_a_server_gives_empty_stores_and_stops(store: str) -> None:
    async def added(url: str) -> int:
        app = App(url)

        @app.task
        async def nothing() -> None: ...

        async with app:
            await nothing.enqueue()
            return sum(queue.waiting for queue in await app.queues())

    check(store)
    with STORES[store]() as server:
        assert [asyncio.run(added(server.fresh())) for _ in range(2)] == [1, 1]
        pids = server.pids()
        assert bool(pids) == (store not in ("memory", "sqlite"))
        # Those that served our connections may have ended.
        assert not pids or any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_run_that_is_interrupted_leaves_no_process(number: int) -> None:
    words = [sys.executable, "-m", "tickwheel", "bench", "--stores", "sqlite", "--peers", "none"]
    bench = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while len(started := family(bench.pid)) < 4:
            assert bench.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        bench.send_signal(number)
        _, said = bench.communicate(timeout=60)
    finally:
        bench.kill()
        bench.wait()
    assert bench.returncode == 130
    assert said.endswith("error: interrupted\n")
    assert [pid for pid in started if Path(f"/proc/{pid}").exists()] == []
