"""Explain a job's state: takes facts, returns findings in plain words. Pure.

Each finding has a code for programs, whose meaning never changes, and words for people.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tickwheel.duration import duration_text
from tickwheel.envelope import REFUSED
from tickwheel.job import EXPIRED, Job, Outcome, State, held, losses, suspect
from tickwheel.operate.facts import Facts
from tickwheel.schedule import MOVING_MS
from tickwheel.store import WorkerInfo

# A job that has been due for longer than this while slots are free is no longer "on its way".
ON_ITS_WAY_MS = 10_000

# `name@2026-01-31T02:00:00Z`: the id of a schedule's job.
_TICK_ID = re.compile(r"(?P<name>.+)@(?P<tick>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{3})?Z)")


class Why(StrEnum):
    """The codes of findings. Programs rely on these values."""

    # Why it waits
    NOT_DUE = "not_due"
    RETRY = "retry"
    SNOOZED = "snoozed"
    RELEASED = "released"
    PARKED = "parked"
    QUEUE_PAUSED = "queue_paused"
    NO_WORKER = "no_worker"
    UNKNOWN_TASK = "unknown_task"
    NO_SLOT = "no_slot"
    ON_ITS_WAY = "on_its_way"
    OVERLOOKED = "overlooked"
    # Who holds it
    HELD = "held"
    HOLDER_GONE = "holder_gone"
    LEASE_RAN_OUT = "lease_ran_out"
    CANCEL_REQUESTED = "cancel_requested"
    FOLLOWED = "followed"
    # How it ended
    DONE = "done"
    NO_RESULT = "no_result"
    OUT_OF_RETRIES = "out_of_retries"
    GAVE_UP = "gave_up"
    FAILED = "failed"
    POISON = "poison"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    # Further facts
    EXPIRES = "expires"
    PROGRESS = "progress"
    LAST_ERROR = "last_error"
    LAST_RUN = "last_run"
    FAILURES_LEFT = "failures_left"
    TAKEOVERS_LEFT = "takeovers_left"
    SCHEDULE = "schedule"


# What keeps a job from running, and what ends that.
_BLOCKING = {
    Why.QUEUE_PAUSED: "once its queue is resumed",
    Why.NO_WORKER: "once a worker serves its queue",
    Why.UNKNOWN_TASK: "once a worker knows its task",
    Why.NO_SLOT: "once a slot is free",
}


@dataclass(frozen=True, slots=True)
class Reason:
    """One finding."""

    why: Why
    words: str


@dataclass(frozen=True, slots=True)
class Advice:
    """What an operator can do now, with the shell command for it, if there is one."""

    words: str
    command: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A job's state in plain words."""

    headline: str
    reasons: tuple[Reason, ...]
    # The earliest time at which it starts or is taken over; later if it is blocked.
    runs_ms: int | None
    blocked: bool
    when: str
    advice: tuple[Advice, ...]
    # The schedule that added it, if any.
    schedule: str | None = None


def explain(facts: Facts) -> Explanation:
    """Explain why the job waits, who holds it or how it ended, when it runs and what to do."""
    found = {
        State.WAITING: _waiting,
        State.RUNNING: _running,
        State.DONE: _done,
        State.DEAD: _dead,
        State.CANCELLED: _cancelled,
    }[facts.job.state](facts)
    schedule = _schedule(facts)
    return Explanation(
        headline=found.headline,
        reasons=(*found.reasons, *([schedule[1]] if schedule else [])),
        runs_ms=found.runs_ms,
        blocked=found.runs_ms is not None and any(each.why in _BLOCKING for each in found.reasons),
        when=found.when,
        advice=tuple(found.advice),
        schedule=schedule[0] if schedule else None,
    )


@dataclass(slots=True)
class _Found:
    """The parts of an explanation, as they are gathered."""

    headline: str
    reasons: list[Reason]
    when: str
    runs_ms: int | None = None
    advice: list[Advice] = field(default_factory=list)


# --- Waiting


def _waiting(facts: Facts) -> _Found:
    job = facts.job
    due = job.due_ms <= facts.now_ms
    blockers, advice = _blockers(facts, due_ms=job.due_ms)
    reasons = [*_why_again(facts), *blockers]
    if not due:
        reasons.insert(0, Reason(Why.NOT_DUE, f"It is not due until {facts.at(job.due_ms)}."))
    cancel = Advice("To cancel it:", facts.command("jobs", "cancel", about=job.id))
    return _Found(
        _why_it_waits(facts, due, blockers),
        [*reasons, *_expires(facts), *_last_error(facts), *_left(facts)],
        _when(facts, job.due_ms, blockers),
        max(job.due_ms, facts.now_ms),
        [*advice, cancel],
    )


