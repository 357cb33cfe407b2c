"""A job's steps as messages: the subject of each state of a job, and the check of each step.

One message per job, which moves. Subjects, below a prefix such as `tw.default.0`:

    t.s|u.<queue>.<id>         waiting: a schedule of the server, a little ahead of the due time
    t.l|m.<queue>.<id>         running: a schedule at the end of the lease
    t.j|k.<queue>.<id>         running, with a request to its holder: to stop it or to put it back
    t.d|x|c.<queue>.<id>       done, dead, cancelled
    t.p-<queue>.<line>.<id>    parked: a schedule that never fires, so that a claim can remove it
    t.q.<queue>.%<line>        a note: there may be parked jobs in this line
    r.<queue>.<priority>.<id>  ready: the job waits and can be claimed, or its lease ran out
    k.<name>                   a schedule of ours: cron and intervals
    n.<kind>-<group>.<name>    a record; a group is how its name begins
    g.<kind>.<group>           a note: there may be records in this group
    w.<name>, b.<key>          a running worker; the state of a rate limit

What is stored under `t` is the truth, and only we write it. A ready message may also be written by
the server, at any moment, so it is only a hint: it counts while nothing is stored under `t` for its
id. Running jobs alternate between two subjects, because a schedule that fires purges whatever is
stored on its subject by then; so a parked job remembers the one that it has left. Waiting jobs that
are replaced or moved alternate, too.

Parked jobs of one queue, priority and task are a line, which only workers that know the task read.
The note of a line is written in one batch with each of its jobs, so where there is a job there is a
note. No id looks like that of a note: in a part of a subject, `%` comes only before two digits.

A server that is killed forgets what it removed a moment before: then a schedule is back that was
over, a ghost. Attempts never go back, so its content tells: see `current`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from tickwheel.duration import moment
from tickwheel.job import Job, Priority, State

# Kinds of truth, by state; a job that starts to wait or to run enters the first of two.
PARKED, DONE, DEAD, CANCELLED = "p", "d", "x", "c"
WAITING = ("s", "u")
RUNNING, ASKED = ("l", "m"), ("j", "k")
ENDED = {State.DONE: DONE, State.DEAD: DEAD, State.CANCELLED: CANCELLED}
PRIORITIES = tuple(str(int(priority)) for priority in sorted(Priority, reverse=True))

# This close to its end, a lease may already be firing by the server's clock.
CLOSE_MS = 1_000

# How long a job that may be on its way to a worker stands under `t` after it was replaced or moved.
# A ready message that is half as old is looked up before it is claimed.
HOLD_MS = 1_000

# How many bytes a claim adds to a message, in addition to a subject.
PADDING = 190

# Long after every real schedule.
NEVER = "@at 2200-01-01T00:00:00Z"

_UNSAFE = re.compile(r"[\s.*>%\x00-\x20\x7f]")

_encode = msgspec.json.encode
_decode = msgspec.json.Decoder(Job).decode


@functools.lru_cache(4096)
def subject_part(text: str) -> str:
    """The text as one part of a subject, which dots separate. Each step asks a few times for the
    same job and queue."""
    if text.isalnum():
        return text
    return _UNSAFE.sub(lambda found: "".join(f"%{each:02X}" for each in found[0].encode()), text)


class Line(NamedTuple):
    """Parked jobs that only workers that know their task can claim."""

    queue: str
    priority: int
    task: str

    @property
    def part(self) -> str:
        return f"{self.priority}-{subject_part(self.task)}"


as_line = msgspec.json.Decoder(Line).decode


def line_of(job: Job) -> Line:
    return Line(job.queue, job.priority, job.task)


class Check(msgspec.Struct, frozen=True, gc=False):
    """Store only if this is the last message of a subject, which may have wildcards."""

    subject: str
    seq: int

    @property
    def headers(self) -> str:
        return (
            f"Nats-Expected-Last-Subject-Sequence: {self.seq}\r\n"
            f"Nats-Expected-Last-Subject-Sequence-Subject: {self.subject}\r\n"
        )


class Step(msgspec.Struct, frozen=True, gc=False):
    """One message, which is stored if its check holds; it may also remove a schedule."""

    subject: str
    headers: str
    body: bytes


class Standing(msgspec.Struct, frozen=True, gc=False):
    """A job as it is stored in the stream: its subject and the sequence of its message."""

    job: Job
    subject: str
    seq: int
    # One of the kinds of truth; empty for a ready message.
    kind: str
    # The kind that a parked job has left.
    left: str = ""
    # With a ready message: what is stored under `t` and is over, ghosts or a schedule that is
    # firing.
    over: tuple[Standing, ...] = ()


class ReadyMessage(msgspec.Struct, frozen=True, gc=False):
    """A job that can be claimed, as it was delivered. It counts only while nothing is stored under
    `t` for its id."""

    standing: Standing
    ack: str
    # Whether it may have been delivered before, here or elsewhere: then it may be out of date.
    again: bool
    # The connection that delivered it, and when.
    connection: int
    at_s: float


class Layout:
    """The subjects of one stream."""

    def __init__(self, namespace: str, shard: int, ahead_ms: int) -> None:
        self.stream = f"TICKWHEEL-{namespace}-{shard}"
        self.prefix = f"tw.{namespace}.{shard}"
        # Core subjects for notifications, which are not stored: ready jobs, and cancel requests.
        self.notify = f"tw-news.{namespace}.{shard}"
        self.notify_cancel = f"tw-news.{namespace}.asked"
        self._ahead_ms = ahead_ms

    # --- Subjects

    def truth(self, id: str) -> str:
        """Where a job is stored, in any state. All checks of a job must use exactly this text: a
        cluster's leader compares the checks in flight by their text."""
        return f"{self.prefix}.t.*.*.{subject_part(id)}"

    def anywhere(self, id: str) -> str:
        """A job, or its ready message."""
        return f"{self.prefix}.*.*.*.{subject_part(id)}"

    def ready_of(self, id: str) -> str:
        """The ready message of a job."""
        return f"{self.prefix}.r.*.*.{subject_part(id)}"

    def of_kind(self, kind: str, queue: str | None) -> str:
        """All jobs of a kind; parked ones only of one queue."""
        if kind == PARKED:
            assert queue is not None
            return f"{self.prefix}.t.{PARKED}-{subject_part(queue)}.*.*"
        return f"{self.prefix}.t.{kind}.{'*' if queue is None else subject_part(queue)}.*"

    def parked(self, line: Line) -> str:
        return f"{self.prefix}.t.{PARKED}-{subject_part(line.queue)}.{line.part}.*"

    @property
    def notes(self) -> str:
        """The notes of all lines."""
        return f"{self.prefix}.t.q.*.*"

    def note_subject(self, line: Line) -> str:
        return f"{self.prefix}.t.q.{subject_part(line.queue)}.%{line.part}"

    def ready(self, queue: str | None, priority: str) -> str:
        return f"{self.prefix}.r.{'*' if queue is None else subject_part(queue)}.{priority}.*"

    def ready_subject(self, job: Job) -> str:
        """The subject of a job's ready message: always the same, so that a later one replaces an
        earlier one."""
        return f"{self.prefix}.r.{subject_part(job.queue)}.{job.priority}.{subject_part(job.id)}"

    # --- Checks

    def nowhere(self, id: str) -> Check:
        return Check(self.anywhere(id), 0)

    def only_ready(self, id: str) -> Check:
        return Check(self.truth(id), 0)

    def as_left(self, standing: Standing) -> Check:
        """Nothing has moved the job since it was read."""
        return Check(self.truth(standing.job.id), standing.seq if standing.kind else 0)

    # --- Steps

    def step(
        self,
        job: Job,
        check: Check | None,
        *,
        now_ms: int,
        drop: str = "",
        other_than: str = "",
        firing: bool = False,
        new: bool = False,
        hold_ms: int = 0,
    ) -> Step:
        """The message that stores the job, and removes the schedule that it was.

        `other_than` is the kind that a running job leaves, or has left when it was parked. `firing`
        says that the removed schedule may be about to fire: its ready message would replace ours,
        so we write a schedule instead. `new` is a job that was never claimed. A waiting job can be
        claimed after `hold_ms` at the earliest.
        """
        headers = check.headers if check else ""
        if drop:
            headers += f"Nats-Schedule-Next: purge\r\nNats-Scheduler: {drop}\r\n"
        body = _encode(job)
        if job.state.ended:
            return Step(self._truth_of(job, ENDED[job.state]), headers, body)
        target = self.ready_subject(job)
        if new:
            headers += padding(target)
        if job.parked:
            body = body[:-1] + b',"left":"%s"}' % other_than.encode()
            return Step(self._parked_of(job), headers + _never(target), body)
        if job.state is State.WAITING:
            start_ms = max(self.start_ms(job), now_ms + hold_ms) if hold_ms else self.start_ms(job)
            if start_ms <= now_ms and not firing:
                return Step(target, headers, body)
            subject = self._truth_of(job, WAITING[other_than == WAITING[0]])
            return Step(subject, headers + _schedule(start_ms, target), body)
        assert job.lease_until_ms is not None
        kinds = ASKED if job.cancel_requested or job.told else RUNNING
        subject = self._truth_of(job, kinds[other_than == kinds[0]])
        return Step(subject, headers + _schedule(job.lease_until_ms, target), body)

    def start_ms(self, job: Job) -> int:
        """When a waiting job can be claimed."""
        return job.due_ms - self._ahead_ms

    def step_from(
        self,
        standing: Standing,
        job: Job,
        *,
        now_ms: int,
        hold_ms: int = 0,
        changed: bool = False,
    ) -> Step:
        """The message that moves a job on from where it is stored. One that others have `changed`
        is never written as ready: an earlier version of it may be about to be."""
        scheduled = standing.kind and standing.kind not in ENDED.values()
        lease_ms = (standing.job.lease_until_ms or now_ms + CLOSE_MS) - now_ms
        return self.step(
            job,
            self.as_left(standing),
            now_ms=now_ms,
            drop=standing.subject if scheduled else "",
            other_than=standing.left or standing.kind,
            firing=changed or lease_ms < CLOSE_MS,
            hold_ms=hold_ms,
        )

    def revive(self, standing: Standing, job: Job, *, now_ms: int) -> list[Step]:
        """The messages that move an ended job on, for one atomic batch.

        A message can remove only a schedule, so the ended job becomes one first; if the server
        forgets the removal, its content says that it is over.
        """
        headers = self.as_left(standing).headers
        target = self.ready_subject(job)
        first = Step(standing.subject, headers + _never(target), _encode(job))
        return [first, self.step(job, None, now_ms=now_ms, drop=standing.subject)]

    def note(self, line: Line) -> Step:
        """The message that says that there are parked jobs in a line."""
        return Step(self.note_subject(line), "", _encode(line))

    def _parked_of(self, job: Job) -> str:
        return self.parked(line_of(job))[:-1] + subject_part(job.id)

    def _truth_of(self, job: Job, kind: str) -> str:
        return f"{self.prefix}.t.{kind}.{subject_part(job.queue)}.{subject_part(job.id)}"

    def lease(self, job: Job) -> Standing:
        """Where a job is stored that was ready when it was claimed, and was not moved since."""
        return Standing(job, self._truth_of(job, RUNNING[0]), job.fence, RUNNING[0])


