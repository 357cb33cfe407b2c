"""What requests bring: their bodies and queries, as types that check and describe them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta

from tickwheel.checks import ID_LIMIT, NAME_LIMIT, PriorityName
from tickwheel.job import State
from tickwheel.jobs import PAGE_MOST
from tickwheel.operate.keys import Scope
from tickwheel.store import RECORDS_LIMIT

# How many jobs one request adds or names.
JOBS_MOST = 1000
# How many jobs a bulk operation changes; the answer says if more remain.
CHANGED_MOST = 10_000
# How many ticks are listed.
TICKS_MOST = 1000
TEXT_LIMIT = 100
# In how many slots due jobs are counted.
SLOTS_MOST = 1440

Name = Annotated[str, Meta(min_length=1, max_length=NAME_LIMIT)]
Id = Annotated[str, Meta(min_length=1, max_length=ID_LIMIT)]
DurationText = Annotated[
    str | float, Meta(description="'30m', '1h30m', or a number of seconds", examples=["30m", 90])
]
TimeText = Annotated[
    str,
    Meta(
        max_length=TEXT_LIMIT,
        description="a time with its zone, as in RFC 3339",
        examples=["2026-01-31T09:30:00Z"],
    ),
]

WaitText = Annotated[
    str, Meta(max_length=TEXT_LIMIT, description="at most '60s'", examples=["30s"])
]
Limit = Annotated[int, Meta(ge=1, le=PAGE_MOST)]


class _Form(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What has other fields is refused: a mistyped name would be ignored otherwise."""


# --- Jobs


class NewJob(_Form):
    """A job to add: of a task, or, with `url`, an HTTP call."""

    # One of the two.
    task: Name | None = None
    url: Annotated[str, Meta(max_length=2048)] | None = None
    # By parameter name.
    arguments: dict[str, Any] = {}

    # Of an HTTP call.
    method: Annotated[str, Meta(max_length=16)] | None = None
    headers: dict[str, str] | None = None
    body: Any = UNSET
    on_done: Annotated[str, Meta(max_length=2048)] | None = None
    on_dead: Annotated[str, Meta(max_length=2048)] | None = None

    delay: DurationText | None = None
    at: TimeText | None = None
    # Adds nothing if a job has it, unless `if_exists` says otherwise.
    id: Id | None = None
    # What happens to the job that has the id. `renew`: it makes way if it has ended. `replace`: it
    # makes way; if it runs, once it has ended.
    if_exists: Literal["keep", "renew", "replace"] | None = None
    # With `if_exists`: any text that is unique to this request; a repeat then changes nothing more.
    request: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    queue: Name | None = None
    priority: PriorityName | None = None
    retries: Annotated[int, Meta(ge=0)] | None = None
    timeout: DurationText | None = None
    # How long after it is due it may start, or until when.
    expires: DurationText | None = None
    meta: dict[str, str] | None = None


class GetJob(_Form):
    """Whether to wait for the end of a job."""

    # For how long; at most a minute.
    wait: WaitText | None = None


class NewJobs(_Form):
    """Jobs to add, each on its own."""

    jobs: Annotated[list[NewJob], Meta(min_length=1, max_length=JOBS_MOST)]


class RawJobs(_Form):
    """The same, each still to be checked."""

    jobs: Annotated[list[msgspec.Raw], Meta(min_length=1, max_length=JOBS_MOST)]


# Waiting and due later, waiting and due by now, waiting after a failure; or a state.
View = Literal["scheduled", "ready", "retrying", "running", "done", "dead", "cancelled"]
SearchText = Annotated[str, Meta(min_length=1, max_length=200)]
Fingerprint = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]


class _Times(_Form):
    # From when until when (excluded) they are due; if they have ended, when they did.
    from_: TimeText | None = msgspec.field(name="from", default=None)
    until: TimeText | None = None


class CountDead(_Times):
    """Which dead jobs; all that are given must match."""

    queue: Annotated[str, Meta(max_length=NAME_LIMIT)] | None = None
    task: Annotated[str, Meta(max_length=NAME_LIMIT)] | None = None
    # One name and value of their meta: `customer=42`.
    meta: Annotated[str, Meta(max_length=2048)] | None = None
    # In their ids, tasks, errors, arguments and meta.
    text: SearchText | None = None


class FindDead(CountDead):
    """Which dead jobs, and which page of them."""

    fingerprint: Fingerprint | None = None
    cursor: Annotated[str, Meta(max_length=4096)] | None = None
    limit: Limit = 100


class CountJobs(CountDead):
    """Which jobs; all that are given must match."""

    state: State | None = None
    view: View | None = None
    # Which has them now.
    worker: Annotated[str, Meta(max_length=NAME_LIMIT)] | None = None


