"""The app of the judge's workers and producers. Its tasks tell the record what they do."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from judge.busy import STARVED, Waiting
from judge.load import QUEUES, RETRIES, RETRY_S, SNOOZE_S, Wish
from judge.record import SLOW, SLOW_S, Ended, Recorder, Started, Trouble
from tickwheel import App, Call, GiveUp, Outcome, Retry, Snooze, Task, current_job

recorder = Recorder(os.environ["JUDGE_RECORD"])
_runs = itertools.count()


@dataclass(frozen=True)
class Errand:
    """The arguments of a job: what it should do, and when it may start at the earliest."""

    number: int
    not_before: float
    seconds: float
    fails: int
    dies: bool
    gives_up: bool
    snoozes: bool


async def work(errand: Errand) -> str:
    with _recorded(errand) as run:
        await asyncio.sleep(errand.seconds)
        _end(errand)
        return run


def work_in_thread(errand: Errand) -> str:
    with _recorded(errand) as run:
        time.sleep(errand.seconds)
        _end(errand)
        return run


def _end(errand: Errand) -> None:
    """End as the errand says."""
    context = current_job()
    assert context is not None
    job = context.job
    if errand.snoozes and not any(run.outcome is Outcome.SNOOZE for run in job.history):
        raise Snooze(SNOOZE_S)
    if errand.gives_up:
        raise GiveUp("as it should")
    if errand.dies and job.failures >= RETRIES:
        raise GiveUp("as it should, at last")
    if errand.dies or job.failures < errand.fails:
        raise Retry(RETRY_S, "as it should")


@contextmanager
def _recorded(errand: Errand) -> Iterator[str]:
    context = current_job()
    assert context is not None
    run, job = f"{os.getpid()}-{next(_runs)}", context.job
    recorder.write(
        Started(
            at=time.time(),
            run=run,
            id=job.id,
            number=errand.number,
            attempt=job.attempt,
            pid=os.getpid(),
            not_before=errand.not_before,
        )
    )
    how = "interrupted"
    try:
        yield run
        how = "done"
    except Retry:
        how = "retry"
        raise
    except Snooze:
        how = "snooze"
        raise
    except GiveUp:
        how = "dead"
        raise
    finally:
        recorder.write(Ended(at=time.time(), run=run, attempt=context.job.attempt, how=how))


def app_on(url: str, outbox: str | None) -> App:
    app = App(url, outbox=outbox)
    for queue in QUEUES:
        # Workers serve the queues of the app's tasks.
        app.task(name=f"work-{queue}", queue=queue)(work)
        app.task(name=f"thread-{queue}", queue=queue)(work_in_thread)
    return app


def call_of(app: App, wish: Wish, **options: object) -> Call[[Errand], str]:
    name = f"{'thread' if wish.in_thread else 'work'}-{wish.queue}"
    task: Task[[Errand], str, object] = Task(app._access, app.tasks.get(name))
    return task.using(priority=wish.priority, **options)  # type: ignore[arg-type]


def _watch() -> None:
    """Tell where the machine had no time for us. And whoever started us may be gone: then nobody
    wants us any more."""
    parent, waiting = os.getppid(), Waiting()
    while os.getppid() == parent:
        before = time.time()
        time.sleep(SLOW_S / 2)
        if (now := time.time()) - before > SLOW_S or waiting.share() > STARVED:
            recorder.write(Trouble(at=before, until=now, kind=SLOW, pid=os.getpid()))
    os._exit(1)


threading.Thread(target=_watch, daemon=True).start()
app = app_on(os.environ["TICKWHEEL_STORE"], os.environ["JUDGE_OUTBOX"])
