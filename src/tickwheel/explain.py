"""Why a job stands where it stands: facts in, findings in plain words out. Pure.

Each finding has a code that never changes its meaning, for programs, and words for people.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tickwheel.job import Job, Outcome, Run, State, held, losses, suspect
from tickwheel.schedule import MOVING_MS, Schedule
from tickwheel.span import moment, span_text
from tickwheel.store import QueueInfo, WorkerInfo

# A job that is due longer than this, with free slots around, is not just on its way.
ON_ITS_WAY_MS = 10_000

# `name@2026-01-31T02:00:00Z`: the id of a schedule's job.
_TICK_ID = re.compile(r"(?P<name>.+)@(?P<tick>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{3})?Z)")


class Why(StrEnum):
    """What was found. Programs rely on these words."""

    # Why it waits
    NOT_DUE = "not_due"
    RETRY = "retry"
    SNOOZED = "snoozed"
    RELEASED = "released"
    QUEUE_PAUSED = "queue_paused"
    NO_WORKER = "no_worker"
    NO_SLOT = "no_slot"
    ON_ITS_WAY = "on_its_way"
    OVERLOOKED = "overlooked"
    # Who has it
    HELD = "held"
    HOLDER_GONE = "holder_gone"
    LEASE_RAN_OUT = "lease_ran_out"
    ASKED = "asked"
    # How it ended
    DONE = "done"
    NO_RESULT = "no_result"
    OUT_OF_RETRIES = "out_of_retries"
    GAVE_UP = "gave_up"
    FAILED = "failed"
    POISON = "poison"
    CANCELLED = "cancelled"
    # What else there is to know
    LAST_ERROR = "last_error"
    LAST_RUN = "last_run"
    FAILURES_LEFT = "failures_left"
    TAKEOVERS_LEFT = "takeovers_left"
    SCHEDULE = "schedule"


# What keeps a job from running, and when it does so no longer.
_BLOCKING = {
    Why.QUEUE_PAUSED: "once the queue is resumed",
    Why.NO_WORKER: "once a worker serves the queue",
    Why.NO_SLOT: "once a slot is free",
}


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that was found."""

    why: Why
    words: str


@dataclass(frozen=True, slots=True)
class Advice:
    """What an operator can do now; the command, where there is one, as a shell reads it."""

    words: str
    command: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A job in plain words."""

    headline: str
    reasons: tuple[Reason, ...]
    # The earliest moment at which it starts or is taken over; not even then where it is blocked.
    runs_ms: int | None
    blocked: bool
    when: str
    advice: tuple[Advice, ...]
    # The schedule that made it, where one did.
    schedule: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A job, and what is known of its surroundings at one moment."""

    job: Job
    # Its queue; None where the store has none of that name.
    queue: QueueInfo | None
    # The workers that live.
    workers: Sequence[WorkerInfo]
    schedules: Sequence[Schedule]
    now_ms: int
    # How often its workers may die before the job is dead.
    takeovers: int
    # How often its task is retried, where the app is known.
    task_retries: int | None = None
    # What a command needs to find the same store: ["--store", "sqlite:///jobs.db"].
    where: Sequence[str] = ()
    # The app, as a worker is started with.
    app: str = "MODULE:APP"

    @property
    def retries(self) -> int | None:
        return self.task_retries if self.job.retries is None else self.job.retries

    @property
    def serving(self) -> list[WorkerInfo]:
        return [worker for worker in self.workers if self.job.queue in worker.queues]

    @property
    def holder(self) -> WorkerInfo | None:
        return next((each for each in self.workers if each.name == self.job.worker), None)

    @property
    def last(self) -> Run | None:
        return self.job.history[-1] if self.job.history else None

    def at(self, ms: int) -> str:
        """'2026-01-31 09:30:00Z, in 29m'."""
        return f"{moment(ms):%Y-%m-%d %H:%M:%S}Z, {self.away(ms)}"

    def away(self, ms: int) -> str:
        whole_ms = abs(ms - self.now_ms) // 1000 * 1000
        if not whole_ms:
            return "just now"
        return f"in {span_text(whole_ms)}" if ms > self.now_ms else f"{span_text(whole_ms)} ago"

    def command(self, *words: str) -> str:
        return shlex.join(["tickwheel", *words, *self.where])


