"""A job's steps as messages: where each state of a job stands in the stream, and what guards it.

One message per job, which moves. Subjects, below a prefix such as `tw.default.0`:

    t.s.<queue>.<id>           waiting: a schedule of the server's, due a little ahead of the job
    t.l|m.<queue>.<id>         running: a schedule at the end of the lease
    t.j|k.<queue>.<id>         running, and asked to stop
    t.d|x|c.<queue>.<id>       done, dead, cancelled
    r.<queue>.<priority>.<id>  a token: the job waits and can be claimed, or its lease ran out
    k.<name>                   a schedule of ours: cron and intervals
    w.<name>, b.<key>          a worker that lives; a token bucket

What stands under `t` is the truth, and we alone write it. A token may also be written by the
server, at any moment, so it is only a hint: it counts while nothing stands under `t` for its id.
Running jobs alternate between two subjects, because a schedule that fires purges whatever stands on
its subject by then.
"""

from __future__ import annotations

import functools
import re
from urllib.parse import unquote

import msgspec

from tickwheel.job import Job, Priority, State
from tickwheel.span import moment

# Kinds of truth, by state; the first is the one that a job enters.
WAITING, DONE, DEAD, CANCELLED = "s", "d", "x", "c"
RUNNING, ASKED = ("l", "m"), ("j", "k")
ENDED = {State.DONE: DONE, State.DEAD: DEAD, State.CANCELLED: CANCELLED}
PRIORITIES = tuple(str(int(priority)) for priority in sorted(Priority, reverse=True))

# This close to its end a lease may already be firing, by the server's clock.
CLOSE_MS = 1_000

# Long after every schedule that anybody meant.
NEVER = "@at 2200-01-01T00:00:00Z"

_UNSAFE = re.compile(r"[\s.*>%\x00-\x20\x7f]")

_encode = msgspec.json.encode
_decode = msgspec.json.Decoder(Job).decode


def token(text: str) -> str:
    """The text as one token of a subject."""
    return text if text.isalnum() else _escaped(text)


@functools.lru_cache(4096)
def _escaped(text: str) -> str:
    return _UNSAFE.sub(lambda found: "".join(f"%{each:02X}" for each in found[0].encode()), text)


def untoken(text: str) -> str:
    return unquote(text)


class Check(msgspec.Struct, frozen=True, gc=False):
    """Go ahead only if the last message under a subject, which may hold wildcards, is this one."""

    subject: str
    seq: int

    @property
    def headers(self) -> str:
        return (
            f"Nats-Expected-Last-Subject-Sequence: {self.seq}\r\n"
            f"Nats-Expected-Last-Subject-Sequence-Subject: {self.subject}\r\n"
        )


class Step(msgspec.Struct, frozen=True, gc=False):
    """One message: it is stored if its check holds, and drops a schedule as it is."""

    subject: str
    headers: str
    body: bytes


class Standing(msgspec.Struct, frozen=True, gc=False):
    """A job as it stands in the stream: under which subject, and as which message."""

    job: Job
    subject: str
    seq: int
    # One of the kinds of truth; empty where there is only a token.
    kind: str


