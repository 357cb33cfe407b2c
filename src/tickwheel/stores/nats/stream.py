"""One JetStream stream: storing steps, reading jobs, pulling ready messages, keeping consumers.

It knows the server's API and its answers; `steps` knows what the steps mean.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import logging
import secrets
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from tickwheel.batch import BATCH_BYTES as REPLY_BYTES, portions
from tickwheel.duration import moment
from tickwheel.errors import StoreIncompatible, StoreUnavailable, UsageError
from tickwheel.stores.nats import answers, steps
from tickwheel.stores.nats.answers import (
    INVALID,
    NO_STREAM,
    NOT_FOUND,
    REFUSED,
    TOO_MANY,
    StoreFull,
    allowed,
    nanoseconds,
)
from tickwheel.stores.nats.consumers import (
    COUNTED,
    consumer_name,
    is_outdated,
    settings_of_consumer,
)
from tickwheel.stores.nats.publishing import as_batch, as_json_bytes, as_singles, size_of
from tickwheel.stores.nats.settings import (
    NO_LIMITS,
    described,
    drift,
    refuse_demands,
    refuse_old,
    refuse_other,
    settings_of,
)
from tickwheel.stores.nats.steps import Layout, ReadyMessage, Standing, Step
from tickwheel.stores.nats.wire import (
    Denied,
    Message,
    Wire,
    delivered,
    header,
    publish_line,
    status,
)

log = logging.getLogger("tickwheel")

# One atomic batch: as many messages as the server accepts, because each batch has a fixed cost; and
# no more bytes than both sides can hold.
BATCH = 1000
BATCH_BYTES = 8 * 1024 * 1024
# How many jobs one read may ask for, and the size of its answer. Reads from the leader start with
# fewer jobs, and ask for more if those are small.
READ_MOST = 400
READ_BYTES = REPLY_BYTES
READ_FIRST = 16
# What a delivered message has in addition to its content: subjects, at their maximum length.
SUBJECT_BYTES = 8 * 1024
# More than any server accepts.
LARGEST_EVER = 128 * 1024 * 1024
# A job that moves while it is read can be missed: it is read again.
LOOKS = 4
LOOK_AGAIN_S = 0.005
# How long a ready message may take from delivery to claim. Not the lease, which is a schedule.
ACK_WAIT_S = 10
# A ready message that is older is looked up before it is claimed: its job may have been changed.
DOUBTED_S = steps.HOLD_MS / 2 / 1000
# The server's last valid date.
FAR_MS = 253_402_300_799_000
# A queue is paused until then.
NEVER_ENDS = "2200-01-01T00:00:00Z"


class Stream:
    """A stream with this layout, over a connection that somebody else keeps."""

    def __init__(
        self, wire: Wire, layout: Layout, *, replicas: int | None, shards: int, singly: bool
    ) -> None:
        self._wire = wire
        self._layout = layout
        self._name = layout.stream
        self._shards = shards
        # Whether many steps are sent singly. A batch costs more, but has one fsync for all of them.
        self.singly = singly
        # None leaves the stream as it is, and creates a new one with one replica.
        self._wanted_replicas = replicas
        self._replicas = replicas or 1
        # Queues and priorities that are known to have a consumer.
        self._sources: set[tuple[str, str]] = set()
        # How many messages the server accepts in one batch, as far as is known.
        self.batch = BATCH
        # Why its jobs may be lost; then none may be added.
        self.unsafe = ""
        # A ready message from before this moment, in ns, may have been delivered before.
        self._doubted_ns = 0

    @property
    def name(self) -> str:
        return self._name

    @property
    def alone(self) -> bool:
        """Whether one server has it all."""
        return self._replicas == 1

    @property
    def connection(self) -> int:
        """Which connection this is: another one each time that it was lost."""
        return self._wire.connection

    # --- The server's API

    async def api(self, subject: str, request: Any = None) -> dict[str, Any]:
        """Send a request; returns the answer, which may be an error: see `_must`. Raises if the
        stream is gone."""
        found = await self._ask(subject, request)
        if answers.code(found) == NO_STREAM:
            raise StoreUnavailable(
                f"stream {self._name} was deleted on the server: restore it from a backup, or "
                "restart tickwheel to create a new one, without jobs"
            )
        return found

    async def _ask(self, subject: str, request: Any = None) -> dict[str, Any]:
        data = b"" if request is None else msgspec.json.encode(request)
        answer = await self._wire.request(f"$JS.API.{subject}", data)
        if status(answer) == 503:
            raise StoreUnavailable(
                "JetStream does not answer: it is off, off for this account, or has no leader"
            )
        found: dict[str, Any] = msgspec.json.decode(answer.data)
        return found

    async def info(self, *, subjects: str = "") -> dict[str, Any]:
        """The stream as the server describes it; with `subjects`, also which of them it has."""
        request = {"subjects_filter": subjects} if subjects else None
        return answers.must(await self.api(f"STREAM.INFO.{self._name}", request))

    # --- Its settings

    def config(self) -> dict[str, Any]:
        """The settings that the steps rely on."""
        return settings_of(self._layout, replicas=self._replicas, shards=self._shards)

    async def ensure(self) -> None:
        """Create or update the stream. Raises StoreIncompatible if server or schema won't do."""
        refuse_old(self._wire.info.get("version", "0"))
        self.forget_sources()
        found = await self._ask(f"STREAM.INFO.{self._name}")
        if answers.code(found) == NO_STREAM:
            created = await self.api(f"STREAM.CREATE.{self._name}", self.config())
            refuse_demands(created)
            await self._set_right(answers.must(created)["config"])
            await self._prove()
            return
        stored = answers.must(found)["config"]
        if self._wanted_replicas is None:
            self._replicas = stored["num_replicas"]
        refuse_other(stored, shards=self._shards)
        await self._set_right(stored)
        await self._prove()

    async def keep_right(self) -> None:
        """Check that nobody gave the stream settings that lose jobs, and correct them. If that is
        not possible, `unsafe` says so."""
        try:
            await self._set_right((await self.info())["config"])
        except StoreIncompatible as error:
            if not self.unsafe:
                log.error("%s", error)
            self.unsafe = str(error)
        else:
            self.unsafe = ""

    async def _set_right(self, stored: dict[str, Any]) -> None:
        """Correct the stream's settings. Raises StoreIncompatible if that is not possible."""
        wrong = drift(self.config(), stored)
        if not wrong:
            return
        limits = NO_LIMITS.keys() & wrong
        words = described(wrong, stored)
        loses = " and may lose jobs" if limits else ""
        try:
            answer = await self.api(f"STREAM.UPDATE.{self._name}", stored | self.config())
        except Denied as error:
            raise StoreIncompatible(
                f"stream {self._name} has {words}{loses}, and this user may not change that: open "
                f"the store once as operator, or correct {', '.join(wrong)} by hand"
            ) from error
        refuse_demands(answer)
        if answers.code(answer) == INVALID or (
            not answer.get("error") and drift(self.config(), answer["config"])
        ):
            said = answer.get("error", {}).get("description", "the server did not apply it")
            raise StoreIncompatible(
                f"stream {self._name} has {words}{loses}, and can't be changed: {said}; move its "
                "jobs to another namespace with tickwheel migrate-jobs"
            )
        answers.must(answer)
        if limits:
            log.warning("stream %s had %s: removed, because it loses jobs", self._name, words)

    async def _prove(self) -> None:
        """Test that the server has the two behaviours that every step relies on.

        Wildcards in the subject of a check; and a check, a schedule and the removal of another
        schedule in a single message.
        """
        prefix, id = self._layout.prefix, f"probe{secrets.token_hex(8)}"
        target = f"{prefix}.p.target.q.{id}"
        check = steps.Check(f"{prefix}.p.*.*.{id}", 0)
        # The messages expire after a second.
        never = (
            f"Nats-TTL: 1s\r\nNats-Schedule: {steps.NEVER}\r\nNats-Schedule-Target: {target}\r\n"
        )
        first = Step(f"{prefix}.p.a.q.{id}", check.headers + never, b"")
        try:
            seq = await self.store([first])
        except StoreFull:
            return  # it passed the test when it stored what it has
        refused = await self.store([first])
        if seq is None or refused is not None:
            raise StoreIncompatible("this NATS server ignores wildcards in checks")
        check = steps.Check(check.subject, seq)
        drop = f"Nats-Schedule-Next: purge\r\nNats-Scheduler: {first.subject}\r\n"
        moved = await self.store([Step(f"{prefix}.p.b.q.{id}", check.headers + drop + never, b"")])
        if moved is None or await self.leader_last(first.subject):
            raise StoreIncompatible("this NATS server can't move a schedule in one message")

    # --- Storing

    async def put(
        self, groups: Sequence[Sequence[Step]], *, connection: int | None = None
    ) -> list[int | None]:
        """Store groups of steps, each completely or not at all. Returns the sequence of the last
        step of each, or None if it was refused: because of its own check, or that of another group
        in the same batch. With `connection`, over this one or not at all."""
        if self.singly and len(groups) > 1 and all(len(group) == 1 for group in groups):
            seqs = await self.put_each([group[0] for group in groups], connection=connection)
            if full := [seq for seq in seqs if isinstance(seq, StoreFull)]:
                raise full[0]
            return [seq for seq in seqs if not isinstance(seq, StoreFull)]
        all_steps = [step for group in groups for step in group]
        last = await self.store(all_steps, connection=connection)
        if last is None:
            return [None] * len(groups)
        ends = itertools.accumulate(map(len, groups))
        first = last - sum(map(len, groups))
        return [first + end for end in ends]

    async def store(self, messages: Sequence[Step], *, connection: int | None = None) -> int | None:
        """Store all of these or none; returns the sequence of the last one, or None if a check did
        not hold. Those of the others come right before it."""
        self.refuse_large(messages)
        if len(messages) == 1:
            [only] = messages
            answer = await self._wire.request(
                only.subject, only.body, only.headers, connection=connection
            )
        else:
            batch = secrets.token_hex(11)
            [answer] = await self._wire.exchange(
                lambda reply: as_batch(messages, batch, reply), connection=connection
            )
        return self._stored(answer)

    async def put_each(
        self, messages: Sequence[Step], *, connection: int | None = None
    ) -> list[int | StoreFull | None]:
        """Store each of these separately, all in flight at the same time."""
        self.refuse_large(messages)
        left = len(messages)

        def last(_: Message) -> bool:
            nonlocal left
            left -= 1
            return not left

        replies = await self._wire.exchange(
            lambda reply: as_singles(messages, reply), last=last, connection=connection
        )
        seqs: list[int | StoreFull | None] = [None] * len(messages)
        for answer in replies:
            # In a cluster a refusal can come before the answers to earlier messages.
            number = int(answer.subject.rpartition(".")[2])
            try:
                seqs[number] = self._stored(answer)
            except StoreFull as error:
                seqs[number] = error
        return seqs

    def _stored(self, answer: Message) -> int | None:
        """The sequence of a stored message; None if its check did not hold."""
        if answer.headers and status(answer) == 503:
            # If it comes back as a new stream, it has no consumers.
            self.forget_sources()
            raise StoreUnavailable(_silent(self._name))
        stored = answers.as_stored(answer.data)
        if stored.error is None and stored.seq:
            return stored.seq
        refusal = {"error": stored.error or {}}
        if answers.code(refusal) in REFUSED:
            return None
        if answers.code(refusal) == TOO_MANY and self.batch > 1:
            self.batch = allowed(refusal, self.batch)
            raise StoreUnavailable(
                f"this NATS server accepts batches of {self.batch} messages: the next are smaller"
            )
        raise answers.failure(refusal)

    def refuse_large(self, messages: Sequence[Step]) -> None:
        largest = max(messages, key=size_of)
        if self.over(largest) > 0:
            raise UsageError(
                f"{len(largest.body):,} bytes are more than this NATS server accepts: "
                "raise its max_payload, or store less"
            )

    def over(self, message: Step) -> int:
        """By how much a message is too large for the server; negative if it fits. This includes
        what a batch adds."""
        return size_of(message) + 200 - self.largest

    @property
    def largest(self) -> int:
        """The largest message that the server accepts."""
        most: int = self._wire.info.get("max_payload", 1 << 20)
        return most

    async def purge(self, subject: str, *, before_seq: int | None = None) -> int:
        """Remove all messages of a subject, which may have wildcards; returns how many."""
        request: dict[str, Any] = {"filter": subject}
        if before_seq is not None:
            request["seq"] = before_seq
        purged: int = answers.must(await self.api(f"STREAM.PURGE.{self._name}", request))["purged"]
        return purged

    # --- Reading

    async def read(self, ids: Iterable[str]) -> dict[str, Standing]:
        """Jobs by id, as they are stored; unknown ids are left out."""
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
        if self.alone:
            messages = await self.last_of(subjects)
        else:
            # Any replica may answer a direct read, even one that is behind; the leader never is.
            messages = await self._leader_read(ids)
        by_id: defaultdict[str, list[Standing]] = defaultdict(list)
        for message in messages:
            seen = steps.standing(*message)
            by_id[seen.job.id].append(seen)
        found |= {id: steps.current(each) for id, each in by_id.items()}

    async def _leader_read(self, ids: Sequence[str]) -> list[tuple[str, int, bytes]]:
        """The last message of each job, many at once if they are small."""
        layout = self._layout
        messages: list[tuple[str, int, bytes]] = []
        start, count = 0, READ_FIRST
        while start < len(ids):
            some = ids[start : start + count]
            subjects = [each(id) for id in some for each in (layout.truth, layout.ready_of)]
            replies = await asyncio.gather(*map(self.leader_last, subjects))
            found = [message for message in replies if message is not None]
            messages += found
            start += count
            average = sum(len(body) for *_, body in found) // len(some)
            count = min(max(READ_BYTES // (average + 1), 1), READ_MOST)
        return messages

    async def leader_last(self, subject: str) -> tuple[str, int, bytes] | None:
        answer = await self.api(f"STREAM.MSG.GET.{self._name}", {"last_by_subj": subject})
        if answers.code(answer) in NOT_FOUND:
            return None
        message = answers.must(answer)["message"]
        return message["subject"], message["seq"], base64.b64decode(message.get("data", ""))

    async def last_of(self, subjects: Sequence[str]) -> list[tuple[str, int, bytes]]:
        """The last message of each subject that matches one of these, in as many answers as needed.
        What moves meanwhile comes later, so it is not missed; it may come twice."""
        messages: list[tuple[str, int, bytes]] = []
        # A request is a message, too: the server closes the connection if it is too large.
        most = self.largest // 2
        for some in portions(list(subjects), as_json_bytes, most=READ_MOST, most_bytes=most):
            messages += await self._last_of(some)
        return messages

    async def _last_of(self, subjects: Sequence[str]) -> list[tuple[str, int, bytes]]:
        request: dict[str, Any] = {"multi_last": subjects, "max_bytes": READ_BYTES}
        messages, more = await self._direct(request)
        while more and messages:
            page, more = await self._direct(request | {"seq": messages[-1][1] + 1})
            more = more and bool(page)
            messages += page
        return messages

    async def all_of(self, subject: str) -> list[tuple[str, int, bytes]]:
        """All messages of a subject; only for subjects with few of them."""
        found: list[tuple[str, int, bytes]] = []
        more = True
        while more:
            from_seq = found[-1][1] + 1 if found else 1
            page, more = await self.page(subject, from_seq=from_seq, limit=READ_MOST)
            found += page
        return found

    async def page(
        self, subject: str, *, from_seq: int, limit: int, most_bytes: int = READ_BYTES
    ) -> tuple[list[tuple[str, int, bytes]], bool]:
        """Up to `limit` messages of a subject, from a sequence on; and whether more follow."""
        request = {"seq": max(from_seq, 1), "batch": limit, "next_by_subj": subject}
        return await self._direct(request | {"max_bytes": max(most_bytes, 1)})

    async def first_since(self, subject: str, at_ms: int) -> int:
        """The sequence of the first message of a subject that was stored at a moment or later, by
        the server's clock; the next free one if there is none."""
        at = moment(min(max(at_ms, 0), FAR_MS)).isoformat().replace("+00:00", "Z")
        found, _ = await self._direct({"start_time": at, "batch": 1, "next_by_subj": subject})
        last: int = (await self.info())["state"]["last_seq"]
        return found[0][1] if found else last + 1

    async def _direct(self, request: dict[str, Any]) -> tuple[list[tuple[str, int, bytes]], bool]:
        data = msgspec.json.encode(request)
        subject = f"$JS.API.DIRECT.GET.{self._name}"
        *messages, last = await self._wire.exchange(
            lambda reply: publish_line(subject, data, reply=reply), last=lambda m: status(m) != 0
        )
        if status(last) == 503:
            raise StoreUnavailable(_silent(self._name))
        if status(last) not in (204, 404):
            words = last.headers[9:].partition(b"\r\n")[0].decode()
            raise StoreUnavailable(f"stream {self._name} can't be read: {words}")
        more = int(header(last, b"Nats-Num-Pending") or 0) > 0
        return [
            (header(each, b"Nats-Subject"), int(header(each, b"Nats-Sequence")), each.data)
            for each in messages
        ], more

    # --- Ready messages

    async def pull(
        self, queue: str, priority: str, count: int, most_bytes: int
    ) -> tuple[list[ReadyMessage], bool]:
        """Ready messages that a queue has now, up to so many bytes but at least one; and whether it
        may have more. Raises Gone if it has no consumer."""
        consumer = consumer_name(queue, f"r{priority}")
        most_bytes = max(most_bytes, self.largest + SUBJECT_BYTES)
        delivered, more = await self._wire.pull(self._name, consumer, count, most_bytes)
        if more and not delivered:
            # It was stored when the server accepted larger messages.
            delivered, _ = await self._wire.pull(self._name, consumer, 1, LARGEST_EVER)
        return [self.ready_message(message) for message in delivered], more

    def ready_message(self, message: Message) -> ReadyMessage:
        seq, deliveries, stored_ns = delivered(message)
        standing = steps.standing(message.subject, seq, message.data)
        again = deliveries > 1 or stored_ns < self._doubted_ns
        at_s = asyncio.get_running_loop().time()
        return ReadyMessage(standing, message.reply, again, self._wire.connection, at_s)

    def doubt(self, before_ns: int) -> None:
        """The server may have been restarted: then it has forgotten its last deliveries."""
        self._doubted_ns = before_ns

    def doubts(self, message: ReadyMessage) -> bool:
        """Whether a message may have been delivered to another handle, before or since."""
        age_s = asyncio.get_running_loop().time() - message.at_s
        return message.again or message.connection != self.connection or age_s > DOUBTED_S

    def ack(self, messages: Sequence[ReadyMessage]) -> None:
        """Acknowledge ready messages without waiting: the next claim of a leftover is refused."""
        if messages:
            self._wire.send(b"".join(publish_line(each.ack, b"+ACK") for each in messages))

    # --- Consumers: one per queue and priority delivers; dormant ones count
    #
    # Each adds a little work to every message, so each is created when it is first needed.

    async def ensure_source(self, queue: str, priority: str) -> None:
        """Create the consumer of this queue and priority, unless it is known to exist."""
        if (queue, priority) not in self._sources:
            await self.make_source(queue, priority)

    async def make_source(self, queue: str, priority: str, *, paused: bool = False) -> None:
        """Create or correct the consumer of this queue and priority."""
        subject = self._layout.ready(queue, priority)
        pause = {"pause_until": NEVER_ENDS} if paused else {}
        await self._ensure_consumer(queue, f"r{priority}", [subject], **pause)
        self._sources.add((queue, priority))

    def forget_sources(self) -> None:
        """Check the consumers again before the next adds: somebody may have deleted them while we
        were disconnected."""
        self._sources.clear()

    async def first_ready(self, queue: str, priority: str) -> int | None:
        """When the oldest ready message of a queue and priority was stored, in ns; None if there is
        none. Asks the leader: others may be behind."""
        subject = self._layout.ready(queue, priority)
        request = {"seq": 1, "next_by_subj": subject}
        answer = await self.api(f"STREAM.MSG.GET.{self._name}", request)
        if answers.code(answer) in NOT_FOUND:
            return None
        return nanoseconds(answers.must(answer)["message"]["time"])

    async def move_consumer(self, name: str, server: str) -> bool:
        """Let another server lead a consumer; returns whether the server agreed."""
        request = {"placement": {"preferred": server}}
        answer = await self.api(f"CONSUMER.LEADER.STEPDOWN.{self._name}.{name}", request)
        return bool(answer.get("success"))

    async def count(self, parked: Iterable[str]) -> list[dict[str, Any]]:
        """All our consumers as the server describes them; those that count are created first. In
        the queues of `parked`, jobs may be parked."""
        found = await self.list_consumers()
        kinds: defaultdict[str, set[str]] = defaultdict(set)
        for each in found[:]:
            metadata = each["config"]["metadata"]
            if is_outdated(each, self._layout) and await self._forget_consumer(each["name"]):
                found.remove(each)
            else:
                kinds[metadata["queue"]].add(metadata["kind"])
        lines = set(parked)
        for queue in {*kinds, *lines}:
            for kind, parts in COUNTED.items():
                if kind not in kinds[queue] and (kind != steps.PARKED or queue in lines):
                    subjects = [self._layout.of_kind(part, queue) for part in parts]
                    found.append(await self._ensure_consumer(queue, kind, subjects))
        return found

    async def _forget_consumer(self, name: str) -> bool:
        """Delete one that counts, but not as it should: it is never read from, so nothing is lost.
        False if we may not; then a worker does it."""
        with contextlib.suppress(Denied):
            await self.api(f"CONSUMER.DELETE.{self._name}.{name}")
            return True
        return False

    async def _ensure_consumer(
        self, queue: str, kind: str, subjects: list[str], **more: str
    ) -> dict[str, Any]:
        config = settings_of_consumer(queue, kind, subjects, ACK_WAIT_S) | more
        name = config["name"]
        request = {"stream_name": self._name, "config": config}
        return answers.must(await self.api(f"CONSUMER.CREATE.{self._name}.{name}", request))

    async def list_consumers(self) -> list[dict[str, Any]]:
        """All our consumers that exist now."""
        found: list[dict[str, Any]] = []
        while True:
            request = {"offset": len(found)}
            page = answers.must(await self.api(f"CONSUMER.LIST.{self._name}", request))
            found += page["consumers"] or []
            if len(found) >= page["total"] or not page["consumers"]:
                return [each for each in found if "queue" in each["config"].get("metadata", {})]

    async def consumer(self, name: str) -> dict[str, Any] | None:
        """One consumer as the server describes it; None if there is none of that name."""
        answer = await self.api(f"CONSUMER.INFO.{self._name}.{name}")
        return None if answers.code(answer) in NOT_FOUND else answers.must(answer)

    async def pause(self, queue: str, paused: bool) -> None:
        until = {"pause_until": NEVER_ENDS} if paused else {}
        for priority in steps.PRIORITIES:
            # Also if nobody has used this priority yet: it must be paused from the start.
            await self.ensure_source(queue, priority)
            name = consumer_name(queue, f"r{priority}")
            answers.must(await self.api(f"CONSUMER.PAUSE.{self._name}.{name}", until))


def _silent(name: str) -> str:
    return f"stream {name} does not answer: it has no leader, or was deleted"
