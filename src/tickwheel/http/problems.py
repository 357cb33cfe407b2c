"""Every problem that the API answers with, by its stable type (RFC 9457)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import msgspec

from tickwheel.errors import (
    JobUnknown,
    StoreError,
    StoreRefused,
    TickwheelError,
    UnknownSchedule,
    UnknownTask,
    UsageError,
)
from tickwheel.masking import scrubbed, without_keys

# What a problem's type starts with; clients compare the whole.
PREFIX = "urn:tickwheel:problem:"
MEDIA_TYPE = "application/problem+json"
# When to ask again, if the store is away.
RETRY_AFTER_S = 2
# How many characters of detail an answer has.
DETAIL_LIMIT = 2000


class Kind(Enum):
    """A problem's name, its status and title, and what it means. Names never change."""

    BAD_REQUEST = (
        "bad-request",
        400,
        "The request can't be read",
        "The body is not JSON, or a parameter is unknown, repeated or not of its type.",
    )
    UNAUTHORIZED = (
        "unauthorized",
        401,
        "A valid API key is needed",
        "Send `Authorization: Bearer tw_…` with a key that is known, not revoked and not expired.",
    )
    FORBIDDEN = (
        "forbidden",
        403,
        "The API key may not do this",
        "The key lacks the scope, or may not use this queue or task.",
    )
    HOST_NOT_ALLOWED = (
        "host-not-allowed",
        403,
        "Without API keys, only this machine has access",
        "The Host or Origin is not this machine's. Create a key, or list the host: `--allow-host`.",
    )
    CROSS_ORIGIN = (
        "cross-origin",
        403,
        "The request may come from another site",
        "With a session's cookie, only pages of the same origin may change things.",
    )
    NOT_FOUND = (
        "not-found",
        404,
        "There is no such thing",
        "No operation has this path, or the job, schedule, queue or key is unknown, or the API key "
        "may not see it.",
    )
    METHOD_NOT_ALLOWED = (
        "method-not-allowed",
        405,
        "The path has no such method",
        "The header `Allow` lists those that it has.",
    )
    REQUEST_TIMEOUT = (
        "request-timeout",
        408,
        "The request took too long to arrive",
        "The whole body must arrive within 10 seconds.",
    )
    CONFLICT = (
        "conflict",
        409,
        "The state doesn't allow it",
        "A job to cancel has already ended, or one to rerun or delete has not.",
    )
    IDEMPOTENCY_IN_PROGRESS = (
        "idempotency-in-progress",
        409,
        "The first request with this Idempotency-Key is under way",
        "Repeat it a moment later.",
    )
    TOO_LARGE = (
        "too-large",
        413,
        "The body is too large",
        "A body may have 1 MiB; of a batch or a bulk operation, 16 MiB.",
    )
    URI_TOO_LONG = ("uri-too-long", 414, "The URL is too long", "It may have 8,192 bytes.")
    UNSUPPORTED_MEDIA_TYPE = (
        "unsupported-media-type",
        415,
        "The body must be JSON",
        "Send `Content-Type: application/json`, in UTF-8, and no Content-Encoding.",
    )
    INVALID = (
        "invalid",
        422,
        "The request can't be carried out as it is",
        "A value is missing, of the wrong type or out of range. `detail` says which and why.",
    )
    UNKNOWN_TASK = (
        "unknown-task",
        422,
        "The app has no such task",
        "`GET /v1/tasks` lists those that it has.",
    )
    NO_CALLBACKS = (
        "no-callbacks",
        422,
        "The app can't call URLs",
        "A job with `url` needs the task `http.call`, which this app doesn't have.",
    )
    IDEMPOTENCY_KEY_REUSED = (
        "idempotency-key-reused",
        422,
        "The Idempotency-Key was used for another request",
        "Use a new key for each new request, and the same only to repeat one.",
    )
    RATE_LIMITED = (
        "rate-limited",
        429,
        "Too many requests with this API key",
        "Wait as long as `Retry-After` says.",
    )
    HEADERS_TOO_LARGE = (
        "headers-too-large",
        431,
        "The headers are too large",
        "Together they may have 16 KiB, in at most 64 lines.",
    )
    INTERNAL = (
        "internal",
        500,
        "The server failed",
        "A bug, or a broken store. The server's log has more under the same `request_id`.",
    )
    NOT_AVAILABLE = (
        "not-available",
        501,
        "This server doesn't have it",
        "It keeps no API keys or no audit log.",
    )
    OVERLOADED = (
        "overloaded",
        503,
        "Too many requests are under way",
        "Nothing was done. Wait as long as `Retry-After` says.",
    )
    STORE_UNAVAILABLE = (
        "store-unavailable",
        503,
        "The store does not answer",
        "It is unknown whether the step happened. Repeat it: with an id or an Idempotency-Key no "
        "job is added twice.",
    )

    STOPPING = (
        "stopping",
        503,
        "The server is stopping",
        "It waited for the request as long as it may, and it is unknown whether the step happened. "
        "Repeat it: with an id or an Idempotency-Key no job is added twice.",
    )

    def __init__(self, code: str, status: int, title: str, meaning: str) -> None:
        self.code = code
        self.status = status
        self.title = title
        self.meaning = meaning

    @property
    def type(self) -> str:
        return PREFIX + self.code


class ProblemDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    request_id: str


class Problem(Exception):
    """Ends a request with this problem."""

    def __init__(
        self, kind: Kind, detail: str = "", *, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail or kind.meaning)
        self.kind = kind
        self.headers = dict(headers or {})

    def details(self, request_id: str) -> ProblemDetails:
        # A name in the path may hold what is not text.
        detail = without_keys(str(self))[:DETAIL_LIMIT].encode(errors="replace").decode()
        return ProblemDetails(
            type=self.kind.type,
            title=self.kind.title,
            status=self.kind.status,
            detail=detail,
            request_id=request_id,
        )


def store_away(why: str = "") -> Problem:
    return Problem(Kind.STORE_UNAVAILABLE, why, headers={"Retry-After": str(RETRY_AFTER_S)})


def problem_of(error: TickwheelError) -> Problem:
    """The problem that an error of ours means to a client."""
    words = scrubbed(str(error))
    if isinstance(error, (JobUnknown, UnknownSchedule)):
        return Problem(Kind.NOT_FOUND, words)
    if isinstance(error, UnknownTask):
        return Problem(Kind.UNKNOWN_TASK, words)
    if isinstance(error, (UsageError, StoreRefused)):
        return Problem(Kind.INVALID, words)
    if isinstance(error, StoreError):
        return store_away(words)
    return Problem(Kind.INTERNAL)
