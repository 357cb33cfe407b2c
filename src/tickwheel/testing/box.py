"""A box as a test sees it: what happened, what is expected, and time to let pass."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from tickwheel.app import App
from tickwheel.calls import Task
from tickwheel.client import JobInfo
from tickwheel.errors import BadTime, UsageError
from tickwheel.job import State
from tickwheel.span import Span, due_ms, moment, span_ms
from tickwheel.tasks import PriorityName
from tickwheel.testing.driver import Driver
from tickwheel.testing.expect import Expected, complaint, expected
from tickwheel.testing.place import BoxClock, BoxStore, by_hand, off_any_loop
from tickwheel.testing.running import BoxRun

AnyTask = Task[..., Any, Any]


class Looks:
    """What both kinds of box can tell; also when their block is over."""

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
        """What the runs that failed raised."""
        return [run.exception for run in self.runs if run.failed and run.exception is not None]

    def jobs(
        self, *, state: State | str | None = None, task: AnyTask | str | None = None
    ) -> list[JobInfo]:
        """The jobs in the box, in the order in which they were added, those of ticks included."""
        wanted = None if state is None else _checked_state(state)
        name = task.name if isinstance(task, Task) else task
        return [
            JobInfo.of(job)
            for job in self._store.all()
            if wanted in (None, job.state) and name in (None, job.task)
        ]

    def assert_enqueued(
        self,
        task: AnyTask,
        *args: Any,
        arguments: Mapping[str, Any] | None = None,
        delay: Span | None = None,
        at: datetime | None = None,
        queue: str | None = None,
        priority: PriorityName | None = None,
        id: str | None = None,
        count: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Fail unless the task was enqueued, with these arguments and choices, in this box.

        Without arguments any will do; with some, the call must be the same one. `count` says how
        often exactly; without it, once is enough. Where an argument of the task has the name of a
        choice, give the task's own as `arguments={…}`.
        """
        __tracebackhide__ = True
        choices = {"delay": delay, "at": at, "queue": queue, "priority": priority, "id": id}
        wanted = self._expected(task, args, kwargs, arguments, choices)
        self._check(wanted, count)

    def assert_not_enqueued(
        self,
        task: AnyTask,
        *args: Any,
        arguments: Mapping[str, Any] | None = None,
        delay: Span | None = None,
        at: datetime | None = None,
        queue: str | None = None,
        priority: PriorityName | None = None,
        id: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Fail if the task was enqueued so; with no arguments and choices, if it was at all."""
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
            raise UsageError(f"{task!r} is not a task: give a function that has @app.task")
        return expected(task.definition, args, kwargs, arguments=arguments, **choices)

    def _check(self, wanted: Expected, count: int | None) -> None:
        __tracebackhide__ = True
        found = sum(map(wanted.fits, self.enqueued))
        if found == 0 if count is None else found != count:
            raise AssertionError(complaint(wanted, found, count, self.enqueued))

    # --- For the boxes

    def _until_ms(self, span: Span | None, until: datetime | None) -> int:
        """Where a journey ends; BadTime where that lies behind."""
        if (span is None) == (until is None):
            raise BadTime("give a length of time, as in travel('30m'), or until=an aware datetime")
        now_ms = self._clock.now_ms()
        if until is None:
            assert span is not None
            return now_ms + span_ms(span)
        if due_ms(until) < now_ms:
            raise BadTime(
                f"until={until.isoformat()} has passed, it is {self.now.isoformat()} in the box; "
                "time goes forward only"
            )
        return due_ms(until)

    def _end(self) -> None:
        self._over = True

    def _check_open(self) -> None:
        if self._over:
            raise UsageError("this box has ended: time passes only inside its with block")


class Box(Looks):
    """For code with an event loop: `async with sandbox(app) as box`."""

    async def travel(
        self, span: Span | None = None, *, until: datetime | None = None
    ) -> list[BoxRun]:
        """Let time pass; what falls due on the way runs in its order, at its exact moment.

        Answers with what ran. A run that failed is retried as in production; see `errors`.
        """
        self._check_open()
        return await self._driver.travel(self._until_ms(span, until))

    async def drain(self) -> list[BoxRun]:
        """Run what is due now, and what that adds, until nothing is due; time stands still."""
        self._check_open()
        return await self._driver.drain()

    async def outage(self, span: Span | None = None, *, until: datetime | None = None) -> None:
        """Let time pass as if no worker were up: jobs grow late, ticks are missed.

        What becomes of them shows at the next `travel` or `drain`.
        """
        self._check_open()
        await self._driver.outage(self._until_ms(span, until))


class SyncBox(Looks):
    """For code without an event loop: `with sandbox(app) as box`. Plain tasks run on the thread of
    the test, async ones on an event loop on that thread."""

    def travel(self, span: Span | None = None, *, until: datetime | None = None) -> list[BoxRun]:
        """Let time pass; what falls due on the way runs in its order, at its exact moment."""
        self._check_open()
        off_any_loop()
        return by_hand(self._driver.travel(self._until_ms(span, until)))

    def drain(self) -> list[BoxRun]:
        """Run what is due now, and what that adds, until nothing is due; time stands still."""
        self._check_open()
        off_any_loop()
        return by_hand(self._driver.drain())

    def outage(self, span: Span | None = None, *, until: datetime | None = None) -> None:
        """Let time pass as if no worker were up: jobs grow late, ticks are missed."""
        self._check_open()
        off_any_loop()
        by_hand(self._driver.outage(self._until_ms(span, until)))


def _checked_state(state: State | str) -> State:
    try:
        return State(state)
    except ValueError:
        known = ", ".join(each.value for each in State)
        raise UsageError(f"state={state!r}: a state is one of {known}") from None
