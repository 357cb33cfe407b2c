"""One JetStream stream: how steps are stored, jobs read, tokens pulled and consumers kept.

It knows the server's API and its answers; what the steps mean is in `steps`.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import re
import secrets
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from tickwheel.batch import BATCH_BYTES as REPLY_BYTES
from tickwheel.errors import StoreError, StoreIncompatible, StoreUnavailable, UsageError
from tickwheel.stores.nats import steps
from tickwheel.stores.nats.steps import Layout, Standing, Step
from tickwheel.stores.nats.wire import (
    Message,
    Wire,
    delivered,
    header,
    publish_line,
    status,
)

# One atomic batch: as many messages as the server takes, because each batch has its fixed cost; and
# no more bytes than both sides can hold.
BATCH = 1000
BATCH_BYTES = 8 * 1024 * 1024
# What one read may ask for, and what its answer may weigh. Of the leader so many jobs are asked for
# first; the more of them fit, the more the next time.
READ_MOST = 400
READ_BYTES = REPLY_BYTES
READ_FIRST = 16
# What a delivered message has beside its content: subjects, as long as the server takes them.
SUBJECT_BYTES = 8 * 1024
# A job that moves while it is looked up can be missed: it is looked up again.
LOOKS = 4
LOOK_AGAIN_S = 0.005
# How long a token may be on its way from delivery to claim. Not the lease, which is a schedule.
ACK_WAIT_S = 10
# The stream's own format; a later release may raise it.
SCHEMA = 1
OLDEST_SERVER = (2, 15)
# "wrong last sequence": somebody was quicker.
REFUSED = (10071, 10164)
NOT_FOUND = (10037, 10059, 10014)

_SAFE = re.compile(r"[A-Za-z0-9_]{1,64}")


class Token(msgspec.Struct, frozen=True, gc=False):
    """A ready job as it was delivered; it counts only while nothing else stands for its id."""

    standing: Standing
    ack: str
    # The schedule that wrote it; it goes a moment after its token comes.
    scheduler: str
    # Whether it was delivered before: then it may be out of date.
    again: bool


class Stream:
    """A stream, by its layout, over a connection that somebody else keeps."""

    def __init__(
        self, wire: Wire, layout: Layout, *, replicas: int | None, shards: int, singly: bool
    ) -> None:
        self._wire = wire
        self._layout = layout
        self._name = layout.stream
        self._shards = shards
        # Whether many steps go one by one. A batch costs more, but has one fsync for all of them.
        self._singly = singly
        # What was asked for; None leaves the stream as it is, and makes a new one with one.
        self._asked = replicas
        self._replicas = replicas or 1
        # Queues and priorities of which it is known that they have a consumer.
        self._sources: set[tuple[str, str]] = set()

    # --- The server's API

    async def api(self, subject: str, wish: Any = None) -> dict[str, Any]:
        """Ask, and give the answer, which may be an error: see `_must`."""
        data = b"" if wish is None else msgspec.json.encode(wish)
        answer = await self._wire.request(f"$JS.API.{subject}", data)
        if status(answer) == 503:
            raise StoreUnavailable(
                "JetStream does not answer: it is off, this account has none, or it has no leader"
            )
        found: dict[str, Any] = msgspec.json.decode(answer.data)
        return found

    async def info(self) -> dict[str, Any]:
        return _must(await self.api(f"STREAM.INFO.{self._name}"))

    # --- Making it what we need

    def config(self) -> dict[str, Any]:
        """The stream that the steps rest on."""
        layout = self._layout
        return {
            "name": self._name,
            "subjects": [f"{layout.prefix}.>"],
            "retention": "workqueue",
            "storage": "file",
            "discard": "old",
            "max_msgs_per_subject": 1,
            "num_replicas": self._replicas,
            "allow_direct": True,
            "allow_atomic": True,
            "allow_msg_schedules": True,
            "allow_msg_ttl": True,
            "allow_rollup_hdrs": True,
            "republish": {
                "src": f"{layout.prefix}.r.>",
                "dest": f"{layout.news}.r.>",
                "headers_only": True,
            },
            "metadata": {"tickwheel-schema": str(SCHEMA), "tickwheel-shards": str(self._shards)},
        }

    async def ensure(self) -> None:
        """Create the stream or bring it up to date; refuse a server or a schema that won't do."""
        _refuse_old(self._wire.info.get("version", "0"))
        self._sources.clear()
        found = await self.api(f"STREAM.INFO.{self._name}")
        if _code(found) in NOT_FOUND:
            _must(await self.api(f"STREAM.CREATE.{self._name}", self.config()))
            await self._prove()
            return
        stored = _must(found)["config"]
        if self._asked is None:
            self._replicas = stored["num_replicas"]
        schema = int(stored.get("metadata", {}).get("tickwheel-schema", 0))
        if schema > SCHEMA:
            raise StoreIncompatible(
                f"stream {self._name} has schema {schema}, this release knows {SCHEMA}: "
                "upgrade tickwheel"
            )
        shards = stored["metadata"].get("tickwheel-shards", str(self._shards))
        if shards != str(self._shards):
            raise StoreIncompatible(
                f"this namespace has shards={shards}, the URL says {self._shards}: their number "
                "is fixed once jobs are there; tickwheel migrate-jobs moves them to another one"
            )
        if drift(self.config(), stored):
            _must(await self.api(f"STREAM.UPDATE.{self._name}", stored | self.config()))
        await self._prove()

    async def _prove(self) -> None:
        """See that the server does the two things that every step rests on.

        Wildcards in the subject of a check; and a check, a schedule of its own and the drop of
        another one in a single message.
        """
        prefix, id = self._layout.prefix, f"probe{secrets.token_hex(8)}"
        target = f"{prefix}.p.target.q.{id}"
        check = steps.Check(f"{prefix}.p.*.*.{id}", 0)
        # Gone by themselves after a second.
        never = (
            f"Nats-TTL: 1s\r\nNats-Schedule: {steps.NEVER}\r\nNats-Schedule-Target: {target}\r\n"
        )
        first = Step(f"{prefix}.p.a.q.{id}", check.headers + never, b"")
        seq = await self.store([first])
        refused = await self.store([first])
        if seq is None or refused is not None:
            raise StoreIncompatible("this NATS server ignores wildcards in checks")
        check = steps.Check(check.subject, seq)
        drop = f"Nats-Schedule-Next: purge\r\nNats-Scheduler: {first.subject}\r\n"
        moved = await self.store([Step(f"{prefix}.p.b.q.{id}", check.headers + drop + never, b"")])
        if moved is None or await self.leader_last(first.subject):
            raise StoreIncompatible("this NATS server can't move a schedule in one message")

    async def stranded(self, queue: str, names: Iterable[str]) -> list[str]:
        """Priorities of a queue that have tokens and, by these names, no consumer."""
        known = set(names)
        return [
            priority
            for priority in steps.PRIORITIES
            if consumer_name(queue, f"r{priority}") not in known
            and (await self.page(self._layout.ready(queue, priority), from_seq=1, limit=1))[0]
        ]

    # --- Storing

    async def put(self, groups: Sequence[Sequence[Step]]) -> list[int | None]:
        """Store groups of steps, each whole or not at all; gives the sequence of the last step of
        each, or None where it was refused: for a check of its own, or of another group that was
        stored in the same batch."""
        if self._singly and len(groups) > 1 and all(len(group) == 1 for group in groups):
            return await self._store_singly([group[0] for group in groups])
        last = await self.store([step for group in groups for step in group])
        if last is None:
            return [None] * len(groups)
        ends = itertools.accumulate(map(len, groups))
        first = last - sum(map(len, groups))
        return [first + end for end in ends]

    async def store(self, messages: Sequence[Step]) -> int | None:
        """Store all of these or none; gives the last one's sequence, None where a check did not
        hold. Those of the others come right before it."""
        self.refuse_large(messages)
        if len(messages) == 1:
            [only] = messages
            answer = await self._wire.request(only.subject, only.body, only.headers)
        else:
            batch = secrets.token_hex(11)
            [answer] = await self._wire.exchange(lambda reply: _batch(messages, batch, reply))
        return self._stored(answer)

    async def _store_singly(self, messages: Sequence[Step]) -> list[int | None]:
        """Store each of these for itself, all under way at the same time."""
        self.refuse_large(messages)
        left = len(messages)

        def last(_: Message) -> bool:
            nonlocal left
            left -= 1
            return not left

        answers = await self._wire.exchange(lambda reply: _each(messages, reply), last=last)
        seqs: list[int | None] = [None] * len(messages)
        for answer in answers:
            # In a cluster a refusal can come before the answers to earlier ones.
            seqs[int(answer.subject.rpartition(".")[2])] = self._stored(answer)
        return seqs

    def _stored(self, answer: Message) -> int | None:
        """The sequence that the server gave a message; None where its check did not hold."""
        if status(answer) == 503:
            raise StoreUnavailable(
                f"stream {self._name} does not answer: it has no leader, or is gone"
            )
        found = msgspec.json.decode(answer.data)
        if _code(found) in REFUSED:
            return None
        seq: int = _must(found)["seq"]
        return seq

    def refuse_large(self, messages: Sequence[Step]) -> None:
        largest = max(messages, key=_size)
        if not self.fits(largest):
            raise UsageError(
                f"{len(largest.body):,} bytes are more than this NATS server takes: "
                "raise its max_payload, or store less"
            )

    def fits(self, message: Step) -> bool:
        """Whether the server takes a message of this size; some is left for what a batch adds."""
        return _size(message) + 200 <= self.largest

    @property
    def largest(self) -> int:
        """The largest message that the server takes."""
        most: int = self._wire.info.get("max_payload", 1 << 20)
        return most

    async def purge(self, subject: str, *, before_seq: int | None = None) -> int:
        """Remove what stands under a subject, wildcards allowed; says how much that was."""
        wish: dict[str, Any] = {"filter": subject}
        if before_seq is not None:
            wish["seq"] = before_seq
        purged: int = _must(await self.api(f"STREAM.PURGE.{self._name}", wish))["purged"]
        return purged

    # --- Reading

    async def read(self, ids: Iterable[str]) -> dict[str, Standing]:
        """Jobs by id, as they stand; those that are nowhere are left out."""
        missing = list(dict.fromkeys(ids))
        found: dict[str, Standing] = {}
        for look in range(LOOKS):
            for start in range(0, len(missing), READ_MOST):
                await self._read(missing[start : start + READ_MOST], found)
            missing = [id for id in missing if id not in found]
            if not missing or look == LOOKS - 1:
                return found
            await asyncio.sleep(LOOK_AGAIN_S * look)
        return found

    async def _read(self, ids: Sequence[str], found: dict[str, Standing]) -> None:
        subjects = [self._layout.anywhere(id) for id in ids]
        if self._replicas == 1:
            messages = await self.last_of(subjects)
        else:
            # Any replica may answer a direct read, one that is behind as well; the leader is not.
            messages = await self._leader_read(ids)
        for subject, seq, body in messages:
            seen = steps.standing(subject, seq, body)
            best = found.get(seen.job.id)
            if best is None or (bool(seen.kind), seen.seq) > (bool(best.kind), best.seq):
                found[seen.job.id] = seen

    async def _leader_read(self, ids: Sequence[str]) -> list[tuple[str, int, bytes]]:
        """The last message of each job, many at once where they are small."""
        messages: list[tuple[str, int, bytes]] = []
        start, count = 0, READ_FIRST
        while start < len(ids):
            some = ids[start : start + count]
            answers = await asyncio.gather(
                *(
                    self.leader_last(self._layout.truth(id), self._layout.ready_of(id))
                    for id in some
                )
            )
            found = [message for message in answers if message is not None]
            messages += found
            start += count
            average = sum(len(body) for *_, body in found) // len(some)
            count = min(max(READ_BYTES // (average + 1), 1), READ_MOST)
        return messages

    async def leader_last(self, *subjects: str) -> tuple[str, int, bytes] | None:
        for subject in subjects:
            answer = await self.api(f"STREAM.MSG.GET.{self._name}", {"last_by_subj": subject})
            if _code(answer) not in NOT_FOUND:
                message = _must(answer)["message"]
                body = base64.b64decode(message.get("data", ""))
                return message["subject"], message["seq"], body
        return None

    async def last_of(self, subjects: Sequence[str]) -> list[tuple[str, int, bytes]]:
        """The last message of each subject that matches one of these, as many answers as it takes.
        What moves meanwhile comes later, so it is not missed; it may be there twice."""
        wish: dict[str, Any] = {"multi_last": subjects, "max_bytes": READ_BYTES}
        messages, more = await self._direct(wish)
        while more and messages:
            page, more = await self._direct(wish | {"seq": messages[-1][1] + 1})
            more = more and bool(page)
            messages += page
        return messages

    async def all_of(self, subject: str) -> list[tuple[str, int, bytes]]:
        """Every message under a subject; meant for subjects that have few."""
        found: list[tuple[str, int, bytes]] = []
        more = True
        while more:
            from_seq = found[-1][1] + 1 if found else 1
            page, more = await self.page(subject, from_seq=from_seq, limit=READ_MOST)
            found += page
        return found

    async def page(
        self, subject: str, *, from_seq: int, limit: int
    ) -> tuple[list[tuple[str, int, bytes]], bool]:
        """Up to `limit` messages under a subject, from a sequence on; and whether more follow."""
        wish = {"seq": max(from_seq, 1), "batch": limit, "next_by_subj": subject}
        return await self._direct(wish | {"max_bytes": READ_BYTES})

    async def _direct(self, wish: dict[str, Any]) -> tuple[list[tuple[str, int, bytes]], bool]:
        data = msgspec.json.encode(wish)
        subject = f"$JS.API.DIRECT.GET.{self._name}"
        *messages, last = await self._wire.exchange(
            lambda reply: publish_line(subject, data, reply=reply), last=lambda m: status(m) != 0
        )
        if status(last) not in (204, 404):
            words = last.headers[9:].partition(b"\r\n")[0].decode()
            raise StoreUnavailable(f"stream {self._name} can't be read: {words}")
        more = int(header(last, b"Nats-Num-Pending") or 0) > 0
        return [
            (header(each, b"Nats-Subject"), int(header(each, b"Nats-Sequence")), each.data)
            for each in messages
        ], more

    # --- Tokens

    async def pull(
        self, queue: str, priority: str, count: int, most_bytes: int
    ) -> tuple[list[Token], bool]:
        """Tokens that a queue has right now, up to so many bytes but at least one; and whether it
        may have more. A queue that nobody used yet has none."""
        consumer = consumer_name(queue, f"r{priority}")
        most_bytes = max(most_bytes, self.largest + SUBJECT_BYTES)
        delivered, more = await self._wire.pull(self._name, consumer, count, most_bytes)
        return [self.token_of(message) for message in delivered], more

    def token_of(self, message: Message) -> Token:
        seq, deliveries = delivered(message)
        standing = steps.standing(message.subject, seq, message.data)
        scheduler = header(message, b"Nats-Scheduler")
        return Token(standing, message.reply, scheduler, again=deliveries > 1)

    def ack(self, tokens: Sequence[Token]) -> None:
        """Spend tokens, without waiting: one that is left over is found out at its claim."""
        if tokens:
            self._wire.send(b"".join(publish_line(each.ack, b"+ACK") for each in tokens))

    # --- Consumers: one per queue and priority hands out tokens; dormant ones count
    #
    # Each costs the server a little with every message, so each is made when it is first needed.

    async def ensure_source(self, queue: str, priority: str) -> None:
        """Let tokens of this queue and priority be handed out."""
        if (queue, priority) in self._sources:
            return
        subject = self._layout.ready(queue, priority)
        await self._ensure_consumer(queue, f"r{priority}", [subject])
        self._sources.add((queue, priority))

    async def count(self) -> list[dict[str, Any]]:
        """All consumers of ours, as the server describes them; each queue has those that count."""
        found = await self.list_consumers()
        kinds: defaultdict[str, set[str]] = defaultdict(set)
        for each in found:
            metadata = each["config"]["metadata"]
            kinds[metadata["queue"]].add(metadata["kind"])
        for queue in kinds:
            for kind, parts in COUNTED.items():
                if kind not in kinds[queue]:
                    subjects = [self._layout.of_kind(part, queue) for part in parts]
                    found.append(await self._ensure_consumer(queue, kind, subjects))
        return found

    async def _ensure_consumer(self, queue: str, kind: str, subjects: list[str]) -> dict[str, Any]:
        name = consumer_name(queue, kind)
        config = {
            "name": name,
            "durable_name": name,
            "filter_subjects": subjects,
            "ack_policy": "explicit",
            "ack_wait": ACK_WAIT_S * 1_000_000_000,
            "max_deliver": -1,
            "max_ack_pending": 10_000,
            "deliver_policy": "all",
            "metadata": {"queue": queue, "kind": kind},
        }
        wish = {"stream_name": self._name, "config": config}
        return _must(await self.api(f"CONSUMER.CREATE.{self._name}.{name}", wish))

    async def list_consumers(self) -> list[dict[str, Any]]:
        """All consumers of ours that there are by now."""
        found: list[dict[str, Any]] = []
        while True:
            wish = {"offset": len(found)}
            page = _must(await self.api(f"CONSUMER.LIST.{self._name}", wish))
            found += page["consumers"] or []
            if len(found) >= page["total"] or not page["consumers"]:
                return [each for each in found if "queue" in each["config"].get("metadata", {})]

    async def consumer(self, name: str) -> dict[str, Any] | None:
        """One consumer as the server describes it; None where there is none of that name."""
        answer = await self.api(f"CONSUMER.INFO.{self._name}.{name}")
        return None if _code(answer) in NOT_FOUND else _must(answer)

    async def pause(self, queue: str, paused: bool) -> None:
        until = {"pause_until": "2200-01-01T00:00:00Z"} if paused else {}
        for priority in steps.PRIORITIES:
            # Also where nobody used this priority yet: it is to be found paused.
            await self.ensure_source(queue, priority)
            name = consumer_name(queue, f"r{priority}")
            _must(await self.api(f"CONSUMER.PAUSE.{self._name}.{name}", until))


# What each dormant consumer of a queue counts: jobs of these kinds.
RUNNING = "run"
COUNTED = {
    RUNNING: (*steps.RUNNING, *steps.ASKED),
    **{kind: (kind,) for kind in (steps.WAITING, *steps.ENDED.values())},
}


def consumer_name(queue: str, kind: str) -> str:
    """A name that NATS takes; the queue's own where it can be, so that operators see it."""
    if _SAFE.fullmatch(queue):
        return f"{queue}-{kind}"
    return f"={hashlib.blake2b(queue.encode(), digest_size=10).hexdigest()}-{kind}"


def is_source(consumer: dict[str, Any]) -> bool:
    """Whether it is one that hands out tokens."""
    kind: str = consumer["config"]["metadata"].get("kind", "")
    return kind not in COUNTED


def drift(wanted: dict[str, Any], stored: dict[str, Any]) -> list[str]:
    """The settings of a stream or consumer that are not as we need them."""
    different = [
        key for key, value in wanted.items() if key != "metadata" and stored.get(key) != value
    ]
    metadata = stored.get("metadata", {})
    changed = any(metadata.get(key) != value for key, value in wanted["metadata"].items())
    return different + (["metadata"] if changed else [])


def _size(message: Step) -> int:
    return len(message.body) + len(message.headers)


def _batch(messages: Sequence[Step], batch: str, reply: str) -> bytes:
    """An atomic batch as it goes over the wire; the last message commits it and is answered."""
    lines = []
    for number, message in enumerate(messages, 1):
        headers = f"{message.headers}Nats-Batch-Id: {batch}\r\nNats-Batch-Sequence: {number}\r\n"
        if number < len(messages):
            lines.append(publish_line(message.subject, message.body, headers=headers))
        else:
            headers += "Nats-Batch-Commit: 1\r\n"
            lines.append(publish_line(message.subject, message.body, headers=headers, reply=reply))
    return b"".join(lines)


def _each(messages: Sequence[Step], reply: str) -> bytes:
    """Messages as they go over the wire, each answered for itself, by its number."""
    return b"".join(
        publish_line(each.subject, each.body, headers=each.headers, reply=f"{reply}.{number}")
        for number, each in enumerate(messages)
    )


def _code(answer: dict[str, Any]) -> int:
    code: int = answer.get("error", {}).get("err_code", 0)
    return code


def _must(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer, where it is none of an error."""
    error = answer.get("error")
    if error is None:
        return answer
    words = f"NATS: {error.get('description', 'unknown error')} ({error.get('err_code', 0)})"
    if error.get("code") in (400, 403):
        raise StoreError(words)
    raise StoreUnavailable(words)


def _refuse_old(version: str) -> None:
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_SERVER:
        raise StoreIncompatible(
            f"this NATS server is {version}; jobs need {'.'.join(map(str, OLDEST_SERVER))} or later"
        )
