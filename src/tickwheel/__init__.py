"""Tickwheel runs a function at the time you asked for: durable, and exact to milliseconds.

    app = App("sqlite:///jobs.db")

    @app.task
    async def cancel_order(order_id: int) -> None: ...

    await cancel_order.using(delay="30m").enqueue(42)

Everything that is public is importable from here.
"""

from tickwheel.app import App
from tickwheel.attempt import JobContext, current_job
from tickwheel.calls import Call, JobHandle, Task
from tickwheel.client import JobInfo
from tickwheel.errors import (
    BadArguments,
    BadConfig,
    BadSchedule,
    BadTime,
    GiveUp,
    JobCancelled,
    JobFailed,
    JobUnknown,
    ResultError,
    ResultTimeout,
    Retry,
    Snooze,
    StoreError,
    StoreIncompatible,
    StoreRefused,
    StoreUnavailable,
    TickwheelError,
    UnknownTask,
    UsageError,
)
from tickwheel.job import Cancelled, Job, Outcome, Priority, Run, State
from tickwheel.retry import RetryPolicy
from tickwheel.schedules import ScheduleInfo
from tickwheel.store import Page, Query, QueueInfo, WorkerInfo
from tickwheel.timer import Timer, TimerHandle
from tickwheel.version import __version__
from tickwheel.worker import Worker

__all__ = [
    "App",
    "BadArguments",
    "BadConfig",
    "BadSchedule",
    "BadTime",
    "Call",
    "Cancelled",
    "GiveUp",
    "Job",
    "JobCancelled",
    "JobContext",
    "JobFailed",
    "JobHandle",
    "JobInfo",
    "JobUnknown",
    "Outcome",
    "Page",
    "Priority",
    "Query",
    "QueueInfo",
    "ResultError",
    "ResultTimeout",
    "Retry",
    "RetryPolicy",
    "Run",
    "ScheduleInfo",
    "Snooze",
    "State",
    "StoreError",
    "StoreIncompatible",
    "StoreRefused",
    "StoreUnavailable",
    "Task",
    "TickwheelError",
    "Timer",
    "TimerHandle",
    "UnknownTask",
    "UsageError",
    "Worker",
    "WorkerInfo",
    "__version__",
    "current_job",
]
