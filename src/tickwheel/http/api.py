"""One request, from its arrival to its answer: let in, read, carried out, recorded."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path

from tickwheel.batch import Batcher
from tickwheel.clock import MS_NS, Clock, SystemClock
from tickwheel.concurrency import cancel_all
from tickwheel.errors import StoreUnavailable, TickwheelError
from tickwheel.http.access import (
    Caller,
    RateLimits,
    check_local,
    check_same_origin,
    identified,
    session_token,
)
from tickwheel.http.body import (
    check_sizes,
    decode,
    read_body,
    read_idempotency_key,
    read_path,
    read_query,
)
from tickwheel.http.problems import MEDIA_TYPE, Kind, Problem, problem_of, store_away
from tickwheel.http.service import Service
from tickwheel.http.streaming import Parts, StreamedResponse
from tickwheel.http.streams import stopping
from tickwheel.http.table import Incoming, Operation, Reply
from tickwheel.ids import new_id
from tickwheel.operate.audit import Entry

log = logging.getLogger("tickwheel.http")

OPENAPI = "/v1/openapi.json"
# No request takes longer, whatever the store does.
REQUEST_S = 10.0
# How many requests may be under way, and how many bytes of their bodies are in memory.
REQUESTS_MOST = 1000
BODIES_MOST = 256 * 1024 * 1024
# How many more may wait for the end of a job.
WAITING_MOST = 2000
# How often a request that waits looks whether its key is still valid.
LOOK_S = 1.0
# How long an entry of the audit log may take to be written, if the request has used up its time.
AUDIT_S = 1.0


class Api:
    """Answers requests."""

    def __init__(
        self,
        service: Service,
        operations: Sequence[Operation],
        *,
        allow_hosts: Sequence[str] = (),
        clock: Clock | None = None,
    ) -> None:
        self._service = service
        self._readable = _readable(operations)
        self._allow_hosts = frozenset(host.lower() for host in allow_hosts)
        self._clock = clock or SystemClock()
        self._rates = RateLimits()
        self._auditing: Batcher[Entry, None] = Batcher(self._write)
        self._requests = self._waiting = self._bytes = 0

    # --- A request

    async def respond(self, operation: Operation, request: Request) -> Response:
        """Answer a request, whatever happens."""
        arrived = asyncio.get_running_loop().time()
        request_id = new_id(self._now_ms())
        incoming = self._incoming(operation, request, request_id, Caller(None))
        try:
            reply = await self._carry_out(operation, request, incoming)
            response = _response(reply, request_id, request.scope.get("root_path", ""))
            outcome = "ok"
        except Problem as problem:
            response, outcome = _problem(problem, request_id), problem.kind.code
        except Exception:
            log.exception("request %s failed: %s", request_id, operation.id)
            response, outcome = _problem(Problem(Kind.INTERNAL), request_id), Kind.INTERNAL.code
        if _has_body(request) and not incoming.consumed:
            # What is left of it would keep the connection.
            response.headers["Connection"] = "close"
        source = request.client.host if request.client else ""
        if operation.writes and incoming.admitted:
            left_s = arrived + REQUEST_S - asyncio.get_running_loop().time()
            await self._record(operation, incoming, source, outcome, max(left_s, AUDIT_S))
        _log_access(operation, incoming.caller, source, response.status_code, arrived)
        return response

    def _incoming(
        self, operation: Operation, request: Request, request_id: str, caller: Caller
    ) -> Incoming:
        return Incoming(
            service=self._service,
            api=self,
            request=request,
            request_id=request_id,
            caller=caller,
            scope=operation.scope,  # type: ignore[arg-type]
            path={},
            query=None,
            body=None,
            idempotency_key=None,
            root=request.scope.get("root_path", ""),
        )

    async def _carry_out(self, operation: Operation, request: Request, incoming: Incoming) -> Reply:
        with self._room() as room, _problems():
            check_sizes(request)
            until = asyncio.get_running_loop().time() + REQUEST_S
            async with asyncio.timeout_at(until):
                await self._let_in(operation, request, incoming)
            await self._read(operation, request, incoming, room, until)
            async with asyncio.timeout_at(until) as limit:
                incoming.wait = partial(self._wait, request, limit)
                return await operation.handler(incoming)

    async def _let_in(self, operation: Operation, request: Request, incoming: Incoming) -> None:
        """Check who it is and what they may do: the one place for every operation."""
        if operation.writes and session_token(request) is not None:
            check_same_origin(request)
        if operation.scope is None:
            return
        incoming.path = read_path(request)
        incoming.target = next(iter(incoming.path.values()), "")
        incoming.caller = await self._identified(request, writes=operation.writes)
        self.count(incoming.caller)
        incoming.admitted = True
        _check_scope(incoming.caller, operation)

    async def _identified(self, request: Request, *, writes: bool) -> Caller:
        caller = await identified(
            await self._service.keys(),
            await self._service.sessions(),
            request.headers.get("authorization"),
            session_token(request),
        )
        if caller.key is None:
            client = request.client.host if request.client else None
            check_local(request.headers, client, self._allow_hosts, writes=writes)
        return caller

    async def _read(
        self,
        operation: Operation,
        request: Request,
        incoming: Incoming,
        room: Callable[[int], None],
        until: float,
    ) -> None:
        incoming.query = read_query(request, operation.query)
        incoming.accept = request.headers.get("accept", "")
        if operation.idempotent:
            incoming.idempotency_key = read_idempotency_key(request.headers)
        if operation.body is not None:
            try:
                async with asyncio.timeout_at(until):
                    body = await read_body(request, operation.body_limit, room)
            except TimeoutError:
                raise Problem(Kind.REQUEST_TIMEOUT) from None
            incoming.consumed = True
            incoming.body = decode(body, operation.decode or operation.body)

    @contextmanager
    def _room(self) -> Iterator[Callable[[int], None]]:
        """Room for one more request; the block says how many bytes it keeps."""
        if self._requests >= REQUESTS_MOST:
            raise Problem(Kind.OVERLOADED, headers={"Retry-After": "1"})
        kept = 0

        def keep(size: int) -> None:
            nonlocal kept
            if self._bytes + size > BODIES_MOST:
                raise Problem(Kind.OVERLOADED, headers={"Retry-After": "1", "Connection": "close"})
            kept += size
            self._bytes += size

        self._requests += 1
        try:
            yield keep
        finally:
            self._requests -= 1
            self._bytes -= kept

    async def _wait(
        self,
        request: Request,
        limit: asyncio.Timeout,
        awaited: asyncio.Future[Any],
        within_s: float,
    ) -> None:
        """Wait in a request: it does not count as one that is under way meanwhile, nor does its
        time."""
        if self._waiting >= WAITING_MOST:
            raise Problem(Kind.OVERLOADED, "too many wait", headers={"Retry-After": "1"})
        began, until = asyncio.get_running_loop().time(), limit.when() or 0.0
        limit.reschedule(None)
        self._waiting += 1
        self._requests -= 1
        try:
            ends = [
                asyncio.create_task(_left(request)),
                asyncio.create_task(stopping(request.scope)),
            ]
            try:
                await self._first_of([awaited, *ends], request, began + within_s)
            finally:
                await cancel_all(*ends)
        finally:
            self._waiting -= 1
            self._requests += 1
            limit.reschedule(until + asyncio.get_running_loop().time() - began)

    async def _first_of(
        self, waits: Sequence[asyncio.Future[Any]], request: Request, until: float
    ) -> None:
        """Wait for one of these until that time. Raises Problem soon after the caller's key was
        revoked or has expired."""
        while (left_s := until - asyncio.get_running_loop().time()) > 0:
            step_s = min(left_s, LOOK_S)
            done, _ = await asyncio.wait(waits, timeout=step_s, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return
            # A store that is away for a moment says nothing about the key.
            with suppress(StoreUnavailable):
                await self._identified(request, writes=False)

    # --- For handlers

    async def identify(self, request: Request) -> Caller:
        with _problems():
            async with asyncio.timeout(REQUEST_S):
                return await self._identified(request, writes=False)

    def count(self, caller: Caller) -> None:
        self._rates.check(caller, self._now_ms())

    async def read(self, request: Request, caller: Caller, path: str) -> bytes:
        """As if the caller had sent a request of its own; its rate is not counted."""
        operation, inner = _found(self._readable, request, path)
        request_id = new_id(self._now_ms())
        incoming = self._incoming(operation, inner, request_id, caller)
        try:
            with self._room(), _problems():
                _check_scope(caller, operation)
                incoming.path = read_path(inner)
                incoming.query = read_query(inner, operation.query)
                async with asyncio.timeout(REQUEST_S):
                    reply = await operation.handler(incoming)
            return msgspec.json.encode(reply.content)
        except Problem:
            raise
        except Exception as error:
            log.exception("request %s failed: %s", request_id, operation.id)
            raise Problem(Kind.INTERNAL, f"the server's log has more under {request_id}") from error

    # --- The audit log

    async def _record(
        self, operation: Operation, incoming: Incoming, source: str, outcome: str, within_s: float
    ) -> None:
        entry = Entry(
            at_ms=self._now_ms(),
            who=incoming.caller.who,
            action=operation.id,
            target=incoming.target[:256],
            source=source,
            outcome=outcome,
            detail=incoming.detail,
        )
        try:
            async with asyncio.timeout(within_s):
                await self._auditing.send(entry)
        except (TickwheelError, TimeoutError) as error:
            why = str(error) or "the store does not answer"
            log.error("an entry of the audit log could not be written (%s): %s", why, entry)

    async def _write(self, entries: Sequence[Entry]) -> list[None]:
        await (await self._service.audit()).write(entries)
        return [None] * len(entries)

    def _now_ms(self) -> int:
        return self._clock.now_ns() // MS_NS


@contextmanager
def _problems() -> Iterator[None]:
    """What goes wrong inside, as a problem."""
    try:
        yield
    except TickwheelError as error:
        raise problem_of(error) from error
    except TimeoutError:
        raise store_away(f"it did not answer within {REQUEST_S:g} s") from None


def _check_scope(caller: Caller, operation: Operation) -> None:
    if operation.scope is not None and not caller.may(operation.scope):
        raise Problem(Kind.FORBIDDEN, f"the key lacks the scope {operation.scope}")


def _readable(operations: Sequence[Operation]) -> list[tuple[re.Pattern[str], Operation]]:
    """Operations that a stream may read, each with what its path is like; those without a name in
    it first."""
    found = [
        each
        for each in operations
        if each.method == "GET" and each.scope is not None and each.media == "application/json"
    ]
    return [
        (compile_path(each.path)[0], each) for each in sorted(found, key=lambda o: "{" in o.path)
    ]


def _found(
    readable: Sequence[tuple[re.Pattern[str], Operation]], request: Request, address: str
) -> tuple[Operation, Request]:
    """The operation at this path, and a request for it from the same client."""
    path, _, query = address.partition("?")
    if not address.isascii():
        raise Problem(Kind.BAD_REQUEST, f"quote it in UTF-8: {address[:200]!r}")
    for pattern, operation in readable:
        if match := pattern.match(path):
            changes = {
                "method": "GET",
                "path": path,
                "raw_path": path.encode(),
                "query_string": query.encode(),
                "path_params": match.groupdict(),
            }
            return operation, Request({**request.scope, **changes})
    raise Problem(Kind.NOT_FOUND, f"nothing to watch is at {path[:200]!r}; {OPENAPI} lists all")


async def _left(request: Request) -> None:
    """Wait until the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _has_body(request: Request) -> bool:
    return request.headers.get("content-length", "0") != "0" or (
        "transfer-encoding" in request.headers
    )