def explain(facts: Facts) -> Explanation:
    """Why the job waits, who holds it, how it ended; when it runs, and what can be done."""
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
    """What one state's explanation is gathered in."""

    headline: str
    reasons: list[Reason]
    when: str
    runs_ms: int | None = None
    advice: list[Advice] = field(default_factory=list)


# --- Waiting


def _waiting(facts: Facts) -> _Found:
    job = facts.job
    due = job.due_ms <= facts.now_ms
    hindrances, advice = _hindrances(facts, due_ms=job.due_ms)
    reasons = [*_why_again(facts), *hindrances]
    if not due:
        reasons.insert(0, Reason(Why.NOT_DUE, f"It is not due before {facts.at(job.due_ms)}."))
    cancel = Advice("To stop it for good:", facts.command("jobs", "cancel", job.id))
    return _Found(
        _why_it_waits(facts, due, hindrances),
        [*reasons, *_last_error(facts), *_left(facts)],
        _when(facts, job.due_ms, hindrances),
        max(job.due_ms, facts.now_ms),
        [*advice, cancel],
    )


_HEADLINES = {
    Why.QUEUE_PAUSED: "its queue is paused",
    Why.NO_WORKER: "no worker that lives serves its queue",
    Why.NO_SLOT: "all slots of its queue's workers are taken",
    Why.ON_ITS_WAY: "a worker takes it in a moment",
    Why.OVERLOOKED: "workers have room, but none has taken it",
}


