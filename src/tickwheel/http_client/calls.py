"""Tasks by name and HTTP calls, with the options of `using`, for both clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, Unpack

from tickwheel.checks import checked_options
from tickwheel.errors import BadArguments
from tickwheel.http_client import requests
from tickwheel.http_client.requests import HttpJob, JobOptions

H = TypeVar("H")


class HttpCall(Generic[H]):
    """A task, by its name, with the options of `using`."""

    def __init__(
        self,
        add: Callable[[HttpJob], H],
        ids: Callable[[], str],
        task: str,
        **options: Unpack[JobOptions],
    ) -> None:
        self._add = add
        self._ids = ids
        self._task = task
        self._given = options
        self._options = requests.job_options(**options)

    def __repr__(self) -> str:
        return f"<task {self._task}>"

    def using(self, **options: Unpack[JobOptions]) -> HttpCall[H]:
        """Choose options for one job: `delay`, `at`, `queue`, `priority`, `id`, `retries`,
        `timeout`, `expires` and `meta`, as in an app. Those chosen before stay."""
        return HttpCall(self._add, self._ids, self._task, **(self._given | options))

    def enqueue(self, /, *args: Any, **arguments: Any) -> H:
        """Add a job with these arguments, by name; it is durable when this returns."""
        return self._add(self.job(*args, **arguments))

    def job(self, /, *args: Any, **arguments: Any) -> HttpJob:
        """A job for `enqueue_many`; nothing is sent yet."""
        if args:
            raise BadArguments(
                f"{self._task}(): give arguments by name, as in enqueue(order=42): the client does "
                "not know the task's parameters"
            )
        return requests.task_job(self._task, arguments, self._options, self._ids())


class HttpCallback(Generic[H]):
    """HTTP calls, with the options of `using`; the app needs `Callbacks`."""

    def __init__(
        self, add: Callable[[HttpJob], H], ids: Callable[[], str], **options: Unpack[JobOptions]
    ) -> None:
        self._add = add
        self._ids = ids
        self._given = options
        self._options = requests.job_options(**options)

    def using(self, **options: Unpack[JobOptions]) -> HttpCallback[H]:
        """Choose options for one call, as for a task."""
        return HttpCallback(self._add, self._ids, **(self._given | options))

    def call(self, url: str, **request: Any) -> H:
        """Add a job that calls the URL: with `method`, `headers`, `body`, `on_done`, `on_dead`."""
        return self._add(self.job(url, **request))

    @checked_options
    def job(
        self,
        url: str,
        *,
        method: str | None = None,
        headers: Mapping[str, str] | None = None,
        body: Any = None,
        on_done: str | None = None,
        on_dead: str | None = None,
    ) -> HttpJob:
        """A call for `enqueue_many`; nothing is sent yet."""
        given = {
            "method": method,
            "headers": None if headers is None else dict(headers),
            "body": body,
            "on_done": on_done,
            "on_dead": on_dead,
        }
        given = {name: value for name, value in given.items() if value is not None}
        return requests.callback_job(url, given, self._options, self._ids())
