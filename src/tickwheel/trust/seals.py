"""What is sealed of jobs and schedules, and what an opened one must fulfil. Pure but for nonces.

A signature covers what decides what runs, where and when: see `_signed_fields`. What the steps of a
job's life change is not covered: its counters, its history, its result. Of the due time and the
expiry, which they change as well, the envelope keeps the signed ones: a job does not start before
the one, and the other can be lifted, as by a rerun, but not moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

from tickwheel import job as life
from tickwheel.checks import NOTE
from tickwheel.envelope import Seal, is_sealed, unwrapped, wrapped
from tickwheel.errors import BadConfig, shown
from tickwheel.job import Changes, Job, Move, Outcome, Sealed, Settlement
from tickwheel.schedule import Schedule, refused_rule
from tickwheel.trust.keys import Cipher, KeyMissing, NotGenuine, Signer, read_keys

J = TypeVar("J", bound=Job)

MODES = ("require", "prefer")

_encode = msgspec.json.Encoder().encode
_replace = msgspec.structs.replace

# Outcomes whose error is the task's. That of others is the engine's own, and has no secrets.
_OF_TASKS = (Outcome.RETRY, Outcome.DEAD, Outcome.DONE)


class OpenedJob(Job, frozen=True, kw_only=True, gc=False, eq=False):
    """A job from its envelope. It keeps what the store has, which goes back there unchanged."""

    stored: Job

    def __eq__(self, other: object) -> bool:
        return _values(self) == _values(other) if isinstance(other, Job) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


class OpenedSchedule(Schedule, frozen=True, kw_only=True):
    """A schedule from its envelope, with its rule as the store has it, and as it was opened."""

    stored: str
    opened: str


class Refused(Exception):
    """A job or a schedule that can't be trusted, and why."""


class TooEarly(Exception):
    """A job that would start before the time that was signed."""

    def __init__(self, due_ms: int) -> None:
        super().__init__()
        self.due_ms = due_ms


def trust_of(
    signing_keys: Iterable[str], encryption_keys: Iterable[str], mode: str = "require"
) -> Trust | None:
    """What these keys can do; None without any. Raises BadConfig."""
    if mode not in MODES:
        raise BadConfig(f"signing={shown(mode)}: must be one of {', '.join(MODES)}")
    signing = read_keys("signing_keys", signing_keys)
    encryption = read_keys("encryption_keys", encryption_keys)
    if set(signing.values()) & set(encryption.values()):
        raise BadConfig("signing_keys and encryption_keys share a key; use different ones")
    if not signing and not encryption:
        return None
    return Trust(
        Signer(signing) if signing else None,
        Cipher(encryption) if encryption else None,
        required=mode == "require",
    )