class Layout:
    """The subjects of one stream."""

    def __init__(self, namespace: str, shard: int, ahead_ms: int) -> None:
        self.stream = f"TICKWHEEL-{namespace}-{shard}"
        self.prefix = f"tw.{namespace}.{shard}"
        # Core subjects: what became ready, and who was asked to stop. Nothing of it is stored.
        self.news = f"tw-news.{namespace}.{shard}"
        self.asked = f"tw-news.{namespace}.asked"
        self._ahead_ms = ahead_ms

    # --- Subjects

    def truth(self, id: str) -> str:
        """Where a job stands, whatever its state. Every check on a live job uses this very text:
        a cluster's leader tells checks that are under way apart by their text."""
        return f"{self.prefix}.t.*.*.{token(id)}"

    def anywhere(self, id: str) -> str:
        """A job or its token."""
        return f"{self.prefix}.*.*.*.{token(id)}"

    def ready_of(self, id: str) -> str:
        """The token of a job."""
        return f"{self.prefix}.r.*.*.{token(id)}"

    def of_kind(self, kind: str, queue: str | None) -> str:
        return f"{self.prefix}.t.{kind}.{'*' if queue is None else token(queue)}.*"

    def ready(self, queue: str | None, priority: str) -> str:
        return f"{self.prefix}.r.{'*' if queue is None else token(queue)}.{priority}.*"

    def token_of(self, job: Job) -> str:
        """One subject, whoever writes to it: a later token takes the place of an earlier one."""
        return f"{self.prefix}.r.{token(job.queue)}.{job.priority}.{token(job.id)}"

    # --- Checks

    def nowhere(self, id: str) -> Check:
        return Check(self.anywhere(id), 0)

    def only_a_token(self, id: str) -> Check:
        return Check(self.truth(id), 0)

    def as_left(self, standing: Standing) -> Check:
        """Nothing has moved the job since it was seen."""
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
    ) -> Step:
        """The message that makes the job stand as it is, and drops the schedule it stood as.

        `other_than` is the kind that a running job leaves. `firing` says that the dropped schedule
        may be about to fire: its token would take the place of ours, so we leave none alone.
        """
        headers = check.headers if check else ""
        if drop:
            headers += f"Nats-Schedule-Next: purge\r\nNats-Scheduler: {drop}\r\n"
        body = _encode(job)
        if job.state.ended:
            return Step(self._truth_of(job, ENDED[job.state]), headers, body)
        target = self.token_of(job)
        if job.state is State.WAITING:
            start_ms = job.due_ms - self._ahead_ms
            if start_ms <= now_ms and not firing:
                return Step(target, headers, body)
            subject = self._truth_of(job, WAITING)
            return Step(subject, headers + _schedule(start_ms, target), body)
        assert job.lease_until_ms is not None
        kinds = ASKED if job.asked else RUNNING
        subject = self._truth_of(job, kinds[other_than == kinds[0]])
        return Step(subject, headers + _schedule(job.lease_until_ms, target), body)

    def step_from(self, standing: Standing, job: Job, *, now_ms: int) -> Step:
        """The message that moves a job on from where it stands."""
        scheduled = standing.kind and standing.kind not in ENDED.values()
        lease_ms = (standing.job.lease_until_ms or now_ms + CLOSE_MS) - now_ms
        return self.step(
            job,
            self.as_left(standing),
            now_ms=now_ms,
            drop=standing.subject if scheduled else "",
            other_than=standing.kind,
            firing=lease_ms < CLOSE_MS,
        )

    def revive(self, standing: Standing, job: Job, *, now_ms: int) -> list[Step]:
        """The messages that move an ended job on, for one atomic batch.

        Only a schedule can be dropped by a message, so the ended job becomes one first.
        """
        headers = self.as_left(standing).headers
        target = self.token_of(job)
        headers += f"Nats-Schedule: {NEVER}\r\nNats-Schedule-Target: {target}\r\n"
        first = Step(standing.subject, headers, _encode(standing.job))
        return [first, self.step(job, None, now_ms=now_ms, drop=standing.subject)]

    def _truth_of(self, job: Job, kind: str) -> str:
        return f"{self.prefix}.t.{kind}.{token(job.queue)}.{token(job.id)}"

    def lease(self, job: Job) -> Standing:
        """Where a job that was claimed, and not moved since, stands."""
        return Standing(job, self._truth_of(job, RUNNING[0]), job.fence, RUNNING[0])


def _schedule(at_ms: int, target: str) -> str:
    second, ms = divmod(at_ms, 1000)
    at = f"{_second(second)}.{ms:03}Z"
    return f"Nats-Schedule: @at {at}\r\nNats-Schedule-Target: {target}\r\n"


@functools.lru_cache(64)
def _second(second: int) -> str:
    """A second as text; the leases of a batch all end in the same one."""
    return moment(second * 1000).isoformat()[:19]


def standing(subject: str, seq: int, body: bytes) -> Standing:
    """What a message of the stream says of its job."""
    _, side, kind, _, _ = subject.rsplit(".", 4)
    job = _decode(body)
    if side != "t":
        return Standing(job, subject, seq, "")
    if job.fence == 0 and kind in RUNNING:
        # A claim is written before its sequence is known; that is its fence.
        job = msgspec.structs.replace(job, fence=seq)
    return Standing(job, subject, seq, kind)
