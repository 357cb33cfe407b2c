"""The table of operations: each is declared once, with all that routes, checks and describes it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import Request

from tickwheel.arguments import MIB
from tickwheel.http.access import Caller
from tickwheel.http.problems import Kind
from tickwheel.http.service import Service
from tickwheel.operate.keys import Scope

# Wait for a future, for so many seconds, or until the caller has left or the server stops.
Wait = Callable[["asyncio.Future[Any]", float], Awaitable[None]]


class Asking(Protocol):
    """What a handler may ask of the API itself, as often as it likes."""

    async def identify(self, request: Request) -> Caller:
        """Who sent a request: by what the store knows now. Raises Problem."""

    def count(self, caller: Caller) -> None:
        """Count a request for the rate of a key. Raises Problem if it is one too many."""

    async def read(self, request: Request, caller: Caller, path: str) -> bytes:
        """What a GET of this path, with its query, answers to a caller. Raises Problem."""


@dataclass(slots=True, kw_only=True)
class Incoming:
    """A request that was let in, with its path, query and body checked."""

    service: Service
    api: Asking
    request: Request
    request_id: str
    caller: Caller
    scope: Scope
    path: Mapping[str, str]
    query: Any
    body: Any
    idempotency_key: str | None
    accept: str = ""
    # The path that the API is below.
    root: str = ""
    # Whether its caller is known and may be here at all, and whether its body was read.
    admitted: bool = False
    consumed: bool = False
    # How it waits, while others are answered.
    wait: Wait | None = None
    # For the audit log: what it is about, and a few words.
    target: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """What to answer with."""

    # Bytes are sent as they are; so are those of an async iterator with `aclose`, one by one, for
    # as long as it takes. Anything else becomes JSON.
    content: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    # Where what was created is, as a path of this API.
    location: str | None = None


Handler = Callable[[Incoming], Awaitable[Reply]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of the API."""

    method: str
    path: str
    # What the caller needs; None: nothing, not even a key.
    scope: Scope | None
    summary: str
    description: str
    handler: Handler
    # The body and the query parameters, as structs; None: it has none.
    body: Any = None
    query: Any = None
    # The type of the body of each answer, by status.
    answers: Mapping[int, Any]
    # Problems of its own.
    problems: tuple[Kind, ...] = ()
    # What the body is decoded as, if its parts are checked one by one.
    decode: Any = None
    body_limit: int = MIB
    # The media type of its answers.
    media: str = "application/json"
    idempotent: bool = False

    @property
    def id(self) -> str:
        return self.handler.__name__

    @property
    def writes(self) -> bool:
        return self.method != "GET"

    @property
    def parameters(self) -> list[str]:
        """The names in its path."""
        return [part[1:-1] for part in self.path.split("/") if part.startswith("{")]


class Table:
    """Operations, as a decorator for their handlers collects them."""

    def __init__(self) -> None:
        self._operations: list[Operation] = []

    def __iter__(self) -> Iterator[Operation]:
        return iter(self._operations)

    def operation(
        self,
        method: str,
        path: str,
        *,
        scope: Scope | None,
        summary: str,
        answers: Mapping[int, Any],
        **more: Any,
    ) -> Callable[[Handler], Handler]:
        """Declare an operation; the handler's docstring is its description."""

        def declare(handler: Handler) -> Handler:
            self._operations.append(
                Operation(
                    method=method,
                    path=path,
                    scope=scope,
                    summary=summary,
                    description=" ".join((handler.__doc__ or "").split()),
                    handler=handler,
                    answers=answers,
                    **more,
                )
            )
            return handler

        return declare
