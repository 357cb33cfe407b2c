"""The box that a test uses: see what happened, assert on it, and move time."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from tickwheel.app import App
from tickwheel.checks import AnyPriority
from tickwheel.client import JobInfo
from tickwheel.duration import Duration, due_ms, duration_ms, moment
from tickwheel.errors import BadTime, UsageError, shown
from tickwheel.job import State
from tickwheel.task import Task
from tickwheel.testing.driver import Driver
from tickwheel.testing.expect import Expected, complaint, expected
from tickwheel.testing.parts import BoxClock, BoxStore, by_hand, off_any_loop
from tickwheel.testing.running import BoxRun

AnyTask = Task[..., Any, Any]


class BoxView:
    """What both kinds of box can show, also after their block has ended."""

    def __init__(self, app: App, clock: BoxClock, store: BoxStore, driver: Driver) -> None:
        self._app = app
        self._clock = clock
        self._store = store
        self._driver = driver
        self._over = False
        # What was enqueued since the box began, in order; a test may clear it.
        self.enqueued: list[JobInfo] = store.enqueued
        # What ran, in the order in which it started; a test may clear it.
        self.runs: list[BoxRun] = driver.runs

    @property
    def now(self) -> datetime:
        """The time in the box, in UTC."""
        return moment(self._clock.now_ms())

    @property
    def errors(self) -> list[BaseException]:
        """The exceptions of failed runs."""
        return [run.exception for run in self.runs if run.failed and run.exception is not None]

    def jobs(
        self, *, state: State | str | None = None, task: AnyTask | str | None = None
    ) -> list[JobInfo]:
        """The jobs in the box, including those of ticks, in the order in which they were added."""
        wanted = None if state is None else _checked_state(state)
        name = task.name if isinstance(task, Task) else task
        return [
            self._app._access.info_of(job)
            for job in self._store.all()
            if wanted in (None, job.state) and name in (None, job.task)
        ]

    def assert_enqueued(
        self,
        /,
        task: AnyTask,
        *args: Any,
        arguments: Mapping[str, Any] | None = None,
        delay: Duration | None = None,
        at: datetime | None = None,
        queue: str | None = None,
        priority: AnyPriority | None = None,
        id: str | None = None,
        count: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Fail unless the task was enqueued in this box, with these arguments and choices.

        Without arguments any call matches; with some, the call must be the same. `count` is the
        exact number; without it, one is enough. If an argument of the task has the name of a
        choice, pass the task's arguments as `arguments={…}`.
        """
        __tracebackhide__ = True
        choices = {"delay": delay, "at": at, "queue": queue, "priority": priority, "id": id}
        wanted = self._expected(task, args, kwargs, arguments, choices)
        self._check(wanted, count)

    def assert_not_enqueued(
        self,
        /,
        task: AnyTask,
        *args: Any,
        arguments: Mapping[str, Any] | None = None,
        delay: Duration | None = None,
        at: datetime | None = None,
        queue: str | None = None,
        priority: AnyPriority | None = None,
        id: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Fail if the task was enqueued like this; without arguments and choices, if at all."""
        __tracebackhide__ = True
        choices = {"delay": delay, "at": at, "queue": queue, "priority": priority, "id": id}
        wanted = self._expected(task, args, kwargs, arguments, choices)
        self._check(wanted, 0)

    def _expected(
        self,
        task: AnyTask,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        arguments: Mapping[str, Any] | None,
        choices: dict[str, Any],
    ) -> Expected:
        if not isinstance(task, Task):
            raise UsageError(
                f"{shown(task)} is not a task; pass a function decorated with @app.task"
            )
        return expected(task.definition, args, kwargs, arguments=arguments, **choices)

    def _check(self, wanted: Expected, count: int | None) -> None:
        __tracebackhide__ = True
        found = sum(map(wanted.fits, self.enqueued))
        if found == 0 if count is None else found != count:
            raise AssertionError(complaint(wanted, found, count, self.enqueued))

    # --- For the boxes

    def _until_ms(self, duration: Duration | None, until: datetime | None) -> int:
        """When a travel ends. Raises BadTime if that is in the past."""
        if (duration is None) == (until is None):
            raise BadTime("pass a duration, as in travel('30m'), or until=an aware datetime")
        now_ms = self._clock.now_ms()
        if until is None:
            assert duration is not None
            return now_ms + duration_ms(duration)
        if due_ms(until, "until") < now_ms:
            raise BadTime(
                f"until={until.isoformat()} has passed: it is {self.now.isoformat()} in the box; "
                "time only moves forward"
            )
        return due_ms(until, "until")

    def _end(self) -> None:
        self._over = True

    def _check_open(self) -> None:
        if self._over:
            raise UsageError("this box has ended; time moves only inside its with block")


class Box(BoxView):
    """For code with an event loop: `async with sandbox(app) as box`."""

    async def travel(
        self, duration: Duration | None = None, *, until: datetime | None = None
    ) -> list[BoxRun]:
        """Let time pass; jobs that become due on the way run in order, each at its exact time.

        Returns the runs. A run that failed is retried as in production; see `errors`.
        """
        self._check_open()
        return await self._driver.travel(self._until_ms(duration, until))

    async def drain(self) -> list[BoxRun]:
        """Run due jobs, and due jobs that they add, until none is due; time does not move."""
        self._check_open()
        return await self._driver.drain()

    async def outage(
        self, duration: Duration | None = None, *, until: datetime | None = None
    ) -> None:
        """Let time pass as if no worker were running: jobs become late, ticks are missed.

        The next `travel` or `drain` shows what happens to them.
        """
        self._check_open()
        await self._driver.outage(self._until_ms(duration, until))


class SyncBox(BoxView):
    """For code without an event loop: `with sandbox(app) as box`. Plain tasks run on the test's
    thread, async ones on an event loop on that thread."""

    def travel(
        self, duration: Duration | None = None, *, until: datetime | None = None
    ) -> list[BoxRun]:
        """Let time pass; jobs that become due on the way run in order, each at its exact time."""
        self._check_open()
        off_any_loop()
        return by_hand(self._driver.travel(self._until_ms(duration, until)))

    def drain(self) -> list[BoxRun]:
        """Run due jobs, and due jobs that they add, until none is due; time does not move."""
        self._check_open()
        off_any_loop()
        return by_hand(self._driver.drain())

    def outage(self, duration: Duration | None = None, *, until: datetime | None = None) -> None:
        """Let time pass as if no worker were running: jobs become late, ticks are missed."""
        self._check_open()
        off_any_loop()
        by_hand(self._driver.outage(self._until_ms(duration, until)))


def _checked_state(state: State | str) -> State:
    try:
        return State(state)
    except ValueError:
        known = ", ".join(each.value for each in State)
        raise UsageError(f"state={shown(state)}: must be one of {known}") from None