# --- Answers


def _response(reply: Reply, request_id: str, root: str) -> Response:
    headers = {"X-Request-Id": request_id, "Cache-Control": "no-store", **reply.headers}
    if reply.location is not None:
        headers["Location"] = root + reply.location
    if isinstance(reply.content, Parts):
        return StreamedResponse(reply.content, reply.status, headers)
    if isinstance(reply.content, bytes):
        return Response(reply.content, reply.status, headers)
    body = msgspec.json.encode(reply.content)
    return Response(body, reply.status, headers, media_type="application/json")


def _problem(problem: Problem, request_id: str) -> Response:
    headers = {"X-Request-Id": request_id, "Cache-Control": "no-store", **problem.headers}
    body = msgspec.json.encode(problem.details(request_id))
    return Response(body, problem.kind.status, headers, media_type=MEDIA_TYPE)


def problem_response(kind: Kind, detail: str, headers: dict[str, str]) -> Response:
    """For requests that no operation answers."""
    now_ms = SystemClock().now_ns() // MS_NS
    return _problem(Problem(kind, detail, headers=headers), new_id(now_ms))


def _log_access(
    operation: Operation, caller: Caller, source: str, status: int, arrived: float
) -> None:
    """One line for each request, without query and body, which may hold secrets. Probes come
    often."""
    level = logging.DEBUG if operation.scope is None else logging.INFO
    if log.isEnabledFor(level):
        took_ms = (asyncio.get_running_loop().time() - arrived) * 1000
        log.log(
            level,
            "%s %s %d %.1f ms, %s, %s",
            *(operation.method, operation.path, status, took_ms, caller.who, source or "-"),
            extra={"operation": operation.id, "status": status, "source": source},
        )
