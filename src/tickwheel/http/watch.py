"""A stream of documents: each as it is now, and then what changes (server-sent events)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tickwheel.concurrency import cancel_all, first_of
from tickwheel.http.patches import difference
from tickwheel.http.problems import Kind, Problem, ProblemDetails
from tickwheel.http.streams import stopping
from tickwheel.http.table import Incoming, Reply, Table
from tickwheel.operate.keys import Scope

# How many documents a stream has, and how many bytes all of them.
PATHS_MOST, STREAM_BYTES = 16, 4 * 1024 * 1024
# A larger document is sent whole: to compare it would hold up everything else.
COMPARED_BYTES = 256 * 1024
# How many documents a stream reads at the same time.
READS_MOST = 4
# A stream ends after this time, and its client opens another: none is kept by a forgotten client.
LONGEST_S = 600.0
# If reading takes longer, the client hears a beat.
BEAT_S = 1.0

BEAT = b"event: beat\ndata: {}\n\n"
END = b"event: end\ndata: {}\n\n"

table = Table()


class Watch(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What to watch: GET operations of this API, each with its query; and how often to look."""

    path: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=4096)]],
        Meta(min_length=1, max_length=PATHS_MOST, examples=[["/v1/stats", "/v1/jobs?limit=10"]]),
    ]
    every: Annotated[int, Meta(ge=1, le=60, description="seconds")] = 2


class WatchEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Each event. Its data is JSON: `path` with `document`, `patch` or `problem`, or nothing."""

    event: Literal["document", "change", "problem", "beat", "end"]
    data: str


@table.operation(
    "GET",
    "/v1/watch",
    scope=Scope.READ,
    summary="Watch documents",
    query=Watch,
    answers={200: WatchEvent},
    media="text/event-stream",
)
async def watch(incoming: Incoming) -> Reply:
    """Server-sent events. `document` has a path and what a GET of it answers, `change` what is
    different since (a patch), `problem` why there is no answer, `beat` nothing; after `end` open
    another stream."""
    wanted: Watch = incoming.query
    leave = incoming.service.streams.enter(incoming.caller)
    stream = _Stream(incoming, list(dict.fromkeys(wanted.path)), wanted.every)
    headers = {"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}
    return Reply(_Events(stream.events(), leave), headers=headers)


class _Events:
    """Events that can be closed before the first of them was asked for."""

    def __init__(self, events: AsyncGenerator[bytes, None], leave: Callable[[], None]) -> None:
        self._events = events
        self._leave = leave

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._events

    async def aclose(self) -> None:
        try:
            await self._events.aclose()
        finally:
            self._leave()


class _Stream:
    """One client's documents."""

    def __init__(self, incoming: Incoming, paths: Sequence[str], every: int) -> None:
        self._incoming = incoming
        self._paths = paths
        self._every = every
        self._turn = asyncio.Semaphore(READS_MOST)
        # What the client knows: a document, or why there is none.
        self._sent: dict[str, bytes | ProblemDetails] = {}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """All that the client is told."""
        scope = self._incoming.request.scope
        ending = asyncio.ensure_future(first_of(stopping(scope), timeout_s=LONGEST_S))
        try:
            while not ending.done():
                quiet = True
                async with aclosing(self._round(ending)) as events:
                    async for event in events:
                        quiet = False
                        yield event
                if quiet:
                    yield BEAT
                # All streams look at the same moments, so that they share what they read.
                now = asyncio.get_running_loop().time()
                await asyncio.wait([ending], timeout=self._every - now % self._every)
        except _Ended:
            pass
        finally:
            await cancel_all(ending)
        yield END

    async def _round(self, ending: asyncio.Future[None]) -> AsyncGenerator[bytes, None]:
        """Read each document once, and say what is new, as soon as it is known."""
        reading = {asyncio.ensure_future(self._read(path)): path for path in self._paths}
        left: set[asyncio.Future[Any]] = {*reading}
        try:
            while left and not ending.done():
                done, _ = await asyncio.wait(
                    {*left, ending}, timeout=BEAT_S, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    yield BEAT
                for task in [each for each in reading if each in done]:
                    left.discard(task)
                    if event := self._event(reading[task], task.result()):
                        yield event
        finally:
            await cancel_all(*reading)

    async def _read(self, path: str) -> bytes | Problem:
        """What a GET of this path answers to the client now."""
        api, request = self._incoming.api, self._incoming.request
        async with self._turn:
            try:
                # Each time: a key may have been revoked, a session may have ended.
                caller = await api.identify(request)
            except Problem as problem:
                if problem.kind in (Kind.UNAUTHORIZED, Kind.HOST_NOT_ALLOWED):
                    raise _Ended from None
                return problem

            async def read() -> bytes | Problem:
                try:
                    return await api.read(request, caller, path)
                except Problem as problem:
                    return problem

            return await self._incoming.service.streams.share((caller.id, path), read)

    # --- What is new

    def _event(self, path: str, found: bytes | Problem) -> bytes | None:
        before = self._sent.pop(path, None)
        if isinstance(found, bytes) and self._size() + len(found) > STREAM_BYTES:
            found = Problem(
                Kind.INVALID,
                f"it has {len(found):,} bytes, and all that one stream watches may have "
                f"{STREAM_BYTES:,}: ask for fewer at a time",
            )
        if isinstance(found, Problem):
            details = found.details(self._incoming.request_id)
            self._sent[path] = details
            return None if details == before else _said("problem", path, problem=details)
        self._sent[path] = found
        if not isinstance(before, bytes):
            return _said("document", path, document=msgspec.Raw(found))
        return None if before == found else _changed(path, before, found)

    def _size(self) -> int:
        return sum(len(each) for each in self._sent.values() if isinstance(each, bytes))


class _Ended(Exception):
    """The client may not be here any more."""


def _changed(path: str, before: bytes, now: bytes) -> bytes | None:
    whole = _said("document", path, document=msgspec.Raw(now))
    if max(len(before), len(now)) > COMPARED_BYTES:
        return whole
    try:
        patch = difference(msgspec.json.decode(before), msgspec.json.decode(now))
    except RecursionError:
        return whole
    if patch is None:
        return None
    change = _said("change", path, patch=patch)
    return change if len(change) < len(whole) else whole


def _said(event: str, path: str, **more: object) -> bytes:
    # No line break can be in it: JSON quotes them.
    return b"event: %b\ndata: %b\n\n" % (
        event.encode(),
        msgspec.json.encode({"path": path, **more}),
    )