class Trust:
    """Seals what goes to a store, and opens what comes from it."""

    def __init__(self, signer: Signer | None, cipher: Cipher | None, *, required: bool) -> None:
        self._signer = signer
        self._cipher = cipher
        self._required = required

    # --- Jobs

    def seal(self, job: Job) -> Job:
        """A new job, as it goes to the store. One that is in an envelope already stays in it."""
        if is_sealed(job.payload):
            return job
        job = self._moved(job)
        body = self._encrypted(job.payload, "payload", job.id, job.task)
        if self._signer is not None:
            fields = _signed_fields(job, job.due_ms, job.expires_ms)
            body = self._sign(fields, body, due_ms=job.due_ms, expires_ms=job.expires_ms)
        return _replace(job, payload=body)

    def _moved(self, job: Job) -> Job:
        """The job with what earlier runs left, if it has had any: encrypted for its new place."""
        if isinstance(job, OpenedJob):
            job = _job(Job, job)
        if self._cipher is None or (job.error is None and not job.history):
            return job
        return _replace(
            job,
            error=self._maybe_encrypted(job.error, "error", job),
            traceback=self._maybe_encrypted(job.traceback, "traceback", job),
            history=tuple(
                _replace(run, error=self._maybe_encrypted(run.error, "error", job))
                if run.outcome in _OF_TASKS
                else run
                for run in job.history
            ),
        )

    def move(self, job: Job, move: Move) -> Move:
        """A move of this job, as it is stored. One that is signed is signed as it will be; if it
        can't be trusted, the move is left as it is, and the store refuses it."""
        pending = job.changes or Changes()
        signed = job if pending.next is None else pending.next
        try:
            seal, body = self._signed_body(signed.payload)
            if seal is None or self._signer is None:
                return move
            self._verify(seal, _signed_fields(signed, seal.due_ms, seal.expires_ms), body)
        except Refused:
            return move
        after = signed
        for each in (pending.move, move):
            if each is not None:
                after = life.moved(after, _replace(each, sealed=None), None)
        text = self._sign(
            _signed_fields(after, after.due_ms, after.expires_ms),
            body,
            due_ms=after.due_ms,
            expires_ms=after.expires_ms,
        )
        return _replace(
            move,
            due_ms=after.due_ms,
            priority=after.priority,
            queue=after.queue,
            sealed=Sealed(signed.payload, text, after.expires_ms),
        )

    def open(self, job: Job) -> Job:
        """A claimed job, as it may run. Raises Refused or TooEarly."""
        seal, body = self._signed_body(job.payload)
        if seal is not None:
            self._verify(seal, _signed_fields(job, seal.due_ms, seal.expires_ms), body)
            if job.expires_ms not in (None, seal.expires_ms):
                raise Refused("its expiry was changed in the store")
            if seal.due_ms is not None and job.due_ms < seal.due_ms:
                raise TooEarly(seal.due_ms)
        texts = self._texts(job)
        texts["payload"] = self._decrypted(body, "payload", job.id, job.task)
        return _job(OpenedJob, job, **texts, stored=job)

    def browse(self, job: Job) -> Job:
        """A job to be looked at: not verified, and opened as far as possible."""
        texts = self._texts(job)
        if is_sealed(job.payload):
            found = unwrapped(job.payload)
            signed = found is not None and found[0].signed is not None
            body = found[1] if found is not None and signed else job.payload
            payload = self._tried(body, "payload", job)
            texts["payload"] = job.payload if is_sealed(payload) else payload
        return _replace(job, **texts) if texts else job

    def _texts(self, job: Job) -> dict[str, Any]:
        """What the job says of its runs, as far as that is encrypted and can be opened."""
        texts: dict[str, Any] = {}
        for name in ("result", "error", "traceback"):
            text = getattr(job, name)
            if is_sealed(text):
                texts[name] = self._tried(text, name, job)
        if any(is_sealed(run.error) for run in job.history):
            texts["history"] = tuple(
                _replace(run, error=self._tried(run.error, "error", job))
                if run.error is not None
                else run
                for run in job.history
            )
        return texts

    def settlement(self, settlement: Settlement) -> Settlement:
        """How an attempt ended, as it goes to the store."""
        job = settlement.job
        stored = restored(job)
        if self._cipher is None:
            return _replace(settlement, job=stored)
        error, traceback = settlement.error, settlement.traceback
        if error is job.error:
            error = stored.error
        elif settlement.outcome in _OF_TASKS:
            error = self._anew(error, "error", job)
        kept = traceback is job.traceback
        return _replace(
            settlement,
            job=stored,
            result=self._anew(settlement.result, "result", job),
            error=error,
            traceback=stored.traceback if kept else self._anew(traceback, "traceback", job),
        )

    # --- Schedules

    def seal_schedule(self, schedule: Schedule) -> Schedule:
        """A schedule as it goes to the store. What was read from there goes back as it was."""
        if isinstance(schedule, OpenedSchedule):
            # The same object: an equal text that somebody has written anew is signed anew.
            if schedule.rule is schedule.opened:
                return _plain_schedule(schedule, schedule.stored)
            schedule = _plain_schedule(schedule, schedule.rule)
        rule = schedule.rule
        if schedule.name == NOTE or is_sealed(rule):
            return schedule
        if self._cipher is not None:
            rule = self._with_payload(rule, schedule.name, self._encrypted)
        if self._signer is not None:
            rule = self._sign(_rule_fields(schedule.name), rule)
        return _replace(schedule, rule=rule)

    def open_schedule(self, schedule: Schedule) -> Schedule:
        """A schedule with its rule, or with the reason why that can't be trusted."""
        if schedule.name == NOTE:
            return schedule
        try:
            seal, rule = self._signed_body(schedule.rule)
            if seal is not None:
                self._verify(seal, _rule_fields(schedule.name), rule)
            rule = self._with_payload(rule, schedule.name, self._decrypted)
        except Refused as refused:
            rule = refused_rule(str(refused))
        return OpenedSchedule(
            name=schedule.name,
            rule=rule,
            next_ms=schedule.next_ms,
            paused=schedule.paused,
            last_id=schedule.last_id,
            fence=schedule.fence,
            stored=schedule.rule,
            opened=rule,
        )

    def _with_payload(self, rule: str, name: str, step: Callable[[str, str, str, str], str]) -> str:
        """The rule after this step on its payload; all else stays as it is to the letter. A rule
        that can't be read is for others to complain about."""
        try:
            fields = msgspec.json.decode(rule, type=dict[str, msgspec.Raw])
            payload = msgspec.json.decode(fields["payload"], type=str)
            task = msgspec.json.decode(fields["task"], type=str)
        except (msgspec.MsgspecError, KeyError, RecursionError):
            return rule
        changed = step(payload, "rule", name, task)
        if changed is payload:
            return rule
        fields["payload"] = msgspec.Raw(_encode(changed))
        return _encode(fields).decode()

    # --- Signatures

    def _sign(
        self,
        fields: list[Any],
        body: str,
        *,
        due_ms: int | None = None,
        expires_ms: int | None = None,
    ) -> str:
        assert self._signer is not None
        mac = self._signer.sign(_encode([*fields, body]))
        seal = Seal(signed=self._signer.id, mac=mac, due_ms=due_ms, expires_ms=expires_ms)
        return wrapped(seal, body)

    def _signed_body(self, text: str) -> tuple[Seal | None, str]:
        """The seal of a signed text and its body; without a seal if it may be unsigned."""
        if is_sealed(text):
            found = unwrapped(text)
            if found is None:
                raise Refused("its envelope was changed in the store: it can't be read")
            if found[0].signed is not None:
                return found
        if self._signer is not None and self._required:
            raise Refused(
                "it is not signed: it was put there without a signing key, by SQL, or before "
                "signing was turned on"
            )
        return None, text

    def _verify(self, seal: Seal, fields: list[Any], body: str) -> None:
        words = f"it is signed with the key {shown(seal.signed)}, which this program does not have"
        if self._signer is None or seal.signed is None:
            raise Refused(words)
        try:
            self._signer.verify(seal.signed, _encode([*fields, body]), seal.mac)
        except KeyMissing:
            raise Refused(words) from None
        except NotGenuine:
            raise Refused(
                "its signature does not match: it was changed in the store, or signed with "
                f"another key that is also named {shown(seal.signed)}"
            ) from None

    # --- Encryption

    def _encrypted(self, text: str, what: str, id: str, task: str) -> str:
        """The text, encrypted for this place; as it is without a key, or if it is already."""
        if self._cipher is None or is_sealed(text):
            return text
        return self._in_cipher(text, what, id, task)

    def _in_cipher(self, text: str, what: str, id: str, task: str) -> str:
        assert self._cipher is not None
        body = self._cipher.encrypt(text, _place(what, id, task))
        return wrapped(Seal(encrypted=self._cipher.id), f'"{body}"')

    def _anew(self, text: str | None, what: str, job: Job) -> str | None:
        """What a run has just left, encrypted whatever it looks like."""
        return None if text is None else self._in_cipher(text, what, job.id, job.task)

    def _maybe_encrypted(self, text: str | None, what: str, job: Job) -> str | None:
        return None if text is None else self._encrypted(text, what, job.id, job.task)

    def _decrypted(self, text: str, what: str, id: str, task: str) -> str:
        """The text, which may be plain. Raises Refused."""
        if not is_sealed(text):
            return text
        found = unwrapped(text)
        if found is None or found[0].encrypted is None:
            raise Refused("its envelope was changed in the store: it can't be read")
        key, body = found[0].encrypted, found[1]
        words = f"it is encrypted with the key {shown(key)}, which this program does not have"
        if self._cipher is None:
            raise Refused(words)
        try:
            return self._cipher.decrypt(key, body.strip('"'), _place(what, id, task))
        except KeyMissing:
            raise Refused(words) from None
        except NotGenuine:
            raise Refused(
                "it can't be decrypted: it was changed in the store, or belongs to another job"
            ) from None

    def _tried(self, text: str, what: str, job: Job) -> str:
        """The text as opened; in its envelope if it can't be."""
        try:
            return self._decrypted(text, what, job.id, job.task)
        except Refused:
            return text


