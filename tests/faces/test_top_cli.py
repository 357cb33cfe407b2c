"""`tickwheel top`: frames from samples, drawn, and live on a real file."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tickwheel import App, StoreUnavailable
from tickwheel.cli import main
from tickwheel.cli.top import Sampler
from tickwheel.cli.top_frame import SLOT_MS, Frame, Sample, Waiting, frame, frame_document
from tickwheel.cli.top_view import bars, view
from tickwheel.client import Client
from tickwheel.job import Job, Outcome, Run, State
from tickwheel.store import Page, Query, QueueInfo, WorkerInfo
from tickwheel.unserved import UnservedTask

NOW = 1_800_000_000_000


def job(id: str = "j", **changes: Any) -> Job:
    fields: dict[str, Any] = {"task": "pack", "payload": "{}", "due_ms": NOW, "created_ms": NOW}
    return Job(id=id, **fields | changes)


def run(late_ms: int, outcome: Outcome = Outcome.DONE, **changes: Any) -> Run:
    fields: dict[str, Any] = {"attempt": 1, "worker": "w", "due_ms": NOW - 9000}
    times = {"started_ms": NOW - 9000 + late_ms, "ended_ms": NOW - 1000}
    return Run(outcome=outcome, **fields | times | changes)


def worker(name: str = "w", **changes: Any) -> WorkerInfo:
    fields: dict[str, Any] = {"name": name, "host": "box", "pid": 7, "version": "1"}
    times = {"started_ms": NOW, "seen_ms": NOW, "gone_after_ms": 15_000}
    return WorkerInfo(**fields | times | {"queues": ("mail",), "concurrency": 4} | changes)


def sample(now_ms: int = NOW, **changes: Any) -> Sample:
    fields: dict[str, Any] = {"queues": [], "workers": [], "waiting": Waiting(now_ms)}
    return Sample(now_ms=now_ms, **fields | changes)


def test_tasks_that_no_worker_knows_are_named_and_those_beyond_three_counted() -> None:
    unknown = [UnservedTask("mail", f"task-{n}", NOW - 61_000, f"j{n}") for n in range(5)]
    shown = frame(sample(unknown=unknown), None)
    lines = drawn(shown)
    assert "no running worker of queue mail knows task task-0 (for 1m 1s)" in lines
    assert "and 2 more such tasks" in lines
    assert frame_document(shown)["unserved_tasks"][0] == {
        "queue": "mail",
        "task": "task-0",
        "since": "2027-01-15T07:58:59.000Z",
    }


def drawn(of: Frame, width: int = 80, height: int | None = None) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO(), color_system=None)
    console.print(view(of, "sqlite:///jobs.db", width=width, height=height))
    return [line.rstrip() for line in console.export_text().splitlines()]


# --- Frames


def test_rates_are_differences_over_time_and_never_below_nothing() -> None:
    before = sample(queues=[QueueInfo(name="a", done=100, dead=5)])
    after = sample(
        NOW + 2000,
        queues=[QueueInfo(name="a", done=150, dead=1), QueueInfo(name="new", done=4)],
    )
    assert [(row.done_per_s, row.dead_per_s) for row in frame(after, before).queues] == [
        (25.0, 0.0),
        (2.0, 0.0),
    ]
    assert frame(after, None).queues[0].done_per_s is None
    assert frame(after, after).queues[0].done_per_s is None


def test_punctuality_is_that_of_the_last_runs_of_done_jobs() -> None:
    late = [job(f"j{n}", state=State.DONE, history=(run(n),)) for n in range(1, 101)]
    others = [
        job("dead", state=State.DEAD, history=(run(5000, Outcome.DEAD),)),
        job("unknown", state=State.DONE, history=(run(0, started_ms=None),)),
        job("early", state=State.DONE),
    ]
    found = frame(sample(ended=[*late, *others]), None).punctuality
    assert found is not None
    assert (found.jobs, found.p50_ms, found.p99_ms, found.max_ms) == (100, 50, 99, 100)
    assert frame(sample(ended=others[:1]), None).punctuality is None


def test_waiting_jobs_fall_into_the_slots_of_their_due_times() -> None:
    due = [-1, 0, SLOT_MS - 1, SLOT_MS, 59 * SLOT_MS, 60 * SLOT_MS]
    jobs = [job(f"j{n}", due_ms=NOW + ms) for n, ms in enumerate(due)]
    coming = frame(sample(waiting=Waiting(NOW, jobs)), None).coming
    assert (coming.overdue, coming.later, coming.at_least) == (1, 1, False)
    assert (coming.slots[0], coming.slots[1], coming.slots[59]) == (2, 1, 1)


def test_jobs_that_fell_due_since_they_were_looked_at_are_not_called_overdue() -> None:
    jobs = [job("old", due_ms=NOW - 9000), job("new", due_ms=NOW - 1000)]
    coming = frame(sample(waiting=Waiting(NOW - 5000, jobs)), None).coming
    assert (coming.overdue, sum(coming.slots), coming.later) == (1, 0, 0)


def test_failures_are_the_last_runs_that_failed_the_latest_first() -> None:
    history = (
        run(0, Outcome.RETRY, attempt=1, ended_ms=NOW - 3000, error="first"),
        run(0, Outcome.LOST, attempt=2, ended_ms=NOW - 2000),
        run(0, Outcome.SNOOZE, attempt=3, ended_ms=NOW - 1500),
        run(0, Outcome.DEAD, attempt=4, ended_ms=NOW - 1000, error="last"),
    )
    ended = [job(state=State.DEAD, history=history)]
    # Seen twice: it moved while we looked.
    failures = frame(sample(ended=ended, waiting=Waiting(NOW, ended)), None).failures
    assert [each.outcome for each in failures] == [Outcome.DEAD, Outcome.LOST, Outcome.RETRY]
    assert failures[0].error == "last"


# --- Drawn


def busy(**changes: Any) -> Frame:
    queues = [QueueInfo(name=f"queue-{n:02}", waiting=n, done=10**7, dead=1) for n in range(30)]
    workers = [worker(f"host-{n:02}", running=n % 5, held=n) for n in range(12)]
    waiting = [job(f"j{n}", due_ms=NOW + n * 1000) for n in range(900)]
    ended = [
        job(f"d{n}", state=State.DEAD, history=(run(0, Outcome.DEAD, error="Boom: " + "x" * 200),))
        for n in range(30)
    ]
    done = [job("ok", state=State.DONE, history=(run(3),))]
    fields: dict[str, Any] = {"queues": queues, "workers": workers, "ended": ended + done}
    return frame(sample(**fields | {"waiting": Waiting(NOW, waiting)} | changes), None)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 50), (120, 24), (120, 40)])
def test_a_frame_fits_its_terminal_and_shows_every_part(width: int, height: int) -> None:
    lines = drawn(busy(), width, height)
    assert max(len(line) for line in lines) <= width
    assert len(lines) <= height
    text = "\n".join(lines)
    for part in ("queue-29", "more", "host-", "COMING", "p99 3ms", "LAST FAILURES", "Boom"):
        assert part in text
    assert (
        "60 within a minute · 600 within 10m · 300 later" in text.replace("\n", " ") or width > 80
    )


def test_a_cut_sample_says_that_there_may_be_more() -> None:
    few = Waiting(NOW, [job(due_ms=NOW + 1000)], more=True)
    text = "\n".join(drawn(busy(waiting=few)))
    assert "based on 1 of 435 waiting jobs" in text
    assert "≥1 within a minute" in text
    assert "█" + "·" * 59 in text


def test_an_empty_store_says_so() -> None:
    text = "\n".join(drawn(frame(sample(), None)))
    for part in ("no queues", "no workers", "no jobs done yet", "LAST FAILURES  none"):
        assert part in text


def test_a_job_cannot_steer_the_terminal() -> None:
    evil = run(0, Outcome.DEAD, error="\x1b[2J[red]gone")
    text = "\n".join(drawn(frame(sample(ended=[job(state=State.DEAD, history=(evil,))]), None)))
    assert "\x1b" not in text and "[red]gone" in text


def test_bars_are_as_tall_as_their_counts_and_the_least_shows() -> None:
    assert bars([0, 1, 8, 16], 2) == ["   █", " ▁██"]
    assert bars([0, 0], 2) == ["  ", "  "]
    assert bars([1, 1000], 1) == ["▁█"]


def test_a_frame_as_json_keeps_its_names() -> None:
    document = frame_document(busy())
    assert list(document) == [
        *("at", "queues", "workers", "punctuality", "coming"),
        *("unserved_tasks", "failures"),
    ]
    assert document["queues"][0]["done_per_s"] is None
    assert len(document["coming"]["slots"]) == 60


# --- Asking the store


class Counting(Client):
    """Counts what it is asked, and answers from what a test says."""

    def __init__(self, queues: list[QueueInfo]) -> None:
        self.told = queues
        self.finds: list[tuple[Query, int]] = []

        class Still:
            def now_ms(self) -> int:
                return NOW

        self.clock = Still()  # type: ignore[assignment]

    async def ready(self) -> None: ...

    async def queues(self) -> list[QueueInfo]:
        return self.told

    async def workers(self) -> list[WorkerInfo]:
        return []

    async def parked(self) -> list[Job]:
        return []

    async def find(self, query: Query, *, cursor: str | None = None, limit: int = 100) -> Page:
        self.finds.append((query, limit))
        return Page(jobs=[job(f"{query.queue}-{n}") for n in range(limit)], cursor="more")


async def test_a_sample_asks_little_of_a_large_store_and_less_the_second_time() -> None:
    many = [QueueInfo(name=f"q{n:03}", waiting=10**6, done=10**6, dead=9) for n in range(200)]
    client = Counting(many)
    sampler = Sampler(client)
    found = await sampler.take()
    assert len(client.finds) <= 30
    assert len(found.waiting.jobs) <= 5_000 and found.waiting.more
    for _ in range(30):
        client.finds.clear()
        await sampler.take()
    assert client.finds == [], "nothing moved, and the clock stands still"
    client.told = [QueueInfo(name="q000", waiting=10**6, done=10**6 + 1, dead=9), *many[1:]]
    await sampler.take()
    assert [query for query, _ in client.finds] == [Query(state=State.DONE, queue="q000")]


async def test_a_large_queue_hides_no_small_one() -> None:
    client = Counting([QueueInfo(name="big", waiting=10**6), QueueInfo(name="small", waiting=2)])
    await Sampler(client).take()
    assert {query.queue for query, _ in client.finds} == {"big", "small"}


# --- The command


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store in which a job is done, one is dead, and two wait."""
    url = f"sqlite:///{tmp_path}/jobs.db"
    app = App(url)

    @app.task
    async def pack(n: int) -> None: ...

    @app.task(queue="mail", retries=0)
    async def send() -> None:
        raise ValueError("no mailbox")

    async def fill() -> None:
        async with app:
            done = await pack.enqueue(1)
            await send.enqueue()
            async with app.worker(guarded=False):
                await done.result(timeout=10)
                while not any(queue.dead for queue in await app.queues()):
                    await asyncio.sleep(0.01)
            await pack.using(delay="5m").enqueue(2)
            await pack.using(delay="5h").enqueue(3)

    asyncio.run(fill())
    return url