def _why_it_waits(facts: Facts, due: bool, hindrances: Sequence[Reason]) -> str:
    job = facts.job
    if due:
        late = span_text((facts.now_ms - job.due_ms) // 1000 * 1000)
        return f"It waits and is due, for {late} now: {_HEADLINES[hindrances[0].why]}."
    first = f"It waits: due {facts.away(job.due_ms)}"
    if _retrying(facts):
        first = f"It waits for {_retry_number(facts)}, {facts.away(job.due_ms)}"
    blocked = [_HEADLINES[each.why] for each in hindrances]
    return f"{first}; but {blocked[0]}." if blocked else f"{first}."


def _hindrances(facts: Facts, *, due_ms: int) -> tuple[list[Reason], list[Advice]]:
    """What keeps the job from being handed out once it may be, the strongest first."""
    job = facts.job
    reasons: list[Reason] = []
    advice: list[Advice] = []
    if facts.queue is not None and facts.queue.paused:
        reasons.append(
            Reason(Why.QUEUE_PAUSED, f"The queue {job.queue!r} is paused: it hands out no jobs.")
        )
        advice.append(
            Advice("To hand out jobs again:", facts.command("queues", "resume", job.queue))
        )
    if not facts.serving:
        reasons.append(Reason(Why.NO_WORKER, _no_worker(facts)))
        start = shlex.join(["tickwheel", "worker", facts.app, "--queues", job.queue])
        advice.append(Advice("To start a worker for it:", start))
    if reasons or due_ms > facts.now_ms:
        return reasons, advice
    return _on_its_way(facts, due_ms)


def _no_worker(facts: Facts) -> str:
    if not facts.workers:
        return "No worker lives."
    served = _some(sorted({queue for worker in facts.workers for queue in worker.queues}))
    queue, count = facts.job.queue, len(facts.workers)
    if count == 1:
        return f"The one worker that lives does not serve the queue {queue!r}, but {served}."
    return f"None of the {count:,} workers that live serves the queue {queue!r}, but {served}."


def _on_its_way(facts: Facts, since_ms: int) -> tuple[list[Reason], list[Advice]]:
    """Nothing forbids it: are there free slots?"""
    serving = facts.serving
    slots = sum(worker.concurrency for worker in serving)
    running = sum(worker.running for worker in serving)
    workers = _count(len(serving), "worker")
    seen = facts.away(max(worker.seen_ms for worker in serving))
    if all(worker.running >= worker.concurrency for worker in serving):
        words = (
            f"Its queue is served by {workers} with {_count(slots, 'slot')}, and all are taken, "
            f"as last heard {seen}.{_in_front(facts)}"
        )
        start = shlex.join(["tickwheel", "worker", facts.app, "--queues", facts.job.queue])
        return [Reason(Why.NO_SLOT, words)], [Advice("To add slots, start a worker:", start)]
    free = f"{slots - running} of {_count(slots, 'slot')} free at {workers}, as last heard {seen}"
    if facts.now_ms - since_ms <= ON_ITS_WAY_MS:
        return [Reason(Why.ON_ITS_WAY, f"A worker takes it in a moment: {free}.")], []
    words = f"It should have been taken: {free}.{_in_front(facts)}"
    return (
        [Reason(Why.OVERLOOKED, words)],
        [
            Advice(
                "See whether the workers have lost the store: read their logs, and look at",
                facts.command("workers"),
            )
        ],
    )


def _in_front(facts: Facts) -> str:
    if facts.queue is None or facts.queue.waiting < 2:
        return ""
    return (
        f" {facts.queue.waiting:,} jobs wait in its queue; "
        "those of higher priority, and those that were due before, go first."
    )


def _why_again(facts: Facts) -> list[Reason]:
    """Why a job that ran before waits again."""
    last = facts.last
    if last is None:
        return []
    when, by = facts.away(last.ended_ms), last.worker
    if _retrying(facts):
        return [Reason(Why.RETRY, f"It failed {when}; {_retry_number(facts)} is to come.")]
    if last.outcome is Outcome.SNOOZE:
        return [Reason(Why.SNOOZED, f"Its task asked, {when}, to run later.")]
    if last.outcome is Outcome.RELEASE:
        return [Reason(Why.RELEASED, f"The worker {by} had it and handed it back, {when}.")]
    return []


def _retrying(facts: Facts) -> bool:
    # After a rerun the last run is still known, but its failures no longer count.
    last = facts.last
    return last is not None and last.outcome is Outcome.RETRY and facts.job.failures > 0


def _retry_number(facts: Facts) -> str:
    allowed = "" if facts.retries is None else f" of {facts.retries:,}"
    return f"retry {facts.job.failures:,}{allowed}"


def _when(facts: Facts, ms: int, hindrances: Sequence[Reason]) -> str:
    needed = [_BLOCKING[each.why] for each in hindrances if each.why in _BLOCKING]
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
        found = _held_by_none_that_lives(facts)
    else:
        found = _held(facts, facts.holder)
    if not job.asked:
        found.advice.append(Advice("To stop it:", facts.command("jobs", "cancel", job.id)))
    found.reasons += [*_last_error(facts), *_left(facts)]
    return found


def _held(facts: Facts, holder: WorkerInfo) -> _Found:
    job = facts.job
    early = job.due_ms > facts.now_ms
    reasons = [Reason(Why.HELD, _holding(facts, holder))]
    headline = f"The worker {holder.name} has it, and runs it."
    if early:
        headline = f"The worker {holder.name} holds it, to start it {facts.away(job.due_ms)}."
    elif holder.held > holder.running >= holder.concurrency:
        words = (
            f"All of that worker's {_count(holder.concurrency, 'slot')} are taken. If not by this "
            "job, it waits there for a moment, and then goes back."
        )
        reasons.append(Reason(Why.NO_SLOT, words))
        headline = f"The worker {holder.name} has it."
    if job.asked:
        headline = f"It was asked to stop; the worker {holder.name} still has it."
        reasons.insert(0, Reason(Why.ASKED, _ASKED))
    if early:
        return _Found(headline, reasons, f"at {facts.at(job.due_ms)}", job.due_ms)
    return _Found(headline, reasons, "now")


_ASKED = (
    "It was asked to stop, and its worker is told at once. An async task is interrupted; a thread "
    "can only look at `stopping`, or finish. It does not run again."
)


def _holding(facts: Facts, holder: WorkerInfo) -> str:
    job = facts.job
    until = facts.at(job.lease_until_ms or 0)
    return (
        f"{holder.name} (pid {holder.pid} on {holder.host}, heard of {facts.away(holder.seen_ms)}) "
        f"has it, as attempt {job.attempt}. Its lease runs until {until}, and is made longer while "
        "the worker lives; if it dies, another one takes over then."
    )


def _held_by_none_that_lives(facts: Facts) -> _Found:
    job = facts.job
    until_ms = job.lease_until_ms or 0
    gone = (
        f"{job.worker} was not heard of lately: it died, froze or lost the store. Its lease on the "
        f"job runs until {facts.at(until_ms)}; then another worker takes over."
    )
    headline = f"Its worker {job.worker} is gone: others take over {facts.away(until_ms)}."
    return _taken_over(facts, Reason(Why.HOLDER_GONE, gone), headline)


def _lost(facts: Facts) -> _Found:
    job = facts.job
    gone = "which still lives but lost it" if facts.holder else "which is gone"
    words = f"The lease of {job.worker}, {gone}, ran out {facts.at(job.lease_until_ms or 0)}."
    headline = f"Its worker {job.worker} lost it: it waits to be taken over."
    return _taken_over(facts, Reason(Why.LEASE_RAN_OUT, words), headline)


def _taken_over(facts: Facts, gone: Reason, headline: str) -> _Found:
    """What comes when the lease has run out."""
    from_ms = facts.job.lease_until_ms or 0
    hindrances, advice = _hindrances(facts, due_ms=from_ms)
    if facts.job.asked:
        words = "It was asked to stop: whoever would take it over cancels it."
        headline = "It was asked to stop, and its worker is lost: it does not run again."
        return _Found(headline, [Reason(Why.ASKED, words), gone], _NEVER)
    when = _when(facts, from_ms, hindrances)
    return _Found(headline, [gone, *hindrances], when, max(from_ms, facts.now_ms), advice)


# --- Ended

_NEVER = "not again by itself"


def _done(facts: Facts) -> _Found:
    job = facts.job
    reasons = [Reason(Why.DONE, f"{_ran(facts)}{_after_failures(job)}.")]
    if job.error is not None:
        reasons.append(Reason(Why.NO_RESULT, f"Its result could not be kept: {job.error}"))
    again = Advice("To run it once more:", facts.command("jobs", "rerun", job.id))
    headline = f"It is done, since {facts.at(job.ended_ms or facts.now_ms)}."
    return _Found(headline, reasons, _NEVER, None, [again])


def _ran(facts: Facts) -> str:
    last = facts.last
    if last is None or last.started_ms is None:
        return f"{facts.job.worker} ran it"
    late = span_text(max(last.started_ms - last.due_ms, 0))
    took = span_text(max(last.ended_ms - last.started_ms, 0))
    return f"{last.worker} started it {late} after it was due, and took {took}"


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
        reasons.append(Reason(Why.LAST_RUN, f"The last time, {_ran(facts)}."))
    return _Found(
        f"It is dead, since {facts.at(job.ended_ms or facts.now_ms)}: it waits for a person.",
        reasons,
        _NEVER,
        None,
        [
            Advice(
                "When the cause is mended, to run it again with all its retries:",
                facts.command("jobs", "rerun", job.id),
            ),
            Advice("To see every run:", facts.command("jobs", "show", job.id)),
            Advice("To forget it:", facts.command("dead", "delete", job.id)),
        ],
    )


def _why_dead(facts: Facts) -> tuple[Why, str]:
    job, retries = facts.job, facts.retries
    # The last entry says that it was not run again; what came before it says why.
    lost = losses(job.history[:-1])
    if lost >= facts.takeovers:
        return (
            Why.POISON,
            f"Its workers died or froze {_times(lost)} in a row: it may well be what kills them.",
        )
    if retries is None:
        return (
            Why.FAILED,
            f"{_failures(job).capitalize()}: all that its task allows, or its task gave up.",
        )
    if job.failures > retries:
        return (
            Why.OUT_OF_RETRIES,
            f"It is out of retries: {_failures(job)}, with {_retries(retries)} allowed.",
        )
    return (
        Why.GAVE_UP,
        f"It was not tried again, though {job.failures} of {_retries(retries)} were used: its task "
        "gave up, or is not to be retried after such an error.",
    )


def _cancelled(facts: Facts) -> _Found:
    job = facts.job
    ran = f"after {_count(job.attempt, 'attempt')}" if job.attempt else "before it ever ran"
    reasons = [Reason(Why.CANCELLED, f"Somebody, or its schedule, cancelled it {ran}.")]
    return _Found(
        f"It was cancelled, {facts.at(job.ended_ms or facts.now_ms)}: it does not run.",
        [*reasons, *_last_error(facts)],
        _NEVER,
        None,
        [Advice("To run it after all:", facts.command("jobs", "rerun", job.id))],
    )


# --- What else there is to know


def _last_error(facts: Facts) -> list[Reason]:
    job = facts.job
    if job.error is not None:
        return [Reason(Why.LAST_ERROR, f"Its last error: {job.error}")]
    last = facts.last
    # While it runs again the job itself has no error; its history has.
    if job.state is State.RUNNING and last is not None and last.error is not None:
        return [Reason(Why.LAST_ERROR, f"The error of the run before: {last.error}")]
    return []


def _left(facts: Facts) -> list[Reason]:
    """How much may still go wrong before the job is dead."""
    job, retries = facts.job, facts.retries
    so_far = f"{_failures(job).capitalize()} so far" if job.failures else "It has not failed so far"
    if retries is None:
        words = f"{so_far}; it is retried as often as its task says."
    elif job.failures >= retries:
        words = f"{so_far}: at the next failure it is dead."
    else:
        words = f"{so_far}; {retries - job.failures} of {_retries(retries)} left."
    reasons = [Reason(Why.FAILURES_LEFT, words)]
    if lost := losses(job.history):
        left = max(facts.takeovers - lost, 0)
        words = f"Its worker was lost {_times(lost)} in a row; {_times(left)} more, and it is dead."
        if suspect(job):
            words += " It may be what kills its workers, so it runs apart and may have to wait."
        if not left:
            words = f"Its worker was lost {_times(lost)} in a row: the next one settles it dead."
        reasons.append(Reason(Why.TAKEOVERS_LEFT, words))
    return reasons


def _schedule(facts: Facts) -> tuple[str, Reason] | None:
    """The schedule that made the job, by the job's id."""
    made = _TICK_ID.fullmatch(facts.job.id)
    if made is None:
        return None
    name, tick = made["name"], made["tick"]
    schedule = next((each for each in facts.schedules if each.name == name), None)
    if schedule is None:
        goes_on = "which is no longer there"
    elif schedule.paused:
        goes_on = "which is paused now"
    elif schedule.next_ms == MOVING_MS:
        goes_on = "which is on its way to another store"
    elif schedule.next_ms is None:
        goes_on = "which has no more ticks"
    else:
        goes_on = f"which ticks next at {facts.at(schedule.next_ms)}"
    words = f"The schedule {name!r}, {goes_on}, made it for its tick of {tick}."
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
