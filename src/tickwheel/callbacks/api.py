"""`Callbacks`: registers the task `http.call` on an app, and enqueues jobs of it."""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import logging
import re
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from tickwheel import webhooks
from tickwheel.app import App
from tickwheel.callbacks import answers
from tickwheel.callbacks.answers import Answer
from tickwheel.callbacks.hosts import Hosts, Share
from tickwheel.callbacks.targets import (
    Allowed,
    Body,
    Target,
    checked_headers,
    checked_method,
    kept_body,
    parsed_target,
    sent_body,
)
from tickwheel.checks import ID_LIMIT, AnyPriority, checked_options
from tickwheel.clock import StoreClock
from tickwheel.duration import Duration, duration_ms, moment
from tickwheel.engine.context import current_job
from tickwheel.errors import BadArguments, BadConfig, GiveUp, Retry, Snooze, shown
from tickwheel.job import Job, Outcome, Priority, Settlement
from tickwheel.masking import CALLBACK_TASK
from tickwheel.retry import RetryPolicy
from tickwheel.task import Call, JobHandle, checked_timeout
from tickwheel.version import __version__

if TYPE_CHECKING:
    from tickwheel.callbacks.sending import Received, Sender

log = logging.getLogger("tickwheel")

# About half a day in all.
RETRIES = RetryPolicy(retries=8, first="5s", factor=4, cap="6h")
LONGEST_TIMEOUT_MS = 3_600_000
# What a run has on top of its timeout, which is for the request alone.
AFTERWARDS_MS = 10_000
# After this long, a job whose host is left alone fails like any other, and ends at last.
PATIENCE_MS = 86_400_000
# A call that failed counts against its host if it had this long, or the usual time.
PATIENT_MS = 5_000

