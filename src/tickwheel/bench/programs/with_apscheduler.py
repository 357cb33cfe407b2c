"""APScheduler 3 with its jobs in Redis or SQLite. It runs them in its own process."""

from __future__ import annotations

from datetime import UTC, datetime
from urllib.parse import urlsplit

from apscheduler.schedulers.background import BackgroundScheduler
from record import URL, ran

# Without a grace time it drops a job that starts a second late.
scheduler = BackgroundScheduler(timezone=UTC, job_defaults={"misfire_grace_time": None})


def nothing(n: int) -> None:
    ran(n)


def open() -> None:
    if URL.startswith("redis:"):
        from apscheduler.jobstores.redis import RedisJobStore

        where = urlsplit(URL)
        scheduler.add_jobstore(RedisJobStore(host=where.hostname, port=where.port))
    else:
        scheduler.add_jobstore("sqlalchemy", url=URL)
    scheduler.start(paused=True)


def add(n: int) -> None:
    scheduler.add_job(nothing, args=[n])


def add_at(n: int, due: float) -> None:
    scheduler.add_job(nothing, "date", run_date=datetime.fromtimestamp(due, UTC), args=[n])


def work() -> None:
    scheduler.resume()


def rest() -> None:
    scheduler.shutdown(wait=False)
