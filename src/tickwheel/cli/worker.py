"""`tickwheel worker`: run an app's jobs until told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated

import typer

from tickwheel.app import App
from tickwheel.cli.codes import FAILURE, OK
from tickwheel.cli.ending import Ending, leave_nothing_behind
from tickwheel.cli.loading import load_app, open_app, store_name
from tickwheel.cli.logs import LogLevel, set_up_logs
from tickwheel.cli.output import show_fields
from tickwheel.errors import BadConfig
from tickwheel.span import span_ms, span_text
from tickwheel.tasks import checked_name
from tickwheel.version import __version__
from tickwheel.worker import Worker

log = logging.getLogger("tickwheel")

# Names of tasks that the banner has room for.
TASKS_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What was typed, checked as far as that can be done without the app."""

    target: str
    queues: tuple[str, ...]
    concurrency: int
    lease_ms: int
    grace_ms: int
    log_level: LogLevel

    def command(self, parent: int) -> list[str]:
        """The command that runs one worker process of several, tied to its parent by a pipe."""
        return [
            *(sys.executable, "-m", "tickwheel", "worker", self.target),
            *(("--queues", ",".join(self.queues)) if self.queues else ()),
            *("--concurrency", str(self.concurrency)),
            *("--lease", f"{self.lease_ms}ms", "--grace", f"{self.grace_ms}ms"),
            *("--log-level", str(self.log_level), "--parent", str(parent)),
        ]


def worker(
    target: Annotated[
        str, typer.Argument(metavar="MODULE:APP", help="The app, as shop:app or shop.")
    ],
    queues: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Queues to serve. Default: those of the app's tasks."),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(metavar="N", min=1, help="Jobs to run at the same time, per process.")
    ] = 100,
    lease: Annotated[
        str,
        typer.Option(
            metavar="SPAN", help="How soon others take over the jobs of a worker that died."
        ),
    ] = "15s",
    grace: Annotated[
        str, typer.Option(metavar="SPAN", help="How long running jobs may take to finish.")
    ] = "30s",
    processes: Annotated[
        int, typer.Option(metavar="N", min=1, help="Worker processes; one that dies is replaced.")
    ] = 1,
    log_level: Annotated[LogLevel, typer.Option(help="The least that is logged.")] = LogLevel.INFO,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run jobs until SIGTERM or Ctrl-C: once to let running jobs finish, twice to end at once."""
    settings = Settings(
        target=target,
        queues=_names(queues),
        concurrency=concurrency,
        lease_ms=span_ms(lease),
        grace_ms=span_ms(grace),
        log_level=log_level,
    )
    several = processes > 1
    raise typer.Exit(_supervise(settings, processes) if several else _work(settings, parent))


def _names(queues: str | None) -> tuple[str, ...]:
    if queues is None:
        return ()
    return tuple(checked_name("queue", name.strip()) for name in queues.split(","))


# --- Several processes


def _supervise(settings: Settings, processes: int) -> int:
    from tickwheel.supervisor import Supervisor

    if os.name != "posix":
        raise BadConfig("--processes needs a POSIX system; start the command several times instead")
    set_up_logs(settings.log_level)
    log.info(
        "tickwheel %s: %d processes of %s, pid %d",
        __version__,
        processes,
        settings.target,
        os.getpid(),
    )
    return asyncio.run(
        Supervisor(settings.command, processes=processes, grace_s=settings.grace_ms / 1000).run()
    )


# --- One process


def _work(settings: Settings, parent: int | None) -> int:
    app = load_app(settings.target)
    set_up_logs(settings.log_level, with_pid=parent is not None)
    # The store's thread gets Python's lock back sooner from a task that computes.
    sys.setswitchinterval(0.001)
    try:
        return asyncio.run(_serve(app, settings, parent))
    except SystemExit as error:
        # Our own exit codes mean something else.
        log.error("a task called sys.exit(%s) in the worker's own thread", error.code)
        return FAILURE


async def _serve(app: App, settings: Settings, parent: int | None) -> int:
    """Work until asked to stop. Whatever happens, the process is on its way out afterwards."""
    ending = Ending(grace_s=settings.grace_ms / 1000, parent=parent)
    ending.listen()
    # For tasks that use asyncio.to_thread: asyncio would wait for its own pool without end.
    threads = ThreadPoolExecutor(thread_name_prefix="asyncio")
    asyncio.get_running_loop().set_default_executor(threads)
    code = FAILURE
    try:
        if await ending.unless_asked(open_app(app)):
            await _run(app, settings, ending, alone=parent is None)
        code = OK
    finally:
        await app.__aexit__()
        threads.shutdown(wait=False, cancel_futures=True)
        ending.leave(code)
    log.info("stopped")
    await leave_nothing_behind()
    return code


async def _run(app: App, settings: Settings, ending: Ending, *, alone: bool) -> None:
    queues = settings.queues or tuple(app.tasks.queues())
    async with app.worker(
        queues=queues,
        concurrency=settings.concurrency,
        lease=settings.lease_ms / 1000,
        grace=settings.grace_ms / 1000,
    ) as worker:
        if alone:
            _banner(app, settings, queues)
        else:
            log.info("started, serving %s", ", ".join(queues))
        if not app.tasks.all():
            log.warning("%s has no tasks: no job can run here", settings.target)
        await ending.asked()
        _say_stopping(worker, settings, alone)


def _banner(app: App, settings: Settings, queues: tuple[str, ...]) -> None:
    names = sorted(definition.name for definition in app.tasks.all())
    more = f" and {len(names) - TASKS_SHOWN} more" if len(names) > TASKS_SHOWN else ""
    show_fields(
        [
            ("tickwheel", __version__),
            ("app", settings.target),
            ("store", store_name(app)),
            ("queues", ", ".join(queues)),
            ("concurrency", str(settings.concurrency)),
            ("pid", str(os.getpid())),
            ("tasks", ", ".join(names[:TASKS_SHOWN]) + more or "none"),
        ],
        stderr=True,
    )


def _say_stopping(worker: Worker, settings: Settings, alone: bool) -> None:
    log.info(
        "stopping: %d running, grace %s%s",
        worker._hand.running,
        span_text(settings.grace_ms),
        "; again to end at once" if alone else "",
    )