_PLAIN_ID = re.compile(r"[A-Za-z0-9_:-]{1,128}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Callbacks:
    """HTTP callbacks of an app: the task `http.call`.

    Requests are signed with each of `keys` (Standard Webhooks; `tickwheel.webhooks` verifies them).
    A function gets the job and returns its keys, at each attempt: for keys of each customer's own.
    Without `allow`, they may go to every public host, on ports 80, 443 and 8000 to 9000; with it,
    only to those that it lists: "api.example.com", "*.example.com:8443", "http://localhost:8000",
    "10.0.0.0/8".

    A worker has at most `connections` calls under way, and `per_host` of them to one host. Without
    that limit, a host that answers quickly can have nine tenths of the worker's slots, and one that
    doesn't half of those that others leave. A host that failed `break_after` times in a row is left
    alone for `break_for`, then tried with one call.
    """

    @checked_options
    def __init__(
        self,
        app: App,
        *,
        keys: str | Sequence[str] | Callable[[Job], str | Sequence[str]] = (),
        allow: Sequence[str] | None = None,
        queue: str = "default",
        priority: AnyPriority = "normal",
        retries: int | RetryPolicy = RETRIES,
        timeout: Duration = "30s",
        expires: Duration | None = None,
        connections: int = 500,
        per_host: int | None = None,
        break_after: int = 10,
        break_for: Duration = "10s",
        resolver: Any = None,
    ) -> None:
        """`retries`, `timeout` and the like are those of the task. `resolver` is one of aiohttp's,
        instead of the system's."""
        self._app = app
        self._keys = keys
        if keys and not callable(keys):
            webhooks.check_keys(keys, to_sign=True)
        self.allowed = Allowed(allow)
        self._timeout_ms = _timeout_ms(timeout)
        self._resolver = resolver
        for name, count in {
            "connections": connections,
            "per_host": 1 if per_host is None else per_host,
            "break_after": break_after,
        }.items():
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise BadConfig(f"{name}={shown(count)}: must be at least 1")
        self._connections, self._per_host = connections, per_host
        self._break_after, self._break_ms = break_after, duration_ms(break_for)
        policy = retries if isinstance(retries, RetryPolicy) else RetryPolicy(
            retries=retries, first=RETRIES.first, factor=RETRIES.factor, cap=RETRIES.cap
        )  # fmt: skip
        self._policy = policy
        self.task = app.task(
            name=CALLBACK_TASK,
            queue=queue,
            priority=priority,
            retries=policy,
            timeout=timedelta(milliseconds=self._timeout_ms + AFTERWARDS_MS),
            expires=expires,
        )(self._http_call)
        # What is open, and how many use it, by event loop.
        self._senders: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Open] = (
            weakref.WeakKeyDictionary()
        )
        # The slots of the worker that runs a job; without one, as in a sandbox, all share them.
        self._share: contextvars.ContextVar[Share | None] = contextvars.ContextVar("share")
        app.resources.append(self._sender_of_worker)
        app.following[CALLBACK_TASK] = self._following
        app.callbacks = self

    @checked_options
    def using(
        self,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        queue: str | None = None,
        priority: AnyPriority | None = None,
        id: str | None = None,
        retries: int | None = None,
        timeout: Duration | None = None,
        expires: Duration | datetime | None = None,
        meta: Mapping[str, str] | None = None,
        inherit_meta: bool | None = None,
        connection: Any = None,
    ) -> Callback:
        """Choose options for one callback, as for any task. `timeout` is for one attempt, from
        connecting to the end of the answer."""
        timeout_ms = None if timeout is None else _timeout_ms(timeout)
        options: dict[str, Any] = {
            "queue": queue,
            "priority": priority,
            "id": id,
            "retries": retries,
            "expires": expires,
            "meta": meta,
            "inherit_meta": inherit_meta,
            "connection": connection,
        }
        if timeout_ms is not None:
            options["timeout"] = timedelta(milliseconds=timeout_ms + AFTERWARDS_MS)
        # Checks them, and that there is only one of `delay` and `at`.
        self.task.using(delay=delay, at=at, **options)
        return Callback(
            self, options, None if delay is None else duration_ms(delay), at, timeout_ms
        )

    async def call(self, url: str, **request: Any) -> JobHandle[Answer]:
        """Enqueue a callback that is due now; see `Callback.call`."""
        return await self.using().call(url, **request)

    def call_sync(self, url: str, **request: Any) -> JobHandle[Answer]:
        """The same for callers without an event loop."""
        return self.using().call_sync(url, **request)

    def job(self, url: str, **request: Any) -> Job:
        """A callback as a job for `app.enqueue_many`."""
        return self.using().job(url, **request)

    # --- The task

    async def _http_call(
        self,
        url: str,
        method: str = "POST",
        headers: dict[str, str] | None = None,
        body: str | None = None,
        body_base64: str | None = None,
        on_done: str | None = None,
        on_dead: str | None = None,
        timeout_ms: int | None = None,
        due_ms: int | None = None,
    ) -> Answer:
        """Send one request; `due_ms` is when it should first have been sent. See `_following` for
        `on_done` and `on_dead`."""
        context = current_job()
        if context is None:
            raise BadArguments("http.call runs in a worker; to send a request, use callbacks.call")
        try:
            request = self._request(url, method, headers, Body(body, body_base64))
            within_ms = self._timeout_ms if timeout_ms is None else timeout_ms
            if within_ms < 1:
                raise BadArguments(f"timeout_ms={within_ms}: must be at least 1")
        except BadArguments as error:
            raise GiveUp(str(error)) from None
        return await self._attempt(context.job, request, within_ms, due_ms)

    def _request(
        self, url: str, method: str, headers: Mapping[str, str] | None, body: Body
    ) -> _Request:
        """The request, checked."""
        target = parsed_target(url)
        self.allowed.check(target)
        return _Request(target, checked_method(method), checked_headers(headers), sent_body(body))

    async def _attempt(
        self, job: Job, request: _Request, timeout_ms: int, due_ms: int | None
    ) -> Answer:
        """Send the request. Raises Retry, Snooze or GiveUp unless it was accepted."""
        clock, place = (await self._app.client()).clock, request.target.place
        nominal_ms = _nominal_ms(job) if due_ms is None else due_ms
        share = self._share.get(None)
        async with self._sender() as sender:
            wait = await sender.enter(place, clock.now_ms, share)
            if wait is not None:
                if wait.broken and clock.now_ms() > nominal_ms + PATIENCE_MS:
                    raise Retry(reason=f"{place} has been failing for more than a day")
                raise Snooze(wait.ms / 1000)
            began_ms, trouble = clock.now_ms(), None
            try:
                headers = request.headers | self._headers(job, request.body, clock, nominal_ms)
                received, trouble = await self._sent(sender, request, headers, timeout_ms)
            finally:
                now_ms = clock.now_ms()
                sender.leave(place, now_ms, share, began_ms=began_ms, trouble=trouble)
        took_ms = max(now_ms - began_ms, 0)
        if self._app.counts is not None:
            answered = None if isinstance(received, str) else received.status
            self._app.counts.called(place, answered)
        if isinstance(received, str):
            raise Retry(reason=f"{place}: {received}, after {took_ms}ms")
        secrets = answers.secrets_in(request.headers, request.target.path, request.body)
        answer = Answer(received.status, took_ms, answers.kept_text(received.start, secrets))
        own_ms = self._policy.delay_ms(job.failures + 1)
        return _judged(place, answer, received.retry_after, clock.now_ms(), own_ms)

    async def _sent(
        self, sender: Sender, request: _Request, headers: dict[str, str], timeout_ms: int
    ) -> tuple[Received | str, bool | None]:
        """The answer, or why there is none; and whether that counts against the host."""
        from tickwheel.callbacks.sending import AddressRefused, Failed

        try:
            received = await sender.send(
                request.target, request.method, headers, request.body, timeout_ms=timeout_ms
            )
        except AddressRefused as error:
            raise GiveUp(f"{request.target.place} is refused: {error}") from None
        except Failed as error:
            # A caller that had less patience than others says little about the host.
            return str(error), timeout_ms >= min(self._timeout_ms, PATIENT_MS) or None
        return received, answers.is_trouble(received.status)

    def _headers(self, job: Job, body: bytes, clock: StoreClock, nominal_ms: int) -> dict[str, str]:
        """What every request says about its job; signed, if there are keys."""
        now_ms, id = clock.now_ms(), webhook_id(job.id)
        headers = {
            "user-agent": f"tickwheel/{__version__}",
            "accept-encoding": "identity",
            "idempotency-key": id,
            "tickwheel-job": quote(job.id, safe=":"),
            "tickwheel-queue": job.queue,
            "tickwheel-attempt": str(job.failures + job.takeovers + 1),
            "tickwheel-due": _iso(nominal_ms),
            "tickwheel-sent": _iso(now_ms),
        }
        trace = (job.meta or {}).get("traceparent", "")
        if _TRACEPARENT.fullmatch(trace):
            headers["traceparent"] = trace
        keys = self._keys(job) if callable(self._keys) else self._keys
        if keys:
            return headers | webhooks.sign(body, id=id, keys=keys, timestamp=now_ms // 1000)
        return headers | {webhooks.ID: id, webhooks.TIMESTAMP: str(now_ms // 1000)}

    def _following(self, settlement: Settlement) -> Job | None:
        """A callback about how the job ended, if it asks for one; its id makes it one job."""
        job = settlement.job
        end = "done" if settlement.outcome is Outcome.DONE else "dead"
        if f'"on_{end}"' not in job.payload:
            return None
        arguments = msgspec.json.decode(job.payload, type=dict[str, Any])
        if (url := arguments.get(f"on_{end}")) is None:
            return None
        told = {
            "type": f"job.{end}",
            "timestamp": _iso(settlement.ended_ms),
            "data": _end_in_words(settlement, arguments),
        }
        using = self.using(
            id=following_id(job.id, end),
            queue=job.queue,
            priority=Priority(job.priority),
            meta=job.meta,
            inherit_meta=False,
        )
        try:
            return using.job(url, body=told)
        except BadArguments as refused:
            log.error("%s %s: on_%s could not be enqueued: %s", job.task, job.id, end, refused)
            return None

    # --- What is open

    @asynccontextmanager
    async def _sender(self) -> AsyncIterator[Sender]:
        """The sender of this event loop; closed when nobody uses it any more."""
        loop = asyncio.get_running_loop()
        opened = self._senders.get(loop)
        if opened is None:
            opened = self._senders[loop] = _Open(self._new_sender())
        opened.users += 1
        try:
            yield opened.sender
        finally:
            opened.users -= 1
            if not opened.users:
                del self._senders[loop]
                await opened.sender.close()

    @asynccontextmanager
    async def _sender_of_worker(self, slots: int) -> AsyncIterator[None]:
        """Keep a sender open for a worker with so many slots. The worker starts in the context of
        whoever enters this, and so do its jobs: they find its slots there."""
        before = self._share.get(None)
        async with self._sender():
            self._share.set(Share(slots))
            try:
                yield
            finally:
                self._share.set(before)

    def _new_sender(self) -> Sender:
        from tickwheel.callbacks.sending import Sender

        hosts = Hosts(
            total=self._connections,
            per_host=self._per_host,
            break_after=self._break_after,
            break_ms=self._break_ms,
        )
        return Sender(self.allowed, hosts, self._resolver, self._connections)


@dataclass(frozen=True, slots=True)
class Callback:
    """Callbacks with the choices made by `using`, ready for a request."""

    _callbacks: Callbacks
    _options: dict[str, Any]
    _delay_ms: int | None
    _at: datetime | None
    _timeout_ms: int | None

    @checked_options
    async def call(
        self,
        url: str,
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        body: Any = None,
        on_done: str | None = None,
        on_dead: str | None = None,
    ) -> JobHandle[Answer]:
        """Enqueue a request; durable when this returns. Raises BadArguments if it is not allowed.

        `body` is bytes, text, or anything that can be written as JSON. When the request has been
        accepted, or is given up, that is posted to `on_done` or `on_dead`, as a callback of its
        own.
        """
        arguments = self._arguments(url, method, headers, body, on_done, on_dead)
        if self._options["connection"] is None:
            await self._callbacks._app.client()  # from here on, the store's clock counts
        return await self._call(arguments).enqueue(**arguments)

    @checked_options
    def call_sync(
        self,
        url: str,
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        body: Any = None,
        on_done: str | None = None,
        on_dead: str | None = None,
    ) -> JobHandle[Answer]:
        """The same for callers without an event loop."""
        arguments = self._arguments(url, method, headers, body, on_done, on_dead)
        return self._call(arguments).enqueue_sync(**arguments)

    @checked_options
    def job(
        self,
        url: str,
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        body: Any = None,
        on_done: str | None = None,
        on_dead: str | None = None,
    ) -> Job:
        """A job for `app.enqueue_many`; nothing is stored yet."""
        arguments = self._arguments(url, method, headers, body, on_done, on_dead)
        return self._call(arguments).job(**arguments)

    def _call(self, arguments: dict[str, Any]) -> Call[..., Answer]:
        """The task's own call. Decides when it is due, so that each attempt can tell."""
        at, access = self._at, self._callbacks._app._access
        if at is None:
            at = moment(access.now_ms() + (self._delay_ms or 0))
        arguments["due_ms"] = max(round(at.timestamp() * 1000), access.now_ms())
        return self._callbacks.task.using(at=at, **self._options)

    def _arguments(
        self,
        url: str,
        method: str,
        headers: Mapping[str, str] | None,
        body: Any,
        on_done: str | None,
        on_dead: str | None,
    ) -> dict[str, Any]:
        """The task's arguments, without those that say nothing."""
        given = checked_headers(headers)
        kept = kept_body(body, given)
        self._callbacks._request(url, method, given, kept)
        for name, other in (("on_done", on_done), ("on_dead", on_dead)):
            if other is not None:
                try:
                    self._callbacks.allowed.check(parsed_target(other))
                except BadArguments as error:
                    raise BadArguments(f"{name}: {str(error).removeprefix('url: ')}") from None
        arguments = {
            "url": url,
            "method": None if checked_method(method) == "POST" else checked_method(method),
            "headers": given or None,
            "body": kept.text,
            "body_base64": kept.base64,
            "on_done": on_done,
            "on_dead": on_dead,
            "timeout_ms": self._timeout_ms,
        }
        return {name: value for name, value in arguments.items() if value is not None}


@dataclass(frozen=True, slots=True, repr=False)
class _Request:
    target: Target
    method: str
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True)
class _Open:
    sender: Sender
    users: int = 0


def webhook_id(id: str) -> str:
    """The id of a job as a receiver sees it; one with other characters than a header and a
    signature can carry is hashed."""
    return id if _PLAIN_ID.fullmatch(id) else f"job_{hashlib.sha256(id.encode()).hexdigest()[:48]}"


def following_id(id: str, end: str) -> str:
    """The id of the callback that tells how a job ended."""
    following = f"{id}:{end}"
    return following if len(following) <= ID_LIMIT else f"{webhook_id(id)}:{end}"


def _judged(
    place: str, answer: Answer, retry_after: str | None, now_ms: int, own_ms: int
) -> Answer:
    """The answer, if the request was accepted. Raises Retry or GiveUp."""
    what = answers.verdict(answer.status)
    if what == "done":
        return answer
    words = answers.in_words(place, answer)
    if what == "give up":
        raise GiveUp(words)
    # A server can ask for a longer wait than ours, not for a shorter one: its clock may be wrong.
    wait_ms = max(answers.wait_ms(retry_after, now_ms) or 0, own_ms)
    raise Retry(timedelta(milliseconds=wait_ms), words)


def _end_in_words(settlement: Settlement, arguments: dict[str, Any]) -> dict[str, Any]:
    """What `on_done` and `on_dead` are told."""
    job, ran = settlement.job, settlement.started_ms is not None
    try:
        answer = msgspec.json.decode(settlement.result or "", type=Answer)
    except msgspec.MsgspecError:
        answer = None  # it was not accepted; or a middleware has another result
    return {
        "id": job.id,
        "task": job.task,
        "queue": job.queue,
        "attempts": job.failures + job.takeovers + ran,
        "url": str(arguments.get("url")).partition("?")[0],
        "status": None if answer is None else answer.status,
        "answer": None if answer is None else answer.text,
        "error": settlement.error,
    }


def _nominal_ms(job: Job) -> int:
    """When the job was first due, as far as its history knows."""
    return job.history[0].due_ms if job.history else job.due_ms


def _timeout_ms(timeout: Duration) -> int:
    ms = checked_timeout(timeout)
    if ms > LONGEST_TIMEOUT_MS:
        raise BadConfig(f"timeout={shown(timeout)}: must be at most 1h")
    return ms


def _iso(ms: int) -> str:
    return moment(ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")
