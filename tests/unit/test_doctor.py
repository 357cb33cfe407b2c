"""The doctor's checks: what was read goes in, findings come out."""

from __future__ import annotations

import msgspec
import pytest

from tickwheel.job import Job, Outcome, Run
from tickwheel.notes import Note
from tickwheel.operate import doctor
from tickwheel.schedule import GRACE_MS, MOVING_MS, Misfire, Overlap, Rule, Schedule
from tickwheel.store import Durability, Finding, Level, QueueInfo, WorkerInfo
from tickwheel.unserved import unserved_tasks

NOW_MS = 1_800_000_000_000


def worker(name: str = "w", **fields: object) -> WorkerInfo:
    known: dict[str, object] = {
        "name": name,
        "host": "h",
        "pid": 1,
        "version": "1",
        "queues": ("default",),
        "concurrency": 10,
        "started_ms": 0,
        "seen_ms": NOW_MS,
        "gone_after_ms": 10_000,
    }
    return WorkerInfo(**(known | fields))  # type: ignore[arg-type]


def told(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(each.level, each.words) for each in findings]


@pytest.mark.parametrize(
    ("crash", "power", "machine", "level", "words"),
    [
        (
            True,
            True,
            True,
            Level.OK,
            "a killed process and power loss and loss of the machine (",
        ),
        (True, True, False, Level.OK, "and power loss, not loss of the machine ("),
        (True, False, False, Level.WARN, "survive a killed process, not power loss or"),
        (False, False, False, Level.BAD, "survive nothing, not a killed process"),
    ],
)
def test_durability_in_words(
    crash: bool, power: bool, machine: bool, level: Level, words: str
) -> None:
    durability = Durability(
        process_crash=crash, power_loss=power, machine_loss=machine, summary="s", fixes=("do it",)
    )
    first, second = doctor.of_durability(durability)
    assert first.level is level
    assert words in first.words
    assert second.fix == "do it"


def test_a_crash_that_loses_only_the_last_second_is_a_warning() -> None:
    durability = Durability(
        process_crash=False, power_loss=False, machine_loss=False, window_ms=1000, summary="s"
    )
    [finding] = doctor.of_durability(durability)
    assert finding.level is Level.WARN
    assert finding.words == "a crash may lose the jobs of the last 1s (s)"


@pytest.mark.parametrize(
    ("offset_ms", "level", "words"),
    [(-3.2, Level.OK, "3 ms ahead of"), (1_500, Level.WARN, "1,500 ms behind")],
)
def test_a_clock_that_is_off(offset_ms: float, level: Level, words: str) -> None:
    [finding] = doctor.of_clock(offset_ms)
    assert finding.level is level
    assert words in finding.words
    assert bool(finding.fix) == (level is Level.WARN)


def test_workers_none_busy_or_of_several_releases() -> None:
    [none] = doctor.of_workers([])
    assert none.level is Level.WARN and "tickwheel worker" in none.fix
    found = list(
        doctor.of_workers([worker("a", running=3), worker("b", version="2", offset_ms=5e3)])
    )
    assert told(found) == [
        ("ok", "2 running, 3 of 20 slots busy"),
        ("warn", "b is 5,000 ms behind the store"),
        ("warn", "workers run different releases: 1, 2"),
    ]


def test_a_queue_says_why_its_jobs_will_not_run() -> None:
    def words(queue: QueueInfo, due_ms: int | None = NOW_MS) -> list[tuple[str, str]]:
        return told(list(doctor.of_queue(queue, [worker()], due_ms, NOW_MS)))

    assert words(QueueInfo(name="default", done=9)) == []
    assert words(QueueInfo(name="default", waiting=1)) == []
    assert words(QueueInfo(name="default", dead=2)) == [("warn", "2 dead jobs to rerun or delete")]
    paused = QueueInfo(name="default", waiting=1, paused=True)
    assert words(paused) == [("warn", "paused, with 1 job waiting")]
    assert words(QueueInfo(name="mail", waiting=1)) == [
        ("bad", "no worker serves it, with 1 job waiting")
    ]
    late_ms = NOW_MS - doctor.STUCK_MS - 60_000
    assert words(QueueInfo(name="default", waiting=1), late_ms) == [
        ("bad", "its first job has been due for 2m")
    ]


def test_a_schedule_that_can_not_be_read_or_does_not_fire() -> None:
    rule = Rule(
        cron="0 2 * * *",
        tz="UTC",
        task="t",
        payload="{}",
        queue="q",
        priority=1,
        misfire=Misfire.ONE,
        overlap=Overlap.ALLOW,
    ).encode()
    fine = Schedule(name="fine", rule=rule, next_ms=NOW_MS)
    late = Schedule(name="late", rule=rule, next_ms=NOW_MS - GRACE_MS - 1)
    paused = Schedule(name="paused", rule=rule, next_ms=0, paused=True)
    broken = Schedule(name="broken", rule=rule.replace("0 2", "99 2"), next_ms=NOW_MS)
    found = list(doctor.of_schedules([fine, late, paused, broken], [], NOW_MS, ahead_ms=1_000))
    assert [(each.level, each.about) for each in found] == [
        (Level.BAD, "schedule late"),
        (Level.BAD, "schedule broken"),
    ]
    assert "99" in found[1].words