class FindJobs(CountJobs):
    """Which jobs, and which page of them."""

    cursor: Annotated[str, Meta(max_length=4096)] | None = None
    limit: Limit = 100
    # Without what may be large: no arguments, results and tracebacks, and the start of errors.
    brief: bool = False


class DueRange(_Form):
    """Which time, in how many slots."""

    from_: TimeText = msgspec.field(name="from")
    until: TimeText
    slots: Annotated[int, Meta(ge=1, le=SLOTS_MOST)] = 60
    queue: Annotated[str, Meta(max_length=NAME_LIMIT)] | None = None


class GroupDead(_Form):
    """Which dead jobs; all that are given must match."""

    queue: Annotated[str, Meta(max_length=NAME_LIMIT)] | None = None
    task: Annotated[str, Meta(max_length=NAME_LIMIT)] | None = None


class _Narrowing(_Times):
    queue: Name | None = None
    task: Name | None = None
    # One name and its value.
    meta: dict[str, str] | None = None
    # Added or ended since this time.
    since: TimeText | None = None
    text: SearchText | None = None


class DeadFilter(_Narrowing):
    """Which dead jobs: at least one of these."""

    # As `/v1/dead/groups` has it.
    fingerprint: Fingerprint | None = None


class JobFilter(_Narrowing):
    """Which jobs; all that are given must match."""

    state: State | None = None
    view: View | None = None
    worker: Name | None = None


Ids = Annotated[list[Id], Meta(min_length=1, max_length=JOBS_MOST)]
Most = Annotated[int, Meta(ge=1, le=CHANGED_MOST)]


class Which(_Form):
    """Jobs by their ids, or all that match a filter, up to `limit`."""

    ids: Ids | None = None
    filter: JobFilter | None = None
    limit: Most = 1000


class MoveTo(_Form):
    """Where jobs move; what is not given stays as it is. Of `delay`, `at` and `later`, one."""

    # When they are due, from now; or at this time; or so much later than before.
    delay: DurationText | None = None
    at: TimeText | None = None
    later: DurationText | None = None
    queue: Name | None = None
    priority: PriorityName | None = None


class WhichMove(Which):
    """The same, and where they move."""

    to: MoveTo = msgspec.field(default_factory=MoveTo)


class WhichDead(_Form):
    """Dead jobs by their ids, or all that match a filter (`{}`: all), up to `limit`."""

    ids: Ids | None = None
    filter: DeadFilter | None = None
    limit: Most = 1000


# --- Schedules


class NewSchedule(_Form):
    """A schedule: a task, and when it runs. Give `cron` or `every`."""

    task: Name
    cron: Annotated[str, Meta(max_length=256)] | None = None
    every: DurationText | None = None
    tz: Annotated[str, Meta(max_length=TEXT_LIMIT)] | None = None
    start: TimeText | None = None
    end: TimeText | None = None
    arguments: dict[str, Any] = {}
    misfire: Literal["skip", "one", "all"] = "one"
    misfire_limit: Annotated[int, Meta(ge=1, le=10_000)] = 100
    overlap: Literal["allow", "skip", "cancel"] = "allow"
    spread: DurationText = 0


class NextTicks(_Form):
    """How many ticks, and from when on."""

    count: Annotated[int, Meta(ge=1, le=TICKS_MOST)] = 10
    after: TimeText | None = None


class LastTicks(_Form):
    """How many ticks."""

    count: Annotated[int, Meta(ge=1, le=100)] = 20


class Preview(NextTicks):
    """An expression to try: `cron` or `every`."""

    cron: Annotated[str, Meta(max_length=256)] | None = None
    every: Annotated[str, Meta(max_length=TEXT_LIMIT)] | None = None
    tz: Annotated[str, Meta(max_length=TEXT_LIMIT)] | None = None


class Range(_Form):
    """From when until when to simulate: by default, the next 24 hours."""

    start: TimeText | None = None
    end: TimeText | None = None
    name: Annotated[str, Meta(max_length=NAME_LIMIT)] | None = None
    limit: Annotated[int, Meta(ge=1, le=TICKS_MOST)] = 100


# --- Keys and the audit log


class NewKey(_Form):
    """An API key to create. Without `queues` and `tasks` it may use all; `*` stands for others."""

    name: Name
    scopes: Annotated[list[Scope], Meta(min_length=1, max_length=len(Scope))]
    queues: Annotated[list[Name], Meta(max_length=100)] = []
    tasks: Annotated[list[Name], Meta(max_length=100)] = []
    # How long it is valid.
    expires: DurationText | None = None
    # As in '100/s'.
    rate: Annotated[str, Meta(max_length=TEXT_LIMIT)] | None = None


class FindEntries(_Form):
    """Which page of the audit log."""

    cursor: Annotated[str, Meta(max_length=4096)] | None = None
    limit: Annotated[int, Meta(ge=1, le=RECORDS_LIMIT)] = 100