def _signed_fields(job: Job, due_ms: int | None, expires_ms: int | None) -> list[Any]:
    """What decides what runs, where, when and how: what nobody without a key can choose."""
    return [
        "tickwheel job 1",
        job.id,
        job.task,
        job.queue,
        job.priority,
        due_ms,
        expires_ms,
        job.retries,
        job.timeout_ms,
        sorted(job.meta.items()) if job.meta else None,
    ]


def _rule_fields(name: str) -> list[Any]:
    return ["tickwheel schedule 1", name]


def _place(what: str, id: str, task: str) -> bytes:
    """Where an encrypted text belongs: it means nothing in another job, or elsewhere in this."""
    return _encode(["tickwheel", what, id, task])


# --- There and back

_FIELDS = Job.__struct_fields__
_values = attrgetter(*_FIELDS)
_TEXTS = ("payload", "result", "error", "traceback", "history")


def _job(kind: type[J], job: Job, **changes: Any) -> J:
    values = dict(zip(_FIELDS, _values(job), strict=True))
    values.update(changes)
    return kind(**values)


def restored(job: Job) -> Job:
    """A job that was opened, with its texts as the store has them."""
    if not isinstance(job, OpenedJob):
        return job
    return _job(Job, job, **{name: getattr(job.stored, name) for name in _TEXTS})


def extended(job: Job, answer: Job) -> Job:
    """The job after its holder extended its lease. All else stays as it was opened and verified,
    whatever somebody has written to the store since."""
    if not isinstance(job, OpenedJob):
        return answer
    return _replace(
        job,
        fence=answer.fence,
        lease_until_ms=answer.lease_until_ms,
        started_ms=answer.started_ms,
        progress=answer.progress,
        cancel_requested=answer.cancel_requested,
        changes=answer.changes,
    )


def _plain_schedule(schedule: Schedule, rule: str) -> Schedule:
    return Schedule(
        name=schedule.name,
        rule=rule,
        next_ms=schedule.next_ms,
        paused=schedule.paused,
        last_id=schedule.last_id,
        fence=schedule.fence,
    )