def padding(target: str) -> str:
    """Makes the message of a new job about as large as it will be after its claim, so that its
    claim and its end find room in a full store."""
    return f"Tickwheel-Room: {'.' * (PADDING + len(target))}\r\n"


def _schedule(at_ms: int, target: str) -> str:
    second, ms = divmod(at_ms, 1000)
    at = f"{_second(second)}.{ms:03}Z"
    return f"Nats-Schedule: @at {at}\r\nNats-Schedule-Target: {target}\r\n"


def _never(target: str) -> str:
    """A schedule, because nothing else can be removed by the message that moves the job on."""
    return f"Nats-Schedule: {NEVER}\r\nNats-Schedule-Target: {target}\r\n"


@functools.lru_cache(64)
def _second(second: int) -> str:
    """A second as text. The leases of a batch all end in the same second."""
    return moment(second * 1000).isoformat()[:19]


class _Left(msgspec.Struct):
    """What the message of a parked job has in addition to the job."""

    left: str = ""


_left = msgspec.json.Decoder(_Left).decode


def standing(subject: str, seq: int, body: bytes) -> Standing:
    """The job in a message of the stream."""
    found = standing_of(_decode(body), subject, seq)
    if found.kind == PARKED:
        return msgspec.structs.replace(found, left=_left(body).left)
    if found.job.fence == 0 and found.kind in RUNNING:
        # A claim is written before its sequence is known; that is its fence.
        job = msgspec.structs.replace(found.job, fence=seq)
        return msgspec.structs.replace(found, job=job)
    return found


