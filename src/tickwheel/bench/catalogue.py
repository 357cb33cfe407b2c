"""What is measured: Tickwheel on its stores, and other libraries, each set up as it recommends."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tickwheel.errors import UsageError

PROGRAMS = Path(__file__).parent / "programs"
OURS = "Tickwheel"

# Why a library has no figure.
_SYNC_ONLY = {"add_async": "no async API"}
_NO_BULK = {"add_many": "no call for many"}
_ASYNC_ONLY = {"add": "no sync API"}
_NO_RESULTS = {"call": "keeps no results"}
_ONE_PROCESS = {"processes": "its jobs belong to one process"}


@dataclass(frozen=True, slots=True)
class Subject:
    """One library on one store. In commands, `{n}` stands for the number of processes, and `{url}`
    for the store."""

    library: str
    store: str
    program: str
    # What to install for it; none for Tickwheel.
    packages: tuple[str, ...] = ()
    # Its workers: each command is started once, those under `each` once for each process. None: in
    # the process that adds the jobs.
    commands: tuple[str, ...] = ()
    each: tuple[str, ...] = ()
    # What is not left at its default, or is worth knowing.
    settings: str = ""
    lacks: Mapping[str, str] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        return self.library == OURS

    @property
    def name(self) -> str:
        return f"{self.library} · {self.store}"

    @property
    def inside(self) -> bool:
        """Whether the worker runs in the process that adds the jobs."""
        return not (self.commands or self.each)

    def worker_commands(self, processes: int, url: str) -> list[list[str]]:
        """The commands that serve this store with so many processes."""
        templates = [*self.commands, *(each for each in self.each for _ in range(processes))]
        return [each.format(n=processes, url=url).split() for each in templates]


def _tickwheel(store: str) -> Subject:
    if store == "memory":
        # Jobs in memory are seen by the event loop that opened the store, and by no other.
        lacks = _ONE_PROCESS | {"add": "its jobs belong to one event loop"}
        return Subject(OURS, store, "with_tickwheel", settings="100 jobs at a time", lacks=lacks)
    command = "python -m tickwheel worker with_tickwheel:app --processes {n} --log-level warning"
    settings = "100 jobs at a time"
    return Subject(OURS, store, "with_tickwheel", commands=(command,), settings=settings)


def _huey(store: str, packages: tuple[str, ...]) -> Subject:
    return Subject(
        *("Huey", store, "with_huey", packages),
        commands=("huey_consumer with_huey.huey --worker-type process --workers {n} --quiet",),
        settings="process workers"
        + ("; polls with a back-off of 0.1 to 10 s; fsync off" if store == "sqlite" else ""),
        lacks=_SYNC_ONLY | _NO_BULK,
    )


def _apscheduler(store: str, packages: tuple[str, ...]) -> Subject:
    return Subject(
        *("APScheduler", store, "with_apscheduler", packages),
        settings="BackgroundScheduler, 10 threads, misfire_grace_time=None",
        lacks=_SYNC_ONLY | _NO_BULK | _NO_RESULTS | _ONE_PROCESS,
    )


def _nats_py(store: str) -> Subject:
    return Subject(
        *("nats-py", store, "with_nats", ("nats-py",)),
        each=("python with_nats.py",),
        settings="JetStream alone: pull consumer, 100 a fetch, acks not confirmed; no tasks",
        lacks=_ASYNC_ONLY | _NO_BULK | _NO_RESULTS,
    )


PEERS = (
    Subject(
        *("Celery", "redis", "with_celery", ("celery[redis]",)),
        commands=("celery -A with_celery worker --concurrency {n} --loglevel WARNING",),
        settings="prefork, worker_prefetch_multiplier=64 as for short tasks; bulk is a group",
        lacks=_SYNC_ONLY,
    ),
    Subject(
        *("Dramatiq", "redis", "with_dramatiq", ("dramatiq[redis]",)),
        commands=("dramatiq with_dramatiq --processes {n}",),
        settings="8 threads a process; bulk is a group",
        lacks=_SYNC_ONLY,
    ),
    _huey("redis", ("huey", "redis")),
    Subject(
        *("RQ", "redis", "with_rq", ("rq",)),
        each=("rq worker --with-scheduler --url {url} --logging_level WARNING",),
        settings="a fork for each job, with the scheduler",
        lacks=_SYNC_ONLY,
    ),
    Subject(
        *("taskiq", "redis", "with_taskiq", ("taskiq", "taskiq-redis")),
        commands=(
            "taskiq worker with_taskiq:broker --workers {n} --log-level WARNING",
            "taskiq scheduler with_taskiq:scheduler --update-interval 1 --log-level WARNING",
        ),
        settings="RedisStreamBroker; the scheduler reads every second (default: every minute)",
        lacks=_ASYNC_ONLY | _NO_BULK,
    ),
    Subject(
        *("arq", "redis", "with_arq", ("arq",)),
        each=("arq with_arq.WorkerSettings",),
        settings="10 jobs at a time, polls every 0.5 s",
        lacks=_ASYNC_ONLY | _NO_BULK,
    ),
    _apscheduler("redis", ("apscheduler", "redis")),
    _huey("sqlite", ("huey",)),
    _apscheduler("sqlite", ("apscheduler", "sqlalchemy")),
    Subject(
        *("Procrastinate", "postgresql", "with_procrastinate", ("procrastinate",)),
        each=("procrastinate --app=with_procrastinate.app worker --concurrency 10",),
        settings="10 jobs at a time, polls for later jobs every 5 s",
        lacks=_NO_RESULTS,
    ),
    Subject(
        # Version 1.6 of its command fails with a newer typer.
        *("PgQueuer", "postgresql", "with_pgqueuer", ("pgqueuer[asyncpg]", "typer<0.26")),
        each=("pgq run with_pgqueuer:main",),
        settings="asyncpg, batches of 10, durable tables",
        lacks=_ASYNC_ONLY | _NO_RESULTS,
    ),
    _nats_py("nats-strict"),
    _nats_py("nats-fast"),
)

STORE_NAMES = ("memory", "sqlite", "postgresql", "redis", "nats-strict", "nats-fast")
PEER_NAMES = tuple(dict.fromkeys(peer.library for peer in PEERS))


def chosen(stores: Sequence[str], peers: Sequence[str]) -> list[Subject]:
    """The subjects on these stores, Tickwheel first on each; UsageError for unknown names."""
    for given, known, what in ((stores, STORE_NAMES, "store"), (peers, PEER_NAMES, "peer")):
        for name in given:
            if name not in known:
                raise UsageError(f"no {what} {name!r}; there are: {', '.join(known)}")
    found: list[Subject] = []
    for store in stores:
        found.append(_tickwheel(store))
        found += [each for each in PEERS if each.store == store and each.library in peers]
    return found


def python_of(subject: Subject, environment: Path | None) -> str:
    """The interpreter that a subject runs with."""
    if environment is None:
        return sys.executable
    return str(environment / "bin" / "python")
