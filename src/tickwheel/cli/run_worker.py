"""Behind `tickwheel worker`: run one worker in this process, or several processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from tickwheel.address import http_address
from tickwheel.app import App
from tickwheel.cli.load_app import load_app, open_app, store_name
from tickwheel.cli.logs import set_up_logs
from tickwheel.cli.output import FAILURE, OK, show_fields
from tickwheel.cli.shutdown import Shutdown, end_leftovers, end_now
from tickwheel.cli.work import Work
from tickwheel.config import Settings
from tickwheel.duration import duration_ms, duration_text
from tickwheel.engine.worker import Worker
from tickwheel.errors import BadConfig, LifespanError
from tickwheel.operate.supervisor import Supervisor
from tickwheel.version import __version__

log = logging.getLogger("tickwheel")

# How many task names the banner shows.
TASKS_SHOWN = 20


# --- One process


def serve(work: Work, parent: int | None) -> int:
    """Run one worker in this process until told to stop; returns the exit code.

    `parent` is the pipe to the supervising process, if there is one.
    """
    app = load_app(work.target, work.settings.imports)
    set_up_logs(work.settings, with_pid=parent is not None)
    if work.settings.http or work.settings.metrics:
        # Before the store is opened, so that all its calls are counted.
        app.enable_metrics()
    return run_app(
        app,
        work.settings,
        parent,
        lambda shutdown, started: _run(app, work, shutdown, started, alone=parent is None),
    )


# What runs between the start and the stop of a process; it calls the second once it has started.
Running = Callable[[Shutdown, Callable[[], object]], Awaitable[None]]


def run_app(app: App, settings: Settings, parent: int | None, run: Running) -> int:
    """Open the app, run until told to stop, and close it; returns the exit code."""
    # The store's thread gets the GIL back sooner from a CPU-bound task.
    sys.setswitchinterval(0.001)
    try:
        return asyncio.run(_run_app(app, settings, parent, run))
    except SystemExit as error:
        # Our own exit codes have other meanings.
        log.error("a task called sys.exit(%s) in the worker's own thread", error.code)
        return FAILURE


async def _run_app(app: App, settings: Settings, parent: int | None, run: Running) -> int:
    """Run until asked to stop. Whatever happens, the process exits afterwards."""
    shutdown = Shutdown(grace_s=duration_ms(settings.grace) / 1000, parent=parent)
    shutdown.listen()
    # For tasks that use asyncio.to_thread: asyncio would wait for its own pool forever.
    threads = ThreadPoolExecutor(thread_name_prefix="asyncio")
    asyncio.get_running_loop().set_default_executor(threads)
    code = FAILURE
    try:
        if await shutdown.unless_stopped(open_app(app)):
            async with shutdown.starting() as started:
                await run(shutdown, started)
        code = OK
    except LifespanError as error:
        log.error("%s", error, exc_info=error.__cause__)
        raise
    finally:
        await app.__aexit__()
        threads.shutdown(wait=False, cancel_futures=True)
        shutdown.leave(code)
    if not await end_leftovers():
        end_now(code, "stopped")
    log.info("stopped")
    return code


async def _run(
    app: App, work: Work, shutdown: Shutdown, started: Callable[[], object], *, alone: bool
) -> None:
    async with working(app, work) as worker:
        started()
        queues = queues_of(app, work)
        if alone and work.settings.log_format == "text":
            _banner(app, work, queues)
        else:
            log.info("started, serving %s", ", ".join(queues))
        await shutdown.requested()
        _say_stopping(worker, work.settings, alone)


def queues_of(app: App, work: Work) -> tuple[str, ...]:
    return work.settings.queues or tuple(app.tasks.queues())


@contextlib.asynccontextmanager
async def working(app: App, work: Work) -> AsyncIterator[Worker]:
    """A worker with these settings, for the duration of the block; warns of what it can't do."""
    settings = work.settings
    # In this order: what the worker does while it stops can still be seen.
    async with (
        _serving_status(app, settings) as running,
        app.worker(
            queues=queues_of(app, work),
            concurrency=settings.concurrency,
            threads=settings.threads,
            processes=settings.task_processes,
            lease=settings.lease,
            grace=settings.grace,
        ) as worker,
    ):
        running(worker)
        if app.url.lower().startswith("memory:"):
            log.warning(
                "the store is memory://: its jobs are lost when this process ends, and no other "
                "process can add any"
            )
        if not app.tasks.all():
            log.warning("%s has no tasks, so this worker can't run any job", work.target)
        yield worker


@asynccontextmanager
async def _serving_status(app: App, settings: Settings) -> AsyncIterator[Callable[[Worker], None]]:
    """Serve metrics and health, if asked; yields who wants to know of the worker."""
    if not settings.http:
        yield lambda _: None
        return
    # Needs a library that others don't.
    from tickwheel.operate.status import serving_status

    async with serving_status(app, settings.http) as status:
        yield lambda worker: setattr(status, "worker", worker)


def _banner(app: App, work: Work, queues: tuple[str, ...]) -> None:
    names = sorted(definition.name for definition in app.tasks.all())
    more = f" and {len(names) - TASKS_SHOWN} more" if len(names) > TASKS_SHOWN else ""
    show_fields(
        [
            ("tickwheel", __version__),
            ("app", work.target),
            ("store", store_name(app)),
            ("queues", ", ".join(queues)),
            ("concurrency", str(work.settings.concurrency)),
            ("threads", str(work.settings.threads)),
            ("pid", str(os.getpid())),
            ("tasks", ", ".join(names[:TASKS_SHOWN]) + more or "none"),
        ],
        stderr=True,
    )


def _say_stopping(worker: Worker, settings: Settings, alone: bool) -> None:
    log.info(
        "stopping: %d running, grace %s%s",
        worker.running,
        duration_text(duration_ms(settings.grace)),
        "; signal again to end at once" if alone else "",
    )


# --- Several processes


def supervise(work: Work) -> int:
    """Run several worker processes until told to stop; returns the exit code."""
    if os.name != "posix":
        raise BadConfig("--processes needs a POSIX system; run the command several times instead")
    settings = work.settings
    if settings.http:
        http_address(settings.http, processes=settings.processes)
    set_up_logs(settings)
    if settings.log_format == "text":
        show_fields(
            [
                ("tickwheel", __version__),
                ("app", work.target),
                ("processes", str(settings.processes)),
                ("concurrency", f"{settings.concurrency} each"),
                ("pid", str(os.getpid())),
            ],
            stderr=True,
        )
    grace_s = duration_ms(settings.grace) / 1000
    return asyncio.run(
        Supervisor(work.command, processes=settings.processes, grace_s=grace_s).run()
    )