def standing_of(job: Job, subject: str, seq: int) -> Standing:
    _, side, kind, _, _ = subject.rsplit(".", 4)
    kind = PARKED if kind.startswith(f"{PARKED}-") else kind
    return Standing(job, subject, seq, kind if side == "t" else "")


def current(found: Iterable[Standing]) -> Standing:
    """Which of the messages of one job counts: the last one under `t`, unless a later ready message
    says that it is over."""
    messages = sorted(found, key=lambda each: each.seq)
    truth = [each for each in messages if each.kind]
    ready = [each for each in messages if not each.kind]
    if not truth:
        return ready[-1]
    if ready and _is_over(truth[-1], ready[-1]):
        return msgspec.structs.replace(ready[-1], over=tuple(truth))
    return truth[-1]


def _is_over(truth: Standing, ready: Standing) -> bool:
    """Whether what is stored under `t` is firing, or is a ghost. If the ready message is behind it
    in the job's life, a ghost has written that."""
    earlier = _stage(truth.job) <= _stage(ready.job)
    return earlier and truth.seq < ready.seq and not truth.job.state.ended


def _stage(job: Job) -> tuple[int, int, bool, int, bool]:
    """How far a job that has not ended has come in its life."""
    waits = job.state is State.WAITING
    return job.attempt, version(job), waits, job.lease_until_ms or 0, job.cancel_requested


def version(job: Job) -> int:
    """How often others have changed the job."""
    return 0 if job.changes is None else job.changes.count