def test_one_frame_as_text_and_as_json(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--store", url, "--every", "100ms"]) == 0
    out = capsys.readouterr().out
    assert "default" in out and "ValueError: no mailbox" in out and "no workers" in out
    assert main(["top", "--once", "--every", "100ms", "--store", url, "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {each["name"]: each["done_per_s"] for each in found["queues"]} == {
        "default": 0.0,
        "mail": 0.0,
    }
    assert sum(found["coming"]["slots"]) == 1 and found["coming"]["later"] == 1
    assert found["punctuality"]["jobs"] == 1
    assert found["failures"][0]["error"] == "ValueError: no mailbox"


@pytest.mark.parametrize("every", ["soon", "5ms", "-1s"])
def test_a_span_that_is_none_gets_one_line(
    url: str, every: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--store", url, f"--every={every}"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1


def test_it_outlives_a_store_that_goes_away(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = 0
    really = Client.queues

    async def queues(client: Client) -> list[QueueInfo]:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise StoreUnavailable("the disk is on fire")
        if asked == 4:
            raise KeyboardInterrupt
        return await really(client)

    monkeypatch.setattr(Client, "queues", queues)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["top", "--store", url, "--every", "100ms"]) == 0
    frames = capsys.readouterr().out.split("tickwheel top")[1:]
    assert ["the disk is on fire" in each for each in frames] == [False, True, False]
    assert "default" in frames[1], "what was known before is still shown"


def test_help_fits_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["top", "-h"]) == 0
    assert max(len(line) for line in capsys.readouterr().out.splitlines()) < 80
    assert main(["-h"]) == 0
    [line] = [each for each in capsys.readouterr().out.splitlines() if each.startswith("  top ")]
    assert not line.endswith("..."), "something was cut"


@pytest.mark.slow
@pytest.mark.parametrize("by", ["signal", "q"])
def test_it_watches_on_a_terminal_until_it_is_told_to_quit(url: str, by: str) -> None:
    ours, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "tickwheel", "top", "--store", url, "--every", "200ms"],
        stdin=its,
        stdout=its,
        stderr=its,
        env={**os.environ, "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(its)
    try:
        seen = read_until(ours, b"LAST FAILURES", times=3)
        if by == "q":
            assert not termios.tcgetattr(ours)[3] & termios.ECHO, "keys are not shown"
            os.write(ours, b"xq")
        else:
            process.send_signal(signal.SIGINT)
        seen += read_until(ours, b"\x1b[?1049l")
        assert process.wait(timeout=30) == 0
        assert termios.tcgetattr(ours)[3] & termios.ECHO, "the terminal is as it was"
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert seen.startswith(b"\x1b[?1049h"), "it has a screen of its own"
    assert b"Traceback" not in seen and b"interrupted" not in seen


def read_until(terminal: int, mark: bytes, *, times: int = 1) -> bytes:
    seen = b""
    until = time.monotonic() + 60
    while seen.count(mark) < times:
        assert time.monotonic() < until, seen
        if select.select([terminal], [], [], 1)[0]:
            seen += os.read(terminal, 65_536)
    return seen
