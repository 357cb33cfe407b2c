"""`manage.py tickwheel_worker`: run the project's jobs."""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from tickwheel.cli import run_worker
from tickwheel.cli.work import Work
from tickwheel.config import LOG_LEVELS, NAMES, Settings, load
from tickwheel.django.project import for_workers
from tickwheel.errors import TickwheelError

TARGET = "tickwheel.django:app"


class Command(BaseCommand):  # type: ignore[misc]  # Django has no types
    help = (
        "Runs the project's jobs until told to stop. The first SIGTERM or Ctrl-C lets running jobs "
        "finish; the second ends the process at once."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        usual = Settings()
        for name, metavar, words in (
            ("queues", "A,B", "Queues to serve. Default: those of the tasks."),
            ("concurrency", "N", f"Jobs to run at the same time. Default: {usual.concurrency}."),
            ("threads", "N", f"Plain functions among them. Default: {usual.threads}."),
            ("task-processes", "N", 'Child processes for tasks with pool="process".'),
            ("lease", "DURATION", f"How soon others take over. Default: {usual.lease}."),
            ("grace", "DURATION", f"For running jobs to finish. Default: {usual.grace}."),
            ("http", "HOST:PORT", "Serve /metrics and /healthz there."),
            ("processes", "N", "Worker processes; one that dies is replaced. Default: 1."),
        ):
            parser.add_argument(f"--{name}", metavar=metavar, help=words)
        parser.add_argument("--log-level", choices=LOG_LEVELS, help="The lowest level to log.")

    def handle(self, *_: Any, **options: Any) -> None:
        flags = {
            name: value for name, value in options.items() if name in NAMES and value is not None
        }
        try:
            # Flags override the project's settings, and these all other sources.
            work = Work(TARGET, load(for_workers() | flags).settings)
            several = work.settings.processes > 1
            code = run_worker.supervise(work) if several else run_worker.serve(work, None)
        except TickwheelError as error:
            raise CommandError(str(error)) from error
        if code:
            sys.exit(code)
