"""A backend for `django.tasks` of Django 6.0, or of the package django-tasks before.

    TASKS = {"default": {"BACKEND": "tickwheel.django.backend.TickwheelBackend"}}

A task of Django's is a task of the project's app, named after its function. `OPTIONS` may have
`retries` and `timeout`.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from inspect import iscoroutinefunction
from typing import Any

import msgspec
from django.utils import timezone
from django.utils.module_loading import import_string

try:
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import TaskContext, TaskError, TaskResult, TaskResultStatus
    from django.tasks.exceptions import TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued, task_finished, task_started
except ImportError:  # Django before 6.0
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import TaskContext, TaskError, TaskResult, TaskResultStatus
    from django_tasks.exceptions import TaskResultDoesNotExist
    from django_tasks.signals import task_enqueued, task_finished, task_started

from tickwheel.checks import PriorityName
from tickwheel.client import Client
from tickwheel.engine.attempt import current_job
from tickwheel.envelope import ENCRYPTED, readable
from tickwheel.errors import JobUnknown
from tickwheel.job import Job, Outcome, Run, State
from tickwheel.task import Task

_STATUS = {
    State.WAITING: TaskResultStatus.READY,
    State.RUNNING: TaskResultStatus.RUNNING,
    State.DONE: TaskResultStatus.SUCCESSFUL,
    State.DEAD: TaskResultStatus.FAILED,
    State.CANCELLED: TaskResultStatus.FAILED,
}
_FAILURES = (Outcome.RETRY, Outcome.DEAD)

# The tasks of the project's app, by the path of their function. Not in the backend: each thread has
# one of its own.
_tasks: dict[str, Task[..., Any, Any]] = {}
_lock = threading.Lock()


class TickwheelBackend(BaseTaskBackend):  # type: ignore[misc]  # Django has no types
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def validate_task(self, task: Any) -> None:
        """Called for each task that is defined; so a worker knows those of all imported modules."""
        super().validate_task(task)
        with _lock:
            if task.module_path not in _tasks:
                _tasks[task.module_path] = self._registered(task)

    def _registered(self, task: Any) -> Task[..., Any, Any]:
        from tickwheel.django import app

        options = {
            name: self.options[name] for name in ("retries", "timeout") if name in self.options
        }
        registered: Task[..., Any, Any] = app.task(name=task.module_path, **options)(
            self._runner(task)
        )
        return registered

    def _runner(self, task: Any) -> Callable[..., Any]:
        """The function that a worker calls."""

        async def run_async(args: list[Any], kwargs: dict[str, Any]) -> Any:
            result = self._started(task)
            value = await task.func(*_with_context(task, result, args), **kwargs)
            return self._finished(result, value)

        def run(args: list[Any], kwargs: dict[str, Any]) -> Any:
            result = self._started(task)
            value = task.func(*_with_context(task, result, args), **kwargs)
            return self._finished(result, value)

        return run_async if iscoroutinefunction(task.func) else run

    def _started(self, task: Any) -> Any:
        context = current_job()
        assert context is not None
        result = self._result(task, context.job)
        task_started.send(type(self), task_result=result)
        return result

    def _finished(self, result: Any, value: Any) -> Any:
        for name, now in {
            "status": TaskResultStatus.SUCCESSFUL,
            "finished_at": timezone.now(),
            "_return_value": value,
        }.items():
            object.__setattr__(result, name, now)
        task_finished.send(type(self), task_result=result)
        return value

    # --- Jobs

    def enqueue(self, task: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self.validate_task(task)
        call = _tasks[task.module_path].using(
            at=_aware(task.run_after),
            queue=task.queue_name,
            priority=_priority(task.priority),
        )
        job = call.job(list(args), dict(kwargs))
        call.add_sync(job)
        result = self._result(task, job)
        task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> Any:
        from tickwheel.django import app

        async def get() -> Job:
            client: Client = await app.client()
            return await client.get(result_id)

        try:
            job = app._access.run_sync(get())
            task = import_string(job.task)
        except (JobUnknown, ImportError) as error:
            raise TaskResultDoesNotExist(result_id) from error
        return self._result(task, job)

    def _result(self, task: Any, job: Job) -> Any:
        job = readable(job)
        call = msgspec.json.decode(job.payload)
        if call == ENCRYPTED:
            call = {"args": [ENCRYPTED], "kwargs": {}}
        began = [run for run in job.history if run.started_ms is not None]
        workers = [run.worker for run in began]
        starts = [run.started_ms for run in began]
        if job.state is State.RUNNING and job.worker:
            workers.append(job.worker)
            starts.append(job.started_ms)
        result = TaskResult(
            task=task,
            id=job.id,
            status=_STATUS[job.state],
            enqueued_at=_moment(job.created_ms),
            started_at=_moment(starts[0] if starts else None),
            last_attempted_at=_moment(starts[-1] if starts else None),
            finished_at=_moment(job.ended_ms),
            args=call["args"],
            kwargs=call["kwargs"],
            backend=self.alias,
            errors=[_error(run, job) for run in job.history if run.outcome in _FAILURES],
            worker_ids=workers,
        )
        if job.result is not None:
            object.__setattr__(result, "_return_value", msgspec.json.decode(job.result))
        return result


def _with_context(task: Any, result: Any, args: list[Any]) -> list[Any]:
    return [TaskContext(task_result=result), *args] if task.takes_context else args


def _error(run: Run, job: Job) -> Any:
    """The store keeps one line of each failure, and the traceback of the last."""
    name = (run.error or "").partition(":")[0]
    path = f"builtins.{name}" if hasattr(builtins, name) else name
    last = run.attempt == job.history[-1].attempt and job.traceback
    return TaskError(exception_class_path=path, traceback=last or run.error or "")


def _priority(priority: int) -> PriorityName:
    if priority < 0:
        return "low"
    return "normal" if priority == 0 else "high" if priority <= 50 else "urgent"


def _aware(moment: datetime | None) -> datetime | None:
    return timezone.make_aware(moment) if moment and timezone.is_naive(moment) else moment


def _moment(ms: int | None) -> datetime | None:
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC)
