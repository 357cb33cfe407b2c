"""Tickwheel runs a function at the time you asked for: durable, and exact to milliseconds.

    app = App("sqlite:///jobs.db")

    @app.task
    async def cancel_order(order_id: int) -> None: ...

    await cancel_order.using(delay="30m").enqueue(42)

The whole public API can be imported from here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tickwheel import webhooks
from tickwheel.app import App
from tickwheel.arguments import INJECTED
from tickwheel.client import JobInfo, JobPage
from tickwheel.engine.alerts import Alert, AlertKind
from tickwheel.engine.context import JobContext, current_job, current_jobs
from tickwheel.engine.worker import Worker
from tickwheel.errors import (
    AccessDenied,
    BadArguments,
    BadConfig,
    BadSchedule,
    BadTime,
    GiveUp,
    JobCancelled,
    JobFailed,
    JobsRefused,
    JobUnknown,
    LifespanError,
    Partial,
    ResultError,
    ResultTimeout,
    Retry,
    SignatureError,
    Snooze,
    StoreError,
    StoreIncompatible,
    StoreRefused,
    StoreUnavailable,
    TickwheelError,
    UnknownSchedule,
    UnknownTask,
    UsageError,
)
from tickwheel.job import (
    CancelOutcome,
    Job,
    MoveOutcome,
    Outcome,
    Priority,
    Progress,
    PutOutcome,
    Run,
    State,
)
from tickwheel.retry import RetryPolicy
from tickwheel.schedules import ScheduleInfo
from tickwheel.store import QueueInfo, WorkerInfo
from tickwheel.task import BatchTask, Call, JobHandle, Task
from tickwheel.timer import Timer, TimerHandle
from tickwheel.version import __version__

if TYPE_CHECKING:
    from tickwheel.http_client import AsyncHttpClient, HttpClient

__all__ = [
    "INJECTED",
    "AccessDenied",
    "Alert",
    "AlertKind",
    "App",
    "AsyncHttpClient",
    "BadArguments",
    "BadConfig",
    "BadSchedule",
    "BadTime",
    "BatchTask",
    "Call",
    "CancelOutcome",
    "GiveUp",
    "HttpClient",
    "Job",
    "JobCancelled",
    "JobContext",
    "JobFailed",
    "JobHandle",
    "JobInfo",
    "JobPage",
    "JobUnknown",
    "JobsRefused",
    "LifespanError",
    "MoveOutcome",
    "Outcome",
    "Partial",
    "Priority",
    "Progress",
    "PutOutcome",
    "QueueInfo",
    "ResultError",
    "ResultTimeout",
    "Retry",
    "RetryPolicy",
    "Run",
    "ScheduleInfo",
    "SignatureError",
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
    "UnknownSchedule",
    "UnknownTask",
    "UsageError",
    "Worker",
    "WorkerInfo",
    "__version__",
    "current_job",
    "current_jobs",
    "webhooks",
]

# Imported when they are first used: most programs need no HTTP.
_LAZY = {"AsyncHttpClient": "tickwheel.http_client", "HttpClient": "tickwheel.http_client"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