def test_a_schedule_whose_next_tick_a_wrong_clock_gave() -> None:
    rule = Rule(every_ms=60_000, task="t")
    fine = Schedule(name="fine", rule=rule.encode(), next_ms=NOW_MS + 60_000)
    silent = msgspec.structs.replace(fine, name="silent", next_ms=NOW_MS + 86_400_000)
    none = msgspec.structs.replace(fine, name="none", next_ms=None)
    paused = msgspec.structs.replace(silent, name="paused", paused=True)
    moving = msgspec.structs.replace(fine, name="moving", next_ms=MOVING_MS)
    found = list(
        doctor.of_schedules([fine, silent, none, paused, moving], [], NOW_MS, ahead_ms=1_000)
    )
    assert [(each.level, each.about) for each in found] == [
        (Level.BAD, "schedule silent"),
        (Level.BAD, "schedule none"),
        (Level.BAD, "schedule moving"),
    ]
    assert "stored as 2027-01-16 08:00:00Z, but should be 2027-01-15 08:01:00Z" in found[0].words
    assert "stored as none" in found[1].words
    assert "being moved to another store" in found[2].words


def test_a_schedule_whose_task_no_running_worker_knows() -> None:
    rule = Rule(every_ms=60_000, task="report").encode()
    schedule = Schedule(name="nightly", rule=rule, next_ms=NOW_MS + 60_000)

    def words(*workers: WorkerInfo) -> list[str]:
        found = doctor.of_schedules([schedule], workers, NOW_MS, ahead_ms=1_000)
        return [each.words for each in found]

    assert words() == [], "that no worker is running is said once, of the workers"
    assert words(worker(tasks=("report",))) == words(worker()) == []
    [unknown] = words(worker(tasks=("other",)), worker(tasks=("report",), queues=("mail",)))
    assert unknown == "no running worker of queue default knows its task report: its jobs wait"


def test_jobs_that_wait_for_a_worker_that_knows_their_task() -> None:
    fields = {"id": "j", "payload": "{}", "due_ms": NOW_MS, "created_ms": NOW_MS, "parked": True}
    run = Run(attempt=1, worker="w", outcome=Outcome.PARK, due_ms=0, ended_ms=NOW_MS - 90_000)
    parked = [Job(task=task, history=(run,), **fields) for task in ("mail", "bill")]  # type: ignore[arg-type]
    unknown = unserved_tasks(parked, [worker(tasks=("mail",)), worker(tasks=(), queues=("x",))])
    [found] = doctor.of_unknown(unknown, NOW_MS)
    assert (found.level, found.about) == (Level.BAD, "task bill")
    assert found.words == "no running worker of queue default knows task bill (for 1m 30s)"
    assert unserved_tasks(parked, [worker()]) == [], "an older release does not say what it knows"


def test_the_first_due_job_of_a_queue_may_be_parked() -> None:
    fields = {"id": "j", "payload": "{}", "created_ms": NOW_MS}
    late = Job(task="mail", due_ms=NOW_MS - 90_000, parked=True, **fields)  # type: ignore[arg-type]
    later = Job(task="bill", due_ms=NOW_MS + 90_000, **fields)  # type: ignore[arg-type]
    assert doctor.first_due_ms([later, late], []) == late.due_ms
    assert doctor.first_due_ms([later, late], [worker(tasks=("mail",))]) == late.due_ms
    assert doctor.first_due_ms([later, late], [worker(tasks=("bill",))]) == later.due_ms
    assert doctor.first_due_ms([late], [worker(tasks=("bill",))]) is None


def test_a_move_that_has_not_finished() -> None:
    assert list(doctor.of_move(None)) == []
    [found] = doctor.of_move(Note(ids=["a", "b"], paused=["default", "mail"]))
    assert found.level is Level.BAD
    assert "2 jobs in transit, and these queues are paused: default, mail" in found.words
    assert "run the same command again" in found.fix


def test_time_zones_older_than_the_package() -> None:
    assert doctor.of_zones(None, "2026.6").words == "2026.6, from the tzdata package"
    assert doctor.of_zones(("2026a", "/z"), "2026.6").level is Level.OK
    assert doctor.of_zones(("2025b", "/z"), "2026.6").level is Level.WARN
    assert doctor.of_zones(("2025b", "/z"), None).level is Level.OK
