"""Which jobs a request is about, and which of them its caller may see."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tickwheel.duration import due_ms
from tickwheel.errors import BadArguments
from tickwheel.http.adding import read_time
from tickwheel.http.forms import CountDead, CountJobs, DeadFilter, FindDead, JobFilter, View
from tickwheel.http.problems import Kind, Problem
from tickwheel.http.table import Incoming
from tickwheel.job import Job, State
from tickwheel.jobs import checked_query
from tickwheel.operate.bulk import Filter, everything
from tickwheel.operate.search import Search

# How many jobs a list or a count looks at, and for how long, where no index helps.
LISTED_MOST, COUNTED_MOST = 5_000, 20_000
LOOK_S = 0.2

_WAITING_VIEWS = ("scheduled", "ready", "retrying")


def visible(incoming: Incoming) -> Callable[[Job], bool]:
    """Whether the caller may see a job."""
    if incoming.caller.sees_all(incoming.scope):
        return everything
    return lambda job: incoming.caller.sees(incoming.scope, job)


def listed(incoming: Incoming, query: CountDead, now_ms: int, state: State | None = None) -> Filter:
    """What the query of a list or a count says."""
    meta = _pair(query.meta)
    chosen = query.state if isinstance(query, CountJobs) else state
    return _filter(
        incoming,
        query,
        now_ms,
        states=[] if chosen is None else [chosen],
        meta=meta,
        fingerprint=query.fingerprint if isinstance(query, FindDead) else None,
    )


def filtered(
    incoming: Incoming, chosen: JobFilter | DeadFilter, now_ms: int, states: Sequence[State]
) -> Filter:
    """What the body of a bulk operation says."""
    if isinstance(chosen, JobFilter) and chosen.state is not None:
        states = [chosen.state]
    return _filter(
        incoming,
        chosen,
        now_ms,
        states=states,
        meta=checked_query(None, None, None, chosen.meta).meta,
        fingerprint=chosen.fingerprint if isinstance(chosen, DeadFilter) else None,
        since_ms=_ms("since", chosen.since),
    )


def _filter(
    incoming: Incoming,
    given: CountDead | JobFilter | DeadFilter,
    now_ms: int,
    *,
    states: Sequence[State],
    meta: tuple[str, str] | None,
    fingerprint: str | None,
    since_ms: int | None = None,
) -> Filter:
    view, worker = None, None
    if isinstance(given, CountJobs | JobFilter):
        view, worker = given.view, given.worker
        if view is not None and given.state is not None:
            raise BadArguments("give a state or a view, not both")
    if meta is not None and incoming.service.redaction.hides(meta[0], incoming.caller):
        raise Problem(Kind.FORBIDDEN, f"the values of {meta[0][:80]!r} are hidden from this key")
    from_ms, until_ms = _ms("from", given.from_), _ms("until", given.until)
    if view is not None:
        states = [State.WAITING] if view in _WAITING_VIEWS else [State(view)]
        from_ms, until_ms = _seen_in(view, from_ms, until_ms, now_ms)
    if worker is not None:
        if any(state is not State.RUNNING for state in states):
            raise BadArguments("worker: only running jobs have one")
        states = [State.RUNNING]
    query = checked_query(None, given.queue, given.task, None)
    return Filter(
        states=states,
        queue=query.queue,
        task=query.task,
        meta=meta,
        since_ms=since_ms,
        from_ms=from_ms,
        until_ms=until_ms,
        in_order=view is not None,
        retrying=view == "retrying",
        worker=worker,
        fingerprint=fingerprint,
        has_text=None if given.text is None else _search(incoming, given.text),
    )


def _seen_in(
    view: View, from_ms: int | None, until_ms: int | None, now_ms: int
) -> tuple[int | None, int | None]:
    """The time range of a view: what is due by now is ready."""
    if view == "scheduled":
        return max(from_ms or 0, now_ms + 1), until_ms
    if view == "ready":
        return from_ms, now_ms + 1 if until_ms is None else min(until_ms, now_ms + 1)
    return from_ms, until_ms


def _search(incoming: Incoming, text: str) -> Search:
    redaction, caller = incoming.service.redaction, incoming.caller
    return Search(text, lambda job: redaction.searchable(job, caller))


def _ms(name: str, text: str | None) -> int | None:
    return None if text is None else due_ms(read_time(name, text))


def _pair(text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    name, equals, value = text.partition("=")
    if not equals:
        raise Problem(Kind.BAD_REQUEST, f"meta={text[:80]!r}: must be name=value, as customer=42")
    return checked_query(None, None, None, {name: value}).meta