_HEADLINES = {
    Why.QUEUE_PAUSED: "its queue is paused",
    Why.NO_WORKER: "no running worker serves its queue",
    Why.UNKNOWN_TASK: "no running worker knows its task",
    Why.NO_SLOT: "all slots for its queue are busy",
    Why.ON_ITS_WAY: "a worker should take it in a moment",
    Why.OVERLOOKED: "slots are free, but no worker has taken it",
}


def _why_it_waits(facts: Facts, due: bool, blockers: Sequence[Reason]) -> str:
    job = facts.job
    if due:
        late = duration_text((facts.now_ms - job.due_ms) // 1000 * 1000)
        return f"It is waiting and has been due for {late}: {_HEADLINES[blockers[0].why]}."
    first = f"It is waiting: due {facts.away(job.due_ms)}"
    if _retrying(facts):
        first = f"It is waiting for {_retry_number(facts)}, {facts.away(job.due_ms)}"
    blocked = [_HEADLINES[each.why] for each in blockers]
    return f"{first}, but {blocked[0]}." if blocked else f"{first}."


def _blockers(facts: Facts, *, due_ms: int) -> tuple[list[Reason], list[Advice]]:
    """Whatever keeps the job from being claimed once it is due, most important first."""
    job = facts.job
    reasons: list[Reason] = []
    advice: list[Advice] = []
    if facts.queue is not None and facts.queue.paused:
        reasons.append(
            Reason(Why.QUEUE_PAUSED, f"Queue {job.queue!r} is paused, so none of its jobs start.")
        )
        advice.append(
            Advice("To resume the queue:", facts.command("queues", "resume", about=job.queue))
        )
    if facts.of_queue and not facts.serving:
        reasons.append(Reason(Why.UNKNOWN_TASK, _unknown_task(facts)))
        advice.append(Advice("Start a worker of the app that has this task."))
    elif not facts.serving:
        reasons.append(Reason(Why.NO_WORKER, _no_worker(facts)))
        start = shlex.join(["tickwheel", "worker", facts.app, "--queues", job.queue])
        advice.append(Advice("To start a worker for its queue:", start))
    if reasons or due_ms > facts.now_ms:
        return reasons, advice
    return _on_its_way(facts, due_ms)


def _no_worker(facts: Facts) -> str:
    if not facts.workers:
        return "No worker is running."
    served = _some(sorted({queue for worker in facts.workers for queue in worker.queues}))
    queue, count = facts.job.queue, len(facts.workers)
    if count == 1:
        return f"The only running worker serves {served}, not queue {queue!r}."
    return f"None of the {count:,} running workers serves queue {queue!r}; they serve {served}."


def _unknown_task(facts: Facts) -> str:
    job, count = facts.job, len(facts.of_queue)
    none = "The only worker" if count == 1 else f"None of the {count:,} workers"
    knows = "does not know" if count == 1 else "knows"
    return f"{none} of queue {job.queue!r} {knows} task {job.task!r}."


def _on_its_way(facts: Facts, since_ms: int) -> tuple[list[Reason], list[Advice]]:
    """Nothing holds the job back: see whether slots are free."""
    serving = facts.serving
    slots = sum(worker.concurrency for worker in serving)
    running = sum(worker.running for worker in serving)
    workers = _count(len(serving), "worker")
    seen = facts.away(max(worker.seen_ms for worker in serving))
    if all(worker.running >= worker.concurrency for worker in serving):
        words = (
            f"Its queue is served by {workers} with {_count(slots, 'slot')}, all of them busy "
            f"(last report {seen}).{_in_front(facts)}"
        )
        start = shlex.join(["tickwheel", "worker", facts.app, "--queues", facts.job.queue])
        return [Reason(Why.NO_SLOT, words)], [Advice("To add slots, start another worker:", start)]
    total = _count(slots, "slot")
    free = f"{slots - running} of {total} free on {workers} (last report {seen})"
    if facts.now_ms - since_ms <= ON_ITS_WAY_MS:
        return [Reason(Why.ON_ITS_WAY, f"A worker should take it in a moment: {free}.")], []
    words = f"A worker should have taken it by now: {free}.{_in_front(facts)}"
    return (
        [Reason(Why.OVERLOOKED, words)],
        [
            Advice(
                "Check in the workers' logs whether they can reach the store, and run:",
                facts.command("workers"),
            )
        ],
    )


def _in_front(facts: Facts) -> str:
    if facts.queue is None or facts.queue.waiting < 2:
        return ""
    return (
        f" {facts.queue.waiting:,} jobs are waiting in its queue; "
        "jobs with a higher priority or an earlier due time go first."
    )


def _why_again(facts: Facts) -> list[Reason]:
    """Why a job that ran before is waiting again."""
    last = facts.last
    if last is None:
        return []
    when, by = facts.away(last.ended_ms), last.worker
    if _retrying(facts):
        return [Reason(Why.RETRY, f"It failed {when}; {_retry_number(facts)} comes next.")]
    if last.outcome is Outcome.SNOOZE:
        return [Reason(Why.SNOOZED, f"Its task asked to run later (snoozed {when}).")]
    if last.outcome is Outcome.RELEASE:
        return [Reason(Why.RELEASED, f"Worker {by} held it and released it {when}.")]
    if last.outcome is Outcome.PARK:
        words = f"Worker {by} does not know its task and put it back {when}."
        return [Reason(Why.PARKED, words)]
    return []


def _retrying(facts: Facts) -> bool:
    # After a rerun the last run is still in the history, but its failures no longer count.
    last = facts.last
    return last is not None and last.outcome is Outcome.RETRY and facts.job.failures > 0


def _retry_number(facts: Facts) -> str:
    allowed = "" if facts.retries is None else f" of {facts.retries:,}"
    return f"retry {facts.job.failures:,}{allowed}"


def _when(facts: Facts, ms: int, blockers: Sequence[Reason]) -> str:
    needed = [_BLOCKING[each.why] for each in blockers if each.why in _BLOCKING]
    if ms <= facts.now_ms:
        return " and ".join(needed) or "in a moment"
    at = f"at {facts.at(ms)}"
    return f"{at}, but only {' and '.join(needed)}" if needed else at


# --- Running


def _running(facts: Facts) -> _Found:
    job = facts.job
    if not held(job, now_ms=facts.now_ms):
        found = _lost(facts)
    elif facts.holder is None:
        found = _holder_gone(facts)
    else:
        found = _held(facts, facts.holder)
    if not job.cancel_requested:
        found.advice.append(Advice("To stop it:", facts.command("jobs", "cancel", about=job.id)))
    found.reasons += [Reason(Why.FOLLOWED, each) for each in facts.pending()]
    found.reasons += [*_progress(job), *_expires(facts), *_last_error(facts), *_left(facts)]
    return found


def _held(facts: Facts, holder: WorkerInfo) -> _Found:
    job = facts.job
    early = job.due_ms > facts.now_ms
    reasons = [Reason(Why.HELD, _holding(facts, holder))]
    headline = f"Worker {holder.name} is running it."
    if early:
        headline = f"Worker {holder.name} holds it and starts it {facts.away(job.due_ms)}."
    elif holder.held > holder.running >= holder.concurrency:
        slots = _count(holder.concurrency, "slot")
        words = (
            f"All of that worker's {slots} are busy. If this job is not "
            "in one of them, it waits there for a moment and is then released."
        )
        reasons.append(Reason(Why.NO_SLOT, words))
        headline = f"Worker {holder.name} has it."
    if job.cancel_requested:
        headline = f"It was asked to stop; worker {holder.name} still has it."
        reasons.insert(0, Reason(Why.CANCEL_REQUESTED, _CANCEL_REQUESTED))
    if early:
        return _Found(headline, reasons, f"at {facts.at(job.due_ms)}", job.due_ms)
    return _Found(headline, reasons, "now")


_CANCEL_REQUESTED = (
    "It was asked to stop, and its worker is told at once. An async task is interrupted; a thread "
    "must check `stopping` itself, or runs to its end. The job does not run again."
)


def _holding(facts: Facts, holder: WorkerInfo) -> str:
    job = facts.job
    until = facts.at(job.lease_until_ms or 0)
    return (
        f"{holder.name} (pid {holder.pid} on {holder.host}, seen {facts.away(holder.seen_ms)}) "
        f"holds it for attempt {job.attempt}. The lease runs until {until} and is extended while "
        "the worker is alive; if it dies, another worker takes over then."
    )


def _holder_gone(facts: Facts) -> _Found:
    job = facts.job
    until_ms = job.lease_until_ms or 0
    gone = (
        f"{job.worker} has not been seen lately: it died, froze or lost the store. Its lease "
        f"runs until {facts.at(until_ms)}; then another worker takes over."
    )
    headline = f"Its worker {job.worker} is gone; another takes over {facts.away(until_ms)}."
    return _taken_over(facts, Reason(Why.HOLDER_GONE, gone), headline)


def _lost(facts: Facts) -> _Found:
    job = facts.job
    gone = "which is still running" if facts.holder else "which is gone"
    words = f"The lease of {job.worker}, {gone}, ran out at {facts.at(job.lease_until_ms or 0)}."
    headline = f"Its worker {job.worker} lost its lease; it is waiting for a takeover."
    return _taken_over(facts, Reason(Why.LEASE_RAN_OUT, words), headline)


def _taken_over(facts: Facts, gone: Reason, headline: str) -> _Found:
    """What happens once the lease has run out."""
    from_ms = facts.job.lease_until_ms or 0
    blockers, advice = _blockers(facts, due_ms=from_ms)
    if facts.job.cancel_requested:
        words = "It was asked to stop, so the next worker cancels it instead of running it."
        headline = "It was asked to stop and its worker is gone: it does not run again."
        return _Found(headline, [Reason(Why.CANCEL_REQUESTED, words), gone], _NEVER)
    when = _when(facts, from_ms, blockers)
    return _Found(headline, [gone, *blockers], when, max(from_ms, facts.now_ms), advice)


# --- Ended

_NEVER = "not again, unless you rerun it"


def _done(facts: Facts) -> _Found:
    job = facts.job
    reasons = [Reason(Why.DONE, f"{_ran(facts)}{_after_failures(job)}.")]
    if job.error is not None:
        reasons.append(Reason(Why.NO_RESULT, f"Its result could not be stored: {job.error}"))
    again = Advice("To run it again:", facts.command("jobs", "rerun", about=job.id))
    headline = f"It is done: it ended at {facts.at(job.ended_ms or facts.now_ms)}."
    return _Found(headline, reasons, _NEVER, None, [again])


def _ran(facts: Facts) -> str:
    last = facts.last
    if last is None or last.started_ms is None:
        return f"{facts.job.worker} ran it"
    late = duration_text(max(last.started_ms - last.due_ms, 0))
    took = duration_text(max(last.ended_ms - last.started_ms, 0))
    return f"{last.worker} started it {late} after it was due; it took {took}"


def _after_failures(job: Job) -> str:
    before = []
    if job.failures:
        before.append(_failures(job))
    if job.takeovers:
        before.append(_count(job.takeovers, "takeover"))
    return f", after {' and '.join(before)}" if before else ""


def _dead(facts: Facts) -> _Found:
    job = facts.job
    why, words = _why_dead(facts)
    reasons = [Reason(why, words), *_last_error(facts)]
    if facts.last is not None and facts.last.started_ms is not None:
        reasons.append(Reason(Why.LAST_RUN, f"Last run: {_ran(facts)}."))
    return _Found(
        f"It died at {facts.at(job.ended_ms or facts.now_ms)}. Rerun or delete it.",
        reasons,
        _NEVER,
        None,
        [
            Advice(
                "To run it again with all its retries, once the cause is fixed:",
                facts.command("jobs", "rerun", about=job.id),
            ),
            Advice("To see every run:", facts.command("jobs", "show", about=job.id)),
            Advice("To delete it:", facts.command("dead", "delete", about=job.id)),
        ],
    )


def _why_dead(facts: Facts) -> tuple[Why, str]:
    job, retries = facts.job, facts.retries
    if job.error and job.error.startswith(REFUSED) and facts.last and not facts.last.started_ms:
        return Why.REFUSED, "It was not run: no program with a key has added it as it is."
    # The last entry records that it was not run again; the entries before it tell why.
    lost = losses(job.history[:-1])
    if lost >= facts.takeovers:
        return (
            Why.POISON,
            f"Its workers died or froze {_times(lost)} in a row; the job may be killing them.",
        )
    if retries is None:
        return (
            Why.FAILED,
            f"{_failures(job).capitalize()}: it is out of retries, or its task gave up.",
        )
    if job.failures > retries:
        return (
            Why.OUT_OF_RETRIES,
            f"It is out of retries: {_failures(job)}, with {_retries(retries)} allowed.",
        )
    return (
        Why.GAVE_UP,
        f"It was not retried, although only {job.failures} of {_retries(retries)} were used: its "
        "task gave up, or does not retry this kind of error.",
    )


def _cancelled(facts: Facts) -> _Found:
    job = facts.job
    if job.error == EXPIRED:
        return _expired(facts)
    ran = f"after {_count(job.attempt, 'attempt')}" if job.attempt else "before it ran"
    reasons = [Reason(Why.CANCELLED, f"It was cancelled {ran}, by a user or by its schedule.")]
    return _Found(
        f"It was cancelled at {facts.at(job.ended_ms or facts.now_ms)} and does not run.",
        [*reasons, *_last_error(facts)],
        _NEVER,
        None,
        [Advice("To run it anyway:", facts.command("jobs", "rerun", about=job.id))],
    )


def _expired(facts: Facts) -> _Found:
    job = facts.job
    by = f"It expired: could not start by {facts.at(job.expires_ms or facts.now_ms)}."
    before = facts.job.history[:-1]
    if any(run.started_ms is not None for run in before):
        by = f"{by} It had run before, and was to run again."
    again = Advice(
        "To run it anyway, without an expiry:", facts.command("jobs", "rerun", about=job.id)
    )
    headline = f"It expired and was cancelled at {facts.at(job.ended_ms or facts.now_ms)}."
    earlier = [run.error for run in before if run.error is not None]
    reasons = [Reason(Why.EXPIRED, by)]
    if earlier:
        reasons.append(Reason(Why.LAST_ERROR, f"Error of the previous run: {earlier[-1]}"))
    return _Found(headline, reasons, _NEVER, None, [again])


# --- Further facts


def _expires(facts: Facts) -> list[Reason]:
    """Until when the job may start, if it has not."""
    job = facts.job
    if job.expires_ms is None or job.started_ms is not None:
        return []
    if job.expires_ms <= facts.now_ms:
        words = f"It expired at {facts.at(job.expires_ms)}: the next worker that has it cancels it."
    else:
        words = f"It expires at {facts.at(job.expires_ms)}: from then on it is not started."
    return [Reason(Why.EXPIRES, words)]


def _progress(job: Job) -> list[Reason]:
    if job.progress is None:
        return []
    return [Reason(Why.PROGRESS, f"Its task says how far it is: {job.progress}")]


def _last_error(facts: Facts) -> list[Reason]:
    job = facts.job
    if job.error is not None:
        return [Reason(Why.LAST_ERROR, f"Last error: {job.error}")]
    last = facts.last
    # While it runs again the error is in its history, not in the job itself.
    if job.state is State.RUNNING and last is not None and last.error is not None:
        return [Reason(Why.LAST_ERROR, f"Error of the previous run: {last.error}")]
    return []


def _left(facts: Facts) -> list[Reason]:
    """How many failures and takeovers are left before the job is dead."""
    job, retries = facts.job, facts.retries
    so_far = f"{_failures(job).capitalize()} so far" if job.failures else "No failures so far"
    if retries is None:
        words = f"{so_far}; the task decides how often it is retried."
    elif job.failures >= retries:
        words = f"{so_far}; the next failure makes it dead."
    else:
        words = f"{so_far}; {retries - job.failures} of {_retries(retries)} left."
    reasons = [Reason(Why.FAILURES_LEFT, words)]
    if lost := losses(job.history):
        left = max(facts.takeovers - lost, 0)
        words = f"Its worker was lost {_times(lost)} in a row; {left:,} more and it is dead."
        if suspect(job):
            words += " It may be killing its workers, so it runs on its own and may have to wait."
        if not left:
            words = f"Its worker was lost {_times(lost)} in a row; the next takeover makes it dead."
        reasons.append(Reason(Why.TAKEOVERS_LEFT, words))
    return reasons


def _schedule(facts: Facts) -> tuple[str, Reason] | None:
    """The schedule that added the job, by the job's id."""
    made = _TICK_ID.fullmatch(facts.job.id)
    if made is None:
        return None
    name, tick = made["name"], made["tick"]
    schedule = next((each for each in facts.schedules if each.name == name), None)
    if schedule is None:
        goes_on = "which no longer exists"
    elif schedule.paused:
        goes_on = "which is paused now"
    elif schedule.next_ms == MOVING_MS:
        goes_on = "which is being moved to another store"
    elif schedule.next_ms is None:
        goes_on = "which has no more ticks"
    else:
        goes_on = f"which ticks next at {facts.at(schedule.next_ms)}"
    words = f"Schedule {name!r}, {goes_on}, added it for its tick of {tick}."
    return name, Reason(Why.SCHEDULE, words)


# --- Words


def _failures(job: Job) -> str:
    return _count(job.failures, "failure")


def _retries(count: int) -> str:
    return "1 retry" if count == 1 else f"{count:,} retries"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _count(count: int, thing: str) -> str:
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def _some(names: Iterable[str], most: int = 5) -> str:
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
