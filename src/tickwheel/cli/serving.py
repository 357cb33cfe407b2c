"""What `tickwheel worker` does: one worker in this process, or several processes of it."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from tickwheel.app import App
from tickwheel.cli.ending import Ending, end_leftovers, end_now
from tickwheel.cli.loading import load_app, open_app, store_name
from tickwheel.cli.output import FAILURE, OK, show_fields
from tickwheel.cli.worker import Work
from tickwheel.config import Settings
from tickwheel.errors import BadConfig
from tickwheel.span import span_ms, span_text
from tickwheel.supervisor import Supervisor
from tickwheel.version import __version__
from tickwheel.worker import Worker

log = logging.getLogger("tickwheel")

# Names of tasks that the banner has room for.
TASKS_SHOWN = 20


# --- One process


def serve(work: Work, parent: int | None) -> int:
    """Run one worker in this process until told to stop; gives the exit code.

    `parent` is the pipe to the process that started several of us, if one did.
    """
    app = load_app(work.target)
    set_up_logs(work.settings.log_level, with_pid=parent is not None)
    # The store's thread gets Python's lock back sooner from a task that computes.
    sys.setswitchinterval(0.001)
    try:
        return asyncio.run(_serve(app, work, parent))
    except SystemExit as error:
        # Our own exit codes mean something else.
        log.error("a task called sys.exit(%s) in the worker's own thread", error.code)
        return FAILURE


async def _serve(app: App, work: Work, parent: int | None) -> int:
    """Work until asked to stop. Whatever happens, the process is on its way out afterwards."""
    ending = Ending(grace_s=span_ms(work.settings.grace) / 1000, parent=parent)
    ending.listen()
    # For tasks that use asyncio.to_thread: asyncio would wait for its own pool without end.
    threads = ThreadPoolExecutor(thread_name_prefix="asyncio")
    asyncio.get_running_loop().set_default_executor(threads)
    code = FAILURE
    try:
        if await ending.unless_asked(open_app(app)):
            await _run(app, work, ending, alone=parent is None)
        code = OK
    finally:
        await app.__aexit__()
        threads.shutdown(wait=False, cancel_futures=True)
        ending.leave(code)
    if not await end_leftovers():
        end_now(code, "stopped")
    log.info("stopped")
    return code


async def _run(app: App, work: Work, ending: Ending, *, alone: bool) -> None:
    settings = work.settings
    queues = settings.queues or tuple(app.tasks.queues())
    async with app.worker(
        queues=queues,
        concurrency=settings.concurrency,
        lease=settings.lease,
        grace=settings.grace,
    ) as worker:
        if alone:
            _banner(app, work, queues)
        else:
            log.info("started, serving %s", ", ".join(queues))
        if not app.tasks.all():
            log.warning("%s has no tasks: no job can run here", work.target)
        await ending.asked()
        _say_stopping(worker, settings, alone)


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
            ("pid", str(os.getpid())),
            ("tasks", ", ".join(names[:TASKS_SHOWN]) + more or "none"),
        ],
        stderr=True,
    )


def _say_stopping(worker: Worker, settings: Settings, alone: bool) -> None:
    log.info(
        "stopping: %d running, grace %s%s",
        worker.running,
        span_text(span_ms(settings.grace)),
        "; again to end at once" if alone else "",
    )


# --- Several processes


def supervise(work: Work) -> int:
    """Run several worker processes until told to stop; gives the exit code."""
    if os.name != "posix":
        raise BadConfig("--processes needs a POSIX system; start the command several times instead")
    settings = work.settings
    set_up_logs(settings.log_level)
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
    grace_s = span_ms(settings.grace) / 1000
    return asyncio.run(
        Supervisor(work.command, processes=settings.processes, grace_s=grace_s).run()
    )


# --- Log lines on stderr: time in UTC, level, logger, message


class _Line(logging.Formatter):
    default_msec_format = "%s.%03dZ"

    def converter(self, seconds: float | None) -> time.struct_time:
        return time.gmtime(seconds)


def set_up_logs(level: str, *, with_pid: bool = False) -> None:
    """Log to stderr, unless the user's module has set up logging itself: then only our level.

    Call it after that module was imported.
    """
    root = logging.getLogger()
    if not root.handlers:
        pid = "[%(process)d] " if with_pid else ""
        handler = logging.StreamHandler()
        handler.setFormatter(_Line(f"%(asctime)s %(levelname)-7s {pid}%(name)s: %(message)s"))
        root.addHandler(handler)
        root.setLevel(level.upper())
        # Which selector it uses is no news, at any level.
        logging.getLogger("asyncio").setLevel(max(root.level, logging.INFO))
    logging.getLogger("tickwheel").setLevel(level.upper())
